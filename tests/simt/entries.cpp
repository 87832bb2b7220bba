// C functions through which tests/simt/test_simt*.py call the kernels of csrc/cuda. Those that
// return const char* return an error message, or null.
#include "cuda/dropout.h"
#include "cuda/embedding.h"
#include "cuda/nt_asgd.h"
#include "cuda/recurrence/loop.h"
#include "cuda/recurrence/lost_wait.h"
#include "cuda/recurrence/persistent.h"
#include "cuda/recurrence/weight_gradients.h"
#include "cuda/recurrence/weight_preparation.h"
#include "cuda/regularization.h"
#include "cuda/vector_access.cuh"

using namespace fusedseq;
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* dropout(int type, int64_t T, int64_t B, int64_t D, const void* x, void* y,
                           const int64_t* seed, uint64_t threshold, double scale, bool by_row) {
  return cuda::dropout({cuda::Type(type), T, B, D, x, y, seed, threshold, scale, by_row}, nullptr);
}

EXPORT int64_t nt_asgd_partials(const cpu::NtAsgdTensor* tensors, int64_t count) {
  return cuda::nt_asgd_partials(tensors, count);
}
EXPORT const char* nt_asgd_norm(const cpu::NtAsgdTensor* tensors, int64_t count, double* partial,
                                void* norm, bool wide) {
  return cuda::nt_asgd_norm(tensors, count, partial, norm, wide, nullptr);
}
EXPORT const char* nt_asgd_step(cpu::NtAsgdTensor* tensors, int64_t count, const void* norm,
                                bool wide, double max_norm, double lr, double weight_decay,
                                double mu) {
  return cuda::nt_asgd_step({tensors, count, 1, lr, weight_decay, mu}, norm, wide, max_norm,
                            nullptr);
}

// ---- recurrences

namespace {

double element(const cuda::Matrix& m, int64_t i, int64_t j) {
  const int64_t at = i * m.row_stride + j * m.column_stride;
  return cuda::by_type(m.type,
                       [&](auto s) { return double(static_cast<const decltype(s)*>(m.data)[at]); });
}

// Stands in for the vendor's matrix products. It sums in double, so that the tests measure only the
// errors of the kernels before and after a product.
const char* plain_product(void*, const cuda::Matrix& a, const cuda::Matrix& b,
                          const cuda::Matrix& out) {
  if (a.columns != b.rows || out.rows != a.rows || out.columns != b.columns)
    return "product: sizes that do not fit";
  if (a.row_stride != 1 && a.column_stride != 1)
    return "product: a matrix that the vendor's library does not take";
  for (int64_t i = 0; i < out.rows; ++i)
    for (int64_t j = 0; j < out.columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < a.columns; ++k)
        sum += element(a, i, k) * element(b, k, j);
      const int64_t at = i * out.row_stride + j * out.column_stride;
      cuda::by_type(out.type, [&](auto s) {
        using S = decltype(s);
        static_cast<S*>(out.data)[at] = S(typename cuda::Computing<S>::type(sum));
      });
    }
  return nullptr;
}
const cuda::Product PLAIN{nullptr, plain_product};

}  // namespace

EXPORT int64_t multiplied_out_bytes(const cuda::Recurrence* r) {
  return cuda::multiplied_out_bytes(*r);
}
EXPORT int64_t loop_bytes(const cuda::Recurrence* r) {
  return cuda::loop_bytes(*r);
}
EXPORT int64_t loop_backward_bytes(const cuda::RecurrenceBackward* g) {
  return cuda::loop_backward_bytes(g->forward);
}
EXPORT int64_t gradients_bytes(const cuda::RecurrenceGradients* g) {
  return cuda::gradients_bytes(*g);
}
EXPORT const char* multiply_out(cuda::Recurrence* r, void* workspace) {
  return cuda::multiply_out(*r, PLAIN, workspace);
}
EXPORT const char* loop_forward(const cuda::Recurrence* r, void* workspace) {
  return cuda::loop_forward(*r, PLAIN, workspace, nullptr);
}
EXPORT const char* loop_backward(const cuda::RecurrenceBackward* g, void* workspace) {
  return cuda::loop_backward(*g, PLAIN, workspace, nullptr);
}
EXPORT const char* gradients(const cuda::RecurrenceGradients* g, void* workspace) {
  return cuda::gradients(*g, PLAIN, workspace, nullptr);
}

EXPORT const char* embedding(int type, int64_t N, int64_t V, int64_t E, const int64_t* ids,
                             const void* W, void* y, const int64_t* seed, uint64_t threshold,
                             double scale) {
  return cuda::embedding({cuda::Type(type), N, V, E, ids, W, y, seed, threshold, scale}, nullptr);
}
EXPORT const char* embedding_ids(int64_t N, int64_t V, const int64_t* ids, int32_t* narrow) {
  return cuda::embedding_ids(N, V, ids, narrow, nullptr);
}
EXPORT int64_t embedding_tiles(int64_t N) {
  return cuda::embedding_tiles(N);
}
EXPORT const char* embedding_backward(int type, int64_t N, int64_t V, int64_t E, const int32_t* ids,
                                      const int64_t* order, const int64_t* keys, const void* dy,
                                      void* dW, void* partial, const int64_t* seed,
                                      uint64_t threshold, double scale) {
  return cuda::embedding_backward(
      {cuda::Type(type), N, V, E, ids, order, keys, dy, dW, partial, seed, threshold, scale},
      nullptr);
}

