// The process barrier's state machine. It has no sockets, threads or locks: events are calls, and what follows from
// them goes to a Transport. barrier.cc runs it on sockets, tests/cpp/simulation on virtual time.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/barrier/arrival_tracker.h"
#include "csrc/barrier/barrier.h"
#include "csrc/barrier/circle.h"
#include "csrc/barrier/clock.h"
#include "csrc/barrier/messages.h"

namespace jaxmp::barrier {

// How long a handler may hold its thread: longer than messages take between ranks that come at the same time.
inline constexpr std::chrono::milliseconds kMoment(50);
// While a device waits, Settle is called this often.
inline constexpr std::chrono::milliseconds kTick(100);

// Carries messages to the other processes.
class Transport {
 public:
  virtual void Want(int process) = 0;                          // asks for a connection; Connect or Lose follows
  virtual void Send(int process, const Message& message) = 0;  // on an open connection
  virtual void Wake() = 0;                                     // asks for a call of Settle

 protected:
  ~Transport() = default;
};

// Another process of the job.
struct Peer {
  void Leave(const std::string& how);

  bool is_wanted = false, is_connected = false;  // ever
  bool is_open = false;
  std::optional<Clock::time_point> spoke;  // for the first time
  std::vector<Message> unsent;             // until it is connected
  std::string gone;                        // how it left; empty while it is there
  bool is_clean = false;
  std::vector<uint64_t> final;  // of one that left well: circle, number of its last arrival, circle, number, ...
  Clock::time_point heard = Clock::now(), pinged = Clock::now(), left;
  std::string last_call;
};

// Gets the outcome, and of a collective the tokens.
using Done = std::function<void(const Status&, const std::vector<uint64_t>&)>;

// A device of this process that waits for the others.
struct Waiting {
  Arrival arrival;
  Clock::time_point since, looked;          // looked: when its outcome was last asked for
  std::optional<Clock::time_point> passed;  // since when a process is seen in a later run
  Done done;
};

struct Resumed {
  Done done;
  Status status;
  std::vector<uint64_t> tokens;
};

// The rounds that are left of telling the circle that this process has come.
struct Dissemination {
  Arrival arrival;
  size_t round = 0;
};

// One that cannot be connected, or whose connection has ended before it has said anything. In a moment others may have
// said how it has left.
struct Lost {
  int process;
  Clock::time_point since;
  Message how;
};

class Service {
 public:
  Service(const BarrierOptions& options, Transport* transport)
      : options_(options), transport_(transport), is_running_(transport), arrivals_(options.process) {}

  // ---- of connections
  // Asks for a connection.
  void Want(int process);
  // Whether a connection to `process` is the first. One that has said that it leaves still waits for the others, and
  // would take the end of the connection for theirs.
  bool CanConnect(int process);
  // There is one.
  void Connect(int process);
  void Hear(int process, const Message& message);
  // The connection has ended.
  void Close(int process);
  // There is no connection to `process`, since it `gone`.
  void Lose(int process, const std::string& gone);

  // ---- of this process
  void Expect(const CallSignature& signature) { arrivals_.Expect(signature); }
  // A device has come. Returns the outcome, or the arrival that waits for it, whose outcome `done` gets from Settle.
  struct Entered {
    std::optional<Status> outcome;
    std::vector<uint64_t> tokens;
    std::optional<Arrival> arrival;
  };
  Entered Enter(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, int64_t position,
                uint64_t token, const Done& done);
  // Whether an arrival that has waited for so long should not go on into its collective yet. Either the transport may
  // have to be opened, because it waits for a process that has come to no call so far. Or it must not meet a process
  // that seems to run another program, or is in another run.
  bool IsHeld(const Arrival& arrival, Clock::duration waited);
  // A call has failed after its process had gone on.
  void FailLate(const Status& status);
  // Returns those who no longer wait. To be called after each event, and once in a kTick while one waits.
  std::vector<Resumed> Settle();
  void Leave(const std::string& reason);
  // Whether a connection that was asked for in the last second is not there yet.
  bool IsConnecting() const;
  std::vector<Resumed> Stop();
  void Forget() { is_running_ = false, peers_.clear(); }

