#include "csrc/rollcall/ledger.h"

#include <algorithm>

namespace jaxmp::rollcall {
namespace {

// Calls whose failure is remembered for those who come late.
constexpr size_t kFailuresKept = 8;

}  // namespace

Turn Ledger::Arrive(const std::shared_ptr<const Appointment>& appointment, size_t position) {
  Turn turn{appointment, static_cast<size_t>(appointment->groups[position]), 0};
  Entry& entry = entries_[turn.members().key];
  entry.program = appointment->program_hash;
  entry.label = appointment->label;
  turn.count = ++entry.arrived[appointment->devices[position]];
  return turn;
}

std::optional<Message> Ledger::Announcement(const Turn& turn) {
  const Appointment& appointment = *turn.appointment;
  Entry& entry = entries_.at(turn.members().key);
  if (turn.count <= entry.announced) return std::nullopt;
  entry.announced = turn.count;
  Message message;
  message.kind = Kind::kArrival;
  message.program = appointment.program_hash;
  message.label = appointment.label;
  message.key = turn.members().key;
  message.count = turn.count;
  message.digest = appointment.digest;
  if (entry.described.insert(appointment.digest).second) message.text = appointment.call + "\n" + appointment.fields;
  return message;
}

std::string Ledger::Hear(int process, const Message& arrival) {
  Entry& entry = entries_[arrival.key];
  entry.program = arrival.program;
  entry.label = arrival.label;
  Said& said = entry.said[process];
  said.count = arrival.count;
  said.digest[arrival.count] = arrival.digest;
  Text& text = texts_[arrival.digest];
  if (!arrival.text.empty()) {
    const size_t end = std::min(arrival.text.find('\n'), arrival.text.size());
    text = {arrival.text.substr(0, end), arrival.text.substr(end)};
  }
  return text.call;
}

bool Ledger::Awaits(const Turn& turn, int process) const {
  if (process == process_) return false;
  const std::map<int, Said>& said = entry(turn).said;
  const auto found = said.find(process);
  return found == said.end() || found->second.count < turn.count;
}

void Ledger::Settle(const Turn& turn) {
  for (auto& [process, said] : entries_.at(turn.members().key).said) {
    said.digest.erase(said.digest.begin(), said.digest.lower_bound(turn.count));
  }
}

std::optional<std::string> Ledger::Disagreement(const Turn& turn) const {
  for (const auto& [process, said] : entry(turn).said) {
    const auto found = said.digest.find(turn.count);
    if (found == said.digest.end() || found->second == turn.appointment->digest) continue;
    return Differences(process, text(found->second).fields, process_, turn.appointment->fields);
  }
  return std::nullopt;
}

std::optional<std::string> Ledger::Crossing(const Turn& turn, int process) const {
  const Entry& mine = entry(turn);
  for (const auto& [key, other] : entries_) {
    const auto said = other.said.find(process);
    if (&other == &mine || said == other.said.end() || said->second.count <= other.announced) continue;
    if (other.failed.count(said->second.count)) continue;
    if (other.program == mine.program && other.label != mine.label) continue;
    const auto digest = said->second.digest.find(said->second.count);
    const Text theirs = digest == said->second.digest.end() ? Text() : text(digest->second);
    if (other.label == mine.label) {
      return Differences(process, theirs.fields, process_, turn.appointment->fields);
    }
    return "the ranks run different programs: rank " + std::to_string(process) + " waits in " + theirs.call +
           ", rank " + std::to_string(process_) + " in " + turn.appointment->call;
  }
  return std::nullopt;
}

void Ledger::Fail(const Turn& turn, const Status& status) {
  std::map<uint64_t, Status>& failed = entries_.at(turn.members().key).failed;
  failed.emplace(turn.count, status);
  if (failed.size() > kFailuresKept) failed.erase(failed.begin());
}

void Ledger::HearFailure(const Message& failure) {
  entries_[failure.key].failed.emplace(failure.count, FailedPrecondition("jaxmp.DistributedError: " + failure.text));
}

const Status* Ledger::failure(const Turn& turn) const {
  const std::map<uint64_t, Status>& failed = entry(turn).failed;
  const auto found = failed.find(turn.count);
  return found == failed.end() ? nullptr : &found->second;
}

Ledger::Text Ledger::text(uint64_t digest) const {
  const auto found = texts_.find(digest);
  return found == texts_.end() ? Text() : found->second;
}

}  // namespace jaxmp::rollcall
