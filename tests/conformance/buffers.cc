#include "tests/conformance/buffers.h"

#include <limits>

namespace jaxmp::conformance {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool is_tiled(int mode) {
  return mode == CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3 || mode == CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
}

// Returns the index of a block's scale in a rank's part, by the cuBLAS documentation, "Narrow Precision Data Types
// Usage"; `inners` blocks along k, `outers` elements across it.
int64_t scale_index(int mode, int64_t inner, int64_t outer, int64_t inners, int64_t outers) {
  switch (mode) {
    case CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32:
      return 0;
    case CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32:
      return outer;
    case CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32:
      return inner * outers + outer;
    case CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32:
      return outer / 128 * round_up(inners, 4) + inner;
    default:  // tiles of 128 x 4
      return (outer / 128 * (round_up(inners, 4) / 4) + inner / 4) * 512 + outer % 32 * 16 + outer % 128 / 32 * 4 +
             inner % 4;
  }
}

int64_t scale_count(int mode, int64_t inners, int64_t outers) {
  switch (mode) {
    case CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32:
      return 1;
    case CUBLASMP_MATMUL_MATRIX_SCALE_OUTER_VEC_FP32:
      return outers;
    case CUBLASMP_MATMUL_MATRIX_SCALE_VEC128_FP32:
      return inners * outers;
    case CUBLASMP_MATMUL_MATRIX_SCALE_BLK128x128_FP32:
      return round_up(inners, 4) * ((outers + 127) / 128);
    default:
      return round_up(inners, 4) * round_up(outers, 128);
  }
}

// The scales of tiled modes are bytes: a power of two, or an unsigned e4m3.
void put_scale(int mode, double value, char* data, int64_t index) {
  if (mode == CUBLASMP_MATMUL_MATRIX_SCALE_VEC32_UE8M0) {
    data[index] = static_cast<char>(127 + std::ilogb(value));
  } else if (mode == CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3) {
    test::encode(CUDA_R_8F_E4M3, value, data + index);
  } else {
    test::encode(CUDA_R_32F, value, data + 4 * index);
  }
}

double get_tiled_scale(int mode, const char* data, int64_t index) {
  if (mode == CUBLASMP_MATMUL_MATRIX_SCALE_VEC16_UE4M3) return test::decode(CUDA_R_8F_E4M3, data + index).real();
  return std::ldexp(1.0, static_cast<unsigned char>(data[index]) - 127);
}

// Returns the smallest number above 0, or 1e-37 if it is out of reach.
double smallest(cudaDataType_t type) {
  if (type == CUDA_R_8F_E4M3) return std::ldexp(1, -9);
  if (type == CUDA_R_8F_E5M2) return std::ldexp(1, -16);
  return type == CUDA_R_16F ? std::ldexp(1, -24) : 1e-37;
}

// Returns the allowed error of a sum of terms of this size, including its final rounding to a neighbour.
double allowance(const Case& c, cudaDataType_t type, double magnitude, Number want) {
  const double u_acc = test::unit_roundoff(c.accumulator()), u_out = test::unit_roundoff(type);
  return 8 * u_acc * magnitude + 2 * u_out * std::abs(want) + smallest(type);
}

}  // namespace

void Verdict::add(Number got, Number want, double allowed) {
  if (got == want) return;
  is_exact = false;
  const double used = std::abs(got - want) / allowed;
  worst = used <= worst ? worst : used;                               // also for a NaN
  if (std::isnan(worst)) worst = std::numeric_limits<double>::max();  // JSON has no word for NaN
}

int64_t Buffers::lld(const test::Layout& layout) const {
  return std::max<int64_t>(1, layout.local_shape(number_).first) + c_.extra_ld;
}

