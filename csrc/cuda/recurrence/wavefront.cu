// Two layers of a Mogrifier LSTM in one cooperative launch each way, each layer on SMs of its own:
// the blocks of persistent_forward.cuh and persistent_backward.cuh, linked by a tensor as described
// in persistent_layer_link.cuh. No block of the producing layer waits for the other layer, so there
// is no cycle of waits.
//
// The consuming layer loads its input a step early, as a layer alone does, and falls behind until
// it no longer waits: by arithmetic two layers take the time of T + 1 steps and two exchanges,
// instead of 2 T steps. A step takes as long as that of a layer that has the GPU alone, except that
// a block owns twice the columns. Measured: docs/gpu-status.md.
#include "cuda/recurrence/persistent.h"
#include "cuda/recurrence/persistent_backward.cuh"
#include "cuda/recurrence/persistent_exchange.cuh"
#include "cuda/recurrence/persistent_forward.cuh"
#include "cuda/recurrence/persistent_launch.cuh"

namespace fusedseq::cuda {
namespace {

template <class Direction>
struct Layers {
  Direction layer[2];
};

// The first blocks of the grid run the first layer, the others the second.
template <class S>
__global__ void __launch_bounds__(32 * WARPS, 1)
    wavefront_forward_kernel(const __grid_constant__ Layers<Forward> p) {
  const int blocks = p.layer[0].l.blocks;
  const int l = int(blockIdx.x) >= blocks;
  ForwardBlock<S, WavefrontVariant, true>(p.layer[l], int(blockIdx.x) - l * blocks).run();
}

template <class S>
__global__ void __launch_bounds__(32 * WARPS, 1)
    wavefront_backward_kernel(const __grid_constant__ Layers<Backward> p) {
  const int blocks = p.layer[0].l.blocks;
  const int l = int(blockIdx.x) >= blocks;
  BackwardBlock<S, WavefrontVariant, true>(p.layer[l], int(blockIdx.x) - l * blocks).run();
}

// The workspace of the second layer follows the first's.
template <class D>
int64_t bytes(const Layers<D>& p) {
  return exchange_bytes(p.layer[0].e, p.layer[0].l).total +
         exchange_bytes(p.layer[1].e, p.layer[1].l).total;
}

template <class D>
const char* prepare(Layers<D>& p, void* memory, cudaStream_t stream) {
  D &first = p.layer[0], &second = p.layer[1];
  void* second_memory = static_cast<char*>(memory) + exchange_bytes(first.e, first.l).total;
  if (const char* error = prepare(first.e, first.l, memory, stream)) return error;
  return prepare(second.e, second.l, second_memory, stream);
}

// One direction's link between the layers.
struct LinkArguments {
  int producer;                   // number of the producing layer
  int columns_of_block;           // that its blocks own of the tensor
  int64_t rounds;                 // of the producing layer
  void *stored_to, *loaded_from;  // LayerLink.tensor of the producing and of the consuming layer
};

template <class D>
void link(Layers<D>& p, const LayerInterface& between, const LinkArguments& a) {
  LayerLink& from = p.layer[a.producer].link;
  from = {};
  from.tensor = a.stored_to;
  from.mask = between.mask;
  from.locked = between.locked;
  from.seed = between.seed;
  p.layer[1 - a.producer].link = {p.layer[a.producer].e.flags,
                                  a.columns_of_block,
                                  int(a.rounds) + 1,
                                  a.producer ? p.layer[0].l.blocks : 0,
                                  a.loaded_from,
                                  {},
                                  false,
                                  nullptr};
}

template <class D, class K>
const char* launch(K kernel, const Layers<D>& p, cudaStream_t stream) {
  const Layout &first = p.layer[0].l, &second = p.layer[1].l;
  return launch_persistent(kernel, first.blocks + second.blocks,
                           first.shared > second.shared ? first.shared : second.shared, p, stream);
}

Layers<Forward> arguments(const Recurrence& first, const Recurrence& second, const Wavefront& w) {
  return {{arguments(first, w.forward[0]), arguments(second, w.forward[1])}};
}
Layers<Backward> arguments(const RecurrenceBackward& first, const RecurrenceBackward& second,
                           const Wavefront& w) {
  return {{arguments(first, w.backward[0]), arguments(second, w.backward[1])}};
}

}  // namespace

int64_t wavefront_bytes(const Recurrence& first, const Recurrence& second, const Wavefront& w) {
  return bytes(arguments(first, second, w));
}

int64_t wavefront_backward_bytes(const Recurrence& first, const Recurrence& second,
                                 const Wavefront& w) {
  RecurrenceBackward b[2]{};
  b[0].forward = first;
  b[1].forward = second;
  return bytes(arguments(b[0], b[1], w));
}

const char* wavefront_forward(const Recurrence& first, const Recurrence& second,
                              const LayerInterface& between, const Wavefront& w, void* memory,
                              void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  auto p = arguments(first, second, w);
  if (const char* error = prepare(p, memory, stream)) return error;

  // The second layer reads its x, which is the tensor or y, as an ordinary input.
  link(p, between, {0, w.forward[0].columns_h, first.rounds, between.tensor, nullptr});
  p.layer[1].r.x = between.tensor ? between.tensor : first.y;
  if (first.type == Type::bf16) return launch(wavefront_forward_kernel<__nv_bfloat16>, p, stream);
  return launch(wavefront_forward_kernel<__half>, p, stream);
}

const char* wavefront_backward(const RecurrenceBackward& first, const RecurrenceBackward& second,
                               const LayerInterface& between, const Wavefront& w, void* memory,
                               void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  auto p = arguments(first, second, w);
  if (const char* error = prepare(p, memory, stream)) return error;

  // The second layer writes the tensor as its dx.
  link(p, between, {1, w.backward[1].columns_x, second.forward.rounds, nullptr, between.tensor});
  p.layer[1].b.dx = between.tensor;
  if (first.forward.type == Type::bf16)
    return launch(wavefront_backward_kernel<__nv_bfloat16>, p, stream);
  return launch(wavefront_backward_kernel<__half>, p, stream);
}

}  // namespace fusedseq::cuda
