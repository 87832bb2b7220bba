// The recurrences on CUDA as two engines take them, which know no torch: recurrence_loop.cu, for any size, and
// persistent_forward.cu and persistent_backward.cu, where recurrence_plan.h says so. recurrence_cuda.cpp makes these
// structures from tensors, picks the engine, and takes the weights' gradients when the loop over time is over.
//
// S: the dtype of the tensors.    C: what is computed and carried in: fp32, and fp64 where S is.
// Hp, Xp: H and X rounded up to 16 elements; what pads a row is zero before it is read by a product.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cuda_type.h"

namespace fusedseq::cuda {

constexpr int MAX_ROUNDS = 64;

// A random mask, by philox.h's rule under the key *seed + stream; a threshold of 0 keeps all.
struct Mask { uint64_t stream, threshold; double p, scale; };

struct Recurrence {
  Type type;
  int64_t steps, B, X, H, rounds, Xp, Hp;
  int64_t round_width;              // of all rounds on x (Xp) and on h (Hp), in order: 0, 1, 2, ...
  bool cap_input_gate, training;
  const int64_t* seed;              // on the device, as everything below; null where no mask needs it
  Mask state, zoneout_h, zoneout_c; // (B, H), (T, B, H), (T, B, H)
  Mask weight;                      // (4H, H), of W_hh, or one element a row where `weight_by_row`
  bool weight_by_row;
  const int64_t* lengths;           // (B,) or null
  const void* x;                    // (T, B, X)  S
  const void *W_ih, *W_hh, *b;      // (4H, X), (4H, H), (4H,) or null  S
  const void *h0, *c0;              // (B, H)  S
  int64_t rank;                     // 0: full
  const void* Q[MAX_ROUNDS];        // round k: (X, H) where k is even, else (H, X)  S; a low rank's factors multiplied out
  const void *A[MAX_ROUNDS], *F[MAX_ROUNDS];  // the factors, (X, rank) and (rank, H), or (H, rank) and (rank, X)  S
  const void* bias[MAX_ROUNDS];     // (X,) or (H,), or null  S
  void *y, *h, *c;                  // (T, B, H), (B, H), (B, H)  S
  void* gates;                      // (T, B, 4, Hp)  S  activated
  void* cells;                      // (T, B, Hp)  C  after each step
  void* round_gates;                // (T, B, round_width)  S  sigmoids
};

struct RecurrenceBackward {
  Recurrence forward;               // its y, gates, cells and round_gates are read
  const void *dy, *dh, *dc;         // (T, B, H), (B, H), (B, H)  S
  void* dz;                         // (T, B, 4H)  S  of the gates' pre-activations
  void* dround;                     // (T, B, round_width)  S  of the rounds' pre-activations, padding zero
  void* dx;                         // (T, B, X)  S, where there are rounds; else a product after the loop makes it
  void *dh0, *dc0;                  // (B, H)  S
};

// What there is to do after either engine's backward: the gradients of what does not change from step to step. Null where
// not needed; a repeated pointer adds up.
struct RecurrenceGradients {
  RecurrenceBackward backward;      // its dz and dround are read
  void* dx;                         // (T, B, X)  S, where there are no rounds
  void *dW_ih, *dW_hh, *db;         // as the weights
  void *dQ[MAX_ROUNDS], *dF[MAX_ROUNDS], *dbias[MAX_ROUNDS];  // dQ: of the first factor where the rank is low
};

}  // namespace fusedseq::cuda
