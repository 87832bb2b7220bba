// The cross-entropy of logits z = (x W^T + b) / temperature and its gradients, by blocks of columns
// of the vocabulary. gemm.h computes a block of logits, whose statistics are taken while it is in
// the L2 cache. The logits of all rows and columns are never in memory at once.
//
//   - Without gradients a block of logits is used for the statistics only.
//   - With gradients the rows are processed in chunks whose logits stay in memory, at most about
//     MAX_LOGITS_BYTES, until their statistics are known, and then become their own gradients dz.
//     Three products; each chunk reads W twice and adds to dW.
//
// Few rows multiply W where it is, as in few_rows.h: packing it would take as long as some of the
// products.
//
// A result does not depend on the number of parts of the work. The columns are divided into groups,
// whose number depends on V alone: a part owns whole groups, each group has its own statistics, and
// these are combined in order. dx is a sum over all columns, so it is split by its own columns.
//
// What limits it: the multiply-add units, in the products.
#pragma once
#include "cpu/arguments/losses.h"
#include "cpu/gemm/linear.h"
#include "cpu/losses/online_statistics.h"
#include "cpu/losses/weight_gradient.h"
#include "cpu/simd/elementary_functions.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// E: the elements of the products, T or bf16_pair. S: the type of x and W in memory
//
// The gradients dz of a block of logits are numbers of the type dZ that the products multiply. They
// replace the logits, or are beside them in memory if they are bfloat16 numbers.
template <class T, class E, class S>
class CrossEntropy {
 public:
  CrossEntropy(const cpu::LinearCrossEntropy<T, S>& l, int parts)
      : l(l),
        parts(parts),
        gradients(l.dx || l.dW || l.db),
        few_rows(l.N, l.E, l.x),
        reads_W(SAME && l.N <= CHUNK<E> && l.E % LANES<E> == 0),
        scale(T(1 / l.temperature)),
        barrier(parts) {
    choose_schedule();
    allocate_workspaces();
  }

  // Parts [begin, end) of the team. Each part owns columns of the vocabulary; rows are split among
  // the parts where the statistics of all columns are combined, and columns of x for dx.
  void run(int64_t begin, int64_t end) {
    const Range own{first_column(begin), first_column(end)};
    for (int64_t r0 = 0; r0 < l.N; r0 += rows) {
      const int64_t r1 = r0 + rows < l.N ? r0 + rows : l.N, n = r1 - r0;

      // First pass: the statistics of each group of the part's columns.
      if (l.statistics) {
        for (int64_t i = own.begin / group * rows; i < (own.end + group - 1) / group * rows; ++i)
          statistics[i] = {LOWEST<T>, 0, 0, 0};
        for (int64_t i = 0; i < n; ++i)
          highest[begin * rows + i] = LOWEST<T>;
        each_block(own, [&](Range block) { first_pass(begin, block, r0, r1); });
        barrier.wait(int(end - begin));
      }

      // The statistics of all columns, and from them loss, lse and the gradients' coefficients.
      for (int64_t i = n * begin / parts; i < n * end / parts; ++i) {
        if (l.statistics) finish_row(r0 + i, i);
        if (gradients) coefficients[i] = row_coefficients(r0 + i);
      }
      if (!gradients && r1 == l.N) return;
      barrier.wait(int(end - begin));
      if (!gradients) continue;

      // Second pass: the gradients. dx needs dz of the columns of all parts.
      each_block(own, [&](Range block) { second_pass(begin, block, r0, r1); });
      if (!l.dx && r1 == l.N) return;
      barrier.wait(int(end - begin));
      if (!l.dx) continue;
      add_dx(begin, own_columns<T>(l.E, begin, end, parts), r0, r1);
      if (r1 < l.N) barrier.wait(int(end - begin));
    }
  }

