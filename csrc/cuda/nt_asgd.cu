// NT-ASGD on lists of tensors: the gradients' norm, and the step. A launch processes a batch of
// tensors, whose table is the kernel's argument; a block processes a chunk of one tensor.
//
// What limits the speed: memory. Of 24 million fp32 parameters the norm reads 97 MB, the step reads
// 291 MB and writes 194 MB: together 0.14 ms on an H200 at 4.3 TB/s, besides 3 kernel launches for
// each 64 tensors. Not timed.
#include "cuda/nt_asgd.h"

#include "cuda/block_sum.cuh"
#include "cuda/launch_error.cuh"
#include "cuda/vector_access.cuh"
#include "math/nt_asgd.h"

namespace fusedseq::cuda {
namespace {

// Tensors of a batch. The table must be smaller than 4 KiB, the limit of a kernel's arguments on
// older drivers.
constexpr int CAPACITY = 64;
constexpr int THREADS = 256;
constexpr int64_t CHUNK = 32768;  // elements that a block processes
// Elements that a thread loads at once, in one access if the tensors are aligned.
constexpr int WIDE = 4;

struct Batch {
  cpu::NtAsgdTensor tensors[CAPACITY];
  int first[CAPACITY + 1];  // number of each tensor's first block; then of blocks in all
  int count;
};

// The elements [begin, end) of a tensor that this block processes.
struct Part {
  int tensor;
  int64_t begin, end;
};
__device__ Part own_part(const Batch& b) {
  int i = 0;
  while (b.first[i + 1] <= int(blockIdx.x))
    ++i;
  const int64_t begin = (int(blockIdx.x) - b.first[i]) * CHUNK;
  const int64_t n = b.tensors[i].n;
  return {i, begin, begin + CHUNK < n ? begin + CHUNK : n};
}

// The thread's sum of squared gradients of a part. The elements are summed in the computing type,
// the threads and blocks in double.
template <class S>
__device__ double squares(const cpu::NtAsgdTensor& t, int64_t begin, int64_t end) {
  using C = typename Computing<S>::type;
  const S* g = static_cast<const S*>(t.g);
  const bool wide = aligned<WIDE>(g);
  C sum[WIDE] = {};
  for (int64_t i = begin + int64_t(threadIdx.x) * WIDE; i < end; i += THREADS * WIDE) {
    C v[WIDE];
    load(g + i, end - i < WIDE ? int(end - i) : WIDE, wide, v);
    for (int j = 0; j < WIDE; ++j)
      sum[j] += v[j] * v[j];
  }
  double total = 0;
  for (int j = 0; j < WIDE; ++j)
    total += double(sum[j]);
  return total;
}

// partial: (blocks,)  out
__global__ void __launch_bounds__(THREADS) squares_kernel(const Batch b, double* partial) {
  const Part part = own_part(b);
  const cpu::NtAsgdTensor& t = b.tensors[part.tensor];
  double sum = 0;
  switch (t.type) {
    case cpu::Type::f32:
      sum = squares<float>(t, part.begin, part.end);
      break;
    case cpu::Type::f64:
      sum = squares<double>(t, part.begin, part.end);
      break;
    case cpu::Type::bf16:
      sum = squares<__nv_bfloat16>(t, part.begin, part.end);
      break;
  }
  sum = block_sum<THREADS>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Launched with one block. partial: (n,)    norm: ()  out, double if norm_is_double, else float
__global__ void __launch_bounds__(THREADS)
    norm_kernel(const double* partial, int64_t n, void* norm, bool norm_is_double) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += THREADS)
    sum += partial[i];
  sum = sqrt(block_sum<THREADS>(sum));
  if (threadIdx.x != 0) return;
  if (norm_is_double)
    *static_cast<double*>(norm) = sum;
  else
    *static_cast<float*>(norm) = float(sum);
}

struct Step {
  const void* norm;     // ()  null: the gradients are not clipped
  bool norm_is_double;  // else norm is a float
  double max_norm, lr, weight_decay, mu;
};

// The step of a part of a tensor. clip_: the factor of all gradients
template <class S>
__device__ void step(const cpu::NtAsgdTensor& t, int64_t begin, int64_t end, double clip_,
                     const Step& s) {
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
    // Rounded to the parameter's dtype, because the average is of the stored parameters.
    for (int j = 0; j < WIDE; ++j)
      value[j] = C(S(nt_asgd_parameter(value[j], grad[j], clip, lr, weight_decay)));
    store(p + i, n, wide, value);
    if (!average) continue;
    // With mu = 1 the average is the parameter itself, and need not be read.
    if (s.mu != 1) {
      load(average + i, n, wide, mean);
      for (int j = 0; j < WIDE; ++j)
        value[j] = nt_asgd_average(mean[j], value[j], mu);
    }
    store(average + i, n, wide, value);
  }
}

__global__ void __launch_bounds__(THREADS) step_kernel(const Batch b, const Step s) {
  const Part part = own_part(b);
  const cpu::NtAsgdTensor& t = b.tensors[part.tensor];
  double clip = 1;
  if (s.norm)
    clip = s.norm_is_double
               ? clip_factor(*static_cast<const double*>(s.norm), s.max_norm)
               : double(clip_factor(*static_cast<const float*>(s.norm), float(s.max_norm)));
  switch (t.type) {
    case cpu::Type::f32:
      return step<float>(t, part.begin, part.end, clip, s);
    case cpu::Type::f64:
      return step<double>(t, part.begin, part.end, clip, s);
    case cpu::Type::bf16:
      return step<__nv_bfloat16>(t, part.begin, part.end, clip, s);
  }
}

int64_t blocks_of(const cpu::NtAsgdTensor& t) {
  return (t.n + CHUNK - 1) / CHUNK;
}

// Calls launch(batch, blocks) for batches of up to CAPACITY tensors, leaving out empty tensors.
template <class F>
void each_batch(const cpu::NtAsgdTensor* tensors, int64_t count, F launch) {
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
  for (int64_t i = 0; i < count; ++i)
    n += blocks_of(tensors[i]);
  return n;
}

const char* nt_asgd_norm(const cpu::NtAsgdTensor* tensors, int64_t count, double* partial,
                         void* norm, bool norm_is_double, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  int64_t n = 0;
  each_batch(tensors, count, [&](const Batch& b, int blocks) {
    squares_kernel<<<blocks, THREADS, 0, stream>>>(b, partial + n);
    n += blocks;
  });
  norm_kernel<<<1, THREADS, 0, stream>>>(partial, n, norm, norm_is_double);
  return launch_error();
}

const char* nt_asgd_step(const cpu::NtAsgd& o, const void* norm, bool norm_is_double,
                         double max_norm, void* stream) {
  const Step s{norm, norm_is_double, max_norm, o.lr, o.weight_decay, o.mu};
  each_batch(o.tensors, o.count, [&](const Batch& b, int blocks) {
    step_kernel<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(b, s);
  });
  return launch_error();
}

}  // namespace fusedseq::cuda
