// The kernels that loop.cu launches between the matrix products of a forward step: the initial
// state, a round, the cell. Each reads a product's result and writes the next product's operand.
#pragma once
#include "cuda/recurrence/loop_step.cuh"
#include "math/cells.h"
#include "math/mogrifier.h"
#include "math/zoneout.h"

namespace fusedseq::cuda {

template <class S>
struct Begin {
  using C = typename Computing<S>::type;
  const S *h0, *c0;  // (B, H); c0 and c are null for a cell without c
  C *h, *c;          // (B, Hp)  out
  S* operand;        // (B, ld)  out: its part of h, after state dropout
  int64_t ld;
};

// Converts the initial state to the computing type, and drops it for the first product.
template <class S>
__global__ void __launch_bounds__(THREADS) begin_kernel(const LoopArguments a, const Begin<S> g) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  if (j >= a.Hp) return;
  Elements<C> h = {}, c;
  if (!resets(a, nth_step(a, 0), b)) load(g.h0 + b * a.H + j, a.H - j, h);
  store(g.h + b * a.Hp + j, PER_THREAD, h);
  if (g.c0) {
    load(g.c0 + b * a.H + j, a.H - j, c);
    store(g.c + b * a.Hp + j, PER_THREAD, c);
  }
  drop(a.state, a.seed, b, j, a.H, h);
  store(g.operand + b * g.ld + j, PER_THREAD, h);
}

template <class S>
struct RoundForward {
  using C = typename Computing<S>::type;
  int64_t width, padded;  // of the operand that the round scales
  const C* z;             // (B, padded)  product of the other operand with the round's weight
  const S* bias;          // (width,) or null
  const S* x;             // (B, width)  the operand before its first round, or null: then `before`
  const C* before;        // (B, padded)  the operand before this round
  Mask state;             // dropout of the operand, in its first round
  const int64_t* seed;
  const int64_t* lengths;  // (B,) or null: x counts as zero past the end of a sequence
  int64_t t;
  C* after;    // (B, padded)  out: the operand
  S* operand;  // (B, ld)  out: its part of [x | h]
  S* gate;     // (B, round_width)  out: the round's sigmoids, in its columns
  int64_t ld, round_width;
};

template <class S>
__global__ void __launch_bounds__(THREADS) round_kernel(const RoundForward<S> r) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  const int64_t n = r.width - j;
  if (j >= r.padded) return;
  Elements<C> s;
  Elements<C> v = {}, bias = {};
  load(r.z + b * r.padded + j, n, s);
  if (!r.x)
    load(r.before + b * r.padded + j, n, v);
  else if (!has_ended(r.lengths, r.t, b))
    load(r.x + b * r.width + j, n, v);
  drop(r.state, r.seed, b, j, r.width, v);
  if (r.bias) load(r.bias + j, n, bias);

  // sigmoid(0) is not 0, so the padding of the sigmoids is set to zero here.
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    s[i] = i < n ? sigmoid(s[i] + bias[i]) : C(0);
    v[i] = mogrify(s[i], v[i]);
  }
  store(r.gate + b * r.round_width + j, PER_THREAD, s);
  store(r.after + b * r.padded + j, PER_THREAD, v);
  store(r.operand + b * r.ld + j, PER_THREAD, v);
}

template <class S>
struct CellForward {
  using C = typename Computing<S>::type;
  int64_t t;
  C* z;                // (B, GATES H)  the product with W_hh, and where z_x is null with W_ih
  const C* z_x;        // (B, GATES H)  the product with W_ih, or null
  const S* b;          // (biases H,) or null
  const S* vectors;    // (V H,)  the cell's own parameters
  const C* c_before;   // (B, Hp)
  C* c_after;          // (B, Hp)  out
  C* h;                // (B, Hp)  in: the state, out: that before the next step
  S* gates;            // (B, SLOTS, Hp)  out
  S* y;                // (B, H)  out
  S* operand;          // (B, ld)  out: its part of h, after state dropout
  S *h_last, *c_last;  // (B, H)  out; null except in the last step
  int64_t ld;
};

