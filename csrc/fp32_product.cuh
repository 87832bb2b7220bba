// Products of fp32 on tensor cores, as exact as fp32: a factor is the sum of three numbers of bf16, 8 bits each, and of the nine
// products of two such sums the six larger ones count. "Leveraging the bfloat16 artificial intelligence datatype for
// higher-precision computations", Henry, Tang and Heinecke, 2019. A factor beyond bf16's 3.39e38 makes no number.
#pragma once
#include <ptx.cuh>

namespace fusedseq::cuda {

// Two factors, as registers of two bf16.
struct Parts { uint32_t high, middle, low; };
__device__ __forceinline__ uint32_t cut(float& first, float& second) {  // to what is left of them
  const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
  uint32_t bits;
  memcpy(&bits, &both, 4);
  first -= __uint_as_float(bits << 16), second -= __uint_as_float(bits & 0xffff0000u);
  return bits;
}
__device__ __forceinline__ Parts parts(uint32_t first, uint32_t second) {
  float a = __uint_as_float(first), b = __uint_as_float(second);
  Parts p;
  p.high = cut(a, b), p.middle = cut(a, b), p.low = cut(a, b);
  return p;
}

// d += a b for a 16 x 8, b 8 x 8 of fp32. Lane l = 4 g + t has a: (row g, column 2t), (g + 8, 2t), (g, 2t+1), (g + 8, 2t+1)
// b: (rows 2t 2t+1, column g)    d: as of ptx::mma. Tensor cores cut off sums: those of more than one step are rounded here.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float) {
  const Parts upper = parts(a[0], a[2]), lower = parts(a[1], a[3]), right = parts(b[0], b[1]);
  const uint32_t high[2] = {upper.high, lower.high}, middle[2] = {upper.middle, lower.middle}, low[2] = {upper.low, lower.low};
  float sum[4] = {};
  ptx::mma(sum, low, right.high), ptx::mma(sum, high, right.low), ptx::mma(sum, middle, right.middle);
  ptx::mma(sum, middle, right.high), ptx::mma(sum, high, right.middle), ptx::mma(sum, high, right.high);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += sum[i];
}
template <class S> __device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], S) {
  ptx::mma(d, a, b, S());
}

}  // namespace fusedseq::cuda
