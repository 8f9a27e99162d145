#include "csrc/barrier/barrier.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "csrc/barrier/service.h"
#include "csrc/base/completion_pool.h"
#include "csrc/base/float_state.h"
#include "csrc/base/schedule_noise.h"

namespace jaxmp {
namespace {

using barrier::Clock;
using barrier::Message;
using barrier::Resumed;
using barrier::Service;
using barrier::Socket;

// The process barrier on sockets. Callers' threads and its own one share it under its mutex.
class Runner final : public barrier::Transport {
 public:
  void Want(int process) override {
    wanted.push_back(process);
    has_wanted.notify_one();
  }
  void Send(int process, const Message& message) override { sockets.at(process).Send(message); }
  void Wake() override {
    const char byte = 0;
    if (wake[1] >= 0 && write(wake[1], &byte, 1) < 0) return;  // full: it is awake
  }
  // The thread that reads.
  void Serve();
  // Under no lock: programs come to their next call from here.
  void Resume(std::vector<Resumed> settled) {
    for (Resumed& each : settled) {
      completions.Post([each = std::move(each)] { each.done(each.status, each.tokens); });
    }
  }

  std::mutex mutex;               // of everything below; all but Serve() and Resume() is called under it
  Service service{{}, nullptr};   // does not run
  std::map<int, Socket> sockets;  // by process
  std::vector<int> wanted;        // newly asked for; the thread that waits for has_wanted takes them
  std::condition_variable has_wanted;
  int wake[2] = {-1, -1};
  std::thread thread;
  CompletionPool completions;

 private:
  void Read(int process);
};

// Never destroyed: its threads outlive main.
Runner& runner() {
  static auto* const the_runner = new Runner;
  return *the_runner;
}

// The runner, locked.
class Locked {
 public:
  Runner* operator->() const { return &runner_; }

