// One call of the C++ API as the fuzzer draws it: legal arguments in memory of their exact size,
// and the faults that a caller could put into them. Each fault must raise Error, with no byte of
// memory changed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "minifloat/spec.h"
#include "minifloat/tensor_ref.h"

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
  std::int64_t size() { return one_of<std::int64_t>({0, 1, 2, 3, 15, 16, 17, 33, 64, 128, 130}); }

 private:
  std::uint64_t state_;
};

// Memory of exactly `size` bytes. The sanitizer sees an access outside of it; without one it lies
// between guards.
class Block {
 public:
  Block(std::int64_t size, Draws& draw) : size_(static_cast<std::size_t>(size)) {
    memory_.reset(static_cast<std::uint8_t*>(std::malloc(size_ + 2 * kGuard)));
    std::memset(memory_.get(), kFill, size_ + 2 * kGuard);
    for (std::size_t i = 0; i < size_; ++i) begin()[i] = static_cast<std::uint8_t>(draw.next());
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

class Call {
 public:
  Call(std::string function, Draws& draws) : name(std::move(function)), draw(draws) {}

  // Returns memory for `count` numbers of random bits.
  template <class T>
  T* memory(std::int64_t count) {
    blocks.emplace_back(count * static_cast<std::int64_t>(sizeof(T)), draw);
    return reinterpret_cast<T*>(blocks.back().begin());
  }
  // Returns an object that lives as long as the call.
  template <class T>
  T& object(T value = {}) {
    const auto held = std::make_shared<T>(std::move(value));
    objects_.push_back(held);
    return *held;
  }
  void fault(std::string what, std::function<void()> commit) {
    faults.push_back({std::move(what), std::move(commit)});
  }

  // Allocates what `to` points to, and adds the faults of that pointer where it has bytes.
  //   is_optional: null is legal
  template <class T>
  void input(const char* what, T*& to, std::int64_t count, bool is_optional = false) {
    using Value = std::remove_const_t<T>;
    allocate<Value>(what, to, count, is_optional, false);
  }
  template <class T>
  void output(const char* what, T*& to, std::int64_t count, bool is_optional = false) {
    allocate<T>(what, to, count, is_optional, true);
  }
  // The same for memory without a type, of elements of `size` bytes.
  void input(const char* what, const void*& to, std::int64_t count, std::int64_t size) {
    place(what, to, memory<std::uint8_t>(count * size), count * size, size, false, false);
  }
  void output(const char* what, void*& to, std::int64_t count, std::int64_t size) {
    place(what, to, memory<std::uint8_t>(count * size), count * size, size, false, true);
  }
  // Adds the faults of a pointer to memory that is there.
  template <class T>
  void place(const char* what, T*& to, void* at, std::int64_t bytes, std::int64_t alignment,
             bool is_optional, bool is_output) {
    to = static_cast<T*>(at);
    if (bytes == 0) return;
    if (!is_optional) fault(std::string(what) + " null", [&to] { to = nullptr; });
    if (alignment > 1)
      fault(std::string(what) + " at an odd address",
            [&to, at] { to = reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(at) + 1); });
    // What is written is moved, never what is read: an index would be shorter there than it is.
    const std::function<void(void*)> move = [&to](void* place) { to = static_cast<T*>(place); };
    for (const Range& other : ranges_) {
      if (is_output)
        fault(std::string(what) + " in the place of " + other.name,
              [move, place = other.begin] { move(place); });
      else if (other.is_output)
        fault(other.name + " in the place of " + what, [move = other.move, at] { move(at); });
    }
    ranges_.push_back({what, at, is_output, move});
  }
  // Ends the memory that later outputs must not share.
  void forget_places() { ranges_.clear(); }
  // Adds the faults of a size: no memory has it.
  template <class T>
  void size(const char* what, T& n) {
    for (const std::int64_t bad : {std::int64_t{-1}, INT64_MIN, INT64_MAX, std::int64_t{1} << 49})
      if (sizeof(T) == 8 || bad < 0)
        fault(std::string(what) + " " + std::to_string(bad),
              [&n, bad] { n = static_cast<T>(sizeof(T) == 8 || bad == -1 ? bad : INT32_MIN); });
  }
  template <class E>
  void choice(const char* what, E& e) {
    fault(std::string(what) + " unknown", [&e] { e = static_cast<E>(77); });
  }
  // Adds a stride that spans more than any memory, of rows that are there.
  void stride(const char* what, std::int64_t& stride, std::int64_t rows) {
    if (rows <= 1) return;
    for (const std::int64_t bad : {INT64_MIN, INT64_MAX, std::int64_t{1} << 51})
      fault(std::string(what) + " " + std::to_string(bad), [&stride, bad] { stride = bad; });
  }
  // Fills an index with numbers of [least, end), and adds faults of the first `used` ones.
  void fill_index(const char* what, const std::int32_t* index, std::int64_t count,
                  std::int64_t least, std::int64_t end, std::int64_t used) {
    auto* const to = const_cast<std::int32_t*>(index);
    for (std::int64_t i = 0; i < count; ++i)
      to[i] = static_cast<std::int32_t>(least + draw.below(std::max<std::int64_t>(end - least, 1)));
    if (used == 0) return;
    const std::int64_t at = draw.below(used);
    for (const std::int64_t bad :
         {end, end + 1000, least - 1, std::int64_t{INT32_MIN}, std::int64_t{INT32_MAX}})
      fault(std::string(what) + " with " + std::to_string(bad),
            [to, at, bad] { to[at] = static_cast<std::int32_t>(bad); });
  }

  std::string name;
  Draws& draw;
  std::vector<Block> blocks;
  std::vector<Fault> faults;
  std::function<void()> run;
  bool is_legal = true;  // without a fault

 private:
  struct Range {
    std::string name;
    void* begin;
    bool is_output;
    std::function<void(void*)> move;
  };
  template <class Value, class T>
  void allocate(const char* what, T*& to, std::int64_t count, bool is_optional, bool is_output) {
    if (is_optional && draw.one_in(3)) {
      to = nullptr;
      return;
    }
    place(what, to, memory<Value>(count), count * static_cast<std::int64_t>(sizeof(Value)),
          static_cast<std::int64_t>(alignof(Value)), is_optional, is_output);
  }
  std::vector<std::shared_ptr<void>> objects_;
  std::vector<Range> ranges_;
};

// ---- Parts of calls that several functions take (casts.cpp) -------------------------------------
Spec draw_spec(Draws& draw);
void spoil_spec(Call& call, Spec& spec);
inline std::int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
// Draws a table of groups of `rows` rows, with its faults.
void add_groups(Call& call, GroupTable& groups, std::int64_t rows);
// Draws values: a matrix, a batch of some, or either or a matrix in groups.
enum class Values { kMatrix, kBatch, kAny };
void add_values(Call& call, TensorRef& x, Values values);

using MakeCall = Call (*)(Draws& draw);
extern const std::vector<MakeCall> kCastCalls, kCodeCalls, kExpertCalls, kShardCalls;

}  // namespace minifloat::fuzz
