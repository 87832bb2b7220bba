// The arguments of a recurrence and of its backward pass.
#pragma once
#include "cpu/arguments/products.h"
#include "math/cell_kind.h"

namespace fusedseq::cpu {

// Rows of the tensors that a recurrence saves for backward are padded to multiples of PAD, so that
// they consist of whole vectors in every instruction set.
constexpr int64_t PAD = 16;
inline int64_t padded(int64_t n) {
  return (n + PAD - 1) / PAD * PAD;
}

// The type of a recurrence's weights in memory: the type in which it computes, or a narrower one.
// Row n of a weight of 8 bits is scale[n] times whole numbers; there is no backward pass for it.
enum class WeightType { full, bf16, int8 };

// A recurrence over `steps` time steps (T in the shapes); with rounds > 0, which only the cell
// `lstm` can have, a Mogrifier LSTM. In the shapes `gates`, `slots`, `biases`, `vectors` and
// `statistics` stand for gates_of(cell), slots_of(cell), biases_of(cell), vectors_of(cell) and
// statistics_of(cell), and Hp, Xp and rp for padded(H), padded(X) and padded(rank). Round k scales
// x if k is even and h if k is odd; `out` is the width of what it scales, `in` that of the other
// operand. c0, c and cells are null for a cell without c. All pointers to what a forward pass saves
// are null where no backward pass will follow.
//
// With a projection W_hr, which only the cell `lstm` without rounds can have, h and y are W_hr
// times what the cell computes. P is their width, and H where there is none.
template <class Real>
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
  double eps;               // of layer normalization, added to variances
  const int64_t* lengths;   // (B,) or null
  const uint8_t* starts;    // (T, B) or null  1: the state is zero before this step
  const Real* x;            // (T, B, X)
  WeightType weights;       // of W_ih, W_hh, W_hr, A and F
  const void* W_ih;         // (gates * H, X)
  const void* W_hh;         // (gates * H, P)
  const void* W_hr;         // (P, H) or null
  const Real* b;            // (biases * H,) or null
  const Real* vectors;      // (vectors * H,)  the cell's own parameters
  const Real* h0;           // (B, P)
  const Real* c0;           // (B, H)
  const void* const* A;     // `rounds` pointers to (out, in), or to (out, rank) with a low rank
  const void* const* F;     // `rounds` pointers to (rank, in), only with a low rank
  const Real* const* bias;  // `rounds` pointers to (out,) or null
  // Of weights in 8 bits: a scale for each of their rows.
  const float *W_ih_scale, *W_hh_scale;
  const float* const* A_scale;  // `rounds` pointers, as A and F are
  const float* const* F_scale;
  Int8Rows int8_rows;  // multiplies by weights in 8 bits
  Real* y;             // (T, B, P)
  Real* h;             // (B, P)  the last hidden state
  Real* c;             // (B, H)  the last cell state
  Real* gates;         // (T, B, slots, Hp)  activated gates, saved
  Real* cells;         // (T, B, Hp)  the cell state after each step, saved
  Real* statistics;    // (T, B, statistics)  of layer normalization, saved
  Real* round_gates;   // (T, B, sum of padded widths)  the rounds' sigmoids, saved
  Real* factors;       // (rounds, T, B, rp)  operand times F^T, saved
};

template <class Real>
struct RecurrenceBackward {
  Recurrence<Real> forward;  // the inputs, and y and all that is saved
  const Real* dy;            // (T, B, P)
  const Real* dh;            // (B, P)
  const Real* dc;            // (B, H), like dc0 null for a cell without c
  Real* dx;                  // (T, B, X) or null if not needed
  Real* dh0;                 // (B, P)
  Real* dc0;                 // (B, H)
  Real* dW_ih;               // (gates * H, X) or null if not needed
  Real* dW_hh;               // (gates * H, P) or null if not needed
  Real* dW_hr;               // (P, H) or null if not needed
  Real* db;                  // (biases * H,) or null if not needed
  Real* dvectors;            // (vectors * H,) or null if not needed
  // `rounds` pointers each, to gradients in the shapes of A, F and bias; null if not needed. Rounds
  // that share a weight share the pointer, and their gradients are summed.
  Real* const* dA;
  Real* const* dF;
  Real* const* dbias;
};

}  // namespace fusedseq::cpu
