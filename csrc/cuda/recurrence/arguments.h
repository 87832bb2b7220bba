// Arguments of the CUDA kernels of the recurrences, without any torch type. Two implementations
// take them: loop.cu, for every call, and the persistent kernels (persistent_forward.cu,
// persistent_backward.cu, persistent_cells.cu), for the cells of LSTM, peephole LSTM and GRU in the
// sizes that plan.h accepts.
// csrc/ops/recurrence_cuda_arguments.cpp fills these structures from tensors,
// recurrence_cuda_engines.cpp picks the implementation, and recurrence_on_cuda.cpp computes the
// weight gradients after the loop over time.
//
// S: the dtype of the tensors.    C: the dtype of arithmetic and of the carried state: fp64 where S
// is fp64, else fp32.
// Hp, Xp: H and X rounded up to a multiple of 16 elements. The padding of a row is set to zero
// before a matrix product reads it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda/type.h"
#include "math/cells.h"
#include "math/host_device.h"
#include "math/mask_stream.h"
#include "math/step_order.h"

namespace fusedseq::cuda {

constexpr int MAX_ROUNDS = 64;

// TERMS of a cell, see math/cells.h.
inline int64_t terms_of(CellKind kind) {
  int64_t terms = 0;
  with_cell(kind, false, [&](auto cell) { terms = decltype(cell)::TERMS; });
  return terms;
}

// A random mask. The words of Philox under the key *seed decide, as in csrc/math/philox.h: an
// element is kept where its word is at least `threshold`. A threshold of 0 keeps every element.
struct Mask {
  MaskStream stream;
  uint64_t threshold;
  double p, scale;
};

// G, Z and V stand for gates_of(cell), slots_of(cell) and vectors_of(cell) of math/cell_kind.h. c0,
// c and cells are null for a cell without c.
struct Recurrence {
  Type type;
  CellKind cell;
  int64_t steps, B, X, H, rounds, Xp, Hp;
  int64_t round_width;  // sum over the rounds, in order, of Xp (even rounds) and Hp (odd rounds)
  bool cap_input_gate, training;
  bool reverse;         // from the last step to the first, each row from its own end on
  const int64_t* seed;  // ()  on the device, like every pointer below; null if no mask needs it
  Mask state, zoneout_h, zoneout_c;  // (B, H), (T, B, H), (T, B, H)
  Mask weight;  // of W_hh: (G H, H), or (G H,), one element a row, if variational
  bool variational;
  const int64_t* lengths;       // (B,) or null
  const uint8_t* starts;        // (T, B) or null  1: the state is zero before this step
  const void* x;                // (T, B, X)  S
  const void *W_ih, *W_hh, *b;  // (G H, X), (G H, H), (biases_of(cell) H,) or null  S
  const void* vectors;          // (V H,)  S  the cell's own parameters
  double eps;                   // of layer normalization, added to variances
  const void *h0, *c0;          // (B, H)  S
  int64_t rank;                 // of the rounds' weights; 0: full rank
  // Per round k. Round k scales x if k is even, else h. With a low rank, Q[k] is A[k] F[k].
  const void* Q[MAX_ROUNDS];     // (X, H) if k is even, else (H, X)  S
  const void* A[MAX_ROUNDS];     // (X, rank), or (H, rank)  S  only with a low rank
  const void* F[MAX_ROUNDS];     // (rank, H), or (rank, X)  S  only with a low rank
  const void* bias[MAX_ROUNDS];  // (X,) or (H,), or null  S
  // Outputs.
  void *y, *h, *c;    // (T, B, H), (B, H), (B, H)  S
  void* gates;        // (T, B, Z, Hp)  S  after their activation functions; saved for backward
  void* cells;        // (T, B, Hp)  C  the cell state after each step; saved for backward
  void* statistics;   // (T, B, statistics_of(cell))  C  of layer normalization; saved for backward
  void* round_gates;  // (T, B, round_width)  S  the rounds' sigmoids; saved for backward
};

struct RecurrenceBackward {
  Recurrence forward;        // its y, gates, cells and round_gates are inputs here
  const void *dy, *dh, *dc;  // (T, B, H), (B, H), (B, H)  S
  void* dz;                  // (T, B, Z H)  S  gradient of the pre-activations
  void* terms;   // (T, B, terms_of(cell) H)  S  what each step adds to the gradients of `vectors`
  void* dround;  // (T, B, round_width)  S  gradient of the rounds' pre-activations, padding zero
  void* dx;      // (T, B, X)  S; null without rounds: one product after the loop computes it then
  void *dh0, *dc0;  // (B, H)  S
};

// The gradients that are computed after the backward loop, from its dz and dround: those of tensors
// that every step shares. A null pointer: not needed. Rounds with the same pointer share a weight,
// whose gradient is the sum over these rounds.
struct RecurrenceGradients {
  RecurrenceBackward backward;
  void* dx;                  // (T, B, X)  S; only without rounds
  void *dW_ih, *dW_hh, *db;  // shaped as the weights
  void* dvectors;            // shaped as vectors
  void* dQ[MAX_ROUNDS];      // shaped as Q; with a low rank, as A
  void* dF[MAX_ROUNDS];      // shaped as F
  void* dbias[MAX_ROUNDS];   // shaped as bias
};

}  // namespace fusedseq::cuda
