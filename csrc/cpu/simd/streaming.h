// Non-temporal ("streaming") stores. A result that is larger than the caches is only written: a
// normal store would first read each of its cache lines from memory, a streaming store does not.
//
// They are also for what another core reads next, or whose rows are split among cores. A normal
// store takes the cache line from the core that has it, and the prefetcher of a core that writes
// its columns of a row reads on, into lines that another core is writing. Between cores that share
// no cache each such line takes 0.2 microseconds; a streaming store leaves it in memory, from where
// either core reads it by prefetching. Between cores that share a cache both are equally fast.
#pragma once
#include "cpu/simd/vec.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns whether a result of that many elements of type T is larger than the caches.
template <class T>
HD bool exceeds_caches(int64_t elements) {
  return elements * int64_t(sizeof(T)) >= int64_t(8) << 20;
}

// Stores x at an aligned address, bypassing the caches. `stream_fence` must be called before
// another thread reads it.
template <class T>
HD void stream(T* p, Vec<T> x) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)x.v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)x.v);
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)x.v);
#else
  x.store(p);
#endif
}

// Stores x at an aligned address, with a streaming store if `streamed`.
template <class T>
HD void store(T* p, Vec<T> x, bool streamed) {
  if (streamed)
    stream(p, x);
  else
    x.store(p);
}

HD void stream_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Copies a row of n elements that is in the L1 cache to `destination` with streaming stores. The
// ends that do not fill an aligned vector are copied normally.
template <class T>
HD void stream_row(const T* row, T* destination, int64_t n) {
  const char* from = reinterpret_cast<const char*>(row);
  char* to = reinterpret_cast<char*>(destination);
  const int64_t bytes = n * sizeof(T), before = -reinterpret_cast<uintptr_t>(to) % VECTOR_BYTES;
  int64_t i = before < bytes ? before : bytes;
  memcpy(to, from, i);
  for (; i + VECTOR_BYTES <= bytes; i += VECTOR_BYTES)
    stream(reinterpret_cast<float*>(to + i),
           Vec<float>::load(reinterpret_cast<const float*>(from + i)));
  memcpy(to + i, from + i, bytes - i);
}

// Fills memory with zeros by streaming stores.
inline void stream_zeros(char* p, int64_t bytes) {
#ifdef __SSE2__
  char* const aligned = p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64;
  if (p + bytes >= aligned + 64) {
    memset(p, 0, aligned - p);
    char* q = aligned;
    for (; q + 64 <= p + bytes; q += 64)
      for (int i = 0; i < 64; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(q + i), _mm_setzero_si128());
    memset(q, 0, p + bytes - q);
    return;
  }
#endif
  memset(p, 0, bytes);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
