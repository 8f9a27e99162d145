// Ranks that are left alone: without the watchdog each of these would hang for ever. An abort holds for the process, so
// every case runs in one of its own: this program again, with the case's name.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/cuda/nccl_id_exchange.h"
#include "csrc/cuda/watchdog.h"
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

std::string AwaitFailure() {
  for (int i = 0; i < 2000 && cuda::Failure().empty(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return cuda::Failure();
}

// Every later call gives the reason, on every device and for every program.
void CheckDead(Pair& pair, const std::string& why) {
  for (const std::string& error : pair.RunBoth()) {
    CHECK_CONTAINS(error, why);
    CHECK_CONTAINS(error, "the communicators of this process were aborted, start it again");
  }
  const auto local = fake_xla::InstantiateOnCuda(tests::Local(4, 4, 4));
  World world(local.site->plan->problem());
  CHECK_CONTAINS(tests::RunRank(*local.site, world, pair.zero, 0, 0), why);
}

void Sleep(abi::CUstream stream, int milliseconds) {
  static auto* const launch = tests::FakeFunction<decltype(cuLaunchHostFunc)>("right/libcuda.so.1", "cuLaunchHostFunc");
  const auto sleep = [](void* time) {
    std::this_thread::sleep_for(std::chrono::milliseconds(reinterpret_cast<intptr_t>(time)));
  };
  CHECK_EQ(launch(stream, sleep, reinterpret_cast<void*>(intptr_t{milliseconds})), abi::CUDA_SUCCESS);
}

// Rank 1 does not come to the second call: rank 0's stream waits. It ends with an error, for what it holds by then is
// no result, and the process says for whom it waited and where.
void APeerThatStaysAwayOnTheDevice() {
  cuda::SetTimeout(0.3);
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  // A product without peers, on its way on a third device at that time, is none of it.
  const auto local = fake_xla::InstantiateOnCuda(tests::Local(4, 4, 4));
  const Gpu two(2);
  World alone(local.site->plan->problem());
  Sleep(two.stream, 1000);
  CHECK_EQ(fake_xla::ExecuteOnCuda(*local.site, 2, two.stream, {tests::F32(alone.a[0]), tests::F32(alone.b[0])},
                                   {tests::F32(alone.d[0])}),
           "");
  World world(pair.instance.site->plan->problem());
  CHECK_EQ(tests::RunRank(*pair.instance.site, world, pair.zero, 0, 0), "the stream failed with 719");
  CHECK_EQ(Gpu::driver().StreamSynchronize(two.stream), abi::CUDA_SUCCESS);
  CHECK(alone.IsRight());
  const std::string why =
      "jaxmp: rank 0 of 2 in group 0 (device 0) has waited 0.3 s on the device for its peers in the "
      "call [pattern=all_gather m=4 n=6 k=8 ";
  CHECK_CONTAINS(cuda::Failure(), why);
  CheckDead(pair, why);
}

// Machine code needs no compiler of the driver's.
void ADriverWithoutACompiler() {
  setenv("FAKE_CUDA_COMPILES", "0", 1);
  APeerThatStaysAwayOnTheDevice();
}

// A card that there is no machine code for.
void ACardOfLaterOn() {
  setenv("FAKE_CUDA_RUNS_MACHINE_CODE", "0", 1);
  APeerThatStaysAwayOnTheDevice();
}

// Where the driver takes neither, there is no way to fail a stream but to end the process.
void ADeviceThatCannotBeMadeToFail() {
  cuda::SetTimeout(0.3);
  setenv("FAKE_CUDA_RUNS_MACHINE_CODE", "0", 1);
  setenv("FAKE_CUDA_COMPILES", "0", 1);
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  World world(pair.instance.site->plan->problem());
  (void)tests::RunRank(*pair.instance.site, world, pair.zero, 0, 0);
  CHECK(!"reached");
}

// A launch waits for a driver that a thread in another call holds.
void ADriverThatDoesNotLetDevicesFail() {
  cuda::SetTimeout(0.3);
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  setenv("FAKE_CUDA_LAUNCH_HANGS", "1", 1);
  World world(pair.instance.site->plan->problem());
  (void)tests::RunRank(*pair.instance.site, world, pair.zero, 0, 0);
  CHECK(!"reached");
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
  CHECK_EQ(cuda::Failure(), "");
}

// Rank 1 fails ahead of a collective call of the host's, in which rank 0 then waits.
void APeerThatStaysAwayOnTheHost() {
  cuda::SetTimeout(0.5);
  Pair pair;
  tests::FakeFunction<decltype(fake_cublasmp_fail)>("right/libcublasmp.so.0", "fake_cublasmp_fail")(
      "GridCreate", 1, abi::CUBLASMP_STATUS_INTERNAL_ERROR);
  const std::string why = " has waited 0.5 s on the host for its peers in the call [pattern=all_gather";
  for (const std::string& error : pair.RunBoth()) CHECK_CONTAINS(error, why);
  CheckDead(pair, why);
}

// Rank 1 has reported, and ends ahead of ncclCommInitRank, in which rank 0 then waits; nothing can abort that.
void APeerThatIsLostWhileConnecting() {
  cuda::SetTimeout(0.4);
  Pair pair;
  const std::string here = "here";
  CHECK(cuda::CallExchange("jaxmp/nccl/mesh 2/axes 0 by /devices /group 0/0/1", &here, 1).ok());
  World world(pair.instance.site->plan->problem());
  const std::string why =
      "jaxmp: rank 0 of 2 in group 0 (device 0) has waited 0.4 s on the host for its peers in the call "
      "ncclCommInitRank; ";
  CHECK_CONTAINS(tests::RunRank(*pair.instance.site, world, pair.zero, 0, 0), why);
  CheckDead(pair, why);
}

// What an abort does not free, a communicator that cuBLASMp split off ours for one, ends the process.
void AHostThatCannotBeFreed() {
  cuda::SetTimeout(0.3);
  Pair pair;
  tests::FakeFunction<decltype(fake_cublasmp_fail)>("right/libcublasmp.so.0", "fake_cublasmp_fail")("GridCreate", 0,
                                                                                                    kFakeHang);
  (void)pair.RunBoth();
  CHECK(!"reached");
}

// Rank 1 fails ahead of a collective of the library's own communicator, which no abort of ours ends.
void APeerThatStaysAwayInASplitCommunicator() {
  cuda::SetTimeout(0.3);
  Pair pair;
  tests::FakeFunction<decltype(fake_cublasmp_fail)>("right/libcublasmp.so.0", "fake_cublasmp_fail")(
      "BufferRegister", 1, abi::CUBLASMP_STATUS_INTERNAL_ERROR);
  (void)pair.RunBoth();
  CHECK(!"reached");
}

// NCCL has found out by itself, between two calls.
void AnErrorThatNcclReports() {
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  tests::FakeFunction<decltype(fake_nccl_break)>("right/libnccl.so.2", "fake_nccl_break")(abi::ncclRemoteError);
  const std::string why =
      "jaxmp: NCCL reports remote process exited or there was a network error (NCCL error 6) on rank";
  CHECK_CONTAINS(AwaitFailure(), why);
  // No call was on the streams: what they hold are results.
  for (const Gpu* gpu : {&pair.zero, &pair.one}) {
    CHECK_EQ(Gpu::driver().StreamSynchronize(gpu->stream), abi::CUDA_SUCCESS);
  }
  CheckDead(pair, why);
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
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  CHECK_EQ(cuda::Failure(), "");
}

void EveryCommunicatorIsAborted() {
  Pair pair;
  for (const std::string& error : pair.RunBoth()) CHECK_EQ(error, "");
  auto* const live = tests::FakeFunction<decltype(fake_nccl_live)>("right/libnccl.so.2", "fake_nccl_live");
  CHECK_EQ(live(), 2);
  tests::FakeFunction<decltype(fake_nccl_break)>("right/libnccl.so.2", "fake_nccl_break")(abi::ncclSystemError);
  CHECK(!AwaitFailure().empty());
  for (int i = 0; i < 2000 && live() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK_EQ(live(), 0);
}

const std::map<std::string, void (*)()>& Cases() {
  static const std::map<std::string, void (*)()> cases = {
      {"APeerThatStaysAwayOnTheDevice", APeerThatStaysAwayOnTheDevice},
      {"TimeBeforeACallDoesNotCount", TimeBeforeACallDoesNotCount},
      {"APeerThatStaysAwayOnTheHost", APeerThatStaysAwayOnTheHost},
      {"APeerThatIsLostWhileConnecting", APeerThatIsLostWhileConnecting},
      {"AHostThatCannotBeFreed", AHostThatCannotBeFreed},
      {"APeerThatStaysAwayInASplitCommunicator", APeerThatStaysAwayInASplitCommunicator},
      {"AnErrorThatNcclReports", AnErrorThatNcclReports},
      {"AnEndIsNoFailure", AnEndIsNoFailure},
      {"EveryCommunicatorIsAborted", EveryCommunicatorIsAborted},
      {"ADriverWithoutACompiler", ADriverWithoutACompiler},
      {"ACardOfLaterOn", ACardOfLaterOn},
      {"ADeviceThatCannotBeMadeToFail", ADeviceThatCannotBeMadeToFail},
      {"ADriverThatDoesNotLetDevicesFail", ADriverThatDoesNotLetDevicesFail}};
  return cases;
}

int RunCase(const std::string& name) {
  CHECK_EQ(tests::LoadFakes().message(), "");
  Cases().at(name)();
  return check::summary(name.c_str());
}

// In a process of its own. This one has no other threads, so the child may go on as it is: an emulator of another
// architecture, which the system does not know of, stays with it.
int StartCase(const std::string& name) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) std::exit(RunCase(name));
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

}  // namespace
}  // namespace jaxmp

int main(int argc, char** argv) {
  if (argc > 1) return jaxmp::RunCase(argv[1]);
  for (const auto& [name, run] : jaxmp::Cases()) {
    const bool is_aborted = name == "ADeviceThatCannotBeMadeToFail" || name == "AHostThatCannotBeFreed" ||
                            name == "APeerThatStaysAwayInASplitCommunicator" ||
                            name == "ADriverThatDoesNotLetDevicesFail";
    const int status = jaxmp::StartCase(name);
    CHECK(is_aborted ? WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT : status == 0);
  }
  return jaxmp::check::summary("cuda_faults");
}
