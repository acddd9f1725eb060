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

#include "panels.h"

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
  for (int64_t i = 0; i < steps; i++) row[i] = Words<T>::input_at(x, i, inputs);
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

template <class T>
struct Many {
  static constexpr int P = 4 / sizeof(T), STEPS = Words<T>::STEPS;
  const T *w, *bias;
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
    for (int64_t c = 0; c < count; c++)
      store_column(sums[c], split.rows, bias, (first + c) * WIDTH, outputs, to);
  }
};

template <class T>
void many(const T* x, int64_t rows, int64_t stride, const T* w, const T* bias, T* out,
          const int64_t* sizes, int64_t threads) {
  const int64_t inputs = sizes[0], outputs = sizes[1], tile = sizes[2];
  const int64_t words = sizes[3] / Many<T>::P, per_tile = tile / WIDTH;
  const Many<T> product{w, bias, outputs, tile, words, per_tile};
  multiply_rows<T>(product, x, rows, stride, inputs, words * Many<T>::STEPS, out, outputs, per_tile,
                   threads);
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
void packed_linear(const void* x, const void* w, const void* bias, void* out, const int64_t* sizes,
                   int64_t rows, int64_t stride, int64_t threads) {
  dispatch<DTYPE>(x, w, bias, out, sizes, rows, stride, threads);
}

// w: [O, I], rows `stride` apart; tiles: [O / N][padded I / P][N][P]; sizes: as above.
void pack_linear(const void* w, void* tiles, const int64_t* sizes, int64_t stride,
                 int64_t threads) {
  pack((const DTYPE*)w, stride, (DTYPE*)tiles, sizes, threads);
}

// The outputs of a tile that suits products of many rows best.
int64_t packed_linear_tile() { return std::max<int64_t>(REGISTERS == 32 ? 2 * WIDTH : WIDTH, 16); }

// Whether products of many rows can be had of tiles with this many outputs.
bool packed_linear_takes(int64_t tile) { return tile % WIDTH == 0 && tile / WIDTH <= GROUP; }
}
