#include "tests/conformance/run.h"

namespace jaxmp::conformance {
bool CaseRun::check(cublasMpStatus_t status, const char* stage) {
  if (status == CUBLASMP_STATUS_SUCCESS) return true;
  outcome.stage = stage;
  outcome.status = status;
  outcome.error = api_.last_error();
  if (outcome.error.empty()) outcome.error = api_.GetStatusString(status);
  return false;
}

bool CaseRun::make(const test::Layout& layout, const Description& x, Owned<cublasMpMatrixDescriptor>* made) {
  cublasMpStatus_t status = CUBLASMP_STATUS_SUCCESS;
  const cublasMpGrid_t grid = runner_.grid(layout.grid, &status);
  if (!check(status, "GridCreate")) return false;
  cublasMpMatrixDescriptor_t desc = nullptr;
  const bool is_made =
      check(api_.MatrixDescriptorCreate(x.m, x.n, x.mb, x.nb, x.rsrc, x.csrc, x.lld, x.type, grid, &desc),
            "MatrixDescriptorCreate");
  *made = {desc, api_.MatrixDescriptorDestroy};
  return is_made;
}

bool CaseRun::describe() {
  const auto description = [this](const test::Layout& l, cudaDataType_t type) {
    return Description{l.rows, l.cols, l.mb, l.nb, l.rsrc, l.csrc, x_.lld(l), type};
  };
  const test::Layouts& layouts = x_.layouts;
  Descriptions x = {description(layouts.a, c_.in), description(layouts.b, c_.in_b), description(layouts.d, c_.c_type),
                    description(layouts.d, c_.out)};
  if (c_.describe) c_.describe(x);
  return make(layouts.a, x.a, &a_) && make(layouts.b, x.b, &b_) && (!c_.has_c || make(layouts.d, x.c, &c_desc_)) &&
         make(layouts.d, x.d, &d_);
}

bool CaseRun::set(int attribute, const void* value, size_t size) {
  return check(api_.MatmulDescriptorSetAttribute(
                   matmul_.get(), static_cast<cublasMpMatmulDescriptorAttribute_t>(attribute), value, size),
               "MatmulDescriptorSetAttribute");
}

bool CaseRun::set_number(int attribute, int64_t value, size_t size) {
  return set(attribute, &value, size > 0 ? size : abi::AttributeSize(attribute));  // little-endian, so 4 bytes do
}

bool CaseRun::set_attributes() {
  cublasMpMatmulDescriptor_t matmul = nullptr;
  if (!check(api_.MatmulDescriptorCreate(&matmul, c_.compute), "MatmulDescriptorCreate")) return false;
  matmul_ = {matmul, api_.MatmulDescriptorDestroy};
  if (c_.fixed_reduction_order && !check(api_.fix_reduction_order(matmul), "fix_reduction_order")) return false;
  const int epilog = c_.epilog | (c_.pattern == Pattern::kAllReduce ? CUBLASMP_MATMUL_EPILOGUE_ALLREDUCE : 0);
  if (!set_number(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSA, c_.trans_a) ||
      !set_number(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_TRANSB, c_.trans_b) ||
      !set_number(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE, epilog) || !set_epilog() || !set_scales()) {
    return false;
  }
  for (const Setting& setting : c_.settings) {
    if (!set_number(setting.attribute, setting.value, setting.size)) return false;
  }
  return true;
}

bool CaseRun::set_epilog() {
  if (test::has_bias(c_.epilog) || test::has_gradient(c_.epilog)) {
    const Buffer& bias = test::has_gradient(c_.epilog) ? x_.gradient : x_.bias;
    if (!set_pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_POINTER, bias.get()) ||
        !set_number(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_DATA_TYPE, c_.bias_type)) {
      return false;
    }
  }
  if (test::has_gradient(c_.epilog) &&
      !set_number(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_BIAS_RESULT_SCHEME, CUBLASMP_RESULT_SCHEME_FULL)) {
    return false;
  }
  if (!test::has_aux(c_.epilog)) return true;
  if (!test::is_relu(c_.epilog) &&
      !set_number(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_DATA_TYPE, c_.aux_type)) {
    return false;
  }
  return set_pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_POINTER, x_.aux.get()) &&
         set_number(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_LD, x_.aux_ld);
}

