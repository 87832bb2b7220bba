// Forward persistent kernel: an LSTM or Mogrifier LSTM layer over a whole sequence in one launch.
// persistent_exchange.cuh explains how the blocks share the work, and what limits the speed.
//
// The vectors of a step, each one exchange: h (after state dropout), then the result of each round,
// which is x or h, alternating. The gates read the last two of these. The older one is already read
// by the last round, which multiplies it with the gates' weights at the same time, so that every
// vector is loaded once.
//
// This file: the arguments, what is loaded before the first step, and the loop over time.
// persistent_forward_step.cuh: the rounds, the gates and the cell.
#pragma once
#include <cuda/ptx.cuh>

#include "cuda/recurrence/persistent_launch.cuh"
#include "cuda/recurrence/persistent_layer_link.cuh"
#include "cuda/recurrence/persistent_masks.cuh"
#include "cuda/recurrence/persistent_products.cuh"
#include "cuda/recurrence/persistent_weights.cuh"
#include "math/lstm.h"

namespace fusedseq::cuda {
namespace {

struct Forward {
  Recurrence r;
  Layout l;
  BatchRows rows;
  Exchange e;
  ExchangedVector x, h;
  const float* input_gates;  // (T, B, G H)  x W_ih^T; only without rounds. G: gates_of(cell)
  LayerLink link;            // only of a layer of a wavefront
};

inline Forward arguments(const Recurrence& r, const Layout& l) {
  Forward p{r, l, slice_rows(r, l, 0), {}, {}, {}, nullptr, {}};
  p.h = append_vector(p.e.group_bytes, r, l, r.H, l.columns_h);
  p.x = append_vector(p.e.group_bytes, r, l, r.rounds ? r.X : 0, l.columns_x);
  return p;
}

inline int64_t input_gates_bytes(const Recurrence& r) {
  return r.rounds ? 0 : r.steps * r.B * gates_of(r.cell) * r.H * int64_t(sizeof(float));
}

// Runs a layer: launch(p, stream) launches its kernel for the slice p.rows of the batch.
template <class L>
const char* run_forward(const Recurrence& r, const Layout& l, const Product& product, void* memory,
                        cudaStream_t stream, L launch) {
  Forward p = arguments(r, l);

  // Without rounds x does not change within a step: one product for all steps.
  if (!r.rounds) {
    char* after_exchange = static_cast<char*>(memory) + exchange_bytes(p.e, l).total;
    float* gates = reinterpret_cast<float*>(after_exchange);
    p.input_gates = gates;
    const int64_t width = gates_of(r.cell) * r.H;
    const Matrix x = matrix(r.type, r.x, r.steps * r.B, r.X, r.X);
    const Matrix W = matrix(r.type, r.W_ih, width, r.X, r.X);
    const Matrix out = matrix(Type::f32, gates, r.steps * r.B, width, width);
    if (const char* error = product(x, W.transposed(), out)) return error;
  }

  // The slices run one after another, so that they can use the same memory.
  for (int i = 0; i < l.slices; ++i) {
    p.rows = slice_rows(r, l, i);
    if (const char* error = prepare(p.e, l, memory, stream)) return error;
    if (const char* error = launch(p, stream)) return error;
  }
  return nullptr;
}

// The B operands of a k-step of the last round: those of the round, and of the gates.
template <class V>
struct RoundAndGates {
  ColumnFragments<V::N> round;
  ColumnFragments<V::N_GATES> gates;
};

// One thread of a block. The arrays are the elements that the thread owns (OwnedElements), in
// registers. LINKED: the layer is one of a wavefront.
template <class S, class V, bool LINKED = false>
struct ForwardBlock {
  static constexpr int ROUND_STRIDE = plan::stride(8 * V::N);
  static constexpr int GATE_STRIDE = plan::forward_stride(V::N == 2, V::PLAIN);
  // k-steps whose loads are in flight, as many as the variant has registers for.
  static constexpr int FEW_LOADS = V::RESIDENT || V::GROUPS * V::N == 4 ? 2 : 6;
  static constexpr int MORE_LOADS = V::TILES == 3 ? (V::PLAIN == 16 ? 1 : 2) : FEW_LOADS;
  static constexpr int LOADS = loads_in_flight<S, V>(MORE_LOADS);
  using X = OwnedElements<V, V::X_COLUMNS>;
  using H = OwnedElements<V, V::H_COLUMNS>;
  using Gates = Accumulators<V, V::N_GATES>;
  static constexpr int MOST = X::COUNT > H::COUNT ? X::COUNT : H::COUNT;
  // Whether there are registers to load the gates' biases and input before the wait.
  static constexpr bool EARLY_INPUT = H::COUNT <= 2 && !V::RESIDENT && sizeof(S) == 2;

