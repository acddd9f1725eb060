// Products with a packed weight: of few rows at the rate at which memory delivers the weight, of many
// near the rate at which the processor multiplies.
//
// A weight [O, I] lies in tiles as oneDNN packs it: [O / N][I / P][N][P], where P values fill four
// bytes (one float32 or two bfloat16) and N outputs stand side by side; both dimensions are padded
// with zeros. A column block of N outputs is read front to back.
//
// Where a CPU cannot multiply bfloat16, oneDNN keeps such weights transposed: one tile of O outputs
// whose words hold one element. They are read row by row, in stretches of STRETCH outputs. Where it
// refuses to pack them, they are packed as above without it, in tiles that suit the products below.
//
// An output is the sum of its products in the order of the inputs, however many rows there are and
// whichever thread adds them up: a row's result does not depend on the rows beside it.

#include <algorithm>
#include <atomic>
#include <vector>

#include "simd.h"

namespace {

// How memory is read, by what was measured: bytes a second against a plain sum of as many bytes.
//
// Column blocks that are read side by side are streams of addresses. Intel (Sapphire Rapids): two
// streams and a line asked for 2048 bytes ahead, because the hardware alone stops at a page; one
// stream leaves a sixth. AMD (Zen 4 and 5): eight streams and nothing asked for reach the plain sum,
// two reach 0.84 of it, and asking costs another tenth.
struct Ahead {
  static constexpr int STREAMS = 2;
  static constexpr int64_t BYTES = 2048;
};

struct Wide {
  static constexpr int STREAMS = 8;
  static constexpr int64_t BYTES = 0;
};

bool prefers_wide() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// A vector of words is multiplied in STEPS, in the order of the inputs: each multiplies a Part of it
// with one Input of a row. A processor that multiplies pairs of bfloat16 takes a word in one step.
template <class T>
struct Words {
  static constexpr int STEPS = 4 / sizeof(T);
  typedef float Input;
  typedef f32v Part;
};

inline void split(const float* w, f32v (&parts)[1]) { parts[0] = load(w); }

#if defined(__AVX512BF16__)

template <>
struct Words<bf16> {
  static constexpr int STEPS = 1;
  typedef uint32_t Input;
  typedef u32v Part;
};

inline void split(const bf16* w, u32v (&parts)[1]) { memcpy(parts, w, sizeof parts); }

// What a row [inputs] has for step i, zeros behind the inputs.
inline uint32_t input_at(const bf16* x, int64_t i, int64_t inputs) {
  const uint32_t high = 2 * i + 1 < inputs ? x[2 * i + 1].bits : 0;
  return 2 * i < inputs ? high << 16 | x[2 * i].bits : 0;
}

#else

inline void split(const bf16* w, f32v (&parts)[2]) {
  u32v pairs;
  memcpy(&pairs, w, sizeof pairs);
  parts[0] = (f32v)(pairs << 16);
  parts[1] = (f32v)(pairs & 0xffff0000u);
}

inline float input_at(const bf16* x, int64_t i, int64_t inputs) {
  return i < inputs ? to_float(x[i]) : 0.0f;
}

#endif

inline float input_at(const float* x, int64_t i, int64_t inputs) { return i < inputs ? x[i] : 0.0f; }

template <class T>
using Input = typename Words<T>::Input;

// COUNT column blocks of `size` elements each. x: [words * STEPS]; sums: [COUNT * VECTORS * LANES].
template <class T, int VECTORS, int64_t AHEAD, int COUNT>
void blocks(const T* w, int64_t size, const Input<T>* x, int64_t words, float* sums) {
  constexpr int P = 4 / sizeof(T), STEPS = Words<T>::STEPS;
  f32v acc[COUNT][VECTORS] = {};
  for (int64_t word = 0; word < words; word++, x += STEPS, w += VECTORS * LANES * P)
    for (int b = 0; b < COUNT; b++)
      for (int v = 0; v < VECTORS; v++) {
        const T* at = w + b * size + v * LANES * P;
        if (AHEAD) __builtin_prefetch((const char*)at + AHEAD);
        typename Words<T>::Part parts[STEPS];
        split(at, parts);
        for (int s = 0; s < STEPS; s++) acc[b][v] = add_product(acc[b][v], parts[s], x[s]);
      }
  memcpy(sums, acc, sizeof acc);
}

// `count` column blocks, in halves of COUNT and less until none is left.
template <class T, int VECTORS, int64_t AHEAD, int COUNT>
void all_blocks(const T* w, int64_t size, const Input<T>* x, int64_t words, int64_t count,
                float* sums) {
  for (; count >= COUNT; count -= COUNT, w += COUNT * size, sums += COUNT * VECTORS * LANES)
    blocks<T, VECTORS, AHEAD, COUNT>(w, size, x, words, sums);
  if constexpr (COUNT > 1)
    if (count) all_blocks<T, VECTORS, AHEAD, COUNT / 2>(w, size, x, words, count, sums);
}

template <class T, int VECTORS, class Reading>
void linear(const T* x, const T* w, const T* bias, T* out, const int64_t* sizes,
            int64_t threads) {
  const int64_t inputs = sizes[0], outputs = sizes[1], padded = sizes[3];
  const int64_t words = padded * (int64_t)sizeof(T) / 4, steps = words * Words<T>::STEPS;
  constexpr int64_t N = VECTORS * LANES, ROOM = std::max(REGISTERS / 2 / VECTORS, 1);
  constexpr int64_t STREAMS = std::min<int64_t>(Reading::STREAMS, ROOM);
  std::vector<Input<T>> row(steps);
  for (int64_t i = 0; i < steps; i++) row[i] = input_at(x, i, inputs);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t first = 0; first < outputs; first += STREAMS * N) {
    float sums[STREAMS * N];
    const int64_t left = outputs - first, n = left < STREAMS * N ? left : STREAMS * N;
    all_blocks<T, VECTORS, Reading::BYTES, STREAMS>(w + first * padded, N * padded, row.data(),
                                                    words, (n + N - 1) / N, sums);
    for (int64_t i = 0; i < n; i++)
      from_float(sums[i] + (bias ? to_float(bias[first + i]) : 0.0f), out + first + i);
  }
}

