// What the threads of one call share: the parallel loop, a barrier, and the split of columns among
// the parts of the work.
#pragma once
#include <sched.h>

#include "cpu/arguments/common.h"
#include "cpu/range.h"
#include "cpu/simd/vec.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Runs body(begin, end) for ranges that cover [0, n), several at the same time.
template <class Function>
void parallel(cpu::Parallel run, int64_t n, Function body) {
  run(
      n, [](void* f, int64_t begin, int64_t end) { (*static_cast<Function*>(f))(begin, end); },
      &body);
}

// A barrier for `parts` parts of the work. A thread may run several parts at once; it then arrives
// once, with their number as its weight. Waiting threads spin, and yield if that takes long.
class Barrier {
 public:
  explicit Barrier(int parts) : parts_(parts) {}

  void wait(int weight) {
    const int turn = __atomic_load_n(&turn_, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived_, weight, __ATOMIC_ACQ_REL) == parts_) {
      __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&turn_, turn + 1, __ATOMIC_RELEASE);
      return;
    }
    wait_for_others(turn);
  }

 private:
  // Not inlined, so that a profile shows the time that threads wait under this name.
  __attribute__((noinline)) void wait_for_others(int turn) {
    for (int spins = 0; __atomic_load_n(&turn_, __ATOMIC_ACQUIRE) == turn; ++spins) {
      if (spins > 4000) sched_yield();  // more threads than cores: let the late one run
#ifdef __SSE2__
      else
        _mm_pause();
#endif
    }
  }

  int parts_;
  alignas(64) int arrived_ = 0;  // the weights of the parts that have arrived in this turn
  alignas(64) int turn_ = 0;     // how often all parts have met
};

// Runs one pass, or two that do not depend on each other, by `parts` parts of the work each. A
// range that has parts of both runs those of the first one first, as every other range does, so
// that no two ranges wait for each other.
template <class Pass, class Problem>
void run_side_by_side(const Problem* problems, int count, cpu::Parallel run, int parts) {
  Pass first(problems[0], parts);
  if (count == 1)
    return parallel(run, parts, [&](int64_t begin, int64_t end) { first.run(begin, end); });
  Pass second(problems[1], parts);
  parallel(run, 2 * parts, [&](int64_t begin, int64_t end) {
    if (begin < parts) first.run(begin, end < parts ? end : parts);
    if (end > parts) second.run(begin > parts ? begin - parts : 0, end - parts);
  });
}

// The columns that parts of the work own are whole vectors, and at least whole blocks of four,
// which is how Philox produces a mask.
template <class T>
constexpr int64_t COLUMN_UNIT = LANES<T> < 4 ? 4 : LANES<T>;

// Returns the columns of [0, width) that parts [begin, end) of `parts` own, in whole units.
template <class T>
HD Range own_columns(int64_t width, int64_t begin, int64_t end, int64_t parts,
                     int64_t unit = COLUMN_UNIT<T>) {
  const int64_t units = (width + unit - 1) / unit;
  const int64_t first = units * begin / parts * unit, last = units * end / parts * unit;
  return {first < width ? first : width, last < width ? last : width};
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
