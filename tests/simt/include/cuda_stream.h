// The twin of csrc/cuda_stream.h: tensors lie in the CPU's memory, and there is one stream.
#pragma once
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace fusedseq {

inline void* current_stream(int32_t) { return nullptr; }
inline void require_launched(const char* op, const char* error) { STD_TORCH_CHECK(!error, op, ": ", error ? error : ""); }

// In the place of torch's, which asks for a device.
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};

}  // namespace fusedseq
