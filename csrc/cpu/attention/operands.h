// Rows of q, k, v and dout, and the logits of a block of queries, as operands of products.
//
// The elements of the products are numbers, or pairs of bfloat16 numbers (simd/bf16_pair.h). A pair
// stands for two neighbours in the direction of the product's sum. So a matrix has two forms:
// `along`, whose pairs are neighbours in a row, and `across`, whose pairs are neighbours in a
// column. Where an element is a number, both are the matrix itself.
#pragma once
#include "cpu/attention/problem.h"
#include "cpu/gemm/unpacked.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class Stored, class Element>
struct AttentionOperands : AttentionProblem<Stored> {
  using Problem = AttentionProblem<Stored>;
  using Real = RealOf<Element>;
  using Problem::a, Problem::Dp, Problem::Sp, Problem::R, Problem::Rp, Problem::relative;
  static constexpr bool PAIRS = !std::is_same<Element, Real>::value;

  // The length of a row of Dp numbers along, and the elements of it that a product needs.
  const int64_t ld_along = round_up<Element>(depth<Element>(a.D));
  const int64_t D_elements = depth<Element>(a.D);
  // The numbers that staging needs as its workspace.
  const int64_t rotation_size = PAIRS && Problem::rope ? 2 * Dp : 0;
  // The elements of relative_keys across, and along while they are staged.
  const int64_t relative_size = relative ? (R + 1) * ld_along : 0;

  explicit AttentionOperands(const cpu::Attention& call) : Problem{call} {}

  // The addresses of the rows of head n of batch row b in q or dout from i0 on, and of the keys or
  // values of key head g.
  auto query_rows(const void* x, const int64_t* strides, int64_t b, int64_t n, int64_t i0) const {
    const Stored* first = this->row(x, strides, b, n, this->first_query(b) + i0);
    const int64_t stride = strides[2];
    return [=](int64_t i) {
      return first + i * stride;
    };
  }
  auto key_rows(const void* x, const int64_t* strides, int64_t b, int64_t g) const {
    const int64_t first = this->first_key(b);
    return [this, x, strides, b, g, first](int64_t j) {
      return this->key(x, strides, b, g, first + j);
    };
  }

  // Stages the rows row(0), row(1), ... row(n - 1) along, to `to` (n, ld_along); `rotated` by their
  // positions from `position` on. rotation: the workspace.
  template <class Function>
  void stage_along(Function row, int64_t n, int64_t position, bool rotated, Real* rotation,
                   Element* to) const {
    for (int64_t i = 0; i < n; ++i, to += ld_along) {
      if constexpr (!PAIRS) {
        this->stage_row(row(i), position + i, rotated, to);
      } else if (rotated && Problem::rope) {
        this->stage_row(row(i), position + i, true, rotation);
        for (int64_t d = 0; d < ld_along; d += LANES<Element>)
          load_along<Element>(rotation + 2 * d, Dp - 2 * d).store(to + d);
      } else {
        const Stored* x = row(i);
        for (int64_t d = 0; d < ld_along; d += LANES<Element>)
          load_along<Element>(x + 2 * d, a.D - 2 * d).store(to + d);
      }
    }
  }
  // The same across, to `to` (depth(n), Dp).
  template <class Function>
  void stage_across(Function row, int64_t n, int64_t position, bool rotated, Real* rotation,
                    Element* to) const {
    if constexpr (!PAIRS) {
      stage_along(row, n, position, rotated, rotation, to);
    } else {
      for (int64_t i = 0; i < n; i += 2, to += Dp) {
        const int64_t rows = n - i < 2 ? 1 : 2;
        if (rotated && Problem::rope) {
          for (int64_t r = 0; r < rows; ++r)
            this->stage_row(row(i + r), position + i + r, true, rotation + r * Dp);
          for (int64_t d = 0; d < Dp; d += LANES<Real>)
            load_across<Element>(rotation + d, Dp, rows, Dp - d).store(to + d);
        } else {
          const Stored* x = row(i);
          const int64_t to_next = rows > 1 ? row(i + 1) - x : 0;
          for (int64_t d = 0; d < Dp; d += LANES<Real>)
            load_across<Element>(x + d, to_next, rows, a.D - d).store(to + d);
        }
      }
    }
  }
  // Returns the across form of rows that are staged along: these themselves, or in `to`.
  template <class Function>
  const Element* also_across(const Element* along, Function row, int64_t n, int64_t position,
                             bool rotated, Real* rotation, Element* to) const {
    if constexpr (!PAIRS) return along;
    stage_across(row, n, position, rotated, rotation, to);
    return to;
  }

