// The gradient dW = dz^T x of linear_cross_entropy, computed in blocks of its rows.
//
// Its sums are numbers of the type of computing, Real. Where dW in memory has narrower numbers
// (bfloat16), each sum is rounded once: by the product itself if one product has all rows of x,
// else after the last rows of x have been added.
#pragma once
#include "cpu/arguments/losses.h"
#include "cpu/buffer.h"
#include "cpu/gemm/transposed.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Element: Real or bf16_pair. Gradient: the type of dz.
template <class Real, class Element, class Stored, class Gradient>
class WeightGradient {
 public:
  WeightGradient() = default;
  // chunk: the rows of x whose dz are in memory at the same time. classes: the most rows of dW in a
  // block. Allocates nothing if dW is not needed.
  WeightGradient(const cpu::LinearCrossEntropy<Real, Stored>& l, int64_t chunk, int64_t classes,
                 int parts)
      : l(&l),
        one_chunk(chunk == l.N),
        one_product(ROUNDED && one_chunk && l.N <= ROWS_PER_PASS<Element>),
        classes(classes),
        scratch(l.dW ? scratch_size * parts : 0),
        sums(l.dW && ROUNDED && !one_product ? (one_chunk ? parts * classes : l.V) * l.E : 0) {}

  // Adds the rows [first, last) of x to a block of dW, or writes them if they are the first ones.
  // dz (last - first, .) has their gradients in the columns of the block.
  void add(int64_t part, Range block, int64_t first, int64_t last, Matrix<const Gradient> dz) {
    if (!one_product)
      multiply(part, block, first, last, dz, Matrix<Real>{sums_of(part, block), l->E}, first > 0);
  }

  // Writes a block of dW in its type in memory, after all rows of x have been added. dz has the
  // gradients of the chunk's rows in the columns of the block.
  void finish(int64_t part, Range block, Matrix<const Gradient> dz) {
    if constexpr (ROUNDED) {
      Stored* const dW = l->dW + block.begin * l->E;
      if (one_product) return multiply(part, block, 0, l->N, dz, Matrix<Stored>{dW, l->E}, false);
      const Real* const from = sums_of(part, block);
      for (int64_t i = 0, n = block.size() * l->E; i < n; i += LANES<Real>)
        store_up_to(dW + i, Vec<Real>::load(from + i), n - i);
    }
  }

 private:
  static constexpr bool ROUNDED = !std::is_same<Stored, Real>::value;
  static constexpr int64_t scratch_size =
      (TRANSPOSED_SCRATCH<Element> + LANES<Element> - 1) / LANES<Element> * LANES<Element>;

  const cpu::LinearCrossEntropy<Real, Stored>* l = nullptr;
  bool one_chunk = false, one_product = false;
  int64_t classes = 0;
  Buffer<Element> scratch;  // (parts, scratch_size)  of gemm_transposed
  Buffer<Real> sums;        // (V, E), or if there is one chunk (parts, classes, E)

  // Returns where the sums of a block are.
  Real* sums_of(int64_t part, Range block) {
    if constexpr (ROUNDED)
      return sums + (one_chunk ? part * classes : block.begin) * l->E;
    else
      return l->dW + block.begin * l->E;
  }

  template <class Result>
  void multiply(int64_t part, Range block, int64_t first, int64_t last, Matrix<const Gradient> dz,
                Matrix<Result> to, bool accumulate) {
    gemm_transposed<Element>(last - first, l->E, {0, block.size()}, dz,
                             Matrix<const Stored>{l->x + first * l->E, l->E}, to, accumulate,
                             scratch + part * scratch_size);
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
