// The operator linear_cross_entropy: pyext/fusedseq/reference/linear_cross_entropy.py. Only the
// rows that have a target are passed to the kernel: the others cost nothing, and their values do
// not matter.
#include <cstring>

#include "ops/tensor.h"

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

// The gradients of x, W and b, formed with the loss as if the loss's own gradient were 1.
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

#define LCE_SCALE(FIELD) LCE_GRADIENTS(FIELD) FIELD(Tensor, dloss)
FUSEDSEQ_DECLARE(ScaleInputs, LCE_SCALE)

template <class T>
constexpr ScalarType computing = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
template <class T>
const T* in(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* out(const Tensor& t) {
  return t.numel() ? static_cast<T*>(t.mutable_data_ptr()) : nullptr;
}

void run(const cpu::LinearCrossEntropy<float>& l, int n) {
  cpu::kernels().linear_cross_entropy_f32(l, parallel, n);
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

// The tensors of a call in the type T that the kernel computes in, and the kernel's arguments,
// which point to them.
template <class T>
struct Call {
  const char* op;  // for error messages
  Tensor x, W, target, b, class_weights;
  bool has_b, weighted;
  Options o;
  std::vector<int64_t> selected;  // the rows that have a target
  std::vector<int64_t> targets;   // (selected.size(),)
  Tensor rows;                    // (selected.size(), E); x itself where all rows are selected
  double norm = 0;                // the sum of the targets' weights, which the mean divides by
  cpu::LinearCrossEntropy<T> l{};

  Call(const char* op, const LossTensors& t, const Options& o)
      : op(op),
        x(dense(t.x, computing<T>)),
        W(dense(t.W, computing<T>)),
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
    l.x = in<T>(rows);
    l.W = in<T>(W);
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

  Call(const Call&) = delete;  // the kernel's arguments point into this object

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
    rows = output(x, {int64_t(selected.size()), E()});
    for (size_t i = 0; i < selected.size(); ++i)
      memcpy(out<T>(rows) + i * E(), in<T>(x) + selected[i] * E(), E() * sizeof(T));
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

  // One thread per 20,000 multiply-adds, and at least 64 classes for each.
  int team() const {
    double most = double(l.N) * double(l.E) * double(l.V) / 20000 + 1;
    if (double(V()) / 64 < most) most = double(V()) / 64;
    return most < 1 ? 1 : most < threads() ? int(most) : threads();
  }

  // Runs the kernel, and returns the gradients whose bits are set in `needs`.
  LossGradients gradients(int64_t needs) {
    Tensor dx = output(x,
                       is_needed(needs, LossGradients::Position::dx) ? Sizes{l.N, E()} : Sizes{0}),
           dW = output(x,
                       is_needed(needs, LossGradients::Position::dW) ? Sizes{V(), E()} : Sizes{0}),
           db = output(x, is_needed(needs, LossGradients::Position::db) ? Sizes{V()} : Sizes{0});
    l.dx = out<T>(dx);
    l.dW = out<T>(dW);
    l.db = out<T>(db);
    if (l.N)
      run(l, team());
    else
      for (const Tensor& t : {dW, db})
        if (t.numel()) memset(t.mutable_data_ptr(), 0, t.numel() * sizeof(T));
    if (!is_needed(needs, LossGradients::Position::dx) || has_all_targets()) return {dx, dW, db};
    Tensor all = output(x, {N(), E()});
    memset(all.mutable_data_ptr(), 0, all.numel() * sizeof(T));
    for (int64_t i = 0; i < l.N; ++i)
      memcpy(out<T>(all) + selected[i] * E(), l.dx + i * E(), E() * sizeof(T));
    return {all, dW, db};
  }
};

template <class T>
LossOutputs forward(Call<T> c, int64_t needs) {
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

template <class T>
LossGradients backward(Call<T> c, const LossOutputGradients& g, int64_t needs) {
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

LossOutputs linear_cross_entropy(const LossTensors& t, const Options& o, const Needs& needs) {
  require_inputs(OP, t, o);
  return t.x.scalar_type() == ScalarType::Double ? forward(Call<double>(OP, t, o), needs.needs)
                                                 : forward(Call<float>(OP, t, o), needs.needs);
}

LossGradients linear_cross_entropy_backward(const LossOutputGradients& g, const LossTensors& t,
                                            const Options& o, const Needs& needs) {
  require_inputs(BACKWARD, t, o);
  return t.x.scalar_type() == ScalarType::Double
             ? backward(Call<double>(BACKWARD, t, o), g, needs.needs)
             : backward(Call<float>(BACKWARD, t, o), g, needs.needs);
}

template <class T>
Tensor scaled(const Tensor& gradient, const Tensor& dloss) {
  constexpr int64_t BLOCK = 16384;
  Tensor result = output_like(gradient);
  struct Context {
    const T* from;
    T* to;
    T factor;
    int64_t n;
  };
  Context c{in<T>(gradient), out<T>(result), *in<T>(dense(dloss, computing<T>)), gradient.numel()};
  parallel((c.n + BLOCK - 1) / BLOCK,
           [](void* context, int64_t begin, int64_t end) {
             const Context& c = *static_cast<Context*>(context);
             const int64_t last = end * BLOCK < c.n ? end * BLOCK : c.n;
             for (int64_t i = begin * BLOCK; i < last; ++i)
               c.to[i] = c.from[i] * c.factor;
           },
           &c);
  return result;
}

// Multiplies the gradients that were formed with the loss by the loss's gradient. The former stay
// unchanged, as another backward may follow.
LossGradients linear_cross_entropy_scale(const ScaleInputs& i, const Needs& needs) {
  require_scalar(SCALE, "dloss", i.dloss);
  const auto scale_one = [&](const char* name, const Tensor& gradient, int position) {
    if (!is_needed(needs.needs, position)) return output(gradient, {0});
    require(gradient.is_contiguous(), SCALE, "dx, dW and db must be contiguous");
    if (gradient.scalar_type() != ScalarType::Double)
      require_dtype(SCALE, name, gradient, ScalarType::Float);
    return gradient.scalar_type() == ScalarType::Double ? scaled<double>(gradient, i.dloss)
                                                        : scaled<float>(gradient, i.dloss);
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
