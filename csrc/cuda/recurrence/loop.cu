// The recurrences of any size and cell (math/cells.h), step by step: a matrix product of the
// vendor's library and a pointwise kernel for each round, and for the gates, which are one product
// of [x | h] with [W_ih | W_hh]. Without rounds, x does not change within a step, and its product
// is computed for many steps at once.
//
// What limits the speed: at few batch rows the launches, (rounds + 1) * 2 a step each way, one more
// in the backward of a GRU, and reading the weights from the L2 cache, once a step.
// Timed on an H200: docs/gpu-kernels.md.
#include "cuda/recurrence/loop.h"

#include "cuda/recurrence/loop_backward.cuh"
#include "cuda/recurrence/loop_forward.cuh"
#include "cuda/recurrence/loop_layer_norm_gru.cuh"
#include "cuda/recurrence/loop_layer_norm_lstm.cuh"
#include "cuda/recurrence/loop_weights.cuh"
#include "cuda/recurrence/round.h"
#include "cuda/recurrence/workspace.h"

namespace fusedseq::cuda {
namespace {

// Bytes of x W_ih^T that are computed at once without rounds.
constexpr int64_t HOISTED = int64_t(1) << 28;

// The arguments of layer normalization at step t.
template <class S, class Cell>
LayerNorm<S, Cell> layer_norm_at(const Recurrence& r, int64_t t) {
  using C = typename Computing<S>::type;
  LayerNorm<S, Cell> n{};
  n.H = r.H;
  n.Hp = r.Hp;
  n.eps = C(r.eps);
  n.b = static_cast<const S*>(r.b);
  n.vectors = static_cast<const S*>(r.vectors);
  n.statistics = static_cast<C*>(r.statistics) + t * r.B * n.STATISTICS;
  return n;
}

template <class S, class Cell>
class Forward {
  using C = typename Computing<S>::type;

 public:
  static constexpr Type computing = type_of<C>();

  Forward(const Recurrence& r, Workspace& w)
      : r(r),
        weights(r, w),
        gates_size(r.B * Cell::GATES * r.H),
        widest(r.Xp > r.Hp ? r.Xp : r.Hp),
        operand(w.take<S>(r.B * weights.ld)),
        h(w.take<C>(r.B * r.Hp)),
        c_first(w.take<C>(Cell::HAS_C ? r.B * r.Hp : 0)),
        x_mogrified(w.take<C>(r.rounds > 0 ? r.B * r.Xp : 0)),
        h_mogrified(w.take<C>(r.rounds > 1 ? r.B * r.Hp : 0)),
        z(w.take<C>(gates_size > r.B * widest ? gates_size : r.B * widest)) {
    hoisted = HOISTED / (gates_size * int64_t(sizeof(C)));
    if (hoisted > r.steps) hoisted = r.steps;
    if (hoisted < 1) hoisted = 1;
    z_x = r.rounds ? nullptr : w.take<C>(hoisted * gates_size);
  }

  const char* run(const Product& product, cudaStream_t stream) const {
    if (const char* error = beyond_grid(r.B, widest)) return error;
    if (const char* error = weights.fill(r, stream)) return error;
    begin_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(
        LoopArguments(r),
        Begin<S>{in(r.h0), in(r.c0), h, c_first, operand + weights.h_at, weights.ld});
    for (int64_t n = 0; n < r.steps; ++n) {
      if (const char* error = input_product(product, n)) return error;
      for (int64_t k = 0; k < r.rounds; ++k)
        if (const char* error = round(product, stream, nth_step(r, n), k)) return error;
      if (const char* error = gates(product, stream, n)) return error;
    }
    return failed_launch("cell_kernel");
  }

 private:
  const Recurrence& r;
  const LoopWeights<S> weights;
  const int64_t gates_size, widest;
  int64_t hoisted;               // steps whose input product is computed at once
  S* operand;                    // (B, ld)  [x | h] in the course of a step, padding zero
  C *h, *c_first;                // (B, Hp)  the carried h; c0
  C *x_mogrified, *h_mogrified;  // (B, Xp), (B, Hp)  x and h after their rounds, not rounded to S
  C* z;                          // (B, .)  result of a product
  C* z_x;                        // (hoisted, B, G H)  x W_ih^T; null if there are rounds

  static const S* in(const void* p) { return static_cast<const S*>(p); }
  static S* out(void* p) { return static_cast<S*>(p); }

