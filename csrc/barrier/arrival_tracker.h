// Which process has come to which call, and how often: the record alone, without sockets, clocks and threads.
#ifndef JAXMP_BARRIER_ARRIVAL_TRACKER_H_
#define JAXMP_BARRIER_ARRIVAL_TRACKER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

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

  // The device at `position` has come.
  Arrival Arrive(const std::shared_ptr<const CallSignature>& signature, size_t position);
  // What tells the peers so, unless another device of this process has come as often before.
  std::optional<Message> Announcement(const Arrival& arrival);
  // A peer has come; the call to which it came, for people.
  std::string Hear(int process, const Message& arrival);

  // Whether `process` is another one that has yet to come.
  bool Awaits(const Arrival& arrival, int process) const;
  // All have come, and nothing is compared any more.
  void Settle(const Arrival& arrival);

  // How peers that came to the same call differ from this process.
  std::optional<std::string> Disagreement(const Arrival& arrival) const;
  // How `process`, which is awaited, waits for this one at a different call, which no order of independent calls
  // explains: different programs, or the same call on other devices.
  std::optional<std::string> Crossing(const Arrival& arrival, int process) const;

  void Fail(const Arrival& arrival, const Status& status);
  // A peer has given up.
  void HearFailure(const Message& failure);
  const Status* failure(const Arrival& arrival) const;

 private:
  // What one peer has said about one call.
  struct Said {
    uint64_t count = 0;                   // how often it has come
    std::map<uint64_t, uint64_t> digest;  // by count, of the calls that are not settled here
  };

  // One call on one set of devices.
  struct Entry {
    uint64_t program = 0, label = 0;
    std::map<int64_t, uint64_t> arrived;  // by device of this process
    uint64_t announced = 0;
    std::map<int, Said> said;           // by peer
    std::set<uint64_t> described;       // digests whose text the peers have
    std::map<uint64_t, Status> failed;  // by count
  };

  struct Text {
    std::string call, fields;
  };

  const Entry& entry(const Arrival& arrival) const { return entries_.at(arrival.members().key); }
  Text text(uint64_t digest) const;

  int process_;
  std::map<uint64_t, Entry> entries_;
  std::map<uint64_t, Text> texts_;  // by digest, of what peers have said
};

}  // namespace jaxmp::barrier

#endif  // JAXMP_BARRIER_ARRIVAL_TRACKER_H_
