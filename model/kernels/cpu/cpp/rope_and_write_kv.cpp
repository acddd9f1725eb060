// Rotary positions, and the write of keys and values into their slots, in one pass over the tokens.
//
// The first slot of a block clears the slots of this layer that no later token of the step writes:
// threads may be at work on those. Slots of block 0 are padding: nothing is written.
//
// Shapes: T tokens, H query heads, Hkv KV heads, D head dim, N blocks, B tokens per block.

#include "arguments.h"

namespace {

// Rotates the pairs (x[i], x[i + half]) of one head. Rounds where torch does: the first product, and
// its sum with the second one.
template <class T>
void rotate(const T* x, const T* cos, const T* sin, int64_t half, T* out) {
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

// q, rotated: [T, H, D]; k, v: [T, Hkv, D]; cos, sin: [T, 1, D / 2]; k_cache, v_cache: [N, B, Hkv,
// D]; slots: [T], block * B + offset. Queries are rotated into `rotated`, keys into the cache.
template <class T>
bool rope_and_write_kv(Arguments given) {
  const auto q = given.next<const T>(), k = given.next<const T>(), v = given.next<const T>();
  const auto cos = given.next<const T>(), sin = given.next<const T>();
  const auto k_cache = given.next<T>(), v_cache = given.next<T>();
  const int64_t* slots = given.next<const int64_t>().data;
  const auto rotated = given.next<T>();
  if (!lie_alike(k_cache, v_cache)) return false;
  const int64_t tokens = q.shape[0], heads = q.shape[1], kv_heads = k.shape[1], dim = q.shape[2];
  const int64_t half = dim / 2, block_size = k_cache.shape[1], slot_stride = k_cache.stride[1];
  const int64_t threads = given.threads, work = tokens * (heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if (threads > 1 && work > ALONE) schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    const T *c = cos.data + t * cos.stride[0], *s = sin.data + t * sin.stride[0];
    for (int64_t h = 0; h < heads; h++)
      rotate(q.data + t * q.stride[0] + h * q.stride[1], c, s, half,
           rotated.data + t * rotated.stride[0] + h * rotated.stride[1]);
    const int64_t block = slots[t] / block_size, slot = slots[t] % block_size;
    if (block == 0) continue;
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t first = block * k_cache.stride[0] + h * k_cache.stride[2];
      T *keys = k_cache.data + first, *values = v_cache.data + first;
      for (int64_t i = 1; slot == 0 && i < block_size; i++) {
        if (t + i < tokens && slots[t + i] == slots[t] + i) continue;
        memset((void*)(keys + i * slot_stride), 0, dim * sizeof(T));
        memset((void*)(values + i * slot_stride), 0, dim * sizeof(T));
      }
      rotate(k.data + t * k.stride[0] + h * k.stride[1], c, s, half, keys + slot * slot_stride);
      memcpy((void*)(values + slot * slot_stride), v.data + t * v.stride[0] + h * v.stride[1],
             dim * sizeof(T));
    }
  }
  return true;
}

}  // namespace

KERNEL(rope_and_write_kv)
