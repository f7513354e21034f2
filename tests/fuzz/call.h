// One call of the C++ API as the fuzzer draws it: legal arguments in memory of their exact size,
// and the faults that a caller could put into them. Each fault must raise Error, with no byte of
// memory changed.
//
// A function is a struct of its arguments, which says how they are drawn and how it is called:
//
//     struct CopyRows : Named<"copy_rows"> {
//       Rows from;
//       void draw(Call& call) { from.count = call.length(), call.input("from", from.data, ...); }
//       void run() const { copy_rows(from); }
//     };
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "minifloat/quantize.h"

namespace minifloat::fuzz {

class Draws {
 public:
  explicit Draws(std::uint64_t seed) : state_(seed * 0x9E37'79B9'7F4A'7C15u + 1) {}
  std::uint32_t next() {  // the upper half of a 64-bit congruential sequence
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  std::int64_t below(std::int64_t end) { return static_cast<std::int64_t>(next() % end); }
  bool one_in(std::int64_t n) { return below(n) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<std::int64_t>(list.size()))];
  }
  std::int64_t length() { return one_of<std::int64_t>({0, 1, 2, 3, 15, 16, 17, 33, 64, 128, 130}); }
  DType dtype() { return one_in(2) ? DType::kFloat32 : DType::kBFloat16; }
  Spec spec();                    // any but bf16
  Spec spec(const TensorRef& x);  // that takes x: no blocks of several rows in groups
  Spec spec_of(std::initializer_list<const char*> texts) { return Spec::parse(one_of(texts)); }

 private:
  std::uint64_t state_;
};

inline std::int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Memory of exactly `size` bytes. The sanitizer sees an access outside of it; without one it lies
// between guards.
class Block {
 public:
  Block(std::int64_t size, Draws& draws) : size_(static_cast<std::size_t>(size)) {
    memory_.reset(static_cast<std::uint8_t*>(std::malloc(size_ + 2 * kGuard)));
    std::memset(memory_.get(), kFill, size_ + 2 * kGuard);
    for (std::size_t i = 0; i < size_; ++i) begin()[i] = static_cast<std::uint8_t>(draws.next());
  }
  std::uint8_t* begin() const { return memory_.get() + kGuard; }
  std::size_t size() const { return size_; }
  bool guards_hold() const {
    for (std::size_t i = 0; i < kGuard; ++i)
      if (memory_.get()[i] != kFill || begin()[size_ + i] != kFill) return false;
    return true;
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kGuard = 0;
#else
  static constexpr std::size_t kGuard = 64;
#endif
  static constexpr std::uint8_t kFill = 0xA5;
  struct Free {
    void operator()(std::uint8_t* memory) const { std::free(memory); }
  };
  std::size_t size_;
  std::unique_ptr<std::uint8_t, Free> memory_;
};

struct Fault {
  std::string name;
  std::function<void()> commit;
};

template <class T>  // of an element; of memory without a type, a byte's
constexpr std::int64_t kSize = sizeof(std::conditional_t<std::is_void_v<T>, char, T>);

class Call : public Draws {
 public:
  explicit Call(const Draws& draws) : Draws(draws) {}

  // Returns memory for `count` numbers of random bits.
  template <class T>
  T* memory(std::int64_t count) {
    blocks.emplace_back(count * kSize<T>, *this);
    return reinterpret_cast<T*>(blocks.back().begin());
  }

  // ---- Memory: allocates what `to` points to, and adds the faults of that pointer ---------------
  //   size: of an element, also its alignment
  template <class T>
  void input(const char* what, T*& to, std::int64_t count, std::int64_t size = kSize<T>) {
    place(what, to, memory<std::uint8_t>(count * size), count * size, size, false);
  }
  template <class T>
  void output(const char* what, T*& to, std::int64_t count, std::int64_t size = kSize<T>) {
    place(what, to, memory<std::uint8_t>(count * size), count * size, size, true);
  }
  // The same for memory that may be null, and sometimes is.
  template <class T>
  void optional(const char* what, T*& to, std::int64_t count) {
    if (one_in(3)) return;
    std::is_const_v<T> ? input(what, to, count) : output(what, to, count);
    drop(what, " null");
  }
  // Adds the faults of a pointer to memory that is there.
  template <class T>
  void place(const char* what, T*& to, void* at, std::int64_t bytes, std::int64_t alignment,
             bool is_output) {
    to = static_cast<T*>(at);
    if (bytes == 0) return;
    const std::function<void(std::uint8_t*)> move = [&to](std::uint8_t* place) {
      to = static_cast<T*>(static_cast<void*>(place));
    };
    const Range range = {what, static_cast<std::uint8_t*>(at), bytes, alignment, is_output, move};
    fault(range.name + " null", [&to] { to = nullptr; });
    if (alignment > 1)
      fault(range.name + " at an odd address", [move, at = range.begin + 1] { move(at); });
    // What is written is moved, never what is read: an index would be shorter there than it is.
    for (const Range& other : ranges_) {
      if (is_output)
        add_overlaps(range, other);
      else if (other.is_output)
        add_overlaps(other, range);
    }
    ranges_.push_back(range);
  }
  // Ends the memory that later outputs must not share.
  void forget_places() { ranges_.clear(); }

