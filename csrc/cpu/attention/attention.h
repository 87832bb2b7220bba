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

// One pass over tensors of elements E. X: the type of the products' elements.
template <class E, class X>
void attention_pass(const cpu::Attention& a, cpu::Parallel run, int threads, bool forward) {
  const cpu::AttentionKernel kernel = attention_kernel<E>(a);
  if (kernel == cpu::AttentionKernel::packed)
    return attention_packed<E, X>(a, run, threads, forward);
  if (!forward) return AttentionBackward<E, X>(a, threads).run(run);
  if (kernel == cpu::AttentionKernel::thin) return AttentionThin<E>(a).run(run, threads);
  AttentionBlocks<E, X>(a, threads).run(run);
}

// Products in the type of computing, for every element type.
template <bool FORWARD>
void attention(const cpu::Attention& a, cpu::Parallel run, int threads) {
  by_type(a.type, [&](auto number) {
    using E = decltype(number);
    attention_pass<E, RealOf<E>>(a, run, threads, FORWARD);
  });
}
// Products of bfloat16 pairs, for bf16 and fp32 tensors.
template <bool FORWARD>
void attention_in_pairs(const cpu::Attention& a, cpu::Parallel run, int threads) {
  if (a.type == cpu::Type::f32)
    attention_pass<float, bf16_pair>(a, run, threads, FORWARD);
  else
    attention_pass<bfloat16, bf16_pair>(a, run, threads, FORWARD);
}

// Returns which kernel a forward pass would run, for fused.explain.
inline cpu::AttentionPlan attention_plan(const cpu::Attention& a) {
  cpu::AttentionPlan plan{};
  by_type(a.type, [&](auto number) {
    using E = decltype(number);
    plan = {attention_kernel<E>(a), AttentionProblem<E>{a}.block};
  });
  return plan;
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
