// An operator as Python calls it: converts the arguments, calls the operator, and records the call
// for autograd where an input requires a gradient.
#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <cctype>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "python/conversion.h"
#include "python/formula_table.h"

namespace fusedseq {
namespace {

using torch::autograd::AutogradContext;

// The function (operator, inputs, outputs, grads, needs) -> gradients of the inputs, in Python.
py::object& python_gradients() {
  // It is never destroyed, because Python may have ended before this library is unloaded.
  static py::object* function = new py::object;
  return *function;
}

// Whether a tensor has a tangent of forward-mode AD.
bool is_dual(const Tensor& t) {
  constexpr uint64_t LEVEL = 0;  // the only one that torch has
  return t.defined() && t._fw_grad(LEVEL).defined();
}

// Calls an operator without recording the call.
void call_below_autograd(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowAutograd guard;
  op.callBoxed(stack);
}

// FusedseqLinearBackward for linear, as pyext/fusedseq/fused/autograd.py names the nodes that
// Python records.
std::string node_name_of(const std::string& op) {
  std::string name = "Fusedseq";
  bool begins_word = true;
  for (const char letter : op) {
    if (letter != '_') name += begins_word ? char(std::toupper(letter)) : letter;
    begins_word = letter == '_';
  }
  return name + "Backward";
}

struct Operator {
  const std::string name;
  const std::string node_name;  // of its node in autograd's graph
  const std::shared_ptr<const Formula> formula;
  std::vector<ArgumentType> types;  // of the arguments

  Operator(const std::string& name, std::shared_ptr<const Formula> formula)
      : name(name), node_name(node_name_of(name)), formula(std::move(formula)) {
    for (const auto& argument : this->formula->forward.schema().arguments()) {
      const auto optional = argument.type()->cast<c10::OptionalType>();
      const auto& type = optional ? optional->getElementType() : argument.type();
      types.push_back({type->kind(), bool(optional)});
    }
  }

  // Returns the results, or NotImplemented if the call has to be made in Python.
  py::object operator()(const py::args& values) const {
    Stack stack;
    return convert(values, stack) ? to_python(run(stack)) : not_implemented();
  }
  // The same for arguments that were not checked yet: NotImplemented also if a check might fail.
  py::object checked(const py::args& values) const {
    Stack stack;
    if (!convert(values, stack) || !formula->accepts(stack)) return not_implemented();
    return to_python(run(stack));
  }

  bool convert(const py::args& values, Stack& to) const {
    if (values.size() != types.size() || at::impl::torch_function_mode_enabled()) return false;
    to.resize(types.size());
    for (size_t i = 0; i < types.size(); ++i)
      if (!from_python(PyTuple_GET_ITEM(values.ptr(), i), types[i], to[i])) return false;
    return true;
  }
  variable_list run(Stack& stack) const;
};

const std::map<std::string, Operator>& all_operators() {
  static const auto* operators = [] {
    auto* made = new std::map<std::string, Operator>;
    for (const auto& [name, formula] : make_formulas())
      made->emplace(std::piecewise_construct, std::forward_as_tuple(name),
                    std::forward_as_tuple(name, formula));
    return made;
  }();
  return *operators;
}

// What torch::autograd::Function<F> records, with a node that has the name F::node_name(its
// context) in profiles and printed graphs: see CppNode<Named<F>> below.
template <class F>
struct Named : torch::autograd::Function<Named<F>> {
  template <class... Inputs>
  static variable_list forward(AutogradContext* ctx, Inputs&&... inputs) {
    return F::forward(ctx, std::forward<Inputs>(inputs)...);
  }
};

}  // namespace
}  // namespace fusedseq

// The node of a Function of torch has the name of its C++ class. torch looks a node up as
// CppNode<F>, so a specialization of it is the place to override the name.
template <class F>
struct torch::autograd::CppNode<fusedseq::Named<F>> : torch::autograd::CppNode<F> {
  std::string name() const override { return F::node_name(this->ctx_); }

