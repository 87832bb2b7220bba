// The loop engine: see recurrence_loop.cu. Functions return a message where something failed, else null.
#pragma once
#include "product.h"
#include "recurrence_cuda.h"

namespace fusedseq::cuda {

int64_t loop_bytes(const Recurrence& r);           // of workspace, as what follows
int64_t loop_backward_bytes(const Recurrence& r);

const char* loop_forward(const Recurrence& r, const Product& product, void* workspace, void* stream);
const char* loop_backward(const RecurrenceBackward& g, const Product& product, void* workspace, void* stream);

}  // namespace fusedseq::cuda
