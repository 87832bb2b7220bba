// The CPU kernels: what csrc/<op>.cpp calls and csrc/cpu/kernels.cpp defines once per instruction set. Torch-free.
// T is float or double; S is the type in memory, float, double or bfloat16 (2 bytes).
#pragma once
#include <cstdint>

namespace fusedseq::cpu {

// Runs body(context, begin, end) on the parts [0, n) cut into ranges, each range once and, where there is more than
// one, all at the same time.
using Body = void (*)(void* context, int64_t begin, int64_t end);
using Parallel = void (*)(int64_t n, Body body, void* context);

enum class Type { f32, f64, bf16 };

// Masks of (rows, S): element j of a row is kept by `philox.h`'s rule.
struct Mask {
  uint64_t seed, threshold;  // threshold = round(p * 2^32)
  double scale;              // of what is kept: 1 / (1 - p)
};

// Every pointer wears its shape. mask rows are b, columns d.
struct Dropout {
  Type type;
  int64_t T, B, D;
  const void* x;  // (T, B, D)
  void* y;        // (T, B, D)
  Mask mask;      // (B, D), the same for every t
};

struct Embedding {
  Type type;
  int64_t N, V, E;
  const int64_t* ids;   // (N,)  rows of W; the row's number itself where null
  const int64_t* keys;  // (V,)  the mask's element for row v of W; v itself where null
  const void* W;        // (V, E)
  void* y;              // (N, E)
  bool masked;
  Mask mask;  // (keys,), one row
};

struct ActivationRegularization {
  Type type;
  int64_t T, N;         // N = B * H
  const void *dropped;  // (T, N)
  const void *raw;      // (T, N)
  double alpha, beta;   // alpha / (T N) and beta / ((T - 1) N) once divided
  void *ddropped, *draw;  // (T, N), backward only
};

// A recurrence over T steps: the LSTM with rounds = 0, else the Mogrifier LSTM. Hp, Xp, rp: H, X, rank rounded up to
// PAD. Saved tensors are padded so that every row is whole vectors on any machine.
constexpr int64_t PAD = 16;
inline int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }

template <class T> struct Recurrence {
  int64_t steps, B, X, H, rounds, rank;  // rank 0: full
  bool cap_input_gate, training;
  Mask state, zoneout_h, zoneout_c;       // a threshold of 0: none
  double zoneout_h_p, zoneout_c_p;
  const int64_t* lengths;                 // (B,) or null
  const T *x;                             // (T, B, X)
  const T *W_ih, *W_hh, *b;               // (4H, X), (4H, H), (4H,) or null
  const T *h0, *c0;                       // (B, H)
  const T* const* A;                      // rounds: (out, in), low rank (out, rank)
  const T* const* F;                      // rounds: (rank, in), the second factor of a low rank
  const T* const* bias;                   // rounds: (out,) or null
  T *y, *h, *c;                           // (T, B, H), (B, H), (B, H)
  T *gates;                               // (T, B, 4, Hp)  activated
  T *cells;                               // (T, B, Hp)     c after each step
  T *round_gates;                         // (T, B, sum of padded widths)  sigmoids
  T *factors;                             // (rounds, T, B, rp)  operand times the second factor
};

template <class T> struct RecurrenceBackward {
  Recurrence<T> forward;                  // its y, gates, cells, round_gates and factors are read
  const T *dy, *dh, *dc;                  // (T, B, H), (B, H), (B, H)
  T *dx, *dh0, *dc0;                      // (T, B, X), (B, H), (B, H)
  T *dW_ih, *dW_hh, *db;                  // as the weights; null where not needed, as is dx
  T* const* dA;                           // rounds, null where not needed; a repeated pointer adds up
  T* const* dF;
  T* const* dbias;
};

template <class T> struct Linear {
  int64_t M, K, N;
  const T *x, *W, *b;  // (M, K), (N, K), (N,) or null
  T* y;                // (M, N)
  const T* dy;         // (M, N), backward only, as what follows; null where not needed
  T *dx, *dW, *db;     // (M, K), (N, K), (N,)
};

// What runs an attention: see explain.py, which has the kernels in this order.
enum class AttentionKernel : int64_t { rows, packed, thin };
struct AttentionPlan {
  AttentionKernel kernel;
  int64_t block;  // queries at a time, of `rows`
};

// Attention. Strides are those of the dimensions before the last, in elements; the last has stride 1 but for bias and mask.
struct Attention {
  Type type;                              // of q, k, v, bias and dout in memory; the rest is of the computing type
  int64_t B, N, N_kv, L, S, D, K, offset;  // K: the clipping distance of relative_keys
  double scale;
  bool causal, dropped;
  Mask dropout;                           // (B, N, L, S)
  const void *q, *k, *v;                  // (B, N, L, D), (B, N_kv, S, D) twice
  int64_t q_strides[3], k_strides[3], v_strides[3];
  const void* bias;                       // (B, N, L, S) by strides of 0 where it is broadcast, or null, as what follows
  int64_t bias_strides[4];
  const uint8_t* mask;                    // (B, N, L, S) by strides of 0
  int64_t mask_strides[4];
  const int64_t *key_lengths, *key_rows;  // (B,), (B, S)
  const void *alibi, *relative_keys, *rope;  // (N,), (2K + 1, D), (positions, D)
  void* out;                              // (B, L, N, D)
  void* lse;                              // (B, N, L)  +inf where a query sees no key
  const void* dout;                       // (B, N, L, D), backward only, as what follows; null where not needed
  int64_t dout_strides[3];
  void *dq, *dk, *dv;                     // (B, L, N, D), (B, S, N_kv, D) twice, heads D apart
  int64_t dq_strides[2], dk_strides[2];   // of the first two dimensions, dk's for dv too
  void* dbias;                            // in the shape of bias, of which dbias_strides are the strides
  int64_t dbias_strides[4], dbias_size;
  void* drelative_keys;                   // (2K + 1, D)
};

