// Seeded faults of C++. Each stands in place of one function, by the linker's --wrap, and calls the original.
//
// `run.py` compiles this file for each fault of `CPP` in faults.py: with -DFAULT_<its name>, and the mangled name of
// the function as SYMBOL.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/barrier/barrier.h"
#include "csrc/barrier/call_signature.h"
#include "csrc/hostmp/exec/bias_grad.h"
#include "csrc/hostmp/exec/collective_call.h"
#include "csrc/hostmp/exec/epilog.h"
#include "csrc/hostmp/kernels/simd_gemm.h"
#include "csrc/hostmp/numeric/activations.h"
#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/numeric/low_precision.h"
#include "csrc/hostmp/numeric/scales.h"
#include "csrc/hostmp/tiling/tiling.h"
#include "csrc/hostmp/validate/validate.h"
#include "csrc/plan/distribution.h"
#include "csrc/shared_memory/collective.h"

// SEED(result, (parameters)) { body of the fault, which may call Original(...) }
#define SEED(result, parameters)                    \
  result Original parameters asm("__real_" SYMBOL); \
  result Fault parameters asm("__wrap_" SYMBOL);    \
  result Fault parameters

namespace jaxmp {
using namespace hostmp;  // NOLINT
using abi::cudaDataType_t;

#if defined(FAULT_alpha_of_ordered_sums)
SEED(void, (SimdLevel level, cudaDataType_t type, const KSegments& segments, double, bool adds, char* scratch)) {
  Original(level, type, segments, 1.0, adds, scratch);
}
#elif defined(FAULT_few_columns_keep_the_last_block)
SEED(void, (SimdLevel level, cudaDataType_t type, const KSegments& segments, double alpha, bool)) {
  Original(level, type, segments, alpha, false);
}
#elif defined(FAULT_bf16_is_cut)
SEED(void, (const float* from, BFloat16* to, int64_t count)) {
  std::vector<float> cut(from, from + count);
  for (float& value : cut) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits &= 0xffff0000u;
    std::memcpy(&value, &bits, sizeof(bits));
  }
  Original(cut.data(), to, count);
}
#elif defined(FAULT_large_is_encoded_as_zero)
SEED(void, (cudaDataType_t type, const float* from, int64_t count, void* to)) {
  std::vector<float> values(from, from + count);
  for (float& value : values) {
    if (std::abs(value) > Largest(type)) value = 0;
  }
  Original(type, values.data(), count, to);
}
#elif defined(FAULT_scale_of_decoded_numbers)
SEED(void, (cudaDataType_t type, const void* from, int64_t first, int64_t count, float, BFloat16* to)) {
  Original(type, from, first, count, 1, to);
}
#elif defined(FAULT_half_byte_that_begins_a_row)
SEED(void, (cudaDataType_t type, const void* from, int64_t first, int64_t count, int8_t* to)) {
  Original(type, from, first & ~int64_t{1}, count, to);
}
#elif defined(FAULT_amax_behind_the_scale)
SEED(uint32_t, (const Downconversion& output)) {
  const uint32_t most = Original(output);
  float value;
  std::memcpy(&value, &most, sizeof(value));
  return AbsoluteBits(value * output.scale);
}
#elif defined(FAULT_slope_of_gelu)
SEED(void, (float* values, int64_t count)) {
  for (int64_t i = 0; i < count; ++i) values[i] = std::min(values[i], 3.0f);
  Original(values, count);
}
#elif defined(FAULT_padding_of_aux)
SEED(void, (const Finish& finish, cudaDataType_t accumulator, cudaDataType_t out)) {
  Finish cut = finish;
  cut.aux_rows = finish.rows;
  Original(cut, accumulator, out);
}
#elif defined(FAULT_last_piece_of_a_bias_gradient)
SEED(void, (const DistributedProduct& product, const BiasGrad& work, size_t piece)) {
  if (piece == 0 || piece + 1 != work.pieces()) Original(product, work, piece);
}
#elif defined(FAULT_ranks_agree_on_anything)
SEED(Status, (const std::vector<const MatmulCall*>&)) { return Status(); }
#elif defined(FAULT_order_of_segments)
SEED(Tiling, (const MatmulCall& call)) {
  Tiling tiling = Original(call);
  std::reverse(tiling.k.begin(), tiling.k.end());
  return tiling;
}
#elif defined(FAULT_first_process_of_d)
SEED(StatusOr<Distribution>, (const Problem& problem)) {
  StatusOr<Distribution> distribution = Original(problem);
  if (distribution.ok()) distribution->d.row_source = distribution->d.col_source = 0;
  return distribution;
}
#elif defined(FAULT_fields_are_not_compared)
SEED(StatusOr<std::shared_ptr<const CallSignature> >, (CallSignature signature)) {
  signature.fields.clear();
  return Original(std::move(signature));
}
#elif defined(FAULT_ranks_in_another_order)
SEED(void, (const std::shared_ptr<const SharedCollective>& call, const Origin& origin, int64_t position,
            const CollectiveArrays& arrays, std::function<void(const Status&)> done)) {
  auto turned = std::make_shared<SharedCollective>(*call);
  const int64_t last = *std::max_element(turned->ranks.begin(), turned->ranks.end());
  for (int64_t& rank : turned->ranks) rank = last - rank;
  Original(turned, origin, position, arrays, std::move(done));
}
#endif

}  // namespace jaxmp
