// The weights' gradients of a recurrence, after either engine's backward: every operand of every step from the saved
// sigmoids again, then one product over all T * B rows for each use of a weight. Sums always in the same order.
//
// What limits it: the products, at the speed of the vendor's; beside them the operands are read and written once. Not
// timed.
#include "recurrence_gradients.h"

#include "recurrence.cuh"
#include "recurrence_weights.h"

namespace fusedseq::cuda {
namespace {

constexpr int64_t SLICE = 64;  // rows that a thread sums

template <class S> struct Operands {
  int64_t B, width, padded;
  const S *first, *others;  // (B, width), (., width): row t of the operand before any round is row t - shift of the others
  int64_t shift;            // 1 for h, whose first step reads h0
  Mask state;
  const int64_t* seed;
  const S* gates;           // (T, B, .), round_width apart: of the first round on this operand
  int64_t round_width, period;
  int count;                // rounds on it
  S *raw, *out;             // (T, B, padded) before any round, or null; (count, T, B, padded) after each
  int64_t size;             // T B padded
};

template <class S> __global__ void __launch_bounds__(THREADS) operands_kernel(const Operands<S> o) {
  using C = typename Computing<S>::type;
  const int64_t row = own_row(), j = own_column(), n = o.width - j, before = row - o.shift * o.B;
  if (j >= o.padded) return;
  C v[N];
  load((before < 0 ? o.first + row * o.width : o.others + before * o.width) + j, n, v);
  drop(o.state, o.seed, row % o.B, j, o.width, v);
  if (o.raw) store(o.raw + row * o.padded + j, N, v);
  for (int k = 0; k < o.count; ++k) {
    mogrify_all(o.gates + row * o.round_width + k * o.period + j, 0, 1, v);
    store(o.out + k * o.size + row * o.padded + j, N, v);
  }
}

// partial (slices, width): the sums of SLICE rows each
template <class S, class C> __global__ void __launch_bounds__(THREADS) partial_sums_kernel(const S* in, int64_t rows, int64_t width, C* partial) {
  const int64_t slice = own_row(), j = own_column(), end = slice * SLICE + SLICE < rows ? slice * SLICE + SLICE : rows;
  if (j >= width) return;
  C sum[N] = {};
  for (int64_t row = slice * SLICE; row < end; ++row) {
    C v[N];
    load(in + row * width + j, width - j, v);
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += v[i];
  }
  store(partial + slice * width + j, width - j, sum);
}

// out (n,): over the slices, and over `uses` places in a row, `period` apart
template <class S, class C> struct Sums {
  const C* partial;
  int64_t slices, stride, n, uses, period;
  S* out;
};
template <class S, class C> __global__ void __launch_bounds__(THREADS) sums_kernel(const Sums<S, C> s) {
  const int64_t j = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * N;
  if (j >= s.n) return;
  C sum[N] = {};
  for (int64_t use = 0; use < s.uses; ++use)
    for (int64_t slice = 0; slice < s.slices; ++slice) {
      C v[N];
      load(s.partial + slice * s.stride + use * s.period + j, s.n - j, v);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += v[i];
    }
  store(s.out + j, s.n - j, sum);
}

template <class S> class Gradients {
  using C = typename Computing<S>::type;

 public:
  static constexpr Type computing = type_of<C>();

  Gradients(const RecurrenceGradients& g, Workspace& w)
      : g(g), r(g.backward.forward), rows(r.steps * r.B), slices((rows + SLICE - 1) / SLICE) {
    h = w.take<S>((1 + rounds_on(1)) * rows * r.Hp);
    x = w.take<S>(rounds_on(0) * rows * r.Xp);
    partial = w.take<C>(slices * (4 * r.H > r.round_width ? 4 * r.H : r.round_width));
    u = w.take<S>(r.rank ? rows * r.rank : 0), du = w.take<S>(r.rank ? rows * r.rank : 0);
    for (int64_t k = 0; k < r.rounds && k < 2; ++k) {  // a shared weight is one of the first two rounds'
      const Round a(r, k);
      parts_Q[k] = w.take<C>(shared(g.dQ, k) * a.out * (r.rank ? r.rank : a.in));
      parts_F[k] = w.take<C>(shared(g.dF, k) * r.rank * a.in);
    }
  }

  const char* run(const Product& product_, cudaStream_t stream_) {
    product = &product_, stream = stream_;
    if (const char* error = beyond_grid(rows, larger(4 * r.H, larger(larger(r.Xp, r.Hp), r.round_width)))) return error;
    if (const char* error = operands()) return error;
    if (const char* error = of_gates()) return error;
    if (const char* error = biases()) return error;
    for (int64_t k = 0; k < r.rounds; ++k)
      if (const char* error = of_round(k)) return error;
    return failed_launch("sums_kernel");
  }

 private:
  const RecurrenceGradients& g;
  const Recurrence& r;
  const int64_t rows, slices;
  S *h, *x;                    // (., T, B, padded): h before and x after the first round on it, and after each other one
  C* partial;                  // (slices, .)
  S *u, *du;                   // (T, B, rank): operand times the second factor
  C *parts_Q[2], *parts_F[2];  // (uses, size of a shared weight): of the rounds on x, on h
  const Product* product;
  cudaStream_t stream;

  static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
  static const S* in(const void* p) { return static_cast<const S*>(p); }
  int64_t rounds_on(int side) const { return (r.rounds + 1 - side) / 2; }  // 0: x, 1: h

  const S* h_after(int64_t n) const { return h + n * rows * r.Hp; }
  const S* x_after(int64_t n) const { return x + (n - 1) * rows * r.Xp; }

  // How many rounds a gradient is of; 0 where it is of an earlier round too, or not needed.
  int64_t uses(void* const* d, int64_t k) const {
    if (!d[k] || first_use(d, k) < k) return 0;
    int64_t n = 0;
    for (int64_t j = k; j < r.rounds; j += 2) n += d[j] == d[k];
    return n;
  }
  int64_t shared(void* const* d, int64_t k) const { return uses(d, k) > 1 ? uses(d, k) : 0; }

  const char* operands() const {
    const int64_t period = r.Xp + r.Hp;
    if (g.dW_hh || r.rounds)
      operands_kernel<S><<<grid(rows, r.Hp), THREADS, 0, stream>>>(
          Operands<S>{r.B, r.H, r.Hp, in(r.h0), in(r.y), 1, r.state, r.seed, in(r.round_gates) + r.Xp, r.round_width, period, int(rounds_on(1)),
                      h, h + rows * r.Hp, rows * r.Hp});
    if (r.rounds)
      operands_kernel<S><<<grid(rows, r.Xp), THREADS, 0, stream>>>(
          Operands<S>{r.B, r.X, r.Xp, in(r.x), in(r.x), 0, Mask{}, r.seed, in(r.round_gates), r.round_width, period, int(rounds_on(0)),
                      nullptr, x, rows * r.Xp});
    return failed_launch("operands_kernel");
  }

  Matrix own(const void* p, int64_t m, int64_t n, int64_t stride) const { return matrix(r.type, p, m, n, stride); }

  const char* of_gates() const {
    const Matrix dz = own(g.backward.dz, rows, 4 * r.H, 4 * r.H);
    if (g.dx && !r.rounds)
      if (const char* error = (*product)(dz, own(r.W_ih, 4 * r.H, r.X, r.X), own(g.dx, rows, r.X, r.X))) return error;
    const Matrix last_x = r.rounds ? own(x_after(rounds_on(0)), rows, r.X, r.Xp) : own(r.x, rows, r.X, r.X);
    if (g.dW_ih)
      if (const char* error = (*product)(dz.transposed(), last_x, own(g.dW_ih, 4 * r.H, r.X, r.X))) return error;
    if (!g.dW_hh) return nullptr;
    if (const char* error = (*product)(dz.transposed(), own(h_after(rounds_on(1)), rows, r.H, r.Hp), own(g.dW_hh, 4 * r.H, r.H, r.H))) return error;
    if (!r.weight.threshold) return nullptr;
    return masked_copy({r.type, g.dW_hh, g.dW_hh, 4 * r.H, r.H, r.H, r.H, r.H, r.weight, r.weight_by_row, r.seed}, stream);
  }

  const char* biases() const {
    if (g.db) {
      partial_sums_kernel<S, C><<<grid(slices, 4 * r.H), THREADS, 0, stream>>>(in(g.backward.dz), rows, 4 * r.H, partial);
      sum({partial, slices, 4 * r.H, 4 * r.H, 1, 0, static_cast<S*>(g.db)});
    }
    bool any = false;
    for (int64_t k = 0; k < r.rounds; ++k) any = any || g.dbias[k];
    if (!any) return failed_launch("sums_kernel");
    partial_sums_kernel<S, C><<<grid(slices, r.round_width), THREADS, 0, stream>>>(in(g.backward.dround), rows, r.round_width, partial);
    for (int64_t k = 0; k < r.rounds; ++k) {
      const Round a(r, k);
      if (const int64_t n = uses(g.dbias, k))
        sum({partial + a.offset, slices, r.round_width, a.out, n, r.Xp + r.Hp, static_cast<S*>(g.dbias[k])});
    }
    return failed_launch("sums_kernel");
  }

  void sum(const Sums<S, C>& s) const {
    sums_kernel<S, C><<<unsigned((s.n + N * THREADS - 1) / (N * THREADS)), THREADS, 0, stream>>>(s);
  }

  const char* of_round(int64_t k) const {
    const Round a(r, k);
    const Matrix dz = own(in(g.backward.dround) + a.offset, rows, a.out, r.round_width);
    const Matrix operand = own(a.on_x ? h_after(k / 2) : x_after(k / 2 + 1), rows, a.in, a.in_padded);
    if (!r.rank) return weight(g.dQ, k, dz, operand, parts_Q[k % 2]);
    const Matrix hidden = own(u, rows, r.rank, r.rank), d_hidden = own(du, rows, r.rank, r.rank);
    if (g.dQ[k]) {
      if (const char* error = (*product)(operand, own(r.F[k], r.rank, a.in, a.in).transposed(), hidden)) return error;
      if (const char* error = weight(g.dQ, k, dz, hidden, parts_Q[k % 2])) return error;
    }
    if (!g.dF[k]) return nullptr;
    if (const char* error = (*product)(dz, own(r.A[k], a.out, r.rank, r.rank), d_hidden)) return error;
    return weight(g.dF, k, d_hidden, operand, parts_F[k % 2]);
  }

  // One use of a weight: its gradient, or a part that the last of several uses adds up.
  const char* weight(void* const* all, int64_t k, const Matrix& d, const Matrix& operand, C* parts) const {
    if (!all[k]) return nullptr;
    const int64_t first = first_use(all, k), n = uses(all, first), size = d.columns * operand.columns, part = (k - first) / 2;
    if (n == 1) return (*product)(d.transposed(), operand, own(all[k], d.columns, operand.columns, operand.columns));
    if (const char* error = (*product)(d.transposed(), operand, matrix(computing, parts + part * size, d.columns, operand.columns, operand.columns)))
      return error;
    if (part == n - 1) sum({parts, n, size, size, 1, 0, static_cast<S*>(all[k])});
    return nullptr;
  }
};

}  // namespace

int64_t gradients_bytes(const RecurrenceGradients& g) {
  Workspace w{nullptr};
  by_type(g.backward.forward.type, [&](auto s) { Gradients<decltype(s)>(g, w); });
  return w.used;
}

const char* gradients(const RecurrenceGradients& g, const Product& product, void* workspace, void* stream) {
  Workspace w{static_cast<char*>(workspace)};
  return by_type(g.backward.forward.type, [&](auto s) {
    return Gradients<decltype(s)>(g, w).run(product, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace fusedseq::cuda