  const Forward& p;
  const Recurrence& r;
  GroupProducts<S, V> g;
  const int rounds;
  const OwnedColumns columns_x, columns_h;
  const X own_x;
  const H own_h;
  uint32_t epoch;               // of the newest vector
  uint32_t uses_x, uses_h;      // with words, the numbers of the newest x and of the newest h
  const S *Q_x, *Q_h;           // weights of round 0 and 1; those of rounds 2, 3, ... follow
  SharedWeights<S> W_ih, W_hh;  // (K, 4 columns_h): column 4 j + gate
  ResidentWeights<V, V::N_GATES> resident_W_ih;
  float x[X::COUNT], next_x[X::COUNT];     // after the rounds so far; of the next step
  float h[H::COUNT];                       // after state dropout and the rounds so far
  float carried_h[H::COUNT], c[H::COUNT];  // the state
  uint32_t state_keep;                     // bit e: state dropout keeps element e
  // Of the cell to come. Bit e: element e's sequence has not ended; its zoneout draws.
  uint32_t alive, draws_h, draws_c;
  float4 gate_inputs[EARLY_INPUT ? H::COUNT : 1];  // bias, and without rounds W_ih's product

  __device__ __forceinline__ ForwardBlock(const Forward& p, int block_of_layer)
      : p(p),
        r(p.r),
        g(p.l, p.e, p.rows, block_of_layer),
        rounds(V::PLAIN ? 0 : int(p.r.rounds)),
        columns_x(g.block, p.l.columns_x, int(r.X)),
        columns_h(g.block, p.l.columns_h, int(r.H)),
        own_x(g, columns_x.count),
        own_h(g, columns_h.count),
        epoch(1),
        uses_x(0),
        uses_h(0),
        state_keep(0) {}

  __device__ __forceinline__ void run();

 private:
  // The batch row of a row of the group.
  __device__ __forceinline__ int batch(int row) const { return g.first_row + row; }

  __device__ __forceinline__ S* load_rounds(S* to, int first, const OwnedColumns& own, int K);
  __device__ __forceinline__ void load_weights();
  __device__ __forceinline__ void load_state();
  __device__ __forceinline__ void fetch_x(int64_t t);

  // Stores an element of the next vector, if the thread has it. All lanes of a warp take part.
  template <class O>
  __device__ __forceinline__ void put(const ExchangedVector& v, const O& own, int e, int first,
                                      float value);
  // Publishes that vector: x or h.
  __device__ __forceinline__ void publish(bool of_x) {
    ++epoch;
    if (V::WORDS) {
      ++(of_x ? uses_x : uses_h);
      g.publish_words(epoch);
    } else {
      g.publish(epoch);
    }
  }
  // The numbers of the slots of the newest x and of the newest h.
  __device__ __forceinline__ uint32_t newest_x() const { return V::WORDS ? uses_x : epoch; }
  __device__ __forceinline__ uint32_t newest_h() const { return V::WORDS ? uses_h : epoch; }
  __device__ __forceinline__ void put_state();

