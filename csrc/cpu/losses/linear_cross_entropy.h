// The cross-entropy of logits z = (x W^T + b) / temperature and its gradients, by blocks of columns
// of the vocabulary. gemm.h computes a block of logits, whose statistics are taken while it is in
// the L2 cache. At most a chunk of the logits is in memory: see MAX_LOGITS_BYTES.
//
//   - Without gradients a block of logits is used for the statistics only.
//   - With gradients the logits of a chunk of rows stay in memory, at most about MAX_LOGITS_BYTES,
//     until their statistics are known, and then become their own gradients dz. Three products;
//     each chunk reads W twice and adds to dW.
//   - Or no logits stay in memory: they are computed a second time for their gradients, and these
//     are in memory for a range of columns, at most about MAX_RANGE_BYTES, which stays in the
//     caches. Four products, but few chunks add to dW. This is faster where a processor multiplies
//     much faster than it reads memory (RECOMPUTING_IS_FASTER), unless all logits take less than
//     MAX_RANGE_BYTES.
//   - A backward that is given the log-sum-exp computes logits once, for ranges of columns too.
//
// Few rows multiply W where it is, as in few_rows.h: packing it would take as long as some of the
// products. Their logits stay in memory.
//
// A result does not depend on the number of parts of the work. The statistics do not, see
// row_statistics.h. dx is a sum over all columns, so it is split by its own columns.
//
// What limits it: the multiply-add units, in the products.
#pragma once
#include "cpu/arguments/losses.h"
#include "cpu/gemm/linear.h"
#include "cpu/losses/logit_gradients.h"
#include "cpu/losses/row_statistics.h"
#include "cpu/losses/weight_gradient.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Element: Real or bf16_pair. Stored: the type of x and W in memory
//
// The gradients dz of a block of logits have the type Gradient, whose numbers the products
// multiply. They replace logits that stay in memory, or are beside them if they are bfloat16
// numbers.
template <class Real, class Element, class Stored>
class CrossEntropy {
 public:
  CrossEntropy(const cpu::LinearCrossEntropy<Real, Stored>& l, int parts)
      : l(l),
        parts(parts),
        gradients(l.dx || l.dW || l.db),
        few_rows(l.N, l.E, l.x),
        reads_W(ELEMENTS_IN_MEMORY && l.N <= CHUNK_ROWS<Element> && l.E % LANES<Element> == 0),
        scale(Real(1 / l.temperature)),
        barrier(parts) {
    choose_schedule();
    allocate_workspaces();
  }

  // Parts [begin, end) of the team. Each part owns columns of the vocabulary; rows are split among
  // the parts where the statistics of all columns are combined, and columns of x for dx.
  void run(int64_t begin, int64_t end) {
    for (int64_t r0 = 0; r0 < l.N; r0 += chunk_rows) {
      const int64_t r1 = r0 + chunk_rows < l.N ? r0 + chunk_rows : l.N, n = r1 - r0;

      // First pass: the statistics of each group of the part's columns.
      if (l.statistics) {
        const Range own = statistics.columns_of(begin, end);
        statistics.begin(begin, own);
        statistics.each_block(own, BLOCK_COLUMNS, [&](Range b) { first_pass(begin, b, r0, r1); });
        barrier.wait(int(end - begin));
      }

      // The statistics of all columns, and from them loss, lse and the gradients' coefficients.
      for (int64_t i = n * begin / parts; i < n * end / parts; ++i) {
        if (l.statistics) statistics.finish(r0 + i, i);
        if (gradients) logit_gradients.begin(r0 + i, i);
      }
      if (!gradients && r1 == l.N) return;
      barrier.wait(int(end - begin));
      if (!gradients) continue;

      // Second pass: the gradients. dx needs dz of the columns of all parts.
      for (int64_t c = 0; c < l.V; c += range_columns) {
        const Range range{c, c + range_columns < l.V ? c + range_columns : l.V};
        each_block(own_columns<Real>(range.size(), begin, end, parts),
                   [&](Range b) { second_pass(begin, {c + b.begin, c + b.end}, c, r0, r1); });
        const bool last = range.end == l.V && r1 == l.N;
        if (!l.dx && last) return;
        barrier.wait(int(end - begin));
        if (!l.dx) continue;
        add_dx(begin, own_columns<Real>(l.E, begin, end, parts), range, r0, r1);
        if (!last) barrier.wait(int(end - begin));
      }
    }
  }

