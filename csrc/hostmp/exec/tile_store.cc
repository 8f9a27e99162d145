#include "csrc/hostmp/exec/tile_store.h"

#include <algorithm>
#include <complex>
#include <cstring>

#include "csrc/hostmp/numeric/convert.h"
#include "csrc/hostmp/numeric/scales.h"

namespace jaxmp::hostmp {
namespace {

void RaiseTo(uint32_t* most, uint32_t value) {
  uint32_t have = __atomic_load_n(most, __ATOMIC_RELAXED);
  while (have < value && !__atomic_compare_exchange_n(most, &have, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Transposes block by block through a buffer, because the columns of a matrix may all map to one set of the L1 cache.
template <typename T>
void Transpose(const T* from, int64_t ld, int64_t rows, int64_t cols, T* to, int64_t ld_to) {
  constexpr int64_t kBlock = std::max<int64_t>(8, kAlignment / sizeof(T));  // whole cache lines
  T block[kBlock][kBlock];
  for (int64_t col = 0; col < cols; col += kBlock) {
    const int64_t width = std::min(kBlock, cols - col);
    for (int64_t row = 0; row < rows; row += kBlock) {
      const int64_t height = std::min(kBlock, rows - row);
      for (int64_t j = 0; j < width; ++j) {
        const T* const column = from + (col + j) * ld + row;
        for (int64_t i = 0; i < height; ++i) block[i][j] = column[i];
      }
      for (int64_t i = 0; i < height; ++i) std::copy_n(block[i], width, to + (row + i) * ld_to + col);
    }
  }
}

// Writes the transpose of `from`, rows x cols numbers of whole bytes, to `to`.
void TransposeView(abi::cudaDataType_t type, const MatrixView& from, int64_t rows, int64_t cols, const MatrixView& to) {
  WithType(type, [&](auto number) {
    using T = decltype(number);
    Transpose(reinterpret_cast<const T*>(from.data), from.ld, rows, cols, reinterpret_cast<T*>(to.data), to.ld);
  });
}

}  // namespace

// In an all-reduce C is the same on all ranks, so the first rank's is read.
bool TileStore::AddC(bool is_started) const {
  const MatmulCall& call = owner();
  if (!call.reads_c) return is_started;
  const MatrixView c = Locate(call.c, origin_.row, origin_.col);
  const std::complex<double> beta = call.beta * static_cast<double>(call.scale_c.scalar());
  ScaleC(c.data, c.ld, z_.data, z_.ld, rows_, cols_, beta, is_started, call.accumulator(), call.c.desc.type,
         call.takes_scales());
  return true;
}

void TileStore::Finish() const {
  Store();
  if (call_.is_all_reduce) CopyToPeers();
}

void TileStore::Mirror(const TileOrigin& to) const {
  const MatrixView from = DOf(origin_.rank);
  for (int64_t i = 0; i < (call_.is_all_reduce ? call_.nranks : 1); ++i) {
    TransposeView(call_.d.desc.type, from, rows_, cols_, Locate(CallOf(to.rank + i).d, to.row, to.col));
  }
}

void TileStore::Store() const {
  const Epilog* epilog = FindEpilog(call_.epilog);
  if (is_in_d_ && epilog->is_plain()) return;
  if (call_.stores_low_precision()) return StoreLowPrecision(epilog);
  ApplyEpilog(epilog, DOf(origin_.rank), call_.d.desc.type);
}

// For fp8 and fp4: applies the epilog to the float sums in place, then scales and encodes them.
void TileStore::StoreLowPrecision(const Epilog* epilog) const {
  if (!epilog->is_plain()) ApplyEpilog(epilog, z_, abi::CUDA_R_32F);
  const MatrixView d = DOf(origin_.rank);
  const int64_t rows_of_part = call_.is_all_reduce ? call_.m : owner().d.local_rows();
  const uint32_t amax = DownconvertTile({call_.d.desc.type, reinterpret_cast<const float*>(z_.data), z_.ld, rows_,
                                         cols_, d.data, d.ld, owner().scale_d.scalar(), owner().d_out_scale.mode,
                                         static_cast<uint8_t*>(const_cast<void*>(owner().d_out_scale.data)),
                                         origin_.row, origin_.col, rows_of_part});
  Raise(&MatmulCall::amax_d, amax);
}

// Applies the epilog to the sums and writes the result, of type `out`, to `to`.
void TileStore::ApplyEpilog(const Epilog* epilog, const MatrixView& to, abi::cudaDataType_t out) const {
  const void* bias = epilog->has_bias ? BiasAs(out) : nullptr;
  const Aux aux = epilog->has_aux ? AuxOf(origin_.rank) : Aux{};
  uint32_t amax = 0;
  FinishTile({epilog, rows_, cols_, z_.data, z_.ld, to.data, to.ld, bias, aux.data, aux.bit, aux.ld, aux.rows,
              call_.aux_type, owner().scale_aux.scalar(), &amax},
             call_.accumulator(), out);
  Raise(&MatmulCall::amax_aux, amax);
}

// The bias of the part's rows, in the given type.
const void* TileStore::BiasAs(abi::cudaDataType_t type) const {
  const abi::cudaDataType_t have = call_.bias_type;
  const char* const bias = static_cast<const char*>(owner().bias) + BytesOf(have, origin_.row);
  if (have == type) return bias;
  float* const wide = reinterpret_cast<float*>(scratch_);  // fp8 operands only; their products are done by now
  if (have == abi::CUDA_R_16BF) Widen(reinterpret_cast<const BFloat16*>(bias), wide, rows_);
  if (have == abi::CUDA_R_16F) Widen(reinterpret_cast<const Float16*>(bias), wide, rows_);
  return wide;
}

TileStore::Aux TileStore::AuxOf(int64_t rank) const {
  const MatmulCall& call = CallOf(rank);
  const int64_t local_rows = call.is_all_reduce ? call.m : call.d.local_rows();
  const bool is_last = origin_.row + rows_ == local_rows;
  Aux aux;
  aux.rows = is_last ? call.aux_ld - origin_.row : rows_;
  const bool is_mask = FindEpilog(call.epilog)->activation == Activation::kRelu;
  aux.ld = is_mask ? call.aux_ld / 8 : call.aux_ld;
  aux.stride = is_mask ? aux.ld : BytesOf(call.aux_type, aux.ld);
  aux.bit = is_mask ? origin_.row % 8 : 0;
  aux.bytes = is_mask ? CeilDiv(aux.bit + aux.rows, 8) : BytesOf(call.aux_type, aux.rows);
  const int64_t above = is_mask ? origin_.row / 8 : BytesOf(call.aux_type, origin_.row);
  aux.data = static_cast<char*>(call.aux) + origin_.col * aux.stride + above;
  return aux;
}

// Raises the maximum on every rank that has the part.
void TileStore::Raise(uint32_t* MatmulCall::* most, uint32_t value) const {
  for (int64_t rank = origin_.rank; rank <= last_rank(); ++rank) {
    uint32_t* const of_rank = CallOf(rank).*most;
    if (of_rank) RaiseTo(of_rank, value);
  }
}

void TileStore::CopyToPeers() const {
  const MatrixView from = DOf(0);
  const Epilog* epilog = FindEpilog(call_.epilog);
  const bool writes_aux = epilog->has_aux && !epilog->is_derivative;
  for (int64_t rank = 1; rank < call_.nranks; ++rank) {
    CopyView(call_.d.desc.type, from, rows_, cols_, DOf(rank));
    if (call_.has_d_out_scale) CopyScales(CallOf(rank));
    if (!writes_aux) continue;
    const Aux source = AuxOf(0), target = AuxOf(rank);
    for (int64_t col = 0; col < cols_; ++col) {
      std::memcpy(target.data + col * target.stride, source.data + col * source.stride,
                  static_cast<size_t>(source.bytes));
    }
  }
}

void TileStore::CopyScales(const MatmulCall& to) const {
  const int64_t block = BlockOf(call_.d_out_scale.mode);
  for (int64_t col = origin_.col; col < origin_.col + cols_; ++col) {
    for (int64_t row = origin_.row; row < origin_.row + rows_; row += block) {
      const int64_t at = TiledOffset(row / block, col, call_.m / block);
      static_cast<uint8_t*>(const_cast<void*>(to.d_out_scale.data))[at] =
          static_cast<const uint8_t*>(call_.d_out_scale.data)[at];
    }
  }
}

}  // namespace jaxmp::hostmp
