// How the gradients of the operators that _autograd.cpp records are had, and what the checks at their doors ask.
#pragma once
#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fusedseq {
namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::variable_list;
using Stack = std::vector<IValue>;

bool has(const IValue& v) { return v.isTensor() && v.toTensor().defined(); }
IValue optional(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }

// What the checks at an operator's door ask of its inputs.

// Those of these that are there are tensors of one device and of one dtype, which all kernels take; there is no autocast.
bool alike(const Stack& inputs, std::initializer_list<size_t> places) {
  if (!has(inputs[0])) return false;
  const Tensor& first = inputs[0].toTensor();
  const auto type = first.scalar_type();
  const bool of_cpu = first.device().is_cpu();
  if (!(of_cpu || first.device().is_cuda()) || at::autocast::is_autocast_enabled(first.device().type())) return false;
  if (type != at::kFloat && type != at::kBFloat16 && !(of_cpu && type == at::kDouble)) return false;
  for (size_t i : places)
    if (has(inputs[i]) && (inputs[i].toTensor().scalar_type() != type || inputs[i].toTensor().device() != first.device())) return false;
  return true;
}

// None, or (n,)
bool is_row(const IValue& v, int64_t n) { return !has(v) || (v.toTensor().dim() == 1 && v.toTensor().size(0) == n); }

bool is_dropout(const IValue& x, const IValue& p, const IValue& seed) {
  const bool probability = p.isDouble() && p.toDouble() >= 0 && p.toDouble() <= 1;
  return probability && has(seed) && seed.toTensor().scalar_type() == at::kLong && seed.toTensor().numel() == 1 &&
         seed.toTensor().device() == x.toTensor().device();
}

// What backward knows: the inputs and outputs of forward, None where `forget` said so; the outputs' gradients, undefined
// where there is none; and which inputs need one.
struct Known {
  Stack inputs, outputs;
  variable_list grads;
  std::vector<bool> needs;
};

// How an operator's gradients are had. Its backward gives one for each of `differentiable`, in that order, undefined or empty
// where it is not needed.
struct Formula {
  std::vector<size_t> differentiable;  // inputs
  size_t results;  // outputs that have a gradient, the first ones

  virtual ~Formula() = default;
  virtual const char* backward() const = 0;
  virtual void forget(Stack& inputs, Stack& outputs) const {}  // what backward does not need becomes None
  virtual bool arguments(const Known& known, Stack& to) const = 0;  // of `backward`; false: a case for Python
  virtual void finish(const Known& known, variable_list& grads) const {}
  // Whether the checks of fused/<op>.py would find no fault in these inputs; false also where they have to look.
  virtual bool fits(const Stack& inputs) const { return false; }

  int64_t bits(const Known& known) const {
    int64_t bits = 0;
    for (size_t i = 0; i < differentiable.size(); ++i) bits |= int64_t(known.needs[differentiable[i]]) << i;
    return bits;
  }

 protected:
  Formula(std::vector<size_t> differentiable, size_t results) : differentiable(std::move(differentiable)), results(results) {}
};

// linear(x, W, b) -> y; linear_backward(dy, x, W, needs)
struct Linear : Formula {
  Linear() : Formula({0, 1, 2}, 1) {}
  const char* backward() const override { return "fusedseq::linear_backward"; }
  bool arguments(const Known& k, Stack& to) const override {
    to = {k.grads[0], k.inputs[0], k.inputs[1], bits(k)};
    return true;
  }
  bool fits(const Stack& inputs) const override {
    if (!alike(inputs, {0, 1, 2}) || !has(inputs[1])) return false;
    const Tensor &x = inputs[0].toTensor(), &W = inputs[1].toTensor();
    return x.dim() > 0 && W.dim() == 2 && x.size(-1) == W.size(1) && W.size(1) > 0 && is_row(inputs[2], W.size(0));
  }
};

// bias_activation_dropout(x, b, activation, p, seed) -> y; ..._backward(dy, x, b, activation, p, seed, needs)
struct BiasActivationDropout : Formula {
  BiasActivationDropout() : Formula({0, 1}, 1) {}
  const char* backward() const override { return "fusedseq::bias_activation_dropout_backward"; }
  bool arguments(const Known& k, Stack& to) const override {
    to.emplace_back(k.grads[0]);
    to.insert(to.end(), k.inputs.begin(), k.inputs.end());
    to.emplace_back(bits(k));
    return true;
  }
  bool fits(const Stack& inputs) const override {
    if (!alike(inputs, {0, 1}) || !is_dropout(inputs[0], inputs[3], inputs[4]) || !inputs[2].isString()) return false;
    const Tensor& x = inputs[0].toTensor();
    const std::string& activation = inputs[2].toStringRef();
    const bool known = activation == "relu" || activation == "gelu" || activation == "gelu_tanh" || activation == "tanh";
    return known && x.dim() > 0 && is_row(inputs[1], x.size(-1));
  }
};

