#include "tests/conformance/case.h"

namespace jaxmp::conformance {
namespace {

// The attribute's number less its prefix.
#define ATTRIBUTE(name) CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_##name

constexpr cublasMpStatus_t kInvalid = CUBLASMP_STATUS_INVALID_VALUE, kUnsupported = CUBLASMP_STATUS_NOT_SUPPORTED;

Case base(int nranks, cudaDataType_t in = CUDA_R_32F, cudaDataType_t out = CUDA_R_32F,
          Pattern pattern = Pattern::kAllGather) {
  return make_case("refusal", pattern, nranks, in, out);
}

class Refusals {
 public:
  Refusals(int nranks, const Add& add) : nranks_(nranks), add_(add) {}

  void change(const char* variant, cublasMpStatus_t expected, std::function<void(Call&)> what) {
    Case c = base(nranks_);
    c.change = std::move(what);
    put(c, variant, expected);
  }
  void describe(const char* variant, cublasMpStatus_t expected, std::function<void(Descriptions&)> what) {
    Case c = base(nranks_);
    c.describe = std::move(what);
    put(c, variant, expected);
  }
  // With an epilog, and what it is set to.
  void set(const char* variant, cublasMpStatus_t expected, int epilog, const Setting& setting) {
    Case c = base(nranks_);
    c.epilog = epilog;
    c.settings = {setting};
    put(c, variant, expected);
  }
  void put(Case c, const char* variant, cublasMpStatus_t expected) {
    c.variant = variant;
    c.expected = expected;
    add_(c);
  }

