// Rotary positions, and the write of keys and values into their slots, in one pass over the tokens.
//
// The first slot of a block clears the slots of this layer that no later token of the step writes:
// threads may be at work on those. Slots of block 0 are padding: nothing is written.
//
// Shapes: T tokens, H query heads, Hkv KV heads, D head dim, N blocks, B tokens per block.

#include "arguments.h"

namespace {

// Values of T as they are put where C is kept.
template <class T, class C>
inline f32v divided(f32v v, float scale) {
  if constexpr (std::is_same_v<T, C>) return v;
  return rounded<T>(v) / scale;
}

// Rotates the pairs (x[i], x[i + half]) of one head. Rounds where torch does: the first product, and
// its sum with the second one.
template <class T, class C>
void rotate(const T* x, const T* cos, const T* sin, int64_t half, C* out, float scale = 1) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const f32v a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, divided<T, C>(rounded<T>(a * c) - b * s, scale));
    store(out + half + i, divided<T, C>(rounded<T>(b * c) + a * s, scale));
  }
  if (i < half) {
    const int64_t n = half - i;
    const f32v a = load_part(x + i, n), b = load_part(x + half + i, n);
    const f32v c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(out + i, divided<T, C>(rounded<T>(a * c) - b * s, scale), n);
    store_part(out + half + i, divided<T, C>(rounded<T>(b * c) + a * s, scale), n);
  }
}

template <class T, class C>
void copy(const T* x, int64_t dim, C* out, float scale) {
  if constexpr (std::is_same_v<T, C>) {
    memcpy((void*)out, x, dim * sizeof(T));
    return;
  }
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) store(out + d, load(x + d) / scale);
  if (d < dim) store_part(out + d, load_part(x + d, dim - d) / scale, dim - d);
}

// q, rotated: [T, H, D]; k, v: [T, Hkv, D]; cos, sin: [T, 1, D / 2]; k_cache, v_cache: [N, B, Hkv,
// D]; slots: [T], block * B + offset. Queries are rotated into `rotated`, keys into the cache.
template <class T, class C>
bool rope_and_write_kv(Arguments given) {
  const auto q = given.next<const T>();
  const auto rotated = given.next<T>();
  const auto k = given.next<const T>(), v = given.next<const T>();
  const auto cos = given.next<const T>(), sin = given.next<const T>();
  const auto k_cache = given.next<C>(), v_cache = given.next<C>();
  const int64_t* slots = given.next<const int64_t>().data;
  const Scales scales = given.scales<C>();
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
      C *keys = k_cache.data + first, *values = v_cache.data + first;
      for (int64_t i = 1; slot == 0 && i < block_size; i++) {
        if (t + i < tokens && slots[t + i] == slots[t] + i) continue;
        memset((void*)(keys + i * slot_stride), 0, dim * sizeof(C));
        memset((void*)(values + i * slot_stride), 0, dim * sizeof(C));
      }
      rotate(k.data + t * k.stride[0] + h * k.stride[1], c, s, half, keys + slot * slot_stride,
             scales.key(h));
      copy(v.data + t * v.stride[0] + h * v.stride[1], dim, values + slot * slot_stride,
           scales.value(h));
    }
  }
  return true;
}

}  // namespace

CACHE_KERNEL(rope_and_write_kv)
