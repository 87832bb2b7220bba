// C functions through which Python launches any kernel of a translated module by its name. build.py
// writes the table of the module's kernels. Those that return const char* return an error message,
// or null.
#include <algorithm>

#include "modules.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

static const ptx::Kernel* kernel_of(const char* name) {
  const auto found = std::find_if(
      std::begin(ptx::KERNELS), std::end(ptx::KERNELS),
      [name](const ptx::Kernel& kernel) { return std::strcmp(kernel.name, name) == 0; });
  return found == std::end(ptx::KERNELS) ? nullptr : found;
}

// arguments: the addresses of the kernel's arguments    size: {grid x, y, z, block x, dynamic
// shared memory}
EXPORT const char* ptx_launch(const char* name, const unsigned* size, void* const* arguments) {
  const ptx::Kernel* kernel = kernel_of(name);
  if (!kernel) return "no kernel of this name";
  const void* key = reinterpret_cast<const void*>(kernel->run);
  simt::translate({key, kernel->run, kernel->shared, kernel->sizes});
  static thread_local char anchor;
  anchor = 0;
  if (size[4] > 0) simt::allow_shared(key, size[4]);
  const int error = simt::launch({key,
                                  {size[0], size[1], size[2]},
                                  {size[3]},
                                  size[4],
                                  false,
                                  &anchor,
                                  &anchor,
                                  nullptr,
                                  0,
                                  arguments,
                                  kernel->sizes.data(),
                                  kernel->sizes.size()});
  return error ? simt::error_text(error) : nullptr;
}

EXPORT int ptx_parameter_count(const char* name) {
  const ptx::Kernel* kernel = kernel_of(name);
  return kernel ? int(kernel->sizes.size()) : -1;
}
