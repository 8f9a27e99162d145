// Draws schedules, says what docs/faults.md promises of each, and shrinks one that breaks a promise.
#include "tests/cpp/simulation/schedule.h"

#include <algorithm>
#include <random>
#include <regex>

namespace jaxmp::simulation {
namespace {

const char* const kNames[] = {"kill",    "stop",    "raise", "leave", "cut",    "shape",
                              "program", "abandon", "slow",  "pause", "rename", "slow link"};

std::string Milliseconds(Time time) { return std::to_string(time / kMilli) + " ms"; }

}  // namespace

std::string Event::Text() const {
  std::string text = std::string(kNames[kind]) + " rank " + std::to_string(rank) + " at step " + std::to_string(step) +
                     ", call " + std::to_string(call);
  if (after) text += ", after " + Milliseconds(after);
  if (lasts) text += ", for " + Milliseconds(lasts);
  if (machine > 1) text += ", with " + std::to_string(machine) + " ranks";
  return text;
}

std::string Schedule::Text() const {
  std::string text = "seed " + std::to_string(seed) + ": " + std::to_string(nprocesses) + " processes of " +
                     std::to_string(ndevices) + " devices, rows of " + std::to_string(ncolumns) + ", " +
                     std::to_string(nsteps) + " steps" + (is_concurrent ? " of concurrent calls" : "") + ":";
  for (const Call& call : calls) {
    text += std::string(" ") +
            (call.group == Call::kAll    ? "all"
             : call.group == Call::kRows ? "row"
                                         : "column") +
            (call.has_tokens ? "" : " (XLA)");
  }
  if (settling) text += "; connections take up to " + Milliseconds(settling);
  for (const Event& event : events) text += "; " + event.Text();
  return text;
}

Schedule Draw(uint64_t seed, int nprocesses) {
  std::mt19937_64 random(seed);
  const auto below = [&random](int n) { return int(random() % uint64_t(n)); };
  Schedule drawn;
  drawn.seed = seed;
  drawn.nprocesses = nprocesses ? nprocesses : below(20) ? 2 + below(11) : 13 + below(28);
  drawn.ndevices = below(4) ? 1 : 2;
  std::vector<int> columns;
  for (int n = 1; n <= drawn.nprocesses; ++n) {
    if (drawn.nprocesses % n == 0) columns.push_back(n);
  }
  drawn.ncolumns = columns[size_t(below(int(columns.size())))];
  drawn.nsteps = 1 + below(4);
  const int mode = below(3);  // tokens, XLA's, both
  for (int n = 1 + below(4); n > 0; --n) {
    Call call;
    call.group = Call::Group(below(3));
    const int size = call.group == Call::kAll    ? drawn.nprocesses
                     : call.group == Call::kRows ? drawn.ncolumns
                                                 : drawn.nprocesses / drawn.ncolumns;
    if (size == 1) call.group = Call::kAll;
    call.has_tokens = mode == 0 || (mode == 2 && below(2));
    drawn.calls.push_back(call);
  }
  drawn.is_concurrent = mode == 0 && below(2);
  drawn.most = below(4) ? 200 * kMicro : 20 * kMilli;
  drawn.settling = seed % 2 ? kSecond : 0;
  const auto event = [&](Event::Kind kind) {
    Event made{kind, below(drawn.nprocesses), below(drawn.nsteps), below(int(drawn.calls.size()))};
    if (below(2)) made.after = Time(below(3)) * below(1000) * kMicro * 100;
    return made;
  };
  for (int n = below(3); n > 0; --n) {
    Event made = event(Event::Kind(Event::kSlow + below(4)));
    made.lasts = made.kind == Event::kSlowLink ? Time(1 + below(50)) * kMilli : Time(below(1000)) * kMilli;
    drawn.events.push_back(made);
  }
  if (below(6) == 0) return drawn;
  Event fault = event(Event::Kind(below(Event::kSlow)));
  if (fault.kind == Event::kCut) {
    fault.machine = 1 + below(drawn.nprocesses - 1);
    fault.rank = below(drawn.nprocesses - fault.machine + 1);
  }
  if (fault.kind >= Event::kShape || drawn.is_concurrent) fault.after = 0;
  const auto is_renamed = [](const Event& each) { return each.kind == Event::kRename; };
  const bool has_rename = std::any_of(drawn.events.begin(), drawn.events.end(), is_renamed);
  // docs/faults.md: with several devices, programs that differ may meet in a collective of XLA's.
  const bool is_other = fault.kind == Event::kProgram || (fault.kind == Event::kShape && has_rename);
  if (is_other && drawn.ndevices > 1 && mode != 0) return drawn;
  if (fault.kind == Event::kAbandon) {
    // docs/faults.md, Limits: runs of other programs are paired at their first call.
    if (mode != 0 || drawn.is_concurrent || has_rename || fault.step == drawn.nsteps - 1) return drawn;
  }
  drawn.events.push_back(fault);
  return drawn;
}

namespace {

class Judge {
 public:
  explicit Judge(const Job& job) : job_(job), schedule_(job.schedule) {
    for (const Event& event : schedule_.events) {
      if (event.IsFault()) fault_ = &event;
    }
    if (job.fault_at < 0) fault_ = nullptr;
  }

