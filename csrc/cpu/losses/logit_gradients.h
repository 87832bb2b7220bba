// The gradients of rows of logits, from the logits and their log-sum-exp.
#pragma once
#include "cpu/arguments/losses.h"
#include "cpu/buffer.h"
#include "cpu/range.h"
#include "cpu/simd/elementary_functions.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Gradient: the type of the gradients
template <class Real, class Stored, class Gradient>
class LogitGradients {
 public:
  LogitGradients() = default;
  // rows: in a chunk
  LogitGradients(const cpu::LinearCrossEntropy<Real, Stored>& l, int64_t rows)
      : l(&l), coefficients(rows) {}

  // Before the first block of row n, which is row i of its chunk.
  void begin(int64_t n, int64_t i) {
    const double w = weight(n);
    const double dloss = l->dloss ? l->dloss[n] : l->dloss_of_all;
    const double dlog_prob = l->dlog_prob ? l->dlog_prob[n] : 0.;
    const double target = (1 - l->label_smoothing) * w * dloss - dlog_prob;
    const double classes = l->label_smoothing / double(l->V) * dloss;
    const double rest = 2 * l->z_loss * w * l->lse[n] * dloss + (l->dlse ? l->dlse[n] : 0.);
    coefficients[i] = {target / l->temperature, classes / l->temperature, rest / l->temperature};
  }

  // dz = the gradients of a block of columns of the logits z of row n, which is row i of its chunk.
  // dz may be z.
  void differentiate(const Real* z, Gradient* dz, Range block, int64_t n, int64_t i) const {
    constexpr int lanes = LANES<Real>;
    const Coefficients c = coefficients[i];
    const int64_t columns = block.size(), y = l->target[n];
    const bool has_target = block.begin <= y && y < block.end;
    const double P = has_target ? ::exp(double(z[y - block.begin]) - double(l->lse[n])) : 0;
    const Vec<Real> lse(l->lse[n]), p(Real(c.p(l->weights_sum))), classes(Real(c.classes));
    if (l->class_weights && c.classes != 0) {
      for (int64_t j = 0; j < columns; j += lanes) {
        const Vec<Real> weights = Vec<Real>::load(l->class_weights + block.begin + j, columns - j);
        store_as(dz + j, p * exp_(Vec<Real>::load(z + j) - lse) - classes * weights);
      }
    } else {
      for (int64_t j = 0; j < columns; j += lanes)
        store_as(dz + j, p * exp_(Vec<Real>::load(z + j) - lse) - classes);
    }
    if (has_target)
      store_scalar(
          dz + (y - block.begin),
          Real(c.target * (P - 1) + c.classes * (l->weights_sum * P - weight(n)) + c.rest * P));
  }

 private:
  // The gradient of a row with respect to its logits before they are divided by the temperature is
  //   target * (P - [the target's column]) + classes * (weights_sum * P - class_weights) + rest * P
  // with P = softmax, that is p * P - classes * class_weights in every column but the target's. In
  // that column P may be near 1, and the differences above are formed before they are added.
  struct Coefficients {
    double target, classes, rest;
    double p(double weights_sum) const { return target + classes * weights_sum + rest; }
  };

  const cpu::LinearCrossEntropy<Real, Stored>* l = nullptr;
  Buffer<Coefficients> coefficients;  // (rows,)

  // The class weight of a row's target.
  Real weight(int64_t n) const {
    return l->class_weights ? l->class_weights[l->target[n]] : Real(1);
  }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
