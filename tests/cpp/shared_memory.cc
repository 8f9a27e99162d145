// Memory that processes share, and the collectives through it, against peers that the test plays: they write blocks to
// this process's own memory, which it maps for them too, and come to the barrier over a socket.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "csrc/barrier/barrier.h"
#include "csrc/barrier/call_signature.h"
#include "csrc/barrier/messages.h"
#include "csrc/shared_memory/arena.h"
#include "csrc/shared_memory/collective.h"
#include "tests/cpp/check.h"

namespace jaxmp {
namespace {

using barrier::Message;

void ABlockIsWrittenToAgainOnceAllHaveReadIt() {
  CHECK(ShareArena(0, *OwnArena()).ok());
  const Block first = *AllocateBlock(10000, 2), second = *AllocateBlock(1, 1);
  CHECK(first.token != second.token);
  std::memset(first.data, 7, 10000);
  CHECK_EQ((*ReadBlock(0, first.token, 10000))[9999], 7);
  ReleaseBlock(0, first.token);
  CHECK((*AllocateBlock(10000, 0)).token != first.token);  // one has still to read it
  ReleaseBlock(0, first.token);
  const Block third = *AllocateBlock(5000, 1);
  CHECK_EQ(third.token, first.token);
  ReleaseBlock(0, second.token);
  ReleaseBlock(0, third.token);
  CHECK_EQ(OwnArenaUse().used, size_t{0});
  const size_t touched = OwnArenaUse().touched;
  for (int i = 0; i < 100; ++i) ReleaseBlock(0, (*AllocateBlock(20000, 1)).token);
  CHECK(OwnArenaUse().touched <= touched + 24576);
}

void WhatIsNotThereIsRefused() {
  const Block block = *AllocateBlock(100, 1);
  CHECK_CONTAINS(ReadBlock(3, block.token, 100).status().message(), "shares no memory with process 3");
  for (const uint64_t token : {uint64_t{0}, block.token + 64, ~uint64_t{0} << 12}) {
    CHECK_CONTAINS(ReadBlock(0, token, 100).status().message(), "shares no block of 100 bytes");
  }
  CHECK_CONTAINS(ReadBlock(0, block.token, 101).status().message(), "shares no block of 101 bytes");
  CHECK_CONTAINS(ReadBlock(0, block.token, ~size_t{0} - 8).status().message(), "shares no block");
  ReleaseBlock(0, block.token);
  CHECK(AllocateBlock(~size_t{0} / 2, 1).status().code() == Code::kResourceExhausted);
  CHECK_CONTAINS(ShareArena(1, "memory").message(), "describes no shared memory");
  CHECK_CONTAINS(ShareArena(1, "1 99999 4096 5").message(), "cannot open /proc/1/fd/99999");
  int pid = 0, fd = 0;
  std::sscanf(OwnArena()->c_str(), "%d %d", &pid, &fd);
  const std::string place = std::to_string(pid) + " " + std::to_string(fd);
  CHECK_CONTAINS(ShareArena(1, place + " 4096 5").message(), "is not the memory of process 1");
  for (const char* size : {"9000000000000", "18446744073709551615"}) {
    CHECK_CONTAINS(ShareArena(1, place + " " + size + " 5").message(), "is not the memory of process 1");
  }
  CHECK_CONTAINS(ShareArena(1, place + " 0 5").message(), "cannot map shared memory");
}

void AnotherProcessReadsWhatThisOneWrites() {
  const std::string described = *OwnArena();
  const Block block = *AllocateBlock(6, 1);
  std::memcpy(block.data, "shared", 6);
  const pid_t child = fork();
  if (child == 0) {
    const bool is_right = ShareArena(5, described).ok() && ReadBlock(5, block.token, 6).ok() &&
                          std::memcmp(*ReadBlock(5, block.token, 6), "shared", 6) == 0;
    if (is_right) ReleaseBlock(5, block.token);
    _exit(is_right ? 0 : 1);
  }
  int how = -1;
  CHECK_EQ(waitpid(child, &how, 0), child);
  CHECK_EQ(how, 0);
  CHECK_EQ(OwnArenaUse().used, size_t{0});
}

// Four devices, of which this process has those at positions 0 and 2, and the peer the others; the order of their ranks
// is another one.
struct Job {
  explicit Job(bool sums, const std::string& fields = "k=4") {
    CallSignature signature;
    signature.program = "jit_f";
    signature.call = "matmul at train.py:41";
    signature.fields = fields;
    signature.devices = {0, 1, 2, 3};
    signature.processes = {0, 1, 0, 1};
    signature.groups = {0, 0, 0, 0};
    signature.has_tokens = true;
    call = std::make_shared<const SharedCollective>(SharedCollective{*Prepare(signature), ranks, 3, sums});
    CHECK(CheckCollective(*call).ok());
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    fd = ends[1];
    for (int process : {0, 1}) CHECK(ShareArena(process, *OwnArena()).ok());
    StartBarrier({0, 2, 1.5, true, -1});
    ConnectPeer(1, ends[0]);
  }
  ~Job() {
    StopBarrier();
    if (fd >= 0) close(fd);
  }

