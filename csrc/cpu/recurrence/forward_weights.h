// The weights of a recurrence's forward pass: their packed copies, and the products with them.
#pragma once
#include <algorithm>

#include "cpu/gemm/dot_products.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/int8_rows.h"
#include "cpu/recurrence/sizes.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class Real, class Element, class Cell>
class ForwardWeights {
 public:
  // What one thread computes.
  struct Own : Share {
    Element* left_copy;  // workspace: a left operand, copied as elements of the products
  };

  // A part's columns of a product: rows of a weight (out, K), from its number `first` on, their
  // packed copy, null where there is none, and their scales, if they have 8 bits.
  struct Weight {
    const void* W;
    int64_t first;
    const Element* packed;
    const float* scale;
  };

  ForwardWeights(const cpu::Recurrence<Real>& r, const Sizes<Real>& s, int parts)
      : r(r),
        s(s),
        in_panels(are_in_panels(r)),
        W_ih(in_panels ? 0 : GATES * packed_size<Element>(s.X, s.H)),
        W_hh(in_panels ? 0 : GATES * packed_size<Element>(s.P, s.H)),
        W_hr(in_panels || !r.W_hr ? 0 : packed_size<Element>(s.H, s.P)),
        panel(packed_size<Element>(std::max({s.X, s.H, s.P, s.rank}), PANEL_COLUMNS<Element>)),
        panels(in_panels ? panel * parts : 0) {
    for (int64_t k = 0; k < s.rounds && !in_panels; ++k) {
      if (first_use(r.A, k) == k)
        A[k] = Buffer<Element>(packed_size<Element>(s.rank ? s.rank : s.in(k), s.out(k)));
      if (s.rank && first_use(r.F, k) == k)
        F[k] = Buffer<Element>(packed_size<Element>(s.in(k), s.rank));
    }
  }

  // Whether each panel of a weight is multiplied as soon as it is packed, while it is in the L2
  // cache, or by dot products without being packed if the rows are few. No weight is packed as a
  // whole then. This is so for a single step, which uses no weight twice, and for few rows with
  // weights in 8 bits, which dot products read faster than packed floats.
  static bool are_in_panels(const cpu::Recurrence<Real>& r) {
    if (r.steps == 1) return r.B <= CHUNK_ROWS<Element>;
    return r.weights == cpu::WeightType::int8 && r.B <= MAX_DOT_ROWS;
  }

  // Packs columns of every weight, unless that is done panel by panel.
  void pack(const Columns& p) {
    if (in_panels) return;
    for (int64_t g = 0; g < GATES; ++g) {
      const int64_t row = g * s.H + p.h.begin;
      pack_weight(r, r.W_ih, row * s.X, 1, s.X, s.X, p.h.size(),
                  W_ih + g * packed_size<Element>(s.X, s.H) + depth<Element>(s.X) * p.h.begin,
                  scale_of(r.W_ih_scale, row));
      pack_weight(r, r.W_hh, row * s.P, 1, s.P, s.P, p.h.size(),
                  W_hh + g * packed_size<Element>(s.P, s.H) + depth<Element>(s.P) * p.h.begin,
                  scale_of(r.W_hh_scale, row));
    }
    if (r.W_hr)
      pack_weight(r, r.W_hr, p.p.begin * s.H, 1, s.H, s.H, p.p.size(),
                  W_hr + depth<Element>(s.H) * p.p.begin);
    for (int64_t k = 0; k < s.rounds; ++k) {
      const Range out = s.on_x(k) ? p.x : p.h;
      const int64_t K = s.rank ? s.rank : s.in(k);
      if (first_use(r.A, k) == k)
        pack_weight(r, r.A[k], out.begin * K, 1, K, K, out.size(),
                    A[k] + depth<Element>(K) * out.begin, scale_of(scale_of_A(k), out.begin));
      if (s.rank && first_use(r.F, k) == k)
        pack_weight(r, r.F[k], p.r.begin * s.in(k), 1, s.in(k), s.in(k), p.r.size(),
                    F[k] + depth<Element>(s.in(k)) * p.r.begin, scale_of(scale_of_F(k), p.r.begin));
    }
  }

  // The part's columns of one gate's weight, of W_ih or of W_hh.
  Weight of_x(int gate, const Own& p) const {
    const int64_t j = p.own.h.begin;
    return weight(r.W_ih, s.X, gate * s.H + j, W_ih + gate * packed_size<Element>(s.X, s.H), j,
                  r.W_ih_scale);
  }
  Weight of_h(int gate, const Own& p) const {
    const int64_t j = p.own.h.begin;
    return weight(r.W_hh, s.P, gate * s.H + j, W_hh + gate * packed_size<Element>(s.P, s.H), j,
                  r.W_hh_scale);
  }
  // The part's columns of the projection.
  Weight of_projection(const Own& p) const {
    return weight(r.W_hr, s.H, p.own.p.begin, W_hr, p.own.p.begin, nullptr);
  }
  // The part's columns of the weights that round k multiplies first and last: F and A with a low
  // rank, else A twice.
  Weight last_of_round(const Own& p, int64_t k) const {
    const int64_t j = (s.on_x(k) ? p.own.x : p.own.h).begin;
    return weight(r.A[k], s.rank ? s.rank : s.in(k), j, A[first_use(r.A, k)], j, scale_of_A(k));
  }
  Weight first_of_round(const Own& p, int64_t k) const {
    if (!s.rank) return last_of_round(p, k);
    const int64_t j = p.own.r.begin;
    return weight(r.F[k], s.in(k), j, F[first_use(r.F, k)], j, scale_of_F(k));
  }
  // The weight that the next step multiplies first, if there is one.
  Weight first_of_step(const Own& p) const {
    if (in_panels) return {};
    return s.rounds ? first_of_round(p, 0) : of_h(0, p);
  }

