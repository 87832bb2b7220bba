// The split of (M, D) rows into blocks, and sums over the rows that do not depend on the number of
// threads.
#pragma once
#include "cpu/buffer.h"
#include "cpu/simd/row_arithmetic.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// M rows of D elements in blocks. The blocks depend on M and D alone, so that the sum of the
// blocks' sums, in order, does not depend on the number of threads.
struct RowBlocks {
  int64_t M;
  int64_t size;   // rows in a block
  int64_t count;  // blocks

  RowBlocks(int64_t M, int64_t D)
      : M(M), size(rows_per_block(M, D)), count((M + size - 1) / size) {}

  // At most 256 blocks, so that their sums need little memory. Usually 16 rows; fewer if there are
  // few rows, so that the threads get equal work (an eighth of the rows), but not less work than
  // starting a thread is worth (4096 elements).
  HD static int64_t rows_per_block(int64_t M, int64_t D) {
    if (M > 16 * 256) return (M + 255) / 256;
    const int64_t equal = (M + 7) / 8, worthwhile = 4096 / (D + 1) + 1;
    const int64_t rows = equal > worthwhile ? equal : worthwhile;
    return rows < 16 ? rows : 16;
  }

  // The rows [begin, end) of a block.
  HD int64_t begin(int64_t block) const { return block * size; }
  HD int64_t end(int64_t block) const { return block * size + size < M ? block * size + size : M; }
};

// The sum over the rows of some (M, D) tensor: one sum for each block, then the sum of those.
template <class Real>
class BlockSums {
 public:
  // needed: false if the caller does not want this sum; `of` then returns null.
  BlockSums(const RowBlocks& blocks, int64_t D, bool needed)
      : blocks_(blocks),
        D_(D),
        stride_(round_up<Real>(D)),
        sums_(needed ? blocks.count * stride_ : 0) {}

  // Returns the block's sum (D rounded up to vectors), set to zero, for the caller to add to.
  Real* of(int64_t block) const {
    if (!sums_) return nullptr;
    memset(sums_ + block * stride_, 0, stride_ * sizeof(Real));
    return sums_ + block * stride_;
  }

  // out (D,) = the sum of the blocks' sums, in order. Does nothing if out is null.
  void total(Real* out, cpu::Parallel run) const {
    if (!out) return;
    constexpr int64_t COLUMNS = 512;  // a unit of work
    parallel(run, (D_ + COLUMNS - 1) / COLUMNS, [&](int64_t begin, int64_t end) {
      const int64_t j = begin * COLUMNS, n = (end * COLUMNS < D_ ? end * COLUMNS : D_) - j;
      memset(out + j, 0, n * sizeof(Real));
      for (int64_t block = 0; block < blocks_.count; ++block)
        add_row(sums_ + block * stride_ + j, out + j, n, Real(1));
    });
  }

 private:
  RowBlocks blocks_;
  int64_t D_, stride_;
  Buffer<Real> sums_;  // (blocks, stride)
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
