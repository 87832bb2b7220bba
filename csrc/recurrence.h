// What lstm.cpp and mogrifier_lstm.cpp share: from tensors to the kernels' arguments and back.
#pragma once
#include <cstring>

#include "dropout.h"

namespace fusedseq {

// The inputs of a recurrence, as the operators take them.
struct RecurrenceInputs {
  const char* op;
  Tensor x, W_ih, W_hh;
  std::optional<Tensor> b;
  Tensor h0, c0;
  std::optional<Tensor> lengths;
  // The Mogrifier's. Q (n, X, H), or its factors (n, X, rank) and (n, rank, H); R (n, H, X) likewise; n is the number
  // of rounds on x (on h), or 1: one weight for all of them.
  std::optional<Tensor> Q, Q_factor, R, R_factor, Q_bias, R_bias, seed;
  int64_t rounds = 0;
  bool cap_input_gate = false, training = true;
  double state_dropout = 0, zoneout_h = 0, zoneout_c = 0, weight_drop = 0;
  bool variational = false;
};

// The keys of the masks: pyext/fusedseq/reference/mogrifier_lstm.py.
enum Key : uint64_t { STATE = 1, ZONEOUT_H, ZONEOUT_C, WEIGHT };

// W_hh under the weight drop, or its gradient: the operator weight_drop under the recurrence's key for it.
inline Tensor dropped_weight(const RecurrenceInputs& i, const Tensor& W) {
  if (!i.training || i.weight_drop == 0) return W;
  require(bool(i.seed), i.op, "a weight drop needs a seed");
  return drop_cpu({i.op, dense(W), i.weight_drop, *i.seed, 1, W.size(0), W.size(1), i.variational, WEIGHT});
}

// The kernels' arguments, with the tensors that own their memory, in the computing type: T.
template <class T> struct RecurrenceArguments {
  static constexpr ScalarType type = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  std::vector<Tensor> owned;
  std::vector<const T*> A, F, bias;
  cpu::Recurrence<T> r{};

  const T* in(const Tensor& t) {
    owned.push_back(dense(t, type));
    return static_cast<const T*>(owned.back().const_data_ptr());
  }
  T* out(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }

  explicit RecurrenceArguments(const RecurrenceInputs& i) {
    const char* op = i.op;
    require(i.x.dim() == 3 && i.h0.dim() == 2, op, "x must be (T, B, X) and h0 (B, H)");
    r.steps = i.x.size(0), r.B = i.x.size(1), r.X = i.x.size(2), r.H = i.h0.size(1), r.rounds = i.rounds;
    require(r.steps > 0 && r.X > 0 && r.H > 0, op, "T, X and H must be at least 1");
    require_shape(op, "h0", i.h0, {r.B, r.H});
    require_shape(op, "c0", i.c0, {r.B, r.H});
    require_shape(op, "W_ih", i.W_ih, {4 * r.H, r.X});
    require_shape(op, "W_hh", i.W_hh, {4 * r.H, r.H});
    if (i.b) require_shape(op, "b", *i.b, {4 * r.H});
    if (i.lengths) {
      require_shape(op, "lengths", *i.lengths, {r.B});
      require(i.lengths->scalar_type() == ScalarType::Long, op, "lengths must be int64");
      owned.push_back(dense(*i.lengths));
      r.lengths = static_cast<const int64_t*>(owned.back().const_data_ptr());
    }
    r.x = in(i.x), r.W_ih = in(i.W_ih), r.W_hh = in(dropped_weight(i, i.W_hh)), r.b = i.b ? in(*i.b) : nullptr;
    r.h0 = in(i.h0), r.c0 = in(i.c0);
    r.cap_input_gate = i.cap_input_gate, r.training = i.training;
    if (i.seed) {
      if (i.training && i.state_dropout > 0) r.state = mask(*i.seed, i.state_dropout, STATE);
      if (i.zoneout_h > 0) r.zoneout_h = mask(*i.seed, i.zoneout_h, ZONEOUT_H), r.zoneout_h_p = i.zoneout_h;
      if (i.zoneout_c > 0) r.zoneout_c = mask(*i.seed, i.zoneout_c, ZONEOUT_C), r.zoneout_c_p = i.zoneout_c;
    }
    require(i.rounds >= 0 && i.rounds < 64, op, "rounds must be in [0, 64)");
    if (i.rounds > 0) weights(op, i.Q, i.Q_factor, i.Q_bias, 0, r.X, r.H);
    if (i.rounds > 1) weights(op, i.R, i.R_factor, i.R_bias, 1, r.H, r.X);
    r.A = A.data(), r.F = F.data(), r.bias = bias.data();
  }

 private:
  void weights(const char* op, const std::optional<Tensor>& W, const std::optional<Tensor>& factor,
               const std::optional<Tensor>& b, int64_t first, int64_t out, int64_t in_) {
    A.resize(r.rounds), F.resize(r.rounds), bias.resize(r.rounds);
    const int64_t uses = (r.rounds + 1 - first) / 2;
    require(W && W->dim() == 3, op, "a round's weights are missing");
    const int64_t n = W->size(0);
    require(n == uses || n == 1, op, "there must be a weight for each round, or one");
    if (factor) r.rank = factor->size(1);
    require_shape(op, first ? "R" : "Q", *W, {n, out, factor ? r.rank : in_});
    if (factor) require_shape(op, first ? "R's second factor" : "Q's second factor", *factor, {n, r.rank, in_});
    if (b) require_shape(op, first ? "R_bias" : "Q_bias", *b, {n, out});
    const T* w = in(*W);
    const T* f = factor ? in(*factor) : nullptr;
    const T* v = b ? in(*b) : nullptr;
    for (int64_t k = first; k < r.rounds; k += 2) {
      const int64_t j = k / 2 % n;
      A[k] = w + j * out * (factor ? r.rank : in_);
      F[k] = f ? f + j * r.rank * in_ : nullptr;
      bias[k] = v ? v + j * out : nullptr;
    }
  }
};

// Few multiply-adds a step are not worth a second thread's waiting.
template <class T> int recurrence_threads(const cpu::Recurrence<T>& r) {
  const int64_t work = r.B * 4 * r.H * (r.H + (r.rounds ? r.X : 0));
  const int64_t useful = work / 20000 + 1;
  return int(useful < threads() ? useful : threads());
}

inline void run(const cpu::Recurrence<float>& r) { cpu::kernels().recurrence_f32(r, parallel, recurrence_threads(r)); }
inline void run(const cpu::Recurrence<double>& r) { cpu::kernels().recurrence_f64(r, parallel, recurrence_threads(r)); }
inline void run(const cpu::RecurrenceBackward<float>& r) {
  cpu::kernels().recurrence_backward_f32(r, parallel, recurrence_threads(r.forward));
}
inline void run(const cpu::RecurrenceBackward<double>& r) {
  cpu::kernels().recurrence_backward_f64(r, parallel, recurrence_threads(r.forward));
}

// Zeroes what pads the rows of a saved tensor: `width` of each `padded` elements are written by the kernel.
template <class T> void zero_padding(const Tensor& t, int64_t width, int64_t padded) {
  T* p = static_cast<T*>(t.mutable_data_ptr());
  for (int64_t row = 0; padded > width && row < t.numel() / padded; ++row)
    std::memset(p + row * padded + width, 0, (padded - width) * sizeof(T));
}

// Saved for backward, whatever the operator: what the kernels call gates, cells, round_gates and factors.
struct Saved { Tensor gates, cells, round_gates, factors; };

template <class T> std::tuple<Tensor, Tensor, Tensor, Saved> forward(const RecurrenceInputs& i) {
  RecurrenceArguments<T> a(i);
  auto& r = a.r;
  constexpr ScalarType type = RecurrenceArguments<T>::type;
  const int64_t Hp = cpu::padded(r.H), Xp = cpu::padded(r.X), width = (r.rounds + 1) / 2 * Xp + r.rounds / 2 * Hp;
  Tensor y = output(i.x, {r.steps, r.B, r.H}, type), h = output(i.x, {r.B, r.H}, type), c = output(i.x, {r.B, r.H}, type);
  Saved s{output(i.x, {r.steps, r.B, 4, Hp}, type), output(i.x, {r.steps, r.B, Hp}, type),
          output(i.x, {r.steps, r.B, width}, type), output(i.x, {r.rank ? r.rounds : 0, r.steps, r.B, cpu::padded(r.rank)}, type)};
  zero_padding<T>(s.gates, r.H, Hp), zero_padding<T>(s.cells, r.H, Hp);
  if (r.rank) zero_padding<T>(s.factors, r.rank, cpu::padded(r.rank));
  for (int64_t row = 0; row < r.steps * r.B && width > 0; ++row)
    for (int64_t k = 0, at = row * width; k < r.rounds; at += k % 2 ? Hp : Xp, ++k) {
      const int64_t used = k % 2 ? r.H : r.X;
      std::memset(a.out(s.round_gates) + at + used, 0, ((k % 2 ? Hp : Xp) - used) * sizeof(T));
    }
  r.y = a.out(y), r.h = a.out(h), r.c = a.out(c);
  r.gates = a.out(s.gates), r.cells = a.out(s.cells), r.round_gates = a.out(s.round_gates), r.factors = a.out(s.factors);
  if (r.B > 0) run(r);
  const ScalarType out = i.x.scalar_type();
  return {as_type(y, out), as_type(h, out), as_type(c, out), s};
}

// The gradients that a backward returns; one that is not needed is an empty tensor.
enum Needs { X = 1, W_IH = 2, W_HH = 4, BIAS = 8, Q_ALL = 16, R_ALL = 32 };
struct Gradients { Tensor dx, dW_ih, dW_hh, db, dh0, dc0, dQ, dQ_factor, dR, dR_factor, dQ_bias, dR_bias; };

template <class T>
Gradients backward(const RecurrenceInputs& i, const Tensor& dy, const Tensor& dh, const Tensor& dc, const Tensor& y,
                   const Saved& s, int64_t needs) {
  RecurrenceArguments<T> a(i);
  auto& r = a.r;
  constexpr ScalarType type = RecurrenceArguments<T>::type;
  require_shape(i.op, "dy", dy, {r.steps, r.B, r.H});
  require_shape(i.op, "dh", dh, {r.B, r.H});
  require_shape(i.op, "dc", dc, {r.B, r.H});
  require_shape(i.op, "y", y, {r.steps, r.B, r.H});
  require_shape(i.op, "gates", s.gates, {r.steps, r.B, 4, cpu::padded(r.H)});
  r.y = const_cast<T*>(a.in(y)), r.gates = const_cast<T*>(a.in(s.gates)), r.cells = const_cast<T*>(a.in(s.cells));
  r.round_gates = const_cast<T*>(a.in(s.round_gates)), r.factors = const_cast<T*>(a.in(s.factors));

  const auto like = [&](const std::optional<Tensor>& t, bool needed) {
    if (!t || !needed) return output(i.x, {0}, type);
    return output(i.x, Sizes(t->sizes().begin(), t->sizes().end()), type);
  };
  const bool on_q = needs & Q_ALL, on_r = needs & R_ALL;
  Gradients g{like(i.x, needs & X), like(i.W_ih, needs & W_IH), like(i.W_hh, needs & W_HH), like(i.b, needs & BIAS),
              like(i.h0, true), like(i.c0, true), like(i.Q, on_q), like(i.Q_factor, on_q), like(i.R, on_r),
              like(i.R_factor, on_r), like(i.Q_bias, on_q), like(i.R_bias, on_r)};
  const auto pointer = [&](const Tensor& t, bool needed) { return needed ? a.out(t) : nullptr; };
  std::vector<T*> dA(r.rounds), dF(r.rounds), dbias(r.rounds);
  for (int64_t k = 0; k < r.rounds; ++k) {
    const bool on_h = k % 2;
    if (!(on_h ? on_r : on_q)) continue;
    const Tensor &W = on_h ? *i.R : *i.Q, &dW = on_h ? g.dR : g.dQ;
    const int64_t j = k / 2 % W.size(0);
    dA[k] = a.out(dW) + j * W.size(1) * W.size(2);
    if (r.rank) dF[k] = a.out(on_h ? g.dR_factor : g.dQ_factor) + j * r.rank * (on_h ? r.X : r.H);
    if (r.bias[k]) dbias[k] = a.out(on_h ? g.dR_bias : g.dQ_bias) + j * (on_h ? r.H : r.X);
  }
  cpu::RecurrenceBackward<T> b{r, a.in(dy), a.in(dh), a.in(dc), pointer(g.dx, needs & X), a.out(g.dh0), a.out(g.dc0),
                               pointer(g.dW_ih, needs & W_IH), pointer(g.dW_hh, needs & W_HH),
                               pointer(g.db, (needs & BIAS) && i.b), dA.data(), dF.data(), dbias.data()};
  run(b);
  const ScalarType out = i.x.scalar_type();
  for (Tensor* t : {&g.dx, &g.dW_ih, &g.dW_hh, &g.db, &g.dh0, &g.dc0, &g.dQ, &g.dQ_factor, &g.dR, &g.dR_factor, &g.dQ_bias, &g.dR_bias})
    *t = as_type(*t, out);
  if (needs & W_HH) g.dW_hh = dropped_weight(i, g.dW_hh);
  return g;
}

inline bool is_double(const Tensor& x) { return kernel_type("recurrence", x) == cpu::Type::f64; }

}  // namespace fusedseq
