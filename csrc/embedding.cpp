// embedding: the gather with embedding dropout in it, and its gradient, which touches only the rows that were used.
#include <sys/mman.h>

#include "tensor.h"

namespace fusedseq {
namespace {

void require_ids(const Tensor& ids, int64_t V) {
  require(ids.scalar_type() == ScalarType::Long && ids.is_contiguous(), "embedding", "ids must be contiguous int64");
  const int64_t* id = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t n = 0; n < ids.numel(); ++n)
    STD_TORCH_CHECK(id[n] >= 0 && id[n] < V, "embedding: ids must be in [0, V) = [0, ", V, "), got ", id[n]);
}

cpu::Embedding arguments(const Tensor& ids, int64_t V, int64_t E, cpu::Type type, double p, const Tensor& seed) {
  return {type, ids.numel(), V, E, static_cast<const int64_t*>(ids.const_data_ptr()), nullptr, nullptr, nullptr, p > 0,
          mask(seed, p)};
}

Tensor embedding(Tensor ids, Tensor W, double p, Tensor seed) {
  const Tensor index = dense(ids), table = dense(W);
  require(W.dim() == 2, "embedding", "W must be (V, E)");
  require_ids(index, W.size(0));
  Sizes shape(ids.sizes().begin(), ids.sizes().end());
  shape.push_back(W.size(1));
  Tensor y = output(W, shape);
  cpu::Embedding e = arguments(index, W.size(0), W.size(1), kernel_type("embedding", W), p, seed);
  e.W = table.const_data_ptr(), e.y = y.mutable_data_ptr();
  if (y.numel()) cpu::kernels().embedding(e, parallel, threads());
  return y;
}

// Memory for a gradient, and whether it is zeroed. A large one the system zeroes where it is first touched, so that only
// the rows used cost anything: by huge pages, unless faults for the rows used cost less.
struct Table { Tensor t; bool zeroed; };
Table table(const Tensor& like, int64_t rows, int64_t columns, ScalarType type, int64_t used) {
  const int64_t row_bytes = columns * (type == ScalarType::Double ? 8 : 4), bytes = rows * row_bytes;
  const Sizes shape{rows, columns}, strides{columns, 1};
  constexpr int64_t REUSED = int64_t(64) << 20, PAGE = 4096, HUGE_PAGE = 1 << 21, HUGE_FAULT = 28;  // in faults of a page
  if (bytes <= REUSED) return {output(like, shape, type), false};
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  STD_TORCH_CHECK(p != MAP_FAILED, "embedding: no memory for a gradient of ", rows, " x ", columns);
#ifdef MADV_HUGEPAGE
  if (bytes / HUGE_PAGE * HUGE_FAULT < used * (row_bytes / PAGE + 1)) madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return {torch::stable::from_blob(p, shape, strides, like.device(), type, [bytes](void* q) { munmap(q, bytes); }), true};
}

// dy (..., E) -> dW (V, E). With keys, row v of dW is the row of word keys[v]: the compact gradient of those words.
Tensor embedding_backward(Tensor dy, Tensor ids, int64_t V, double p, Tensor seed, std::optional<Tensor> keys) {
  const Tensor index = dense(ids), d = dense(dy);
  require_ids(index, V);
  require(dy.dim() >= 1 && dy.numel() == ids.numel() * dy.size(dy.dim() - 1), "embedding", "dy must be (*ids.shape, E)");
  const int64_t E = dy.size(dy.dim() - 1);
  const ScalarType type = dy.scalar_type();
  auto [dW, zeroed] = table(dy, V, E, type == ScalarType::BFloat16 ? ScalarType::Float : type, ids.numel());
  cpu::Embedding e = arguments(index, V, E, kernel_type("embedding", dy), p, seed);
  const Tensor key = keys ? dense(*keys) : index;
  if (keys) {
    require(key.numel() == V && key.scalar_type() == ScalarType::Long, "embedding", "keys must be (V,) int64");
    e.keys = static_cast<const int64_t*>(key.const_data_ptr());
  }
  if (dW.numel()) cpu::kernels().embedding_backward(e, d.const_data_ptr(), dW.mutable_data_ptr(), zeroed, parallel, threads());
  return as_type(dW, type);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("embedding(Tensor ids, Tensor W, float p, Tensor seed) -> Tensor");
  m.def("embedding_backward(Tensor dy, Tensor ids, int V, float p, Tensor seed, Tensor? keys) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("embedding", TORCH_BOX(&embedding));
  m.impl("embedding_backward", TORCH_BOX(&embedding_backward));
}

}  // namespace fusedseq
