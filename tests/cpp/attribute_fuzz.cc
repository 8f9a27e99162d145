// Programs are input: an exported one can be changed before it runs. So each attribute of each kind of call is set to
// every value that arithmetic could stumble over, left out, given twice or with another type, and then several of them
// at random. Calls that are not refused are executed, with buffers of exactly the sizes that the call had before. The
// answer is an error or a result, never a crash, an access outside of our memory, or an endless wait.
//
// JAXMP_FUZZ is the number of attribute sets, JAXMP_FUZZ_SEED the first seed (a failure names its own).
#include <sys/socket.h>
#include <unistd.h>

#include <climits>
#include <csignal>
#include <limits>
#include <random>

#include "csrc/barrier/barrier.h"
#include "csrc/ffi/host_matmul.h"
#include "csrc/ffi/process_calls.h"
#include "csrc/plan/distribution.h"
#include "csrc/plan/enums.h"
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
using tests::With;

size_t Below(Random& random, size_t bound) { return random() % bound; }

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

struct Kind {
  const char* name;
  Attributes attributes;
};

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

// Adds `many` with every value at each place and at all places, and with other lengths.
template <typename T>
void AddMany(const std::vector<T>& many, const std::vector<T>& values, std::vector<AnyAttribute>* to) {
  std::vector<T> changed;
  for (const T& value : values) {
    for (size_t place = 0; place < many.size(); ++place) {
      changed = many;
      changed[place] = value;
      to->emplace_back(changed);
    }
    to->emplace_back(std::vector<T>(many.size(), value));
  }
  changed = many;
  changed.push_back(values[1]);
  to->emplace_back(changed);
  changed.resize(many.empty() ? 0 : many.size() - 1);
  to->emplace_back(changed);
  to->emplace_back(std::vector<T>(1000, values[2]));
}

// Returns values for an attribute: values of its type, then of other types.
std::vector<AnyAttribute> VariantsOf(const AnyAttribute& attribute) {
  std::vector<AnyAttribute> all;
  if (std::holds_alternative<std::string>(attribute)) {
    all.assign(kWords.begin(), kWords.end());
  } else if (const auto* integers = std::get_if<std::vector<int64_t>>(&attribute)) {
    AddMany(*integers, kIntegers, &all);
  } else if (const auto* numbers = std::get_if<std::vector<double>>(&attribute)) {
    AddMany(*numbers, kNumbers, &all);
  } else {
    all.assign(kIntegers.begin(), kIntegers.end());
  }
  all.insert(all.end(), std::begin(kTypes), std::end(kTypes));
  return all;
}

// Mutates one attribute, by number: to each of its variants, left out, given twice, and given with another value too.
constexpr size_t kCounts = 3;
void Mutate(size_t index, const std::vector<AnyAttribute>& variants, size_t mutation, AnyAttributes* attributes) {
  const std::pair<std::string, AnyAttribute> copy = (*attributes)[index];
  if (mutation < variants.size()) {
    (*attributes)[index].second = variants[mutation];
  } else if (mutation == variants.size()) {
    attributes->erase(attributes->begin() + static_cast<int64_t>(index));
  } else {
    attributes->emplace_back(copy.first, mutation == variants.size() + 1 ? copy.second : int64_t{1} << 62);
  }
}

// Mutates one to three attributes at random.
void MutateSome(Random& random, AnyAttributes* attributes) {
  for (size_t left = 1 + Below(random, 3); left > 0; --left) {
    const size_t index = Below(random, attributes->size());
    const std::vector<AnyAttribute> variants = VariantsOf((*attributes)[index].second);
    Mutate(index, variants, Below(random, variants.size() + kCounts), attributes);
  }
}

// Sets one number for the blocks of all matrices along some of m, n and k. Blocks have to fit each other, so one alone
// would be refused for that.
const std::string kLetters[] = {"m", "n", "k", "mnk"};
void MutateBlocks(const std::string& letters, int64_t block, AnyAttributes* attributes) {
  const auto is_plain = [attributes](const std::string& op) {
    return std::count(attributes->begin(), attributes->end(), std::pair(op, AnyAttribute(std::string("N")))) > 0;
  };
  const std::map<std::string, std::string> axes = {{"layout_a", is_plain("trans_a") ? "mk" : "km"},
                                                   {"layout_b", is_plain("trans_b") ? "kn" : "nk"},
                                                   {"layout_d", "mn"}};
  for (auto& [name, value] : *attributes) {
    auto* const layout = std::get_if<std::vector<int64_t>>(&value);
    for (size_t i = 0; axes.count(name) && layout && layout->size() > 1 && i < 2; ++i) {
      if (letters.find(axes.at(name)[i]) != std::string::npos) (*layout)[i] = block;
    }
  }
}

