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

// Two layers at once: wavefront.cu. The second's x is the first's y under a mask, backward dy of the first what the second hands
// over, added to b.dy where that is not null.
struct Between {
  Mask mask;            // a threshold of 0: the second's x is the first's y
  bool locked;          // (B, H), else (T, B, H)
  const int64_t* seed;  // on the device; null where there is no mask
  void* handed;         // (T, B, H)  S  forward: the second's x, null where that is y; backward: memory
};
Wavefront wavefront_plan(const Recurrence& first, const Recurrence& second, int64_t shortest = SHORTEST);
int64_t wavefront_bytes(const Recurrence& first, const Recurrence& second, const Wavefront& w);
int64_t wavefront_backward_bytes(const Recurrence& first, const Recurrence& second, const Wavefront& w);
const char* wavefront_forward(const Recurrence& first, const Recurrence& second, const Between& between, const Wavefront& w, void* workspace,
                              void* stream);
const char* wavefront_backward(const RecurrenceBackward& first, const RecurrenceBackward& second, const Between& between, const Wavefront& w,
                               void* workspace, void* stream);

}  // namespace fusedseq::cuda