// residual_layer_norm(x, residual, weight, bias, p, eps, prenorm, seed) -> y, s, mean, rstd;
// ..._backward(dy, ds, x, residual, weight, s, mean, rstd, p, seed, needs)
struct ResidualLayerNorm : Formula {
  ResidualLayerNorm() : Formula({0, 1, 2, 3}, 2) {}
  const char* backward() const override { return "fusedseq::residual_layer_norm_backward"; }
  static bool prenorm(const Stack& inputs) { return inputs[6].toBool(); }
  void forget(Stack& inputs, Stack& outputs) const override {
    outputs[0] = {};
    if (prenorm(inputs))
      inputs[0] = inputs[1] = {};  // s is kept
    else
      outputs[1] = {};
  }
  // Without dropout the gradients of x and residual are the same tensor, which the backward gives once.
  static bool same(const Known& k) { return k.inputs[4].toDouble() == 0 && k.needs[0] && k.needs[1]; }
  bool arguments(const Known& k, Stack& to) const override {
    const bool pre = prenorm(k.inputs);
    if (!k.grads[0].defined()) return false;
    to = {k.grads[0], pre ? optional(k.grads[1]) : IValue(), pre ? k.outputs[1] : k.inputs[0], k.inputs[1], k.inputs[2],
          pre ? k.outputs[1] : IValue(), k.outputs[2], k.outputs[3], k.inputs[4], k.inputs[7], bits(k) & ~int64_t(same(k))};
    return true;
  }
  void finish(const Known& k, variable_list& grads) const override {
    if (same(k)) grads[0] = grads[1];
  }
  bool fits(const Stack& inputs) const override {
    if (!alike(inputs, {0, 1, 2, 3}) || !is_dropout(inputs[0], inputs[4], inputs[7])) return false;
    const Tensor& x = inputs[0].toTensor();
    if (x.dim() == 0 || x.size(-1) == 0 || !inputs[5].isDouble() || !(inputs[5].toDouble() >= 0) || !inputs[6].isBool()) return false;
    const bool residual = !has(inputs[1]) || inputs[1].toTensor().sizes() == x.sizes();
    return residual && is_row(inputs[2], x.size(-1)) && is_row(inputs[3], x.size(-1));
  }
};

// linear_cross_entropy(x, W, target, b, class_weights, ..., reduction, needs) -> loss, log_prob, lse, argmax, dx, dW, db: the
// gradients are formed with the loss, linear_cross_entropy_scale(dx, dW, db, dloss, needs) has but to multiply them.
struct LinearCrossEntropy : Formula {
  LinearCrossEntropy() : Formula({0, 1, 3}, 3) {}
  const char* backward() const override { return "fusedseq::linear_cross_entropy_scale"; }
  void forget(Stack&, Stack& outputs) const override { outputs[0] = outputs[1] = outputs[3] = {}; }
  bool arguments(const Known& k, Stack& to) const override {
    const int64_t formed = k.inputs.back().toInt(), wanted = bits(k);
    if (k.grads[1].defined() || k.grads[2].defined() || (wanted & formed) != wanted) return false;
    if (k.outputs[4].toTensor().scalar_type() != k.inputs[0].toTensor().scalar_type()) return false;
    to = {k.outputs[4], k.outputs[5], k.outputs[6], k.grads[0], wanted};
    return true;
  }
};

// attention(q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, key_rows, seed, scale, causal, offset, dropout) -> out,
// lse; attention_backward(dout, out, lse, the inputs but key_rows, needs)
struct Attention : Formula {
  Attention() : Formula({0, 1, 2, 3, 7}, 1) {}
  const char* backward() const override { return "fusedseq::attention_backward"; }
  bool arguments(const Known& k, Stack& to) const override {
    to = {k.grads[0], k.outputs[0], k.outputs[1]};
    to.insert(to.end(), k.inputs.begin(), k.inputs.begin() + 9);
    to.insert(to.end(), k.inputs.begin() + 10, k.inputs.end());
    to.emplace_back(bits(k) | together(k));
    return true;
  }

  // Whether b's rows follow those of a in memory.
  static bool adjacent(const Tensor& a, const Tensor& b) {
    const auto behind = a.size(1) * a.size(3) * a.element_size();
    return a.strides() == b.strides() && static_cast<const char*>(b.const_data_ptr()) == static_cast<const char*>(a.const_data_ptr()) + behind;
  }
  // A bit of `needs` where q, k, v (32), or k and v (64), are parts of one projection, the whole of which is made of them.
  static int64_t together(const Known& known) {
    if (!known.needs[1] || !known.needs[2]) return 0;
    const Tensor &q = known.inputs[0].toTensor(), &k = known.inputs[1].toTensor(), &v = known.inputs[2].toTensor();
    const bool three = known.needs[0] && q.sizes() == k.sizes() && adjacent(q, k);
    const int64_t B = k.size(0), S = k.size(2), D = k.size(3), row = (three ? 3 : 2) * k.size(1) * D;
    const auto strides = k.strides();
    const bool first = strides == at::IntArrayRef{S * row, D, row, 1}, second = strides == at::IntArrayRef{row, D, B * row, 1};
    return (first || second) && adjacent(k, v) ? three ? 32 : 64 : 0;
  }
};

const std::map<std::string, std::shared_ptr<const Formula>>& formulas() {
  static const std::map<std::string, std::shared_ptr<const Formula>> all{
      {"attention", std::make_shared<Attention>()},
      {"bias_activation_dropout", std::make_shared<BiasActivationDropout>()},
      {"linear", std::make_shared<Linear>()},
      {"linear_cross_entropy", std::make_shared<LinearCrossEntropy>()},
      {"residual_layer_norm", std::make_shared<ResidualLayerNorm>()},
  };
  return all;
}

}  // namespace
}  // namespace fusedseq
