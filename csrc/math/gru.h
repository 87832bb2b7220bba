// The gated recurrent unit (Cho et al., 2014) of one hidden unit at one time step, in the form of
// torch.nn.GRU and cuDNN, whose reset gate multiplies the product with W_hh and not its operand. V
// is a scalar or a vector of hidden units.
//
//   r, z = sigmoid(z_r), sigmoid(z_z)      n = tanh(z_n + r q)      h' = (1 - z) n + z h
//
// z_n is the new gate's part of W_ih x + b_ih, and q that of W_hh h + b_hh.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

template <class V>
struct GruGates {
  V r, z, n, q;
};

// Applies the activation functions to the gates' pre-activations z. q remains what it is.
template <class V>
HD GruGates<V> gru_gates(const GruGates<V>& z) {
  const V r = sigmoid(z.r);
  return {r, sigmoid(z.z), tanh_(z.n + r * z.q), z.q};
}

// Returns h' from the activated gates a and the previous state h.
template <class V>
HD V gru_cell(const GruGates<V>& a, V h) {
  return a.n + a.z * (h - a.n);
}

// Returns the gradients of z_r, z_z, z_n and q from dh, the gradient of h'. On return dh is the
// gradient of the previous state h where it is interpolated; what comes through q is not in it.
template <class V>
HD GruGates<V> gru_cell_backward(const GruGates<V>& a, V h, V& dh) {
  const V dn = dh * (1.f - a.z) * dtanh(a.n);
  const V dz = dh * (h - a.n) * dsigmoid(a.z);
  dh = dh * a.z;
  return {dn * a.q * dsigmoid(a.r), dz, dn, dn * a.r};
}

}  // namespace fusedseq
