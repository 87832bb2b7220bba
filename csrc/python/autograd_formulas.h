// How the gradients of the operators that _autograd.cpp records are computed, and which arguments
// need no further checks. Arguments and gradients are connected by the names in the schemas, as in
// pyext/fusedseq/fused/schema.py.
#pragma once
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace fusedseq {
namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::variable_list;
using Stack = std::vector<IValue>;

bool is_given(const IValue& v) {
  return v.isTensor() && v.toTensor().defined();
}
IValue optional(const Tensor& t) {
  return t.defined() ? IValue(t) : IValue();
}

c10::OperatorHandle find(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("fusedseq::" + name).c_str(), "");
}

// ---- checks of arguments, for the calls that skip those of the public functions in Python

// Returns whether a tensor is dense, with strides, and not nested.
inline bool is_plain(const Tensor& t) {
  return t.layout() == at::kStrided && !t.is_nested();
}

// Returns true if inputs[0] and every optional input at `positions` that was given share one device
// and one dtype, that dtype is one that every kernel supports, and autocast is off.
bool are_alike(const Stack& inputs, c10::ArrayRef<size_t> positions) {
  if (!is_given(inputs[0]) || !is_plain(inputs[0].toTensor())) return false;
  const Tensor& first = inputs[0].toTensor();
  const auto type = first.scalar_type();
  const bool on_cpu = first.device().is_cpu();
  if (!on_cpu && !first.device().is_cuda()) return false;
  if (at::autocast::is_autocast_enabled(first.device().type())) return false;
  if (type != at::kFloat && type != at::kBFloat16 && !(on_cpu && type == at::kDouble)) return false;
  for (const size_t i : positions) {
    if (!is_given(inputs[i])) continue;
    const Tensor& t = inputs[i].toTensor();
    if (!is_plain(t) || t.scalar_type() != type || t.device() != first.device()) return false;
  }
  return true;
}

// Returns true for None and for a tensor of shape (n,).
bool is_none_or_row(const IValue& v, int64_t n) {
  return !is_given(v) || (v.toTensor().dim() == 1 && v.toTensor().size(0) == n);
}

// Returns true if p is a probability and seed one int64 on the device of x.
bool is_valid_dropout(const IValue& x, const IValue& p, const IValue& seed) {
  if (!p.isDouble() || !(p.toDouble() >= 0 && p.toDouble() <= 1) || !is_given(seed)) return false;
  const Tensor& s = seed.toTensor();
  return s.scalar_type() == at::kLong && s.numel() == 1 && s.device() == x.toTensor().device();
}

// ---- gradients

// A recorded call in backward. A tensor that was not saved is None. An output that the loss does
// not depend on has an undefined gradient.
struct SavedCall {
  Stack inputs, outputs;
  variable_list output_gradients;
  std::vector<bool> needs;  // of every input: whether it needs a gradient
};

// How an operator's gradients are computed: by calling one backward operator, whose arguments are
// found by their names. Its results, undefined or empty where not needed, are the gradients of the
// inputs `differentiable`, in that order.
struct Formula {
  const c10::OperatorHandle forward, backward;
  std::optional<c10::OperatorHandle> inference;  // `<op>_inference`, if there is one
  std::vector<size_t> inferred;                  // the outputs of `forward` that it returns
  std::vector<size_t> differentiable;
  std::vector<bool> has_gradient, reads_output;  // of every output
  // The outputs that a call returns: not those that `backward` alone reads.
  std::vector<size_t> results;

  // backward: the operator that C++ calls; read: other operators, called by Python, for which
  // outputs are saved as well
  Formula(const std::string& op, const std::string& backward,
          const std::vector<std::string>& read = {})
      : forward(find(op)), backward(find(backward)) {
    const auto& inputs = forward.schema().arguments();
    const auto& outputs = forward.schema().returns();
    has_gradient.resize(outputs.size());
    reads_output.resize(outputs.size());
    for (const auto& result : this->backward.schema().returns())
      differentiable.push_back(position(inputs, result.name().substr(1)));
    for (const auto& argument : this->backward.schema().arguments())
      sources.push_back(source(argument));
    for (const std::string& name : read) {
      for (const auto& argument : find(name).schema().arguments())
        source(argument);
    }
    for (size_t i = 0; i < outputs.size(); ++i)
      if (has_gradient[i] || !reads_output[i]) results.push_back(i);
    inference = c10::Dispatcher::singleton().findSchema({"fusedseq::" + op + "_inference", ""});
    if (inference)
      for (const auto& result : inference->schema().returns())
        inferred.push_back(position(outputs, result.name()));
  }
  virtual ~Formula() = default;

