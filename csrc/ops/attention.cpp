// The operator attention: pyext/fusedseq/reference/attention.py. The CPU kernels are in
// csrc/cpu/attention; on CUDA the kernels are those of kernels/attention, in Triton.
//
// attention_plain is attention without options, on the CPU. It has fewer arguments and results to
// convert, which in a small call takes a good part of the time: csrc/python/_autograd.cpp calls it.
#include <limits>
#include <memory>
#include <vector>

#include "ops/attention_call.h"

namespace fusedseq {
namespace {

constexpr char OP[] = "attention", BACKWARD[] = "attention_backward", PLAN[] = "attention_plan",
               PLAIN[] = "attention_plain", OF_PLAIN[] = "attention_plain_backward";

#define ATTENTION_OUTPUTS(FIELD)                                \
  FIELD(Tensor, out) /* (B, N, L, D), stored as (B, L, N, D) */ \
  FIELD(Tensor, lse) /* (B, N, L) log-sum-exp of the logits */
FUSEDSEQ_DECLARE(Outputs, ATTENTION_OUTPUTS)
#define PLAIN_INPUTS(FIELD) \
  ATTENTION_QKV(FIELD)      \
  FIELD(double, scale)
FUSEDSEQ_DECLARE(PlainInputs, PLAIN_INPUTS)
#define INFERENCE_OUTPUT(FIELD) FIELD(Tensor, out)
FUSEDSEQ_DECLARE(InferenceOutput, INFERENCE_OUTPUT)

#define ATTENTION_BACKWARD(FIELD) \
  FIELD(Tensor, dout)             \
  FIELD(Tensor, out)              \
  FIELD(Tensor, lse)              \
  ATTENTION_QKV(FIELD)            \
  ATTENTION_TERMS(FIELD)          \
  ATTENTION_SETTINGS(FIELD)       \
  ATTENTION_MORE(FIELD)
FUSEDSEQ_DECLARE(BackwardInputs, ATTENTION_BACKWARD)
#define ATTENTION_GRADIENTS(FIELD) \
  FIELD(Tensor, dq)                \
  FIELD(Tensor, dk)                \
  FIELD(Tensor, dv)                \
  FIELD(Tensor, dbias)             \
  FIELD(Tensor, drelative_keys)    \
  FIELD(Tensor, dsinks)
FUSEDSEQ_DECLARE(Gradients, ATTENTION_GRADIENTS)

#define PLAIN_BACKWARD(FIELD) \
  FIELD(Tensor, dout)         \
  FIELD(Tensor, lse)          \
  PLAIN_INPUTS(FIELD)
FUSEDSEQ_DECLARE(PlainBackwardInputs, PLAIN_BACKWARD)
#define PLAIN_GRADIENTS(FIELD) \
  FIELD(Tensor, dq)            \
  FIELD(Tensor, dk)            \
  FIELD(Tensor, dv)
FUSEDSEQ_DECLARE(PlainGradients, PLAIN_GRADIENTS)

#define PLAN_INPUTS(FIELD)             \
  FIELD(Tensor, q)                     \
  FIELD(Tensor, k)                     \
  FIELD(OptionalTensor, relative_keys) \
  FIELD(OptionalTensor, key_rows)      \
  FIELD(bool, causal)                  \
  FIELD(int64_t, offset)               \
  ATTENTION_MORE(FIELD)
FUSEDSEQ_DECLARE(PlanInputs, PLAN_INPUTS)
#define PLAN_OUTPUT(FIELD) FIELD(Tensor, plan) /* (2,) int64 */
FUSEDSEQ_DECLARE(PlanOutput, PLAN_OUTPUT)

// A new (B, N, L, D) tensor that is stored as (B, L, N, D).
Tensor heads_last(const Tensor& like, int64_t B, int64_t N, int64_t L, int64_t D) {
  return output(like, {B, N, L, D}, {L * N * D, D, N * D, 1}, kernel_scalar_type(like));
}

// A view of `whole`, whose memory it keeps alive.
Tensor part_of(const Tensor& whole, const Sizes& shape, const Sizes& strides, int64_t offset) {
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      whole.get(), int64_t(shape.size()), shape.data(), strides.data(), offset, &made));
  return Tensor(made);
}

