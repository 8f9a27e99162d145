#include "csrc/shared_memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <utility>

#include "csrc/shared_memory/pages.h"

namespace jaxmp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kUnit = 64 << 10;  // slots begin and end at page boundaries, for any page size in use

// At the beginning of an arena.
struct ArenaHead {
  uint64_t number;
  char failure[256];  // why the last block could not be allocated
};

// At the beginning of a block, before its bytes.
struct BlockHead {
  uint64_t token;
  std::atomic<uint32_t> readers;  // still to come
  uint64_t bytes;
};
constexpr size_t kBlockHead = 64, kMostBytes = size_t{PTRDIFF_MAX} - kUnit;
static_assert(sizeof(BlockHead) <= kBlockHead);
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

size_t RoundUp(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

std::string Why() { return std::strerror(errno); }

size_t PlaceOf(uint64_t token) { return (token & UINT32_MAX) * kUnit; }

BlockHead* HeadOf(const Mapping& slot) { return reinterpret_cast<BlockHead*>(slot.get()); }

// The arena that this process writes to.
class LocalArena {
 public:
  static StatusOr<std::unique_ptr<LocalArena>> Make();

  const std::string& described() const { return described_; }
  uint32_t process() const { return process_; }
  void set_process(uint32_t process) { process_ = process; }
  Block Allocate(size_t bytes, uint32_t readers);
  void Trim(Clock::duration unused_for);
  ArenaUse use();

 private:
  struct Slot {
    Mapping mapping;
    bool is_taken;
    Clock::time_point used;
  };
  using Slots = std::map<size_t, Slot>;  // by place in the file

  LocalArena(int fd, uint64_t number, Mapping head);
  void Reclaim();
  StatusOr<Slots::iterator> FreeSlot(size_t bytes);
  StatusOr<Slots::iterator> AddSlot(size_t bytes);

  const int fd_;
  const Mapping head_;
  std::string described_;
  uint32_t process_ = 0;
  Slots slots_;
  uint32_t number_ = 0;  // of the last block
};

LocalArena::LocalArena(int fd, uint64_t number, Mapping head) : fd_(fd), head_(std::move(head)) {
  new (head_.get()) ArenaHead{number, {}};
  char pid[32] = {};  // as this /proc counts, perhaps in another namespace
  if (readlink("/proc/self", pid, sizeof(pid) - 1) < 0) std::snprintf(pid, sizeof(pid), "%d", int(getpid()));
  described_ = std::string(pid) + " " + std::to_string(fd) + " " + std::to_string(number);
}

StatusOr<std::unique_ptr<LocalArena>> LocalArena::Make() {
  const int fd = memfd_create("jaxmp", MFD_CLOEXEC);
  if (fd < 0) return FailedPrecondition("no memory can be shared: ", Why());
  const Status allocated = AllocatePages(fd, 0, kUnit);
  StatusOr<Mapping> head = allocated.ok() ? MapPages(fd, 0, kUnit) : StatusOr<Mapping>(allocated);
  if (!head.ok()) {
    close(fd);
    return FailedPrecondition("no memory can be shared: ", head.status().message());
  }
  std::random_device random;
  const uint64_t number = uint64_t{random()} << 32 | random();
  return std::unique_ptr<LocalArena>(new LocalArena(fd, number, *std::move(head)));
}

void LocalArena::Reclaim() {
  for (auto& [begin, slot] : slots_) {
    if (!slot.is_taken || HeadOf(slot.mapping)->readers.load(std::memory_order_acquire) != 0) continue;
    slot.is_taken = false;
    slot.used = Clock::now();
  }
}

void LocalArena::Trim(Clock::duration unused_for) {
  Reclaim();
  for (auto at = slots_.begin(); at != slots_.end();) {
    const auto& [begin, slot] = *at;
    if (slot.is_taken || Clock::now() - slot.used < unused_for) {
      ++at;
      continue;
    }
    FreePages(fd_, begin, slot.mapping.get_deleter().bytes);
    at = slots_.erase(at);
  }
}

// The first one of the smallest, so that the same pages are written to again and again. A slot of more than twice the
// size is left to larger blocks, or goes back.
StatusOr<LocalArena::Slots::iterator> LocalArena::FreeSlot(size_t bytes) {
  Reclaim();
  auto best = slots_.end();
  for (auto at = slots_.begin(); at != slots_.end(); ++at) {
    const size_t size = at->second.mapping.get_deleter().bytes;
    const bool is_fit = !at->second.is_taken && size >= bytes && size / 2 <= bytes;
    if (is_fit && (best == slots_.end() || size < best->second.mapping.get_deleter().bytes)) best = at;
  }
  if (best != slots_.end()) return best;
  StatusOr<Slots::iterator> added = AddSlot(bytes);
  if (!added.ok()) {
    Trim(Clock::duration::zero());
    added = AddSlot(bytes);
  }
  return added;
}

// In the first gap. The pages are allocated here: where that failed on writing to them, the process would end (SIGBUS).
StatusOr<LocalArena::Slots::iterator> LocalArena::AddSlot(size_t bytes) {
  size_t begin = kUnit;
  for (const auto& [taken, slot] : slots_) {
    if (taken - begin >= bytes) break;
    begin = taken + slot.mapping.get_deleter().bytes;
  }
  if (begin / kUnit > UINT32_MAX) return ResourceExhausted("the arena is full");
  JAXMP_RETURN_IF_ERROR(AllocatePages(fd_, begin, bytes));
  StatusOr<Mapping> mapping = MapPages(fd_, begin, bytes);
  if (!mapping.ok()) {
    FreePages(fd_, begin, bytes);
    return mapping.status();
  }
  return slots_.emplace(begin, Slot{*std::move(mapping), false, {}}).first;
}

Block LocalArena::Allocate(size_t bytes, uint32_t readers) {
  StatusOr<Slots::iterator> found = ResourceExhausted("they are too many");
  if (bytes <= kMostBytes) found = FreeSlot(RoundUp(kBlockHead + bytes));
  if (!found.ok()) {
    auto* head = reinterpret_cast<ArenaHead*>(head_.get());
    std::snprintf(head->failure, sizeof(head->failure), "rank %u has no memory to share %zu bytes with the others (%s)",
                  process_, bytes, found.status().message().c_str());
    return {};
  }
  auto& [begin, slot] = **found;
  slot.is_taken = true;
  auto* head = new (slot.mapping.get()) BlockHead{};
  head->token = uint64_t{++number_} << 32 | begin / kUnit;
  head->bytes = bytes;
  head->readers.store(readers, std::memory_order_release);
  return Block{head->token, slot.mapping.get() + kBlockHead};
}

ArenaUse LocalArena::use() {
  Reclaim();
  ArenaUse use{0, 0};
  for (const auto& [begin, slot] : slots_) {
    use.touched += slot.mapping.get_deleter().bytes;
    if (slot.is_taken) use.used += slot.mapping.get_deleter().bytes;
  }
  return use;
}

// Another process's arena. This process maps the blocks that it reads.
class PeerArena {
 public:
  explicit PeerArena(int fd) : fd_(fd) {}
  PeerArena(const PeerArena&) = delete;
  ~PeerArena() { close(fd_); }

  StatusOr<const char*> Read(uint64_t token, size_t bytes);
  void Release(uint64_t token);
  void Trim(Clock::duration unused_for);

 private:
  struct View {
    Mapping mapping;
    size_t readers;  // of this process, that have yet to release it
    Clock::time_point used;
  };

  StatusOr<View*> ViewOf(size_t begin, size_t bytes);

  const int fd_;
  std::map<size_t, View> views_;  // by place in the file
};

StatusOr<PeerArena::View*> PeerArena::ViewOf(size_t begin, size_t bytes) {
  const auto found = views_.find(begin);
  if (found != views_.end()) {
    if (found->second.mapping.get_deleter().bytes >= bytes) return &found->second;
    if (found->second.readers != 0) return FailedPrecondition("a smaller block is being read");
    views_.erase(found);
  }
  const auto end = static_cast<size_t>(std::max(lseek(fd_, 0, SEEK_END), off_t{0}));
  if (begin > end || bytes > end - begin) return FailedPrecondition("the arena ends at ", end);
  StatusOr<Mapping> mapping = MapPages(fd_, begin, bytes);
  if (!mapping.ok()) {
    Trim(Clock::duration::zero());
    mapping = MapPages(fd_, begin, bytes);
  }
  JAXMP_RETURN_IF_ERROR(mapping.status());
  return &views_.emplace(begin, View{*std::move(mapping), 0, Clock::now()}).first->second;
}

StatusOr<const char*> PeerArena::Read(uint64_t token, size_t bytes) {
  if (token == 0) {
    ArenaHead head{};
    const bool is_told = pread(fd_, &head, sizeof(head), 0) == sizeof(head) && head.failure[0] != 0;
    return ResourceExhausted(is_told ? head.failure : "there is none");
  }
  const size_t begin = PlaceOf(token);
  if (begin == 0 || bytes > kMostBytes) return FailedPrecondition("there is none");
  JAXMP_ASSIGN_OR_RETURN(View * view, ViewOf(begin, RoundUp(kBlockHead + bytes)));
  const BlockHead* head = HeadOf(view->mapping);
  if (head->token != token || head->bytes != bytes) {
    return FailedPrecondition("another block is there");
  }
  ++view->readers;
  return view->mapping.get() + kBlockHead;
}

void PeerArena::Release(uint64_t token) {
  const auto found = views_.find(PlaceOf(token));
  if (found == views_.end() || found->second.readers == 0) return;
  View& view = found->second;
  --view.readers;
  view.used = Clock::now();
  HeadOf(view.mapping)->readers.fetch_sub(1, std::memory_order_release);
}

void PeerArena::Trim(Clock::duration unused_for) {
  for (auto at = views_.begin(); at != views_.end();) {
    const bool is_used = at->second.readers != 0 || Clock::now() - at->second.used < unused_for;
    at = is_used ? std::next(at) : views_.erase(at);
  }
}

// Never destroyed: calls may run until the very end.
struct ArenaRegistry {
  std::mutex mutex;
  std::unique_ptr<LocalArena> own;
  std::map<int, std::unique_ptr<PeerArena>> of_process;
};
ArenaRegistry& registry() {
  static auto* const the_registry = new ArenaRegistry;
  return *the_registry;
}

StatusOr<LocalArena*> MakeLocalArena(ArenaRegistry& all) {
  if (!all.own) {
    JAXMP_ASSIGN_OR_RETURN(all.own, LocalArena::Make());
  }
  return all.own.get();
}

}  // namespace

