// The Python module fusedseq._autograd: records the calls of small operators by autograd in C++.
// For a few kilobytes of data, a torch.autograd.Function written in Python takes longer than the
// operator itself, forward and backward. Unlike _ops.so, this module works only under the torch and
// the Python it was compiled with. Without it, pyext/fusedseq/fused/autograd.py does the same in
// Python; that file also handles what is not done here: second derivatives, tensors with a
// __torch_function__, and gradients that no formula of autograd_formulas.h covers.
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "python/autograd_record.h"

namespace fusedseq {
namespace {

// Whether fused/attention.py would accept q, k and v of a call without options. Its checks take a
// fifth of the time of a small call, and half of that of a decoding step.
bool is_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  constexpr int64_t MAX_HEAD_DIM = 2048;
  const auto type = q.scalar_type();
  const bool on_cpu = q.device().is_cpu();
  const bool is_known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf ||
                        (on_cpu && type == at::kDouble);
  if (!is_plain(q) || q.dim() != 4 || !is_known || !(on_cpu || q.device().is_cuda())) return false;
  if (q.size(1) == 0 || q.size(2) == 0 || q.size(3) == 0 || q.size(3) > MAX_HEAD_DIM) return false;
  for (const Tensor* t : {&k, &v})
    if (!is_plain(*t) || t->dim() != 4 || t->scalar_type() != type || t->device() != q.device())
      return false;
  if (k.sizes() != v.sizes() || k.size(0) != q.size(0) || k.size(3) != q.size(3)) return false;
  if (k.size(1) == 0 || q.size(1) % k.size(1) != 0 || k.size(2) == 0) return false;
  return !at::autocast::is_autocast_enabled(q.device().type()) &&
         !at::impl::torch_function_mode_enabled();
}

// Whether a transform of torch.func traces this call, or a tensor has a tangent: what
// fused/transforms.py asks, without torch.compile, which does not call C++.
bool is_traced(std::initializer_list<Tensor> tensors) {
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  return keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         keys.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         std::any_of(tensors.begin(), tensors.end(), is_dual);
}

// attention without options, or NotImplemented where Python has to check the arguments.
py::object attention_without_options(py::handle q, py::handle k, py::handle v,
                                     std::optional<double> scale) {
  for (const py::handle t : {q, k, v})
    if (!THPVariable_CheckExact(t.ptr())) return not_implemented();
  const Tensor &query = THPVariable_Unpack(q.ptr()), &key = THPVariable_Unpack(k.ptr()),
               &value = THPVariable_Unpack(v.ptr());
  if (!is_attention(query, key, value)) return not_implemented();
  if (is_traced({query, key, value})) return not_implemented();
  const double factor = scale ? *scale : std::pow(double(query.size(3)), -0.5);
  if (query.is_cpu()) {
    static const Operator& plain = all_operators().at("attention_plain");
    Stack stack{query, key, value, factor};
    return to_python(IValue(plain.run(stack)[0]));
  }
  // The operator's inputs by name, once; a call replaces q, k, v and scale.
  static const Operator& op = all_operators().at("attention");
  static const auto& formula = static_cast<const Attention&>(*op.formula);
  static const Stack no_options = formula.without_options();
  Stack stack = no_options;
  stack[formula.q] = query;
  stack[formula.k] = key;
  stack[formula.v] = value;
  stack[formula.scale] = factor;
  return to_python(IValue(op.run(stack)[0]));
}

// Splits a projection (B, L, parts N D), or (L, B, parts N D), into `parts` views (B, N, L, D), as
// pyext/fusedseq/nn/heads.py does in Python.
struct Heads : torch::autograd::Function<Heads> {
  static constexpr bool is_traceable = true;  // by compiled autograd, as Recorded

