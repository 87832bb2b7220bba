// A half-open range of rows, columns or other indices.
#pragma once
#include "math/host_device.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

struct Range {
  int64_t begin, end;
  HD int64_t size() const { return end - begin; }
  HD bool contains(int64_t i) const { return begin <= i && i < end; }
};

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
