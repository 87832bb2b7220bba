// Dropout of one row of an (M, D) tensor in a buffer that stays in the L1 cache, and the rows of a
// result. The kernels that include this file compute several functions of a row before they write
// it to memory.
#pragma once
#include "cpu/pointwise/dropout.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Generates the mask of row m into keep (D,): all ones where the element is kept. Does nothing if
// there is no dropout.
HD void row_mask(const cpu::Mask& mask, int64_t m, int64_t D, uint32_t* keep) {
  if (mask.threshold) mask_values<uint32_t>(mask, m, D, 0, D, ~0u, 0u, keep);
}

// y = dropout(x) for a row (D,) with the mask `keep` that row_mask generated.
template <class StoredX, class StoredY>
HD void drop_row(const cpu::Mask& mask, const uint32_t* keep, const StoredX* x, StoredY* y,
                 int64_t D) {
  using Real = RealOf<StoredX>;
  if (mask.threshold) return drop(x, y, keep, D, Real(mask.scale));
  for (int64_t j = 0; j < D; j += LANES<Real>)
    store_up_to<StoredY>(y + j, load_up_to(x + j, D - j), D - j);
}

// The rows of a result (M, D), or of none if `result` is null. A result that exceeds the caches is
// written row by row into a buffer and copied from there with streaming stores.
template <class Stored>
class ResultRows {
 public:
  ResultRows(void* result, int64_t M, int64_t D)
      : result_(static_cast<Stored*>(result)),
        D_(D),
        staged_(result && exceeds_caches<Stored>(M * D) ? D : 0) {}
  ~ResultRows() { stream_fence(); }

  // Returns where row m is to be written, or null if the result is not needed.
  Stored* row(int64_t m) const { return staged_ ? staged_ : result_ ? result_ + m * D_ : nullptr; }
  // To be called when row m has been written.
  void written(int64_t m) const {
    if (staged_) stream_row((const Stored*)staged_, result_ + m * D_, D_);
  }

 private:
  Stored* result_;  // (M, D) or null
  int64_t D_;
  Buffer<Stored> staged_;  // (D,) or null
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
