// What a kernel is called with: tensors, an integer and a number. `native.run` fills them in.

#pragma once

#include <algorithm>

#include "simd.h"

// Strides count elements; the last one is 1. A tensor that is left out has no data and no dims.
template <class T>
struct Tensor {
  T* data;
  int64_t dims;
  const int64_t *shape, *stride;
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

 private:
  void* const* data_;
  const int64_t* sizes_;
};

template <class T>
bool lie_alike(const Tensor<T>& a, const Tensor<T>& b) {
  return a.dims == b.dims && std::equal(a.stride, a.stride + a.dims, b.stride);
}

// Exports a kernel for both dtypes. It returns whether it serves what it was given; if not, it has
// done nothing.
#define KERNEL(name)                                                                       \
  extern "C" bool name##_float32(void* const* data, const int64_t* sizes, float scalar) {  \
    return name<float>({data, sizes, scalar});                                             \
  }                                                                                        \
  extern "C" bool name##_bfloat16(void* const* data, const int64_t* sizes, float scalar) { \
    return name<bf16>({data, sizes, scalar});                                              \
  }
