// How an attention call is split among threads.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/simd/streaming.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns the multiply-adds of the batch rows before each, (B + 1,), where the rows are sequences
// of different lengths; else nothing, as all rows have the same work.    p: an AttentionProblem
template <class Problem>
std::vector<double> work_before(const Problem& p) {
  if (!p.a.cu_seqlens_q) return {};
  std::vector<double> sums(size_t(p.a.B) + 1);  // push_back would not be inlined
  for (int64_t b = 0; b < p.a.B; ++b)
    sums[b + 1] = sums[b] + p.row_multiply_adds(b) + 1;
  return sums;
}

// A unit is one (batch row, key head). Where there are few units, the query blocks of each are
// split into chunks. The items, units times chunks, are split into `parts` of consecutive items, of
// as much work each as possible.
struct WorkSplit {
  static constexpr double WORTHWHILE = 50000;  // multiply-adds that are worth a thread
  static constexpr int FIXED_PARTS = 8;        // see `fixed_parts`
  int64_t units;
  int64_t chunks;  // per unit
  int parts;
  int64_t step = 1;            // items of which every part has a multiple
  std::vector<double> before;  // of work_before; with it, step is 1

  // Returns how many chunks a unit has in a pass that sums over the chunks: as many as give at
  // least 8 items in all, if there are as many blocks. That follows from the shapes alone, so that
  // the order of the sums does not depend on the number of threads. Each chunk needs a copy of the
  // sum, so there are no more of them, and at most 8 threads share the work of a single unit.
  static int64_t chunks_of_a_sum(int64_t units, int64_t blocks, double work) {
    if (work < WORTHWHILE || units == 0 || blocks == 0) return 1;
    const int64_t few = (8 + units - 1) / units;
    return few < blocks ? few : blocks;
  }

  // blocks: the query blocks of a unit; work: the multiply-adds of the whole call.
  // fixed_chunks: the number of chunks, or 0 to choose it for the number of threads.
  // fixed_parts: whether the number of parts follows from the shapes alone, whatever `threads` is.
  // It must where each part has a copy of a sum over the items, as the gradient of a bias is.
  // before: of work_before
  WorkSplit(int64_t units, int64_t blocks, double work, int threads, int64_t fixed_chunks = 0,
            bool fixed_parts = false, std::vector<double> before = {})
      : units(units),
        chunks(1),
        parts(fixed_parts ? FIXED_PARTS : threads),
        before(std::move(before)) {
    const double useful = work / WORTHWHILE + 1;
    if (useful < parts) parts = int(useful);
    const int64_t alike = units_of_the_largest();
    if (parts > 1 && alike < 2 * parts) chunks = (2 * parts + alike - 1) / alike;
    if (chunks > blocks) chunks = blocks;
    if (fixed_chunks) chunks = fixed_chunks;
    own_whole(1);
  }

  // Returns how many units as large as the largest would be the whole work, at least 1.
  int64_t units_of_the_largest() const {
    if (before.size() < 2) return units;
    double largest = 0;
    for (size_t b = 1; b < before.size(); ++b)
      largest = std::max(largest, before[b] - before[b - 1]);
    const int64_t rows = int64_t(before.size()) - 1;
    return std::max<int64_t>(1, int64_t(double(units / rows) * before.back() / largest));
  }

  // Returns the first item of a part.
  int64_t first_item(int64_t part) const {
    const int64_t items = units * chunks;
    if (before.size() < 2 || part == parts) return items / step * part / parts * step;
    const double share = before.back() * double(part) / double(parts);
    const auto next = std::upper_bound(before.begin(), before.end(), share);
    const int64_t b = next - before.begin() - 1, rows = int64_t(before.size()) - 1;
    const double in_row = (share - before[b]) / (before[b + 1] - before[b]);
    const int64_t of_row = items / rows;
    return b * of_row + int64_t(in_row * double(of_row));
  }

  // Gives every part a multiple of `count` items.
  void own_whole(int64_t count) {
    step = count;
    if (units * chunks / step < parts) parts = units * chunks > 0 ? int(units * chunks / step) : 1;
  }

  // Calls body(part, first item, end of the items) for each part, in parallel.
  template <class Function>
  void each(cpu::Parallel run, Function body) const {
    parallel(run, parts, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part)
        body(part, first_item(part), first_item(part + 1));
      stream_fence();
    });
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
