// What a kernel is called with: tensors, an integer and a number. `native.run` fills them in.

#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

// Strides count elements; the last one is 1. A tensor that is left out has no data and no dims.
template <class T>
struct Tensor {
  T* data;
  int64_t dims;
  const int64_t *shape, *stride;
};

// What the numbers of a cache of e4m3 are multiplied by, of each KV head; of others there are none.
struct Scales {
  const float *keys, *values;

  float key(int64_t head) const { return keys ? keys[head] : 1; }
  float value(int64_t head) const { return values ? values[head] : 1; }
  Scales from(int64_t head) const { return keys ? Scales{keys + head, values + head} : *this; }
};

// Tensors are taken in the order in which Python passes them.
class Arguments {
 public:
  const int64_t threads, window;
  const float scalar;

  // sizes: threads, window; then of each tensor its dims, shape and strides.
  Arguments(void* const* data, const int64_t* sizes, float scalar)
      : threads(sizes[0]), window(sizes[1]), scalar(scalar), data_(data), sizes_(sizes + 2) {}

  template <class T>
  Tensor<T> next() {
    const int64_t dims = *sizes_++;
    const Tensor<T> found{(T*)*data_++, dims, sizes_, sizes_ + dims};
    sizes_ += 2 * dims;
    return found;
  }

  // Of a cache of C: [2, Hkv], of keys and of values.
  template <class C>
  Scales scales() {
    if constexpr (!std::is_same_v<C, fp8>) return {nullptr, nullptr};
    const auto found = next<const float>();
    return {found.data, found.data + found.stride[0]};
  }

 private:
  void* const* data_;
  const int64_t* sizes_;
};

template <class T>
bool lie_alike(const Tensor<T>& a, const Tensor<T>& b) {
  return a.dims == b.dims && std::equal(a.stride, a.stride + a.dims, b.stride);
}

// What this library is compiled for, of which `native.py` tells the compiler: DTYPE, float or bf16,
// and CACHE, fp8 if it attends to caches of e4m3.
#ifndef CACHE
#define CACHE DTYPE
#endif

// Exports a kernel under its name. It returns whether it serves what it was given; if not, it has
// done nothing.
#define EXPORTED(name, ...)                                                      \
  extern "C" bool name(void* const* data, const int64_t* sizes, float scalar) { \
    return name<__VA_ARGS__>({data, sizes, scalar});                             \
  }

#define KERNEL(name) EXPORTED(name, DTYPE)

// Beside a cache of e4m3 the last tensor has the scales of keys and of values.
#define CACHE_KERNEL(name) EXPORTED(name, DTYPE, CACHE)
