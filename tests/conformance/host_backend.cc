#include <cstdlib>
#include <cstring>

#include "csrc/hostmp/handles/runtime.h"
#include "tests/conformance/backend.h"
#include "tests/cpp/threads.h"

namespace jaxmp::conformance {
namespace {

class HostRank final : public Rank {
 public:
  HostRank(hostmp::Group* group, hostmp::Rendezvous* rendezvous, hostmp::Pool* pool, int rank)
      : group_(group), rendezvous_(rendezvous), pool_(pool), rank_(rank) {}

  abi::ncclComm_t comm() const override { return group_->comm(rank_); }

  abi::cudaStream_t stream(int64_t number) override {
    streams_ = std::make_unique<test::Streams>(1);
    stream_ = streams_->start(0, rendezvous_, pool_, number);
    return hostmp::AsStream(stream_);
  }

  void give_up(const std::string& why) override {
    hostmp::Fail(*stream_, rank_, group_->nranks(), InvalidArgument(why));
  }

  Status synchronize() override {
    streams_->wait();
    const std::string& error = streams_->errors[0];
    return error.empty() ? Status() : Internal(error);
  }

  void* allocate(size_t bytes) override { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }
  void release(void* memory) override { std::free(memory); }
  Status write(void* to, const void* from, size_t bytes) override { return copy(to, from, bytes); }
  Status read(void* to, const void* from, size_t bytes) override { return copy(to, from, bytes); }

 private:
  static Status copy(void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
    return {};
  }

  hostmp::Group* group_;
  hostmp::Rendezvous* rendezvous_;
  hostmp::Pool* pool_;
  int rank_;
  std::unique_ptr<test::Streams> streams_;  // of the last call
  hostmp::Stream* stream_ = nullptr;
};

class HostBackend final : public Backend {
 public:
  HostBackend(int nranks, int threads) : group_(nranks), pool_(threads > 0 ? new test::Threads(threads) : nullptr) {}
  const MpApi& api() const override { return host_api(); }
  StatusOr<std::unique_ptr<Rank>> make_rank(int rank) override {
    return std::unique_ptr<Rank>(std::make_unique<HostRank>(&group_, &rendezvous_, pool_.get(), rank));
  }
  size_t workspace_bytes() const override { return size_t{8} << 20; }

 private:
  hostmp::Group group_;
  hostmp::Rendezvous rendezvous_;
  std::unique_ptr<test::Threads> pool_;
};

}  // namespace

std::unique_ptr<Backend> make_host_backend(int nranks, int threads) {
  return std::make_unique<HostBackend>(nranks, threads);
}

}  // namespace jaxmp::conformance