  // The last call of Function::apply, which needs the set of results without a gradient no longer.
  // Compiled autograd fails if the set is not empty.
  void save_variables_to_ctx() {
    torch::autograd::CppNode<F>::save_variables_to_ctx();
    this->ctx_.non_differentiable_.clear();
  }
};

namespace fusedseq {
namespace {

// The autograd node of a recorded call.
struct Recorded : torch::autograd::Function<Recorded> {
  // Whether compiled autograd may trace `backward`, which reads only what `save` has stored in the
  // context.
  static constexpr bool is_traceable = true;

  // stack: the inputs. present: bit i is set if the i-th of formula.differentiable was given. The
  // last argument, which is not used here, has these tensors: torch reads from it what to record.
  static variable_list forward(AutogradContext* ctx, const Operator& op, Stack& stack,
                               int64_t present, at::TensorList) {
    Stack inputs = stack;
    call_below_autograd(op.formula->forward, stack);
    variable_list results, constants;
    for (const size_t i : op.formula->results) {
      results.push_back(stack[i].toTensor());
      if (!op.formula->has_gradient[i]) constants.push_back(results.back());
    }
    ctx->mark_non_differentiable(constants);
    ctx->set_materialize_grads(false);
    save(ctx, op, std::move(inputs), stack, present);
    return results;
  }

  // Tensors are saved as autograd's variables, so that it notices when one is changed in place. The
  // other inputs, `op` and `present` are one tuple: every entry of saved_data takes a lookup.
  static void save(AutogradContext* ctx, const Operator& op, Stack inputs, Stack outputs,
                   int64_t present) {
    op.formula->drop_unread(inputs, outputs);
    variable_list tensors;
    tensors.reserve(inputs.size() + outputs.size());
    for (Stack* values : {&inputs, &outputs})
      for (const IValue& v : *values)
        tensors.push_back(v.isTensor() ? v.toTensor() : Tensor());
    for (IValue& v : inputs)
      if (v.isTensor()) v = {};
    ctx->save_for_backward(std::move(tensors));
    // A pointer to an entry of all_operators(), which is never destroyed.
    inputs.emplace_back(int64_t(reinterpret_cast<intptr_t>(&op)));
    inputs.emplace_back(present);
    ctx->saved_data["call"] = c10::ivalue::Tuple::create(std::move(inputs));
  }
  // The operator of a call that `save` has saved, from its tuple.
  static const Operator& saved_operator(const IValue& call) {
    const auto& inputs = call.toTupleRef().elements();
    return *reinterpret_cast<const Operator*>(intptr_t(inputs[inputs.size() - 2].toInt()));
  }
  // torch empties the context of a node that has been released.
  static std::string node_name(const AutogradContext& ctx) {
    const auto call = ctx.saved_data.find("call");
    return call == ctx.saved_data.end() ? "FusedseqBackward"
                                        : saved_operator(call->second).node_name;
  }

  // inputs: those that are not tensors; the others are None
  static SavedCall load(AutogradContext* ctx, const Formula& formula, Stack inputs, int64_t present,
                        variable_list of_results) {
    SavedCall call;
    call.inputs = std::move(inputs);
    const variable_list tensors = ctx->get_saved_variables();
    const size_t n = call.inputs.size();
    for (size_t i = 0; i < n; ++i)
      if (tensors[i].defined()) call.inputs[i] = tensors[i];
    for (size_t i = n; i < tensors.size(); ++i)
      call.outputs.push_back(optional(tensors[i]));
    call.needs.resize(n);
    size_t edge = 0;  // of the tensors that were given
    for (size_t i = 0; i < formula.differentiable.size(); ++i)
      if (present >> i & 1) call.needs[formula.differentiable[i]] = ctx->needs_input_grad(edge++);
    call.output_gradients.resize(call.outputs.size());
    for (size_t i = 0; i < formula.results.size(); ++i)
      call.output_gradients[formula.results[i]] = std::move(of_results[i]);
    return call;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const IValue& saved = ctx->saved_data["call"];
    const Operator& op = saved_operator(saved);
    Stack inputs = saved.toTupleRef().elements().vec();
    const int64_t present = inputs.back().toInt();
    inputs.resize(inputs.size() - 2);
    const Formula& formula = *op.formula;
    const SavedCall call = load(ctx, formula, std::move(inputs), present, std::move(grads));
    const variable_list found = gradients(op, call);
    variable_list result(3);  // of forward's arguments before the tensors
    for (size_t i = 0; i < found.size(); ++i)
      if (present >> i & 1)
        result.push_back(call.needs[formula.differentiable[i]] ? found[i] : Tensor());
    return result;
  }

