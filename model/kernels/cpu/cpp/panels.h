// What products of packed weights with several rows have in common: words of weights, panels of rows,
// and threads that share columns of outputs.
//
// Rows are taken in chunks, a chunk's inputs in blocks: of a column of WIDTH outputs, one block's
// words stay in the first cache while every panel of rows meets them, and the panels of a block stay
// in the second while a group of columns does (Goto and van de Geijn, 2008). Up to CHUNK rows, the
// weight comes from memory once.
//
// While a block is multiplied, the next one is asked for, by each panel an equal part: memory and
// multiplication take as long as the slower of the two, not as both. That is why a thread claims its
// next group of columns before it begins one.

#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "simd.h"

namespace {

// A vector of words is multiplied in STEPS, in the order of the inputs: each multiplies a Part of it
// with one Input of a row. A processor that multiplies pairs of bfloat16 takes a word in one step.
template <class W>
struct Words {
  static constexpr int STEPS = 4 / sizeof(W);
  typedef float Input;
  typedef f32v Part, Sum;

  // What a row [inputs] has for step i, zeros behind the inputs.
  static float input_at(const W* x, int64_t i, int64_t inputs) {
    return i < inputs ? to_float(x[i]) : 0.0f;
  }
};

inline void split(const float* w, f32v (&parts)[1]) { parts[0] = load(w); }

#if defined(__AVX512BF16__)

template <>
struct Words<bf16> {
  static constexpr int STEPS = 1;
  typedef uint32_t Input;
  typedef u32v Part;
  typedef f32v Sum;

  static uint32_t input_at(const bf16* x, int64_t i, int64_t inputs) {
    const uint32_t high = 2 * i + 1 < inputs ? x[2 * i + 1].bits : 0;
    return 2 * i < inputs ? high << 16 | x[2 * i].bits : 0;
  }
};

inline void split(const bf16* w, u32v (&parts)[1]) { memcpy(parts, w, sizeof parts); }

#else

inline void split(const bf16* w, f32v (&parts)[2]) {
  u32v pairs;
  memcpy(&pairs, w, sizeof pairs);
  parts[0] = (f32v)(pairs << 16);
  parts[1] = (f32v)(pairs & 0xffff0000u);
}

#endif

template <class W>
using Input = typename Words<W>::Input;

constexpr int SIDE = 2;
constexpr int64_t WIDTH = SIDE * LANES;
// With SIDE vectors each, the sums of a panel's rows leave registers for two words and an input.
constexpr int PANEL = REGISTERS == 32 ? 12 : 6;
constexpr int64_t CHUNK = 96, BLOCK = 256, GROUP = REGISTERS == 32 ? 2 : 6;
constexpr int MOST_COLUMNS = REGISTERS == 32 ? 2 : 3;
constexpr int64_t LINE = 64;

// Rows [ROWS, stride] as a panel [steps, ROWS].
template <class W, int ROWS, class T>
void fill_panel(const T* x, int64_t stride, int64_t inputs, int64_t steps, Input<W>* panel) {
  for (int64_t i = 0; i < steps; i++)
    for (int r = 0; r < ROWS; r++)
      panel[i * ROWS + r] = Words<W>::input_at(x + r * stride, i, inputs);
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
  typename Words<T>::Sum acc[COLUMNS][ROWS][SIDE];
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
#pragma GCC unroll 8
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

// Multiplies rows [rows, stride] with all columns: product.group() takes a group of them that a thread
// has claimed. A thread's groups are whole tiles of `per_tile` columns.
template <class W, class X, class T, class Product>
void multiply_rows(const Product& product, const X* x, int64_t rows, int64_t stride, int64_t inputs,
                   int64_t steps, T* out, int64_t outputs, int64_t per_tile, int64_t threads) {
  const int64_t columns = (outputs + WIDTH - 1) / WIDTH;
  // Whole tiles, and several groups for each thread: one that has lost its core takes fewer.
  const int64_t share = std::min(GROUP, columns / (4 * threads));
  const int64_t size = std::max<int64_t>(share / per_tile, 1) * per_tile;
  const int64_t groups = (columns + size - 1) / size;
  static thread_local std::vector<Input<W>> scratch;
  scratch.resize(std::max<size_t>(scratch.size(), std::min(CHUNK, rows) * steps));
  Input<W>* panels = scratch.data();
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
          fill_panel<W, count()>(x + (first + row) * stride, stride, inputs, steps,
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

// Stores a column's sums [rows, WIDTH] of outputs from o on.
template <class T>
void store_column(const float* sums, int64_t rows, const T* bias, int64_t o, int64_t outputs, T* to) {
  const int64_t n = std::min(WIDTH, outputs - o);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < n; i++)
      from_float(sums[r * WIDTH + i] + (bias ? to_float(bias[o + i]) : 0.0f), to + r * outputs + o + i);
}

}  // namespace
