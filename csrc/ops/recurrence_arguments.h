// The declarations of the recurrent operators, which every device shares. recurrence_checks.h has
// the checks of their arguments.
#pragma once
#include "ops/tensor.h"

namespace fusedseq {

// The sequence that a recurrent operator reads.
#define SEQUENCE(FIELD) FIELD(Tensor, x) /* (T, B, X) */
FUSEDSEQ_DECLARE(Sequence, SEQUENCE)

// A sequence and the order in which its steps are computed.
#define ORDERED_SEQUENCE(FIELD)                                                          \
  SEQUENCE(FIELD)                                                                        \
  FIELD(OptionalTensor, starts) /* (T, B) bool: where the state is zero before a step */ \
  FIELD(bool, reverse)          /* from the last step to the first, each row from its end */
FUSEDSEQ_DECLARE(OrderedSequence, ORDERED_SEQUENCE)

// What lstm and mogrifier_lstm have in common.
#define RECURRENT_LAYER(FIELD)                                         \
  FIELD(Tensor, W_ih)            /* (4H, X), gates in order i f g o */ \
  FIELD(Tensor, W_hh)            /* (4H, H) */                         \
  FIELD(OptionalTensor, b)       /* (4H,) */                           \
  FIELD(Tensor, h0)              /* (B, H) */                          \
  FIELD(Tensor, c0)              /* (B, H) */                          \
  FIELD(OptionalTensor, lengths) /* (B,) int64 */
#define WEIGHT_DROP(FIELD)                                                        \
  FIELD(double, weight_drop) /* probability that an element of W_hh is dropped */ \
  FIELD(bool, variational)   /* one mask value per row of W_hh instead */

#define LSTM_LAYER(FIELD)                                              \
  RECURRENT_LAYER(FIELD)                                               \
  FIELD(OptionalTensor, seed) /* one int64; required by weight_drop */ \
  WEIGHT_DROP(FIELD)
FUSEDSEQ_DECLARE(LstmLayer, LSTM_LAYER)

// What the LSTMs with parameter vectors of their own have in common.
#define ZONED_LSTM_LAYER(FIELD)                                                  \
  LSTM_LAYER(FIELD)                                                              \
  FIELD(bool, training)                                                          \
  FIELD(double, zoneout_h) /* probability that a unit keeps its h; needs seed */ \
  FIELD(double, zoneout_c)

// A layer whose state is h alone. G is the number of its gates and Z that of its biases for each
// hidden unit: gates_of and biases_of.
#define HIDDEN_STATE_LAYER(FIELD)                                        \
  FIELD(Tensor, W_ih)            /* (G H, X) */                          \
  FIELD(Tensor, W_hh)            /* (G H, H) */                          \
  FIELD(OptionalTensor, b)       /* (Z H,) */                            \
  FIELD(Tensor, h0)              /* (B, H) */                            \
  FIELD(OptionalTensor, lengths) /* (B,) int64 */                        \
  FIELD(OptionalTensor, seed)    /* one int64; required by every mask */ \
  FIELD(bool, training)                                                  \
  FIELD(double, zoneout_h)                                               \
  WEIGHT_DROP(FIELD)
FUSEDSEQ_DECLARE(HiddenStateLayer, HIDDEN_STATE_LAYER)

// n is the number of rounds on x (for Q) or on h (for R), or 1: one weight shared by these rounds.
#define MOGRIFIER_LAYER(FIELD)                                            \
  RECURRENT_LAYER(FIELD)                                                  \
  FIELD(OptionalTensor, Q)        /* (n, X, H), or (n, X, rank) */        \
  FIELD(OptionalTensor, Q_factor) /* (n, rank, H) if Q has a low rank */  \
  FIELD(OptionalTensor, R)        /* (n, H, X), or (n, H, rank) */        \
  FIELD(OptionalTensor, R_factor) /* (n, rank, X) if R has a low rank */  \
  FIELD(OptionalTensor, Q_bias)   /* (n, X) */                            \
  FIELD(OptionalTensor, R_bias)   /* (n, H) */                            \
  FIELD(OptionalTensor, seed)     /* one int64; required by every mask */ \
  FIELD(int64_t, rounds)                                                  \
  FIELD(bool, cap_input_gate)                                             \
  FIELD(bool, training)                                                   \
  FIELD(double, state_dropout)                                            \
  FIELD(double, zoneout_h)                                                \
  FIELD(double, zoneout_c)                                                \
  WEIGHT_DROP(FIELD)
FUSEDSEQ_DECLARE(MogrifierLayer, MOGRIFIER_LAYER)

// The scales of weights in 8 bits, fp32: row n of a weight is scale[n] times whole numbers.
#define WEIGHT_SCALES(FIELD)             \
  FIELD(Tensor, W_ih_scale) /* (G H,) */ \
  FIELD(Tensor, W_hh_scale) /* (G H,) */
FUSEDSEQ_DECLARE(WeightScales, WEIGHT_SCALES)
#define MOGRIFIER_SCALES(FIELD)                                     \
  WEIGHT_SCALES(FIELD)                                              \
  FIELD(OptionalTensor, Q_scale)        /* (n, X), if there is Q */ \
  FIELD(OptionalTensor, Q_factor_scale) /* (n, rank) */             \
  FIELD(OptionalTensor, R_scale)        /* (n, H) */                \
  FIELD(OptionalTensor, R_factor_scale) /* (n, rank) */
FUSEDSEQ_DECLARE(MogrifierScales, MOGRIFIER_SCALES)

// One call of a recurrent operator, as the functions that run it on a device take it. For a cell
// without c, c0 is an empty tensor.
struct RecurrenceInputs : MogrifierLayer {
  const char* op;         // the operator's name, for error messages
  Tensor x;               // (T, B, X)
  OptionalTensor starts;  // (T, B) bool
  bool reverse = false;
  CellKind cell = CellKind::lstm;
  OptionalTensor vectors = {};                 // (V H,)  the cell's own parameters
  const char* vectors_name = "";               // for error messages
  OptionalTensor W_hr = {};                    // (P, H)  a projection: h0 is then (B, P)
  double eps = 0;                              // of layer normalization
  bool saves = true;                           // whether a backward may follow, which needs Saved
  std::optional<MogrifierScales> scales = {};  // of weights in 8 bits

