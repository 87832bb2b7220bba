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

// The numbers of a recurrence's weights: those of the type it computes in, or narrower ones. Row n
// of a weight of 8 bits is scale[n] times whole numbers; there is no backward for it.
enum class WeightType { full, bf16, int8 };

// A recurrence over `steps` time steps (T in the shapes); with rounds > 0, which only the cell
// `lstm` can have, a Mogrifier LSTM. G, Z, N, V and S stand for gates_of(cell), slots_of(cell),
// biases_of(cell), vectors_of(cell) and statistics_of(cell), Hp, Xp and rp for padded(H), padded(X)
// and padded(rank). Round k scales x if k is even and h if k is odd; `out` is the width of what it
// scales, `in` that of the other operand. c0, c and cells are null for a cell without c. What a
// forward saves is all null where no backward will follow.
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
  // Of weights in 8 bits: a scale for each of their rows.
  const float *W_ih_scale, *W_hh_scale;
  const float* const* A_scale;  // `rounds` pointers, as A and F are
  const float* const* F_scale;
  Int8Rows int8_rows;  // multiplies by weights in 8 bits
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

}  // namespace fusedseq::cpu
