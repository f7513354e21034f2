// The one exception, and the one check that throws it: what was expected, and what came.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace minifloat {

// Thrown on bad input, before anything is written.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace minifloat

// MINIFLOAT_CHECK(x.rows > 0, "amax: expected at least one row, got ", x.rows)
#define MINIFLOAT_CHECK(condition, ...) \
  do {                                  \
    if (!(condition)) [[unlikely]]      \
      ::minifloat::fail(__VA_ARGS__);   \
  } while (false)