  // Replaces what neither `<op>_backward` nor the oracle reads by None, before a call is saved.
  virtual void drop_unread([[maybe_unused]] Stack& inputs, Stack& outputs) const {
    for (size_t i = 0; i < outputs.size(); ++i)
      if (!reads_output[i]) outputs[i] = {};
  }
  // Returns true if the gradients were computed in forward and no longer have to change.
  virtual bool are_ready(const SavedCall& /*call*/, variable_list& /*gradients*/) const {
    return false;
  }
  // Writes the arguments of `backward`; returns false for a call that Python has to handle.
  virtual bool arguments(const SavedCall& call, Stack& to) const {
    return arguments(call, to, bits(call));
  }
  // The zeros that stand in for the undefined gradient of an output where `backward` requires a
  // tensor; undefined if the formula cannot make them.
  virtual Tensor absent_gradient(const SavedCall& /*call*/, size_t /*output*/) const { return {}; }
  // Completes the gradients that `backward` returned.
  virtual void finish(const SavedCall& /*call*/, variable_list& /*gradients*/) const {}
  // Returns true if the checks of the public function would accept these inputs; false also where
  // that is not certain.
  virtual bool accepts(const Stack& /*inputs*/) const { return false; }

 protected:
  // Where an argument of `backward` comes from.
  struct Source {
    enum Kind { INPUT, OUTPUT, OUTPUT_GRADIENT, NEEDS } kind;
    size_t position;
    bool is_optional;
  };

  // For an operator with one output whose backward is not called by the names in its schema.
  Formula(const std::string& op, const std::string& backward, size_t differentiable,
          std::vector<Source> sources)
      : forward(find(op)),
        backward(find(backward)),
        differentiable{differentiable},
        has_gradient{true},
        reads_output{false},
        results{0},
        sources(std::move(sources)) {}

  size_t input(const char* name) const { return position(forward.schema().arguments(), name); }
  size_t output(const char* name) const { return position(forward.schema().returns(), name); }
  bool has_input(const char* name) const { return contains(forward.schema().arguments(), name); }

  // The argument `needs`: bit i is set if the i-th of `differentiable` needs a gradient.
  int64_t bits(const SavedCall& call) const {
    int64_t bits = 0;
    for (size_t i = 0; i < differentiable.size(); ++i)
      bits |= int64_t(call.needs[differentiable[i]]) << i;
    return bits;
  }

  bool arguments(const SavedCall& call, Stack& to, int64_t needs) const {
    to.reserve(sources.size());
    for (const Source& s : sources) {
      switch (s.kind) {
        case Source::NEEDS:
          to.emplace_back(needs);
          break;
        case Source::INPUT:
          to.push_back(call.inputs[s.position]);
          break;
        case Source::OUTPUT:
          to.push_back(call.outputs[s.position]);
          break;
        case Source::OUTPUT_GRADIENT: {
          Tensor gradient = call.output_gradients[s.position];
          if (!gradient.defined() && !s.is_optional) {
            gradient = absent_gradient(call, s.position);
            if (!gradient.defined()) return false;
          }
          to.push_back(optional(gradient));
        }
      }
    }
    return true;
  }

 private:
  std::vector<Source> sources;

  static size_t position(const std::vector<c10::Argument>& list, const std::string& name) {
    const auto found = std::find_if(list.begin(), list.end(),
                                    [&](const c10::Argument& a) { return a.name() == name; });
    TORCH_CHECK(found != list.end(), "fusedseq: no schema entry is called ", name);
    return size_t(found - list.begin());
  }
  static bool contains(const std::vector<c10::Argument>& list, const std::string& name) {
    return std::any_of(list.begin(), list.end(),
                       [&](const c10::Argument& a) { return a.name() == name; });
  }

