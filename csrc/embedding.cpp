// embedding: the gather with embedding dropout in it, and its gradient, which touches only the rows that were used.
#include "embedding_cuda.h"

#include <sys/mman.h>

#include <array>

#include "cuda_stream.h"
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

Sizes result_shape(const Tensor& ids, const Tensor& W) {
  require(W.dim() == 2, "embedding", "W must be (V, E)");
  Sizes shape(ids.sizes().begin(), ids.sizes().end());
  shape.push_back(W.size(1));
  return shape;
}

Tensor embedding(Tensor ids, Tensor W, double p, Tensor seed) {
  const Tensor index = dense(ids), table = dense(W);
  Tensor y = output(W, result_shape(ids, W));
  require_ids(index, W.size(0));
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

// E of dy (*ids.shape, E).
int64_t width(const Tensor& dy, const Tensor& ids) {
  require(dy.dim() >= 1 && dy.numel() == ids.numel() * dy.size(dy.dim() - 1), "embedding", "dy must be (*ids.shape, E)");
  return dy.size(dy.dim() - 1);
}
void require_keys(const Tensor& keys, int64_t V) {
  require(keys.numel() == V && keys.scalar_type() == ScalarType::Long, "embedding", "keys must be (V,) int64");
}

// dy (..., E) -> dW (V, E). With keys, row v of dW is the row of word keys[v]: the compact gradient of those words.
Tensor embedding_backward(Tensor dy, Tensor ids, int64_t V, double p, Tensor seed, std::optional<Tensor> keys) {
  const Tensor index = dense(ids), d = dense(dy);
  require_ids(index, V);
  const int64_t E = width(dy, ids);
  const ScalarType type = dy.scalar_type();
  auto [dW, zeroed] = table(dy, V, E, type == ScalarType::BFloat16 ? ScalarType::Float : type, ids.numel());
  cpu::Embedding e = arguments(index, V, E, kernel_type("embedding", dy), p, seed);
  const Tensor key = keys ? dense(*keys) : index;
  if (keys) {
    require_keys(key, V);
    e.keys = static_cast<const int64_t*>(key.const_data_ptr());
  }
  if (dW.numel()) cpu::kernels().embedding_backward(e, d.const_data_ptr(), dW.mutable_data_ptr(), zeroed, parallel, threads());
  return as_type(dW, type);
}

#ifdef FUSEDSEQ_CUDA
// The device of all of them.
int32_t device_of(const Tensor& first, const std::vector<Tensor>& others) {
  for (const Tensor& t : others)
    require(t.is_cuda() && t.get_device_index() == first.get_device_index(), "embedding", "tensors must be on one device");
  return first.get_device_index();
}

void require_started(const char* error, int64_t N, int64_t V, int64_t E) {
  STD_TORCH_CHECK(!error, "embedding: its kernels for ", N, " ids and W (", V, ", ", E, "): ", error ? error : "");
}

const int64_t* int64s(const Tensor& t) {
  require(t.scalar_type() == ScalarType::Long, "embedding", "ids and seed must be int64");
  return static_cast<const int64_t*>(t.const_data_ptr());
}

Tensor embedding_cuda(Tensor ids, Tensor W, double p, Tensor seed) {
  const Tensor index = dense(ids), table = dense(W);
  const int32_t device = device_of(W, {ids, seed});
  require_seed(seed, p);
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor y = torch::stable::new_empty(W, result_shape(ids, W));
  const cuda::Embedding e{cuda_type("embedding", W), ids.numel(), W.size(0), W.size(1), int64s(index), table.const_data_ptr(),
                          y.mutable_data_ptr(), int64s(seed), threshold(p), scale(p)};
  if (y.numel()) require_started(cuda::embedding(e, current_stream(device)), e.N, e.V, e.E);
  return y;
}

// The values of a (N,) tensor in order, equal ones in the order in which they stand, and where each stood.
std::tuple<Tensor, Tensor> sorted(const Tensor& t) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::array<StableIValue, 4> stack{from(t), from(std::optional<bool>(true)), from(int64_t(0)), from(false)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

// As embedding_backward.
Tensor embedding_backward_cuda(Tensor dy, Tensor ids, int64_t V, double p, Tensor seed, std::optional<Tensor> keys) {
  const Tensor index = dense(ids), d = dense(dy), key = keys ? dense(*keys) : index;
  const int32_t device = device_of(dy, {ids, seed, key});
  const int64_t N = ids.numel(), E = width(dy, ids);
  require_seed(seed, p);
  if (keys) require_keys(key, V);
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor dW = torch::stable::new_zeros(dy, {V, E});
  if (dy.numel() == 0) return dW;
  Tensor narrow = torch::stable::new_empty(ids, {N}, ScalarType::Int);
  void* stream = current_stream(device);
  require_started(cuda::embedding_ids(N, V, int64s(index), static_cast<int32_t*>(narrow.mutable_data_ptr()), stream), N, V, E);
  const auto [words, order] = sorted(narrow);
  const cuda::Type type = cuda_type("embedding", dy);
  Tensor partial = torch::stable::new_empty(dy, {cuda::embedding_tiles(N), 2, E},
                                            type == cuda::Type::f64 ? ScalarType::Double : ScalarType::Float);
  const cuda::EmbeddingBackward b{type, N, V, E, static_cast<const int32_t*>(words.const_data_ptr()), int64s(order),
                                  keys ? int64s(key) : nullptr, d.const_data_ptr(), dW.mutable_data_ptr(),
                                  partial.mutable_data_ptr(), int64s(seed), threshold(p), scale(p)};
  require_started(cuda::embedding_backward(b, stream), N, V, E);
  return dW;
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  m.def("embedding(Tensor ids, Tensor W, float p, Tensor seed) -> Tensor");
  m.def("embedding_backward(Tensor dy, Tensor ids, int V, float p, Tensor seed, Tensor? keys) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("embedding", TORCH_BOX(&embedding));
  m.impl("embedding_backward", TORCH_BOX(&embedding_backward));
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("embedding", TORCH_BOX(&embedding_cuda));
  m.impl("embedding_backward", TORCH_BOX(&embedding_backward_cuda));
}
#endif

}  // namespace fusedseq
