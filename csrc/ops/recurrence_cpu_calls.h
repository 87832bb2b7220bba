// A call of a recurrence on the CPU, forward or backward: the arguments of its kernel, memory for
// what the kernel writes, and the operator's results from that.
#pragma once
#include <cstring>

#include "ops/recurrence_cpu_arguments.h"

namespace fusedseq::on_cpu {

// The kernels write `width` of each `padded` elements of a saved tensor's rows; this zeroes the
// others.
template <class Real>
void zero_padding(const Tensor& t, int64_t width, int64_t padded) {
  Real* p = static_cast<Real*>(t.mutable_data_ptr());
  for (int64_t row = 0; padded > width && row < t.numel() / padded; ++row)
    std::memset(p + row * padded + width, 0, (padded - width) * sizeof(Real));
}

// The same of the rounds' sigmoids, of which a row holds those of every round, one after the other.
template <class Real>
void zero_padding_of_rounds(const Tensor& round_gates, const cpu::Recurrence<Real>& r) {
  const int64_t Hp = cpu::padded(r.H), Xp = cpu::padded(r.X);
  Real* p = static_cast<Real*>(round_gates.mutable_data_ptr());
  for (int64_t row = 0; row < r.steps * r.B; ++row) {
    for (int64_t k = 0; k < r.rounds; ++k) {
      const int64_t width = k % 2 ? r.H : r.X, padded = k % 2 ? Hp : Xp;
      std::memset(p + width, 0, (padded - width) * sizeof(Real));
      p += padded;
    }
  }
}

// A forward call: its arguments and the tensors that the kernel writes to.
template <class Real>
struct ForwardCall {
  const RecurrenceInputs& i;
  KernelArguments<Real> a;
  Tensor y, h, c;
  Saved saved;  // its tensors are undefined if nothing is saved

  explicit ForwardCall(const RecurrenceInputs& i) : i(i), a(i) {
    auto& r = a.r;
    constexpr ScalarType type = KernelArguments<Real>::type;
    const int64_t rows_of_c = has_c(r.cell) ? r.B : 0;
    y = output(i.x, {r.steps, r.B, r.P}, type);
    h = output(i.x, {r.B, r.P}, type);
    c = output(i.x, {rows_of_c, r.H}, type);
    r.y = a.out(y);
    r.h = a.out(h);
    r.c = a.out(c);
    if (i.saves) save();
  }

  Outputs results() const {
    const ScalarType out = i.x.scalar_type();
    return {as_type(y, out), as_type(h, out), as_type(c, out), saved};
  }

 private:
  // Makes the tensors that the backward reads.
  void save() {
    auto& r = a.r;
    constexpr ScalarType type = KernelArguments<Real>::type;
    const int64_t Hp = cpu::padded(r.H), Xp = cpu::padded(r.X), rank = cpu::padded(r.rank);
    const int64_t width = (r.rounds + 1) / 2 * Xp + r.rounds / 2 * Hp;
    const int64_t steps_of_c = has_c(r.cell) ? r.steps : 0;
    saved = {output(i.x, {r.steps, r.B, slots_of(r.cell), Hp}, type),
             output(i.x, {steps_of_c, r.B, Hp}, type), output(i.x, {r.steps, r.B, width}, type),
             output(i.x, {r.rank ? r.rounds : 0, r.steps, r.B, rank}, type),
             output(i.x, {r.steps, r.B, statistics_of(r.cell)}, type)};
    zero_padding<Real>(saved.gates, r.H, Hp);
    zero_padding<Real>(saved.cells, r.H, Hp);
    if (r.rank) zero_padding<Real>(saved.factors, r.rank, rank);
    if (width > 0) zero_padding_of_rounds<Real>(saved.round_gates, r);
    r.gates = a.out(saved.gates);
    r.cells = a.out(saved.cells);
    r.statistics = a.out(*saved.statistics);
    r.round_gates = a.out(saved.round_gates);
    r.factors = a.out(saved.factors);
  }
};

// Where the kernel writes the gradients of the rounds' weights.
template <class Real>
struct RoundGradients {
  std::vector<Real*> first_factors, second_factors, biases;

  RoundGradients(const KernelArguments<Real>& a, const Gradients& g,
                 const RequiredGradients& required, const RecurrenceInputs& i)
      : first_factors(a.r.rounds), second_factors(a.r.rounds), biases(a.r.rounds) {
    if (required.any_Q) set(a, rounds_on_x(i), g.dQ, g.dQ_factor, g.dQ_bias);
    if (required.any_R) set(a, rounds_on_h(i), g.dR, g.dR_factor, g.dR_bias);
  }

