// y = x W^T + b and its gradients on the products of this folder, whose rate on some processors is
// twice that of torch's library.
//
// What limits it: for many rows the multiply-add units, for few rows reading W. few_rows.h computes
// y where W need not be packed, gemm.h all others. For at most CHUNK_ROWS rows each panel of W is
// used as soon as it is packed, while it is in the L2 cache, and the next panel is prefetched
// meanwhile.
#pragma once
#include "cpu/arguments/products.h"
#include "cpu/gemm/column_sums.h"
#include "cpu/gemm/few_rows.h"
#include "cpu/gemm/transposed.h"
#include "cpu/gemm/unpacked.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// C (M, columns) = A (M, K) times packed columns + bias, as `gemm`. If C in memory has another type
// than the sums, the sums go through a block. Where C is larger than the caches, streaming stores
// write it, because normal stores would first read each cache line from memory.
template <class Element, class Stored>
void gemm_to(int64_t M, int64_t K, int64_t columns, Matrix<const Stored> A, const Element* packed,
             Matrix<Stored> C, Element* scratch, const RealOf<Element>* bias = nullptr,
             const Element* next = nullptr) {
  if constexpr (std::is_same<Stored, RealOf<Element>>::value && !IN_TILE_REGISTERS<Element>) {
    gemm<Element, Stored>(M, K, columns, A, packed, {C.p, C.ld, false, false}, scratch, bias, next);
  } else {
    const bool streamed = exceeds_caches<Stored>(M * C.ld) &&
                          reinterpret_cast<uintptr_t>(C.p) % 64 == 0 &&
                          C.ld * sizeof(Stored) % 64 == 0;
    each_chunk(M, K, A, scratch, [&](int64_t m, int64_t rows, LeftOperand<Element> left) {
      gemm_in_blocks<Element>(
          rows, depth<Element>(K), columns, left, packed, bias, next,
          [&](int64_t n, int64_t width, const RealOf<Element>* sums, int64_t ld) {
            Stored* const to = C.p + m * C.ld + n;
            if (streamed)
              store_block<true>(rows, width, sums, ld, to, C.ld);
            else
              store_block(rows, width, sums, ld, to, C.ld);
          });
    });
    if (streamed) stream_fence();
  }
}

template <class Element, class Stored>
void linear(const cpu::Linear<Stored>& l, cpu::Parallel run, int threads) {
  using Real = RealOf<Element>;
  Buffer<Real> converted;
  const Real* b;
  if constexpr (std::is_same<Stored, Real>::value) {
    b = l.b;
  } else {
    if (l.b) converted = Buffer<Real>(round_up<Real>(l.N));
    for (int64_t n = 0; l.b && n < l.N; n += LANES<Real>)
      load_up_to(l.b + n, l.N - n).store(converted + n);
    b = converted;
  }

  const FewRows<Element, Stored> few_rows(l.M, l.K, l.x);
  if (few_rows)
    return parallel(run, threads, [&](int64_t begin, int64_t end) {
      const Range own = own_columns<Element>(l.N, begin, end, threads);
      few_rows.multiply(own.size(), l.W + own.begin * l.K, b ? b + own.begin : nullptr,
                        l.y + own.begin, l.N);
    });

  // The workspace: one panel for each part if a chunk has all rows, else W.
  const bool one_chunk = l.M <= CHUNK_ROWS<Element>;
  const int64_t panel = packed_size<Element>(l.K, PANEL_COLUMNS<Element>);
  const int64_t left_size =
      stays_in_place<Element, Stored>(l.K, l.K) ? 0 : left_copy_size<Element, Stored>(l.K);
  Buffer<Element> packed(one_chunk ? panel * threads : packed_size<Element>(l.K, l.N));
  Buffer<Element> scratch(left_size * threads);
  // Columns [n, n_end) of y: packs these rows of W and multiplies. `next` is that of `gemm`.
  const auto columns = [&](int64_t n, int64_t n_end, Element* to, Element* own_scratch,
                           const Element* next) {
    pack(l.W + n * l.K, 1, l.K, l.K, n_end - n, to);
    gemm_to<Element, Stored>(l.M, l.K, n_end - n, {l.x, l.K}, to, {l.y + n, l.N}, own_scratch,
                             b ? b + n : nullptr, next);
  };
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<Element>(l.N, begin, end, threads);
    Element* const own_scratch = scratch + left_size * begin;
    if (!one_chunk)
      return columns(own.begin, own.end, packed + depth<Element>(l.K) * own.begin, own_scratch,
                     nullptr);
    for (int64_t n = own.begin; n < own.end; n += PANEL_COLUMNS<Element>) {
      const int64_t next = n + PANEL_COLUMNS<Element>, n_end = next < own.end ? next : own.end;
      columns(n, n_end, packed + panel * begin, own_scratch,
              as_elements<Element>(l.W + next * l.K));
    }
  });
}