EXPORT int64_t activation_regularization_blocks(int type, int64_t T, int64_t N) {
  return cuda::activation_regularization_blocks(cuda::Type(type), T, N);
}
EXPORT const char* activation_regularization(int type, int64_t T, int64_t N, const void* dropped,
                                             const void* raw, double alpha, double beta, void* loss,
                                             double* partial) {
  return cuda::activation_regularization(
      {cuda::Type(type), T, N, dropped, raw, alpha, beta, loss, partial, nullptr, nullptr, nullptr},
      nullptr);
}
EXPORT const char* activation_regularization_backward(int type, int64_t T, int64_t N,
                                                      const void* dropped, const void* raw,
                                                      double alpha, double beta, const void* dloss,
                                                      void* ddropped, void* draw) {
  return cuda::activation_regularization_backward(
      {cuda::Type(type), T, N, dropped, raw, alpha, beta, nullptr, nullptr, dloss, ddropped, draw},
      nullptr);
}

// What a kernel leaves that gives up; zeros stand in for a new process.
EXPORT void set_lost_wait(uint32_t waiting, uint32_t awaited, uint32_t epoch, uint32_t shown) {
  *cuda::lost_wait_record() = {waiting, awaited, epoch, shown};
}

EXPORT int64_t persistent_bytes(const cuda::Recurrence* r) {
  return cuda::persistent_bytes(*r, cuda::persistent_plan(*r, 1).forward);
}
EXPORT int64_t persistent_backward_bytes(const cuda::RecurrenceBackward* g) {
  return cuda::persistent_backward_bytes(g->forward, cuda::persistent_plan(g->forward, 1).backward);
}
EXPORT const char* persistent_forward(const cuda::Recurrence* r, void* workspace) {
  const cuda::Plan plan = cuda::persistent_plan(*r, 1);
  return plan.forward.blocks ? cuda::persistent_forward(*r, plan.forward, PLAIN, workspace, nullptr)
                             : plan.why;
}
EXPORT const char* persistent_backward(const cuda::RecurrenceBackward* g, void* workspace) {
  const cuda::Plan plan = cuda::persistent_plan(g->forward, 1);
  return plan.backward.blocks ? cuda::persistent_backward(*g, plan.backward, workspace, nullptr)
                              : plan.why;
}

// The same with the exchange by words, which must fit in every direction that is called.
cuda::Plan words_plan(const cuda::Recurrence& r) {
  return cuda::persistent_plan(r, 1, cuda::Protocol::words);
}
EXPORT int64_t words_bytes(const cuda::Recurrence* r) {
  return cuda::persistent_bytes(*r, words_plan(*r).forward);
}
EXPORT int64_t words_backward_bytes(const cuda::RecurrenceBackward* g) {
  return cuda::persistent_backward_bytes(g->forward, words_plan(g->forward).backward);
}
EXPORT const char* words_forward(const cuda::Recurrence* r, void* workspace) {
  const cuda::Layout l = words_plan(*r).forward;
  return l.words ? cuda::persistent_forward(*r, l, PLAIN, workspace, nullptr)
                 : "the plan has no words in forward";
}
EXPORT const char* words_backward(const cuda::RecurrenceBackward* g, void* workspace) {
  const cuda::Layout l = words_plan(g->forward).backward;
  return l.words ? cuda::persistent_backward(*g, l, workspace, nullptr)
                 : "the plan has no words in backward";
}

// The two layers of a wavefront. tests/simt/memory.py declares the same structures.
template <class R>
struct Layers {
  const R *first, *second;
  cuda::LayerInterface between;
};
EXPORT int64_t wavefront_bytes(const Layers<cuda::Recurrence>* p) {
  return cuda::wavefront_bytes(*p->first, *p->second,
                               cuda::wavefront_plan(*p->first, *p->second, 1));
}
EXPORT int64_t wavefront_backward_bytes(const Layers<cuda::RecurrenceBackward>* p) {
  const cuda::Recurrence &first = p->first->forward, &second = p->second->forward;
  return cuda::wavefront_backward_bytes(first, second, cuda::wavefront_plan(first, second, 1));
}
EXPORT const char* wavefront_forward(const Layers<cuda::Recurrence>* p, void* workspace) {
  const cuda::Wavefront w = cuda::wavefront_plan(*p->first, *p->second, 1);
  return w.persistent
             ? cuda::wavefront_forward(*p->first, *p->second, p->between, w, workspace, nullptr)
             : w.why;
}
EXPORT const char* wavefront_backward(const Layers<cuda::RecurrenceBackward>* p, void* workspace) {
  const cuda::Wavefront w = cuda::wavefront_plan(p->first->forward, p->second->forward, 1);
  return w.persistent
             ? cuda::wavefront_backward(*p->first, *p->second, p->between, w, workspace, nullptr)
             : w.why;
}