  int64_t H() const { return W_hr ? W_hr->size(1) : h0.size(1); }
  int64_t P() const { return h0.size(1); }
  ScalarType weight_type() const { return scales ? ScalarType::Char : x.scalar_type(); }
  int64_t rank() const {  // 0: full rank
    return Q_factor && Q_factor->dim() == 3 ? Q_factor->size(1) : 0;
  }
};

// The weights of the rounds on one operand: the even rounds change x, the odd ones h.
struct RoundsOn {
  const char *name, *factor_name, *bias_name;  // for error messages
  const OptionalTensor &W, &factor, &bias;     // Q or R
  int64_t first;                               // the first of these rounds
  int64_t uses;                                // how many of these rounds there are
  int64_t out, in;                             // a weight is (out, in)
  OptionalTensor scale, factor_scale;          // of weights in 8 bits
  // The index of round k's weight; there is one for each of these rounds, or one for all.
  int64_t index(int64_t k) const { return k / 2 % W->size(0); }
};
inline RoundsOn rounds_on_x(const RecurrenceInputs& i) {
  return {"Q",
          "Q_factor",
          "Q_bias",
          i.Q,
          i.Q_factor,
          i.Q_bias,
          0,
          (i.rounds + 1) / 2,
          i.x.size(2),
          i.h0.size(1),
          i.scales ? i.scales->Q_scale : OptionalTensor(),
          i.scales ? i.scales->Q_factor_scale : OptionalTensor()};
}
inline RoundsOn rounds_on_h(const RecurrenceInputs& i) {
  return {"R",
          "R_factor",
          "R_bias",
          i.R,
          i.R_factor,
          i.R_bias,
          1,
          i.rounds / 2,
          i.h0.size(1),
          i.x.size(2),
          i.scales ? i.scales->R_scale : OptionalTensor(),
          i.scales ? i.scales->R_factor_scale : OptionalTensor()};
}

// What a forward saves for the backward beside its outputs; only csrc/cpu and csrc/cuda look
// inside. A row of these tensors is padded to a multiple of 16 elements.
struct Saved {
  Tensor gates;        // (T, B, Z, padded H)  activated
  Tensor cells;        // (T, B, padded H)     c after every step
  Tensor round_gates;  // (T, B, sum of the rounds' padded widths)  the rounds' sigmoids
  Tensor factors;      // (rounds, T, B, padded rank)  low rank on the CPU only: the inner products
  OptionalTensor statistics = {};  // (T, B, S)  of layer normalization
};
using Outputs = std::tuple<Tensor, Tensor, Tensor, Saved>;  // y (T, B, P), h (B, P), c (B, H)

#define OUTPUT_GRADIENTS(FIELD) \
  FIELD(Tensor, dy)             \
  FIELD(Tensor, dh)             \
  FIELD(Tensor, dc)
FUSEDSEQ_DECLARE(OutputGradients, OUTPUT_GRADIENTS)

// The gradients that a backward returns; one that is not required is an empty tensor.
#define LSTM_LAYER_GRADIENTS(FIELD) \
  FIELD(Tensor, dW_ih)              \
  FIELD(Tensor, dW_hh)              \
  FIELD(Tensor, db)                 \
  FIELD(Tensor, dh0)                \
  FIELD(Tensor, dc0)
#define MOGRIFIER_LAYER_GRADIENTS(FIELD) \
  LSTM_LAYER_GRADIENTS(FIELD)            \
  FIELD(Tensor, dQ)                      \
  FIELD(Tensor, dQ_factor)               \
  FIELD(Tensor, dR)                      \
  FIELD(Tensor, dR_factor)               \
  FIELD(Tensor, dQ_bias)                 \
  FIELD(Tensor, dR_bias)
#define MOGRIFIER_GRADIENTS(FIELD) FIELD(Tensor, dx) MOGRIFIER_LAYER_GRADIENTS(FIELD)
FUSEDSEQ_DECLARE(Gradients, MOGRIFIER_GRADIENTS)
// The bits of dx and of LSTM_LAYER_GRADIENTS, with which the gradients of every LSTM begin. For a
// cell with parameters of its own, the next bit is that of their gradient, and not of dQ.
constexpr int64_t LSTM_NEEDS = (int64_t(1) << int(Gradients::Position::dQ)) - 1;

// Which gradients a call requires, by the bits of the argument `needs`. The kernels compute the
// gradients of a round's weight, second factor and bias together.
struct RequiredGradients {
  bool dx, dW_ih, dW_hh, db, any_Q, any_R;