 private:
  // A block of logits is BLOCK_ROWS rows by BLOCK_COLUMNS columns and stays in the L2 cache.
  using Gradient = typename std::conditional<NUMBERS<Element> == 2, bfloat16, Real>::type;
  static constexpr bool GRADIENTS_REPLACE_LOGITS = std::is_same<Gradient, Real>::value;
  // Whether all numbers in memory are elements of the products.
  static constexpr bool ELEMENTS_IN_MEMORY =
      std::is_same<Element, Real>::value && std::is_same<Stored, Real>::value;
  static constexpr int64_t BLOCK_COLUMNS = 512, BLOCK_ROWS = 288;
  // Whether computing logits twice is faster than storing them. Measured with AMX alone: faster for
  // rows of x of 256 numbers, as fast for 400 and 512, slower for 650.
#if defined(__AMX_BF16__)
  static constexpr bool RECOMPUTING_IS_FASTER = NUMBERS<Element> == 2;
#else
  static constexpr bool RECOMPUTING_IS_FASTER = false;
#endif
  static constexpr int64_t MAX_RECOMPUTED_E = 512;
  // Logits that stay in memory: at most so many bytes, but chunks of at least MIN_ROWS rows, so
  // that the three products take longer than reading W and dW, and of at most MAX_ROWS.
  static constexpr int64_t MAX_LOGITS_BYTES = int64_t(160) << 20;
  static constexpr int64_t MIN_ROWS = BLOCK_ROWS / 2, MAX_ROWS = 3 * BLOCK_ROWS;
  // The gradients of a range of columns: at most so many bytes, but at least MIN_BLOCKS blocks,
  // which the parts share. Without gradients a chunk has at most MANY_ROWS, which limits the memory
  // of the statistics.
  static constexpr int64_t MAX_RANGE_BYTES = int64_t(32) << 20, MIN_BLOCKS = 8;
  static constexpr int64_t MANY_ROWS = 14 * BLOCK_ROWS;
  static constexpr int64_t ld_sums = BLOCK_COLUMNS + 16;

  const cpu::LinearCrossEntropy<Real, Stored>& l;
  int parts;
  bool gradients;                     // whether any gradient is needed
  FewRows<Element, Stored> few_rows;  // multiplies by the rows of W where they are
  bool reads_W;                       // whether dx is dz W, with the rows of W where they are
  Real scale;                         // of the logits, 1 / temperature
  bool stores_logits;                 // whether the logits of a chunk stay in memory
  int64_t chunk_rows;
  int64_t range_columns;     // of a range of columns whose gradients dz are in memory
  int64_t ld, ld_dz;         // the row lengths of `logits` and `dlogits`
  Buffer<Real> logits;       // stored: (chunk_rows, ld), else (parts, BLOCK_ROWS, ld)
  Buffer<Gradient> dlogits;  // (chunk_rows, ld_dz) unless they replace the logits
  Buffer<Element> packed;    // (parts, packed_size(E, BLOCK_COLUMNS))  columns of W^T, of a block
  Buffer<Element> packed_rows;  // (BLOCK_COLUMNS, E)  rows of W, whose columns the parts share
  int64_t left_size;            // the elements of a left operand that is copied, see gemm.h
  Buffer<Element> left_copies;  // (parts, left_size)
  Buffer<Real> sums;            // (parts, 2, ld_sums)  of column_sums
  RowStatistics<Real, Stored> statistics;
  LogitGradients<Real, Stored, Gradient> logit_gradients;
  WeightGradient<Real, Element, Stored, Gradient> dW;
  Barrier barrier;