  // ---- Faults of other arguments ----------------------------------------------------------------
  void fault(std::string what, std::function<void()> commit) {
    faults.push_back({std::move(what), std::move(commit)});
  }
  // Drops faults that are legal: those of a name, and of what follows it.
  void drop(const char* name, const char* rest = "") {
    const std::string begin = std::string(name) + rest;
    std::erase_if(faults, [&](const Fault& f) { return f.name.starts_with(begin); });
  }
  // Adds values that are not legal.
  template <class T>
  void bad(const char* what, T& field, std::initializer_list<std::type_identity_t<T>> values) {
    for (const T& value : values) fault(what, [&field, value] { field = value; });
  }
  // Adds those of enums, and of sizes: no memory has them.   what: the fields' names
  template <class... T>
  void wrong(std::string_view what, T&... field) {
    (add_wrong(cut(what), field), ...);
  }
  // Adds a stride that spans more than any memory, of rows that are there.
  void stride(const char* what, std::int64_t& stride, std::int64_t rows) {
    if (rows > 1) bad(what, stride, {INT64_MIN, INT64_MAX, std::int64_t{1} << 51});
  }
  // Fills an index with numbers of [least, end), and adds faults of the first `used` ones.
  void fill_index(const char* what, const std::int32_t* index, std::int64_t count,
                  std::int64_t least, std::int64_t end, std::int64_t used) {
    auto* const to = const_cast<std::int32_t*>(index);
    for (std::int64_t i = 0; i < count; ++i)
      to[i] = static_cast<std::int32_t>(least + below(std::max<std::int64_t>(end - least, 1)));
    if (used == 0) return;
    std::int32_t& entry = to[below(used)];
    for (const std::int64_t value : {end, end + 1000, least - 1})
      bad(what, entry, {static_cast<std::int32_t>(value)});
    bad(what, entry, {INT32_MIN, INT32_MAX});
  }
  void spoil_spec(Spec& spec);
  // Draws a table of groups of `rows` rows, with its faults.
  void groups(GroupTable& groups, std::int64_t rows);

  std::vector<Block> blocks;
  std::vector<Fault> faults;
  std::function<void()> run;
  std::string refusal;  // what the Error of legal arguments says; "": they have none

 private:
  struct Range {
    std::string name;
    std::uint8_t* begin;
    std::int64_t bytes, alignment;
    bool is_output;
    std::function<void(std::uint8_t*)> move;
  };
  // Adds the faults of an output in other memory: at its begin, and at its last element.
  void add_overlaps(const Range& output, const Range& other) {
    const std::int64_t last = (other.bytes - 1) / output.alignment * output.alignment;
    const auto add = [&](const char* where, std::uint8_t* at) {
      fault(output.name + where + other.name, [move = output.move, at] { move(at); });
    };
    add(" in the place of ", other.begin);
    if (last > 0) add(" at the end of ", other.begin + last);
  }
  template <class T>
  void add_wrong(const std::string& what, T& field) {
    if constexpr (std::is_enum_v<T>)
      bad(what.c_str(), field, {static_cast<T>(77)});
    else
      bad(what.c_str(), field, {-1, INT64_MIN, INT64_MAX, std::int64_t{1} << 49});
  }
  // Takes the first of names that ", " parts.
  static std::string cut(std::string_view& names) {
    const std::string_view name = names.substr(0, names.find(", "));
    names.remove_prefix(std::min(names.size(), name.size() + 2));
    return std::string(name);
  }

  std::vector<Range> ranges_;
};

// ---- Functions ----------------------------------------------------------------------------------
template <std::size_t kLength>
struct Text {
  char text[kLength];
  consteval Text(const char (&from)[kLength]) { std::copy_n(from, kLength, text); }
};
template <Text kText>
struct Named {
  static constexpr const char* kFunction = kText.text;
};

struct Function {
  std::string name;
  std::function<void(Call&)> draw;  // the arguments and `run`
};
template <class... Arguments>
std::vector<Function> functions() {
  return {{Arguments::kFunction, [](Call& call) {
             const auto arguments = std::make_shared<Arguments>();
             arguments->draw(call);
             call.run = [arguments] { arguments->run(); };
           }}...};
}
extern const std::vector<Function> kCasts, kCodes, kExperts, kShards, kProducts;

// ---- Parts of calls that several functions take (cast_calls.cpp) --------------------------------
// Draws values: a matrix, a batch of some, or either or a matrix in groups.
enum class Values { kMatrix, kBatch, kAny };
void add_values(Call& call, TensorRef& x, Values values);
// Draws the outputs of one direction of x under to.spec.
void add_operand(Call& call, const TensorRef& x, Operand& to, bool columnwise);
// Draws those of a cast of x in either direction or both.
struct Directions {
  Operand row, col;
  const Operand *to_row = nullptr, *to_col = nullptr;
  void draw_casts(Call& call, const TensorRef& x);
};

}  // namespace minifloat::fuzz
