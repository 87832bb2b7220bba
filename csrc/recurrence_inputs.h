// The inputs and outputs of lstm and mogrifier_lstm on any device, and the checks of them.
#pragma once
#include "tensor.h"

namespace fusedseq {

// The inputs of a recurrence, as the operators take them.
struct RecurrenceInputs {
  const char* op;
  Tensor x, W_ih, W_hh;
  std::optional<Tensor> b;
  Tensor h0, c0;
  std::optional<Tensor> lengths;
  // The Mogrifier's. Q (n, X, H), or its factors (n, X, rank) and (n, rank, H); R (n, H, X) likewise; n is the number
  // of rounds on x (on h), or 1: one weight for all of them.
  std::optional<Tensor> Q, Q_factor, R, R_factor, Q_bias, R_bias, seed;
  int64_t rounds = 0;
  bool cap_input_gate = false, training = true;
  double state_dropout = 0, zoneout_h = 0, zoneout_c = 0, weight_drop = 0;
  bool variational = false;

  int64_t rank() const { return Q_factor ? Q_factor->size(1) : 0; }  // 0: full
};

// The keys of the masks: pyext/fusedseq/reference/mogrifier_lstm.py.
enum Key : uint64_t { INPUT, STATE, ZONEOUT_H, ZONEOUT_C, WEIGHT };

// The weights of the rounds on one operand.
struct RoundsOn {
  const char *name, *factor_name;
  const std::optional<Tensor>&W, &factor, &bias;
  int64_t first, uses, out, in;
  int64_t index(int64_t k) const { return k / 2 % W->size(0); }  // of round k's among them
};
inline RoundsOn rounds_on_x(const RecurrenceInputs& i) {
  return {"Q", "Q's second factor", i.Q, i.Q_factor, i.Q_bias, 0, (i.rounds + 1) / 2, i.x.size(2), i.h0.size(1)};
}
inline RoundsOn rounds_on_h(const RecurrenceInputs& i) {
  return {"R", "R's second factor", i.R, i.R_factor, i.R_bias, 1, i.rounds / 2, i.h0.size(1), i.x.size(2)};
}

inline void require_rounds(const RecurrenceInputs& i, const RoundsOn& side) {
  if (side.uses == 0) return;
  require(side.W && side.W->dim() == 3, i.op, "a round's weights are missing");
  const int64_t n = side.W->size(0), rank = i.rank();
  require(n == side.uses || n == 1, i.op, "there must be a weight for each round, or one");
  require(bool(side.factor) == bool(i.Q_factor), i.op, "Q and R must both be weights or both pairs of factors");
  require_shape(i.op, side.name, *side.W, {n, side.out, side.factor ? rank : side.in});
  if (side.factor) require_shape(i.op, side.factor_name, *side.factor, {n, rank, side.in});
  if (side.bias) require_shape(i.op, "a round's bias", *side.bias, {n, side.out});
}

inline void require_inputs(const RecurrenceInputs& i) {
  require(i.x.dim() == 3 && i.h0.dim() == 2, i.op, "x must be (T, B, X) and h0 (B, H)");
  const int64_t B = i.x.size(1), X = i.x.size(2), H = i.h0.size(1);
  require(i.x.size(0) > 0 && X > 0 && H > 0, i.op, "T, X and H must be at least 1");
  require_shape(i.op, "h0", i.h0, {B, H});
  require_shape(i.op, "c0", i.c0, {B, H});
  require_shape(i.op, "W_ih", i.W_ih, {4 * H, X});
  require_shape(i.op, "W_hh", i.W_hh, {4 * H, H});
  if (i.b) require_shape(i.op, "b", *i.b, {4 * H});
  if (i.lengths) {
    require_shape(i.op, "lengths", *i.lengths, {B});
    require(i.lengths->scalar_type() == ScalarType::Long, i.op, "lengths must be int64");
  }
  require(i.rounds >= 0 && i.rounds < 64, i.op, "rounds must be in [0, 64)");
  require_rounds(i, rounds_on_x(i));
  require_rounds(i, rounds_on_h(i));
}

// Saved for backward, whatever the operator: what the kernels call gates, cells, round_gates and factors.
struct Saved { Tensor gates, cells, round_gates, factors; };
using Outputs = std::tuple<Tensor, Tensor, Tensor, Saved>;  // y, h, c

// The gradients that a backward returns; one that is not needed is an empty tensor.
enum Needs { X = 1, W_IH = 2, W_HH = 4, BIAS = 8, Q_ALL = 16, R_ALL = 32 };
struct Gradients { Tensor dx, dW_ih, dW_hh, db, dh0, dc0, dQ, dQ_factor, dR, dR_factor, dQ_bias, dR_bias; };

inline void require_upstream(const RecurrenceInputs& i, const Tensor& dy, const Tensor& dh, const Tensor& dc, const Tensor& y, const Saved& s) {
  const int64_t T = i.x.size(0), B = i.x.size(1), H = i.h0.size(1);
  require_shape(i.op, "dy", dy, {T, B, H});
  require_shape(i.op, "dh", dh, {B, H});
  require_shape(i.op, "dc", dc, {B, H});
  require_shape(i.op, "y", y, {T, B, H});
  require_shape(i.op, "gates", s.gates, {T, B, 4, cpu::padded(H)});
}

// On one kind of device.
using Forward = Outputs (*)(const RecurrenceInputs&);
using Backward = Gradients (*)(const RecurrenceInputs&, const Tensor& dy, const Tensor& dh, const Tensor& dc, const Tensor& y, const Saved&,
                               int64_t needs);

Outputs forward_cuda(const RecurrenceInputs& i);
Gradients backward_cuda(const RecurrenceInputs& i, const Tensor& dy, const Tensor& dh, const Tensor& dc, const Tensor& y, const Saved& s,
                        int64_t needs);

// Two layers: mogrifier_lstm_pair. p, locked: of the dropout between them, of which x, the second's, comes, empty where p is 0.
struct PairOutputs { Outputs first, second; Tensor x; };
PairOutputs forward_pair_cuda(const RecurrenceInputs& first, RecurrenceInputs second, double p, bool locked);

// A layer's part of a pair's backward; the first's dy may be missing.
struct LayerBackward { const RecurrenceInputs& i; std::optional<Tensor> dy; Tensor dh, dc, y; Saved saved; int64_t needs; };
std::pair<Gradients, Gradients> backward_pair_cuda(const LayerBackward& first, const LayerBackward& second, double p, bool locked);

}  // namespace fusedseq
