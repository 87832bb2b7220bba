// What the cells with layer normalization of their products (math/layer_norm.h) have in common, for
// one row of the batch at one step: the sums over the row, and the gradients of the products.
//
// Variances are computed from centred values. A row of the products is read three times forward,
// and once for each pass backward; it is in the L1 or L2 cache, and the products of the step cost
// more.
#pragma once
#include "cpu/recurrence/zoneout.h"
#include "cpu/simd/elementary_functions.h"
#include "cpu/simd/vec.h"
#include "math/cells.h"
#include "math/layer_norm.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns a with zeros in the lanes from the n-th on.
template <class Real>
HD Vec<Real> first_lanes(Vec<Real> a, int64_t n) {
  if (n >= LANES<Real>) return a;
  return select<Real>(lane_numbers<Real>() < int(n) - typename Vec<Real>::Mask{}, a,
                      Vec<Real>(Real(0)));
}

// The functions of a cell with WHOLE_ROWS: layer_norm_lstm_row.h, layer_norm_gru_row.h.
template <class Real, class Cell>
struct WholeRow;

template <class Real, class Cell>
struct LayerNormRow {
  static constexpr int GATES = Cell::GATES, SLOTS = Cell::SLOTS;
  static constexpr int PRE_ACTIVATIONS =
      4;  // pre-activations of a hidden unit, whose gradients are terms

  int64_t H, Hp;
  Real eps;
  const Real* b;  // (PRE_ACTIVATIONS H,) or null
  const Real*
      vectors;  // (vectors * H,)  gamma_ih and gamma_hh, a part for each slot, then the cell's own
  const Real* before;  // (H,)  c before the step, or h of a cell without c; null for zeros
  Real* slots;         // (SLOTS, Hp)  the products with W_ih and with W_hh; forward normalizes them
  Real* c_after;       // (Hp,)  forward stores c' here; not of a cell without c
  Real* statistics;    // (STATISTICS,)  rstd of both products, then the cell's own

  // For a row whose sequence has ended: what is saved becomes zero.
  HD void clear() const {
    memset(slots, 0, SLOTS * Hp * sizeof(Real));
    memset(statistics, 0, Cell::STATISTICS * sizeof(Real));
  }

 protected:
  static HD Vec<Real> square(Vec<Real> v) { return v * v; }
  HD Real reciprocal_deviation(Vec<Real> squares, int64_t count) const {
    return Real(1) / std::sqrt(sum(squares) / count + eps);
  }

  HD Vec<Real> vector(int part, int64_t j) const {
    return Vec<Real>::load(vectors + part * H + j, H - j);
  }
  HD Vec<Real> state_before(int64_t j) const {
    return before ? Vec<Real>::load(before + j, H - j) : Vec<Real>(Real(0));
  }

  HD void normalize_products() const {
    statistics[0] = normalize_gates(slots);
    statistics[1] = normalize_gates(slots + GATES * Hp);
  }

  // Normalizes the gates (GATES, Hp) of a product together, and returns their rstd.
  HD Real normalize_gates(Real* z) const {
    Vec<Real> total(Real(0)), squares(Real(0));
    for (int gate = 0; gate < GATES; ++gate)
      for (int64_t j = 0; j < H; j += LANES<Real>)
        total = total + Vec<Real>::load(z + gate * Hp + j, H - j);
    const Vec<Real> mean(sum(total) / (GATES * H));
    for (int gate = 0; gate < GATES; ++gate)
      for (int64_t j = 0; j < H; j += LANES<Real>)
        squares = squares + square(first_lanes(Vec<Real>::load(z + gate * Hp + j) - mean, H - j));
    const Real rstd = reciprocal_deviation(squares, GATES * H);
    for (int gate = 0; gate < GATES; ++gate)
      for (int64_t j = 0; j < H; j += LANES<Real>) {
        Real* v = z + gate * Hp + j;
        normalize(Vec<Real>::load(v), mean, Vec<Real>(rstd)).store(v, H - j);
      }
    return rstd;
  }

  // The pre-activations of the units from j on, from the normalized products.
  HD void pre_activations(int64_t j, Vec<Real> (&z)[PRE_ACTIVATIONS]) const {
    for (int i = 0; i < PRE_ACTIVATIONS; ++i)
      z[i] = Vec<Real>(Real(0));
    for (int slot = 0; slot < SLOTS; ++slot) {
      Vec<Real>& to = z[Cell::term(slot)];
      to = to + Vec<Real>::load(slots + slot * Hp + j, H - j) * vector(slot, j);
    }
    for (int i = 0; i < PRE_ACTIVATIONS && b; ++i)
      z[i] = z[i] + Vec<Real>::load(b + i * H + j, H - j);
  }

  // Sums over a row of the gradients dn of both normalized products, and of dn n.
  struct Sums {
    Vec<Real> dn[2] = {Vec<Real>(Real(0)), Vec<Real>(Real(0))},
              dn_n[2] = {Vec<Real>(Real(0)), Vec<Real>(Real(0))};
  };

  // Stores the gradients dz of the pre-activations of the units from j on as terms, and adds them
  // to the sums.
  HD void add(int64_t j, const Vec<Real> (&dz)[PRE_ACTIVATIONS], Real* terms, Sums& sums) const {
    for (int i = 0; i < PRE_ACTIVATIONS; ++i)
      dz[i].store(terms + i * H + j, H - j);
    for (int slot = 0; slot < SLOTS; ++slot) {
      const Vec<Real> dn = dz[Cell::term(slot)] * vector(slot, j);
      Vec<Real>&total = sums.dn[slot / GATES], &total_n = sums.dn_n[slot / GATES];
      total = total + dn;
      total_n = total_n + dn * Vec<Real>::load(slots + slot * Hp + j, H - j);
    }
  }

  // Through the normalization of both products: their gradients (SLOTS, H), from the terms.
  HD void through_products(const Sums& sums, const Real* terms, Real* dz) const {
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int product = slot / GATES;
      const Vec<Real> rstd(statistics[product]);
      const Vec<Real> mean_dn(sum(sums.dn[product]) / (GATES * H));
      const Vec<Real> mean_dn_n(sum(sums.dn_n[product]) / (GATES * H));
      for (int64_t j = 0; j < H; j += LANES<Real>) {
        const int64_t count = H - j;
        const Vec<Real> n = Vec<Real>::load(slots + slot * Hp + j, count);
        const Vec<Real> dn =
            Vec<Real>::load(terms + Cell::term(slot) * H + j, count) * vector(slot, j);
        normalize_backward(n, dn, rstd, mean_dn, mean_dn_n).store(dz + slot * H + j, count);
      }
    }
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
