// A caching allocator for large results and workspaces. Released blocks are cached and handed out
// again; blocks of a megabyte and more are backed by huge pages.
//
// What limits large operators otherwise is page faults: on a virtual machine, fresh memory costs
// one to five microseconds for each 4 KiB. A dropout of 3 million elements took 0.4 ms in memory
// that had been used before and up to 3.9 ms in fresh memory. malloc alone does not avoid this: it
// returns a block of some hundred KiB to the system whenever that block is the last one of its
// heap, so that every call faults again.
#pragma once
#include <cstddef>

namespace fusedseq::cpu {

// Returns uninitialized memory aligned to 64 bytes; throws std::bad_alloc if there is none.
void* allocate(size_t bytes);
// Releases a block. `bytes` must be the size that was passed to `allocate`.
void release(void* p, size_t bytes) noexcept;

// Blocks smaller than LARGE bytes are not cached; they come from malloc.
constexpr size_t LARGE = size_t(1) << 17;

// Frees all cached blocks and returns their size in bytes. The cache holds at most
// FUSEDSEQ_CACHE_MB (an environment variable) MiB, by default an eighth of the machine's memory,
// from 512 MiB to 4 GiB. Where that is exceeded, the blocks released first are freed.
size_t empty_cache();

}  // namespace fusedseq::cpu