  Source source(const c10::Argument& argument) {
    const auto& inputs = forward.schema().arguments();
    const auto& outputs = forward.schema().returns();
    const std::string& name = argument.name();
    const bool is_optional = argument.type()->kind() == c10::TypeKind::OptionalType;
    if (name == "needs") return {Source::NEEDS, 0, false};
    if (contains(inputs, name)) return {Source::INPUT, position(inputs, name), is_optional};
    if (contains(outputs, name)) {
      const size_t i = position(outputs, name);
      reads_output[i] = true;
      return {Source::OUTPUT, i, is_optional};
    }
    const size_t i = position(outputs, name.substr(1));
    has_gradient[i] = true;
    return {Source::OUTPUT_GRADIENT, i, is_optional};
  }
};

struct Linear : Formula {
  const size_t x = input("x"), W = input("W"), b = input("b");

  Linear() : Formula("linear", "linear_backward") {}
  bool accepts(const Stack& inputs) const override {
    if (!are_alike(inputs, {x, W, b}) || !is_given(inputs[W])) return false;
    const Tensor &t = inputs[x].toTensor(), &weight = inputs[W].toTensor();
    return t.dim() > 0 && weight.dim() == 2 && t.size(-1) == weight.size(1) && weight.size(1) > 0 &&
           is_none_or_row(inputs[b], weight.size(0));
  }
};

struct BiasActivationDropout : Formula {
  const size_t x = input("x"), b = input("b"), activation = input("activation"), p = input("p"),
               seed = input("seed");

  BiasActivationDropout()
      : Formula("bias_activation_dropout", "bias_activation_dropout_backward") {}
  bool accepts(const Stack& inputs) const override {
    if (!are_alike(inputs, {x, b}) || !inputs[activation].isString()) return false;
    if (!is_valid_dropout(inputs[x], inputs[p], inputs[seed])) return false;
    const Tensor& t = inputs[x].toTensor();
    const std::string& name = inputs[activation].toStringRef();
    const bool is_known = name == "relu" || name == "gelu" || name == "gelu_tanh" || name == "tanh";
    return is_known && t.dim() > 0 && is_none_or_row(inputs[b], t.size(-1));
  }
};

struct ResidualLayerNorm : Formula {
  const size_t x = input("x"), residual = input("residual"), weight = input("weight"),
               bias = input("bias"), p = input("p"), eps = input("eps"), prenorm = input("prenorm"),
               seed = input("seed"), y = output("y"), s = output("s");

  ResidualLayerNorm() : Formula("residual_layer_norm", "residual_layer_norm_backward") {}

  // Pre-norm saves s in place of x and residual; post-norm has no s.
  void drop_unread(Stack& inputs, Stack& outputs) const override {
    outputs[y] = {};
    if (inputs[prenorm].toBool())
      inputs[x] = inputs[residual] = {};
    else
      outputs[s] = {};
  }
  // Without dropout x and residual have the same gradient, which is computed once.
  bool is_shared(const SavedCall& call) const {
    return call.inputs[p].toDouble() == 0 && call.needs[x] && call.needs[residual];
  }
  bool arguments(const SavedCall& saved, Stack& to) const override {
    SavedCall call = saved;
    if (call.inputs[prenorm].toBool())
      call.inputs[x] = call.outputs[s];
    else
      call.output_gradients[s] = Tensor();
    const int64_t first_bit = is_shared(call);  // bit 0 is the gradient of x
    return Formula::arguments(call, to, bits(call) & ~first_bit);
  }
  void finish(const SavedCall& call, variable_list& gradients) const override {
    if (is_shared(call)) gradients[0] = gradients[1];
  }
  bool accepts(const Stack& inputs) const override {
    if (!are_alike(inputs, {x, residual, weight, bias})) return false;
    if (!is_valid_dropout(inputs[x], inputs[p], inputs[seed])) return false;
    if (!inputs[eps].isDouble() || !(inputs[eps].toDouble() >= 0)) return false;
    const Tensor& t = inputs[x].toTensor();
    if (t.dim() == 0 || t.size(-1) == 0 || !inputs[prenorm].isBool()) return false;
    if (is_given(inputs[residual]) && inputs[residual].toTensor().sizes() != t.sizes())
      return false;
    return is_none_or_row(inputs[weight], t.size(-1)) && is_none_or_row(inputs[bias], t.size(-1));
  }
};

// The gradients were computed with the loss: linear_cross_entropy_scale multiplies them by the
// gradient of the loss.
struct LinearCrossEntropy : Formula {
  const size_t needs = input("needs"), loss = output("loss"), log_prob = output("log_prob"),
               lse = output("lse");
  const size_t computed[3] = {output("dx"), output("dW"), output("db")};