  // Round k of step t: a product with the other operand's part of [x | h], then round_kernel.
  const char* round(const Product& product, cudaStream_t stream, int64_t t, int64_t k) const {
    const Round a(r, k);
    S* scaled = operand + (a.on_x ? 0 : r.Xp);
    S* read = operand + (a.on_x ? r.Xp : 0);
    const char* error = product(matrix(r.type, read, r.B, a.in_padded, weights.ld),
                                weights.of_round(r, k).transposed(),
                                matrix(computing, z, r.B, a.out, a.out_padded));
    if (error) return error;

    RoundForward<S> f{};
    f.width = a.out;
    f.padded = a.out_padded;
    f.z = z;
    f.bias = in(r.bias[k]);
    f.after = a.on_x ? x_mogrified : h_mogrified;
    // The first round on x reads x itself, the first round on h the state, under its dropout.
    f.x = k == 0 ? in(r.x) + t * r.B * r.X : nullptr;
    f.before = k == 1 ? h : f.after;
    f.state = k == 1 ? r.state : Mask{};
    f.seed = r.seed;
    f.lengths = r.lengths;
    f.t = t;
    f.operand = scaled;
    f.ld = weights.ld;
    f.gate = out(r.round_gates) + t * r.B * r.round_width + a.offset;
    f.round_width = r.round_width;
    round_kernel<S><<<grid(r.B, a.out_padded), THREADS, 0, stream>>>(f);
    return failed_launch("round_kernel");
  }

  // Without rounds, the input product of the `hoisted` steps from the n-th one on, when those of
  // the ones before it are used up. It includes rows past the ends of sequences, which
  // cell_kernel does not use. The product's rows are in the order of x, also in reverse.
  const char* input_product(const Product& product, int64_t n) const {
    if (r.rounds || n % hoisted) return nullptr;
    const int64_t steps = steps_from(n);
    const int64_t t = r.reverse ? nth_step(r, n + steps - 1) : n;
    return product(matrix(r.type, in(r.x) + t * r.B * r.X, steps * r.B, r.X, r.X),
                   matrix(r.type, r.W_ih, Cell::GATES * r.H, r.X, r.X).transposed(),
                   matrix(computing, z_x, steps * r.B, Cell::GATES * r.H, Cell::GATES * r.H));
  }
  // How many steps the product that begins with the n-th step covers.
  int64_t steps_from(int64_t n) const { return r.steps - n < hoisted ? r.steps - n : hoisted; }
  // The n-th step's part of it.
  const C* inputs(int64_t n) const {
    if (!z_x) return nullptr;
    const int64_t i = n % hoisted;
    return z_x + (r.reverse ? steps_from(n - i) - 1 - i : i) * gates_size;
  }

  // The gates of the n-th step: a product, then cell_kernel.
  const char* gates(const Product& product, cudaStream_t stream, int64_t n) const {
    const char* error = product(matrix(r.type, operand, r.B, weights.ld, weights.ld),
                                weights.of_gates(r).transposed(),
                                matrix(computing, z, r.B, Cell::GATES * r.H, Cell::GATES * r.H));
    if (error) return error;

    const int64_t t = nth_step(r, n), cells_size = Cell::HAS_C ? r.B * r.Hp : 0;
    C* cells = static_cast<C*>(r.cells);
    const bool last = n == r.steps - 1;
    CellForward<S> f{};
    f.t = t;
    f.z = z;
    f.z_x = inputs(n);
    f.b = in(r.b);
    f.vectors = in(r.vectors);
    f.c_before = n ? cells + step_before(r, t) * cells_size : c_first;
    f.c_after = cells + t * cells_size;
    f.h = h;
    f.gates = out(r.gates) + t * r.B * Cell::SLOTS * r.Hp;
    f.y = out(r.y) + t * r.B * r.H;
    f.operand = operand + weights.h_at;
    f.ld = weights.ld;
    f.h_last = last ? out(r.h) : nullptr;
    f.c_last = last ? out(r.c) : nullptr;
    const LoopArguments a(r);
    if constexpr (Cell::WHOLE_ROWS) {
      const LayerNorm<S, Cell> norm = layer_norm_at<S, Cell>(r, t);
      const auto rows = unsigned(r.B);
      if constexpr (Cell::HAS_C)
        layer_norm_lstm_kernel<S><<<rows, ROW_THREADS, 0, stream>>>(a, f, norm);
      else
        layer_norm_gru_kernel<S><<<rows, ROW_THREADS, 0, stream>>>(a, f, norm);
    } else {
      const dim3 blocks = grid(r.B, r.Hp);
      cell_kernel<S, Cell><<<blocks, THREADS, 0, stream>>>(a, f);
    }
    return failed_launch("cell_kernel");
  }
};

template <class S, class Cell>
class Backward {
  using C = typename Computing<S>::type;

