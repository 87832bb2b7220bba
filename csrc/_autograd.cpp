// The Python module fusedseq._autograd: the small operators, recorded by autograd in C++. On a few kilobytes the way through a
// torch.autograd.Function of Python takes longer than the operator, forward and backward. Unlike _ops.so the module is for the
// torch and the Python that it was compiled with; without it pyext/fusedseq/fused/autograd.py does the same in Python, and does
// always what is not done here: second derivatives, tensors with a __torch_function__, unusual gradients.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>

#include "autograd_formulas.h"

namespace fusedseq {
namespace {

using torch::autograd::AutogradContext;

// python(operator, inputs, outputs, grads, needs): the gradients of the inputs, by what the operator registered in Python.
py::object& python() {
  static py::object* function = new py::object;  // never destroyed: at exit there is no Python for it
  return *function;
}

py::object object(const IValue& v) {
  if (has(v)) return py::reinterpret_steal<py::object>(THPVariable_Wrap(v.toTensor()));
  if (v.isDouble()) return py::float_(v.toDouble());
  if (v.isBool()) return py::bool_(v.toBool());
  if (v.isInt()) return py::int_(v.toInt());
  if (v.isString()) return py::str(v.toStringRef());
  return py::none();
}

c10::OperatorHandle find(const std::string& name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""); }

void call_below(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowAutograd guard;
  op.callBoxed(stack);
}

// An operator, as Python calls it.
struct Operator {
  const std::string name;
  const std::shared_ptr<const Formula> formula;
  const c10::OperatorHandle forward, backward;
  std::vector<c10::TypeKind> kinds;  // of its arguments

  explicit Operator(const std::string& name)
      : name(name), formula(formulas().at(name)), forward(find("fusedseq::" + name)), backward(find(formula->backward())) {
    for (const auto& argument : forward.schema().arguments()) {
      auto type = argument.type();
      if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      kinds.push_back(type->kind());
    }
  }

  // A seed on the CPU, as fused/check.py makes it; a GPU's Python makes there.
  static bool convert_seed(PyObject* value, IValue& to) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && (to = at::scalar_tensor(int64_t(number), at::kLong), true);
  }

  // False for what only Python can pass on: a tensor of a class of its own, a number that is traced.
  bool convert(PyObject* value, c10::TypeKind kind, IValue& to) const {
    if (value == Py_None) return true;
    switch (kind) {
      case c10::TypeKind::TensorType:
        if (PyLong_CheckExact(value)) return convert_seed(value, to);
        if (!THPVariable_CheckExact(value)) return false;
        to = THPVariable_Unpack(value);
        return true;
      case c10::TypeKind::FloatType:
        if (PyFloat_Check(value)) return to = PyFloat_AS_DOUBLE(value), true;
        return PyLong_CheckExact(value) && (to = PyLong_AsDouble(value), true);
      case c10::TypeKind::IntType: {
        if (!PyLong_CheckExact(value)) return false;
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow && (to = int64_t(number), true);
      }
      case c10::TypeKind::BoolType: return PyBool_Check(value) && (to = value == Py_True, true);
      case c10::TypeKind::StringType:
        if (!PyUnicode_Check(value)) return false;
        to = std::string(py::handle(value).cast<std::string>());
        return true;
      default: return false;
    }
  }

  py::object operator()(const py::args& values) const;
  py::object checked(const py::args& values) const;
  bool convert(const py::args& values, Stack& to) const;
  variable_list run(Stack& stack) const;
};

const std::map<std::string, Operator>& all() {
  static const auto* operators = [] {
    auto* made = new std::map<std::string, Operator>;
    for (const auto& [name, formula] : formulas()) made->emplace(name, name);
    return made;
  }();
  return *operators;
}

