// Paged decode attention that reads each byte of keys and values once.
//
// One work item is some KV heads of a sequence: all their query heads are attended together, with an
// online softmax (Milakov and Gimelshein, 2018), in float32. Slots at or behind a sequence's length,
// or before its sliding window, are never read.
//
// Tokens are taken in tiles of LANES, tiles in chunks of TILES: all scores of a chunk, then their
// weights, then its values. The highest score and the sum are chains of dependent operations, which a
// chunk pays for once. Heads are inside of tiles, because the rows of a block's heads lie side by
// side: PIECE bytes a token are enough to read a block in one piece. Hardware cannot predict
// where the next block lies, so while a tile is attended, one of the next chunk is prefetched.
//
// Shapes: S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim, N blocks, B tokens per
// block, M columns of a table.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "arguments.h"

namespace {

constexpr int TILE = LANES, TILES = 4, CHUNK = TILES * TILE;
constexpr int64_t PIECE = 512, MAX_HEAD_DIM = 256;

template <class T>
struct Paged {
  const T *k, *v;
  int64_t block_stride, slot_stride, head_stride, block_size;
  Scales scales;

  // Where the rows [first, first + n) of the first head lie.
  void locate(const int32_t* table, int64_t first, int64_t n, int64_t* at) const {
    const int64_t end = first + n;
    for (int64_t token = first; token < end;) {
      const int64_t slot = token % block_size;
      const int64_t stop = std::min(end, token + block_size - slot);
      int64_t row = table[token / block_size] * block_stride + slot * slot_stride;
      for (; token < stop; token++, row += slot_stride) *at++ = row;
    }
  }
};

// Sums of the lanes of each of LANES vectors: a tree that folds pairs of vectors into one.
template <int N>
inline f32v sums(const f32v* rows) {
  constexpr int HALF = N / 2;
  constexpr auto first = [](int j) {
    return j / N * N + j % HALF + (j % N < HALF ? 0 : LANES);
  };
  constexpr auto second = [=](int j) { return first(j) + HALF; };
  f32v folded[HALF];
  for (int i = 0; i < HALF; i++) {
    const f32v a = rows[i], b = rows[i + HALF];
    folded[i] = __builtin_shuffle(a, b, by_lane(first)) + __builtin_shuffle(a, b, by_lane(second));
  }
  return sums<HALF>(folded);
}

template <>
inline f32v sums<1>(const f32v* rows) {
  return rows[0];
}

// Copies a row of D values into vectors, zeros behind it.
template <class T, int VECTORS>
inline void widen(const T* row, int64_t dim, f32v* out) {
  if (dim == VECTORS * LANES) {
    for (int i = 0; i < VECTORS; i++) out[i] = load(row + i * LANES);
    return;
  }
  float values[VECTORS * LANES] = {};
  for (int64_t d = 0; d < dim; d++) values[d] = to_float(row[d]);
  memcpy(out, values, sizeof values);
}

// Prefetches a row into the second-level cache: a chunk fills the first.
template <class T>
inline void prefetch(const T* row, int64_t dim) {
  constexpr int64_t LINE = 64 / sizeof(T);
  for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(row + d, 0, 2);
}

// The running softmax of one query head. Vectors hold a row of D values, zeros behind it.
template <int VECTORS>
struct Head {
  f32v q[VECTORS], attended[VECTORS];
  // Scores of a chunk, which become weights.
  float p[TILES][TILE];
  float top, weight;
};

// Widens the first n rows of a tile, zeros behind them.
template <class T, int VECTORS>
inline void widen_tile(const T* rows, const int64_t* at, int64_t n, int64_t dim,
                       f32v (*out)[VECTORS]) {
  for (int64_t t = 0; t < n; t++) widen<T, VECTORS>(rows + at[t], dim, out[t]);
  if (n < TILE) memset(out[n], 0, (TILE - n) * sizeof out[0]);
}

// Scores the first n tokens of a tile.
template <int VECTORS>
inline void score(const f32v (*keys)[VECTORS], int64_t n, const Head<VECTORS>& head, float* p) {
  f32v rows[TILE];
  for (int t = 0; t < TILE; t++) rows[t] = head.q[0] * keys[t][0];
  for (int i = 1; i < VECTORS; i++)
    for (int t = 0; t < TILE; t++) rows[t] += head.q[i] * keys[t][i];
  const i32v token = by_lane([](int t) { return t; });
  store(p, token < (int32_t)n ? sums<TILE>(rows) : f32v{} - INFINITY);
}

// Makes weights of a chunk's scores, relative to the highest score so far.
template <int VECTORS>
inline void weigh(int64_t tiles, Head<VECTORS>& head) {
  f32v high = load(head.p[0]);
  for (int64_t i = 1; i < tiles; i++) high = larger(high, load(head.p[i]));
  const float highest = fold<larger>(high), top = highest > head.top ? highest : head.top;
  const float shrink = exp_of_negative(f32v{} + (head.top - top))[0];
  f32v sum = {};
  for (int64_t i = 0; i < tiles; i++) {
    const f32v p = exp_of_negative(load(head.p[i]) - top);
    store(head.p[i], p);
    sum += p;
  }
  head.top = top;
  head.weight = head.weight * shrink + fold<plus>(sum);
  for (int i = 0; i < VECTORS; i++) head.attended[i] *= shrink;
}

// Adds a tile's values by their weights. As many sums are taken at once as leave registers for what
// is added.
template <int VECTORS>
inline void add(const f32v (*values)[VECTORS], const float* p, Head<VECTORS>& head) {
  constexpr int SUMS = VECTORS % 8 == 0 ? 8 : VECTORS % 6 == 0 ? 6 : VECTORS;
  for (int first = 0; first < VECTORS; first += SUMS) {
    f32v sum[SUMS];
    for (int i = 0; i < SUMS; i++) sum[i] = head.attended[first + i];
    for (int t = 0; t < TILE; t++)
      for (int i = 0; i < SUMS; i++) sum[i] += values[t][first + i] * p[t];
    for (int i = 0; i < SUMS; i++) head.attended[first + i] = sum[i];
  }
}

// All query heads of `kv_heads` neighbouring KV heads of one sequence, which see its tokens from
// `start` on. q, out, cache: the first of these heads.
template <class T, class C, int VECTORS>
void attend(const T* q, const Paged<C>& cache, const int32_t* table, int64_t start, int64_t length,
            int64_t kv_heads, int64_t dim, float scale, T* out, int64_t q_stride,
            int64_t out_stride, std::vector<Head<VECTORS>>& heads) {
  const int64_t num_heads = heads.size(), group = num_heads / kv_heads;
  for (int64_t g = 0; g < num_heads; g++) {
    widen<T, VECTORS>(q + g * q_stride, dim, heads[g].q);
    for (int i = 0; i < VECTORS; i++) {
      heads[g].q[i] *= scale * cache.scales.key(g / group);
      heads[g].attended[i] = f32v{};
    }
    heads[g].top = -FLT_MAX;
    heads[g].weight = 0;
  }
  f32v rows[TILE][VECTORS];
  int64_t found[2][CHUNK], *at = found[0], *next = found[1];
  auto chunk = [&](int64_t first) { return std::clamp<int64_t>(length - first, 0, CHUNK); };
  cache.locate(table, start, chunk(start), next);
  for (int64_t first = start; first < length; first += CHUNK) {
    const int64_t n = chunk(first), ahead = chunk(first + n), tiles = (n + TILE - 1) / TILE;
    std::swap(at, next);
    cache.locate(table, first + n, ahead, next);
    auto size = [&](int64_t tile) { return std::min<int64_t>(n - tile * TILE, TILE); };
    auto for_each_tile = [&](const C* from, auto f) {
      for (int64_t i = 0; i < tiles; i++)
        for (int64_t h = 0; h < kv_heads; h++) {
          const C* row = from + h * cache.head_stride;
          widen_tile<C, VECTORS>(row, at + i * TILE, size(i), dim, rows);
          for (int64_t t = i * TILE; t < std::min(ahead, (i + 1) * TILE); t++)
            prefetch(row + next[t], dim);
          for (int64_t g = h * group; g < (h + 1) * group; g++) f(i, heads[g]);
        }
    };
    for_each_tile(cache.k, [&](int64_t i, Head<VECTORS>& head) {
      score<VECTORS>(rows, size(i), head, head.p[i]);
    });
    for (Head<VECTORS>& head : heads) weigh<VECTORS>(tiles, head);
    for_each_tile(cache.v,
                  [&](int64_t i, Head<VECTORS>& head) { add<VECTORS>(rows, head.p[i], head); });
  }
  for (int64_t g = 0; g < num_heads; g++) {
    const float rest = length > 0 ? cache.scales.value(g / group) / heads[g].weight : 0;
    T* row = out + g * out_stride;
    for (int64_t i = 0, d = 0; d < dim; i++, d += LANES) {
      const f32v attended = heads[g].attended[i] * rest;
      if (d + LANES <= dim)
        store(row + d, attended);
      else
        store_part(row + d, attended, dim - d);
    }
  }
}

// How many KV heads are attended together: up to PIECE bytes a token, as long as every thread has
// several items.
int64_t heads_at_once(int64_t seqs, int64_t kv_heads, int64_t row_bytes, int64_t threads) {
  int64_t count = std::min(kv_heads, std::max<int64_t>(PIECE / row_bytes, 1));
  while (count > 1 && (kv_heads % count || seqs * (kv_heads / count) < 4 * threads)) count--;
  return count;
}

// q, out: [S, H, D]; k, v: the caches [N, B, Hkv, D]; table: [S, M]; lengths: [S].
template <class T, class C>
struct Decode {
  Tensor<const T> q;
  Tensor<const C> k, v;
  Tensor<const int32_t> table, lengths;
  Tensor<T> out;
  Scales scales;
};

template <class T, class C, int VECTORS>
void decode(const Decode<T, C>& call, int64_t threads, int64_t window, float scale) {
  const auto &q = call.q, &k = call.k;
  const int64_t seqs = q.shape[0], kv_heads = k.shape[2], dim = q.shape[2];
  const int64_t group = q.shape[1] / kv_heads;
  const int64_t at_once = heads_at_once(seqs, kv_heads, dim * (int64_t)sizeof(C), threads);
  const int64_t items = kv_heads / at_once;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<Head<VECTORS>> heads(group * at_once);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < seqs * items; item++) {
      const int64_t seq = item / items, kv_head = item % items * at_once;
      const int64_t length = call.lengths.data[seq];
      const int64_t start = window > 0 && length > window ? length - window : 0;
      const int64_t skipped = kv_head * k.stride[2];
      const Paged<C> cache{k.data + skipped, call.v.data + skipped, k.stride[0], k.stride[1],
                           k.stride[2],      k.shape[1],            call.scales.from(kv_head)};
      attend<T, C, VECTORS>(q.data + seq * q.stride[0] + kv_head * group * q.stride[1], cache,
                            call.table.data + seq * call.table.stride[0], start, length, at_once,
                            dim, scale,
                            call.out.data + seq * call.out.stride[0] +
                                kv_head * group * call.out.stride[1],
                            q.stride[1], call.out.stride[1], heads);
    }
  }
}

// Head dims are rounded up to a few numbers of vectors: each is a kernel whose sums stay in
// registers. window: how many of a sequence's last tokens count, 0 for all.
template <class T, class C>
bool paged_decode(Arguments given) {
  const Decode<T, C> call{given.next<const T>(),       given.next<const C>(),
                          given.next<const C>(),       given.next<const int32_t>(),
                          given.next<const int32_t>(), given.next<T>(),
                          given.scales<C>()};
  const int64_t dim = call.q.shape[2];
  if (dim > MAX_HEAD_DIM || !lie_alike(call.k, call.v)) return false;
  auto with = [&](auto* f) {
    f(call, given.threads, given.window, given.scalar);
    return true;
  };
  if (dim <= 16) return with(decode<T, C, 16 / LANES>);
  if (dim <= 32) return with(decode<T, C, 32 / LANES>);
  if (dim <= 64) return with(decode<T, C, 64 / LANES>);
  if (dim <= 96) return with(decode<T, C, 96 / LANES>);
  if (dim <= 128) return with(decode<T, C, 128 / LANES>);
  return with(decode<T, C, 256 / LANES>);
}

}  // namespace

CACHE_KERNEL(paged_decode)