 private:
  int nranks_;
  const Add& add_;
};

void add_arguments(Refusals& refuse) {
  refuse.change("m is negative", kInvalid, [](Call& call) { call.m = -1; });
  refuse.change("k is larger than A", kInvalid, [](Call& call) { call.k *= 2; });
  refuse.change("ia does not stand at a block", kInvalid, [](Call& call) { call.ia = 2; });
  refuse.change("alpha is null", kInvalid, [](Call& call) { call.alpha = nullptr; });
  refuse.change("descA is null", kInvalid, [](Call& call) { call.desc_a = nullptr; });
  refuse.change("beta is 1 and c is null", kInvalid, [](Call& call) {
    static const float one = 1;
    call.beta = &one;
  });
  refuse.change("d is a", kInvalid, [](Call& call) { call.d = const_cast<void*>(call.a); });
}

void add_descriptors(Refusals& refuse) {
  refuse.describe("lld is smaller than the local rows", kInvalid, [](Descriptions& x) { --x.a.lld; });
  refuse.describe("mb is 0", kInvalid, [](Descriptions& x) { x.a.mb = 0; });
  refuse.describe("rsrc is no process row", kInvalid, [](Descriptions& x) { x.a.rsrc = 99; });
  refuse.describe("A and D have other blocks along m", kInvalid, [](Descriptions& x) { x.d.mb = x.d.mb / 2; });
  refuse.describe("A and B have other blocks along k", kInvalid, [](Descriptions& x) { x.a.nb = x.a.nb / 2; });
  refuse.describe("B is f64", kUnsupported, [](Descriptions& x) { x.b.type = CUDA_R_64F; });
  refuse.describe("D is bf16", kUnsupported, [](Descriptions& x) { x.d.type = CUDA_R_16BF; });
}

void add_attributes(int nranks, Refusals& refuse) {
  refuse.set("a size of 8 for TRANSA", kInvalid, 0, {ATTRIBUTE(TRANSA), 0, 8});
  refuse.set("TRANSA 3", kInvalid, 0, {ATTRIBUTE(TRANSA), 3});
  refuse.set("compute type 64F", kUnsupported, 0, {ATTRIBUTE(COMPUTE_TYPE), CUBLAS_COMPUTE_64F});
  refuse.set("algorithm 7", kInvalid, 0, {ATTRIBUTE(ALGO_TYPE), 7});
  refuse.set("FUSED does not gather", kUnsupported, 0, {ATTRIBUTE(ALGO_TYPE), CUBLASMP_MATMUL_ALGO_TYPE_FUSED});
  refuse.set("-1 multiprocessors", kInvalid, 0, {ATTRIBUTE(COMMUNICATION_SM_COUNT), -1});
  if (nranks > 1) {
    refuse.set("no partial sums to communicate", kInvalid, 0, {ATTRIBUTE(COMMUNICATION_TYPE), CUDA_R_32F});
  }
  refuse.set("a communication type below D's", kInvalid, 0, {ATTRIBUTE(COMMUNICATION_TYPE), CUDA_R_16F});
  refuse.set("epilog 8", kUnsupported, 0, {ATTRIBUTE(EPILOGUE), 8});
  refuse.set("no bias", kInvalid, CUBLASMP_MATMUL_EPILOGUE_BIAS, {ATTRIBUTE(BIAS_POINTER), 0});
  refuse.set("a stride of biases", kInvalid, CUBLASMP_MATMUL_EPILOGUE_BIAS, {ATTRIBUTE(BIAS_BATCH_STRIDE), 4});
  refuse.set("bias of f64", kUnsupported, CUBLASMP_MATMUL_EPILOGUE_BIAS, {ATTRIBUTE(BIAS_DATA_TYPE), CUDA_R_64F});
  refuse.set("no aux", kInvalid, CUBLASMP_MATMUL_EPILOGUE_RELU_AUX, {ATTRIBUTE(EPILOGUE_AUX_POINTER), 0});
  refuse.set("a mask of 64", kInvalid, CUBLASMP_MATMUL_EPILOGUE_RELU_AUX, {ATTRIBUTE(EPILOGUE_AUX_LD), 64});
  refuse.set("a mask of f32", kInvalid, CUBLASMP_MATMUL_EPILOGUE_RELU_AUX,
             {ATTRIBUTE(EPILOGUE_AUX_DATA_TYPE), CUDA_R_32F});
  refuse.set("an aux of no columns", kInvalid, CUBLASMP_MATMUL_EPILOGUE_GELU_AUX, {ATTRIBUTE(EPILOGUE_AUX_LD), 0});
  refuse.set("an aux of f16", kUnsupported, CUBLASMP_MATMUL_EPILOGUE_GELU_AUX,
             {ATTRIBUTE(EPILOGUE_AUX_DATA_TYPE), CUDA_R_16F});
  refuse.set("a scale of f32", kUnsupported, 0, {ATTRIBUTE(A_SCALE_POINTER), 64});
  refuse.set("the largest value of an f32 D", kUnsupported, 0, {ATTRIBUTE(AMAX_D_POINTER), 64});
}

void add_combinations(int nranks, Refusals& refuse) {
  Case c = base(nranks);
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_BGRADA, c.trans_a = CUBLAS_OP_T;
  refuse.put(c, "BGRADA of a transposed A", kUnsupported);
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_BGRADB, c.trans_a = CUBLAS_OP_N;
  refuse.put(c, "BGRADB of a plain B", kUnsupported);
  c = base(nranks);
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_DGELU, c.k = 1;
  refuse.put(c, "a derivative of k = 1", kUnsupported);
  c = base(nranks, CUDA_C_32F, CUDA_C_32F);
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_RELU;
  refuse.put(c, "RELU of complex numbers", kUnsupported);
  for (Pattern pattern : {Pattern::kAllGather, Pattern::kAllReduce}) {
    if (nranks == 1 && pattern == Pattern::kAllGather) continue;  // one rank's layouts are those of every pattern
    c = base(nranks, CUDA_R_32F, CUDA_R_32F, pattern);
    c.trans_a = CUBLAS_OP_T;
    c.settings = {{ATTRIBUTE(ALGO_TYPE), CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST}};
    refuse.put(c, "ATOMIC_MULTICAST only reduces and scatters", kUnsupported);
  }
  c.m = 26;  // rows of 104 bytes
  c.settings = {{ATTRIBUTE(ALGO_TYPE), CUBLASMP_MATMUL_ALGO_TYPE_FUSED}};
  refuse.put(c, "FUSED of rows that are no multiple of 16 bytes", kUnsupported);
  c = base(nranks, CUDA_R_8F_E4M3, CUDA_R_16BF);
  c.m = c.n = c.k = 64;
  refuse.put(c, "fp8 that is not stored along k", kUnsupported);
  c.trans_a = CUBLAS_OP_T, c.in = c.in_b = CUDA_R_8F_E5M2;
  refuse.put(c, "f8e5m2 twice", kUnsupported);
  c.in = c.in_b = CUDA_R_8F_E4M3, c.out = CUDA_R_64F;
  refuse.put(c, "fp8 to f64", kUnsupported);
  c.out = CUDA_R_16BF, c.k = 24;
  refuse.put(c, "k = 24 of fp8", kInvalid);
  c.k = 64;
  c.settings = {{ATTRIBUTE(A_SCALE_MODE), 3}, {ATTRIBUTE(B_SCALE_MODE), 4}};
  refuse.put(c, "scales of rows beside scales of blocks", kUnsupported);
  c.settings = {{ATTRIBUTE(A_SCALE_MODE), 7}, {ATTRIBUTE(B_SCALE_MODE), 7}};
  refuse.put(c, "scale mode 7", kInvalid);
  c = base(nranks, CUDA_R_16BF, CUDA_R_16BF);
  c.change = [](Call& call) { call.bytes = call.bytes > 0 ? call.bytes - 1 : 0; };
  refuse.put(c, "a workspace that is a byte short", kInvalid);
  c.change = [](Call& call) { call.work = nullptr; };
  refuse.put(c, "no workspace", kInvalid);
}

#undef ATTRIBUTE

}  // namespace

void add_refusals(int nranks, const Add& add) {
  Refusals refuse(nranks, add);
  add_arguments(refuse);
  add_descriptors(refuse);
  add_attributes(nranks, refuse);
  add_combinations(nranks, refuse);
}

}  // namespace jaxmp::conformance
