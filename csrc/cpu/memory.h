// Memory for large results and workspaces: blocks that are kept and used again, from a megabyte on with huge pages. Fresh
// memory costs faults of one to five microseconds for each 4 KiB on a virtual machine: a dropout of 3 million elements took
// 0.4 ms in memory used before and up to 3.9 ms in fresh. And malloc gives a block of some hundred KiB back to the system
// whenever it was the last of its heap, so that every call faults again.
#pragma once
#include <cstddef>

namespace fusedseq::cpu {

// Uninitialised, aligned to 64 bytes; throws std::bad_alloc. `release` wants the size that was asked for.
void* allocate(size_t bytes);
void release(void* p, size_t bytes);

// Bytes that are kept at most, 512 MiB or FUSEDSEQ_CACHE_MB; blocks below LARGE come from malloc.
constexpr size_t LARGE = size_t(1) << 17;
size_t empty_cache();  // gives them back; returns how many they were

}  // namespace fusedseq::cpu