struct Recorded : torch::autograd::Function<Recorded> {
  // `stack`: the inputs. The tensors, which apply() looks at, are those of them that may have a gradient and are there.
  // Bit i of `present`: the i-th of these is among them.
  static variable_list forward(AutogradContext* ctx, const Operator& op, Stack& stack, int64_t present, at::TensorList) {
    Stack inputs = stack;
    call_below(op.forward, stack);
    variable_list results, constants;
    for (size_t i = 0; i < stack.size(); ++i) {
      results.push_back(stack[i].toTensor());
      if (i >= op.formula->results) constants.push_back(results.back());
    }
    ctx->mark_non_differentiable(constants);
    ctx->set_materialize_grads(false);
    Stack outputs = stack;
    op.formula->forget(inputs, outputs);
    variable_list kept;
    kept.reserve(inputs.size() + outputs.size());
    for (Stack* values : {&inputs, &outputs})
      for (IValue& v : *values) kept.push_back(v.isTensor() ? v.toTensor() : Tensor());
    for (IValue& v : inputs)
      if (v.isTensor()) v = {};
    ctx->save_for_backward(std::move(kept));
    auto& saved = ctx->saved_data;
    saved["settings"] = c10::ivalue::Tuple::create(std::move(inputs));
    saved["operator"] = int64_t(reinterpret_cast<intptr_t>(&op));  // one of all(), which are there for good
    saved["present"] = present;
    return results;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Operator& op = *reinterpret_cast<const Operator*>(intptr_t(ctx->saved_data["operator"].toInt()));
    const Formula& formula = *op.formula;
    Known known;
    known.inputs = ctx->saved_data["settings"].toTupleRef().elements().vec();
    const variable_list kept = ctx->get_saved_variables();
    const size_t n = known.inputs.size();
    for (size_t i = 0; i < n; ++i)
      if (kept[i].defined()) known.inputs[i] = kept[i];
    for (size_t i = n; i < kept.size(); ++i) known.outputs.push_back(optional(kept[i]));
    known.needs.resize(n);
    const auto present = ctx->saved_data["present"].toInt();
    size_t edge = 0;
    for (size_t i = 0; i < formula.differentiable.size(); ++i)
      if (present >> i & 1) known.needs[formula.differentiable[i]] = ctx->needs_input_grad(edge++);
    known.grads = std::move(grads);
    variable_list found = gradients(op, known), result(3);  // none of the arguments before the tensors
    for (size_t i = 0; i < found.size(); ++i)
      if (present >> i & 1) result.push_back(known.needs[formula.differentiable[i]] ? found[i] : Tensor());
    return result;
  }

  static variable_list gradients(const Operator& op, const Known& known) {
    const Formula& formula = *op.formula;
    variable_list found(formula.differentiable.size());
    bool any = false;
    for (size_t i = 0; i < formula.results; ++i) any |= known.grads[i].defined();
    if (!any) return found;
    Stack stack;
    if (at::GradMode::is_enabled() || !formula.arguments(known, stack)) return in_python(op, known);
    call_below(op.backward, stack);
    for (size_t i = 0; i < found.size(); ++i) found[i] = stack[i].toTensor();
    formula.finish(known, found);
    return found;
  }

  static variable_list in_python(const Operator& op, const Known& known) {
    const py::gil_scoped_acquire gil;
    const auto list = [](const Stack& values) {
      py::list all;
      for (const IValue& v : values) all.append(object(v));
      return all;
    };
    const py::object grads = python()(op.name, list(known.inputs), list(known.outputs), known.grads, known.needs);
    variable_list found;
    for (size_t i : op.formula->differentiable) {
      const py::object g = grads.attr("__getitem__")(i);
      found.push_back(g.is_none() ? Tensor() : g.cast<Tensor>());
    }
    return found;
  }
};

// The outputs for the inputs `stack`, recorded if one of them requires a gradient.
variable_list Operator::run(Stack& stack) const {
  variable_list tensors, results;
  int64_t present = 0;
  bool records = false;
  for (size_t i = 0; i < formula->differentiable.size(); ++i) {
    const IValue& v = stack[formula->differentiable[i]];
    if (!has(v)) continue;
    tensors.push_back(v.toTensor());
    present |= int64_t(1) << i;
    records |= tensors.back().requires_grad();
  }
  const py::gil_scoped_release no_gil;
  if (records && at::GradMode::is_enabled()) return Recorded::apply(*this, stack, present, at::TensorList(tensors));
  call_below(forward, stack);
  for (const IValue& v : stack) results.push_back(v.toTensor());
  return results;
}

py::object not_implemented() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

bool Operator::convert(const py::args& values, Stack& to) const {
  if (values.size() != kinds.size() || at::impl::torch_function_mode_enabled()) return false;
  to.resize(kinds.size());
  for (size_t i = 0; i < kinds.size(); ++i)
    if (!convert(PyTuple_GET_ITEM(values.ptr(), i), kinds[i], to[i])) return false;
  return true;
}

py::object as_python(const variable_list& results) {
  if (results.size() == 1) return object(results[0]);
  py::tuple tuple(results.size());
  for (size_t i = 0; i < results.size(); ++i) tuple[i] = object(results[i]);
  return tuple;
}

// The outputs, or NotImplemented: a call that the caller has to make in Python.
py::object Operator::operator()(const py::args& values) const {
  Stack stack;
  return convert(values, stack) ? as_python(run(stack)) : not_implemented();
}

// The same of inputs that nobody has checked; a seed may be a number. NotImplemented if a check would find a fault.
py::object Operator::checked(const py::args& values) const {
  Stack stack;
  return convert(values, stack) && formula->fits(stack) ? as_python(run(stack)) : not_implemented();
}

