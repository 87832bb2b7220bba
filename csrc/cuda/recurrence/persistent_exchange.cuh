// The persistent kernels: one cooperative launch runs all steps of a layer. persistent_forward.cuh
// and persistent_backward.cuh are the two directions; this file is the data that their blocks
// exchange through global memory.
//
// A block owns some columns of h and of x. In every phase of a step each block computes its own
// columns of a vector and then reads the whole vector. (A "vector" is a (rows, width) matrix: h, x
// or the gradient of the gates, for all batch rows of a warp group.) The weights that a block needs
// for its columns stay in its shared memory for the whole launch: persistent_weights.cuh.
//
// Layout of a vector in global memory: (row tiles of 16, k-steps of 32 bytes, 32 lanes, 16 bytes),
// the order in which mma.sync reads its A operand. A lane therefore loads 16 bytes at once from the
// L2 cache straight into registers. Shared memory would not help, because no other warp of the
// block reads the same elements.
//
// Protocol. The vectors that a group publishes are numbered by an epoch; vector `epoch` is in slot
// epoch % SLOTS. The producer stores its columns with relaxed stores, then all threads of its group
// meet at a barrier, then one thread stores the epoch to the block's flag with release semantics. A
// consumer warp loads, with acquire semantics, the flags of the blocks whose columns it reads,
// until all of them show the epoch; after __syncwarp its relaxed loads see the columns. Every block
// reads each vector before it publishes the next one. Every block owns columns of all vectors but
// x, and x never follows x. So having received the vectors e - 1 and e - 2 proves that vector e - 3
// is no longer read: three slots would be enough. Two would not, because nobody waits for a block
// that owns no columns of x when x is exchanged. tests/memory_model proves this under the memory
// model of PTX. A wait that comes to no end is reported by lost_wait.h.
//
// The protocol of words (V::WORDS; 16-bit types, even numbers of columns). A word is two columns of
// a row, and never 0 once it has been stored: two zeros are stored as two negative zeros, which are
// the same numbers. A consumer loads its words until none of them is 0, so neither a fence nor a
// flag stands between a store and the load that sees it. The uses of each kind of vector are
// numbered; use n is in slot n % WORD_SLOTS. The thread that stores a word of use n also empties
// the word of use n - RESET_AFTER. Its readers have read it: what the thread stores depends on
// vectors that every block stored after it had read that use. Every FENCE_PERIOD epochs all threads
// have a fence. Two of them order the reset before the polls of the slot's next use, so that no
// poll sees the slot's old word: the producer's between the reset and a later word, and the
// consumer's between reading that word and polling. In the other direction, two fences order a load
// before the stores of the slot's next use. tests/memory_model proves both, and that 9 slots would
// be enough. Words beyond the rows or columns are filled once, and never emptied.
//
// What limits the speed: rounds + 1 exchanges a step, about 1 us each by arithmetic; at B 64 and
// more, the transfer of the vectors from L2 to every SM. What a GPU took: docs/gpu-status.md.
#pragma once
#include <cuda/ptx.cuh>

#include <cstring>
#include <type_traits>

#include "cuda/recurrence/arguments.h"
#include "cuda/recurrence/lost_wait.h"
#include "cuda/recurrence/plan.h"

