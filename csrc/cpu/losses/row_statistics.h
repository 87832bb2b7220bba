// Loss, log-sum-exp, log-probability of the target and argmax of rows of logits, from blocks of
// their columns.
//
// The columns are divided into groups, whose number depends on V alone: each group has its own
// statistics, and these are combined in order. So a result does not depend on the number of parts
// of the work, where a part owns whole groups.
#pragma once
#include "cpu/arguments/losses.h"
#include "cpu/buffer.h"
#include "cpu/losses/online_statistics.h"
#include "cpu/range.h"
#include "cpu/simd/elementary_functions.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class Real, class Stored>
class RowStatistics {
 public:
  RowStatistics() = default;
  // rows: in a chunk, of which the statistics are taken at a time
  RowStatistics(const cpu::LinearCrossEntropy<Real, Stored>& l, int64_t rows, int parts)
      : l(&l), rows(rows), parts(parts) {
    const int64_t columns = (l.V + MAX_GROUPS - 1) / MAX_GROUPS;
    group = (columns + MIN_GROUP - 1) / MIN_GROUP * MIN_GROUP;
    if (!l.statistics) return;
    statistics = Buffer<Statistics<Real>>(groups() * rows);
    target_logit = Buffer<Real>(rows);
    highest = Buffer<Real>(parts * rows);
  }

  // The columns of the parts [begin, end), whole groups.
  Range columns_of(int64_t begin, int64_t end) const {
    return {first_column(begin), first_column(end)};
  }

  // Before the first block of a part that owns the columns `own`.
  void begin(int64_t part, Range own) {
    for (int64_t i = own.begin / group * rows; i < (own.end + group - 1) / group * rows; ++i)
      statistics[i] = {LOWEST<Real>, 0, 0, 0};
    for (int64_t i = 0; i < rows; ++i)
      highest[part * rows + i] = LOWEST<Real>;
  }

  // Calls f with blocks of at most `most` of the columns `own`: several whole groups or, where a
  // group is wider, part of one group.
  template <class Function>
  void each_block(Range own, int64_t most, Function f) const {
    const int64_t whole = most / group * group;
    for (int64_t c = own.begin, end; c < own.end; c = end) {
      const int64_t group_end = (c / group + 1) * group;
      end = whole ? c + whole : c + most < group_end ? c + most : group_end;
      if (end > own.end) end = own.end;
      f(Range{c, end});
    }
  }

  // Adds the logits z of a block of columns of row n, which is row i of its chunk.
  void add(int64_t part, const Real* z, Range block, int64_t n, int64_t i) {
    for (int64_t c = block.begin; c < block.end; c += group - c % group) {
      const int64_t c_end = c + group - c % group;
      add_to_group(z + c - block.begin, {c, c_end < block.end ? c_end : block.end},
                   statistics[c / group * rows + i], highest[part * rows + i]);
    }
    const int64_t y = l->target[n];
    if (block.begin <= y && y < block.end) target_logit[i] = z[y - block.begin];
  }

  // Combines the statistics of all groups for row n, which is row i of its chunk, and stores the
  // row's results.
  void finish(int64_t n, int64_t i) {
    Statistics<Real> s = statistics[i];
    for (int64_t g = 1; g < groups(); ++g)
      combine(statistics[g * rows + i], s);
    const double w = l->class_weights ? l->class_weights[l->target[n]] : Real(1);
    // Not target_logit - lse, whose rounding exceeds small losses where the logits are large.
    const double log_sum = ::log(s.sum), lse = s.max + log_sum;
    const double log_prob = (double(target_logit[i]) - s.max) - log_sum;
    l->lse[n] = Real(lse);
    l->log_prob[n] = Real(log_prob);
    l->argmax[n] = s.argmax;
    l->loss[n] = Real(-(1 - l->label_smoothing) * w * log_prob +
                      l->label_smoothing / double(l->V) * (l->weights_sum * lse - s.weighted) +
                      l->z_loss * w * lse * lse);
  }

 private:
  // The columns are divided into at most MAX_GROUPS groups of at least MIN_GROUP columns.
  static constexpr int64_t MAX_GROUPS = 64, MIN_GROUP = 32;

  const cpu::LinearCrossEntropy<Real, Stored>* l = nullptr;
  int64_t rows = 0;
  int parts = 0;
  int64_t group = 0;          // columns of a group, a multiple of MIN_GROUP
  Buffer<Real> target_logit;  // (rows,)
  Buffer<Real> highest;       // (parts, rows)  the largest logit of a part's columns so far
  Buffer<Statistics<Real>> statistics;  // (groups, rows)

  int64_t groups() const { return (l->V + group - 1) / group; }
  int64_t first_column(int64_t part) const {
    const int64_t column = groups() * part / parts * group;
    return column < l->V ? column : l->V;
  }

  // Adds a row's logits z of columns of one group to their statistics s. The column of the maximum
  // is looked for only if it may be the row's: if it exceeds `highest` of the columns before.
  void add_to_group(const Real* z, Range block, Statistics<Real>& s, Real& highest) {
    constexpr int lanes = LANES<Real>;
    const int64_t n = block.size();

    // The maximum and its column.
    Vec<Real> high(LOWEST<Real>);
    for (int64_t j = 0; j < n; j += lanes)
      high = max_(high, Vec<Real>::load(z + j));
    Statistics<Real> here{max_lane(high), 0, 0, 0};
    if (here.max > highest) {
      highest = here.max;
      while (here.argmax < n - 1 && z[here.argmax] != here.max)
        ++here.argmax;
      here.argmax += block.begin;
    }

    // The sum of exp relative to the maximum of all columns so far.
    const Vec<Real> max(here.max > s.max ? here.max : s.max);
    Vec<Real> total(Real(0));
    for (int64_t j = 0; j < n; j += lanes)
      total = total + exp_(Vec<Real>::load(z + j) - max);
    here.sum = sum(total);
    if (l->label_smoothing != 0) here.weighted = weighted_sum(z, block);
    if (here.max <= s.max) here.max = s.max;
    combine(here, s);
  }

  // The sum of class_weights * z over a block of columns.
  double weighted_sum(const Real* z, Range block) {
    Vec<Real> total(Real(0));
    for (int64_t j = 0, n = block.size(); j < n; j += LANES<Real>) {
      const Vec<Real> x = Vec<Real>::load(z + j, n - j);
      total =
          total +
          (l->class_weights ? x * Vec<Real>::load(l->class_weights + block.begin + j, n - j) : x);
    }
    return sum(total);
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
