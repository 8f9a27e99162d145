// The state of the fake libcuda.so.1: contexts, streams, memory, and the calls that were put on the streams.
#ifndef JAXMP_TESTS_FAKES_CUDA_STATE_H_
#define JAXMP_TESTS_FAKES_CUDA_STATE_H_

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fakes/fake.h"

namespace jaxmp::abi {

struct CUctx_st {
  int ordinal;
};

struct CUevent_st {
  struct Mark {
    std::mutex mutex;
    std::condition_variable reached;
    bool is_reached = false;
  };
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // of the last record; null before the first
};

struct CUstream_st {
  explicit CUstream_st(CUcontext context) : context(context), worker([this] { Work(); }) {}
  ~CUstream_st() {
    Put(nullptr);
    worker.join();
  }

  void Put(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push(std::move(work));
    changed.notify_all();
  }
  void Work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return !queue.empty(); });
      const std::function<void()> work = queue.front();
      lock.unlock();
      if (!work) return;
      work();
      lock.lock();
      queue.pop();  // only now: an empty queue is an idle stream
      changed.notify_all();
    }
  }
  CUresult Synchronize() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty(); });
    return CUDA_SUCCESS;
  }

  bool IsIdle() {
    std::lock_guard<std::mutex> lock(mutex);
    return queue.empty();
  }

  const CUcontext context;
  std::mutex mutex;
  std::condition_variable changed;
  std::queue<std::function<void()>> queue;
  std::thread worker;
};

}  // namespace jaxmp::abi

namespace fakes {

using namespace jaxmp::abi;  // NOLINT: the driver's own names

constexpr int kMostDevices = 64;
constexpr size_t kMemory = size_t{4} << 30;  // of a device

struct Block {
  size_t bytes = 0;
  int ordinal = 0;
  bool is_host = false;  // pinned
};

struct Memory {
  std::mutex mutex;
  std::map<const char*, Block> blocks;  // by address: allocated and not freed

  // Returns the block around the address, or blocks.end().
  std::map<const char*, Block>::const_iterator Find(const void* at) const {
    auto found = blocks.upper_bound(static_cast<const char*>(at));
    if (found == blocks.begin()) return blocks.end();
    --found;
    return static_cast<const char*>(at) < found->first + found->second.bytes ? found : blocks.end();
  }
};

Memory& memory();
CUcontext Current();  // of this thread; null if there is none

// Notes a call that puts something on a stream, or waits for one.
void Note(CUcontext context, const char* name);

CUstream NewStream(CUcontext context);
void* Allocate(size_t bytes, int ordinal, bool is_host);
bool Release(void* data);  // true if it was allocated

inline void* Pointer(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

}  // namespace fakes

#endif  // JAXMP_TESTS_FAKES_CUDA_STATE_H_