const std::map<DType, XLA_FFI_DataType> kFfiTypes = {
    {DType::kF32, XLA_FFI_DataType_F32}, {DType::kF64, XLA_FFI_DataType_F64}, {DType::kBF16, XLA_FFI_DataType_BF16},
    {DType::kC64, XLA_FFI_DataType_C64}, {DType::kU8, XLA_FFI_DataType_U8},   {DType::kE4M3, XLA_FFI_DataType_F8E4M3FN},
    {DType::kS8, XLA_FFI_DataType_S8},   {DType::kS32, XLA_FFI_DataType_S32}, {DType::kE2M1, XLA_FFI_DataType_U8},
    {DType::kS4, XLA_FFI_DataType_S4}};

// The buffers of one device. The memory of each buffer ends where the buffer does.
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

// A call site to be made of attributes, and the results of the attempts.
struct Target {
  std::string name;
  AnyAttributes all;
  std::function<bool(const AnyAttributes&)> attempt;  // true if the site was made; it has then been executed
  int64_t accepted = 0;

  void Try(const std::string& mutation, const AnyAttributes& attributes) {
    std::snprintf(trial, sizeof(trial), "%s, %s", name.c_str(), mutation.c_str());
    accepted += attempt(attributes);
    ++sets;
  }
  static inline int64_t sets = 0, succeeded = 0, failed = 0;  // attempts, and executions of matmul
};

// Every device executes the site, or gets an error.
Target MatmulTarget(const Kind& kind) {
  const Problem problem = *MakeProblem(kind.attributes);
  const Distribution layout = *MakeDistribution(problem);
  auto operands = std::make_shared<std::vector<Operands>>();
  for (int32_t position = 0; position < problem.nranks(); ++position) operands->emplace_back(problem, layout, position);
  const auto attempt = [operands, run = int64_t{0}](const AnyAttributes& attributes) mutable {
    // The platform of the real library answers before any device exists too.
    (void)fake_xla::InstantiateWith<CudaSite>(CudaMatmulInstantiate, attributes);
    fake_xla::Instance instance = fake_xla::Instantiate(attributes);
    CHECK(instance.error.empty() == (instance.site != nullptr));
    if (!instance.site) return false;
    std::vector<std::unique_ptr<fake_xla::Execution>> executions;
    for (const Operands& of : *operands) {
      executions.push_back(std::make_unique<fake_xla::Execution>(*instance.site, ++run / 64, of.args, of.rets));
    }
    instance.site.reset();  // frees ranks that wait for ranks that do not exist
    for (const auto& execution : executions) ++(execution->Wait().empty() ? Target::succeeded : Target::failed);
    return true;
  };
  return {kind.name, fake_xla::All(kind.attributes), attempt};
}

// The other process has ended, so nothing waits for long.
template <typename SiteType>
Target ProcessTarget(const char* name, XLA_FFI_Error* (*instantiate)(XLA_FFI_CallFrame*),
                     XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*), const Attributes& attributes) {
  const auto attempt = [=](const AnyAttributes& attributes) {
    const auto made = fake_xla::InstantiateWith<SiteType>(instantiate, attributes);
    CHECK(made.error.empty() == (made.site != nullptr));
    if (!made.site) return false;
    int32_t position = 0;
    float in = 0, out[4];
    (void)fake_xla::Execute(execute, made.site.get(),
                            {{XLA_FFI_DataType_F32, {1}, &in}, {XLA_FFI_DataType_S32, {}, &position}},
                            {{XLA_FFI_DataType_F32, {4}, out}});
    return true;
  };
  return {name, fake_xla::All(attributes), attempt};
}