  // C (M, columns) (+)= A (M, K) times the columns of a weight. next: see `gemm`
  void multiply(const Own& p, int64_t M, int64_t K, int64_t columns, LeftOperand<Element> left,
                Weight weight, Output<Real> C, Weight next) const {
    if (!in_panels)
      return gemm_chunk<Element>(M, depth<Element>(K), columns, left, weight.packed, C, nullptr,
                                 next.packed);
    if constexpr (std::is_same<Element, float>::value)
      if (r.weights == cpu::WeightType::int8 && M <= r.int8_rows.most)
        return r.int8_rows.multiply({M, K, columns, left.p, left.stride_m,
                                     static_cast<const int8_t*>(weight.W) + weight.first,
                                     weight.scale, nullptr, C.p, C.ld, C.whole_vectors,
                                     C.accumulate});
    if (M <= MAX_DOT_ROWS && fills_vectors<Element>(K) && are_elements(K))
      return product_of_rows<Element>(M, depth<Element>(K), columns, {left.p, left.stride_m},
                                      {in_memory(weight), depth<Element>(K)}, nullptr, C);
    Element* const own = panels + panel * p.begin;
    for (int64_t n = 0; n < columns; n += PANEL_COLUMNS<Element>) {
      const int64_t after = n + PANEL_COLUMNS<Element>,
                    width = (after < columns ? after : columns) - n;
      const Weight ahead =
          after < columns ? Weight{weight.W, weight.first + after * K, {}, {}} : next;
      pack_weight(r, weight.W, weight.first + n * K, 1, K, K, width, own,
                  scale_of(weight.scale, n));
      gemm_chunk<Element>(M, depth<Element>(K), width, left, own,
                          {C.p + n, C.ld, C.whole_vectors, C.accumulate}, nullptr,
                          in_memory(ahead));
    }
  }
  void multiply(const Own& p, int64_t M, int64_t K, int64_t columns, Matrix<const Real> operand,
                Weight weight, Output<Real> C, Weight next) const {
    each_chunk(M, K, operand, p.left_copy, [&](int64_t m, int64_t rows, LeftOperand<Element> left) {
      multiply(p, rows, K, columns, left, weight,
               {C.p + m * C.ld, C.ld, C.whole_vectors, C.accumulate}, next);
    });
  }

 private:
  static constexpr int GATES = Cell::GATES;

  const cpu::Recurrence<Real>& r;
  const Sizes<Real>& s;
  const bool in_panels;
  Buffer<Element> W_ih;           // packed, (GATES)(X, H)
  Buffer<Element> W_hh;           // packed, (GATES)(P, H)
  Buffer<Element> W_hr;           // packed, (H, P)
  Buffer<Element> A[MAX_ROUNDS];  // packed, (in, out), or (rank, out) with a low rank
  Buffer<Element> F[MAX_ROUNDS];  // packed, (in, rank)
  const int64_t panel;            // the elements of the widest panel
  Buffer<Element> panels;         // (parts, panel)

  // row: the first one    column: its place among those that were packed together
  // scale: that of row 0, or null
  Weight weight(const void* W, int64_t K, int64_t row, const Element* packed, int64_t column,
                const float* scale) const {
    return {W, row * K, in_panels ? nullptr : packed + depth<Element>(K) * column,
            scale_of(scale, row)};
  }
  static const float* scale_of(const float* scale, int64_t row) {
    return scale ? scale + row : nullptr;
  }
  // The scales of round k's weights, or null.
  const float* scale_of_A(int64_t k) const { return r.A_scale ? r.A_scale[k] : nullptr; }
  const float* scale_of_F(int64_t k) const { return r.F_scale ? r.F_scale[k] : nullptr; }

  // Whether a weight's rows of K numbers are rows of the products' elements where they are in
  // memory.
  bool are_elements(int64_t K) const {
    const auto type =
        std::is_same<Element, Real>::value ? cpu::WeightType::full : cpu::WeightType::bf16;
    return r.weights == type && K % NUMBERS<Element> == 0;
  }

  // Where a weight is in memory: null for one of 8 bits, which is not prefetched.
  const Element* in_memory(Weight weight) const {
    if (!weight.W || r.weights == cpu::WeightType::int8) return nullptr;
    const int64_t bytes = r.weights == cpu::WeightType::bf16 ? sizeof(bfloat16) : sizeof(Real);
    return reinterpret_cast<const Element*>(static_cast<const char*>(weight.W) +
                                            weight.first * bytes);
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