  // persistent_forward_step.cuh
  __device__ __forceinline__ SharedWeights<S> weights_of(int k) const;
  __device__ __forceinline__ void round(int64_t t, int k, int64_t offset, Gates& gates);
  template <class O>
  __device__ __forceinline__ void fetch_bias(const O& own, const OwnedColumns& columns, int k,
                                             float (&bias)[MOST]) const;
  template <class O>
  __device__ __forceinline__ void finish_round(const Accumulators<V, V::N>& z, const O& own,
                                               const float (&bias)[MOST],
                                               const OwnedColumns& columns,
                                               const ExchangedVector& result, int k,
                                               float (&operand)[O::COUNT], int64_t t,
                                               int64_t offset);
  __device__ __forceinline__ void gates_of_newest(Gates& gates);
  __device__ __forceinline__ void cell(int64_t t, const Gates& sums);
  __device__ __forceinline__ void fetch_cell(int64_t t);
  __device__ __forceinline__ float4 gate_input(int64_t t, int b, int j) const;
  __device__ __forceinline__ LstmGates<float> activated_gates(int64_t t, int e, int b, int j);
  __device__ __forceinline__ void save(int64_t t, const GateQuad<S> (&saved)[H::COUNT]);
  __device__ __forceinline__ void store_y(S* y, S value, int64_t t, int b, int j);
};

// ---- before the first step

// The block's columns of the weights of rounds first, first + 2, ... Returns the address after
// them.
template <class S, class V, bool LINKED>
__device__ __forceinline__ S* ForwardBlock<S, V, LINKED>::load_rounds(S* to, int first,
                                                                      const OwnedColumns& own,
                                                                      int K) {
  for (int k = first; k < rounds; k += 2) {
    if (k > first && r.Q[k] == r.Q[first]) break;  // all rounds share one weight
    const S* q = static_cast<const S*>(r.Q[k]) + int64_t(own.first) * K;
    to = load_to_shared<V, 0, 0, Neighbours::rows>(
        to, own.count, K, [=](int n, int k) { return q[int64_t(n) * K + k]; });
  }
  return to;
}

// All weights of the block, which is all of its shared memory but for the partial sums at the end.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::load_weights() {
  S* to = reinterpret_cast<S*>(ptx::dynamic_shared());
  Q_x = to;
  to = load_rounds(to, 0, columns_x, int(r.H));
  Q_h = to;
  to = load_rounds(to, 1, columns_h, int(r.X));

  // The four gates of a unit are neighbouring columns, so that the cell reads one float4.
  const int columns = 4 * columns_h.count, H = int(r.H), X = int(r.X), first = columns_h.first;
  W_hh = {to, columns};
  to = load_to_shared<V, 0, 0, Neighbours::rows>(to, columns, H, [&](int n, int k) {
    return dropped_weight<S>(r, int64_t(n % 4) * H + first + n / 4, k);
  });
  W_ih = {to, columns};
  const S* w_ih = static_cast<const S*>(r.W_ih);
  const auto ih = [=](int n, int k) {
    return w_ih[(int64_t(n % 4) * H + first + n / 4) * X + k];
  };
  if (rounds) {
    to = load_to_shared<V, V::RESIDENT, 8 * V::N_GATES, Neighbours::rows>(to, columns, X, ih);
    resident_W_ih.template load<S>(columns, X, g.warp, g.lane, ih);
  }
  g.partial = reinterpret_cast<float*>(to) + g.number * V::SPLIT * V::PASS * 16 * GATE_STRIDE;
}

// h0, c0, and the state's mask, which is the same in every step.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::load_state() {
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    carried_h[e] = c[e] = h[e] = 0;
    if (!own_h.has(e)) continue;
    const int b = batch(own_h.row(e));
    const int j = columns_h.first + own_h.column(e);
    carried_h[e] = float(step_of<S>(r.h0, b, r.H)[j]);
    c[e] = float(step_of<S>(r.c0, b, r.H)[j]);
    if (!r.state.threshold || keep(r.seed, r.state, b, j, r.H)) state_keep |= 1u << e;
  }
}

