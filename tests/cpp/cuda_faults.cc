// Ranks that are left alone: without the watchdog each of these would hang for ever. It ends the process, so every case
// runs in one of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "csrc/cuda/nccl_id_exchange.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_gpus.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

using tests::Gpu;
using tests::World;

struct Pair {
  Pair() : instance(fake_xla::InstantiateOnCuda(tests::AllGather(2, 4, 6, 8))), zero(0), one(1) {
    CHECK_EQ(instance.error, "");
  }

  std::vector<std::string> RunBoth() {
    World world(instance.site->plan->problem());
    return tests::RunAll(*instance.site, world, {&zero, &one});
  }

  fake_xla::InstanceOf<CudaSite> instance;
  Gpu zero, one;
};

void Sleep(abi::CUstream stream, int milliseconds) {
  static auto* const launch = tests::FakeFunction<decltype(cuLaunchHostFunc)>("right/libcuda.so.1", "cuLaunchHostFunc");
  const auto sleep = [](void* time) {
    std::this_thread::sleep_for(std::chrono::milliseconds(reinterpret_cast<intptr_t>(time)));
  };
  CHECK_EQ(launch(stream, sleep, reinterpret_cast<void*>(intptr_t{milliseconds})), abi::CUDA_SUCCESS);
}

void Pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

void BreakNccl() {
  tests::FakeFunction<decltype(fake_nccl_break)>("right/libnccl.so.2", "fake_nccl_break")(abi::ncclRemoteError);
}

// Rank 1 does not come to the second call, and rank 0 has queued more after it: its stream waits, and the contents must
// not be taken as a result.
void APeerThatStaysAwayOnTheDevice() {
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  cuda::SetTimeout(0.3);
  World world(pair.instance.site->plan->problem());
  int32_t position = 0;
  std::vector<fake_xla::Buffer> args = {tests::F32(world.a[0]), tests::F32(world.b[0])};
  tests::AddPosition(world.problem, &position, pair.zero, &args);
  for (int call = 0; call < 3; ++call) {
    CHECK_EQ(fake_xla::ExecuteOnCuda(*pair.instance.site, 0, pair.zero.stream, args, {tests::F32(world.d[0])}), "");
  }
  CHECK_EQ(Gpu::driver().StreamSynchronize(pair.zero.stream), abi::CUDA_SUCCESS);
}

// Calls that end are not held against a process that is slow to send more, nor is a stream that is busy with others.
void TimeBeforeACallDoesNotCount() {
  cuda::SetTimeout(0.2);
  Pair pair;
  for (int run = 0; run < 3; ++run) {
    if (run > 0) Sleep(pair.zero.stream, 500);
    if (run > 0) Sleep(pair.one.stream, 500);
    for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  }
}

// Rank 1 fails before a collective call of the host's; rank 0 then waits in it.
void APeerThatStaysAwayOnTheHost() {
  cuda::SetTimeout(0.5);
  Pair pair;
  tests::FailNext("GridCreate", 1);
  (void)pair.RunBoth();
}

// Rank 1 has reported, and ends before ncclCommInitRank; rank 0 then waits in it.
void APeerThatIsLostWhileConnecting() {
  cuda::SetTimeout(0.4);
  Pair pair;
  const std::string here = "here";
  CHECK(cuda::CallExchange("jaxmp/nccl/mesh 2/axes 0 by /devices /group 0/0/1", &here, 1).ok());
  World world(pair.instance.site->plan->problem());
  (void)tests::RunRank(*pair.instance.site, world, pair.zero, 0, 0);
}

// Rank 1 fails before a collective of a communicator that the library has split off ours.
void APeerThatStaysAwayInASplitCommunicator() {
  cuda::SetTimeout(0.3);
  Pair pair;
  tests::FailNext("BufferRegister", 1);
  (void)pair.RunBoth();
}

// Rank 0 has made its call before, so its host waits for no one; rank 1 has not made its own.
void APeerInACallThatIsNew() {
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  cuda::SetTimeout(0.3);
  const auto other = fake_xla::InstantiateOnCuda(tests::AllGather(2, 4, 6, 10));
  World worlds[] = {World(pair.instance.site->plan->problem()), World(other.site->plan->problem())};
  tests::OnEach(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const std::string error = tests::RunRank(rank == 0 ? *pair.instance.site : *other.site, worlds[r],
                                             rank == 0 ? pair.zero : pair.one, rank, r);
    std::fprintf(stderr, "%s\n", error.c_str());
  });
}

