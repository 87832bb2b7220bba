// assert in a kernel. On a GPU it prints the same message and stops the device.
#include "machine.h"

extern "C" [[noreturn]] void __assert_fail(const char* expression, const char*, unsigned line,
                                           const char*) noexcept {
  simt::fault_in_kernel("line %u: assertion %s failed", line, expression);
}
