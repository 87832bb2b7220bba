#include "ops/precision.h"

#include <dlfcn.h>

namespace fusedseq {
namespace {

// torch's stable ABI has no access to this setting. These are the names of
//   at::Context& at::globalContext()
//   at::Float32Precision at::Context::float32Precision(Float32Backend, Float32Op) const
// in libtorch_cpu.so, which at least torch 2.11 to 2.15 export; without them the products are
// exact.
constexpr char CONTEXT[] = "_ZN2at13globalContextEv",
               PRECISION[] = "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE";
enum Backend : int { GENERIC, CUDA, MKLDNN };
enum Operation : int { ALL, CONV, RNN, MATMUL };
enum Precision : int { NONE, IEEE, TF32, BF16 };

}  // namespace

bool float32_products_in_bf16() {
  static const auto context = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, CONTEXT));
  static const auto precision =
      reinterpret_cast<Precision (*)(void*, Backend, Operation)>(dlsym(RTLD_DEFAULT, PRECISION));
  return context && precision && precision(context(), MKLDNN, MATMUL) == BF16;
}

}  // namespace fusedseq
