// The LSTM and the Mogrifier LSTM of any size, step by step: a matrix product of the vendor's
// library and a pointwise kernel for each round, and for the gates, which are one product of [x |
// h] with [W_ih | W_hh]. Without rounds, x does not change within a step, and its product is
// computed for many steps at once.
//
// What limits the speed: at few batch rows the launches, (rounds + 1) * 2 a step each way, and
// reading the weights from the L2 cache, once a step. Not timed.
#include "cuda/recurrence/loop.h"

#include "cuda/recurrence/loop_backward.cuh"
#include "cuda/recurrence/loop_forward.cuh"
#include "cuda/recurrence/loop_weights.cuh"
#include "cuda/recurrence/round.h"
#include "cuda/recurrence/workspace.h"

namespace fusedseq::cuda {
namespace {

// Bytes of x W_ih^T that are computed at once without rounds.
constexpr int64_t HOISTED = int64_t(1) << 28;

template <class S>
class Forward {
  using C = typename Computing<S>::type;

 public:
  static constexpr Type computing = type_of<C>();

  Forward(const Recurrence& r, Workspace& w)
      : r(r),
        weights(r, w),
        rows_4H(r.B * 4 * r.H),
        widest(r.Xp > r.Hp ? r.Xp : r.Hp),
        operand(w.take<S>(r.B * weights.ld)),
        h(w.take<C>(r.B * r.Hp)),
        c_first(w.take<C>(r.B * r.Hp)),
        x_mogrified(w.take<C>(r.rounds > 0 ? r.B * r.Xp : 0)),
        h_mogrified(w.take<C>(r.rounds > 1 ? r.B * r.Hp : 0)),
        z(w.take<C>(r.B * (4 * r.H > widest ? 4 * r.H : widest))) {
    hoisted = HOISTED / (rows_4H * int64_t(sizeof(C)));
    if (hoisted > r.steps) hoisted = r.steps;
    if (hoisted < 1) hoisted = 1;
    z_x = r.rounds ? nullptr : w.take<C>(hoisted * rows_4H);
  }

  const char* run(const Product& product, cudaStream_t stream) const {
    if (const char* error = beyond_grid(r.B, widest)) return error;
    if (const char* error = weights.fill(r, stream)) return error;
    begin_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(
        Cell(r), Begin<S>{in(r.h0), in(r.c0), h, c_first, operand + weights.h_at, weights.ld});
    for (int64_t t = 0; t < r.steps; ++t) {
      for (int64_t k = 0; k < r.rounds; ++k)
        if (const char* error = round(product, stream, t, k)) return error;
      if (const char* error = gates(product, stream, t)) return error;
    }
    return failed_launch("cell_kernel");
  }

 private:
  const Recurrence& r;
  const LoopWeights<S> weights;
  const int64_t rows_4H, widest;
  int64_t hoisted;               // steps whose input product is computed at once
  S* operand;                    // (B, ld)  [x | h] in the course of a step, padding zero
  C *h, *c_first;                // (B, Hp)  the carried h; c0
  C *x_mogrified, *h_mogrified;  // (B, Xp), (B, Hp)  x and h after their rounds, not rounded to S
  C* z;                          // (B, .)  result of a product
  C* z_x;                        // (hoisted, B, 4H)  x W_ih^T; null if there are rounds

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

  // Without rounds, the input product of the next `hoisted` steps, when the last ones are used up.
  // It includes rows behind the ends of sequences, which cell_kernel does not use.
  const char* input_product(const Product& product, int64_t t) const {
    if (r.rounds || t % hoisted) return nullptr;
    const int64_t steps = r.steps - t < hoisted ? r.steps - t : hoisted;
    const int64_t n = steps * r.B;
    return product(matrix(r.type, in(r.x) + t * r.B * r.X, n, r.X, r.X),
                   matrix(r.type, r.W_ih, 4 * r.H, r.X, r.X).transposed(),
                   matrix(computing, z_x, n, 4 * r.H, 4 * r.H));
  }

  // The gates of step t: a product, then cell_kernel.
  const char* gates(const Product& product, cudaStream_t stream, int64_t t) const {
    if (const char* error = input_product(product, t)) return error;
    const char* error =
        product(matrix(r.type, operand, r.B, weights.ld, weights.ld),
                weights.of_gates(r).transposed(), matrix(computing, z, r.B, 4 * r.H, 4 * r.H));
    if (error) return error;

    C* cells = static_cast<C*>(r.cells) + t * r.B * r.Hp;
    const bool last = t == r.steps - 1;
    CellForward<S> f{};
    f.t = t;
    f.z = z;
    f.z_x = z_x ? z_x + t % hoisted * rows_4H : nullptr;
    f.b = in(r.b);
    f.c_before = t ? cells - r.B * r.Hp : c_first;
    f.c_after = cells;
    f.h = h;
    f.gates = out(r.gates) + t * r.B * 4 * r.Hp;
    f.y = out(r.y) + t * r.B * r.H;
    f.operand = operand + weights.h_at;
    f.ld = weights.ld;
    f.h_last = last ? out(r.h) : nullptr;
    f.c_last = last ? out(r.c) : nullptr;
    cell_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(Cell(r), f);
    return failed_launch("cell_kernel");
  }
};

template <class S>
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
        d_round(r.rounds ? w.take<C>(r.B * widest) : nullptr),
        dh(w.take<C>(r.B * r.Hp)),
        dc(w.take<C>(r.B * r.Hp)),
        c_first(w.take<C>(r.B * r.Hp)) {}

