// The launch grid of kernels over a (T, plane) tensor, in which a thread owns 16 bytes of the plane
// and loops over some of the T steps.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace fusedseq::cuda {

constexpr int64_t MAX_GRID_X = INT32_MAX;
constexpr int64_t MAX_GRID_Y = 65535;

// x: blocks of `threads` that cover the plane, `elements` a thread. y: slices of the steps; more
// than one where the plane alone has fewer than `target_threads`, the number that keeps a GPU busy.
// Returns a grid of 0 blocks if the plane is too large.
inline dim3 plane_grid(int64_t T, int64_t plane, int elements, int threads,
                       int64_t target_threads) {
  const int64_t chunks = (plane + elements - 1) / elements;
  const int64_t blocks = (chunks + threads - 1) / threads;
  if (blocks > MAX_GRID_X) return dim3(0);
  const int64_t slices = chunks && chunks < target_threads ? target_threads / chunks : 1;
  const int64_t max_slices = T < MAX_GRID_Y ? T : MAX_GRID_Y;
  return dim3(unsigned(blocks), unsigned(slices < max_slices ? slices : max_slices));
}

}  // namespace fusedseq::cuda
