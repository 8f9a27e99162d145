// One wrong thing at a time: hostmp's status, and parts of its reason. Without these hostmp would take what the real
// library leaves undefined, and a plan proven here would fail there.
#include "tests/conformance/case.h"

namespace jaxmp::conformance {
namespace {

// The attribute's number, by its name without the prefix.
#define ATTRIBUTE(name) CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_##name

constexpr cublasMpStatus_t kInvalid = CUBLASMP_STATUS_INVALID_VALUE, kUnsupported = CUBLASMP_STATUS_NOT_SUPPORTED;
constexpr int kBias = CUBLASMP_MATMUL_EPILOGUE_BIAS, kRelu = CUBLASMP_MATMUL_EPILOGUE_RELU,
              kReluAux = CUBLASMP_MATMUL_EPILOGUE_RELU_AUX, kGeluAux = CUBLASMP_MATMUL_EPILOGUE_GELU_AUX,
              kDGelu = CUBLASMP_MATMUL_EPILOGUE_DGELU, kDReluBgrad = CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD;
const float two = 2;

using Words = std::vector<std::string>;

// Refusals of products on all ranks: A 24x32, B 32x16, D 24x16. Messages hold numbers of two ranks, and are read for
// two ranks only: A in blocks of 12x32 on 2x1 processes, B of 32x8 on 1x2, D of 12x8 on 2x1.
class Refusals {
 public:
  Refusals(int nranks, const Add& add) : nranks_(nranks), add_(add) {}

  Case base(cudaDataType_t in = CUDA_R_32F, cudaDataType_t out = CUDA_R_32F,
            Pattern pattern = Pattern::kAllGather) const {
    return make_case("refusal", pattern, nranks_, in, out);
  }
  // A square product of fp8 as it has to be.
  Case narrow(cudaDataType_t out = CUDA_R_16BF) const {
    Case c = base(CUDA_R_8F_E4M3, out);
    c.m = c.n = c.k = 64;
    c.trans_a = CUBLAS_OP_T;
    return c;
  }

  void put(Case c, const char* variant, cublasMpStatus_t expected, const Words& says) const {
    c.variant = variant;
    c.expected = expected;
    if (nranks_ == 2) c.says = says;
    add_(c);
  }
  void change(const char* variant, cublasMpStatus_t expected, const Words& says,
              std::function<void(Call&)> what) const {
    Case c = base();
    c.change = std::move(what);
    put(c, variant, expected, says);
  }
  void describe(const char* variant, cublasMpStatus_t expected, const Words& says,
                std::function<void(Descriptions&)> what) const {
    Case c = base();
    c.describe = std::move(what);
    put(c, variant, expected, says);
  }
  void set(Case c, const char* variant, cublasMpStatus_t expected, const Words& says,
           const std::vector<Setting>& settings) const {
    c.settings = settings;
    put(c, variant, expected, says);
  }
  void set(int epilog, const char* variant, cublasMpStatus_t expected, const Words& says,
           const Setting& setting) const {
    Case c = base();
    c.epilog = epilog;
    set(c, variant, expected, says, {setting});
  }

