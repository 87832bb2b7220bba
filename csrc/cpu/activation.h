// Activations of a feed-forward layer and their derivatives, on vectors.
#pragma once
#include "vec.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The standard normal distribution: its density e^(-x^2/2) / sqrt(2 pi), and P(X < x). The tail beyond |x| over
// e^(-x^2/2) is a polynomial in t = 1 / (1 + .26 |x|), of minimax relative error 6e-8.
struct Normal { Vec<float> density, below; };
HD Normal normal(Vec<float> x) {
  using V = Vec<float>;
  const V a = V(V::Raw(V::Mask(x.v) & 0x7fffffff)), e = exp_(a * a * V(-.5f));
  const V t = 1.f / (1.f + .26f * a);
  V q = V(1.640487657e-02f);
  q = q * t + V(-5.491306289e-02f);
  q = q * t + V(3.893182817e-02f);
  q = q * t + V(8.444174094e-03f);
  q = q * t + V(4.028292702e-02f);
  q = q * t + V(6.427695212e-02f);
  q = q * t + V(8.237852502e-02f);
  q = q * t + V(9.674495838e-02f);
  q = q * t + V(1.037238533e-01f);
  q = q * t + V(1.037249994e-01f);
  const V tail = q * t * e;
  return {e * V(.398942280f), select<float>(x.v < V(0.f).v, tail, 1.f - tail)};
}
struct Normal64 { Vec<double> density, below; };
HD Normal64 normal(Vec<double> x) {  // libm, lane by lane: see exp_
  Normal64 n;
  for (int i = 0; i < LANES<double>; ++i) {
    n.density.v[i] = ::exp(-.5 * x.v[i] * x.v[i]) * .39894228040143267794;
    n.below.v[i] = .5 * ::erfc(-x.v[i] * .70710678118654752440);
  }
  return n;
}

struct Relu {
  template <class T> HD static Vec<T> value(Vec<T> x) { return select<T>(x.v < Vec<T>(T(0)).v, Vec<T>(T(0)), x); }  // NaN stays
  template <class T> HD static Vec<T> slope(Vec<T> x) {
    return select<T>(x.v > Vec<T>(T(0)).v, Vec<T>(T(1)), Vec<T>(T(0)));
  }
};

struct Tanh {
  template <class T> HD static Vec<T> value(Vec<T> x) { return tanh_(x); }
  template <class T> HD static Vec<T> slope(Vec<T> x) { return dtanh(tanh_(x)); }
};

struct Gelu {  // Hendrycks & Gimpel (2016): x P(X < x)
  template <class T> HD static Vec<T> value(Vec<T> x) { return x * normal(x).below; }
  template <class T> HD static Vec<T> slope(Vec<T> x) {
    const auto n = normal(x);
    return n.below + x * n.density;
  }
};

struct GeluTanh {  // x (1 + tanh(sqrt(2 / pi) (x + .044715 x^3))) / 2
  static constexpr double ROOT = .79788456080286535588, CUBE = .044715;
  template <class T> HD static Vec<T> inner(Vec<T> x) {
    return tanh_(Vec<T>(T(ROOT)) * (x + Vec<T>(T(CUBE)) * x * x * x));
  }
  template <class T> HD static Vec<T> value(Vec<T> x) { return Vec<T>(T(.5)) * x * (1.f + inner(x)); }
  template <class T> HD static Vec<T> slope(Vec<T> x) {
    const Vec<T> y = inner(x);
    return Vec<T>(T(.5)) * (1.f + y + x * dtanh(y) * Vec<T>(T(ROOT)) * (1.f + Vec<T>(T(3 * CUBE)) * x * x));
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
