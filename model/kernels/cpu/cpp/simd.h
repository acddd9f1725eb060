// Vectors of floats through GCC's and Clang's vector extension, as wide as one register.
//
// LANES follows what -march allows. A vector wider than the registers would live in memory: GCC
// splits each operation on one, but keeps no accumulator of that type in registers. Loads and
// stores go through memcpy: nothing is aligned.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

// Values up to which a pass over them is one thread's: waking the others takes longer.
constexpr int64_t ALONE = 16384;

typedef float f32v __attribute__((vector_size(LANES * 4)));
typedef int32_t i32v __attribute__((vector_size(LANES * 4)));
typedef uint32_t u32v __attribute__((vector_size(LANES * 4)));
typedef uint16_t u16v __attribute__((vector_size(LANES * 2)));
typedef uint8_t u8v __attribute__((vector_size(LANES)));

// A bfloat16 is the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

// e4m3: a sign, four bits of exponent, three of mantissa; these seven set are no number.
struct fp8 {
  uint8_t bits;
};

static inline f32v load(const float* p) {
  f32v v;
  memcpy(&v, p, sizeof v);
  return v;
}

// GCC 12 widens and narrows a whole register by halves, in five instructions instead of one.
static inline u32v widen(u16v v) {
#if defined(__AVX512F__)
  return (u32v)_mm512_cvtepu16_epi32((__m256i)v);
#else
  return __builtin_convertvector(v, u32v);
#endif
}

static inline u32v widen(u8v v) {
#if defined(__AVX512F__)
  return (u32v)_mm512_cvtepu8_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, u32v);
#endif
}

static inline u8v narrow_to_bytes(u32v v) {
#if defined(__AVX512F__)
  return (u8v)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, u8v);
#endif
}

static inline u16v narrow(u32v v) {
#if defined(__AVX512F__)
  return (u16v)_mm512_cvtepi32_epi16((__m512i)v);
#else
  return __builtin_convertvector(v, u16v);
#endif
}

static inline f32v load(const bf16* p) {
  u16v v;
  memcpy(&v, p, sizeof v);
  return (f32v)(widen(v) << 16);
}

// Below 8 the exponent's bits are zero, and the number is so many times 2^-9.
static inline f32v from_e4m3(u32v codes) {
  const u32v rest = codes & 0x7f, shifted = rest << 20;
  const u32v small = (u32v)((f32v)(shifted + (121u << 23)) - 0x1p-6f);
  const u32v number = rest < 8 ? small : shifted + (120u << 23);
  const u32v found = rest == 0x7f ? u32v{} + 0x7fc00000 : number;
  return (f32v)(found | (codes & 0x80) << 24);
}

// Rounds to nearest, ties to even; cuts off at the largest number. Below 2^-6 a sum rounds, of which
// the last bit is 2^-9.
static inline u32v to_e4m3(f32v v) {
  constexpr float LARGEST = 448.0f, ROUNDS = 0x1p14f;
  const f32v magnitude = (f32v)((u32v)v & 0x7fffffff), largest = f32v{} + LARGEST;
  const f32v kept = magnitude > largest ? largest : magnitude;
  const u32v bits = (u32v)kept;
  const u32v normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120u << 3);
  const u32v small = (u32v)(kept + ROUNDS) - (u32v)(f32v{} + ROUNDS);
  const u32v number = kept < 0x1p-6f ? small : normal;
  return (kept != kept ? u32v{} + 0x7f : number) | ((u32v)v >> 24 & 0x80);
}

static inline f32v load(const fp8* p) {
  u8v v;
  memcpy(&v, p, sizeof v);
  return from_e4m3(widen(v));
}

static inline void store(fp8* p, f32v v) {
  const u8v kept = narrow_to_bytes(to_e4m3(v));
  memcpy(p, &kept, sizeof kept);
}

static inline void store(float* p, f32v v) { memcpy(p, &v, sizeof v); }

static inline float to_float(float x) { return x; }

static inline float to_float(fp8 x) { return from_e4m3(u32v{} + x.bits)[0]; }

static inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline void from_float(float x, float* out) { *out = x; }

// Rounds to nearest, ties to even, as torch does; a NaN stays one.
static inline void from_float(float x, bf16* out) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = x != x ? 0x7fc0 : (uint16_t)rounded;
}

// Values as a T keeps them, in float32; rounding as above.
template <class T>
static inline f32v rounded(f32v v) {
  if constexpr (sizeof(T) == sizeof(float)) return v;
  const u32v bits = (u32v)v, nan = u32v{} + 0x7fc00000;
  const u32v kept = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  return (f32v)(v != v ? nan : kept);
}

static inline void store(bf16* p, f32v v) {
  const u16v kept = narrow((u32v)rounded<bf16>(v) >> 16);
  memcpy(p, &kept, sizeof kept);
}

// The first n values, zeros behind them.
template <class T>
static inline f32v load_part(const T* p, int64_t n) {
  T values[LANES] = {};
  memcpy(values, p, n * sizeof(T));
  return load(values);
}

template <class T>
static inline void store_part(T* p, f32v v, int64_t n) {
  T values[LANES];
  store(values, v);
  memcpy(p, values, n * sizeof(T));
}

static inline f32v add_product(f32v sums, f32v part, float x) { return sums + part * x; }

#if defined(__AVX512BF16__)
// Words are pairs of bfloat16.
static inline f32v add_product(f32v sums, u32v part, uint32_t x) {
  return (f32v)_mm512_dpbf16_ps((__m512)sums, (__m512bh)part, (__m512bh)_mm512_set1_epi32(x));
}
#endif

static inline i32v add_product(i32v sums, i32v part, int32_t x) { return sums + part * x; }

#if defined(__AVX512VNNI__)
// Words are four integers of eight bits each, those of the part without a sign.
static inline i32v add_product(i32v sums, i32v part, uint32_t x) {
  return (i32v)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)part, _mm512_set1_epi32(x));
}
#endif

// e^r for |r| <= ln 2 / 2 (Cephes).
static inline f32v exp_near_zero(f32v r) {
  f32v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

static inline f32v exp_rest(f32v x, f32v n) { return (x - n * 0.693359375f) + n * 2.12194440e-4f; }

// exp of x <= 0: 2^n * e^r. Underflows to 0, keeps a NaN.
static inline f32v exp_of_negative(f32v x) {
#if defined(__AVX512F__)
  const f32v clamped = (f32v)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  const f32v n = (f32v)_mm512_roundscale_ps((__m512)(clamped * 1.44269504f), 0);
  return (f32v)_mm512_scalef_ps((__m512)exp_near_zero(exp_rest(clamped, n)), (__m512)n);
#else
  const f32v lowest = f32v{} - 87.0f;
  const i32v is_tiny = x < lowest;
  const f32v clamped = is_tiny ? lowest : x;
  const i32v n = __builtin_convertvector(clamped * 1.44269504f - 0.5f, i32v);
  const f32v r = exp_rest(clamped, __builtin_convertvector(n, f32v));
  const f32v power = (f32v)((n + 127) << 23);
  const f32v value = is_tiny ? f32v{} : exp_near_zero(r) * power;
  return x != x ? x : value;
#endif
}

// A vector of f(0), f(1) and so on. Written out, for a shuffle by it to be one instruction: a loop
// that fills the vector is not seen through.
template <class F, size_t... J>
static inline i32v by_lane(F f, std::index_sequence<J...>) {
  return i32v{f((int)J)...};
}

template <class F>
static inline i32v by_lane(F f) {
  return by_lane(f, std::make_index_sequence<LANES>());
}

static inline f32v larger(f32v a, f32v b) { return a > b ? a : b; }
static inline f32v plus(f32v a, f32v b) { return a + b; }

// Folds the lanes of a vector into one value by halves.
template <f32v (*COMBINE)(f32v, f32v)>
static inline float fold(f32v v) {
  for (int half = LANES / 2; half; half /= 2) {
    v = COMBINE(v, __builtin_shuffle(v, by_lane([=](int i) { return i ^ half; })));
  }
  return v[0];
}