bool CaseRun::set_scales() {
  struct Scale {
    int pointer, mode;
    const Buffer& buffer;
    int mode_attribute = pointer + 1;
  };
  constexpr int kScalar = CUBLASMP_MATMUL_MATRIX_SCALE_SCALAR_FP32;
  const Scale scales[] = {{CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_A_SCALE_POINTER, c_.scale_a, x_.scale_a},
                          {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_B_SCALE_POINTER, c_.scale_b, x_.scale_b},
                          {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_C_SCALE_POINTER, kScalar, x_.scale_c},
                          {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_SCALE_POINTER, kScalar, x_.scale_d},
                          {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_D_OUT_SCALE_POINTER, c_.d_out_scale, x_.d_out_scale},
                          {CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_POINTER, kScalar, x_.scale_aux,
                           CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_SCALE_MODE}};
  for (const Scale& scale : scales) {
    if (!scale.buffer.get()) continue;
    if (!set_pointer(scale.pointer, scale.buffer.get()) || !set_number(scale.mode_attribute, scale.mode)) return false;
  }
  if (x_.amax_aux.get() &&
      !set_pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_EPILOGUE_AUX_AMAX_POINTER, x_.amax_aux.get())) {
    return false;
  }
  return !x_.amax.get() || set_pointer(CUBLASMP_MATMUL_DESCRIPTOR_ATTRIBUTE_AMAX_D_POINTER, x_.amax.get());
}

Call CaseRun::arguments() {
  const cudaDataType_t scalar = c_.accumulator();
  test::encode(scalar, c_.alpha, alpha_.data());
  test::encode(scalar, c_.beta, beta_.data());
  Call call = {};
  call.handle = runner_.handle_, call.matmul = matmul_.get();
  call.m = c_.m, call.n = c_.n, call.k = c_.k;
  call.ia = call.ja = call.ib = call.jb = call.ic = call.jc = call.id = call.jd = 1;
  call.alpha = alpha_.data(), call.beta = beta_.data();
  call.a = x_.a.get(), call.b = x_.b.get(), call.c = x_.given_c(), call.d = x_.d.get();
  call.desc_a = a_.get(), call.desc_b = b_.get(), call.desc_c = c_desc_.get(), call.desc_d = d_.get();
  return call;
}

bool CaseRun::query() {
  const Call x = arguments();
  size_t host_bytes = 0;
  const cublasMpStatus_t status = api_.Matmul_bufferSize(
      x.handle, x.matmul, x.m, x.n, x.k, x.alpha, x.a, x.ia, x.ja, x.desc_a, x.b, x.ib, x.jb, x.desc_b, x.beta, x.c,
      x.ic, x.jc, x.desc_c, x.d, x.id, x.jd, x.desc_d, &outcome.workspace, &host_bytes);
  host_work_.resize(host_bytes);
  return check(status, "Matmul_bufferSize");
}

Call CaseRun::ready() {
  Call x = arguments();
  x.work = workspace();
  x.bytes = outcome.workspace;
  const std::vector<char> margin(kMargin, kCanary);
  (void)runner_.rank_.write(workspace() + x.bytes, margin.data(), kMargin);  // a failure shows as an overrun
  return x;
}

cublasMpStatus_t CaseRun::start(const Call& x, cudaStream_t stream) {
  const cublasMpStatus_t status = api_.SetStream(x.handle, stream);
  if (status != CUBLASMP_STATUS_SUCCESS) return status;
  return api_.Matmul(x.handle, x.matmul, x.m, x.n, x.k, x.alpha, x.a, x.ia, x.ja, x.desc_a, x.b, x.ib, x.jb, x.desc_b,
                     x.beta, x.c, x.ic, x.jc, x.desc_c, x.d, x.id, x.jd, x.desc_d, x.work, x.bytes, host_work_.data(),
                     host_work_.size());
}

bool CaseRun::call(int64_t index) {
  if (outcome.workspace + kMargin > runner_.backend_.workspace_bytes()) {
    outcome.stage = "workspace";
    outcome.status = CUBLASMP_STATUS_ALLOCATION_FAILED;
    outcome.error = "the suite has no workspace of " + std::to_string(outcome.workspace) + " bytes";
    return false;
  }
  Call x = ready();
  if (c_.change) c_.change(x);
  if (const Status met = runner_.rank_.meet(); !met.ok()) {
    outcome.stage = "run";
    outcome.error = met.message();
    return false;
  }
  const bool is_taken = check(start(x, runner_.rank_.stream(index)), "Matmul");
  if (!is_taken) runner_.rank_.give_up(outcome.error);
  const Status done = runner_.rank_.synchronize();
  if (is_taken && !done.ok()) {
    outcome.stage = "run";
    outcome.status = CUBLASMP_STATUS_EXECUTION_FAILED;
    outcome.error = done.message();
  }
  return is_taken && done.ok();
}

