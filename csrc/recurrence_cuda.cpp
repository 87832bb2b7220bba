// lstm and mogrifier_lstm on CUDA: from tensors to what recurrence_cuda.h has, the choice of the engine, and back.
#include "recurrence_inputs.h"

#ifdef FUSEDSEQ_CUDA
#include "cuda_stream.h"
#include "dropout_cuda.h"
#include "persistent.h"
#include "recurrence_cuda.h"
#include "recurrence_gradients.h"
#include "recurrence_loop.h"
#include "recurrence_weights.h"
#include "vendor_product.h"

#include <cstdlib>
#include <cstring>

namespace fusedseq {
namespace {

using torch::stable::new_empty;

cuda::Type cuda_type(const RecurrenceInputs& i) {
  switch (i.x.scalar_type()) {
    case ScalarType::Float: return cuda::Type::f32;
    case ScalarType::Double: return cuda::Type::f64;
    case ScalarType::BFloat16: return cuda::Type::bf16;
    case ScalarType::Half: return cuda::Type::f16;
    default: STD_TORCH_CHECK(false, i.op, ": dtype must be float32, float64, bfloat16 or float16");
  }
}

// One call: where it runs, and the tensors that own what the kernels are given.
struct Call {
  const RecurrenceInputs& i;
  const torch::stable::Device device;
  const torch::stable::accelerator::DeviceGuard guard;
  void* const stream;
  const cuda::Product product;
  std::vector<Tensor> owned;

  explicit Call(const RecurrenceInputs& i)
      : i(i), device(i.x.device()), guard(i.x.get_device_index()), stream(current_stream(i.x.get_device_index())),
        product(vendor_product(device)) {}

  void on_device(const Tensor& t) const {
    require(t.is_cuda() && t.get_device_index() == i.x.get_device_index(), i.op, "tensors must be on one device");
  }
  const void* in(const Tensor& t, ScalarType type) {
    on_device(t);
    require(t.scalar_type() == type, i.op, "tensors must be of one dtype");
    owned.push_back(dense(t));
    return owned.back().const_data_ptr();
  }
  const void* in(const Tensor& t) { return in(t, i.x.scalar_type()); }
  const void* in(const std::optional<Tensor>& t) { return t ? in(*t) : nullptr; }
  const int64_t* whole_numbers(const std::optional<Tensor>& t) {
    return t ? static_cast<const int64_t*>(in(*t, ScalarType::Long)) : nullptr;
  }

  void* workspace(int64_t bytes) {
    owned.push_back(new_empty(i.x, {bytes}, ScalarType::Byte));
    return owned.back().mutable_data_ptr();
  }

