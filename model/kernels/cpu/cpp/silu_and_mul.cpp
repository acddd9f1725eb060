// silu(gate) * up in one pass.

#include "arguments.h"

namespace {

// Rounds where torch does: the gate, and its product.
template <class T>
f32v gated(f32v gate, f32v up) {
  const f32v e = exp_of_negative(gate > 0.0f ? -gate : gate);
  const f32v opened = gate * (gate > 0.0f ? f32v{} + 1.0f : e) / (1.0f + e);
  return rounded<T>(opened) * up;
}

// x: [T, 2 * n], gate first; out: [T, n], contiguous.
template <class T>
bool silu_and_mul(Arguments given) {
  const auto x = given.next<const T>();
  const auto out = given.next<T>();
  if (x.dims != 2 || x.shape[1] % 2) return false;
  const int64_t count = x.shape[0], n = x.shape[1] / 2, threads = given.threads;
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * n > ALONE) schedule(static)
  for (int64_t r = 0; r < count; r++) {
    const T *gate = x.data + r * x.stride[0], *up = gate + n;
    T* row = out.data + r * n;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(row + i, gated<T>(load(gate + i), load(up + i)));
    if (i < n)
      store_part(row + i, gated<T>(load_part(gate + i, n - i), load_part(up + i, n - i)), n - i);
  }
  return true;
}

}  // namespace

KERNEL(silu_and_mul)
