// Workspaces whose columns are split among the threads of a team.
//
// The columns of each thread are in a piece of memory of their own. Where they lie side by side in
// the rows of one matrix, the hardware prefetcher of a core reads on past the end of its columns,
// and takes from the other core lines that it is changing. On two cores that share no cache, a step
// of an LSTM took up to 1.6 times as long.
#pragma once
#include <vector>

#include "cpu/buffer.h"
#include "cpu/gemm/operands.h"
#include "cpu/range.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// One thread's columns, from column `first` on, of a matrix (rows, slots, width).
template <class Real>
struct Strip {
  Real* p;
  int64_t ld, ld_slot;  // elements from row to row, and from slot to slot
  int64_t first;

  HD Real* at(int64_t row, int64_t column, int64_t slot = 0) const {
    return p + row * ld + slot * ld_slot + (column - first);
  }
};

// The strips of all threads of a matrix (rows, slots, width), or nothing if rows is 0.
template <class Real>
class Strips {
 public:
  Strips(int64_t rows, int64_t width, int64_t slots, int64_t parts)
      : rows(rows),
        slots(slots),
        memory(rows * (slots * round_up<Real>(width) + ROW_PADDING * parts)) {}

  // Returns the strip of a thread that owns these columns. Threads that own rows of the matrix, and
  // so all columns, share one. begin: the first part of the work that the thread does
  Strip<Real> of(Range columns, int64_t begin) const {
    if (!memory) return {};
    const int64_t width = round_up<Real>(columns.size());
    const int64_t padding = columns.begin ? ROW_PADDING * begin : 0;
    return {memory + rows * (slots * columns.begin + padding),
            leading_dimension<Real>(slots * width), width, columns.begin};
  }

 private:
  int64_t rows, slots;
  Buffer<Real> memory;
};

// A matrix (rows, width) of which each thread computes its own columns, or its own rows, and reads
// all columns. After a barrier each thread that owns columns copies the strips of all threads to a
// matrix of its own.
template <class Real>
class Exchange {
 public:
  Exchange(int64_t rows, int64_t width, int64_t parts)
      : strips(rows, width, 1, parts), columns(parts), rows(rows), width(width) {}

  // Returns the strip of a thread that owns these columns. Every thread calls this, and a barrier
  // follows, before the first gather. begin: see Strips
  Strip<Real> join(Range own, int64_t begin) {
    columns[begin] = own;
    return strips.of(own, begin);
  }

  // Returns the matrix. copy: (rows, leading_dimension(width))  for a thread that owns columns
  Matrix<const Real> gather(Range own, Real* copy) const {
    if (own.size() == width) {
      const Strip<Real> all = strips.of(own, 0);
      return {all.p, all.ld};
    }
    const int64_t ld = leading_dimension<Real>(width);
    for (size_t part = 0; part < columns.size(); ++part) {
      const Range of_part = columns[part];
      const Strip<Real> from = strips.of(of_part, part);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t j = of_part.begin; j < of_part.end; j += LANES<Real>)
          Vec<Real>::load(from.at(row, j)).store(copy + row * ld + j);
    }
    return {copy, ld};
  }

 private:
  Strips<Real> strips;
  std::vector<Range> columns;  // of the thread that begins with this part, or none
  int64_t rows, width;
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