 private:
  // A block of logits is SUB rows by COLUMNS columns and stays in the L2 cache.
  using dZ = typename std::conditional<NUMBERS<E> == 2, bfloat16, T>::type;
  static constexpr bool REPLACED = std::is_same<dZ, T>::value;
  // Whether all numbers in memory are elements of the products.
  static constexpr bool SAME = std::is_same<E, T>::value && std::is_same<S, T>::value;
  static constexpr int64_t COLUMNS = 512, SUB = 288;
  // Logits that stay in memory: at most so many bytes, but chunks of at least MIN_ROWS rows, so
  // that the three products take longer than reading W and dW. At most MAX_ROWS rows; without
  // gradients MAX_ROWS_OF_STATISTICS, which limits the memory of the statistics.
  static constexpr int64_t MAX_LOGITS_BYTES = int64_t(160) << 20;
  static constexpr int64_t MIN_ROWS = SUB / 2, MAX_ROWS = 3 * SUB;
  static constexpr int64_t MAX_ROWS_OF_STATISTICS = 14 * SUB;
  // The columns are divided into at most MAX_GROUPS groups of at least MIN_GROUP columns.
  static constexpr int64_t MAX_GROUPS = 64, MIN_GROUP = 32;
  static constexpr int64_t ld_sums = COLUMNS + 16;

  // The gradient of a row with respect to its logits before they are divided by the temperature is
  //   target * (P - [the target's column]) + classes * (weights_sum * P - class_weights) + rest * P
  // with P = softmax, that is p * P - classes * class_weights in every column but the target's. In
  // that column P may be near 1, and the differences above are formed before they are added.
  struct Coefficients {
    double target, classes, rest;
    double p(double weights_sum) const { return target + classes * weights_sum + rest; }
  };

  const cpu::LinearCrossEntropy<T, S>& l;
  int parts;
  bool gradients;          // whether any gradient is needed
  FewRows<E, S> few_rows;  // the logits, with the rows of W where they are
  bool reads_W;            // whether dx is dz W, with the rows of W where they are
  T scale;                 // of the logits, 1 / temperature
  int64_t group;           // columns of a group, a multiple of MIN_GROUP
  int64_t rows;            // in a chunk
  int64_t ld;              // the row length of `logits`
  Buffer<T> logits;        // (rows, ld) with gradients, else (parts, SUB, ld)
  Buffer<dZ> dlogits;      // (rows, ld) unless they replace the logits
  Buffer<E> packed;        // (parts, packed_size(E, COLUMNS))  a block's columns of W^T
  Buffer<E> packed_rows;   // (COLUMNS, E)  a block's rows of W, of which each part packs columns
  int64_t left;            // the elements of a converted left operand, see gemm.h
  Buffer<E> lefts;         // (parts, left)
  WeightGradient<T, E, S, dZ> dW;
  Buffer<T> sums;                     // (parts, 2, ld_sums)  of column_sums
  Buffer<T> target_logit;             // (rows,)
  Buffer<T> highest;                  // (parts, rows)  the largest logit of a part's columns so far
  Buffer<Statistics<T>> statistics;   // (groups, rows)
  Buffer<Coefficients> coefficients;  // (rows,)
  Barrier barrier;

  int64_t groups() const { return (l.V + group - 1) / group; }
  // The first column of a part.
  int64_t first_column(int64_t part) const {
    const int64_t column = groups() * part / parts * group;
    return column < l.V ? column : l.V;
  }

  void choose_schedule() {
    const int64_t columns = (l.V + MAX_GROUPS - 1) / MAX_GROUPS;
    group = (columns + MIN_GROUP - 1) / MIN_GROUP * MIN_GROUP;
    rows = MAX_ROWS_OF_STATISTICS;
    if (gradients) {
      const int64_t bytes = sizeof(T) + (REPLACED ? 0 : sizeof(dZ));
      const int64_t fitting = MAX_LOGITS_BYTES / bytes / leading_dimension<T>(l.V);
      rows = fitting < MIN_ROWS ? MIN_ROWS : fitting < MAX_ROWS ? fitting : MAX_ROWS;
      rows = rows / MIN_ROWS * MIN_ROWS;
    }
    // Chunks of equal size, a multiple of MIN_ROWS.
    const int64_t chunks = (l.N + rows - 1) / rows;
    rows = ((l.N + chunks - 1) / chunks + MIN_ROWS - 1) / MIN_ROWS * MIN_ROWS;
    if (rows > l.N) rows = l.N;
    ld = leading_dimension<T>(gradients ? l.V : COLUMNS);
  }

