// What lstm.cpp and mogrifier_lstm.cpp share on the CPU: from tensors to the kernels' arguments and back.
#pragma once
#include <cstring>

#include "dropout.h"
#include "recurrence_inputs.h"

namespace fusedseq {

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
    require_inputs(i);
    r.steps = i.x.size(0), r.B = i.x.size(1), r.X = i.x.size(2), r.H = i.h0.size(1), r.rounds = i.rounds, r.rank = i.rank();
    if (i.lengths) {
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
    A.resize(r.rounds), F.resize(r.rounds), bias.resize(r.rounds);
    for (const RoundsOn& side : {rounds_on_x(i), rounds_on_h(i)})
      if (side.uses > 0) weights(side);
    r.A = A.data(), r.F = F.data(), r.bias = bias.data();
  }

 private:
  void weights(const RoundsOn& side) {
    const T* w = in(*side.W);
    const T* f = side.factor ? in(*side.factor) : nullptr;
    const T* v = side.bias ? in(*side.bias) : nullptr;
    for (int64_t k = side.first; k < r.rounds; k += 2) {
      const int64_t j = side.index(k);
      A[k] = w + j * side.out * (f ? r.rank : side.in);
      F[k] = f ? f + j * r.rank * side.in : nullptr;
      bias[k] = v ? v + j * side.out : nullptr;
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

template <class T> Outputs forward(const RecurrenceInputs& i) {
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

template <class T>
Gradients backward(const RecurrenceInputs& i, const Tensor& dy, const Tensor& dh, const Tensor& dc, const Tensor& y,
                   const Saved& s, int64_t needs) {
  RecurrenceArguments<T> a(i);
  auto& r = a.r;
  constexpr ScalarType type = RecurrenceArguments<T>::type;
  require_upstream(i, dy, dh, dc, y, s);
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

inline bool is_double(const RecurrenceInputs& i) { return kernel_type(i.op, i.x) == cpu::Type::f64; }
inline Outputs forward_cpu(const RecurrenceInputs& i) { return is_double(i) ? forward<double>(i) : forward<float>(i); }
inline Gradients backward_cpu(const RecurrenceInputs& i, const Tensor& dy, const Tensor& dh, const Tensor& dc, const Tensor& y,
                              const Saved& s, int64_t needs) {
  return is_double(i) ? backward<double>(i, dy, dh, dc, y, s, needs) : backward<float>(i, dy, dh, dc, y, s, needs);
}

}  // namespace fusedseq
