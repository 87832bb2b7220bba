// Which engine runs a recurrence on a GPU, and how the persistent one is laid out there: a pure function of shape, dtype
// and the GPU, also for tests and for `explain`, which need no GPU.
//
// The persistent engine keeps every weight of the layer in the shared memory (and, at need, some in the registers) of
// the GPU's multiprocessors (SMs), one block on each, for the whole sequence. A block owns `columns_h` hidden units and
// `columns_x` inputs; its warps share out the sums over K; rows of the batch come in tiles of 16.
#pragma once
#include <cstdint>

namespace fusedseq::cuda {

struct Gpu { int sms; int64_t shared; bool cooperative; };  // of one block, in bytes: cudaDevAttrMaxSharedMemoryPerBlockOptin

struct RecurrenceSize {
  int64_t steps, B, X, H, rounds;
  int64_t on_x, on_h;  // different weights of the rounds on x (on h): 1 where they are shared
  int element;         // bytes of the tensors' dtype
};

constexpr int WARPS = 8;

// What the kernels are compiled for. GROUPS: of warps, each with rows of its own, under the weights of all; while one
// waits for the other blocks, the other computes. TILES: of 16 rows, of a group. KEPT: steps along K of W_ih that
// each warp holds in registers. PLAIN: without rounds.
template <int GROUPS_, int TILES_, bool WIDE_, int KEPT_ = 0, bool PLAIN_ = false> struct Variant {
  static constexpr bool PLAIN = PLAIN_;
  static constexpr int GROUPS = GROUPS_, TILES = TILES_, KEPT = KEPT_;
  static constexpr int SPLIT = WARPS / GROUPS, THREADS = 32 * SPLIT;          // warps and threads of a group
  static constexpr int H_COLUMNS = WIDE_ ? 10 : 6, X_COLUMNS = WIDE_ ? 16 : 8;  // the most a block can own
  static constexpr int PASS = WIDE_ ? 1 : TILES, PASSES = TILES / PASS;       // tiles whose sums are added up at once
  static constexpr int N = WIDE_ ? 2 : 1, N_GATES = WIDE_ ? 5 : 3;            // tiles of 8 columns: of x or h, of the gates
};
constexpr int FORWARD_KEPT = 7, BACKWARD_KEPT = 21;  // forward all columns, backward the first 8

struct Layout {                    // of one direction
  int replicas;                    // of the weights, on SMs of their own, each for a part of the batch
  int blocks;                      // of a replica
  int columns_h, columns_x;        // that a block owns
  int groups, tiles;               // Variant
  bool wide;
  int kept;
  int64_t rows;                    // of a replica
  int64_t shared;                  // bytes of a block
};

struct Plan {
  bool persistent;
  const char* why;
  Layout forward, backward;
};

namespace plan {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Steps along K: of 32 bytes, 16 elements of bf16 and fp16 or 8 of fp32.
constexpr int64_t steps_of(int64_t K, int element) { return divide_up(K * element, 32); }

// Floats between the rows of the sums: an odd multiple of 8, so that a warp's stores meet no bank twice.
constexpr int stride(int columns) { return columns / 8 % 2 ? columns : columns + 8; }
constexpr int forward_stride(bool wide) { return stride(wide ? 40 : 24); }
constexpr int KEPT_COLUMNS = 10;  // the most of x or h where weights are in registers backward
constexpr int backward_stride(bool wide, bool kept) {  // for dx and dh; with weights in registers one by one, as no byte is left
  return kept ? KEPT_COLUMNS : stride(wide ? 32 : 16);
}

// Bytes: of the warps' sums, and of the weights, 32 for a column and step along K.
constexpr int64_t sums(bool backward, const Layout& l) {
  return int64_t(WARPS) * 16 * (l.wide ? 1 : l.tiles) * (backward ? backward_stride(l.wide, l.kept) : forward_stride(l.wide)) * 4;
}
constexpr int64_t weights(const RecurrenceSize& s, bool backward, const Layout& l) {
  const int64_t x = steps_of(s.X, s.element), h = steps_of(s.H, s.element), gates = steps_of(4 * s.H, s.element);
  const int64_t kept = WARPS / l.groups * l.kept;
  if (backward)
    return 32 * (s.on_x * x * l.columns_h + s.on_h * h * l.columns_x + gates * l.columns_h +
                 (s.rounds ? gates * l.columns_x - kept * (l.columns_x < 8 ? l.columns_x : 8) : 0));
  return 32 * (s.on_x * h * l.columns_x + s.on_h * x * l.columns_h + 4 * l.columns_h * (h + (s.rounds ? x - kept : 0)));
}

// The layout of `replicas` copies of the weights; one of 0 blocks where it does not fit. wide: also where it need not be
constexpr Layout layout(const RecurrenceSize& s, bool backward, const Gpu& gpu, int replicas, bool keep, bool wide = false) {
  Layout l{};
  l.replicas = replicas, l.rows = divide_up(s.B, replicas);
  l.groups = l.rows > 32 ? 2 : 1;
  const int64_t sms = gpu.sms / replicas;
  if (sms == 0) return l;
  const int64_t h = divide_up(s.H, sms) < 2 ? 2 : divide_up(s.H, sms), blocks = divide_up(s.H, h);
  const int64_t x = s.rounds ? divide_up(s.X, blocks) : 0;
  l.wide = wide || h > 6 || x > 8, l.tiles = l.groups == 1 || (l.wide && l.rows <= 64) ? 2 : 3;
  if (h > 10 || x > 16 || l.rows > 16 * l.tiles * l.groups || (l.wide && l.tiles > 2 && (s.rounds || s.element > 2)))
    return l;  // the registers hold no more
  l.columns_h = int(h), l.columns_x = int(x);
  if (keep) {
    l.kept = backward ? BACKWARD_KEPT : FORWARD_KEPT;
    if (s.element > 2 || !l.wide || l.groups != 1 || s.rounds == 0 || x > KEPT_COLUMNS) return l;
    if (steps_of(backward ? 4 * s.H : s.X, s.element) / WARPS < l.kept) return l;
  }
  l.shared = weights(s, backward, l) + sums(backward, l);
  if (l.shared <= gpu.shared) l.blocks = int(blocks);
  return l;
}

// Two copies of the weights halve what each block reads of the others, which limits large batches.
constexpr Layout best(const RecurrenceSize& s, bool backward, const Gpu& gpu) {
  constexpr int TWO_FROM = 32;
  if (s.B >= TWO_FROM)
    if (const Layout l = layout(s, backward, gpu, 2, false); l.blocks) return l;
  if (const Layout l = layout(s, backward, gpu, 1, false); l.blocks) return l;
  return layout(s, backward, gpu, 1, true);
}

}  // namespace plan

constexpr int64_t SHORTEST = 4;             // steps that weights are loaded for
constexpr int64_t HOISTED = int64_t(1) << 30;  // bytes of x W_ih^T, which is there for all steps at once

constexpr Plan recurrence_plan(const RecurrenceSize& s, const Gpu& gpu, int64_t shortest = SHORTEST) {
  Plan p{};
  if (s.element > 4) return p.why = "the persistent kernels are for float32, bfloat16 and float16", p;
  if (s.steps < shortest) return p.why = "for fewer than 4 steps the weights are not worth loading", p;
  if (s.rounds == 0 && s.steps * s.B * 4 * s.H * 4 > HOISTED)
    return p.why = "the hoisted product of the input would take more than 1 GiB", p;
  if (!gpu.cooperative) return p.why = "the GPU has no cooperative launch", p;
  p.forward = plan::best(s, false, gpu), p.backward = plan::best(s, true, gpu);
  p.persistent = p.forward.blocks && p.backward.blocks;
  p.why = p.persistent ? "the weights stay in shared memory for all steps"
                       : "the weights, or the rows of the batch, are more than the GPU's shared memory and registers hold";
  return p;
}

// Two layers of a model in one launch, each on half of the SMs, the second a step behind the first (backward the first behind
// the second), so that both take the time of one. They have one kernel, for the wide layout of one group.
using WavefrontVariant = Variant<1, 2, true>;
struct Wavefront {
  bool persistent;
  const char* why;
  Layout forward[2], backward[2];  // of the first layer, of the second
};

constexpr Wavefront wavefront_plan(const RecurrenceSize& first, const RecurrenceSize& second, const Gpu& gpu, int64_t shortest = SHORTEST) {
  Wavefront w{};
  if (first.element != 2) return w.why = "two layers at once are for bfloat16 and float16", w;
  if (first.steps < shortest) return w.why = "for fewer than 4 steps the weights are not worth loading", w;
  if (!first.rounds || !second.rounds) return w.why = "the product of the input of a layer without rounds is taken for all steps at once", w;
  if (first.B > 16 * WavefrontVariant::TILES) return w.why = "more than 32 rows are left to one layer at a time on all of the GPU", w;
  if (!gpu.cooperative) return w.why = "the GPU has no cooperative launch", w;
  const Gpu half{gpu.sms / 2, gpu.shared, true};
  w.persistent = true;
  for (int l = 0; l < 2; ++l) {
    const RecurrenceSize& s = l ? second : first;
    w.forward[l] = plan::layout(s, false, half, 1, false, true), w.backward[l] = plan::layout(s, true, half, 1, false, true);
    w.persistent = w.persistent && w.forward[l].blocks && w.backward[l].blocks;
  }
  w.why = w.persistent ? "each layer's weights stay in the shared memory of half of the GPU for all steps"
                       : "each layer's weights are more than the shared memory of half of the GPU holds";
  return w;
}

}  // namespace fusedseq::cuda
