// torch's matrix products, which are the vendor's, as product.h has them.
#pragma once
#ifdef FUSEDSEQ_CUDA
#include <torch/csrc/stable/device.h>

#include "product.h"
#include "tensor.h"

namespace fusedseq {

// device: outlives the product
cuda::Product vendor_product(const torch::stable::Device& device);

}  // namespace fusedseq
#endif
