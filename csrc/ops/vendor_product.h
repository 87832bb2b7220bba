// The matrix products of cuda/product.h, computed by the vendor's library through torch.
#pragma once
#ifdef FUSEDSEQ_CUDA
#include <torch/csrc/stable/device.h>

#include "cuda/product.h"
#include "ops/tensor.h"

namespace fusedseq {

// The product keeps a pointer to the device, which must outlive it.
cuda::Product vendor_product(const torch::stable::Device& device);

}  // namespace fusedseq
#endif