  // The device at a position, of this process.
  std::future<std::string> Come(int64_t position, const std::vector<float>& operand, std::vector<float>* result,
                                const Origin& origin = {}) {
    auto promise = std::make_shared<std::promise<std::string>>();
    const auto add = [](void* z, const void* x, const void* y, size_t count) {
      for (size_t i = 0; i < count; ++i) {
        static_cast<float*>(z)[i] = static_cast<const float*>(x)[i] + static_cast<const float*>(y)[i];
      }
    };
    const CollectiveArrays arrays = {reinterpret_cast<const char*>(operand.data()),
                                     operand.size() * 4,
                                     reinterpret_cast<char*>(result->data()),
                                     result->size() * 4,
                                     call->sums ? size_t{4} : size_t{1},
                                     add};
    RunCollective(call, origin, position, arrays,
                  [promise](const Status& status) { promise->set_value(status.message()); });
    return promise->get_future();
  }

  // The peer, with both its devices.
  void PeerComes(uint64_t count, const std::vector<std::vector<float>>& operands) {
    const CallSignature& signature = *call->signature;
    Message message{barrier::Kind::kArrival,
                    signature.program_hash,
                    signature.label,
                    signature.members[0].key,
                    count,
                    signature.digest,
                    {},
                    signature.call + "\n" + signature.fields};
    for (const uint64_t position : {1, 3}) {
      const std::vector<float>& operand = operands[position];
      const Block block = *AllocateBlock(operand.size() * 4, 3);
      std::memcpy(block.data, operand.data(), operand.size() * 4);
      message.tokens.insert(message.tokens.end(), {position, block.token});
    }
    const std::string bytes = Encode(message);
    CHECK_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }

  const std::vector<int64_t> ranks = {2, 0, 3, 1};
  std::shared_ptr<const SharedCollective> call;
  int fd = -1;
};

// [3, pieces, 5] numbers of the device at a position.
std::vector<float> Operand(int64_t position, size_t pieces) {
  std::vector<float> x(3 * pieces * 5);
  std::iota(x.begin(), x.end(), static_cast<float>(1000 * position));
  return x;
}

void ResultsAreInTheOrderOfTheRanks() {
  for (const bool sums : {false, true}) {
    Job job(sums);
    const size_t given = sums ? 4 : 1, wanted = sums ? 1 : 4;
    std::vector<std::vector<float>> operands;
    for (int64_t position = 0; position < 4; ++position) operands.push_back(Operand(position, given));
    for (uint64_t count = 1; count <= 3; ++count) {
      std::vector<float> one(3 * wanted * 5), other(3 * wanted * 5);
      auto first = job.Come(0, operands[0], &one);
      if (count % 2) job.PeerComes(count, operands);
      auto second = job.Come(2, operands[2], &other);
      if (count % 2 == 0) job.PeerComes(count, operands);
      CHECK_EQ(first.get(), "");
      CHECK_EQ(second.get(), "");
      for (size_t i = 0; i < 3; ++i) {
        for (size_t j = 0; j < 5; ++j) {
          float total[2] = {0, 0};
          for (size_t position = 0; position < 4; ++position) {
            const auto rank = static_cast<size_t>(job.ranks[position]);
            if (!sums) CHECK_EQ(one[(i * 4 + rank) * 5 + j], operands[position][i * 5 + j]);
            total[0] += sums ? operands[position][(i * 4 + 2) * 5 + j] : 0;
            total[1] += sums ? operands[position][(i * 4 + 3) * 5 + j] : 0;
          }
          if (sums) {
            CHECK_EQ(one[i * 5 + j], total[0]);
            CHECK_EQ(other[i * 5 + j], total[1]);
          }
        }
      }
      if (!sums) CHECK(one == other);
    }
  }
}

void AProcessComesWithItsLastDevice() {
  Job job(/*sums=*/false);
  std::vector<std::vector<float>> operands;
  for (int64_t position = 0; position < 4; ++position) operands.push_back(Operand(position, 1));
  std::vector<float> one(60), other(60);
  job.PeerComes(1, operands);
  auto first = job.Come(0, operands[0], &one);
  CHECK(first.wait_for(std::chrono::milliseconds(300)) == std::future_status::timeout);
  char byte;
  CHECK(recv(job.fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) <= 0);  // the peer has not been told
  auto second = job.Come(2, operands[2], &other);
  CHECK_EQ(first.get(), "");
  CHECK_EQ(second.get(), "");
}

void AFaultIsAnError() {
  std::vector<float> x = Operand(0, 1), result(60), wrong(59);
  {
    Job job(/*sums=*/false);
    CHECK_CONTAINS(job.Come(0, x, &wrong).get(), "of 4 ranks has 60 bytes on one side and 236 on the other");
    CHECK_CONTAINS(job.Come(4, x, &result).get(), "the mesh has no position 4");
    CHECK_CONTAINS(job.Come(0, x, &result).get(), "rank 0 has not come with all its devices");
  }
  {
    Job job(/*sums=*/false);
    auto first = job.Come(0, x, &result);
    auto second = job.Come(2, x, &result);
    close(std::exchange(job.fd, -1));
    CHECK_CONTAINS(first.get(), "rank 1 has ended without a word");
    CHECK_CONTAINS(second.get(), "rank 1 has ended without a word");
  }
  {
    Job job(/*sums=*/false);
    const int one = 1, other = 2;
    auto first = job.Come(0, x, &result, {&one, 7});
    CHECK_CONTAINS(job.Come(0, x, &result, {&other, 7}).get(), "two instructions of the compiled program");
    close(std::exchange(job.fd, -1));
    first.wait();
  }
  SharedCollective call = *Job(/*sums=*/true).call;
  for (const std::vector<int64_t>& ranks : {std::vector<int64_t>{0, 1, 2, 2}, {0, 1, 2, 4}, {0, 1, 2}, {0, -1, 2, 3}}) {
    call.ranks = ranks;
    CHECK_CONTAINS(CheckCollective(call).message(), "must count from 0 in each group");
  }
}

}  // namespace
}  // namespace jaxmp

int main() {
  jaxmp::ABlockIsWrittenToAgainOnceAllHaveReadIt();
  jaxmp::WhatIsNotThereIsRefused();
  jaxmp::AnotherProcessReadsWhatThisOneWrites();
  jaxmp::ResultsAreInTheOrderOfTheRanks();
  jaxmp::AProcessComesWithItsLastDevice();
  jaxmp::AFaultIsAnError();
  return jaxmp::check::summary("shared_memory");
}
