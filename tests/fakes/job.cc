#include "tests/fakes/job.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "tests/fakes/fake.h"

namespace fakes {
namespace {

// The file has a page that counts its processes, the board, and a share of memory for every process that has ever
// opened it. It is sparse, and takes only as much of a disk as was written.
constexpr uintptr_t kAddress = uintptr_t{1} << 44;  // far from programs, their libraries and heaps
constexpr size_t kPage = 4096, kShare = size_t{8} << 30, kMostProcesses = 128;
constexpr size_t kFileBytes = kPage + kFakeBoardBytes + kMostProcesses * kShare;

[[noreturn]] void End(const char* why) {
  std::perror(why);
  std::abort();  // a test on a machine that it was not made for
}

size_t Rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

class Job {
 public:
  explicit Job(const char* file) {
    const int opened = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (opened < 0 || ftruncate(opened, static_cast<off_t>(kFileBytes)) != 0) End("fake cuda: FAKE_CUDA_JOB");
    void* const wanted = reinterpret_cast<void*>(kAddress);
    void* const mapped =
        mmap(wanted, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, opened, 0);
    if (mapped != wanted) End("fake cuda: the memory of a job");
    close(opened);
    const size_t process = static_cast<std::atomic<size_t>*>(mapped)->fetch_add(1);
    if (process >= kMostProcesses) End("fake cuda: too many processes have opened FAKE_CUDA_JOB");
    board = static_cast<char*>(mapped) + kPage;
    next_ = board + kFakeBoardBytes + process * kShare;
    end_ = next_ + kShare;
  }

  char* Take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<char*>& free = free_[bytes];
    char* taken = next_;
    if (!free.empty()) {
      taken = free.back();
      free.pop_back();
    } else if (next_ += bytes; next_ > end_) {
      End("fake cuda: a process has used up its share of the memory of a job");
    }
    return taken;
  }
  void GiveBack(char* data, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_[bytes].push_back(data);
  }

  char* board;

 private:
  std::mutex mutex_;
  char *next_, *end_;                          // the part of this process's share that was never taken
  std::map<size_t, std::vector<char*>> free_;  // given back, by size
};

// Null if the process is alone. Never destroyed, because streams may still run at exit.
Job* job() {
  static Job* const only = [] {
    const char* const file = std::getenv("FAKE_CUDA_JOB");
    return file ? new Job(file) : nullptr;
  }();
  return only;
}

}  // namespace

void* Board() {
  static void* const board = [] {
    if (job()) return static_cast<void*>(job()->board);
    void* const own =
        mmap(nullptr, kFakeBoardBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (own == MAP_FAILED) End("fake cuda: the board");
    return own;
  }();
  return board;
}

char* Take(size_t bytes) {
  return job() ? job()->Take(Rounded(bytes)) : static_cast<char*>(std::aligned_alloc(256, Rounded(bytes)));
}

void GiveBack(char* data, size_t bytes) { job() ? job()->GiveBack(data, Rounded(bytes)) : std::free(data); }

}  // namespace fakes

void* fake_cuda_board() { return fakes::Board(); }
