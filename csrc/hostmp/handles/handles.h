// The objects that cuBLASMp's opaque handles point to.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>

#include "csrc/cublasmp/abi.h"
#include "csrc/hostmp/handles/distribution.h"
#include "csrc/hostmp/handles/runtime.h"

namespace jaxmp::hostmp {
struct ProductTiling;
}

namespace jaxmp::abi {

struct cublasMpHandle {
  hostmp::Stream* stream;
};

struct cublasMpGrid {
  int64_t nprow, npcol;
  cublasMpGridLayout_t layout;
  ncclComm comm;
};

struct cublasMpMatrixDescriptor {
  hostmp::Axis rows, cols;
  int64_t lld;
  cudaDataType_t type;
  cublasMpGrid grid;  // a copy, so that a product survives a grid that is destroyed too early
};

struct cublasMpMatmulDescriptor {
  // The raw bytes of every attribute, in the low bytes; see AttributeSize().
  std::array<uint64_t, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME + 1> values;
  std::array<bool, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME + 1> is_set;
  bool fixed_reduction_order;
  std::shared_ptr<const hostmp::ProductTiling> tiling;  // of the last call; use std::atomic_load and _store
};

}  // namespace jaxmp::abi

namespace jaxmp::hostmp {

// The value of an attribute, in the type that cuBLASMp's header gives it.
template <typename T>
T AttributeOf(const abi::cublasMpMatmulDescriptor& desc, int number) {
  T value;
  std::memcpy(&value, &desc.values[static_cast<size_t>(number)], sizeof(value));
  return value;
}

inline int64_t RankOf(const abi::cublasMpGrid& grid, int64_t row, int64_t col) {
  return grid.layout == abi::CUBLASMP_GRID_LAYOUT_COL_MAJOR ? row + col * grid.nprow : row * grid.npcol + col;
}
inline int64_t RowOf(const abi::cublasMpGrid& grid, int64_t rank) {
  return grid.layout == abi::CUBLASMP_GRID_LAYOUT_COL_MAJOR ? rank % grid.nprow : rank / grid.npcol;
}
inline int64_t ColOf(const abi::cublasMpGrid& grid, int64_t rank) {
  return grid.layout == abi::CUBLASMP_GRID_LAYOUT_COL_MAJOR ? rank / grid.nprow : rank % grid.npcol;
}

constexpr int64_t kAlignment = 64;  // of every buffer: a cache line, and an AVX-512 register

}  // namespace jaxmp::hostmp
