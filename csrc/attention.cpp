// attention, forward and backward: csrc/cpu/attention.h on a CPU, kernels/attention.py on CUDA.
#include "tensor.h"

namespace fusedseq {
namespace {

using Optional = std::optional<Tensor>;
constexpr char OP[] = "attention";

// The kernels' element type; fp16, which few CPUs compute in, is widened to fp32 as a whole.
ScalarType stored(const Tensor& t) { return t.scalar_type() == ScalarType::Half ? ScalarType::Float : t.scalar_type(); }
ScalarType computing(const Tensor& t) { return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

// As it lies in memory, if its last dimension is dense and the kernels take its type.
Tensor rows(const Tensor& t) {
  const Tensor x = as_type(t, stored(t));
  return x.stride(3) == 1 || x.size(3) == 1 ? x : torch::stable::contiguous(x);
}
void strides_of(const Tensor& t, int64_t* strides, int count, bool broadcast) {
  for (int d = 0; d < count; ++d) strides[d] = broadcast && t.size(d) == 1 ? 0 : t.stride(d);
}

// A call's tensors, kept alive in the types and layouts of the kernel, and the arguments that point to them.
struct Call {
  std::vector<Tensor> kept;
  cpu::Attention a{};

  const void* keep(Tensor t) {
    kept.push_back(std::move(t));
    return kept.back().const_data_ptr();
  }

  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& bias, const Optional& mask_, const Optional& key_lengths,
       const Optional& alibi, const Optional& relative_keys, const Optional& rope, const Optional& key_rows, const Optional& seed,
       double scale, bool causal, int64_t offset, double dropout) {
    require(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, OP, "q must be (B, N, L, D), k and v (B, N_kv, S, D)");
    a.B = q.size(0), a.N = q.size(1), a.L = q.size(2), a.D = q.size(3), a.N_kv = k.size(1);
    a.S = key_rows ? key_rows->size(1) : k.size(2);
    require(a.L > 0 && a.S > 0 && a.D > 0 && a.N > 0 && a.N_kv > 0 && a.N % a.N_kv == 0, OP,
            "q and k must have N, L, S and D at least 1 and N a multiple of N_kv");
    require_shape(OP, "k", k, {key_rows ? k.size(0) : a.B, a.N_kv, key_rows ? k.size(2) : a.S, a.D});
    require_shape(OP, "v", v, {k.size(0), a.N_kv, k.size(2), a.D});
    const ScalarType type = stored(q), wide = computing(q);
    a.type = type == ScalarType::Float ? cpu::Type::f32 : kernel_type(OP, q);
    a.scale = scale, a.causal = causal, a.offset = offset;
    a.dropped = dropout > 0;
    require(!a.dropped || seed, OP, "dropout needs a seed");
    if (a.dropped) a.dropout = mask(*seed, dropout);
    Tensor q_ = rows(q), k_ = rows(k), v_ = rows(v);
    strides_of(q_, a.q_strides, 3, false), strides_of(k_, a.k_strides, 3, false), strides_of(v_, a.v_strides, 3, false);
    a.q = keep(q_), a.k = keep(k_), a.v = keep(v_);
    const Sizes all{a.B, a.N, a.L, a.S};
    if (bias) {
      require_broadcast("bias", *bias, all);
      Tensor bias_ = as_type(*bias, type);
      strides_of(bias_, a.bias_strides, 4, true);
      a.bias = keep(bias_);
    }
    if (mask_) {
      require_broadcast("mask", *mask_, all);
      require(mask_->scalar_type() == ScalarType::Bool, OP, "mask must be bool");
      strides_of(*mask_, a.mask_strides, 4, true);
      a.mask = static_cast<const uint8_t*>(mask_->const_data_ptr());
    }
    a.key_lengths = whole_numbers("key_lengths", key_lengths, {a.B});
    a.key_rows = whole_numbers("key_rows", key_rows, {a.B, a.S});
    if (key_rows) {
      require(a.S <= k.size(2), OP, "key_rows must not have more keys than k");
      for (int64_t i = 0; i < a.B * a.S; ++i)
        require(a.key_rows[i] >= 0 && a.key_rows[i] < k.size(0), OP, "key_rows must be rows of k");
    }
    if (alibi) {
      require_shape(OP, "alibi", *alibi, {a.N});
      a.alibi = keep(dense(*alibi, wide));
    }
    if (relative_keys) {
      a.K = relative_keys->size(0) / 2;
      require_shape(OP, "relative_keys", *relative_keys, {2 * a.K + 1, a.D});
      a.relative_keys = keep(dense(*relative_keys, wide));
    }
    if (rope) {
      const int64_t least = a.S > a.L + offset ? a.S : a.L + offset;
      require(rope->dim() == 2 && rope->size(1) == a.D && a.D % 2 == 0 && rope->size(0) >= least && offset >= 0, OP, "rope has a shape the kernel does not take");
      a.rope = keep(dense(*rope, wide));
    }
  }

  void require_broadcast(const char* name, const Tensor& t, const Sizes& all) {
    Sizes sizes(t.sizes().begin(), t.sizes().end());
    for (size_t d = 0; d < sizes.size() && d < 4; ++d)
      if (sizes[d] != 1) sizes[d] = all[d];
    require_shape(OP, name, t, sizes);
    require(t.dim() == 4, OP, "bias and mask must have four dimensions");
  }
  const int64_t* whole_numbers(const char* name, const Optional& t, const Sizes& shape) {
    if (!t) return nullptr;
    require_shape(OP, name, *t, shape);
    require(t->scalar_type() == ScalarType::Long, OP, "key_lengths and key_rows must be int64");
    return static_cast<const int64_t*>(keep(dense(*t)));
  }
};

// A (B, N, L, D) that lies in memory as (B, L, N, D).
Tensor heads_last(const Tensor& like, int64_t B, int64_t N, int64_t L, int64_t D) {
  return output(like, {B, N, L, D}, {L * N * D, D, N * D, 1}, stored(like));
}

// A part of `whole`, which it keeps alive.
Tensor part_of(const Tensor& whole, const Sizes& shape, const Sizes& strides, int64_t offset) {
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(whole.get(), int64_t(shape.size()), shape.data(), strides.data(), offset, &made));
  return Tensor(made);
}

// Gradients of views (B, N, L, D) of one projection (B, L, n, N, D) or (L, B, n, N, D), so laid out that together they are
// the projection's: `like` is the first of the n.
std::vector<Tensor> parts_of_projection(const Tensor& like, int64_t n) {
  const Sizes shape(like.sizes().begin(), like.sizes().end()), strides(like.strides().begin(), like.strides().end());
  const int64_t width = shape[1] * shape[3], row = n * width;
  const Sizes batch_first{shape[2] * row, shape[3], row, 1}, batch_second{row, shape[3], shape[0] * row, 1};
  require(strides == batch_first || strides == batch_second, OP,
          "arguments whose gradients are to be together must be parts of one projection");
  const Tensor whole = output(like, {shape[0] * shape[2] * row});
  std::vector<Tensor> parts;
  for (int64_t i = 0; i < n; ++i) parts.push_back(part_of(whole, shape, strides, i * width));
  return parts;
}

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, Optional bias, Optional mask, Optional key_lengths, Optional alibi,
                                     Optional relative_keys, Optional rope, Optional key_rows, Optional seed, double scale, bool causal,
                                     int64_t offset, double dropout) {
  Call call(q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, key_rows, seed, scale, causal, offset, dropout);
  cpu::Attention& a = call.a;
  Tensor out = heads_last(q, a.B, a.N, a.L, a.D), lse = output(q, {a.B, a.N, a.L}, computing(q));
  if (out.numel()) {
    a.out = out.mutable_data_ptr(), a.lse = lse.mutable_data_ptr();
    cpu::kernels().attention(a, parallel, threads());
  }
  return {as_type(out, q.scalar_type()), lse};
}

