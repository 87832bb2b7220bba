#include "ops/recurrence_cuda_engines.h"

#ifdef FUSEDSEQ_CUDA
#include "cuda/recurrence/loop.h"
#include "ops/engine_table.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

namespace fusedseq::on_cuda {
namespace {

// FUSEDSEQ_RECURRENCE=loop selects the loop for every call, for comparisons.
bool forced_loop() {
  const char* value = std::getenv("FUSEDSEQ_RECURRENCE");
  return value && std::strcmp(value, "loop") == 0;
}
// The engine that was measured to be the fastest for a layer, or for two in turn; see
// engine_table.h. Only LSTMs in the usual order without `starts` are measured.
Engine measured(const cuda::Recurrence& r, const cuda::Recurrence* second = nullptr) {
  if (!has_measured_engines() || cuda::needs_cells(r)) return Engine::by_plan;
  const cuda::GpuKind gpu = cuda::current_gpu_kind();
  return measured_engine({gpu.multiprocessors, gpu.capability, int64_t(r.type), r.B, r.X, r.H,
                          r.rounds, second ? second->H : 0, second ? second->rounds : 0});
}
cuda::Plan plan_of(const cuda::Recurrence& r) {
  const Engine engine = measured(r);
  if (forced_loop() || engine == Engine::loop) return {};
  using cuda::Protocol;
  return cuda::persistent_plan(r, cuda::SHORTEST,
                               engine == Engine::words        ? Protocol::words
                               : engine == Engine::persistent ? Protocol::flags
                                                              : Protocol::by_estimate);
}

}  // namespace

cuda::Wavefront wavefront(const cuda::Recurrence& first, const cuda::Recurrence& second) {
  if (forced_loop() || measured(first, &second) == Engine::in_turn) return {};
  return cuda::wavefront_plan(first, second);
}

bool has_run(const RecurrenceCall& call, const cuda::Recurrence& r, const char* error) {
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

void run_forward(RecurrenceCall& call, const cuda::Recurrence& r) {
  if (const cuda::Plan plan = plan_of(r); plan.forward.blocks) {
    void* workspace = call.workspace(cuda::persistent_bytes(r, plan.forward));
    const char* error =
        cuda::persistent_forward(r, plan.forward, call.product, workspace, call.stream);
    if (has_run(call, r, error)) return;
  }
  void* workspace = call.workspace(cuda::loop_bytes(r));
  call.require_done(cuda::loop_forward(r, call.product, workspace, call.stream), r);
}
void run_backward(RecurrenceCall& call, const cuda::RecurrenceBackward& g) {
  const cuda::Recurrence& r = g.forward;
  if (const cuda::Plan plan = plan_of(r); plan.backward.blocks) {
    void* workspace = call.workspace(cuda::persistent_backward_bytes(r, plan.backward));
    const char* error = cuda::persistent_backward(g, plan.backward, workspace, call.stream);
    if (has_run(call, r, error)) return;
  }
  void* workspace = call.workspace(cuda::loop_backward_bytes(r));
  call.require_done(cuda::loop_backward(g, call.product, workspace, call.stream), r);
}

void run_gradients(RecurrenceCall& call, const cuda::RecurrenceBackward& g, const Gradients& d,
                   void* dvectors) {
  const cuda::RecurrenceGradients w = gradient_arguments(call.i, g, d, dvectors);
  void* workspace = call.workspace(cuda::gradients_bytes(w));
  call.require_done(cuda::gradients(w, call.product, workspace, call.stream), g.forward);
}

}  // namespace fusedseq::on_cuda
#endif
