// Which implementation of a recurrence runs on a GPU, and running it: the persistent kernels, the
// wavefront of two layers, or the loop.
#pragma once
#include "ops/recurrence_cuda_arguments.h"

#ifdef FUSEDSEQ_CUDA
#include "cuda/recurrence/persistent.h"

namespace fusedseq::on_cuda {

// The plan of a wavefront; not persistent where two launches, one for each layer, are to run.
cuda::Wavefront wavefront(const cuda::Recurrence& first, const cuda::Recurrence& second);

// Whether a launch of persistent kernels has run; false if the driver refused it, which the first
// call in a process warns of. Raises any other error.
bool has_run(const RecurrenceCall& call, const cuda::Recurrence& r, const char* error);

void run_forward(RecurrenceCall& call, const cuda::Recurrence& r);
void run_backward(RecurrenceCall& call, const cuda::RecurrenceBackward& g);

// The gradients of the weights, from the results of the backward loop. dvectors: where that of the
// cell's own parameters is stored; null: not needed
void run_gradients(RecurrenceCall& call, const cuda::RecurrenceBackward& g, const Gradients& d,
                   void* dvectors = nullptr);

}  // namespace fusedseq::on_cuda
#endif