// Rows of LN(residual + dropout(x)); mean and rstd are in the computing type, as are the gradients of weight and bias.
struct ResidualLayerNorm {
  Type type;
  int64_t M, D;
  const void *x, *residual;   // (M, D), residual may be null
  const void *weight, *bias;  // (D,) or null
  double eps;
  Mask mask;                  // (M, D); a threshold of 0: none
  void *y, *s;                // (M, D); s null where not wanted
  void *mean, *rstd;          // (M,)
};

struct ResidualLayerNormBackward {
  ResidualLayerNorm forward;  // read: mean, rstd, and s, which is made again from x and residual where it is null
  const void *dy, *ds;        // (M, D), ds may be null
  void *dx, *dresidual;       // (M, D), null where not needed, as what follows
  void *dweight, *dbias;      // (D,)
};

enum class Activation { relu, gelu, gelu_tanh, tanh };

struct BiasActivationDropout {
  Type type;
  Activation activation;
  int64_t M, D;
  const void *x, *b;  // (M, D), (D,) or null
  void* y;            // (M, D)
  Mask mask;          // (M, D); a threshold of 0: none
  bool backward;
  const void* dy;     // (M, D), backward only, as what follows; null where not needed
  void *dx, *db;      // (M, D), (D,) in the computing type
};

// The rows of a cross-entropy over logits z = (x W^T + b) / temperature, every row with a target.
template <class T> struct LinearCrossEntropy {
  int64_t N, E, V;
  const T *x, *W, *b;      // (N, E), (V, E), (V,) or null
  const int64_t* target;   // (N,) in [0, V)
  const T* class_weights;  // (V,), null where all are 1
  double weights_sum;      // of class_weights
  double label_smoothing, z_loss, temperature;
  bool statistics;         // whether loss, lse, log_prob and argmax are to be found; else lse is given
  T *loss, *lse, *log_prob;  // (N,)
  int64_t* argmax;         // (N,)
  double dloss_of_all;     // every row's, where dloss is null
  const T *dloss, *dlog_prob, *dlse;  // (N,) or null
  T *dx, *dW, *db;         // (N, E), (V, E), (V,); null where not needed
};

// A tensor of an optimiser. The average is of the computing type, fp32 for bf16, in which a mean would soon stand still.
struct NtAsgdTensor {
  Type type;
  int64_t n;
  const void* g;  // (n,)
  void* p;        // (n,)  null where only the norm is asked for
  void* average;  // (n,)  null where there is none
};

struct NtAsgd {
  const NtAsgdTensor* tensors;
  int64_t count;
  double clip, lr, weight_decay;
  double mu;  // 1: the average begins with this p
};

struct Kernels {
  const char* isa;
  int vector_bytes;
  void (*keep_mask)(const Mask&, int64_t row, int64_t S, int64_t begin, int64_t end, uint8_t* keep);
  void (*dropout)(const Dropout&, Parallel, int threads);
  void (*embedding)(const Embedding&, Parallel, int threads);
  void (*embedding_backward)(const Embedding&, const void* dy, void* dW, bool zeroed, Parallel, int threads);
  double (*activation_regularization)(const ActivationRegularization&, Parallel, int threads);
  void (*activation_regularization_backward)(const ActivationRegularization&, double dloss, Parallel, int threads);
  void (*recurrence_f32)(const Recurrence<float>&, Parallel, int threads);
  void (*recurrence_f64)(const Recurrence<double>&, Parallel, int threads);
  void (*recurrence_backward_f32)(const RecurrenceBackward<float>&, Parallel, int threads);
  void (*recurrence_backward_f64)(const RecurrenceBackward<double>&, Parallel, int threads);
  void (*linear_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_f64)(const Linear<double>&, Parallel, int threads);
  void (*linear_backward_f32)(const Linear<float>&, Parallel, int threads);
  void (*linear_backward_f64)(const Linear<double>&, Parallel, int threads);
  void (*attention)(const Attention&, Parallel, int threads);
  void (*attention_backward)(const Attention&, Parallel, int threads);
  AttentionPlan (*attention_plan)(const Attention&);
  void (*residual_layer_norm)(const ResidualLayerNorm&, Parallel);
  void (*residual_layer_norm_backward)(const ResidualLayerNormBackward&, Parallel);
  void (*bias_activation_dropout)(const BiasActivationDropout&, Parallel);
  void (*linear_cross_entropy_f32)(const LinearCrossEntropy<float>&, Parallel, int threads);
  void (*linear_cross_entropy_f64)(const LinearCrossEntropy<double>&, Parallel, int threads);
  double (*nt_asgd_squares)(const NtAsgd&, Parallel);  // the sum of the squares of all g
  void (*nt_asgd_step)(const NtAsgd&, Parallel);
  double (*gemm_f32)(int64_t M, int64_t N, int64_t K, const float* A, const float* W, float* C, int64_t repeats, Parallel, int threads);
};

}  // namespace fusedseq::cpu