  explicit RequiredGradients(int64_t needs) {
    using Position = Gradients::Position;
    dx = is_needed(needs, Position::dx);
    dW_ih = is_needed(needs, Position::dW_ih);
    dW_hh = is_needed(needs, Position::dW_hh);
    db = is_needed(needs, Position::db);
    any_Q = is_needed(needs, Position::dQ) || is_needed(needs, Position::dQ_factor) ||
            is_needed(needs, Position::dQ_bias);
    any_R = is_needed(needs, Position::dR) || is_needed(needs, Position::dR_factor) ||
            is_needed(needs, Position::dR_bias);
  }
};

// The same gradients, those that are not required replaced by empty tensors: a gradient that a
// kernel computes together with another one may not be among the required ones.
inline Gradients only_required(Gradients g, int64_t needs) {
#define REPLACE(type, name)                                                                       \
  if (!is_needed(needs, Gradients::Position::name) && (g.name.dim() != 1 || g.name.numel() != 0)) \
    g.name = empty(g.name);
  MOGRIFIER_GRADIENTS(REPLACE)
#undef REPLACE
  return g;
}

// A layer's call of a backward. dy may be absent: the first of two layers has then no other use of
// its output than the second layer's.
struct LayerBackward {
  const RecurrenceInputs& i;
  OptionalTensor dy;  // (T, B, P)
  Tensor dh, dc;      // (B, P) and (B, H)
  Tensor y;           // (T, B, P), the forward's output
  Saved saved;
  int64_t needs;               // bits of Gradients::Position
  Tensor* dvectors = nullptr;  // set to the gradient of `vectors`, unless null: not needed
  Tensor* dW_hr = nullptr;     // the same of the projection
};

// One layer on one kind of device.
using Forward = Outputs (*)(const RecurrenceInputs&);
using Backward = Gradients (*)(const LayerBackward&);

Outputs forward_cpu(const RecurrenceInputs& i);  // Saved is undefined if i.saves is false
Gradients backward_cpu(const LayerBackward& layer);
// Two recurrences of the same cell, sizes and dtype that do not depend on each other.
std::pair<Outputs, Outputs> forward_two_cpu(const RecurrenceInputs& first,
                                            const RecurrenceInputs& second);
std::pair<Gradients, Gradients> backward_two_cpu(const LayerBackward& first,
                                                 const LayerBackward& second);
Outputs forward_cuda(const RecurrenceInputs& i);
Gradients backward_cuda(const LayerBackward& layer);

// The operators `<op>_inference` take the inputs of `<op>` and return those of its outputs that are
// not saved for a backward, and save nothing: for calls whose gradients nobody will ask for.
#define LSTM_STATES(FIELD) \
  FIELD(Tensor, y)         \
  FIELD(Tensor, h)         \
  FIELD(Tensor, c)
FUSEDSEQ_DECLARE(LstmStates, LSTM_STATES)
#define HIDDEN_STATES(FIELD) \
  FIELD(Tensor, y)           \
  FIELD(Tensor, h)
FUSEDSEQ_DECLARE(HiddenStates, HIDDEN_STATES)

inline LstmStates lstm_states(RecurrenceInputs i) {
  i.saves = false;
  const auto [y, h, c, saved] = forward_cpu(i);
  return {y, h, c};
}
inline HiddenStates hidden_states(const RecurrenceInputs& i) {
  const auto [y, h, c] = lstm_states(i);
  return {y, h};
}

// The operators `<op>_int8` are `<op>_inference` with weights in 8 bits and their scales, in float
// and without random masks: on the CPU alone.
inline RecurrenceInputs with_scales(RecurrenceInputs i, const MogrifierScales& scales) {
  i.scales = scales;
  i.training = false;
  return i;
}
inline RecurrenceInputs with_scales(const RecurrenceInputs& i, const WeightScales& scales) {
  return with_scales(i, MogrifierScales{scales.W_ih_scale, scales.W_hh_scale, {}, {}, {}, {}});
}

// Two layers on CUDA, for mogrifier_lstm_pair. p, locked: the dropout between the layers; x: what
// the second layer reads, the first layer's y under that dropout, or an empty tensor where p is 0.
struct PairOutputs {
  Outputs first, second;
  Tensor x;
};
PairOutputs forward_pair_cuda(const RecurrenceInputs& first, RecurrenceInputs second, double p,
                              bool locked);
std::pair<Gradients, Gradients> backward_pair_cuda(const LayerBackward& first,
                                                   const LayerBackward& second, double p,
                                                   bool locked);

}  // namespace fusedseq
