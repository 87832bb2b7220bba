// The recurrent operators on the CPU: makes the arguments of csrc/cpu/recurrence from tensors, and
// the operators' results from what the kernels wrote.
#include <cstring>

#include "ops/dropout.h"
#include "ops/precision.h"
#include "ops/recurrence_checks.h"

namespace fusedseq {
namespace {

// W_hh under the weight drop, or the gradient of W_hh from that of the dropped weight.
Tensor drop_weight(const RecurrenceInputs& i, const Tensor& W) {
  if (!i.training || i.weight_drop == 0) return W;
  require(bool(i.seed), i.op, "a weight drop needs a seed");
  return drop_cpu({i.op, "W_hh", dense(W), "weight_drop", i.weight_drop, *i.seed, 1, W.size(0),
                   W.size(1), i.variational, MaskStream::weight});
}

// The arguments of a kernel that computes in T, and the tensors that own the memory they point to.
template <class T>
struct KernelArguments {
  static constexpr ScalarType type = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  std::vector<Tensor> owned;
  // Of every round: the weight or its first factor, its second factor or null, its bias or null.
  std::vector<const void*> first_factors, second_factors;
  std::vector<const T*> biases;
  std::vector<const float*> first_scales, second_scales;  // of weights in 8 bits
  cpu::Recurrence<T> r{};

  const T* in(const Tensor& t) {
    owned.push_back(dense(t, type));
    return static_cast<const T*>(owned.back().const_data_ptr());
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
                                                : sizeof(T);
  }
  static T* out(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }

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
    const T* bias = side.bias ? in(*side.bias) : nullptr;
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

// The threads of a step, at the end of which they wait for each other.
template <class T>
int team_size(const cpu::Recurrence<T>& r) {
  return threads_for(double(r.B) * gates_of(r.cell) * r.H * (r.P + (r.rounds ? r.X : 0)));
}

template <class T>
int team_size(const cpu::RecurrenceBackward<T>& g) {
  return team_size(g.forward);
}

// The kernel of some problems. `type` is that of the operator's tensors.
auto kernel(const cpu::Recurrence<float>* r, ScalarType type) {
  const auto& all = cpu::kernels();
  const bool in_bf16 = r->weights != cpu::WeightType::int8 && multiplies_in_bf16(type);
  return in_bf16 ? all.bf16.recurrence : all.recurrence_f32;
}
auto kernel(const cpu::Recurrence<double>*, ScalarType) {
  return cpu::kernels().recurrence_f64;
}
auto kernel(const cpu::RecurrenceBackward<float>*, ScalarType type) {
  const auto& all = cpu::kernels();
  return multiplies_in_bf16(type) ? all.bf16.recurrence_backward : all.recurrence_backward_f32;
}
auto kernel(const cpu::RecurrenceBackward<double>*, ScalarType) {
  return cpu::kernels().recurrence_backward_f64;
}

// Runs problems that do not depend on each other. Two run at the same time, each on half of the
// threads, which have fewer others to wait for at the barriers of a step: with two threads none.
// An odd number of threads runs them one after the other.
template <class Problem>
void run(const std::vector<Problem>& problems, ScalarType type) {
  const auto call = kernel(problems.data(), type);
  if (problems.size() == 2 && threads() % 2 == 0) {
    const int half = threads() / 2, useful = team_size(problems[0]);
    call(problems.data(), 2, parallel, useful < half ? useful : half);
    return;
  }
  for (const Problem& problem : problems)
    call(&problem, 1, parallel, team_size(problem));
}

// The kernels write `width` of each `padded` elements of a saved tensor's rows; this zeroes the
// others.
template <class T>
void zero_padding(const Tensor& t, int64_t width, int64_t padded) {
  T* p = static_cast<T*>(t.mutable_data_ptr());
  for (int64_t row = 0; padded > width && row < t.numel() / padded; ++row)
    std::memset(p + row * padded + width, 0, (padded - width) * sizeof(T));
}

// The same of the rounds' sigmoids, of which a row holds those of every round, one after the other.
template <class T>
void zero_padding_of_rounds(const Tensor& round_gates, const cpu::Recurrence<T>& r) {
  const int64_t Hp = cpu::padded(r.H), Xp = cpu::padded(r.X);
  T* p = static_cast<T*>(round_gates.mutable_data_ptr());
  for (int64_t row = 0; row < r.steps * r.B; ++row) {
    for (int64_t k = 0; k < r.rounds; ++k) {
      const int64_t width = k % 2 ? r.H : r.X, padded = k % 2 ? Hp : Xp;
      std::memset(p + width, 0, (padded - width) * sizeof(T));
      p += padded;
    }
  }
}

// A forward call: its arguments and the tensors that the kernel writes to.
template <class T>
struct ForwardCall {
  const RecurrenceInputs& i;
  KernelArguments<T> a;
  Tensor y, h, c;
  Saved saved;  // its tensors are undefined if nothing is saved

