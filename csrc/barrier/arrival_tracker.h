// Records which process has come to which call in which run. It has no sockets, clocks or threads.
//
// A run is one execution of a compiled program. XLA numbers it when the program is dispatched and hands the number to
// every call in it, also in loops and inner jits (`xla::ffi::RunId`). The numbers of a program start at a fingerprint
// of its text and devices, and count the dispatches. So equal programs have equal numbers on every process, whatever
// each of them has run before, and also if a run has ended before its first call. Arrivals at a call meet only within
// one run, and there the i-th arrival of a rank meets the i-th of every other rank. This is exact: a call is one
// instruction of the compiled program (jaxmp/_src/platform/jax_internals/jax_lowering.py numbers them), and within a
// run a device comes to one instruction again only in the next iteration of a loop.
//
// A run that ends early on one process (a callback that raises or is interrupted) changes no count. The next run has
// another number everywhere.
//
// Worked example: rank 1's run 7 raises before its call, and rank 0's run 7 waits there. Rank 1 comes with run 8, which
// meets nothing of run 7. Rank 0 gives run 7 up (HasPassed), and its run 8 meets rank 1's.
//
// Ranks may run programs of different texts with equal calls: under another name, from another line, or eagerly. The
// numbers of two such programs keep a constant distance, a shift, from the first call at which they meet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/barrier/call_signature.h"
#include "csrc/barrier/messages.h"

namespace jaxmp::barrier {

// XLA's number of a run. It wraps around.
using Run = uint32_t;

// A device of this process at a call, with the number of times that it has come in this run.
struct Arrival {
  std::shared_ptr<const CallSignature> signature;
  size_t group;
  int64_t device;
  Run run;
  uint64_t count;

  const CallSignature::Group& members() const { return signature->members[group]; }
};

class ArrivalTracker {
 public:
  explicit ArrivalTracker(int process) : process_(process) {}

  // A program of this process has this call.
  void Expect(const CallSignature& signature);
  // The device at `position` has come, to a collective with a token.
  Arrival Arrive(const std::shared_ptr<const CallSignature>& signature, const Origin& origin, size_t position,
                 uint64_t token = 0);
  // Whether the device has come in this run from another instruction.
  bool IsAmbiguous(const CallSignature& signature, size_t position, const Origin& origin);
  // The message that tells the peers that this process has come. None if it has come before, or if a collective still
  // waits for another device of this process.
  std::optional<Message> Announcement(const Arrival& arrival);
  // Records the arrival of a peer and returns the name of the call, for people.
  std::string Hear(int process, const Message& arrival);

  // Finds the runs of the peers that belong to the run of an arrival.
  void PairRuns(const Arrival& arrival);
  void PairRuns(const Arrival& arrival, int process);
  // Whether two runs belong together: of equal programs, or as a call of them has found.
  bool AreOneRun(Run own, int process, Run theirs) const;
  // Whether `process` has yet to come. For this process: whether another of its devices has, to a collective.
  bool Awaits(const Arrival& arrival, int process) const;
  // The tokens of all devices, ordered as the positions of the group. Call it once for each device of this process,
  // after all have come to a collective.
  std::vector<uint64_t> TakeTokens(const Arrival& arrival);

  // How a peer differs: it waits at another call in the same place of a program of this name, or at an equal call of
  // another program that this process has as well.
  std::optional<std::string> Disagreement(const Arrival& arrival) const;
  // How `process`, which is awaited, waits for this one at another call, where no program of this process has both, so
  // that no order of independent calls explains it.
  std::optional<std::string> Crossing(const Arrival& arrival, int process) const;
  // How `process`, which is awaited, has gone on to a later run of the program, if it has. Its own run of this number
  // has ended, or another thread of it is slow.
  std::optional<std::string> HasPassed(const Arrival& arrival, int process) const;
  // Whether `process`, which is awaited, waits in an earlier run of the program for this process, which has not come.
  bool IsBehind(const Arrival& arrival, int process) const;

  // `process` has given up a run; `kind` and `text` as in its message.
  void Fail(int process, Run run, Kind kind, const std::string& text);
  struct Failure {
    Run run;
    Kind kind;
    std::string text;
  };
  // Why a process of the group, this one or a peer, has given up the run of an arrival. Null if none has.
  const Failure* failure(const Arrival& arrival) const;
  // Whether this process has given up a run.
  bool HasFailed(Run run) const { return HasFailed(process_, run); }

 private:
  // A run of this process at one call.
  struct OwnRun {
    Run run = 0;
    uint64_t announced = 0;
    std::map<int64_t, uint64_t> arrived;                     // by device
    std::map<int64_t, const void*> instructions;             // of the last arrival with a token, by device
    std::map<uint64_t, std::map<int64_t, uint64_t>> tokens;  // by count and device
    std::map<uint64_t, size_t> takers;                       // by count: devices that have taken the tokens
  };
  // A peer's messages about one run at one call.
  struct PeerRun {
    Run run = 0;
    std::optional<Run> own;      // the run of this process that it belongs to
    Kind kind = Kind::kArrival;  // of the last arrival, as the other numbers
    uint64_t count = 0, digest = 0, place = 0;
    std::map<uint64_t, std::map<int64_t, uint64_t>> tokens;  // by count and device
  };
  struct Peer {
    std::deque<PeerRun> runs;       // in order of arrival
    std::vector<Run> shifts = {0};  // from a run of this process to the peer's, for each pair of programs
  };

  // One call on one set of devices.
  struct Entry {
    std::deque<OwnRun> runs;       // in order of arrival
    std::map<int, Peer> peers;     // by process
    std::set<int64_t> devices;     // of the call, once a program of this process has it
    std::set<uint64_t> described;  // digests of texts that the peers have
    std::vector<Run> first;        // runs of this process, of each program: people count runs from there

    const OwnRun* own(Run run) const;
    const PeerRun* theirs(int process, Run run) const;  // the peer's run that belongs to this process's
    // The last run of the peer, if it waits there for this process.
    const PeerRun* WaitingPeer(int process) const;
    int64_t NumberOf(Run run) const;  // of a run of this process, for people
  };

  struct Text {
    std::string call, fields;
  };

  void Note(int64_t device, Run run);
  bool IsNear(const Arrival& arrival, int process, const PeerRun& theirs) const;
  bool IsOtherProgram(const Arrival& arrival, int process, const PeerRun& theirs) const;
  const Entry& entry(const Arrival& arrival) const { return entries_.at(arrival.members().key); }
  Text text(uint64_t digest) const;
  bool HasFailed(int process, Run run) const;
  bool AreInOneProgram(uint64_t one, uint64_t other) const;
  // A process that has both programs knows that the ranks differ in their order.
  std::string DifferentPrograms(const Arrival& arrival, int process, const Text& theirs, bool has_both) const;
  std::string HasBoth() const;

  int process_;
  std::map<uint64_t, Entry> entries_;
  std::map<uint64_t, Text> texts_;                       // by digest, of what peers have said
  std::map<uint64_t, std::map<int, uint64_t>> last_at_;  // by place and peer: the key of its last call there
  std::map<int64_t, std::set<Run>> latest_;              // by device: its latest run of each program
  std::map<int, std::deque<Failure>> failed_;            // by process: runs that it has given up
  std::map<uint64_t, std::set<uint64_t>> programs_;      // of this process: the keys of their calls
  std::set<std::pair<uint64_t, uint64_t>> own_places_;   // of this process: (key, place) of calls
};

}  // namespace jaxmp::barrier
