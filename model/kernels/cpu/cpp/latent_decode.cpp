// Paged decode attention to latents, which all query heads of a sequence share: a row is the key of
// every head, and its first part the value. In float32, with an online softmax (Milakov and
// Gimelshein, 2018). Slots at or behind a sequence's length are never read.
//
// One work item is some heads of a sequence. TILE tokens at a time are widened into rows of floats,
// which stay in the nearest cache while every head is scored against them and adds them up. Both are
// products of matrices, of which HEADS by STEP results are kept in registers.
//
// Shapes: S sequences, H query heads, W width of a row, R of its part that is a value, N blocks, B
// tokens per block, M columns of a table.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "arguments.h"

namespace {

constexpr int TILE = LANES, HEADS = 4, STEP = REGISTERS == 32 ? 4 : 2;
static_assert(TILE % STEP == 0, "tokens are scored STEP at a time");

int64_t vectors_of(int64_t n) { return (n + LANES - 1) / LANES; }

// Rows of floats, each padded with zeros to whole vectors.
struct Rows {
  int64_t vectors;
  std::vector<f32v> values;

  Rows(int64_t rows, int64_t size) : vectors(vectors_of(size)), values(rows * vectors) {}
  f32v* at(int64_t row) { return values.data() + row * vectors; }
  const f32v* at(int64_t row) const { return values.data() + row * vectors; }
};

template <class T>
void widen(const T* row, int64_t size, f32v* out) {
  int64_t d = 0;
  for (; d + LANES <= size; d += LANES) *out++ = load(row + d);
  if (d < size) *out = load_part(row + d, size - d);
}

// q, out: [S, H, W] and [S, H, R]; cache: [N, B, 1, W]; table: [S, M]; lengths: [S].
template <class T>
struct Latents {
  Tensor<const T> q, cache;
  Tensor<const int32_t> table, lengths;
  Tensor<T> out;
};

// What the heads of an item have found so far. Heads are padded to a multiple of HEADS.
struct State {
  Rows q, tile, found;
  std::vector<float> weights;  // [heads, TILE]: scores, then weights
  std::vector<float> top, sum, shrink;

