#include "csrc/barrier/arrival_tracker.h"

#include <algorithm>
#include <utility>

namespace jaxmp::barrier {
namespace {

// Calls whose failure is remembered for those who come late.
constexpr size_t kFailuresKept = 8;

}  // namespace

void ArrivalTracker::Expect(const CallSignature& signature) {
  // Eager calls are programs of jaxmp's own, of one name for all.
  const bool is_eager = signature.program.rfind("jit_jaxmp_", 0) == 0;
  for (const CallSignature::Group& group : signature.members) {
    programs_[signature.program_hash].insert(group.key);
    if (!is_eager) own_places_.insert({group.key, group.place});
  }
}

Arrival ArrivalTracker::Arrive(const std::shared_ptr<const CallSignature>& signature, size_t position, uint64_t token) {
  Arrival arrival{signature, static_cast<size_t>(signature->groups[position]), 0};
  Entry& entry = entries_[arrival.members().key];
  arrival.count = ++entry.arrived[signature->devices[position]];
  if (signature->has_tokens) entry.tokens[arrival.count].by_position[static_cast<int64_t>(position)] = token;
  return arrival;
}

bool ArrivalTracker::IsAmbiguous(const CallSignature& signature, size_t position, const Origin& origin) {
  Entry& entry = entries_[signature.members[static_cast<size_t>(signature.groups[position])].key];
  const Origin before = std::exchange(entry.origins[signature.devices[position]], origin);
  return before.run == origin.run && before.instruction && before.instruction != origin.instruction;
}

std::optional<Message> ArrivalTracker::Announcement(const Arrival& arrival) {
  const CallSignature& signature = *arrival.signature;
  Entry& entry = entries_.at(arrival.members().key);
  if (arrival.count <= entry.announced) return std::nullopt;
  Message message;
  if (signature.has_tokens) {
    const std::map<int64_t, uint64_t>& tokens = entry.tokens[arrival.count].by_position;
    for (int64_t position : arrival.members().positions) {
      if (signature.processes[static_cast<size_t>(position)] != process_) continue;
      const auto found = tokens.find(position);
      if (found == tokens.end()) return std::nullopt;
      message.tokens.push_back(static_cast<uint64_t>(position));
      message.tokens.push_back(found->second);
    }
  }
  entry.announced = arrival.count;
  message.kind = Kind::kArrival;
  message.place = arrival.members().place;
  message.key = arrival.members().key;
  message.count = arrival.count;
  message.digest = signature.digest;
  if (entry.described.insert(signature.digest).second) message.text = signature.call + "\n" + signature.fields;
  return message;
}

std::string ArrivalTracker::Hear(int process, const Message& arrival) {
  Entry& entry = entries_[arrival.key];
  Said& said = entry.said[process];
  said.count = arrival.count;
  said.digest = arrival.digest;
  said.place[arrival.count] = arrival.place;
  last_at_[arrival.place][process] = arrival.key;
  for (size_t i = 0; i + 1 < arrival.tokens.size(); i += 2) {
    entry.tokens[arrival.count].by_position[static_cast<int64_t>(arrival.tokens[i])] = arrival.tokens[i + 1];
  }
  Text& text = texts_[arrival.digest];
  if (!arrival.text.empty()) {
    const size_t end = std::min(arrival.text.find('\n'), arrival.text.size());
    text = {arrival.text.substr(0, end), arrival.text.substr(end)};
  }
  return text.call;
}

bool ArrivalTracker::Awaits(const Arrival& arrival, int process) const {
  if (process == process_) return arrival.signature->has_tokens && entry(arrival).announced < arrival.count;
  const std::map<int, Said>& said = entry(arrival).said;
  const auto found = said.find(process);
  return found == said.end() || found->second.count < arrival.count;
}

void ArrivalTracker::Settle(const Arrival& arrival) {
  for (auto& [process, said] : entries_.at(arrival.members().key).said) {
    said.place.erase(said.place.begin(), said.place.lower_bound(arrival.count));
  }
}

std::vector<uint64_t> ArrivalTracker::TakeTokens(const Arrival& arrival) {
  std::vector<uint64_t> taken;
  if (!arrival.signature->has_tokens) return taken;
  std::map<uint64_t, TokensOfCall>& tokens = entries_.at(arrival.members().key).tokens;
  TokensOfCall& found = tokens.at(arrival.count);
  size_t nlocal = 0;
  for (int64_t position : arrival.members().positions) {
    taken.push_back(found.by_position[position]);
    nlocal += arrival.signature->processes[static_cast<size_t>(position)] == process_;
  }
  if (++found.takers == nlocal) tokens.erase(arrival.count);
  return taken;
}

std::optional<std::string> ArrivalTracker::Disagreement(const Arrival& arrival) const {
  const auto [processes, positions, key, place] = arrival.members();
  if (const auto last = last_at_.find(place); last != last_at_.end()) {
    for (const auto& [process, other_key] : last->second) {
      const Entry& other = entries_.at(other_key);
      if (other_key == key || !Awaits(arrival, process) || !other.IsAhead(process)) continue;
      const Said& theirs = other.said.at(process);  // its last arrival there may be at another place of a later program
      const auto at = theirs.place.find(theirs.count);
      if (at == theirs.place.end() || at->second != place) continue;
      return Differences(process, text(other, process).fields, process_, arrival.signature->fields) +
             (own_places_.count({other_key, place}) ? HasBoth() : "");
    }
  }
  for (const auto& [process, said] : entry(arrival).said) {
    const auto theirs = said.place.find(arrival.count);
    if (theirs == said.place.end() || theirs->second == place || !own_places_.count({key, theirs->second})) continue;
    if (!own_places_.count({key, place})) continue;
    return DifferentPrograms(arrival, process, text(entry(arrival), process), true);
  }
  return std::nullopt;
}

std::optional<std::string> ArrivalTracker::Crossing(const Arrival& arrival, int process) const {
  const uint64_t mine = arrival.members().key;
  for (const auto& [key, other] : entries_) {
    if (key == mine || !other.IsAhead(process) || other.failed.count(other.said.at(process).count)) continue;
    if (AreInOneProgram(mine, key)) continue;
    const Text found = text(other, process);
    const bool has_both = std::any_of(programs_.begin(), programs_.end(),
                                      [theirs = key](const auto& program) { return program.second.count(theirs); });
    return DifferentPrograms(arrival, process, found, has_both) + "; " +
           Differences(process, found.fields, process_, arrival.signature->fields);
  }
  return std::nullopt;
}

bool ArrivalTracker::AreInOneProgram(uint64_t one, uint64_t other) const {
  return std::any_of(programs_.begin(), programs_.end(),
                     [&](const auto& program) { return program.second.count(one) && program.second.count(other); });
}

std::string ArrivalTracker::DifferentPrograms(const Arrival& arrival, int process, const Text& theirs,
                                              bool has_both) const {
  return std::string("the ranks run ") + (has_both ? "" : "different programs, or ") +
         "their programs in different orders: rank " + std::to_string(process) + " waits in " + theirs.call +
         ", rank " + std::to_string(process_) + " in " + arrival.signature->call + (has_both ? HasBoth() : "");
}

std::string ArrivalTracker::HasBoth() const {
  return ", and rank " + std::to_string(process_) + " has both programs; all ranks must call them in one order";
}

bool ArrivalTracker::Entry::IsAhead(int process) const {
  const auto found = said.find(process);
  return found != said.end() && found->second.count > announced;
}

void ArrivalTracker::Fail(const Arrival& arrival, const Status& status) {
  std::map<uint64_t, Status>& failed = entries_.at(arrival.members().key).failed;
  failed.emplace(arrival.count, status);
  if (failed.size() > kFailuresKept) failed.erase(failed.begin());
}

void ArrivalTracker::HearFailure(const Message& failure) {
  entries_[failure.key].failed.emplace(failure.count, FailedPrecondition("jaxmp.DistributedError: ", failure.text));
}

const Status* ArrivalTracker::failure(const Arrival& arrival) const {
  const std::map<uint64_t, Status>& failed = entry(arrival).failed;
  const auto found = failed.find(arrival.count);
  return found == failed.end() ? nullptr : &found->second;
}

ArrivalTracker::Text ArrivalTracker::text(const Entry& entry, int process) const {
  const auto found = texts_.find(entry.said.at(process).digest);
  return found == texts_.end() ? Text() : found->second;
}

}  // namespace jaxmp::barrier
