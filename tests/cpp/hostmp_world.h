// The ranks of one product on hostmp, side by side in one process, each with what it passes to Matmul.
#ifndef JAXMP_TESTS_HOSTMP_WORLD_H_
#define JAXMP_TESTS_HOSTMP_WORLD_H_

#include "tests/conformance/run.h"
#include "tests/cpp/check.h"
#include "tests/cpp/threads.h"

namespace jaxmp::test {

using conformance::Buffers;
using conformance::Call;
using conformance::Case;
using conformance::make_case;
using conformance::Operands;

inline const MpApi& api = host_api();

inline void check_ok(cublasMpStatus_t status) {
  if (status != CUBLASMP_STATUS_SUCCESS) check::report(false, __FILE__, __LINE__, api.last_error());
}

// A product of f32 on `nranks` ranks.
inline Case product(Pattern pattern, int nranks, int64_t m, int64_t n, int64_t k, cudaDataType_t in = CUDA_R_32F,
                    cudaDataType_t out = CUDA_R_32F) {
  Case c = make_case("", pattern, nranks, in, out);
  c.m = m, c.n = n, c.k = k;
  return c;
}

class World {
 public:
  explicit World(const Case& given) : c(given), operands(c), backend_(conformance::make_host_backend(c.nranks())) {
    for (int rank = 0; rank < c.nranks(); ++rank) {
      Member& member = members_.emplace_back();
      member.rank = *backend_->make_rank(rank);
      member.runner = std::make_unique<conformance::Runner>(*backend_, *member.rank, rank, c.nranks());
      CHECK_EQ(member.runner->start().message(), "");
      member.buffers = std::make_unique<Buffers>(c, operands, member.rank.get(), rank);
      CHECK_EQ(member.buffers->write().message(), "");
      member.run = std::make_unique<conformance::CaseRun>(member.runner.get(), c, member.buffers.get());
      CHECK(member.run->prepare());
      calls.push_back(member.run->ready());
    }
  }

  cublasMpStatus_t matmul(int rank, hostmp::Stream* stream) {
    return at(rank).run->start(calls[static_cast<size_t>(rank)], hostmp::AsStream(stream));
  }

  // Each rank's call, in order, on this thread, or each on a thread of its own; returns when all are done.
  void run(hostmp::Pool* pool, bool on_threads = false, int64_t run_id = 1) {
    Streams streams(calls.size());
    const auto start = [&](int rank) {
      hostmp::Stream* const stream = streams.start(static_cast<size_t>(rank), &rendezvous, pool, run_id);
      if (matmul(rank, stream) == CUBLASMP_STATUS_SUCCESS) return;
      hostmp::Fail(*stream, rank, c.nranks(), InvalidArgument(api.last_error()));
    };
    std::vector<std::thread> threads;
    for (int rank = 0; rank < c.nranks(); ++rank) {
      on_threads ? threads.emplace_back(start, rank), void() : start(rank);
    }
    for (std::thread& thread : threads) thread.join();
    streams.wait();
    errors = streams.errors;
  }

  // Returns D; every rank of an all-reduce has a copy.
  Matrix gather() {
    Matrix whole(c.m, c.n);
    for (int rank = 0; rank < c.nranks(); ++rank) {
      Buffers& x = buffers(rank);
      CHECK(x.read().ok());
      CHECK(x.is_memory_intact() && at(rank).run->workspace_is_intact());
      const int64_t ld = x.lld(x.layouts.d);
      x.layouts.d.each_of(rank, [&](int64_t i, int64_t j, int64_t row, int64_t col) {
        const Number value = conformance::get_element(c.out, x.d.after(), col * ld + row);
        if (j < c.n) whole.at(i, j) = value;
      });
    }
    return whole;
  }

  Buffers& buffers(int rank) { return *at(rank).buffers; }

  const Case c;
  const Operands operands;
  hostmp::Rendezvous rendezvous;
  std::vector<Call> calls;          // by rank
  std::vector<std::string> errors;  // of the last run

 private:
  struct Member {
    std::unique_ptr<conformance::Rank> rank;
    std::unique_ptr<conformance::Runner> runner;
    std::unique_ptr<Buffers> buffers;
    std::unique_ptr<conformance::CaseRun> run;
  };
  Member& at(int rank) { return members_[static_cast<size_t>(rank)]; }

  const std::unique_ptr<conformance::Backend> backend_;
  std::vector<Member> members_;
};

}  // namespace jaxmp::test

#endif  // JAXMP_TESTS_HOSTMP_WORLD_H_
