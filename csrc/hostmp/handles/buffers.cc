#include "csrc/hostmp/handles/buffers.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

#include "csrc/base/str_cat.h"
#include "csrc/hostmp/numeric/dtypes.h"

namespace jaxmp::hostmp {
namespace {

struct Buffer {
  size_t size;
  bool is_ours;       // of cublasMpMalloc
  int registrations;  // one communicator may register a buffer with each of its grids
};

// By communicator, rank and address: registration belongs to a rank of a communicator.
struct Key {
  const void* group;
  int rank;
  const void* ptr;
  bool operator<(const Key& o) const { return std::tie(group, rank, ptr) < std::tie(o.group, o.rank, o.ptr); }
};

std::mutex mutex;
std::map<Key, Buffer>& buffers() {
  static auto* const all = new std::map<Key, Buffer>;  // a product may still run when statics are destroyed
  return *all;
}

Key KeyOf(const abi::cublasMpGrid& grid, const void* ptr) { return {grid.comm.group, grid.comm.rank, ptr}; }

}  // namespace

StatusOr<void*> Allocate(const abi::cublasMpGrid& grid, size_t size) {
  const auto rounded = static_cast<size_t>(RoundUp(static_cast<int64_t>(size > 0 ? size : 1), kAlignment));
  void* const ptr = std::aligned_alloc(kAlignment, rounded);
  if (!ptr) return ResourceExhausted(StrCat("no memory for ", size, " bytes"));
  std::lock_guard<std::mutex> lock(mutex);
  buffers()[KeyOf(grid, ptr)] = {size, true, 1};
  return ptr;
}

Status Release(const abi::cublasMpGrid& grid, void* ptr) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = buffers().find(KeyOf(grid, ptr));
  if (found == buffers().end() || !found->second.is_ours) {
    return InvalidArgument("ptr did not come from cublasMpMalloc on a grid of this communicator and rank");
  }
  buffers().erase(found);
  std::free(ptr);
  return {};
}

Status RegisterBuffer(const abi::cublasMpGrid& grid, void* ptr, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_new] = buffers().insert({KeyOf(grid, ptr), {size, false, 0}});
  if (!is_new && at->second.size != size) {
    return InvalidArgument(
        StrCat("ptr is registered with ", at->second.size, " bytes already, got ", size, "; deregister it first"));
  }
  ++at->second.registrations;
  return {};
}

Status DeregisterBuffer(const abi::cublasMpGrid& grid, void* ptr) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = buffers().find(KeyOf(grid, ptr));
  if (found == buffers().end()) return InvalidArgument("ptr is not registered with a grid of this communicator");
  const bool is_last = --found->second.registrations == 0;
  if (is_last && found->second.is_ours) {
    ++found->second.registrations;
    return InvalidArgument("ptr came from cublasMpMalloc; give it back with cublasMpFree");
  }
  if (is_last) buffers().erase(found);
  return {};
}

bool IsRegistered(const abi::cublasMpGrid& grid, const void* ptr) {
  std::lock_guard<std::mutex> lock(mutex);
  return buffers().count(KeyOf(grid, ptr)) > 0;
}

}  // namespace jaxmp::hostmp