StatusOr<std::string> DescribeLocalArena() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  JAXMP_ASSIGN_OR_RETURN(LocalArena * own, MakeLocalArena(registry()));
  return own->described();
}

Status ShareArena(int process, const std::string& described) {
  int pid = 0, fd = -1;
  uint64_t number = 0;
  if (std::sscanf(described.c_str(), "%d %d %" SCNu64, &pid, &fd, &number) != 3) {
    return InvalidArgument("\"", described, "\" describes no shared memory");
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const std::string memory = "the memory of rank " + std::to_string(process);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) return FailedPrecondition("cannot open ", memory, ", ", path, ": ", Why());
  auto arena = std::make_unique<PeerArena>(opened);
  ArenaHead head{};
  if (pread(opened, &head, sizeof(head), 0) != sizeof(head) || head.number != number) {
    return FailedPrecondition(path, " is not ", memory);
  }
  ArenaRegistry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.of_process[process] = std::move(arena);
  if (all.own && all.own->described() == described) all.own->set_process(static_cast<uint32_t>(process));
  return {};
}

StatusOr<Block> AllocateBlock(size_t bytes, uint32_t readers) {
  if (readers == 0) return InvalidArgument("jaxmp: a block without readers would be free while it is written");
  std::lock_guard<std::mutex> lock(registry().mutex);
  JAXMP_ASSIGN_OR_RETURN(LocalArena * own, MakeLocalArena(registry()));
  return own->Allocate(bytes, readers);
}

StatusOr<const char*> ReadBlock(int process, uint64_t token, size_t bytes) {
  ArenaRegistry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.of_process.find(process);
  StatusOr<const char*> block = FailedPrecondition("the two share no memory");
  if (found != all.of_process.end()) block = found->second->Read(token, bytes);
  if (block.ok()) return block;
  std::string what;
  if (token != 0) {
    what = "rank " + std::to_string(all.own ? all.own->process() : 0) + " cannot read a block of rank " +
           std::to_string(process) + ", " + std::to_string(bytes) + " bytes: ";
  }
  return FailedPrecondition("jaxmp.DistributedError: ", what, block.status().message());
}

void ReleaseBlock(int process, uint64_t token) {
  ArenaRegistry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.of_process.find(process);
  if (found != all.of_process.end()) found->second->Release(token);
}

void TrimArenas(double unused_for) {
  const auto age = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(unused_for));
  ArenaRegistry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.own) all.own->Trim(age);
  for (auto& [process, arena] : all.of_process) arena->Trim(age);
}

ArenaUse LocalArenaUse() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().own ? registry().own->use() : ArenaUse{0, 0};
}

}  // namespace jaxmp
