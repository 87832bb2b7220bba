// The source line and function of an address of machine code, from binutils' addr2line.
#include <dlfcn.h>

#include <cstdio>
#include <vector>

#include "machine.h"

namespace simt {
namespace {

std::vector<std::string> lines_of(const char* options, const void* pc) {
  Dl_info library;
  if (!dladdr(pc, &library)) return {};
  char text[1024];
  const auto offset =
      size_t(static_cast<const char*>(pc) - static_cast<const char*>(library.dli_fbase));
  snprintf(text, sizeof text, "addr2line %s -e '%s' %#zx", options, library.dli_fname, offset);
  std::vector<std::string> lines;
  FILE* process = popen(text, "r");
  while (process && fgets(text, sizeof text, process)) {
    lines.push_back(text);
    lines.back().pop_back();
  }
  if (process) pclose(process);
  return lines;
}

}  // namespace

std::string line_of(const void* pc) {
  const auto lines = lines_of("-s", static_cast<const char*>(pc) - 1);
  return lines.empty() ? "?" : lines[0].substr(0, lines[0].find(' '));
}

std::string function_of(const void* function) {
  // addr2line -i prints two lines for each inlined frame, innermost first: function, file:line.
  const auto lines = lines_of("-f -i -C", function);
  if (lines.size() < 2) return "kernel";
  std::string name = lines[lines.size() - 2];
  const std::string anonymous = "(anonymous namespace)::";
  for (size_t at; (at = name.find(anonymous)) != name.npos;)
    name.erase(at, anonymous.size());
  name = name.substr(0, name.find_first_of("(<"));
  return name.substr(name.find_last_of(": ") + 1);
}

}  // namespace simt
