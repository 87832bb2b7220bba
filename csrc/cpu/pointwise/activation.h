// The activations of a feed-forward layer and their derivatives, on vectors. Each is a struct with
// `value(x)`, the activation, and `gradient(x, dy)`, the gradient of x from that of the activation.
// Both follow torch's own for NaN, infinities and numbers whose square overflows.
#pragma once
#include "cpu/simd/elementary_functions.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The standard normal distribution at x: its density e^(-x^2/2) / sqrt(2 pi), and P(X < x).
//
// In float, the tail P(X > |x|) divided by e^(-x^2/2) is a polynomial in t = 1 / (1 + .26 |x|) of
// minimax relative error 6e-8. In double it is libm's erfc, lane by lane (see
// simd/elementary_functions.h).
template <class Real>
struct Normal {
  Vec<Real> density, below;
};
HD Normal<float> normal(Vec<float> x) {
  using V = Vec<float>;
  const V a = V(V::Raw(V::Mask(x.v) & 0x7fffffff));  // |x|
  // Beyond 13.1 the exact e^(-x^2/2) is less than exp_ returns, which a large x would then
  // multiply.
  const V e = select<float>(a.v > V(13.1f).v, V(0.f), exp_(a * a * V(-.5f)));
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
HD Normal<double> normal(Vec<double> x) {
  Normal<double> n;
  for (int i = 0; i < LANES<double>; ++i) {
    n.density.v[i] = ::exp(-.5 * x.v[i] * x.v[i]) * .39894228040143267794;
    n.below.v[i] = .5 * ::erfc(-x.v[i] * .70710678118654752440);
  }
  return n;
}

struct Relu {
  // NaN stays NaN, because it is not less than 0.
  template <class Real>
  HD static Vec<Real> value(Vec<Real> x) {
    return relu(x);
  }
  template <class Real>
  HD static Vec<Real> gradient(Vec<Real> x, Vec<Real> dy) {
    return if_positive(x, dy);
  }
};

struct Tanh {
  template <class Real>
  HD static Vec<Real> value(Vec<Real> x) {
    return tanh_(x);
  }
  template <class Real>
  HD static Vec<Real> gradient(Vec<Real> x, Vec<Real> dy) {
    return dy * dtanh(tanh_(x));
  }
};

// Hendrycks & Gimpel (2016): x P(X < x).
struct Gelu {
  template <class Real>
  HD static Vec<Real> value(Vec<Real> x) {
    return x * normal(x).below;
  }
  template <class Real>
  HD static Vec<Real> gradient(Vec<Real> x, Vec<Real> dy) {
    const auto n = normal(x);
    return dy * (n.below + x * n.density);
  }
};

// Gelu's approximation x (1 + tanh(sqrt(2 / pi) (x + .044715 x^3))) / 2.
struct GeluTanh {
  static constexpr double ROOT = .79788456080286535588;  // sqrt(2 / pi)
  static constexpr double CUBE = .044715;
  template <class Real>
  HD static Vec<Real> inner(Vec<Real> x) {
    return tanh_(Vec<Real>(Real(ROOT)) * (x + Vec<Real>(Real(CUBE)) * x * x * x));
  }
  template <class Real>
  HD static Vec<Real> value(Vec<Real> x) {
    return Vec<Real>(Real(.5)) * x * (1.f + inner(x));
  }
  template <class Real>
  HD static Vec<Real> gradient(Vec<Real> x, Vec<Real> dy) {
    const Vec<Real> y = inner(x);
    const Vec<Real> slope_of_inner =
        Vec<Real>(Real(ROOT)) * (1.f + Vec<Real>(Real(3 * CUBE)) * x * x);
    return dy * Vec<Real>(Real(.5)) * (1.f + y + x * dtanh(y) * slope_of_inner);
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
