// Attention from chunks of prompts to the paged cache, in blocks that stay in the caches
// (FlashAttention-2; Dao, 2023).
//
// One work item is a stretch of a sequence's tokens and a KV head. Its rows are these tokens' query
// heads of the group, token by token. A block of KEYS tokens is packed once for all rows; then each
// panel of ROWS rows scores it, makes weights of the scores and adds the values by them. Slots at
// or behind a sequence's length, or before the first row's sliding window, are never read.
//
// Shapes: T tokens, S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim, N blocks, B
// tokens per block, M columns of a table.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>
#include <vector>

#include "arguments.h"

namespace {

// With VECTORS each, the sums of a panel's rows leave registers for a word's vectors and an input.
constexpr int VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr int ROWS = 6;
constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int KEYS = 64, KEY_VECTORS = KEYS / LANES, SHRINKS = (ROWS + LANES - 1) / LANES;
constexpr int64_t ITEM_ROWS = 192;  // packing a block is then a twentieth of the work on it

// Both products take rows in words: single values, or pairs where pairs of bfloat16 are multiplied.
template <class T>
struct Packed {
  typedef float Word;
  static constexpr int PER_WORD = 1;
};

template <class T>
inline void pack_values(const T* values, float* words, int64_t n) {
  for (int64_t i = 0; i < n; i++) words[i] = to_float(values[i]);
}

inline void pack_weights(const f32v* p, float* words) { memcpy(words, p, KEYS * sizeof(float)); }

template <class T>
inline void pack_tokens(const T* const* rows, float* words, int64_t dim) {
  pack_values(rows[0], words, dim);
}

#if defined(__AVX512BF16__)

template <>
struct Packed<bf16> {
  typedef uint32_t Word;
  static constexpr int PER_WORD = 2;
};

inline void pack_values(const bf16* values, uint32_t* words, int64_t n) {
  memcpy(words, values, n / 2 * 4);
  if (n % 2) words[n / 2] = values[n - 1].bits;
}

inline void pack_weights(const f32v* p, uint32_t* words) {
  for (int v = 0; v < KEY_VECTORS; v++) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)p[v]);
    memcpy(words + v * LANES / 2, &rounded, sizeof rounded);
  }
}

// Words hold neighbours' values of a dimension.
inline void pack_tokens(const bf16* const* rows, uint32_t* words, int64_t dim) {
  for (int64_t d = 0; d < dim; d++) words[d] = (uint32_t)rows[1][d].bits << 16 | rows[0][d].bits;
}

#endif

template <class Word>
using Part = std::conditional_t<std::is_same_v<Word, float>, f32v, u32v>;

// Adds to sums the products of ROWS rows of words with columns, VECTORS vectors of them.
template <int COUNT, class Word>
inline void multiply(const Word* rows, int64_t stride, const Word* columns, int64_t step,
                     int64_t words, f32v (&sums)[ROWS][COUNT]) {
  f32v acc[ROWS][COUNT];
  memcpy(acc, sums, sizeof acc);
  for (int64_t i = 0; i < words; i++) {
    Part<Word> parts[COUNT];
    memcpy(parts, columns + i * step, sizeof parts);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < COUNT; v++)
        acc[r][v] = add_product(acc[r][v], parts[v], rows[r * stride + i]);
  }
  memcpy(sums, acc, sizeof acc);
}

template <class T, class C>
struct Prefill {
  const T* q;
  const C *k, *v;
  const int32_t *tables, *bounds, *lengths;
  T* out;
  int64_t kv_heads, group, dim, block_stride, slot_stride, head_stride, block_size;
  int64_t q_token, q_head, out_token, out_head, table_stride, window;
  float scale;
  Scales scales;

  int64_t stretch() const { return std::max<int64_t>(ITEM_ROWS / group, 1); }
};

// What a thread needs for one work item.
template <class T>
struct Scratch {
  typedef typename Packed<T>::Word Word;
  static constexpr int PER_WORD = Packed<T>::PER_WORD;

