// Without these, arrivals of different calls could be mixed, or a rank could wait for ever: many call sites at once,
// runs that overlap, loops. (handler_execute has failing ranks and sites that go away.)

#include "tests/cpp/hostmp_world.h"

namespace jaxmp::test {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

Case case_of(int number) {
  const Pattern pattern = std::array{Pattern::kAllGather, Pattern::kReduceScatter, Pattern::kAllReduce}[number % 3];
  const cudaDataType_t type = number % 4 == 3 ? CUDA_R_16BF : CUDA_R_32F;
  return product(pattern, 2 + number % 3, 24 + number, 36, 12, type, type);
}

// A thousand products in 16 call sites, every rank of each on a thread of its own, all sharing one pool.
TEST(test_many_sites) {
  constexpr int kSites = 16, kRounds = 63;
  Threads pool(4);
  std::vector<std::thread> sites;
  std::atomic<int> wrong{0};
  for (int site = 0; site < kSites; ++site) {
    sites.emplace_back([&pool, &wrong, site] {
      World world(case_of(site));
      world.run(&pool);
      const std::vector<Number> first = world.gather().values;
      for (int round = 0; round < kRounds; ++round) {
        world.run(&pool, /*on_threads=*/round % 8 == 0, /*run_id=*/round % 3);
        wrong += world.gather().values != first;
        for (const std::string& error : world.errors) wrong += !error.empty();
      }
    });
  }
  for (std::thread& site : sites) site.join();
  CHECK_EQ(wrong.load(), 0);
}

// One rank may run ahead through a loop, and through another run of the same program, before its peer arrives at all.
TEST(test_a_rank_runs_ahead) {
  const Case c = product(Pattern::kAllGather, 2, 8, 8, 8);
  constexpr int kTurns = 5;
  std::vector<std::unique_ptr<World>> turns;
  for (int i = 0; i < 2 * kTurns; ++i) turns.push_back(std::make_unique<World>(c));
  hostmp::Rendezvous site;
  Streams streams(4 * kTurns);
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 2 * kTurns; ++i) {
      // A turn's ranks must be of one communicator to agree; so each turn has a world, and the site is shared.
      hostmp::Stream* const stream = streams.start(static_cast<size_t>(2 * i + rank), &site, nullptr, /*run_id=*/i % 2);
      check_ok(turns[static_cast<size_t>(i)]->matmul(rank, stream));
      CHECK(rank == 1 || streams.count() == 0);
    }
  }
  streams.wait();
  for (const std::string& error : streams.errors) CHECK_EQ(error, "");
}

// A peer's continuation may block for long: the others' completions must not wait in a queue for it.
TEST(test_blocking_continuations) {
  constexpr int kCalls = 8;
  struct Gate {
    std::mutex mutex;
    std::condition_variable open;
    int waiting = 0, gone = 0;
  } gate;
  const auto meet = [](void* context, const Status&) {
    auto* const gate = static_cast<Gate*>(context);
    std::unique_lock<std::mutex> lock(gate->mutex);
    ++gate->waiting;
    gate->open.notify_all();
    gate->open.wait(lock, [gate] { return gate->waiting >= kCalls; });  // as an XLA collective of kCalls programs
    ++gate->gone;
    gate->open.notify_all();
  };
  std::vector<std::unique_ptr<World>> worlds;
  std::vector<hostmp::Stream> first(kCalls);
  Streams second(kCalls);
  for (size_t i = 0; i < kCalls; ++i) {
    worlds.push_back(std::make_unique<World>(product(Pattern::kAllGather, 2, 8, 8, 8)));
    first[i] = {&worlds[i]->rendezvous, 1, 7, nullptr, meet, &gate};
    check_ok(worlds[i]->matmul(0, &first[i]));
    check_ok(worlds[i]->matmul(1, second.start(i, &worlds[i]->rendezvous)));
  }
  std::unique_lock<std::mutex> lock(gate.mutex);
  gate.open.wait(lock, [&gate] { return gate.gone == kCalls; });
  lock.unlock();
  second.wait();
}

}  // namespace
}  // namespace jaxmp::test
