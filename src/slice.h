// A part of a longer text with its position, so that an error can show the position in the whole.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "minifloat/error.h"

namespace minifloat {

// Returns whether a byte of UTF-8 continues a character that an earlier byte began.
inline bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0u) == 0x80u; }

inline std::size_t characters(std::string_view text) {
  return text.size() -
         static_cast<std::size_t>(std::count_if(text.begin(), text.end(), is_continuation));
}

struct Slice {
  std::string_view whole;
  std::size_t begin = 0;
  std::size_t end = 0;

  explicit Slice(std::string_view text) : whole(text), end(text.size()) {}
  Slice(std::string_view text, std::size_t b, std::size_t e) : whole(text), begin(b), end(e) {}

  std::string_view text() const { return whole.substr(begin, end - begin); }
  bool empty() const { return begin == end; }

  Slice trimmed() const {
    Slice s = *this;
    while (s.begin < s.end && whole[s.begin] == ' ') ++s.begin;
    while (s.end > s.begin && whole[s.end - 1] == ' ') --s.end;
    return s;
  }
  // Cuts at the first `separator`. Without one, the second part is empty and at the end.
  std::pair<Slice, Slice> cut(std::string_view separator) const {
    const std::size_t at = text().find(separator);
    if (at == std::string_view::npos) return {*this, {whole, end, end}};
    return {{whole, begin, begin + at}, {whole, begin + at + separator.size(), end}};
  }
  // Cuts at the last `separator`, which there is.
  std::pair<Slice, Slice> cut_at_last(std::string_view separator) const {
    const std::size_t at = text().rfind(separator);
    return {{whole, begin, begin + at}, {whole, begin + at + separator.size(), end}};
  }
  std::vector<Slice> split(std::string_view separator) const {
    std::vector<Slice> parts;
    Slice rest = *this;
    while (rest.text().find(separator) != std::string_view::npos) {
      auto [part, tail] = rest.cut(separator);
      parts.push_back(part);
      rest = tail;
    }
    parts.push_back(rest);
    return parts;
  }
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    minifloat::fail("'", whole, "', position ", characters(whole.substr(0, begin)), ": ", parts...);
  }
};

struct Spec;
struct Product;
struct Recipe;
Spec parse_spec(const Slice& slice);
Product parse_product(const Slice& slice);
Recipe parse_recipe(const Slice& slice);

}  // namespace minifloat