template <class T, int VECTORS>
void linear_as_read_best(const T* x, const T* w, const T* bias, T* out, const int64_t* sizes,
                         int64_t threads) {
  static const bool wide = prefers_wide();
  if (wide) return linear<T, VECTORS, Wide>(x, w, bias, out, sizes, threads);
  linear<T, VECTORS, Ahead>(x, w, bias, out, sizes, threads);
}

// --- many rows ----------------------------------------------------------------------------------
//
// Rows are taken in chunks, a chunk's inputs in blocks: of a column of WIDTH outputs, one block's
// words stay in the first cache while every panel of rows meets them, and the panels of a block stay
// in the second while a group of columns does (Goto and van de Geijn, 2008). Up to CHUNK rows, the
// weight comes from memory once.
//
// While a block is multiplied, the next one is asked for, by each panel an equal part: memory and
// multiplication take as long as the slower of the two, not as both. That is why a thread claims its
// next group of columns before it begins one.

constexpr int SIDE = 2;
constexpr int64_t WIDTH = SIDE * LANES;
// With SIDE vectors each, the sums of a panel's rows leave registers for two words and an input.
constexpr int PANEL = REGISTERS == 32 ? 12 : 6;
constexpr int64_t CHUNK = 96, BLOCK = 256, GROUP = REGISTERS == 32 ? 2 : 6;
constexpr int MOST_COLUMNS = REGISTERS == 32 ? 2 : 3;
constexpr int64_t LINE = 64;

// Rows [ROWS, stride] as a panel [steps, ROWS].
template <class T, int ROWS>
void fill_panel(const T* x, int64_t stride, int64_t inputs, int64_t steps, Input<T>* panel) {
  for (int64_t i = 0; i < steps; i++)
    for (int r = 0; r < ROWS; r++) panel[i * ROWS + r] = input_at(x + r * stride, i, inputs);
}

// Which words of the next block are asked for: `first` and every `every`th from there, each `ahead`
// elements behind the one of this block.
struct Request {
  int64_t ahead, first, every;
};

