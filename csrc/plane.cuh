// A (T, plane) tensor: a thread has 16 bytes of the plane and goes over some of the T steps.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace fusedseq::cuda {

constexpr int64_t MOST_BLOCKS = INT32_MAX, MOST_SLICES = 65535;  // of a grid, in x and in y

// Blocks of `threads` for the plane in x, and slices of the steps in y where the plane alone has fewer than `enough` threads,
// which keep a GPU busy. A grid of 0: too large a plane.
inline dim3 plane_grid(int64_t T, int64_t plane, int elements, int threads, int64_t enough) {
  const int64_t chunks = (plane + elements - 1) / elements, blocks = (chunks + threads - 1) / threads;
  if (blocks > MOST_BLOCKS) return dim3(0);
  const int64_t wanted = chunks && chunks < enough ? enough / chunks : 1, most = T < MOST_SLICES ? T : MOST_SLICES;
  return dim3(unsigned(blocks), unsigned(wanted < most ? wanted : most));
}

}  // namespace fusedseq::cuda
