// lstm, mogrifier_lstm and mogrifier_lstm_pair on CUDA: fills the structures of
// cuda/recurrence/arguments.h from tensors, chooses the implementation (persistent kernels or
// loop), runs it, and returns tensors.
#include "ops/recurrence_arguments.h"

#ifdef FUSEDSEQ_CUDA
#include "cuda/dropout.h"
#include "cuda/recurrence/arguments.h"
#include "cuda/recurrence/loop.h"
#include "cuda/recurrence/lost_wait.h"
#include "cuda/recurrence/persistent.h"
#include "cuda/recurrence/weight_gradients.h"
#include "cuda/recurrence/weight_preparation.h"
#include "ops/cuda_stream.h"
#include "ops/engine_table.h"
#include "ops/vendor_product.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

namespace fusedseq {
namespace {

using torch::stable::new_empty;

// Returns i. After a kernel that has ended itself no CUDA call succeeds: its reason is raised here,
// before any other call would raise the error that follows from it.
const RecurrenceInputs& of_living_context(const RecurrenceInputs& i) {
  require_launched(i.op, cuda::lost_wait());
  return i;
}

// A call of an operator: its device and stream, and the tensors that own the memory whose addresses
// the kernels receive. They live until the call returns; torch's allocator then reuses the memory
// only for later work on the same stream.
struct Call {
  const RecurrenceInputs& i;
  const torch::stable::Device device;
  const torch::stable::accelerator::DeviceGuard guard;
  void* const stream;
  const cuda::Product product;
  std::vector<Tensor> owned;

  explicit Call(const RecurrenceInputs& i)
      : i(of_living_context(i)),
        device(i.x.device()),
        guard(i.x.get_device_index()),
        stream(current_stream(i.x.get_device_index())),
        product(vendor_product(device)) {}

  void require_on_device(const Tensor& t) const {
    require(t.is_cuda() && t.get_device_index() == i.x.get_device_index(), i.op,
            "tensors must be on one device");
  }
  // The address of an input, which is made contiguous; null for one that is absent.
  const void* in(const Tensor& t, ScalarType type) {
    require_on_device(t);
    require(t.scalar_type() == type, i.op, "tensors must be of one dtype");
    owned.push_back(dense(t));
    return owned.back().const_data_ptr();
  }
  const void* in(const Tensor& t) { return in(t, i.x.scalar_type()); }
  const void* in(const std::optional<Tensor>& t) { return t ? in(*t) : nullptr; }
  const int64_t* integers(const std::optional<Tensor>& t) {
    return t ? static_cast<const int64_t*>(in(*t, ScalarType::Long)) : nullptr;
  }

  void* workspace(int64_t bytes) {
    owned.push_back(new_empty(i.x, {bytes}, ScalarType::Byte));
    return owned.back().mutable_data_ptr();
  }

