// The dtypes of the CUDA kernels in csrc/*.cu.
#pragma once

namespace fusedseq::cuda {

enum class Type { f32, f64, bf16, f16 };

}  // namespace fusedseq::cuda
