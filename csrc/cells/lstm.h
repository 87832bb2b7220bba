// The LSTM cell (Hochreiter & Schmidhuber, 1997) for one hidden unit, or a vector of them, at one time step.
//
//   i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o)      g = tanh(z_g)
//   c' = f c + i g                                          h' = o tanh(c')
//
// With `cap`, min(i, 1 - f) stands for i in c' (Melis et al., 2020). Gate order i, f, g, o, as in torch.nn.LSTM.
#pragma once
#include "../host_device.h"

namespace fusedseq {

template <class V> struct LstmGates { V i, f, g, o; };
template <class V> struct LstmState { V h, c; };

template <class V> HD LstmGates<V> lstm_gates(const LstmGates<V>& z) {
  return {sigmoid(z.i), sigmoid(z.f), tanh_(z.g), sigmoid(z.o)};
}

template <bool cap, class V> HD V lstm_cell_c(const LstmGates<V>& a, V c) {
  if constexpr (cap) return a.f * c + min_(a.i, 1.f - a.f) * a.g;
  return a.f * c + a.i * a.g;
}

template <bool cap, class V> HD LstmState<V> lstm_cell(const LstmGates<V>& a, V c) {
  const V c_next = lstm_cell_c<cap>(a, c);
  return {a.o * tanh_(c_next), c_next};
}

// From dh' and dc' to dz; dc becomes the gradient of the incoming c.
template <bool cap, class V> HD LstmGates<V> lstm_cell_backward(const LstmGates<V>& a, V c, V dh, V& dc) {
  const V tanh_c = tanh_(lstm_cell_c<cap>(a, c));
  const V dct = dc + dh * a.o * dtanh(tanh_c);
  dc = dct * a.f;
  V i = a.i, di = dct * a.g, df = dct * c;
  if constexpr (cap) {
    const V slack = 1.f - a.f - a.i;  // > 0: i is the smaller one
    i = min_(a.i, 1.f - a.f);
    df = df - choose(slack, 0.f * di, di);
    di = choose(slack, di, 0.f * di);
  }
  return {di * dsigmoid(a.i), df * dsigmoid(a.f), dct * i * dtanh(a.g), dh * tanh_c * dsigmoid(a.o)};
}

}  // namespace fusedseq
