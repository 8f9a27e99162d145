// The process barrier of twelve real processes over sockets, more than tell each other directly.
#include <sys/wait.h>

#include <future>

#include "csrc/barrier/circle.h"
#include "tests/cpp/peer.h"

namespace jaxmp {
namespace {

using namespace tests;  // NOLINT: the sockets

constexpr int kProcesses = 12, kVictim = 5, kCalls = 60, kLast = 40;

std::shared_ptr<const CallSignature> MakeCall(int64_t index, bool has_tokens) {
  CallSignature signature;
  signature.program = "jit_f";
  signature.index = index;
  signature.call = "matmul at train.py:" + std::to_string(41 + index);
  signature.fields = "m=" + std::to_string(index);
  for (int i = 0; i < kProcesses; ++i) {
    signature.devices.push_back(i);
    signature.processes.push_back(i);
    signature.groups.push_back(0);
  }
  signature.is_sequential = true;
  signature.has_tokens = has_tokens;
  return *Prepare(signature);
}

// Comes to calls with and without tokens in turn; the victim ends without a word. Returns what was wrong.
std::string RunProcess(int process) {
  const auto barrier = MakeCall(0, false), collective = MakeCall(1, true);
  for (const auto& call : {barrier, collective}) ExpectCall(*call);
  for (int64_t run = 0; run < kCalls; ++run) {
    if (process == kVictim && run == kLast) _exit(0);
    std::string error = ArriveForAMoment(barrier, {barrier.get(), run}, process).message();
    std::promise<std::string> promise;
    std::vector<uint64_t> got;
    if (error.empty()) {
      ArriveWithToken(collective, {collective.get(), run}, process, uint64_t(100 * run + process),
                      [&](const Status& status, const std::vector<uint64_t>& tokens) {
                        got = tokens;
                        promise.set_value(status.message());
                      });
      error = promise.get_future().get();
    }
    if (!error.empty()) {
      const bool is_right = error.find("rank " + std::to_string(kVictim) + " has ended") != std::string::npos;
      return run == kLast && is_right ? "" : "in run " + std::to_string(run) + ": " + error;
    }
    for (size_t i = 0; i < kProcesses; ++i) {
      if (got.at(i) != uint64_t(100 * run) + i) return "wrong tokens in run " + std::to_string(run);
    }
  }
  return "it has not noticed the end";
}

TEST(TwelveProcessesMeetAndNameTheOneThatEnds) {
  std::vector<int> members;
  std::map<std::pair<int, int>, int> sockets;  // by process and peer
  for (int i = 0; i < kProcesses; ++i) members.push_back(i);
  for (int i = 0; i < kProcesses; ++i) {
    const barrier::Circle circle(members, i);
    for (int peer : circle.links()) {
      if (peer > i) std::tie(sockets[{i, peer}], sockets[{peer, i}]) = SocketPair();
    }
  }
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      StartBarrier({i, kProcesses, 20});
      for (const auto& [ends, fd] : sockets) {
        if (ends.first == i) {
          ConnectPeer(ends.second, fd);
        } else {
          close(fd);
        }
      }
      const std::string wrong = RunProcess(i);
      if (!wrong.empty()) std::fprintf(stderr, "rank %d: %s\n", i, wrong.c_str());
      LeaveBarrier(wrong.empty() ? "rank 5 has ended" : wrong);
      _exit(wrong.empty() ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const auto& [ends, fd] : sockets) close(fd);
  for (pid_t child : children) {
    int status = 1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
}

}  // namespace
}  // namespace jaxmp
