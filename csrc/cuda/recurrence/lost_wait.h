// What the host learns of a wait that came to no end. Each wait of the persistent kernels counts
// how often it has read its flag. Beyond MAX_POLLS the thread stores a LostWait and ends the kernel
// by a trap, so that a block that never arrives (a fault of a kernel, the driver or the GPU) is an
// error and not a GPU that is busy for ever.
//
// A trap destroys the CUDA context, and with it all device memory. The record is therefore in
// pinned memory of the host, which outlives the context.
#pragma once
#include <cstdint>

namespace fusedseq::cuda {

// Reads of a flag before a wait gives up. Polls are counted and not time, because a process may be
// preempted for any time. One poll is a round trip to the L2 cache, about 0.3 us by arithmetic: the
// bound is some 20 s, and the longest wait of a kernel that works is for weights to be loaded,
// below a millisecond.
constexpr uint32_t MAX_POLLS = 1u << 26;

// The device stores all 16 bytes at once: CUDA preserves aligned accesses of up to 16 bytes to the
// host's memory as one access (CUDA C++ Programming Guide, Mapped Memory).
struct alignas(16) LostWait {
  static constexpr uint32_t WORDS = 1u << 31;  // of `waiting`: it read words and not a flag
  uint32_t waiting;  // 1 + number in the grid of the block that gave up, and its warp group << 16
  uint32_t awaited;  // number in the grid of the block whose flag, or word, it read
  uint32_t epoch;    // that it waited for
  uint32_t shown;    // the epoch that the flag had; 0 with words
};

// The record of this process, allocated at the first call; null if the host's memory is exhausted.
LostWait* lost_wait_record();

// A sentence about the wait that was lost in this process, or null.
const char* lost_wait();

}  // namespace fusedseq::cuda
