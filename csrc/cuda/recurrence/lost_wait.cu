// The host's side of lost_wait.h.
#include "cuda/recurrence/lost_wait.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace fusedseq::cuda {
namespace {

std::atomic<LostWait*> record;

// Pinned memory that every device addresses by the host's pointer. The stream of the caller may be
// capturing a graph, which forbids allocations unless the thread's mode is relaxed.
LostWait* allocate() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  void* memory = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&memory, sizeof(LostWait), cudaHostAllocMapped | cudaHostAllocPortable);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  std::memset(memory, 0, sizeof(LostWait));
  return static_cast<LostWait*>(memory);
}

}  // namespace

LostWait* lost_wait_record() {
  static std::mutex mutex;
  if (!record) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!record) record = allocate();
  }
  return record;
}

const char* lost_wait() {
  const volatile LostWait* r = record;
  if (!r || !r->waiting) return nullptr;
  static thread_local char text[640];
  const bool words = r->waiting & LostWait::WORDS;
  char shown[32] = "it is still empty";
  if (!words) std::snprintf(shown, sizeof shown, "it shows epoch %u", unsigned(r->shown));
  std::snprintf(
      text, sizeof text,
      "a persistent kernel waited without end: block %u (warp group %u) read %s of block "
      "%u %u times for epoch %u, and %s. That block, or one that it waits for, was "
      "lost. The kernel ended itself by a trap, so the CUDA context of this process is gone: no "
      "CUDA call can succeed any more, and the process must be restarted. Please report this; "
      "FUSEDSEQ_RECURRENCE=loop runs without persistent kernels",
      (r->waiting & 0xffff) - 1, (r->waiting & ~LostWait::WORDS) >> 16,
      words ? "a word" : "the flag", unsigned(r->awaited), MAX_POLLS, unsigned(r->epoch), shown);
  return text;
}

}  // namespace fusedseq::cuda
