// The operators whose calls are recorded in C++, each with its formula.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "python/autograd_formulas.h"
#include "python/mask_and_embedding_formulas.h"
#include "python/recurrence_formula.h"

namespace fusedseq {
namespace {

std::map<std::string, std::shared_ptr<const Formula>> make_formulas() {
  return {
      {"activation_regularization",
       std::make_shared<Formula>("activation_regularization",
                                 "activation_regularization_backward")},
      {"attention", std::make_shared<Attention>("attention")},
      {"attention_plain", std::make_shared<Attention>("attention_plain")},
      {"bias_activation_dropout", std::make_shared<BiasActivationDropout>()},
      {"bidirectional_lstm", std::make_shared<Recurrence>("bidirectional_lstm")},
      {"dropout", std::make_shared<RandomMask>("dropout")},
      {"embedding", std::make_shared<Embedding>()},
      {"gru", std::make_shared<CheckedRecurrence>("gru", 3, 4)},
      {"layer_norm_gru", std::make_shared<CheckedRecurrence>("layer_norm_gru", 3, 4, "norm", 6)},
      {"layer_norm_lstm", std::make_shared<CheckedRecurrence>("layer_norm_lstm", 4, 4, "norm", 10)},
      {"linear", std::make_shared<Linear>()},
      {"linear_cross_entropy", std::make_shared<LinearCrossEntropy>()},
      {"locked_dropout", std::make_shared<RandomMask>("locked_dropout", 3)},
      {"lstm", std::make_shared<CheckedRecurrence>("lstm", 4, 4)},
      {"mogrifier_lstm", std::make_shared<MogrifierLstm>()},
      {"peephole_lstm", std::make_shared<CheckedRecurrence>("peephole_lstm", 4, 4, "peephole", 3)},
      {"projected_lstm", std::make_shared<Recurrence>("projected_lstm")},
      {"residual_layer_norm", std::make_shared<ResidualLayerNorm>()},
      {"rnn", std::make_shared<CheckedRecurrence>("rnn", 1, 1)},
      {"weight_drop", std::make_shared<RandomMask>("weight_drop", 2)},
  };
}

}  // namespace
}  // namespace fusedseq
