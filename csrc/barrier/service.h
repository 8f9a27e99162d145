// The process barrier's state. Callers' threads (barrier.cc) and its own one (service.cc) share it under its mutex.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "csrc/barrier/arrival_tracker.h"
#include "csrc/barrier/barrier.h"
#include "csrc/barrier/messages.h"
#include "csrc/base/completion_pool.h"

namespace jaxmp::barrier {

using Clock = std::chrono::steady_clock;

inline double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// Another process of the job: its socket, and what is known of it.
struct Peer {
  void Connect(int fd);
  void Leave(const std::string& how);

  // Waits for the connection, where there is none yet; is nothing to who has left.
  void Send(const Message& message);
  // Asks for a sign of life, once a second.
  void Ping(Clock::time_point now);
  bool IsSilent(Clock::time_point now) const;
  // Why it may have come to no call yet: "has not come; it is alive, ...".
  std::string WhyMissing(Clock::time_point now) const;

  bool is_wanted = false, is_connected = false;  // ever
  Socket socket{-1};
  std::vector<Message> unsent;  // until it is connected
  std::string gone;             // how it left; empty while it is there
  bool is_clean = false;
  Clock::time_point heard = Clock::now(), pinged = Clock::now(), left;
  std::string last_call;
};

// Gets the outcome, and of a collective the tokens.
using Done = std::function<void(const Status&, const std::vector<uint64_t>&)>;

// A device of this process that waits for the others.
struct Waiting {
  Arrival arrival;
  Clock::time_point since;
  Done done;
};

struct Resumed {
  Done done;
  Status status;
  std::vector<uint64_t> tokens;
};

struct Service {
  // The outcome of an arrival, if it is known.
  std::optional<Status> Outcome(const Arrival& arrival);
  // Asks for a connection.
  void Want(int process);
  // To all other processes of the call.
  void Send(const Arrival& arrival, const Message& message);
  // Whether an arrival that has waited for so long should not go on into its collective yet. Either the transport may
  // have to be opened, because it waits for a process that has come to no call so far. Or it must not meet a process
  // that seems to run another program, or is in another run.
  bool IsHeld(const Arrival& arrival, Clock::duration waited);
  // Has the thread look at what has changed.
  void Wake();
  // The thread.
  void Serve();

  std::mutex mutex;  // of everything below; the functions above, but for Serve(), are called under it
  bool is_running = false;
  BarrierOptions options;
  std::map<int, Peer> peers;  // that calls have asked for, by process
  std::vector<int> wanted;    // newly asked for; the thread that waits for has_wanted takes them
  std::condition_variable has_wanted;
  ArrivalTracker arrivals{0};
  std::vector<Waiting> waiting;  // in order of arrival
  std::string failure, last_call;
  std::optional<Status> late_failure;
  int wake[2] = {-1, -1};
  std::thread thread;

  // Under no lock: programs come to their next call from here.
  void Resume(std::vector<Resumed> settled);
  CompletionPool completions;

 private:
  std::optional<Status> OutcomeOfWaiting(const Waiting& waiting, Clock::time_point now);
  Status Fail(const Arrival& arrival, const std::string& why, Kind kind = Kind::kFailure);
  Status GiveUp(const Arrival& arrival, const std::string& text, Kind kind);
  std::string Missing(const Waiting& waiting, Clock::time_point now);
  std::vector<Resumed> Settle();
  void Read(int process);
  void Handle(int process, const Message& message);
};

}  // namespace jaxmp::barrier
