// The LSTM cell with layer normalization for one row of the batch at one step: the sums over the
// row, and the arithmetic of math/layer_norm_lstm.h between them.
//
// Variances are computed from centred values. The row is read three times forward and three times
// backward; it is in the L1 or L2 cache, and the products of the step cost more.
#pragma once
#include "cpu/recurrence/zoneout.h"
#include "cpu/simd/elementary_functions.h"
#include "cpu/simd/vec.h"
#include "math/layer_norm_lstm.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns a with zeros in the lanes from the n-th on.
template <class T>
HD Vec<T> first_lanes(Vec<T> a, int64_t n) {
  if (n >= LANES<T>) return a;
  return select<T>(lane_numbers<T>() < int(n) - typename Vec<T>::Mask{}, a, Vec<T>(T(0)));
}

template <class T>
struct LayerNormLstmRow {
  static constexpr int GATES = 4, STATISTICS = 4;
  // Where the parts of `vectors`, and the terms of the parameters' gradients, begin, in units of H.
  static constexpr int GAMMA_IH = 0, GAMMA_HH = 4, GAMMA_C = 8, BETA_C = 9;
  static constexpr int DZ = 0, DGAMMA_C = 4, DBETA_C = 5;

  int64_t H, Hp;
  T eps;
  const T* b;         // (4H,) or null
  const T* vectors;   // (10H,)  gamma_ih, gamma_hh, gamma_c, beta_c
  const T* c_before;  // (H,) or null for zeros
  T* slots;           // (8, Hp)  the products with W_ih and with W_hh; forward normalizes them
  T* c_after;         // (Hp,)  forward stores c' here
  T* statistics;      // (4,)  rstd of both products, mean and rstd of c'

  // Computes h' (H,) and c', and saves the normalized products and the statistics.
  HD void forward(T* h) const {
    statistics[0] = normalize_gates(slots);
    statistics[1] = normalize_gates(slots + GATES * Hp);

    // The gates, and c'. The output gate is stored where h' will be.
    Vec<T> total(T(0));
    for (int64_t j = 0; j < H; j += LANES<T>) {
      const LstmGates<Vec<T>> a = gates(j);
      const Vec<T> c = lstm_cell_c<false>(a, c_at(j));
      c.store(c_after + j);
      a.o.store(h + j, H - j);
      total = total + first_lanes(c, H - j);
    }
    const T mean = sum(total) / H;
    Vec<T> squares(T(0));
    for (int64_t j = 0; j < H; j += LANES<T>)
      squares = squares + square(first_lanes(Vec<T>::load(c_after + j) - Vec<T>(mean), H - j));
    const T rstd = reciprocal_deviation(squares, H);
    statistics[2] = mean;
    statistics[3] = rstd;

    for (int64_t j = 0; j < H; j += LANES<T>) {
      const Vec<T> c = normalize(Vec<T>::load(c_after + j), Vec<T>(mean), Vec<T>(rstd));
      (Vec<T>::load(h + j, H - j) * activated_c(c, j)).store(h + j, H - j);
    }
  }

  // For a row whose sequence has ended: what is saved becomes zero.
  HD void clear() const {
    memset(slots, 0, 2 * GATES * Hp * sizeof(T));
    memset(statistics, 0, STATISTICS * sizeof(T));
  }

