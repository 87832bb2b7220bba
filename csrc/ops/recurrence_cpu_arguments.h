// Between the tensors of a recurrence and the structures of cpu/arguments/recurrence.h: addresses
// of inputs, weights and masks.
#pragma once
#include "ops/dropout.h"
#include "ops/recurrence_checks.h"

namespace fusedseq::on_cpu {

// W_hh under the weight drop, or the gradient of W_hh from that of the dropped weight.
inline Tensor drop_weight(const RecurrenceInputs& i, const Tensor& W) {
  if (!i.training || i.weight_drop == 0) return W;
  require(bool(i.seed), i.op, "seed must be one int64 where a mask is drawn, got None");
  return drop_cpu({i.op, "W_hh", dense(W), "weight_drop", i.weight_drop, *i.seed, 1, W.size(0),
                   W.size(1), i.variational, MaskStream::weight});
}

// The arguments of a kernel that computes in Real, and the tensors that own the memory they point
// to.
template <class Real>
struct KernelArguments {
  static constexpr ScalarType type = sizeof(Real) == 8 ? ScalarType::Double : ScalarType::Float;
  std::vector<Tensor> owned;
  // Of every round: the weight or its first factor, its second factor or null, its bias or null.
  std::vector<const void*> first_factors, second_factors;
  std::vector<const Real*> biases;
  std::vector<const float*> first_scales, second_scales;  // of weights in 8 bits
  cpu::Recurrence<Real> r{};

  const Real* in(const Tensor& t) {
    owned.push_back(dense(t, type));
    return static_cast<const Real*>(owned.back().const_data_ptr());
  }
  // A weight as the kernels read it: numbers of 16 and of 8 bits where they are.
  const void* weight(const Tensor& t) {
    if (r.weights == cpu::WeightType::full) return in(t);
    owned.push_back(dense(t));
    return owned.back().const_data_ptr();
  }
  const float* scale(const OptionalTensor& t) {
    if (!t) return nullptr;
    owned.push_back(dense(*t));
    return static_cast<const float*>(owned.back().const_data_ptr());
  }
  int64_t bytes_of_weights() const {
    return r.weights == cpu::WeightType::int8   ? 1
           : r.weights == cpu::WeightType::bf16 ? sizeof(cpu::bfloat16)
                                                : sizeof(Real);
  }
  static Real* out(const Tensor& t) { return static_cast<Real*>(t.mutable_data_ptr()); }

  explicit KernelArguments(const RecurrenceInputs& i) {
    require_inputs(i);
    r.cell = i.cell;
    r.reverse = i.reverse;
    r.steps = i.x.size(0);
    r.B = i.x.size(1);
    r.X = i.x.size(2);
    r.H = i.H();
    r.P = i.P();
    r.rounds = i.rounds;
    r.rank = i.rank();
    if (i.lengths) {
      owned.push_back(dense(*i.lengths));
      r.lengths = static_cast<const int64_t*>(owned.back().const_data_ptr());
      require_range(i.op, "lengths", r.lengths, r.B, 0, r.steps);
    }
    if (i.starts) {
      owned.push_back(dense(*i.starts));
      r.starts = static_cast<const uint8_t*>(owned.back().const_data_ptr());
    }
    r.x = in(i.x);
    r.weights = i.scales                                    ? cpu::WeightType::int8
                : i.x.scalar_type() == ScalarType::BFloat16 ? cpu::WeightType::bf16
                                                            : cpu::WeightType::full;
    r.W_ih = weight(i.W_ih);
    r.W_hh = weight(drop_weight(i, i.W_hh));
    r.W_hr = i.W_hr ? weight(*i.W_hr) : nullptr;
    if (i.scales) {
      r.W_ih_scale = scale(i.scales->W_ih_scale);
      r.W_hh_scale = scale(i.scales->W_hh_scale);
      first_scales.resize(r.rounds);
      second_scales.resize(r.rounds);
      r.A_scale = first_scales.data();
      r.F_scale = second_scales.data();
      r.int8_rows = cpu::kernels().int8_rows;
    }
    r.b = i.b ? in(*i.b) : nullptr;
    r.vectors = i.vectors ? in(*i.vectors) : nullptr;
    r.eps = i.eps;
    r.h0 = in(i.h0);
    r.c0 = has_c(i.cell) ? in(i.c0) : nullptr;
    r.cap_input_gate = i.cap_input_gate;
    r.training = i.training;
    set_masks(i);
    first_factors.resize(r.rounds);
    second_factors.resize(r.rounds);
    biases.resize(r.rounds);
    set_rounds(rounds_on_x(i));
    set_rounds(rounds_on_h(i));
    r.A = first_factors.data();
    r.F = second_factors.data();
    r.bias = biases.data();
  }

 private:
  void set_masks(const RecurrenceInputs& i) {
    if (!i.seed) return;
    if (i.training && i.state_dropout > 0)
      r.state = mask(*i.seed, i.state_dropout, MaskStream::state);
    if (i.zoneout_h > 0) {
      r.zoneout_h = mask(*i.seed, i.zoneout_h, MaskStream::zoneout_h);
      r.zoneout_h_p = i.zoneout_h;
    }
    if (i.zoneout_c > 0) {
      r.zoneout_c = mask(*i.seed, i.zoneout_c, MaskStream::zoneout_c);
      r.zoneout_c_p = i.zoneout_c;
    }
  }

  void set_rounds(const RoundsOn& side) {
    if (side.uses == 0) return;
    const char* W = static_cast<const char*>(weight(*side.W));
    const char* factor = static_cast<const char*>(side.factor ? weight(*side.factor) : nullptr);
    const int64_t size = bytes_of_weights();
    const float *scales = scale(side.scale), *factor_scales = scale(side.factor_scale);
    const Real* bias = side.bias ? in(*side.bias) : nullptr;
    for (int64_t k = side.first; k < r.rounds; k += 2) {
      const int64_t j = side.index(k);
      first_factors[k] = W + j * side.out * (factor ? r.rank : side.in) * size;
      second_factors[k] = factor ? factor + j * r.rank * side.in * size : nullptr;
      biases[k] = bias ? bias + j * side.out : nullptr;
      if (scales) first_scales[k] = scales + j * side.out;
      if (factor && factor_scales) second_scales[k] = factor_scales + j * r.rank;
    }
  }
};

}  // namespace fusedseq::on_cpu
