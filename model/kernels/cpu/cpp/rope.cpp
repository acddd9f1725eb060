// Rotary positions of queries and keys in one pass.

#include "simd.h"

namespace {

// Turns the pairs (x[i], x[i + half]) of one head. Rounds where torch does: the first product, and
// its sum with the second one.
template <class T>
void turn(const T* x, const T* cos, const T* sin, int64_t half, T* out) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const f32v a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, rounded<T>(a * c) - b * s);
    store(out + half + i, rounded<T>(b * c) + a * s);
  }
  if (i < half) {
    const int64_t n = half - i;
    const f32v a = load_part(x + i, n), b = load_part(x + half + i, n);
    const f32v c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(out + i, rounded<T>(a * c) - b * s, n);
    store_part(out + half + i, rounded<T>(b * c) + a * s, n);
  }
}

template <class T>
void rope(const T* q, const T* k, const T* cos, const T* sin, T* q_out, T* k_out,
          const int64_t* sizes) {
  const int64_t tokens = sizes[0], heads = sizes[1], kv_heads = sizes[2], dim = sizes[3];
  const int64_t half = dim / 2, threads = sizes[8], work = tokens * (heads + kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && work > ALONE) schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    const T *c = cos + t * half, *s = sin + t * half;
    for (int64_t h = 0; h < heads; h++)
      turn(q + t * sizes[4] + h * sizes[5], c, s, half, q_out + (t * heads + h) * dim);
    for (int64_t h = 0; h < kv_heads; h++)
      turn(k + t * sizes[6] + h * sizes[7], c, s, half, k_out + (t * kv_heads + h) * dim);
  }
}

}  // namespace

extern "C" {

// q: [T, H, D], k: [T, Hkv, D], any strides but the last; cos, sin: [T, D / 2], contiguous.
// q_out, k_out: [T, H, D] and [T, Hkv, D], contiguous.
// sizes: T, H, Hkv, D; strides of q by token and head, of k by both; threads.
void rope_float32(const void* q, const void* k, const void* cos, const void* sin, void* q_out,
                  void* k_out, const int64_t* sizes) {
  rope((const float*)q, (const float*)k, (const float*)cos, (const float*)sin, (float*)q_out,
       (float*)k_out, sizes);
}

void rope_bfloat16(const void* q, const void* k, const void* cos, const void* sin, void* q_out,
                   void* k_out, const int64_t* sizes) {
  rope((const bf16*)q, (const bf16*)k, (const bf16*)cos, (const bf16*)sin, (bf16*)q_out,
       (bf16*)k_out, sizes);
}
}
