// Vectors of floats through GCC's and Clang's vector extension, as wide as one register.
//
// LANES follows what -march allows. A vector wider than the registers would live in memory: GCC
// splits each operation on one, but keeps no accumulator of that type in registers. Loads and
// stores go through memcpy: nothing is aligned.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
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

typedef float f32v __attribute__((vector_size(LANES * 4)));
typedef int32_t i32v __attribute__((vector_size(LANES * 4)));
typedef uint32_t u32v __attribute__((vector_size(LANES * 4)));
typedef uint16_t u16v __attribute__((vector_size(LANES * 2)));

// A bfloat16 is the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

static inline f32v load(const float* p) {
  f32v v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline f32v load(const bf16* p) {
  u16v v;
  memcpy(&v, p, sizeof v);
  return (f32v)(__builtin_convertvector(v, u32v) << 16);
}

static inline void store(float* p, f32v v) { memcpy(p, &v, sizeof v); }

static inline float to_float(float x) { return x; }

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
