// XLA's side of the FFI, as far as jaxmp's handlers use it: they can then run under sanitizers, on threads of the
// test's choosing, without XLA.
#ifndef JAXMP_TESTS_FAKE_XLA_H_
#define JAXMP_TESTS_FAKE_XLA_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "csrc/ffi/cuda_matmul.h"
#include "csrc/ffi/host_matmul.h"
#include "csrc/plan/matmul_problem.h"
#include "xla/ffi/api/ffi.h"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

struct XLA_FFI_Future {
  std::mutex mutex;
  std::condition_variable is_set;
  bool is_done = false;
  std::string error;

  void Set(std::string message) {
    std::lock_guard<std::mutex> lock(mutex);
    is_done = true;
    error = std::move(message);
    is_set.notify_all();  // under the lock: the waiter may destroy this as soon as it is released
  }
  std::string Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    is_set.wait(lock, [this] { return is_done; });
    return error;
  }
};

namespace fake_xla {

// The argument of a handler. The headers declare the type of the pointer only, and its name is not the same in
// every version of jaxlib.
struct Context {
  void* state = nullptr;
  int64_t run_id = 0;
  int64_t num_threads = 2;
  int32_t ordinal = 0;
  void* stream = nullptr;
  std::vector<std::thread> helpers;
};

template <typename Args>
Context& ContextOf(const Args* args) {
  return *reinterpret_cast<Context*>(args->ctx);
}

// From version 0.5 of the interface on, XLA_FFI_Error_GetMessage is XLA_FFI_Error_GetDetails, and gives the code too.
template <typename Api>
auto SetErrorText(Api& api, int) -> decltype(void(api.XLA_FFI_Error_GetDetails)) {
  api.XLA_FFI_Error_GetDetails = [](auto* args) {
    args->message = args->error->message.c_str();
    args->errc = args->error->code;
  };
}
template <typename Api>
auto SetErrorText(Api& api, long) -> decltype(void(api.XLA_FFI_Error_GetMessage)) {
  api.XLA_FFI_Error_GetMessage = [](auto* args) { args->message = args->error->message.c_str(); };
}
inline const XLA_FFI_Api* Api() {
  constexpr XLA_FFI_Error* kNone = nullptr;
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made = {};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.XLA_FFI_Error_Create = [](auto* args) { return new XLA_FFI_Error{args->errc, args->message}; };
    SetErrorText(made, 0);
    made.XLA_FFI_Error_Destroy = [](auto* args) { delete args->error; };
    made.XLA_FFI_State_Set = [](auto* args) { return ContextOf(args).state = args->state, kNone; };
    made.XLA_FFI_State_Get = [](auto* args) { return args->state = ContextOf(args).state, kNone; };
    made.XLA_FFI_RunId_Get = [](auto* args) { return args->run_id = ContextOf(args).run_id, kNone; };
    made.XLA_FFI_DeviceOrdinal_Get = [](auto* args) { return args->device_ordinal = ContextOf(args).ordinal, kNone; };
    made.XLA_FFI_Stream_Get = [](auto* args) { return args->stream = ContextOf(args).stream, kNone; };
    made.XLA_FFI_ThreadPool_NumThreads = [](auto* args) {
      return *args->num_threads = ContextOf(args).num_threads, kNone;
    };
    made.XLA_FFI_ThreadPool_Schedule = [](auto* args) {
      return ContextOf(args).helpers.emplace_back(args->task, args->data), kNone;
    };
    made.XLA_FFI_Future_Create = [](auto* args) { return args->future = new XLA_FFI_Future, kNone; };
    made.XLA_FFI_Future_SetAvailable = [](auto* args) { return args->future->Set(""), kNone; };
    made.XLA_FFI_Future_SetError = [](auto* args) {
      return args->future->Set(std::unique_ptr<XLA_FFI_Error>(args->error)->message), kNone;
    };
    return made;
  }();
  return &api;
}

// Attributes that XLA may hand over: ours, and scalars of other types.
using AnyAttribute =
    std::variant<int64_t, std::string, std::vector<int64_t>, std::vector<double>, int32_t, float, double, bool>;
