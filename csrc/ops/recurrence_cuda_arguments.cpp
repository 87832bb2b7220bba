#include "ops/recurrence_cuda_arguments.h"

#ifdef FUSEDSEQ_CUDA
#include "cuda/recurrence/lost_wait.h"
#include "cuda/recurrence/weight_preparation.h"
#include "ops/recurrence_checks.h"
#include "ops/vendor_product.h"

namespace fusedseq::on_cuda {

using torch::stable::new_empty;

namespace {

// Returns i, whose x has been found to be on a GPU. After a kernel that has ended itself no CUDA
// call succeeds: its reason is raised here, before any other call would raise the error that
// follows from it.
const RecurrenceInputs& of_living_context(const RecurrenceInputs& i) {
  require_cuda_device(i.op, "x", i.x, "x", i.x);
  require_launched(i.op, cuda::lost_wait());
  return i;
}

// The address of an element of a tensor; null if p is.
const void* element(const void* p, int64_t index, const RecurrenceInputs& i) {
  return p ? static_cast<const char*>(p) + index * int64_t(i.x.element_size()) : nullptr;
}

// The weights (or gradients of weights) of the rounds on one side, whose first dimension is the
// round's index on that side; and where to store each round's address, by number of the round.
struct RoundTensors {
  const void *weight, *factor, *bias;
};
struct RoundAddresses {
  const void **weight, **factor, **bias;  // (MAX_ROUNDS,)
};
void store_round_addresses(const RecurrenceInputs& i, const RoundsOn& side, const RoundTensors& t,
                           const RoundAddresses& to) {
  const int64_t rank = i.rank();
  for (int64_t k = side.first; k < i.rounds; k += 2) {
    const int64_t j = side.index(k);
    to.weight[k] = element(t.weight, j * side.out * (rank ? rank : side.in), i);
    to.factor[k] = element(t.factor, j * rank * side.in, i);
    to.bias[k] = element(t.bias, j * side.out, i);
  }
}

ScalarType computing_type(const RecurrenceInputs& i) {
  return i.x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

}  // namespace

RecurrenceCall::RecurrenceCall(const RecurrenceInputs& i)
    : i(of_living_context(i)),
      device(i.x.device()),
      guard(i.x.get_device_index()),
      stream(current_stream(i.x.get_device_index())),
      product(vendor_product(device)) {}

cuda::Mask mask_of(const RecurrenceInputs& i, double p, MaskStream stream) {
  if (p == 0) return {};
  require(bool(i.seed), i.op, "seed must be one int64 where a mask is drawn, got None");
  return {stream, threshold(p), p, scale(p)};
}

cuda::Recurrence arguments(RecurrenceCall& call) {
  const RecurrenceInputs& i = call.i;
  require_inputs(i);
  cuda::Recurrence r{};
  r.type = cuda_type(i.op, "x", i.x);
  r.cell = i.cell;
  r.reverse = i.reverse;
  r.steps = i.x.size(0);
  r.B = i.x.size(1);
  r.X = i.x.size(2);
  r.H = i.h0.size(1);
  r.rounds = i.rounds;
  r.rank = i.rank();
  r.Xp = cpu::padded(r.X);
  r.Hp = cpu::padded(r.H);
  r.round_width = (r.rounds + 1) / 2 * r.Xp + r.rounds / 2 * r.Hp;
  r.cap_input_gate = i.cap_input_gate;
  r.training = i.training;

  r.seed = call.integers("seed", i.seed);
  r.state = mask_of(i, i.training ? i.state_dropout : 0, MaskStream::state);
  r.zoneout_h = mask_of(i, i.zoneout_h, MaskStream::zoneout_h);
  r.zoneout_c = mask_of(i, i.zoneout_c, MaskStream::zoneout_c);
  r.weight = mask_of(i, i.training ? i.weight_drop : 0, MaskStream::weight);
  r.variational = i.variational;

  r.lengths = call.integers("lengths", i.lengths);
  if (i.starts)
    r.starts = static_cast<const uint8_t*>(call.in("starts", *i.starts, ScalarType::Bool));
  r.x = call.in("x", i.x);
  r.W_ih = call.in("W_ih", i.W_ih);
  r.W_hh = call.in("W_hh", i.W_hh);
  r.b = call.in("b", i.b);
  r.h0 = call.in("h0", i.h0);
  r.c0 = has_c(i.cell) ? call.in("c0", i.c0) : nullptr;
  r.vectors = call.in(i.vectors_name, i.vectors);
  r.eps = i.eps;
  for (const RoundsOn& side : {rounds_on_x(i), rounds_on_h(i)})
    if (side.uses > 0)
      store_round_addresses(i, side,
                            {call.in(side.name, side.W), call.in(side.factor_name, side.factor),
                             call.in(side.bias_name, side.bias)},
                            {r.rank ? r.A : r.Q, r.F, r.bias});
  return r;
}

void multiply_out(RecurrenceCall& call, cuda::Recurrence& r) {
  if (r.rank)
    call.require_done(
        cuda::multiply_out(r, call.product, call.workspace(cuda::multiplied_out_bytes(r))), r);
}

Outputs outputs(const RecurrenceInputs& i, cuda::Recurrence& r) {
  const ScalarType computing = computing_type(i);
  const int64_t steps_of_c = has_c(r.cell) ? r.steps : 0, rows_of_c = has_c(r.cell) ? r.B : 0;
  Tensor y = new_empty(i.x, {r.steps, r.B, r.H}), h = new_empty(i.x, {r.B, r.H}),
         c = new_empty(i.x, {rows_of_c, r.H});
  Saved s{new_empty(i.x, {r.steps, r.B, slots_of(r.cell), r.Hp}),
          new_empty(i.x, {steps_of_c, r.B, r.Hp}, computing),
          new_empty(i.x, {r.steps, r.B, r.round_width}),
          new_empty(i.x, {0, r.steps, r.B, 0}, computing),
          new_empty(i.x, {r.steps, r.B, statistics_of(r.cell)}, computing)};
  r.y = out(y);
  r.h = out(h);
  r.c = out(c);
  r.gates = out(s.gates);
  r.cells = out(s.cells);
  r.statistics = out(*s.statistics);
  r.round_gates = out(s.round_gates);
  return {y, h, c, s};
}

Tensor empty_gradient(const RecurrenceInputs& i, const OptionalTensor& t) {
  Tensor g = t ? new_empty(i.x, t->sizes()) : new_empty(i.x, {0});
  return i.x.size(1) == 0 ? torch::stable::zero_(g) : g;
}

Gradients empty_gradients(const RecurrenceInputs& i, int64_t needs) {
  const auto like = [&](const OptionalTensor& t, bool needed) {
    return empty_gradient(i, needed ? t : OptionalTensor{});
  };
  const RequiredGradients required(needs);
  return {like(i.x, required.dx),
          like(i.W_ih, required.dW_ih),
          like(i.W_hh, required.dW_hh),
          like(i.b, required.db),
          like(i.h0, true),
          like(i.c0, has_c(i.cell)),
          like(i.Q, required.any_Q),
          like(i.Q_factor, required.any_Q),
          like(i.R, required.any_R),
          like(i.R_factor, required.any_R),
          like(i.Q_bias, required.any_Q),
          like(i.R_bias, required.any_R)};
}

cuda::RecurrenceBackward backward_arguments(RecurrenceCall& call, const LayerBackward& l,
                                            const Gradients& d) {
  const RecurrenceInputs& i = call.i;
  cuda::Recurrence r = arguments(call);
  require_output_gradients(i, l.dy ? *l.dy : l.y, l.dh, l.dc, l.y, l.saved);
  r.y = const_cast<void*>(call.in("y", l.y));
  r.gates = const_cast<void*>(call.in("gates", l.saved.gates));
  if (has_c(i.cell))
    r.cells = const_cast<void*>(call.in("cells", l.saved.cells, computing_type(i)));
  if (statistics_of(i.cell))
    r.statistics = const_cast<void*>(call.in("statistics", *l.saved.statistics, computing_type(i)));
  if (r.rounds) r.round_gates = const_cast<void*>(call.in("round_gates", l.saved.round_gates));
  if (r.B) multiply_out(call, r);
  const Tensor dz = new_empty(i.x, {r.steps, r.B, slots_of(r.cell) * r.H}),
               terms = new_empty(i.x, {r.steps, r.B, cuda::terms_of(r.cell) * r.H}),
               dround = new_empty(i.x, {r.steps, r.B, r.round_width});
  call.owned.push_back(dz);
  call.owned.push_back(terms);
  call.owned.push_back(dround);
  cuda::RecurrenceBackward g{};
  g.forward = r;
  g.dy = call.in("dy", l.dy);
  g.dh = call.in("dh", l.dh);
  g.dc = has_c(i.cell) ? call.in("dc", l.dc) : nullptr;
  g.dz = out(dz);
  g.terms = out(terms);
  g.dround = out(dround);
  g.dx = r.rounds ? out(d.dx) : nullptr;
  g.dh0 = out(d.dh0);
  g.dc0 = out(d.dc0);
  return g;
}

cuda::RecurrenceGradients gradient_arguments(const RecurrenceInputs& i,
                                             const cuda::RecurrenceBackward& g, const Gradients& d,
                                             void* dvectors) {
  const void *dW[cuda::MAX_ROUNDS] = {}, *dF[cuda::MAX_ROUNDS] = {}, *dbias[cuda::MAX_ROUNDS] = {};
  const RoundsOn on_x = rounds_on_x(i), on_h = rounds_on_h(i);
  if (on_x.uses > 0)
    store_round_addresses(i, on_x, {out(d.dQ), out(d.dQ_factor), out(d.dQ_bias)}, {dW, dF, dbias});
  if (on_h.uses > 0)
    store_round_addresses(i, on_h, {out(d.dR), out(d.dR_factor), out(d.dR_bias)}, {dW, dF, dbias});

  cuda::RecurrenceGradients w{};
  w.backward = g;
  w.dx = i.rounds ? nullptr : out(d.dx);
  w.dW_ih = out(d.dW_ih);
  w.dW_hh = out(d.dW_hh);
  w.db = out(d.db);
  w.dvectors = dvectors;
  for (int64_t k = 0; k < i.rounds; ++k) {
    w.dQ[k] = const_cast<void*>(dW[k]);
    w.dF[k] = const_cast<void*>(dF[k]);
    w.dbias[k] = const_cast<void*>(dbias[k]);
  }
  return w;
}

}  // namespace fusedseq::on_cuda
#endif