  // From the gradients dy (H,) and dh of h after the step, and dc of c: the gradients dz (8, H) of
  // the products with W_ih and with W_hh, dc of the previous c, and what the row adds to the
  // parameters' gradients. On return dh is what bypasses the cell: the rest of the previous h's
  // gradient comes through the products. c' is computed again, as zoneout may have replaced it.
  // update: see bypass
  HD void backward(const T* dy, T* dh, T* dc, const Update<T>& update, T* dz, T* terms) const {
    const Vec<T> zero(T(0)), mean(statistics[2]), rstd(statistics[3]);

    // Through h' into z_o and the normalized c'. dz holds the gates i, f and g meanwhile.
    Vec<T> total(T(0)), total_n(T(0));
    for (int64_t j = 0; j < H; j += LANES<T>) {
      const int64_t n = H - j;
      const LstmGates<Vec<T>> a = gates(j);
      const Vec<T> c = normalize(lstm_cell_c<false>(a, c_at(j)), mean, rstd);
      Vec<T> d_h = Vec<T>::load(dh + j, n) + Vec<T>::load(dy + j, n);
      bypass(update.h, j, d_h).store(dh + j);
      Vec<T> ds;
      const Vec<T> dz_o = layer_norm_lstm_output_backward(a.o, activated_c(c, j), d_h, ds);
      dz_o.store(terms + (DZ + 3) * H + j, n);
      (ds * c).store(terms + DGAMMA_C * H + j, n);
      ds.store(terms + DBETA_C * H + j, n);
      a.i.store(dz + j, n);
      a.f.store(dz + H + j, n);
      a.g.store(dz + 2 * H + j, n);
      const Vec<T> dn = ds * vector(GAMMA_C, j);
      total = total + dn;
      total_n = total_n + dn * c;
    }
    const Vec<T> mean_dn(sum(total) / H), mean_dn_n(sum(total_n) / H);

    // Through c' into the other gates, and the sums over the normalized products.
    Vec<T> x(T(0)), x_n(T(0)), h(T(0)), h_n(T(0));
    for (int64_t j = 0; j < H; j += LANES<T>) {
      const int64_t n = H - j;
      const auto from = [&](const T* p, int gate) {
        return Vec<T>::load(p + gate * H + j, n);
      };
      const LstmGates<Vec<T>> a{from(dz, 0), from(dz, 1), from(dz, 2), zero};
      const Vec<T> c = normalize(lstm_cell_c<false>(a, c_at(j)), mean, rstd);
      const Vec<T> dn = from(terms, DBETA_C) * vector(GAMMA_C, j);
      Vec<T> d_c = Vec<T>::load(dc + j, n), dc_before;
      const Vec<T> past = bypass(update.c, j, d_c);
      const Vec<T> dc_next = d_c + normalize_backward(c, dn, rstd, mean_dn, mean_dn_n);
      const LstmGates<Vec<T>> d =
          layer_norm_lstm_cell_backward(a, c_at(j), dc_next, from(terms, DZ + 3), dc_before);
      (dc_before + past).store(dc + j);
      const Vec<T> of_gates[GATES] = {d.i, d.f, d.g, d.o};
      for (int gate = 0; gate < GATES; ++gate) {
        of_gates[gate].store(terms + (DZ + gate) * H + j, n);
        const Vec<T> dx = of_gates[gate] * vector(GAMMA_IH + gate, j);
        const Vec<T> d_h = of_gates[gate] * vector(GAMMA_HH + gate, j);
        x = x + dx;
        x_n = x_n + dx * Vec<T>::load(slots + gate * Hp + j, n);
        h = h + d_h;
        h_n = h_n + d_h * Vec<T>::load(slots + (GATES + gate) * Hp + j, n);
      }
    }

    // Through the normalization of both products.
    gradient_of_product(0, GAMMA_IH, sum(x), sum(x_n), terms, dz);
    gradient_of_product(1, GAMMA_HH, sum(h), sum(h_n), terms, dz + GATES * H);
  }

 private:
  static HD Vec<T> square(Vec<T> v) { return v * v; }
  HD T reciprocal_deviation(Vec<T> squares, int64_t count) const {
    return T(1) / std::sqrt(sum(squares) / count + eps);
  }

  HD Vec<T> vector(int part, int64_t j) const {
    return Vec<T>::load(vectors + part * H + j, H - j);
  }
  HD Vec<T> c_at(int64_t j) const {
    return c_before ? Vec<T>::load(c_before + j, H - j) : Vec<T>(T(0));
  }
  HD Vec<T> activated_c(Vec<T> c, int64_t j) const {
    return tanh_(c * vector(GAMMA_C, j) + vector(BETA_C, j));
  }

  // Normalizes four gates (4, Hp) together, and returns their rstd.
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

  // The activated gates of the units from j on, from the normalized products.
  HD LstmGates<Vec<T>> gates(int64_t j) const {
    Vec<T> z[GATES];
    for (int gate = 0; gate < GATES; ++gate) {
      const Vec<T> from_x = Vec<T>::load(slots + gate * Hp + j, H - j);
      const Vec<T> from_h = Vec<T>::load(slots + (GATES + gate) * Hp + j, H - j);
      z[gate] = from_x * vector(GAMMA_IH + gate, j) + from_h * vector(GAMMA_HH + gate, j);
      if (b) z[gate] = z[gate] + Vec<T>::load(b + gate * H + j, H - j);
    }
    return lstm_gates(LstmGates<Vec<T>>{z[0], z[1], z[2], z[3]});
  }

  // The gradient dz (4, H) of a product, 0 or 1, from the sums over its gates of dn and dn n.
  HD void gradient_of_product(int product, int gamma, T total, T total_n, const T* terms,
                              T* dz) const {
    const Vec<T> rstd(statistics[product]);
    const Vec<T> mean_dn(total / (GATES * H)), mean_dn_n(total_n / (GATES * H));
    for (int gate = 0; gate < GATES; ++gate)
      for (int64_t j = 0; j < H; j += LANES<T>) {
        const Vec<T> n = Vec<T>::load(slots + (product * GATES + gate) * Hp + j, H - j);
        const Vec<T> dn =
            Vec<T>::load(terms + (DZ + gate) * H + j, H - j) * vector(gamma + gate, j);
        normalize_backward(n, dn, rstd, mean_dn, mean_dn_n).store(dz + gate * H + j, H - j);
      }
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