using AnyAttributes = std::vector<std::pair<std::string, AnyAttribute>>;  // one name may come twice

inline AnyAttributes All(const jaxmp::Attributes& attributes) {
  AnyAttributes all;
  for (const auto& [name, value] : attributes) {
    std::visit([&all, &name = name](const auto& typed) { all.emplace_back(name, typed); }, value);
  }
  return all;
}

struct Buffer {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> shape;
  void* data;
};

inline Buffer F32(std::vector<float>& data) { return {XLA_FFI_DataType_F32, {int64_t(data.size())}, data.data()}; }

// Owns what a call frame points to.
class Frame {
 public:
  Frame(XLA_FFI_ExecutionStage stage, Context* context) {
    frame_.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame_.api = Api();
    frame_.ctx = reinterpret_cast<decltype(frame_.ctx)>(context);
    frame_.stage = stage;
  }
  Frame(const Frame&) = delete;

  void SetBuffers(std::vector<Buffer> args, std::vector<Buffer> rets) {
    args_ = std::move(args);
    rets_ = std::move(rets);
    arg_types_.assign(args_.size(), XLA_FFI_ArgType_BUFFER);
    ret_types_.assign(rets_.size(), XLA_FFI_RetType_BUFFER);
    buffers_.reserve(args_.size() + rets_.size());
    for (Buffer& buffer : args_) arg_pointers_.push_back(Wrap(buffer));
    for (Buffer& buffer : rets_) ret_pointers_.push_back(Wrap(buffer));
    frame_.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(args_.size()), arg_types_.data(), arg_pointers_.data()};
    frame_.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(rets_.size()), ret_types_.data(), ret_pointers_.data()};
  }

  void SetAttributes(const jaxmp::Attributes& attributes) { SetAttributes(All(attributes)); }

  void SetAttributes(AnyAttributes attributes) {
    attributes_ = std::move(attributes);
    const size_t count = attributes_.size();
    spans_.reserve(2 * count);
    scalars_.reserve(count);
    arrays_.reserve(count);
    for (auto& [name, value] : attributes_) {
      spans_.push_back({name.data(), name.size()});
      names_.push_back(&spans_.back());
      std::visit([this](auto& typed) { Encode(typed); }, value);
    }
    frame_.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, int64_t(count), types_.data(), names_.data(), values_.data()};
  }

  XLA_FFI_CallFrame* get() { return &frame_; }

 private:
  void* Wrap(Buffer& buffer) {
    buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, buffer.dtype, buffer.data, int64_t(buffer.shape.size()),
                        buffer.shape.data()});
    return &buffers_.back();
  }
  void Add(XLA_FFI_AttrType type, void* value) {
    types_.push_back(type);
    values_.push_back(value);
  }
  void Encode(int64_t& value) { EncodeScalar(XLA_FFI_DataType_S64, &value); }
  void Encode(int32_t& value) { EncodeScalar(XLA_FFI_DataType_S32, &value); }
  void Encode(float& value) { EncodeScalar(XLA_FFI_DataType_F32, &value); }
  void Encode(double& value) { EncodeScalar(XLA_FFI_DataType_F64, &value); }
  void Encode(bool& value) { EncodeScalar(XLA_FFI_DataType_PRED, &value); }
  void EncodeScalar(XLA_FFI_DataType dtype, void* value) {
    scalars_.push_back({dtype, value});
    Add(XLA_FFI_AttrType_SCALAR, &scalars_.back());
  }
  void Encode(std::string& value) {
    spans_.push_back({value.data(), value.size()});
    Add(XLA_FFI_AttrType_STRING, &spans_.back());
  }
  void Encode(std::vector<int64_t>& value) {
    arrays_.push_back({XLA_FFI_DataType_S64, value.size(), value.data()});
    Add(XLA_FFI_AttrType_ARRAY, &arrays_.back());
  }
  void Encode(std::vector<double>& value) {
    arrays_.push_back({XLA_FFI_DataType_F64, value.size(), value.data()});
    Add(XLA_FFI_AttrType_ARRAY, &arrays_.back());
  }

  XLA_FFI_CallFrame frame_ = {};
  std::vector<Buffer> args_, rets_;
  std::vector<XLA_FFI_Buffer> buffers_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
  std::vector<void*> arg_pointers_, ret_pointers_, values_;
  AnyAttributes attributes_;
  std::vector<XLA_FFI_ByteSpan> spans_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<XLA_FFI_Scalar> scalars_;
  std::vector<XLA_FFI_Array> arrays_;
  std::vector<XLA_FFI_AttrType> types_;
};

