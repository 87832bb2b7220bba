// What operators on (M, D) rows share: one row in memory that stays in the cache, and sums over the rows.
#pragma once
#include "pointwise.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class F> void by_type(cpu::Type type, F f) {
  switch (type) {
    case cpu::Type::f32: return f(float());
    case cpu::Type::f64: return f(double());
    case cpu::Type::bf16: return f(bfloat16());
  }
}

// Rows of D in blocks that depend on these numbers alone: a sum over the rows is the sum of the blocks' sums in order, and
// does not depend on the number of threads. At most 256, so that their sums are little memory; of 16 rows, or fewer where
// there are few, so that threads have as much to do as each other, but not of less than a thread's start is worth.
struct RowBlocks {
  int64_t M, size, count;
  RowBlocks(int64_t M, int64_t D) : M(M), size(rows(M, D)), count((M + size - 1) / size) {}
  HD static int64_t rows(int64_t M, int64_t D) {
    if (M > 16 * 256) return (M + 255) / 256;
    const int64_t even = (M + 7) / 8, worth = 4096 / (D + 1) + 1, most = even > worth ? even : worth;
    return most < 16 ? most : 16;
  }
  HD int64_t begin(int64_t block) const { return block * size; }
  HD int64_t end(int64_t block) const { return block * size + size < M ? block * size + size : M; }
};

// One sum of rows of D for each block: accumulated in `of(block)`, then put together.
template <class C> class BlockSums {
 public:
  BlockSums(const RowBlocks& blocks, int64_t D, bool wanted)
      : blocks_(blocks), D_(D), stride_(round_up<C>(D)), sums_(wanted ? blocks.count * stride_ : 0) {}
  // Zeroed by the block that fills it; null where not wanted.
  C* of(int64_t block) const {
    if (!sums_) return nullptr;
    memset(sums_ + block * stride_, 0, stride_ * sizeof(C));
    return sums_ + block * stride_;
  }
  void total(C* out, cpu::Parallel run) const {
    if (!out) return;
    constexpr int64_t COLUMNS = 512;
    parallel(run, (D_ + COLUMNS - 1) / COLUMNS, [&](int64_t begin, int64_t end) {
      const int64_t j = begin * COLUMNS, n = (end * COLUMNS < D_ ? end * COLUMNS : D_) - j;
      memset(out + j, 0, n * sizeof(C));
      for (int64_t block = 0; block < blocks_.count; ++block) add_row(sums_ + block * stride_ + j, out + j, n, C(1));
    });
  }

 private:
  RowBlocks blocks_;
  int64_t D_, stride_;
  Buffer<C> sums_;
};

// The rows of a result, each written where it belongs or, of one larger than the caches, beside it first and from there past
// them. Null where the result is not wanted.
template <class S> class ResultRows {
 public:
  ResultRows(void* result, int64_t M, int64_t D)
      : result_(static_cast<S*>(result)), D_(D), staged_(result && past_caches<S>(M * D) ? D : 0) {}
  ~ResultRows() { stream_fence(); }
  S* row(int64_t m) const { return staged_ ? staged_ : result_ ? result_ + m * D_ : nullptr; }
  void written(int64_t m) const {
    if (staged_) stream_row((const S*)staged_, result_ + m * D_, D_);
  }

 private:
  S* result_;
  int64_t D_;
  Buffer<S> staged_;
};

// The row's mask, all ones where kept; nothing to make where there is no dropout.
HD void row_mask(const cpu::Mask& mask, int64_t m, int64_t D, uint32_t* keep) {
  if (mask.threshold) mask_values<uint32_t>(mask, m, D, 0, D, ~0u, 0u, keep);
}
// y = dropout(x) for a row whose mask `row_mask` made.
template <class S, class O> HD void drop_row(const cpu::Mask& mask, const uint32_t* keep, const S* x, O* y, int64_t D) {
  using C = typename Compute<S>::type;
  if (mask.threshold) return drop(x, y, keep, D, C(mask.scale));
  for (int64_t j = 0; j < D; j += LANES<C>) store_up_to<O>(y + j, load_up_to(x + j, D - j), D - j);
}

template <class C> HD C sum_lanes(Vec<C> v) {
  C sum = 0;
  for (int i = 0; i < LANES<C>; ++i) sum += v.v[i];
  return sum;
}

// The sum of f(j), vectors from element j on, over a row of D; two chains, for one alone waits on its own latency.
template <class C, class F> HD C sum_row(int64_t D, F f) {
  Vec<C> even(C(0)), odd(C(0));
  int64_t j = 0;
  for (; j + LANES<C> < D; j += 2 * LANES<C>) even = even + f(j), odd = odd + f(j + LANES<C>);
  if (j < D) even = even + f(j);
  return sum_lanes(even + odd);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