 private:
  void set(const KernelArguments<Real>& a, const RoundsOn& side, const Tensor& weight,
           const Tensor& factor, const Tensor& bias) {
    const auto& r = a.r;
    for (int64_t k = side.first; k < r.rounds; k += 2) {
      const int64_t j = side.index(k);
      first_factors[k] = a.out(weight) + j * weight.size(1) * weight.size(2);
      if (r.rank) second_factors[k] = a.out(factor) + j * r.rank * side.in;
      if (r.bias[k]) biases[k] = a.out(bias) + j * side.out;
    }
  }
};

// A backward call: its arguments and the tensors that the kernel writes to.
template <class Real>
struct BackwardCall {
  const LayerBackward& layer;
  KernelArguments<Real> a;
  const RequiredGradients required;
  Gradients g;
  Tensor dvectors, dW_hr;
  std::optional<RoundGradients<Real>> rounds;
  cpu::RecurrenceBackward<Real> problem;

  explicit BackwardCall(const LayerBackward& layer)
      : layer(layer), a(layer.i), required(layer.needs) {
    const RecurrenceInputs& i = layer.i;
    const Saved& s = layer.saved;
    auto& r = a.r;
    require(bool(layer.dy), i.op, "dy must be a tensor, got None");
    require_output_gradients(i, *layer.dy, layer.dh, layer.dc, layer.y, s);
    if (r.rank && r.rounds) {
      require_shape(i.op, "factors", s.factors, {r.rounds, r.steps, r.B, cpu::padded(r.rank)});
      require_floating(i.op, "factors", s.factors);
    }
    r.y = const_cast<Real*>(a.in(layer.y));
    r.gates = const_cast<Real*>(a.in(s.gates));
    r.cells = has_c(r.cell) ? const_cast<Real*>(a.in(s.cells)) : nullptr;
    r.statistics = s.statistics ? const_cast<Real*>(a.in(*s.statistics)) : nullptr;
    r.round_gates = const_cast<Real*>(a.in(s.round_gates));
    r.factors = const_cast<Real*>(a.in(s.factors));

    g = {like(i.x, required.dx),
         like(i.W_ih, required.dW_ih),
         like(i.W_hh, required.dW_hh),
         like(i.b, required.db),
         like(i.h0, true),
         like(i.c0, has_c(i.cell)),
         like(i.Q, required.any_Q),
         like(i.Q_factor, required.any_Q),
         like(i.R, required.any_R),
         like(i.R_factor, required.any_R),
         like(i.Q_bias, required.any_Q),
         like(i.R_bias, required.any_R)};
    dvectors = like(i.vectors, layer.dvectors);
    dW_hr = like(i.W_hr, layer.dW_hr);
    if (r.B == 0) {  // Each gradient is a sum over no rows, and no kernel runs.
      const auto zero = [](const Tensor& t) {
        if (t.numel()) std::memset(t.mutable_data_ptr(), 0, t.numel() * sizeof(Real));
      };
#define ZERO(type, name) zero(g.name);
      MOGRIFIER_GRADIENTS(ZERO)
#undef ZERO
      zero(dvectors);
      zero(dW_hr);
    }
    rounds.emplace(a, g, required, i);
    problem = {r,
               a.in(*layer.dy),
               a.in(layer.dh),
               has_c(i.cell) ? a.in(layer.dc) : nullptr,
               pointer(g.dx, required.dx),
               a.out(g.dh0),
               a.out(g.dc0),
               pointer(g.dW_ih, required.dW_ih),
               pointer(g.dW_hh, required.dW_hh),
               pointer(dW_hr, layer.dW_hr),
               pointer(g.db, required.db && i.b),
               pointer(dvectors, layer.dvectors),
               rounds->first_factors.data(),
               rounds->second_factors.data(),
               rounds->biases.data()};
  }

  Gradients results() {
    const ScalarType type = layer.i.x.scalar_type();
#define IN_THE_DTYPE_OF_X(type_, name) g.name = as_type(g.name, type);
    MOGRIFIER_GRADIENTS(IN_THE_DTYPE_OF_X)
#undef IN_THE_DTYPE_OF_X
    if (required.dW_hh) g.dW_hh = drop_weight(layer.i, g.dW_hh);
    if (layer.dvectors) *layer.dvectors = as_type(dvectors, type);
    if (layer.dW_hr) *layer.dW_hr = as_type(dW_hr, type);
    return g;
  }

 private:
  Tensor like(const OptionalTensor& t, bool is_required) const {
    constexpr ScalarType type = KernelArguments<Real>::type;
    if (!t || !is_required) return output(layer.i.x, {0}, type);
    return output(layer.i.x, Sizes(t->sizes().begin(), t->sizes().end()), type);
  }
  static Real* pointer(const Tensor& t, bool is_required) {
    return is_required ? KernelArguments<Real>::out(t) : nullptr;
  }
};

}  // namespace fusedseq::on_cpu
