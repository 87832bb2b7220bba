// The operator linear_cross_entropy: pyext/fusedseq/reference/linear_cross_entropy.py. Only the
// rows that have a target are passed to the kernel: the others cost nothing, and their values do
// not matter.
#include <algorithm>
#include <cstring>

#include "ops/precision.h"

namespace fusedseq {
namespace {

constexpr const char *OP = "linear_cross_entropy", *BACKWARD = "linear_cross_entropy_backward",
                     *SCALE = "linear_cross_entropy_scale";
enum Reduction : int64_t { NONE, MEAN, SUM };

#define LCE_TENSORS(FIELD)                              \
  FIELD(Tensor, x)                     /* (N, E) */     \
  FIELD(Tensor, W)                     /* (V, E) */     \
  FIELD(Tensor, target)                /* (N,) int64 */ \
  FIELD(OptionalTensor, b)             /* (V,) */       \
  FIELD(OptionalTensor, class_weights) /* (V,) */
FUSEDSEQ_DECLARE(LossTensors, LCE_TENSORS)

#define LCE_OPTIONS(FIELD)       \
  FIELD(int64_t, ignore_index)   \
  FIELD(double, label_smoothing) \
  FIELD(double, z_loss)          \
  FIELD(double, temperature)     \
  FIELD(int64_t, reduction) /* a value of Reduction */
FUSEDSEQ_DECLARE(Options, LCE_OPTIONS)

// The gradients of x, W and b in the dtype of x, formed with the loss as if the loss's own gradient
// were 1.
#define LCE_GRADIENTS(FIELD)     \
  FIELD(Tensor, dx) /* (N, E) */ \
  FIELD(Tensor, dW) /* (V, E) */ \
  FIELD(Tensor, db) /* (V,) */
FUSEDSEQ_DECLARE(LossGradients, LCE_GRADIENTS)

#define LCE_OUTPUTS(FIELD)                             \
  FIELD(Tensor, loss)     /* () or, unreduced, (N,) */ \
  FIELD(Tensor, log_prob) /* (N,) of the target */     \
  FIELD(Tensor, lse)      /* (N,) log-sum-exp */       \
  FIELD(Tensor, argmax)   /* (N,) int64 */             \
  LCE_GRADIENTS(FIELD)
FUSEDSEQ_DECLARE(LossOutputs, LCE_OUTPUTS)

#define LCE_OUTPUT_GRADIENTS(FIELD) \
  FIELD(OptionalTensor, dloss)      \
  FIELD(OptionalTensor, dlog_prob)  \
  FIELD(OptionalTensor, dlse)       \
  FIELD(Tensor, lse) /* the forward's output */
FUSEDSEQ_DECLARE(LossOutputGradients, LCE_OUTPUT_GRADIENTS)

#define LCE_SCALE(FIELD) \
  LCE_GRADIENTS(FIELD)   \
  FIELD(Tensor, dloss)   \
  FIELD(Tensor, x) /* only its dtype is used, that of the gradients */
FUSEDSEQ_DECLARE(ScaleInputs, LCE_SCALE)

template <class T>
constexpr ScalarType computing = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
template <class S>
constexpr ScalarType in_memory = sizeof(S) == 2 ? ScalarType::BFloat16 : computing<S>;
template <class T>
const T* in(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* out(const Tensor& t) {
  return t.numel() ? static_cast<T*>(t.mutable_data_ptr()) : nullptr;
}

void run(const cpu::LinearCrossEntropy<float>& l, int n) {
  const auto& all = cpu::kernels();
  const auto exact = all.linear_cross_entropy_f32, in_bf16 = all.bf16.linear_cross_entropy_f32;
  (in_bf16 && float32_products_in_bf16() ? in_bf16 : exact)(l, parallel, n);
}
void run(const cpu::LinearCrossEntropy<float, cpu::bfloat16>& l, int n) {
  cpu::kernels().bf16.linear_cross_entropy(l, parallel, n);
}
void run(const cpu::LinearCrossEntropy<double>& l, int n) {
  cpu::kernels().linear_cross_entropy_f64(l, parallel, n);
}

void require_inputs(const char* op, const LossTensors& t, const Options& o) {
  const auto& [x, W, target, b, class_weights] = t;
  const ScalarType type = x.scalar_type();
  kernel_type(op, "x", x);
  require_dimensions(op, "x", x, 2, "(N, E)");
  require_dimensions(op, "W", W, 2, "(V, E)");
  require_that(W.size(0) > 0 && W.size(1) > 0 && W.size(1) == x.size(1), op, "W", W,
               "(V, E) with x's E, both at least 1");
  require_dtype(op, "W", W, type);
  require_shape(op, "target", target, {x.size(0)});
  require_dtype(op, "target", target, ScalarType::Long);
  if (b) {
    require_shape(op, "b", *b, {W.size(0)});
    require_dtype(op, "b", *b, type);
  }
  if (class_weights) {
    require_shape(op, "class_weights", *class_weights, {W.size(0)});
    if (class_weights->scalar_type() != ScalarType::Float)
      require_dtype(op, "class_weights", *class_weights, type);
  }
  require_probability(op, "label_smoothing", o.label_smoothing);
  if (!(o.z_loss >= 0)) refuse(op, "z_loss must be at least 0, got ", o.z_loss);
  if (!(o.temperature > 0)) refuse(op, "temperature must be above 0, got ", o.temperature);
  require_range(op, "reduction", o.reduction, NONE, SUM);
}

// The tensors of a call, x and W of the type S in memory and the others of the type T that the
// kernel computes in, and the kernel's arguments, which point to them.
template <class T, class S = T>
struct LossCall {
  const char* op;         // for error messages
  const ScalarType type;  // of the caller's x
  Tensor x, W, target, b, class_weights;
  bool has_b, weighted;
  Options o;
  std::vector<int64_t> selected;  // the rows that have a target
  std::vector<int64_t> targets;   // (selected.size(),)
  Tensor rows;                    // (selected.size(), E); x itself where all rows are selected
  double norm = 0;                // the sum of the targets' weights, which the mean divides by
  cpu::LinearCrossEntropy<T, S> l{};

  LossCall(const char* op, const LossTensors& t, const Options& o)
      : op(op),
        type(t.x.scalar_type()),
        x(dense(t.x, in_memory<S>)),
        W(dense(t.W, in_memory<S>)),
        target(dense(t.target)),
        b(t.b ? dense(*t.b, computing<T>) : x),
        class_weights(t.class_weights ? dense(*t.class_weights, computing<T>) : x),
        has_b(t.b),
        weighted(t.class_weights),
        o(o),
        rows(x) {
    select_rows();
    l.N = int64_t(selected.size());
    l.E = E();
    l.V = V();
    l.x = in<S>(rows);
    l.W = in<S>(W);
    l.b = has_b ? in<T>(b) : nullptr;
    l.target = targets.data();
    l.class_weights = weighted ? in<T>(class_weights) : nullptr;
    l.label_smoothing = o.label_smoothing;
    l.z_loss = o.z_loss;
    l.temperature = o.temperature;
    l.weights_sum = double(V());
    if (weighted) {
      l.weights_sum = 0;
      for (int64_t v = 0; v < V(); ++v)
        l.weights_sum += l.class_weights[v];
    }
    for (int64_t y : targets)
      norm += weighted ? double(l.class_weights[y]) : 1.;
  }

  LossCall(const LossCall&) = delete;  // the kernel's arguments point into this object

  int64_t N() const { return x.size(0); }
  int64_t E() const { return x.size(1); }
  int64_t V() const { return W.size(0); }
  bool has_all_targets() const { return l.N == N(); }
  // The factor of every row's loss in the reduced loss.
  double scale() const { return o.reduction != MEAN ? 1. : norm != 0 ? 1 / norm : 0.; }

  void select_rows() {
    const int64_t* y = in<int64_t>(target);
    for (int64_t n = 0; n < N(); ++n) {
      if (y[n] == o.ignore_index) continue;
      if (y[n] < 0 || y[n] >= V())
        refuse(op, "target must be in [0, V) = [0, ", V(), ") or ignore_index, got ", y[n]);
      selected.push_back(n);
      targets.push_back(y[n]);
    }
    if (int64_t(selected.size()) == N()) return;
    rows = output(x, {int64_t(selected.size()), E()}, in_memory<S>);
    for (size_t i = 0; i < selected.size(); ++i)
      memcpy(out<S>(rows) + i * E(), in<S>(x) + selected[i] * E(), E() * sizeof(S));
  }

  // A new tensor with one element per selected row.
  Tensor column(ScalarType type) const { return output(x, {l.N}, type); }
  // The elements of the selected rows among those of all rows, (N,); the others are `fill`.
  template <class C>
  Tensor scattered(const Tensor& t, C fill) const {
    if (has_all_targets()) return t;
    Tensor all = output(t, {N()});
    for (int64_t n = 0; n < N(); ++n)
      out<C>(all)[n] = fill;
    for (int64_t i = 0; i < l.N; ++i)
      out<C>(all)[selected[i]] = in<C>(t)[i];
    return all;
  }
  // The elements of the selected rows of a tensor (N,), times `factor`.
  Tensor gathered(const char* name, const Tensor& t_, double factor = 1) const {
    require_shape(op, name, t_, {N()});
    require_floating(op, name, t_);
    const Tensor t = dense(t_, computing<T>);
    Tensor some = column(computing<T>);
    for (int64_t i = 0; i < l.N; ++i)
      out<T>(some)[i] = T(in<T>(t)[selected[i]] * factor);
    return some;
  }

  // At least 64 classes for each thread.
  int team() const {
    const int64_t most = std::max<int64_t>(V() / 64, 1);
    return int(std::min<int64_t>(most, threads_for(double(l.N) * double(l.E) * double(l.V))));
  }

  // Runs the kernel, and returns the gradients whose bits are set in `needs`.
  LossGradients gradients(int64_t needs) {
    const auto gradient = [&](int position, const Sizes& shape, ScalarType formed) {
      return output(x, is_needed(needs, position) ? shape : Sizes{0}, formed);
    };
    const Tensor dx = gradient(LossGradients::Position::dx, {l.N, E()}, computing<T>),
                 dW = gradient(LossGradients::Position::dW, {V(), E()}, in_memory<S>),
                 db = gradient(LossGradients::Position::db, {V()}, computing<T>);
    l.dx = out<T>(dx);
    l.dW = out<S>(dW);
    l.db = out<T>(db);
    if (l.N) {
      run(l, team());
    } else {
      if (l.dW) memset(l.dW, 0, dW.numel() * sizeof(S));
      if (l.db) memset(l.db, 0, db.numel() * sizeof(T));
    }
    const bool scatters = is_needed(needs, LossGradients::Position::dx) && !has_all_targets();
    return {rounded(scatters ? dx_of_all_rows() : dx), rounded(dW), rounded(db)};
  }

  // The gradient of x (N, E): that of the selected rows, and zero for the others.
  Tensor dx_of_all_rows() const {
    Tensor all = output(x, {N(), E()}, computing<T>);
    memset(all.mutable_data_ptr(), 0, all.numel() * sizeof(T));
    for (int64_t i = 0; i < l.N; ++i)
      memcpy(out<T>(all) + selected[i] * E(), l.dx + i * E(), E() * sizeof(T));
    return all;
  }

  // A tensor in the dtype of the caller's x.
  Tensor rounded(const Tensor& t) const {
    if (t.scalar_type() == type) return t;
    Tensor result = output(t, Sizes(t.sizes().begin(), t.sizes().end()), type);
    if (t.numel())
      cpu::kernels().scale({cpu::Type::bf16, cpu::Type::f32, t.numel(), t.const_data_ptr(), 1,
                            result.mutable_data_ptr()},
                           parallel);
    return result;
  }
};

template <class T, class S>
LossOutputs forward(LossCall<T, S>& c, int64_t needs) {
  constexpr ScalarType type = computing<T>;
  const Tensor rows = c.column(type), lse = c.column(type), log_prob = c.column(type),
               argmax = c.column(ScalarType::Long);
  auto& l = c.l;
  l.statistics = true;
  l.dloss_of_all = c.scale();
  l.loss = out<T>(rows);
  l.lse = out<T>(lse);
  l.log_prob = out<T>(log_prob);
  l.argmax = out<int64_t>(argmax);
  const auto [dx, dW, db] = c.gradients(needs);
  const Tensor log_probs = c.template scattered<T>(log_prob, 0),
               lses = c.template scattered<T>(lse, 0),
               best = c.template scattered<int64_t>(argmax, -1);
  if (c.o.reduction == NONE)
    return {c.template scattered<T>(rows, 0), log_probs, lses, best, dx, dW, db};
  double total = 0;
  for (int64_t i = 0; i < l.N; ++i)
    total += l.loss[i];
  Tensor loss = output(c.x, {}, type);
  *out<T>(loss) = T(total * c.scale());
  return {loss, log_probs, lses, best, dx, dW, db};
}

template <class T, class S>
LossGradients backward(LossCall<T, S>& c, const LossOutputGradients& g, int64_t needs) {
  const auto& [dloss, dlog_prob, dlse, lse] = g;
  auto& l = c.l;
  const Tensor lses = c.gathered("lse", lse);
  l.lse = out<T>(lses);
  Tensor rows = lses, of_log_prob = lses, of_lse = lses;
  if (dlog_prob)
    of_log_prob = c.gathered("dlog_prob", *dlog_prob), l.dlog_prob = in<T>(of_log_prob);
  if (dlse) of_lse = c.gathered("dlse", *dlse), l.dlse = in<T>(of_lse);
  if (dloss && c.o.reduction == NONE) rows = c.gathered("dloss", *dloss), l.dloss = in<T>(rows);
  if (dloss && c.o.reduction != NONE) {
    require_scalar(c.op, "dloss", *dloss);
    l.dloss_of_all = *in<T>(dense(*dloss, computing<T>)) * c.scale();
  }
  return c.gradients(needs);
}

// Calls f with the call in the types that its kernel takes. bf16 tensors are converted as a whole
// where the processor does not multiply bfloat16 numbers.
template <class F>
auto with_call(const char* op, const LossTensors& t, const Options& o, F f) {
  require_inputs(op, t, o);
  const ScalarType type = t.x.scalar_type();
  if (type == ScalarType::Double) return f(LossCall<double>(op, t, o));
  if (type == ScalarType::BFloat16 && multiplies_in_bf16(type))
    return f(LossCall<float, cpu::bfloat16>(op, t, o));
  return f(LossCall<float>(op, t, o));
}

LossOutputs linear_cross_entropy(const LossTensors& t, const Options& o, const Needs& needs) {
  return with_call(OP, t, o, [&](auto&& call) { return forward(call, needs.needs); });
}

LossGradients linear_cross_entropy_backward(const LossOutputGradients& g, const LossTensors& t,
                                            const Options& o, const Needs& needs) {
  return with_call(BACKWARD, t, o, [&](auto&& call) { return backward(call, g, needs.needs); });
}

// Multiplies the gradients that were formed with the loss by the loss's gradient. The former stay
// unchanged, as another backward may follow.
LossGradients linear_cross_entropy_scale(const ScaleInputs& i, const Needs& needs) {
  require_scalar(SCALE, "dloss", i.dloss);
  const cpu::Type type = kernel_type(SCALE, "x", i.x);
  const Tensor dloss = dense(i.dloss, ScalarType::Double);
  const auto scale_one = [&](const char* name, const Tensor& gradient, int position) {
    if (!is_needed(needs.needs, position)) return output(i.x, {0});
    if (!gradient.is_contiguous()) refuse(SCALE, name, " must be contiguous");
    require_dtype(SCALE, name, gradient, i.x.scalar_type());
    Tensor result = output(i.x, Sizes(gradient.sizes().begin(), gradient.sizes().end()));
    if (result.numel())
      cpu::kernels().scale({type, type, result.numel(), gradient.const_data_ptr(),
                            *in<double>(dloss), result.mutable_data_ptr()},
                           parallel);
    return result;
  };
  using Position = LossGradients::Position;
  return {scale_one("dx", i.dx, Position::dx), scale_one("dW", i.dW, Position::dW),
          scale_one("db", i.db, Position::db)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<linear_cross_entropy>(m, "linear_cross_entropy");
  define<linear_cross_entropy_backward>(m, "linear_cross_entropy_backward");
  define<linear_cross_entropy_scale>(m, "linear_cross_entropy_scale");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("linear_cross_entropy", boxed<linear_cross_entropy>);
  m.impl("linear_cross_entropy_backward", boxed<linear_cross_entropy_backward>);
  m.impl("linear_cross_entropy_scale", boxed<linear_cross_entropy_scale>);
}

}  // namespace fusedseq
