// What the arguments of all CPU kernels have in common. Nothing in this folder depends on torch.
//
// The templates of this folder name types by words:
//   Real      the type of computing, float or double
//   Stored    the type of a tensor's elements in memory. bfloat16 is computed in float
//   Element   what a matrix product multiplies: a Real, or a pair of bfloat16 numbers
//   Function  anything that can be called
//   T         any type of elements, where nothing else is known of it
//   V         a vector, Vec<Real>, in the classes and functions that say so
// A number that is a template argument is named in capitals: ROWS, VECTORS, KEYS. The row length of
// a matrix is `ld`, or ld_x for the matrix x, as in BLAS (leading dimension).
// The enum Type stands for a Stored that is known at run time only.
//
// Tensors are contiguous unless strides are given. A pointer that may be null says so.
#pragma once
#include <cstdint>

#include "math/mask_stream.h"

namespace fusedseq::cpu {

// A parallel loop: splits [0, n) into ranges, calls body(context, begin, end) once for each, and
// runs several ranges at the same time. The kernels rely on that: parts wait for each other.
using Body = void (*)(void* context, int64_t begin, int64_t end);
using Parallel = void (*)(int64_t n, Body body, void* context);

enum class Type { f32, f64, bf16 };

// An element of a bfloat16 tensor: the upper half of a float.
struct bfloat16 {
  uint16_t bits;
};

// A random mask of shape (rows, S) by the rule of math/philox.h.
struct Mask {
  uint64_t seed;
  uint64_t threshold;  // round(p * 2^32); where a kernel makes the mask optional, 0 means none
  double scale;        // the factor of the elements that are kept, 1 / (1 - p)
  MaskStream stream = MaskStream::single;
};

}  // namespace fusedseq::cpu
