#include "csrc/plan/matmul_problem.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <utility>

#include "csrc/base/limits.h"
#include "csrc/plan/enums.h"

namespace jaxmp {
namespace {

// The one list of fields: attribute decoding, equality, hash and printing all walk it, so a new field cannot be
// forgotten by any of them.
template <typename P, typename Visitor>
void VisitFields(P& p, Visitor&& visit) {
  visit("pattern", p.pattern);
  visit("m", p.m);
  visit("n", p.n);
  visit("k", p.k);
  visit("trans_a", p.trans_a);
  visit("trans_b", p.trans_b);
  visit("dtype_a", p.dtype_a);
  visit("dtype_b", p.dtype_b);
  visit("dtype_c", p.dtype_c);
  visit("dtype_d", p.dtype_d);
  visit("dtype_bias", p.dtype_bias);
  visit("dtype_aux", p.dtype_aux);
  visit("compute", p.compute);
  visit("alpha", p.alpha);
  visit("beta", p.beta);
  visit("scale_mode_a", p.scale_mode_a);
  visit("scale_mode_b", p.scale_mode_b);
  visit("scale_mode_c", p.scale_mode_c);
  visit("scale_mode_d", p.scale_mode_d);
  visit("scale_mode_aux", p.scale_mode_aux);
  visit("d_out_scale_mode", p.d_out_scale_mode);
  visit("amax_d", p.amax_d);
  visit("amax_aux", p.amax_aux);
  visit("epilog", p.epilog);
  visit("mesh_shape", p.mesh_shape);
  visit("axes_row", p.axes_row);
  visit("axes_col", p.axes_col);
  visit("determinism", p.determinism);
  visit("communication_dtype", p.communication_dtype);
  visit("algorithm", p.algorithm);
  visit("comm_sm_count", p.comm_sm_count);
  visit("layout_a", p.layout_a);
  visit("layout_b", p.layout_b);
  visit("layout_d", p.layout_d);
  visit("devices", p.devices);
}

// ---- printing

template <typename E, std::enable_if_t<std::is_enum_v<E>, int> = 0>
void Print(std::ostream& os, E value) {
  os << NameOf(value);
}
void Print(std::ostream& os, int64_t value) { os << value; }
void Print(std::ostream& os, const std::string& value) { os << value; }
void Print(std::ostream& os, const std::complex<double>& value) {
  os << value.real();
  if (value.imag() != 0) os << (value.imag() < 0 ? "" : "+") << value.imag() << "i";
}
void Print(std::ostream& os, const std::vector<int64_t>& values) {
  os << '[';
  for (size_t i = 0; i < values.size(); ++i) os << (i ? "," : "") << values[i];
  os << ']';
}

// ---- equality and hash: both read the bytes of a field

template <typename T, std::enable_if_t<std::is_trivially_copyable_v<T>, int> = 0>
std::string_view Bytes(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}
std::string_view Bytes(const std::string& value) { return value; }
std::string_view Bytes(const std::vector<int64_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t)};
}

// ---- decoding

Status WrongType(const char* name, const char* required) {
  return InvalidArgument("jaxmp: attribute ", name, " must be ", required,
                         "; the Python package and its extension disagree, reinstall jaxmp");
}

Status Decode(const char* name, const Attribute& from, int64_t& to) {
  if (!std::holds_alternative<int64_t>(from)) return WrongType(name, "an int64");
  to = std::get<int64_t>(from);
  return to >= 0 ? Status() : InvalidArgument("jaxmp: attribute ", name, " must not be negative, got ", to);
}

Status Decode(const char* name, const Attribute& from, std::string& to) {
  if (!std::holds_alternative<std::string>(from)) return WrongType(name, "a string");
  to = std::get<std::string>(from);
  return {};
}

Status Decode(const char* name, const Attribute& from, std::complex<double>& to) {
  const auto* parts = std::get_if<std::vector<double>>(&from);
  if (!parts || parts->size() != 2) return WrongType(name, "float64[2] (real, imaginary)");
  to = {(*parts)[0], (*parts)[1]};
  return {};
}

