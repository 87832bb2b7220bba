// The checks that keep a wrong call of a registered recurrent operator from touching memory it
// should not. The public functions in Python check the same before, with better messages.
#pragma once
#include "ops/recurrence_arguments.h"

namespace fusedseq {

inline void require_rounds(const RecurrenceInputs& i, const RoundsOn& side) {
  if (side.uses == 0) return;
  if (!side.W)
    refuse(i.op, side.name, " must be a weight for each of its rounds, or one, got None");
  const ScalarType type = i.x.scalar_type();
  require_dimensions(i.op, side.name, *side.W, 3, "(n, out, in) or (n, out, rank)");
  const int64_t n = side.W->size(0), rank = i.rank();
  require_that(n == side.uses || n == 1, i.op, side.name, *side.W,
               "(n, ...) with a weight for each of its rounds, or one");
  require(bool(side.factor) == bool(i.Q_factor), i.op,
          "Q and R must both be weights or both pairs of factors, got one of each");
  require_shape(i.op, side.name, *side.W, {n, side.out, side.factor ? rank : side.in});
  require_dtype(i.op, side.name, *side.W, i.weight_type());
  if (side.factor) {
    require_shape(i.op, side.factor_name, *side.factor, {n, rank, side.in});
    require_that(rank > 0, i.op, side.factor_name, *side.factor, "of rank 1 at least");
    require_dtype(i.op, side.factor_name, *side.factor, i.weight_type());
  }
  if (side.bias) {
    require_shape(i.op, side.bias_name, *side.bias, {n, side.out});
    require_dtype(i.op, side.bias_name, *side.bias, type);
  }
}

// A scale for each row of a weight, if that is given. A weight of no dimension is one of no rounds.
inline void require_scale(const RecurrenceInputs& i, const char* name, const OptionalTensor& scale,
                          const OptionalTensor& weight) {
  if (!weight || weight->dim() == 0) return;
  if (!scale) refuse(i.op, name, " must be the scales of a weight in 8 bits, got None");
  require_shape(i.op, name, *scale, Sizes(weight->sizes().begin(), weight->sizes().end() - 1));
  require_dtype(i.op, name, *scale, ScalarType::Float);
}
inline void require_scales(const RecurrenceInputs& i) {
  const MogrifierScales& s = *i.scales;
  require_scale(i, "W_ih_scale", s.W_ih_scale, i.W_ih);
  require_scale(i, "W_hh_scale", s.W_hh_scale, i.W_hh);
  require_scale(i, "Q_scale", s.Q_scale, i.Q);
  require_scale(i, "Q_factor_scale", s.Q_factor_scale, i.Q_factor);
  require_scale(i, "R_scale", s.R_scale, i.R);
  require_scale(i, "R_factor_scale", s.R_factor_scale, i.R_factor);
  require(i.x.scalar_type() != ScalarType::Double, i.op,
          "x must be fp32 or bf16 with weights in 8 bits, got fp64");
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
            i.op, "seed must be one int64 where a mask is drawn, got None");
}

inline void require_inputs(const RecurrenceInputs& i) {
  require_dimensions(i.op, "x", i.x, 3, "(T, B, X)");
  require_dimensions(i.op, "h0", i.h0, 2, "(B, H)");
  if (i.W_hr) require_dimensions(i.op, "W_hr", *i.W_hr, 2, "(P, H)");
  const int64_t B = i.x.size(1), X = i.x.size(2), H = i.H(), P = i.P();
  require_that(i.x.size(0) > 0 && X > 0, i.op, "x", i.x, "(T, B, X) with T and X at least 1");
  require_that(P > 0, i.op, "h0", i.h0, "(B, H) with H at least 1");
  if (i.W_hr) {
    require_that(H > 0, i.op, "W_hr", *i.W_hr, "(P, H) with H at least 1");
    require_shape(i.op, "W_hr", *i.W_hr, {P, H});
    require_dtype(i.op, "W_hr", *i.W_hr, i.weight_type());
    checked_product(i.op, "W_hr", {P, H});
  }
  // Bounds the sizes from which those of the outputs and workspaces follow, so that none of these
  // exceeds 64 bits.
  checked_product(i.op, "x", i.x.sizes());
  const int64_t gates = gates_of(i.cell), slots = slots_of(i.cell);
  const bool with_c = has_c(i.cell);
  checked_product(i.op, "W_hh", {slots, H, P});
  checked_product(i.op, "W_ih", {slots, H, X});
  require_shape(i.op, "h0", i.h0, {B, P});
  if (with_c) require_shape(i.op, "c0", i.c0, {B, H});
  require_shape(i.op, "W_ih", i.W_ih, {gates * H, X});
  require_shape(i.op, "W_hh", i.W_hh, {gates * H, P});
  if (i.b) require_shape(i.op, "b", *i.b, {biases_of(i.cell) * H});
  const ScalarType type = i.x.scalar_type();
  require_dtype(i.op, "W_ih", i.W_ih, i.weight_type());
  require_dtype(i.op, "W_hh", i.W_hh, i.weight_type());
  require_dtype(i.op, "h0", i.h0, type);
  if (with_c) require_dtype(i.op, "c0", i.c0, type);
  if (i.b) require_dtype(i.op, "b", *i.b, type);
  if (const int64_t width = vectors_of(i.cell) * H) {
    if (!i.vectors) refuse(i.op, i.vectors_name, " must be ", in_words(Sizes{width}), ", got None");
    require_shape(i.op, i.vectors_name, *i.vectors, {width});
    require_dtype(i.op, i.vectors_name, *i.vectors, type);
    if (!(i.eps >= 0)) refuse(i.op, "eps must be at least 0, got ", i.eps);
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
  if (i.scales) require_scales(i);
}

// A weight that no round uses is not read, but its gradient would not be written either.
inline void require_used(const RecurrenceInputs& i, const RoundsOn& side) {
  if (side.uses == 0 && side.W)
    refuse(i.op, side.name, " must be None, as no round uses it, got ", in_words(side.W->sizes()));
}

inline void require_output_gradients(const RecurrenceInputs& i, const Tensor& dy, const Tensor& dh,
                                     const Tensor& dc, const Tensor& y, const Saved& s) {
  require_used(i, rounds_on_x(i));
  require_used(i, rounds_on_h(i));
  const int64_t T = i.x.size(0), B = i.x.size(1), H = i.H(), P = i.P();
  require_shape(i.op, "dy", dy, {T, B, P});
  require_shape(i.op, "dh", dh, {B, P});
  const bool with_c = has_c(i.cell);
  if (with_c) require_shape(i.op, "dc", dc, {B, H});
  require_shape(i.op, "y", y, {T, B, P});
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
    require(bool(s.statistics), i.op, "statistics must be a tensor, got None");
    require_shape(i.op, "statistics", *s.statistics, {T, B, statistics});
    require_floating(i.op, "statistics", *s.statistics);
  }
  if (i.rounds == 0) return;  // the rest is not read
  require_shape(i.op, "round_gates", s.round_gates,
                {T, B, (i.rounds + 1) / 2 * Xp + i.rounds / 2 * Hp});
  require_floating(i.op, "round_gates", s.round_gates);
}

}  // namespace fusedseq