  static variable_list forward(AutogradContext* ctx, const Tensor& y, int64_t parts,
                               int64_t num_heads, bool batch_first) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["shape"] = y.sizes().vec();
    ctx->saved_data["batch_first"] = batch_first;
    const int64_t B = batch_first ? 0 : 1, L = 1 - B;
    // Not -1, which torch cannot infer for a tensor without elements.
    const int64_t head_dim = y.size(2) / (parts * num_heads);
    return y.view({y.size(0), y.size(1), parts, num_heads, head_dim})
        .permute({2, B, 3, L, 4})
        .unbind(0);
  }

  // Returns whether the gradients (B, N, L, D) are already the parts of one tensor that is laid out
  // as the projection. order: the permutation to (B, L, N, D) or (L, B, N, D)
  static bool are_parts_of_one(const variable_list& grads, const std::vector<int64_t>& shape,
                               const std::vector<int64_t>& order) {
    for (size_t i = 0; i < grads.size(); ++i) {
      const Tensor &g = grads[i], &first = grads[0];
      if (!g.defined() || is_dual(g) || !g.has_storage() ||
          g.storage().unsafeGetStorageImpl() != first.storage().unsafeGetStorageImpl())
        return false;
      const int64_t size = shape[2] / int64_t(grads.size()),
                    strides[4] = {shape[1] * shape[2], shape[2], g.size(3), 1};
      for (int d = 0; d < 4; ++d)
        if (g.stride(order[d]) != strides[d]) return false;
      if (g.storage_offset() != first.storage_offset() + int64_t(i) * size ||
          g.scalar_type() != first.scalar_type())
        return false;
    }
    return true;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto shape = ctx->saved_data["shape"].toIntVector();
    const std::vector<int64_t> order = ctx->saved_data["batch_first"].toBool()
                                           ? std::vector<int64_t>{0, 2, 1, 3}
                                           : std::vector<int64_t>{2, 0, 1, 3};
    Tensor given;
    for (const Tensor& g : grads)
      if (g.defined()) given = g;
    if (!given.defined()) return variable_list(4);
    if (!at::GradMode::is_enabled() && are_parts_of_one(grads, shape, order))
      return {grads[0].as_strided(shape, {shape[1] * shape[2], shape[2], 1}), Tensor(), Tensor(),
              Tensor()};
    for (Tensor& g : grads)
      g = (g.defined() ? g : at::zeros_like(given)).permute(order);
    return {at::stack(grads, 2).view(shape), Tensor(), Tensor(), Tensor()};
  }
  static std::string node_name(const AutogradContext&) { return node_name_of("heads"); }
};

}  // namespace
}  // namespace fusedseq

PYBIND11_MODULE(_autograd, m) {
  using namespace fusedseq;
  py::class_<Operator, std::unique_ptr<Operator, py::nodelete>>(
      m, "Operator",
      "An operator, called with positional arguments; returns NotImplemented for a call that has "
      "to be made in Python.")
      .def("__call__", &Operator::operator())
      .def("checked", &Operator::checked,
           "The same for arguments that were not checked yet: returns NotImplemented also if a "
           "check might fail.");
  m.def(
      "operators",
      [] {
        py::dict made;
        for (const auto& [name, op] : all_operators())
          made[name.c_str()] = py::cast(&op, py::return_value_policy::reference);
        return made;
      },
      "{name: Operator} of the operators that are recorded in C++. _ops.so must be loaded.");
  m.def(
      "by_python", [](py::object function) { python_gradients() = std::move(function); },
      py::arg("function"),
      "Sets the function (operator, inputs, outputs, grads, needs) -> gradients of the inputs, "
      "which computes the gradients that C++ does not.");
  m.def("attention_without_options", &attention_without_options, py::arg("q"), py::arg("k"),
        py::arg("v"), py::arg("scale"),
        "fusedseq.fused.attention(q, k, v, scale=scale), or NotImplemented if Python has to make "
        "the call.");
  m.def(
      "heads",
      [](const Tensor& y, int64_t parts, int64_t num_heads, bool batch_first) {
        return Named<Heads>::apply(y, parts, num_heads, batch_first);
      },
      py::arg("y"), py::arg("parts"), py::arg("num_heads"), py::arg("batch_first"),
      "The views that fusedseq.nn.heads.heads returns, recorded for autograd.");
}
