// The recurrent operators as _autograd.cpp records them.
#pragma once
#include <map>
#include <utility>

#include "python/autograd_formulas.h"

namespace fusedseq {
namespace {

// An operator whose inputs and outputs are named as in csrc/ops/recurrence_arguments.h.
struct Recurrence : Formula {
  explicit Recurrence(const std::string& op) : Formula(op, op + "_backward") {
    for (const size_t i : results) {  // all of them have gradients
      std::string name = forward.schema().returns()[i].name();
      const bool is_y = name[0] == 'y';
      name.insert(1, 1, '0');  // h_reverse becomes h0_reverse
      same_shape[i] = {is_y, is_y ? i : input(name.c_str())};
    }
  }

  // A loss often reads only y, or only the last state, and `backward` takes zeros for the others.
  Tensor absent_gradient(const SavedCall& call, size_t i) const override {
    const auto [is_output, position] = same_shape.at(i);
    const IValue& like = (is_output ? call.outputs : call.inputs)[position];
    return at::zeros(like.toTensor().sizes(), call.inputs[0].toTensor().options());
  }

 private:
  // Of each result: whether it is an output or an input that has its shape, and which one.
  std::map<size_t, std::pair<bool, size_t>> same_shape;
};

// A recurrence in one direction, for calls on the CPU without random masks of which C++ can check
// the arguments.
struct CheckedRecurrence : Recurrence {
  const int64_t gates, biases;  // rows of W_ih and W_hh, and of b, for each hidden unit

  // vector: the input that holds the cell's own parameters, or null    size: its elements for each
  // hidden unit
  CheckedRecurrence(const std::string& op, int64_t gates, int64_t biases,
                    const char* vector = nullptr, int64_t size = 0)
      : Recurrence(op), gates(gates), biases(biases) {
    if (vector) vectors.push_back({input(vector), size});
    const auto& arguments = forward.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto kind = arguments[i].type()->kind();
      const bool is_probability = arguments[i].name() != "eps";
      if (kind == c10::TypeKind::FloatType && is_probability) probabilities.push_back(i);
    }
    for (const char* name : {"h0", "c0"})
      if (has_input(name)) states.push_back(input(name));
  }

  bool accepts(const Stack& inputs) const override {
    if (!are_alike(inputs, {x, W_ih, W_hh, b}) || !inputs[x].toTensor().is_cpu()) return false;
    const Tensor& sequence = inputs[x].toTensor();
    if (sequence.dim() != 3 || !is_given(inputs[states[0]])) return false;
    const Tensor& h0 = inputs[states[0]].toTensor();
    const int64_t T = sequence.size(0), B = sequence.size(1), X = sequence.size(2);
    const int64_t H = h0.dim() == 2 ? h0.size(1) : 0;
    if (T == 0 || X == 0 || H == 0) return false;
    if (!has_shape(inputs[W_ih], {gates * H, X}) || !has_shape(inputs[W_hh], {gates * H, H}) ||
        !is_none_or_row(inputs[b], biases * H))
      return false;
    for (const size_t state : states)
      if (!are_alike(inputs, {x, state}) || !has_shape(inputs[state], {B, H})) return false;
    for (const auto& [vector, size] : vectors)
      if (!are_alike(inputs, {x, vector}) || !has_shape(inputs[vector], {size * H})) return false;
    for (const size_t p : probabilities)
      if (!inputs[p].isDouble() || inputs[p].toDouble() != 0) return false;
    return are_lengths(inputs[lengths], T, B) && are_starts(inputs[starts], T, B) &&
           accepts_rounds(inputs, X, H);
  }

 protected:
  const size_t x = input("x"), W_ih = input("W_ih"), W_hh = input("W_hh"), b = input("b"),
               lengths = input("lengths"), starts = input("starts");

  static bool has_shape(const IValue& v, at::IntArrayRef sizes) {
    return is_given(v) && v.toTensor().sizes() == sizes;
  }
  // Whether the inputs that only mogrifier_lstm has are valid.
  virtual bool accepts_rounds(const Stack& /*inputs*/, int64_t /*X*/, int64_t /*H*/) const {
    return true;
  }

 private:
  // The input that holds the cell's own parameters, if it has some, and its elements for each
  // hidden unit.
  std::vector<std::pair<size_t, int64_t>> vectors;
  std::vector<size_t> probabilities, states;

  static bool are_lengths(const IValue& v, int64_t T, int64_t B) {
    if (!is_given(v)) return true;
    const Tensor& t = v.toTensor();
    if (!is_plain(t) || !t.is_cpu() || t.scalar_type() != at::kLong ||
        t.sizes() != at::IntArrayRef{B})
      return false;
    const int64_t* first = t.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < B; ++i)
      if (const int64_t n = first[i * t.stride(0)]; n < 0 || n > T) return false;
    return true;
  }
  static bool are_starts(const IValue& v, int64_t T, int64_t B) {
    return !is_given(v) || (is_plain(v.toTensor()) && v.toTensor().is_cpu() &&
                            v.toTensor().scalar_type() == at::kBool && has_shape(v, {T, B}));
  }
};

// With weights of full rank.
struct MogrifierLstm : CheckedRecurrence {
  MogrifierLstm() : CheckedRecurrence("mogrifier_lstm", 4, 4) {}

 protected:
  bool accepts_rounds(const Stack& inputs, int64_t X, int64_t H) const override {
    const int64_t n = inputs[rounds].toInt();
    return n >= 0 && n < 64 && !is_given(inputs[Q_factor]) && !is_given(inputs[R_factor]) &&
           are_rounds(inputs, Q, Q_bias, (n + 1) / 2, X, H) &&
           are_rounds(inputs, R, R_bias, n / 2, H, X);
  }

 private:
  const size_t rounds = input("rounds"), Q = input("Q"), R = input("R"),
               Q_factor = input("Q_factor"), R_factor = input("R_factor"), Q_bias = input("Q_bias"),
               R_bias = input("R_bias");

  // uses: the number of rounds on this operand    out, in: the sizes of a weight
  bool are_rounds(const Stack& inputs, size_t W, size_t bias, int64_t uses, int64_t out,
                  int64_t in) const {
    if (uses == 0) return !is_given(inputs[W]) && !is_given(inputs[bias]);
    if (!is_given(inputs[W]) || !are_alike(inputs, {x, W, bias})) return false;
    const Tensor& weight = inputs[W].toTensor();
    const int64_t n = weight.dim() == 3 ? weight.size(0) : 0;
    return (n == 1 || n == uses) && has_shape(inputs[W], {n, out, in}) &&
           (!is_given(inputs[bias]) || has_shape(inputs[bias], {n, out}));
  }
};

}  // namespace
}  // namespace fusedseq
