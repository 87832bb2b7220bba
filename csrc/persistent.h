// The persistent engine of the recurrences on CUDA: persistent_forward.cu, persistent_backward.cu. Functions return a message
// where something failed, else null.
#pragma once
#include "product.h"
#include "recurrence_cuda.h"
#include "recurrence_plan.h"

namespace fusedseq::cuda {

// For the current GPU.
Plan persistent_plan(const Recurrence& r, int64_t shortest = SHORTEST);

int64_t persistent_bytes(const Recurrence& r, const Layout& l);  // of workspace, as what follows
int64_t persistent_backward_bytes(const Recurrence& r, const Layout& l);

const char* persistent_forward(const Recurrence& r, const Layout& l, const Product& product, void* workspace, void* stream);
const char* persistent_backward(const RecurrenceBackward& b, const Layout& l, void* workspace, void* stream);

}  // namespace fusedseq::cuda