  void allocate_workspaces() {
    logits = Buffer<T>(gradients ? rows * ld : parts * SUB * ld);
    if (gradients && !REPLACED) dlogits = Buffer<dZ>(rows * ld);
    if (!few_rows) packed = Buffer<E>(parts * packed_size<E>(l.E, COLUMNS));
    if (l.dx && !reads_W) packed_rows = Buffer<E>(packed_size<E>(COLUMNS, l.E));
    dW = WeightGradient<T, E, S, dZ>(l, rows, COLUMNS, parts);
    const int64_t of_x = left_size<E, S>(l.E), of_logits = left_size<E, dZ>(COLUMNS);
    left = of_x > of_logits ? of_x : of_logits;
    lefts = Buffer<E>(parts * left);
    if (l.db) sums = Buffer<T>(parts * 2 * ld_sums);
    if (l.statistics) {
      statistics = Buffer<Statistics<T>>(groups() * rows);
      target_logit = Buffer<T>(rows);
      highest = Buffer<T>(parts * rows);
    }
    if (gradients) coefficients = Buffer<Coefficients>(rows);
  }

  // Calls f with blocks of at most COLUMNS of the columns `own`: several whole groups or, where a
  // group is wider, part of one group.
  template <class F>
  void each_block(Range own, F f) {
    const int64_t whole = COLUMNS / group * group;
    for (int64_t c = own.begin, end; c < own.end; c = end) {
      const int64_t group_end = (c / group + 1) * group;
      end = whole ? c + whole : c + COLUMNS < group_end ? c + COLUMNS : group_end;
      if (end > own.end) end = own.end;
      f(Range{c, end});
    }
  }

  // Returns where the logits of a block are, from row `row` of the chunk on.
  T* logits_of(int64_t part, Range block, int64_t row) {
    return gradients ? logits + row * ld + block.begin : logits + part * SUB * ld;
  }

  E* packed_of(int64_t part) { return packed + part * packed_size<E>(l.E, COLUMNS); }

  void pack_block(int64_t part, Range block) {
    if (!few_rows) pack(l.W + block.begin * l.E, 1, l.E, l.E, block.size(), packed_of(part));
  }

  // z (s1 - s0, ld) = the logits of rows [s0, s1) and of a packed block. The columns that pad a row
  // to whole vectors are set to LOWEST, which neither a maximum nor a sum of exp notices.
  void compute_logits(int64_t part, Range block, int64_t s0, int64_t s1, T* z) {
    const T* const bias = l.b ? l.b + block.begin : nullptr;
    if (few_rows)
      few_rows.multiply(block.size(), l.W + block.begin * l.E, bias, z, ld);
    else
      gemm<E, S>(s1 - s0, l.E, block.size(), {l.x + s0 * l.E, l.E}, packed_of(part),
                 {z, ld, true, false}, lefts + part * left, bias);
    for (int64_t i = 0; i < s1 - s0; ++i) {
      T* const row = z + i * ld;
      if (l.temperature != 1)
        for (int64_t j = 0; j < block.size(); j += LANES<T>)
          (Vec<T>::load(row + j) * Vec<T>(scale)).store(row + j);
      for (int64_t j = block.size(); j % LANES<T>; ++j)
        row[j] = LOWEST<T>;
    }
  }

  // Logits and statistics of a block of columns for the rows [r0, r1) of a chunk.
  void first_pass(int64_t part, Range block, int64_t r0, int64_t r1) {
    pack_block(part, block);
    for (int64_t s0 = r0; s0 < r1; s0 += SUB) {
      const int64_t s1 = s0 + SUB < r1 ? s0 + SUB : r1;
      T* z = logits_of(part, block, s0 - r0);
      compute_logits(part, block, s0, s1, z);
      for (int64_t s = s0; s < s1; ++s, z += ld) {
        for (int64_t c = block.begin; c < block.end; c += group - c % group) {
          const int64_t c_end = c + group - c % group;
          update_statistics(z + c - block.begin, {c, c_end < block.end ? c_end : block.end},
                            statistics[c / group * rows + s - r0], highest[part * rows + s - r0]);
        }
        const int64_t y = l.target[s];
        if (block.begin <= y && y < block.end) target_logit[s - r0] = z[y - block.begin];
      }
    }
  }

