// silu(gate) * up in one pass.

#include "simd.h"

namespace {

// Rounds where torch does: the gate, and its product.
template <class T>
f32v gated(f32v gate, f32v up) {
  const f32v e = exp_of_negative(gate > 0.0f ? -gate : gate);
  const f32v opened = gate * (gate > 0.0f ? f32v{} + 1.0f : e) / (1.0f + e);
  return rounded<T>(opened) * up;
}

template <class T>
void silu_and_mul(const T* x, T* out, const int64_t* sizes) {
  const int64_t count = sizes[0], n = sizes[1], stride = sizes[2], threads = sizes[3];
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * n > ALONE) schedule(static)
  for (int64_t r = 0; r < count; r++) {
    const T *gate = x + r * stride, *up = gate + n;
    T* row = out + r * n;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(row + i, gated<T>(load(gate + i), load(up + i)));
    if (i < n)
      store_part(row + i, gated<T>(load_part(gate + i, n - i), load_part(up + i, n - i)), n - i);
  }
}

}  // namespace

extern "C" {

// x: [T, 2 * n], gate first, any stride between rows; out: [T, n], contiguous.
// sizes: T, n, rows' stride of x, threads.
void silu_and_mul_float32(const void* x, void* out, const int64_t* sizes) {
  silu_and_mul((const float*)x, (float*)out, sizes);
}

void silu_and_mul_bfloat16(const void* x, void* out, const int64_t* sizes) {
  silu_and_mul((const bf16*)x, (bf16*)out, sizes);
}
}
