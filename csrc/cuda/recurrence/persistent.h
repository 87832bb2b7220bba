// Host functions of the persistent kernels: persistent_forward.cu, persistent_backward.cu, for
// other cells than the LSTM's, `starts` and the reverse order persistent_cells.cu and, for two
// layers in one launch, wavefront.cu.
// Functions that return const char* return an error message, or null.
#pragma once
#include "cuda/product.h"
#include "cuda/recurrence/arguments.h"
#include "cuda/recurrence/plan.h"

namespace fusedseq::cuda {

// What the functions below return, compared by its address, if the driver refuses the cooperative
// launch: fewer blocks are resident at a time than the device's attributes say, as under limits of
// MPS, on a part of a GPU (MIG), or beside another process. Nothing has been computed then, and the
// loop computes the same.
inline constexpr char LAUNCH_REFUSED[] =
    "the driver refused the cooperative launch, as not all of its blocks can be resident";

// What tells the current GPU from others in a table of measured engines.
struct GpuKind {
  int64_t multiprocessors, capability;  // 90: compute capability 9.0
};
GpuKind current_gpu_kind();

// Whether the kernels of persistent_cells.cu are those of a call, if any are.
inline bool needs_cells(const Recurrence& r) {
  return r.cell != CellKind::lstm || r.starts || r.reverse;
}

// The plan for the current GPU.
Plan persistent_plan(const Recurrence& r, int64_t shortest = SHORTEST,
                     Protocol protocol = Protocol::by_estimate);

// Bytes of workspace of the functions below. Forward and backward are separate: a layout without
// blocks is the loop's.
int64_t persistent_bytes(const Recurrence& r, const Layout& l);
int64_t persistent_backward_bytes(const Recurrence& r, const Layout& l);

const char* persistent_forward(const Recurrence& r, const Layout& l, const Product& product,
                               void* workspace, void* stream);
const char* persistent_backward(const RecurrenceBackward& b, const Layout& l, void* workspace,
                                void* stream);

// The same for a call that needs_cells, to which these functions pass it.
const char* cells_forward(const Recurrence& r, const Layout& l, const Product& product,
                          void* workspace, void* stream);
const char* cells_backward(const RecurrenceBackward& b, const Layout& l, void* workspace,
                           void* stream);

// What the two layers of a wavefront pass to each other. The second layer's x is the first layer's
// y after dropout. In backward the second layer computes the gradient of that y; it is added to dy
// of the first layer, unless that dy is null.
struct LayerInterface {
  Mask mask;            // of the dropout; a threshold of 0: the second layer's x is y itself
  bool locked;          // the mask is (B, H), else (T, B, H)
  const int64_t* seed;  // ()  on the device; null if there is no mask
  void* tensor;  // (T, B, H)  S  forward: the second layer's x, null if that is y; backward: where
                 // the second layer stores the gradient
};
Wavefront wavefront_plan(const Recurrence& first, const Recurrence& second,
                         int64_t shortest = SHORTEST);
int64_t wavefront_bytes(const Recurrence& first, const Recurrence& second, const Wavefront& w);
int64_t wavefront_backward_bytes(const Recurrence& first, const Recurrence& second,
                                 const Wavefront& w);
const char* wavefront_forward(const Recurrence& first, const Recurrence& second,
                              const LayerInterface& between, const Wavefront& w, void* workspace,
                              void* stream);
const char* wavefront_backward(const RecurrenceBackward& first, const RecurrenceBackward& second,
                               const LayerInterface& between, const Wavefront& w, void* workspace,
                               void* stream);

}  // namespace fusedseq::cuda
