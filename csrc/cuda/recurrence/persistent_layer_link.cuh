// What one layer of a wavefront (wavefront.cu) passes to the other layer of the same launch:
// forward the first layer's y, backward the gradient of it, which the second layer computes.
//
// The tensor has room for all steps, so that the producing layer never waits for the other layer to
// have read it. The producer stores step t of it after it has published the last vector of that
// step; the next vector's release therefore publishes it too. After its last step the producer
// publishes one more epoch for the same reason.
#pragma once
#include <cuda/ptx.cuh>

#include "cuda/recurrence/persistent_exchange.cuh"
#include "cuda/recurrence/persistent_masks.cuh"

namespace fusedseq::cuda {

struct LayerLink {
  // Of the consuming layer; in the producing layer flags is null.
  const uint32_t* flags;  // (blocks,)  of the producing layer
  int columns_of_block;   // that each of these blocks owns of the tensor
  int epochs;             // that the producing layer publishes in a step
  int first_block;        // of the producing layer, in the grid
  // Of the producing layer.
  void* tensor;  // (T, B, H of the first layer)  S; null if the layer's own output is what is read
  Mask mask;     // of the dropout between the layers, which the producer applies to the tensor
  bool locked;   // the mask is (B, H), else (T, B, H)
  const int64_t* seed;
};

// Stores an element of the tensor, and loads it in the other layer: relaxed accesses at the L2
// cache, since a plain load could find an old line in L1.
template <class S>
__device__ __forceinline__ void store_linked(S* to, S v) {
  ptx::store_relaxed(reinterpret_cast<Bits<S>*>(to), bits_of<S>(float(v)));
}
template <class S>
__device__ __forceinline__ float load_linked(const S* from) {
  return value_of<S>(ptx::load_relaxed(reinterpret_cast<const Bits<S>*>(from)));
}

// Element (t, b, j) after the dropout between the layers.
template <class S>
__device__ __forceinline__ S masked(const LayerLink& link, S v, int64_t t, int64_t B, int b, int j,
                                    int64_t width) {
  if (!link.mask.threshold) return v;
  return keep(link.seed, link.mask, link.locked ? b : t * B + b, j, width)
             ? S(float(v) * float(link.mask.scale))
             : S(0.f);
}

}  // namespace fusedseq::cuda
