// Chooses the implementation of a recurrence on a GPU, and the layout of the persistent kernels: a
// pure function of the sizes, the dtype and the GPU's limits. It needs no GPU, so tests and
// `fused.explain` call it on any machine.
//
// The persistent kernels hold every weight of the layer in the shared memory of the GPU's
// multiprocessors (SMs), some of W_ih in registers where shared memory is too small, one thread
// block per SM, for the whole sequence. A block computes `columns_h` hidden units and `columns_x`
// inputs (the columns it owns). Its warps split the sums over K. Batch rows are processed in tiles
// of 16, the M of mma.sync. A batch with more rows than the registers hold is processed in slices,
// one launch after another: rows do not depend on each other.
#pragma once
#include <cstdint>
#include <initializer_list>

namespace fusedseq::cuda {

struct Gpu {
  int sms;
  int64_t shared;  // bytes a block can have: cudaDevAttrMaxSharedMemoryPerBlockOptin
  bool cooperative;
};

struct RecurrenceSize {
  int64_t steps, B, X, H, rounds;
  int64_t on_x, on_h;  // number of distinct weights of the rounds on x (on h); 1 if they share one
  int element;         // bytes of an element of the tensors
  int64_t gates = 4;   // gates_of(cell), see math/cell_kind.h
  // Whether the kernels are those of persistent_cells.cu, which have other cells than the LSTM's,
  // `starts` and `reverse`, and no rounds.
  bool cells = false;
};

constexpr int WARPS = 8;  // per block

// What a persistent kernel is compiled for.
// GROUPS: groups of warps in a block. Each group has its own batch rows; all groups use the same
//   weights. While one group waits for other blocks, the other one computes.
// TILES: tiles of 16 batch rows of a group.    WIDE: the larger limits on columns per block.
// RESIDENT: steps along K of W_ih whose weights every warp holds in registers.
// PLAIN: 0, or, in the variants without rounds, the most columns of h: 9 or 16.
// WORDS: the exchange is by words that carry their own validity; see persistent_exchange.cuh.
template <int GROUPS_, int TILES_, bool WIDE_, int RESIDENT_ = 0, int PLAIN_ = 0,
          bool WORDS_ = false>
struct Variant {
  static constexpr int PLAIN = PLAIN_;
  static constexpr bool WORDS = WORDS_;
  static constexpr int GROUPS = GROUPS_, TILES = TILES_, RESIDENT = RESIDENT_;
  // Warps of a group, among which K is split, and threads of a group.
  static constexpr int SPLIT = WARPS / GROUPS;
  static constexpr int THREADS = 32 * SPLIT;
  // The most columns of h and of x that a block can own.
  static constexpr int H_COLUMNS = PLAIN_ ? PLAIN_ : WIDE_ ? 10 : 6;
  static constexpr int X_COLUMNS = WIDE_ ? 16 : 8;
  // Row tiles whose sums are reduced over the warps in one pass, and the number of passes.
  static constexpr int PASS = WIDE_ ? 1 : TILES;
  static constexpr int PASSES = TILES / PASS;
  // Tiles of 8 columns, the N of mma.sync: of x or h, and of the four gates.
  static constexpr int N = WIDE_ ? 2 : 1;
  static constexpr int N_GATES = (4 * H_COLUMNS + 7) / 8;
};
// The variants of persistent_cells.cu. GATES: of the cell; in 16 bits PLAIN is 0 or 16
template <int GATES_, int GROUPS_, int TILES_, bool WIDE_, int PLAIN_ = 0>
struct CellVariant : Variant<GROUPS_, TILES_, WIDE_, 0, PLAIN_> {
  static constexpr int GATES = GATES_;
  static constexpr int N_GATES = (GATES_ * Variant<1, 1, WIDE_, 0, PLAIN_>::H_COLUMNS + 7) / 8;
};
// RESIDENT of the variants that have it. Forward all columns of these k-steps are in registers,
// backward the first 8 columns.
constexpr int FORWARD_RESIDENT = 7;
constexpr int BACKWARD_RESIDENT = 21;

struct Layout {  // of one direction
  int slices;    // of the batch, one launch each
  int replicas;  // copies of the weights, on different SMs, each for a part of the slice
  int blocks;    // of a replica; 0: this layout is not possible
  int columns_h, columns_x;  // that a block owns
  int groups, tiles;         // as in Variant
  bool wide;                 // as in Variant
  int resident, plain;       // as in Variant
  bool words;                // as in Variant
  int64_t slice_rows, rows;  // batch rows of a slice, and of a replica
  int64_t shared;            // bytes of shared memory of a block
};

// The loop runs a direction whose layout has no blocks: both implementations save the same tensors.
struct Plan {
  bool persistent;  // in both directions
  const char* why;
  Layout forward, backward;
};

// How the blocks exchange vectors, where a layout leaves the choice: by flags, or by words that
// carry their own validity.
enum class Protocol { by_estimate, flags, words };

namespace plan {

constexpr int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// k-steps, the steps along K: 32 bytes each, 16 elements of bf16 or fp16, 8 of fp32.
constexpr int64_t steps_of(int64_t K, int element) {
  return divide_up(K * element, 32);
}

// Floats between two rows of the warps' partial sums: an odd multiple of 8, so that the stores of a
// warp go to distinct banks.
constexpr int stride(int columns) {
  return columns / 8 % 2 ? columns : columns + 8;
}
// The plain variant of 9 columns has no padding, so that the shared memory of GPUs with 99 KB for a
// block suffices at H = 1150. Two rows of a store then share banks (2 cycles in place of 1), and
// the loads of the sums, which are contiguous, have no conflicts.
constexpr int forward_stride(bool wide, int plain, int64_t gates = 4) {
  if (plain == 9) return 36;
  const int units = plain ? plain : wide ? 10 : 6;
  return stride(int(divide_up(gates * units, 8)) * 8);
}
// The most columns of x or h that a block may own if weights are resident in registers backward.
constexpr int RESIDENT_COLUMNS = 10;
// Of the partial sums of dx and dh side by side; in plain variants, and in all of
// persistent_cells.cu, of dh only; with resident weights of one of them at a time and without
// padding, because no shared memory is left.
constexpr int backward_stride(bool wide, bool resident, bool plain) {
  return resident ? RESIDENT_COLUMNS : stride(wide && !plain ? 32 : 16);
}

// Bytes of shared memory for the warps' partial sums.
constexpr int64_t partial_sum_bytes(const RecurrenceSize& s, bool backward, const Layout& l) {
  const int row_stride = backward ? backward_stride(l.wide, l.resident, l.plain || s.cells)
                                  : forward_stride(l.wide, l.plain, s.gates);
  return int64_t(WARPS) * 16 * (l.wide ? 1 : l.tiles) * row_stride * 4;
}
// Bytes of shared memory for the weights: 32 for a column and k-step.
constexpr int64_t weight_bytes(const RecurrenceSize& s, bool backward, const Layout& l) {
  const int64_t x = steps_of(s.X, s.element);
  const int64_t h = steps_of(s.H, s.element);
  const int64_t gates = steps_of(s.gates * s.H, s.element);
  const int64_t resident = WARPS / l.groups * l.resident;
  if (backward) {
    const int64_t rounds = s.on_x * x * l.columns_h + s.on_h * h * l.columns_x;
    const int64_t resident_columns = l.columns_x < 8 ? l.columns_x : 8;
    const int64_t W_ih = s.rounds ? gates * l.columns_x - resident * resident_columns : 0;
    return 32 * (rounds + gates * l.columns_h + W_ih);
  }
  const int64_t rounds = s.on_x * h * l.columns_x + s.on_h * x * l.columns_h;
  const int64_t W_ih = s.rounds ? x - resident : 0;
  return 32 * (rounds + s.gates * l.columns_h * (h + W_ih));
}

// An estimate of the cycles of one exchange on an H100, from instruction latencies: only whole
// calls have been measured, on an H200. Both protocols store, cross the L2 cache (175), are seen by
// a poll (325), load the vector (900, half of it latency and half the transfer of 3.4 MB to all
// SMs, at H 650 and 20 rows), multiply (450), add the warps' sums (370) and compute the element
// (200). With flags a fence stands before the flag (600). With words such a fence comes once in
// FENCE_PERIOD exchanges; the checks for empty words (100) and the stores that empty old ones (20)
// come in each.
constexpr int FENCE_PERIOD = 4;  // epochs
constexpr int exchange_cycles(Protocol by) {
  constexpr int BOTH = 175 + 325 + 900 + 450 + 370 + 200, FENCE = 600;
  return BOTH + (by == Protocol::words ? FENCE / FENCE_PERIOD + 100 + 20 : FENCE);
}
// The estimate is no better than a quarter: polls of words move data, whose cost at the L2 cache it
// leaves out. So words replace flags unasked only if they save more than that. On an H200 they
// saved 4 % of the call in two sizes.
constexpr bool estimate_favours_words() {
  return 4 * exchange_cycles(Protocol::words) < 3 * exchange_cycles(Protocol::flags);
}

// usual: the narrow variant where it suffices, else the wide one    wide: always the wide one
// plain: a variant without rounds    resident: the wide one with weights in registers
enum class Form { usual, wide, plain, resident };

// The layout of `slices` launches with `replicas` copies of the weights; its `blocks` is 0 if it
// does not fit.
constexpr Layout layout(const RecurrenceSize& s, bool backward, const Gpu& gpu, int slices,
                        int replicas, Form form, Protocol by = Protocol::flags) {
  Layout l{};
  l.slice_rows = divide_up(s.B, slices);
  l.slices = l.slice_rows ? int(divide_up(s.B, l.slice_rows)) : 1;
  l.replicas = replicas;
  l.rows = divide_up(l.slice_rows, replicas);
  l.groups = l.rows > 32 ? 2 : 1;
  const int64_t sms = gpu.sms / replicas;
  if (sms == 0) return l;

  // Columns per block, at least 2 of h. The x columns are spread over as many blocks as h needs.
  // Words hold two columns, and all columns of a word have one owner.
  const bool words = by == Protocol::words;
  const int64_t unit = words ? 2 : 1;
  const int64_t h = divide_up(s.H, sms * unit) * unit < 2 ? 2 : divide_up(s.H, sms * unit) * unit;
  const int64_t blocks = divide_up(s.H, h);
  const int64_t x = s.rounds ? divide_up(s.X, blocks * unit) * unit : 0;
  l.wide = form == Form::wide || h > 6 || x > 8;
  l.plain = form != Form::plain ? 0 : h <= 9 && !s.cells ? 9 : 16;
  if (l.plain && (s.rounds || s.element > 2 || !l.wide)) return l;
  // persistent_cells.cu has the plain variant in place of the wide one in 16 bits.
  if (s.cells && (s.rounds || by != Protocol::flags)) return l;
  if (s.cells && s.element == 2 && l.wide && !l.plain) return l;
  l.tiles = l.groups == 1 || (l.wide && !l.plain) ? 2 : 3;
  l.words = words;
  if (words && (s.element != 2 || s.H % 2 || (s.rounds && s.X % 2) || l.groups != 1 || l.plain ||
                form == Form::resident))
    return l;

  // Limits of the compiled variants: the registers hold no more.
  if (h > (l.plain ? 16 : 10) || x > 16 || l.rows > 16 * l.tiles * l.groups) return l;
  l.columns_h = int(h);
  l.columns_x = int(x);
  if (form == Form::resident) {
    l.resident = backward ? BACKWARD_RESIDENT : FORWARD_RESIDENT;
    if (s.element > 2 || !l.wide || l.groups != 1 || s.rounds == 0 || x > RESIDENT_COLUMNS)
      return l;
    // Every warp's part of K must have that many k-steps.
    if (steps_of(backward ? s.gates * s.H : s.X, s.element) / WARPS < l.resident) return l;
  }

  l.shared = weight_bytes(s, backward, l) + partial_sum_bytes(s, backward, l);
  if (l.shared <= gpu.shared) l.blocks = int(blocks);
  return l;
}

// More slices than this are the loop's. By arithmetic, not measured: an exchange between blocks
// takes 2 to 4 us for each slice. The loop has two launches in its place, which take 12 to 16 us to
// issue, and more from about 500 rows on.
constexpr int MOST_SLICES = 4;

// Two copies of the weights halve what each block reads of the others' columns, which is what
// limits large batches. As few slices as possible, since each of them takes all steps. Resident
// weights are the last resort. The protocol that is asked for, where it fits, else flags.
constexpr Layout best_layout(const RecurrenceSize& s, bool backward, const Gpu& gpu,
                             Protocol protocol) {
  if (protocol == Protocol::by_estimate)
    protocol = estimate_favours_words() ? Protocol::words : Protocol::flags;
  constexpr int TWO_REPLICAS_FROM = 32;
  for (int slices = 1; slices <= MOST_SLICES; ++slices) {
    for (int replicas = divide_up(s.B, slices) >= TWO_REPLICAS_FROM ? 2 : 1; replicas; --replicas)
      for (const Form form : {Form::usual, Form::plain, Form::resident}) {
        if (form == Form::resident && replicas > 1) continue;
        for (const Protocol by : {protocol, Protocol::flags}) {
          const Layout l = layout(s, backward, gpu, slices, replicas, form, by);
          if (l.blocks) return l;
        }
      }
  }
  return {};
}

}  // namespace plan

// Fewest steps for which loading the weights into the SMs pays.
constexpr int64_t SHORTEST = 4;
// Largest size in bytes of x W_ih^T, which is computed for all steps at once without rounds.
constexpr int64_t MAX_INPUT_GATES = int64_t(1) << 30;

constexpr Plan recurrence_plan(const RecurrenceSize& s, const Gpu& gpu, int64_t shortest = SHORTEST,
                               Protocol protocol = Protocol::by_estimate) {
  Plan p{};
  if (s.element > 4) {
    p.why = "the persistent kernels are for float32, bfloat16 and float16";
  } else if (s.cells && s.rounds) {
    p.why = "the persistent kernels with rounds have neither `starts` nor `reverse`";
  } else if (s.steps < shortest) {
    p.why = "loading the weights into the SMs does not pay for fewer than 4 steps";
  } else if (s.rounds == 0 && s.steps * s.B * s.gates * s.H * 4 > MAX_INPUT_GATES) {
    p.why = "the product of the input with W_ih for all steps would take more than 1 GiB";
  } else if (!gpu.cooperative) {
    p.why = "the GPU has no cooperative launch";
  } else {
    p.forward = plan::best_layout(s, false, gpu, protocol);
    p.backward = plan::best_layout(s, true, gpu, protocol);
    p.persistent = p.forward.blocks && p.backward.blocks;
    p.why = p.persistent        ? "the weights stay in shared memory for all steps"
            : p.forward.blocks  ? "only in forward the GPU's shared memory holds the weights"
            : p.backward.blocks ? "only in backward the GPU's shared memory holds the weights"
                                : "the weights, or the batch rows, are more than the GPU's shared "
                                  "memory and registers hold";
  }
  return p;
}

// Two layers in one launch, each on half of the SMs. Forward the second layer runs one step behind
// the first, backward the first behind the second, so that both together take about the time of
// one. Both layers run the same kernel, compiled for the wide layout with one group.
using WavefrontVariant = Variant<1, 2, true>;
struct Wavefront {
  bool persistent;
  const char* why;
  Layout forward[2], backward[2];  // of the first and the second layer
};

constexpr Wavefront wavefront_plan(const RecurrenceSize& first, const RecurrenceSize& second,
                                   const Gpu& gpu, int64_t shortest = SHORTEST) {
  Wavefront w{};
  if (first.element != 2) {
    w.why = "two layers in one launch are for bfloat16 and float16";
  } else if (first.steps < shortest) {
    w.why = "loading the weights into the SMs does not pay for fewer than 4 steps";
  } else if (!first.rounds || !second.rounds) {
    w.why = "a layer without rounds computes the product of its input for all steps at once";
  } else if (first.B > 16 * WavefrontVariant::TILES) {
    w.why = "with more than 32 rows each layer uses the whole GPU, one after the other";
  } else if (!gpu.cooperative) {
    w.why = "the GPU has no cooperative launch";
  } else {
    const Gpu half{gpu.sms / 2, gpu.shared, true};
    w.persistent = true;
    for (int l = 0; l < 2; ++l) {
      const RecurrenceSize& s = l ? second : first;
      w.forward[l] = plan::layout(s, false, half, 1, 1, plan::Form::wide);
      w.backward[l] = plan::layout(s, true, half, 1, 1, plan::Form::wide);
      w.persistent = w.persistent && w.forward[l].blocks && w.backward[l].blocks;
    }
    w.why = w.persistent
                ? "each layer's weights stay in the shared memory of half of the GPU for all steps"
                : "each layer's weights are more than the shared memory of half of the GPU holds";
  }
  return w;
}

}  // namespace fusedseq::cuda
