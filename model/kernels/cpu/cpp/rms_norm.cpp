// RMSNorm of rows, or of the sums of two rows, in two passes over a row that stays in the cache.

#include <cmath>

#include "simd.h"

namespace {

// The second pass. Rounds where torch does: the scaled row, and its product with the weight.
template <class T>
void scale_row(const T* row, float squares, const T* weight, T* normed, int64_t n, float eps) {
  const float scale = 1.0f / std::sqrt(squares / (float)n + eps);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    T scaled;
    from_float(to_float(row[i]) * scale, &scaled);
    from_float(to_float(weight[i]) * to_float(scaled), normed + i);
  }
}

template <class T>
void norm_row(const T* x, const T* weight, T* normed, int64_t n, float eps) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; i++) squares += to_float(x[i]) * to_float(x[i]);
  scale_row(x, squares, weight, normed, n, eps);
}

// summed may be the residual's memory.
template <class T>
void add_and_norm_row(const T* x, const T* residual, const T* weight, T* normed, T* summed,
                      int64_t n, float eps) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; i++) {
    from_float(to_float(x[i]) + to_float(residual[i]), summed + i);
    const float sum = to_float(summed[i]);
    squares += sum * sum;
  }
  scale_row(summed, squares, weight, normed, n, eps);
}

template <class T>
void norm(const T* x, const T* weight, T* normed, const int64_t* sizes, float eps) {
  const int64_t heads = sizes[1], count = sizes[0] * heads, n = sizes[2], threads = sizes[5];
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * n > ALONE) schedule(static)
  for (int64_t i = 0; i < count; i++)
    norm_row(x + i / heads * sizes[3] + i % heads * sizes[4], weight, normed + i * n, n, eps);
}

template <class T>
void add_and_norm(const T* x, const T* residual, const T* weight, T* normed, T* summed,
                  const int64_t* sizes, float eps) {
  const int64_t count = sizes[0], n = sizes[1], threads = sizes[5];
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * n > ALONE) schedule(static)
  for (int64_t i = 0; i < count; i++)
    add_and_norm_row(x + i * sizes[2], residual + i * sizes[3], weight, normed + i * n,
                     summed + i * sizes[4], n, eps);
}

}  // namespace

extern "C" {

// x: [T, H, E], any strides but the last; weight: [E]; normed: [T, H, E], contiguous.
// sizes: T, H, E; strides of x by T and H; threads.
void rms_norm_float32(const void* x, const void* weight, void* normed, const int64_t* sizes,
                      float eps) {
  norm((const float*)x, (const float*)weight, (float*)normed, sizes, eps);
}

void rms_norm_bfloat16(const void* x, const void* weight, void* normed, const int64_t* sizes,
                       float eps) {
  norm((const bf16*)x, (const bf16*)weight, (bf16*)normed, sizes, eps);
}

// x, residual, summed: [T, E], any stride between rows, summed perhaps the residual; weight: [E];
// normed: [T, E], contiguous.
// sizes: T, E; rows' strides of x, residual and summed; threads.
void add_rms_norm_float32(const void* x, const void* residual, const void* weight, void* normed,
                          void* summed, const int64_t* sizes, float eps) {
  add_and_norm((const float*)x, (const float*)residual, (const float*)weight, (float*)normed,
               (float*)summed, sizes, eps);
}

void add_rms_norm_bfloat16(const void* x, const void* residual, const void* weight, void* normed,
                           void* summed, const int64_t* sizes, float eps) {
  add_and_norm((const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)normed,
               (bf16*)summed, sizes, eps);
}
}
