// Status-or-value for everything below the FFI boundary. `ffi` maps it to ffi::Error, `module` to a Python
// exception; no other layer knows either of them, and nothing here throws.
#pragma once

#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace jaxmp {

enum class Code {
  kOk,
  kInvalidArgument,     // the caller's values are wrong
  kFailedPrecondition,  // right values at a wrong time, or ranks that disagree
  kUnimplemented,       // the library lacks it
  kResourceExhausted,   // memory
  kInternal,            // a bug of ours
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const& { return message_; }
  std::string message() && { return std::move(message_); }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Concatenates the parts as text: StrCat(1, " of ", 2) == "1 of 2".
template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return {Code::kInvalidArgument, StrCat(parts...)};
}
template <typename... Parts>
Status FailedPrecondition(const Parts&... parts) {
  return {Code::kFailedPrecondition, StrCat(parts...)};
}
template <typename... Parts>
Status Unimplemented(const Parts&... parts) {
  return {Code::kUnimplemented, StrCat(parts...)};
}
template <typename... Parts>
Status ResourceExhausted(const Parts&... parts) {
  return {Code::kResourceExhausted, StrCat(parts...)};
}
template <typename... Parts>
Status Internal(const Parts&... parts) {
  return {Code::kInternal, StrCat(parts...)};
}

template <typename T>
class [[nodiscard]] StatusOr {
 public:
  StatusOr(T value) : value_(std::move(value)) {}          // NOLINT: a value is a success
  StatusOr(Status status) : status_(std::move(status)) {}  // NOLINT: an error is a failure

  bool ok() const { return value_.has_value(); }
  const Status& status() const& { return status_; }
  Status status() && { return std::move(status_); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T operator*() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace jaxmp

// Both names end in the line number, so that two uses in one scope do not collide.
#define JAXMP_CONCAT_(a, b) a##b
#define JAXMP_CONCAT(a, b) JAXMP_CONCAT_(a, b)

#define JAXMP_RETURN_IF_ERROR(expression)                                      \
  do {                                                                         \
    if (::jaxmp::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

#define JAXMP_ASSIGN_OR_RETURN(declaration, expression) \
  JAXMP_ASSIGN_OR_RETURN_(JAXMP_CONCAT(status_or_, __LINE__), declaration, expression)
#define JAXMP_ASSIGN_OR_RETURN_(result, declaration, expression) \
  auto result = (expression);                                    \
  if (!result.ok()) return result.status();                      \
  declaration = std::move(*result)