  // The gradients of formula.differentiable.
  static variable_list gradients(const Operator& op, const SavedCall& call) {
    const Formula& formula = *op.formula;
    variable_list found(formula.differentiable.size());
    bool any = false, duals = false;  // dual tensors: those of forward-mode AD, with a tangent
    for (const Tensor& gradient : call.output_gradients) {
      any |= gradient.defined();
      duals |= is_dual(gradient);
    }
    if (!any) return found;
    Stack stack;
    // With grad mode on, the gradients must be differentiable themselves.
    if (at::GradMode::is_enabled() || duals) return gradients_in_python(op, call);
    if (formula.are_ready(call, found)) return found;
    if (!formula.arguments(call, stack)) return gradients_in_python(op, call);
    call_below_autograd(formula.backward, stack);
    for (size_t i = 0; i < found.size(); ++i)
      found[i] = stack[i].toTensor();
    formula.finish(call, found);
    return found;
  }

  static variable_list gradients_in_python(const Operator& op, const SavedCall& call) {
    variable_list given = call.output_gradients;
    for (size_t i = 0; i < given.size(); ++i)
      if (!given[i].defined() && op.formula->has_gradient[i])
        given[i] = op.formula->absent_gradient(call, i);
    const py::gil_scoped_acquire gil;
    const py::object grads = python_gradients()(op.name, to_python(call.inputs),
                                                to_python(call.outputs), given, call.needs);
    variable_list found;
    for (const size_t i : op.formula->differentiable) {
      const py::object g = grads.attr("__getitem__")(i);
      found.push_back(g.is_none() ? Tensor() : g.cast<Tensor>());
    }
    return found;
  }
};

// Calls the operator; records the call if an input requires a gradient, and else calls
// `<op>_inference` where there is one. Outputs that are not results are then undefined.
variable_list Operator::run(Stack& stack) const {
  variable_list tensors, results;
  int64_t present = 0;
  bool requires_grad = false;
  for (size_t i = 0; i < formula->differentiable.size(); ++i) {
    const IValue& v = stack[formula->differentiable[i]];
    if (!is_given(v)) continue;
    tensors.push_back(v.toTensor());
    present |= int64_t(1) << i;
    requires_grad |= tensors.back().requires_grad();
  }
  const py::gil_scoped_release no_gil;
  if (requires_grad && at::GradMode::is_enabled()) {
    variable_list found = Named<Recorded>::apply(*this, stack, present, at::TensorList(tensors));
    results.resize(formula->forward.schema().returns().size());
    for (size_t i = 0; i < found.size(); ++i)
      results[formula->results[i]] = std::move(found[i]);
    return results;
  }
  if (formula->inference && tensors[0].is_cpu()) {
    call_below_autograd(*formula->inference, stack);
    results.resize(formula->forward.schema().returns().size());
    for (size_t i = 0; i < stack.size(); ++i)
      results[formula->inferred[i]] = stack[i].toTensor();
    return results;
  }
  call_below_autograd(formula->forward, stack);
  for (const IValue& v : stack)
    results.push_back(v.toTensor());
  return results;
}

}  // namespace
}  // namespace fusedseq
