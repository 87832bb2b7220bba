// The interface of the CPU kernels: csrc/ops/*.cpp fills these structs and calls the functions of
// the table `Kernels`, which csrc/cpu/kernels.cpp defines once per instruction set. Nothing here
// depends on torch.
//
// T is the type of computing, float or double. Type is an element type in memory; bfloat16 is
// computed in float. Tensors are contiguous unless strides are given. A pointer that may be null
// says so.
#pragma once
#include <cstdint>

#include "math/cell_kind.h"
#include "math/host_device.h"
#include "math/mask_stream.h"

namespace fusedseq::cpu {

// A parallel loop: splits [0, n) into ranges, calls body(context, begin, end) once for each, and
// runs several ranges at the same time. The kernels rely on that: parts wait for each other.
using Body = void (*)(void* context, int64_t begin, int64_t end);
using Parallel = void (*)(int64_t n, Body body, void* context);

enum class Type { f32, f64, bf16 };

// An element of a bfloat16 tensor: the upper half of a float.
struct bfloat16 {
  uint16_t bits;
};

// A random mask of shape (rows, S) by the rule of math/philox.h.
struct Mask {
  uint64_t seed;
  uint64_t threshold;  // round(p * 2^32); where a kernel makes the mask optional, 0 means none
  double scale;        // the factor of the elements that are kept, 1 / (1 - p)
  MaskStream stream = MaskStream::single;
};

struct Dropout {
  Type type;
  int64_t T, B, D;
  const void* x;  // (T, B, D)
  void* y;        // (T, B, D)
  Mask mask;      // (B, D), the same at every time step
};

// y[n] = W[ids[n]], scaled or zero if the whole embedding row is dropped.
struct Embedding {
  Type type;
  int64_t N, V, E;
  const int64_t* ids;   // (N,)  rows of W; if null, ids[n] = n
  const int64_t* keys;  // (V,)  the element of the mask for each row of W; if null, keys[v] = v
  const void* W;        // (V, E)
  void* y;              // (N, E)
  bool masked;
  Mask mask;  // (1, number of keys)
};

// alpha * sum(dropped^2) + beta * sum((raw[t + 1] - raw[t])^2).
struct ActivationRegularization {
  Type type;
  int64_t T;
  int64_t N;            // B * H, the elements of a time step
  const void* dropped;  // (T, N)  the output after dropout
  const void* raw;      // (T, N)  the output before dropout
  double alpha;         // already divided by T * N
  double beta;          // already divided by (T - 1) * N; 0 if T == 1
  void* ddropped;       // (T, N)  backward only
  void* draw;           // (T, N)  backward only
};

// Rows of the tensors that a recurrence saves for backward are padded to multiples of PAD, so that
// they consist of whole vectors in every instruction set.
constexpr int64_t PAD = 16;
inline int64_t padded(int64_t n) {
  return (n + PAD - 1) / PAD * PAD;
}

// The numbers of a recurrence's weights: those of the type it computes in, or narrower ones. Row n
// of a weight of 8 bits is scale[n] times whole numbers; there is no backward for it.
enum class WeightType { full, bf16, int8 };

// C (M, N) (+)= A (M, K) W^T + bias, where row n of W is scale[n] times the numbers of 8 bits W[n].
struct Int8Product {
  int64_t M, K, N;
  const float* A;  // (M, lda)
  int64_t lda;
  const int8_t* W;     // (N, K)
  const float* scale;  // (N,)
  const float* bias;   // (N,) or null
  float* C;            // (M, ldc)
  int64_t ldc;
  bool whole_vectors;  // whether to write zeros behind column N of C, unless it accumulates
  bool accumulate;
};
// A function that computes such a product without converting W first.
struct Int8Rows {
  void (*multiply)(const Int8Product&);
  int64_t most;  // the most rows of A for which it is the fastest way
};

// A recurrence over `steps` time steps (T in the shapes); with rounds > 0, which only the cell
// `lstm` can have, a Mogrifier LSTM. G, Z, N, V and S stand for gates_of(cell), slots_of(cell),
// biases_of(cell), vectors_of(cell) and statistics_of(cell), Hp, Xp and rp for padded(H), padded(X)
// and padded(rank). Round k scales x if k is even and h if k is
// odd; `out` is the width of what it scales, `in` that of the other operand. c0, c and cells are
// null for a cell without c. What a forward saves is all null where no backward will follow.
//
// With a projection W_hr, which only the cell `lstm` without rounds can have, h and y are W_hr
// times what the cell computes. P is their width, and H where there is none.
template <class T>
struct Recurrence {
  CellKind cell;
  int64_t steps, B, X, H, P;
  bool reverse;  // from the last step to the first, each row from its own end on
  int64_t rounds;
  int64_t rank;  // of the rounds' weights, factored as A F; 0 means one full matrix A
  bool cap_input_gate;
  bool training;
  Mask state;                 // (B, H)  dropout of h, the same at every step; threshold 0: none
  Mask zoneout_h, zoneout_c;  // (T * B, H)  threshold 0: none
  double zoneout_h_p, zoneout_c_p;
  double eps;              // of layer normalization, added to variances
  const int64_t* lengths;  // (B,) or null
  const uint8_t* starts;   // (T, B) or null  1: the state is zero before this step
  const T* x;              // (T, B, X)
  WeightType weights;      // of W_ih, W_hh, W_hr, A and F
  const void* W_ih;        // (G H, X)
  const void* W_hh;        // (G H, P)
  const void* W_hr;        // (P, H) or null
  const T* b;              // (N H,) or null
  const T* vectors;        // (V H,)  the cell's own parameters
  const T* h0;             // (B, P)
  const T* c0;             // (B, H)
  const void* const* A;    // `rounds` pointers to (out, in), or to (out, rank) with a low rank
  const void* const* F;    // `rounds` pointers to (rank, in), only with a low rank
  const T* const* bias;    // `rounds` pointers to (out,) or null
  // Of weights of 8 bits: a scale for each of their rows.
  const float *W_ih_scale, *W_hh_scale;
  const float* const* A_scale;  // `rounds` pointers, as A and F are
  const float* const* F_scale;
  Int8Rows int8_rows;  // multiplies by weights of 8 bits
  T* y;                // (T, B, P)
  T* h;                // (B, P)  the last hidden state
  T* c;                // (B, H)  the last cell state
  T* gates;            // (T, B, Z, Hp)  activated gates, saved
  T* cells;            // (T, B, Hp)  the cell state after each step, saved
  T* statistics;       // (T, B, S)  of layer normalization, saved
  T* round_gates;      // (T, B, sum of padded widths)  the rounds' sigmoids, saved
  T* factors;          // (rounds, T, B, rp)  operand times F^T, saved
};

template <class T>
struct RecurrenceBackward {
  Recurrence<T> forward;  // the inputs, and y and all that is saved
  const T* dy;            // (T, B, P)
  const T* dh;            // (B, P)
  const T* dc;            // (B, H), like dc0 null for a cell without c
  T* dx;                  // (T, B, X) or null if not needed
  T* dh0;                 // (B, P)
  T* dc0;                 // (B, H)
  T* dW_ih;               // (G H, X) or null if not needed
  T* dW_hh;               // (G H, P) or null if not needed
  T* dW_hr;               // (P, H) or null if not needed
  T* db;                  // (N H,) or null if not needed
  T* dvectors;            // (V H,) or null if not needed
  // `rounds` pointers each, to gradients in the shapes of A, F and bias; null if not needed. Rounds
  // that share a weight share the pointer, and their gradients are summed.
  T* const* dA;
  T* const* dF;
  T* const* dbias;
};

// y = x W^T + b and its gradients. T is the type in memory, also bfloat16.
template <class T>
struct Linear {
  int64_t M, K, N;
  const T* x;   // (M, K)
  const T* W;   // (N, K)
  const T* b;   // (N,) or null
  T* y;         // (M, N)
  const T* dy;  // (M, N)  backward only
  T* dx;        // (M, K)  backward only, null if not needed
  T* dW;        // (N, K)  backward only, null if not needed
  T* db;        // (N,)  backward only, null if not needed
};

// y = x W^T + b, where row n of W is scale[n] times the numbers of 8 bits W[n].
struct LinearInt8 {
  int64_t M, K, N;
  const float* x;      // (M, K)
  const int8_t* W;     // (N, K)
  const float* scale;  // (N,)
  const float* b;      // (N,) or null
  float* y;            // (M, N)
  Int8Rows rows;
};

// The kernel that runs an attention call. pyext/fusedseq/fused/explain.py lists them in this order.
enum class AttentionKernel : int64_t { rows, packed, thin };
struct AttentionPlan {
  AttentionKernel kernel;
  int64_t block;  // queries per block of the kernel `rows`
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

// y = LayerNorm(s), s = residual + dropout(x), row by row.
struct ResidualLayerNorm {
  Type type;
  int64_t M, D;
  const void* x;         // (M, D)
  const void* residual;  // (M, D) or null
  const void* weight;    // (D,) or null
  const void* bias;      // (D,) or null
  double eps;
  Mask mask;   // (M, D)  threshold 0: none
  void* y;     // (M, D)
  void* s;     // (M, D) or null if the caller does not use it
  void* mean;  // (M,)  in the type of computing
  void* rstd;  // (M,)  in the type of computing
};

struct ResidualLayerNormBackward {
  // The inputs, mean, rstd and s. If s is null it is recomputed from x and residual.
  ResidualLayerNorm forward;
  const void* dy;   // (M, D)
  const void* ds;   // (M, D) or null
  void* dx;         // (M, D) or null if not needed
  void* dresidual;  // (M, D) or null if not needed
  void* dweight;    // (D,)  in the type of computing, or null if not needed
  void* dbias;      // (D,)  in the type of computing, or null if not needed
};

enum class Activation { relu, gelu, gelu_tanh, tanh };

// y = dropout(activation(x + b)) and its gradients.
struct BiasActivationDropout {
  Type type;
  Activation activation;
  int64_t M, D;
  const void* x;  // (M, D)
  const void* b;  // (D,) or null
  void* y;        // (M, D)
  Mask mask;      // (M, D)  threshold 0: none
  bool backward;
  const void* dy;  // (M, D)  backward only
  void* dx;        // (M, D)  backward only, null if not needed
  void* db;        // (D,)  backward only, in the type of computing, null if not needed
};

// The cross-entropy of logits z = (x W^T + b) / temperature, whose rows all have a target. S is the
// type in memory of the two large inputs, and of the gradient of W.
template <class T, class S = T>
struct LinearCrossEntropy {
  int64_t N, E, V;
  const S* x;              // (N, E)
  const S* W;              // (V, E)
  const T* b;              // (V,) or null
  const int64_t* target;   // (N,)  each in [0, V)
  const T* class_weights;  // (V,), or null if all weights are 1
  double weights_sum;      // the sum of class_weights, V if all are 1
  double label_smoothing, z_loss, temperature;
  bool statistics;      // true: compute loss, lse, log_prob and argmax; false: lse is an input
  T* loss;              // (N,)
  T* lse;               // (N,)
  T* log_prob;          // (N,)  of the target
  int64_t* argmax;      // (N,)
  double dloss_of_all;  // the gradient of every row's loss if dloss is null
  const T* dloss;       // (N,) or null
  const T* dlog_prob;   // (N,) or null
  const T* dlse;        // (N,) or null
  T* dx;                // (N, E) or null if not needed
  S* dW;                // (V, E) or null if not needed
  T* db;                // (V,) or null if not needed
};

// y = x * factor.
struct Scale {
  Type type;  // of y
  Type of_x;  // the same, or the type of computing
  int64_t n;
  const void* x;  // (n,)
  double factor;
  void* y;  // (n,)
};

// One parameter tensor of the optimiser. The average has the type of computing: float for bfloat16,
// because in bfloat16 a running mean soon stops changing.
struct NtAsgdTensor {
  Type type;
  int64_t n;
  const void* g;  // (n,)  the gradient
  void* p;        // (n,)  the parameter; null if only the gradient's norm is needed
  void* average;  // (n,) or null if there is no average
};

struct NtAsgd {
  const NtAsgdTensor* tensors;  // (count,)
  int64_t count;
  double clip, lr, weight_decay;
  double mu;  // 1 / (number of averaged parameters); 1 means the average starts with this step
};

// The functions whose products multiply pairs of bfloat16 numbers and add in float, which some
// instruction sets can; see csrc/cpu/simd/bf16_pair.h. All are null in the others. Operands that
// are floats in memory are rounded to bfloat16 for the products only.
struct Bf16Kernels {
  void (*recurrence)(const Recurrence<float>*, int count, Parallel, int threads);
  void (*recurrence_backward)(const RecurrenceBackward<float>*, int count, Parallel, int threads);
  void (*linear)(const Linear<bfloat16>&, Parallel, int threads);
  void (*linear_backward)(const Linear<bfloat16>&, Parallel, int threads);
  void (*linear_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_backward_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_cross_entropy)(const LinearCrossEntropy<float, bfloat16>&, Parallel, int threads);
  void (*linear_cross_entropy_f32)(const LinearCrossEntropy<float>&, Parallel, int threads);
  void (*attention)(const Attention&, Parallel, int threads);  // of bf16 and of fp32 tensors
  void (*attention_backward)(const Attention&, Parallel, int threads);
  double (*gemm)(int64_t M, int64_t N, int64_t K, const float* A, const float* W, float* C,
                 int64_t repeats, Parallel, int threads);
};

// The functions that each instruction set provides. `threads` is the number of parts of the work.
struct Kernels {
  const char* isa;
  int vector_bytes;
  // keep[j - begin] = whether the mask keeps element j of row `row`, for j in [begin, end).
  void (*keep_mask)(const Mask&, int64_t row, int64_t S, int64_t begin, int64_t end, uint8_t* keep);
  void (*dropout)(const Dropout&, Parallel, int threads);
  void (*embedding)(const Embedding&, Parallel, int threads);
  // dW (V, E) is in the type of computing; `zeroed` says that it already contains zeros.
  void (*embedding_backward)(const Embedding&, const void* dy, void* dW, bool zeroed, Parallel,
                             int threads);
  double (*activation_regularization)(const ActivationRegularization&, Parallel, int threads);
  void (*activation_regularization_backward)(const ActivationRegularization&, double dloss,
                                             Parallel, int threads);
  // One recurrence, or two with the same cell that run at the same time; `threads` is the number of
  // parts of the work of each.
  void (*recurrence_f32)(const Recurrence<float>*, int count, Parallel, int threads);
  void (*recurrence_f64)(const Recurrence<double>*, int count, Parallel, int threads);
  void (*recurrence_backward_f32)(const RecurrenceBackward<float>*, int count, Parallel,
                                  int threads);
  void (*recurrence_backward_f64)(const RecurrenceBackward<double>*, int count, Parallel,
                                  int threads);
  void (*linear_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_f64)(const Linear<double>&, Parallel, int threads);
  void (*linear_backward_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_backward_f64)(const Linear<double>&, Parallel, int threads);
  void (*linear_int8)(const LinearInt8&, Parallel, int threads);
  Int8Rows int8_rows;
  void (*attention)(const Attention&, Parallel, int threads);
  void (*attention_backward)(const Attention&, Parallel, int threads);
  AttentionPlan (*attention_plan)(const Attention&);
  void (*residual_layer_norm)(const ResidualLayerNorm&, Parallel);
  void (*residual_layer_norm_backward)(const ResidualLayerNormBackward&, Parallel);
  void (*bias_activation_dropout)(const BiasActivationDropout&, Parallel);
  void (*linear_cross_entropy_f32)(const LinearCrossEntropy<float>&, Parallel, int threads);
  void (*linear_cross_entropy_f64)(const LinearCrossEntropy<double>&, Parallel, int threads);
  void (*scale)(const Scale&, Parallel);
  double (*nt_asgd_squares)(const NtAsgd&, Parallel);  // the sum of the squares of all gradients
  void (*nt_asgd_step)(const NtAsgd&, Parallel);
  // The benchmark of the matrix product. Returns the number of floating-point operations.
  double (*gemm_f32)(int64_t M, int64_t N, int64_t K, const float* A, const float* W, float* C,
                     int64_t repeats, Parallel, int threads);
  // The functions of kernels_bf16.cpp.
  Bf16Kernels bf16;
};

}  // namespace fusedseq::cpu
