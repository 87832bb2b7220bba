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
template <class T>
HD Vec<T> first_lanes(Vec<T> a, int64_t n) {
  if (n >= LANES<T>) return a;
  return select<T>(lane_numbers<T>() < int(n) - typename Vec<T>::Mask{}, a, Vec<T>(T(0)));
}

// The functions of a cell with WHOLE_ROWS: layer_norm_lstm_row.h, layer_norm_gru_row.h.
template <class T, class Cell>
struct WholeRow;

template <class T, class Cell>
struct LayerNormRow {
  static constexpr int GATES = Cell::GATES, SLOTS = Cell::SLOTS;
  static constexpr int Z = 4;  // pre-activations of a hidden unit, whose gradients are terms

  int64_t H, Hp;
  T eps;
  const T* b;        // (Z H,) or null
  const T* vectors;  // (V H,)  gamma_ih and gamma_hh, a part for each slot, then the cell's own
  const T* before;   // (H,)  c before the step, or h of a cell without c; null for zeros
  T* slots;          // (SLOTS, Hp)  the products with W_ih and with W_hh; forward normalizes them
  T* c_after;        // (Hp,)  forward stores c' here; not of a cell without c
  T* statistics;     // (STATISTICS,)  rstd of both products, then the cell's own

  // For a row whose sequence has ended: what is saved becomes zero.
  HD void clear() const {
    memset(slots, 0, SLOTS * Hp * sizeof(T));
    memset(statistics, 0, Cell::STATISTICS * sizeof(T));
  }

 protected:
  static HD Vec<T> square(Vec<T> v) { return v * v; }
  HD T reciprocal_deviation(Vec<T> squares, int64_t count) const {
    return T(1) / std::sqrt(sum(squares) / count + eps);
  }

  HD Vec<T> vector(int part, int64_t j) const {
    return Vec<T>::load(vectors + part * H + j, H - j);
  }
  HD Vec<T> state_before(int64_t j) const {
    return before ? Vec<T>::load(before + j, H - j) : Vec<T>(T(0));
  }

  HD void normalize_products() const {
    statistics[0] = normalize_gates(slots);
    statistics[1] = normalize_gates(slots + GATES * Hp);
  }

  // Normalizes the gates (GATES, Hp) of a product together, and returns their rstd.
  HD T normalize_gates(T* z) const {
    Vec<T> total(T(0)), squares(T(0));
    for (int gate = 0; gate < GATES; ++gate)
      for (int64_t j = 0; j < H; j += LANES<T>)
        total = total + Vec<T>::load(z + gate * Hp + j, H - j);
    const Vec<T> mean(sum(total) / (GATES * H));
    for (int gate = 0; gate < GATES; ++gate)
      for (int64_t j = 0; j < H; j += LANES<T>)
        squares = squares + square(first_lanes(Vec<T>::load(z + gate * Hp + j) - mean, H - j));
    const T rstd = reciprocal_deviation(squares, GATES * H);
    for (int gate = 0; gate < GATES; ++gate)
      for (int64_t j = 0; j < H; j += LANES<T>) {
        T* v = z + gate * Hp + j;
        normalize(Vec<T>::load(v), mean, Vec<T>(rstd)).store(v, H - j);
      }
    return rstd;
  }

  // The pre-activations of the units from j on, from the normalized products.
  HD void pre_activations(int64_t j, Vec<T> (&z)[Z]) const {
    for (int i = 0; i < Z; ++i)
      z[i] = Vec<T>(T(0));
    for (int slot = 0; slot < SLOTS; ++slot) {
      Vec<T>& to = z[Cell::term(slot)];
      to = to + Vec<T>::load(slots + slot * Hp + j, H - j) * vector(slot, j);
    }
    for (int i = 0; i < Z && b; ++i)
      z[i] = z[i] + Vec<T>::load(b + i * H + j, H - j);
  }

  // Sums over a row of the gradients dn of both normalized products, and of dn n.
  struct Sums {
    Vec<T> dn[2] = {Vec<T>(T(0)), Vec<T>(T(0))}, dn_n[2] = {Vec<T>(T(0)), Vec<T>(T(0))};
  };

  // Stores the gradients dz of the pre-activations of the units from j on as terms, and adds them
  // to the sums.
  HD void add(int64_t j, const Vec<T> (&dz)[Z], T* terms, Sums& sums) const {
    for (int i = 0; i < Z; ++i)
      dz[i].store(terms + i * H + j, H - j);
    for (int slot = 0; slot < SLOTS; ++slot) {
      const Vec<T> dn = dz[Cell::term(slot)] * vector(slot, j);
      Vec<T>&total = sums.dn[slot / GATES], &total_n = sums.dn_n[slot / GATES];
      total = total + dn;
      total_n = total_n + dn * Vec<T>::load(slots + slot * Hp + j, H - j);
    }
  }

  // Through the normalization of both products: their gradients (SLOTS, H), from the terms.
  HD void through_products(const Sums& sums, const T* terms, T* dz) const {
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int product = slot / GATES;
      const Vec<T> rstd(statistics[product]);
      const Vec<T> mean_dn(sum(sums.dn[product]) / (GATES * H));
      const Vec<T> mean_dn_n(sum(sums.dn_n[product]) / (GATES * H));
      for (int64_t j = 0; j < H; j += LANES<T>) {
        const int64_t count = H - j;
        const Vec<T> n = Vec<T>::load(slots + slot * Hp + j, count);
        const Vec<T> dn = Vec<T>::load(terms + Cell::term(slot) * H + j, count) * vector(slot, j);
        normalize_backward(n, dn, rstd, mean_dn, mean_dn_n).store(dz + slot * H + j, count);
      }
    }
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