  std::string Verdict() {
    if (!job_.wrong.empty()) return job_.wrong[0];
    for (size_t i = 0; i < job_.ranks.size(); ++i) {
      std::string wrong = OfRank(int(i));
      if (!wrong.empty()) return "rank " + std::to_string(i) + " " + wrong;
    }
    return "";
  }

 private:
  bool IsVictim(int rank) const { return fault_ && rank >= fault_->rank && rank < fault_->rank + fault_->machine; }

  std::string OfRank(int i) const {
    const Rank& rank = job_.ranks[size_t(i)];
    if (rank.is_killed || rank.is_stopped) return "";
    if (!rank.has_ended) return "hangs";
    if (!fault_ || fault_->kind == Event::kAbandon)
      return rank.saw.empty() ? "" : "sees an error without a fault: " + rank.saw;
    if (rank.saw.empty()) {
      return rank.has_finished && job_.ranks[size_t(fault_->rank)].has_finished ? "" : "ended without an error";
    }
    const bool is_own = fault_->kind == Event::kRaise || fault_->kind == Event::kLeave;
    if (IsVictim(i) && is_own) return "";
    if (!Names(i, rank.saw) && !NamesOneThatWaits(rank.saw)) return "does not name the victim: " + rank.saw;
    std::string falsely = Accused(rank);
    if (!falsely.empty()) return falsely + ": " + rank.saw;
    const Time after = rank.at - std::max(job_.fault_at, Came(i)), within = Within();
    if (after <= within) return "";
    return "sees it " + std::to_string(after / kMilli) + " ms after the fault, not within " +
           std::to_string(within / kMilli) + ": " + rank.saw;
  }

  bool Names(int i, const std::string& text) const {
    const bool is_pair = fault_->kind == Event::kShape || fault_->kind == Event::kProgram;
    if (is_pair && IsVictim(i)) return text.find("rank ") != std::string::npos;
    for (int other = 0; other < schedule_.nprocesses; ++other) {
      const bool is_named = std::regex_search(text, std::regex("\\brank " + std::to_string(other) + "\\b"));
      const bool is_across = fault_->kind == Event::kCut ? IsVictim(other) != IsVictim(i) : IsVictim(other);
      if (is_named && is_across) return true;
    }
    return false;
  }

  // Programs that differ are noticed at the deadline if the processes have several devices, so a rank that waits for
  // one of those who differ may come to its own deadline first.
  bool NamesOneThatWaits(const std::string& text) const {
    const bool is_at_deadline = fault_->kind == Event::kProgram || (fault_->kind == Event::kShape && HasRename());
    return is_at_deadline && schedule_.ndevices > 1 && text.find("has not come; it is alive") != std::string::npos;
  }

  // From when on a rank can know.
  Time Came(int i) const {
    if (fault_->kind != Event::kShape && fault_->kind != Event::kProgram) return job_.ranks[size_t(i)].came;
    Time last = 0;
    for (const Rank& rank : job_.ranks) last = std::max(last, rank.came);
    return last;
  }