  // Raises the error of a kernel or product, if there is one, with the sizes of the recurrence.
  void require_done(const char* error, const cuda::Recurrence& r) const {
    STD_TORCH_CHECK(!error, i.op, " with T, B, X, H, rounds = ", r.steps, ", ", r.B, ", ", r.X,
                    ", ", r.H, ", ", r.rounds, ": ", error ? error : "");
  }
};

// The address of an element of a tensor; null if p is.
const void* element(const void* p, int64_t index, const RecurrenceInputs& i) {
  return p ? static_cast<const char*>(p) + index * int64_t(i.x.element_size()) : nullptr;
}

// The weights (or gradients of weights) of the rounds on one side, whose first dimension is the
// round's index on that side; and where to store each round's address, by number of the round.
struct RoundTensors {
  const void *weight, *factor, *bias;
};
struct RoundAddresses {
  const void **weight, **factor, **bias;  // (MAX_ROUNDS,)
};
void store_round_addresses(const RecurrenceInputs& i, const RoundsOn& side, const RoundTensors& t,
                           const RoundAddresses& to) {
  const int64_t rank = i.rank();
  for (int64_t k = side.first; k < i.rounds; k += 2) {
    const int64_t j = side.index(k);
    to.weight[k] = element(t.weight, j * side.out * (rank ? rank : side.in), i);
    to.factor[k] = element(t.factor, j * rank * side.in, i);
    to.bias[k] = element(t.bias, j * side.out, i);
  }
}

cuda::Mask mask_of(const RecurrenceInputs& i, double p, MaskStream stream) {
  if (p == 0) return {};
  require(bool(i.seed), i.op, "a mask needs a seed");
  return {stream, threshold(p), p, scale(p)};
}

// The inputs of a recurrence; the outputs are still null.
cuda::Recurrence arguments(Call& call) {
  const RecurrenceInputs& i = call.i;
  require_inputs(i);
  cuda::Recurrence r{};
  r.type = cuda_type(i.op, "x", i.x);
  r.steps = i.x.size(0);
  r.B = i.x.size(1);
  r.X = i.x.size(2);
  r.H = i.h0.size(1);
  r.rounds = i.rounds;
  r.rank = i.rank();
  r.Xp = cpu::padded(r.X);
  r.Hp = cpu::padded(r.H);
  r.round_width = (r.rounds + 1) / 2 * r.Xp + r.rounds / 2 * r.Hp;
  r.cap_input_gate = i.cap_input_gate;
  r.training = i.training;

  r.seed = call.integers(i.seed);
  r.state = mask_of(i, i.training ? i.state_dropout : 0, MaskStream::state);
  r.zoneout_h = mask_of(i, i.zoneout_h, MaskStream::zoneout_h);
  r.zoneout_c = mask_of(i, i.zoneout_c, MaskStream::zoneout_c);
  r.weight = mask_of(i, i.training ? i.weight_drop : 0, MaskStream::weight);
  r.variational = i.variational;

  r.lengths = call.integers(i.lengths);
  r.x = call.in(i.x);
  r.W_ih = call.in(i.W_ih);
  r.W_hh = call.in(i.W_hh);
  r.b = call.in(i.b);
  r.h0 = call.in(i.h0);
  r.c0 = call.in(i.c0);
  for (const RoundsOn& side : {rounds_on_x(i), rounds_on_h(i)})
    if (side.uses > 0)
      store_round_addresses(i, side, {call.in(side.W), call.in(side.factor), call.in(side.bias)},
                            {r.rank ? r.A : r.Q, r.F, r.bias});
  return r;
}

// With a low rank, computes the rounds' weights from their factors, as both implementations expect.
void multiply_out(Call& call, cuda::Recurrence& r) {
  if (r.rank)
    call.require_done(
        cuda::multiply_out(r, call.product, call.workspace(cuda::multiplied_out_bytes(r))), r);
}

// FUSEDSEQ_RECURRENCE=loop selects the loop for every call, for comparisons.
bool forced_loop() {
  const char* value = std::getenv("FUSEDSEQ_RECURRENCE");
  return value && std::strcmp(value, "loop") == 0;
}
// The engine that was measured to be the fastest for a layer, or for two in turn; see
// engine_table.h.
Engine measured(const cuda::Recurrence& r, const cuda::Recurrence* second = nullptr) {
  if (!has_measured_engines()) return Engine::by_plan;
  const cuda::GpuKind gpu = cuda::current_gpu_kind();
  return measured_engine({gpu.multiprocessors, gpu.capability, int64_t(r.type), r.B, r.X, r.H,
                          r.rounds, second ? second->H : 0, second ? second->rounds : 0});
}
cuda::Plan plan_of(const cuda::Recurrence& r) {
  if (forced_loop() || measured(r) == Engine::loop) return {};
  return cuda::persistent_plan(r);
}

// Whether a launch of persistent kernels has run; false if the driver refused it, which the first
// call in a process warns of. Raises any other error.
bool has_run(const Call& call, const cuda::Recurrence& r, const char* error) {
  if (error != cuda::LAUNCH_REFUSED) {
    call.require_done(error, r);
    return true;
  }
  static std::atomic<bool> has_warned = false;
  if (!has_warned.exchange(true)) {
    const std::string text =
        std::string("fusedseq: ") + call.i.op + ": " + error +
        " (limits of MPS, a part of a GPU by MIG, or another process); this call and others like "
        "it run the loop, which is slower. FUSEDSEQ_RECURRENCE=loop selects it without the attempt";
    aoti_torch_warn(__func__, __FILE__, __LINE__, text.c_str());
  }
  return false;
}

void run_forward(Call& call, const cuda::Recurrence& r) {
  if (const cuda::Plan plan = plan_of(r); plan.forward.blocks) {
    void* workspace = call.workspace(cuda::persistent_bytes(r, plan.forward));
    const char* error =
        cuda::persistent_forward(r, plan.forward, call.product, workspace, call.stream);
    if (has_run(call, r, error)) return;
  }
  void* workspace = call.workspace(cuda::loop_bytes(r));
  call.require_done(cuda::loop_forward(r, call.product, workspace, call.stream), r);
}
void run_backward(Call& call, const cuda::RecurrenceBackward& g) {
  const cuda::Recurrence& r = g.forward;
  if (const cuda::Plan plan = plan_of(r); plan.backward.blocks) {
    void* workspace = call.workspace(cuda::persistent_backward_bytes(r, plan.backward));
    const char* error = cuda::persistent_backward(g, plan.backward, workspace, call.stream);
    if (has_run(call, r, error)) return;
  }
  void* workspace = call.workspace(cuda::loop_backward_bytes(r));
  call.require_done(cuda::loop_backward(g, call.product, workspace, call.stream), r);
}

ScalarType computing_type(const RecurrenceInputs& i) {
  return i.x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Tensors for the gradients, uninitialized; empty for those that are not needed. Zero if the batch
// is empty, because no kernel runs then.
Gradients empty_gradients(const RecurrenceInputs& i, int64_t needs) {
  const auto like = [&](const std::optional<Tensor>& t, bool needed) {
    Tensor g = t && needed ? new_empty(i.x, t->sizes()) : new_empty(i.x, {0});
    return i.x.size(1) == 0 ? torch::stable::zero_(g) : g;
  };
  const RequiredGradients required(needs);
  return {like(i.x, required.dx),
          like(i.W_ih, required.dW_ih),
          like(i.W_hh, required.dW_hh),
          like(i.b, required.db),
          like(i.h0, true),
          like(i.c0, true),
          like(i.Q, required.any_Q),
          like(i.Q_factor, required.any_Q),
          like(i.R, required.any_R),
          like(i.R_factor, required.any_R),
          like(i.Q_bias, required.any_Q),
          like(i.R_bias, required.any_R)};
}

// The address of an output; null for an empty tensor.
void* out(const Tensor& t) {
  return t.numel() ? t.mutable_data_ptr() : nullptr;
}

// The gradients of the weights, from the results of the backward loop.
void gradients(Call& call, const cuda::RecurrenceBackward& g, const Gradients& d) {
  const RecurrenceInputs& i = call.i;
  const void *dW[cuda::MAX_ROUNDS] = {}, *dF[cuda::MAX_ROUNDS] = {}, *dbias[cuda::MAX_ROUNDS] = {};
  const RoundsOn on_x = rounds_on_x(i), on_h = rounds_on_h(i);
  if (on_x.uses > 0)
    store_round_addresses(i, on_x, {out(d.dQ), out(d.dQ_factor), out(d.dQ_bias)}, {dW, dF, dbias});
  if (on_h.uses > 0)
    store_round_addresses(i, on_h, {out(d.dR), out(d.dR_factor), out(d.dR_bias)}, {dW, dF, dbias});

  cuda::RecurrenceGradients w{};
  w.backward = g;
  w.dx = i.rounds ? nullptr : out(d.dx);
  w.dW_ih = out(d.dW_ih);
  w.dW_hh = out(d.dW_hh);
  w.db = out(d.db);
  for (int64_t k = 0; k < i.rounds; ++k) {
    w.dQ[k] = const_cast<void*>(dW[k]);
    w.dF[k] = const_cast<void*>(dF[k]);
    w.dbias[k] = const_cast<void*>(dbias[k]);
  }
  void* workspace = call.workspace(cuda::gradients_bytes(w));
  call.require_done(cuda::gradients(w, call.product, workspace, call.stream), g.forward);
}

// Tensors for the outputs, whose addresses are stored to r.
Outputs outputs(const RecurrenceInputs& i, cuda::Recurrence& r) {
  const ScalarType computing = computing_type(i);
  Tensor y = new_empty(i.x, {r.steps, r.B, r.H}), h = new_empty(i.x, {r.B, r.H}),
         c = new_empty(i.x, {r.B, r.H});
  Saved s{new_empty(i.x, {r.steps, r.B, 4, r.Hp}), new_empty(i.x, {r.steps, r.B, r.Hp}, computing),
          new_empty(i.x, {r.steps, r.B, r.round_width}),
          new_empty(i.x, {0, r.steps, r.B, 0}, computing)};
  r.y = out(y);
  r.h = out(h);
  r.c = out(c);
  r.gates = out(s.gates);
  r.cells = out(s.cells);
  r.round_gates = out(s.round_gates);
  return {y, h, c, s};
}

// The arguments of a backward loop, with memory for dz and dround, from which the weights'
// gradients are computed.
cuda::RecurrenceBackward backward_arguments(Call& call, const LayerBackward& l,
                                            const Gradients& d) {
  const RecurrenceInputs& i = call.i;
  cuda::Recurrence r = arguments(call);
  require_output_gradients(i, l.dy ? *l.dy : l.y, l.dh, l.dc, l.y, l.saved);
  r.y = const_cast<void*>(call.in(l.y));
  r.gates = const_cast<void*>(call.in(l.saved.gates));
  r.cells = const_cast<void*>(call.in(l.saved.cells, computing_type(i)));
  r.round_gates = const_cast<void*>(call.in(l.saved.round_gates));
  if (r.B) multiply_out(call, r);
  const Tensor dz = new_empty(i.x, {r.steps, r.B, 4 * r.H}),
               dround = new_empty(i.x, {r.steps, r.B, r.round_width});
  call.owned.push_back(dz);
  call.owned.push_back(dround);
  cuda::RecurrenceBackward g{};
  g.forward = r;
  g.dy = call.in(l.dy);
  g.dh = call.in(l.dh);
  g.dc = call.in(l.dc);
  g.dz = out(dz);
  g.dround = out(dround);
  g.dx = r.rounds ? out(d.dx) : nullptr;
  g.dh0 = out(d.dh0);
  g.dc0 = out(d.dc0);
  return g;
}

// ---- two layers

cuda::Wavefront wavefront(const cuda::Recurrence& first, const cuda::Recurrence& second) {
  if (forced_loop() || measured(first, &second) == Engine::in_turn) return {};
  return cuda::wavefront_plan(first, second);
}

// tensor: (T, B, H of the first layer)
cuda::LayerInterface between_layers(Call& second, double p, bool locked, void* tensor) {
  return {mask_of(second.i, p, MaskStream::input), locked, second.integers(second.i.seed), tensor};
}

// Applies the dropout between two layers, if they run one after the other: to y forward, and to its
// gradient, in place, backward. from: (T, B, X of the second layer)
void drop(const Call& call, const cuda::LayerInterface& d, const cuda::Recurrence& second,
          const void* from) {
  const int64_t T = d.locked ? second.steps : 1;
  const int64_t B = second.steps * second.B / T;
  call.require_done(cuda::dropout({second.type, T, B, second.X, from, d.tensor, d.seed,
                                   d.mask.threshold, d.mask.scale, false},
                                  call.stream),
                    second);
}

}  // namespace

Outputs forward_cuda(const RecurrenceInputs& i) {
  Call call(i);
  cuda::Recurrence r = arguments(call);
  const Outputs results = outputs(i, r);
  if (r.B == 0) return results;
  multiply_out(call, r);
  run_forward(call, r);
  return results;
}

Gradients backward_cuda(const LayerBackward& layer) {
  const RecurrenceInputs& i = layer.i;
  Call call(i);
  const Gradients d = empty_gradients(i, layer.needs);
  const cuda::RecurrenceBackward g = backward_arguments(call, layer, d);
  if (g.forward.B == 0) return d;
  run_backward(call, g);
  gradients(call, g, d);
  return d;
}

PairOutputs forward_pair_cuda(const RecurrenceInputs& first, RecurrenceInputs second, double p,
                              bool locked) {
  Call call(first);
  cuda::Recurrence r = arguments(call);
  PairOutputs results{outputs(first, r), {}, new_empty(first.x, {p > 0 ? r.steps : 0, r.B, r.H})};
  second.x = p > 0 ? results.x : std::get<0>(results.first);
  Call second_call(second);
  cuda::Recurrence s = arguments(second_call);
  results.second = outputs(second, s);
  if (r.B == 0) return results;
  multiply_out(call, r);
  multiply_out(second_call, s);
  const cuda::LayerInterface between = between_layers(second_call, p, locked, out(results.x));

  // Both layers in one launch if they fit, else one after the other.
  if (const cuda::Wavefront w = wavefront(r, s); w.persistent) {
    void* workspace = call.workspace(cuda::wavefront_bytes(r, s, w));
    if (has_run(call, r, cuda::wavefront_forward(r, s, between, w, workspace, call.stream)))
      return results;
  }
  run_forward(call, r);
  if (p > 0) drop(second_call, between, s, r.y);
  run_forward(second_call, s);
  return results;
}

std::pair<Gradients, Gradients> backward_pair_cuda(const LayerBackward& first,
                                                   const LayerBackward& second, double p,
                                                   bool locked) {
  Call call(first.i), second_call(second.i);
  const Gradients d_first = empty_gradients(first.i, first.needs);
  const Gradients d_second = empty_gradients(second.i, second.needs);
  cuda::RecurrenceBackward b = backward_arguments(call, first, d_first);
  const cuda::RecurrenceBackward b_second = backward_arguments(second_call, second, d_second);
  const cuda::Recurrence &r = b.forward, &s = b_second.forward;
  if (r.B == 0) return {d_first, d_second};
  const cuda::LayerInterface between = between_layers(second_call, p, locked, out(d_second.dx));

  bool together = false;
  if (const cuda::Wavefront w = wavefront(r, s); w.persistent) {
    void* workspace = call.workspace(cuda::wavefront_backward_bytes(r, s, w));
    together =
        has_run(call, r, cuda::wavefront_backward(b, b_second, between, w, workspace, call.stream));
  }
  if (together) {
    gradients(second_call, b_second, d_second);
  } else {
    // The second layer's dx, through the dropout, is a gradient of the first layer's y.
    run_backward(second_call, b_second);
    gradients(second_call, b_second, d_second);
    if (p > 0) drop(second_call, between, s, between.tensor);
    b.dy = call.in(first.dy ? torch::stable::subtract(d_second.dx, *first.dy, -1.) : d_second.dx);
    run_backward(call, b);
  }
  gradients(call, b, d_first);
  return {d_first, d_second};
}

}  // namespace fusedseq
#endif
