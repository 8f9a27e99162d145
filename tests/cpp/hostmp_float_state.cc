// Without these a thread of ours would round differently from XLA's, and the bits of a program would depend on which
// rank has waited: each rank's program resumes in the state of the thread that it came on, and all threads compute the
// tiles of a product in one state.
#include <optional>
#include <random>

#include "csrc/base/float_state.h"
#include "tests/cpp/hostmp_world.h"

namespace jaxmp::test {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

#if defined(__x86_64__) || defined(__aarch64__)
constexpr bool kHasState = true;
#else
constexpr bool kHasState = false;
#endif

FloatState state_of(bool flushes) {
  const FloatState state = FloatState::Current();
  return flushes ? state.Flushing() : state;
}

// Multiplies a subnormal number by a large one on this thread: 0 if the thread flushes.
bool keeps_subnormals() {
  volatile float tiny = 1e-40f, large = 1e30f;
  return tiny * large != 0;
}

TEST(test_scope) {
  const FloatState before = FloatState::Current();
  CHECK(keeps_subnormals());
  {
    const ScopedFloatState scope(before.Flushing());
    CHECK(FloatState::Current() == before.Flushing());
    CHECK(keeps_subnormals() != kHasState);
    {
      const ScopedFloatState inner(before);
      CHECK(keeps_subnormals());
    }
    CHECK(keeps_subnormals() != kHasState);
  }
  CHECK(FloatState::Current() == before);
  CHECK(keeps_subnormals());
}

// The state that a rank's program finds when it resumes.
struct Resumed {
  std::thread::id thread;
  FloatState state = FloatState::Current();
  bool keeps = false;
  std::atomic<bool> is_done{false};

  void wait() const {
    while (!is_done) std::this_thread::yield();
  }
};

void resume(void* context, const Status&) {
  auto* const resumed = static_cast<Resumed*>(context);
  resumed->thread = std::this_thread::get_id();
  resumed->state = FloatState::Current();
  resumed->keeps = keeps_subnormals();
  resumed->is_done = true;
}

// Each rank comes on a thread of its own and state, and all but the last go on before the next one comes. So they
// resume on threads of hostmp's, which serve ranks of either state in turn.
void check_resumption(bool fails) {
  for (int round = 0; round < 12; ++round) {
    World world(product(Pattern::kAllGather, 3, 9, 9, 8));
    std::array<Resumed, 3> resumed;
    std::array<hostmp::Stream, 3> streams;
    std::array<std::thread::id, 3> came_on;
    const auto flushes = [round](int rank) { return (round >> rank & 1) != 0; };
    for (int turn = 0; turn < 3; ++turn) {
      const int rank = (turn + round) % 3;
      const auto i = static_cast<size_t>(rank);
      streams[i] = {&world.rendezvous, 1, 0, nullptr, resume, &resumed[i]};
      std::thread([&] {
        came_on[i] = std::this_thread::get_id();
        const ScopedFloatState scope(state_of(flushes(rank)));
        if (fails && turn == 1) {
          hostmp::Fail(streams[i], rank, 3, InvalidArgument("bad luck"));
        } else {
          check_ok(world.matmul(rank, &streams[i]));
        }
        CHECK(FloatState::Current() == state_of(flushes(rank)));
      }).join();
    }
    for (int rank = 0; rank < 3; ++rank) {
      const Resumed& at = resumed[static_cast<size_t>(rank)];
      at.wait();
      const bool is_last = rank == (2 + round) % 3;
      CHECK(is_last == (at.thread == came_on[static_cast<size_t>(rank)]));
      CHECK(at.state == state_of(flushes(rank)));
      CHECK(at.keeps == !(flushes(rank) && kHasState));
    }
  }
}

TEST(test_ranks_resume_in_their_own_state) { check_resumption(/*fails=*/false); }
TEST(test_ranks_that_failed_resume_in_their_own_state) { check_resumption(/*fails=*/true); }

// Ranks still wait when their call site is destroyed.
TEST(test_ranks_of_a_destroyed_site_resume_in_their_own_state) {
  for (bool flushes : {false, true, false}) {
    Resumed resumed;
    hostmp::Stream stream;
    {
      World world(product(Pattern::kAllGather, 2, 8, 8, 8));
      stream = {&world.rendezvous, 1, 0, nullptr, resume, &resumed};
      const ScopedFloatState scope(state_of(flushes));
      check_ok(world.matmul(1, &stream));
    }
    resumed.wait();
    CHECK(resumed.state == state_of(flushes));
  }
}

// Threads of a pool in a state of their own, which they have to find again.
class OtherThreads final : public hostmp::Pool {
 public:
  OtherThreads(int count, bool flushes) : threads_(count), flushes_(flushes) {}
  int num_threads() const override { return threads_.num_threads(); }
  void Schedule(int64_t threads, const std::function<void()>& work) override {
    threads_.Schedule(threads, [this, work] {
      const ScopedFloatState scope(state_of(flushes_));
      work();
      CHECK(FloatState::Current() == state_of(flushes_));
    });
  }