  // Adds a row's logits z of columns of one group to their statistics s. The column of the maximum
  // is looked for only if it may be the row's: if it exceeds `highest` of the columns before.
  void update_statistics(const T* z, Range block, Statistics<T>& s, T& highest) {
    using V = Vec<T>;
    constexpr int L = LANES<T>;
    const int64_t n = block.size();

    // The maximum and its column.
    V high(LOWEST<T>);
    for (int64_t j = 0; j < n; j += L)
      high = max_(high, V::load(z + j));
    Statistics<T> here{max_lane(high), 0, 0, 0};
    if (here.max > highest) {
      highest = here.max;
      while (here.argmax < n - 1 && z[here.argmax] != here.max)
        ++here.argmax;
      here.argmax += block.begin;
    }

    // The sum of exp relative to the maximum of all columns so far.
    const V max(here.max > s.max ? here.max : s.max);
    V total(T(0));
    for (int64_t j = 0; j < n; j += L)
      total = total + exp_(V::load(z + j) - max);
    here.sum = sum(total);
    if (l.label_smoothing != 0) here.weighted = weighted_sum(z, block);
    if (here.max <= s.max) here.max = s.max;
    combine(here, s);
  }

  // The sum of class_weights * z over a block of columns.
  double weighted_sum(const T* z, Range block) {
    Vec<T> total(T(0));
    for (int64_t j = 0, n = block.size(); j < n; j += LANES<T>) {
      const Vec<T> x = Vec<T>::load(z + j, n - j);
      total = total +
              (l.class_weights ? x * Vec<T>::load(l.class_weights + block.begin + j, n - j) : x);
    }
    return sum(total);
  }

  // The class weight of a row's target.
  T weight(int64_t row) { return l.class_weights ? l.class_weights[l.target[row]] : T(1); }

  // Combines the statistics of all groups for row n, which is row i of its chunk, and stores the
  // row's results.
  void finish_row(int64_t n, int64_t i) {
    Statistics<T> s = statistics[i];
    for (int64_t g = 1; g < groups(); ++g)
      combine(statistics[g * rows + i], s);
    const double lse = s.max + ::log(s.sum), log_prob = target_logit[i] - lse, w = weight(n);
    l.lse[n] = T(lse);
    l.log_prob[n] = T(log_prob);
    l.argmax[n] = s.argmax;
    l.loss[n] = T(-(1 - l.label_smoothing) * w * log_prob +
                  l.label_smoothing / double(l.V) * (l.weights_sum * lse - s.weighted) +
                  l.z_loss * w * lse * lse);
  }

  Coefficients row_coefficients(int64_t n) {
    const double w = weight(n);
    const double dloss = l.dloss ? l.dloss[n] : l.dloss_of_all;
    const double dlog_prob = l.dlog_prob ? l.dlog_prob[n] : 0.;
    const double target = (1 - l.label_smoothing) * w * dloss - dlog_prob;
    const double classes = l.label_smoothing / double(l.V) * dloss;
    const double rest = 2 * l.z_loss * w * l.lse[n] * dloss + (l.dlse ? l.dlse[n] : 0.);
    return {target / l.temperature, classes / l.temperature, rest / l.temperature};
  }