// The gradients of the n views (B, N, L, D) that make up one projection (B, L, n, N, D) or
// (L, B, n, N, D), as views of one tensor that is laid out as the projection. like: the first view.
std::vector<Tensor> parts_of_projection(const char* op, const Tensor& like, int64_t n) {
  const Sizes shape(like.sizes().begin(), like.sizes().end()),
      strides(like.strides().begin(), like.strides().end());
  const int64_t width = shape[1] * shape[3], row = n * width;
  const Sizes batch_first{shape[2] * row, shape[3], row, 1},
      batch_second{row, shape[3], shape[0] * row, 1};
  require(strides == batch_first || strides == batch_second, op,
          "arguments whose gradients are to be together must be parts of one projection");
  checked_product(op, "the projection", {shape[0], shape[2], n, shape[1], shape[3]});
  const Tensor whole = output(like, {shape[0] * shape[2] * row});
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < n; ++i)
    parts.push_back(part_of(whole, shape, strides, i * width));
  return parts;
}

// type: that of q
void run(const cpu::Attention& a, ScalarType type) {
  const cpu::Kernels& kernels = cpu::kernels();
  (multiplies_in_bf16(type) ? kernels.bf16.attention : kernels.attention)(a, parallel, threads());
}

Outputs forward(const char* op, const Inputs& i) {
  const Tensor& q = i.q;
  AttentionCall call(op, i);
  cpu::Attention& a = call.a;
  Tensor out = heads_last(q, q.size(0), a.N, q.size(2), a.D),
         lse = output(q, {a.B, a.N, a.L}, computing(q));
  // The log-sum-exps of sequences have padding, of which nothing is read.
  if (i.cu_seqlens_q) torch::stable::fill_(lse, std::numeric_limits<double>::infinity());
  if (call.is_empty()) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, std::numeric_limits<double>::infinity());
  } else {
    a.out = out.mutable_data_ptr();
    a.lse = lse.mutable_data_ptr();
    run(a, q.scalar_type());
  }
  return {as_type(out, q.scalar_type()), lse};
}
Outputs attention(const Inputs& i) {
  return forward(OP, i);
}

Inputs without_options(const PlainInputs& i) {
  return {.q = i.q,
          .k = i.k,
          .v = i.v,
          .rope_interleaved = true,
          .scale = i.scale,
          .window_left = -1,
          .window_right = -1};
}
Outputs attention_plain(const PlainInputs& i) {
  return forward(PLAIN, without_options(i));
}
InferenceOutput attention_plain_inference(const PlainInputs& i) {
  AttentionCall call(PLAIN, without_options(i));
  cpu::Attention& a = call.a;
  Tensor out = heads_last(i.q, a.B, a.N, a.L, a.D);
  if (call.is_empty()) {
    torch::stable::zero_(out);
  } else {
    const std::unique_ptr<double[]> lse(new double[a.B * a.N * a.L]);  // which nobody reads
    a.out = out.mutable_data_ptr();
    a.lse = lse.get();
    run(a, i.q.scalar_type());
  }
  return {as_type(out, i.q.scalar_type())};
}

// Bits of `needs` beside those of the gradients: dq, dk and dv, or dk and dv, are to be laid out
// together as the gradient of the one projection that q, k and v, or k and v, are parts of.
constexpr int QKV_TOGETHER = 6, KV_TOGETHER = 7;

// dsinks (N,) = the sum of a.dsinks over batch rows and queries, in their order.
template <class T>
void sum_of_queries(const cpu::Attention& a, Tensor& dsinks) {
  const T* x = static_cast<const T*>(a.dsinks);
  T* sums = static_cast<T*>(dsinks.mutable_data_ptr());
  for (int64_t n = 0; n < a.N; ++n) {
    double sum = 0;
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t i = 0; i < a.L; ++i)
        sum += double(x[(b * a.N + n) * a.L + i]);
    sums[n] = T(sum);
  }
}

// The gradients of q, k and v of a call, and what its kernel reads for them.
struct Backward {
  AttentionCall& call;
  const Tensor &q, &k, &v;
  const bool as_stored, q_too, together;  // see parts_of_projection
  const int64_t needs;
  const Tensor dout, lse;
  const std::vector<Tensor> parts;  // the gradients that are laid out together
  Tensor dq, dk, dv;  // of what is not needed: empty, as no two may be the same tensor

