// Functions and a variable that the headers of GCC 12 and glibc 2.36 use, and that the libraries of
// manylinux_2_28 lack (libstdc++ of GCC 8, glibc 2.28). Each is written here with what those have,
// and linked into the library under its mangled name, hidden, as the compilers of manylinux images
// do it. torch's libraries happen to export some of these names; nothing may depend on that.
#include <cstdlib>
#include <new>
#include <sstream>
#include <string>

#ifdef __GLIBC__
// 1 would say that the process has a single thread, whose reference counts need not be atomic.
extern "C" {
extern char __libc_single_threaded;
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;  // GLIBC_2.32
}
#endif

#ifdef __GLIBCXX__
namespace fusedseq {

// GLIBCXX_3.4.29
[[noreturn]] void throw_bad_array_new_length() asm("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() {
  throw std::bad_array_new_length();
}

// The constructors without arguments, GLIBCXX_3.4.26, by those that are given a mode.
void make_stringstream(void*) asm(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_stringstream(void* p) {
  new (p) std::stringstream(std::ios_base::in | std::ios_base::out);
}
void make_ostringstream(void*) asm(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void make_ostringstream(void* p) {
  new (p) std::ostringstream(std::ios_base::out);
}

// str() const & of C++20, GLIBCXX_3.4.29, by str() const of C++17, as which this file is compiled.
std::string contents(const std::stringbuf*) asm(
    "_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv");
std::string contents(const std::stringbuf* buffer) {
  return buffer->str();
}
std::string contents(const std::stringstream*) asm(
    "_ZNKRSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEE3strEv");
std::string contents(const std::stringstream* stream) {
  return stream->str();
}
std::string contents(const std::ostringstream*) asm(
    "_ZNKRSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEE3strEv");
std::string contents(const std::ostringstream* stream) {
  return stream->str();
}

// std::exception_ptr's change of the reference count, CXXABI_1.3.13, by libstdc++'s own copy
// constructor, whose copy is never destroyed, and destructor. The headers of GCC 12 have these
// inline, by means of the functions that are written here: local_symbols.map keeps a copy that the
// compiler made of them from being called instead.
void copy_exception(void* to, const void* from);
void destroy_exception(void*);
asm(".symver _ZN8fusedseq14copy_exceptionEPvPKv,"
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
asm(".symver _ZN8fusedseq17destroy_exceptionEPv,"
    "_ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
void add_reference(const void*) asm("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(const void* exception) {
  void* copy;
  copy_exception(&copy, exception);
}
void release_reference(void**) asm("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release_reference(void** exception) {
  destroy_exception(exception);
  *exception = nullptr;
}

}  // namespace fusedseq
#endif
