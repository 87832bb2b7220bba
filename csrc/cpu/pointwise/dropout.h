// Dropout: y = keep ? x / (1 - p) : 0. One pass over the memory; the mask is generated on the way
// and never stored, except where one mask serves all time steps.
//
// What limits it: memory bandwidth, and Philox, at about a third of a nanosecond an element and
// core with AVX-512.
#pragma once
#include "cpu/arguments/pointwise.h"
#include "cpu/buffer.h"
#include "cpu/random_mask.h"
#include "cpu/simd/streaming.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// y = keep ? x * scale : 0 for n elements. This is a select and not a product with a mask of zeros
// and ones, so that an infinity is dropped too. `keep` has a word for each element, all ones or
// zero.
template <class StoredX, class StoredY>
HD void drop(const StoredX* x, StoredY* y, const uint32_t* keep, int64_t n, RealOf<StoredX> scale) {
  using Real = RealOf<StoredX>;
  int64_t i = 0;
  if constexpr (sizeof(Real) == 4)
    for (; i + WORDS <= n; i += WORDS) {
      WordVector k;
      memcpy(&k, keep + i, sizeof k);
      const Vec<float> v = load_as(x + i) * Vec<float>(scale);
      store_as(y + i, Vec<float>(Vec<float>::Raw(WordVector(v.v) & k)));
    }
  for (; i < n; ++i)
    store_scalar(y + i, keep[i] ? load_scalar(x + i) * scale : Real(0));
}

// A unit of work is a segment of a row, of this many elements.
constexpr int64_t DROPOUT_SEGMENT = 4096;

// Elements [begin, end) of row b. A result that exceeds the caches is computed in a buffer and
// copied with streaming stores.
template <class Stored>
void dropout_segment(const cpu::Dropout& d, int64_t b, int64_t begin, int64_t end) {
  const Stored* x = static_cast<const Stored*>(d.x) + b * d.D;
  Stored* const destination = static_cast<Stored*>(d.y) + b * d.D;
  const bool streamed = exceeds_caches<Stored>(d.B * d.D);
  alignas(64) Stored staged[DROPOUT_SEGMENT];
  Stored* y = streamed ? staged - begin : destination;
  const auto scale = RealOf<Stored>(d.mask.scale);
  each_mask_block(d.mask, b, d.D, begin, end, [&](int64_t j, const WordVector* keep, auto vectors) {
    const int64_t n = end - j < vectors * WORDS ? end - j : vectors * WORDS;
    drop(x + j, y + j, reinterpret_cast<const uint32_t*>(keep), n, scale);
  });
  if (streamed) stream_row((const Stored*)staged, destination + begin, end - begin);
}

// One mask (B, D) for all time steps: it is generated once and stored, then each step is one pass.
template <class Stored>
void dropout_of_all_steps(const cpu::Dropout& d, cpu::Parallel run) {
  Buffer<uint32_t> keep(d.B * d.D);
  parallel(run, d.B, [&](int64_t b0, int64_t b1) {
    for (int64_t b = b0; b < b1; ++b)
      mask_values<uint32_t>(d.mask, b, d.D, 0, d.D, ~0u, 0u, keep + b * d.D);
  });
  constexpr int64_t BLOCK = 1 << 14;  // elements; a step may be few large ones
  const int64_t n = d.B * d.D, blocks = (n + BLOCK - 1) / BLOCK;
  parallel(run, d.T * blocks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * BLOCK, at = i / blocks * n + first;
      drop(static_cast<const Stored*>(d.x) + at, static_cast<Stored*>(d.y) + at,
           (const uint32_t*)keep + first, n - first < BLOCK ? n - first : BLOCK,
           RealOf<Stored>(d.mask.scale));
    }
  });
}

template <class Stored>
void dropout_of_type(const cpu::Dropout& d, cpu::Parallel run) {
  if (d.T > 1) return dropout_of_all_steps<Stored>(d, run);
  const int64_t segments = (d.D + DROPOUT_SEGMENT - 1) / DROPOUT_SEGMENT;
  parallel(run, d.B * segments, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t j = i % segments * DROPOUT_SEGMENT;
      const int64_t j_end = j + DROPOUT_SEGMENT < d.D ? j + DROPOUT_SEGMENT : d.D;
      dropout_segment<Stored>(d, i / segments, j, j_end);
    }
    stream_fence();
  });
}

inline void dropout(const cpu::Dropout& d, cpu::Parallel run, int) {
  by_type(d.type, [&](auto number) { dropout_of_type<decltype(number)>(d, run); });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