  // Returns queries as the left operand of a product along D: where they are in memory if that is
  // possible, else staged to `staged` (rows, ld_along).
  LeftOperand<Element> left_queries(int64_t b, int64_t n, int64_t i0, int64_t rows, Real* rotation,
                                    Element* staged) const {
    const int64_t stride = a.q_strides[2];
    const bool in_place =
        std::is_same<Stored, Real>::value ? !PAIRS : PAIRS && stride % 2 == 0 && a.D % 2 == 0;
    if (in_place && !Problem::rope)
      return {reinterpret_cast<const Element*>(query_rows(a.q, a.q_strides, b, n, i0)(0)),
              stride / NUMBERS<Element>, 1};
    stage_along(query_rows(a.q, a.q_strides, b, n, i0), rows, i0 + this->offset(b), true, rotation,
                staged);
    return {staged, ld_along, 1};
  }

  // to (ld_along, ld) = the transpose of x (rows, ld_along), staged along; the columns past `rows`
  // are zero up to a whole vector.
  void transpose_rows(const Element* x, int64_t rows, int64_t ld, Element* to) const {
    for (int64_t j = 0; j < rows; j += LANES<Element>)
      for (int64_t d = 0; d < ld_along; d += LANES<Element>) {
        Vec<Element> square[LANES<Element>];
        for (int i = 0; i < LANES<Element>; ++i)
          square[i] = j + i < rows ? Vec<Element>::load(x + (j + i) * ld_along + d)
                                   : Vec<Element>(Element{});
        transpose(square);
        for (int i = 0; i < LANES<Element>; ++i)
          square[i].store(to + (d + i) * ld + j);
      }
  }
  // Stages relative_keys across to `across` (depth(R), Dp) and, transposed, to `columns` (ld_along,
  // Rp). `across` has relative_size elements, which first hold the rows along.
  void stage_relative_keys(Element* across, Element* columns) const {
    if (!relative) return;
    for (int64_t r = 0; r < R; ++r)
      for (int64_t d = 0; d < ld_along; d += LANES<Element>)
        load_along<Element>(relative + r * a.D + NUMBERS<Element> * d, a.D - NUMBERS<Element> * d)
            .store(across + r * ld_along + d);
    transpose_rows(across, R, Rp, columns);
    for (int64_t r = 0; PAIRS && r < R; r += 2)
      for (int64_t d = 0; d < Dp; d += LANES<Real>)
        load_across<Element>(relative + r * a.D + d, a.D, R - r, a.D - d)
            .store(across + r / 2 * Dp + d);
  }

  // Returns x (rows, ld), of which `columns` are used, as the left operand of a product whose sum
  // runs along the rows. Where an element is a pair, the rows are overwritten with pairs. LANES
  // numbers past x may be read.
  LeftOperand<Element> left_along(Real* x, int64_t rows, int64_t ld, int64_t columns) const {
    if constexpr (PAIRS)
      for (int64_t i = 0; i < rows; ++i) {
        Real* row = x + i * ld;
        for (int64_t j = 0; j < depth<Element>(columns); j += LANES<Element>)
          pair_neighbours(Vec<Real>::load(row + 2 * j), Vec<Real>::load(row + 2 * j + LANES<Real>))
              .store(reinterpret_cast<Element*>(row) + j);
      }
    return {reinterpret_cast<const Element*>(x), ld, 1};
  }
  // Returns the transpose of x as the left operand of a product whose sum runs along the columns,
  // of which `rows` are used. Where an element is a pair, `to` (depth(rows), ld) gets the pairs; it
  // may be x.
  LeftOperand<Element> left_across(Real* x, int64_t rows, int64_t ld, int64_t columns,
                                   Real* to) const {
    if constexpr (!PAIRS) return {x, 1, ld};
    for (int64_t i = 0; PAIRS && i < rows; i += 2)
      for (int64_t j = 0; j < columns; j += LANES<Real>)
        load_across<Element>(x + i * ld + j, ld, rows - i, LANES<Real>)
            .store(reinterpret_cast<Element*>(to) + i / 2 * ld + j);
    return {reinterpret_cast<const Element*>(to), 1, ld};
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