inline std::string Take(XLA_FFI_Error* error) {
  std::unique_ptr<XLA_FFI_Error> owned(error);
  return owned ? owned->message : "";
}

// A call site of an executable, or the message of its refusal.
template <typename Site>
struct InstanceOf {
  std::unique_ptr<Site> site;
  std::string error;
};
using Instance = InstanceOf<jaxmp::Site>;

template <typename Site, typename Attributes>
InstanceOf<Site> InstantiateWith(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), const Attributes& attributes) {
  Site::id.type_id = 1;  // what the registration would have written
  Context context;
  Frame frame(XLA_FFI_ExecutionStage_INSTANTIATE, &context);
  frame.SetAttributes(attributes);
  std::string error = Take(handler(frame.get()));
  return {std::unique_ptr<Site>(static_cast<Site*>(context.state)), error};
}

template <typename Attributes>
Instance Instantiate(const Attributes& attributes) {
  return InstantiateWith<jaxmp::Site>(jaxmp::MatmulInstantiate, attributes);
}
inline InstanceOf<jaxmp::CudaSite> InstantiateOnCuda(const jaxmp::Attributes& attributes) {
  return InstantiateWith<jaxmp::CudaSite>(jaxmp::CudaMatmulInstantiate, attributes);
}

// Returns the error of a call on a CUDA device, or "".
inline std::string ExecuteOnCuda(jaxmp::CudaSite& site, int32_t ordinal, void* stream, std::vector<Buffer> args,
                                 std::vector<Buffer> rets) {
  Context context;
  context.state = &site;
  context.ordinal = ordinal;
  context.stream = stream;
  Frame frame(XLA_FFI_ExecutionStage_EXECUTE, &context);
  frame.SetBuffers(std::move(args), std::move(rets));
  return Take(jaxmp::CudaMatmulExecute(frame.get()));
}

// The error of a call on host memory without helpers, or "".
inline std::string Execute(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), void* site, std::vector<Buffer> args,
                           std::vector<Buffer> rets) {
  Context context;
  context.state = site;
  Frame frame(XLA_FFI_ExecutionStage_EXECUTE, &context);
  frame.SetBuffers(std::move(args), std::move(rets));
  const std::string error = Take(handler(frame.get()));
  const std::unique_ptr<XLA_FFI_Future> future(frame.get()->future);
  return future ? future->Wait() : error;
}

// One device's execution of a call site: begun by the constructor, over after Wait().
class Execution {
 public:
  Execution(jaxmp::Site& site, int64_t run_id, std::vector<Buffer> args, std::vector<Buffer> rets)
      : frame_(XLA_FFI_ExecutionStage_EXECUTE, &context_) {
    context_.state = &site;
    context_.run_id = run_id;
    frame_.SetBuffers(std::move(args), std::move(rets));
    error_ = Take(jaxmp::MatmulExecute(frame_.get()));
    future_.reset(frame_.get()->future);
  }
  ~Execution() { Wait(); }

  bool is_asynchronous() const { return future_ != nullptr; }

  // The error, or "" for success.
  std::string Wait() {
    if (future_) error_ = future_->Wait();
    future_.reset();
    for (std::thread& helper : context_.helpers) helper.join();
    context_.helpers.clear();
    return error_;
  }

 private:
  Context context_;
  Frame frame_;
  std::unique_ptr<XLA_FFI_Future> future_;
  std::string error_;
};

}  // namespace fake_xla

#endif  // JAXMP_TESTS_FAKE_XLA_H_
