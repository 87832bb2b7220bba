// How an attention call is split among threads.
#pragma once
#include "cpu/simd/streaming.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// A unit is one (batch row, key head). Where there are few units, the query blocks of each are
// split into chunks. The items, units times chunks, are split into `parts` of consecutive items.
struct WorkSplit {
  static constexpr double WORTHWHILE = 50000;  // multiply-adds that are worth a thread
  static constexpr int FIXED_PARTS = 8;        // see `fixed_parts`
  int64_t units;
  int64_t chunks;  // per unit
  int parts;
  int64_t step = 1;  // items of which every part has a multiple

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
  WorkSplit(int64_t units, int64_t blocks, double work, int threads, int64_t fixed_chunks = 0,
            bool fixed_parts = false)
      : units(units), chunks(1), parts(fixed_parts ? FIXED_PARTS : threads) {
    const double useful = work / WORTHWHILE + 1;
    if (useful < parts) parts = int(useful);
    if (parts > 1 && units < 2 * parts) chunks = (2 * parts + units - 1) / units;
    if (chunks > blocks) chunks = blocks;
    if (fixed_chunks) chunks = fixed_chunks;
    own_whole(1);
  }

  // Gives every part a multiple of `count` items.
  void own_whole(int64_t count) {
    step = count;
    if (units * chunks / step < parts) parts = units * chunks > 0 ? int(units * chunks / step) : 1;
  }

  // Calls body(part, first item, end of the items) for each part, in parallel.
  template <class F>
  void each(cpu::Parallel run, F body) const {
    const int64_t steps = units * chunks / step;
    parallel(run, parts, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part)
        body(part, steps * part / parts * step, steps * (part + 1) / parts * step);
      stream_fence();
    });
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
