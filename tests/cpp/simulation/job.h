// A job of many processes in virtual time: the process barrier's real state machine in each rank, with sockets, clock,
// programs and XLA's collectives replaced. One thread runs it, so a seed decides everything.
#ifndef JAXMP_TESTS_SIMULATION_JOB_H_
#define JAXMP_TESTS_SIMULATION_JOB_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/barrier/service.h"

namespace jaxmp::simulation {

// Times are in nanoseconds.
using Time = int64_t;
inline constexpr Time kMicro = 1000, kMilli = 1000 * kMicro, kSecond = 1000 * kMilli;

// What happens to a rank when it is about to come to a call of a step, or `after` that time.
struct Event {
  enum Kind {
    kKill,      // SIGKILL
    kStop,      // SIGSTOP
    kRaise,     // an exception, also an interrupt
    kLeave,     // the program ends early
    kCut,       // its machine, `machine` ranks from `rank` on, loses the network
    kShape,     // it has another k from here on
    kProgram,   // it runs another program from here on
    kAbandon,   // it leaves the run early, and goes on with the next one
    kSlow,      // it comes late
    kPause,     // SIGSTOP, and SIGCONT after `lasts`
    kRename,    // its program has another name, from the first step on
    kSlowLink,  // messages to and from it take up to `lasts`
  };
  Kind kind;
  int rank, step, call;
  Time after = 0, lasts = 0;
  int machine = 1;

  bool IsFault() const { return kind < kSlow; }
  std::string Text() const;
};

struct Call {
  enum Group { kAll, kRows, kColumns };
  Group group = kAll;
  bool has_tokens = true;
};

struct Schedule {
  uint64_t seed = 0;
  int nprocesses = 2, ndevices = 1, ncolumns = 1;  // devices of each process; processes in a row of the mesh
  int nsteps = 1;
  std::vector<Call> calls;     // of each step
  bool is_concurrent = false;  // all calls of a step are pending at once, in an order of each device's own
  Time timeout = 5 * kSecond;  // JAXMP_TIMEOUT
  Time least = 20 * kMicro, most = 200 * kMicro;  // that a message takes
  Time pause = 2 * kMilli;                        // at most, before a call
  Time processor = 5 * kMicro;                    // of each message, sent or received
  Time settling = 0;  // at most, until an end of a new connection is ready: one in four takes longer than a message
  std::vector<Event> events;

  std::string Text() const;
};

// What became of a rank.
struct Rank {
  std::string saw;  // its error, or ""
  Time at = 0;      // when it ended
  Time came = 0;    // when it last came to a call
  bool has_ended = false, is_killed = false, is_stopped = false, has_finished = false;
  int nerrors = 0;                     // that it caught
  std::map<std::string, int> entered;  // by call: how often it has come
  int64_t nmessages = 0;               // that it has sent, but for signs of life
  int64_t nbytes = 0;
  int nsockets = 0;
};

class Job {
 public:
  explicit Job(const Schedule& schedule, bool is_logged = false);
  ~Job();

  void Run(Time limit);

  const Schedule schedule;
  std::vector<Rank> ranks;
  Time now = 0, fault_at = -1;
  std::vector<std::string> wrong;  // what no schedule may bring, such as the tokens of another run

 private:
  class Node;
  struct Strand;
  struct Collective {
    std::set<int64_t> joined;
    std::vector<Strand*> waiting;
  };
  struct Timed {
    Time time;
    uint64_t number;
    std::function<void()> run;
    bool operator<(const Timed& other) const {
      return std::make_pair(time, number) > std::make_pair(other.time, other.number);
    }
  };

  void At(Time time, std::function<void()> run) { timed_.push({time, ntimed_++, std::move(run)}); }
  uint64_t Draw() { return random_ = random_ * 6364136223846793005u + 1442695040888963407u, random_ >> 33; }
  Time Latency(int from, int to);
  // When an end of a new connection is ready.
  Time Settling(int process, int peer);
  bool IsCut(int one, int other) const { return is_cut_ && is_apart_[size_t(one)] != is_apart_[size_t(other)]; }
  void Log(int rank, const std::string& what);
  std::shared_ptr<const CallSignature> SignatureOf(size_t call, Event::Kind kind);
  std::vector<int64_t> GroupsOf(const Call& call) const;

  std::priority_queue<Timed> timed_;
  uint64_t ntimed_ = 0, random_;
  bool is_logged_, is_cut_ = false;
  std::vector<bool> is_apart_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<std::pair<size_t, int>, std::shared_ptr<const CallSignature>> signatures_;
  std::map<std::tuple<size_t, int, int64_t>, Collective> collectives_;  // by call, step and group
  int nleft_ = 0;                                                       // at the end
};

}  // namespace jaxmp::simulation

#endif  // JAXMP_TESTS_SIMULATION_JOB_H_
