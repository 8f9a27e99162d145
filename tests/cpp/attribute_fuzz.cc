// Programs are input: an exported one can be changed before it runs. So each attribute of each kind of call is set to
// every value that arithmetic could stumble over, left out, given twice or with another type, and then several of them
// at random; what is not refused is executed, with buffers of exactly the sizes that the call had before. The answer is
// an error or a result, never a crash, memory that is not ours, or a wait without end.
//
// JAXMP_FUZZ says how many attribute sets are drawn, JAXMP_FUZZ_SEED from which seed on (a failure names its own).
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "csrc/barrier/barrier.h"
#include "csrc/ffi/host_matmul.h"
#include "csrc/ffi/process_calls.h"
#include "csrc/plan/distribution.h"
#include "csrc/plan/enums.h"
#include "csrc/plan/plan.h"
#include "tests/cpp/check.h"
#include "tests/cpp/fake_xla.h"
#include "tests/cpp/problems.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace jaxmp {
namespace {

TEST(LoadsTheBlas) { check::load_blas(); }

using fake_xla::AnyAttribute;
using fake_xla::AnyAttributes;
using fake_xla::Buffer;
using Random = std::mt19937;

size_t Below(Random& random, size_t bound) { return random() % bound; }

// ---- what is being tried, for whoever reads the log of a crash

char trial[160];

void NameTrial() {
  (void)!write(2, "attribute_fuzz died at ", 23);
  (void)!write(2, trial, std::find(trial, trial + sizeof(trial) - 1, '\0') - trial);
  (void)!write(2, "\n", 1);
}

void OnSignal(int number) {
  NameTrial();
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void NameTrialsThatDie() {
  if (__sanitizer_set_death_callback) return __sanitizer_set_death_callback(NameTrial);
  for (int number : {SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL}) std::signal(number, OnSignal);
}

// ---- calls of every kind

struct Kind {
  const char* name;
  Attributes attributes;
};

Attributes With(Attributes attributes, const Attributes& changes) {
  for (const auto& [name, value] : changes) attributes[name] = value;
  return attributes;
}

Attributes Typed(Attributes attributes, const std::string& in, const std::string& out, const std::string& compute) {
  return With(std::move(attributes), {{"dtype_a", in}, {"dtype_b", in}, {"dtype_d", out}, {"compute", compute}});
}

const std::vector<Kind>& Kinds() {
  using tests::Cyclic;
  const std::string t = "T", u8 = "u8", f32 = "f32";
  const auto narrow = [&](const std::string& type, const std::string& mode, Attributes of) {
    return With(Typed(std::move(of), type, "bf16", "32F"),
                {{"trans_a", t}, {"scale_mode_a", mode}, {"scale_mode_b", mode}});
  };
  static const std::vector<Kind> kinds = {
      {"local", tests::Local(8, 8, 4)},
      {"all-gather", tests::AllGather(2, 8, 8, 4)},
      {"reduce-scatter", tests::ReduceScatter(2, 8, 8, 4)},
      {"all-reduce", tests::AllReduce(4, 8, 4, 8)},
      {"grid", tests::Grid(2, 2, 8, 8, 8)},
      {"grid 1x2 T", With(tests::Grid(1, 2, 6, 8, 8), {{"trans_a", t}})},
      {"cyclic", Cyclic(2, 2, 7, 9, 10)},
      {"cyclic TN", Cyclic(2, 2, 7, 9, 10, false, true)},
      {"cyclic NT", Cyclic(1, 2, 7, 9, 10, true, false)},
      {"cyclic TT", Cyclic(2, 1, 7, 9, 10, false, false)},
      {"cyclic 1x4", Cyclic(1, 4, 8, 12, 16)},
      {"cyclic 4x1", Cyclic(4, 1, 8, 12, 16)},
      {"cyclic 2x4 NT", Cyclic(2, 4, 8, 12, 16, true, false)},
      {"ordered", With(tests::ReduceScatter(2, 8, 8, 4), {{"determinism", std::string("topology")}})},
      {"f64", Typed(tests::AllGather(2, 8, 8, 4), "f64", "f64", "64F")},
      {"bf16 with C", With(Typed(tests::AllGather(2, 8, 8, 4), "bf16", "bf16", "32F"),
                           {{"dtype_c", std::string("bf16")}, {"beta", std::vector<double>{0.5, 0}}})},
      {"c64", Typed(tests::Grid(2, 2, 8, 8, 8), "c64", "c64", "32F")},
      {"relu", With(tests::AllGather(2, 8, 8, 4), {{"epilog", int64_t{134}}, {"dtype_bias", f32}, {"dtype_aux", u8}})},
      {"relu on a grid",
       With(tests::Grid(1, 2, 6, 8, 8), {{"epilog", int64_t{130}}, {"dtype_aux", u8}, {"trans_a", t}})},
      {"drelu", With(tests::Local(8, 8, 4), {{"epilog", int64_t{152}}, {"dtype_bias", f32}, {"dtype_aux", u8}})},
      {"gelu", With(tests::ReduceScatter(2, 8, 8, 4), {{"epilog", int64_t{160}}, {"dtype_aux", f32}})},
      {"bgrada", With(tests::AllGather(2, 8, 8, 4), {{"epilog", int64_t{256}}, {"dtype_bias", f32}})},
      {"bgradb", With(tests::Local(8, 8, 4), {{"epilog", int64_t{512}}, {"dtype_bias", f32}, {"trans_b", t}})},
      {"s4 beside f32", With(tests::AllGather(2, 6, 10, 5), {{"dtype_a", std::string("s4")}})},
      {"s8", With(Typed(tests::Local(16, 16, 16), "s8", "s32", "32I"), {{"trans_a", t}})},
      {"fp8", narrow("f8e4m3", "scalar_fp32", tests::AllGather(2, 32, 32, 16))},
      {"mxfp8", narrow("f8e4m3", "vec32_ue8m0", tests::Local(128, 128, 128))},
      {"fp4", narrow("f4e2m1", "vec16_ue4m3", tests::Local(128, 128, 64))},
  };
  return kinds;
}

// ---- mutations

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
std::vector<int64_t> Integers() {
  std::vector<int64_t> integers = {0, -1, 1, 2, 3, 4, 12, 16, 130, INT_MAX, kMax - 1, kMax, INT64_MIN};
  integers.insert(integers.end(), {(int64_t{1} << 32) + 4, (int64_t{1} << 40) + 1});
  for (int bit : {31, 32, 40, 61, 62}) integers.push_back(int64_t{1} << bit);
  return integers;
}
const std::vector<int64_t> kIntegers = Integers();

const std::vector<double> kNumbers = {0.0, -0.0, 1.0, 0.5, 1e300, -1e300, 3e9, NAN, INFINITY};
std::vector<std::string> Words() {
  std::istringstream text(
      "local all_gather reduce_scatter all_reduce grid N T C none f32 f64 bf16 f16 c64 c128 u8 f8e4m3 f8e5m2 f4e2m1 s8 "
      "s4 f8e8m0 s32 32F 64F 32I scalar_fp32 vec16_ue4m3 vec32_ue8m0 outer_vec_fp32 vec128_fp32 blk128x128_fp32 "
      "run_to_run batch topology default split_p2p fused 32F_FAST_TF32");
  std::vector<std::string> words = {"", std::string("local\0x", 7)};
  for (std::string word; text >> word;) words.push_back(word);
  return words;
}
const std::vector<std::string> kWords = Words();

// How many values stand at a place of an attribute, and what stands there in the i-th variant.
size_t VariantsOf(const AnyAttribute& attribute) {
  if (std::holds_alternative<std::string>(attribute)) return kWords.size();
  if (const auto* many = std::get_if<std::vector<int64_t>>(&attribute)) {
    return (many->size() + 1) * kIntegers.size() + 4;
  }
  if (const auto* many = std::get_if<std::vector<double>>(&attribute)) return (many->size() + 1) * kNumbers.size() + 4;
  return kIntegers.size();
}

template <typename T>
void ChangeMany(const std::vector<T>& values, size_t variant, std::vector<T>* many) {
  const size_t place = variant / values.size();
  const T value = values[variant % values.size()];
  if (place < many->size()) {
    (*many)[place] = value;
  } else if (place == many->size()) {
    std::fill(many->begin(), many->end(), value);
  } else if (variant % 4 == 0) {
    many->clear();
  } else if (variant % 4 == 1) {
    many->push_back(value);
  } else if (variant % 4 == 2 && !many->empty()) {
    many->pop_back();
  } else {
    many->assign(1000, value);
  }
}

void Change(size_t variant, AnyAttribute* attribute) {
  if (auto* word = std::get_if<std::string>(attribute)) {
    *word = kWords[variant];
  } else if (auto* integers = std::get_if<std::vector<int64_t>>(attribute)) {
    ChangeMany(kIntegers, variant, integers);
  } else if (auto* numbers = std::get_if<std::vector<double>>(attribute)) {
    ChangeMany(kNumbers, variant, numbers);
  } else {
    *attribute = kIntegers[variant];
  }
}

const AnyAttribute kTypes[] = {int64_t{1},
                               std::string("x"),
                               std::vector<int64_t>{},
                               std::vector<int64_t>{1, 2, 3, 4},
                               std::vector<double>{},
                               std::vector<double>{1, 0},
                               int32_t{1},
                               1.0f,
                               1.0,
                               true};

// Every mutation of one attribute, by number: values first, then other types, none and two.
size_t MutationsOf(const AnyAttribute& attribute) { return VariantsOf(attribute) + std::size(kTypes) + 3; }

void Mutate(size_t index, size_t mutation, AnyAttributes* attributes) {
  AnyAttribute& attribute = (*attributes)[index].second;
  const size_t values = VariantsOf(attribute);
  if (mutation < values) return Change(mutation, &attribute);
  mutation -= values;
  if (mutation < std::size(kTypes)) {
    attribute = kTypes[mutation];
    return;
  }
  const std::pair<std::string, AnyAttribute> copy = (*attributes)[index];
  switch (mutation - std::size(kTypes)) {
    case 0:
      attributes->erase(attributes->begin() + static_cast<int64_t>(index));
      return;
    case 1:
      attributes->push_back(copy);
      return;
    default:
      attributes->emplace_back(copy.first, AnyAttribute(int64_t{1} << 62));
  }
}

// One to three of them at random.
void MutateSome(Random& random, AnyAttributes* attributes) {
  for (size_t left = 1 + Below(random, 3); left > 0; --left) {
    const size_t index = Below(random, attributes->size());
    Mutate(index, Below(random, MutationsOf((*attributes)[index].second)), attributes);
  }
}

// One number for the blocks of all matrices along their rows (1), their columns (2) or both (3): blocks have to fit
// each other, so that one alone would be refused for that.
void MutateBlocks(size_t along, int64_t block, AnyAttributes* attributes) {
  for (auto& [name, value] : *attributes) {
    auto* const layout = std::get_if<std::vector<int64_t>>(&value);
    if (name.rfind("layout_", 0) != 0 || !layout || layout->size() < 2) continue;
    if (along & 1) (*layout)[0] = block;
    if (along & 2) (*layout)[1] = block;
  }
}

// And the same of one of m, n and k in all of them.
void MutateBlocksOf(char letter, int64_t block, AnyAttributes* attributes) {
  std::map<std::string, AnyAttribute*> by_name;
  for (auto& [name, value] : *attributes) by_name[name] = &value;
  const auto set = [&](const char* layout, size_t place) {
    auto* const at = std::get_if<std::vector<int64_t>>(by_name[layout]);
    if (at && place < at->size()) (*at)[place] = block;
  };
  const auto is_plain = [&](const char* op) { return *by_name[op] == AnyAttribute(std::string("N")); };
  const size_t row_a = is_plain("trans_a") ? 0 : 1, row_b = is_plain("trans_b") ? 0 : 1;
  if (letter == 'm') set("layout_a", row_a), set("layout_d", 0);
  if (letter == 'n') set("layout_b", 1 - row_b), set("layout_d", 1);
  if (letter == 'k') set("layout_a", 1 - row_a), set("layout_b", row_b);
}

AnyAttributes All(const Attributes& attributes) {
  AnyAttributes all;
  for (const auto& [name, value] : attributes) {
    std::visit([&all, &name = name](const auto& typed) { all.emplace_back(name, typed); }, value);
  }
  return all;
}

// ---- execution, with the buffers of the call as it was

const std::map<DType, XLA_FFI_DataType> kFfiTypes = {{DType::kF64, XLA_FFI_DataType_F64},
                                                     {DType::kBF16, XLA_FFI_DataType_BF16},
                                                     {DType::kF16, XLA_FFI_DataType_F16},
                                                     {DType::kC64, XLA_FFI_DataType_C64},
                                                     {DType::kC128, XLA_FFI_DataType_C128},
                                                     {DType::kU8, XLA_FFI_DataType_U8},
                                                     {DType::kE2M1, XLA_FFI_DataType_U8},
                                                     {DType::kE4M3, XLA_FFI_DataType_F8E4M3FN},
                                                     {DType::kE5M2, XLA_FFI_DataType_F8E5M2},
                                                     {DType::kS8, XLA_FFI_DataType_S8},
                                                     {DType::kS32, XLA_FFI_DataType_S32},
                                                     {DType::kS4, XLA_FFI_DataType_S4},
                                                     {DType::kU4, XLA_FFI_DataType_U4},
                                                     {DType::kE3M4, XLA_FFI_DataType_F8E3M4},
                                                     {DType::kE4M3Ieee, XLA_FFI_DataType_F8E4M3},
                                                     {DType::kE4M3B11Fnuz, XLA_FFI_DataType_F8E4M3B11FNUZ},
                                                     {DType::kE4M3Fnuz, XLA_FFI_DataType_F8E4M3FNUZ},
                                                     {DType::kE5M2Fnuz, XLA_FFI_DataType_F8E5M2FNUZ},
                                                     {DType::kE8M0, XLA_FFI_DataType_F8E8M0FNU},
                                                     {DType::kF32, XLA_FFI_DataType_F32}};

// The buffers of one device, each in memory of its own, which ends where the buffer does.
class Operands {
 public:
  Operands(const Problem& p, const Distribution& layout, int32_t position) {
    Add(&args, p.dtype_a, layout.a.local_size());
    Add(&args, p.dtype_b, layout.b.local_size());
    if (p.has_c()) Add(&args, p.dtype_c, layout.d.local_size());
    if (p.has_bias()) Add(&args, p.dtype_bias, layout.bias_size);
    if (p.reads_aux()) Add(&args, p.dtype_aux, layout.aux.local_size);
    const auto scale = [&](ScaleMode mode, int64_t size) {
      if (mode == ScaleMode::kNone) return;
      const bool is_byte = mode == ScaleMode::kVec16 || mode == ScaleMode::kVec32;
      Add(&args, is_byte ? DType::kU8 : DType::kF32, size);
    };
    scale(p.scale_mode_a, layout.scales.a);
    scale(p.scale_mode_b, layout.scales.b);
    if (p.nranks() > 1) {
      Add(&args, DType::kS32, 1);
      std::memcpy(args.back().data, &position, sizeof(position));
    }
    Add(&rets, p.dtype_d, layout.d.local_size());
    if (p.has_aux() && !p.reads_aux()) Add(&rets, p.dtype_aux, layout.aux.local_size);
    if (p.has_gradient()) Add(&rets, p.dtype_bias, layout.bias_size);
  }

  std::vector<Buffer> args, rets;

 private:
  void Add(std::vector<Buffer>* to, DType dtype, int64_t size) {
    const int64_t elements = dtype == DType::kE2M1 ? size / 2 : size;
    memory_.emplace_back(new char[static_cast<size_t>(BytesOf(dtype, size))]());
    to->push_back({kFfiTypes.at(dtype), {elements}, memory_.back().get()});
  }

  std::vector<std::unique_ptr<char[]>> memory_;
};

class Call {
 public:
  explicit Call(const Kind& kind) : all(All(kind.attributes)) {
    const Problem problem = *MakeProblem(kind.attributes);
    const Distribution layout = *MakeDistribution(problem);
    for (int32_t position = 0; position < problem.nranks(); ++position) {
      operands_.push_back(std::make_unique<Operands>(problem, layout, position));
    }
  }

  // Whether the site was made; then every device has executed it, or heard of an error.
  bool Try(const AnyAttributes& attributes) {
    fake_xla::Instance instance = fake_xla::Instantiate(attributes);
    CHECK(instance.error.empty() == (instance.site != nullptr));
    if (!instance.site) return false;
    std::vector<std::unique_ptr<fake_xla::Execution>> executions;
    for (const auto& of : operands_) {
      executions.push_back(std::make_unique<fake_xla::Execution>(*instance.site, ++run_ / 64, of->args, of->rets));
    }
    instance.site.reset();  // ranks that wait for ranks which do not exist
    for (const auto& execution : executions) {
      const std::string error = execution->Wait();
      ++(error.empty() ? succeeded : failed);
    }
    return true;
  }

  const AnyAttributes all;
  int succeeded = 0, failed = 0;

 private:
  std::vector<std::unique_ptr<Operands>> operands_;
  int64_t run_ = 0;
};

template <typename T>
constexpr bool kIsOurs = std::is_same_v<T, int64_t> || std::is_same_v<T, std::string> ||
                         std::is_same_v<T, std::vector<int64_t>> || std::is_same_v<T, std::vector<double>>;

// What the platform of the real library makes of it ahead of any device.
void TryLayout(const AnyAttributes& all) {
  Attributes attributes;
  for (const auto& [name, value] : all) {
    std::visit(
        [&attributes, &name = name](const auto& typed) {
          if constexpr (kIsOurs<std::decay_t<decltype(typed)>>) attributes[name] = typed;
        },
        value);
  }
  const StatusOr<Problem> problem = MakeProblem(attributes);
  if (problem.ok()) (void)MakeDistribution(*problem).ok();
}

struct Tally {
  int64_t sets = 0, accepted = 0, succeeded = 0, failed = 0;
};

std::vector<std::unique_ptr<Call>> MakeCalls() {
  std::vector<std::unique_ptr<Call>> calls;
  for (const Kind& kind : Kinds()) {
    calls.push_back(std::make_unique<Call>(kind));
    CHECK(calls.back()->Try(calls.back()->all));
    check::report(calls.back()->failed == 0, __FILE__, __LINE__, std::string(kind.name) + " fails as it is");
  }
  return calls;
}

void EveryAttributeWithEveryMutation(std::vector<std::unique_ptr<Call>>& calls, Tally* tally) {
  for (size_t kind = 0; kind < calls.size(); ++kind) {
    const AnyAttributes& all = calls[kind]->all;
    for (size_t index = 0; index < all.size(); ++index) {
      for (size_t mutation = 0; mutation < MutationsOf(all[index].second); ++mutation) {
        std::snprintf(trial, sizeof(trial), "%s, %s, mutation %zu", Kinds()[kind].name, all[index].first.c_str(),
                      mutation);
        AnyAttributes attributes = all;
        Mutate(index, mutation, &attributes);
        TryLayout(attributes);
        tally->accepted += calls[kind]->Try(attributes);
        ++tally->sets;
      }
    }
  }
}

void EveryBlockOfAllMatrices(std::vector<std::unique_ptr<Call>>& calls, Tally* tally) {
  for (size_t kind = 0; kind < calls.size(); ++kind) {
    if (std::string(Kinds()[kind].name).rfind("cyclic", 0) != 0) continue;
    for (int64_t block : kIntegers) {
      for (size_t change = 1; change <= 6; ++change) {
        std::snprintf(trial, sizeof(trial), "%s, change %zu of blocks to %lld", Kinds()[kind].name, change,
                      static_cast<long long>(block));
        AnyAttributes attributes = calls[kind]->all;
        change <= 3 ? MutateBlocks(change, block, &attributes) : MutateBlocksOf("mnk"[change - 4], block, &attributes);
        tally->accepted += calls[kind]->Try(attributes);
        ++tally->sets;
      }
    }
  }
}

void SomeAttributesAtRandom(std::vector<std::unique_ptr<Call>>& calls, int64_t count, uint32_t seed, Tally* tally) {
  for (int64_t i = 0; i < count; ++i, ++seed) {
    std::snprintf(trial, sizeof(trial), "JAXMP_FUZZ_SEED=%u", seed);
    Random random(seed);
    Call& call = *calls[Below(random, calls.size())];
    AnyAttributes attributes = call.all;
    if (Below(random, 4) == 0)
      MutateBlocks(1 + Below(random, 3), kIntegers[Below(random, kIntegers.size())], &attributes);
    MutateSome(random, &attributes);
    TryLayout(attributes);
    tally->accepted += call.Try(attributes);
    ++tally->sets;
  }
}

// The same of a custom call in which processes meet.
template <typename SiteType>
void ProcessCall(const char* name, XLA_FFI_Error* (*instantiate)(XLA_FFI_CallFrame*),
                 XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*), const AnyAttributes& all, int64_t count,
                 uint32_t seed) {
  int accepted = 0;
  const auto run = [&](const AnyAttributes& attributes) {
    const auto made = fake_xla::InstantiateWith<SiteType>(instantiate, attributes);
    CHECK(made.error.empty() == (made.site != nullptr));
    if (!made.site) return;
    ++accepted;
    fake_xla::Context context;
    context.state = made.site.get();
    fake_xla::Frame frame(XLA_FFI_ExecutionStage_EXECUTE, &context);
    int32_t position = 0;
    float in = 0, out[4];
    std::vector<Buffer> args = {{XLA_FFI_DataType_F32, {1}, &in}, {XLA_FFI_DataType_S32, {}, &position}};
    frame.SetBuffers(args, {{XLA_FFI_DataType_F32, {4}, out}});
    (void)fake_xla::Take(execute(frame.get()));
    const std::unique_ptr<XLA_FFI_Future> future(frame.get()->future);
    if (future) future->Wait();
  };
  for (size_t index = 0; index < all.size(); ++index) {
    for (size_t mutation = 0; mutation < MutationsOf(all[index].second); ++mutation) {
      std::snprintf(trial, sizeof(trial), "%s, %s, mutation %zu", name, all[index].first.c_str(), mutation);
      AnyAttributes attributes = all;
      Mutate(index, mutation, &attributes);
      run(attributes);
    }
  }
  for (int64_t i = 0; i < count; ++i, ++seed) {
    std::snprintf(trial, sizeof(trial), "%s, JAXMP_FUZZ_SEED=%u", name, seed);
    Random random(seed);
    AnyAttributes attributes = all;
    MutateSome(random, &attributes);
    run(attributes);
  }
  CHECK(accepted > 10);
}

// The other process has ended, so nobody waits for long.
void ProcessCalls(int64_t count, uint32_t seed) {
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  close(ends[1]);
  StartBarrier({0, 2, 0.1, -1});
  ConnectPeer(1, ends[0]);
  Attributes good = {{"program", std::string("jit_step")},
                     {"index", int64_t{0}},
                     {"repeat", int64_t{0}},
                     {"call", std::string("matmul at train.py:41")},
                     {"fields", std::string("m=1\nn=2")},
                     {"devices", std::vector<int64_t>{0, 1}},
                     {"processes", std::vector<int64_t>{0, 1}},
                     {"groups", std::vector<int64_t>{0, 0}},
                     {"is_sequential", int64_t{1}}};
  ProcessCall<ProcessBarrierSite>("a process barrier", ProcessBarrierInstantiate, ProcessBarrierExecute, All(good),
                                  count, seed);
  good["ranks"] = std::vector<int64_t>{1, 0};
  good["outer"] = int64_t{2};
  good["sums"] = int64_t{0};
  good["part"] = std::string("all");
  ProcessCall<ProcessCollectiveSite>("a process collective", ProcessCollectiveInstantiate, ProcessCollectiveExecute,
                                     All(good), count, seed);
  StopBarrier();
}

TEST(NoAttributeCrashes) {
  NameTrialsThatDie();
  const int64_t asked = std::getenv("JAXMP_FUZZ") ? std::atoll(std::getenv("JAXMP_FUZZ")) : 0;
  const int64_t count = asked > 0 ? asked : check::kIsSlow ? 2000 : 10000;
  const auto seed = static_cast<uint32_t>(std::getenv("JAXMP_FUZZ_SEED") ? std::atoll(std::getenv("JAXMP_FUZZ_SEED"))
                                          : asked > 0                    ? std::random_device()()
                                                                         : 1);
  const auto begun = std::chrono::steady_clock::now();
  auto calls = MakeCalls();
  Tally tally;
  EveryBlockOfAllMatrices(calls, &tally);
  EveryAttributeWithEveryMutation(calls, &tally);
  SomeAttributesAtRandom(calls, count, seed, &tally);
  ProcessCalls(count / 20, seed);
  for (const auto& call : calls) tally.succeeded += call->succeeded, tally.failed += call->failed;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  std::printf(
      "%lld attribute sets from seed %u in %.0f s: %lld accepted, %lld executions, %lld of them with an error\n",
      static_cast<long long>(tally.sets), seed, seconds, static_cast<long long>(tally.accepted),
      static_cast<long long>(tally.succeeded + tally.failed), static_cast<long long>(tally.failed));
  CHECK(tally.accepted > tally.sets / 50);
  CHECK(tally.succeeded > 100 && tally.failed > 100);
}

}  // namespace
}  // namespace jaxmp