  Backward(AttentionCall& call, const Inputs& i, const Tensor& dout_, const Tensor& lse_,
           int64_t needs_)
      : call(call),
        q(i.q),
        k(i.k),
        v(i.v),
        as_stored(kernel_scalar_type(q) == q.scalar_type() && !call.is_empty()),
        q_too(as_stored && is_needed(needs_, QKV_TOGETHER)),
        together(q_too || (as_stored && is_needed(needs_, KV_TOGETHER))),
        needs(needs_ | (together ? DKV : 0) | (q_too ? DQ : 0)),
        dout(checked_dout(dout_)),
        lse(checked_lse(lse_)),
        parts(laid_out_together()),
        dq(q_too ? parts[0] : gradient(Position::dq, q, call.a.N)),
        dk(together ? parts[q_too] : gradient(Position::dk, k, call.a.N_kv)),
        dv(together ? parts[q_too + 1] : gradient(Position::dv, v, call.a.N_kv)) {
    cpu::Attention& a = call.a;
    strides_of(dout, a.dout_strides, 3, false);
    a.dout = dout.const_data_ptr();
    a.lse = const_cast<void*>(lse.const_data_ptr());
    for (int d = 0; d < 2; ++d) {
      a.dq_strides[d] = is_needed(needs, Position::dq) ? dq.stride(2 * d) : 0;
      a.dk_strides[d] = is_needed(needs, Position::dk)   ? dk.stride(2 * d)
                        : is_needed(needs, Position::dv) ? dv.stride(2 * d)
                                                         : 0;
    }
    if (a.cu_seqlens_q) a.dout_strides[0] = a.dq_strides[0] = a.dk_strides[0] = 0;
    a.dq = at(dq);
    a.dk = at(dk);
    a.dv = at(dv);
  }

  void run() {
    const cpu::Kernels& kernels = cpu::kernels();
    const bool in_pairs = multiplies_in_bf16(q.scalar_type());
    (in_pairs ? kernels.bf16.attention_backward : kernels.attention_backward)(call.a, parallel,
                                                                              threads());
  }

 private:
  using Position = Gradients::Position;
  // Gradients that are laid out together are all computed.
  static constexpr int64_t DQ = 1 << Position::dq, DKV = 1 << Position::dk | 1 << Position::dv;

  std::vector<Tensor> laid_out_together() const {
    if (!together) return {};
    if (q_too) require_shape(call.op, "k", k, q.sizes());
    return parts_of_projection(call.op, q_too ? q : k, q_too ? 3 : 2);
  }
  static void* at(Tensor& t) { return t.numel() ? t.mutable_data_ptr() : nullptr; }
  Tensor gradient(int position, const Tensor& t, int64_t heads) const {
    return is_needed(needs, position) ? heads_last(q, t.size(0), heads, t.size(2), call.a.D)
                                      : output(q, {0});
  }
  Tensor checked_dout(const Tensor& t) const {
    require_shape(call.op, "dout", t, q.sizes());
    require_floating(call.op, "dout", t);
    return with_dense_rows(as_type(t, q.scalar_type()));
  }
  Tensor checked_lse(const Tensor& t) const {
    require_shape(call.op, "lse", t, {call.a.B, call.a.N, call.a.L});
    require_dtype(call.op, "lse", t, computing(q));
    return dense(t);
  }
};

