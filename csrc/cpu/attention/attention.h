// Chooses the attention kernel of a call: packed.h, few_queries.h or blocks.h with backward.h.
#pragma once
#include "cpu/attention/backward.h"
#include "cpu/attention/blocks.h"
#include "cpu/attention/few_queries.h"
#include "cpu/attention/packed.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns the kernel of the forward pass. The kernel few_queries has no backward pass:
// AttentionBackward is by blocks.
template <class Stored>
inline cpu::AttentionKernel attention_kernel(const cpu::Attention& a) {
  if (packed_takes<Stored>(a)) return cpu::AttentionKernel::packed;
  if (few_queries_takes<Stored>(a)) return cpu::AttentionKernel::few_queries;
  return cpu::AttentionKernel::blocks;
}

// One pass over tensors of the type Stored.
template <class Stored, class Element>
void attention_pass(const cpu::Attention& a, cpu::Parallel run, int threads, bool forward) {
  const cpu::AttentionKernel kernel = attention_kernel<Stored>(a);
  if (kernel == cpu::AttentionKernel::packed)
    return attention_packed<Stored, Element>(a, run, threads, forward);
  if (!forward) return AttentionBackward<Stored, Element>(a, threads).run(run);
  if (kernel == cpu::AttentionKernel::few_queries)
    return AttentionFewQueries<Stored>(a).run(run, threads);
  AttentionBlocks<Stored, Element>(a, threads).run(run);
}

// Products in the type of computing, for every element type.
template <bool FORWARD>
void attention(const cpu::Attention& a, cpu::Parallel run, int threads) {
  by_type(a.type, [&](auto number) {
    using Stored = decltype(number);
    attention_pass<Stored, RealOf<Stored>>(a, run, threads, FORWARD);
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
    using Stored = decltype(number);
    plan = {attention_kernel<Stored>(a), AttentionProblem<Stored>{a}.block_queries};
  });
  return plan;
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
