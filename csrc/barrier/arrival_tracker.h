// Which process has come to which call, and how often: the record alone, without sockets, clocks and threads.
//
// A rank's i-th arrival at a call meets everybody's i-th. That is exact because a call is one instruction of the
// compiled program (jaxmp/_src/jax_internals/jax_lowering.py numbers them): a device runs its programs one after the
// other and comes to one instruction again only in the next iteration of a loop, so data dependences give the order on
// every rank. Equal calls of several programs count together: all ranks call those programs in one order, under
// whatever names, or hear that they do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "csrc/barrier/call_signature.h"
#include "csrc/barrier/messages.h"
#include "csrc/base/status.h"

namespace jaxmp::barrier {

// A device of this process at a call, for the count-th time.
struct Arrival {
  std::shared_ptr<const CallSignature> signature;
  size_t group;
  uint64_t count;

  const CallSignature::Group& members() const { return signature->members[group]; }
};

class ArrivalTracker {
 public:
  explicit ArrivalTracker(int process) : process_(process) {}

  // A program of this process has this call.
  void Expect(const CallSignature& signature);
  // The device at `position` has come, to a collective with a token.
  Arrival Arrive(const std::shared_ptr<const CallSignature>& signature, size_t position, uint64_t token = 0);
  // Whether the device has come in this run from another instruction.
  bool IsAmbiguous(const CallSignature& signature, size_t position, const Origin& origin);
  // What tells the peers that this process has come, unless it has done so before, or of a collective waits for another
  // device of its own.
  std::optional<Message> Announcement(const Arrival& arrival);
  // A peer has come; the call to which it came, for people.
  std::string Hear(int process, const Message& arrival);

  // Whether `process` has yet to come; of this one, whether another of its devices has, to a collective.
  bool Awaits(const Arrival& arrival, int process) const;
  // Of a settled collective, once for each device of this process: the tokens of all devices, by their places among the
  // group's positions.
  std::vector<uint64_t> TakeTokens(const Arrival& arrival);
  // All have come, and nothing is compared any more.
  void Settle(const Arrival& arrival);

  // How a peer differs: one that waits at another call in the same place of a program of this name, or at an equal call
  // of another program that this process has as well.
  std::optional<std::string> Disagreement(const Arrival& arrival) const;
  // How `process`, which is awaited, waits for this one at another call, where no program of this process has both, so
  // that no order of independent calls explains it.
  std::optional<std::string> Crossing(const Arrival& arrival, int process) const;

  void Fail(const Arrival& arrival, const Status& status);
  // A peer has given up.
  void HearFailure(const Message& failure);
  const Status* failure(const Arrival& arrival) const;

 private:
  // What one peer has said about one call.
  struct Said {
    uint64_t count = 0, digest = 0;      // how often it has come, and what it said then
    std::map<uint64_t, uint64_t> place;  // by count, of the calls that are not settled here
  };
  struct TokensOfCall {
    std::map<int64_t, uint64_t> by_position;  // in the mesh
    size_t takers = 0;                        // devices of this process that have taken them
  };

  // One call on one set of devices.
  struct Entry {
    bool IsAhead(int process) const;  // whether the peer has come more often than this process

    std::map<int64_t, uint64_t> arrived;  // by device of this process
    std::map<int64_t, Origin> origins;    // of the last arrival with a token, by device of this process
    uint64_t announced = 0;
    std::map<uint64_t, TokensOfCall> tokens;  // by count
    std::map<int, Said> said;                 // by peer
    std::set<uint64_t> described;             // digests whose text the peers have
    std::map<uint64_t, Status> failed;        // by count
  };

  struct Text {
    std::string call, fields;
  };

  const Entry& entry(const Arrival& arrival) const { return entries_.at(arrival.members().key); }
  Text text(const Entry& entry, int process) const;
  bool AreInOneProgram(uint64_t one, uint64_t other) const;
  // A process that has both programs knows that the ranks differ in their order.
  std::string DifferentPrograms(const Arrival& arrival, int process, const Text& theirs, bool has_both) const;
  std::string HasBoth() const;

  int process_;
  std::map<uint64_t, Entry> entries_;
  std::map<uint64_t, Text> texts_;                       // by digest, of what peers have said
  std::map<uint64_t, std::map<int, uint64_t>> last_at_;  // by place and peer: the key of its last call there
  std::map<uint64_t, std::set<uint64_t>> programs_;      // of this process: the keys of their calls
  std::set<std::pair<uint64_t, uint64_t>> own_places_;   // of this process: (key, place) of calls
};

}  // namespace jaxmp::barrier