  void choose_schedule() {
    const int64_t row_bytes = (sizeof(Real) + (GRADIENTS_REPLACE_LOGITS ? 0 : sizeof(Gradient))) *
                              leading_dimension<Real>(l.V);
    const bool recomputes =
        RECOMPUTING_IS_FASTER && l.E <= MAX_RECOMPUTED_E && l.N * row_bytes > MAX_RANGE_BYTES;
    stores_logits = gradients && (few_rows || (l.statistics && !recomputes));
    chunk_rows = MANY_ROWS;
    if (stores_logits) {
      const int64_t fitting = MAX_LOGITS_BYTES / row_bytes;
      chunk_rows = fitting < MIN_ROWS ? MIN_ROWS : fitting < MAX_ROWS ? fitting : MAX_ROWS;
    } else if (gradients) {
      chunk_rows = MAX_RANGE_BYTES / int64_t(sizeof(Gradient)) / (MIN_BLOCKS * BLOCK_COLUMNS);
    }
    chunk_rows = chunk_rows / MIN_ROWS * MIN_ROWS;
    // Chunks of equal size, a multiple of MIN_ROWS.
    const int64_t chunks = (l.N + chunk_rows - 1) / chunk_rows;
    chunk_rows = ((l.N + chunks - 1) / chunks + MIN_ROWS - 1) / MIN_ROWS * MIN_ROWS;
    if (chunk_rows > l.N) chunk_rows = l.N;
    range_columns = l.V;
    if (!stores_logits) {
      const int64_t columns =
          MAX_RANGE_BYTES / int64_t(sizeof(Gradient)) / chunk_rows / BLOCK_COLUMNS * BLOCK_COLUMNS;
      if (columns < range_columns) range_columns = columns;
    }
    ld = leading_dimension<Real>(stores_logits ? l.V : BLOCK_COLUMNS);
    ld_dz = stores_logits ? ld : leading_dimension<Gradient>(range_columns);
  }

  void allocate_workspaces() {
    logits = Buffer<Real>(stores_logits ? chunk_rows * ld : parts * BLOCK_ROWS * ld);
    if (gradients && !(stores_logits && GRADIENTS_REPLACE_LOGITS))
      dlogits = Buffer<Gradient>(chunk_rows * ld_dz);
    if (!few_rows) packed = Buffer<Element>(parts * packed_size<Element>(l.E, BLOCK_COLUMNS));
    if (l.dx && !reads_W) packed_rows = Buffer<Element>(packed_size<Element>(BLOCK_COLUMNS, l.E));
    const int64_t of_x = left_copy_size<Element, Stored>(l.E);
    const int64_t of_dz = left_copy_size<Element, Gradient>(BLOCK_COLUMNS);
    left_size = of_x > of_dz ? of_x : of_dz;
    left_copies = Buffer<Element>(parts * left_size);
    if (l.db) sums = Buffer<Real>(parts * 2 * ld_sums);
    statistics = RowStatistics<Real, Stored>(l, chunk_rows, parts);
    if (gradients) logit_gradients = LogitGradients<Real, Stored, Gradient>(l, chunk_rows);
    dW = WeightGradient<Real, Element, Stored, Gradient>(l, chunk_rows, BLOCK_COLUMNS, parts);
  }

  // Calls f with blocks of at most BLOCK_COLUMNS of the columns `own`.
  template <class Function>
  static void each_block(Range own, Function f) {
    for (int64_t c = own.begin; c < own.end; c += BLOCK_COLUMNS)
      f(Range{c, c + BLOCK_COLUMNS < own.end ? c + BLOCK_COLUMNS : own.end});
  }

  // Returns where the logits of a block are, from row `row` of the chunk on.
  Real* logits_of(int64_t part, Range block, int64_t row) {
    return stores_logits ? logits + row * ld + block.begin : logits + part * BLOCK_ROWS * ld;
  }

  Element* packed_of(int64_t part) {
    return packed + part * packed_size<Element>(l.E, BLOCK_COLUMNS);
  }

  void pack_block(int64_t part, Range block) {
    if (!few_rows) pack(l.W + block.begin * l.E, 1, l.E, l.E, block.size(), packed_of(part));
  }

  // z (s1 - s0, ld) = the logits of rows [s0, s1) and of a packed block. The columns that pad a row
  // to whole vectors are set to -infinity, which neither a maximum nor a sum of exp notices.
  const Real* compute_logits(int64_t part, Range block, int64_t s0, int64_t s1, Real* z) {
    const Real* const bias = l.b ? l.b + block.begin : nullptr;
    if (few_rows)
      few_rows.multiply(block.size(), l.W + block.begin * l.E, bias, z, ld);
    else
      gemm<Element, Stored>(s1 - s0, l.E, block.size(), {l.x + s0 * l.E, l.E}, packed_of(part),
                            {z, ld, true, false}, left_copies + part * left_size, bias);
    for (int64_t i = 0; i < s1 - s0; ++i) {
      Real* const row = z + i * ld;
      if (l.temperature != 1)
        for (int64_t j = 0; j < block.size(); j += LANES<Real>)
          (Vec<Real>::load(row + j) * Vec<Real>(scale)).store(row + j);
      for (int64_t j = block.size(); j % LANES<Real>; ++j)
        row[j] = -INFINITE<Real>;
    }
    return z;
  }

