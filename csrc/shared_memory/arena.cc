#include "csrc/shared_memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>

namespace jaxmp {
namespace {

constexpr size_t kUnit = 4096;                       // blocks begin and end at pages
constexpr size_t kMostBytes = size_t{64} << 30;      // of addresses, which many processes map of each other
constexpr int kProtection = PROT_READ | PROT_WRITE;  // readers count themselves off

// At the beginning of an arena.
struct ArenaHead {
  uint64_t number;
};

// At the beginning of a block, ahead of its bytes.
struct BlockHead {
  std::atomic<uint32_t> readers;  // still to come
  uint64_t bytes;
};
constexpr size_t kBlockHead = 64;
static_assert(sizeof(BlockHead) <= kBlockHead);
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

size_t round_up(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

std::string why() { return std::strerror(errno); }

struct Mapping {
  char* base = nullptr;
  size_t bytes = 0;
};

StatusOr<Mapping> map(int fd, size_t bytes) {
  void* base = mmap(nullptr, bytes, kProtection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) return ResourceExhausted("jaxmp: cannot map shared memory: " + why());
  madvise(base, bytes, MADV_DONTDUMP);
  return Mapping{static_cast<char*>(base), bytes};
}

BlockHead* head_of(const Mapping& arena, uint64_t token) { return reinterpret_cast<BlockHead*>(arena.base + token); }

// First fit, lowest address first, so that the same pages are written to again and again.
class OwnedArena {
 public:
  static StatusOr<std::unique_ptr<OwnedArena>> Make();

  const Mapping& mapping() const { return mapping_; }
  const std::string& described() const { return described_; }
  StatusOr<Block> Allocate(size_t bytes, uint32_t readers);
  ArenaUse use();

 private:
  void Reclaim();

  std::mutex mutex_;
  Mapping mapping_;
  std::string described_;
  std::map<size_t, size_t> used_;  // offset: size
  size_t touched_ = kUnit;
};

StatusOr<std::unique_ptr<OwnedArena>> OwnedArena::Make() {
  const auto memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = std::min(memory, kMostBytes) / kUnit * kUnit;
  const int fd = memfd_create("jaxmp", MFD_CLOEXEC);
  if (fd < 0) return FailedPrecondition("jaxmp: no shared memory: " + why());
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const Status failed = FailedPrecondition("jaxmp: no shared memory: " + why());
    close(fd);
    return failed;
  }
  StatusOr<Mapping> mapping = map(fd, bytes);
  if (!mapping.ok()) {
    close(fd);
    return mapping.status();
  }
  auto arena = std::make_unique<OwnedArena>();
  arena->mapping_ = *mapping;
  std::random_device random;
  const uint64_t number = uint64_t{random()} << 32 | random();
  new (arena->mapping_.base) ArenaHead{number};
  char described[128];
  std::snprintf(described, sizeof(described), "%d %d %zu %" PRIu64, static_cast<int>(getpid()), fd, bytes, number);
  arena->described_ = described;
  return arena;
}

void OwnedArena::Reclaim() {
  for (auto at = used_.begin(); at != used_.end();) {
    const bool is_read = head_of(mapping_, at->first)->readers.load(std::memory_order_acquire) == 0;
    at = is_read ? used_.erase(at) : std::next(at);
  }
}

StatusOr<Block> OwnedArena::Allocate(size_t bytes, uint32_t readers) {
  std::lock_guard<std::mutex> lock(mutex_);
  Reclaim();
  const size_t size = round_up(kBlockHead + bytes);
  size_t begin = kUnit;
  for (const auto& [offset, taken] : used_) {
    if (offset - begin >= size) break;
    begin = offset + taken;
  }
  if (size > mapping_.bytes || begin > mapping_.bytes - size) {
    return ResourceExhausted("jaxmp: " + std::to_string(bytes) + " bytes do not fit the memory that processes share, " +
                             std::to_string(mapping_.bytes) + " bytes; JAXMP_SHARED_MEMORY=off does without it");
  }
  used_[begin] = size;
  touched_ = std::max(touched_, begin + size);
  auto* head = new (mapping_.base + begin) BlockHead;
  head->bytes = bytes;
  head->readers.store(readers, std::memory_order_release);
  return Block{begin, mapping_.base + begin + kBlockHead};
}

ArenaUse OwnedArena::use() {
  std::lock_guard<std::mutex> lock(mutex_);
  Reclaim();
  ArenaUse use{0, touched_};
  for (const auto& [offset, size] : used_) use.used += size;
  return use;
}

// Never destroyed: calls may run until the very end.
struct Arenas {
  std::mutex mutex;
  std::unique_ptr<OwnedArena> own;
  std::map<int, Mapping> of_process;
};
Arenas& arenas() {
  static auto* const the_arenas = new Arenas;
  return *the_arenas;
}

StatusOr<OwnedArena*> own_arena() {
  Arenas& all = arenas();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (!all.own) {
    JAXMP_ASSIGN_OR_RETURN(all.own, OwnedArena::Make());
  }
  return all.own.get();
}

StatusOr<Mapping> arena_of(int process) {
  Arenas& all = arenas();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.of_process.find(process);
  if (found != all.of_process.end()) return found->second;
  return FailedPrecondition("jaxmp: this process shares no memory with process " + std::to_string(process));
}

}  // namespace

StatusOr<std::string> OwnArena() {
  JAXMP_ASSIGN_OR_RETURN(OwnedArena * arena, own_arena());
  return arena->described();
}

Status ShareArena(int process, const std::string& described) {
  int pid = 0, fd = -1;
  size_t bytes = 0;
  uint64_t number = 0;
  if (std::sscanf(described.c_str(), "%d %d %zu %" SCNu64, &pid, &fd, &bytes, &number) != 4) {
    return InvalidArgument("jaxmp: \"" + described + "\" describes no shared memory");
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) return FailedPrecondition("jaxmp: cannot open " + path + ": " + why());
  const Status is_another =
      FailedPrecondition("jaxmp: " + path + " is not the memory of process " + std::to_string(process));
  // A false size reserves no addresses.
  const off_t length = lseek(opened, 0, SEEK_END);
  StatusOr<Mapping> mapping = is_another;
  if (length >= 0 && static_cast<size_t>(length) >= bytes) mapping = map(opened, bytes);
  close(opened);
  if (!mapping.ok()) return mapping.status();
  if (reinterpret_cast<const ArenaHead*>(mapping->base)->number != number) {
    munmap(mapping->base, mapping->bytes);
    return is_another;
  }
  Arenas& all = arenas();
  std::lock_guard<std::mutex> lock(all.mutex);
  Mapping& shared = all.of_process[process];
  if (shared.base) munmap(shared.base, shared.bytes);
  shared = *mapping;
  return {};
}

StatusOr<Block> AllocateBlock(size_t bytes, uint32_t readers) {
  JAXMP_ASSIGN_OR_RETURN(OwnedArena * arena, own_arena());
  return arena->Allocate(bytes, readers);
}

StatusOr<const char*> ReadBlock(int process, uint64_t token, size_t bytes) {
  JAXMP_ASSIGN_OR_RETURN(const Mapping arena, arena_of(process));
  const bool is_inside =
      token % kUnit == 0 && bytes + kBlockHead <= arena.bytes && token <= arena.bytes - bytes - kBlockHead;
  if (!is_inside || token == 0 || head_of(arena, token)->bytes != bytes) {
    return FailedPrecondition("jaxmp: process " + std::to_string(process) + " shares no block of " +
                              std::to_string(bytes) + " bytes at " + std::to_string(token));
  }
  return arena.base + token + kBlockHead;
}

void ReleaseBlock(int process, uint64_t token) {
  const StatusOr<Mapping> arena = arena_of(process);
  if (arena.ok()) head_of(*arena, token)->readers.fetch_sub(1, std::memory_order_release);
}

ArenaUse OwnArenaUse() {
  StatusOr<OwnedArena*> arena = own_arena();
  return arena.ok() ? (*arena)->use() : ArenaUse{0, 0};
}

}  // namespace jaxmp
