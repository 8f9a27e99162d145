// The meeting place of the ranks of a communicator of the fake libnccl.so.2. It is on the board of a job (job.h), zeros
// at first, and no rank holds a lock: if one dies, it only stays away.
#ifndef JAXMP_TESTS_FAKES_NCCL_GROUP_H_
#define JAXMP_TESTS_FAKES_NCCL_GROUP_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>

#include "tests/fakes/fake.h"

namespace fakes {

void Await(const std::function<bool()>& holds);

// The i-th arrival of a rank meets every other rank's i-th.
struct Channel {
  // A rank arrives again only when it has the values of its last arrival; some of its threads may do so at a time.
  static constexpr size_t kTurns = 8;

  std::array<std::atomic<uint64_t>, kFakeMostRanks> begun, arrived;               // counts
  std::array<std::array<std::atomic<long long>, kFakeMostRanks>, kTurns> values;  // NOLINT: of the latest turns

  void Gather(int rank, int nranks, long long value, long long* taken);  // NOLINT
};

// Messages that one rank has sent to another, in order, until the other has taken them.
struct Mail {
  static constexpr size_t kMost = 8;

  std::array<std::atomic<void*>, kMost> letters;  // the sender's, until the next one is put there
  std::atomic<uint64_t> sent, taken;              // counts
};

struct Group {
  std::array<Channel, 2> channels;
  std::array<std::array<Mail, kFakeMostRanks>, kFakeMostRanks> mail;                      // by sender and receiver
  std::array<std::array<std::atomic<uint64_t>, kFakeMostRanks>, kFakeMostRanks> signals;  // the same, counts
};

}  // namespace fakes

extern "C" fakes::Mail* fake_nccl_mail(jaxmp::abi::ncclComm_t comm, int from, int to);

#endif  // JAXMP_TESTS_FAKES_NCCL_GROUP_H_