  // Logits and statistics of a block of columns for the rows [r0, r1) of a chunk.
  void first_pass(int64_t part, Range block, int64_t r0, int64_t r1) {
    pack_block(part, block);
    for (int64_t s0 = r0; s0 < r1; s0 += BLOCK_ROWS) {
      const int64_t s1 = s0 + BLOCK_ROWS < r1 ? s0 + BLOCK_ROWS : r1;
      const Real* z = compute_logits(part, block, s0, s1, logits_of(part, block, s0 - r0));
      for (int64_t s = s0; s < s1; ++s, z += ld)
        statistics.add(part, z, block, s, s - r0);
    }
  }

  // The gradients dz of the logits of a block of columns, for the rows [r0, r1) of a chunk, and
  // what they contribute to dW and db. The range of the block begins at column c.
  void second_pass(int64_t part, Range block, int64_t c, int64_t r0, int64_t r1) {
    const int64_t n = block.size();
    const bool computes = !(stores_logits && l.statistics);
    if (computes) pack_block(part, block);
    for (int64_t s0 = r0; s0 < r1; s0 += BLOCK_ROWS) {
      const int64_t s1 = s0 + BLOCK_ROWS < r1 ? s0 + BLOCK_ROWS : r1;
      Real* const z = logits_of(part, block, s0 - r0);
      if (computes) compute_logits(part, block, s0, s1, z);
      Gradient* const dz = gradients_of(s0 - r0, block.begin - c);
      for (int64_t i = 0; i < s1 - s0; ++i)
        logit_gradients.differentiate(z + i * ld, dz + i * ld_dz, block, s0 + i, s0 + i - r0);

      // dW += dz^T x and db += the sum of dz, where the first rows of all write and the others add.
      if (l.dW) dW.add(part, block, s0, s1, {dz, ld_dz});
      if (l.db) {
        Real* const total = sums + part * 2 * ld_sums;
        column_sums(s1 - s0, (const Gradient*)dz, ld_dz, n, total, total + ld_sums);
        if (s0 == 0) memset(l.db + block.begin, 0, n * sizeof(Real));
        add_row((const Real*)total, l.db + block.begin, n, Real(1));
      }
    }
    if (l.dW && r1 == l.N) dW.finish(part, block, {gradients_of(0, block.begin - c), ld_dz});
  }

  // Returns where the gradients of a chunk's logits are, from this row and column of a range on.
  Gradient* gradients_of(int64_t row, int64_t column) {
    if constexpr (GRADIENTS_REPLACE_LOGITS)
      if (stores_logits) return logits + row * ld + column;
    return dlogits + row * ld_dz + column;
  }

  // dx = dz W for the columns `own` of x and the rows [r0, r1) of a chunk: the first columns of W
  // write and the others add.
  void add_dx(int64_t part, Range own, Range range, int64_t r0, int64_t r1) {
    if constexpr (ELEMENTS_IN_MEMORY)
      if (reads_W)
        return product<Element>(r1 - r0, range.size(), own.size(), {gradients_of(0, 0), ld_dz, 1},
                                {l.W + range.begin * l.E + own.begin, l.E},
                                {l.dx + r0 * l.E + own.begin, l.E}, range.begin > 0);
    Element* const rows_of_W = packed_rows + depth<Element>(BLOCK_COLUMNS) * own.begin;
    each_block(range, [&](Range block) {
      pack(l.W + block.begin * l.E + own.begin, l.E, 1, block.size(), own.size(), rows_of_W);
      for (int64_t s0 = r0; s0 < r1; s0 += BLOCK_ROWS) {
        const int64_t s1 = s0 + BLOCK_ROWS < r1 ? s0 + BLOCK_ROWS : r1;
        gemm<Element, Gradient>(s1 - s0, block.size(), own.size(),
                                {gradients_of(s0 - r0, block.begin - range.begin), ld_dz},
                                rows_of_W,
                                {l.dx + s0 * l.E + own.begin, l.E, false, block.begin > 0},
                                left_copies + part * left_size);
      }
    });
  }
};

template <class Element, class Real, class Stored>
void linear_cross_entropy(const cpu::LinearCrossEntropy<Real, Stored>& l, cpu::Parallel run,
                          int threads) {
  CrossEntropy<Real, Element, Stored> team(l, threads);
  parallel(run, threads, [&](int64_t begin, int64_t end) { team.run(begin, end); });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
