// Memory that processes share, and the collectives through it, against peers that the test plays: they write blocks to
// this process's own memory, which it maps for them too, and come to the barrier over a socket.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <future>
#include <numeric>

#include "csrc/shared_memory/arena.h"
#include "csrc/shared_memory/collective.h"
#include "tests/cpp/peer.h"

namespace jaxmp {
namespace {

constexpr uint64_t kPages = uint64_t{1} << 32;  // a token: which block, where

void Fill(const Block& block, char byte, size_t bytes) { std::memset(block.data, byte, bytes); }

void ReadAndRelease(uint64_t token, size_t bytes, char byte) {
  const StatusOr<const char*> block = ReadBlock(0, token, bytes);
  CHECK(block.ok());
  CHECK_EQ((*block)[bytes - 1], byte);
  ReleaseBlock(0, token);
}

TEST(ABlockIsWrittenToAgainOnceAllHaveReadIt) {
  CHECK(ShareArena(0, *DescribeLocalArena()).ok());
  CHECK_CONTAINS(AllocateBlock(1, 0).status().message(), "without readers");
  const Block first = *AllocateBlock(100000, 2), second = *AllocateBlock(1, 1);
  CHECK(first.token % kPages != second.token % kPages);
  Fill(first, 7, 100000);
  ReadAndRelease(first.token, 100000, 7);
  const Block other = *AllocateBlock(100000, 1);
  CHECK(other.token % kPages != first.token % kPages);  // one has still to read it
  Fill(other, 6, 100000);
  ReadAndRelease(first.token, 100000, 7);
  const Block third = *AllocateBlock(70000, 1);
  Fill(third, 8, 70000);
  CHECK_EQ(third.token % kPages, first.token % kPages);
  CHECK_CONTAINS(ReadBlock(0, first.token, 70000).status().message(), "another block is there");
  ReadAndRelease(third.token, 70000, 8);
  Fill(second, 9, 1);
  ReadAndRelease(second.token, 1, 9);
  ReadAndRelease(other.token, 100000, 6);
  CHECK_EQ(LocalArenaUse().used, size_t{0});
  const size_t touched = LocalArenaUse().touched;
  for (int i = 0; i < 100; ++i) {
    const Block block = *AllocateBlock(200000, 1);
    Fill(block, 3, 200000);
    ReadAndRelease(block.token, 200000, 3);
  }
  CHECK(LocalArenaUse().touched <= touched + (256 << 10));
}

size_t AddressesMapped() {
  std::ifstream statm("/proc/self/statm");
  size_t pages = 0;
  statm >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

TEST(MemoryThatIsNotUsedGoesBack) {
  constexpr size_t kLarge = 64 << 20;
  const size_t before = AddressesMapped();
  const Block large = *AllocateBlock(kLarge, 1);
  Fill(large, 5, kLarge);
  TrimArenas(0);
  ReadAndRelease(large.token, kLarge, 5);  // frees no block that is in use
  CHECK(LocalArenaUse().touched >= kLarge);
  const Block small = *AllocateBlock(1000, 1);  // does not keep the large one
  Fill(small, 6, 1000);
  TrimArenas(60);  // a loop of calls finds it again
  CHECK(LocalArenaUse().touched >= kLarge);
  TrimArenas(0);
  CHECK(LocalArenaUse().touched < (1 << 20));
  CHECK(AddressesMapped() < before + (8 << 20));
  ReadAndRelease(small.token, 1000, 6);
  const Block again = *AllocateBlock(2 * kLarge, 1);  // where the large one was
  Fill(again, 7, 2 * kLarge);
  ReadAndRelease(again.token, 2 * kLarge, 7);
  TrimArenas(0);
}

// Runs in a process of its own, under a limit: existing blocks stay, and a reader of the missing one gets the reason.
int AtALimit(__rlimit_resource resource, rlim_t limit, const char* why) {
  std::signal(SIGXFSZ, SIG_IGN);  // as Python does
  const Block block = *AllocateBlock(1000, 1);
  Fill(block, 4, 1000);
  const rlimit limits{limit, limit};
  CHECK_EQ(setrlimit(resource, &limits), 0);
  const Block missing = *AllocateBlock(256 << 20, 1);
  CHECK_EQ(missing.token, uint64_t{0});
  const std::string message = ReadBlock(0, missing.token, 256 << 20).status().message();
  CHECK_CONTAINS(message, "jaxmp.DistributedError: ");
  CHECK_CONTAINS(message, "rank 0 has no memory to share 268435456 bytes with the others (");
  CHECK_CONTAINS(message, why);
  ReadAndRelease(block.token, 1000, 4);
  return check::summary("a limit");
}

TEST(MemoryThatRunsOutIsNamed) {
  const std::pair<__rlimit_resource, const char*> limits[] = {{RLIMIT_FSIZE, "File too large"},
                                                              {RLIMIT_AS, "Cannot allocate memory"}};
  for (const auto& [resource, why] : limits) {
    const rlim_t limit = resource == RLIMIT_AS ? AddressesMapped() + (64 << 20) : rlim_t{64 << 20};
    const pid_t child = fork();
    if (child == 0) _exit(AtALimit(resource, limit, why));
    int how = -1;
    CHECK_EQ(waitpid(child, &how, 0), child);
    CHECK_EQ(how, 0);
  }
}

TEST(WhatIsNotThereIsRefused) {
  const Block block = *AllocateBlock(100, 1);
  Fill(block, 1, 100);
  const uint64_t token = block.token;
  const auto why = [](int process, uint64_t token, size_t bytes) {
    return ReadBlock(process, token, bytes).status().message();
  };
  CHECK_CONTAINS(why(3, token, 100), "of rank 3, 100 bytes: the two share no memory");
  for (const uint64_t wrong : {uint64_t{0}, kPages, token + 1, token + kPages, ~uint64_t{0}}) {
    CHECK_CONTAINS(why(0, wrong, 100), "jaxmp.DistributedError: ");
  }
  CHECK_CONTAINS(why(0, token + kPages, 100), "of rank 0, 100 bytes: another block is there");
  CHECK_CONTAINS(why(0, token, 101), "of rank 0, 101 bytes: another block is there");
  CHECK_CONTAINS(why(0, token, size_t{1} << 40), "the arena ends at");
  CHECK_CONTAINS(why(0, token, ~size_t{0} - 8), "there is none");
  ReadAndRelease(token, 100, 1);
  CHECK_EQ((*AllocateBlock(~size_t{0} - 8, 1)).token, uint64_t{0});
  CHECK_EQ((*AllocateBlock(~size_t{0} / 4, 1)).token, uint64_t{0});
  CHECK_CONTAINS(ShareArena(1, "memory").message(), "describes no shared memory");
  CHECK_CONTAINS(ShareArena(1, "1 99999 5").message(), "cannot open the memory of rank 1, /proc/1/fd/99999: ");
  int pid = 0, fd = 0;
  std::sscanf(DescribeLocalArena()->c_str(), "%d %d", &pid, &fd);
  const std::string place = std::to_string(pid) + " " + std::to_string(fd);
  CHECK_CONTAINS(ShareArena(1, place + " 5").message(), "is not the memory of rank 1");
}

TEST(AnotherProcessReadsWhatThisOneWrites) {
  const std::string described = *DescribeLocalArena();
  const Block block = *AllocateBlock(6, 1);
  std::memcpy(block.data, "shared", 6);
  const pid_t child = fork();
  if (child == 0) {
    const StatusOr<const char*> found =
        ShareArena(5, described).ok() ? ReadBlock(5, block.token, 6) : Internal("not opened");
    const bool is_right = found.ok() && std::memcmp(*found, "shared", 6) == 0;
    if (is_right) ReleaseBlock(5, block.token);
    _exit(is_right ? 0 : 1);
  }
  int how = -1;
  CHECK_EQ(waitpid(child, &how, 0), child);
  CHECK_EQ(how, 0);
  CHECK_EQ(LocalArenaUse().used, size_t{0});
}

// Four devices: this process has positions 0 and 2, and the peer the others; their ranks have another order.
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
    for (int process : {0, 1}) CHECK(ShareArena(process, *DescribeLocalArena()).ok());
  }