// The pre-activations: both products and the bias.
template <class Cell, class S, class C>
__device__ void load_slots(const LoopArguments& a, const CellForward<S>& f, int64_t b, int64_t j,
                           Elements<C> (&z)[Cell::SLOTS]) {
  const int64_t n = a.H - j;
#pragma unroll
  for (int slot = 0; slot < Cell::SLOTS; ++slot) {
    const int gate = hidden_gate<Cell>(slot);
    Elements<C> bias = {};
    if (f.b) load(f.b + slot * a.H + j, n, bias);
    if (gate >= 0) {
      load(f.z + (b * Cell::GATES + gate) * a.H + j, n, z[slot]);
      if (f.z_x && slot < Cell::GATES) add(f.z_x + (b * Cell::GATES + slot) * a.H + j, n, z[slot]);
    } else {
      load(f.z_x + (b * Cell::GATES + slot) * a.H + j, n, z[slot]);
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      z[slot][i] += bias[i];
  }
}

// Stores the state after a step: the last one, or what the next step reads, which is zero where a
// sequence starts there.
template <class S, class C>
__device__ void store_state(const LoopArguments& a, const CellForward<S>& f, int64_t b, int64_t j,
                            Elements<C>& h, const Elements<C>& c) {
  if (f.h_last) {
    store(f.h_last + b * a.H + j, a.H - j, h);
    if (f.c_last) store(f.c_last + b * a.H + j, a.H - j, c);
  } else if (resets(a, step_after(a, f.t), b)) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i)
      h[i] = C(0);
  }
  store(f.h + b * a.Hp + j, PER_THREAD, h);
  drop(a.state, a.seed, b, j, a.H, h);
  store(f.operand + b * f.ld + j, PER_THREAD, h);
}

template <class S, class Cell>
__global__ void __launch_bounds__(THREADS)
    cell_kernel(const LoopArguments a, const CellForward<S> f) {
  using C = typename Computing<S>::type;
  const int64_t b = own_row();
  const int64_t j = own_column();
  const int64_t n = a.H - j;
  if (j >= a.Hp) return;
  Elements<C> z[Cell::SLOTS], h, update_h, update_c, y;
  Elements<C> c = {};
  UnitVectors<C, Cell::VECTORS + 1> p;
  load_slots<Cell>(a, f, b, j, z);
  load(f.h + b * a.Hp + j, PER_THREAD, h);
  if (Cell::HAS_C && !resets(a, f.t, b)) load(f.c_before + b * a.Hp + j, PER_THREAD, c);
#pragma unroll
  for (int v = 0; v < Cell::VECTORS; ++v)
    load(f.vectors + v * a.H + j, n, p.all[v]);
  zoneout(a, a.zoneout_h, f.t, b, j, update_h);
  zoneout(a, a.zoneout_c, f.t, b, j, update_c);

  // The cell, elementwise. Past a sequence's end its state does not change and y is 0.
  const bool alive = !has_ended(a.lengths, f.t, b);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    C slots[Cell::SLOTS];
#pragma unroll
    for (int slot = 0; slot < Cell::SLOTS; ++slot)
      slots[slot] = z[slot][i];
    C h_next = h[i], c_next = c[i];
    p.i = i;
    Cell::forward(slots, h_next, c_next, p);
    if (alive) {
      h[i] = mix(update_h[i], h_next, h[i]);
      c[i] = mix(update_c[i], c_next, c[i]);
    }
    y[i] = alive ? h[i] : C(0);
#pragma unroll
    for (int slot = 0; slot < Cell::SLOTS; ++slot)
      z[slot][i] = i < n ? slots[slot] : C(0);
  }

  // Outputs, what backward needs, and the operand of the next step's products.
#pragma unroll
  for (int slot = 0; slot < Cell::SLOTS; ++slot)
    store(f.gates + (b * Cell::SLOTS + slot) * a.Hp + j, PER_THREAD, z[slot]);
  store(f.y + b * a.H + j, n, y);
  if (Cell::HAS_C) store(f.c_after + b * a.Hp + j, PER_THREAD, c);
  store_state(a, f, b, j, h, c);
}

}  // namespace fusedseq::cuda
