// Functions of the C library that the operators use and that have a version newer than glibc 2.28:
// 2.29 has exp, log and pow without an error handler, and 2.34 moved dlsym from libdl to libc.
#include "linux/forward.h"

FORWARD(exp);
FORWARD(log);
FORWARD(pow);
FORWARD(dlsym);
