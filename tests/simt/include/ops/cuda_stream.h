// Replaces csrc/ops/cuda_stream.h: tensors are in the CPU's memory, and there is one stream.
#pragma once
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace fusedseq {

inline void* current_stream(int32_t) {
  return nullptr;
}
inline void require_launched(const char* op, const char* error) {
  STD_TORCH_CHECK(!error, op, ": ", error ? error : "");
}

// Replaces torch::stable::accelerator::DeviceGuard, which needs a device.
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};

}  // namespace fusedseq
