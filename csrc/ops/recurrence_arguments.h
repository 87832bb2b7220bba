// The declarations of the recurrent operators, which every device shares, and the checks that keep
// a wrong call of the registered operator from touching memory it should not.
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
// hidden unit: gates_of and slots_of.
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

// One call of a recurrent operator, as the functions that run it on a device take it. For a cell
// without c, c0 is an empty tensor.
struct RecurrenceInputs : MogrifierLayer {
  const char* op;         // the operator's name, for error messages
  Tensor x;               // (T, B, X)
  OptionalTensor starts;  // (T, B) bool
  bool reverse = false;
  CellKind cell = CellKind::lstm;
  OptionalTensor vectors = {};    // (V H,)  the cell's own parameters
  const char* vectors_name = "";  // for error messages
  double eps = 0;                 // of layer normalization
  bool saves = true;              // whether a backward may follow, which needs Saved

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
  // The index of round k's weight; there is one for each of these rounds, or one for all.
  int64_t index(int64_t k) const { return k / 2 % W->size(0); }
};
inline RoundsOn rounds_on_x(const RecurrenceInputs& i) {
  return {"Q",      "Q_factor", "Q_bias",           i.Q,         i.Q_factor,
          i.Q_bias, 0,          (i.rounds + 1) / 2, i.x.size(2), i.h0.size(1)};
}
inline RoundsOn rounds_on_h(const RecurrenceInputs& i) {
  return {"R",      "R_factor", "R_bias",     i.R,          i.R_factor,
          i.R_bias, 1,          i.rounds / 2, i.h0.size(1), i.x.size(2)};
}

inline void require_rounds(const RecurrenceInputs& i, const RoundsOn& side) {
  if (side.uses == 0) return;
  require(bool(side.W), i.op, "a round's weights are missing");
  const ScalarType type = i.x.scalar_type();
  require_dimensions(i.op, side.name, *side.W, 3, "(n, out, in) or (n, out, rank)");
  const int64_t n = side.W->size(0), rank = i.rank();
  require_that(n == side.uses || n == 1, i.op, side.name, *side.W,
               "(n, ...) with a weight for each of its rounds, or one");
  require(bool(side.factor) == bool(i.Q_factor), i.op,
          "Q and R must both be weights or both pairs of factors");
  require_shape(i.op, side.name, *side.W, {n, side.out, side.factor ? rank : side.in});
  require_dtype(i.op, side.name, *side.W, type);
  if (side.factor) {
    require_shape(i.op, side.factor_name, *side.factor, {n, rank, side.in});
    require_that(rank > 0, i.op, side.factor_name, *side.factor, "of rank 1 at least");
    require_dtype(i.op, side.factor_name, *side.factor, type);
  }
  if (side.bias) {
    require_shape(i.op, side.bias_name, *side.bias, {n, side.out});
    require_dtype(i.op, side.bias_name, *side.bias, type);
  }
}

inline void require_masks(const RecurrenceInputs& i) {
  require_probability(i.op, "state_dropout", i.state_dropout);
  require_probability(i.op, "zoneout_h", i.zoneout_h);
  require_probability(i.op, "zoneout_c", i.zoneout_c);
  require_probability(i.op, "weight_drop", i.weight_drop);
  if (i.seed)
    require_seed(i.op, *i.seed);
  else
    require(i.state_dropout == 0 && i.zoneout_h == 0 && i.zoneout_c == 0 && i.weight_drop == 0,
            i.op, "a mask needs a seed");
}

