// A group of warps of a persistent kernel's block: which batch rows it has, how it publishes its
// columns of a vector and waits for the columns of other blocks, and which elements of a vector
// each of its threads owns.
#pragma once
#include <cuda/ptx.cuh>

#include "cuda/recurrence/persistent_exchange.cuh"
#include "cuda/recurrence/persistent_layer_link.cuh"
#include "cuda/recurrence/persistent_weights.cuh"

namespace fusedseq::cuda {

// Ends the kernel, and leaves the host a LostWait: see lost_wait.h. The arguments of a call that is
// inlined, and registers for what follows it, would make the largest variants spill. So this is a
// function that never returns, and it computes itself what it can. threads: of a group
[[noreturn]] inline __device__ __noinline__ void give_up(LostWait* lost, int threads,
                                                         uint32_t awaited, uint32_t epoch,
                                                         uint32_t shown) {
  const uint32_t waiting = blockIdx.x + 1 + (threadIdx.x / threads << 16);
  ptx::leave_and_trap(reinterpret_cast<uint4*>(lost), uint4{waiting, awaited, epoch, shown});
}

// The same of a wait for words, which show no epoch.
[[noreturn]] inline __device__ __noinline__ void give_up_words(LostWait* lost, int threads,
                                                               uint32_t awaited, uint32_t epoch) {
  const uint32_t waiting = blockIdx.x + 1 + (threadIdx.x / threads << 16);
  ptx::leave_and_trap(reinterpret_cast<uint4*>(lost),
                      uint4{waiting | LostWait::WORDS, awaited, epoch, 0});
}

// A group has V::SPLIT warps and batch rows of its own. It uses the weights of the block, and
// exchanges vectors only with the groups of the same number in the other blocks of its replica.
template <class S, class V>
struct WarpGroup {
  int block, number;       // of the replica; of the group in the block
  int warp, thread, lane;  // warp and thread: of the group
  int first_row, rows;     // of the batch
  uint32_t* flags;         // (blocks,)  of this group's counterparts in all blocks
  char* vectors;           // this group's part of the exchange buffer
  LostWait* lost;          // as in Exchange
  float* partial;          // (SPLIT, 16 PASS, stride)  in shared memory: the warps' partial sums

  // block_of_layer: the block's number among all blocks of the layer, of every replica
  __device__ __forceinline__ WarpGroup(const Layout& l, const Exchange& e, const BatchRows& slice,
                                       int block_of_layer)
      : block(block_of_layer % l.blocks),
        number(int(threadIdx.x) / V::THREADS),
        warp(int(threadIdx.x) % V::THREADS / 32),
        thread(int(threadIdx.x) % V::THREADS),
        lane(int(threadIdx.x) % 32),
        lost(e.lost) {
    const int replica = block_of_layer / l.blocks;
    const int index = replica * V::GROUPS + number;
    // The replica's rows end at `end`. A group has at most `most` of them, whole tiles of 16.
    const int first = slice.first + replica * int(l.rows);
    const int end = first + int(l.rows) < slice.end ? first + int(l.rows) : slice.end;
    const int most = int((l.rows + 16 * V::GROUPS - 1) / (16 * V::GROUPS)) * 16;
    first_row = first + number * most;
    rows = first_row >= end ? 0 : (end - first_row < most ? end - first_row : most);
    flags = e.flags + index * l.blocks;
    vectors = static_cast<char*>(e.vectors) + index * e.group_bytes;
  }

  // The slot of a vector. number: its epoch, or with words the number of its use
  __device__ __forceinline__ S* slot(const ExchangedVector& v, uint32_t number) const {
    constexpr uint32_t MANY = V::WORDS ? WORD_SLOTS : SLOTS;
    return reinterpret_cast<S*>(vectors + v.first_byte +
                                int64_t(number % MANY) * V::TILES * v.k_steps * FRAGMENT);
  }

  // Stores an element of use `use` of a vector: the lanes with even columns store words. All lanes
  // of the warp call it; exists: whether the lane has an element
  __device__ __forceinline__ void put_word(const ExchangedVector& v, uint32_t use, bool exists,
                                           int row, int column, float value) const {
    const float next = ptx::of_next_lane(value);
    if (!exists || column % 2) return;
    const int at = exchange_index<S>(row, column, v.k_steps);
    ptx::store_words(reinterpret_cast<uint32_t*>(slot(v, use) + at),
                     full_word(bits_of<S>(value) | uint32_t(bits_of<S>(next)) << 16));
    ptx::store_words(reinterpret_cast<uint32_t*>(slot(v, use - RESET_AFTER) + at), 0);
  }