// Loads x of step t to next_x, or zeros past the last step and past the end of a sequence. In the
// second layer of a wavefront x is the first layer's y, for which the group waits.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::fetch_x(int64_t t) {
  const S* from = step_of<S>(r.x, t, r.B * r.X) + columns_x.first;
  if (LINKED && p.link.flags && t < r.steps) g.wait(p.link, columns_x, t + 1, 1);
#pragma unroll
  for (int e = 0; e < X::COUNT; ++e) {
    const int i = batch(own_x.row(e)) * int(r.X) + own_x.column(e);
    next_x[e] = 0;
    if (own_x.has(e) && t < r.steps && !has_ended(r.lengths, t, batch(own_x.row(e))))
      next_x[e] = LINKED ? load_linked<S>(from + i) : float(from[i]);
  }
}

// first: the block's first column of the vector
template <class S, class V, bool LINKED>
template <class O>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::put(const ExchangedVector& v,
                                                                const O& own, int e, int first,
                                                                float value) {
  const int row = own.row(e), column = first + own.column(e);
  if constexpr (V::WORDS)
    g.put_word(v, (&v == &p.x ? uses_x : uses_h) + 1, own.has(e), row, column, value);
  else if (own.has(e))
    ptx::store_relaxed(reinterpret_cast<Bits<S>*>(g.slot(v, epoch + 1)) +
                           exchange_index<S>(row, column, v.k_steps),
                       bits_of<S>(value));
}

// h after state dropout, from the carried state, into the next vector.
template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::put_state() {
  const float scale = r.state.threshold ? float(r.state.scale) : 1.f;
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    h[e] = state_keep >> e & 1 ? carried_h[e] * scale : 0.f;
    put(p.h, own_h, e, columns_h.first, h[e]);
  }
}

// ---- the loop over time

template <class S, class V, bool LINKED>
__device__ __forceinline__ void ForwardBlock<S, V, LINKED>::run() {
  // Both groups load the weights and use all of them. From here on a group synchronizes only its
  // own threads, so a group without rows may leave.
  load_weights();
  __syncthreads();
  if (g.rows == 0) return;

  // Epoch 1 is h0.
  load_state();
  if constexpr (V::WORDS) {
    g.fill_padding(p.h, p.l.blocks);
    if (rounds) g.fill_padding(p.x, p.l.blocks);
  }
  epoch = 0;
  put_state();
  publish(false);
  if (rounds) fetch_x(0);

  for (int64_t t = 0; t < r.steps; ++t) {
    Gates gates;
    clear<V>(gates);
#pragma unroll
    for (int e = 0; e < X::COUNT; ++e)
      x[e] = next_x[e];

    // Each round waits for the newest vector, and publishes the next one.
    int64_t offset = 0;
#pragma unroll 1
    for (int k = 0; k < rounds; ++k) {
      round(t, k, offset, gates);
      offset += k % 2 ? r.Hp : r.Xp;
    }

    // What the cell reads besides the vectors, and x of the next step, are loaded while the other
    // blocks finish their part of the last round.
    fetch_cell(t);
    if (rounds) fetch_x(t + 1);
    gates_of_newest(gates);
    cell(t, gates);
  }

  // The last y has been stored after the last epoch: one more epoch releases it to the other layer.
  if (LINKED) publish(false);
#pragma unroll
  for (int e = 0; e < H::COUNT; ++e) {
    if (!own_h.has(e)) continue;
    const int i = batch(own_h.row(e)) * int(r.H) + columns_h.first + own_h.column(e);
    static_cast<S*>(r.h)[i] = S(carried_h[e]);
    static_cast<S*>(r.c)[i] = S(c[e]);
  }
}

}  // namespace
}  // namespace fusedseq::cuda

#include "cuda/recurrence/persistent_forward_step.cuh"
