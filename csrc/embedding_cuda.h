// What csrc/embedding.cu gives csrc/embedding.cpp. All return a message where a kernel could not be started, else null.
#pragma once
#include <cstdint>

#include "cuda_type.h"

namespace fusedseq::cuda {

// The mask has one element a word, (V,), by philox.h's rule; a threshold of 0 keeps all.
struct Embedding {
  Type type;
  int64_t N, V, E;
  const int64_t* ids;   // (N,)  the kernel stops the device at one outside [0, V)
  const void* W;        // (V, E)
  void* y;              // (N, E)
  const int64_t* seed;  // on the device
  uint64_t threshold;   // round(p * 2^32)
  double scale;         // of what is kept
};
const char* embedding(const Embedding& e, void* stream);

// ids (N,), each in [0, V), as 32-bit numbers, which sort in half the time.
const char* embedding_ids(int64_t N, int64_t V, const int64_t* ids, int32_t* narrow, void* stream);

struct EmbeddingBackward {
  Type type;
  int64_t N, V, E;
  const int32_t* ids;    // (N,)  sorted
  const int64_t* order;  // (N,)  where each of them stood
  const int64_t* keys;   // (V,)  the mask's element for row v of dW; v itself where null
  const void* dy;        // (N, E)
  void* dW;              // (V, E)  in: zeros
  void* partial;         // (embedding_tiles(N), 2, E)  of the computing type: fp32, and fp64 where dy is
  const int64_t* seed;
  uint64_t threshold;
  double scale;
};
int64_t embedding_tiles(int64_t N);
const char* embedding_backward(const EmbeddingBackward& b, void* stream);

}  // namespace fusedseq::cuda
