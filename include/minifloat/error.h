// The one exception of this library, and the check that throws it: its message is what was expected
// and what was found. The functions of minifloat/torch.h throw c10::ValueError instead, with the
// same message. Both are std::exception.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace minifloat {

// Thrown on bad input, before anything is written, and where CUDA reports an error, after which
// results may be missing. One type has both: only the message tells them apart.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Returns the text with control characters spelled out: a NUL would end a message early.
inline std::string printable(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F)
      out += c;
    else
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 0xF]};
  }
  return out;
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(printable(message.str()));
}

}  // namespace minifloat

// MINIFLOAT_CHECK(x.rows > 0, "amax: expected at least one row, got ", x.rows)
#define MINIFLOAT_CHECK(condition, ...) \
  do {                                  \
    if (!(condition)) [[unlikely]]      \
      ::minifloat::fail(__VA_ARGS__);   \
  } while (false)