std::vector<Target> Targets() {
  std::vector<Target> targets;
  for (const Kind& kind : Kinds()) {
    targets.push_back(MatmulTarget(kind));
    CHECK(targets.back().attempt(targets.back().all));
    check::report(Target::failed == 0, __FILE__, __LINE__, std::string(kind.name) + " fails as it is");
  }
  Attributes process = {{"program", std::string("jit_step")},
                        {"index", int64_t{0}},
                        {"repeat", int64_t{0}},
                        {"call", std::string("matmul at train.py:41")},
                        {"fields", std::string("m=1\nn=2")},
                        {"devices", std::vector<int64_t>{0, 1}},
                        {"processes", std::vector<int64_t>{0, 1}},
                        {"groups", std::vector<int64_t>{0, 0}},
                        {"is_sequential", int64_t{1}}};
  targets.push_back(ProcessTarget<ProcessBarrierSite>("a process barrier", ProcessBarrierInstantiate,
                                                      ProcessBarrierExecute, process));
  process = With(process, {{"ranks", std::vector<int64_t>{1, 0}},
                           {"outer", int64_t{2}},
                           {"sums", int64_t{0}},
                           {"picks", int64_t{0}},
                           {"part", std::string("all")}});
  targets.push_back(ProcessTarget<ProcessCollectiveSite>("a process collective", ProcessCollectiveInstantiate,
                                                         ProcessCollectiveExecute, process));
  return targets;
}

void TryEveryMutation(Target& target) {
  for (size_t index = 0; index < target.all.size(); ++index) {
    const std::vector<AnyAttribute> variants = VariantsOf(target.all[index].second);
    for (size_t mutation = 0; mutation < variants.size() + kCounts; ++mutation) {
      AnyAttributes attributes = target.all;
      Mutate(index, variants, mutation, &attributes);
      target.Try(target.all[index].first + ", mutation " + std::to_string(mutation), attributes);
    }
  }
  if (target.name.rfind("cyclic", 0) != 0) return;
  for (int64_t block : kIntegers) {
    for (const std::string& letters : kLetters) {
      AnyAttributes attributes = target.all;
      MutateBlocks(letters, block, &attributes);
      target.Try("blocks of " + std::to_string(block) + " along " + letters, attributes);
    }
  }
}

void TrySomeAtRandom(std::vector<Target>& targets, int64_t count, uint32_t seed) {
  for (int64_t i = 0; i < count; ++i, ++seed) {
    Random random(seed);
    Target& target = targets[Below(random, targets.size())];
    AnyAttributes attributes = target.all;
    if (Below(random, 4) == 0) {
      MutateBlocks(kLetters[Below(random, std::size(kLetters))], kIntegers[Below(random, kIntegers.size())],
                   &attributes);
    }
    MutateSome(random, &attributes);
    target.Try("JAXMP_FUZZ_SEED=" + std::to_string(seed), attributes);
  }
}

TEST(NoAttributeCrashes) {
  NameTrialsThatDie();
  const int64_t asked = std::getenv("JAXMP_FUZZ") ? std::atoll(std::getenv("JAXMP_FUZZ")) : 0;
  const int64_t count = asked > 0 ? asked : check::kIsSlow ? 2000 : 10000;
  const auto seed = static_cast<uint32_t>(std::getenv("JAXMP_FUZZ_SEED") ? std::atoll(std::getenv("JAXMP_FUZZ_SEED"))
                                          : asked > 0                    ? std::random_device()()
                                                                         : 1);
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  close(ends[1]);
  StartBarrier({0, 2, 0.1});
  ConnectPeer(1, ends[0]);
  std::vector<Target> targets = Targets();
  for (Target& target : targets) TryEveryMutation(target);
  TrySomeAtRandom(targets, count, seed);
  StopBarrier();
  std::printf("%lld attribute sets from seed %u, %lld executions, %lld of them with an error\n",
              static_cast<long long>(Target::sets), seed, static_cast<long long>(Target::succeeded + Target::failed),
              static_cast<long long>(Target::failed));
  int64_t accepted = 0;
  for (const Target& target : targets) {
    check::report(target.accepted > 10, __FILE__, __LINE__, target.name + " is hardly ever accepted");
    accepted += target.accepted;
  }
  CHECK(accepted > Target::sets / 50);
  CHECK(Target::succeeded > 100 && Target::failed > 100);
}

}  // namespace
}  // namespace jaxmp
