// RMSNorm of rows, or of the sums of two rows, in two passes over a row that stays in the cache.

#include <cmath>

#include "arguments.h"

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

// x: [T, E] or [T, H, E]; weight: [E]; normed: like x, contiguous.
template <class T>
bool rms_norm(Arguments given) {
  const auto x = given.next<const T>(), weight = given.next<const T>();
  const auto normed = given.next<T>();
  if (x.dims != 2 && x.dims != 3) return false;
  const int64_t heads = x.dims == 3 ? x.shape[1] : 1, n = weight.shape[0];
  const int64_t head_stride = x.dims == 3 ? x.stride[1] : 0;
  const int64_t count = x.shape[0] * heads, threads = given.threads;
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * n > ALONE) schedule(static)
  for (int64_t i = 0; i < count; i++)
    norm_row(x.data + i / heads * x.stride[0] + i % heads * head_stride, weight.data,
             normed.data + i * n, n, given.scalar);
  return true;
}

// x, residual: [T, E]; weight: [E]; normed, summed: [T, E], contiguous.
template <class T>
bool fused_add_rms_norm(Arguments given) {
  const auto x = given.next<const T>(), residual = given.next<const T>();
  const auto weight = given.next<const T>();
  const auto normed = given.next<T>(), summed = given.next<T>();
  if (x.dims != 2) return false;
  const int64_t count = x.shape[0], n = x.shape[1], threads = given.threads;
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * n > ALONE) schedule(static)
  for (int64_t i = 0; i < count; i++)
    add_and_norm_row(x.data + i * x.stride[0], residual.data + i * residual.stride[0], weight.data,
                     normed.data + i * n, summed.data + i * n, n, given.scalar);
  return true;
}

}  // namespace

KERNEL(rms_norm)
KERNEL(fused_add_rms_norm)