  CollectiveArrays Arrays(const std::vector<float>& operand, std::vector<float>* result) const {
    const auto add = [](void* z, const void* x, const void* y, size_t count) {
      for (size_t i = 0; i < count; ++i) {
        static_cast<float*>(z)[i] = static_cast<const float*>(x)[i] + static_cast<const float*>(y)[i];
      }
    };
    return {reinterpret_cast<const char*>(operand.data()),
            operand.size() * 4,
            reinterpret_cast<char*>(result->data()),
            result->size() * 4,
            call->sums ? size_t{4} : size_t{1},
            add};
  }

  // The device at a position, of this process.
  std::future<std::string> Come(int64_t position, const std::vector<float>& operand, std::vector<float>* result,
                                const Origin& origin = {}) {
    auto promise = std::make_shared<std::promise<std::string>>();
    RunCollective(call, origin, position, Arrays(operand, result),
                  [promise](const Status& status) { promise->set_value(status.message()); });
    return promise->get_future();
  }

  // The peer, with both its devices.
  void PeerComes(uint64_t count, const std::vector<std::vector<float>>& operands) {
    std::vector<uint64_t> tokens;
    for (const uint64_t position : {1, 3}) {
      const std::vector<float>& operand = operands[position];
      const Block block = *AllocateBlock(operand.size() * 4, 3);
      std::memcpy(block.data, operand.data(), operand.size() * 4);
      tokens.insert(tokens.end(), {position, block.token});
    }
    peer.Come(*call->signature, count, tokens);
  }