Status Decode(const char* name, const Attribute& from, std::vector<int64_t>& to) {
  // An empty list has no element type when it comes from Python.
  const auto* empty = std::get_if<std::vector<double>>(&from);
  if (empty && empty->empty()) return {};
  if (!std::holds_alternative<std::vector<int64_t>>(from)) return WrongType(name, "an int64 array");
  to = std::get<std::vector<int64_t>>(from);
  return {};
}

template <typename E, std::enable_if_t<std::is_enum_v<E>, int> = 0>
Status Decode(const char* name, const Attribute& from, E& to) {
  if (!std::holds_alternative<std::string>(from)) return WrongType(name, "a string");
  const std::string& text = std::get<std::string>(from);
  std::string known;
  for (const auto& word : WordsOf(to)) {
    if (text == word.name) {
      to = static_cast<E>(&word - WordsOf(to));
      return {};
    }
    known += (known.empty() ? "" : ", ") + std::string(word.name);
  }
  return InvalidArgument("jaxmp: attribute ", name, " must be one of ", known, "; got ", text);
}

// Attributes are checked as input, because a program may have been changed since it was exported.
constexpr int64_t kMostDevices = 1 << 20;

Status CheckNumbers(const Problem& problem) {
  struct Range {
    const char* name;
    int64_t value, most;
  };
  for (const Range& range : {Range{"m", problem.m, kLargestExtent}, Range{"n", problem.n, kLargestExtent},
                             Range{"k", problem.k, kLargestExtent}, Range{"amax_d", problem.amax_d, 1},
                             Range{"amax_aux", problem.amax_aux, 1}, Range{"epilog", problem.epilog, INT32_MAX},
                             Range{"comm_sm_count", problem.comm_sm_count, INT32_MAX}}) {
    if (range.value <= range.most) continue;
    return InvalidArgument("jaxmp: attribute ", range.name, " must be at most ", range.most, ", got ", range.value);
  }
  if (problem.compute != Compute::k32I || problem.dtype_d != DType::kS32) return {};
  const std::pair<const char*, std::complex<double>> scalars[] = {{"alpha", problem.alpha}, {"beta", problem.beta}};
  for (const auto& [name, value] : scalars) {
    const bool fits = value.real() >= INT32_MIN && value.real() <= INT32_MAX;  // false for a NaN
    if (fits && value.real() == std::trunc(value.real()) && value.imag() == 0) continue;
    return InvalidArgument("jaxmp: attribute ", name, " must be an integer of 32 bits with compute 32I");
  }
  return {};
}

Status CheckAxes(const Problem& problem) {
  JAXMP_RETURN_IF_ERROR(CheckMesh(problem.mesh_shape, problem.axes_row, problem.axes_col));
  const int64_t ndevices =
      std::accumulate(problem.mesh_shape.begin(), problem.mesh_shape.end(), int64_t{1}, std::multiplies<>());
  if (!problem.devices.empty() && static_cast<int64_t>(problem.devices.size()) != ndevices) {
    return InvalidArgument("jaxmp: attribute devices must be empty or name the ", ndevices,
                           " devices of mesh_shape; got ", problem.devices.size());
  }
  const bool is_local = problem.pattern == Pattern::kLocal;
  if (is_local && !(problem.axes_row.empty() && problem.axes_col.empty())) {
    return InvalidArgument("jaxmp: pattern local takes no axes_row and no axes_col");
  }
  if (!is_local && problem.pattern != Pattern::kGrid && !problem.axes_col.empty()) {
    return InvalidArgument("jaxmp: pattern ", NameOf(problem.pattern),
                           " takes its axes in axes_row; axes_col must be empty");
  }
  return {};
}