// Self-attention without options, of tensors in which fused/attention.py would find no fault: for that its checks are a fifth
// of the time of a small call. NotImplemented for any other.
py::object self_attention(py::handle q_, py::handle k_, py::handle v_, std::optional<double> scale) {
  constexpr int64_t MAX_HEAD_DIM = 2048;
  for (const py::handle t : {q_, k_, v_})
    if (!THPVariable_CheckExact(t.ptr())) return not_implemented();
  const Tensor &q = THPVariable_Unpack(q_.ptr()), &k = THPVariable_Unpack(k_.ptr()), &v = THPVariable_Unpack(v_.ptr());
  const auto type = q.scalar_type();
  const bool of_cpu = q.device().is_cpu(), known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || (of_cpu && type == at::kDouble);
  if (q.dim() != 4 || !known || !(of_cpu || q.device().is_cuda())) return not_implemented();
  if (q.size(1) == 0 || q.size(2) == 0 || q.size(3) == 0 || q.size(3) > MAX_HEAD_DIM) return not_implemented();
  for (const Tensor* t : {&k, &v})
    if (t->sizes() != q.sizes() || t->scalar_type() != type || t->device() != q.device()) return not_implemented();
  if (at::autocast::is_autocast_enabled(q.device().type()) || at::impl::torch_function_mode_enabled()) return not_implemented();
  const IValue none;
  Stack stack{q, k, v, none, none, none, none, none, none, none, none, scale ? *scale : std::pow(double(q.size(3)), -0.5), false, int64_t(0), 0.0};
  static const Operator& attention = all().at("attention");
  return object(attention.run(stack)[0]);
}

// (B, L, parts N D), or (L, B, parts N D) -> `parts` views (B, N, L, D); see pyext/fusedseq/nn/heads.py.
struct Heads : torch::autograd::Function<Heads> {
  static variable_list forward(AutogradContext* ctx, const Tensor& y, int64_t parts, int64_t num_heads, bool batch_first) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["shape"] = y.sizes().vec();
    ctx->saved_data["batch_first"] = batch_first;
    const int64_t B = batch_first ? 0 : 1, L = 1 - B;
    return y.view({y.size(0), y.size(1), parts, num_heads, -1}).permute({2, B, 3, L, 4}).unbind(0);
  }

  // Whether the gradients (B, N, L, D) are parts of one tensor, each where its part of y is. order: of (B, L, N, D) or (L, B, N, D)
  static bool together(const variable_list& grads, const std::vector<int64_t>& shape, const std::vector<int64_t>& order) {
    for (size_t i = 0; i < grads.size(); ++i) {
      const Tensor &g = grads[i], &first = grads[0];
      if (!g.defined() || !g.has_storage() || g.storage().unsafeGetStorageImpl() != first.storage().unsafeGetStorageImpl()) return false;
      const int64_t size = shape[2] / int64_t(grads.size()), strides[4] = {shape[1] * shape[2], shape[2], g.size(3), 1};
      for (int d = 0; d < 4; ++d)
        if (g.stride(order[d]) != strides[d]) return false;
      if (g.storage_offset() != first.storage_offset() + int64_t(i) * size || g.scalar_type() != first.scalar_type()) return false;
    }
    return true;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto shape = ctx->saved_data["shape"].toIntVector();
    const std::vector<int64_t> order = ctx->saved_data["batch_first"].toBool() ? std::vector<int64_t>{0, 2, 1, 3} : std::vector<int64_t>{2, 0, 1, 3};
    Tensor known;
    for (const Tensor& g : grads)
      if (g.defined()) known = g;
    if (!known.defined()) return variable_list(4);
    if (!at::GradMode::is_enabled() && together(grads, shape, order))
      return {grads[0].as_strided(shape, {shape[1] * shape[2], shape[2], 1}), Tensor(), Tensor(), Tensor()};
    for (Tensor& g : grads) g = (g.defined() ? g : at::zeros_like(known)).permute(order);
    return {at::stack(grads, 2).view(shape), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace
}  // namespace fusedseq

PYBIND11_MODULE(_autograd, m) {
  using namespace fusedseq;
  py::class_<Operator, std::unique_ptr<Operator, py::nodelete>>(m, "Operator", "An operator, called by position; NotImplemented: call it by way of Python.")
      .def("__call__", &Operator::operator())
      .def("checked", &Operator::checked, "The same of inputs that nobody has checked; NotImplemented also if the checks might find a fault.");
  m.def("operators", [] {
    py::dict made;
    for (const auto& [name, op] : all()) made[name.c_str()] = py::cast(&op, py::return_value_policy::reference);
    return made;
  }, "{name: Operator}, of those in torch.ops.fusedseq, which must be loaded and known.");
  m.def("by_python", [](py::object function) { python() = std::move(function); }, py::arg("function"),
        "function(operator, inputs, outputs, grads, needs) -> the gradients of the inputs, where C++ has no formula.");
  m.def("self_attention", &self_attention, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("scale"),
        "fusedseq.fused.attention(q, k, v, scale=scale), or NotImplemented: by way of Python.");
  m.def("heads", [](const Tensor& y, int64_t parts, int64_t num_heads, bool batch_first) {
    return Heads::apply(y, parts, num_heads, batch_first);
  }, py::arg("y"), py::arg("parts"), py::arg("num_heads"), py::arg("batch_first"), "As fusedseq.nn.heads.heads, where a gradient is recorded.");
}
