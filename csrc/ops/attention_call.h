// The arguments of a call of attention, checked and in the types and layouts of its kernels.
#pragma once
#include <utility>
#include <vector>

#include "ops/precision.h"
#include "ops/tensor.h"

namespace fusedseq {
namespace {

// Positions are sums of the offset and an index, which 64 bits hold within these limits.
constexpr int64_t MAX_OFFSET = int64_t(1) << 62;
// The offset that stands for S - L, with which the last query is at the last key. A number of the
// sizes would fix their difference in a compiled graph.
constexpr int64_t AT_END = INT64_MIN;
// The most elements of the keys or values of a head. The kernels copy them, with padding, into
// workspaces, whose sizes must not exceed 64 bits.
constexpr int64_t MAX_HEAD = int64_t(1) << 40;

#define ATTENTION_QKV(FIELD)             \
  FIELD(Tensor, q) /* (B, N, L, D) */    \
  FIELD(Tensor, k) /* (B, N_kv, S, D) */ \
  FIELD(Tensor, v) /* (B, N_kv, S, D) */
#define ATTENTION_TERMS(FIELD)                                                \
  FIELD(OptionalTensor, bias)          /* (B or 1, N or 1, L or 1, S or 1) */ \
  FIELD(OptionalTensor, mask)          /* bool, as bias; true: seen */        \
  FIELD(OptionalTensor, key_lengths)   /* (B,) int64 */                       \
  FIELD(OptionalTensor, alibi)         /* (N,) slopes */                      \
  FIELD(OptionalTensor, relative_keys) /* (2K + 1, D) */                      \
  FIELD(OptionalTensor, rope)          /* (P, R) */                           \
  FIELD(bool, rope_interleaved)        /* pairs of neighbours, else halves */
#define ATTENTION_SETTINGS(FIELD)                                   \
  FIELD(OptionalTensor, seed) /* required by dropout */             \
  FIELD(double, scale)                                              \
  FIELD(bool, causal)                                               \
  FIELD(int64_t, offset) /* of query 0 among the keys, or AT_END */ \
  FIELD(double, dropout)
// The mask of a window, what happens to the logits, and sequences without padding: those of q are
// the rows of q (1, N, tokens, D) that cu_seqlens_q separates, and those of k and v as well. B is
// then the number of sequences, and L and S are max_seqlen_q and max_seqlen_k.
#define ATTENTION_MORE(FIELD)                                               \
  FIELD(OptionalTensor, sinks)        /* (N,) */                            \
  FIELD(double, softcap)              /* 0: none */                         \
  FIELD(int64_t, window_left)         /* keys before a position; -1: all */ \
  FIELD(int64_t, window_right)        /* keys after a position; -1: all */  \
  FIELD(OptionalTensor, cu_seqlens_q) /* (B + 1,) int64 */                  \
  FIELD(OptionalTensor, cu_seqlens_k) /* (B + 1,) int64 */                  \
  FIELD(int64_t, max_seqlen_q)                                              \
  FIELD(int64_t, max_seqlen_k)
#define KEY_ROWS(FIELD) FIELD(OptionalTensor, key_rows) /* (B, S) int64: rows of k and v */

#define ATTENTION_INPUTS(FIELD) \
  ATTENTION_QKV(FIELD)          \
  ATTENTION_TERMS(FIELD)        \
  KEY_ROWS(FIELD)               \
  ATTENTION_SETTINGS(FIELD)     \
  ATTENTION_MORE(FIELD)
FUSEDSEQ_DECLARE(Inputs, ATTENTION_INPUTS)

// The element type of the kernels: fp16 tensors are converted to fp32 as a whole, because few CPUs
// compute in fp16.
ScalarType kernel_scalar_type(const Tensor& t) {
  return t.scalar_type() == ScalarType::Half ? ScalarType::Float : t.scalar_type();
}
ScalarType computing(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The tensor in the kernels' type, copied only where its last dimension is not contiguous.
Tensor with_dense_rows(const Tensor& t) {
  const Tensor x = as_type(t, kernel_scalar_type(t));
  return x.stride(3) == 1 || x.size(3) == 1 ? x : torch::stable::contiguous(x);
}
void strides_of(const Tensor& t, int64_t* strides, int count, bool broadcast) {
  for (int d = 0; d < count; ++d)
    strides[d] = broadcast && t.size(d) == 1 ? 0 : t.stride(d);
}

// The tensors of a call in the types and layouts of the kernel, and the arguments that point to
// their memory.
struct AttentionCall {
  const char* op;  // for error messages
  std::vector<Tensor> owned;
  cpu::Attention a{};

  const void* own(Tensor t) {
    owned.push_back(std::move(t));
    return owned.back().const_data_ptr();
  }

  AttentionCall(const char* op, const Inputs& i) : op(op) {
    const auto& [q, k, v, bias, mask_, key_lengths, alibi, relative_keys, rope, rope_interleaved,
                 key_rows, seed, scale, causal, given_offset, dropout, sinks, softcap, window_left,
                 window_right, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k] = i;
    set_sizes(i);
    const int64_t offset = given_offset == AT_END ? a.S - a.L : given_offset;
    owned.reserve(3);  // q, k and v; few calls have more
    require_range(op, "offset", offset, -MAX_OFFSET, MAX_OFFSET);
    require_probability(op, "dropout", dropout);
    const ScalarType type = kernel_scalar_type(q), wide = computing(q);
    a.type = type == ScalarType::Float ? cpu::Type::f32 : kernel_type(op, "q", q);
    a.scale = scale;
    a.causal = causal;
    a.offset = offset;
    if (!(softcap >= 0)) refuse(op, "softcap must be at least 0, got ", softcap);
    a.softcap = softcap;
    set_window(i);
    if (sinks) {
      require_shape(op, "sinks", *sinks, {a.N});
      require_dtype(op, "sinks", *sinks, q.scalar_type());
      a.sinks = own(dense(*sinks, wide));
    }
    a.dropped = dropout > 0;
    require(!a.dropped || seed, op, "dropout needs a seed");
    if (seed) require_seed(op, *seed);
    if (a.dropped) a.dropout = mask(*seed, dropout);
    Tensor q_ = with_dense_rows(q), k_ = with_dense_rows(k), v_ = with_dense_rows(v);
    strides_of(q_, a.q_strides, 3, false);
    strides_of(k_, a.k_strides, 3, false);
    strides_of(v_, a.v_strides, 3, false);
    if (a.cu_seqlens_q) a.q_strides[0] = a.k_strides[0] = a.v_strides[0] = 0;
    a.q = own(q_);
    a.k = own(k_);
    a.v = own(v_);
    const Sizes all{a.B, a.N, a.L, a.S};
    if (bias) {
      require_broadcast("bias", *bias, all);
      require_dtype(op, "bias", *bias, q.scalar_type());
      Tensor bias_ = as_type(*bias, type);
      strides_of(bias_, a.bias_strides, 4, true);
      a.bias = own(bias_);
    }
    if (mask_) {
      require_broadcast("mask", *mask_, all);
      require_dtype(op, "mask", *mask_, ScalarType::Bool);
      strides_of(*mask_, a.mask_strides, 4, true);
      a.mask = static_cast<const uint8_t*>(mask_->const_data_ptr());
    }
    a.key_lengths = whole_numbers("key_lengths", key_lengths, {a.B}, a.S);
    a.key_rows = whole_numbers("key_rows", key_rows, {a.B, a.S}, k.size(0) - 1);
    if (alibi) {
      require_shape(op, "alibi", *alibi, {a.N});
      require_constant("alibi", *alibi, q);
      a.alibi = own(dense(*alibi, wide));
    }
    if (relative_keys) {
      require_dimensions(op, "relative_keys", *relative_keys, 2, "(2K + 1, D)");
      a.K = relative_keys->size(0) / 2;
      require_shape(op, "relative_keys", *relative_keys, {2 * a.K + 1, a.D});
      require_dtype(op, "relative_keys", *relative_keys, q.scalar_type());
      a.relative_keys = own(dense(*relative_keys, wide));
    }
    if (rope) {
      const int64_t least = a.S > a.L + offset ? a.S : a.L + offset;
      if (offset < 0) refuse(op, "offset must be at least 0 with rope, got ", offset);
      for (int64_t b = 0; a.cu_seqlens_q && b < a.B; ++b)
        if (length(a.cu_seqlens_q, b) > length(a.cu_seqlens_k, b))
          refuse(op, "a sequence must have at least as many keys as queries with rope, got ",
                 length(a.cu_seqlens_q, b), " queries and ", length(a.cu_seqlens_k, b),
                 " keys of sequence ", b);
      require_that(rope->dim() == 2 && rope->size(1) <= a.D && rope->size(1) % 2 == 0 &&
                       rope->size(0) >= least,
                   op, "rope", *rope,
                   "(P, R) with an even R of at most q's D, and a row for every position");
      require_constant("rope", *rope, q);
      a.rope = own(dense(*rope, wide));
      a.rope_width = rope->size(1);
      a.rope_interleaved = rope_interleaved;
    }
  }

  // Checks the shapes and dtypes of q, k and v, and sets the sizes.
  void set_sizes(const Inputs& i) {
    const Tensor &q = i.q, &k = i.k, &v = i.v;
    const Shape of_q = q.sizes(), of_k = k.sizes();  // read once: each size() is a call of torch
    require_that(of_q.size() == 4, op, "q", q, "(B, N, L, D)");
    require_that(of_k.size() == 4, op, "k", k, "(B, N_kv, S, D)");
    a.B = of_q[0], a.N = of_q[1], a.L = of_q[2], a.D = of_q[3];
    a.N_kv = of_k[1], a.S = of_k[2];
    a.queries = a.B * a.L;
    checked_product(op, "q", of_q);
    require_that((a.N_kv ? a.N % a.N_kv == 0 : a.N == 0) && of_k[3] == a.D, op, "k", k,
                 "(B, N_kv, S, D) with q's D and an N_kv that divides N");
    require_that(a.S == 0 || cpu::padded(a.D) <= MAX_HEAD / a.S, op, "k", k,
                 "(B, N_kv, S, D) with S times D at most 2^40");
    if (i.key_rows) {
      require_dimensions(op, "key_rows", *i.key_rows, 2, "(B, S)");
      a.S = i.key_rows->size(1);
      require_that(a.S <= of_k[2], op, "key_rows", *i.key_rows, "(B, S) with no more keys than k");
    } else {
      require_that(of_k[0] == a.B, op, "k", k, "(B, N_kv, S, D) with q's B");
    }
    if (i.cu_seqlens_q || i.cu_seqlens_k) set_sequences(i);
    require_shape(op, "v", v, of_k);
    const ScalarType type = q.scalar_type();
    require_dtype(op, "k", k, type);
    require_dtype(op, "v", v, type);
  }

  // The sizes of packed sequences.
  void set_sequences(const Inputs& i) {
    require(i.cu_seqlens_q && i.cu_seqlens_k, op, "cu_seqlens_q and cu_seqlens_k go together");
    require(!i.key_rows && !i.key_lengths && i.offset == 0, op,
            "packed sequences have no key_rows, key_lengths or offset");
    require(a.B == 1, op, "the batch size of packed sequences must be 1");
    require_dimensions(op, "cu_seqlens_q", *i.cu_seqlens_q, 1, "(B + 1,)");
    const int64_t B = i.cu_seqlens_q->numel() - 1, queries = a.L, keys = a.S;
    require(B >= 0, op, "cu_seqlens_q must have at least one element");
    a.queries = queries;
    a.B = B, a.L = i.max_seqlen_q, a.S = i.max_seqlen_k;
    checked_product(op, "the log-sum-exp of max_seqlen_q", {a.B, a.N, a.L});
    require(a.S >= 0 && (a.S == 0 || cpu::padded(a.D) <= MAX_HEAD / a.S), op,
            "max_seqlen_k is too large");
    a.cu_seqlens_q = boundaries("cu_seqlens_q", *i.cu_seqlens_q, queries, a.L);
    a.cu_seqlens_k = boundaries("cu_seqlens_k", *i.cu_seqlens_k, keys, a.S);
  }
  // The address of the B + 1 boundaries of sequences of at most `longest` of `rows` rows.
  const int64_t* boundaries(const char* name, const Tensor& t, int64_t rows, int64_t longest) {
    const int64_t* cu = whole_numbers(name, t, {a.B + 1}, rows);
    bool are_right = cu[0] == 0 && cu[a.B] == rows;
    for (int64_t b = 0; b < a.B; ++b)
      are_right = are_right && length(cu, b) >= 0 && length(cu, b) <= longest;
    require_that(are_right, op, name, t,
                 "0, then the ends of sequences of at most max_seqlen rows, then the rows");
    return cu;
  }
  static int64_t length(const int64_t* cu, int64_t b) { return cu[b + 1] - cu[b]; }

  // The window, unless no query of the call has a key outside of it.
  void set_window(const Inputs& i) {
    constexpr int64_t UNLIMITED = cpu::Attention::UNLIMITED;
    require(i.window_left >= -1 && i.window_right >= -1, op,
            "window_left and window_right must be at least -1");
    const auto limited = [](int64_t n) {
      return n < 0 || n > UNLIMITED ? UNLIMITED : n;
    };
    a.window_left = limited(i.window_left);
    a.window_right = a.causal ? 0 : limited(i.window_right);
    const int64_t last = i.cu_seqlens_q ? a.S - 1 : a.L - 1 + a.offset;  // position of a query
    const int64_t first = i.cu_seqlens_q ? -a.L : a.offset;
    a.windowed = a.window_left < last || (!a.causal && a.window_right < a.S - 1 - first);
  }

  // Whether the kernels have nothing to do: without elements no query sees a key.
  bool is_empty() const { return !(a.B && a.N && a.L && a.S && a.D && a.queries); }

  void require_broadcast(const char* name, const Tensor& t, const Sizes& all) {
    require_dimensions(op, name, t, 4, "(B or 1, N or 1, L or 1, S or 1)");
    for (int d = 0; d < 4; ++d)
      require_that(t.size(d) == 1 || t.size(d) == all[d], op, name, t,
                   "(B or 1, N or 1, L or 1, S or 1)");
  }
  // A table that may be more exact than q.
  void require_constant(const char* name, const Tensor& t, const Tensor& q) {
    if (t.scalar_type() != ScalarType::Float) require_dtype(op, name, t, q.scalar_type());
  }
  // The address of int64 values in [0, high].
  const int64_t* whole_numbers(const char* name, const OptionalTensor& t, Shape shape,
                               int64_t high) {
    if (!t) return nullptr;
    require_shape(op, name, *t, shape);
    require_dtype(op, name, *t, ScalarType::Long);
    const int64_t* values = static_cast<const int64_t*>(own(dense(*t)));
    require_range(op, name, values, t->numel(), 0, high);
    return values;
  }
};

}  // namespace
}  // namespace fusedseq