// Adds the products of a panel [words * STEPS, ROWS] with COLUMNS columns to sums
// [COLUMNS][ROWS, WIDTH]. step: elements from one word of a column to its next.
template <class T, int ROWS, int COLUMNS>
void multiply(const Input<T>* panel, const T* const* columns, int64_t step, int64_t words,
              Request request, float* const* sums) {
  constexpr int P = 4 / sizeof(T), STEPS = Words<T>::STEPS;
  f32v acc[COLUMNS][ROWS][SIDE];
  for (int c = 0; c < COLUMNS; c++) memcpy(acc[c], sums[c], sizeof acc[c]);
  for (int64_t word = 0; word < words; word++, panel += STEPS * ROWS) {
    const bool asks = word == request.first;
    if (asks) request.first += request.every;
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) {
      const T* at = columns[c] + word * step;
      if (asks)
        for (int64_t i = 0; i < WIDTH * P; i += LINE / (int64_t)sizeof(T))
          __builtin_prefetch(at + request.ahead + i, 0, 2);
      typename Words<T>::Part parts[SIDE][STEPS];
      for (int v = 0; v < SIDE; v++) split(at + v * LANES * P, parts[v]);
#pragma GCC unroll 2
      for (int s = 0; s < STEPS; s++)
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
          for (int v = 0; v < SIDE; v++)
            acc[c][r][v] = add_product(acc[c][r][v], parts[v][s], panel[s * ROWS + r]);
    }
  }
  for (int c = 0; c < COLUMNS; c++) memcpy(sums[c], acc[c], sizeof acc[c]);
}

// Few rows leave registers for several columns, whose sums then need not wait for one another.
template <int ROWS, class T>
void multiply_all(const Input<T>* panel, const T* const* columns, int64_t count, int64_t step,
                  int64_t words, Request request, float* const* sums) {
  constexpr int COLUMNS = std::min(PANEL / ROWS, MOST_COLUMNS);
  int64_t c = 0;
  for (; c + COLUMNS <= count; c += COLUMNS)
    multiply<T, ROWS, COLUMNS>(panel, columns + c, step, words, request, sums + c);
  for (; c < count; c++) multiply<T, ROWS, 1>(panel, columns + c, step, words, request, sums + c);
}

// The words of a column as float32, [words * P, WIDTH]; the next block's are asked for.
template <class T>
void widen_column(const T* at, int64_t step, int64_t words, int64_t ahead, float* wide) {
  constexpr int P = 4 / sizeof(T);
  for (int64_t word = 0; word < words; word++, at += step, wide += P * WIDTH) {
    __builtin_prefetch(at + ahead);
    for (int v = 0; v < SIDE; v++) {
      f32v parts[P];
      split(at + v * LANES * P, parts);
      for (int p = 0; p < P; p++) store(wide + p * WIDTH + v * LANES, parts[p]);
    }
  }
}

// Calls f with `rows` as a constant.
template <int ROWS = PANEL, class F>
inline void with_rows(int64_t rows, F f) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return f(std::integral_constant<int, ROWS>());
    with_rows<ROWS - 1>(rows, f);
  }
}

// As few panels as can be, of nearly equal size: PANEL rows or less.
struct Panels {
  int64_t rows, count = (rows + PANEL - 1) / PANEL;

  int64_t start(int64_t i) const { return rows / count * i + std::min(i, rows % count); }
};

template <class T>
struct Many {
  static constexpr int P = 4 / sizeof(T), STEPS = Words<T>::STEPS;
  const T *w, *bias;
  T* out;
  int64_t outputs, tile, words, columns_per_tile;

  const T* column(int64_t i) const {
    return w + (i / columns_per_tile * tile * words + i % columns_per_tile * WIDTH) * P;
  }

  // Columns [first, first + count) of a chunk's outputs; this thread's next group begins at `next`.
  // panels: [steps, ROWS] one after another.
  void group(const Input<T>* panels, Panels split, int64_t first, int64_t count, int64_t next,
             T* to) const {
    alignas(64) float sums[GROUP][CHUNK * WIDTH], wide[BLOCK * WIDTH];
    for (int64_t c = 0; c < count; c++) std::fill(sums[c], sums[c] + split.rows * WIDTH, 0.0f);
    const int64_t step = tile * P, blocks = (words * P + BLOCK - 1) / BLOCK;
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t start = words * b / blocks, n = words * (b + 1) / blocks - start;
      const int64_t ahead =
          b + 1 < blocks ? n * step : column(next) - column(first) - start * step;
      const T* columns[GROUP];
      for (int64_t c = 0; c < count; c++) columns[c] = column(first + c) + start * step;
      auto multiply_panels = [&](auto* const* from, int64_t c, int64_t count, int64_t step,
                                 int64_t words, bool asks) {
        for (int64_t i = 0; i < split.count; i++) {
          const int64_t row = split.start(i);
          float* part[GROUP];
          for (int64_t s = 0; s < count; s++) part[s] = sums[c + s] + row * WIDTH;
          const Request request{ahead, asks ? i : words, split.count};
          with_rows(split.start(i + 1) - row, [&](auto rows) {
            const Input<T>* panel = panels + (row * this->words + start * rows()) * STEPS;
            multiply_all<rows()>(panel, from, count, step, words, request, part);
          });
        }
      };
      // One column at a time meets all panels; of a single panel, as many as have room.
      const int64_t at_once = split.count > 1 ? 1 : count;
      for (int64_t c = 0; c < count; c += at_once) {
        if constexpr (STEPS > 1)
          if (split.count >= 4) {
            const float* from = wide;
            widen_column(columns[c], step, n, ahead, wide);
            multiply_panels(&from, c, 1, WIDTH, n * P, false);
            continue;
          }
        multiply_panels(columns + c, c, at_once, step, n, true);
      }
    }
    for (int64_t c = 0; c < count; c++) {
      const int64_t o = (first + c) * WIDTH, n = std::min(WIDTH, outputs - o);
      for (int64_t r = 0; r < split.rows; r++)
        for (int64_t i = 0; i < n; i++)
          from_float(sums[c][r * WIDTH + i] + (bias ? to_float(bias[o + i]) : 0.0f),
                     to + r * outputs + o + i);
    }
  }
};

