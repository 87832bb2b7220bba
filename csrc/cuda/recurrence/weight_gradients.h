// The gradients of the weights of a recurrence: weight_gradients.cu.
#pragma once
#include "cuda/product.h"
#include "cuda/recurrence/arguments.h"

namespace fusedseq::cuda {

// Bytes of workspace of `gradients`.
int64_t gradients_bytes(const RecurrenceGradients& g);

// Returns an error message, or null.
const char* gradients(const RecurrenceGradients& g, const Product& product, void* workspace,
                      void* stream);

}  // namespace fusedseq::cuda
