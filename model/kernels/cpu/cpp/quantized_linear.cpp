// Products with a weight of 8-bit or 4-bit integers, of which groups of inputs share a scale: weights
// widen in registers, activations stay what they are, and sums are float32.
//
// A weight [O, I] lies in tiles of WIDTH outputs, [O / WIDTH][G][1 + words][WIDTH] words of four bytes,
// which are read front to back. Of each of the G groups come its scales first, float32, then its
// integers in two's complement: a word has 32 / BITS inputs of one output, the lowest bits first. Both
// dimensions are padded with zeros.
//
// The integers of a group are summed exactly as they are, in the order of the steps; the sum times its
// scale is added to the output. A row's result does not depend on the rows beside it.
//
// Or both sides are integers of eight bits, with one scale for an output and one for a row: what is
// summed are whole numbers, so every processor finds the same.

#include "panels.h"

namespace {

// BITS: 8 or 4; T: of the activations.
template <int BITS, class T>
struct Integers {
  uint32_t word;
};

template <int BITS, class T>
struct Words<Integers<BITS, T>> {
  static constexpr int STEPS = 32 / BITS;
  typedef float Input;
  typedef f32v Part, Sum;

  static float input_at(const T* x, int64_t i, int64_t inputs) {
    return i < inputs ? to_float(x[i]) : 0.0f;
  }
};

inline u32v load_words(const void* w) {
  u32v words;
  memcpy(&words, w, sizeof words);
  return words;
}

template <int BITS, class T>
inline void split(const Integers<BITS, T>* w, f32v (&parts)[32 / BITS]) {
  const u32v words = load_words(w);
  for (int s = 0; s < 32 / BITS; s++) {
#if defined(__AVX512F__)
    if constexpr (BITS == 4) {
      const f32v values{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
      // Of an index the four lowest bits count.
      parts[s] = (f32v)_mm512_permutexvar_ps((__m512i)(words >> (4 * s)), (__m512)values);
      continue;
    }
#endif
    const i32v numbers = (i32v)(words << (32 - BITS * (s + 1))) >> (32 - BITS);
    parts[s] = __builtin_convertvector(numbers, f32v);
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

// Integers of eight bits are numbers of bfloat16, and a processor that multiplies pairs of those takes
// two inputs in a step: of a word's P inputs the ones at s and s + P / 2.
template <int BITS>
struct Words<Integers<BITS, bf16>> {
  static constexpr int STEPS = 16 / BITS;
  typedef uint32_t Input;
  typedef u32v Part;
  typedef f32v Sum;

  static uint32_t input_at(const bf16* x, int64_t i, int64_t inputs) {
    const int64_t low = i / STEPS * 2 * STEPS + i % STEPS, high = low + STEPS;
    return (low < inputs ? x[low].bits : 0) | (high < inputs ? x[high].bits : 0) << 16;
  }
};

// A whole number of at most eight bits, as bfloat16.
constexpr uint16_t half_of(int number) {
  int size = number < 0 ? -number : number, exponent = 127 + 7;
  if (!size) return 0;
  for (; size < 128; size *= 2) exponent--;
  return (number < 0 ? 0x8000 : 0) | exponent << 7 | (size & 127);
}

// By an integer of four bits and one that is ignored; and by the size of one of eight bits, lower
// bytes first.
struct Tables {
  alignas(64) uint16_t of_four[32] = {};
  alignas(64) uint8_t of_eight[2][128] = {};

  constexpr Tables() {
    for (int i = 0; i < 32; i++) of_four[i] = half_of((i % 16 ^ 8) - 8);
    for (int i = 0; i < 128; i++) {
      of_eight[0][i] = half_of(i) & 255;
      of_eight[1][i] = half_of(i) >> 8;
    }
  }
};

constexpr Tables TABLES;

inline void split(const Integers<4, bf16>* w, u32v (&parts)[4]) {
  const __m512i values = _mm512_load_si512(TABLES.of_four);
  const u32v words = load_words(w);
  for (int s = 0; s < 4; s++)
    parts[s] = (u32v)_mm512_permutexvar_epi16((__m512i)(words >> (4 * s)), values);
}

inline void split(const Integers<8, bf16>* w, u32v (&parts)[2]) {
  const __m512i words = (__m512i)load_words(w), sizes = _mm512_abs_epi8(words);
  auto look_up = [&](const uint8_t* bytes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), sizes,
                                    _mm512_load_si512(bytes + 64));
  };
  const __m512i lows = look_up(TABLES.of_eight[0]);
  const __m512i highs = look_up(TABLES.of_eight[1]) | (words & _mm512_set1_epi8((char)0x80));
  constexpr __mmask64 UPPER = 0xaaaaaaaaaaaaaaaa;
  parts[0] = (u32v)_mm512_mask_blend_epi8(UPPER, lows, _mm512_slli_epi16(highs, 8));
  parts[1] = (u32v)_mm512_mask_blend_epi8(UPPER, _mm512_srli_epi16(lows, 8), highs);
}

#endif

// Four integers of eight bits, of an output or of a row, which has whole ones.
struct Fours {
  uint32_t word;
};

#if defined(__AVX512VNNI__)

// The instruction takes one side without a sign: the weight, plus 128.
constexpr int32_t WEIGHT_ADDED = 128;

template <>
struct Words<Fours> {
  static constexpr int STEPS = 1;
  typedef uint32_t Input;
  typedef i32v Part, Sum;

  static uint32_t input_at(const int8_t* x, int64_t i, int64_t) {
    uint32_t four;
    memcpy(&four, x + 4 * i, sizeof four);
    return four;
  }
};

inline void split(const Fours* w, i32v (&parts)[1]) { parts[0] = (i32v)(load_words(w) ^ 0x80808080u); }

#else

constexpr int32_t WEIGHT_ADDED = 0;

template <>
struct Words<Fours> {
  static constexpr int STEPS = 4;
  typedef int32_t Input;
  typedef i32v Part, Sum;

  static int32_t input_at(const int8_t* x, int64_t i, int64_t) { return x[i]; }
};

inline void split(const Fours* w, i32v (&parts)[4]) {
  const u32v words = load_words(w);
  for (int s = 0; s < 4; s++) parts[s] = (i32v)(words << (24 - 8 * s)) >> 24;
}

#endif

template <int BITS, class T>
struct Quantized {
  typedef Integers<BITS, T> Word;
  typedef typename Words<Word>::Part Part;
  // What parts of words are as plain words.
  typedef std::conditional_t<std::is_same_v<Part, f32v>, float, bf16> Wide;
  static constexpr int STEPS = Words<Word>::STEPS;
  // Rows that words are widened for in registers: tables take room there, which sums of many want.
  static constexpr int64_t FEW = STEPS == 2 ? 4 : PANEL;
  // Bytes at which words are asked for before they are read.
  static constexpr int64_t AHEAD = 4096;
  static constexpr int64_t BLOCK_WORDS = BLOCK * BITS / 32;
  const Word* w;
  const T* bias;
  int64_t outputs, groups, words;

  const Word* column(int64_t i) const { return w + i * groups * (1 + words) * WIDTH; }

  // Columns [first, first + count) of a chunk's outputs. panels: [steps, ROWS] one after another.
  void group(const Input<Word>* panels, Panels split, int64_t first, int64_t count, int64_t,
             T* to) const {
    alignas(64) float totals[GROUP][CHUNK * WIDTH], sums[GROUP][CHUNK * WIDTH];
    alignas(64) uint32_t wide[BLOCK * WIDTH];
    const int64_t size = split.rows * WIDTH;
    for (int64_t c = 0; c < count; c++) std::fill(totals[c], totals[c] + size, 0.0f);
    const Word* at[GROUP];
    for (int64_t c = 0; c < count; c++) at[c] = column(first + c);
    for (int64_t g = 0; g < groups; g++) {
      const Word* scales[GROUP];
      for (int64_t c = 0; c < count; c++) {
        scales[c] = at[c];
        at[c] += WIDTH;
        std::fill(sums[c], sums[c] + size, 0.0f);
      }
      // A single panel meets each word once; others share what has been widened.
      const bool is_few = split.rows <= FEW;
      const int64_t most = is_few ? words : BLOCK_WORDS;
      for (int64_t start = 0; start < words; start += most) {
        const int64_t n = std::min(most, words - start), from = (g * words + start) * STEPS;
        if (is_few) {
          multiply_panel(panels, 0, split.rows, from, at, 0, count, n, sums);
        } else {
          for (int64_t c = 0; c < count; c++) {
            widen(at[c], n, wide);
            const Wide* columns = (const Wide*)wide;
            for (int64_t i = 0; i < split.count; i++)
              multiply_panel(panels, split.start(i), split.start(i + 1) - split.start(i), from,
                             &columns, c, 1, n * STEPS, sums);
          }
        }
        for (int64_t c = 0; c < count; c++) at[c] += n * WIDTH;
      }
      for (int64_t c = 0; c < count; c++)
        for (int v = 0; v < SIDE; v++) {
          const f32v scale = load((const float*)scales[c] + v * LANES);
          for (int64_t i = v * LANES; i < size; i += WIDTH)
            store(totals[c] + i, load(totals[c] + i) + load(sums[c] + i) * scale);
        }
    }
    for (int64_t c = 0; c < count; c++)
      store_column(totals[c], split.rows, bias, (first + c) * WIDTH, outputs, to);
  }

  // A panel that begins with row `first` and step `from`, times `count` columns.
  template <class W>
  void multiply_panel(const Input<Word>* panels, int64_t first, int64_t count_rows, int64_t from,
                      const W* const* columns, int64_t c, int64_t count, int64_t num_words,
                      float (*sums)[CHUNK * WIDTH]) const {
    float* part[GROUP];
    for (int64_t s = 0; s < count; s++) part[s] = sums[c + s] + first * WIDTH;
    constexpr bool is_stored = std::is_same_v<W, Word>;
    with_rows<is_stored ? FEW : PANEL>(count_rows, [&](auto rows) {
      const Request request = is_stored ? Request{AHEAD / 4, 0, 1} : Request{0, -1, 0};
      const Input<Word>* panel = panels + first * groups * words * STEPS + from * rows();
      constexpr int64_t STEP = WIDTH * 4 / sizeof(W);
      multiply_all<rows()>(panel, columns, count, STEP, num_words, request, part);
    });
  }

  // Words of a column as parts, [n * STEPS, WIDTH].
  static void widen(const Word* at, int64_t n, uint32_t* to) {
    for (int64_t word = 0; word < n; word++, at += WIDTH, to += STEPS * WIDTH)
      for (int v = 0; v < SIDE; v++) {
        __builtin_prefetch((const char*)(at + v * LANES) + AHEAD, 0, 2);
        Part parts[STEPS];
        split(at + v * LANES, parts);
        for (int s = 0; s < STEPS; s++) memcpy(to + s * WIDTH + v * LANES, parts + s, sizeof(Part));
      }
  }
};

template <int BITS, class T>
void multiply_integers(const void* x, const void* w, const void* bias, void* out,
                       const int64_t* sizes, int64_t rows, int64_t stride, int64_t threads) {
  typedef Quantized<BITS, T> Product;
  const int64_t outputs = sizes[1], groups = sizes[2], words = sizes[3];
  const Product product{(const typename Product::Word*)w, (const T*)bias, outputs, groups, words};
  multiply_rows<typename Product::Word>(product, (const T*)x, rows, stride, sizes[0],
                                        groups * words * Product::STEPS, (T*)out, outputs, 1, threads);
}

// A row [inputs] as integers of eight bits, the largest one as 127. Returns their scale, no number where
// the row has one that is infinite or none, and their sum.
template <class T>
float round_row(const T* x, int64_t inputs, int8_t* to, int32_t* sum) {
  f32v most{}, odd{};
  const auto values_at = [&](int64_t i) {
    return i + LANES <= inputs ? load(x + i) : load_part(x + i, inputs - i);
  };
  for (int64_t i = 0; i < inputs; i += LANES) {
    const f32v values = values_at(i), size = (f32v)((u32v)values & 0x7fffffff);
    most = size > most ? size : most;
    odd += values * 0.0f;
  }
  float largest = 0.0f;
  for (int l = 0; l < LANES; l++) largest = std::max(largest, most[l]) + odd[l];
  const float scale = largest / 127.0f, divisor = scale > 0.0f ? scale : 1.0f;
  i32v total{};
  for (int64_t i = 0; i < inputs; i += LANES) {
    // Adding and taking away rounds to whole numbers, ties to even.
    constexpr float ROUNDS = 0x1.8p23f;
    const i32v found = __builtin_convertvector(values_at(i) / divisor + ROUNDS - ROUNDS, i32v);
    total += found;
    const u8v bytes = narrow_to_bytes((u32v)found);
    memcpy(to + i, &bytes, std::min<int64_t>(LANES, inputs - i));
  }
  *sum = 0;
  for (int l = 0; l < LANES; l++) *sum += total[l];
  return scale;
}

template <class T>
struct BothRounded {
  typedef Fours Word;
  const Word* w;
  const T* bias;
  const T* out;
  const float* scales;
  const int32_t* sums_of_rows;
  int64_t outputs, words;

  const Word* column(int64_t i) const { return w + i * (1 + words) * WIDTH; }

  // As of `Quantized`.
  void group(const Input<Word>* panels, Panels split, int64_t first, int64_t count, int64_t next,
             T* to) const {
    alignas(64) float sums[GROUP][CHUNK * WIDTH];
    constexpr int64_t STEPS = Words<Word>::STEPS;
    for (int64_t c = 0; c < count; c++) std::fill(sums[c], sums[c] + split.rows * WIDTH, 0.0f);
    // Of as many bytes as one of bfloat16.
    const int64_t blocks = (2 * words + BLOCK - 1) / BLOCK, at_once = split.count > 1 ? 1 : count;
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t start = words * b / blocks, n = words * (b + 1) / blocks - start;
      const int64_t ahead = b + 1 < blocks ? n * WIDTH : column(next) - column(first) - start * WIDTH;
      const Word* columns[GROUP];
      for (int64_t c = 0; c < count; c++) columns[c] = column(first + c) + (1 + start) * WIDTH;
      for (int64_t c = 0; c < count; c += at_once)
        for (int64_t i = 0; i < split.count; i++) {
          const int64_t row = split.start(i);
          float* part[GROUP];
          for (int64_t s = 0; s < at_once; s++) part[s] = sums[c + s] + row * WIDTH;
          with_rows(split.start(i + 1) - row, [&](auto rows) {
            const Input<Word>* panel = panels + (row * words + start * rows()) * STEPS;
            multiply_all<rows()>(panel, columns + c, at_once, WIDTH, n, {ahead, i, split.count}, part);
          });
        }
    }
    const int64_t first_row = (to - out) / outputs;
    for (int64_t c = 0; c < count; c++) {
      const Word* of_outputs = column(first + c);
      for (int64_t r = 0; r < split.rows; r++) {
        const int32_t added = WEIGHT_ADDED * sums_of_rows[first_row + r];
        for (int v = 0; v < SIDE; v++) {
          float* at = sums[c] + r * WIDTH + v * LANES;
          i32v found;
          memcpy(&found, at, sizeof found);
          const f32v scale = load((const float*)of_outputs + v * LANES) * scales[first_row + r];
          store(at, __builtin_convertvector(found - added, f32v) * scale);
        }
      }
      store_column(sums[c], split.rows, bias, (first + c) * WIDTH, outputs, to);
    }
  }
};

template <class T>
void multiply_rounded(const T* x, const void* w, const T* bias, T* out, const int64_t* sizes,
                      int64_t rows, int64_t stride, int64_t threads) {
  const int64_t inputs = sizes[0], outputs = sizes[1], words = sizes[3];
  static thread_local std::vector<int8_t> integers;
  static thread_local std::vector<float> scales;
  static thread_local std::vector<int32_t> sums;
  const int64_t padded = 4 * words;
  integers.resize(std::max<size_t>(integers.size(), rows * padded));
  scales.resize(std::max<size_t>(scales.size(), rows));
  sums.resize(std::max<size_t>(sums.size(), rows));
  int8_t* to = integers.data();
  float* scale_of = scales.data();
  int32_t* sum_of = sums.data();
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * inputs > ALONE)
  for (int64_t r = 0; r < rows; r++) {
    std::fill(to + r * padded + inputs, to + (r + 1) * padded, 0);
    scale_of[r] = round_row(x + r * stride, inputs, to + r * padded, sum_of + r);
  }
  const BothRounded<T> product{(const Fours*)w, bias, out, scale_of, sum_of, outputs, words};
  multiply_rows<Fours>(product, (const int8_t*)to, rows, padded, padded, words * Words<Fours>::STEPS,
                       out, outputs, 1, threads);
}

template <class T>
void dispatch(const void* x, const void* w, const void* bias, void* out, const int64_t* sizes,
              int64_t rows, int64_t stride, int64_t threads) {
  if (sizes[5])
    return multiply_rounded((const T*)x, w, (const T*)bias, (T*)out, sizes, rows, stride, threads);
  if (sizes[4] == 8) return multiply_integers<8, T>(x, w, bias, out, sizes, rows, stride, threads);
  multiply_integers<4, T>(x, w, bias, out, sizes, rows, stride, threads);
}

}  // namespace

extern "C" {

// x: [T, I]; bias: [O] or null; out: [T, O], contiguous; w: [O / WIDTH][G][1 + words][WIDTH].
// sizes: I, O, G, words of a group, bits (8 or 4), and 1 if inputs are rounded, too (8 bits, one group).
// rows: T. stride: from row to row of x.
void quantized_linear(const void* x, const void* w, const void* bias, void* out,
                      const int64_t* sizes, int64_t rows, int64_t stride, int64_t threads) {
  dispatch<DTYPE>(x, w, bias, out, sizes, rows, stride, threads);
}

// The outputs of a tile.
int64_t quantized_linear_tile() { return WIDTH; }
}
