// The grid barrier of cooperative_groups.
#pragma once
#include <cuda_runtime.h>

namespace cooperative_groups {

struct grid_group {
  void sync(int line = __builtin_LINE()) const { simt::sync_grid(line); }
};
inline grid_group this_grid() {
  return {};
}

}  // namespace cooperative_groups
