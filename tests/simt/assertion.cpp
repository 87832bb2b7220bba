// assert in a kernel, which on a GPU stops the device and prints the same sentence.
#include "machine.h"

extern "C" [[noreturn]] void __assert_fail(const char* expression, const char*, unsigned line, const char*) noexcept {
  simt::fault_in_kernel("line %u: assertion %s failed", line, expression);
}
