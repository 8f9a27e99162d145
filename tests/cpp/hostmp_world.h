// The ranks of one product, side by side in one process: local buffers with canaries, and what D should be.
#ifndef JAXMP_TESTS_HOSTMP_WORLD_H_
#define JAXMP_TESTS_HOSTMP_WORLD_H_

#include <algorithm>
#include <array>
#include <complex>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/cublasmp/api_table.h"
#include "csrc/hostmp/handles/runtime.h"
#include "tests/cpp/check.h"
#include "tests/cpp/placement.h"

namespace jaxmp::test {

// ---- memory

constexpr unsigned char kCanary = 0xa5;
constexpr size_t kMargin = 256;

// Bytes between two margins, everything set to the canary: what is not written stays recognisable (and a NaN-like or
// tiny number where it is read by mistake).
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), data_(bytes + 2 * kMargin, static_cast<char>(kCanary)) {}
  char* get() { return data_.data() + kMargin; }
  const char* get() const { return data_.data() + kMargin; }
  size_t size() const { return bytes_; }
  const std::vector<char>& all() const { return data_; }
  bool margins_are_intact() const {
    for (size_t i = 0; i < kMargin; ++i) {
      if (static_cast<unsigned char>(data_[i]) != kCanary) return false;
      if (static_cast<unsigned char>(data_[kMargin + bytes_ + i]) != kCanary) return false;
    }
    return true;
  }

 private:
  size_t bytes_;
  std::vector<char> data_;
};

// A fixed number of threads.
class Threads final : public hostmp::Pool {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { serve(); });
  }
  ~Threads() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stops_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int num_threads() const override { return static_cast<int>(threads_.size()); }
  void Schedule(int64_t threads, const std::function<void()>& work) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int64_t i = 0; i < threads; ++i) work_.push(work);
    }
    wake_.notify_all();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stops_ || !work_.empty(); });
      if (work_.empty()) return;
      const std::function<void()> work = std::move(work_.front());
      work_.pop();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::queue<std::function<void()>> work_;
  std::vector<std::thread> threads_;
  bool stops_ = false;
};

// ---- one product

template <typename T>
using Owned = std::unique_ptr<T, cublasMpStatus_t (*)(T*)>;

struct Rank {
  std::vector<Owned<cublasMpGrid>> grids;
  Owned<cublasMpHandle> handle{nullptr, nullptr};
  Owned<cublasMpMatmulDescriptor> matmul{nullptr, nullptr};
  Owned<cublasMpMatrixDescriptor> desc_a{nullptr, nullptr}, desc_b{nullptr, nullptr}, desc_d{nullptr, nullptr};
  std::unique_ptr<Buffer> a, b, c, d, bias, aux, gradient, workspace;
  std::array<char, 16> alpha{}, beta{};
  int64_t aux_ld = 0;
};

class World {
 public:
  // Small integers, or what `fill` puts into a, b and c0.
  explicit World(const Case& c, const std::function<void(World*)>& fill = nullptr);

  // Each rank's call, in order, on this thread, or each on a thread of its own; returns when all are done.
  void run(hostmp::Pool* pool, bool on_threads = false);
  cublasMpStatus_t query(int rank, size_t* device_bytes);
  cublasMpStatus_t matmul(int rank, hostmp::Stream* stream);

  // D as one rank's part of the whole holds it (all-reduce: rank `copy`'s).
  Matrix gather(int64_t copy = 0) const;
  void check_untouched() const;  // operands, margins

  Case c;
  Layouts layouts;
  hostmp::Group group;
  hostmp::Rendezvous rendezvous;
  std::vector<Rank> ranks;
  Matrix a, b, c0, aux0;     // op'd later: as stored; c0 is C, aux0 what a derivative reads (the mask says > 0)
  std::vector<Number> bias;  // by row of D
  std::vector<std::string> errors;
  int64_t run_id = 1;

 private:
  void make_rank(int rank);
  void make_bias(int rank);
  void make_aux(int rank);
  Owned<cublasMpMatrixDescriptor> make_matrix(Rank& rank, int number, const Layout& layout, cudaDataType_t type);
  std::unique_ptr<Buffer> scatter(const Matrix& whole, const Layout& layout, int rank, cudaDataType_t type) const;
  int64_t lld(const Layout& layout, int rank) const;
  std::vector<std::vector<char>> before_;
};

}  // namespace jaxmp::test

#include "tests/cpp/hostmp_world_impl.h"

#endif  // JAXMP_TESTS_HOSTMP_WORLD_H_