inline void require_inputs(const RecurrenceInputs& i) {
  require_dimensions(i.op, "x", i.x, 3, "(T, B, X)");
  require_dimensions(i.op, "h0", i.h0, 2, "(B, H)");
  const int64_t B = i.x.size(1), X = i.x.size(2), H = i.h0.size(1);
  require_that(i.x.size(0) > 0 && X > 0, i.op, "x", i.x, "(T, B, X) with T and X at least 1");
  require_that(H > 0, i.op, "h0", i.h0, "(B, H) with H at least 1");
  // Bounds the sizes from which those of the outputs and workspaces follow, so that none of these
  // exceeds 64 bits.
  checked_product(i.op, "x", i.x.sizes());
  const int64_t gates = gates_of(i.cell), slots = slots_of(i.cell);
  const bool with_c = has_c(i.cell);
  checked_product(i.op, "W_hh", {slots, H, H});
  checked_product(i.op, "W_ih", {slots, H, X});
  require_shape(i.op, "h0", i.h0, {B, H});
  if (with_c) require_shape(i.op, "c0", i.c0, {B, H});
  require_shape(i.op, "W_ih", i.W_ih, {gates * H, X});
  require_shape(i.op, "W_hh", i.W_hh, {gates * H, H});
  if (i.b) require_shape(i.op, "b", *i.b, {biases_of(i.cell) * H});
  const ScalarType type = i.x.scalar_type();
  require_dtype(i.op, "W_ih", i.W_ih, type);
  require_dtype(i.op, "W_hh", i.W_hh, type);
  require_dtype(i.op, "h0", i.h0, type);
  if (with_c) require_dtype(i.op, "c0", i.c0, type);
  if (i.b) require_dtype(i.op, "b", *i.b, type);
  if (const int64_t width = vectors_of(i.cell) * H) {
    require(bool(i.vectors), i.op, "the cell's own parameters are missing");
    require_shape(i.op, i.vectors_name, *i.vectors, {width});
    require_dtype(i.op, i.vectors_name, *i.vectors, type);
    require(i.eps >= 0, i.op, "eps must be at least 0");
  }
  if (i.lengths) {
    require_shape(i.op, "lengths", *i.lengths, {B});
    require_dtype(i.op, "lengths", *i.lengths, ScalarType::Long);
  }
  if (i.starts) {
    require_shape(i.op, "starts", *i.starts, {i.x.size(0), B});
    require_dtype(i.op, "starts", *i.starts, ScalarType::Bool);
  }
  require_masks(i);
  require_range(i.op, "rounds", i.rounds, 0, 63);
  require_rounds(i, rounds_on_x(i));
  require_rounds(i, rounds_on_h(i));
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
using Outputs = std::tuple<Tensor, Tensor, Tensor, Saved>;  // y (T, B, H), h (B, H), c (B, H)

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
  OptionalTensor dy;  // (T, B, H)
  Tensor dh, dc;      // (B, H)
  Tensor y;           // (T, B, H), the forward's output
  Saved saved;
  int64_t needs;               // bits of Gradients::Position
  Tensor* dvectors = nullptr;  // set to the gradient of `vectors`, unless null: not needed
};

inline void require_output_gradients(const RecurrenceInputs& i, const Tensor& dy, const Tensor& dh,
                                     const Tensor& dc, const Tensor& y, const Saved& s) {
  const int64_t T = i.x.size(0), B = i.x.size(1), H = i.h0.size(1);
  require_shape(i.op, "dy", dy, {T, B, H});
  require_shape(i.op, "dh", dh, {B, H});
  const bool with_c = has_c(i.cell);
  if (with_c) require_shape(i.op, "dc", dc, {B, H});
  require_shape(i.op, "y", y, {T, B, H});
  require_floating(i.op, "dy", dy);
  require_floating(i.op, "dh", dh);
  if (with_c) require_floating(i.op, "dc", dc);
  require_floating(i.op, "y", y);
  const int64_t Hp = cpu::padded(H), Xp = cpu::padded(i.x.size(2));
  require_shape(i.op, "gates", s.gates, {T, B, slots_of(i.cell), Hp});
  require_floating(i.op, "gates", s.gates);
  if (with_c) {
    require_shape(i.op, "cells", s.cells, {T, B, Hp});
    require_floating(i.op, "cells", s.cells);
  }
  if (const int64_t statistics = statistics_of(i.cell)) {
    require(bool(s.statistics), i.op, "statistics must be a tensor");
    require_shape(i.op, "statistics", *s.statistics, {T, B, statistics});
    require_floating(i.op, "statistics", *s.statistics);
  }
  if (i.rounds == 0) return;  // the rest is not read
  require_shape(i.op, "round_gates", s.round_gates,
                {T, B, (i.rounds + 1) / 2 * Xp + i.rounds / 2 * Hp});
  require_floating(i.op, "round_gates", s.round_gates);
}

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
