// Common parts of the handlers of all custom calls. A call site's state is made from its attributes, once; executions
// get the state and bind no attributes.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "csrc/base/status.h"
#include "xla/ffi/api/ffi.h"

namespace jaxmp {

xla::ffi::Error ToError(const Status& status);

// The base of a call site's state.
template <typename Site>
struct SiteType {
  inline static xla::ffi::TypeId id = {};  // XLA writes it when the type is registered
  inline static const xla::ffi::TypeInfo info = xla::ffi::MakeTypeInfo<Site>();
};

// T is int64_t, std::string or std::vector<int64_t>.
template <typename T>
Status ReadAttribute(const xla::ffi::Dictionary& attributes, const char* name, T* to) {
  constexpr bool is_integer = std::is_same_v<T, int64_t>, is_text = std::is_same_v<T, std::string>;
  using Array = std::conditional_t<is_text, std::string_view, xla::ffi::Span<const int64_t>>;
  const auto value = attributes.get<std::conditional_t<is_integer, int64_t, Array>>(name);
  if (!value.has_value()) return InvalidArgument("jaxmp: attribute ", name, ": ", value.error().message());
  if constexpr (is_integer) {
    *to = *value;
  } else {
    to->assign(value->begin(), value->end());
  }
  return {};
}

template <typename Site>
using SiteMaker = StatusOr<std::unique_ptr<Site>> (*)(const xla::ffi::Dictionary& attributes);

template <typename Site, SiteMaker<Site> make>
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
  namespace ffi = xla::ffi;
  const auto instantiate = [](ffi::Dictionary attributes) -> ffi::ErrorOr<std::unique_ptr<Site>> {
    try {
      StatusOr<std::unique_ptr<Site>> site = make(attributes);
      if (!site.ok()) return ffi::Unexpected(ToError(site.status()));
      return std::move(*site);
    } catch (const std::exception& exception) {  // memory
      return ffi::Unexpected(ffi::Error::Internal(StrCat("jaxmp: ", exception.what())));
    }
  };
  static const auto* handler = ffi::Ffi::BindInstantiate().Attrs().To(instantiate).release();
  return handler->Call(frame);
}

template <typename Context, typename... Rest, typename Binding>
auto WithContexts(Binding&& binding) {
  if constexpr (sizeof...(Rest) == 0) {
    return std::move(binding).template Ctx<Context>();
  } else {
    return WithContexts<Rest...>(std::move(binding).template Ctx<Context>());
  }
}

// `run` gets the state, XLA's contexts, and the arguments and results.
template <typename Site, auto run, typename... Contexts>
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  namespace ffi = xla::ffi;
  static const auto* handler =
      WithContexts<ffi::State<Site>, Contexts...>(ffi::Ffi::Bind()).RemainingArgs().RemainingRets().To(run).release();
  return handler->Call(frame);
}

// The future of `start`, which gets a function that ends it and does not call this function if it returns an error.
template <typename Start>
xla::ffi::Future FutureOf(Start start) {
  auto promise = std::make_shared<xla::ffi::Promise>();
  xla::ffi::Future future(*promise);
  const std::function<void(const Status&)> done = [promise](const Status& status) {
    status.ok() ? promise->SetAvailable() : promise->SetError(ToError(status));
  };
  if (const Status started = start(done); !started.ok()) done(started);
  return future;
}

}  // namespace jaxmp