  void require_done(const char* error, const cuda::Recurrence& r) const {
    STD_TORCH_CHECK(!error, i.op, " with T, B, X, H, rounds = ", r.steps, ", ", r.B, ", ", r.X, ", ", r.H, ", ", r.rounds, ": ",
                    error ? error : "");
  }
};

const void* part(const void* p, int64_t elements, const RecurrenceInputs& i) {
  return p ? static_cast<const char*>(p) + elements * int64_t(i.x.element_size()) : nullptr;
}

// Each round's part of the (n, .) tensors at w, f and b.
void parts_of_rounds(const RecurrenceInputs& i, const RoundsOn& side, const void* w, const void* f, const void* b,
                     const void** W, const void** F, const void** bias) {
  for (int64_t k = side.first; k < i.rounds; k += 2) {
    const int64_t j = side.index(k), rank = i.rank();
    W[k] = part(w, j * side.out * (rank ? rank : side.in), i);
    F[k] = part(f, j * rank * side.in, i), bias[k] = part(b, j * side.out, i);
  }
}

cuda::Mask mask_of(const RecurrenceInputs& i, double p, Key key) {
  require(p >= 0 && p <= 1, i.op, "a probability must be in [0, 1]");
  if (p == 0) return {};
  require(i.seed && i.seed->numel() == 1, i.op, "a mask needs a seed, one int64");
  return {key, threshold(p), p, scale(p)};
}

cuda::Recurrence arguments(Call& call) {
  const RecurrenceInputs& i = call.i;
  require_inputs(i);
  cuda::Recurrence r{};
  r.type = cuda_type(i);
  r.steps = i.x.size(0), r.B = i.x.size(1), r.X = i.x.size(2), r.H = i.h0.size(1), r.rounds = i.rounds, r.rank = i.rank();
  r.Xp = cpu::padded(r.X), r.Hp = cpu::padded(r.H), r.round_width = (r.rounds + 1) / 2 * r.Xp + r.rounds / 2 * r.Hp;
  r.cap_input_gate = i.cap_input_gate, r.training = i.training;
  r.seed = call.whole_numbers(i.seed);
  r.state = mask_of(i, i.training ? i.state_dropout : 0, STATE);
  r.zoneout_h = mask_of(i, i.zoneout_h, ZONEOUT_H), r.zoneout_c = mask_of(i, i.zoneout_c, ZONEOUT_C);
  r.weight = mask_of(i, i.training ? i.weight_drop : 0, WEIGHT), r.weight_by_row = i.variational;
  r.lengths = call.whole_numbers(i.lengths);
  r.x = call.in(i.x), r.W_ih = call.in(i.W_ih), r.W_hh = call.in(i.W_hh), r.b = call.in(i.b);
  r.h0 = call.in(i.h0), r.c0 = call.in(i.c0);
  for (const RoundsOn& side : {rounds_on_x(i), rounds_on_h(i)})
    if (side.uses > 0)
      parts_of_rounds(i, side, call.in(side.W), call.in(side.factor), call.in(side.bias), r.rank ? r.A : r.Q, r.F, r.bias);
  return r;
}

// Both engines take a low rank's factors multiplied out.
void multiply_out(Call& call, cuda::Recurrence& r) {
  if (r.rank) call.require_done(cuda::multiply_out(r, call.product, call.workspace(cuda::multiplied_out_bytes(r))), r);
}

// The choice of the engine. FUSEDSEQ_RECURRENCE=loop leaves all to the loop, to compare the two.
bool forced_loop() {
  const char* wanted = std::getenv("FUSEDSEQ_RECURRENCE");
  return wanted && std::strcmp(wanted, "loop") == 0;
}
cuda::Plan engine(const cuda::Recurrence& r) { return forced_loop() ? cuda::Plan{} : cuda::persistent_plan(r); }
void run_forward(Call& call, const cuda::Recurrence& r) {
  const cuda::Plan plan = engine(r);
  call.require_done(plan.persistent ? cuda::persistent_forward(r, plan.forward, call.product,
                                                               call.workspace(cuda::persistent_bytes(r, plan.forward)), call.stream)
                                    : cuda::loop_forward(r, call.product, call.workspace(cuda::loop_bytes(r)), call.stream), r);
}
void run_backward(Call& call, const cuda::RecurrenceBackward& g) {
  const cuda::Recurrence& r = g.forward;
  const cuda::Plan plan = engine(r);
  call.require_done(plan.persistent ? cuda::persistent_backward(g, plan.backward, call.workspace(cuda::persistent_backward_bytes(r, plan.backward)),
                                                                call.stream)
                                    : cuda::loop_backward(g, call.product, call.workspace(cuda::loop_backward_bytes(r)), call.stream), r);
}

ScalarType computing_type(const RecurrenceInputs& i) {
  return i.x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The tensors of the gradients and where the kernels write them. With no rows they stay zero.
Gradients empty_gradients(const RecurrenceInputs& i, int64_t needs) {
  const auto like = [&](const std::optional<Tensor>& t, bool needed) {
    Tensor g = t && needed ? new_empty(i.x, t->sizes()) : new_empty(i.x, {0});
    return i.x.size(1) == 0 ? torch::stable::zero_(g) : g;
  };
  const bool on_q = needs & Q_ALL, on_r = needs & R_ALL;
  return {like(i.x, needs & X), like(i.W_ih, needs & W_IH), like(i.W_hh, needs & W_HH), like(i.b, needs & BIAS),
          like(i.h0, true), like(i.c0, true), like(i.Q, on_q), like(i.Q_factor, on_q), like(i.R, on_r),
          like(i.R_factor, on_r), like(i.Q_bias, on_q), like(i.R_bias, on_r)};
}

void* out(const Tensor& t) { return t.numel() ? t.mutable_data_ptr() : nullptr; }

void gradients(Call& call, const cuda::RecurrenceBackward& g, const Gradients& d) {
  const RecurrenceInputs& i = call.i;
  cuda::RecurrenceGradients w{g, i.rounds ? nullptr : out(d.dx), out(d.dW_ih), out(d.dW_hh), out(d.db), {}, {}, {}};
  const void *dW[cuda::MAX_ROUNDS] = {}, *dF[cuda::MAX_ROUNDS] = {}, *dbias[cuda::MAX_ROUNDS] = {};
  for (const bool on_h : {false, true}) {
    const RoundsOn side = on_h ? rounds_on_h(i) : rounds_on_x(i);
    if (side.uses > 0)
      parts_of_rounds(i, side, out(on_h ? d.dR : d.dQ), out(on_h ? d.dR_factor : d.dQ_factor), out(on_h ? d.dR_bias : d.dQ_bias),
                      dW, dF, dbias);
  }
  for (int64_t k = 0; k < i.rounds; ++k)
    w.dQ[k] = const_cast<void*>(dW[k]), w.dF[k] = const_cast<void*>(dF[k]), w.dbias[k] = const_cast<void*>(dbias[k]);
  call.require_done(cuda::gradients(w, call.product, call.workspace(cuda::gradients_bytes(w)), call.stream), g.forward);
}

// The outputs, to which r points from here on.
Outputs outputs(const RecurrenceInputs& i, cuda::Recurrence& r) {
  const ScalarType computing = computing_type(i);
  Tensor y = new_empty(i.x, {r.steps, r.B, r.H}), h = new_empty(i.x, {r.B, r.H}), c = new_empty(i.x, {r.B, r.H});
  Saved s{new_empty(i.x, {r.steps, r.B, 4, r.Hp}), new_empty(i.x, {r.steps, r.B, r.Hp}, computing),
          new_empty(i.x, {r.steps, r.B, r.round_width}), new_empty(i.x, {0, r.steps, r.B, 0}, computing)};
  r.y = out(y), r.h = out(h), r.c = out(c);
  r.gates = out(s.gates), r.cells = out(s.cells), r.round_gates = out(s.round_gates);
  return {y, h, c, s};
}

// The argument of an engine's backward, with memory for what the weights' gradients are made of.
cuda::RecurrenceBackward backward_arguments(Call& call, const LayerBackward& l, const Gradients& d) {
  const RecurrenceInputs& i = call.i;
  cuda::Recurrence r = arguments(call);
  require_upstream(i, l.dy ? *l.dy : l.y, l.dh, l.dc, l.y, l.saved);
  r.y = const_cast<void*>(call.in(l.y)), r.gates = const_cast<void*>(call.in(l.saved.gates));
  r.cells = const_cast<void*>(call.in(l.saved.cells, computing_type(i))), r.round_gates = const_cast<void*>(call.in(l.saved.round_gates));
  if (r.B) multiply_out(call, r);
  const Tensor dz = new_empty(i.x, {r.steps, r.B, 4 * r.H}), dround = new_empty(i.x, {r.steps, r.B, r.round_width});
  call.owned.push_back(dz), call.owned.push_back(dround);
  return {r, call.in(l.dy), call.in(l.dh), call.in(l.dc), out(dz), out(dround), r.rounds ? out(d.dx) : nullptr, out(d.dh0), out(d.dc0)};
}

// ---- two layers

cuda::Wavefront wavefront(const cuda::Recurrence& first, const cuda::Recurrence& second) {
  return forced_loop() ? cuda::Wavefront{} : cuda::wavefront_plan(first, second);
}

// to: (T, B, H of the first)
cuda::Between between(Call& second, double p, bool locked, void* to) {
  return {mask_of(second.i, p, INPUT), locked, second.whole_numbers(second.i.seed), to};
}

// Forward of y, backward of the gradient in place.
void drop(const Call& call, const cuda::Between& d, const cuda::Recurrence& second, const void* from) {
  const int64_t T = d.locked ? second.steps : 1, B = second.steps * second.B / T;
  call.require_done(cuda::dropout({second.type, T, B, second.X, from, d.handed, d.seed, d.mask.threshold, d.mask.scale, false}, call.stream), second);
}

}  // namespace

Outputs forward_cuda(const RecurrenceInputs& i) {
  Call call(i);
  cuda::Recurrence r = arguments(call);
  const Outputs found = outputs(i, r);
  if (r.B == 0) return found;
  multiply_out(call, r);
  run_forward(call, r);
  return found;
}

Gradients backward_cuda(const RecurrenceInputs& i, const Tensor& dy, const Tensor& dh, const Tensor& dc, const Tensor& y,
                        const Saved& s, int64_t needs) {
  Call call(i);
  const Gradients d = empty_gradients(i, needs);
  const cuda::RecurrenceBackward g = backward_arguments(call, {i, dy, dh, dc, y, s, needs}, d);
  if (g.forward.B == 0) return d;
  run_backward(call, g);
  gradients(call, g, d);
  return d;
}

PairOutputs forward_pair_cuda(const RecurrenceInputs& first, RecurrenceInputs second, double p, bool locked) {
  Call call(first);
  cuda::Recurrence r = arguments(call);
  PairOutputs found{outputs(first, r), {}, new_empty(first.x, {p > 0 ? r.steps : 0, r.B, r.H})};
  second.x = p > 0 ? found.x : std::get<0>(found.first);
  Call above(second);
  cuda::Recurrence of_above = arguments(above);
  found.second = outputs(second, of_above);
  if (r.B == 0) return found;
  multiply_out(call, r), multiply_out(above, of_above);
  const cuda::Between d = between(above, p, locked, out(found.x));
  if (const cuda::Wavefront w = wavefront(r, of_above); w.persistent) {
    void* workspace = call.workspace(cuda::wavefront_bytes(r, of_above, w));
    call.require_done(cuda::wavefront_forward(r, of_above, d, w, workspace, call.stream), r);
  } else {
    run_forward(call, r);
    if (p > 0) drop(above, d, of_above, r.y);
    run_forward(above, of_above);
  }
  return found;
}

std::pair<Gradients, Gradients> backward_pair_cuda(const LayerBackward& first, const LayerBackward& second, double p, bool locked) {
  Call call(first.i), above(second.i);
  const Gradients of_first = empty_gradients(first.i, first.needs), of_second = empty_gradients(second.i, second.needs | X);
  cuda::RecurrenceBackward b = backward_arguments(call, first, of_first), of_above = backward_arguments(above, second, of_second);
  const cuda::Recurrence &r = b.forward, &s = of_above.forward;
  if (r.B == 0) return {of_first, of_second};
  const cuda::Between d = between(above, p, locked, out(of_second.dx));
  if (const cuda::Wavefront w = wavefront(r, s); w.persistent) {
    void* workspace = call.workspace(cuda::wavefront_backward_bytes(r, s, w));
    call.require_done(cuda::wavefront_backward(b, of_above, d, w, workspace, call.stream), r);
    gradients(above, of_above, of_second);
  } else {
    run_backward(above, of_above);
    gradients(above, of_above, of_second);
    if (p > 0) drop(above, d, s, d.handed);
    b.dy = call.in(first.dy ? torch::stable::subtract(of_second.dx, *first.dy, -1.) : of_second.dx);
    run_backward(call, b);
  }
  gradients(call, b, of_first);
  return {of_first, of_second};
}

}  // namespace fusedseq
#endif
