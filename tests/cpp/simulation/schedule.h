#ifndef JAXMP_TESTS_SIMULATION_SCHEDULE_H_
#define JAXMP_TESTS_SIMULATION_SCHEDULE_H_

#include <string>

#include "tests/cpp/simulation/job.h"

namespace jaxmp::simulation {

// 0 processes: draws their number too.
Schedule Draw(uint64_t seed, int nprocesses = 0);

// Runs a schedule; returns the promise that it breaks, or "".
std::string Verdict(const Schedule& schedule, bool is_logged = false);

// Returns a schedule with less in it that still breaks a promise.
Schedule Shrink(Schedule schedule);

}  // namespace jaxmp::simulation

#endif  // JAXMP_TESTS_SIMULATION_SCHEDULE_H_
