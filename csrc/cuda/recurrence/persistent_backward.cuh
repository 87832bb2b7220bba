// Backward persistent kernel: the recurrence of persistent_forward.cuh backward through time. It
// computes the gradients of the data only, and writes dz and dround, from which weight_gradients.cu
// computes the gradients of the weights afterwards.
//
// The vectors of a step, each one exchange: the gradient of the gates' pre-activations, 4H wide,
// element 4 j + gate; then the gradient of each round's pre-activations, from the last round to the
// first. The weights are transposed: a block owns columns of the weights' inputs. Dropped weights
// are drawn again from the same Philox counters as forward.
//
// This file: the arguments, what is loaded before the first step, and the loop over time.
// persistent_backward_step.cuh: the cell, the gates and the rounds.
#pragma once
#include <cuda/ptx.cuh>

#include "cuda/recurrence/persistent_launch.cuh"
#include "cuda/recurrence/persistent_layer_link.cuh"
#include "cuda/recurrence/persistent_masks.cuh"
#include "cuda/recurrence/persistent_products.cuh"
#include "cuda/recurrence/persistent_weights.cuh"

namespace fusedseq::cuda {
namespace {

struct Backward {
  RecurrenceBackward b;
  Layout l;
  BatchRows rows;
  Exchange e;
  ExchangedVector gates, x, h;
  LayerLink link;  // only of a layer of a wavefront
};

inline Backward arguments(const RecurrenceBackward& b, const Layout& l) {
  const Recurrence& r = b.forward;
  Backward p{b, l, slice_rows(r, l, 0), {}, {}, {}, {}, {}};
  const int64_t G = gates_of(r.cell);
  p.gates = append_vector(p.e.group_bytes, r, l, G * r.H, int(G) * l.columns_h);
  p.h = append_vector(p.e.group_bytes, r, l, r.rounds ? r.H : 0, l.columns_h);
  p.x = append_vector(p.e.group_bytes, r, l, r.rounds ? r.X : 0, l.columns_x);
  return p;
}

// Runs a layer: launch(p, stream) launches its kernel for the slice p.rows of the batch.
template <class L>
const char* run_backward(const RecurrenceBackward& b, const Layout& l, void* memory,
                         cudaStream_t stream, L launch) {
  Backward p = arguments(b, l);
  // The slices run one after another, so that they can use the same memory.
  for (int i = 0; i < l.slices; ++i) {
    p.rows = slice_rows(b.forward, l, i);
    if (const char* error = prepare(p.e, l, memory, stream)) return error;
    if (const char* error = launch(p, stream)) return error;
  }
  return nullptr;
}

// The B operands of a k-step of the gates: those for dx and for dh.
template <class V>
struct SidesOfGates {
  ColumnFragments<V::N> x, h;
};

// One side of a round: x or h, and the block's part of it.
template <class O>
struct RoundSide {
  const O& own;
  const OwnedColumns& columns;
  const ExchangedVector& vector;
  float (&d)[O::COUNT];  // gradient of the thread's elements
  uint32_t& uses;        // with words, the number of the newest vector of this side
};

// One thread of a block. The arrays are the elements that the thread owns (OwnedElements), in
// registers. LINKED: the layer is one of a wavefront.
template <class S, class V, bool LINKED = false>
struct BackwardBlock {
  // Without resident weights there is shared memory for the sums of dx and dh at once, and there
  // are registers to load the saved tensors of the next phase early.
  static constexpr bool SPARE = !V::RESIDENT;
  static constexpr int STRIDE = plan::backward_stride(V::N == 2, V::RESIDENT, V::PLAIN);
  // k-steps whose loads are in flight, as many as the variant has registers for.
  static constexpr int FEW_LOADS = V::GROUPS * V::N == 4 ? 3 : 6;
  static constexpr int MORE_LOADS = V::TILES == 3 ? 2 : FEW_LOADS;
  static constexpr int LOADS = loads_in_flight<S, V>(V::RESIDENT ? 1 : MORE_LOADS);
  static constexpr int ROUND_LOADS = loads_in_flight<S, V>(V::RESIDENT ? 3 : MORE_LOADS);
  using X = OwnedElements<V, V::X_COLUMNS>;
  using H = OwnedElements<V, V::H_COLUMNS>;
  static constexpr int MOST = X::COUNT > H::COUNT ? X::COUNT : H::COUNT;