// needs: 1 dq, 2 dk, 4 dv, 8 dbias, 16 drelative_keys; 32 beside 7: dq, dk and dv together as the gradient of
// the projection that they are parts of, or 64 beside 6: dk and dv
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Optional bias, Optional mask, Optional key_lengths,
    Optional alibi, Optional relative_keys, Optional rope, Optional seed, double scale, bool causal, int64_t offset, double dropout,
    int64_t needs) {
  Call call(q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, {}, seed, scale, causal, offset, dropout);
  cpu::Attention& a = call.a;
  require_shape(OP, "dout", dout, {a.B, a.N, a.L, a.D});
  require_shape(OP, "lse", lse, {a.B, a.N, a.L});
  require(lse.scalar_type() == computing(q), OP, "lse must be of the computing type");
  const Tensor dout_ = rows(as_type(dout, q.scalar_type())), lse_ = dense(lse);
  strides_of(dout_, a.dout_strides, 3, false);
  a.dout = dout_.const_data_ptr(), a.lse = const_cast<void*>(lse_.const_data_ptr());
  // What is not needed is empty; no two results may be the same tensor.
  const bool as_stored = stored(q) == q.scalar_type(), q_too = as_stored && needs & 32, together = as_stored && needs & 96;
  const std::vector<Tensor> parts = together ? parts_of_projection(q_too ? q : k, q_too ? 3 : 2) : std::vector<Tensor>{};
  Tensor dq = q_too ? parts[0] : needs & 1 ? heads_last(q, a.B, a.N, a.L, a.D) : output(q, {0});
  Tensor dk = together ? parts[q_too] : needs & 2 ? heads_last(q, a.B, a.N_kv, a.S, a.D) : output(q, {0});
  Tensor dv = together ? parts[q_too + 1] : needs & 4 ? heads_last(q, a.B, a.N_kv, a.S, a.D) : output(q, {0});
  for (int d = 0; d < 2; ++d) {
    a.dq_strides[d] = needs & 1 ? dq.stride(2 * d) : 0;
    a.dk_strides[d] = needs & 2 ? dk.stride(2 * d) : needs & 4 ? dv.stride(2 * d) : 0;
  }
  Tensor dbias = output(q, {0}), drelative_keys = output(q, {0});
  const auto at = [](Tensor& t) { return t.numel() ? t.mutable_data_ptr() : nullptr; };
  a.dq = at(dq), a.dk = at(dk), a.dv = at(dv);
  if (needs & 8 && bias) {
    dbias = output(q, Sizes(bias->sizes().begin(), bias->sizes().end()), computing(q));
    strides_of(dbias, a.dbias_strides, 4, true);
    a.dbias = dbias.mutable_data_ptr(), a.dbias_size = dbias.numel();
  }
  if (needs & 16 && relative_keys) {
    drelative_keys = output(q, {2 * a.K + 1, a.D}, computing(q));
    a.drelative_keys = drelative_keys.mutable_data_ptr();
  }
  cpu::kernels().attention_backward(a, parallel, threads());
  const ScalarType type = q.scalar_type();
  return {as_type(dq, type), as_type(dk, type), as_type(dv, type), as_type(dbias, type), as_type(drelative_keys, type)};
}

// What `fused.explain` says of a call: its cpu::AttentionKernel, and the queries in a block of `rows`.
Tensor attention_plan(Tensor q, Tensor k, Optional relative_keys, Optional key_rows) {
  const Call call(q, k, k, {}, {}, {}, {}, relative_keys, {}, key_rows, {}, 1, false, 0, 0);
  const cpu::AttentionPlan plan = cpu::kernels().attention_plan(call.a);
  Tensor found = output(q, {2}, ScalarType::Long);
  int64_t* numbers = static_cast<int64_t*>(found.mutable_data_ptr());
  numbers[0] = int64_t(plan.kernel), numbers[1] = plan.block;
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? key_lengths, Tensor? alibi, Tensor? relative_keys, "
      "Tensor? rope, Tensor? key_rows, Tensor? seed, float scale, bool causal, int offset, float dropout) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, "
      "Tensor? key_lengths, Tensor? alibi, Tensor? relative_keys, Tensor? rope, Tensor? seed, float scale, bool causal, int offset, "
      "float dropout, int needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor drelative_keys)");
  m.def("attention_plan(Tensor q, Tensor k, Tensor? relative_keys, Tensor? key_rows) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_plan", TORCH_BOX(&attention_plan));
}

}  // namespace fusedseq