  explicit ForwardCall(const RecurrenceInputs& i) : i(i), a(i) {
    auto& r = a.r;
    constexpr ScalarType type = KernelArguments<T>::type;
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
    constexpr ScalarType type = KernelArguments<T>::type;
    const int64_t Hp = cpu::padded(r.H), Xp = cpu::padded(r.X), rank = cpu::padded(r.rank);
    const int64_t width = (r.rounds + 1) / 2 * Xp + r.rounds / 2 * Hp;
    const int64_t steps_of_c = has_c(r.cell) ? r.steps : 0;
    saved = {output(i.x, {r.steps, r.B, slots_of(r.cell), Hp}, type),
             output(i.x, {steps_of_c, r.B, Hp}, type), output(i.x, {r.steps, r.B, width}, type),
             output(i.x, {r.rank ? r.rounds : 0, r.steps, r.B, rank}, type),
             output(i.x, {r.steps, r.B, statistics_of(r.cell)}, type)};
    zero_padding<T>(saved.gates, r.H, Hp);
    zero_padding<T>(saved.cells, r.H, Hp);
    if (r.rank) zero_padding<T>(saved.factors, r.rank, rank);
    if (width > 0) zero_padding_of_rounds<T>(saved.round_gates, r);
    r.gates = a.out(saved.gates);
    r.cells = a.out(saved.cells);
    r.statistics = a.out(*saved.statistics);
    r.round_gates = a.out(saved.round_gates);
    r.factors = a.out(saved.factors);
  }
};

template <class T>
Outputs forward(const RecurrenceInputs& i) {
  const ForwardCall<T> call(i);
  if (call.a.r.B > 0) run<cpu::Recurrence<T>>({call.a.r}, i.x.scalar_type());
  return call.results();
}

template <class T>
std::pair<Outputs, Outputs> forward_two(const RecurrenceInputs& first,
                                        const RecurrenceInputs& second) {
  const ForwardCall<T> one(first), two(second);
  if (one.a.r.B > 0) run<cpu::Recurrence<T>>({one.a.r, two.a.r}, first.x.scalar_type());
  return {one.results(), two.results()};
}

// Where the kernel writes the gradients of the rounds' weights.
template <class T>
struct RoundGradients {
  std::vector<T*> first_factors, second_factors, biases;

  RoundGradients(const KernelArguments<T>& a, const Gradients& g, const RequiredGradients& required,
                 const RecurrenceInputs& i)
      : first_factors(a.r.rounds), second_factors(a.r.rounds), biases(a.r.rounds) {
    if (required.any_Q) set(a, rounds_on_x(i), g.dQ, g.dQ_factor, g.dQ_bias);
    if (required.any_R) set(a, rounds_on_h(i), g.dR, g.dR_factor, g.dR_bias);
  }

 private:
  void set(const KernelArguments<T>& a, const RoundsOn& side, const Tensor& weight,
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
template <class T>
struct BackwardCall {
  const LayerBackward& layer;
  KernelArguments<T> a;
  const RequiredGradients required;
  Gradients g;
  Tensor dvectors, dW_hr;
  std::optional<RoundGradients<T>> rounds;
  cpu::RecurrenceBackward<T> problem;

  explicit BackwardCall(const LayerBackward& layer)
      : layer(layer), a(layer.i), required(layer.needs) {
    const RecurrenceInputs& i = layer.i;
    const Saved& s = layer.saved;
    auto& r = a.r;
    require(bool(layer.dy), i.op, "dy must be a tensor");
    require_output_gradients(i, *layer.dy, layer.dh, layer.dc, layer.y, s);
    if (r.rank && r.rounds) {
      require_shape(i.op, "factors", s.factors, {r.rounds, r.steps, r.B, cpu::padded(r.rank)});
      require_floating(i.op, "factors", s.factors);
    }
    r.y = const_cast<T*>(a.in(layer.y));
    r.gates = const_cast<T*>(a.in(s.gates));
    r.cells = has_c(r.cell) ? const_cast<T*>(a.in(s.cells)) : nullptr;
    r.statistics = s.statistics ? const_cast<T*>(a.in(*s.statistics)) : nullptr;
    r.round_gates = const_cast<T*>(a.in(s.round_gates));
    r.factors = const_cast<T*>(a.in(s.factors));

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
        if (t.numel()) std::memset(t.mutable_data_ptr(), 0, t.numel() * sizeof(T));
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
    constexpr ScalarType type = KernelArguments<T>::type;
    if (!t || !is_required) return output(layer.i.x, {0}, type);
    return output(layer.i.x, Sizes(t->sizes().begin(), t->sizes().end()), type);
  }
  static T* pointer(const Tensor& t, bool is_required) {
    return is_required ? KernelArguments<T>::out(t) : nullptr;
  }
};

template <class T>
Gradients backward(const LayerBackward& layer) {
  BackwardCall<T> call(layer);
  if (call.a.r.B > 0) run<cpu::RecurrenceBackward<T>>({call.problem}, layer.i.x.scalar_type());
  return call.results();
}

template <class T>
std::pair<Gradients, Gradients> backward_two(const LayerBackward& first,
                                             const LayerBackward& second) {
  BackwardCall<T> one(first), two(second);
  if (one.a.r.B > 0)
    run<cpu::RecurrenceBackward<T>>({one.problem, two.problem}, first.i.x.scalar_type());
  return {one.results(), two.results()};
}

bool is_double(const RecurrenceInputs& i) {
  return kernel_type(i.op, "x", i.x) == cpu::Type::f64;
}

}  // namespace

Outputs forward_cpu(const RecurrenceInputs& i) {
  return is_double(i) ? forward<double>(i) : forward<float>(i);
}
Gradients backward_cpu(const LayerBackward& layer) {
  return is_double(layer.i) ? backward<double>(layer) : backward<float>(layer);
}
std::pair<Outputs, Outputs> forward_two_cpu(const RecurrenceInputs& first,
                                            const RecurrenceInputs& second) {
  return is_double(first) ? forward_two<double>(first, second) : forward_two<float>(first, second);
}
std::pair<Gradients, Gradients> backward_two_cpu(const LayerBackward& first,
                                                 const LayerBackward& second) {
  return is_double(first.i) ? backward_two<double>(first, second)
                            : backward_two<float>(first, second);
}

}  // namespace fusedseq
