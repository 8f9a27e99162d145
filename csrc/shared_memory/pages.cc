#include "csrc/shared_memory/pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

namespace jaxmp {
namespace {

constexpr size_t kAtATime = 16 << 20;  // a signal undoes what one call has done

// Bytes that the machine can give without killing a process for them.
size_t AvailableMemory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string name, unit;
  for (size_t kilobytes = 0; meminfo >> name >> kilobytes;) {
    if (name == "MemAvailable:") return kilobytes << 10;
    std::getline(meminfo, unit);
  }
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Status AllocatePages(int fd, size_t begin, size_t bytes) {
  if (bytes > AvailableMemory()) return ResourceExhausted(std::strerror(ENOMEM));
  for (size_t done = 0; done < bytes;) {
    const size_t part = std::min(bytes - done, kAtATime);
    if (fallocate(fd, 0, static_cast<off_t>(begin + done), static_cast<off_t>(part)) == 0) {
      done += part;
    } else if (errno != EINTR) {
      const Status failed = ResourceExhausted(std::strerror(errno));
      FreePages(fd, begin, bytes);
      return failed;
    }
  }
  return {};
}

void FreePages(int fd, size_t begin, size_t bytes) {
  fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin), static_cast<off_t>(bytes));
}

void Unmap::operator()(char* base) const { munmap(base, bytes); }

StatusOr<Mapping> MapPages(int fd, size_t begin, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(begin));
  if (base == MAP_FAILED) return ResourceExhausted(std::strerror(errno));
  madvise(base, bytes, MADV_DONTDUMP);
  return Mapping(static_cast<char*>(base), {bytes});
}

}  // namespace jaxmp
