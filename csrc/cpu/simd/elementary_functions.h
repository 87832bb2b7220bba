// exp, log, sigmoid and tanh of vectors. The float versions are polynomials with an error of about
// 1 ulp. In double precision accuracy matters more than speed: those call libm, lane by lane.
#pragma once
#include <initializer_list>

#include "cpu/simd/vec.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// exp(x) = 2^n exp(r) with x = n ln 2 + r; exp(r) is a polynomial of minimax error 3e-9. x is
// clamped to [-87, 88], where the result is a normal number. NaN stays NaN.
HD Vec<float> exp_(Vec<float> x) {
  using V = Vec<float>;
  x = max_(V(-87.f), min_(V(88.f), x));

  // n = x / ln 2 rounded to an integer: adding 1.5 * 2^23 leaves the integer in the low bits. ln 2
  // is subtracted in two parts, so that r is precise.
  const V magic(12582912.f);
  const V shifted = x * V(1.44269504f) + magic;
  const V n = shifted - magic;
  const V r = x - n * V(0.693145752f) - n * V(1.42860677e-6f);

  V q = V(1.395048810e-03f);
  q = q * r + V(8.368887678e-03f);
  q = q * r + V(4.166620585e-02f);
  q = q * r + V(1.666651885e-01f);
  q = q * r + V(5.000000095e-01f);
  q = q * r * r + r + V(1.f);

  // 2^n is built from its exponent bits.
  const V::Mask exponent = (V::Mask(shifted.v) + 127) << 23;
  return q * V(V::Raw(exponent));
}

HD Vec<float> sigmoid(Vec<float> x) {
  return 1.f / (1.f + exp_(0.f - x));
}

// For |x| < .625 a polynomial in x^2 of minimax error 4e-9 for (tanh(x)/x - 1) / x^2, else
// 1 - 2 / (exp(2 |x|) + 1). The sign bit is removed first and restored at the end.
HD Vec<float> tanh_(Vec<float> x) {
  using V = Vec<float>;
  const V::Mask sign = V::Mask(x.v) & V::Mask(V(-0.f).v);
  const V a = V(V::Raw(V::Mask(x.v) ^ sign)), u = x * x;
  V small = V(-5.717044510e-03f);
  small = small * u + V(2.065058678e-02f);
  small = small * u + V(-5.374349792e-02f);
  small = small * u + V(1.333149128e-01f);
  small = small * u + V(-3.333328393e-01f);
  small = small * u * a + a;
  const V large = 1.f - 2.f / (exp_(a + a) + 1.f);
  const V y = select<float>(a.v < V(.625f).v, small, large);
  return V(V::Raw(V::Mask(y.v) | sign));
}

// log of positive normal numbers: x = 2^n (1 + r) with 1 + r in [sqrt(1/2), sqrt(2)), and a
// polynomial in r of minimax error 8e-10. Of infinity and NaN it is x.
HD Vec<float> log_(Vec<float> x) {
  using V = Vec<float>;
  const V::Mask n = (V::Mask(x.v) - 0x3f3504f3) >> 23;  // 0x3f3504f3 are the bits of sqrt(1/2)
  const V r = V(V::Raw(V::Mask(x.v) - (n << 23))) - V(1.f);
  const V e = V(__builtin_convertvector(n, V::Raw));
  V q = V(6.746627251e-02f);
  for (const float c : {-1.167564824e-01f, 1.188816643e-01f, -1.240558977e-01f, 1.421955187e-01f,
                        -1.666799579e-01f, 2.000211868e-01f, -2.500000960e-01f, 3.333331260e-01f})
    q = q * r + V(c);
  const V square = r * r;
  const V y = e * V(0.693145752f) + (r + (square * r * q + (e * V(1.42860677e-6f) - .5f * square)));
  return select<float>(x.v < V(__builtin_inff()).v, y, x);
}

HD Vec<double> log_(Vec<double> x) {
  for (int i = 0; i < LANES<double>; ++i)
    x.v[i] = ::log(x.v[i]);
  return x;
}
HD Vec<double> exp_(Vec<double> x) {
  for (int i = 0; i < LANES<double>; ++i)
    x.v[i] = ::exp(x.v[i]);
  return x;
}
HD Vec<double> sigmoid(Vec<double> x) {
  for (int i = 0; i < LANES<double>; ++i)
    x.v[i] = fusedseq::sigmoid(double(x.v[i]));
  return x;
}
HD Vec<double> tanh_(Vec<double> x) {
  for (int i = 0; i < LANES<double>; ++i)
    x.v[i] = ::tanh(x.v[i]);
  return x;
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
