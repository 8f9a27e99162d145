#include <array>
#include <cstring>

#include "csrc/base/status.h"
#include "csrc/hostmp/validate/validate.h"

namespace jaxmp::hostmp {
namespace {

// Every number on which ranks must agree, as a double: all are small integers, or doubles already.
struct Fields {
  static constexpr size_t kMost = 80;
  std::array<const char*, kMost> names;
  std::array<char, kMost> matrices;  // the name of a matrix to append, or 0
  std::array<double, kMost> values;
  size_t count = 0;

  template <typename T>
  void Add(const char* name, T value, char matrix = 0) {
    names[count] = name;
    matrices[count] = matrix;
    values[count++] = static_cast<double>(value);
  }
};

void AddMatrix(const Operand& x, char name, Fields* fields) {
  fields->Add("m", x.desc.rows.extent, name);
  fields->Add("n", x.desc.cols.extent, name);
  fields->Add("mb", x.desc.rows.block, name);
  fields->Add("nb", x.desc.cols.block, name);
  fields->Add("rsrc", x.desc.rows.source, name);
  fields->Add("csrc", x.desc.cols.source, name);
  fields->Add("type", x.desc.type, name);
  fields->Add("nprow of the grid of ", x.desc.grid.nprow, name);
  fields->Add("layout of the grid of ", x.desc.grid.layout, name);
  fields->Add("first row of ", x.row + 1, name);
  fields->Add("first column of ", x.col + 1, name);
}

// Tensor-wide scales belong to the whole matrix, so their values must agree; block scales differ between ranks.
void AddScales(const MatmulCall& call, Fields* fields) {
  const auto add = [fields](const char* mode, const char* value, const Scales& scales) {
    fields->Add(mode, scales.mode);
    const bool is_scalar = scales.mode == abi::CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
    fields->Add(value, is_scalar ? scales.scalar() : 0.0f);
  };
  add("A_SCALE_MODE", "the scale of A", call.scale_a);
  add("B_SCALE_MODE", "the scale of B", call.scale_b);
  add("C_SCALE_MODE", "the scale of C", call.scale_c);
  add("D_SCALE_MODE", "the scale of D", call.scale_d);
  add("EPILOGUE_AUX_SCALE_MODE", "the scale of the aux", call.scale_aux);
  fields->Add("D_OUT_SCALE_POINTER (set or not)", call.has_d_out_scale);
  fields->Add("AMAX_D_POINTER (set or not)", call.amax_d != nullptr);
  fields->Add("EPILOGUE_AUX_AMAX_POINTER (set or not)", call.amax_aux != nullptr);
  fields->Add("EPILOGUE_AUX_DATA_TYPE", call.aux_type);
}

Fields FieldsOf(const MatmulCall& call) {
  Fields fields;
  fields.Add("m", call.m);
  fields.Add("n", call.n);
  fields.Add("k", call.k);
  fields.Add("TRANSA", call.trans_a);
  fields.Add("TRANSB", call.trans_b);
  fields.Add("COMPUTE_TYPE", call.compute);
  fields.Add("ALGO_TYPE", call.algo);
  fields.Add("COMMUNICATION_SM_COUNT", call.communication_sm_count);
  fields.Add("COMMUNICATION_TYPE", call.communication_type);
  fields.Add("EPILOGUE", call.epilog + (call.is_all_reduce ? 1 : 0));
  fields.Add("the order of sums", call.fixed_reduction_order);
  fields.Add("alpha", call.alpha.real());
  fields.Add("alpha (imaginary part)", call.alpha.imag());
  fields.Add("beta", call.beta.real());
  fields.Add("beta (imaginary part)", call.beta.imag());
  AddMatrix(call.a, 'A', &fields);
  AddMatrix(call.b, 'B', &fields);
  AddMatrix(call.d, 'D', &fields);
  AddScales(call, &fields);
  return fields;
}

}  // namespace

Status CheckAgreement(const std::vector<const MatmulCall*>& calls) {
  const Fields first = FieldsOf(*calls[0]);
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    const MatmulCall& call = *calls[rank];
    if (call.grid().comm.group != calls[0]->grid().comm.group || call.rank != static_cast<int>(rank)) {
      return FailedPrecondition("ranks that meet here are of different communicators: rank ", rank, " came as rank ",
                                call.rank, " of ", call.nranks);
    }
    const Fields other = FieldsOf(call);
    for (size_t i = 0; i < first.count; ++i) {
      // Compared by bits, because alpha may be a NaN. Calls with and without ALLREDUCE differ already at EPILOGUE.
      if (std::memcmp(&first.values[i], &other.values[i], sizeof(double)) == 0) continue;
      return FailedPrecondition("ranks disagree on ", first.names[i],
                                std::string(first.matrices[i] ? 1 : 0, first.matrices[i]), ": rank 0 has ",
                                first.values[i], ", rank ", rank, " has ", other.values[i],
                                "; every rank must pass the same");
    }
  }
  return {};
}

}  // namespace jaxmp::hostmp
