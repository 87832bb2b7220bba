// The arithmetic of the LSTM cell with layer normalization (Ba et al., 2016) for one hidden unit at
// one time step. V is a scalar or a vector of hidden units.
//
//   z = gamma_ih norm(W_ih x) + gamma_hh norm(W_hh h) + b
//   i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o)      g = tanh(z_g)
//   c' = f c + i g      h' = o tanh(gamma_c norm(c') + beta_c)
//
// norm is that of math/layer_norm.h, over the 4H pre-activations of a row and product together, and
// over the H units of c'.
#pragma once
#include "math/layer_norm.h"
#include "math/lstm.h"

namespace fusedseq {

// Returns the gradient of z_o from the gate o, u = tanh(s) with s = gamma_c norm(c') + beta_c, and
// dh, the gradient of h'. On return ds is the gradient of s.
template <class V>
HD V layer_norm_lstm_output_backward(V o, V u, V dh, V& ds) {
  ds = dh * o * dtanh(u);
  return dh * u * dsigmoid(o);
}

// Returns the gradients of z from the activated gates a, the previous cell state c, the gradient
// dc_next of c', and the gradient dz_o. On return dc is the gradient of c.
template <class V>
HD LstmGates<V> layer_norm_lstm_cell_backward(const LstmGates<V>& a, V c, V dc_next, V dz_o,
                                              V& dc) {
  dc = dc_next * a.f;
  return {dc_next * a.g * dsigmoid(a.i), dc_next * c * dsigmoid(a.f), dc_next * a.i * dtanh(a.g),
          dz_o};
}

}  // namespace fusedseq