  State(int64_t heads, int64_t width, int64_t rank)
      : q(heads, width), tile(TILE, width), found(heads, rank), weights(heads * TILE), top(heads),
        sum(heads), shrink(heads) {}
};

// Scores HEADS heads against the rows of the tile.
void score(const State& state, int64_t head, float* weights) {
  const int64_t vectors = state.q.vectors;
  const f32v* q = state.q.at(head);
  for (int t = 0; t < TILE; t += STEP) {
    const f32v* rows = state.tile.at(t);
    f32v sums[HEADS][STEP] = {};
    for (int64_t i = 0; i < vectors; i++)
      for (int h = 0; h < HEADS; h++)
        for (int s = 0; s < STEP; s++) sums[h][s] += q[h * vectors + i] * rows[s * vectors + i];
    for (int h = 0; h < HEADS; h++)
      for (int s = 0; s < STEP; s++) weights[h * TILE + t + s] = fold<plus>(sums[h][s]);
  }
}

// Makes weights of a head's scores of the first n tokens, relative to the highest so far.
void weigh(State& state, int64_t head, int64_t n) {
  float* weights = state.weights.data() + head * TILE;
  const i32v token = by_lane([](int t) { return t; });
  const f32v scores = token < (int32_t)n ? load(weights) : f32v{} - INFINITY;
  const float highest = fold<larger>(scores), before = state.top[head];
  const float top = highest > before ? highest : before;
  const float shrink = exp_of_negative(f32v{} + (before - top))[0];
  const f32v p = exp_of_negative(scores - top);
  store(weights, p);
  state.top[head] = top;
  state.shrink[head] = shrink;
  state.sum[head] = state.sum[head] * shrink + fold<plus>(p);
}

// Adds COUNT vectors of the tile's first n rows by their weights to what HEADS heads have found.
template <int COUNT>
void add(State& state, int64_t head, int64_t first, int64_t n) {
  const int64_t width = state.tile.vectors, vectors = state.found.vectors;
  const f32v* row = state.tile.at(0) + first;
  const float* weights = state.weights.data() + head * TILE;
  f32v *found = state.found.at(head) + first, sums[HEADS][COUNT];
  for (int h = 0; h < HEADS; h++)
    for (int s = 0; s < COUNT; s++) sums[h][s] = found[h * vectors + s] * state.shrink[head + h];
  for (int64_t t = 0; t < n; t++, row += width)
    for (int h = 0; h < HEADS; h++)
      for (int s = 0; s < COUNT; s++) sums[h][s] += row[s] * weights[h * TILE + t];
  for (int h = 0; h < HEADS; h++)
    for (int s = 0; s < COUNT; s++) found[h * vectors + s] = sums[h][s];
}

template <class T>
void attend(const Latents<T>& call, int64_t seq, int64_t first_head, int64_t heads, float scale,
            State& state) {
  const auto &q = call.q, &cache = call.cache;
  const int64_t width = q.shape[2], rank = call.out.shape[2], block_size = cache.shape[1];
  const int64_t length = call.lengths.data[seq], padded = (heads + HEADS - 1) / HEADS * HEADS;
  const int32_t* table = call.table.data + seq * call.table.stride[0];
  for (int64_t h = 0; h < heads; h++) {
    f32v* row = state.q.at(h);
    widen(q.data + seq * q.stride[0] + (first_head + h) * q.stride[1], width, row);
    for (int64_t i = 0; i < state.q.vectors; i++) row[i] *= scale;
  }
  std::fill(state.found.values.begin(), state.found.values.end(), f32v{});
  std::fill(state.top.begin(), state.top.end(), -FLT_MAX);
  std::fill(state.sum.begin(), state.sum.end(), 0.0f);
  for (int64_t first = 0; first < length; first += TILE) {
    const int64_t n = std::min<int64_t>(length - first, TILE);
    for (int64_t t = 0; t < n; t++) {
      const int64_t token = first + t;
      const int64_t at = table[token / block_size] * cache.stride[0];
      widen(cache.data + at + token % block_size * cache.stride[1], width, state.tile.at(t));
    }
    // What an earlier tile left behind the last token is finite, and not looked at.
    for (int64_t h = 0; h < padded; h += HEADS) {
      score(state, h, state.weights.data() + h * TILE);
      for (int i = 0; i < HEADS; i++) weigh(state, h + i, n);
      int64_t i = 0;
      for (; i + STEP <= state.found.vectors; i += STEP) add<STEP>(state, h, i, n);
      for (; i < state.found.vectors; i++) add<1>(state, h, i, n);
    }
  }
  for (int64_t h = 0; h < heads; h++) {
    const float rest = length > 0 ? 1 / state.sum[h] : 0;
    T* row = call.out.data + seq * call.out.stride[0] + (first_head + h) * call.out.stride[1];
    for (int64_t i = 0, d = 0; d < rank; i++, d += LANES) {
      const f32v found = state.found.at(h)[i] * rest;
      if (d + LANES <= rank)
        store(row + d, found);
      else
        store_part(row + d, found, rank - d);
    }
  }
}

template <class T>
bool latent_decode(Arguments given) {
  const Latents<T> call{given.next<const T>(), given.next<const T>(), given.next<const int32_t>(),
                        given.next<const int32_t>(), given.next<T>()};
  const int64_t seqs = call.q.shape[0], num_heads = call.q.shape[1], threads = given.threads;
  const float scale = given.scalar;
  // Widening a row is shared by the heads of an item: as many as leave each thread one.
  int64_t heads = num_heads;
  while (heads > HEADS && seqs * ((num_heads + heads - 1) / heads) < threads) heads = (heads + 1) / 2;
  const int64_t parts = (num_heads + heads - 1) / heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    State state((heads + HEADS - 1) / HEADS * HEADS, call.q.shape[2], call.out.shape[2]);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < seqs * parts; item++) {
      const int64_t first = item % parts * heads;
      attend(call, item / parts, first, std::min(heads, num_heads - first), scale, state);
    }
  }
  return true;
}

}  // namespace

KERNEL(latent_decode)