  const Backward& p;
  const RecurrenceBackward& b;
  const Recurrence& r;
  GroupProducts<S, V> g;
  const int rounds;
  const OwnedColumns columns_x, columns_h;
  const X own_x;
  const H own_h;
  uint32_t epoch;                       // of the newest vector
  uint32_t uses_gates, uses_x, uses_h;  // with words, the numbers of the newest of each kind
  const S *Q_x, *Q_h;           // weights of round 0 and 1; those of rounds 2, 3, ... follow
  SharedWeights<S> W_ih, W_hh;  // (4H, columns): row 4 j + gate
  ResidentWeights<V, 1> resident_W_ih;       // of resident k-steps the first 8 columns of W_ih,
  SharedWeights<S> rest_W_ih;                // and the other columns
  float dx[X::COUNT], dh[H::COUNT];          // gradients of what the rounds and gates read
  float carried_dh[H::COUNT], dc[H::COUNT];  // gradients of the state, from step to step
  GateQuad<S> gates[H::COUNT];               // saved by forward, of the step to come, like
  float c_before[H::COUNT], dy[H::COUNT];    // these
  float s[MOST], operand[MOST];              // of the round to come: sigmoid, and what it scaled
  uint32_t state_keep;                       // bit e: state dropout keeps element e
  // Of the step to come. Bit e: element e's sequence has not ended; its zoneout draws.
  uint32_t alive, draws_h, draws_c;

  __device__ __forceinline__ BackwardBlock(const Backward& p, int block_of_layer)
      : p(p),
        b(p.b),
        r(p.b.forward),
        g(p.l, p.e, p.rows, block_of_layer),
        rounds(V::PLAIN ? 0 : int(r.rounds)),
        columns_x(g.block, p.l.columns_x, int(r.X)),
        columns_h(g.block, p.l.columns_h, int(r.H)),
        own_x(g, columns_x.count),
        own_h(g, columns_h.count),
        epoch(0),
        uses_gates(0),
        uses_x(0),
        uses_h(0),
        state_keep(0) {}

  __device__ __forceinline__ void run();

 private:
  // The batch row of a row of the group.
  __device__ __forceinline__ int batch(int row) const { return g.first_row + row; }

  __device__ __forceinline__ S* load_rounds(S* to, int first, const OwnedColumns& own, int K,
                                            int64_t width);
  __device__ __forceinline__ void load_weights();
  __device__ __forceinline__ void load_state();

  // Publishes the vector of this epoch.
  __device__ __forceinline__ void publish() const {
    if (V::WORDS)
      g.publish_words(epoch);
    else
      g.publish(epoch);
  }

  // persistent_backward_step.cuh
  __device__ __forceinline__ void fetch(int64_t t);
  __device__ __forceinline__ void add_linked_dy(int64_t t);
  __device__ __forceinline__ void fetch_round(int64_t t, int k);
  template <class O>
  __device__ __forceinline__ void fetch_round(const O& own, int64_t t, int k, int first,
                                              int64_t offset, const S* initial, int width);
  __device__ __forceinline__ void cell(int64_t t);
  __device__ __forceinline__ GateQuad<S> cell_gradient(int e);
  __device__ __forceinline__ void operands_of_gates();
  __device__ __forceinline__ void multiply_gates(Accumulators<V, V::N>& on_x,
                                                 Accumulators<V, V::N>& on_h);
  __device__ __forceinline__ void round(int64_t t, int k, int64_t offset);
  template <class O, class I>
  __device__ __forceinline__ void round(int64_t t, int k, int64_t offset, RoundSide<O> scaled,
                                        RoundSide<I> read, const S* weights);
  __device__ __forceinline__ void step(int64_t t);
  __device__ __forceinline__ void store_dx(S* to, S value, int64_t t, int b, int j);
};

// ---- before the first step

// The block's columns of the weights of rounds first, first + 2, ... Returns the address after
// them. K, width: rows and columns of such a weight
template <class S, class V, bool LINKED>
__device__ __forceinline__ S* BackwardBlock<S, V, LINKED>::load_rounds(S* to, int first,
                                                                       const OwnedColumns& own,
                                                                       int K, int64_t width) {
  for (int k = first; k < rounds; k += 2) {
    if (k > first && r.Q[k] == r.Q[first]) break;  // all rounds share one weight
    const S* q = static_cast<const S*>(r.Q[k]) + own.first;
    to = load_to_shared<V, 0, 0, Neighbours::columns>(
        to, own.count, K, [=](int n, int k) { return q[k * width + n]; });
  }
  return to;
}

// All weights of the block, which is all of its shared memory but for the partial sums at the end.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::load_weights() {
  S* to = reinterpret_cast<S*>(ptx::dynamic_shared());
  const int64_t H = r.H, X = r.X;
  Q_x = to;
  to = load_rounds(to, 0, columns_h, int(X), H);
  Q_h = to;
  to = load_rounds(to, 1, columns_x, int(H), X);

