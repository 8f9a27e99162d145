// Tells all processes of a group who has come to a call. The processes form a circle, in the order of their places.
//
// Up to kComplete processes tell each other directly. In a larger circle each process keeps connections to the places
// 1, 2, 4, ... after and before its own (Hensgen, Finkel and Manber, Two algorithms for barrier synchronization, 1988).
// Round k of a process begins when it knows that the 2^k places up to and including its own have come. It then sends
// this to the place 2^k after its own. After log2 of the size, rounded up, each process knows that all have come.
//
// If one process does not come, the rounds of others stop. A process that has waited for a moment therefore sends its
// connections a list of the arrivals that it knows, and both send what the other lacks (Demers et al., Epidemic
// algorithms, 1987). So each waiting process learns who has come.
//
// The arrivals of a process in a circle are numbered from 1. In a message, `ranks` of arrivals and of a summary are
// (place, count, number): count processes from this place on, around the circle, each with its arrival of this number.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/barrier/clock.h"
#include "csrc/barrier/messages.h"

namespace jaxmp::barrier {

inline constexpr size_t kComplete = 8;

class Circle {
 public:
  // `process` is one of the members, which ascend.
  Circle(std::vector<int> members, int process);

  const std::vector<int>& members() const { return members_; }
  bool is_complete() const { return members_.size() <= kComplete; }
  // The processes to stay connected with.
  const std::vector<int>& links() const { return links_; }
  size_t rounds() const { return is_complete() ? 1 : rounds_; }
  // The processes that a round sends to, and those of which it has to know first that they have come.
  std::vector<int> Targets(size_t round) const;
  std::vector<int> Needed(size_t round) const;

  // The number of the last arrival of a member that is known here.
  uint64_t Last(int process) const;
  // This process has come.
  void Add(const Message& arrival);
  // Calls `hear` for each process in a message from `sender` of which the arrival is new here; true if one was.
  bool Take(int sender, const Message& message, const std::function<void(int, const Message&)>& hear);
  // The arrivals for a process: in a round, of the places that it stands for; else all. Each goes to it once.
  std::vector<Message> ForRound(size_t round, int process);
  std::vector<Message> ForAll(int process) { return Unsent(process, members_.size()); }

  Message Summary() const;
  struct Comparison {
    bool has_more = false, lacks = false;  // this process, compared to the sender
  };
  Comparison Compare(int sender, const Message& summary);

  // In a message of a circle: first process, count, stride; once or more.
  const std::vector<uint64_t>& packed() const { return packed_; }
  static std::vector<int> Unpack(const std::vector<uint64_t>& packed, int nprocesses);

  std::set<std::pair<uint64_t, Kind>> failures;  // runs that have been given up
  bool is_stirred = false;                       // something new has come to a summary, which the next one passes on
  Clock::time_point asking{};                    // until then arrivals are taken for answers to summaries
  Clock::time_point summarised{};

 private:
  struct Line {
    uint64_t last = 0;
    std::deque<Message> kept;  // the last ones
  };
  std::vector<Message> Unsent(int process, size_t nplaces);
  size_t Place(size_t back) const { return (me_ + members_.size() - back % members_.size()) % members_.size(); }
  size_t Reach(size_t round) const;

  std::vector<int> members_, links_;
  std::vector<uint64_t> packed_;
  size_t me_ = 0, rounds_ = 0;
  std::vector<Line> lines_;                      // by place
  std::map<int, std::vector<uint64_t>> sent_;    // by process and place: the last number
  std::map<int, std::set<uint64_t>> described_;  // by process: digests of texts that it has
  std::map<uint64_t, std::string> texts_;        // by digest
};

}  // namespace jaxmp::barrier
