// The order in which the steps of a recurrence are computed, and which of them a row of the batch
// has. R: a structure with the fields steps, B, H, reverse, lengths and starts, as cpu::Recurrence.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

// Whether step t is past the end of row b's sequence. What x and dy hold there is never used, not
// even as a factor of zero: it may be NaN or infinite.
HD bool has_ended(const int64_t* lengths, int64_t t, int64_t b) {
  return lengths && t >= lengths[b];
}

// Whether row b's state is set to zero before step t.
template <class R>
HD bool resets(const R& r, int64_t t, int64_t b) {
  return r.starts && r.starts[t * r.B + b] && !has_ended(r.lengths, t, b);
}

// The n-th step that is computed.
template <class R>
HD int64_t nth_step(const R& r, int64_t n) {
  return r.reverse ? r.steps - 1 - n : n;
}
// The step that is computed before step t, or after it.
template <class R>
HD int64_t step_before(const R& r, int64_t t) {
  return r.reverse ? t + 1 : t - 1;
}
template <class R>
HD int64_t step_after(const R& r, int64_t t) {
  return r.reverse ? t - 1 : t + 1;
}

// The row of a mask (T * B, H) for row b at step t. A mask counts the steps of a sequence in the
// order in which they are computed.
template <class R>
HD int64_t mask_row(const R& r, int64_t t, int64_t b) {
  const int64_t length = r.lengths ? r.lengths[b] : r.steps;
  return (r.reverse ? length - 1 - t : t) * r.B + b;
}

// The state h before step t of row b, (width,), or null where it is zero.
// h0: (B, width)    y: (T, B, width), the output
template <class S, class R>
HD const S* h_before(const R& r, int64_t width, const S* h0, const S* y, int64_t t, int64_t b) {
  if (resets(r, t, b)) return nullptr;
  const int64_t before = step_before(r, t);
  const bool is_first = t == nth_step(r, 0) || (r.reverse && has_ended(r.lengths, before, b));
  return is_first ? h0 + b * width : y + (before * r.B + b) * width;
}
template <class S, class R>
HD const S* h_before(const R& r, const S* h0, const S* y, int64_t t, int64_t b) {
  return h_before(r, r.H, h0, y, t, b);
}

}  // namespace fusedseq