bool CaseRun::workspace_is_intact() {
  std::vector<char> margin(kMargin);
  (void)runner_.rank_.read(margin.data(), workspace() + outcome.workspace, kMargin);
  return std::all_of(margin.begin(), margin.end(), [](char byte) { return byte == kCanary; });
}

Runner::Runner(const Backend& backend, Rank& rank, int number, int nranks)
    : backend_(backend), api_(backend.api()), rank_(rank), number_(number), nranks_(nranks) {}

Runner::~Runner() {
  rank_.release(plain_);
  for (const auto& [pattern, memory] : registered_) {
    if (!is_symmetric_) {
      rank_.release(memory);
    } else if (memory) {  // collective, so in one order on all ranks
      (void)api_.BufferDeregister(of_columns_, memory);
      (void)api_.Free(of_rows_, memory);
    }
  }
  for (const auto& [key, grid] : grids_) (void)api_.GridDestroy(grid);
  if (handle_) (void)api_.Destroy(handle_);
}

Status Runner::start() {
  const auto check = [this](cublasMpStatus_t status, const char* what) -> Status {
    if (status == CUBLASMP_STATUS_SUCCESS) return {};
    return Internal(std::string(what) + ": " + api_.GetStatusString(status) + " " + api_.last_error());
  };
  JAXMP_RETURN_IF_ERROR(check(api_.Create(&handle_, rank_.stream(0)), "cublasMpCreate"));
  cublasMpStatus_t status = CUBLASMP_STATUS_SUCCESS;
  of_rows_ = grid({nranks_, 1, CUBLASMP_GRID_LAYOUT_COL_MAJOR}, &status);
  JAXMP_RETURN_IF_ERROR(check(status, "cublasMpGridCreate"));
  of_columns_ = grid({1, nranks_, CUBLASMP_GRID_LAYOUT_ROW_MAJOR}, &status);
  JAXMP_RETURN_IF_ERROR(check(status, "cublasMpGridCreate"));
  const size_t bytes = backend_.workspace_bytes();
  for (Pattern pattern : {Pattern::kLocal, Pattern::kAllGather, Pattern::kReduceScatter, Pattern::kAllReduce,
                          Pattern::kGrid, Pattern::kCyclic}) {
    void*& memory = registered_[pattern];
    const cublasMpStatus_t made = api_.Malloc(of_rows_, &memory, bytes);
    is_symmetric_ = made != CUBLASMP_STATUS_NOT_SUPPORTED;
    if (is_symmetric_) {
      JAXMP_RETURN_IF_ERROR(check(made, "cublasMpMalloc"));
      JAXMP_RETURN_IF_ERROR(check(api_.BufferRegister(of_columns_, memory, bytes), "cublasMpBufferRegister"));
    } else {  // as a plan does: any memory then serves
      (void)api_.last_error();
      memory = rank_.allocate(bytes);
      if (!memory) return ResourceExhausted("no memory for a workspace");
    }
  }
  plain_ = rank_.allocate(bytes);
  return plain_ ? Status() : ResourceExhausted("no memory for a workspace");
}

cublasMpGrid_t Runner::grid(const test::Grid& grid, cublasMpStatus_t* status) {
  const GridKey key = {grid.nprow, grid.npcol, grid.layout};
  if (const auto found = grids_.find(key); found != grids_.end()) return found->second;
  cublasMpGrid_t made = nullptr;
  *status = api_.GridCreate(grid.nprow, grid.npcol, grid.layout, rank_.comm(), &made);
  if (*status == CUBLASMP_STATUS_SUCCESS) grids_[key] = made;
  return made;
}

Outcome Runner::run(const Case& c, const Operands& operands, const Expected& expected, int64_t index) {
  Buffers buffers(c, operands, &rank_, number_);
  CaseRun run(this, c, &buffers);
  Outcome& outcome = run.outcome;
  const auto fail = [&outcome](const Status& status) {
    outcome.stage = "memory";
    outcome.status = CUBLASMP_STATUS_INTERNAL_ERROR;
    outcome.error = status.message();
    return outcome;
  };
  if (const Status written = buffers.write(); !written.ok()) return fail(written);
  if (!run.prepare() || !run.call(index)) return outcome;
  if (const Status read = buffers.read(); !read.ok()) return fail(read);
  outcome.is_memory_intact = buffers.is_memory_intact() && run.workspace_is_intact();
  outcome.results = buffers.judge(expected, api_.name != std::string(kCublasMp));
  return outcome;
}

}  // namespace jaxmp::conformance
