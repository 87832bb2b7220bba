// The gradients of the weights of a recurrence, after the backward loop of either implementation:
// recomputes the operand of every step from the saved sigmoids, then one matrix product over all
// T * B rows for each use of a weight. Sums are always added in the same order.
//
// What limits the speed: the products, which are the vendor's; besides, the operands are written
// and read once. Timed with the loop on an H200: docs/gpu-kernels.md.
#include "cuda/recurrence/weight_gradients.h"

#include "cuda/recurrence/round.h"
#include "cuda/recurrence/thread_elements.cuh"
#include "cuda/recurrence/weight_preparation.h"
#include "cuda/recurrence/workspace.h"
#include "math/cells.h"

namespace fusedseq::cuda {
namespace {

constexpr int64_t SLICE = 64;  // rows that a thread of partial_sums_kernel adds

template <class S>
struct Operands {
  int64_t steps, B, H;  // with reverse, lengths and starts: see math/step_order.h
  bool reverse;
  const int64_t* lengths;
  const uint8_t* starts;
  int64_t width, padded;
  // The operand before any round: x, which counts as zero past a sequence's end, or null for the
  // state before each step.
  const S* x;       // (T, B, width)
  const S *h0, *y;  // (B, width), (T, B, width)
  Mask state;       // dropout of the state
  const int64_t* seed;
  const S* gates;               // (T, B, round_width)  sigmoids, from the first round on it on
  int64_t round_width, period;  // a row, and from a round on this operand to the next one
  int count;                    // rounds on this operand
  S* raw;                       // (T, B, padded)  out: before any round; or null
  S* out;                       // (count, T, B, padded)  out: after each round
  int64_t size;                 // T B padded
};

// Applies the rounds to an operand, elementwise, and stores the result of each.
template <class S>
__global__ void __launch_bounds__(THREADS) operands_kernel(const Operands<S> o) {
  using C = typename Computing<S>::type;
  const int64_t row = own_row();
  const int64_t j = own_column();
  const int64_t n = o.width - j;
  const int64_t t = row / o.B;
  const int64_t b = row % o.B;
  if (j >= o.padded) return;
  Elements<C> v = {};
  if (o.x) {
    if (!has_ended(o.lengths, t, b)) load(o.x + row * o.width + j, n, v);
  } else if (const S* before = h_before(o, o.h0, o.y, t, b)) {
    load(before + j, n, v);
    drop(o.state, o.seed, b, j, o.width, v);
  }
  if (o.raw) store(o.raw + row * o.padded + j, PER_THREAD, v);
  for (int k = 0; k < o.count; ++k) {
    mogrify_all(o.gates + row * o.round_width + k * o.period + j, 0, 1, v);
    store(o.out + k * o.size + row * o.padded + j, PER_THREAD, v);
  }
}

// Column sums, first step: sums of SLICE rows each.
template <class S, class C>
struct PartialSums {
  const S* in;      // (rows, stride), of which the first `width` columns are added
  const S* factor;  // (rows, factor_stride), by which they are multiplied elementwise; or null
  int64_t rows, width, stride, factor_stride;
  C* partial;  // (slices, width)  out
};
template <class S, class C>
__global__ void __launch_bounds__(THREADS) partial_sums_kernel(const PartialSums<S, C> s) {
  const int64_t slice = own_row();
  const int64_t j = own_column();
  const int64_t end = slice * SLICE + SLICE < s.rows ? slice * SLICE + SLICE : s.rows;
  const int64_t n = s.width - j;
  if (j >= s.width) return;
  Elements<C> sum = {};
  for (int64_t row = slice * SLICE; row < end; ++row) {
    Elements<C> v;
    load(s.in + row * s.stride + j, n, v);
    if (s.factor) {
      Elements<C> factor;
      load(s.factor + row * s.factor_stride + j, n, factor);
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i)
        v[i] *= factor[i];
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      sum[i] += v[i];
  }
  store(s.partial + slice * s.width + j, n, sum);
}

// Column sums, second step: over the slices, and over the uses of a shared bias.
template <class S, class C>
struct Sums {
  const C* partial;  // (slices, stride)
  int64_t slices, stride;
  int64_t n;             // columns
  int64_t uses, period;  // how many, and from one to the next in a row
  S* out;                // (n,)
};
template <class S, class C>
__global__ void __launch_bounds__(THREADS) sums_kernel(const Sums<S, C> s) {
  const int64_t j = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * PER_THREAD;
  if (j >= s.n) return;
  Elements<C> sum = {};
  for (int64_t use = 0; use < s.uses; ++use)
    for (int64_t slice = 0; slice < s.slices; ++slice) {
      Elements<C> v;
      load(s.partial + slice * s.stride + use * s.period + j, s.n - j, v);
#pragma unroll
      for (int i = 0; i < PER_THREAD; ++i)
        sum[i] += v[i];
    }
  store(s.out + j, s.n - j, sum);
}

template <class S>
class Gradients {
  using C = typename Computing<S>::type;

