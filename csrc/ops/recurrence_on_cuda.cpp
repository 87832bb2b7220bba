// The recurrent operators on CUDA: one layer, or two in one launch or in turn.
// recurrence_cuda_arguments.h fills the structures of cuda/recurrence/arguments.h from tensors, and
// recurrence_cuda_engines.h chooses the implementation and runs it.
#include "ops/recurrence_cuda_engines.h"

#ifdef FUSEDSEQ_CUDA
#include "cuda/dropout.h"

namespace fusedseq {

using namespace on_cuda;

namespace {

// tensor: (T, B, H of the first layer)
cuda::LayerInterface between_layers(RecurrenceCall& second, double p, bool locked, void* tensor) {
  return {mask_of(second.i, p, MaskStream::input), locked, second.integers("seed", second.i.seed),
          tensor};
}

// Applies the dropout between two layers, if they run one after the other: to y forward, and to its
// gradient, in place, backward. from: (T, B, X of the second layer)
void drop(const RecurrenceCall& call, const cuda::LayerInterface& d, const cuda::Recurrence& second,
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
  RecurrenceCall call(i);
  cuda::Recurrence r = arguments(call);
  const Outputs results = outputs(i, r);
  if (r.B == 0) return results;
  multiply_out(call, r);
  run_forward(call, r);
  return results;
}

Gradients backward_cuda(const LayerBackward& layer) {
  const RecurrenceInputs& i = layer.i;
  RecurrenceCall call(i);
  const Gradients d = empty_gradients(i, layer.needs);
  const cuda::RecurrenceBackward g = backward_arguments(call, layer, d);
  if (layer.dvectors) *layer.dvectors = empty_gradient(i, *i.vectors);
  if (g.forward.B == 0) return d;
  run_backward(call, g);
  run_gradients(call, g, d, layer.dvectors ? out(*layer.dvectors) : nullptr);
  return d;
}

PairOutputs forward_pair_cuda(const RecurrenceInputs& first, RecurrenceInputs second, double p,
                              bool locked) {
  RecurrenceCall call(first);
  cuda::Recurrence r = arguments(call);
  PairOutputs results{
      outputs(first, r), {}, torch::stable::new_empty(first.x, {p > 0 ? r.steps : 0, r.B, r.H})};
  second.x = p > 0 ? results.x : std::get<0>(results.first);
  RecurrenceCall second_call(second);
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
  RecurrenceCall call(first.i), second_call(second.i);
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
    run_gradients(second_call, b_second, d_second);
  } else {
    // The second layer's dx, through the dropout, is a gradient of the first layer's y.
    run_backward(second_call, b_second);
    run_gradients(second_call, b_second, d_second);
    if (p > 0) drop(second_call, between, s, between.tensor);
    b.dy = call.in("dy",
                   first.dy ? torch::stable::subtract(d_second.dx, *first.dy, -1.) : d_second.dx);
    run_backward(call, b);
  }
  run_gradients(call, b, d_first);
  return {d_first, d_second};
}

}  // namespace fusedseq
#endif
