// Garbage for the custom calls: attributes of wrong names, types, sizes and values, buffers of wrong number, dtype
// and shape. Whatever comes, the answer is an error, or a product that the sanitizers have nothing to say about; never
// a crash, a hang or a promise that nobody keeps.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/barrier/messages.h"
#include "csrc/ffi/host_matmul.h"
#include "csrc/ffi/process_calls.h"
#include "csrc/hostmp/gemm/cblas.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_xla.h"
#include "tests/cpp/problems.h"

namespace jaxmp {
namespace {

using fake_xla::Buffer;

// Products stay small enough to run, and every kind of integer comes by that arithmetic on extents could stumble over.
constexpr int64_t kIntegers[] = {0,
                                 1,
                                 2,
                                 3,
                                 4,
                                 8,
                                 12,
                                 -1,
                                 -7,
                                 int64_t{1} << 31,
                                 int64_t{1} << 40,
                                 (int64_t{1} << 62) + 3,
                                 std::numeric_limits<int64_t>::max(),
                                 std::numeric_limits<int64_t>::min()};
constexpr const char* kWords[] = {
    "local", "all_gather", "reduce_scatter", "all_reduce", "grid", "N",  "T",    "C",   "f32", "f64",        "bf16",
    "f16",   "c64",        "c128",           "u8",         "",     "no", "none", "32F", "64F", "run_to_run", "\n=\0x",
    "none",  "none"};

class Fuzzer {
 public:
  explicit Fuzzer(uint32_t seed) : random_(seed) {}

  size_t Below(size_t bound) { return random_() % bound; }
  int64_t Integer() { return kIntegers[Below(std::size(kIntegers))]; }
  std::string Word() { return kWords[Below(std::size(kWords))]; }

  Attribute AnyAttribute() {
    switch (Below(4)) {
      case 0:
        return Integer();
      case 1:
        return Word();
      case 2:
        return Many<int64_t>([this] { return Integer(); });
      default:
        return Many<double>([this] { return Number(); });
    }
  }

  double Number() {
    const double numbers[] = {
        0.0, -0.0, 1.0, -2.5, 1e300, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()};
    return numbers[Below(std::size(numbers))];
  }

  template <typename T, typename Make>
  std::vector<T> Many(const Make& make) {
    std::vector<T> values;
    for (size_t left = Below(5); left > 0; --left) values.push_back(make());
    return values;
  }

  // A good call with a few things wrong: of the right type most of the time, so that it gets past the decoder.
  Attributes Damaged(Attributes attributes) {
    for (size_t left = Below(4); left > 0; --left) {
      auto at = attributes.begin();
      std::advance(at, static_cast<int64_t>(Below(attributes.size())));
      switch (Below(8)) {
        case 0:
          attributes.erase(at);
          break;
        case 1:
          at->second = AnyAttribute();
          break;
        case 2:
          attributes[Word() + "?"] = AnyAttribute();
          break;
        default:
          std::visit([this](auto& value) { Damage(value); }, at->second);
      }
    }
    return attributes;
  }

  std::vector<Buffer> Buffers(size_t count) {
    std::vector<Buffer> buffers;
    for (size_t i = 0; i < count; ++i) {
      const XLA_FFI_DataType dtypes[] = {XLA_FFI_DataType_F32,  XLA_FFI_DataType_F64, XLA_FFI_DataType_S32,
                                         XLA_FFI_DataType_BF16, XLA_FFI_DataType_C64, XLA_FFI_DataType_U8,
                                         XLA_FFI_DataType_PRED, XLA_FFI_DataType_S64};
      // What a buffer claims is there: 4096 elements of at most 16 bytes.
      memory_.push_back(std::make_unique<std::vector<double>>(2 * 4096, 1.0));
      const std::vector<std::vector<int64_t>> shapes = {{}, {0}, {16}, {4, 8}, {8, 8}, {2, 3, 4}, {64, 64}, {24}};
      buffers.push_back({dtypes[Below(4) ? 0 : Below(std::size(dtypes))], shapes[Below(shapes.size())],
                         Below(12) ? memory_.back()->data() : nullptr});
      if (Below(6) == 0) Put(*memory_.back(), static_cast<int32_t>(Integer()));
    }
    return buffers;
  }

 private:
  static void Put(std::vector<double>& memory, int32_t value) { std::memcpy(memory.data(), &value, sizeof(value)); }
  void Damage(int64_t& value) { value = Integer(); }
  void Damage(std::string& value) { value = Word(); }
  void Damage(std::vector<int64_t>& value) {
    value = Many<int64_t>([this] { return Integer(); });
  }
  void Damage(std::vector<double>& value) {
    value = Many<double>([this] { return Number(); });
  }

