// The sum of two rows, and the sum's RMSNorm, in two passes over a row that stays in the cache.

#include <cmath>

#include "simd.h"

namespace {

// Rounds where torch does: the sum, the normed row, and its product with the weight.
template <class T>
void row(const T* x, const T* residual, const T* weight, T* normed, T* summed, int64_t n,
         float eps) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; i++) {
    from_float(to_float(x[i]) + to_float(residual[i]), summed + i);
    const float sum = to_float(summed[i]);
    squares += sum * sum;
  }
  const float scale = 1.0f / std::sqrt(squares / (float)n + eps);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    T scaled;
    from_float(to_float(summed[i]) * scale, &scaled);
    from_float(to_float(weight[i]) * to_float(scaled), normed + i);
  }
}

template <class T>
void rows(const T* x, const T* residual, const T* weight, T* normed, T* summed,
          const int64_t* sizes, float eps) {
  const int64_t count = sizes[0], n = sizes[1], threads = sizes[4];
#pragma omp parallel for num_threads(threads) if (threads > 1 && count > 1) schedule(static)
  for (int64_t i = 0; i < count; i++)
    row(x + i * sizes[2], residual + i * sizes[3], weight, normed + i * n, summed + i * n, n, eps);
}

}  // namespace

// x, residual: [T, E], any stride between rows; weight: [E]; normed, summed: [T, E], contiguous.
// sizes: T, E, rows' strides of x and of residual, threads.
extern "C" {

void add_rms_norm_float32(const void* x, const void* residual, const void* weight, void* normed,
                          void* summed, const int64_t* sizes, float eps) {
  rows((const float*)x, (const float*)residual, (const float*)weight, (float*)normed,
       (float*)summed, sizes, eps);
}

void add_rms_norm_bfloat16(const void* x, const void* residual, const void* weight, void* normed,
                           void* summed, const int64_t* sizes, float eps) {
  rows((const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)normed, (bf16*)summed,
       sizes, eps);
}
}
