// FORWARD(name) binds a function of the C library to its oldest version, so that a library that was
// compiled on a newer system loads on every system from manylinux_2_28 (glibc 2.28) on.
//
// A linker takes the newest version of a function. The older ones stay in glibc for good: a hidden
// function of the same name, linked into the library, jumps to the older one. Arguments and return
// address remain, whatever the signature is. Nothing happens without glibc.
#pragma once
#include <cstdlib>

#if defined(__GLIBC__) && defined(__x86_64__)
#define OLDEST "@GLIBC_2.2.5"
#define JUMP "jmp fusedseq_old_"
#define END_OF_JUMP "@PLT;"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define OLDEST "@GLIBC_2.17"
#define JUMP "b fusedseq_old_"
#define END_OF_JUMP ";"
#endif

#ifdef OLDEST
#define FORWARD_TO(name, version)                                              \
  asm(".text; .p2align 4;"                                                     \
      ".globl " #name "; .hidden " #name "; .type " #name ", %function;" #name \
      ": " JUMP #name END_OF_JUMP " .size " #name ", . - " #name               \
      ";"                                                                      \
      ".symver fusedseq_old_" #name "," #name version)
#else
#define FORWARD_TO(name, version) static_assert(true)
#endif
#define FORWARD(name) FORWARD_TO(name, OLDEST)