  std::mt19937 random_;
  std::vector<std::unique_ptr<std::vector<double>>> memory_;
};

// Limits one fuzz in time, so that a sanitizer that slows things down shortens it.
class Budget {
 public:
  explicit Budget(double seconds)
      : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}
  bool is_left() const { return Clock::now() < end_; }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end_;
};

Attributes AnyCall(Fuzzer& fuzzer) {
  switch (fuzzer.Below(5)) {
    case 0:
      return tests::AllGather(2, 8, 8, 4);
    case 1:
      return tests::ReduceScatter(2, 8, 8, 4);
    case 2:
      return tests::AllReduce(4, 8, 4, 8);
    case 3:
      return tests::Grid(2, 2, 8, 8, 8);
    default:
      return tests::Local(8, 8, 4);
  }
}

void AttributesOfAnyKindAreAnsweredWithAnError() {
  int refused = 0, accepted = 0;
  const Budget budget(10);
  for (uint32_t seed = 0; seed < 4000 && budget.is_left(); ++seed) {
    Fuzzer fuzzer(seed);
    const fake_xla::Instance instance = fake_xla::Instantiate(fuzzer.Damaged(AnyCall(fuzzer)));
    CHECK(instance.error.empty() == (instance.site != nullptr));
    ++(instance.site ? accepted : refused);
  }
  CHECK(refused > 100);
  CHECK(accepted > 100);
}

// Arrivals may wait for ranks that never come; the site's end frees them.
void BuffersOfAnyKindAreAnsweredWithAnError() {
  const Budget budget(10);
  int failed = 0;
  for (uint32_t seed = 0; seed < 4000 && budget.is_left(); ++seed) {
    Fuzzer fuzzer(seed + 100000);
    fake_xla::Instance instance = fake_xla::Instantiate(AnyCall(fuzzer));
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

// Of a custom call in which processes meet: `site` stands for a well-made one.
template <typename SiteType>
void FuzzProcessCall(XLA_FFI_Error* (*instantiate)(XLA_FFI_CallFrame*), XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*),
                     const Attributes& good, SiteType* site) {
  SiteType::id.type_id = 2;  // what the registration would have written
  int accepted = 0;
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    Fuzzer fuzzer(seed + 200000);
    fake_xla::Context context;
    fake_xla::Frame made(XLA_FFI_ExecutionStage_INSTANTIATE, &context);
    made.SetAttributes(fuzzer.Damaged(good));
    const std::string error = fake_xla::Take(instantiate(made.get()));
    const std::unique_ptr<SiteType> found(static_cast<SiteType*>(context.state));
    CHECK(error.empty() == (found != nullptr));
    accepted += found != nullptr;
  }
  CHECK(accepted > 100);
  // No other process is connected here, so the best outcome is that too.
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    Fuzzer fuzzer(seed + 300000);
    fake_xla::Context context;
    context.state = site;
    fake_xla::Frame frame(XLA_FFI_ExecutionStage_EXECUTE, &context);
    // Data of a real call are there; their dtypes and extents are not to be trusted, nor their number.
    std::vector<Buffer> args = fuzzer.Buffers(fuzzer.Below(4)), rets = fuzzer.Buffers(fuzzer.Below(3));
    for (std::vector<Buffer>* buffers : {&args, &rets}) {
      for (Buffer& buffer : *buffers) {
        if (!buffer.data) buffer.shape = {0};
      }
    }
    frame.SetBuffers(args, rets);
    std::string error = fake_xla::Take(execute(frame.get()));
    const std::unique_ptr<XLA_FFI_Future> future(frame.get()->future);
    if (future) error = future->Wait();
    CHECK(!error.empty());
  }
}

void CallsOfProcessesOfAnyKindAreAnsweredWithAnError() {
  Attributes good = {{"program", std::string("jit_step")},
                     {"index", int64_t{0}},
                     {"repeat", int64_t{0}},
                     {"call", std::string("matmul at train.py:41")},
                     {"fields", std::string("m=1\nn=2")},
                     {"devices", std::vector<int64_t>{0, 1}},
                     {"processes", std::vector<int64_t>{0, 1}},
                     {"groups", std::vector<int64_t>{0, 0}},
                     {"is_sequential", int64_t{1}}};
  CallSignature signature;
  signature.devices = {0, 1};
  signature.processes = {0, 1};
  signature.groups = {0, 0};
  ProcessBarrierSite barrier(*Prepare(signature));
  FuzzProcessCall(ProcessBarrierInstantiate, ProcessBarrierExecute, good, &barrier);
  good["ranks"] = std::vector<int64_t>{1, 0};
  good["outer"] = int64_t{2};
  for (const int64_t sums : {0, 1}) {
    good["sums"] = sums;
    signature.has_tokens = true;
    SharedCollective call{*Prepare(signature), {1, 0}, 2, sums != 0};
    ProcessCollectiveSite collective(std::make_shared<const SharedCollective>(call));
    FuzzProcessCall(ProcessCollectiveInstantiate, ProcessCollectiveExecute, good, &collective);
  }
}

void BytesOfAnyKindAreMessagesOrRefused() {
  const barrier::Message good = {barrier::Kind::kArrival, 1, 2, 3, 4, {6, 7}, "matmul at train.py:41\nm=1"};
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
  CHECK(bytes.empty());
}

}  // namespace
}  // namespace jaxmp

int main() {
  CHECK_EQ(jaxmp::hostmp::LoadBlas(jaxmp::check::environment("JAXMP_BLAS")).message(), "");
  jaxmp::AttributesOfAnyKindAreAnsweredWithAnError();
  jaxmp::BuffersOfAnyKindAreAnsweredWithAnError();
  jaxmp::CallsOfProcessesOfAnyKindAreAnsweredWithAnError();
  jaxmp::BytesOfAnyKindAreMessagesOrRefused();
  return jaxmp::check::summary("handler_fuzz");
}