Buffers::Buffers(const Case& given, const Operands& operands, Rank* rank, int number)
    : layouts(test::layouts_of(given)), c_(given), rank_(rank), number_(number) {
  a = scatter(operands.a, layouts.a, given.in);
  b = scatter(operands.b, layouts.b, given.in_b);
  c = scatter(operands.c, layouts.d, given.c_type);
  d = given.is_in_place ? scatter(operands.c, layouts.d, given.c_type)
                        : Buffer(rank, bytes_of(given.out, layouts.d.local_shape(number).second * lld(layouts.d)));
  for (Buffer* buffer : {&c, &d}) {
    if (given.c_is_nan) std::memset(buffer->before(), 0xff, buffer->bytes());
  }
  const bool ta = given.trans_a != CUBLAS_OP_N, tb = given.trans_b != CUBLAS_OP_N;
  if (given.scale_a != kUnscaled) scale_a = scatter_scales(layouts.a, given.scale_a, kSeedA, ta);
  if (given.scale_b != kUnscaled) scale_b = scatter_scales(layouts.b, given.scale_b, kSeedB, !tb);
  if (given.has_scale_c) scale_c = scalar(kScaleC);
  if (given.has_scale_d) scale_d = scalar(kScaleD);
  if (given.has_scale_aux) scale_aux = scalar(kScaleAux);
  if (given.has_amax) amax = Buffer(rank, 4);
  if (given.has_amax_aux) amax_aux = Buffer(rank, 4);
  if (given.d_out_scale != kUnscaled) {
    const auto [rows, cols] = layouts.d.local_shape(number);
    const int64_t count = scale_count(given.d_out_scale, rows / inner_block(given.d_out_scale), cols);
    d_out_scale = Buffer(rank, static_cast<size_t>(count));
  }
  make_epilog(operands);
}

Buffer Buffers::scatter(const Matrix& whole, const test::Layout& layout, cudaDataType_t type) {
  const auto [rows, cols] = layout.local_shape(number_);
  const int64_t ld = lld(layout);
  Buffer buffer(rank_, rows > 0 && cols > 0 ? bytes_of(type, cols * ld) : 0);
  layout.each_of(number_, [&](int64_t i, int64_t j, int64_t row, int64_t col) {
    // An all-reduce's C is the same on every rank, side by side.
    test::encode_at(type, whole.at(i, j % whole.cols), buffer.before(), col * ld + row);
  });
  return buffer;
}

Buffer Buffers::scatter_scales(const test::Layout& layout, int mode, unsigned seed, bool is_inner_row) {
  const auto [rows, cols] = layout.local_shape(number_);
  const int64_t inner_extent = is_inner_row ? rows : cols, outers = is_inner_row ? cols : rows;
  const int64_t inners = (inner_extent + inner_block(mode) - 1) / inner_block(mode);
  const int64_t count = scale_count(mode, inners, outers);
  Buffer buffer(rank_, static_cast<size_t>(is_tiled(mode) ? count : 4 * count));
  layout.each_of(number_, [&](int64_t i, int64_t j, int64_t row, int64_t col) {
    const int64_t inner = (is_inner_row ? row : col) / inner_block(mode), outer = is_inner_row ? col : row;
    put_scale(mode, scale_of(mode, is_inner_row ? i : j, is_inner_row ? j : i, seed), buffer.before(),
              scale_index(mode, inner, outer, inners, outers));
  });
  return buffer;
}

Buffer Buffers::scalar(double value) {
  Buffer buffer(rank_, 4);
  test::encode(CUDA_R_32F, value, buffer.before());
  return buffer;
}

bool Buffers::holds_row(int64_t i) const {
  for (int64_t j = 0; j < layouts.d.cols; ++j) {
    if (layouts.d.owner(i, j) == number_) return true;
  }
  return false;
}

void Buffers::make_epilog(const Operands& operands) {
  const auto [rows, cols] = layouts.d.local_shape(number_);
  if (test::has_bias(c_.epilog)) {
    bias = Buffer(rank_, bytes_of(c_.bias_type, rows));
    for (int64_t i = 0; i < c_.m; ++i) {
      if (!holds_row(i)) continue;
      test::encode_at(c_.bias_type, operands.bias[static_cast<size_t>(i)], bias.before(), layouts.d.local_row(i));
    }
  }
  if (test::has_gradient(c_.epilog)) {
    gradient = Buffer(rank_, bytes_of(c_.bias_type, c_.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB ? c_.n : rows));
  }
  if (!test::has_aux(c_.epilog)) return;
  const bool is_mask = test::is_relu(c_.epilog);
  aux_ld = round_up(rows, is_mask ? 128 : 8);
  aux = Buffer(rank_, is_mask ? static_cast<size_t>(aux_ld / 8 * cols) : bytes_of(c_.aux_type, aux_ld * cols));
  const bool is_written = c_.aux_is_whole && !test::is_derivative(c_.epilog);
  if (is_mask && !is_written) std::memset(aux.before(), 0, aux.bytes());  // gathering needs zeros
  if (test::is_derivative(c_.epilog)) put_aux(operands.aux);
}