 public:
  static constexpr Type computing = type_of<C>();

  Gradients(const RecurrenceGradients& g, Workspace& w)
      : g(g),
        r(g.backward.forward),
        rows(r.steps * r.B),
        slices((rows + SLICE - 1) / SLICE),
        gates_H(gates_of(r.cell) * r.H),
        slots_H(slots_of(r.cell) * r.H),
        terms_H(terms_of(r.cell) * r.H) {
    h = w.take<S>((1 + rounds_on(1)) * rows * r.Hp);
    x = w.take<S>((rounds_on(0) + masks_x()) * rows * r.Xp);
    partial = w.take<C>(slices * larger(larger(slots_H, terms_H), r.round_width));
    u = w.take<S>(r.rank ? rows * r.rank : 0);
    du = w.take<S>(r.rank ? rows * r.rank : 0);
    // Rounds 0 and 1 are the first uses of a shared weight.
    for (int64_t k = 0; k < r.rounds && k < 2; ++k) {
      const Round a(r, k);
      parts_Q[k] = w.take<C>(shared_uses(g.dQ, k) * a.out * (r.rank ? r.rank : a.in));
      parts_F[k] = w.take<C>(shared_uses(g.dF, k) * r.rank * a.in);
    }
  }

  const char* run(const Product& product_, cudaStream_t stream_) {
    product = &product_;
    stream = stream_;
    const int64_t widest =
        larger(larger(slots_H, terms_H), larger(larger(r.Xp, r.Hp), r.round_width));
    if (const char* error = beyond_grid(rows, widest)) return error;
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
  const int64_t rows, slices, gates_H, slots_H, terms_H;
  S* h;        // (1 + rounds on h, T, B, Hp)  before its first round, and after each
  S* x;        // (rounds on x, T, B, Xp)  after each of its rounds; or x itself, see masks_x
  C* partial;  // (slices, .)  column sums
  S *u, *du;   // (T, B, rank)  with a low rank: the operand times F, and the gradient of it
  C *parts_Q[2], *parts_F[2];  // (uses, .)  gradients of a shared weight of the rounds on x, on h
  const Product* product;
  cudaStream_t stream;

  static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
  static const S* in(const void* p) { return static_cast<const S*>(p); }
  int64_t rounds_on(int side) const { return (r.rounds + 1 - side) / 2; }  // 0: x, 1: h

  // Whether the gradient of W_ih needs a copy of x, with zeros past the ends of the sequences: x
  // may be NaN where dz is 0. With rounds, the recomputed operands have zeros there already.
  bool masks_x() const { return r.lengths && !r.rounds && g.dW_ih; }

  // The operands after n of their rounds.
  const S* h_after(int64_t n) const { return h + n * rows * r.Hp; }
  const S* x_after(int64_t n) const { return x + (n - 1) * rows * r.Xp; }

  // The number of rounds whose gradients are added to d[k]. 0 if it is not needed, or if an earlier
  // round has the same.
  int64_t uses(void* const* d, int64_t k) const {
    if (!d[k] || first_use(d, k) < k) return 0;
    int64_t n = 0;
    for (int64_t j = k; j < r.rounds; j += 2)
      n += d[j] == d[k];
    return n;
  }
  int64_t shared_uses(void* const* d, int64_t k) const { return uses(d, k) > 1 ? uses(d, k) : 0; }

  const char* operands() const {
    Operands<S> o{};
    o.steps = r.steps;
    o.B = r.B;
    o.H = r.H;
    o.reverse = r.reverse;
    o.lengths = r.lengths;
    o.starts = r.starts;
    o.seed = r.seed;
    o.round_width = r.round_width;
    o.period = r.Xp + r.Hp;
    if (g.dW_hh || r.rounds) {
      o.width = r.H;
      o.padded = r.Hp;
      o.h0 = in(r.h0);
      o.y = in(r.y);
      o.state = r.state;
      o.gates = in(r.round_gates) + r.Xp;
      o.count = int(rounds_on(1));
      o.size = rows * r.Hp;
      o.raw = h;
      o.out = h + o.size;
      operands_kernel<S><<<grid(rows, r.Hp), THREADS, 0, stream>>>(o);
    }
    if (r.rounds || masks_x()) {
      o.width = r.X;
      o.padded = r.Xp;
      o.x = in(r.x);
      o.gates = in(r.round_gates);
      o.count = int(rounds_on(0));
      o.size = rows * r.Xp;
      o.raw = masks_x() ? x : nullptr;
      o.out = x;
      operands_kernel<S><<<grid(rows, r.Xp), THREADS, 0, stream>>>(o);
    }
    return failed_launch("operands_kernel");
  }

  // A matrix of the tensors' dtype.
  Matrix own(const void* p, int64_t m, int64_t n, int64_t stride) const {
    return matrix(r.type, p, m, n, stride);
  }

  // The gradients of W_ih and W_hh, and, without rounds, of x.
  const char* of_gates() const {
    const Matrix dz = own(g.backward.dz, rows, gates_H, slots_H);  // of the slots that read x
    if (g.dx && !r.rounds) {
      const Matrix W_ih = own(r.W_ih, gates_H, r.X, r.X);
      if (const char* error = (*product)(dz, W_ih, own(g.dx, rows, r.X, r.X))) return error;
    }
    if (g.dW_ih) {
      const Matrix last_x = r.rounds    ? own(x_after(rounds_on(0)), rows, r.X, r.Xp)
                            : masks_x() ? own(x, rows, r.X, r.Xp)
                                        : own(r.x, rows, r.X, r.X);
      const Matrix dW_ih = own(g.dW_ih, gates_H, r.X, r.X);
      if (const char* error = (*product)(dz.transposed(), last_x, dW_ih)) return error;
    }
    if (!g.dW_hh) return nullptr;
    const Matrix last_h = own(h_after(rounds_on(1)), rows, r.H, r.Hp);
    const char* error = nullptr;
    with_cell(r.cell, r.cap_input_gate,
              [&](auto cell) { error = of_blocks<decltype(cell)>(last_h); });
    if (error) return error;

    // That was the gradient of the dropped weight: through weight drop, in place.
    if (!r.weight.threshold) return nullptr;
    MaskedCopy copy{};
    copy.type = r.type;
    copy.from = copy.to = g.dW_hh;
    copy.rows = gates_H;
    copy.columns = copy.padded = copy.from_stride = copy.to_stride = r.H;
    copy.mask = r.weight;
    copy.mask_rows = r.variational;
    copy.seed = r.seed;
    return masked_copy(copy, stream);
  }

  // The gradients of W_hh, for each block of its gates.
  template <class Cell>
  const char* of_blocks(const Matrix& h) const {
    constexpr int BLOCKS = sizeof Cell::BLOCKS / sizeof(Block);
    for (int i = 0; i < BLOCKS; ++i)
      if (const char* error = of_block(Cell::BLOCKS[i], h)) return error;
    return nullptr;
  }
  const char* of_block(const Block& block, const Matrix& h) const {
    const Matrix dz = own(in(g.backward.dz) + block.slot * r.H, rows, block.gates * r.H, slots_H);
    const S* dW = in(g.dW_hh) + block.gate * r.H * r.H;
    return (*product)(dz.transposed(), h, own(dW, block.gates * r.H, r.H, r.H));
  }

  // The gradients of the biases and of the cell's own parameters: column sums of dz, of the terms
  // and of dround.
  const char* biases() const {
    with_cell(r.cell, r.cap_input_gate, [&](auto cell) {
      if constexpr (decltype(cell)::WHOLE_ROWS) {
        layer_norm<decltype(cell)>();
      } else {
        if (g.db) column_sums(in(g.backward.dz), slots_H, slots_H, g.db);
        if (g.dvectors) column_sums(in(g.backward.terms), terms_H, terms_H, g.dvectors);
      }
    });
    bool any = false;
    for (int64_t k = 0; k < r.rounds; ++k)
      any = any || g.dbias[k];
    if (!any) return failed_launch("sums_kernel");

    const PartialSums<S, C> s{in(g.backward.dround), nullptr, rows,   r.round_width,
                              r.round_width,         0,       partial};
    partial_sums_kernel<S, C><<<grid(slices, r.round_width), THREADS, 0, stream>>>(s);
    for (int64_t k = 0; k < r.rounds; ++k) {
      const Round a(r, k);
      if (const int64_t n = uses(g.dbias, k))
        sum({partial + a.offset, slices, r.round_width, a.out, n, r.Xp + r.Hp,
             static_cast<S*>(g.dbias[k])});
    }
    return failed_launch("sums_kernel");
  }

  // With layer normalization the terms are the gradients of the pre-activations, which are those of
  // b, then of an LSTM those of gamma_c and of beta_c. The gradients of gamma_ih and gamma_hh are
  // the first ones times what the gates' normalized products were.
  template <class Cell>
  void layer_norm() const {
    const S* terms = in(g.backward.terms);
    const int64_t of_b = biases_of(r.cell) * r.H;
    if (g.db) column_sums(terms, of_b, terms_H, g.db);
    if (!g.dvectors) return;
    S* d = static_cast<S*>(g.dvectors);
    for (int slot = 0; slot < Cell::SLOTS; ++slot)
      column_sums(terms + Cell::term(slot) * r.H, r.H, terms_H, d + slot * r.H,
                  in(r.gates) + slot * r.Hp, Cell::SLOTS * r.Hp);
    if (terms_H > of_b) column_sums(terms + of_b, terms_H - of_b, terms_H, d + Cell::SLOTS * r.H);
  }

  // out (width,) = the sums of the columns of d (rows, width), whose rows are `stride` elements
  // apart, or of d times factor
  void column_sums(const S* d, int64_t width, int64_t stride, void* out, const S* factor = nullptr,
                   int64_t factor_stride = 0) const {
    const dim3 blocks = grid(slices, width);
    const PartialSums<S, C> s{d, factor, rows, width, stride, factor_stride, partial};
    partial_sums_kernel<S, C><<<blocks, THREADS, 0, stream>>>(s);
    sum({partial, slices, width, width, 1, 0, static_cast<S*>(out)});
  }
  void sum(const Sums<S, C>& s) const {
    constexpr int PER_BLOCK = PER_THREAD * THREADS;
    const auto blocks = unsigned((s.n + PER_BLOCK - 1) / PER_BLOCK);
    sums_kernel<S, C><<<blocks, THREADS, 0, stream>>>(s);
  }

  // The gradients of round k's weight, or of its two factors.
  const char* of_round(int64_t k) const {
    const Round a(r, k);
    const Matrix dz = own(in(g.backward.dround) + a.offset, rows, a.out, r.round_width);
    const Matrix operand =
        own(a.on_x ? h_after(k / 2) : x_after(k / 2 + 1), rows, a.in, a.in_padded);
    if (!r.rank) return weight(g.dQ, k, dz, operand, parts_Q[k % 2]);

    // z = (operand F^T) A^T: the gradient of A needs the product in brackets, that of F its
    // gradient.
    const Matrix hidden = own(u, rows, r.rank, r.rank);
    const Matrix d_hidden = own(du, rows, r.rank, r.rank);
    const Matrix A = own(r.A[k], a.out, r.rank, r.rank);
    const Matrix F = own(r.F[k], r.rank, a.in, a.in);
    if (g.dQ[k]) {
      if (const char* error = (*product)(operand, F.transposed(), hidden)) return error;
      if (const char* error = weight(g.dQ, k, dz, hidden, parts_Q[k % 2])) return error;
    }
    if (!g.dF[k]) return nullptr;
    if (const char* error = (*product)(dz, A, d_hidden)) return error;
    return weight(g.dF, k, d_hidden, operand, parts_F[k % 2]);
  }

  // The gradient d^T operand of round k's weight. If rounds share the weight, each computes its
  // part, and the last one adds the parts up.
  const char* weight(void* const* all, int64_t k, const Matrix& d, const Matrix& operand,
                     C* parts) const {
    if (!all[k]) return nullptr;
    const int64_t first = first_use(all, k);
    const int64_t n = uses(all, first);
    const int64_t m = d.columns;
    const int64_t size = m * operand.columns;
    const int64_t part = (k - first) / 2;
    if (n == 1)
      return (*product)(d.transposed(), operand, own(all[k], m, operand.columns, operand.columns));
    const Matrix out = matrix(computing, parts + part * size, m, operand.columns, operand.columns);
    if (const char* error = (*product)(d.transposed(), operand, out)) return error;
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

const char* gradients(const RecurrenceGradients& g, const Product& product, void* workspace,
                      void* stream) {
  Workspace w{static_cast<char*>(workspace)};
  return by_type(g.backward.forward.type, [&](auto s) {
    return Gradients<decltype(s)>(g, w).run(product, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace fusedseq::cuda
