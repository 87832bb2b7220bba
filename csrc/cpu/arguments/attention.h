// The arguments of attention and of its backward pass.
#pragma once
#include "cpu/arguments/common.h"

namespace fusedseq::cpu {

// The kernel that runs an attention call. pyext/fusedseq/fused/explain_cpu.py lists them in this
// order.
enum class AttentionKernel : int64_t { blocks, packed, few_queries };
struct AttentionPlan {
  AttentionKernel kernel;
  int64_t block_queries;  // the queries in a block of the kernel `blocks`
};

// Attention and its gradients. Strides are in elements and belong to the leading dimensions; the
// last dimension has stride 1, except in bias and mask, whose last stride is given too.
struct Attention {
  Type type;  // of q, k, v, bias and dout; all other tensors have the type of computing
  int64_t B, N, N_kv, L, S, D;  // of packed sequences: their number, and the longest ones
  int64_t K;                    // the clipping distance of relative_keys
  int64_t offset;               // the position of query 0 among the keys
  double scale;
  double softcap;  // 0: none
  bool causal;
  // A query at position p sees keys p - window_left to p + window_right; at most UNLIMITED.
  // Without a window, window_right is 0 if causal.
  static constexpr int64_t UNLIMITED = int64_t(1) << 61;
  bool windowed;
  int64_t window_left, window_right;
  // The sequences of q and of k and v, whose rows follow each other: sequence b has rows
  // [cu[b], cu[b + 1]), and is batch row b for all other tensors. (B + 1,) or null
  const int64_t *cu_seqlens_q, *cu_seqlens_k;
  int64_t queries;  // of all batch rows
  bool dropped;     // whether dropout is applied
  Mask dropout;     // (B, N, L, S)
  const void* q;    // (B, N, L, D)
  const void* k;    // (B, N_kv, S, D)
  const void* v;    // (B, N_kv, S, D)
  int64_t q_strides[3], k_strides[3], v_strides[3];
  const void* bias;  // (B, N, L, S) or null; strides are 0 where it is broadcast
  int64_t bias_strides[4];
  const uint8_t* mask;  // (B, N, L, S) or null; strides are 0 where it is broadcast
  int64_t mask_strides[4];
  const int64_t* key_lengths;  // (B,) or null
  const int64_t* key_rows;     // (B, S) or null  the batch row of k and v that holds each key
  const void* alibi;           // (N,) or null
  const void* sinks;           // (N,) or null
  const void* relative_keys;   // (2K + 1, D) or null
  const void* rope;            // (positions, rope_width) or null  cos, sin, cos, sin, ...
  int64_t rope_width;          // the elements of a head that are rotated, the first ones
  bool rope_interleaved;       // pairs are (x_2m, x_2m+1), else (x_m, x_m+rope_width/2)
  void* out;                   // (B, L, N, D)
  void* lse;                   // (B, N, L)  +inf for a query that sees no key
  const void* dout;            // (B, N, L, D)  this and all below are for backward only
  int64_t dout_strides[3];
  void* dq;               // (B, L, N, D) or null if not needed; heads are D apart
  void* dk;               // (B, S, N_kv, D) or null if not needed; heads are D apart
  void* dv;               // (B, S, N_kv, D) or null if not needed; heads are D apart
  int64_t dq_strides[2];  // of the first two dimensions
  int64_t dk_strides[2];  // of the first two dimensions of dk and of dv
  void* dbias;            // in the shape of bias before broadcasting, or null if not needed
  int64_t dbias_strides[4];
  int64_t dbias_size;    // the number of its elements
  void* drelative_keys;  // (2K + 1, D) or null if not needed
  void* dsinks;          // (B, N, L)  the share of each query, or null if not needed
};

}  // namespace fusedseq::cpu
