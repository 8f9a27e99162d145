// StrCat(1, " of ", 2) == "1 of 2": messages without a format string to get wrong.
#ifndef JAXMP_BASE_STR_CAT_H_
#define JAXMP_BASE_STR_CAT_H_

#include <sstream>
#include <string>

namespace jaxmp::hostmp {

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace jaxmp::hostmp

#endif  // JAXMP_BASE_STR_CAT_H_
