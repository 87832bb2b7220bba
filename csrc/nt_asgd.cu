// NT-ASGD on lists of tensors: kernels of a batch of tensors each, a block for a chunk of one of them.
//
// What limits them is memory: of 24 million fp32 parameters the norm reads 97 MB, the step reads 291 MB and writes 194:
// 0.14 ms together on an H200 at 4.3 TB/s, beside 3 starts of kernels for each 64 tensors. Not timed.
#include "nt_asgd_cuda.h"

#include "block_sum.cuh"
#include "cells/nt_asgd.h"
#include "pack.cuh"

namespace fusedseq::cuda {
namespace {

constexpr int CAPACITY = 64;      // tensors in a batch, whose table is the kernel's argument: below 4 KiB on any driver
constexpr int THREADS = 256;
constexpr int64_t CHUNK = 32768;  // elements of a block
constexpr int WIDE = 4;           // elements a thread takes at once, in one access where all tensors of it are aligned

struct Batch {
  cpu::NtAsgdTensor tensors[CAPACITY];
  int first[CAPACITY + 1];  // the number of each tensor's first block
  int count;
};

// The elements [begin, end) of a tensor that are this block's.
struct Part { int tensor; int64_t begin, end; };
__device__ Part own_part(const Batch& b) {
  int i = 0;
  while (b.first[i + 1] <= int(blockIdx.x)) ++i;
  const int64_t begin = (int(blockIdx.x) - b.first[i]) * CHUNK, n = b.tensors[i].n;
  return {i, begin, begin + CHUNK < n ? begin + CHUNK : n};
}

template <class S> __device__ double squares(const cpu::NtAsgdTensor& t, int64_t begin, int64_t end) {
  using C = typename Computing<S>::type;
  const S* g = static_cast<const S*>(t.g);
  const bool wide = aligned<WIDE>(g);
  C sum[WIDE] = {};
  for (int64_t i = begin + int64_t(threadIdx.x) * WIDE; i < end; i += THREADS * WIDE) {
    C v[WIDE];
    load(g + i, end - i < WIDE ? int(end - i) : WIDE, wide, v);
    for (int j = 0; j < WIDE; ++j) sum[j] += v[j] * v[j];
  }
  double total = 0;
  for (int j = 0; j < WIDE; ++j) total += double(sum[j]);
  return total;
}

__global__ void __launch_bounds__(THREADS) squares_kernel(const Batch b, double* partial) {  // partial: (blocks,)
  const Part part = own_part(b);
  const cpu::NtAsgdTensor& t = b.tensors[part.tensor];
  double sum = 0;
  switch (t.type) {
    case cpu::Type::f32: sum = squares<float>(t, part.begin, part.end); break;
    case cpu::Type::f64: sum = squares<double>(t, part.begin, part.end); break;
    case cpu::Type::bf16: sum = squares<__nv_bfloat16>(t, part.begin, part.end); break;
  }
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block. partial: (n,)    norm: a double where `wide`, else a float
__global__ void __launch_bounds__(THREADS) norm_kernel(const double* partial, int64_t n, void* norm, bool wide) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) sum += partial[i];
  sum = sqrt(block_sum<THREADS>(sum));
  if (threadIdx.x != 0) return;
  if (wide) *static_cast<double*>(norm) = sum;
  else *static_cast<float*>(norm) = float(sum);
}

struct Step {
  const void* norm;  // null: nothing is clipped
  bool wide;         // norm is a double
  double max_norm, lr, weight_decay, mu;
};

template <class S> __device__ void step(const cpu::NtAsgdTensor& t, int64_t begin, int64_t end, double clip_, const Step& s) {
  using C = typename Computing<S>::type;
  const S* g = static_cast<const S*>(t.g);
  S* p = static_cast<S*>(t.p);
  C* average = static_cast<C*>(t.average);
  const bool wide = aligned<WIDE>(g) && aligned<WIDE>(p) && aligned<WIDE>(average);
  const C clip = C(clip_), lr = C(s.lr), weight_decay = C(s.weight_decay), mu = C(s.mu);
  for (int64_t i = begin + int64_t(threadIdx.x) * WIDE; i < end; i += THREADS * WIDE) {
    const int n = end - i < WIDE ? int(end - i) : WIDE;
    C grad[WIDE], value[WIDE], mean[WIDE];
    load(g + i, n, wide, grad);
    load(p + i, n, wide, value);
    for (int j = 0; j < WIDE; ++j)  // rounded to the parameter's dtype
      value[j] = C(S(nt_asgd_parameter(value[j], grad[j], clip, lr, weight_decay)));
    store(p + i, n, wide, value);
    if (!average) continue;
    if (s.mu != 1) {
      load(average + i, n, wide, mean);
      for (int j = 0; j < WIDE; ++j) value[j] = nt_asgd_average(mean[j], value[j], mu);
    }
    store(average + i, n, wide, value);
  }
}

__global__ void __launch_bounds__(THREADS) step_kernel(const Batch b, const Step s) {
  const Part part = own_part(b);
  const cpu::NtAsgdTensor& t = b.tensors[part.tensor];
  double clip = 1;
  if (s.norm)
    clip = s.wide ? clip_factor(*static_cast<const double*>(s.norm), s.max_norm)
                  : double(clip_factor(*static_cast<const float*>(s.norm), float(s.max_norm)));
  switch (t.type) {
    case cpu::Type::f32: return step<float>(t, part.begin, part.end, clip, s);
    case cpu::Type::f64: return step<double>(t, part.begin, part.end, clip, s);
    case cpu::Type::bf16: return step<__nv_bfloat16>(t, part.begin, part.end, clip, s);
  }
}

int64_t blocks_of(const cpu::NtAsgdTensor& t) { return (t.n + CHUNK - 1) / CHUNK; }

// launch(batch, blocks) for batches of up to CAPACITY tensors that have elements.
template <class F> void each_batch(const cpu::NtAsgdTensor* tensors, int64_t count, F launch) {
  Batch b{};
  const auto flush = [&] {
    if (b.count) launch(b, b.first[b.count]);
    b.count = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (tensors[i].n == 0) continue;
    b.tensors[b.count] = tensors[i];
    b.first[b.count + 1] = b.first[b.count] + int(blocks_of(tensors[i]));
    if (++b.count == CAPACITY) flush();
  }
  flush();
}

}  // namespace

int64_t nt_asgd_partials(const cpu::NtAsgdTensor* tensors, int64_t count) {
  int64_t n = 0;
  for (int64_t i = 0; i < count; ++i) n += blocks_of(tensors[i]);
  return n;
}

const char* nt_asgd_norm(const cpu::NtAsgdTensor* tensors, int64_t count, double* partial, void* norm, bool wide, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  int64_t n = 0;
  each_batch(tensors, count, [&](const Batch& b, int blocks) {
    squares_kernel<<<blocks, THREADS, 0, stream>>>(b, partial + n);
    n += blocks;
  });
  norm_kernel<<<1, THREADS, 0, stream>>>(partial, n, norm, wide);
  return launch_error();
}

const char* nt_asgd_step(const cpu::NtAsgd& o, const void* norm, bool wide, double max_norm, void* stream) {
  const Step s{norm, wide, max_norm, o.lr, o.weight_decay, o.mu};
  each_batch(o.tensors, o.count, [&](const Batch& b, int blocks) {
    step_kernel<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(b, s);
  });
  return launch_error();
}

}  // namespace fusedseq::cuda
