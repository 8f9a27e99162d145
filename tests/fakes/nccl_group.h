// Where the ranks of a communicator of the fake libnccl.so.2 meet. It lies on the board of a job (job.h), zeros at
// first, and no rank holds a lock: one that dies stays away, and that is all.
#ifndef JAXMP_TESTS_FAKES_NCCL_GROUP_H_
#define JAXMP_TESTS_FAKES_NCCL_GROUP_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>

#include "tests/fakes/fake.h"

namespace fakes {

void Await(const std::function<bool()>& holds);

// The i-th arrival of a rank belongs with the i-th of every other.
struct Channel {
  // A rank arrives once more only when it has what its last arrival was for; some threads of it may do so at a time.
  static constexpr size_t kTurns = 8;

  std::array<std::atomic<uint64_t>, kFakeMostRanks> begun, arrived;               // how often
  std::array<std::array<std::atomic<long long>, kFakeMostRanks>, kTurns> values;  // NOLINT: of the latest turns

  void Gather(int rank, int nranks, long long value, long long* taken);  // NOLINT
};

// What one rank has sent to another, in order, and the other has still to take.
struct Mail {
  static constexpr size_t kMost = 8;

  std::array<std::atomic<void*>, kMost> letters;  // the sender's, up to the next that is put there
  std::atomic<uint64_t> sent, taken;              // how many
};

struct Group {
  std::array<Channel, 2> channels;
  std::array<std::array<Mail, kFakeMostRanks>, kFakeMostRanks> mail;                      // by sender and receiver
  std::array<std::array<std::atomic<uint64_t>, kFakeMostRanks>, kFakeMostRanks> signals;  // likewise, how many
};

}  // namespace fakes

extern "C" fakes::Mail* fake_nccl_mail(jaxmp::abi::ncclComm_t comm, int from, int to);

#endif  // JAXMP_TESTS_FAKES_NCCL_GROUP_H_