Status CheckLayouts(const Problem& problem) {
  const std::pair<const char*, const std::vector<int64_t>*> layouts[] = {
      {"layout_a", &problem.layout_a}, {"layout_b", &problem.layout_b}, {"layout_d", &problem.layout_d}};
  for (const auto& [name, layout] : layouts) {
    if (layout->size() != (problem.is_block_cyclic() ? 4 : 0)) {
      return InvalidArgument("jaxmp: attribute ", name,
                             " must be (mb, nb, rsrc, csrc) in each of layout_a, layout_b and layout_d, or empty in "
                             "all; got ",
                             layout->size(), " numbers");
    }
    if (layout->empty()) continue;
    const auto& at = *layout;
    const auto is_block = [](int64_t block) { return block > 0 && block <= kLargestExtent; };
    if (is_block(at[0]) && is_block(at[1]) && at[2] >= 0 && at[2] < problem.nprow() && at[3] >= 0 &&
        at[3] < problem.npcol()) {
      continue;
    }
    return InvalidArgument("jaxmp: attribute ", name, " must hold blocks of 1 to 2^40 and a process of the ",
                           problem.nprow(), "x", problem.npcol(), " grid; got blocks ", at[0], "x", at[1],
                           " from process (", at[2], ", ", at[3], ")");
  }
  if (problem.is_block_cyclic() && problem.pattern != Pattern::kGrid) {
    return InvalidArgument("jaxmp: pattern ", NameOf(problem.pattern),
                           " takes contiguous shards; block-cyclic layouts belong to pattern grid");
  }
  return {};
}

}  // namespace

bool operator==(const Problem& x, const Problem& y) {
  std::vector<std::string_view> fields;
  VisitFields(x, [&](const char*, const auto& field) { fields.push_back(Bytes(field)); });
  auto next = fields.begin();
  bool is_equal = true;
  VisitFields(y, [&](const char*, const auto& field) { is_equal &= *next++ == Bytes(field); });
  return is_equal;
}

size_t ProblemHash::operator()(const Problem& problem) const {
  size_t hash = 0;
  VisitFields(problem, [&](const char*, const auto& field) {
    hash = hash * 0x9E3779B97F4A7C15u + std::hash<std::string_view>()(Bytes(field));
  });
  return hash;
}

std::ostream& operator<<(std::ostream& os, const Problem& problem) {
  const char* separator = "";
  VisitFields(problem, [&](const char* name, const auto& field) {
    os << std::exchange(separator, " ") << name << '=';
    Print(os, field);
  });
  return os;
}

std::string ToString(const Problem& problem) {
  std::ostringstream text;
  text << problem;
  return text.str();
}

Status CheckMesh(const std::vector<int64_t>& mesh_shape, const std::vector<int64_t>& axes_row,
                 const std::vector<int64_t>& axes_col) {
  const int64_t naxes = static_cast<int64_t>(mesh_shape.size());
  std::set<int64_t> seen;
  for (const auto* axes : {&axes_row, &axes_col}) {
    for (int64_t axis : *axes) {
      if (axis < 0 || axis >= naxes || !seen.insert(axis).second) {
        return InvalidArgument("jaxmp: axes_row and axes_col must be distinct indices of the ", naxes,
                               " axes of mesh_shape; got ", axis);
      }
    }
  }
  int64_t ndevices = 1;
  for (int64_t size : mesh_shape) {
    if (size < 1) return InvalidArgument("jaxmp: every size in mesh_shape must be at least 1; got ", size);
    if (size > kMostDevices / ndevices) {
      return InvalidArgument("jaxmp: mesh_shape may have ", kMostDevices, " devices in all; got a size of ", size);
    }
    ndevices *= size;
  }
  return {};
}

StatusOr<Problem> MakeProblem(const Attributes& attributes) {
  Problem problem;
  Status status;
  size_t nfields = 0;
  VisitFields(problem, [&](const char* name, auto& field) {
    ++nfields;
    if (!status.ok()) return;
    auto found = attributes.find(name);
    status = found == attributes.end() ? WrongType(name, "present") : Decode(name, found->second, field);
  });
  if (!status.ok()) return status;
  if (attributes.size() != nfields) {
    return InvalidArgument("jaxmp: expected ", nfields, " attributes, got ", attributes.size(),
                           "; the Python package and its extension disagree, reinstall jaxmp");
  }
  if (problem.determinism != "run_to_run" && problem.determinism != "batch" && problem.determinism != "topology") {
    return InvalidArgument("jaxmp: attribute determinism must be one of run_to_run, batch, topology; got ",
                           problem.determinism);
  }
  JAXMP_RETURN_IF_ERROR(CheckNumbers(problem));
  JAXMP_RETURN_IF_ERROR(CheckAxes(problem));
  JAXMP_RETURN_IF_ERROR(CheckLayouts(problem));
  return problem;
}

}  // namespace jaxmp
