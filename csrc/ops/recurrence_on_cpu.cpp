// The recurrent operators on the CPU: which kernel computes them, and on how many threads.
#include "ops/precision.h"
#include "ops/recurrence_cpu_calls.h"

namespace fusedseq {
namespace on_cpu {
namespace {

// The threads of a step, at the end of which they wait for each other.
template <class Real>
int team_size(const cpu::Recurrence<Real>& r) {
  return threads_for(double(r.B) * gates_of(r.cell) * r.H * (r.P + (r.rounds ? r.X : 0)));
}

template <class Real>
int team_size(const cpu::RecurrenceBackward<Real>& g) {
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

template <class Real>
Outputs forward(const RecurrenceInputs& i) {
  const ForwardCall<Real> call(i);
  if (call.a.r.B > 0) run<cpu::Recurrence<Real>>({call.a.r}, i.x.scalar_type());
  return call.results();
}

template <class Real>
std::pair<Outputs, Outputs> forward_two(const RecurrenceInputs& first,
                                        const RecurrenceInputs& second) {
  const ForwardCall<Real> one(first), two(second);
  if (one.a.r.B > 0) run<cpu::Recurrence<Real>>({one.a.r, two.a.r}, first.x.scalar_type());
  return {one.results(), two.results()};
}

template <class Real>
Gradients backward(const LayerBackward& layer) {
  BackwardCall<Real> call(layer);
  if (call.a.r.B > 0) run<cpu::RecurrenceBackward<Real>>({call.problem}, layer.i.x.scalar_type());
  return call.results();
}

template <class Real>
std::pair<Gradients, Gradients> backward_two(const LayerBackward& first,
                                             const LayerBackward& second) {
  BackwardCall<Real> one(first), two(second);
  if (one.a.r.B > 0)
    run<cpu::RecurrenceBackward<Real>>({one.problem, two.problem}, first.i.x.scalar_type());
  return {one.results(), two.results()};
}

bool is_double(const RecurrenceInputs& i) {
  return kernel_type(i.op, "x", i.x) == cpu::Type::f64;
}

}  // namespace
}  // namespace on_cpu

Outputs forward_cpu(const RecurrenceInputs& i) {
  return on_cpu::is_double(i) ? on_cpu::forward<double>(i) : on_cpu::forward<float>(i);
}
Gradients backward_cpu(const LayerBackward& layer) {
  return on_cpu::is_double(layer.i) ? on_cpu::backward<double>(layer)
                                    : on_cpu::backward<float>(layer);
}
std::pair<Outputs, Outputs> forward_two_cpu(const RecurrenceInputs& first,
                                            const RecurrenceInputs& second) {
  return on_cpu::is_double(first) ? on_cpu::forward_two<double>(first, second)
                                  : on_cpu::forward_two<float>(first, second);
}
std::pair<Gradients, Gradients> backward_two_cpu(const LayerBackward& first,
                                                 const LayerBackward& second) {
  return on_cpu::is_double(first.i) ? on_cpu::backward_two<double>(first, second)
                                    : on_cpu::backward_two<float>(first, second);
}

}  // namespace fusedseq
