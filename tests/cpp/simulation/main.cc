// Runs jobs in virtual time: `barrier_simulation --schedules 1000` drawn ones, from --seed on, each with --ranks if
// that is given; --log tells all of the first. `barrier_simulation --table 1024` prints what a call costs in jobs of up
// to so many ranks.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "tests/cpp/simulation/schedule.h"

namespace {

using namespace jaxmp::simulation;  // NOLINT

int RunSchedules(uint64_t count, uint64_t seed, int nprocesses, bool is_logged) {
  int nwrong = 0;
  for (uint64_t i = seed; i < seed + count; ++i) {
    const Schedule schedule = Draw(i, nprocesses);
    const std::string wrong = Verdict(schedule, is_logged);
    if (wrong.empty()) continue;
    ++nwrong;
    std::printf("%s\n  %s\n", schedule.Text().c_str(), wrong.c_str());
    if (nwrong > 1) continue;
    const Schedule small = Shrink(schedule);
    std::printf("the first one, made smaller: %s\n", small.Text().c_str());
    std::printf("  %s\n", Verdict(small, true).c_str());
  }
  std::printf("%llu schedules, %d wrong\n", static_cast<unsigned long long>(count), nwrong);
  return nwrong ? 1 : 0;
}

// What one call of a group of all costs, and how long after a fault the last rank sees it.
void PrintCosts(int nprocesses) {
  Schedule schedule;
  schedule.nprocesses = nprocesses;
  schedule.calls = {{Call::kAll, false}};
  schedule.least = schedule.most = 100 * kMicro;
  schedule.pause = 0;
  Time came[2] = {};
  Rank rank[2];
  for (int i = 0; i < 2; ++i) {
    schedule.nsteps = i ? 3 : 2;
    Job job(schedule);
    job.Run(60 * kSecond);
    for (const Rank& each : job.ranks) {
      came[i] = std::max(came[i], each.came);
      rank[i].nmessages = std::max(rank[i].nmessages, each.nmessages);
      rank[i].nbytes = std::max(rank[i].nbytes, each.nbytes);
      rank[i].nsockets = std::max(rank[i].nsockets, each.nsockets);
    }
  }
  std::printf("| %d | %d | %d | %d | %.2f ms |", nprocesses, int(rank[1].nmessages - rank[0].nmessages),
              int(rank[1].nbytes - rank[0].nbytes), rank[1].nsockets, double(came[1] - came[0]) / kMilli - 0.1);
  for (const Event::Kind kind : {Event::kKill, Event::kStop}) {
    schedule.events = {{kind, nprocesses / 2, 1, 0}};
    Job job(schedule);
    job.Run(60 * kSecond);
    Time last = 0;
    for (const Rank& each : job.ranks) last = std::max(last, each.is_killed || each.is_stopped ? 0 : each.at);
    const bool is_stop = kind == Event::kStop;
    std::printf(" %s%.2f s |", is_stop ? "T + " : "",
                double(last - job.fault_at - is_stop * schedule.timeout) / kSecond);
  }
  std::puts("");
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, uint64_t> options = {{"--schedules", 1000}, {"--seed", 1}, {"--ranks", 0}, {"--log", 0}};
  for (int i = 1; i + 1 < argc; i += 2) options[argv[i]] = std::strtoull(argv[i + 1], nullptr, 10);
  if (options.count("--table")) {
    std::puts(
        "| Ranks | Messages of a rank and call | Bytes | Sockets of a rank | Barrier | A death is named | A stop |");
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    std::puts("|---|---|---|---|---|---|---|");
    for (int n = std::max(4, int(options["--ranks"])); n <= int(options["--table"]); n *= 4) PrintCosts(n);
    return 0;
  }
  return RunSchedules(options["--schedules"], options["--seed"], int(options["--ranks"]), options["--log"]);
}
