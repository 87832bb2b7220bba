// Two layers of a Mogrifier LSTM in one cooperative launch each way, on SMs of their own: the blocks of persistent_forward.cuh
// and persistent_backward.cuh, which hand over a tensor as `Link` says. No block of the giver waits for the other layer, so
// that nobody waits in a circle.
//
// The reader fetches a step early, as one layer alone does, and falls behind until that costs nothing: by arithmetic two layers
// take the time of T + 1 steps and two exchanges, instead of 2 T steps. A step takes as long as that of a layer which has the
// GPU alone, but for twice the columns of each block. Nothing of this has run on a GPU.
#include "persistent.cuh"
#include "persistent_launch.cuh"
#include "persistent_backward.cuh"
#include "persistent_forward.cuh"

namespace fusedseq::cuda {
namespace {

template <class Direction> struct Layers {
  Direction layer[2];
};

template <class S> __global__ void __launch_bounds__(32 * WARPS, 1) wavefront_forward_kernel(const __grid_constant__ Layers<Forward> p) {
  const int blocks = p.layer[0].l.blocks, l = int(blockIdx.x) >= blocks;
  ForwardBlock<S, WavefrontVariant, true>(p.layer[l], int(blockIdx.x) - l * blocks).run();
}

template <class S> __global__ void __launch_bounds__(32 * WARPS, 1) wavefront_backward_kernel(const __grid_constant__ Layers<Backward> p) {
  const int blocks = p.layer[0].l.blocks, l = int(blockIdx.x) >= blocks;
  BackwardBlock<S, WavefrontVariant, true>(p.layer[l], int(blockIdx.x) - l * blocks).run();
}

// The workspace of the second layer follows the first's.
template <class D> int64_t bytes(const Layers<D>& p) {
  return workspace(p.layer[0].e, p.layer[0].l).bytes + workspace(p.layer[1].e, p.layer[1].l).bytes;
}

template <class D> const char* prepare(Layers<D>& p, void* memory, cudaStream_t stream) {
  void* second = static_cast<char*>(memory) + workspace(p.layer[0].e, p.layer[0].l).bytes;
  if (const char* error = prepare(p.layer[0].e, p.layer[0].l, memory, stream)) return error;
  return prepare(p.layer[1].e, p.layer[1].l, second, stream);
}

// giver: the number of the layer; columns: that its blocks own of what is handed over
template <class D> void link(Layers<D>& p, const Between& between, int giver, int columns, int64_t rounds, void* given, void* taken) {
  p.layer[giver].link = {nullptr, 0, 0, given, between.mask, between.locked, between.seed};
  p.layer[1 - giver].link = {p.layer[giver].e.flags, columns, int(rounds) + 1, taken, {}, false, nullptr};
}

template <class D, class K> const char* launch(K kernel, const Layers<D>& p, cudaStream_t stream) {
  const Layout &first = p.layer[0].l, &second = p.layer[1].l;
  return launch_persistent(kernel, first.blocks + second.blocks, first.shared > second.shared ? first.shared : second.shared, p, stream);
}

Layers<Forward> arguments(const Recurrence& first, const Recurrence& second, const Wavefront& w) {
  return {{arguments(first, w.forward[0]), arguments(second, w.forward[1])}};
}
Layers<Backward> arguments(const RecurrenceBackward& first, const RecurrenceBackward& second, const Wavefront& w) {
  return {{arguments(first, w.backward[0]), arguments(second, w.backward[1])}};
}

}  // namespace

int64_t wavefront_bytes(const Recurrence& first, const Recurrence& second, const Wavefront& w) { return bytes(arguments(first, second, w)); }

int64_t wavefront_backward_bytes(const Recurrence& first, const Recurrence& second, const Wavefront& w) {
  RecurrenceBackward b[2]{};
  b[0].forward = first, b[1].forward = second;
  return bytes(arguments(b[0], b[1], w));
}

const char* wavefront_forward(const Recurrence& first, const Recurrence& second, const Between& between, const Wavefront& w, void* memory,
                              void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  auto p = arguments(first, second, w);
  if (const char* error = prepare(p, memory, stream)) return error;
  link(p, between, 0, w.forward[0].columns_h, first.rounds, between.handed, nullptr);
  p.layer[1].r.x = between.handed ? between.handed : first.y;
  if (first.type == Type::bf16) return launch(wavefront_forward_kernel<__nv_bfloat16>, p, stream);
  return launch(wavefront_forward_kernel<__half>, p, stream);
}

const char* wavefront_backward(const RecurrenceBackward& first, const RecurrenceBackward& second, const Between& between, const Wavefront& w,
                               void* memory, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  auto p = arguments(first, second, w);
  if (const char* error = prepare(p, memory, stream)) return error;
  link(p, between, 1, w.backward[1].columns_x, second.forward.rounds, nullptr, between.handed);
  p.layer[1].b.dx = between.handed;
  if (first.forward.type == Type::bf16) return launch(wavefront_backward_kernel<__nv_bfloat16>, p, stream);
  return launch(wavefront_backward_kernel<__half>, p, stream);
}

}  // namespace fusedseq::cuda
