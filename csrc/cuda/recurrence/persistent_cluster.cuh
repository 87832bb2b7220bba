// How the two blocks of a cluster load an exchanged vector once (V::CLUSTERS; compute
// capability 9.0 and later, 16-bit types, one group of warps). Flags, slots and epochs are those of
// persistent_exchange.cuh.
//
// The warps of the same number in both blocks read the same k-steps. Each waits for the flags of
// the blocks that own one half of these k-steps, and copies this half from the L2 cache to the
// shared memory of both blocks: bulk copies with multicast. What crosses from the L2 cache to the
// SMs is half of what it is without clusters.
//
// A warp receives the k-steps in stages of a ring in shared memory. Stage i of a vector holds the
// i-th k-step of the first half, copied by the block with rank 0, and the i-th of the second half,
// copied by the other one. A stage has two barriers, each with two arrivals a phase.
// At the barrier `arrived` the copying warps of both blocks arrive with the bytes of their copies,
// so that a phase is complete when all bytes have been copied. They do so after their wait for
// flags; so what has been released with the epoch happens before what follows the wait for the
// phase, as it does without clusters.
// At the barrier `released` the reading warps of both blocks arrive when they have read the stage.
// A warp waits for it before it copies to the stage again, since it also writes the other block's
// memory.
//
// Bulk copies belong to the asynchronous proxy: a fence between the proxies stands between these
// waits, for the flags and for the release of the stage, and each copy.
//
// Why a slot of the vector in global memory is not overwritten while it is copied: a block
// publishes an epoch after it has received all of the vector before, including what the other block
// copies for it, and every block waits, itself or by the other block of its cluster, for the flags
// of all blocks. The argument of persistent_exchange.cuh then holds with "has received" for
// "reads".
//
// Slower than without clusters on an H200: docs/gpu-status.md.
#pragma once
#include <cuda/cluster.cuh>
#include <cuda/ptx.cuh>

#include "cuda/recurrence/persistent_exchange.cuh"

namespace fusedseq::cuda {

// A warp's ring of stages, and its place in it.
struct ClusterRing {
  uint32_t rank;  // of the block in the cluster
  int stages;     // of the ring
  int tiles;      // row tiles of a stage, those that have rows
  char* staged;   // (stages, 2, tiles, FRAGMENT)
  // (stages, 2)  arrived and released. Phases of a stage alternate between the parities 0 and 1.
  uint64_t* barriers;

  // A stage, and how often the ring has been passed through.
  struct Position {
    int stage;
    uint32_t turn;
  };
  Position position;  // of the next stage to read

  __device__ __forceinline__ void advance(Position& at) const {
    if (++at.stage < stages) return;
    at.stage = 0;
    ++at.turn;
  }
  __device__ __forceinline__ uint64_t* arrived(Position at) const {
    return barriers + 2 * at.stage;
  }
  __device__ __forceinline__ uint64_t* released(Position at) const { return arrived(at) + 1; }
  // The fragment of row tile m of k-step `half` of a stage.
  __device__ __forceinline__ char* fragment(Position at, int half, int m) const {
    return staged + ((at.stage * 2 + half) * tiles + m) * FRAGMENT;
  }

  // Places the rings of all warps of a block, and initializes this warp's barriers. All threads
  // call it; a barrier of the cluster must follow. The rings are at the end of the shared memory,
  // as plan.h counts it: there they have the same place in both blocks, of which one may own fewer
  // columns, and so have fewer weights before the rings.
  __device__ __forceinline__ void start(const Layout& l, int warp, int lane) {
    rank = ptx::cluster_rank();
    stages = l.stages;
    tiles = (int(l.rows) + 15) / 16;
    const int bytes = stages * 2 * tiles * FRAGMENT, of_barriers = stages * 2 * 8;
    char* first = ptx::dynamic_shared() + (l.shared - WARPS * (bytes + of_barriers));
    staged = first + warp * bytes;
    barriers = reinterpret_cast<uint64_t*>(first + WARPS * bytes + warp * of_barriers);
    position = {0, 0};
    if (lane == 0) {
      for (int i = 0; i < 2 * stages; ++i)
        ptx::barrier_init(barriers + i, 2);
      ptx::fence_barrier_init();
    }
  }

  // Copies this block's k-step of a stage to both blocks. One lane calls it.
  // from: its first row tile; null if there is no such k-step    tile: bytes to the next row tile
  // wait: waits for a phase of a barrier
  template <class W>
  __device__ __forceinline__ void copy(Position at, const char* from, int tile, W wait) const {
    // In the first turn nobody has read the stage.
    if (at.turn) wait(released(at), (at.turn - 1) & 1);
    ptx::fence_proxy_async();
    const uint32_t bytes = from ? tiles * FRAGMENT : 0;
    for (uint32_t to = 0; to < 2; ++to)
      ptx::barrier_arrive_expect(arrived(at), to, bytes);
    for (int m = 0; from && m < tiles; ++m)
      ptx::copy_to_both(fragment(at, int(rank), m), from + m * tile, FRAGMENT, arrived(at));
  }

  // Lets both blocks copy to a stage again. One lane calls it, when all lanes have read the stage.
  __device__ __forceinline__ void release(Position at) const {
    for (uint32_t to = 0; to < 2; ++to)
      ptx::barrier_arrive(released(at), to);
  }
};
struct NoRing {};

}  // namespace fusedseq::cuda
