// dropout(activation(x + b)), between the two products of a feed-forward layer: one pass over memory forward, and one
// backward, which computes from x again and stores neither activation nor mask.
#pragma once
#include "activation.h"
#include "rows.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class S, class A> void bias_activation_dropout_row(const cpu::BiasActivationDropout& f, int64_t m, uint32_t* keep, typename Compute<S>::type* row) {
  using C = typename Compute<S>::type;
  const S *x = static_cast<const S*>(f.x) + m * f.D, *b = static_cast<const S*>(f.b);
  for (int64_t j = 0; j < f.D; j += LANES<C>) {
    const Vec<C> z = load_up_to(x + j, f.D - j);
    A::value(b ? z + load_up_to(b + j, f.D - j) : z).store(row + j);
  }
  row_mask(f.mask, m, f.D, keep);
  drop_row(f.mask, keep, (const C*)row, static_cast<S*>(f.y) + m * f.D, f.D);
}

template <class S, class A, class C>
void bias_activation_dropout_backward_row(const cpu::BiasActivationDropout& f, int64_t m, uint32_t* keep, C* row, C* db) {
  row_mask(f.mask, m, f.D, keep);
  drop_row(f.mask, keep, static_cast<const S*>(f.dy) + m * f.D, row, f.D);
  const S *x = static_cast<const S*>(f.x) + m * f.D, *b = static_cast<const S*>(f.b);
  S* dx = f.dx ? static_cast<S*>(f.dx) + m * f.D : nullptr;
  for (int64_t j = 0; j < f.D; j += LANES<C>) {
    const int64_t n = f.D - j;
    const Vec<C> z = load_up_to(x + j, n);
    const Vec<C> d = load_up_to((const C*)row + j, n) * A::slope(b ? z + load_up_to(b + j, n) : z);
    if (dx) store_up_to<S>(dx + j, d, n);
    if (db) (Vec<C>::load(db + j) + d).store(db + j);  // 0 past the row
  }
}

template <class S, class A> void bias_activation_dropout_rows(const cpu::BiasActivationDropout& f, cpu::Parallel run) {
  const RowBlocks blocks(f.M, f.D);
  parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
    Buffer<typename Compute<S>::type> row(round_up<typename Compute<S>::type>(f.D));
    Buffer<uint32_t> keep(f.D);
    for (int64_t m = blocks.begin(begin); m < blocks.end(end - 1); ++m) bias_activation_dropout_row<S, A>(f, m, keep, row);
  });
}

template <class S, class A> void bias_activation_dropout_backward_rows(const cpu::BiasActivationDropout& f, cpu::Parallel run) {
  using C = typename Compute<S>::type;
  const RowBlocks blocks(f.M, f.D);
  const BlockSums<C> db(blocks, f.D, f.db);
  parallel(run, blocks.count, [&](int64_t begin, int64_t end) {
    Buffer<C> row(round_up<C>(f.D));
    Buffer<uint32_t> keep(f.D);
    for (int64_t block = begin; block < end; ++block) {
      C* sums = db.of(block);
      for (int64_t m = blocks.begin(block); m < blocks.end(block); ++m)
        bias_activation_dropout_backward_row<S, A>(f, m, keep, (C*)row, sums);
    }
  });
  db.total(static_cast<C*>(f.db), run);
}

template <class A> void bias_activation_dropout_of(const cpu::BiasActivationDropout& f, cpu::Parallel run) {
  by_type(f.type, [&](auto s) {
    f.backward ? bias_activation_dropout_backward_rows<decltype(s), A>(f, run) : bias_activation_dropout_rows<decltype(s), A>(f, run);
  });
}

inline void bias_activation_dropout(const cpu::BiasActivationDropout& f, cpu::Parallel run) {
  switch (f.activation) {
    case cpu::Activation::relu: return bias_activation_dropout_of<Relu>(f, run);
    case cpu::Activation::gelu: return bias_activation_dropout_of<Gelu>(f, run);
    case cpu::Activation::gelu_tanh: return bias_activation_dropout_of<GeluTanh>(f, run);
    case cpu::Activation::tanh: return bias_activation_dropout_of<Tanh>(f, run);
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