// NCCL has found out by itself, while a call waits for its peers.
void AnErrorThatNcclReports() {
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  std::thread later([] {
    Pause(200);
    BreakNccl();
  });
  World world(pair.instance.site->plan->problem());
  (void)tests::RunRank(*pair.instance.site, world, pair.zero, 0, 0);
  later.join();
}

// The same between two calls: the streams hold results, and each later call gives the reason.
void AnErrorThatNcclReportsBetweenCalls() {
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  BreakNccl();
  Pause(300);
  for (int run = 0; run < 2; ++run) {
    for (const std::string& error : pair.RunBoth()) {
      CHECK_CONTAINS(error,
                     "jaxmp.DistributedError: NCCL reports remote process exited or there was a network error "
                     "(NCCL error 6) on rank ");
      CHECK_CONTAINS(error, "; start the process again");
    }
  }
}

// A process that ends takes its contexts down while the watchdog is still there.
void AnEndIsNoFailure() {
  Pair pair;
  Sleep(pair.zero.stream, 200);
  World world(pair.instance.site->plan->problem());
  tests::OnEach(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    CHECK_EQ(tests::RunRank(*pair.instance.site, world, rank == 0 ? pair.zero : pair.one, rank, r), "");
  });
  tests::FakeFunction<decltype(fake_cuda_shut_down)>("right/libcuda.so.1", "fake_cuda_shut_down")();
  Pause(400);
}

struct Case {
  const char* name;
  void (*run)();
  const char* last_words;  // of the process; null if it goes on
};

#define CASE(name, last_words) {#name, name, last_words}
constexpr Case kCases[] = {
    CASE(
        APeerThatStaysAwayOnTheDevice,
        "jaxmp.DistributedError: rank 0 of 2 in group 0 (device 0) has waited 0.3 s on the device for its peers in the "
        "call [pattern=all_gather m=4 n=6 k=8 "),
    CASE(APeerThatStaysAwayOnTheHost, " has waited 2 s on the host for its peers in the call [pattern=all_gather "),
    CASE(APeerThatIsLostWhileConnecting,
         "jaxmp.DistributedError: rank 0 of 2 in group 0 (device 0) has waited 1.6 s on the host for its peers in the "
         "call ncclCommInitRank; "),
    CASE(APeerThatStaysAwayInASplitCommunicator, " has waited 1.2 s on the host for its peers in the call [pattern="),
    CASE(APeerInACallThatIsNew, "; another one to a call that it has made before; rank 1 of 2 in group 0 (device 1), "),
    CASE(AnErrorThatNcclReports,
         "jaxmp.DistributedError: NCCL reports remote process exited or there was a network error (NCCL error 6) on "
         "rank 0 of 2 in group 0 (device 0), in the call [pattern=all_gather "),
    CASE(AnErrorThatNcclReportsBetweenCalls, nullptr),
    CASE(TimeBeforeACallDoesNotCount, nullptr),
    CASE(AnEndIsNoFailure, nullptr),
};

int RunCase(const Case& given) {
  CHECK_EQ(tests::LoadFakes().message(), "");
  given.run();
  return check::summary(given.name);
}

// Runs in a child process, and its stderr is read. This process has no other threads, so the child may go on as it is:
// an emulator of another architecture, which the system does not know of, stays with it.
void StartCase(const Case& given) {
  std::fflush(nullptr);
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    check::failures = 0;
    dup2(ends[1], STDERR_FILENO);
    std::exit(RunCase(given));
  }
  close(ends[1]);
  std::string said;
  char piece[4096];
  for (ssize_t got; (got = read(ends[0], piece, sizeof(piece))) > 0;) said.append(piece, static_cast<size_t>(got));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  std::fprintf(stderr, "%s: %s\n", given.name, said.c_str());
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), given.last_words ? 1 : 0);
  if (given.last_words) CHECK_CONTAINS(said, given.last_words);
}

TEST(EveryFaultEndsAsItShould) {
  for (const Case& given : kCases) StartCase(given);
}

}  // namespace
}  // namespace jaxmp