 private:
  Threads threads_;
  const bool flushes_;
};

// Fills products with subnormal partial results, or with subnormal operands.
void fill_tiny(Operands& x) {
  const auto fill = [&](Matrix* matrix, double scale, unsigned seed) {
    std::mt19937 random(seed);
    for (Number& value : matrix->values) value = scale * (1 + static_cast<double>(random() % 7));
  };
  fill(&x.a, 1e-40, 1);
  fill(&x.b, 1e30, 2);
  fill(&x.c, 1e-41, 3);
  for (size_t i = 0; i < x.a.values.size(); i += 3) x.a.values[i] = 1e-20;
}

std::vector<Number> product_of(const Case& c, std::optional<bool> pool_flushes, int last,
                               const std::vector<bool>& state) {
  World world(c);
  std::optional<OtherThreads> pool;
  if (pool_flushes) pool.emplace(3, *pool_flushes);
  const int nranks = c.nranks();
  std::vector<Resumed> resumed(world.calls.size());
  std::vector<hostmp::Stream> streams(world.calls.size());
  for (int turn = 1; turn <= nranks; ++turn) {
    const int rank = (last + turn) % nranks;
    const auto i = static_cast<size_t>(rank);
    streams[i] = {&world.rendezvous, 1, 0, pool ? &*pool : nullptr, resume, &resumed[i]};
    const ScopedFloatState scope(state_of(state[i]));
    check_ok(world.matmul(rank, &streams[i]));
  }
  for (const Resumed& at : resumed) at.wait();
  return world.gather().values;
}

// The bits do not depend on the last rank or on the state of the threads that help. (XLA's are all in one state; if
// ranks come in different states, rank 0's is the product's.)
TEST(test_the_product_does_not_depend_on_who_computes_it) {
  const std::pair<cudaDataType_t, cudaDataType_t> types[] = {
      {CUDA_R_32F, CUDA_R_32F}, {CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16BF, CUDA_R_32F}, {CUDA_C_32F, CUDA_C_32F}};
  for (const auto& [in, out] : types) {
    for (bool fixed_reduction_order : {false, true}) {
      for (const int64_t m : {3, 120}) {
        for (bool has_c : {false, true}) {
          Case c = product(Pattern::kReduceScatter, 2, m, 96, 240, in, out);
          c.fixed_reduction_order = fixed_reduction_order, c.has_c = has_c, c.beta = has_c ? 1 : 0;
          c.fill = fill_tiny;
          c.epilog = out == CUDA_C_32F ? 0 : CUBLASMP_MATMUL_EPILOGUE_BGRADA;
          for (bool flushes : {false, true}) {
            const std::vector<Number> alone = product_of(c, {}, 0, {flushes, flushes});
            for (bool pool_flushes : {false, true}) {
              for (int last : {0, 1}) {
                const bool is_equal = product_of(c, pool_flushes, last, {flushes, !flushes}) == alone;
                check::report(is_equal, __FILE__, __LINE__, c.name() + (flushes ? ", flushing" : ", keeping"));
              }
            }
          }
        }
      }
    }
  }
}

// A product of subnormal operands is zero if the state flushes, and only then.
TEST(test_the_state_reaches_the_kernels) {
  for (bool fixed_reduction_order : {false, true}) {
    for (bool flushes : {false, true}) {
      Case c = product(Pattern::kReduceScatter, 2, 120, 96, 240);
      c.fixed_reduction_order = fixed_reduction_order;
      c.fill = [](Operands& x) {
        for (Number& value : x.a.values) value = 1e-40;
        for (Number& value : x.b.values) value = 1e30;
      };
      World world(c);
      OtherThreads pool(3, !flushes);
      {
        const ScopedFloatState scope(state_of(flushes));
        world.run(&pool);
      }
      int zeros = 0;
      for (const Number& value : world.gather().values) zeros += value == 0.0;
      CHECK_EQ(zeros, flushes && kHasState ? 120 * 96 : 0);
    }
  }
}

}  // namespace
}  // namespace jaxmp::test
