// The arithmetic of the LSTM cell with layer normalization (Ba et al., 2016) for one hidden unit at
// one time step. V is a scalar or a vector of hidden units.
//
//   z = gamma_ih norm(W_ih x) + gamma_hh norm(W_hh h) + b
//   i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o)      g = tanh(z_g)
//   c' = f c + i g      h' = o tanh(gamma_c norm(c') + beta_c)
//
// norm(v) = (v - mean(v)) rstd(v), over the 4H pre-activations of a row together, and over the H
// units of c'. The sums over rows are those of cpu/recurrence/layer_norm_lstm_row.h.
#pragma once
#include "math/lstm.h"

namespace fusedseq {

template <class V>
HD V normalize(V v, V mean, V rstd) {
  return (v - mean) * rstd;
}

// Returns the gradient of v from n = normalize(v) and its gradient dn. The means are those of dn
// and of dn n over the units that are normalized together.
template <class V>
HD V normalize_backward(V n, V dn, V rstd, V mean_dn, V mean_dn_n) {
  return rstd * (dn - mean_dn - n * mean_dn_n);
}

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