 public:
  static constexpr Type computing = type_of<C>();

  Backward(const RecurrenceBackward& g, Workspace& w)
      : g(g),
        r(g.forward),
        weights(r, w),
        widest(r.Xp > r.Hp ? r.Xp : r.Hp),
        d(w.take<C>(r.B * weights.ld)),
        d_other(r.rounds || BLOCKS > 1 ? w.take<C>(r.B * widest) : nullptr),
        dh(w.take<C>(r.B * r.Hp)),
        dc(w.take<C>(Cell::HAS_C ? r.B * r.Hp : 0)),
        c_first(w.take<C>(Cell::HAS_C ? r.B * r.Hp : 0)) {}

  const char* run(const Product& product, cudaStream_t stream) const {
    if (const char* error = beyond_grid(r.B, widest)) return error;
    if (const char* error = weights.fill(r, stream)) return error;
    begin_backward_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(
        LoopArguments(r), OutputGradients<S>{in(g.dh), in(g.dc), in(r.c0), dh, dc, c_first});
    for (int64_t n = r.steps - 1; n >= 0; --n) {
      if (const char* error = cell(product, stream, n)) return error;
      for (int64_t k = r.rounds - 1; k >= 0; --k)
        if (const char* error = round(product, stream, nth_step(r, n), k)) return error;
    }
    end_backward_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(
        LoopArguments(r), InitialStateGradients<S>{of_state(0), dc, out(g.dh0), out(g.dc0)});
    return failed_launch("end_backward_kernel");
  }

 private:
  const RecurrenceBackward& g;
  const Recurrence& r;
  const LoopWeights<S> weights;
  const int64_t widest;
  C* d;        // (B, ld)  gradient of [x | h] in the course of a step
  C* d_other;  // (B, .)  result of another product, not yet added to d: the last round's, or that
               // of the cell's second block of gates
  C *dh, *dc;  // (B, Hp)  gradients of the state: of h what bypassed the cell, and of c
  C* c_first;  // (B, Hp)  c0

  static const S* in(const void* p) { return static_cast<const S*>(p); }
  static S* out(void* p) { return static_cast<S*>(p); }

  static constexpr int BLOCKS = sizeof Cell::BLOCKS / sizeof(Block);

  // The gradient of the state before the n-th step; the last state's is dh alone.
  StateGradient<C> of_state(int64_t n) const {
    return {dh, n < r.steps ? d + weights.h_at : nullptr, weights.ld, d_other, nth_step(r, n)};
  }

  // The gates of the n-th step: cell_backward_kernel, then the product of dz with [W_ih | W_hh], or
  // one with each block of W_hh.
  const char* cell(const Product& product, cudaStream_t stream, int64_t n) const {
    const int64_t t = nth_step(r, n), cells_size = Cell::HAS_C ? r.B * r.Hp : 0;
    const C* cells = static_cast<const C*>(r.cells);
    CellGradient<S> f{};
    f.t = t;
    f.gates = in(r.gates) + t * r.B * Cell::SLOTS * r.Hp;
    f.dy = in(g.dy) + t * r.B * r.H;
    f.h0 = in(r.h0);
    f.y = in(r.y);
    f.vectors = in(r.vectors);
    f.c_before = n ? cells + step_before(r, t) * cells_size : c_first;
    f.after = of_state(n + 1);
    f.dh = dh;
    f.dc = dc;
    f.dz = out(g.dz) + t * r.B * Cell::SLOTS * r.H;
    f.terms = out(g.terms) + t * r.B * Cell::TERMS * r.H;
    const LoopArguments a(r);
    if constexpr (Cell::WHOLE_ROWS) {
      const LayerNorm<S, Cell> norm = layer_norm_at<S, Cell>(r, t);
      const auto rows = unsigned(r.B);
      if constexpr (Cell::HAS_C) {
        const C* after = cells + t * cells_size;
        layer_norm_lstm_backward_kernel<S><<<rows, ROW_THREADS, 0, stream>>>(a, f, norm, after);
      } else {
        layer_norm_gru_backward_kernel<S><<<rows, ROW_THREADS, 0, stream>>>(a, f, norm);
      }
    } else {
      const dim3 blocks = grid(r.B, r.Hp);
      cell_backward_kernel<S, Cell><<<blocks, THREADS, 0, stream>>>(a, f);
    }
    if (const char* error = failed_launch("cell_backward_kernel")) return error;
    for (int i = 0; i < BLOCKS; ++i) {
      const Block block = Cell::BLOCKS[i];
      const Matrix result = i ? matrix(computing, d_other, r.B, r.Hp, r.Hp)
                              : matrix(computing, d, r.B, weights.ld, weights.ld);
      const char* error = product(
          matrix(r.type, f.dz + block.slot * r.H, r.B, block.gates * r.H, Cell::SLOTS * r.H),
          weights.of_block(r, block), result);
      if (error) return error;
    }
    return nullptr;
  }

