// The dtypes of tensors in csrc/cuda.
#pragma once

namespace fusedseq::cuda {

enum class Type { f32, f64, bf16, f16 };

}  // namespace fusedseq::cuda