  // The logits of a block of columns become their gradients dz, for the rows [r0, r1) of a chunk,
  // and contribute to dW and db.
  void second_pass(int64_t part, Range block, int64_t r0, int64_t r1) {
    const int64_t n = block.size();
    if (!l.statistics) pack_block(part, block);
    for (int64_t s0 = r0; s0 < r1; s0 += SUB) {
      const int64_t s1 = s0 + SUB < r1 ? s0 + SUB : r1;
      T* const z = logits_of(part, block, s0 - r0);
      if (!l.statistics) compute_logits(part, block, s0, s1, z);
      const Matrix<const dZ> dz{gradients_of(s0 - r0, block.begin), ld};
      for (int64_t s = s0; s < s1; ++s)
        differentiate(z + (s - s0) * ld, gradients_of(s - r0, block.begin), block, s,
                      coefficients[s - r0]);

      // dW += dz^T x and db += the sum of dz, where the first rows of all write and the others add.
      if (l.dW) dW.add(part, block, s0, s1, dz);
      if (l.db) {
        T* const total = sums + part * 2 * ld_sums;
        column_sums(s1 - s0, dz.p, dz.ld, n, total, total + ld_sums);
        if (s0 == 0) memset(l.db + block.begin, 0, n * sizeof(T));
        add_row((const T*)total, l.db + block.begin, n, T(1));
      }
    }
    if (l.dW && r1 == l.N) dW.finish(part, block, {gradients_of(0, block.begin), ld});
  }

  // Returns where the gradients of a chunk's logits are, from this row and column on.
  dZ* gradients_of(int64_t row, int64_t column) {
    if constexpr (REPLACED)
      return logits + row * ld + column;
    else
      return dlogits + row * ld + column;
  }

  // dx = dz W for the columns `own` of x and the rows [r0, r1) of a chunk. Of packed rows of W the
  // first block writes and the others add.
  void add_dx(int64_t part, Range own, int64_t r0, int64_t r1) {
    if constexpr (SAME)
      if (reads_W)
        return product<E>(r1 - r0, l.V, own.size(), {gradients_of(0, 0), ld, 1},
                          {l.W + own.begin, l.E}, {l.dx + r0 * l.E + own.begin, l.E}, false);
    E* const rows_of_W = packed_rows + depth<E>(COLUMNS) * own.begin;
    for (int64_t c = 0; c < l.V; c += COLUMNS) {
      const int64_t n = l.V - c < COLUMNS ? l.V - c : COLUMNS;
      pack(l.W + c * l.E + own.begin, l.E, 1, n, own.size(), rows_of_W);
      for (int64_t s0 = r0; s0 < r1; s0 += SUB) {
        const int64_t s1 = s0 + SUB < r1 ? s0 + SUB : r1;
        gemm<E, dZ>(s1 - s0, n, own.size(), {gradients_of(s0 - r0, c), ld}, rows_of_W,
                    {l.dx + s0 * l.E + own.begin, l.E, false, c > 0}, lefts + part * left);
      }
    }
  }

  // dz = the gradient of a block of row n's logits z, which dz may replace.
  void differentiate(T* z, dZ* dz, Range block, int64_t n, Coefficients c) {
    using V = Vec<T>;
    constexpr int L = LANES<T>;
    const int64_t columns = block.size(), y = l.target[n];
    const bool has_target = block.begin <= y && y < block.end;
    const double P = has_target ? ::exp(double(z[y - block.begin]) - double(l.lse[n])) : 0;
    const V lse(l.lse[n]), p(T(c.p(l.weights_sum))), classes(T(c.classes));
    if (l.class_weights && c.classes != 0) {
      for (int64_t j = 0; j < columns; j += L) {
        const V weights = V::load(l.class_weights + block.begin + j, columns - j);
        store_as(dz + j, p * exp_(V::load(z + j) - lse) - classes * weights);
      }
    } else {
      for (int64_t j = 0; j < columns; j += L)
        store_as(dz + j, p * exp_(V::load(z + j) - lse) - classes);
    }
    if (has_target)
      store_scalar(
          dz + (y - block.begin),
          T(c.target * (P - 1) + c.classes * (l.weights_sum * P - weight(n)) + c.rest * P));
  }
};

template <class E, class T, class S>
void linear_cross_entropy(const cpu::LinearCrossEntropy<T, S>& l, cpu::Parallel run, int threads) {
  CrossEntropy<T, E, S> team(l, threads);
  parallel(run, threads, [&](int64_t begin, int64_t end) { team.run(begin, end); });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