void Buffers::put_aux(const Matrix& whole) {
  layouts.d.each_of(number_, [&](int64_t i, int64_t j, int64_t row, int64_t col) {
    const Number value = whole.at(i, j % c_.n);
    const int64_t at = col * aux_ld + row;
    if (!test::is_relu(c_.epilog)) {
      test::encode_at(c_.aux_type, value, aux.before(), at);
    } else if (value.real() > 0) {
      aux.before()[at / 8] = static_cast<char>(aux.before()[at / 8] | 1 << (row % 8));
    }
  });
}

std::array<Buffer*, 15> Buffers::all() {
  return {&a,       &b,       &c,       &d,         &bias, &aux,      &gradient,   &scale_a,
          &scale_b, &scale_c, &scale_d, &scale_aux, &amax, &amax_aux, &d_out_scale};
}

Status Buffers::write() {
  for (Buffer* buffer : all()) {
    if (buffer->is_missing()) return ResourceExhausted("no memory for the operands");
    JAXMP_RETURN_IF_ERROR(buffer->write());
  }
  return {};
}

Status Buffers::read() {
  for (Buffer* buffer : all()) JAXMP_RETURN_IF_ERROR(buffer->read());
  return {};
}

bool Buffers::is_memory_intact() const {
  for (const Buffer* input : {&a, &b, &c, &bias, &scale_a, &scale_b, &scale_c, &scale_d, &scale_aux}) {
    if (!input->is_untouched()) return false;
  }
  if (test::is_derivative(c_.epilog) && !aux.is_untouched()) return false;
  for (const Buffer* output : {&d, &aux, &gradient, &amax, &amax_aux, &d_out_scale}) {
    if (!output->margins_are_intact()) return false;
  }
  return true;
}

std::map<std::string, Verdict> Buffers::judge(const Expected& expected, bool is_host) const {
  std::map<std::string, Verdict> results;
  results["d"] = c_.d_out_scale == kUnscaled ? judge_d(expected) : judge_blocks(expected);
  if (test::has_aux(c_.epilog) && !test::is_derivative(c_.epilog)) results["aux"] = judge_aux(expected, is_host);
  if (test::has_gradient(c_.epilog)) results["gradient"] = judge_gradient(expected);
  if (c_.has_amax) results["amax"] = judge_amax(expected.d, amax);
  if (c_.has_amax_aux) results["amax of aux"] = judge_amax(expected.z, amax_aux);
  return results;
}

Verdict Buffers::judge_d(const Expected& expected) const {
  Verdict verdict;
  const double scale = c_.has_scale_d ? kScaleD : 1;
  const int64_t ld = lld(layouts.d);
  layouts.d.each_of(number_, [&](int64_t i, int64_t j, int64_t row, int64_t col) {
    const Number want = expected.d.at(i, j % c_.n) * scale;
    const double slack = expected.slack.at(i, j % c_.n).real() + expected.magnitude.at(i, j % c_.n).real();
    verdict.add(get_element(c_.out, d.after(), col * ld + row), stored(c_.out, want),
                allowance(c_, c_.out, slack, want));
  });
  return verdict;
}