  Time Within() const {
    const Time slow = 10 * schedule_.most + schedule_.settling + kSecond / 2;
    switch (fault_->kind) {
      case Event::kKill:
      case Event::kRaise:
      case Event::kLeave:
        return kSecond + slow;
      case Event::kStop:
        return schedule_.timeout + 2 * kSecond + slow;
      case Event::kShape:
        if (!HasRename()) return kSecond + slow;
        [[fallthrough]];
      case Event::kProgram:
        return (schedule_.ndevices == 1 ? 2 * kSecond : schedule_.timeout + 2 * kSecond) + slow;
      default:
        return schedule_.timeout + 6 * kSecond + slow;
    }
  }

  bool HasRename() const {
    return std::any_of(schedule_.events.begin(), schedule_.events.end(),
                       [](const Event& each) { return each.kind == Event::kRename; });
  }

  // What a rank says of another that is not so.
  std::string Accused(const Rank& rank) const {
    static const std::regex said(
        "rank (\\d+) (does not answer|has not come and does not answer|has not come; it is alive|"
        "has ended without a word|has come to run)");
    for (std::sregex_iterator at(rank.saw.begin(), rank.saw.end(), said), end; at != end; ++at) {
      if (!IsTrue(job_.ranks[size_t(std::stoi((*at)[1]))], (*at)[2])) return "says falsely that " + (*at)[0].str();
    }
    return "";
  }

  bool IsTrue(const Rank& other, const std::string& what) const {
    if (what == "has ended without a word") return other.has_ended;
    if (what == "has come to run") return fault_->kind == Event::kAbandon;
    if (what == "has not come; it is alive") return !other.is_stopped;
    return other.is_stopped || other.is_killed || (fault_->kind == Event::kCut && other.has_ended);
  }

  const Job& job_;
  const Schedule& schedule_;
  const Event* fault_ = nullptr;
};

}  // namespace

std::string Verdict(const Schedule& schedule, bool is_logged) {
  Job job(schedule, is_logged);
  job.Run(60 * kSecond);
  return Judge(job).Verdict();
}

Schedule Shrink(Schedule schedule) {
  const auto fails = [](const Schedule& tried) { return !Verdict(tried).empty(); };
  for (bool is_smaller = true; is_smaller;) {
    is_smaller = false;
    std::vector<Schedule> smaller;
    for (size_t i = 0; i < schedule.events.size(); ++i) {
      smaller.push_back(schedule);
      smaller.back().events.erase(smaller.back().events.begin() + int64_t(i));
    }
    for (size_t i = 0; schedule.calls.size() > 1 && i < schedule.calls.size(); ++i) {
      smaller.push_back(schedule);
      smaller.back().calls.erase(smaller.back().calls.begin() + int64_t(i));
    }
    const auto with = [&](auto change) {
      smaller.push_back(schedule);
      change(&smaller.back());
    };
    if (schedule.nsteps > 1) with([](Schedule* s) { --s->nsteps; });
    if (schedule.ndevices > 1) with([](Schedule* s) { s->ndevices = 1; });
    if (schedule.is_concurrent) with([](Schedule* s) { s->is_concurrent = false; });
    if (schedule.ncolumns > 1) with([](Schedule* s) { s->ncolumns = 1; });
    if (schedule.most > 200 * kMicro) with([](Schedule* s) { s->most = 200 * kMicro; });
    if (schedule.settling) with([](Schedule* s) { s->settling = 0; });
    if (schedule.nprocesses > 2) with([](Schedule* s) { --s->nprocesses, s->ncolumns = 1; });
    for (const Schedule& each : smaller) {
      const bool is_valid = std::all_of(each.events.begin(), each.events.end(), [&](const Event& event) {
        return event.rank + event.machine <= each.nprocesses && event.step < each.nsteps &&
               event.call < int(each.calls.size()) && event.machine < each.nprocesses &&
               (event.kind != Event::kAbandon || event.step < each.nsteps - 1);
      });
      if (!is_valid || !fails(each)) continue;
      schedule = each;
      is_smaller = true;
      break;
    }
  }
  return schedule;
}

}  // namespace jaxmp::simulation
