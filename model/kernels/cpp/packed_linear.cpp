// The product of one row with a packed weight, at the rate at which memory delivers the weight.
//
// A weight [O, I] lies in tiles as oneDNN packs it: [O / N][I / P][N][P], where P values fill four
// bytes (one float32 or two bfloat16) and N outputs stand side by side; both dimensions are padded
// with zeros. A column block of N outputs is read front to back.
//
// Where a CPU cannot multiply bfloat16, oneDNN keeps such weights transposed: one tile of O outputs
// whose words hold one element. They are read row by row, in stretches of STRETCH outputs.

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

// One vector of packed words times the inputs that they meet.
inline f32x16 products(const float* w, const float* x) { return load(w) * x[0]; }

inline f32x16 products(const bf16* w, const float* x) {
  u32x16 pairs;
  memcpy(&pairs, w, sizeof pairs);
  return (f32x16)(pairs << 16) * x[0] + (f32x16)(pairs & 0xffff0000u) * x[1];
}

// COUNT column blocks of `size` elements each. x: [I], padded; sums: [COUNT * VECTORS * 16].
template <class T, int VECTORS, int64_t AHEAD, int COUNT>
void blocks(const T* w, int64_t size, const float* x, int64_t words, float* sums) {
  constexpr int P = 4 / sizeof(T);
  f32x16 acc[COUNT][VECTORS] = {};
  for (int64_t word = 0; word < words; word++, x += P, w += VECTORS * LANES * P)
    for (int b = 0; b < COUNT; b++)
      for (int v = 0; v < VECTORS; v++) {
        const T* at = w + b * size + v * LANES * P;
        if (AHEAD) __builtin_prefetch((const char*)at + AHEAD);
        acc[b][v] += products(at, x);
      }
  memcpy(sums, acc, sizeof acc);
}

// `count` column blocks, in halves of COUNT and less until none is left.
template <class T, int VECTORS, int64_t AHEAD, int COUNT>
void all_blocks(const T* w, int64_t size, const float* x, int64_t words, int64_t count,
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
  const int64_t words = padded * (int64_t)sizeof(T) / 4;
  constexpr int64_t N = VECTORS * LANES, STREAMS = Reading::STREAMS;
  std::vector<float> wide(padded);
  for (int64_t i = 0; i < inputs; i++) wide[i] = to_float(x[i]);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t first = 0; first < outputs; first += STREAMS * N) {
    float sums[STREAMS * N];
    const int64_t left = outputs - first, n = left < STREAMS * N ? left : STREAMS * N;
    all_blocks<T, VECTORS, Reading::BYTES, STREAMS>(w + first * padded, N * padded, wide.data(),
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

// Outputs in one stretch at most: their sums stay in the first cache, and stretches that are half
// as long, on pages of their own, were read at four fifths of the rate (Intel Cascade Lake).
constexpr int64_t STRETCH = 8192;

// Adds COUNT rows of a transposed weight, each times its input. rows: [COUNT, stride]; sums: [n].
template <class T, int COUNT>
void add_rows(const T* w, int64_t stride, const float* x, int64_t n, float* sums) {
  int64_t o = 0;
  for (; o + LANES <= n; o += LANES) {
    f32x16 acc = load(sums + o);
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

template <class T>
void dispatch(const void* x, const void* w, const void* bias, void* out, const int64_t* sizes,
              int64_t threads) {
  auto call = [&](auto* f) { f((const T*)x, (const T*)w, (const T*)bias, (T*)out, sizes, threads); };
  if (sizes[4] * (int64_t)sizeof(T) < 4) return call(transposed<T>);
  switch (sizes[2] / LANES) {
    case 1: return call(linear_as_read_best<T, 1>);
    case 2: return call(linear_as_read_best<T, 2>);
    case 3: return call(linear_as_read_best<T, 3>);
    case 4: return call(linear_as_read_best<T, 4>);
  }
}

}  // namespace

// x: [I]; bias: [O] or null; out: [O].
// sizes: I, O, N (16, 32, 48 or 64), padded I, P; P is 1 for bfloat16 that is transposed, N then O.
extern "C" {

void packed_linear_float32(const void* x, const void* w, const void* bias, void* out,
                           const int64_t* sizes, int64_t threads) {
  dispatch<float>(x, w, bias, out, sizes, threads);
}

void packed_linear_bfloat16(const void* x, const void* w, const void* bias, void* out,
                            const int64_t* sizes, int64_t threads) {
  dispatch<bf16>(x, w, bias, out, sizes, threads);
}
}