  const std::vector<int64_t> ranks = {2, 0, 3, 1};
  std::shared_ptr<const SharedCollective> call;
  tests::Peer peer;
};

// [3, pieces, 5] numbers of the device at a position.
std::vector<float> Operand(int64_t position, size_t pieces) {
  std::vector<float> x(3 * pieces * 5);
  std::iota(x.begin(), x.end(), static_cast<float>(1000 * position));
  return x;
}

std::vector<std::vector<float>> Operands(bool sums) {
  std::vector<std::vector<float>> operands;
  for (int64_t position = 0; position < 4; ++position) operands.push_back(Operand(position, sums ? 4 : 1));
  return operands;
}

// Returns the result of the device at a position: the sum of its pieces, or the pieces of all ranks in their order.
std::vector<float> Expected(const std::vector<int64_t>& ranks, bool sums, size_t position) {
  std::vector<float> expected(sums ? 15 : 60);
  for (size_t other = 0; other < 4; ++other) {
    const std::vector<float> x = Operands(sums)[other];
    const auto rank = static_cast<size_t>(ranks[sums ? position : other]);
    for (size_t i = 0; i < 15; ++i) {
      const size_t of_rank = (i / 5 * 4 + rank) * 5 + i % 5;
      sums ? expected[i] += x[of_rank] : expected[of_rank] = x[i];
    }
  }
  return expected;
}

TEST(ResultsAreInTheOrderOfTheRanks) {
  for (const bool sums : {false, true}) {
    Job job(sums);
    const std::vector<std::vector<float>> operands = Operands(sums);
    for (uint64_t count = 1; count <= 3; ++count) {
      std::vector<float> one(sums ? 15 : 60), other(one);
      auto first = job.Come(0, operands[0], &one);
      if (count % 2) job.PeerComes(count, operands);
      auto second = job.Come(2, operands[2], &other);
      if (count % 2 == 0) job.PeerComes(count, operands);
      CHECK_EQ(first.get(), "");
      CHECK_EQ(second.get(), "");
      CHECK(one == Expected(job.ranks, sums, 0));
      CHECK(other == Expected(job.ranks, sums, 2));
    }
  }
}

// All ranks of this process: the halves wait for nothing.
TEST(TheHalvesGiveTheSame) {
  for (const bool sums : {false, true}) {
    Job job(sums);
    const size_t used = LocalArenaUse().used;
    SharedCollective call = *job.call;
    CallSignature signature = *call.signature;
    signature.members.clear();
    signature.processes = {0, 0, 0, 0};
    call.signature = *Prepare(signature);
    uint64_t tokens[4];
    std::vector<float> result(sums ? 15 : 60), none;
    const std::vector<std::vector<float>> operands = Operands(sums);
    for (size_t position = 0; position < 4; ++position) {
      tokens[call.ranks[position]] =
          *WriteOperand(call, static_cast<int64_t>(position), job.Arrays(operands[position], &none));
    }
    for (size_t position = 0; position < 4; ++position) {
      const CollectiveArrays arrays = job.Arrays(operands[position], &result);
      CHECK_EQ(ReadOperands(call, static_cast<int64_t>(position), arrays, tokens).message(), "");
      CHECK(result == Expected(call.ranks, sums, position));
    }
    CHECK_EQ(LocalArenaUse().used, used);
    CHECK_CONTAINS(WriteOperand(call, 4, job.Arrays(operands[0], &none)).status().message(), "no position 4");
    CHECK_CONTAINS(ReadOperands(call, 0, job.Arrays(operands[0], &none), tokens).message(), "on the other");
    tokens[0] = tokens[1] = 0;  // a rank without memory
    CHECK_CONTAINS(ReadOperands(call, 0, job.Arrays(operands[0], &result), tokens).message(), "jaxmp.DistributedError");
  }
}

// Rank r writes its first r + 1 rows of two numbers, and takes the last row of each rank, the highest rank's first.
TEST(RowsAreTakenAsTheTableSays) {
  SharedCollective call = *Job(/*sums=*/false).call;
  CallSignature signature = *call.signature;
  signature.members.clear();
  signature.processes = {0, 0, 0, 0};
  call.signature = *Prepare(signature), call.outer = 1, call.picks = true;
  const size_t used = LocalArenaUse().used;
  const std::vector<int32_t> written = {1, 2, 3, 4};
  const std::vector<int32_t> table = {0, 0, 1, 3, 1, 1, 1, 2, 2, 2, 1, 1, 3, 3, 1, 0, 1, 0, 0, 4};
  uint64_t tokens[4];
  const auto arrays = [&](int64_t position, std::vector<float>* operand, std::vector<float>* result) {
    operand->resize(8);
    std::iota(operand->begin(), operand->end(), static_cast<float>(100 * call.ranks[static_cast<size_t>(position)]));
    return CollectiveArrays{reinterpret_cast<const char*>(operand->data()),
                            operand->size() * 4,
                            reinterpret_cast<char*>(result->data()),
                            result->size() * 4,
                            1,
                            nullptr,
                            {written.data(), table.data(), table.size() / 4, 8}};
  };
  std::vector<float> operand, result(10, -1), none;
  for (int64_t position = 0; position < 4; ++position) {
    CollectiveArrays write = arrays(position, &operand, &none);
    write.picks.npicks = 0;
    tokens[call.ranks[static_cast<size_t>(position)]] = *WriteOperand(call, position, write);
  }
  CHECK_CONTAINS(ReadOperands(call, 0, arrays(0, &operand, &none), tokens).message(),
                 "rows are taken that no rank has");
  for (int64_t position = 0; position < 4; ++position) {
    CHECK_EQ(ReadOperands(call, position, arrays(position, &operand, &result), tokens).message(), "");
    CHECK(result == (std::vector<float>{306, 307, 204, 205, 102, 103, 0, 1, -1, -1}));
  }
  CHECK_EQ(LocalArenaUse().used, used);
}

TEST(AProcessComesWithItsLastDevice) {
  Job job(/*sums=*/false);
  const std::vector<std::vector<float>> operands = Operands(/*sums=*/false);
  std::vector<float> one(60), other(60);
  job.PeerComes(1, operands);
  auto first = job.Come(0, operands[0], &one);
  CHECK(first.wait_for(std::chrono::milliseconds(300)) == std::future_status::timeout);
  CHECK(!job.peer.HasHeard());
  auto second = job.Come(2, operands[2], &other);
  CHECK_EQ(first.get(), "");
  CHECK_EQ(second.get(), "");
}

TEST(AFaultIsAnError) {
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
    job.peer.Close();
    CHECK_CONTAINS(first.get(), "rank 1 has ended without a word");
    CHECK_CONTAINS(second.get(), "rank 1 has ended without a word");
  }
  {
    Job job(/*sums=*/false);
    const int one = 1, other = 2;
    auto first = job.Come(0, x, &result, {&one, 7});
    CHECK_CONTAINS(job.Come(0, x, &result, {&other, 7}).get(), "two instructions of the compiled program");
    job.peer.Close();
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
