// Matrix products of fp32 operands on bf16 tensor cores, as accurate as fp32. Each fp32 factor is
// split into the sum of three bf16 numbers of 8 significant bits each. Of the nine products of two
// such sums, the six largest are computed; the other three are below fp32's precision. (Henry, Tang
// and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
// computations", 2019.) A factor beyond bf16's largest number, 3.39e38, becomes NaN.
#pragma once
#include <cuda/ptx.cuh>

#include <cstring>

namespace fusedseq::cuda {

// Two fp32 factors as three registers of two bf16 each: factor = high + middle + low.
struct Bf16Parts {
  uint32_t high, middle, low;
};

// Rounds two numbers to bf16, subtracts the rounded ones, and returns these as one register.
__device__ __forceinline__ uint32_t split_off_bf16(float& first, float& second) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  uint32_t bits;
  memcpy(&bits, &both, 4);
  first -= __uint_as_float(bits << 16);
  second -= __uint_as_float(bits & 0xffff0000u);
  return bits;
}

__device__ __forceinline__ Bf16Parts bf16_parts(uint32_t first, uint32_t second) {
  float a = __uint_as_float(first);
  float b = __uint_as_float(second);
  Bf16Parts p;
  p.high = split_off_bf16(a, b);
  p.middle = split_off_bf16(a, b);
  p.low = split_off_bf16(a, b);
  return p;
}

// d += a b, where a is 16 x 8 and b is 8 x 8, in fp32.
// Lane l = 4 g + t holds of a: (row g, column 2t), (g + 8, 2t), (g, 2t + 1), (g + 8, 2t + 1); of b:
// (rows 2t and 2t + 1, column g); of d: as in ptx::mma.
__device__ __forceinline__ void fragment_multiply_add(float (&d)[4], const uint32_t (&a)[4],
                                                      const uint32_t (&b)[2], float) {
  const Bf16Parts upper = bf16_parts(a[0], a[2]);
  const Bf16Parts lower = bf16_parts(a[1], a[3]);
  const Bf16Parts right = bf16_parts(b[0], b[1]);
  const uint32_t high[2] = {upper.high, lower.high};
  const uint32_t middle[2] = {upper.middle, lower.middle};
  const uint32_t low[2] = {upper.low, lower.low};

  // The smallest products first. They are summed apart from d, because tensor cores truncate sums:
  // d, the sum over many k-steps, is rounded by the fp32 addition below.
  float sum[4] = {};
  ptx::mma(sum, low, right.high);
  ptx::mma(sum, high, right.low);
  ptx::mma(sum, middle, right.middle);
  ptx::mma(sum, middle, right.high);
  ptx::mma(sum, high, right.middle);
  ptx::mma(sum, high, right.high);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    d[i] += sum[i];
}

// d += a b of bf16 or fp16: ptx::mma.
template <class S>
__device__ __forceinline__ void fragment_multiply_add(float (&d)[4], const uint32_t (&a)[4],
                                                      const uint32_t (&b)[2], S) {
  ptx::mma(d, a, b, S());
}

}  // namespace fusedseq::cuda
