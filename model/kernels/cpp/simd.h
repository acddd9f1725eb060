// Vectors of 16 floats through GCC's and Clang's vector extension.
//
// The compiler lowers them to what -march allows, from one AVX512 register to four SSE ones, so
// there is one source and no intrinsics. Loads and stores go through memcpy: nothing is aligned.

#pragma once

#include <cstdint>
#include <cstring>

constexpr int LANES = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

// A bfloat16 is the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

static inline f32x16 load(const float* p) {
  f32x16 v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline f32x16 load(const bf16* p) {
  u16x16 v;
  memcpy(&v, p, sizeof v);
  return (f32x16)(__builtin_convertvector(v, u32x16) << 16);
}

static inline void store(float* p, f32x16 v) { memcpy(p, &v, sizeof v); }

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
