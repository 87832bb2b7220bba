// The LSTM cell with layer normalization for one row of the batch at one step: the sums over the
// row, and the arithmetic of math/layer_norm_lstm.h between them.
#pragma once
#include "cpu/recurrence/layer_norm_row.h"
#include "math/layer_norm_lstm.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class Real>
struct WholeRow<Real, LayerNormLstmCell> : LayerNormRow<Real, LayerNormLstmCell> {
  using Row = LayerNormRow<Real, LayerNormLstmCell>;
  using Row::H, Row::statistics, Row::c_after, Row::state_before, Row::vector;
  // Where the cell's own parts of `vectors`, and of the terms, begin, in units of H.
  static constexpr int GAMMA_C = 8, BETA_C = 9, DGAMMA_C = 4, DBETA_C = 5;

  // Computes h' (H,) and c', and saves the normalized products and the statistics: after those of
  // the products, mean and rstd of c'.
  HD void forward(Real* h) const {
    this->normalize_products();

    // The gates, and c'. The output gate is stored where h' will be.
    Vec<Real> total(Real(0));
    for (int64_t j = 0; j < H; j += LANES<Real>) {
      const LstmGates<Vec<Real>> a = gates(j);
      const Vec<Real> c = lstm_cell_c<false>(a, state_before(j));
      c.store(c_after + j);
      a.o.store(h + j, H - j);
      total = total + first_lanes(c, H - j);
    }
    const Real mean = sum(total) / H;
    Vec<Real> squares(Real(0));
    for (int64_t j = 0; j < H; j += LANES<Real>)
      squares = squares +
                this->square(first_lanes(Vec<Real>::load(c_after + j) - Vec<Real>(mean), H - j));
    const Real rstd = this->reciprocal_deviation(squares, H);
    statistics[2] = mean;
    statistics[3] = rstd;

    for (int64_t j = 0; j < H; j += LANES<Real>) {
      const Vec<Real> c = normalize(Vec<Real>::load(c_after + j), Vec<Real>(mean), Vec<Real>(rstd));
      (Vec<Real>::load(h + j, H - j) * activated_c(c, j)).store(h + j, H - j);
    }
  }

  // From the gradients dy (H,) and dh of h after the step, and dc of c: the gradients dz (8, H) of
  // the products with W_ih and with W_hh, dc of the previous c, and what the row adds to the
  // parameters' gradients. On return dh is what bypasses the cell: the rest of the previous h's
  // gradient comes through the products. c' is computed again, as zoneout may have replaced it.
  // update: see bypass
  HD void backward(const Real* dy, Real* dh, Real* dc, const Update<Real>& update, Real* dz,
                   Real* terms) const {
    const Vec<Real> zero(Real(0)), mean(statistics[2]), rstd(statistics[3]);

    // Through h' into z_o and the normalized c'. dz holds the gates i, f and g meanwhile, and the
    // term of z_o its gradient.
    Vec<Real> total(Real(0)), total_n(Real(0));
    for (int64_t j = 0; j < H; j += LANES<Real>) {
      const int64_t n = H - j;
      const LstmGates<Vec<Real>> a = gates(j);
      const Vec<Real> c = normalize(lstm_cell_c<false>(a, state_before(j)), mean, rstd);
      Vec<Real> d_h = Vec<Real>::load(dh + j, n) + Vec<Real>::load(dy + j, n);
      bypass(update.h, j, d_h).store(dh + j);
      Vec<Real> ds;
      const Vec<Real> dz_o = layer_norm_lstm_output_backward(a.o, activated_c(c, j), d_h, ds);
      dz_o.store(terms + 3 * H + j, n);
      (ds * c).store(terms + DGAMMA_C * H + j, n);
      ds.store(terms + DBETA_C * H + j, n);
      a.i.store(dz + j, n);
      a.f.store(dz + H + j, n);
      a.g.store(dz + 2 * H + j, n);
      const Vec<Real> dn = ds * vector(GAMMA_C, j);
      total = total + dn;
      total_n = total_n + dn * c;
    }
    const Vec<Real> mean_dn(sum(total) / H), mean_dn_n(sum(total_n) / H);

    // Through c' into the other gates.
    typename Row::Sums sums;
    for (int64_t j = 0; j < H; j += LANES<Real>) {
      const int64_t n = H - j;
      const auto from = [&](const Real* p, int part) {
        return Vec<Real>::load(p + part * H + j, n);
      };
      const LstmGates<Vec<Real>> a{from(dz, 0), from(dz, 1), from(dz, 2), zero};
      const Vec<Real> c = normalize(lstm_cell_c<false>(a, state_before(j)), mean, rstd);
      const Vec<Real> dn = from(terms, DBETA_C) * vector(GAMMA_C, j);
      Vec<Real> d_c = Vec<Real>::load(dc + j, n), dc_before;
      const Vec<Real> past = bypass(update.c, j, d_c);
      const Vec<Real> dc_next = d_c + normalize_backward(c, dn, rstd, mean_dn, mean_dn_n);
      const LstmGates<Vec<Real>> d =
          layer_norm_lstm_cell_backward(a, state_before(j), dc_next, from(terms, 3), dc_before);
      (dc_before + past).store(dc + j);
      this->add(j, {d.i, d.f, d.g, d.o}, terms, sums);
    }
    this->through_products(sums, terms, dz);
  }

 private:
  HD Vec<Real> activated_c(Vec<Real> c, int64_t j) const {
    return tanh_(c * vector(GAMMA_C, j) + vector(BETA_C, j));
  }

  // The activated gates of the units from j on.
  HD LstmGates<Vec<Real>> gates(int64_t j) const {
    Vec<Real> z[Row::PRE_ACTIVATIONS];
    this->pre_activations(j, z);
    return lstm_gates(LstmGates<Vec<Real>>{z[0], z[1], z[2], z[3]});
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
