// The random masks and the embedding as _autograd.cpp records them: operators that are linear in
// their only differentiable input.
#pragma once
#include "python/autograd_formulas.h"

namespace fusedseq {
namespace {

// A product with a random mask: its gradient is the same operator, of the gradient of y.
struct RandomMask : Formula {
  const int64_t dimensions;  // of the first input; 0: any

  explicit RandomMask(const std::string& op, int64_t dimensions = 0)
      : Formula(op, op, 0, sources_of(op)), dimensions(dimensions) {}

  void drop_unread(Stack& inputs, Stack& outputs) const override { inputs[0] = outputs[0] = {}; }
  bool accepts(const Stack& inputs) const override {
    return are_alike(inputs, {0}) && is_valid_dropout(inputs[0], inputs[p], inputs[seed]) &&
           (dimensions == 0 || inputs[0].toTensor().dim() == dimensions);
  }

 private:
  const size_t p = input("p"), seed = input("seed");

  static std::vector<Source> sources_of(const std::string& op) {
    std::vector<Source> sources{{Source::OUTPUT_GRADIENT, 0, false}};
    for (size_t i = 1; i < find(op).schema().arguments().size(); ++i)
      sources.push_back({Source::INPUT, i, false});
    return sources;
  }
};

struct Embedding : Formula {
  Embedding() : Formula("embedding", "embedding_backward", 1, {}) {}

  // Saves V, the number of rows of W, in place of W, which an optimizer may change before the
  // backward.
  void drop_unread(Stack& inputs, Stack& outputs) const override {
    inputs[W] = inputs[W].toTensor().size(0);
    outputs[0] = {};
  }
  bool arguments(const SavedCall& call, Stack& to) const override {
    const IValue no_keys;
    to = {call.output_gradients[0], call.inputs[ids],  call.inputs[W],
          call.inputs[p],           call.inputs[seed], no_keys};
    return true;
  }
  bool accepts(const Stack& inputs) const override {
    if (!is_given(inputs[ids]) || !is_given(inputs[W])) return false;
    const Tensor &words = inputs[ids].toTensor(), &weight = inputs[W].toTensor();
    if (!words.is_cpu() || words.scalar_type() != at::kLong || !words.is_contiguous()) return false;
    if (!weight.is_cpu() || weight.dim() != 2 || !are_alike({inputs[W]}, {})) return false;
    const auto* first = words.const_data_ptr<int64_t>();
    return is_valid_dropout(inputs[W], inputs[p], inputs[seed]) &&
           std::all_of(first, first + words.numel(),
                       [V = weight.size(0)](int64_t word) { return word >= 0 && word < V; });
  }

 private:
  const size_t ids = input("ids"), W = input("W"), p = input("p"), seed = input("seed");
};

}  // namespace
}  // namespace fusedseq