  const int64_t words, columns;  // of a row of D values; D up to a whole vector
  std::vector<Word> queries, keys, values;
  std::vector<T> numbers;  // of a block of a cache that is not of T, until they are packed
  std::vector<f32v> weights;  // by lane: a row's sum is taken once
  std::vector<float> attended, tops;

  Scratch(int64_t rows, int64_t dim, bool has_numbers)
      : words((dim + PER_WORD - 1) / PER_WORD),
        columns((dim + LANES - 1) / LANES * LANES),
        queries(rows * words),
        keys(words * KEYS),
        values(KEYS / PER_WORD * columns),
        numbers(has_numbers ? 2 * KEYS * columns : 0),
        weights(rows),
        attended(rows * columns),
        tops(rows) {}
};

// One panel of an item's rows, and what of a block of keys each of them sees.
template <class T>
struct Panel {
  Scratch<T>& with;
  const int64_t first_row;
  int64_t from[ROWS] = {}, to[ROWS] = {};

  void attend(float scale) const {
    const int64_t last = *std::max_element(to, to + ROWS);
    if (last <= 0 || *std::min_element(from, from + ROWS) >= KEYS) return;
    f32v scores[ROWS][KEY_VECTORS];
    score(scores);
    float shrinks[SHRINKS * LANES] = {};
    shrink(scale, scores, shrinks);
    typename Packed<T>::Word weights[ROWS][KEYS / Packed<T>::PER_WORD];
    for (int r = 0; r < ROWS; r++) {
      weigh(r, shrinks[r], scores[r]);
      pack_weights(scores[r], weights[r]);
    }
    const int64_t words = (last + Packed<T>::PER_WORD - 1) / Packed<T>::PER_WORD;
    int64_t column = 0;
    for (; column + VECTORS * LANES <= with.columns; column += VECTORS * LANES)
      add<VECTORS>(weights, words, shrinks, column);
    for (; column < with.columns; column += LANES) add<1>(weights, words, shrinks, column);
  }

  void score(f32v (&scores)[ROWS][KEY_VECTORS]) const {
    for (int at = 0; at < KEY_VECTORS; at += VECTORS) {
      f32v sums[ROWS][VECTORS] = {};
      multiply(&with.queries[first_row * with.words], with.words, &with.keys[at * LANES], KEYS,
               with.words, sums);
      for (int r = 0; r < ROWS; r++) memcpy(scores[r] + at, sums[r], sizeof sums[r]);
    }
  }

  // Scales the scores, hides those of tokens that a row does not see, and finds by how much what
  // was summed so far shrinks: the weights are relative to the highest score.
  void shrink(float scale, f32v (&scores)[ROWS][KEY_VECTORS], float* shrinks) const {
    const i32v lane = by_lane([](int i) { return i; });
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
      f32v highest = f32v{} - FLT_MAX;
      for (int v = 0; v < KEY_VECTORS; v++) scores[r][v] *= scale;
      if (from[r] > 0 || to[r] < KEYS) {
        for (int v = 0; v < KEY_VECTORS; v++) {
          const i32v key = lane + v * LANES;
          const i32v is_seen = (key >= (int32_t)from[r]) & (key < (int32_t)to[r]);
          scores[r][v] = is_seen ? scores[r][v] : f32v{} - INFINITY;
        }
      }
      for (int v = 0; v < KEY_VECTORS; v++) highest = larger(scores[r][v], highest);
      float& top = with.tops[first_row + r];
      const float found = std::max(fold<larger>(highest), top);
      shrinks[r] = top - found;
      top = found;
    }
    for (int i = 0; i < SHRINKS; i++)
      store(shrinks + i * LANES, exp_of_negative(load(shrinks + i * LANES)));
  }

  // Makes weights of a row's scores.
  void weigh(int r, float shrink, f32v* scores) const {
    const float top = with.tops[first_row + r];
    f32v sum = with.weights[first_row + r] * shrink;
    for (int v = 0; v < KEY_VECTORS; v++) {
      scores[v] = exp_of_negative(scores[v] - top);
      sum += scores[v];
    }
    with.weights[first_row + r] = sum;
  }

  template <int COUNT, class Weights>
  void add(const Weights& weights, int64_t words, const float* shrinks, int64_t column) const {
    f32v sums[ROWS][COUNT];
    float* attended = &with.attended[first_row * with.columns + column];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < COUNT; v++)
        sums[r][v] = load(attended + r * with.columns + v * LANES) * shrinks[r];
    multiply(weights[0], KEYS / Packed<T>::PER_WORD, &with.values[column], with.columns, words,
             sums);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < COUNT; v++) store(attended + r * with.columns + v * LANES, sums[r][v]);
  }
};

