// NT-ASGD (Merity et al., 2018) over a list of tensors: one pass over the gradients for their norm,
// and one over gradient, parameter and average for the step.
//
// What limits it: memory bandwidth. In fp32 the norm reads 4 bytes an element, the step reads and
// writes 20.
#pragma once
#include "cpu/arguments/optimizer.h"
#include "cpu/buffer.h"
#include "cpu/simd/row_arithmetic.h"
#include "cpu/team.h"
#include "math/nt_asgd.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// All tensors are split into chunks of this many elements, which are numbered consecutively.
constexpr int64_t NT_ASGD_CHUNK = 16384;

// first[i] = the number of the first chunk of tensor i; first[count] = the number of all chunks.
inline void number_chunks(const cpu::NtAsgd& o, int64_t* first) {
  first[0] = 0;
  for (int64_t i = 0; i < o.count; ++i)
    first[i + 1] = first[i] + (o.tensors[i].n + NT_ASGD_CHUNK - 1) / NT_ASGD_CHUNK;
}

// Calls body(tensor, begin, end, chunk) for all chunks in parallel; [begin, end) are the chunk's
// elements in its tensor.
template <class Function>
void each_chunk(const cpu::NtAsgd& o, const int64_t* first, cpu::Parallel run, Function body) {
  parallel(run, first[o.count], [&](int64_t begin, int64_t end) {
    int64_t i = 0;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (first[i + 1] <= chunk)
        ++i;
      const int64_t from = (chunk - first[i]) * NT_ASGD_CHUNK, n = o.tensors[i].n;
      body(o.tensors[i], from, from + NT_ASGD_CHUNK < n ? from + NT_ASGD_CHUNK : n, chunk);
    }
  });
}

// The sum of the squares of g (n,). Blocks of 2048 elements are summed in the type of computing,
// and the blocks' sums are added in double precision.
template <class Stored>
double sum_of_squares(const Stored* g, int64_t n) {
  using Real = RealOf<Stored>;
  double sum = 0;
  constexpr int64_t BLOCK = 2048;
  for (int64_t i = 0; i < n; i += BLOCK) {
    const int64_t size = n - i < BLOCK ? n - i : BLOCK;
    sum += sum_row<Real>(size, [&](int64_t j) {
      const Vec<Real> v = load_up_to(g + i + j, size - j);
      return v * v;
    });
  }
  return sum;
}

inline double nt_asgd_squares(const cpu::NtAsgd& o, cpu::Parallel run) {
  Buffer<int64_t> first(o.count + 1);
  number_chunks(o, first);
  Buffer<double> sums(first[o.count]);
  each_chunk(o, first, run,
             [&](const cpu::NtAsgdTensor& t, int64_t begin, int64_t end, int64_t chunk) {
               by_type(t.type, [&](auto number) {
                 sums[chunk] =
                     sum_of_squares(static_cast<const decltype(number)*>(t.g) + begin, end - begin);
               });
             });
  double sum = 0;
  for (int64_t chunk = 0; chunk < first[o.count]; ++chunk)
    sum += sums[chunk];
  return sum;
}

// The step of elements [begin, end) of one tensor.
template <class Stored>
void nt_asgd_chunk(const cpu::NtAsgd& o, const cpu::NtAsgdTensor& t, int64_t begin, int64_t end) {
  using Real = RealOf<Stored>;
  Stored* p = static_cast<Stored*>(t.p);              // (n,)
  const Stored* g = static_cast<const Stored*>(t.g);  // (n,)
  Real* average = static_cast<Real*>(t.average);      // (n,) or null
  const Vec<Real> clip(Real(o.clip)), lr(Real(o.lr)), weight_decay(Real(o.weight_decay)),
      mu(Real(o.mu));
  for (int64_t i = begin; i < end; i += LANES<Real>) {
    const int64_t n = end - i;
    const Vec<Real> gradient = load_up_to(g + i, n);
    store_up_to<Stored>(
        p + i, nt_asgd_parameter(load_up_to(p + i, n), gradient, clip, lr, weight_decay), n);
    if (!average) continue;
    // The average is that of the parameters as they were rounded to their dtype.
    const Vec<Real> stored = load_up_to(p + i, n);
    store_up_to<Real>(average + i,
                      o.mu == 1 ? stored : nt_asgd_average(load_up_to(average + i, n), stored, mu),
                      n);
  }
}

inline void nt_asgd_step(const cpu::NtAsgd& o, cpu::Parallel run) {
  Buffer<int64_t> first(o.count + 1);
  number_chunks(o, first);
  each_chunk(o, first, run, [&](const cpu::NtAsgdTensor& t, int64_t begin, int64_t end, int64_t) {
    by_type(t.type, [&](auto number) { nt_asgd_chunk<decltype(number)>(o, t, begin, end); });
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