template <class T>
void many(const T* x, int64_t rows, int64_t stride, const T* w, const T* bias, T* out,
          const int64_t* sizes, int64_t threads) {
  const int64_t inputs = sizes[0], outputs = sizes[1], tile = sizes[2];
  const int64_t words = sizes[3] / Many<T>::P, steps = words * Many<T>::STEPS;
  const Many<T> product{w, bias, out, outputs, tile, words, tile / WIDTH};
  const int64_t columns = (outputs + WIDTH - 1) / WIDTH;
  // Whole tiles, and several groups for each thread: one that has lost its core takes fewer.
  const int64_t per_tile = product.columns_per_tile;
  const int64_t share = std::min(GROUP, columns / (4 * threads));
  const int64_t size = std::max<int64_t>(share / per_tile, 1) * per_tile;
  const int64_t groups = (columns + size - 1) / size;
  static thread_local std::vector<Input<T>> scratch;
  scratch.resize(std::max<size_t>(scratch.size(), std::min(CHUNK, rows) * steps));
  Input<T>* panels = scratch.data();
  // The groups of all chunks, in their order. What a thread claims last belongs to the next chunk.
  std::atomic<int64_t> unclaimed{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    int64_t group = unclaimed++;
    for (int64_t first = 0, end = groups; first < rows; first += CHUNK, end += groups) {
      const Panels split{std::min(CHUNK, rows - first)};
#pragma omp for schedule(static)
      for (int64_t i = 0; i < split.count; i++) {
        const int64_t row = split.start(i);
        with_rows(split.start(i + 1) - row, [&](auto count) {
          fill_panel<T, count()>(x + (first + row) * stride, stride, inputs, steps,
                                 panels + row * steps);
        });
      }
      while (group < end) {
        const int64_t next = unclaimed++, c = group % groups * size;
        product.group(panels, split, c, std::min(size, columns - c), next % groups * size,
                      out + first * outputs);
        group = next;
      }
#pragma omp barrier
    }
  }
}

// --- transposed weights -------------------------------------------------------------------------

// Outputs in one stretch at most: their sums stay in the first cache, and stretches that are half
// as long, on pages of their own, were read at four fifths of the rate (Intel Cascade Lake).
constexpr int64_t STRETCH = 8192;

// Adds COUNT rows of a transposed weight, each times its input. rows: [COUNT, stride]; sums: [n].
template <class T, int COUNT>
void add_rows(const T* w, int64_t stride, const float* x, int64_t n, float* sums) {
  int64_t o = 0;
  for (; o + LANES <= n; o += LANES) {
    f32v acc = load(sums + o);
    for (int r = 0; r < COUNT; r++) acc += load(w + r * stride + o) * x[r];
    store(sums + o, acc);
  }
  for (; o < n; o++)
    for (int r = 0; r < COUNT; r++) sums[o] += to_float(w[r * stride + o]) * x[r];
}