Gradients attention_backward(const BackwardInputs& i, const Needs& required) {
  const Inputs inputs{.q = i.q,
                      .k = i.k,
                      .v = i.v,
                      .bias = i.bias,
                      .mask = i.mask,
                      .key_lengths = i.key_lengths,
                      .alibi = i.alibi,
                      .relative_keys = i.relative_keys,
                      .rope = i.rope,
                      .rope_interleaved = i.rope_interleaved,
                      .seed = i.seed,
                      .scale = i.scale,
                      .causal = i.causal,
                      .offset = i.offset,
                      .dropout = i.dropout,
                      .sinks = i.sinks,
                      .softcap = i.softcap,
                      .window_left = i.window_left,
                      .window_right = i.window_right,
                      .cu_seqlens_q = i.cu_seqlens_q,
                      .cu_seqlens_k = i.cu_seqlens_k,
                      .max_seqlen_q = i.max_seqlen_q,
                      .max_seqlen_k = i.max_seqlen_k};
  using Position = Gradients::Position;
  AttentionCall call(BACKWARD, inputs);
  Backward b(call, inputs, i.dout, i.lse, required.needs);
  const Tensor& q = i.q;
  cpu::Attention& a = call.a;
  Tensor dbias = output(q, {0}), drelative_keys = output(q, {0}), dsinks = output(q, {0});
  if (is_needed(b.needs, Position::dbias) && i.bias) {
    dbias = output(q, Sizes(i.bias->sizes().begin(), i.bias->sizes().end()), computing(q));
    strides_of(dbias, a.dbias_strides, 4, true);
    a.dbias = dbias.mutable_data_ptr();
    a.dbias_size = dbias.numel();
  }
  if (is_needed(b.needs, Position::drelative_keys) && i.relative_keys) {
    drelative_keys = output(q, {2 * a.K + 1, a.D}, computing(q));
    a.drelative_keys = drelative_keys.mutable_data_ptr();
  }
  OptionalTensor of_queries;  // dsinks of each query
  if (is_needed(b.needs, Position::dsinks) && i.sinks) {
    dsinks = output(q, {a.N}, computing(q));
    of_queries = output(q, {a.B, a.N, a.L}, computing(q));
    torch::stable::zero_(*of_queries);  // the padding of sequences, too
    a.dsinks = of_queries->mutable_data_ptr();
  }
  if (call.is_empty()) {
    for (Tensor* gradient : {&b.dq, &b.dk, &b.dv, &dbias, &drelative_keys, &dsinks})
      torch::stable::zero_(*gradient);
  } else {
    b.run();
    if (a.dsinks && q.scalar_type() == ScalarType::Double)
      sum_of_queries<double>(a, dsinks);
    else if (a.dsinks)
      sum_of_queries<float>(a, dsinks);
  }
  const ScalarType type = q.scalar_type();
  return {as_type(b.dq, type),  as_type(b.dk, type),           as_type(b.dv, type),
          as_type(dbias, type), as_type(drelative_keys, type), as_type(dsinks, type)};
}

PlainGradients attention_plain_backward(const PlainBackwardInputs& i, const Needs& required) {
  const Inputs inputs = without_options({.q = i.q, .k = i.k, .v = i.v, .scale = i.scale});
  AttentionCall call(OF_PLAIN, inputs);
  Backward b(call, inputs, i.dout, i.lse, required.needs);
  if (call.is_empty()) {
    for (Tensor* gradient : {&b.dq, &b.dk, &b.dv})
      torch::stable::zero_(*gradient);
  } else {
    b.run();
  }
  const ScalarType type = i.q.scalar_type();
  return {as_type(b.dq, type), as_type(b.dk, type), as_type(b.dv, type)};
}

// For fused.explain: which cpu::AttentionKernel a call runs, and the number of queries in a block
// of the blockwise kernel.
PlanOutput attention_plan(const PlanInputs& i) {
  const Tensor& q = i.q;
  const AttentionCall call(PLAN, {.q = q,
                                  .k = i.k,
                                  .v = i.k,
                                  .relative_keys = i.relative_keys,
                                  .rope_interleaved = true,
                                  .key_rows = i.key_rows,
                                  .scale = 1,
                                  .causal = i.causal,
                                  .offset = i.offset,
                                  .sinks = i.sinks,
                                  .softcap = i.softcap,
                                  .window_left = i.window_left,
                                  .window_right = i.window_right,
                                  .cu_seqlens_q = i.cu_seqlens_q,
                                  .cu_seqlens_k = i.cu_seqlens_k,
                                  .max_seqlen_q = i.max_seqlen_q,
                                  .max_seqlen_k = i.max_seqlen_k});
  require(!call.is_empty(), PLAN, "a call without elements runs no kernel");
  const cpu::AttentionPlan plan = cpu::kernels().attention_plan(call.a);
  Tensor found = output(q, {2}, ScalarType::Long);
  int64_t* numbers = static_cast<int64_t*>(found.mutable_data_ptr());
  numbers[0] = int64_t(plan.kernel), numbers[1] = plan.block_queries;
  return {found};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<attention>(m, "attention");
  define<attention_backward>(m, "attention_backward");
  define<attention_plain>(m, "attention_plain");
  define<attention_plain_backward>(m, "attention_plain_backward");
  define<attention_plain_inference>(m, "attention_plain_inference");
  define<attention_plan>(m, "attention_plan");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("attention", boxed<attention>);
  m.impl("attention_backward", boxed<attention_backward>);
  m.impl("attention_plain", boxed<attention_plain>);
  m.impl("attention_plain_backward", boxed<attention_plain_backward>);
  m.impl("attention_plain_inference", boxed<attention_plain_inference>);
  m.impl("attention_plan", boxed<attention_plan>);
}

}  // namespace fusedseq
