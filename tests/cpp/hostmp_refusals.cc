// Without these hostmp would take what the real library leaves undefined, and a plan proven here would fail there. One
// wrong thing at a time; each refusal has its status, and a message that names the argument and the values.
#include "csrc/hostmp/gemm/cblas.h"
#include "tests/cpp/hostmp_arguments.h"

namespace jaxmp::test {
namespace {

const Case kGather = {Pattern::kAllGather, 2, 1, 8, 12, 16};

void test_before_load() {
  World world(kGather);  // complains, because it asks for the size of its workspaces
  check::failures = 0;
  Arguments in(world);
  REFUSED(in.run(), NOT_INITIALIZED, "LoadBlas");
  CHECK_CONTAINS(hostmp::LoadBlas("/no/such/library.so").message(), "/no/such/library.so");
  CHECK_CONTAINS(hostmp::LoadBlas(nullptr).message(), "blas_path is null");
}

void test_null_arguments() {
  World world(kGather);
  const auto without = [&world](auto member) {
    Arguments in(world);
    in.*member = nullptr;
    return Outcome(in.run());
  };
  REFUSED(without(&Arguments::handle), INVALID_VALUE, "handle is null");
  REFUSED(without(&Arguments::matmul), INVALID_VALUE, "matmulDesc is null");
  REFUSED(without(&Arguments::desc_a), INVALID_VALUE, "descA is null");
  REFUSED(without(&Arguments::desc_b), INVALID_VALUE, "descB is null");
  REFUSED(without(&Arguments::desc_d), INVALID_VALUE, "descD is null");
  REFUSED(without(&Arguments::alpha), INVALID_VALUE, "alpha is null");
  REFUSED(without(&Arguments::beta), INVALID_VALUE, "beta is null");
  REFUSED(without(&Arguments::a), INVALID_VALUE, "a is null");
  REFUSED(without(&Arguments::b), INVALID_VALUE, "b is null");
  REFUSED(without(&Arguments::d), INVALID_VALUE, "d is null");
  Arguments in(world);
  check_ok(api.SetStream(in.handle, nullptr));
  REFUSED(in.run(), NOT_INITIALIZED, "no stream");
  Arguments lonely(world);
  lonely.stream.rendezvous = nullptr;
  REFUSED(lonely.run(), NOT_INITIALIZED, "rendezvous", "2 ranks");
}

// What Matmul says to rank 0 of the case, with one thing changed.
template <typename Change>
Outcome with(const Case& c, Change change) {
  World world(c);
  Arguments in(world);
  change(in);
  return Outcome(in.run());
}

void test_extents_and_indices() {
  REFUSED(with(kGather, [](Arguments& in) { in.m = -1; }), INVALID_VALUE, "m must not be negative", "-1");
  REFUSED(with(kGather, [](Arguments& in) { in.k = int64_t{1} << 31; }), NOT_SUPPORTED, "k must fit 32 bits");
  REFUSED(with(kGather, [](Arguments& in) { in.ia = 2; }), INVALID_VALUE, "sub(A)", "row 2", "mbA=4");
  REFUSED(with(kGather, [](Arguments& in) { in.ia = 0; }), INVALID_VALUE, "sub(A)", "row 0");
  REFUSED(with(kGather, [](Arguments& in) { in.ia = INT64_MIN; }), INVALID_VALUE, "sub(A)");
  REFUSED(with(kGather, [](Arguments& in) { in.ia = INT64_MAX - 2; }), INVALID_VALUE, "sub(A)");
  REFUSED(with(kGather, [](Arguments& in) { in.jb = 7; }), INVALID_VALUE, "sub(B)", "12 columns from 7", "has 12");
  REFUSED(with(kGather, [](Arguments& in) { in.n = 13; }), INVALID_VALUE, "needs 13", "has 12");
}

struct Description {
  int64_t m = 8, n = 8, mb = 4, nb = 8, rsrc = 0, csrc = 0, lld = 4;
  cudaDataType_t type = CUDA_R_32F;
};

cublasMpStatus_t describe(World& world, const Description& x, bool has_grid = true) {
  cublasMpMatrixDescriptor_t desc = nullptr;
  const cublasMpStatus_t status = api.MatrixDescriptorCreate(x.m, x.n, x.mb, x.nb, x.rsrc, x.csrc, x.lld, x.type,
                                                             has_grid ? world.ranks[0].grids[0].get() : nullptr, &desc);
  if (desc) api.MatrixDescriptorDestroy(desc);
  return status;
}

void test_matrix_descriptors() {
  World world(kGather);  // its first grid is 2 x 1
  const auto change = [&world](auto member, auto value) {
    Description x;
    x.*member = value;
    return describe(world, x);
  };
  check_ok(describe(world, {}));
  REFUSED(change(&Description::m, -1), INVALID_VALUE, "m must not be negative");
  REFUSED(change(&Description::mb, 0), INVALID_VALUE, "mb must be positive", "got 0");
  REFUSED(change(&Description::nb, -2), INVALID_VALUE, "nb must be positive", "got -2");
  REFUSED(change(&Description::rsrc, 2), INVALID_VALUE, "rsrc must be in [0, 2)", "got 2");
  REFUSED(change(&Description::csrc, 1), INVALID_VALUE, "csrc must be in [0, 1)", "got 1");
  REFUSED(change(&Description::lld, 3), INVALID_VALUE, "lld is 3", "4 rows");
  REFUSED(change(&Description::lld, int64_t{1} << 31), NOT_SUPPORTED, "lld must fit 32 bits");
  for (int64_t huge : {(int64_t{1} << 40) + 1, int64_t{1} << 62, INT64_MAX}) {
    REFUSED(change(&Description::m, huge), NOT_SUPPORTED, "m is " + std::to_string(huge), "over 2^40");
    REFUSED(change(&Description::mb, huge), NOT_SUPPORTED, "mb is " + std::to_string(huge), "over 2^40");
    REFUSED(change(&Description::nb, huge), NOT_SUPPORTED, "nb is " + std::to_string(huge), "over 2^40");
  }
  const Description huge = {64, int64_t{1} << 40, 32, int64_t{1} << 40, 0, 0, 32};
  REFUSED(describe(world, huge), NOT_SUPPORTED, "64x1099511627776 with lld=32 has more than 2^44 elements");
  REFUSED(change(&Description::type, static_cast<cudaDataType_t>(9)), NOT_SUPPORTED, "data type 9");
  REFUSED(describe(world, {}, false), INVALID_VALUE, "grid is null");
}

void test_grids() {
  hostmp::Group group(4);
  cublasMpGrid_t grid = nullptr;
  const auto create = [&](int64_t p, int64_t q, int layout, ncclComm_t comm) {
    return api.GridCreate(p, q, static_cast<cublasMpGridLayout_t>(layout), comm, &grid);
  };
  REFUSED(create(2, 3, 0, group.comm(0)), INVALID_VALUE, "2x3", "4 ranks");
  REFUSED(create(int64_t{1} << 62, 16, 0, group.comm(0)), INVALID_VALUE, "4611686018427387904x16", "4 ranks");
  REFUSED(create(-2, -2, 0, group.comm(0)), INVALID_VALUE, "-2x-2");
  REFUSED(create(2, 2, 0, nullptr), INVALID_VALUE, "comm is null");
  REFUSED(create(2, 2, 5, group.comm(0)), INVALID_VALUE, "layout 5");
  REFUSED(api.GridDestroy(nullptr), INVALID_VALUE, "grid is null");
  World other(kGather);
  REFUSED(with(kGather, [&other](Arguments& in) { in.desc_a = other.ranks[0].desc_a.get(); }), INVALID_VALUE,
          "grid of A belongs to another communicator");
}

void test_attributes() {
  World world(kGather);
  cublasMpMatmulDescriptor_t desc = world.ranks[0].matmul.get();
  const int64_t value = 0;
  for (int number = -1; number <= 29; ++number) {
    const auto attribute = static_cast<cublasMpMatmulDescriptorAttribute_t>(number);
    const size_t size = AttributeSize(number);
    if (size > 0) check_ok(api.MatmulDescriptorSetAttribute(desc, attribute, &value, size));
    const size_t wrong = size == 4 ? 8 : 4;
    REFUSED(api.MatmulDescriptorSetAttribute(desc, attribute, &value, wrong), INVALID_VALUE,
            "attribute " + std::to_string(number), size ? "sizeInBytes=" + std::to_string(wrong) : "does not exist");
    int64_t read = 0;
    REFUSED(api.MatmulDescriptorGetAttribute(desc, attribute, &read, wrong, nullptr), INVALID_VALUE, "attribute");
  }
  const int op = 3;
  REFUSED(api.MatmulDescriptorSetAttribute(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, &op, 4), INVALID_VALUE,
          "0 (N), 1 (T) or 2 (C)", "got 3");
  REFUSED(api.MatmulDescriptorSetAttribute(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, nullptr, 4),
          INVALID_VALUE, "buf is null");
  int stored = 1;
  size_t written = 0;
  check_ok(api.MatmulDescriptorSetAttribute(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, &stored, 4));
  stored = 0;
  check_ok(api.MatmulDescriptorGetAttribute(desc, CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, &stored, 4, &written));
  CHECK_EQ(stored, 1);
  CHECK_EQ(written, size_t{4});
}

// A second descriptor for one of the matrices of rank 0.
struct Other {
  Other(World& world, size_t grid, const Description& x) {
    check_ok(api.MatrixDescriptorCreate(x.m, x.n, x.mb, x.nb, x.rsrc, x.csrc, x.lld, x.type,
                                        world.ranks[0].grids[grid].get(), &desc));
  }
  ~Other() { api.MatrixDescriptorDestroy(desc); }
  cublasMpMatrixDescriptor_t desc = nullptr;
};

void test_block_contract() {
  // Gather: A 8x16 in 4x16 on 2x1, B 16x12 in 16x6 on 1x2, D 8x12 in 4x6 on 2x1. Grids 0, 1, 2 are theirs.
  World world(kGather);
  const auto run = [&world](auto member, const Other& other) {
    Arguments in(world);
    in.*member = other.desc;
    return Outcome(in.run());
  };
  REFUSED(run(&Arguments::desc_a, Other(world, 0, {8, 16, 4, 8, 0, 0, 4})), INVALID_VALUE, "nbA=8", "mbB=16",
          "op(A)=N");
  REFUSED(run(&Arguments::desc_a, Other(world, 0, {8, 16, 2, 16, 0, 0, 4})), INVALID_VALUE, "mbA=2", "mbD=4");
  REFUSED(run(&Arguments::desc_b, Other(world, 1, {16, 12, 16, 3, 0, 0, 16})), INVALID_VALUE, "nbB=3", "nbD=6");
}

void test_types() {
  const auto types = [](cudaDataType_t a, cudaDataType_t b, cudaDataType_t d) {
    World world(kGather);
    const Other oa(world, 0, {8, 16, 4, 16, 0, 0, 4, a}), ob(world, 1, {16, 12, 16, 6, 0, 0, 16, b});
    const Other od(world, 2, {8, 12, 4, 6, 0, 0, 4, d});
    Arguments in(world);
    in.desc_a = oa.desc, in.desc_b = ob.desc, in.desc_d = od.desc;
    return Outcome(in.query());
  };
  REFUSED(types(CUDA_R_32F, CUDA_R_64F, CUDA_R_32F), NOT_SUPPORTED, "A is f32", "B is f64");
  REFUSED(types(CUDA_R_32F, CUDA_R_32F, CUDA_R_16BF), NOT_SUPPORTED, "D is bf16", "must be f32");
  REFUSED(types(CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16F), NOT_SUPPORTED, "D must be bf16 or f32");
  REFUSED(types(CUDA_R_64F, CUDA_R_64F, CUDA_R_64F), NOT_SUPPORTED, "compute type is 68", "COMPUTE_64F");
  const auto compute = [](cudaDataType_t type, cublasComputeType_t number) {
    Case c = kGather;
    c.in = c.out = type;
    return with(c, [number](Arguments& in) {
      in.attribute(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_COMPUTE_TYPE, static_cast<int>(number));
    });
  };
  REFUSED(compute(CUDA_R_16BF, CUBLAS_COMPUTE_32F_FAST_TF32), NOT_SUPPORTED, "compute type is 77", "A is bf16");
  REFUSED(compute(CUDA_R_64F, CUBLAS_COMPUTE_32F_FAST_16BF), NOT_SUPPORTED, "compute type is 75", "COMPUTE_64F");
  REFUSED(compute(CUDA_R_32F, CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT), NOT_SUPPORTED, "compute type is 79");
}

void test_c() {
  const float two = 2;
  REFUSED(with(kGather, [&two](Arguments& in) { in.beta = &two; }), INVALID_VALUE, "c is null but beta is 2");
  const auto with_c = [](const Description& x, int64_t ic) {
    World world(kGather);
    const Other other(world, 2, x);
    Arguments in(world);
    in.c = world.ranks[0].c->get(), in.desc_c = other.desc, in.ic = ic;
    return Outcome(in.run());
  };
  REFUSED(with_c({8, 12, 2, 6, 0, 0, 4}, 1), INVALID_VALUE, "blocks of C (2x6)", "D (4x6)");
  REFUSED(with_c({8, 12, 4, 6, 1, 0, 4}, 1), INVALID_VALUE, "C is distributed otherwise");
  REFUSED(with_c({16, 12, 4, 6, 0, 0, 8}, 1), INVALID_VALUE, "C is distributed otherwise");
  REFUSED(with_c({8, 12, 4, 6, 0, 0, 4, CUDA_R_64F}, 1), NOT_SUPPORTED, "C is f64");
  REFUSED(with(kGather, [](Arguments& in) { in.c = in.d; }), INVALID_VALUE, "descC is null");
}

void test_memory() {
  REFUSED(with(kGather, [](Arguments& in) { in.d = const_cast<void*>(in.a); }), INVALID_VALUE,
          "d shares memory with a");
  REFUSED(with(kGather, [](Arguments& in) { in.d = static_cast<char*>(const_cast<void*>(in.b)) + 8; }), INVALID_VALUE,
          "d shares memory with b");
  REFUSED(with(kGather, [](Arguments& in) { in.c = static_cast<char*>(in.d) + 4, in.desc_c = in.desc_d; }),
          INVALID_VALUE, "d shares a part of c");
  Case c = kGather;
  c.in = c.out = CUDA_R_16BF;
  REFUSED(with(c, [](Arguments& in) { --in.bytes; }), INVALID_VALUE, "workspaceSizeInBytesOnDevice", "bufferSize");
  REFUSED(with(c, [](Arguments& in) { in.work = nullptr; }), INVALID_VALUE, "d_work is null");
}

void test_buffers() {
  World world(kGather);
  cublasMpGrid_t grid = world.ranks[0].grids[0].get();
  void* ptr = nullptr;
  check_ok(api.Malloc(grid, &ptr, 100));
  CHECK_EQ(reinterpret_cast<uintptr_t>(ptr) % 64, uintptr_t{0});
  check_ok(api.Free(grid, ptr));
  REFUSED(api.Malloc(nullptr, &ptr, 1), INVALID_VALUE, "grid is null");
}

void test_algorithms() {
  const auto algo = [](int number) {
    return [number](Arguments& in) { in.attribute(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_ALGO_TYPE, number); };
  };
  REFUSED(with(kGather, algo(7)), INVALID_VALUE, "algorithm 7");
  REFUSED(with(kGather, algo(CUBLASMP_MATMUL_ALGO_TYPE_FUSED)), NOT_SUPPORTED, "algorithm 6 (FUSED) all-reduces");
  REFUSED(with(kGather, algo(CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_MULTICAST)), NOT_SUPPORTED, "SPLIT_MULTICAST", "along k");
  REFUSED(with(kGather, [](Arguments& in) { in.attribute(4, int{-1}); }), INVALID_VALUE, "COMMUNICATION_SM_COUNT",
          "got -1");
  REFUSED(with(kGather, [](Arguments& in) { in.attribute(27, int{CUDA_R_32F}); }), INVALID_VALUE,
          "COMMUNICATION_TYPE f32 is of partial sums");
  Case odd = kGather;
  odd.m = 9;
  REFUSED(with(odd, algo(CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P)), NOT_SUPPORTED, "cut evenly", "9 in blocks of 5");
  World world({Pattern::kAllGather, 1, 1, 8, 12, 16});  // one rank, so that nobody is left waiting
  Arguments in(world);
  algo(CUBLASMP_MATMUL_ALGO_TYPE_SPLIT_P2P)(in);
  check_ok(in.run());
}

void test_all_reduce_layout() {
  const Case c = {Pattern::kAllReduce, 2, 1, 8, 12, 16};
  REFUSED(with(kGather, [](Arguments& in) { in.attribute(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE, 1); }),
          INVALID_VALUE, "ALLREDUCE needs D as 8x24");
  World world(c);
  const Other other(world, 2, {8, 12, 8, 12, 0, 0, 8});
  Arguments in(world);
  in.desc_d = other.desc;
  REFUSED(in.run(), INVALID_VALUE, "ALLREDUCE needs D as 8x24", "got 8x12");
}

void test_epilogs() {
  Case c = kGather;
  const auto attribute = [](int number, auto value) {
    return [number, value](Arguments& in) { in.attribute(number, value); };
  };
  REFUSED(with(c, attribute(5, 8)), NOT_SUPPORTED, "epilog 8 is not among");
  REFUSED(with(c, attribute(5, int{CUBLASMP_MATMUL_EPILOGUE_BIAS})), INVALID_VALUE, "BIAS_POINTER is not set");
  REFUSED(with(c, attribute(16, int64_t{1})), NOT_SUPPORTED, "attribute 16");
  REFUSED(with(c, attribute(24, int64_t{1})), NOT_SUPPORTED, "attribute 24");
  REFUSED(with(c, attribute(27, int{CUDA_R_16BF})), INVALID_VALUE, "COMMUNICATION_TYPE bf16", "f32");
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_BIAS;
  REFUSED(with(c, attribute(7, int64_t{4})), INVALID_VALUE, "BIAS_BATCH_STRIDE");
  REFUSED(with(c, attribute(8, int{CUDA_R_64F})), NOT_SUPPORTED, "the bias is f64", "D is f32");
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_RELU_AUX;
  REFUSED(with(c, attribute(9, int64_t{0})), INVALID_VALUE, "EPILOGUE_AUX_POINTER is not set");
  REFUSED(with(c, attribute(10, int64_t{64})), INVALID_VALUE, "multiple of 128", "got 64");
  REFUSED(with(c, attribute(11, int64_t{1})), INVALID_VALUE, "EPILOGUE_AUX_BATCH_STRIDE");
  REFUSED(with(c, attribute(12, int{CUDA_R_32F})), INVALID_VALUE, "bit mask");
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_GELU_AUX;
  REFUSED(with(c, attribute(10, int64_t{0})), INVALID_VALUE, "multiple of 8", "4 local rows", "got 0");
  REFUSED(with(c, attribute(12, int{CUDA_R_16F})), NOT_SUPPORTED, "the aux is f16");
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_DGELU;
  REFUSED(with(c, attribute(9, int64_t{0})), INVALID_VALUE, "aux input", "EPILOGUE_AUX_POINTER is not set");
  REFUSED(with(c, attribute(10, int64_t{0})), INVALID_VALUE, "multiple of 8", "4 local rows", "got 0");
  REFUSED(with(c, attribute(12, int{CUDA_R_16F})), NOT_SUPPORTED, "the aux is f16");
  REFUSED(with(c, [](Arguments& in) { in.k = 1; }), NOT_SUPPORTED, "DGELU does not take k = 1");
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_DRELU_BGRAD;
  REFUSED(with(c, attribute(10, int64_t{64})), INVALID_VALUE, "multiple of 128", "got 64");
  REFUSED(with(c, attribute(12, int{CUDA_R_32F})), INVALID_VALUE, "bit mask");
  REFUSED(with(c, attribute(6, int64_t{0})), INVALID_VALUE, "bias gradient", "BIAS_POINTER is not set");
  REFUSED(with(c, attribute(7, int64_t{4})), INVALID_VALUE, "BIAS_BATCH_STRIDE");
  REFUSED(with(c, attribute(8, int{CUDA_R_64F})), NOT_SUPPORTED, "the bias is f64", "D is f32");
  REFUSED(with(c, attribute(28, int{CUBLASMP_RESULT_SCHEME_PARTIAL})), NOT_SUPPORTED, "BIAS_RESULT_SCHEME is 1",
          "RESULT_SCHEME_FULL");
  REFUSED(with(c, attribute(28, int{CUBLASMP_RESULT_SCHEME_DEFAULT})), NOT_SUPPORTED, "BIAS_RESULT_SCHEME is 0");
  REFUSED(with(c, attribute(5, int{CUBLASMP_MATMUL_EPILOGUE_BGRADB})), NOT_SUPPORTED, "BGRADB needs TRANSB=T");
  c.epilog = CUBLASMP_MATMUL_EPILOGUE_DEFAULT;
  c.trans_a = CUBLAS_OP_T;
  REFUSED(with(c, attribute(5, int{CUBLASMP_MATMUL_EPILOGUE_BGRADA})), NOT_SUPPORTED, "BGRADA needs TRANSA=N");
  c.trans_a = CUBLAS_OP_N;
  c.in = c.out = CUDA_C_32F;
  REFUSED(with(c, attribute(5, int{CUBLASMP_MATMUL_EPILOGUE_RELU})), NOT_SUPPORTED, "RELU", "c64");
  Case cyclic = {Pattern::kCyclic, 2, 2, 13, 11, 17};
  cyclic.epilog = CUBLASMP_MATMUL_EPILOGUE_RELU;
  REFUSED(with(cyclic,
               [](Arguments& in) {
                 in.attribute(10, int64_t{128});
                 in.attribute(5, int{CUBLASMP_MATMUL_EPILOGUE_RELU_AUX});
               }),
          NOT_SUPPORTED, "mbD to be a multiple of 8", "got 3");
}

void test_small_calls() {
  int version = 0;
  check_ok(api.GetVersion(&version));
  CHECK_EQ(version, 1000);
  CHECK_EQ(std::string(api.last_error()), "");
  REFUSED(api.GetVersion(nullptr), INVALID_VALUE, "version is null");
  CHECK_EQ(std::string(api.GetStatusString(CUBLASMP_STATUS_NOT_SUPPORTED)), "not supported");
  CHECK_EQ(std::string(api.GetStatusString(static_cast<cublasMpStatus_t>(99))), "unknown status");
  // 10 indices in blocks of 3 over 2 processes: 0 1 2 6 7 8 and 3 4 5 9.
  CHECK_EQ(api.Numroc(10, 3, 0, 0, 2), int64_t{6});
  CHECK_EQ(api.Numroc(10, 3, 1, 0, 2), int64_t{4});
  CHECK_EQ(api.Numroc(10, 3, 0, 1, 2), int64_t{4});
  CHECK_EQ(api.Numroc(10, 0, 0, 0, 2), int64_t{0});
}

}  // namespace
}  // namespace jaxmp::test

int main() {
  using namespace jaxmp;  // NOLINT
  test::test_before_load();
  CHECK_EQ(hostmp::LoadBlas(check::environment("JAXMP_BLAS")).message(), "");
  test::test_null_arguments();
  test::test_extents_and_indices();
  test::test_matrix_descriptors();
  test::test_grids();
  test::test_attributes();
  test::test_block_contract();
  test::test_types();
  test::test_c();
  test::test_memory();
  test::test_buffers();
  test::test_algorithms();
  test::test_all_reduce_layout();
  test::test_epilogs();
  test::test_small_calls();
  return check::summary("hostmp_refusals");
}
