// The GRU cell with layer normalization for one row of the batch at one step: the arithmetic of
// math/gru.h on the normalized products.
#pragma once
#include "cpu/recurrence/layer_norm_row.h"
#include "math/gru.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class Real>
struct WholeRow<Real, LayerNormGruCell> : LayerNormRow<Real, LayerNormGruCell> {
  using Row = LayerNormRow<Real, LayerNormGruCell>;
  using Row::H, Row::state_before;

  // Computes h' (H,), and saves the normalized products and their statistics.
  HD void forward(Real* h) const {
    this->normalize_products();
    for (int64_t j = 0; j < H; j += LANES<Real>)
      gru_cell(gates(j), state_before(j)).store(h + j, H - j);
  }

  // From the gradients dy (H,) and dh of h after the step: the gradients dz (6, H) of the products
  // with W_ih and with W_hh, and what the row adds to the parameters' gradients. On return dh is
  // the gradient of the previous h without what comes through the products.
  // update: see bypass
  HD void backward(const Real* dy, Real* dh, Real*, const Update<Real>& update, Real* dz,
                   Real* terms) const {
    typename Row::Sums sums;
    for (int64_t j = 0; j < H; j += LANES<Real>) {
      Vec<Real> d_h = Vec<Real>::load(dh + j, H - j) + Vec<Real>::load(dy + j, H - j);
      const Vec<Real> past = bypass(update.h, j, d_h);
      const GruGates<Vec<Real>> d = gru_cell_backward(gates(j), state_before(j), d_h);
      (d_h + past).store(dh + j);
      this->add(j, {d.r, d.z, d.n, d.q}, terms, sums);
    }
    this->through_products(sums, terms, dz);
  }

 private:
  // The activated gates of the units from j on.
  HD GruGates<Vec<Real>> gates(int64_t j) const {
    Vec<Real> z[Row::PRE_ACTIVATIONS];
    this->pre_activations(j, z);
    return gru_gates(GruGates<Vec<Real>>{z[0], z[1], z[2], z[3]});
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