  bool is_running() const { return is_running_; }
  // Whether Settle is to be called in time.
  bool NeedsTick() const { return !waiting_.empty() || is_stirred_ || !ends_.empty() || !lost_.empty(); }
  bool AreOneRun(Run own, int process, Run theirs) const { return arrivals_.AreOneRun(own, process, theirs); }
  const std::string& failure() const { return failure_; }
  const std::string& last_call() const { return last_call_; }
  bool has_failed_late() const { return late_failure_.has_value(); }
  // Asks every peer for a sign of life, so that the next answer is up to date.
  std::vector<PeerState> States();

 private:
  std::optional<Status> Outcome(const Arrival& arrival);
  std::optional<Status> OutcomeOfWaiting(Waiting& waiting, Clock::time_point now);
  Status Fail(const Arrival& arrival, const std::string& why, Kind kind = Kind::kFailure);
  Status GiveUp(const Arrival& arrival, const std::string& text, Kind kind);
  std::string Missing(const Waiting& waiting, Clock::time_point now);
  // Waits for the connection, where there is none yet.
  void Send(int process, const Message& message);
  // The circle of a group; null if the list is none of this process's.
  Circle* CircleOf(uint64_t id, const std::vector<int>& members);
  Circle* CircleOf(const Message& message);
  // Sends on, in rounds, that this process and others have come, as far as that is known. True if nothing is left.
  bool Advance(Dissemination* dissemination);
  bool IsUnderWay(const Arrival& arrival) const;
  // Whether no arrival of `process` may wait for a connection.
  bool IsSettled(int process, const Arrival& arrival, Clock::time_point now);
  void Announce(const Arrival& arrival);
  void SendAll(int process, const std::vector<Message>& messages);
  // Exchanges arrivals in circles where one has waited for a moment.
  void Stir(Clock::time_point now);
  void Answer(int process, Circle* circle, const Message& summary);
  // To all other processes of a circle, once.
  void Flood(Circle* circle, Message message, int origin);
  // To all that this process is connected with, but for the sender.
  void PassOn(const Message& message, int sender);
  // How `process` has left, as it or others have said.
  void Learn(int process, const Message& gone, int sender);
  // Whether it has left, and no arrival that it has sent before may still be on its way through the circle.
  bool HasLeft(int process, const CallSignature::Group& group);
  void TellOfEnds(Clock::time_point now);
  // Tells of the connections on which nothing comes.
  void WatchSilence(Clock::time_point now);
  bool IsSilent(int process, Clock::time_point now);
  // Whether signs of life of `process` reach this one, by any way.
  bool IsReached(int process);
  // Why it may have come to no call yet: "has not come; it is alive, ...".
  std::string WhyMissing(int process, Clock::time_point now);
  // Asks for a sign of life, once a second.
  void Ping(int process, Clock::time_point now);

  // In a small job all processes are connected from the start, so each sees for itself who leaves and who is silent.
  bool is_small() const { return options_.nprocesses <= 5; }

  BarrierOptions options_;
  Transport* transport_;
  bool is_running_;
  std::map<int, Peer> peers_;  // that calls have asked for, by process
  ArrivalTracker arrivals_;
  std::vector<Waiting> waiting_;  // in order of arrival
  std::map<uint64_t, Circle> circles_;
  std::vector<Dissemination> disseminations_;
  bool is_stirred_ = false;  // a circle is
  bool has_news_ = false;    // of an end or a failure, since the last call of Settle
  std::deque<Lost> lost_;
  std::map<std::vector<uint64_t>, std::vector<uint64_t>> ends_;  // to tell of: who has left well, by their `final`
  Clock::time_point told_{};                                     // of ends
  std::set<std::pair<int, int>> silent_links_;                   // (who hears nothing, from whom), in the whole job
  bool has_reached_ = false;                                     // whether the next one is up to date
  std::vector<Clock::time_point> unreached_;                     // by process, since when; zero if it is reached
  std::string failure_, last_call_;
  std::optional<Status> late_failure_;
  std::optional<Message> goodbye_;  // that this process has said, and says to who connects later
};

}  // namespace jaxmp::barrier