 private:
  Runner& runner_ = runner();
  const std::lock_guard<std::mutex> lock_{runner_.mutex};
};

void Runner::Serve() {
  std::unique_lock<std::mutex> lock(mutex);
  while (service.is_running()) {
    std::vector<pollfd> polled = {{wake[0], POLLIN, 0}};
    std::vector<int> readable;
    for (const auto& [process, socket] : sockets) {
      if (!socket.is_open()) continue;
      const int events = POLLIN | (socket.has_unsent() ? POLLOUT : 0);
      polled.push_back({socket.fd(), static_cast<int16_t>(events), 0});
      readable.push_back(process);
    }
    const int poll_timeout = service.NeedsTick() ? static_cast<int>(barrier::kTick.count()) : -1;
    lock.unlock();
    poll(polled.data(), polled.size(), poll_timeout);
    lock.lock();
    if (!service.is_running()) return;
    char bytes[64];
    while (polled[0].revents && read(wake[0], bytes, sizeof(bytes)) > 0) {
    }
    for (size_t i = 0; i < readable.size(); ++i) {
      if (polled[i + 1].revents) Read(readable[i]);
    }
    std::vector<Resumed> settled = service.Settle();
    lock.unlock();
    Resume(std::move(settled));
    lock.lock();
  }
}

void Runner::Read(int process) {
  Socket& socket = sockets.at(process);
  socket.Flush();
  std::vector<Message> messages;
  const bool is_open = socket.Receive(&messages);
  for (const Message& message : messages) service.Hear(process, message);
  if (!is_open) service.Close(process);
}

// A forked child has this process's sockets and none of its threads. It closes them, so that the peers see at once when
// this process ends, however long the child lives.
void ForgetInForks() {
  static const int registered = pthread_atfork([] { runner().mutex.lock(); }, [] { runner().mutex.unlock(); },
                                               [] {
                                                 runner().service.Forget();
                                                 runner().sockets.clear();
                                                 runner().mutex.unlock();
                                               });
  static_cast<void>(registered);
}

}  // namespace

void StartBarrier(const BarrierOptions& options) {
  const Locked r;
  r->service = Service(options, &runner());
  r->sockets.clear();
  r->wanted.clear();
  if (pipe2(r->wake, O_CLOEXEC | O_NONBLOCK) != 0) r->wake[0] = r->wake[1] = -1;
  ForgetInForks();
  r->thread = std::thread([] { runner().Serve(); });
}

void WantProcesses(const std::vector<int>& processes) {
  const Locked r;
  for (int process : processes) r->service.Want(process);
}

std::vector<int> WantedProcesses() {
  Runner& r = runner();
  std::unique_lock<std::mutex> lock(r.mutex);
  r.has_wanted.wait(lock, [&r] { return !r.wanted.empty() || !r.service.is_running(); });
  if (!r.service.is_running()) return {};
  return std::exchange(r.wanted, {});
}

void ConnectPeer(int process, int fd) {
  Socket socket(fd);
  const Locked r;
  if (!r->service.CanConnect(process)) return;
  r->sockets.emplace(process, std::move(socket));
  r->service.Connect(process);
  r->Wake();  // the thread has one more socket to read
}

void LosePeer(int process, const std::string& gone) {
  const Locked r;
  r->service.Lose(process, gone);
  r->Wake();
}

void LeaveBarrier(const std::string& reason) {
  Locked()->service.Leave(reason);
  while (!reason.empty() && Locked()->service.IsConnecting()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void ExpectCall(const CallSignature& signature) { Locked()->service.Expect(signature); }

void StopBarrier() {
  std::vector<Resumed> settled;
  {
    const Locked r;
    if (!r->service.is_running()) return;
    settled = r->service.Stop();
  }
  runner().Resume(std::move(settled));
  runner().has_wanted.notify_all();
  runner().Wake();
  runner().thread.join();
  const Locked r;
  r->service.Forget();
  r->sockets.clear();
  for (int& fd : r->wake) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
}

namespace {

// Like ArriveWithToken. Returns the arrival if its outcome is not known yet.
std::optional<barrier::Arrival> Come(const std::shared_ptr<const CallSignature>& signature, const Origin& origin,
                                     int64_t position, uint64_t token, barrier::Done done) {
  if (position < 0 || position >= static_cast<int64_t>(signature->groups.size())) {
    done(InvalidArgument(signature->call, ": the mesh has no position ", position), {});
    return std::nullopt;
  }
  // Restores the caller's float state: waiting ranks resume on our threads, the last rank continues on its own.
  const barrier::Done resume = [state = FloatState::Current(), done = std::move(done)](
                                   const Status& status, const std::vector<uint64_t>& tokens) {
    const ScopedFloatState scope(state);
    done(status, tokens);
  };
  AddScheduleNoise();
  const Service::Entered entered = Locked()->service.Enter(signature, origin, position, token, resume);
  if (entered.outcome) resume(*entered.outcome, entered.tokens);
  return entered.arrival;
}

}  // namespace

void ArriveWithToken(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, int64_t position,
                     uint64_t token, std::function<void(const Status&, const std::vector<uint64_t>&)> done) {
  Come(signature, origin, position, token, std::move(done));
}

Status ArriveForAMoment(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, int64_t position) {
  struct Wait {
    std::mutex mutex;
    std::condition_variable is_over;
    std::optional<Status> outcome;
    bool has_gone_on = false;
  };
  const auto wait = std::make_shared<Wait>();
  const auto waiting = Come(signature, origin, position, 0, [wait](const Status& status, const std::vector<uint64_t>&) {
    const std::lock_guard<std::mutex> lock(wait->mutex);
    wait->outcome = status;
    wait->is_over.notify_one();
    if (status.ok() || !wait->has_gone_on) return;
    Locked()->service.FailLate(status);
  });
  const Clock::time_point since = Clock::now();
  std::unique_lock<std::mutex> lock(wait->mutex);
  const auto is_known = [&wait] { return wait->outcome.has_value(); };
  while (!wait->is_over.wait_for(lock, barrier::kMoment, is_known) &&
         Locked()->service.IsHeld(*waiting, Clock::now() - since)) {
  }
  wait->has_gone_on = !is_known();
  return wait->outcome.value_or(Status());
}

// If the programs have different texts, the peer's message may still be on its way.
bool IsOneRun(int64_t own, int process, uint64_t theirs) {
  const auto mine = static_cast<barrier::Run>(own), others = static_cast<barrier::Run>(theirs);
  for (const Clock::time_point since = Clock::now(); !Locked()->service.AreOneRun(mine, process, others);) {
    if (Clock::now() - since > barrier::kMoment) return false;
    std::this_thread::yield();
  }
  return true;
}

std::string BarrierFailure() { return Locked()->service.failure(); }

std::string LateFailure() {
  const Locked r;
  return r->service.has_failed_late() ? r->service.failure() : "";
}

std::string LastCall() { return Locked()->service.last_call(); }

std::vector<PeerState> PeerStates() { return Locked()->service.States(); }

}  // namespace jaxmp
