// The kernels of embedding: embedding.cu, called by csrc/ops/embedding.cpp. Functions return an
// error message if a kernel could not be launched, else null.
#pragma once
#include <cstdint>

#include "cuda/type.h"

namespace fusedseq::cuda {

// The mask of embedding dropout has one element a word, (V,); a threshold of 0 keeps every word.
struct Embedding {
  Type type;
  int64_t N, V, E;
  const int64_t* ids;   // (N,)  an id outside [0, V) is an assertion failure on the device
  const void* W;        // (V, E)
  void* y;              // (N, E)
  const int64_t* seed;  // ()  on the device
  uint64_t threshold;   // round(p * 2^32)
  double scale;         // of words that are kept
};
const char* embedding(const Embedding& e, void* stream);

// Checks that the ids are in [0, V), and converts them to 32 bits, which are sorted in half the
// time. ids, narrow: (N,)
const char* embedding_ids(int64_t N, int64_t V, const int64_t* ids, int32_t* narrow, void* stream);

struct EmbeddingBackward {
  Type type;
  int64_t N, V, E;
  const int32_t* ids;    // (N,)  sorted
  const int64_t* order;  // (N,)  position of each sorted id in the text
  const int64_t* keys;   // (V,)  element of the mask of row v of dW; null: v itself
  const void* dy;        // (N, E)
  void* dW;              // (V, E)  in: zeros; rows of words that occur are written
  void* partial;         // (embedding_tiles(N), 2, E)  computing type: fp64 if dy is, else fp32
  const int64_t* seed;   // ()  on the device
  uint64_t threshold;    // as in Embedding
  double scale;
};
int64_t embedding_tiles(int64_t N);
const char* embedding_backward(const EmbeddingBackward& b, void* stream);

}  // namespace fusedseq::cuda
