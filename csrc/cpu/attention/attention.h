// Chooses the attention kernel of a call: packed.h, thin.h or blocks.h with backward.h.
#pragma once
#include "cpu/attention/backward.h"
#include "cpu/attention/blocks.h"
#include "cpu/attention/packed.h"
#include "cpu/attention/thin.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns the kernel of the forward pass. The thin kernel has no backward pass: that is by blocks.
template <class E>
inline cpu::AttentionKernel attention_kernel(const cpu::Attention& a) {
  if (packed_takes<E>(a)) return cpu::AttentionKernel::packed;
  if (thin_takes<E>(a)) return cpu::AttentionKernel::thin;
  return cpu::AttentionKernel::rows;
}

// One pass over tensors of elements E. X: the type of the elements of products between blocks.
template <class E, class X>
void attention_pass(const cpu::Attention& a, cpu::Parallel run, int threads, bool forward) {
  const cpu::AttentionKernel kernel = attention_kernel<E>(a);
  if (kernel == cpu::AttentionKernel::packed) return attention_packed<E>(a, run, threads, forward);
  if (!forward) return AttentionBackward<E, X>(a, threads).run(run);
  if (kernel == cpu::AttentionKernel::thin) return AttentionThin<E>(a).run(run, threads);
  AttentionBlocks<E, X>(a, threads).run(run);
}
template <class E, class X>
void attention_of(const cpu::Attention& a, cpu::Parallel run, int threads) {
  attention_pass<E, X>(a, run, threads, true);
}
template <class E, class X>
void attention_backward_of(const cpu::Attention& a, cpu::Parallel run, int threads) {
  attention_pass<E, X>(a, run, threads, false);
}

// Products in the type of computing, for every element type.
inline void attention(const cpu::Attention& a, cpu::Parallel run, int threads) {
  by_type(a.type, [&](auto e) {
    using E = decltype(e);
    attention_of<E, typename Compute<E>::type>(a, run, threads);
  });
}
inline void attention_backward(const cpu::Attention& a, cpu::Parallel run, int threads) {
  by_type(a.type, [&](auto e) {
    using E = decltype(e);
    attention_backward_of<E, typename Compute<E>::type>(a, run, threads);
  });
}

// Returns which kernel a forward pass would run, for fused.explain.
inline cpu::AttentionPlan attention_plan(const cpu::Attention& a) {
  cpu::AttentionPlan plan{};
  by_type(a.type, [&](auto e) {
    using E = decltype(e);
    plan = {attention_kernel<E>(a), AttentionProblem<E>{a}.block};
  });
  return plan;
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