  W_hh = {to, columns_h.count};
  to = load_to_shared<V, 0, 0, Neighbours::columns>(
      to, columns_h.count, int(4 * H), [&](int n, int k) {
        return dropped_weight<S>(r, int64_t(k % 4) * H + k / 4, columns_h.first + n);
      });
  W_ih = {to, columns_x.count};
  const S* w_ih = static_cast<const S*>(r.W_ih) + columns_x.first;
  const auto ih = [=](int n, int k) {
    return w_ih[(int64_t(k % 4) * H + k / 4) * X + n];
  };
  if (rounds) {
    // What is left of the resident k-steps is after the other k-steps.
    const int steps = p.gates.k_steps - V::RESIDENT * V::SPLIT;
    rest_W_ih = {to + steps * columns_x.count * K_STEP<S>,
                 columns_x.count < 8 ? 0 : columns_x.count - 8};
    to =
        load_to_shared<V, V::RESIDENT, 8, Neighbours::columns>(to, columns_x.count, int(4 * H), ih);
    resident_W_ih.template load<S>(columns_x.count, int(4 * H), g.warp, g.lane, ih);
  }
  g.partial = reinterpret_cast<float*>(to) + g.number * V::SPLIT * V::PASS * 16 * STRIDE;
}

// The gradients of the final state, and the state's mask, which is the same in every step.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::load_state() {
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    carried_dh[e] = dc[e] = 0;
    if (!own_h.has(e)) continue;
    const int row = batch(own_h.row(e));
    const int j = columns_h.first + own_h.column(e);
    carried_dh[e] = float(step_of<S>(b.dh, row, r.H)[j]);
    dc[e] = float(step_of<S>(b.dc, row, r.H)[j]);
    if (!r.state.threshold || keep(r.seed, r.state, row, j, r.H)) state_keep |= 1u << e;
  }
}

// ---- the loop over time

template <class S, class V, bool LINKED>
__device__ __forceinline__ void BackwardBlock<S, V, LINKED>::run() {
  // Both groups load the weights and use all of them. From here on a group synchronizes only its
  // own threads, so a group without rows may leave.
  load_weights();
  __syncthreads();
  if (g.rows == 0) return;

  load_state();
  if constexpr (V::WORDS) {
    g.fill_padding(p.gates, p.l.blocks);
    if (rounds) g.fill_padding(p.x, p.l.blocks);
    if (rounds) g.fill_padding(p.h, p.l.blocks);
  }
  if (SPARE) fetch(r.steps - 1);
  for (int64_t t = r.steps - 1; t >= 0; --t)
    step(t);

  // The dx of step 0 has been stored after the last epoch: one more epoch releases it to the other
  // layer.
  if (LINKED) g.publish(++epoch);
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own_h.has(e)) continue;
    const int i = batch(own_h.row(e)) * int(r.H) + columns_h.first + own_h.column(e);
    static_cast<S*>(b.dh0)[i] = S(carried_dh[e]);
    static_cast<S*>(b.dc0)[i] = S(dc[e]);
  }
}

}  // namespace
}  // namespace fusedseq::cuda

#include "cuda/recurrence/persistent_backward_step.cuh"
