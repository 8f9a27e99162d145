// Int8 products by vectors, a part of int8_gemm.cc that is included once for each instruction set, with JAXMP_TARGET
// and with Vectors in scope, which has
//   V, kLanes        a vector of words, and its number of words
//   kVectors, kCols  the size of a register tile
//   Dot(sum, a, b)   for each word the sum plus the products of its numbers
struct Isa : Vectors {
  static constexpr int64_t kRowUnit = kLanes, kMR = kVectors * kLanes, kNR = kCols, kWordUnit = 4;
  struct Scope {};

  JAXMP_TARGET static void Multiply(const MicroPanels& panels, uint32_t* sums) {
    switch (panels.width / kLanes) {
      case 1:
        return MultiplyVectors<1>(panels, sums);
      case 2:
        return MultiplyVectors<2>(panels, sums);
      default:
        return MultiplyVectors<kVectors>(panels, sums);
    }
  }

  using Unaligned __attribute__((aligned(4), may_alias)) = V;

  // Writes the first values of the sums of a micro-panel of op(A) after its words.
  JAXMP_TARGET static void PutFirst(uint32_t* panel, int64_t width, int64_t words) {
    auto* const line = reinterpret_cast<Unaligned*>(panel);
    const int64_t count = width / kLanes;
    V sums[kVectors] = {};
    for (int64_t word = 0; word < words; ++word) {
      for (int v = 0; v < kVectors; ++v) {
        if (v < count) sums[v] = Vectors::Dot(sums[v], line[word * count + v], V{} + 0x80808080u);
      }
    }
    for (int64_t v = 0; v < count; ++v) line[words * count + v] = V{} - sums[v];
  }

  template <int Count>
  JAXMP_TARGET static inline __attribute__((always_inline)) void MultiplyVectors(const MicroPanels& panels,
                                                                                 uint32_t* sums) {
    const char *a = panels.a, *b = panels.b;
    const int64_t step_b = 4 * panels.words;
    const auto* const first = reinterpret_cast<const Unaligned*>(a) + panels.words * Count;
    V tile[kCols][Count];
    for (auto& column : tile) {
      for (int v = 0; v < Count; ++v) column[v] = kIsUnsignedB ? first[v] : V{};
    }
#pragma GCC unroll 2
    for (int64_t word = 0; word < panels.words; ++word, a += sizeof(V) * Count, b += 4) {
      V rows[Count];
      for (int v = 0; v < Count; ++v) rows[v] = reinterpret_cast<const Unaligned*>(a)[v];
#pragma GCC unroll 8
      for (int col = 0; col < kCols; ++col) {
        uint32_t weight;
        std::memcpy(&weight, b + col * step_b, sizeof(weight));
        for (int v = 0; v < Count; ++v) tile[col][v] = Dot(tile[col][v], rows[v], V{} + weight);
      }
    }
    for (int col = 0; col < kCols; ++col) {
      for (int v = 0; v < Count; ++v) reinterpret_cast<Unaligned*>(sums + col * kMR)[v] = tile[col][v];
    }
  }
};

#include "csrc/hostmp/kernels/int8_gemm_impl.h"
