// The LSTM cell with peephole connections (Gers & Schmidhuber, 2000) of one hidden unit at one time
// step. V is a scalar or a vector of hidden units.
//
//   i, f = sigmoid(z_i + p_i c), sigmoid(z_f + p_f c)      g = tanh(z_g)
//   c' = f c + i g      o = sigmoid(z_o + p_o c')          h' = o tanh(c')
#pragma once
#include "math/lstm.h"

namespace fusedseq {

template <class V>
struct Peepholes {
  V i, f, o;
};

// Applies the activation functions to the gates' pre-activations z, which do not include the
// peepholes p, and returns the activated gates; on return c is c'.
template <class V>
HD LstmGates<V> peephole_lstm_cell(const LstmGates<V>& z, const Peepholes<V>& p, V& c) {
  LstmGates<V> a{sigmoid(z.i + p.i * c), sigmoid(z.f + p.f * c), tanh_(z.g), z.o};
  c = lstm_cell_c<false>(a, c);
  a.o = sigmoid(z.o + p.o * c);
  return a;
}

// Returns the gradients of the pre-activations from the activated gates a, the previous cell state
// c, the gradient dh of h' and the gradient dc of c'. On return dc is the gradient of c, and dp are
// the gradients of the peepholes.
template <class V>
HD LstmGates<V> peephole_lstm_cell_backward(const LstmGates<V>& a, V c, const Peepholes<V>& p, V dh,
                                            V& dc, Peepholes<V>& dp) {
  // Through h' and the output gate into c'.
  const V c_next = lstm_cell_c<false>(a, c), tanh_c = tanh_(c_next);
  const V dz_o = dh * tanh_c * dsigmoid(a.o);
  const V dc_next = dc + dh * a.o * dtanh(tanh_c) + dz_o * p.o;

  // Through the other gates into c.
  const V dz_i = dc_next * a.g * dsigmoid(a.i), dz_f = dc_next * c * dsigmoid(a.f);
  dc = dc_next * a.f + dz_i * p.i + dz_f * p.f;
  dp = {dz_i * c, dz_f * c, dz_o * c_next};
  return {dz_i, dz_f, dc_next * a.i * dtanh(a.g), dz_o};
}

}  // namespace fusedseq
