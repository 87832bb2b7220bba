// The operator embedding: a gather that applies embedding dropout, and a gradient that touches only
// the rows that were used: pyext/fusedseq/reference/embedding.py.
#include "cuda/embedding.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>

#include "ops/cuda_stream.h"
#include "ops/tensor.h"

namespace fusedseq {
namespace {

constexpr const char* BACKWARD = "embedding_backward";

#define EMBEDDING_INPUTS(FIELD)   \
  FIELD(Tensor, ids) /* int64 */  \
  FIELD(Tensor, W)   /* (V, E) */ \
  FIELD(double, p)                \
  FIELD(Tensor, seed)
FUSEDSEQ_DECLARE(EmbeddingInputs, EMBEDDING_INPUTS)
#define EMBEDDING_OUTPUT(FIELD) FIELD(Tensor, y) /* (*ids.shape, E) */
FUSEDSEQ_DECLARE(EmbeddingOutput, EMBEDDING_OUTPUT)

// With keys, row v of dW is the row of word keys[v]: the compact gradient of those words.
#define EMBEDDING_BACKWARD(FIELD)         \
  FIELD(Tensor, dy) /* (*ids.shape, E) */ \
  FIELD(Tensor, ids)                      \
  FIELD(int64_t, V)                       \
  FIELD(double, p)                        \
  FIELD(Tensor, seed)                     \
  FIELD(OptionalTensor, keys) /* (V,) int64 */
FUSEDSEQ_DECLARE(EmbeddingBackward, EMBEDDING_BACKWARD)
#define EMBEDDING_GRADIENT(FIELD) FIELD(Tensor, dW) /* (V, E) */
FUSEDSEQ_DECLARE(EmbeddingGradient, EMBEDDING_GRADIENT)

void require_ids(const char* op, const Tensor& ids, int64_t V) {
  require_dtype(op, "ids", ids, ScalarType::Long);
  const int64_t* id = static_cast<const int64_t*>(ids.const_data_ptr());
  const int64_t N = ids.numel();
  for (int64_t n = 0; n < N; ++n)
    if (id[n] < 0 || id[n] >= V) refuse(op, "ids must be in [0, V) = [0, ", V, "), got ", id[n]);
}

cpu::Embedding arguments(const Tensor& ids, int64_t V, int64_t E, cpu::Type type, double p,
                         const Tensor& seed) {
  return {type,    ids.numel(), V,       E,     static_cast<const int64_t*>(ids.const_data_ptr()),
          nullptr, nullptr,     nullptr, p > 0, mask(seed, p)};
}

Sizes result_shape(const Tensor& ids, const Tensor& W) {
  require_dimensions("embedding", "W", W, 2, "(V, E)");
  Sizes shape(ids.sizes().begin(), ids.sizes().end());
  shape.push_back(W.size(1));
  return shape;
}

EmbeddingOutput embedding(const EmbeddingInputs& i) {
  const auto& [ids, W, p, seed] = i;
  require_probability("embedding", "p", p);
  require_seed("embedding", seed);
  const cpu::Type type = kernel_type("embedding", "W", W);
  const Sizes shape = result_shape(ids, W);
  const Tensor index = dense(ids), table = dense(W);
  require_ids("embedding", index, W.size(0));
  Tensor y = output(W, shape);
  cpu::Embedding e = arguments(index, W.size(0), W.size(1), type, p, seed);
  e.W = table.const_data_ptr(), e.y = y.mutable_data_ptr();
  if (y.numel()) cpu::kernels().embedding(e, parallel, threads());
  return {y};
}

// A new (rows, columns) gradient, and whether it is zeroed. The pages of a large one of which few
// rows are used are zeroed by the operating system when they are first touched, so that only these
// rows cost time. If many rows are used, memory that is reused and filled with zeros costs less
// than page faults, as long as the cache of cpu/memory.h has room for it: by default at least 512
// MiB.
struct Table {
  Tensor t;
  bool zeroed;
};
Table table(const Tensor& like, int64_t rows, int64_t columns, ScalarType type, int64_t used) {
  const int64_t element = type == ScalarType::Double ? 8 : type == ScalarType::BFloat16 ? 2 : 4;
  checked_product(BACKWARD, "the gradient", {rows, columns, element});
  const int64_t row_bytes = columns * element, bytes = rows * row_bytes;
  const Sizes shape{rows, columns}, strides{columns, 1};
  constexpr int64_t MIB = 1 << 20, PAGE = 4096, HUGE_PAGE = 2 * MIB,
                    HUGE_FAULT = 28;  // in faults of a page
  const bool uses_few = bytes / HUGE_PAGE * HUGE_FAULT >= used * (row_bytes / PAGE + 1);
  if (bytes <= (uses_few ? 64 : 512) * MIB) return {output(like, shape, type), false};
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) refuse(BACKWARD, "no memory for a gradient of ", in_words(Shape(shape)));
#ifdef MADV_HUGEPAGE
  if (!uses_few) madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return {torch::stable::from_blob(p, shape, strides, like.device(), type,
                                   [bytes](void* q) { munmap(q, bytes); }),
          true};
}

// The width E of dy (*ids.shape, E).
int64_t width(const Tensor& dy, const Tensor& ids) {
  const Shape of_dy = dy.sizes(), of_ids = ids.sizes();
  const bool ok =
      of_dy.size() == of_ids.size() + 1 && std::equal(of_ids.begin(), of_ids.end(), of_dy.begin());
  require_that(ok, BACKWARD, "dy", dy, "(*ids.shape, E)");
  return of_dy[of_ids.size()];
}
void require_backward(const EmbeddingBackward& g) {
  require_range(BACKWARD, "V", g.V, 0, ADDRESSABLE);
  require_probability(BACKWARD, "p", g.p);
  require_seed(BACKWARD, g.seed);
  if (!g.keys) return;
  require_shape(BACKWARD, "keys", *g.keys, {g.V});
  require_dtype(BACKWARD, "keys", *g.keys, ScalarType::Long);
}

EmbeddingGradient embedding_backward(const EmbeddingBackward& g) {
  const auto& [dy, ids, V, p, seed, keys] = g;
  require_backward(g);
  const cpu::Type type = kernel_type(BACKWARD, "dy", dy);
  const int64_t E = width(dy, ids);
  const Tensor index = dense(ids), d = dense(dy);
  require_ids(BACKWARD, index, V);
  auto [dW, zeroed] = table(dy, V, E, dy.scalar_type(), ids.numel());
  cpu::Embedding e = arguments(index, V, E, type, p, seed);
  const Tensor key = keys ? dense(*keys) : index;
  if (keys) {
    // The word of a Philox block that a key selects is its remainder by 4: it must not be negative.
    e.keys = static_cast<const int64_t*>(key.const_data_ptr());
    require_range(BACKWARD, "keys", e.keys, V, 0, INT64_MAX);
  }
  if (dW.numel())
    cpu::kernels().embedding_backward(e, d.const_data_ptr(), dW.mutable_data_ptr(), zeroed,
                                      parallel, threads());
  return {dW};
}

#ifdef FUSEDSEQ_CUDA
void require_started(const char* error, int64_t N, int64_t V, int64_t E) {
  STD_TORCH_CHECK(!error, "embedding: its kernels for ", N, " ids and W (", V, ", ", E,
                  "): ", error ? error : "");
}

const int64_t* int64s(const char* op, const char* name, const Tensor& t) {
  require_dtype(op, name, t, ScalarType::Long);
  return static_cast<const int64_t*>(t.const_data_ptr());
}

EmbeddingOutput embedding_cuda(const EmbeddingInputs& i) {
  const auto& [ids, W, p, seed] = i;
  const Tensor index = dense(ids), table = dense(W);
  require_cuda_device("embedding", "ids", ids, "W", W);
  require_cuda_device("embedding", "seed", seed, "W", W);
  const int32_t device = W.get_device_index();
  require_probability("embedding", "p", p);
  require_seed("embedding", seed);
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor y = torch::stable::new_empty(W, result_shape(ids, W));
  const cuda::Embedding e{cuda_type("embedding", "W", W),
                          ids.numel(),
                          W.size(0),
                          W.size(1),
                          int64s("embedding", "ids", index),
                          table.const_data_ptr(),
                          y.mutable_data_ptr(),
                          int64s("embedding", "seed", seed),
                          threshold(p),
                          scale(p)};
  if (y.numel()) require_started(cuda::embedding(e, current_stream(device)), e.N, e.V, e.E);
  return {y};
}

// Returns the values of a (N,) tensor in ascending order, and the index of each; the sort is
// stable.
std::tuple<Tensor, Tensor> sorted(const Tensor& t) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::array<StableIValue, 4> stack{from(t), from(std::optional<bool>(true)), from(int64_t(0)),
                                    from(false)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

EmbeddingGradient embedding_backward_cuda(const EmbeddingBackward& g) {
  const auto& [dy, ids, V, p, seed, keys] = g;
  require_backward(g);
  const int64_t N = ids.numel(), E = width(dy, ids);
  const cuda::Type type = cuda_type(BACKWARD, "dy", dy);
  const Tensor index = dense(ids), d = dense(dy), key = keys ? dense(*keys) : index;
  require_cuda_device(BACKWARD, "ids", ids, "dy", dy);
  require_cuda_device(BACKWARD, "seed", seed, "dy", dy);
  if (keys) require_cuda_device(BACKWARD, "keys", *keys, "dy", dy);
  const int32_t device = dy.get_device_index();
  checked_product(BACKWARD, "the gradient", {V, E, 8});
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor dW = torch::stable::new_zeros(dy, {V, E});
  if (dy.numel() == 0) return {dW};
  Tensor narrow = torch::stable::new_empty(ids, {N}, ScalarType::Int);
  void* stream = current_stream(device);
  require_started(cuda::embedding_ids(N, V, int64s(BACKWARD, "ids", index),
                                      static_cast<int32_t*>(narrow.mutable_data_ptr()), stream),
                  N, V, E);
  const auto [words, order] = sorted(narrow);
  Tensor partial =
      torch::stable::new_empty(dy, {cuda::embedding_tiles(N), 2, E},
                               type == cuda::Type::f64 ? ScalarType::Double : ScalarType::Float);
  const cuda::EmbeddingBackward b{type,
                                  N,
                                  V,
                                  E,
                                  static_cast<const int32_t*>(words.const_data_ptr()),
                                  int64s(BACKWARD, "order", order),
                                  keys ? int64s(BACKWARD, "keys", key) : nullptr,
                                  d.const_data_ptr(),
                                  dW.mutable_data_ptr(),
                                  partial.mutable_data_ptr(),
                                  int64s(BACKWARD, "seed", seed),
                                  threshold(p),
                                  scale(p)};
  require_started(cuda::embedding_backward(b, stream), N, V, E);
  return {dW};
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fusedseq, m) {
  define<embedding>(m, "embedding");
  define<embedding_backward>(m, "embedding_backward");
}
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CPU, m) {
  m.impl("embedding", boxed<embedding>);
  m.impl("embedding_backward", boxed<embedding_backward>);
}
#ifdef FUSEDSEQ_CUDA
STABLE_TORCH_LIBRARY_IMPL(fusedseq, CUDA, m) {
  m.impl("embedding", boxed<embedding_cuda>);
  m.impl("embedding_backward", boxed<embedding_backward_cuda>);
}
#endif

}  // namespace fusedseq
