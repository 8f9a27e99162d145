// Pages of a file in memory: allocated, mapped and given back.
#pragma once

#include <cstddef>
#include <memory>

#include "csrc/base/status.h"

namespace jaxmp {

// Takes memory for a range of a file, or frees it. A page that is written to without it may end the process (SIGBUS).
Status AllocatePages(int fd, size_t begin, size_t bytes);
void FreePages(int fd, size_t begin, size_t bytes);

// A range of a file, mapped for reading and writing.
struct Unmap {
  size_t bytes;
  void operator()(char* base) const;
};
using Mapping = std::unique_ptr<char, Unmap>;
StatusOr<Mapping> MapPages(int fd, size_t begin, size_t bytes);

}  // namespace jaxmp
