// The gradient dW = dz^T x of linear_cross_entropy, computed in blocks of its rows.
//
// Its sums are numbers of the type T. Where it has narrower numbers S in memory (bfloat16), each
// sum is rounded once: by the product itself if one product has all rows of x, else after the last
// rows of x have been added.
#pragma once
#include "cpu/arguments/losses.h"
#include "cpu/buffer.h"
#include "cpu/gemm/transposed.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// E: the elements of the products, dZ: the type of dz.
template <class T, class E, class S, class dZ>
class WeightGradient {
 public:
  WeightGradient() = default;
  // chunk: the rows of x whose dz are in memory at the same time. classes: the most rows of dW in a
  // block. Allocates nothing if dW is not needed.
  WeightGradient(const cpu::LinearCrossEntropy<T, S>& l, int64_t chunk, int64_t classes, int parts)
      : l(&l),
        one_chunk(chunk == l.N),
        one_product(ROUNDED && one_chunk && l.N <= ROWS_PER_PASS<E>),
        classes(classes),
        scratch(l.dW ? scratch_size * parts : 0),
        sums(l.dW && ROUNDED && !one_product ? (one_chunk ? parts * classes : l.V) * l.E : 0) {}

  // Adds the rows [first, last) of x to a block of dW, or writes them if they are the first ones.
  // dz (last - first, .) has their gradients in the columns of the block.
  void add(int64_t part, Range block, int64_t first, int64_t last, Matrix<const dZ> dz) {
    if (!one_product)
      multiply(part, block, first, last, dz, Matrix<T>{sums_of(part, block), l->E}, first > 0);
  }

  // Writes a block of dW in its type in memory, after all rows of x have been added. dz has the
  // gradients of the chunk's rows in the columns of the block.
  void finish(int64_t part, Range block, Matrix<const dZ> dz) {
    if constexpr (ROUNDED) {
      S* const dW = l->dW + block.begin * l->E;
      if (one_product) return multiply(part, block, 0, l->N, dz, Matrix<S>{dW, l->E}, false);
      const T* const from = sums_of(part, block);
      for (int64_t i = 0, n = block.size() * l->E; i < n; i += LANES<T>)
        store_up_to(dW + i, Vec<T>::load(from + i), n - i);
    }
  }

 private:
  static constexpr bool ROUNDED = !std::is_same<S, T>::value;
  static constexpr int64_t scratch_size =
      (TRANSPOSED_SCRATCH<E> + LANES<E> - 1) / LANES<E> * LANES<E>;

  const cpu::LinearCrossEntropy<T, S>* l = nullptr;
  bool one_chunk = false, one_product = false;
  int64_t classes = 0;
  Buffer<E> scratch;  // (parts, scratch_size)  of gemm_transposed
  Buffer<T> sums;     // (V, E), or if there is one chunk (parts, classes, E)

  // Returns where the sums of a block are.
  T* sums_of(int64_t part, Range block) {
    if constexpr (ROUNDED)
      return sums + (one_chunk ? part * classes : block.begin) * l->E;
    else
      return l->dW + block.begin * l->E;
  }

  template <class C>
  void multiply(int64_t part, Range block, int64_t first, int64_t last, Matrix<const dZ> dz,
                Matrix<C> to, bool accumulate) {
    gemm_transposed<E>(last - first, l->E, {0, block.size()}, dz,
                       Matrix<const S>{l->x + first * l->E, l->E}, to, accumulate,
                       scratch + part * scratch_size);
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