  // Round k of step t: round_backward_kernel, then the product with the round's weight.
  const char* round(const Product& product, cudaStream_t stream, int64_t t, int64_t k) const {
    const Round a(r, k);
    RoundGradient<S> f{};
    f.width = a.out;
    f.padded = a.out_padded;
    f.x = a.on_x ? in(r.x) + t * r.B * r.X : nullptr;
    f.h0 = in(r.h0);
    f.y = in(r.y);
    f.t = t;
    f.gates = in(r.round_gates) + t * r.B * r.round_width + Round(r, k % 2).offset;
    f.round_width = r.round_width;
    f.period = r.Xp + r.Hp;
    f.count = int(k / 2);
    f.d = d + (a.on_x ? 0 : r.Xp);
    f.ld = weights.ld;
    f.pending = k < r.rounds - 1 ? d_other : nullptr;
    f.dround = out(g.dround) + t * r.B * r.round_width + a.offset;
    f.dx = k == 0 && g.dx ? out(g.dx) + t * r.B * r.X : nullptr;
    round_backward_kernel<S><<<grid(r.B, a.out_padded), THREADS, 0, stream>>>(LoopArguments(r), f);
    if (const char* error = failed_launch("round_backward_kernel")) return error;
    return product(matrix(r.type, f.dround, r.B, a.out, r.round_width), weights.of_round(r, k),
                   matrix(computing, d_other, r.B, a.in_padded, a.in_padded));
  }
};

// Calls with(Loop<S, Cell>{}) for the dtype and the cell of a recurrence.
template <class S_, class Cell_>
struct Loop {
  using S = S_;
  using Cell = Cell_;
};
template <class S, class F>
void with_loop_in(const Recurrence& r, F with) {
  with_cell(r.cell, r.cap_input_gate, [&](auto cell) { with(Loop<S, decltype(cell)>{}); });
}
template <class F>
void with_loop(const Recurrence& r, F with) {
  by_type(r.type, [&](auto s) { with_loop_in<decltype(s)>(r, with); });
}

}  // namespace

int64_t loop_bytes(const Recurrence& r) {
  Workspace w{nullptr};
  with_loop(r, [&](auto l) { Forward<typename decltype(l)::S, typename decltype(l)::Cell>(r, w); });
  return w.used;
}

int64_t loop_backward_bytes(const Recurrence& r) {
  Workspace w{nullptr};
  const RecurrenceBackward g{r};
  with_loop(r,
            [&](auto l) { Backward<typename decltype(l)::S, typename decltype(l)::Cell>(g, w); });
  return w.used;
}

const char* loop_forward(const Recurrence& r, const Product& product, void* workspace,
                         void* stream) {
  Workspace w{static_cast<char*>(workspace)};
  const char* error = nullptr;
  with_loop(r, [&](auto l) {
    using L = decltype(l);
    error = Forward<typename L::S, typename L::Cell>(r, w).run(product,
                                                               static_cast<cudaStream_t>(stream));
  });
  return error;
}

const char* loop_backward(const RecurrenceBackward& g, const Product& product, void* workspace,
                          void* stream) {
  Workspace w{static_cast<char*>(workspace)};
  const char* error = nullptr;
  with_loop(g.forward, [&](auto l) {
    using L = decltype(l);
    error = Backward<typename L::S, typename L::Cell>(g, w).run(product,
                                                                static_cast<cudaStream_t>(stream));
  });
  return error;
}

}  // namespace fusedseq::cuda