template <class Element, class Stored>
class LinearBackward {
 public:
  LinearBackward(const cpu::Linear<Stored>& l, int parts)
      : l(l),
        parts(parts),
        few(l.M <= CHUNK_ROWS<Element> && (!ELEMENTS_IN_MEMORY || l.K % LANES<Element> == 0)),
        panel(packed_size<Element>(l.N, PANEL_COLUMNS<Element>)),
        left_size(stays_in_place<Element, Stored>(l.N, l.N) ? 0
                                                            : left_copy_size<Element, Stored>(l.N)),
        packed(!l.dx                ? 0
               : !few               ? packed_size<Element>(l.N, l.K)
               : ELEMENTS_IN_MEMORY ? 0
                                    : panel * parts),
        left_copies(l.dx ? left_size * parts : 0),
        sums(l.db ? 2 * round_up<Real>(l.N) : 0),
        scratch(l.dW ? scratch_size * parts : 0),
        dW(l.dW && !SUMS_IN_RESULTS && l.M > ROWS_PER_PASS<Element> ? l.N * l.K : 0) {}

  // Parts [begin, end) of the team.
  void run(int64_t begin, int64_t end) {
    if (l.dx) gradient_of_x(begin, own_columns<Element>(l.K, begin, end, parts));
    if (l.dW) gradient_of_W(begin, {l.N * begin / parts, l.N * end / parts});
    if (l.db) gradient_of_b(own_columns<Element>(l.N, begin, end, parts));
  }

 private:
  using Real = RealOf<Element>;
  // Whether the tensors in memory consist of the products' elements.
  static constexpr bool ELEMENTS_IN_MEMORY = std::is_same<Element, Stored>::value;
  // Whether sums have the type of the results, to which they can be written.
  static constexpr bool SUMS_IN_RESULTS = std::is_same<Stored, Real>::value;
  static constexpr int64_t scratch_size =
      (TRANSPOSED_SCRATCH<Element> + LANES<Element> - 1) / LANES<Element> * LANES<Element>;

  const cpu::Linear<Stored>& l;
  const int parts;
  const bool few;
  const int64_t panel, left_size;  // elements of a panel of W, and of a copied chunk of dy
  Buffer<Element> packed;          // W, or (parts, panel) for few rows that need packing
  Buffer<Element> left_copies;     // (parts, left_size)
  Buffer<Real> sums;               // (2, N)
  Buffer<Element> scratch;         // (parts, scratch_size)  of gemm_transposed
  Buffer<Real> dW;                 // (N, K)  its sums, if they are not complete after one pass

  // dx = dy W: each part computes columns of dx. For few rows W is not packed, or panel by panel.
  void gradient_of_x(int64_t part, Range own) {
    if constexpr (ELEMENTS_IN_MEMORY)
      if (few)
        return product<Real>(l.M, l.N, own.size(), {l.dy, l.N, 1}, {l.W + own.begin, l.K},
                             {l.dx + own.begin, l.K}, false);
    const int64_t step = few ? PANEL_COLUMNS<Element> : own.size();
    for (int64_t k = own.begin; k < own.end; k += step) {
      const int64_t width = own.end - k < step ? own.end - k : step;
      Element* const columns = few ? packed + panel * part : packed + depth<Element>(l.N) * k;
      pack(l.W + k, l.K, 1, l.N, width, columns);
      gemm_to<Element, Stored>(l.M, l.N, width, {l.dy, l.N}, columns, {l.dx + k, l.K},
                               left_copies + left_size * part);
    }
  }

  // dW = dy^T x: each part computes rows of dW.
  void gradient_of_W(int64_t part, Range own) {
    Element* const own_scratch = scratch + scratch_size * part;
    const Matrix<const Stored> dy{l.dy, l.N}, x{l.x, l.K};
    if (dW) {
      gemm_transposed<Element>(l.M, l.K, own, dy, x, Matrix<Real>{dW, l.K}, false, own_scratch);
      store_block(own.size(), l.K, dW + own.begin * l.K, l.K, l.dW + own.begin * l.K, l.K);
    } else {
      gemm_transposed<Element>(l.M, l.K, own, dy, x, Matrix<Stored>{l.dW, l.K}, false, own_scratch);
    }
  }

  // db: the column sums of dy.
  void gradient_of_b(Range own) {
    Real* const block = sums + round_up<Real>(l.N) + own.begin;
    Real* to = sums + own.begin;
    if constexpr (SUMS_IN_RESULTS) to = l.db + own.begin;
    column_sums(l.M, l.dy + own.begin, l.N, own.size(), to, block);
    if constexpr (!SUMS_IN_RESULTS)
      store_block(1, own.size(), (const Real*)to, own.size(), l.db + own.begin, l.N);
  }
};

template <class Element, class Stored>
void linear_backward(const cpu::Linear<Stored>& l, cpu::Parallel run, int threads) {
  LinearBackward<Element, Stored> team(l, threads);
  parallel(run, threads, [&](int64_t begin, int64_t end) { team.run(begin, end); });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