namespace fusedseq::cuda {

constexpr int SLOTS = 4;
constexpr int WORD_SLOTS = 16;
constexpr int RESET_AFTER = 2;           // uses of a kind of vector
constexpr uint32_t ZEROS = 0x80008000u;  // a word of zeros, which is not empty: -0 and -0
constexpr int FRAGMENT = 512;            // bytes of one row tile and one k-step of a vector
template <class S>
constexpr int K_STEP = 32 / int(sizeof(S));  // elements of a k-step

template <class S>
__device__ __forceinline__ int k_steps_of(int K) {
  return (K + K_STEP<S> - 1) / K_STEP<S>;
}

// One of the vectors that are exchanged (h, x, or the gates' gradient).
struct ExchangedVector {
  int64_t first_byte;    // of its slots, in a group's part of the exchange buffer
  int k_steps, width;    // elements of a row, and how many k-steps these take
  int columns_of_block;  // how many columns each block owns
};

// The batch rows [first, end) of a launch. Every tensor has all rows of the batch.
struct BatchRows {
  int first, end;
};

// The exchange buffers of a launch.
struct Exchange {
  uint32_t* flags;  // (replicas, groups, blocks)  newest published epoch; 0 at launch
  void* vectors;    // (replicas, groups, group_bytes)  S  zero at launch
  int64_t group_bytes;
  LostWait* lost;  // on the host; null if there is no memory for it
};

// The columns of a vector that a block owns: the last blocks may own fewer, or none.
struct OwnedColumns {
  int first, count;
  __device__ __forceinline__ OwnedColumns(int block, int each, int width)
      : first(block * each),
        count(width - first < each ? (width > first ? width - first : 0) : each) {}
};

// The bits of a tensor element.
template <class S>
using Bits = std::conditional_t<sizeof(S) == 2, uint16_t, uint32_t>;
template <class S>
__device__ __forceinline__ Bits<S> bits_of(float v) {
  const S rounded = S(v);
  Bits<S> bits;
  memcpy(&bits, &rounded, sizeof bits);
  return bits;
}
template <class S>
__device__ __forceinline__ float value_of(Bits<S> bits) {
  S v;
  memcpy(&v, &bits, sizeof bits);
  return float(v);
}

// Step t of a tensor with `elements` elements a step. Only this offset needs 64 bits; offsets
// within a step are 32-bit, which saves registers.
template <class T>
__device__ __forceinline__ T* step_of(void* p, int64_t t, int64_t elements) {
  return static_cast<T*>(p) + t * elements;
}
template <class T>
__device__ __forceinline__ const T* step_of(const void* p, int64_t t, int64_t elements) {
  return static_cast<const T*>(p) + t * elements;
}

// A word as it is stored: never empty.
__device__ __forceinline__ uint32_t full_word(uint32_t w) {
  return w ? w : ZEROS;
}
// The least of a lane's four words: 0 if one of them has not been stored yet.
__device__ __forceinline__ uint32_t least(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}
__device__ __forceinline__ uint32_t least(const uint4& v) {
  return least(least(v.x, v.y), least(v.z, v.w));
}

// The index of element (row, col) in a vector of `k_steps` k-steps, in the layout above.
template <class S>
__device__ __forceinline__ int exchange_index(int row, int col, int k_steps) {
  constexpr int OF_LANE = K_STEP<S> / 4;  // elements of a row that a lane holds of a k-step
  return (((row / 16 * k_steps + col / K_STEP<S>)*32 + row % 8 * 4 + col % K_STEP<S> / OF_LANE) *
              2 +
          row % 16 / 8) *
             OF_LANE +
         col % OF_LANE;
}

// The four gates of a unit (or their gradients) as elements of S, in as few registers as they need.
template <class S>
struct GateQuad {
  uint32_t words[sizeof(S)];
  __device__ __forceinline__ void set_bits(Bits<S> a, Bits<S> b, Bits<S> c, Bits<S> d) {
    if constexpr (sizeof(S) == 2) {
      words[0] = a | uint32_t(b) << 16;
      words[1] = c | uint32_t(d) << 16;
    } else {
      words[0] = a;
      words[1] = b;
      words[2] = c;
      words[3] = d;
    }
  }
  __device__ __forceinline__ void set(float a, float b, float c, float d) {
    set_bits(bits_of<S>(a), bits_of<S>(b), bits_of<S>(c), bits_of<S>(d));
  }
  __device__ __forceinline__ Bits<S> bits(int i) const {
    if constexpr (sizeof(S) == 2)
      return Bits<S>(words[i / 2] >> i % 2 * 16);
    else
      return words[i];
  }
  __device__ __forceinline__ float operator[](int i) const { return value_of<S>(bits(i)); }

  // The same by words; `old` is the slot whose words are emptied.
  __device__ __forceinline__ void store_words_to(S* vector, S* old, int row, int col,
                                                 int k_steps) const {
    const int at = exchange_index<S>(row, col, k_steps);
    ptx::store_words(reinterpret_cast<uint2*>(vector + at),
                     uint2{full_word(words[0]), full_word(words[1])});
    ptx::store_words(reinterpret_cast<uint2*>(old + at), uint2{0, 0});
  }

  // Stores the gates as columns col to col + 3 of a vector; col is a multiple of 4.
  __device__ __forceinline__ void store_to(S* vector, int row, int col, int k_steps) const {
#pragma unroll
    for (int i = 0; i < int(sizeof(S)); i += 2) {
      const int column = col + i * 2 / int(sizeof(S)) * 2;
      ptx::store_relaxed(reinterpret_cast<uint2*>(vector + exchange_index<S>(row, column, k_steps)),
                         uint2{words[i], words[i + 1]});
    }
  }
};

}  // namespace fusedseq::cuda
