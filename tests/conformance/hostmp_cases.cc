#include <array>
#include <numeric>

#include "tests/conformance/case.h"
#include "tests/conformance/operands.h"

namespace jaxmp::conformance {
namespace {

bool is_plain(const Case& c) { return c.trans_a == CUBLAS_OP_N && c.trans_b == CUBLAS_OP_N; }

void set_extents(Case* c, int64_t m, int64_t n, int64_t k) { c->m = m, c->n = n, c->k = k; }

void set_types(Case* c, cudaDataType_t a, cudaDataType_t b, cudaDataType_t out) {
  c->in = a, c->in_b = b;
  c->out = c->c_type = c->bias_type = c->aux_type = out;
}

// Odd extents that no number of ranks divides, with every transposition and type.
void add_odd(int nranks, const Add& add) {
  for (const auto& [in, out] : kTypes) {
    for (Case c : layouts_on("odd", nranks, in, out)) {
      set_extents(&c, 13, 11, 17);
      add_transposed(c, add);
    }
  }
}

void add_shapes(int nranks, const Add& add) {
  const int64_t shapes[][3] = {{1, 1, 1}, {2, 2, 2}, {4, 4, 4}, {5, 1, 7},    {1, 9, 1},    {8, 8, 0},
                               {0, 4, 4}, {4, 0, 4}, {0, 0, 0}, {64, 48, 80}, {33, 65, 17}, {130, 260, 70}};
  for (cudaDataType_t type : {CUDA_R_32F, CUDA_R_16BF}) {
    for (Case c : layouts_on("shape", nranks, type, type)) {
      for (const auto& [m, n, k] : shapes) {
        set_extents(&c, m, n, k);
        add(c);
      }
    }
  }
}

// Many tiles, k deeper than a panel, leading dimensions with a gap.
void add_large(int nranks, const Add& add) {
  for (const auto& [in, out] :
       {std::pair(CUDA_R_32F, CUDA_R_32F), {CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16F, CUDA_R_32F}}) {
    for (Case c : layouts_on("large", nranks, in, out)) {
      c.extra_ld = 5;
      set_extents(&c, 131, 260, 1101);
      if (c.pattern == Pattern::kCyclic) set_extents(&c, 31, 33, 37);
      if (c.pattern != Pattern::kCyclic) c.trans_a = CUBLAS_OP_T;
      add(c);
    }
  }
}

// D = alpha A B + beta C, in place too; with k = 0; and with beta = 0, where C and D hold NaN and must not be read.
void add_scalars(int nranks, const Add& add) {
  for (const auto& [in, out] : kTypes) {
    for (Case c : layouts_on("scalars", nranks, in, out)) {
      set_extents(&c, 12, 24, 36);
      c.has_c = true;
      c.alpha = Facts(in).is_complex ? Number(2, -1) : Number(-2);
      c.beta = Facts(in).is_complex ? Number(1, 3) : Number(3);
      add(c);
      c.is_in_place = true;
      add(c);
      c.is_in_place = false, c.k = 0;
      add(c);
      c.beta = 0, c.k = 36, c.c_is_nan = true;
      add(c);
    }
  }
}

constexpr cudaDataType_t kWide[] = {CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};

// Fits numbers to the narrow type: no sign for unsigned types, powers of two for exponents.
void fit_narrow(const Case& c, Operands* x) {
  for (const auto& [matrix, type] : {std::pair(&x->a, c.in), std::pair(&x->b, c.in_b)}) {
    for (size_t i = 0; i < matrix->values.size(); ++i) {
      double value = static_cast<double>(i * i % 7) - 3;
      if (type == CUDA_R_8U || type == host_types::kU4) value = std::abs(value);
      if (type == host_types::kE8M0) value = std::exp2(value);
      matrix->values[i] = value;
    }
  }
}

// Adds the case with the narrow operand on either side.
void add_mixed(Case c, cudaDataType_t narrow, cudaDataType_t wide, cudaDataType_t out, const Add& add) {
  c.topic = "mixed";
  for (const bool is_a_narrow : {true, false}) {
    set_types(&c, is_a_narrow ? narrow : wide, is_a_narrow ? wide : narrow, out);
    c.fill = [c](Operands& x) { fit_narrow(c, &x); };
    add(c);
  }
}

void add_every_mixed(int nranks, const Add& add) {
  const auto add_types = [&add](const Case& c) {
    for (cudaDataType_t narrow :
         {CUDA_R_8I, CUDA_R_8U, host_types::kS4, host_types::kU4, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2, CUDA_R_4F_E2M1,
          host_types::kE3M4, host_types::kE4M3Ieee, host_types::kE4M3B11Fnuz, host_types::kE4M3Fnuz,
          host_types::kE5M2Fnuz, host_types::kE8M0}) {
      for (cudaDataType_t wide : kWide) {
        add_mixed(c, narrow, wide, wide, add);
        if (wide != CUDA_R_32F && is_plain(c)) add_mixed(c, narrow, wide, CUDA_R_32F, add);
      }
    }
  };
  for (Case c : layouts_on("mixed", nranks)) {
    set_extents(&c, 13, 11, 17);
    c.pattern == Pattern::kCyclic ? add_types(c) : add_transposed(c, add_types);
  }
  // Several blocks of rows and of k; few columns and many; 600 is beyond any kernel's.
  Case c = make_case("mixed", Pattern::kAllGather, nranks);
  c.has_c = true, c.beta = 3, c.extra_ld = 1;
  const auto add_large = [&add](const Case& c) {
    for (cudaDataType_t narrow : {CUDA_R_8I, host_types::kU4}) {
      for (cudaDataType_t wide : kWide) add_mixed(c, narrow, wide, wide, add);
    }
  };
  for (const auto& [m, n, k] : {std::array{1101, 3, 1031}, std::array{39, 600, 1031}, std::array{70, 40, 515}}) {
    set_extents(&c, m, n, k);
    c.fixed_reduction_order = n == 40;
    if (nranks == 2) add_transposed(c, add_large);
  }
}

void add_scaled_integers(int nranks, const Add& add) {
  constexpr int kRows = CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32, kOne = CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
  for (cudaDataType_t out : kWide) {
    for (Case c : layouts_on("scaled integers", nranks, CUDA_R_8I, out)) {
      const bool is_cyclic = c.pattern == Pattern::kCyclic;
      set_extents(&c, 13, 11, 17);
      for (const auto& [a, b] : {std::pair(kRows, kRows), {kRows, kOne}, {kUnscaled, kRows}}) {
        c.scale_a = a, c.scale_b = b;
        if (!is_cyclic) add_transposed(c, add);
        if (is_cyclic && b == kRows) add(c);
      }
      c.has_c = true, c.alpha = 2, c.beta = -1, c.extra_ld = 3;
      c.epilog = is_cyclic ? 0 : CUBLASMP_MATMUL_EPILOGUE_RELU_AUX_BIAS;
      add(c);
      c.k = 0;
      add(c);
    }
  }
}

void add_random(Case c, const char* topic, int epilog, const Add& add) {
  c.topic = topic, c.epilog = epilog, c.is_random = c.aux_is_whole = true;
  if (epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB) c.trans_b = CUBLAS_OP_T;
  add(c);
}

void add_random_epilogs(int nranks, const Add& add) {
  const std::pair<cudaDataType_t, cudaDataType_t> types[] = {{CUDA_R_32F, CUDA_R_32F},
                                                             {CUDA_R_64F, CUDA_R_64F},
                                                             {CUDA_R_16BF, CUDA_R_16BF},
                                                             {CUDA_R_16BF, CUDA_R_32F},
                                                             {CUDA_R_16F, CUDA_R_16F}};
  for (const auto& [in, out] : types) {
    for (Case c : layouts_on("epilog", nranks, in, out)) {
      if (c.pattern == Pattern::kCyclic) continue;
      set_extents(&c, 45, 42, 100);
      add_random(c, "epilog", 0, add);
      for (int epilog : kEpilogs) {
        add_random(c, "epilog", epilog, add);
        Case of_zero = c;
        set_extents(&of_zero, 1, 6, 0);
        add_random(of_zero, "epilog", epilog, add);
      }
    }
  }
  if (nranks != 2) return;
  for (int epilog : kEpilogs) {  // several tiles in both directions: tiles differ in bias and aux
    for (cudaDataType_t type : {CUDA_R_32F, CUDA_R_16BF}) {
      Case c = make_case("", Pattern::kAllReduce, 2, type, type);
      set_extents(&c, 700, 130, 520);
      c.has_c = true, c.alpha = 0.5, c.beta = -0.75;
      add_random(c, "tiles", epilog, add);
    }
  }
  for (cudaDataType_t type : {CUDA_C_32F, CUDA_C_64F}) {
    Case c = make_case("", Pattern::kReduceScatter, 2, type, type);
    set_extents(&c, 40, 30, 60);
    c.trans_a = CUBLAS_OP_C, c.has_c = true, c.alpha = {0.5, -2}, c.beta = {1, 0.25};
    add_random(c, "complex", CUBLASMP_MATMUL_EPILOGUE_BIAS, add);
  }
}

// A stored transposed, its columns are cut by another number of processes than D's rows: tiles of D then begin within a
// byte of its mask, and share that byte with their neighbours.
void add_masks(int nranks, const Add& add) {
  for (int p = 1; p <= nranks; ++p) {
    if (nranks % p != 0) continue;
    Case c = make_case("", Pattern::kGrid, nranks);
    c.p = p, c.q = nranks / p;
    const int64_t unit = std::lcm(c.p, c.q);
    for (int64_t size : {1, 3, 11, 130}) {
      set_extents(&c, size * unit, 3 * unit, 2 * unit);
      c.has_c = size == 3, c.beta = c.has_c ? 0.5 : 0;
      for (int epilog : {130, 134, 136, 152, 160, 164, 192, 208}) {
        add_transposed(c, [&](const Case& transposed) { add_random(transposed, "mask", epilog, add); });
      }
    }
  }
  // Two threads write bits of one byte at once, thousands of times: none may undo the other's.
  for (int times = 0; nranks == 7 && times < 5; ++times) {
    Case c = make_case("", Pattern::kGrid, nranks);
    set_extents(&c, 63, 4200, 14);
    c.p = 1, c.q = 7, c.trans_a = CUBLAS_OP_T, c.variant = "time " + std::to_string(times);
    add_random(c, "bytes of a mask", CUBLASMP_MATMUL_EPILOGUE_RELU_AUX, add);
  }
}

// 16-bit operands are summed in f32 over all of k and all ranks, and rounded once: 1 + 2^-9 + ... would be lost at
// every partial sum in bf16.
void add_rounding(const Add& add) {
  Case c = make_case("rounds once", Pattern::kReduceScatter, 4, CUDA_R_16BF, CUDA_R_16BF);
  set_extents(&c, 1, 4, 512);
  c.fill = [](Operands& x) {
    for (Number& value : x.a.values) value = 1;
    for (Number& value : x.b.values) value = std::ldexp(1, -8);
    for (int64_t j = 0; j < x.b.cols; ++j) x.b.at(0, j) = 256;  // D is 256 + 511/256, and 258 to 8 bits
  };
  add(c);
}

}  // namespace

std::vector<Case> hostmp_cases(int nranks) {
  std::vector<Case> cases;
  const Add add = [&cases](const Case& c) { cases.push_back(c); };
  if (nranks > 1) add_masks(nranks, add);
  if (nranks == 6) add_odd(nranks, add);
  if (nranks > 4) return cases;
  for (auto part : {add_odd, add_shapes, add_large, add_scalars, add_every_mixed, add_scaled_integers,
                    add_random_epilogs, add_refusals_of_hostmp}) {
    part(nranks, add);
  }
  if (nranks == 4) add_rounding(add);
  return cases;
}

}  // namespace jaxmp::conformance
