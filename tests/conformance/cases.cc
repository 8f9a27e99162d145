#include <array>

#include "tests/conformance/case.h"

namespace jaxmp::conformance {
namespace {

bool is_double(cudaDataType_t type) { return type == CUDA_R_64F || type == CUDA_C_64F; }

}  // namespace

std::vector<Case> layouts_on(const char* topic, int nranks, cudaDataType_t in, cudaDataType_t out) {
  std::vector<Case> result;
  if (nranks == 1) result.push_back(make_case(topic, Pattern::kLocal, 1, in, out));
  for (Pattern pattern : {Pattern::kAllGather, Pattern::kReduceScatter, Pattern::kAllReduce}) {
    result.push_back(make_case(topic, pattern, nranks, in, out));
  }
  for (Pattern pattern : {Pattern::kGrid, Pattern::kCyclic}) {
    for (int p = 1; p <= nranks; ++p) {
      if (nranks % p != 0) continue;
      Case c = make_case(topic, pattern, nranks, in, out);
      c.p = p, c.q = nranks / p;
      if (pattern == Pattern::kGrid && c.p != c.q) c.capability = "grid_any_shape";
      result.push_back(c);
    }
  }
  return result;
}

void set_transposition(Case* c, cublasOperation_t a, cublasOperation_t b) {
  c->trans_a = a, c->trans_b = b;
  const bool is_tn = a != CUBLAS_OP_N && b == CUBLAS_OP_N;
  if (c->pattern == Pattern::kAllReduce) c->capability = is_tn ? "" : "all_reduce_any_transposition";
}

void add_transposed(Case c, const Add& add) {
  const bool is_complex = Facts(c.in).is_complex;
  for (cublasOperation_t a : {CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C}) {
    for (cublasOperation_t b : {CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C}) {
      if ((a == CUBLAS_OP_C || b == CUBLAS_OP_C) && !is_complex) continue;
      set_transposition(&c, a, b);
      add(c);
    }
  }
}

std::string Case::name() const {
  std::string text = topic + ": " + test::BaseCase::name();
  if (in_b != in) text += std::string(" B ") + Facts(in_b).name;
  if (aux_type != out) text += std::string(" aux ") + Facts(aux_type).name;
  if (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_64F) text += " compute " + std::to_string(compute);
  if (scale_a != kUnscaled || scale_b != kUnscaled) {
    text += " scales " + std::to_string(scale_a) + "," + std::to_string(scale_b);
  }
  for (const auto& [is_so, word] :
       {std::pair(has_c, " C"), std::pair(is_in_place, " in place"), std::pair(c_is_nan, " of NaN"),
        std::pair(has_scale_c, " scale C"), std::pair(has_scale_d, " scale D"), std::pair(has_amax, " amax"),
        std::pair(has_scale_aux, " scale aux"), std::pair(has_amax_aux, " amax of aux"),
        std::pair(workspace == Workspace::kPlain, " plain workspace"), std::pair(is_random, " random"),
        std::pair(fixed_reduction_order, " in one order")}) {
    if (is_so) text += word;
  }
  if (extra_ld > 0) text += " ld + " + std::to_string(extra_ld);
  return variant.empty() ? text : text + ", " + variant;
}

Case make_case(const char* topic, Pattern pattern, int nranks, cudaDataType_t in, cudaDataType_t out) {
  Case c;
  c.topic = topic;
  c.pattern = pattern;
  c.p = nranks;
  // Up to 4 ranks and every grid of them divide these; all differ, so that a confusion shows.
  c.m = 24, c.n = 16, c.k = 32;
  if (pattern == Pattern::kCyclic) c.m = 23, c.n = 31, c.k = 18;
  c.in = c.in_b = in;
  c.out = c.c_type = c.bias_type = c.aux_type = out;
  c.compute = in == CUDA_R_8I ? CUBLAS_COMPUTE_32I : is_double(in) ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
  return c;
}

void add_products(int nranks, const Add& add) {
  for (const auto& [in, out] : kTypes) {
    for (Case c : layouts_on("product", nranks, in, out)) {
      add_transposed(c, add);
      c.has_c = true;
      c.alpha = 2, c.beta = -1;
      set_transposition(&c, CUBLAS_OP_T, CUBLAS_OP_N);
      add(c);
      c.is_in_place = true;
      add(c);
    }
  }
  for (Case c : layouts_on("uneven", nranks, CUDA_R_32F, CUDA_R_32F)) {
    c.m = 13, c.n = 11, c.k = 17;
    if (nranks > 1 && c.pattern != Pattern::kCyclic) add_transposed(c, add);
  }
}

void add_complex_epilogs(int nranks, const Add& add) {
  for (cudaDataType_t type : {CUDA_C_32F, CUDA_C_64F}) {
    for (Pattern pattern : {Pattern::kAllGather, Pattern::kReduceScatter}) {
      Case c = make_case("epilog", pattern, nranks, type, type);
      c.capability = "complex_epilogs";
      for (int epilog : {CUBLASMP_MATMUL_EPILOGUE_BIAS, CUBLASMP_MATMUL_EPILOGUE_BGRADA}) {
        c.epilog = epilog;
        add(c);
      }
    }
  }
}

void add_epilogs(int nranks, const Add& add) {
  add_complex_epilogs(nranks, add);
  for (const auto& [in, out] : kTypes) {
    if (Facts(in).is_complex) continue;
    for (Case c : layouts_on("epilog", nranks, in, out)) {
      if (c.pattern == Pattern::kCyclic || (c.pattern == Pattern::kGrid && c.p != c.q)) continue;
      for (int epilog : kEpilogs) {
        c.epilog = epilog;
        c.capability = c.pattern == Pattern::kGrid && nranks > 1 ? "grid_epilogs" : "";
        const bool sums_a = epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADA,
                   sums_b = epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB;
        for (cublasOperation_t a : {CUBLAS_OP_N, CUBLAS_OP_T}) {
          for (cublasOperation_t b : {CUBLAS_OP_N, CUBLAS_OP_T}) {
            if ((sums_a && a != CUBLAS_OP_N) || (sums_b && b != CUBLAS_OP_T)) continue;
            set_transposition(&c, a, b);
            add(c);
          }
        }
      }
      c.epilog = CUBLASMP_MATMUL_EPILOGUE_RELU_AUX_BIAS;
      c.has_c = true, c.alpha = 2, c.beta = -1;
      set_transposition(&c, CUBLAS_OP_T, CUBLAS_OP_N);
      add(c);
    }
  }
}

namespace {

// In units of the multiples that each rank's part must have for the types; they differ, so that a confusion shows.
Case narrow_case(Pattern pattern, int nranks, cudaDataType_t in, cudaDataType_t out, int64_t outer, int64_t k) {
  Case c = make_case("narrow", pattern, nranks, in, out);
  c.m = 2 * outer * nranks, c.n = outer * nranks, c.k = 2 * k * nranks;
  c.trans_a = CUBLAS_OP_T;
  const bool stores_narrow = Facts(out).is_low_precision;
  c.c_type = stores_narrow ? CUDA_R_16F : out;
  c.bias_type = stores_narrow ? CUDA_R_16F : out == CUDA_R_32F ? CUDA_R_16BF : out;
  return c;
}

void add_float8(Pattern pattern, int nranks, const Add& add) {
  constexpr std::pair<cudaDataType_t, cudaDataType_t> kPairs[] = {
      {CUDA_R_8F_E4M3, CUDA_R_8F_E4M3}, {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2}, {CUDA_R_8F_E5M2, CUDA_R_8F_E4M3}};
  for (const auto& [a, b] : kPairs) {
    for (cudaDataType_t out : {CUDA_R_16F, CUDA_R_16BF, CUDA_R_32F, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2}) {
      if (out == CUDA_R_8F_E5M2 && a == b) continue;
      Case c = narrow_case(pattern, nranks, a, out, 16, 16);
      c.in_b = b;
      add(c);
      c.scale_a = c.scale_b = CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
      c.has_scale_d = c.has_amax = Facts(out).is_low_precision;
      add(c);
      c.has_c = true, c.beta = -1, c.has_scale_c = Facts(out).is_low_precision;
      add(c);
    }
  }
  for (int epilog : {4, 2, 6, 130, 134, 136, 160, 164}) {
    Case c = narrow_case(pattern, nranks, CUDA_R_8F_E4M3, CUDA_R_16BF, 16, 16);
    c.epilog = epilog;
    add(c);
  }
  // GELU's aux with an fp8 D is of C's type, or fp8 itself, with a scale of its own.
  Case c = narrow_case(pattern, nranks, CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, 16, 16);
  c.has_scale_d = true;
  c.aux_type = CUDA_R_16F;
  for (int epilog : {160, 164}) {
    c.epilog = epilog;
    add(c);
  }
  c.epilog = 160;
  c.aux_type = CUDA_R_8F_E4M3;
  add(c);
  c.has_scale_aux = c.has_amax_aux = true;
  add(c);
}

void add_scaled(Pattern pattern, int nranks, const Add& add) {
  struct Kind {
    int a, b;
    cudaDataType_t in;
    int64_t outer, k;
    bool stores_narrow;
  };
  constexpr auto kVec16 = CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3, kVec32 = CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0,
                 kOuter = CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32,
                 kVec128 = CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32,
                 kBlk128 = CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32;
  const Kind kinds[] = {
      {kOuter, kOuter, CUDA_R_8F_E4M3, 16, 16, false},     {kVec128, kVec128, CUDA_R_8F_E4M3, 16, 128, false},
      {kVec128, kBlk128, CUDA_R_8F_E4M3, 128, 128, false}, {kBlk128, kVec128, CUDA_R_8F_E4M3, 128, 128, false},
      {kVec32, kVec32, CUDA_R_8F_E4M3, 128, 128, true},    {kVec16, kVec16, CUDA_R_4F_E2M1, 128, 64, true}};
  for (const Kind& kind : kinds) {
    std::vector<cudaDataType_t> outs = {CUDA_R_16BF, CUDA_R_32F};
    if (kind.stores_narrow) outs.push_back(kind.in);
    for (cudaDataType_t out : outs) {
      Case c = narrow_case(pattern, nranks, kind.in, out, kind.outer, kind.k);
      if (kind.outer == 128) c.m = c.n = kind.outer * nranks;  // the reference's time
      c.scale_a = kind.a, c.scale_b = kind.b;
      if (Facts(out).is_low_precision) c.d_out_scale = kind.a;
      if (kind.stores_narrow) c.capability = "compute capability 10";
      add(c);
    }
  }
}

}  // namespace

void add_narrow(int nranks, const Add& add) {
  const std::array<Pattern, 3> sharded = {Pattern::kAllGather, Pattern::kReduceScatter, Pattern::kAllReduce};
  for (Pattern pattern : sharded) {
    add_float8(pattern, nranks, add);
    if (nranks < 4) add_scaled(pattern, nranks, add);  // four ranks add no form to two, and cubes of 512
    Case c = narrow_case(pattern, nranks, CUDA_R_8I, CUDA_R_32I, 16, 16);
    c.has_c = true, c.alpha = 2, c.beta = -1;
    add(c);
  }
}

void add_options(int nranks, const Add& add) {
  for (Pattern pattern : {Pattern::kAllGather, Pattern::kReduceScatter, Pattern::kAllReduce}) {
    const bool sums = pattern != Pattern::kAllGather;
    Case c = make_case("option", pattern, nranks, CUDA_R_16BF, CUDA_R_16BF);
    c.trans_a = CUBLAS_OP_T;
    for (int algorithm : {1, 2, 3, 4, 5, 6}) {
      if ((algorithm == CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST && !sums) ||
          (algorithm == CUBLASMP_MATMUL_ALGO_TYPE_ATOMIC_MULTICAST && pattern != Pattern::kReduceScatter) ||
          (algorithm == CUBLASMP_MATMUL_ALGO_TYPE_FUSED && pattern != Pattern::kAllReduce)) {
        continue;
      }
      c.variant = "algorithm " + std::to_string(algorithm);
      c.settings = {{CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE, algorithm}};
      add(c);
    }
    c.variant = "8 multiprocessors communicate";
    c.settings = {{CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_SM_COUNT, 8}};
    add(c);
    for (cudaDataType_t type : {CUDA_R_16BF, CUDA_R_32F}) {
      if (!sums || nranks == 1) continue;
      c.variant = std::string("communicates ") + Facts(type).name;
      c.settings = {{CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMMUNICATION_TYPE, type}};
      add(c);
    }
    c.variant = "", c.settings = {}, c.workspace = Workspace::kPlain;
    add(c);
    c.workspace = Workspace::kRegistered;
    c.has_c = c.c_is_nan = true;
    add(c);
    c = make_case("option", pattern, nranks);
    c.trans_a = CUBLAS_OP_T;
    for (int compute : {69, 74, 75, 77, 78}) {  // some let operands be rounded
      c.compute = static_cast<cublasComputeType_t>(compute);
      add(c);
    }
    c = make_case("option", pattern, nranks, CUDA_C_32F, CUDA_C_32F);
    set_transposition(&c, CUBLAS_OP_C, CUBLAS_OP_N);
    for (int compute : {74, 75, 77, 78}) {
      c.compute = static_cast<cublasComputeType_t>(compute);
      add(c);
    }
    c = make_case("option", pattern, nranks, CUDA_R_64F, CUDA_R_64F);
    c.trans_a = CUBLAS_OP_T;
    for (int compute : {71, 79}) {
      c.compute = static_cast<cublasComputeType_t>(compute);
      add(c);
    }
  }
}

namespace {

// True for cases that cuBLASMp 0.10.0 computes wrongly or refuses, or that end or stop the process, as seen on an H200.
// jaxmp computes them in another way (jaxmp/_src/core/lowering/faults.py).
bool is_fault_of_cublasmp(const Case& c) {
  const bool is_many = c.nranks() > 1, is_double = c.out == CUDA_R_64F;
  const bool sums = c.pattern == Pattern::kReduceScatter || c.pattern == Pattern::kAllReduce;
  if (c.variant == "alpha is null") return true;
  if (is_double && (c.epilog & (CUBLASMP_MATMUL_EPILOGUE_GELU | 64))) return true;  // 11 digits
  if (!is_many) return c.pattern == Pattern::kAllReduce;
  if (c.pattern == Pattern::kGrid || c.pattern == Pattern::kCyclic) return c.trans_b != CUBLAS_OP_N;
  if (c.topic == "uneven" && c.pattern == Pattern::kAllGather) return c.trans_b != CUBLAS_OP_N;
  if (c.topic == "uneven" && c.pattern == Pattern::kAllReduce) return true;
  if (is_double && c.epilog == CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD) return true;
  if (!sums) return false;
  const bool sums_operand = c.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADA || c.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB;
  constexpr int kVec128 = CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32;
  const bool is_vec128 = c.scale_a == kVec128 && c.scale_b == kVec128;
  return sums_operand || is_vec128 || c.has_amax_aux || c.in == CUDA_R_8I;
}

}  // namespace

std::vector<Case> all_cases(int nranks) {
  std::vector<Case> cases;
  const Add add = [&cases](Case c) {
    if (c.capability.empty() && is_fault_of_cublasmp(c)) c.capability = "as_documented";
    cases.push_back(std::move(c));
  };
  for (auto part : {add_products, add_epilogs, add_narrow, add_options, add_refusals}) part(nranks, add);
  return cases;
}

}  // namespace jaxmp::conformance
