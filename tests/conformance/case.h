// One call of cuBLASMp's API: its arguments, and the answer that is expected of hostmp.
//
// A suite of these runs on both libraries (backend.h), and compare.py names what they do differently. Cases are data:
// they say nothing about the library that runs them.
#ifndef JAXMP_TESTS_CONFORMANCE_CASE_H_
#define JAXMP_TESTS_CONFORMANCE_CASE_H_

#include <functional>

#include "csrc/cublasmp/api_table.h"
#include "tests/cpp/definitions.h"

namespace jaxmp::conformance {

using namespace abi;  // NOLINT: cuBLASMp's own names
using test::Facts;
using test::Matrix;
using test::Number;
using test::Pattern;

// The arguments of MatrixDescriptorCreate.
struct Description {
  int64_t m, n, mb, nb, rsrc, csrc, lld;
  cudaDataType_t type;
};

struct Descriptions {
  Description a, b, c, d;
};

// The arguments of Matmul.
struct Call {
  cublasMpHandle_t handle;
  cublasMpMatmulDescriptor_t matmul;
  int64_t m, n, k, ia = 1, ja = 1, ib = 1, jb = 1, ic = 1, jc = 1, id = 1, jd = 1;
  const void *alpha, *beta, *a, *b, *c;
  void* d;
  cublasMpMatrixDescriptor_t desc_a, desc_b, desc_c, desc_d;
  void* work;
  size_t bytes;
};

// A setting of the matmul descriptor in addition to the case's own; `size` 0 is the attribute's size.
struct Setting {
  int attribute;
  int64_t value;
  size_t size = 0;
};

enum class Workspace {
  kRegistered,  // as cublasMpMalloc returns it
  kPlain,
};

constexpr int kUnscaled = -1;

struct Operands;

struct Case : test::BaseCase {
  std::string topic;      // what the case is about, before its name
  std::string variant;    // the difference from similar cases, after its name
  cudaDataType_t in_b{};  // the type of B; `in` is the type of A
  cudaDataType_t c_type{}, bias_type{}, aux_type{};
  cublasComputeType_t compute{};
  int scale_a = kUnscaled, scale_b = kUnscaled, d_out_scale = kUnscaled;  // cublasMpMatmulMatrixScale_t
  bool has_scale_c = false, has_scale_d = false, has_amax = false;
  bool has_scale_aux = false, has_amax_aux = false;
  bool c_is_nan = false;                // with beta = 0, which does not read it
  bool is_random = false;               // normally distributed operands, with inexact sums
  bool fixed_reduction_order = false;   // only for hostmp, as is the next
  bool aux_is_whole = false;            // the padding of its columns is written too
  std::function<void(Operands&)> fill;  // changes the operands
  Workspace workspace = Workspace::kRegistered;
  std::vector<Setting> settings;
  std::function<void(Descriptions&)> describe;  // changes the descriptors
  std::function<void(Call&)> change;            // changes the call
  // hostmp's status, and the capability (api_table.h) that lets hostmp take what the real library may refuse.
  cublasMpStatus_t expected = CUBLASMP_STATUS_SUCCESS;
  std::vector<std::string> says;  // parts of hostmp's reason
  std::string capability;

  std::string name() const;
  // The type of the sums, of alpha and of beta.
  cudaDataType_t accumulator() const {
    const bool is_scaled = in == CUDA_R_8I && out != CUDA_R_32I;
    return in_b == in && !is_scaled ? hostmp::AccumulatorOf(in) : CUDA_R_32F;
  }
};

// The cases for this many ranks, always in the same order.
std::vector<Case> all_cases(int nranks);
// More cases, for hostmp only: they test its kernels, tiles, epilogs or refusals.
std::vector<Case> hostmp_cases(int nranks);

// Patterns with their process grids: one-dimensional ones over all ranks, and every grid that they form.
std::vector<Case> layouts_on(const char* topic, int nranks, cudaDataType_t in = CUDA_R_32F,
                             cudaDataType_t out = CUDA_R_32F);
void set_transposition(Case* c, cublasOperation_t a, cublasOperation_t b);
constexpr std::pair<cudaDataType_t, cudaDataType_t> kTypes[] = {
    {CUDA_R_32F, CUDA_R_32F}, {CUDA_R_64F, CUDA_R_64F}, {CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16BF, CUDA_R_32F},
    {CUDA_R_16F, CUDA_R_16F}, {CUDA_R_16F, CUDA_R_32F}, {CUDA_C_32F, CUDA_C_32F},   {CUDA_C_64F, CUDA_C_64F}};
constexpr int kEpilogs[] = {4, 2, 6, 130, 134, 136, 152, 32, 36, 160, 164, 192, 208, 256, 512};

// The parts of the cases.
using Add = std::function<void(const Case&)>;
// Adds the case with every transposition that its types have.
void add_transposed(Case c, const Add& add);
void add_products(int nranks, const Add& add);
void add_epilogs(int nranks, const Add& add);
void add_narrow(int nranks, const Add& add);
void add_options(int nranks, const Add& add);
void add_refusals(int nranks, const Add& add);
void add_refusals_of_hostmp(int nranks, const Add& add);

// A plain case of the pattern on all ranks, of small extents that up to 4 of them divide.
Case make_case(const char* topic, Pattern pattern, int nranks, cudaDataType_t in = CUDA_R_32F,
               cudaDataType_t out = CUDA_R_32F);

}  // namespace jaxmp::conformance

#endif  // JAXMP_TESTS_CONFORMANCE_CASE_H_