template <class T>
void transposed(const T* x, const T* w, const T* bias, T* out, const int64_t* sizes,
                int64_t threads) {
  const int64_t inputs = sizes[0], outputs = sizes[1];
  std::vector<float> wide(inputs);
  for (int64_t i = 0; i < inputs; i++) wide[i] = to_float(x[i]);
  const int64_t share = (outputs / threads / LANES + 1) * LANES;
  const int64_t stretch = share < STRETCH ? share : STRETCH;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t first = 0; first < outputs; first += stretch) {
    float sums[STRETCH] = {};
    const int64_t left = outputs - first, n = left < stretch ? left : stretch;
    const T* at = w + first;
    int64_t i = 0;
    for (; i + 4 <= inputs; i += 4)
      add_rows<T, 4>(at + i * outputs, outputs, wide.data() + i, n, sums);
    for (; i < inputs; i++) add_rows<T, 1>(at + i * outputs, outputs, wide.data() + i, n, sums);
    for (int64_t o = 0; o < n; o++)
      from_float(sums[o] + (bias ? to_float(bias[first + o]) : 0.0f), out + first + o);
  }
}

// --- packing ------------------------------------------------------------------------------------

// Tiles are written front to back, from N rows at once.
template <class T>
void pack(const T* w, int64_t stride, T* tiles, const int64_t* sizes, int64_t threads) {
  constexpr int64_t P = 4 / sizeof(T);
  const int64_t inputs = sizes[0], outputs = sizes[1], N = sizes[2], padded = sizes[3];
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t first = 0; first < outputs; first += N) {
    T* tile = tiles + first * padded;
    const int64_t n = std::min(N, outputs - first), whole = inputs / P * P;
    if (n < N || whole < padded) memset((void*)tile, 0, N * padded * sizeof(T));
    for (int64_t i = 0; i < whole; i += P)
      for (int64_t o = 0; o < n; o++)
        memcpy(tile + i * N + o * P, w + (first + o) * stride + i, P * sizeof(T));
    for (int64_t i = whole; i < inputs; i++)
      for (int64_t o = 0; o < n; o++)
        tile[whole * N + o * P + i - whole] = w[(first + o) * stride + i];
  }
}

template <class T>
void dispatch(const void* x, const void* w, const void* bias, void* out, const int64_t* sizes,
              int64_t rows, int64_t stride, int64_t threads) {
  if (rows != 1)
    return many<T>((const T*)x, rows, stride, (const T*)w, (const T*)bias, (T*)out, sizes, threads);
  auto call = [&](auto* f) { f((const T*)x, (const T*)w, (const T*)bias, (T*)out, sizes, threads); };
  if (sizes[4] * (int64_t)sizeof(T) < 4) return call(transposed<T>);
  switch (sizes[2]) {
    case 16: return call(linear_as_read_best<T, 16 / LANES>);
    case 32: return call(linear_as_read_best<T, 32 / LANES>);
    case 48: return call(linear_as_read_best<T, 48 / LANES>);
    case 64: return call(linear_as_read_best<T, 64 / LANES>);
  }
}

}  // namespace

extern "C" {

// x: [T, I]; bias: [O] or null; out: [T, O], contiguous.
// sizes: I, O, N (16, 32, 48 or 64), padded I, P; P is 1 for bfloat16 that is transposed, N
// then O. rows: T; more than one only if packed_linear_takes(N). stride: from row to row of x.
void packed_linear_float32(const void* x, const void* w, const void* bias, void* out,
                           const int64_t* sizes, int64_t rows, int64_t stride, int64_t threads) {
  dispatch<float>(x, w, bias, out, sizes, rows, stride, threads);
}

void packed_linear_bfloat16(const void* x, const void* w, const void* bias, void* out,
                            const int64_t* sizes, int64_t rows, int64_t stride, int64_t threads) {
  dispatch<bf16>(x, w, bias, out, sizes, rows, stride, threads);
}

// w: [O, I], rows `stride` apart; tiles: [O / N][padded I / P][N][P]; sizes: as above.
void pack_linear_float32(const void* w, void* tiles, const int64_t* sizes, int64_t stride,
                         int64_t threads) {
  pack<float>((const float*)w, stride, (float*)tiles, sizes, threads);
}

void pack_linear_bfloat16(const void* w, void* tiles, const int64_t* sizes, int64_t stride,
                          int64_t threads) {
  pack<bf16>((const bf16*)w, stride, (bf16*)tiles, sizes, threads);
}

// The outputs of a tile that suits products of many rows best.
int64_t packed_linear_tile() { return std::max<int64_t>(REGISTERS == 32 ? 2 * WIDTH : WIDTH, 16); }

// Whether products of many rows can be had of tiles with this many outputs.
bool packed_linear_takes(int64_t tile) { return tile % WIDTH == 0 && tile / WIDTH <= GROUP; }
}