// D times the scales that the call computed for its blocks. Half the distance of neighbours in e4m3 is a 16th of a
// number; in e2m1 up to a 6th of a block's largest, and its scale is rounded to a 16th too.
Verdict Buffers::judge_blocks(const Expected& expected) const {
  Verdict verdict;
  const int64_t block = inner_block(c_.d_out_scale), inners = layouts.d.local_shape(number_).first / block;
  const int64_t ld = lld(layouts.d);
  for (int64_t j = 0; j < layouts.d.cols; ++j) {
    for (int64_t first = 0; first < c_.m; first += block) {
      if (layouts.d.owner(first, j) != number_) continue;
      double most = 0;
      for (int64_t i = first; i < first + block; ++i) {
        most = std::max(most, std::abs(expected.d.at(i, j % c_.n)));
      }
      const int64_t row = layouts.d.local_row(first), col = layouts.d.local_col(j);
      const int64_t index = scale_index(c_.d_out_scale, row / block, col, inners, 0);
      const double scale = get_tiled_scale(c_.d_out_scale, d_out_scale.after(), index);
      for (int64_t i = 0; i < block; ++i) {
        const Number want = expected.d.at(first + i, j % c_.n);
        const double allowed = c_.out == CUDA_R_4F_E2M1 ? most / 4 : std::abs(want) / 16 + most / 1024;
        verdict.add(get_element(c_.out, d.after(), col * ld + row + i) * scale, want, allowed + 1e-37);
      }
    }
  }
  return verdict;
}

// Judges the mask of a sum of 0 only on hostmp: cuBLASMp has ones there.
Verdict Buffers::judge_aux(const Expected& expected, bool is_host) const {
  Verdict verdict;
  const auto at_bit = [this](int64_t at) { return aux.after()[at / 8] >> (at % 8) & 1; };
  const auto [rows, cols] = layouts.d.local_shape(number_);
  for (int64_t at = 0; c_.aux_is_whole && at < cols * aux_ld; ++at) {
    if (at % aux_ld < rows) continue;
    verdict.add(test::is_relu(c_.epilog) ? at_bit(at) : get_element(c_.aux_type, aux.after(), at), 0, 1e-37);
  }
  layouts.d.each_of(number_, [&](int64_t i, int64_t j, int64_t row, int64_t col) {
    const Number z = expected.z.at(i, j % c_.n);
    const double magnitude = expected.magnitude.at(i, j % c_.n).real();
    const int64_t at = col * aux_ld + row;
    if (test::is_relu(c_.epilog)) {
      const double unsure = c_.is_random ? 8 * test::unit_roundoff(c_.accumulator()) : 0;
      const bool is_free = z.real() == 0 && !is_host;
      const int want = is_free ? at_bit(at) : z.real() > 0 ? 1 : 0;
      verdict.add(at_bit(at), want, std::abs(z) < unsure * magnitude ? 1 : 1e-37);
    } else {
      const Number want = z * (c_.has_scale_aux ? kScaleAux : 1);
      verdict.add(get_element(c_.aux_type, aux.after(), at), stored(c_.aux_type, want),
                  allowance(c_, c_.aux_type, magnitude, want));
    }
  });
  return verdict;
}

Verdict Buffers::judge_gradient(const Expected& expected) const {
  Verdict verdict;
  const bool is_of_b = c_.epilog == CUBLASMP_MATMUL_EPILOGUE_BGRADB;
  for (size_t i = 0; i < expected.gradient.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (!is_of_b && !holds_row(index)) continue;
    const int64_t at = is_of_b ? index : layouts.d.local_row(index);
    const Number want = expected.gradient[i];
    verdict.add(get_element(c_.bias_type, gradient.after(), at), stored(c_.bias_type, want),
                std::max(expected.gradient_slack[i], allowance(c_, c_.bias_type, 0, want)));
  }
  return verdict;
}

// The amax of this rank's part, before its scaling: cuBLASMp takes no maximum over ranks.
Verdict Buffers::judge_amax(const Matrix& whole, const Buffer& buffer) const {
  double most = 0;
  layouts.d.each_of(
      number_, [&](int64_t i, int64_t j, int64_t, int64_t) { most = std::max(most, std::abs(whole.at(i, j % c_.n))); });
  Verdict verdict;
  verdict.add(test::decode(CUDA_R_32F, buffer.after()), stored(CUDA_R_32F, most),
              allowance(c_, CUDA_R_32F, most, most));
  return verdict;
}

}  // namespace jaxmp::conformance