// A row of a cache as values of T, which it is or which are put into `numbers`.
template <class T>
inline const T* values_of(const T* row, int64_t, T*) {
  return row;
}

template <class T>
inline const T* values_of(const fp8* row, int64_t dim, T* numbers) {
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) store(numbers + d, load(row + d));
  if (d < dim) store_part(numbers + d, load_part(row + d, dim - d), dim - d);
  return numbers;
}

// Packs n tokens of a sequence from the `first`; those up to KEYS become zeros.
template <class T, class C>
void pack_block(const Prefill<T, C>& call, const int32_t* table, int64_t first, int64_t n,
                int64_t kv_head, Scratch<T>& with) {
  typedef typename Packed<T>::Word Word;
  constexpr int PER_WORD = Packed<T>::PER_WORD;
  T zeros[MAX_HEAD_DIM] = {};
  const T *keys[KEYS], *values[KEYS];
  for (int64_t t = 0; t < KEYS; t++) {
    const int64_t token = first + t;
    const int64_t at = t < n ? table[token / call.block_size] * call.block_stride +
                                   token % call.block_size * call.slot_stride +
                                   kv_head * call.head_stride
                             : 0;
    T* numbers = with.numbers.data() + 2 * t * with.columns;
    keys[t] = t < n ? values_of(call.k + at, call.dim, numbers) : zeros;
    values[t] = t < n ? values_of(call.v + at, call.dim, numbers + with.columns) : zeros;
  }
  Word row[MAX_HEAD_DIM];
  for (int64_t t = 0; t < KEYS; t++) {
    pack_values(keys[t], row, call.dim);
    for (int64_t i = 0; i < with.words; i++) with.keys[i * KEYS + t] = row[i];
  }
  for (int64_t t = 0; t < KEYS; t += PER_WORD)
    pack_tokens(values + t, &with.values[t / PER_WORD * with.columns], call.dim);
}