  const char* run(const Product& product, cudaStream_t stream) const {
    if (const char* error = beyond_grid(r.B, widest)) return error;
    if (const char* error = weights.fill(r, stream)) return error;
    begin_backward_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(
        Cell(r), OutputGradients<S>{in(g.dh), in(g.dc), in(r.c0), dh, dc, c_first});
    for (int64_t t = r.steps - 1; t >= 0; --t) {
      if (const char* error = cell(product, stream, t)) return error;
      for (int64_t k = r.rounds - 1; k >= 0; --k)
        if (const char* error = round(product, stream, t, k)) return error;
    }
    end_backward_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(
        Cell(r), InitialStateGradients<S>{of_state(true), dc, out(g.dh0), out(g.dc0)});
    return failed_launch("end_backward_kernel");
  }

 private:
  const RecurrenceBackward& g;
  const Recurrence& r;
  const LoopWeights<S> weights;
  const int64_t widest;
  C* d;        // (B, ld)  gradient of [x | h] in the course of a step
  C* d_round;  // (B, .)  result of the last round's product, not yet added to d
  C *dh, *dc;  // (B, Hp)  gradients of the state: of h what bypassed the cell, and of c
  C* c_first;  // (B, Hp)  c0

  static const S* in(const void* p) { return static_cast<const S*>(p); }
  static S* out(void* p) { return static_cast<S*>(p); }

  // any: whether a later step has been computed; the last step's state has only dh
  StateGradient<C> of_state(bool any) const {
    return {dh, any ? d + weights.h_at : nullptr, weights.ld, d_round};
  }

  // The gates of step t: cell_backward_kernel, then the product of dz with [W_ih | W_hh].
  const char* cell(const Product& product, cudaStream_t stream, int64_t t) const {
    const C* cells = static_cast<const C*>(r.cells) + t * r.B * r.Hp;
    CellGradient<S> f{};
    f.t = t;
    f.gates = in(r.gates) + t * r.B * 4 * r.Hp;
    f.dy = in(g.dy) + t * r.B * r.H;
    f.c_before = t ? cells - r.B * r.Hp : c_first;
    f.after = of_state(t < r.steps - 1);
    f.dh = dh;
    f.dc = dc;
    f.dz = out(g.dz) + t * r.B * 4 * r.H;
    cell_backward_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(Cell(r), f);
    if (const char* error = failed_launch("cell_backward_kernel")) return error;
    return product(matrix(r.type, f.dz, r.B, 4 * r.H, 4 * r.H), weights.of_gates(r),
                   matrix(computing, d, r.B, weights.ld, weights.ld));
  }

  // Round k of step t: round_backward_kernel, then the product with the round's weight.
  const char* round(const Product& product, cudaStream_t stream, int64_t t, int64_t k) const {
    const Round a(r, k);
    const S* h_before = t ? in(r.y) + (t - 1) * r.B * r.H : in(r.h0);
    RoundGradient<S> f{};
    f.width = a.out;
    f.padded = a.out_padded;
    f.raw = a.on_x ? in(r.x) + t * r.B * r.X : h_before;
    f.lengths = a.on_x ? r.lengths : nullptr;
    f.t = t;
    f.state = a.on_x ? Mask{} : r.state;
    f.seed = r.seed;
    f.gates = in(r.round_gates) + t * r.B * r.round_width + Round(r, k % 2).offset;
    f.round_width = r.round_width;
    f.period = r.Xp + r.Hp;
    f.count = int(k / 2);
    f.d = d + (a.on_x ? 0 : r.Xp);
    f.ld = weights.ld;
    f.pending = k < r.rounds - 1 ? d_round : nullptr;
    f.dround = out(g.dround) + t * r.B * r.round_width + a.offset;
    f.dx = k == 0 && g.dx ? out(g.dx) + t * r.B * r.X : nullptr;
    round_backward_kernel<S><<<grid(r.B, a.out_padded), THREADS, 0, stream>>>(f);
    if (const char* error = failed_launch("round_backward_kernel")) return error;
    return product(matrix(r.type, f.dround, r.B, a.out, r.round_width), weights.of_round(r, k),
                   matrix(computing, d_round, r.B, a.in_padded, a.in_padded));
  }
};

}  // namespace

int64_t loop_bytes(const Recurrence& r) {
  Workspace w{nullptr};
  by_type(r.type, [&](auto s) { Forward<decltype(s)>(r, w); });
  return w.used;
}

int64_t loop_backward_bytes(const Recurrence& r) {
  Workspace w{nullptr};
  const RecurrenceBackward g{r};
  by_type(r.type, [&](auto s) { Backward<decltype(s)>(g, w); });
  return w.used;
}

const char* loop_forward(const Recurrence& r, const Product& product, void* workspace,
                         void* stream) {
  Workspace w{static_cast<char*>(workspace)};
  return by_type(r.type, [&](auto s) {
    return Forward<decltype(s)>(r, w).run(product, static_cast<cudaStream_t>(stream));
  });
}

const char* loop_backward(const RecurrenceBackward& g, const Product& product, void* workspace,
                          void* stream) {
  Workspace w{static_cast<char*>(workspace)};
  return by_type(g.forward.type, [&](auto s) {
    return Backward<decltype(s)>(g, w).run(product, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace fusedseq::cuda
