// y = dropout(activation(x + b)), which lies between the two products of a feed-forward layer. One
// pass over memory forward and one backward. Backward recomputes everything from x, so that neither
// the activation nor the mask is stored.
//
// What limits it: memory bandwidth, and Philox where there is dropout.
#pragma once
#include "cpu/arguments/pointwise.h"
#include "cpu/pointwise/activation.h"
#include "cpu/pointwise/row_blocks.h"
#include "cpu/pointwise/row_dropout.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Row m of y. keep (D,) and row (D,) are workspaces.
template <class Stored, class Activation>
void bias_activation_dropout_row(const cpu::BiasActivationDropout& f, int64_t m, uint32_t* keep,
                                 RealOf<Stored>* row) {
  using Real = RealOf<Stored>;
  const Stored* x = static_cast<const Stored*>(f.x) + m * f.D;  // (D,)
  const Stored* b = static_cast<const Stored*>(f.b);            // (D,) or null
  for (int64_t j = 0; j < f.D; j += LANES<Real>) {
    const Vec<Real> z = load_up_to(x + j, f.D - j);
    Activation::value(b ? z + load_up_to(b + j, f.D - j) : z).store(row + j);
  }
  row_mask(f.mask, m, f.D, keep);
  drop_row(f.mask, keep, (const Real*)row, static_cast<Stored*>(f.y) + m * f.D, f.D);
}

// Row m of dx, which is also added to db (D rounded up to vectors) if that is not null.
template <class Stored, class Activation, class Real>
void bias_activation_dropout_backward_row(const cpu::BiasActivationDropout& f, int64_t m,
                                          uint32_t* keep, Real* row, Real* db) {
  row_mask(f.mask, m, f.D, keep);
  drop_row(f.mask, keep, static_cast<const Stored*>(f.dy) + m * f.D, row, f.D);
  const Stored* x = static_cast<const Stored*>(f.x) + m * f.D;         // (D,)
  const Stored* b = static_cast<const Stored*>(f.b);                   // (D,) or null
  Stored* dx = f.dx ? static_cast<Stored*>(f.dx) + m * f.D : nullptr;  // (D,) or null
  for (int64_t j = 0; j < f.D; j += LANES<Real>) {
    const int64_t n = f.D - j;
    const Vec<Real> z = load_up_to(x + j, n);
    const Vec<Real> dy = load_up_to((const Real*)row + j, n);
    const Vec<Real> d = Activation::gradient(b ? z + load_up_to(b + j, n) : z, dy);
    if (dx) store_up_to<Stored>(dx + j, d, n);
    if (db) (Vec<Real>::load(db + j) + d).store(db + j);  // d is 0 beyond the row
  }
}

template <class Stored, class Activation>
void bias_activation_dropout_rows(const cpu::BiasActivationDropout& f, cpu::Parallel run) {
  using Real = RealOf<Stored>;
  const RowBlocks blocks(f.M, f.D);
  parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
    Buffer<Real> row(round_up<Real>(f.D));
    Buffer<uint32_t> keep(f.D);
    for (int64_t m = blocks.begin(begin); m < blocks.end(end - 1); ++m)
      bias_activation_dropout_row<Stored, Activation>(f, m, keep, row);
  });
}

template <class Stored, class Activation>
void bias_activation_dropout_backward_rows(const cpu::BiasActivationDropout& f, cpu::Parallel run) {
  using Real = RealOf<Stored>;
  const RowBlocks blocks(f.M, f.D);
  const BlockSums<Real> db(blocks, f.D, f.db);
  parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
    Buffer<Real> row(round_up<Real>(f.D));
    Buffer<uint32_t> keep(f.D);
    for (int64_t block = begin; block < end; ++block) {
      Real* sums = db.of(block);
      for (int64_t m = blocks.begin(block); m < blocks.end(block); ++m)
        bias_activation_dropout_backward_row<Stored, Activation>(f, m, keep, (Real*)row, sums);
    }
  });
  db.total(static_cast<Real*>(f.db), run);
}

// Forward or backward with one activation of activation.h.
template <class Activation>
void bias_activation_dropout_with(const cpu::BiasActivationDropout& f, cpu::Parallel run) {
  by_type(f.type, [&](auto number) {
    using Stored = decltype(number);
    if (f.backward)
      bias_activation_dropout_backward_rows<Stored, Activation>(f, run);
    else
      bias_activation_dropout_rows<Stored, Activation>(f, run);
  });
}

inline void bias_activation_dropout(const cpu::BiasActivationDropout& f, cpu::Parallel run) {
  switch (f.activation) {
    case cpu::Activation::relu:
      return bias_activation_dropout_with<Relu>(f, run);
    case cpu::Activation::gelu:
      return bias_activation_dropout_with<Gelu>(f, run);
    case cpu::Activation::gelu_tanh:
      return bias_activation_dropout_with<GeluTanh>(f, run);
    case cpu::Activation::tanh:
      return bias_activation_dropout_with<Tanh>(f, run);
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