  LinearCrossEntropy()
      : Formula("linear_cross_entropy", "linear_cross_entropy_scale",
                {"linear_cross_entropy_backward"}) {}
  // Python computes the gradients anew if log_prob or lse has one, or if not all were computed with
  // the loss.
  bool arguments(const SavedCall& call, Stack& to) const override {
    return suffice(call) && Formula::arguments(call, to, bits(call));
  }
  // The gradient of a loss that is differentiated itself is one, and a product by one only copies:
  // for few rows that takes as long as one of the products, and memory for W once more. So the
  // saved tensors are given away, except where they are kept for another backward (retain_graph).
  bool are_ready(const SavedCall& call, variable_list& gradients) const override {
    if (torch::autograd::get_current_graph_task_keep_graph() || !suffice(call)) return false;
    const Tensor& dloss = call.output_gradients[loss];
    // A fake or a batched tensor, and one that a dispatch mode intercepts, has no value to read.
    if (!dloss.is_cpu() || at::isTensorSubclassLike(dloss)) return false;
    if (dloss.item().toDouble() != 1) return false;
    for (size_t i = 0; i < gradients.size(); ++i)
      if (call.needs[differentiable[i]]) gradients[i] = call.outputs[computed[i]].toTensor();
    return true;
  }

 private:
  // Returns whether the gradients that were computed with the loss are all that backward needs.
  bool suffice(const SavedCall& call) const {
    if (call.output_gradients[log_prob].defined() || call.output_gradients[lse].defined())
      return false;
    return (bits(call) & ~call.inputs[needs].toInt()) == 0;
  }
};

struct Attention : Formula {
  const size_t q = input("q"), k = input("k"), v = input("v"), scale = input("scale");
  static constexpr int64_t QKV_TOGETHER = 1 << 6, KV_TOGETHER = 1 << 7;

  explicit Attention(const std::string& op) : Formula(op, op + "_backward") {}
  bool arguments(const SavedCall& call, Stack& to) const override {
    return Formula::arguments(call, to, bits(call) | shared_projection(call));
  }

  // The inputs of a call without options: q, k, v and scale are still None.
  Stack without_options() const {
    Stack inputs(forward.schema().arguments().size());
    inputs[input("rope_interleaved")] = true;
    inputs[input("causal")] = false;
    inputs[input("offset")] = int64_t(0);
    inputs[input("dropout")] = 0.0;
    inputs[input("window_left")] = int64_t(-1);
    inputs[input("window_right")] = int64_t(-1);
    inputs[input("softcap")] = 0.0;
    inputs[input("max_seqlen_q")] = int64_t(0);
    inputs[input("max_seqlen_k")] = int64_t(0);
    return inputs;
  }

  // Returns whether each row of b follows the row of a in memory.
  static bool are_adjacent(const Tensor& a, const Tensor& b) {
    const auto width = a.size(1) * a.size(3) * a.element_size();
    return a.strides() == b.strides() && static_cast<const char*>(b.const_data_ptr()) ==
                                             static_cast<const char*>(a.const_data_ptr()) + width;
  }
  // Returns a bit of `needs` if q, k and v, or k and v, are the views that together make up one
  // projection, else 0: see shared_projection in pyext/fusedseq/fused/attention.py.
  int64_t shared_projection(const SavedCall& call) const {
    // Three views of one tensor would be results that share memory, which torch forbids an operator
    // that is traced or that a dispatch mode intercepts.
    if (!call.needs[k] || !call.needs[v] || at::isTensorSubclassLike(call.inputs[k].toTensor()))
      return 0;
    const Tensor &query = call.inputs[q].toTensor(), &key = call.inputs[k].toTensor(),
                 &value = call.inputs[v].toTensor();
    const bool all_three =
        call.needs[q] && query.sizes() == key.sizes() && are_adjacent(query, key);
    const int64_t B = key.size(0), S = key.size(2), D = key.size(3);
    const int64_t row = (all_three ? 3 : 2) * key.size(1) * D;
    const auto strides = key.strides();
    const bool is_whole = strides == at::IntArrayRef{S * row, D, row, 1} ||
                          strides == at::IntArrayRef{row, D, B * row, 1};
    if (!is_whole || !are_adjacent(key, value)) return 0;
    return all_three ? QKV_TOGETHER : KV_TOGETHER;
  }
};

}  // namespace
}  // namespace fusedseq
