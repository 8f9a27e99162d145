#include "csrc/barrier/arrival_tracker.h"

#include <algorithm>
#include <utility>

namespace jaxmp::barrier {
namespace {

// Runs that are remembered at a call, of each process. More than XLA has under way at once.
constexpr size_t kRunsKept = 64;
// Failed runs that are remembered, of each process.
constexpr size_t kFailuresKept = 16;
// Runs that may be of one program are at most so far apart. Programs are paired only if their runs are further apart.
constexpr int32_t kNear = 1 << 16;
// A run counts as a later run of the same program if it is less than this far ahead. Fingerprints are random: among
// 1,000 programs two are this close in 3 of 100 jobs. A false error then also needs a long wait (kPassed, service.cc).
constexpr int32_t kWindow = 128;

// How many runs `run` is after `other`, if they are less than `limit` apart.
std::optional<int32_t> Distance(Run run, Run other, int32_t limit = kNear) {
  const auto distance = static_cast<int32_t>(run - other);
  if (distance <= -limit || distance >= limit) return std::nullopt;
  return distance;
}

template <typename Runs>
auto Find(Runs& runs, Run run) -> decltype(&runs[0]) {
  const auto found = std::find_if(runs.rbegin(), runs.rend(), [run](const auto& each) { return each.run == run; });
  return found == runs.rend() ? nullptr : &*found;
}

// The record of a run, which is made if there is none.
template <typename Record>
Record& Get(std::deque<Record>& runs, Run run) {
  if (Record* found = Find(runs, run)) return *found;
  if (runs.size() == kRunsKept) runs.pop_front();
  runs.emplace_back();
  runs.back().run = run;
  return runs.back();
}

Run RunOf(const Origin& origin) { return static_cast<Run>(origin.run); }

}  // namespace

void ArrivalTracker::Expect(const CallSignature& signature) {
  // Eager calls are programs of jaxmp's own, of one name for all.
  const bool is_eager = signature.program.rfind("jit_jaxmp_", 0) == 0;
  for (const CallSignature::Group& group : signature.members) {
    programs_[signature.program_hash].insert(group.key);
    if (!is_eager) own_places_.insert({group.key, group.place});
    for (int64_t at : group.positions) entries_[group.key].devices.insert(signature.devices[static_cast<size_t>(at)]);
  }
}

Arrival ArrivalTracker::Arrive(const std::shared_ptr<const CallSignature>& signature, const Origin& origin,
                               size_t position, uint64_t token) {
  const int64_t device = signature->devices[position];
  Arrival arrival{signature, static_cast<size_t>(signature->groups[position]), device, RunOf(origin), 0};
  Entry& entry = entries_[arrival.members().key];
  const auto is_near = [&arrival](Run first) { return Distance(arrival.run, first).has_value(); };
  if (std::none_of(entry.first.begin(), entry.first.end(), is_near)) entry.first.push_back(arrival.run);
  OwnRun& run = Get(entry.runs, arrival.run);
  arrival.count = ++run.arrived[device];
  if (signature->has_tokens) run.tokens[arrival.count][device] = token;
  Note(device, arrival.run);
  return arrival;
}

void ArrivalTracker::Note(int64_t device, Run run) {
  std::set<Run>& latest = latest_[device];
  const auto near = latest.lower_bound(run - std::min(run, static_cast<Run>(kWindow) - 1));
  const bool is_known = near != latest.end() && Distance(run, *near, kWindow);
  if (is_known && *near >= run) return;
  if (is_known) latest.erase(near);
  latest.insert(run);
}

bool ArrivalTracker::IsAmbiguous(const CallSignature& signature, size_t position, const Origin& origin) {
  Entry& entry = entries_[signature.members[static_cast<size_t>(signature.groups[position])].key];
  const void*& instruction = Get(entry.runs, RunOf(origin)).instructions[signature.devices[position]];
  const void* before = std::exchange(instruction, origin.instruction);
  return before && before != origin.instruction;
}

std::optional<Message> ArrivalTracker::Announcement(const Arrival& arrival) {
  const CallSignature& signature = *arrival.signature;
  Entry& entry = entries_.at(arrival.members().key);
  OwnRun& run = Get(entry.runs, arrival.run);
  if (arrival.count <= run.announced) return std::nullopt;
  Message message;
  message.kind = signature.has_tokens ? Kind::kArrival : Kind::kFirst;
  const std::map<int64_t, uint64_t> tokens =
      signature.has_tokens ? run.tokens[arrival.count] : std::map<int64_t, uint64_t>{{arrival.device, 0}};
  for (const auto& [device, token] : tokens) {
    message.tokens.push_back(static_cast<uint64_t>(device));
    message.tokens.push_back(token);
  }
  const auto is_own = [&](int64_t at) { return signature.processes[static_cast<size_t>(at)] == process_; };
  const std::vector<int64_t>& positions = arrival.members().positions;
  const auto nown = static_cast<size_t>(std::count_if(positions.begin(), positions.end(), is_own));
  if (signature.has_tokens && tokens.size() < nown) return std::nullopt;
  run.announced = arrival.count;
  message.place = arrival.members().place;
  message.key = arrival.members().key;
  message.run = arrival.run;
  message.count = arrival.count;
  message.digest = signature.digest;
  if (entry.described.insert(signature.digest).second) message.text = signature.call + "\n" + signature.fields;
  return message;
}

std::string ArrivalTracker::Hear(int process, const Message& arrival) {
  PeerRun& run = Get(entries_[arrival.key].peers[process].runs, static_cast<Run>(arrival.run));
  run.kind = arrival.kind;
  run.count = arrival.count;
  run.digest = arrival.digest;
  run.place = arrival.place;
  for (size_t i = 0; i + 1 < arrival.tokens.size(); i += 2) {
    const auto device = static_cast<int64_t>(arrival.tokens[i]);
    if (arrival.kind == Kind::kArrival) run.tokens[arrival.count][device] = arrival.tokens[i + 1];
    Note(device, run.run);
  }
  last_at_[arrival.place][process] = arrival.key;
  Text& text = texts_[arrival.digest];
  if (!arrival.text.empty()) {
    const size_t end = std::min(arrival.text.find('\n'), arrival.text.size());
    text = {arrival.text.substr(0, end), arrival.text.substr(end)};
  }
  return text.call;
}

// ---- which runs belong together

const ArrivalTracker::OwnRun* ArrivalTracker::Entry::own(Run run) const { return Find(runs, run); }

const ArrivalTracker::PeerRun* ArrivalTracker::Entry::theirs(int process, Run run) const {
  const auto peer = peers.find(process);
  if (peer == peers.end()) return nullptr;
  const std::deque<PeerRun>& all = peer->second.runs;
  const auto found = std::find_if(all.begin(), all.end(), [run](const PeerRun& each) { return each.own == run; });
  return found == all.end() ? nullptr : &*found;
}

const ArrivalTracker::PeerRun* ArrivalTracker::Entry::WaitingPeer(int process) const {
  const auto peer = peers.find(process);
  if (peer == peers.end() || peer->second.runs.empty()) return nullptr;
  const PeerRun& last = peer->second.runs.back();
  for (Run shift : peer->second.shifts) {
    const OwnRun* mine = own(last.run - shift);
    if (mine && mine->announced >= last.count) return nullptr;
  }
  return &last;
}

int64_t ArrivalTracker::Entry::NumberOf(Run run) const {
  for (Run each : first) {
    if (const std::optional<int32_t> distance = Distance(run, each)) return int64_t{*distance} + 1;
  }
  return 0;
}

void ArrivalTracker::PairRuns(const Arrival& arrival) {
  for (const auto& [process, peer] : entry(arrival).peers) PairRuns(arrival, process);
}

void ArrivalTracker::PairRuns(const Arrival& arrival, int process) {
  Entry& entry = entries_.at(arrival.members().key);
  const auto found_peer = entry.peers.find(process);
  if (found_peer == entry.peers.end() || entry.theirs(process, arrival.run)) return;
  Peer& peer = found_peer->second;
  PeerRun* found = nullptr;
  for (Run shift : peer.shifts) {
    PeerRun* const theirs = Find(peer.runs, arrival.run + shift);
    if (theirs && !theirs->own) found = theirs;
  }
  for (PeerRun& theirs : peer.runs) {
    if (found) break;
    if (!IsOtherProgram(arrival, process, theirs)) continue;
    peer.shifts.push_back(theirs.run - arrival.run);
    found = &theirs;
  }
  if (found) found->own = arrival.run;
}

// Whether the peer runs the same program as the arrival.
bool ArrivalTracker::IsNear(const Arrival& arrival, int process, const PeerRun& theirs) const {
  const std::vector<Run>& shifts = entry(arrival).peers.at(process).shifts;
  return std::any_of(shifts.begin(), shifts.end(),
                     [&](Run shift) { return Distance(theirs.run - shift, arrival.run).has_value(); });
}

// Whether the peer runs a program that this process does not have, in a run that is not paired yet.
bool ArrivalTracker::IsOtherProgram(const Arrival& arrival, int process, const PeerRun& theirs) const {
  const CallSignature::Group& call = arrival.members();
  if (theirs.own || HasFailed(process, theirs.run)) return false;
  if (theirs.place != call.place && own_places_.count({call.key, theirs.place})) return false;
  const std::deque<OwnRun>& own = entry(arrival).runs;
  const auto is_own = [&theirs](const OwnRun& mine) { return Distance(theirs.run, mine.run).has_value(); };
  return std::none_of(own.begin(), own.end(), is_own) && !IsNear(arrival, process, theirs);
}

bool ArrivalTracker::AreOneRun(Run own, int process, Run theirs) const {
  return own == theirs || std::any_of(entries_.begin(), entries_.end(), [&](const auto& each) {
           const PeerRun* found = each.second.theirs(process, own);
           return found && found->run == theirs;
         });
}

bool ArrivalTracker::Awaits(const Arrival& arrival, int process) const {
  if (process == process_) {
    return arrival.signature->has_tokens && entry(arrival).own(arrival.run)->announced < arrival.count;
  }
  const PeerRun* theirs = entry(arrival).theirs(process, arrival.run);
  return !theirs || theirs->count < arrival.count;
}

std::vector<uint64_t> ArrivalTracker::TakeTokens(const Arrival& arrival) {
  std::vector<uint64_t> taken;
  const CallSignature& signature = *arrival.signature;
  if (!signature.has_tokens) return taken;
  Entry& entry = entries_.at(arrival.members().key);
  OwnRun& mine = Get(entry.runs, arrival.run);
  size_t nlocal = 0;
  for (int64_t position : arrival.members().positions) {
    const auto process = static_cast<int>(signature.processes[static_cast<size_t>(position)]);
    nlocal += process == process_;
    const auto& tokens = process == process_ ? mine.tokens : entry.theirs(process, arrival.run)->tokens;
    taken.push_back(tokens.at(arrival.count).at(signature.devices[static_cast<size_t>(position)]));
  }
  if (++mine.takers[arrival.count] < nlocal) return taken;
  mine.takers.erase(arrival.count);
  mine.tokens.erase(arrival.count);
  for (int process : arrival.members().processes) {
    if (process == process_) continue;
    Find(entry.peers[process].runs, entry.theirs(process, arrival.run)->run)->tokens.erase(arrival.count);
  }
  return taken;
}

// ---- how ranks differ

std::optional<std::string> ArrivalTracker::Disagreement(const Arrival& arrival) const {
  const auto& [processes, positions, key, place, circle] = arrival.members();
  if (const auto last = last_at_.find(place); last != last_at_.end()) {
    for (const auto& [process, other_key] : last->second) {
      if (other_key == key || !Awaits(arrival, process)) continue;
      const PeerRun* theirs = entries_.at(other_key).WaitingPeer(process);
      // Its last arrival there may be at another place of a later program.
      if (!theirs || theirs->place != place || HasFailed(process, theirs->run)) continue;
      return Differences(process, text(theirs->digest).fields, process_, arrival.signature->fields) +
             (own_places_.count({other_key, place}) ? HasBoth() : "");
    }
  }
  for (int process : processes) {
    if (process == process_ || !Awaits(arrival, process)) continue;
    const PeerRun* theirs = entry(arrival).WaitingPeer(process);
    if (!theirs || theirs->place == place || HasFailed(process, theirs->run)) continue;
    if (!own_places_.count({key, theirs->place}) || !own_places_.count({key, place})) continue;
    return DifferentPrograms(arrival, process, text(theirs->digest), true);
  }
  return std::nullopt;
}

std::optional<std::string> ArrivalTracker::Crossing(const Arrival& arrival, int process) const {
  const uint64_t mine = arrival.members().key;
  for (const auto& [key, other] : entries_) {
    const PeerRun* theirs = other.WaitingPeer(process);
    if (!theirs || HasFailed(process, theirs->run)) continue;
    // HasPassed handles other runs of this program. What is left at this call is an equal call of another program.
    if (key == mine ? IsNear(arrival, process, *theirs) : AreInOneProgram(mine, key)) continue;
    const Text found = text(theirs->digest);
    const bool has_both = std::any_of(programs_.begin(), programs_.end(),
                                      [theirs = key](const auto& program) { return program.second.count(theirs); });
    return DifferentPrograms(arrival, process, found, has_both) + "; " +
           Differences(process, found.fields, process_, arrival.signature->fields);
  }
  return std::nullopt;
}

// A device runs the programs of one thread one after the other. So a device in a later run has left this run.
std::optional<std::string> ArrivalTracker::HasPassed(const Arrival& arrival, int process) const {
  const CallSignature& signature = *arrival.signature;
  const Entry& here = entry(arrival);
  const auto peer = here.peers.find(process);
  for (int64_t at : arrival.members().positions) {
    const auto latest = latest_.find(signature.devices[static_cast<size_t>(at)]);
    if (signature.processes[static_cast<size_t>(at)] != process || latest == latest_.end()) continue;
    for (Run shift : peer == here.peers.end() ? std::vector<Run>{0} : peer->second.shifts) {
      for (Run theirs : latest->second) {
        const std::optional<int32_t> ahead = Distance(theirs, arrival.run + shift, kWindow);
        if (!ahead || *ahead <= 0) continue;
        const int64_t number = here.NumberOf(arrival.run);
        return "rank " + std::to_string(process) + " has come to run " + std::to_string(number + *ahead) +
               " of the program and not to this call in run " + std::to_string(number) + ", in which rank " +
               std::to_string(process_) + " waits";
      }
    }
  }
  return std::nullopt;
}

// A peer that has given up such a call may still be in XLA's collective, until it comes to its next call.
bool ArrivalTracker::IsBehind(const Arrival& arrival, int process) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& each) {
    const Entry& other = each.second;
    const PeerRun* theirs = other.WaitingPeer(process);
    if (!theirs || theirs->kind != Kind::kFirst || !other.devices.count(arrival.device)) return false;
    const std::vector<Run>& shifts = other.peers.at(process).shifts;
    return std::any_of(shifts.begin(), shifts.end(), [&](Run shift) {
      const std::optional<int32_t> distance = Distance(theirs->run - shift, arrival.run, kWindow);
      return distance && *distance < 0;
    });
  });
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

ArrivalTracker::Text ArrivalTracker::text(uint64_t digest) const {
  const auto found = texts_.find(digest);
  return found == texts_.end() ? Text() : found->second;
}

// ---- runs that were given up

void ArrivalTracker::Fail(int process, Run run, Kind kind, const std::string& text) {
  std::deque<Failure>& failed = failed_[process];
  if (Find(failed, run)) return;
  failed.push_back({run, kind, text});
  if (failed.size() > kFailuresKept) failed.pop_front();
}

bool ArrivalTracker::HasFailed(int process, Run run) const {
  const auto found = failed_.find(process);
  return found != failed_.end() && Find(found->second, run);
}

const ArrivalTracker::Failure* ArrivalTracker::failure(const Arrival& arrival) const {
  const std::map<int, Peer>& peers = entry(arrival).peers;
  for (int process : arrival.members().processes) {
    const auto failed = failed_.find(process);
    if (failed == failed_.end()) continue;
    const auto peer = peers.find(process);
    for (Run shift : peer == peers.end() ? std::vector<Run>{0} : peer->second.shifts) {
      if (const Failure* found = Find(failed->second, arrival.run + shift)) return found;
    }
  }
  return nullptr;
}

}  // namespace jaxmp::barrier
