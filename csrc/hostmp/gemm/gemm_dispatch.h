// Multiplies with the chosen kernel (kernel_choice.h). scaled_gemm.h converts operands before that, if they need it.
#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "csrc/hostmp/gemm/kernel_choice.h"
#include "csrc/hostmp/kernels/k_blocks.h"

namespace jaxmp::hostmp {

// c = alpha op(a) op(b), or c += alpha op(a) op(b) if `adds`: segment by segment or, with a kernel of ours, K block by
// K block. a and b have numbers of choice.type, c of its accumulator. In a fixed order every K segment but the last has
// a multiple of KUnit() k. `scratch` has ScratchBytes(), aligned to 64.
void Multiply(const KernelChoice& choice, const KSegments& segments, std::complex<double> alpha, bool adds,
              char* scratch);
int64_t ScratchBytes(const KernelChoice& choice, int64_t m, int64_t n, int64_t k);

// Segments for a fixed order, from ranges of k that end at `ends`: product_of(i, begin, end) is the product of the k
// [begin, end) in range i. An instruction sums a whole unit of k, so the unit around the end of a range is copied to
// `memory`: `unit` k of both operands for each end but the last. Only products of 16 bits need this memory.
KSegments CutAtUnits(const std::vector<int64_t>& ends, int64_t unit,
                     const std::function<Product(size_t, int64_t, int64_t)>& product_of, char* memory);

}  // namespace jaxmp::hostmp
