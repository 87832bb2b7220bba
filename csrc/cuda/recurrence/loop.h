// The loop implementation of the recurrences: loop.cu. Functions that return const char* return an
// error message, or null.
#pragma once
#include "cuda/product.h"
#include "cuda/recurrence/arguments.h"

namespace fusedseq::cuda {

// Bytes of workspace of the functions below.
int64_t loop_bytes(const Recurrence& r);
int64_t loop_backward_bytes(const Recurrence& r);

const char* loop_forward(const Recurrence& r, const Product& product, void* workspace,
                         void* stream);
const char* loop_backward(const RecurrenceBackward& g, const Product& product, void* workspace,
                          void* stream);

}  // namespace fusedseq::cuda
