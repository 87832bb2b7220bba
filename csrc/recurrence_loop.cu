// The LSTM and the Mogrifier LSTM step by step, of any size: a product and a kernel for each round, and for the gates of
// [x | h] with [W_ih | W_hh]. Without rounds the input's product is made for many steps at once.
//
// What limits it: at few rows the starts, (rounds + 1) * 2 a step each way, and the weights' way from the second cache,
// which they take once a step. Not timed.
#include "recurrence_loop.h"

#include "recurrence_step.cuh"
#include "recurrence_weights.h"

namespace fusedseq::cuda {
namespace {

constexpr int64_t HOISTED = int64_t(1) << 28;  // bytes of the input's pre-activations at a time, without rounds

// What both directions have: the weights in rows that products like.
template <class S> struct Weights {
  int64_t ld, h_at;      // the length of a row of [x | h], and where h begins; of h alone without rounds
  S* gates;              // (4H, ld)
  S* round[MAX_ROUNDS];  // (out, in_padded), or null where Q is so already

  Weights(const Recurrence& r, Workspace& w) : ld(r.rounds ? r.Xp + r.Hp : r.Hp), h_at(r.rounds ? r.Xp : 0) {
    gates = w.take<S>(4 * r.H * ld);
    for (int64_t k = 0; k < r.rounds; ++k) {
      const Round round_(r, k);
      const bool own = first_use(r.Q, k) == k && round_.in != round_.in_padded;
      round[k] = own ? w.take<S>(round_.out * round_.in_padded) : nullptr;
    }
  }

  const char* fill(const Recurrence& r, void* stream) const {
    const Mask none{};
    if (r.rounds)
      if (const char* error = masked_copy({r.type, r.W_ih, gates, 4 * r.H, r.X, r.Xp, r.X, ld, none, false, r.seed}, stream)) return error;
    if (const char* error = masked_copy({r.type, r.W_hh, gates + h_at, 4 * r.H, r.H, r.Hp, r.H, ld, r.weight, r.weight_by_row, r.seed}, stream))
      return error;
    for (int64_t k = 0; k < r.rounds; ++k) {
      const Round round_(r, k);
      if (!round[k]) continue;
      if (const char* error = masked_copy({r.type, r.Q[k], round[k], round_.out, round_.in, round_.in_padded, round_.in, round_.in_padded,
                                           none, false, r.seed}, stream))
        return error;
    }
    return nullptr;
  }

  Matrix of_gates(const Recurrence& r) const { return matrix(r.type, gates, 4 * r.H, ld, ld); }
  Matrix of_round(const Recurrence& r, int64_t k) const {
    const Round round_(r, k);
    const S* own = round[first_use(r.Q, k)];
    return matrix(r.type, own ? own : r.Q[k], round_.out, round_.in_padded, round_.in_padded);
  }
};

template <class S> class Forward {
  using C = typename Computing<S>::type;

 public:
  static constexpr Type computing = type_of<C>();

  Forward(const Recurrence& r, Workspace& w)
      : r(r), weights(r, w), rows_4H(r.B * 4 * r.H), widest(r.Xp > r.Hp ? r.Xp : r.Hp), operand(w.take<S>(r.B * weights.ld)),
        h(w.take<C>(r.B * r.Hp)), c_first(w.take<C>(r.B * r.Hp)), x_mogrified(w.take<C>(r.rounds > 0 ? r.B * r.Xp : 0)),
        h_mogrified(w.take<C>(r.rounds > 1 ? r.B * r.Hp : 0)), z(w.take<C>(r.B * (4 * r.H > widest ? 4 * r.H : widest))) {
    const int64_t fit = HOISTED / (rows_4H * int64_t(sizeof(C)));
    hoisted = fit < 1 ? 1 : fit < r.steps ? fit : r.steps;
    z_x = r.rounds ? nullptr : w.take<C>(hoisted * rows_4H);
  }

  const char* run(const Product& product, cudaStream_t stream) const {
    if (const char* error = beyond_grid(r.B, widest)) return error;
    if (const char* error = weights.fill(r, stream)) return error;
    begin_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(Cell(r), Begin<S>{in(r.h0), in(r.c0), h, c_first, operand + weights.h_at, weights.ld});
    for (int64_t t = 0; t < r.steps; ++t) {
      for (int64_t k = 0; k < r.rounds; ++k)
        if (const char* error = round(product, stream, t, k)) return error;
      if (const char* error = gates(product, stream, t)) return error;
    }
    return failed_launch("cell_kernel");
  }

 private:
  const Recurrence& r;
  const Weights<S> weights;
  const int64_t rows_4H, widest;
  int64_t hoisted;   // steps whose input's product is made at once
  S* operand;        // (B, ld)  [x | h] in the course of a step, its padding zero
  C *h, *c_first;    // (B, Hp)
  C *x_mogrified, *h_mogrified;  // (B, Xp), (B, Hp), not rounded to S
  C* z;              // (B, .)  of a product
  C* z_x;            // (hoisted, B, 4H)

  static const S* in(const void* p) { return static_cast<const S*>(p); }
  static S* out(void* p) { return static_cast<S*>(p); }

  const char* round(const Product& product, cudaStream_t stream, int64_t t, int64_t k) const {
    const Round a(r, k);
    S *own = operand + (a.on_x ? 0 : r.Xp), *other = operand + (a.on_x ? r.Xp : 0);
    const char* error = product(matrix(r.type, other, r.B, a.in_padded, weights.ld), weights.of_round(r, k).transposed(),
                                matrix(computing, z, r.B, a.out, a.out_padded));
    if (error) return error;
    C* after = a.on_x ? x_mogrified : h_mogrified;
    round_kernel<S><<<grid(r.B, a.out_padded), THREADS, 0, stream>>>(
        RoundForward<S>{a.out, a.out_padded, z, in(r.bias[k]), k == 0 ? in(r.x) + t * r.B * r.X : nullptr, k == 1 ? h : after,
                        k == 1 ? r.state : Mask{}, r.seed, after, own, weights.ld,
                        out(r.round_gates) + t * r.B * r.round_width + a.offset, r.round_width});
    return failed_launch("round_kernel");
  }

  const char* gates(const Product& product, cudaStream_t stream, int64_t t) const {
    if (!r.rounds && t % hoisted == 0) {
      const int64_t n = (r.steps - t < hoisted ? r.steps - t : hoisted) * r.B;
      if (const char* error = product(matrix(r.type, in(r.x) + t * r.B * r.X, n, r.X, r.X), matrix(r.type, r.W_ih, 4 * r.H, r.X, r.X).transposed(),
                                      matrix(computing, z_x, n, 4 * r.H, 4 * r.H)))
        return error;
    }
    if (const char* error = product(matrix(r.type, operand, r.B, weights.ld, weights.ld), weights.of_gates(r).transposed(),
                                    matrix(computing, z, r.B, 4 * r.H, 4 * r.H)))
      return error;
    C* cells = static_cast<C*>(r.cells) + t * r.B * r.Hp;
    const bool last = t == r.steps - 1;
    cell_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(
        Cell(r), CellForward<S>{t, z, z_x ? z_x + t % hoisted * rows_4H : nullptr, in(r.b), t ? cells - r.B * r.Hp : c_first, cells, h,
                                out(r.gates) + t * r.B * 4 * r.Hp, out(r.y) + t * r.B * r.H, operand + weights.h_at, weights.ld,
                                last ? out(r.h) : nullptr, last ? out(r.c) : nullptr});
    return failed_launch("cell_kernel");
  }
};

template <class S> class Backward {
  using C = typename Computing<S>::type;

 public:
  static constexpr Type computing = type_of<C>();

  Backward(const RecurrenceBackward& g, Workspace& w)
      : g(g), r(g.forward), weights(r, w), widest(r.Xp > r.Hp ? r.Xp : r.Hp), d(w.take<C>(r.B * weights.ld)),
        d_round(r.rounds ? w.take<C>(r.B * widest) : nullptr), dh(w.take<C>(r.B * r.Hp)), dc(w.take<C>(r.B * r.Hp)),
        c_first(w.take<C>(r.B * r.Hp)) {}

  const char* run(const Product& product, cudaStream_t stream) const {
    if (const char* error = beyond_grid(r.B, widest)) return error;
    if (const char* error = weights.fill(r, stream)) return error;
    begin_backward_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(Cell(r), Upstream<S>{in(g.dh), in(g.dc), in(r.c0), dh, dc, c_first});
    for (int64_t t = r.steps - 1; t >= 0; --t) {
      if (const char* error = cell(product, stream, t)) return error;
      for (int64_t k = r.rounds - 1; k >= 0; --k)
        if (const char* error = round(product, stream, t, k)) return error;
    }
    end_backward_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(Cell(r), Downstream<S>{of_state(true), dc, out(g.dh0), out(g.dc0)});
    return failed_launch("end_backward_kernel");
  }

 private:
  const RecurrenceBackward& g;
  const Recurrence& r;
  const Weights<S> weights;
  const int64_t widest;
  C* d;                   // (B, ld)  of [x | h] in the course of a step
  C* d_round;             // (B, .)  what the last round's product has left to be added to d
  C *dh, *dc, *c_first;   // (B, Hp)

  static const S* in(const void* p) { return static_cast<const S*>(p); }
  static S* out(void* p) { return static_cast<S*>(p); }

  StateGradient<C> of_state(bool any) const { return {dh, any ? d + weights.h_at : nullptr, weights.ld, d_round}; }

  const char* cell(const Product& product, cudaStream_t stream, int64_t t) const {
    const C* cells = static_cast<const C*>(r.cells) + t * r.B * r.Hp;
    S* dz = out(g.dz) + t * r.B * 4 * r.H;
    cell_backward_kernel<S><<<grid(r.B, r.Hp), THREADS, 0, stream>>>(
        Cell(r), CellGradient<S>{t, in(r.gates) + t * r.B * 4 * r.Hp, in(g.dy) + t * r.B * r.H, t ? cells - r.B * r.Hp : c_first,
                                 of_state(t < r.steps - 1), dh, dc, dz});
    if (const char* error = failed_launch("cell_backward_kernel")) return error;
    return product(matrix(r.type, dz, r.B, 4 * r.H, 4 * r.H), weights.of_gates(r), matrix(computing, d, r.B, weights.ld, weights.ld));
  }

  const char* round(const Product& product, cudaStream_t stream, int64_t t, int64_t k) const {
    const Round a(r, k);
    const S* raw = a.on_x ? in(r.x) + t * r.B * r.X : t ? in(r.y) + (t - 1) * r.B * r.H : in(r.h0);
    S* dround = out(g.dround) + t * r.B * r.round_width + a.offset;
    round_backward_kernel<S><<<grid(r.B, a.out_padded), THREADS, 0, stream>>>(
        RoundGradient<S>{a.out, a.out_padded, raw, a.on_x ? Mask{} : r.state, r.seed,
                         in(r.round_gates) + t * r.B * r.round_width + Round(r, k % 2).offset, r.round_width, r.Xp + r.Hp, int(k / 2),
                         d + (a.on_x ? 0 : r.Xp), weights.ld, k < r.rounds - 1 ? d_round : nullptr, dround,
                         k == 0 && g.dx ? out(g.dx) + t * r.B * r.X : nullptr});
    if (const char* error = failed_launch("round_backward_kernel")) return error;
    return product(matrix(r.type, dround, r.B, a.out, r.round_width), weights.of_round(r, k),
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

const char* loop_forward(const Recurrence& r, const Product& product, void* workspace, void* stream) {
  Workspace w{static_cast<char*>(workspace)};
  return by_type(r.type, [&](auto s) { return Forward<decltype(s)>(r, w).run(product, static_cast<cudaStream_t>(stream)); });
}

const char* loop_backward(const RecurrenceBackward& g, const Product& product, void* workspace, void* stream) {
  Workspace w{static_cast<char*>(workspace)};
  return by_type(g.forward.type, [&](auto s) { return Backward<decltype(s)>(g, w).run(product, static_cast<cudaStream_t>(stream)); });
}

}  // namespace fusedseq::cuda
