// The weights' gradients: see recurrence_gradients.cu.
#pragma once
#include "product.h"
#include "recurrence_cuda.h"

namespace fusedseq::cuda {

int64_t gradients_bytes(const RecurrenceGradients& g);  // of workspace

// A message where something failed, else null.
const char* gradients(const RecurrenceGradients& g, const Product& product, void* workspace, void* stream);

}  // namespace fusedseq::cuda