// Tokens [start, stop) of a chunk that starts at token `bound` and whose sequence has `length`.
template <class T, class C>
void attend(const Prefill<T, C>& call, const int32_t* table, int64_t bound, int64_t start,
            int64_t stop, int64_t chunk, int64_t length, int64_t kv_head, Scratch<T>& with) {
  const int64_t group = call.group, rows = (stop - start) * group, behind = length - chunk;
  const int64_t panels = (rows + ROWS - 1) / ROWS;
  const float scale = call.scale * call.scales.key(kv_head), v_scale = call.scales.value(kv_head);
  std::fill(with.queries.begin(), with.queries.end(), 0);
  std::fill(with.attended.begin(), with.attended.end(), 0.0f);
  std::fill(with.tops.begin(), with.tops.end(), -FLT_MAX);
  std::fill(with.weights.begin(), with.weights.end(), f32v{});
  for (int64_t r = 0; r < rows; r++)
    pack_values(call.q + (bound + start + r / group) * call.q_token +
                    (kv_head * group + r % group) * call.q_head,
                &with.queries[r * with.words], call.dim);
  // The first and last tokens that are seen by any row, and those that row r sees.
  const auto end = [&](int64_t r) { return behind + start + std::min(r, rows - 1) / group + 1; };
  const auto begin = [&](int64_t r) {
    return call.window > 0 ? std::max<int64_t>(end(r) - call.window, 0) : 0;
  };
  for (int64_t first = begin(0); first < behind + stop; first += KEYS) {
    const int64_t n = std::min<int64_t>(KEYS, behind + stop - first);
    pack_block(call, table, first, n, kv_head, with);
    for (int64_t i = 0; i < panels; i++) {
      Panel<T> panel{with, i * ROWS};
      for (int r = 0; r < ROWS; r++) {
        panel.from[r] = begin(i * ROWS + r) - first;
        panel.to[r] = std::min(end(i * ROWS + r) - first, n);
      }
      panel.attend(scale);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    const float weight = fold<plus>(with.weights[r]), rest = weight == 0.0f ? 0 : v_scale / weight;
    T* to = call.out + (bound + start + r / group) * call.out_token +
            (kv_head * group + r % group) * call.out_head;
    const float* attended = &with.attended[r * with.columns];
    int64_t d = 0;
    for (; d + LANES <= call.dim; d += LANES) store(to + d, load(attended + d) * rest);
    for (; d < call.dim; d++) from_float(attended[d] * rest, to + d);
  }
}

template <class T, class C>
void prefill(const Prefill<T, C>& call, int64_t seqs, int64_t tokens, int64_t threads) {
  // Work items before each sequence's.
  std::vector<int64_t> items(seqs + 1);
  const int64_t stretch = call.stretch();
  for (int64_t i = 0; i < seqs; i++) {
    const int64_t chunk = call.bounds[i + 1] - call.bounds[i];
    items[i + 1] = items[i] + (chunk + stretch - 1) / stretch * call.kv_heads;
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch<T> with((stretch * call.group + ROWS - 1) / ROWS * ROWS, call.dim,
                    !std::is_same_v<T, C>);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < items[seqs]; i++) {
      // From the last: a sequence's later tokens see most.
      const int64_t item = items[seqs] - 1 - i;
      const int64_t seq = std::upper_bound(items.begin(), items.end(), item) - items.begin() - 1;
      const int64_t bound = call.bounds[seq], chunk = call.bounds[seq + 1] - bound;
      const int64_t start = (item - items[seq]) / call.kv_heads * stretch;
      attend(call, call.tables + seq * call.table_stride, bound, start,
             std::min(start + stretch, chunk), chunk, call.lengths[seq],
             (item - items[seq]) % call.kv_heads, with);
    }
  }
  // Tokens behind the last sequence are padding.
  for (int64_t t = call.bounds[seqs]; t < tokens; t++)
    for (int64_t h = 0; h < call.kv_heads * call.group; h++)
      memset((void*)(call.out + t * call.out_token + h * call.out_head), 0, call.dim * sizeof(T));
}

// q, out: [T, H, D]; k, v: the caches [N, B, Hkv, D]; tables: [S, M]; bounds: [S + 1], where each
// sequence's queries start; lengths: [S]. Rows of out behind the last sequence become zero.
// window: how many tokens one attends to, 0 for all.
template <class T, class C>
bool paged_prefill(Arguments given) {
  const auto q = given.next<const T>();
  const auto k = given.next<const C>(), v = given.next<const C>();
  const auto tables = given.next<const int32_t>(), bounds = given.next<const int32_t>();
  const auto lengths = given.next<const int32_t>();
  const auto out = given.next<T>();
  const Scales scales = given.scales<C>();
  const int64_t kv_heads = k.shape[2], dim = q.shape[2];
  if (dim > MAX_HEAD_DIM || !lie_alike(k, v)) return false;
  prefill(Prefill<T, C>{q.data,        k.data,        v.data,           tables.data,
                        bounds.data,   lengths.data,  out.data,         kv_heads,
                        q.shape[1] / kv_heads,        dim,              k.stride[0],
                        k.stride[1],   k.stride[2],   k.shape[1],       q.stride[0],
                        q.stride[1],   out.stride[0], out.stride[1],    tables.stride[0],
                        given.window,  given.scalar,  scales},
          lengths.shape[0], q.shape[0], given.threads);
  return true;
}

}  // namespace

CACHE_KERNEL(paged_prefill)
