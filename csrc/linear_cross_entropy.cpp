// linear_cross_entropy: see pyext/fusedseq/reference/linear_cross_entropy.py. Rows without a target are left out before
// the kernel sees them: they cost nothing, and nothing that they hold matters.
#include <cstring>

#include "tensor.h"

namespace fusedseq {
namespace {

constexpr const char* OP = "linear_cross_entropy";
enum Reduction : int64_t { NONE, MEAN, SUM };

struct Options {
  int64_t ignore_index;
  double label_smoothing, z_loss, temperature;
  int64_t reduction;
};

template <class T> constexpr ScalarType computing = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
template <class T> const T* in(const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
template <class T> T* out(const Tensor& t) { return t.numel() ? static_cast<T*>(t.mutable_data_ptr()) : nullptr; }

void run(const cpu::LinearCrossEntropy<float>& l, int n) { cpu::kernels().linear_cross_entropy_f32(l, parallel, n); }
void run(const cpu::LinearCrossEntropy<double>& l, int n) { cpu::kernels().linear_cross_entropy_f64(l, parallel, n); }

// The call's tensors in the computing type, T, and the kernel's view of the rows that have a target.
template <class T> struct Call {
  Tensor x, W, target, b, class_weights;
  bool has_b, weighted;
  Options o;
  std::vector<int64_t> kept;     // the rows that have a target
  std::vector<int64_t> targets;  // theirs
  Tensor rows;                   // of x; x itself where all are kept
  double norm = 0;               // what the sum is divided by
  cpu::LinearCrossEntropy<T> l{};

  Call(const Tensor& x_, const Tensor& W_, const Tensor& target_, const std::optional<Tensor>& b_,
       const std::optional<Tensor>& class_weights_, const Options& o)
      : x(dense(x_, computing<T>)), W(dense(W_, computing<T>)), target(dense(target_)),
        b(b_ ? dense(*b_, computing<T>) : x), class_weights(class_weights_ ? dense(*class_weights_, computing<T>) : x),
        has_b(b_), weighted(class_weights_), o(o), rows(x) {
    require(x.dim() == 2 && W.dim() == 2 && x.size(1) == W.size(1) && x.size(1) > 0 && W.size(0) > 0, OP,
            "x must be (N, E) and W (V, E)");
    require(target.scalar_type() == ScalarType::Long, OP, "target must be int64");
    require(o.temperature > 0 && NONE <= o.reduction && o.reduction <= SUM, OP, "an option is out of range");
    require_shape(OP, "target", target, {N()});
    if (has_b) require_shape(OP, "b", b, {V()});
    if (weighted) require_shape(OP, "class_weights", class_weights, {V()});
    find_kept();
    l.N = int64_t(kept.size()), l.E = E(), l.V = V(), l.x = in<T>(rows), l.W = in<T>(W), l.b = has_b ? in<T>(b) : nullptr;
    l.target = targets.data(), l.class_weights = weighted ? in<T>(class_weights) : nullptr;
    l.label_smoothing = o.label_smoothing, l.z_loss = o.z_loss, l.temperature = o.temperature;
    l.weights_sum = double(V());
    if (weighted) {
      l.weights_sum = 0;
      for (int64_t v = 0; v < V(); ++v) l.weights_sum += l.class_weights[v];
    }
    for (int64_t y : targets) norm += weighted ? double(l.class_weights[y]) : 1.;
  }

  Call(const Call&) = delete;  // the kernel's view points into it

  int64_t N() const { return x.size(0); }
  int64_t E() const { return x.size(1); }
  int64_t V() const { return W.size(0); }
  bool all_kept() const { return l.N == N(); }
  // Of every row, before the gradient of the loss.
  double scale() const { return o.reduction != MEAN ? 1. : norm != 0 ? 1 / norm : 0.; }

  void find_kept() {
    const int64_t* y = in<int64_t>(target);
    for (int64_t n = 0; n < N(); ++n) {
      if (y[n] == o.ignore_index) continue;
      STD_TORCH_CHECK(y[n] >= 0 && y[n] < V(), OP, ": target must be in [0, V) = [0, ", V(), ") or ignore_index, got ", y[n]);
      kept.push_back(n), targets.push_back(y[n]);
    }
    if (int64_t(kept.size()) == N()) return;
    rows = output(x, {int64_t(kept.size()), E()});
    for (size_t i = 0; i < kept.size(); ++i) memcpy(out<T>(rows) + i * E(), in<T>(x) + kept[i] * E(), E() * sizeof(T));
  }

  // A column of the kept rows' numbers; of all rows', those of the others `fill`.
  Tensor column(ScalarType type) const { return output(x, {l.N}, type); }
  template <class C> Tensor scattered(const Tensor& t, C fill) const {
    if (all_kept()) return t;
    Tensor all = output(t, {N()});
    for (int64_t n = 0; n < N(); ++n) out<C>(all)[n] = fill;
    for (int64_t i = 0; i < l.N; ++i) out<C>(all)[kept[i]] = in<C>(t)[i];
    return all;
  }
  Tensor gathered(const Tensor& t_, double factor = 1) const {
    const Tensor t = dense(t_, computing<T>);
    require_shape(OP, "a gradient", t, {N()});
    Tensor some = column(computing<T>);
    for (int64_t i = 0; i < l.N; ++i) out<T>(some)[i] = T(in<T>(t)[kept[i]] * factor);
    return some;
  }

  // Few multiply-adds are not worth a second thread, and each has some columns of its own.
  int team() const {
    double most = double(l.N) * double(l.E) * double(l.V) / 20000 + 1;
    if (double(V()) / 64 < most) most = double(V()) / 64;
    return most < 1 ? 1 : most < threads() ? int(most) : threads();
  }

  // Runs the kernel for the gradients of the bits in `needs`: x 1, W 2, b 4.
  std::tuple<Tensor, Tensor, Tensor> gradients(int64_t needs) {
    Tensor dx = output(x, needs & 1 ? Sizes{l.N, E()} : Sizes{0}), dW = output(x, needs & 2 ? Sizes{V(), E()} : Sizes{0}),
           db = output(x, needs & 4 ? Sizes{V()} : Sizes{0});
    l.dx = out<T>(dx), l.dW = out<T>(dW), l.db = out<T>(db);
    if (l.N)
      run(l, team());
    else
      for (const Tensor& t : {dW, db})
        if (t.numel()) memset(t.mutable_data_ptr(), 0, t.numel() * sizeof(T));
    if (!(needs & 1) || all_kept()) return {dx, dW, db};
    Tensor all = output(x, {N(), E()});
    memset(all.mutable_data_ptr(), 0, all.numel() * sizeof(T));
    for (int64_t i = 0; i < l.N; ++i) memcpy(out<T>(all) + kept[i] * E(), l.dx + i * E(), E() * sizeof(T));
    return {all, dW, db};
  }
};

using Seven = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class T> Seven forward(Call<T> c, int64_t needs) {
  constexpr ScalarType type = computing<T>;
  const Tensor rows = c.column(type), lse = c.column(type), log_prob = c.column(type), argmax = c.column(ScalarType::Long);
  auto& l = c.l;
  l.statistics = true, l.dloss_of_all = c.scale();
  l.loss = out<T>(rows), l.lse = out<T>(lse), l.log_prob = out<T>(log_prob), l.argmax = out<int64_t>(argmax);
  const auto [dx, dW, db] = c.gradients(needs);
  const Tensor log_probs = c.template scattered<T>(log_prob, 0), lses = c.template scattered<T>(lse, 0),
               best = c.template scattered<int64_t>(argmax, -1);
  if (c.o.reduction == NONE) return {c.template scattered<T>(rows, 0), log_probs, lses, best, dx, dW, db};
  double total = 0;
  for (int64_t i = 0; i < l.N; ++i) total += l.loss[i];
  Tensor loss = output(c.x, {}, type);
  *out<T>(loss) = T(total * c.scale());
  return {loss, log_probs, lses, best, dx, dW, db};
}

template <class T>
std::tuple<Tensor, Tensor, Tensor> backward(Call<T> c, const std::optional<Tensor>& dloss, const std::optional<Tensor>& dlog_prob,
                                            const std::optional<Tensor>& dlse, const Tensor& lse, int64_t needs) {
  auto& l = c.l;
  const Tensor lses = c.gathered(lse);
  l.lse = out<T>(lses);
  Tensor rows = lses, of_log_prob = lses, of_lse = lses;
  if (dlog_prob) of_log_prob = c.gathered(*dlog_prob), l.dlog_prob = in<T>(of_log_prob);
  if (dlse) of_lse = c.gathered(*dlse), l.dlse = in<T>(of_lse);
  if (dloss && c.o.reduction == NONE) rows = c.gathered(*dloss), l.dloss = in<T>(rows);
  if (dloss && c.o.reduction != NONE) {
    require(dloss->numel() == 1, OP, "dloss must be a scalar");
    l.dloss_of_all = *in<T>(dense(*dloss, computing<T>)) * c.scale();
  }
  return c.gradients(needs);
}

Seven linear_cross_entropy(Tensor x, Tensor W, Tensor target, std::optional<Tensor> b, std::optional<Tensor> class_weights,
                           int64_t ignore_index, double label_smoothing, double z_loss, double temperature,
                           int64_t reduction, int64_t needs) {
  const Options o{ignore_index, label_smoothing, z_loss, temperature, reduction};
  return kernel_type(OP, x) == cpu::Type::f64 ? forward(Call<double>(x, W, target, b, class_weights, o), needs)
                                              : forward(Call<float>(x, W, target, b, class_weights, o), needs);
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    std::optional<Tensor> dloss, std::optional<Tensor> dlog_prob, std::optional<Tensor> dlse, Tensor lse, Tensor x, Tensor W,
    Tensor target, std::optional<Tensor> b, std::optional<Tensor> class_weights, int64_t ignore_index,
    double label_smoothing, double z_loss, double temperature, int64_t reduction, int64_t needs) {
  const Options o{ignore_index, label_smoothing, z_loss, temperature, reduction};
  if (kernel_type(OP, x) == cpu::Type::f64)
    return backward(Call<double>(x, W, target, b, class_weights, o), dloss, dlog_prob, dlse, lse, needs);
  return backward(Call<float>(x, W, target, b, class_weights, o), dloss, dlog_prob, dlse, lse, needs);
}

template <class T> Tensor scaled(const Tensor& gradient, const Tensor& dloss) {
  constexpr int64_t BLOCK = 16384;
  Tensor result = output_like(gradient);
  struct Context { const T* from; T* to; T factor; int64_t n; };
  Context c{in<T>(gradient), out<T>(result), *in<T>(dense(dloss, computing<T>)), gradient.numel()};
  parallel((c.n + BLOCK - 1) / BLOCK, [](void* context, int64_t begin, int64_t end) {
    const Context& c = *static_cast<Context*>(context);
    const int64_t last = end * BLOCK < c.n ? end * BLOCK : c.n;
    for (int64_t i = begin * BLOCK; i < last; ++i) c.to[i] = c.from[i] * c.factor;
  }, &c);
  return result;
}

// The gradients formed with the loss, once the gradient of the loss is known; the first stay as they are, for another backward.
std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_scale(Tensor dx, Tensor dW, Tensor db, Tensor dloss, int64_t needs) {
  require(dloss.numel() == 1, OP, "dloss must be a scalar");
  const auto one = [&](const Tensor& gradient, int64_t bit) {
    if (!(needs & bit)) return output(gradient, {0});
    require(gradient.is_contiguous(), OP, "gradients must be contiguous");
    return gradient.scalar_type() == ScalarType::Double ? scaled<double>(gradient, dloss) : scaled<float>(gradient, dloss);
  };
  return {one(dx, 1), one(dW, 2), one(db, 4)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("linear_cross_entropy(Tensor x, Tensor W, Tensor target, Tensor? b, Tensor? class_weights, int ignore_index, "
        "float label_smoothing, float z_loss, float temperature, int reduction, int needs) "
        "-> (Tensor loss, Tensor log_prob, Tensor lse, Tensor argmax, Tensor dx, Tensor dW, Tensor db)");
  m.def("linear_cross_entropy_backward(Tensor? dloss, Tensor? dlog_prob, Tensor? dlse, Tensor lse, Tensor x, Tensor W, "
        "Tensor target, Tensor? b, Tensor? class_weights, int ignore_index, float label_smoothing, float z_loss, "
        "float temperature, int reduction, int needs) -> (Tensor, Tensor, Tensor)");
  m.def("linear_cross_entropy_scale(Tensor dx, Tensor dW, Tensor db, Tensor dloss, int needs) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
  m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
  m.impl("linear_cross_entropy_scale", TORCH_BOX(&linear_cross_entropy_scale));
}

}  // namespace fusedseq