  // Fills the words of all slots that no block owns, all groups of this number together.
  __device__ __forceinline__ void fill_padding(const ExchangedVector& v, int blocks) const {
    const int slot_words = V::TILES * v.k_steps * (FRAGMENT / 4);
    uint32_t* words = reinterpret_cast<uint32_t*>(slot(v, 0));
    for (int i = block * V::THREADS + thread; i < slot_words; i += blocks * V::THREADS) {
      // Of a lane's four words two are of row lane / 4, and two of the row 8 below.
      const int fragment = i / (FRAGMENT / 4), word = i % 4, of_lane = i / 4 % 32;
      const int row = fragment / v.k_steps * 16 + word / 2 * 8 + of_lane / 4;
      const int column = fragment % v.k_steps * K_STEP<S> + of_lane % 4 * 4 + word % 2 * 2;
      if (row < rows && column < v.width) continue;
      for (int s = 0; s < WORD_SLOTS; ++s)
        ptx::store_words(words + s * slot_words + i, ZEROS);
    }
  }

  // A barrier of the group's threads. Barrier 0 is __syncthreads, which would include other groups.
  __device__ __forceinline__ void sync() const { ptx::barrier(1 + number, V::THREADS); }

  // Publishes what the group's threads have stored since the last epoch. The barrier orders their
  // stores before thread 0's release, and the release orders them before whatever a block does
  // after it has acquired the flag.
  __device__ __forceinline__ void publish(uint32_t epoch) const {
    sync();
    if (thread == 0) ptx::store_release(flags + block, epoch);
  }

  // The same by words, which are published when they are stored. The barrier keeps the partial sums
  // until all threads have read them.
  __device__ __forceinline__ void publish_words(uint32_t epoch) const {
    sync();
    if (epoch % plan::FENCE_PERIOD == 0) ptx::fence();
  }

  // Waits until the slice's columns of a vector have been published.
  __device__ __forceinline__ void wait(const ExchangedVector& v, KSlice s, uint32_t epoch) const {
    const int end = s.end * K_STEP<S> < v.width ? s.end * K_STEP<S> : v.width;
    const int first_block = int(blockIdx.x) - block;
    wait({flags, first_block, v.columns_of_block, s.begin * K_STEP<S>, end}, epoch);
  }

  // Waits until the other layer has stored the block's columns of its first `steps` steps.
  // epochs_before: that layer's epochs before its first step
  __device__ __forceinline__ void wait(const LayerLink& link, const OwnedColumns& own,
                                       int64_t steps, int epochs_before) const {
    wait({link.flags, link.first_block, link.columns_of_block, own.first, own.first + own.count},
         uint32_t(steps) * link.epochs + epochs_before + 1);
  }

  // The columns [begin, end) of a vector, whose blocks own `columns` each.
  struct Awaited {
    const uint32_t* flags;  // (blocks,)
    int first_block;        // number in the grid of the block with flag 0
    int columns, begin, end;
  };

  // Waits until the blocks that own the columns have published the epoch. The lanes of a warp poll
  // one flag each. The acquire orders a lane's later loads after the producer's stores; __syncwarp
  // extends this to the other lanes. The difference of epochs is compared as a signed number, so
  // that the epoch may wrap around.
  __device__ __forceinline__ void wait(const Awaited& a, uint32_t epoch) const {
    if (a.end > a.begin)
      for (int p = a.begin / a.columns + lane; p <= (a.end - 1) / a.columns; p += 32) {
        uint32_t polls = 0, shown;
#pragma unroll 1  // nvcc would unroll it, because the call that never returns bounds its length
        while (int32_t((shown = ptx::load_acquire(a.flags + p)) - epoch) < 0) {
          if (++polls == MAX_POLLS) give_up(lost, V::THREADS, a.first_block + p, epoch, shown);
          ptx::pause();
        }
      }
    __syncwarp();
  }
};

// The elements that a thread owns of the group's rows and the block's columns of a vector. Element
// e is one of PER_PASS elements of pass e / PER_PASS. MAX_COLUMNS: the most columns a block can
// own. Row and column are computed anew at each use, which costs less than registers to hold them.
template <class V, int MAX_COLUMNS>
struct OwnedElements {
  static constexpr int PER_PASS = (V::PASS * 16 * MAX_COLUMNS + V::THREADS - 1) / V::THREADS;
  static constexpr int COUNT = V::PASSES * PER_PASS;
  int thread, rows, columns;
  uint32_t reciprocal;  // 2^16 / columns, rounded up: the division is exact for so few elements

  template <class G>
  __device__ __forceinline__ OwnedElements(const G& g, int columns)
      : thread(g.thread),
        rows(g.rows),
        columns(columns),
        reciprocal(columns ? 65536 / columns + 1 : 0) {}
  __device__ __forceinline__ int row_of_pass(int e) const {
    return int((thread + e % PER_PASS * V::THREADS) * reciprocal >> 16);
  }
  __device__ __forceinline__ int row(int e) const {
    return e / PER_PASS * V::PASS * 16 + row_of_pass(e);
  }
  __device__ __forceinline__ int column(int e) const {
    return thread + e % PER_PASS * V::THREADS - row_of_pass(e) * columns;
  }
  // Whether element e exists: the last ones may be beyond the rows or the pass.
  __device__ __forceinline__ bool has(int e) const {
    return columns && row_of_pass(e) < V::PASS * 16 && row(e) < rows;
  }
};

}  // namespace fusedseq::cuda
