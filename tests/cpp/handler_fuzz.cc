// Garbage for the custom calls: buffers of wrong number, dtype and shape, and messages of any bytes. The answer is
// always an error, or a product without a report from the sanitizers; never a crash, a hang or a broken promise.
// (attribute_fuzz has wrong attributes.)
#include <iterator>
#include <random>

#include "csrc/barrier/messages.h"
#include "csrc/ffi/host_matmul.h"
#include "csrc/ffi/process_calls.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_xla.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

using fake_xla::Buffer;

constexpr int32_t kPositions[] = {-7, -1, 0, 1, 2, 3, 4, 12, INT32_MAX, INT32_MIN};

class Fuzzer {
 public:
  explicit Fuzzer(uint32_t seed) : random_(seed) {}

  size_t Below(size_t bound) { return random_() % bound; }

  std::vector<Buffer> Buffers(size_t count) {
    std::vector<Buffer> buffers;
    for (size_t i = 0; i < count; ++i) {
      const XLA_FFI_DataType dtypes[] = {XLA_FFI_DataType_F32,  XLA_FFI_DataType_F64, XLA_FFI_DataType_S32,
                                         XLA_FFI_DataType_BF16, XLA_FFI_DataType_C64, XLA_FFI_DataType_U8,
                                         XLA_FFI_DataType_PRED, XLA_FFI_DataType_S64};
      // The claimed size exists: 4096 elements of at most 16 bytes.
      memory_.push_back(std::make_unique<std::vector<double>>(2 * 4096, 1.0));
      const std::vector<std::vector<int64_t>> shapes = {{}, {0}, {16}, {4, 8}, {8, 8}, {2, 3, 4}, {64, 64}, {24}};
      buffers.push_back({dtypes[Below(4) ? 0 : Below(std::size(dtypes))], shapes[Below(shapes.size())],
                         Below(12) ? memory_.back()->data() : nullptr});
      if (Below(6) == 0) Put(*memory_.back(), kPositions[Below(std::size(kPositions))]);
    }
    return buffers;
  }

 private:
  static void Put(std::vector<double>& memory, int32_t value) { std::memcpy(memory.data(), &value, sizeof(value)); }

  std::mt19937 random_;
  std::vector<std::unique_ptr<std::vector<double>>> memory_;
};

// Arrivals may wait for ranks that never come; the site's end frees them.
TEST(BuffersOfAnyKindAreAnsweredWithAnError) {
  const Attributes calls[] = {tests::AllGather(2, 8, 8, 4), tests::ReduceScatter(2, 8, 8, 4),
                              tests::AllReduce(4, 8, 4, 8), tests::Grid(2, 2, 8, 8, 8), tests::Local(8, 8, 4)};
  int failed = 0;
  for (uint32_t seed = 0; seed < (check::kIsSlow ? 500 : 4000); ++seed) {
    Fuzzer fuzzer(seed + 100000);
    fake_xla::Instance instance = fake_xla::Instantiate(calls[fuzzer.Below(std::size(calls))]);
    CHECK_EQ(instance.error, "");
    std::vector<std::unique_ptr<fake_xla::Execution>> executions;
    for (size_t left = 1 + fuzzer.Below(3); left > 0; --left) {
      executions.push_back(std::make_unique<fake_xla::Execution>(
          *instance.site, int64_t(seed), fuzzer.Buffers(fuzzer.Below(5)), fuzzer.Buffers(fuzzer.Below(3))));
    }
    instance.site.reset();
    for (const auto& execution : executions) failed += !execution->Wait().empty();
  }
  CHECK(failed > 100);
}

// For a custom call that joins several processes.
template <typename SiteType>
void FuzzProcessCall(XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*), SiteType site) {
  SiteType::id.type_id = 2;  // what the registration would have written
  // No other process is connected here, so the best outcome is that too.
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    Fuzzer fuzzer(seed + 300000);
    // Data of a real call are there; their dtypes and extents are not to be trusted, nor their number.
    std::vector<Buffer> args = fuzzer.Buffers(fuzzer.Below(6)), rets = fuzzer.Buffers(fuzzer.Below(3));
    for (std::vector<Buffer>* buffers : {&args, &rets}) {
      for (Buffer& buffer : *buffers) {
        if (!buffer.data) buffer.shape = {0};
      }
    }
    CHECK(!fake_xla::Execute(execute, &site, args, rets).empty());
  }
}

TEST(CallsOfProcessesOfAnyKindAreAnsweredWithAnError) {
  CallSignature signature;
  signature.devices = {0, 1};
  signature.processes = {0, 1};
  signature.groups = {0, 0};
  FuzzProcessCall(ProcessBarrierExecute, ProcessBarrierSite(*Prepare(signature)));
  signature.has_tokens = true;
  for (const auto& [sums, picks] : {std::pair(false, false), std::pair(true, false), std::pair(false, true)}) {
    SharedCollective call{*Prepare(signature), {1, 0}, picks ? size_t{1} : size_t{2}, sums, picks};
    for (const auto part : {CollectivePart::kAll, CollectivePart::kWrite, CollectivePart::kRead}) {
      FuzzProcessCall(ProcessCollectiveExecute,
                      ProcessCollectiveSite(std::make_shared<const SharedCollective>(call), part));
    }
  }
}

TEST(BytesOfAnyKindAreMessagesOrRefused) {
  const std::vector<uint64_t> tokens = {6, 7}, members = {0, 1, 2}, ranks = {8, 9};
  const barrier::Message good = {barrier::Kind::kArrival,      1,       2,    3, 4, 5, tokens,
                                 "matmul at train.py:41\nm=1", members, ranks};
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    Fuzzer fuzzer(seed + 400000);
    std::string bytes = barrier::Encode(good) + barrier::Encode(good);
    for (size_t left = fuzzer.Below(6); left > 0; --left) bytes[fuzzer.Below(bytes.size())] = char(fuzzer.Below(256));
    bytes.resize(fuzzer.Below(bytes.size() + 1));
    barrier::Message message;
    int messages = 0;
    while (barrier::Decode(&bytes, &message) == barrier::Decoded::kMessage) ++messages;
    CHECK(messages <= 3);
  }
  std::string bytes = barrier::Encode(good);
  barrier::Message message;
  CHECK(barrier::Decode(&bytes, &message) == barrier::Decoded::kMessage);
  CHECK_EQ(message.text, good.text);
  CHECK_EQ(message.digest, good.digest);
  CHECK(message.tokens == good.tokens);
  CHECK(message.members == good.members);
  CHECK(message.ranks == good.ranks);
  CHECK(bytes.empty());
}

}  // namespace
}  // namespace jaxmp
