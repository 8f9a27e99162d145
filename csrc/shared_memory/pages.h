// Pages of a file in memory: allocated, mapped and given back.
#pragma once

#include <cstddef>
#include <utility>

#include "csrc/base/status.h"

namespace jaxmp {

// Takes memory for a range of a file, or frees it. A page that is written to without it may end the process (SIGBUS).
Status AllocatePages(int fd, size_t begin, size_t bytes);
void FreePages(int fd, size_t begin, size_t bytes);

// A range of a file, mapped for reading and writing.
class Mapping {
 public:
  static StatusOr<Mapping> Make(int fd, size_t begin, size_t bytes);
  Mapping(Mapping&& other) noexcept : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  char* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  Mapping(char* base, size_t bytes) : base_(base), bytes_(bytes) {}

  char* base_;
  size_t bytes_;
};

}  // namespace jaxmp