 private:
  int nranks_;
  const Add& add_;
};

void add_arguments(const Refusals& refuse) {
  refuse.change("m is negative", kInvalid, {"m must not be negative", "-1"}, [](Call& call) { call.m = -1; });
  refuse.change("k is larger than A", kInvalid, {"needs 64", "has 32"}, [](Call& call) { call.k *= 2; });
  refuse.change("ia does not stand at a block", kInvalid, {"sub(A)", "row 2", "mbA=12"},
                [](Call& call) { call.ia = 2; });
  refuse.change("alpha is null", kInvalid, {"alpha is null"}, [](Call& call) { call.alpha = nullptr; });
  refuse.change("descA is null", kInvalid, {"descA is null"}, [](Call& call) { call.desc_a = nullptr; });
  refuse.change("beta is 2 and c is null", kInvalid, {"c is null but beta is 2"}, [](Call& call) { call.beta = &two; });
  refuse.change("d is a", kInvalid, {"d shares memory with a"}, [](Call& call) { call.d = const_cast<void*>(call.a); });
}

void add_descriptors(const Refusals& refuse) {
  refuse.describe("lld is smaller than the local rows", kInvalid, {"lld is 11", "12 rows"},
                  [](Descriptions& x) { --x.a.lld; });
  refuse.describe("mb is 0", kInvalid, {"mb must be positive", "got 0"}, [](Descriptions& x) { x.a.mb = 0; });
  refuse.describe("rsrc is no process row", kInvalid, {"rsrc must be in [0, 2)", "got 99"},
                  [](Descriptions& x) { x.a.rsrc = 99; });
  refuse.describe("A and D have other blocks along m", kInvalid, {"mbA=12", "mbD=6"},
                  [](Descriptions& x) { x.d.mb = x.d.mb / 2; });
  refuse.describe("A and B have other blocks along k", kInvalid, {"nbA=16", "mbB=32", "op(A)=N"},
                  [](Descriptions& x) { x.a.nb = x.a.nb / 2; });
  refuse.describe("B is f64", kUnsupported, {"A is f32", "B is f64"}, [](Descriptions& x) { x.b.type = CUDA_R_64F; });
  refuse.describe("D is bf16", kUnsupported, {"D is bf16", "must be f32"},
                  [](Descriptions& x) { x.d.type = CUDA_R_16BF; });
}

void add_attributes(int nranks, const Refusals& refuse) {
  refuse.set(0, "a size of 8 for TRANSA", kInvalid, {"sizeInBytes=8"}, {ATTRIBUTE(TRANSA), 0, 8});
  refuse.set(0, "TRANSA 3", kInvalid, {"0 (N), 1 (T) or 2 (C)", "got 3"}, {ATTRIBUTE(TRANSA), 3});
  refuse.set(0, "compute type 64F", kUnsupported, {"compute type is 70"},
             {ATTRIBUTE(COMPUTE_TYPE), CUBLAS_COMPUTE_64F});
  refuse.set(0, "algorithm 7", kInvalid, {"algorithm 7"}, {ATTRIBUTE(ALGO_TYPE), 7});
  refuse.set(0, "FUSED does not gather", kUnsupported, {"algorithm 6 (FUSED) all-reduces"},
             {ATTRIBUTE(ALGO_TYPE), CUBLASMP_MATMUL_ALGO_TYPE_FUSED});
  refuse.set(0, "-1 multiprocessors", kInvalid, {"COMMUNICATION_SM_COUNT", "got -1"},
             {ATTRIBUTE(COMMUNICATION_SM_COUNT), -1});
  if (nranks > 1) {
    refuse.set(0, "no partial sums to communicate", kInvalid, {"COMMUNICATION_TYPE f32 is of partial sums"},
               {ATTRIBUTE(COMMUNICATION_TYPE), CUDA_R_32F});
  }
  refuse.set(0, "a communication type below D's", kInvalid, {"COMMUNICATION_TYPE f16", "f32"},
             {ATTRIBUTE(COMMUNICATION_TYPE), CUDA_R_16F});
  refuse.set(0, "epilog 8", kUnsupported, {"epilog 8 is not among"}, {ATTRIBUTE(EPILOGUE), 8});
  refuse.set(kBias, "no bias", kInvalid, {"BIAS_POINTER is not set"}, {ATTRIBUTE(BIAS_POINTER), 0});
  refuse.set(kReluAux, "no aux", kInvalid, {"EPILOGUE_AUX_POINTER is not set"}, {ATTRIBUTE(EPILOGUE_AUX_POINTER), 0});
  for (const int mask : {kReluAux, kDReluBgrad}) {  // written and read
    refuse.set(mask, "a mask of 64", kInvalid, {"multiple of 128", "got 64"}, {ATTRIBUTE(EPILOGUE_AUX_LD), 64});
    refuse.set(mask, "a mask of f32", kInvalid, {"bit mask"}, {ATTRIBUTE(EPILOGUE_AUX_DATA_TYPE), CUDA_R_32F});
  }
  for (const int aux : {kGeluAux, kDGelu}) {
    refuse.set(aux, "an aux of no columns", kInvalid, {"multiple of 8", "12 local rows", "got 0"},
               {ATTRIBUTE(EPILOGUE_AUX_LD), 0});
    refuse.set(aux, "an aux of f16", kUnsupported, {"the aux is f16"}, {ATTRIBUTE(EPILOGUE_AUX_DATA_TYPE), CUDA_R_16F});
  }
  for (const int bias : {kBias, kDReluBgrad}) {  // read and written
    refuse.set(bias, "a stride of biases", kInvalid, {"BIAS_BATCH_STRIDE"}, {ATTRIBUTE(BIAS_BATCH_STRIDE), 4});
    refuse.set(bias, "a bias of f64", kUnsupported, {"the bias is f64", "D is f32"},
               {ATTRIBUTE(BIAS_DATA_TYPE), CUDA_R_64F});
  }
  refuse.set(0, "a scale of f32", kUnsupported, {"attribute 16"}, {ATTRIBUTE(A_SCALE_POINTER), 64});
  refuse.set(0, "the largest value of an f32 D", kUnsupported, {"attribute 24"}, {ATTRIBUTE(AMAX_D_POINTER), 64});
}

void add_combinations(int nranks, const Refusals& refuse) {
  Case c = refuse.base();
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_BGRADA, c.trans_a = CUBLAS_OP_T;
  refuse.put(c, "BGRADA of a transposed A", kUnsupported, {"BGRADA needs TRANSA=N"});
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_BGRADB, c.trans_a = CUBLAS_OP_N;
  refuse.put(c, "BGRADB of a plain B", kUnsupported, {"BGRADB needs TRANSB=T"});
  c = refuse.base();
  c.epilog = kDGelu, c.k = 1;
  refuse.put(c, "a derivative of k = 1", kUnsupported, {"DGELU does not take k = 1"});
  c = refuse.base(CUDA_C_32F, CUDA_C_32F);
  c.epilog = kRelu;
  refuse.put(c, "RELU of complex numbers", kUnsupported, {"RELU", "c64"});
  for (Pattern pattern : {Pattern::kAllGather, Pattern::kAllReduce}) {
    if (nranks == 1 && pattern == Pattern::kAllGather) continue;  // one rank has the same layouts in every pattern
    c = refuse.base(CUDA_R_32F, CUDA_R_32F, pattern);
    c.trans_a = CUBLAS_OP_T;
    c.settings = {{ATTRIBUTE(ALGO_TYPE), CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST}};
    refuse.put(c, "ATOMIC_MULTICAST only reduces and scatters", kUnsupported, {"ATOMIC_MULTICAST"});
  }
  c.m = 26;  // rows of 104 bytes
  refuse.set(c, "FUSED of rows that are no multiple of 16 bytes", kUnsupported, {"FUSED"},
             {{ATTRIBUTE(ALGO_TYPE), CUBLASMP_MATMUL_ALGO_TYPE_FUSED}});
  c = refuse.narrow();
  c.trans_a = CUBLAS_OP_N;
  refuse.put(c, "fp8 that is not stored along k", kUnsupported, {"f8e4m3", "TRANSA=T and TRANSB=N"});
  c.trans_a = CUBLAS_OP_T, c.in = c.in_b = CUDA_R_8F_E5M2;
  refuse.put(c, "f8e5m2 twice", kUnsupported, {"f8e5m2", "not f8e5m2 twice"});
  c.in = c.in_b = CUDA_R_8F_E4M3, c.out = CUDA_R_64F;
  refuse.put(c, "fp8 to f64", kUnsupported, {"D is f64", "f16, bf16, f32, or f8e4m3"});
  c.out = CUDA_R_16BF, c.k = 24;
  refuse.put(c, "k = 24 of fp8", kInvalid, {"the rows of A (k)", "multiple of 16", "got 24"});
  c.k = 64;
  refuse.set(c, "scales of rows beside scales of blocks", kUnsupported,
             {"OUTER_VEC_FP32", "VEC128_FP32", "do not go together"},
             {{ATTRIBUTE(A_SCALE_MODE), 3}, {ATTRIBUTE(B_SCALE_MODE), 4}});
  refuse.set(c, "scale mode 7", kInvalid, {"is 7", "no scale mode"},
             {{ATTRIBUTE(A_SCALE_MODE), 7}, {ATTRIBUTE(B_SCALE_MODE), 7}});
  c = refuse.base(CUDA_R_16BF, CUDA_R_16BF);
  c.change = [](Call& call) { call.bytes = call.bytes > 0 ? call.bytes - 1 : 0; };
  refuse.put(c, "a workspace that is a byte short", kInvalid, {"workspaceSizeInBytesOnDevice", "bufferSize"});
  c.change = [](Call& call) { call.work = nullptr; };
  refuse.put(c, "no workspace", kInvalid, {"d_work is null"});
}

void add_arguments_of_hostmp(const Refusals& refuse) {
  refuse.change("handle", kInvalid, {"handle is null"}, [](Call& call) { call.handle = nullptr; });
  refuse.change("matmul", kInvalid, {"matmulDesc is null"}, [](Call& call) { call.matmul = nullptr; });
  refuse.change("desc_b", kInvalid, {"descB is null"}, [](Call& call) { call.desc_b = nullptr; });
  refuse.change("desc_d", kInvalid, {"descD is null"}, [](Call& call) { call.desc_d = nullptr; });
  refuse.change("beta", kInvalid, {"beta is null"}, [](Call& call) { call.beta = nullptr; });
  refuse.change("a", kInvalid, {"a is null"}, [](Call& call) { call.a = nullptr; });
  refuse.change("b", kInvalid, {"b is null"}, [](Call& call) { call.b = nullptr; });
  refuse.change("d", kInvalid, {"d is null"}, [](Call& call) { call.d = nullptr; });
  refuse.change("desc_c", kInvalid, {"descC is null"}, [](Call& call) { call.c = call.d; });
  refuse.change("k", kUnsupported, {"k must fit 32 bits"}, [](Call& call) { call.k = int64_t{1} << 31; });
  refuse.change("ia = 0", kInvalid, {"sub(A)", "row 0"}, [](Call& call) { call.ia = 0; });
  refuse.change("least ia", kInvalid, {"sub(A)"}, [](Call& call) { call.ia = INT64_MIN; });
  refuse.change("largest ia", kInvalid, {"sub(A)"}, [](Call& call) { call.ia = INT64_MAX - 2; });
  refuse.change("jb = 9", kInvalid, {"sub(B)", "16 columns from 9", "has 16"}, [](Call& call) { call.jb = 9; });
  refuse.change("n = 17", kInvalid, {"needs 17", "has 16"}, [](Call& call) { call.n = 17; });
  refuse.change("d within b", kInvalid, {"d shares memory with b"},
                [](Call& call) { call.d = static_cast<char*>(const_cast<void*>(call.b)) + 8; });
  refuse.change("d beside c", kInvalid, {"d shares a part of c"},
                [](Call& call) { call.c = static_cast<char*>(call.d) + 4, call.desc_c = call.desc_d; });
}

void add_descriptors_of_hostmp(const Refusals& refuse) {
  refuse.describe("m", kInvalid, {"m must not be negative"}, [](Descriptions& x) { x.a.m = -1; });
  refuse.describe("nb", kInvalid, {"nb must be positive", "got -2"}, [](Descriptions& x) { x.a.nb = -2; });
  refuse.describe("csrc", kInvalid, {"csrc must be in [0, 1)", "got 1"}, [](Descriptions& x) { x.a.csrc = 1; });
  refuse.describe("lld", kUnsupported, {"lld must fit 32 bits"}, [](Descriptions& x) { x.a.lld = int64_t{1} << 31; });
  refuse.describe("type", kUnsupported, {"data type 9"},
                  [](Descriptions& x) { x.a.type = static_cast<cudaDataType_t>(9); });
  for (int64_t huge : {(int64_t{1} << 40) + 1, int64_t{1} << 62, INT64_MAX}) {
    const std::string is = " is " + std::to_string(huge);
    refuse.describe(("m" + is).c_str(), kUnsupported, {"m" + is, "over 2^40"}, [huge](auto& x) { x.a.m = huge; });
    refuse.describe(("mb" + is).c_str(), kUnsupported, {"mb" + is, "over 2^40"}, [huge](auto& x) { x.a.mb = huge; });
    refuse.describe(("nb" + is).c_str(), kUnsupported, {"nb" + is, "over 2^40"}, [huge](auto& x) { x.a.nb = huge; });
  }
  refuse.describe("elements", kUnsupported, {"64x1099511627776 with lld=32 has more than 2^44 elements"},
                  [](Descriptions& x) { x.a = {64, int64_t{1} << 40, 32, int64_t{1} << 40, 0, 0, 32, CUDA_R_32F}; });
  refuse.describe("nbB", kInvalid, {"nbB=4", "nbD=8"}, [](Descriptions& x) { x.b.nb = 4; });
  refuse.describe("types", kUnsupported, {"D must be bf16 or f32"},
                  [](Descriptions& x) { x.a.type = x.b.type = CUDA_R_16BF, x.d.type = CUDA_R_16F; });
  refuse.describe("f64", kUnsupported, {"compute type is 68", "COMPUTE_64F"},
                  [](Descriptions& x) { x.a.type = x.b.type = x.d.type = CUDA_R_64F; });
  const auto describe_c = [&refuse](const char* variant, cublasMpStatus_t expected, const Words& says, auto what) {
    Case c = refuse.base();
    c.has_c = true;
    c.describe = what;
    refuse.put(c, variant, expected, says);
  };
  describe_c("blocks of C", kInvalid, {"C has blocks of 6x8", "D of 12x8"}, [](Descriptions& x) { x.c.mb = 6; });
  describe_c("first block of C", kInvalid, {"C is distributed otherwise"}, [](Descriptions& x) { x.c.rsrc = 1; });
  describe_c("rows of C", kInvalid, {"C is distributed otherwise"}, [](Descriptions& x) { x.c.m = 48, x.c.lld = 24; });
  describe_c("type of C", kUnsupported, {"C is f64"}, [](Descriptions& x) { x.c.type = CUDA_R_64F; });
  Case c = refuse.base(CUDA_R_32F, CUDA_R_32F, Pattern::kAllReduce);
  c.describe = [](Descriptions& x) { x.d.n = 16; };
  refuse.put(c, "all-reduce", kInvalid, {"ALLREDUCE needs D as 24x32", "got 24x16"});
}

void add_attributes_of_hostmp(const Refusals& refuse) {
  const auto compute = [&refuse](cudaDataType_t type, cublasComputeType_t number, const Words& says) {
    refuse.set(refuse.base(type, type), "compute type", kUnsupported, says, {{ATTRIBUTE(COMPUTE_TYPE), number}});
  };
  compute(CUDA_R_16BF, CUBLAS_COMPUTE_32F_FAST_TF32, {"compute type is 77", "A is bf16"});
  compute(CUDA_R_64F, CUBLAS_COMPUTE_32F_FAST_16BF, {"compute type is 75", "COMPUTE_64F"});
  compute(CUDA_R_32F, CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT, {"compute type is 79"});
  refuse.set(0, "multicast", kUnsupported, {"SPLIT_MULTICAST", "along k"},
             {ATTRIBUTE(ALGO_TYPE), CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST});
  Case c = refuse.base();
  c.m = 9;
  refuse.set(c, "uneven", kUnsupported, {"cut evenly", "9 in blocks of 5"},
             {{ATTRIBUTE(ALGO_TYPE), CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P}});
  refuse.set(0, "a gather that all-reduces", kInvalid, {"ALLREDUCE needs D as 24x32"}, {ATTRIBUTE(EPILOGUE), 1});
  refuse.set(kReluAux, "stride of aux", kInvalid, {"EPILOGUE_AUX_BATCH_STRIDE"},
             {ATTRIBUTE(EPILOGUE_AUX_BATCH_STRIDE), 1});
  refuse.set(kDGelu, "no aux", kInvalid, {"aux input", "EPILOGUE_AUX_POINTER is not set"},
             {ATTRIBUTE(EPILOGUE_AUX_POINTER), 0});
  refuse.set(kDReluBgrad, "no gradient", kInvalid, {"bias gradient", "BIAS_POINTER is not set"},
             {ATTRIBUTE(BIAS_POINTER), 0});
  refuse.set(kDReluBgrad, "a partial gradient", kUnsupported, {"BIAS_RESULT_SCHEME is 1", "RESULT_SCHEME_FULL"},
             {ATTRIBUTE(BIAS_RESULT_SCHEME), CUBLASMP_RESULT_SCHEME_PARTIAL});
  refuse.set(kDReluBgrad, "a gradient by default", kUnsupported, {"BIAS_RESULT_SCHEME is 0"},
             {ATTRIBUTE(BIAS_RESULT_SCHEME), CUBLASMP_RESULT_SCHEME_DEFAULT});
}

// Refusals of operands of 8 bits or fewer.
void add_narrow_of_hostmp(const Refusals& refuse) {
  constexpr cudaDataType_t kE4M3 = CUDA_R_8F_E4M3;
  Case c = refuse.narrow(CUDA_R_8F_E5M2);
  refuse.put(c, "D of f8e5m2", kUnsupported, {"D is f8e5m2"});
  c = refuse.narrow(kE4M3), c.m = 16;
  refuse.put(c, "m of a rank", kInvalid, {"the columns of A (m)", "multiple of 16", "got 8"});
  c = refuse.narrow(kE4M3), c.has_c = true;  // of D's type
  refuse.put(c, "C", kUnsupported, {"C is f8e4m3", "C must be f16 or bf16"});
  c = refuse.narrow(kE4M3), c.epilog = CUBLASMP_MATMUL_EPILOGUE_GELU, c.aux_type = CUDA_R_16F;
  refuse.put(c, "epilog", kUnsupported, {"no epilog GELU", "GELU_AUX"});
  Case integers = refuse.base(CUDA_R_8I, CUDA_R_32I);
  integers.m = integers.n = integers.k = 64, integers.trans_a = CUBLAS_OP_T;
  refuse.set(integers, "scale of integers", kUnsupported, {"attribute 16"}, {{ATTRIBUTE(A_SCALE_POINTER), 64}});
  integers.epilog = kRelu;
  refuse.put(integers, "integers", kUnsupported, {"RELU", "s8"});

  const auto modes = [&refuse](const Case& c, int a, int b, cublasMpStatus_t expected, const Words& says) {
    const std::string variant = "scale modes " + std::to_string(a) + " and " + std::to_string(b);
    refuse.set(c, variant.c_str(), expected, says, {{ATTRIBUTE(A_SCALE_MODE), a}, {ATTRIBUTE(B_SCALE_MODE), b}});
  };
  const Case stored = refuse.narrow(kE4M3), wide = refuse.narrow(CUDA_R_32F);
  integers = refuse.base(CUDA_R_8I, CUDA_R_32F);
  modes(integers, 4, 4, kUnsupported, {"VEC128_FP32", "have blocks"});
  modes(integers, 0, 3, kInvalid, {"B_SCALE_POINTER is not set"});
  modes(stored, 5, 5, kUnsupported, {"BLK128x128", "do not go together"});
  modes(stored, 1, 1, kUnsupported, {"VEC16_UE4M3", "do not fit f8e4m3"});
  modes(stored, 3, 3, kUnsupported, {"OUTER_VEC", "not f8e4m3"});
  modes(stored, 2, 2, kInvalid, {"D_OUT_SCALE_MODE is not set"});
  modes(wide, 3, 3, kInvalid, {"A_SCALE_POINTER is not set"});
  refuse.set(wide, "scale of D", kUnsupported, {"D_SCALE_POINTER", "D is f32"}, {{ATTRIBUTE(D_SCALE_POINTER), 64}});
  refuse.set(wide, "amax of D", kUnsupported, {"AMAX_D_POINTER"}, {{ATTRIBUTE(AMAX_D_POINTER), 64}});
  const Setting scale_of_aux = {ATTRIBUTE(EPILOGUE_AUX_SCALE_POINTER), 64};
  refuse.set(wide, "scale of no aux", kUnsupported, {"EPILOGUE_AUX_SCALE_POINTER", "the aux is not fp8"},
             {scale_of_aux});
  refuse.set(0, "scale of the aux of f32", kUnsupported, {"attribute 13"}, scale_of_aux);

  // GELU's aux with an fp8 D: of C's type, or e4m3 with everything around it e4m3 and f16.
  const auto aux = [&refuse](cudaDataType_t out, cudaDataType_t type, const Words& says,
                             const std::vector<Setting>& settings) {
    Case c = refuse.narrow(out);
    c.epilog = kGeluAux, c.aux_type = type;
    refuse.set(c, settings.empty() ? "aux" : "more of an aux", kUnsupported, says, settings);
  };
  aux(kE4M3, CUDA_R_8F_E5M2, {"the aux is f8e5m2 beside D of f8e4m3", "the type of C"}, {});
  aux(kE4M3, CUDA_R_32F, {"the aux is f32"}, {});
  aux(CUDA_R_16BF, kE4M3, {"the aux is f8e4m3 and D is bf16", "of one type"}, {});
  aux(kE4M3, kE4M3, {"EPILOGUE_AUX_SCALE_MODE must be SCALAR_FP32, got VEC32_UE8M0"},
      {{ATTRIBUTE(EPILOGUE_AUX_SCALE_MODE), 2}});
  aux(kE4M3, CUDA_R_16F, {"EPILOGUE_AUX_AMAX_POINTER is set, but the aux is not fp8"},
      {{ATTRIBUTE(EPILOGUE_AUX_AMAX_POINTER), 64}});
}

// A narrow operand with a wide one has no scales, and takes the types of real numbers up to 32 bits.
void add_mixed_of_hostmp(const Refusals& refuse) {
  const auto types = [&refuse](cudaDataType_t a, cudaDataType_t b, cudaDataType_t out) {
    Case c = refuse.base(a, out);
    c.in_b = b;
    return c;
  };
  constexpr cudaDataType_t kBF16 = CUDA_R_16BF, kS8 = CUDA_R_8I, kE4M3 = CUDA_R_8F_E4M3;
  refuse.put(types(CUDA_R_64F, kS8, CUDA_R_64F), "types", kUnsupported,
             {"A is f64, B is s8 and D is f64", "f16, bf16 or f32"});
  refuse.put(types(kBF16, kS8, kE4M3), "types", kUnsupported, {"A is bf16, B is s8 and D is f8e4m3"});
  refuse.set(types(kBF16, kS8, kBF16), "compute type", kUnsupported,
             {"the compute type is 77", "take CUBLAS_COMPUTE_32F"},
             {{ATTRIBUTE(COMPUTE_TYPE), CUBLAS_COMPUTE_32F_FAST_TF32}});
  Case e3m4 = types(host_types::kE3M4, host_types::kE3M4, host_types::kE3M4);
  e3m4.fill = [](auto&) {};
  refuse.put(e3m4, "types", kUnsupported, {"A is f8e3m4 and B is f8e3m4"});
  refuse.set(types(kE4M3, kBF16, kBF16), "scales", kUnsupported, {"attribute 17"},
             {{ATTRIBUTE(A_SCALE_MODE), 3}, {ATTRIBUTE(B_SCALE_MODE), 3}});
}

void add_cyclic_of_hostmp(const Add& add) {
  Case c = make_case("refusal", Pattern::kCyclic, 4);
  c.p = c.q = 2, c.epilog = kReluAux;
  c.expected = kUnsupported, c.says = {"mbD to be a multiple of 8", "got 3"};
  add(c);
}

#undef ATTRIBUTE

}  // namespace

void add_refusals(int nranks, const Add& add) {
  const Refusals refuse(nranks, add);
  add_arguments(refuse);
  add_descriptors(refuse);
  add_attributes(nranks, refuse);
  add_combinations(nranks, refuse);
}

void add_refusals_of_hostmp(int nranks, const Add& add) {
  if (nranks == 4) add_cyclic_of_hostmp(add);
  if (nranks != 2) return;
  const Refusals refuse(nranks, add);
  add_arguments_of_hostmp(refuse);
  add_descriptors_of_hostmp(refuse);
  add_attributes_of_hostmp(refuse);
  add_narrow_of_hostmp(refuse);
  add_mixed_of_hostmp(refuse);
}

}  // namespace jaxmp::conformance
