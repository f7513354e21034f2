#include "memory_checks.h"

#include <algorithm>
#include <cstdlib>

#include "minifloat/core/block.h"

namespace minifloat {

void Memory::require_address(const char* name, const void* at, std::int64_t alignment) const {
  MINIFLOAT_CHECK(at, function_, ": expected memory for ", name, ", got null");
  const auto past =
      reinterpret_cast<std::uintptr_t>(at) & (static_cast<std::uintptr_t>(alignment) - 1);
  MINIFLOAT_CHECK(past == 0, function_, ": expected ", name, " at a multiple of ", alignment,
                  " bytes, got ", past, " bytes past one");
}

void Memory::add_to_many(const Range& range) {
  if (many_.empty()) many_.assign(few_.begin(), few_.end());
  many_.push_back(range);
}

void Memory::add_rows(const char* name, const MemoryRows& rows, bool is_written) {
  check_stride(function_, rows.count, rows.stride);
  require_address(name, rows.first, rows.alignment);
  const std::int64_t last = (rows.count - 1) * rows.stride;
  const auto first = reinterpret_cast<std::uintptr_t>(rows.first);
  add({first + static_cast<std::uintptr_t>(std::min<std::int64_t>(last, 0)),
       first + static_cast<std::uintptr_t>(std::max<std::int64_t>(last, 0) + rows.bytes),
       rows.count > 1 ? static_cast<std::uintptr_t>(std::abs(rows.stride)) : 0,
       static_cast<std::uintptr_t>(rows.bytes), name, is_written});
}

void Memory::reads_rows(const char* name, const MemoryRows& rows) {
  if (rows.count * rows.bytes != 0) add_rows(name, rows, false);
}

void Memory::writes_rows(const char* name, const MemoryRows& rows) {
  if (rows.count * rows.bytes == 0) return;
  MINIFLOAT_CHECK(rows.count <= 1 || rows.stride >= rows.bytes || rows.stride <= -rows.bytes,
                  function_, ": expected rows of ", name, " apart by their ", rows.bytes,
                  " bytes or more, got ", rows.stride);
  add_rows(name, rows, true);
}

// Returns whether rows of b lie between rows of a, which begins first.
bool Memory::are_side_by_side(const Range& a, const Range& b) {
  if (a.stride == 0 || a.stride != b.stride) return false;
  const std::uintptr_t at = (b.begin - a.begin) % a.stride;
  return at >= a.bytes && at + b.bytes <= a.stride;
}

void Memory::require_apart() {
  const std::span<Range> ranges = many_.empty() ? std::span(few_.data(), count_) : std::span(many_);
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (auto a = ranges.begin(); a != ranges.end(); ++a)
    for (auto b = a + 1; b != ranges.end() && b->begin < a->end; ++b)
      MINIFLOAT_CHECK(!(a->is_written || b->is_written) || are_side_by_side(*a, *b), function_,
                      ": expected memory of its own for what is written, got ", a->name, " and ",
                      b->name, " that overlap");
  count_ = 0;
  many_.clear();
}

void check_dtype(const char* function, DType dtype) {
  MINIFLOAT_CHECK(dtype == DType::kFloat32 || dtype == DType::kBFloat16, function,
                  ": expected the dtype kFloat32 or kBFloat16, got ", static_cast<int>(dtype));
}

void check_size(const char* function, const char* name, std::int64_t size) {
  MINIFLOAT_CHECK(is_addressable({size}), function, ": expected ", name, " of 0 to 2^48, got ",
                  size);
}

void check_stride(const char* function, std::int64_t count, std::int64_t stride) {
  constexpr std::int64_t kMost = std::int64_t{1} << 50;
  MINIFLOAT_CHECK(count <= 1 || (-kMost / (count - 1) <= stride && stride <= kMost / (count - 1)),
                  function, ": expected rows within 2^50 bytes, got ", count, " rows ", stride,
                  " apart");
}

void check_index(const char* function, const char* name, const std::int32_t* index,
                 std::int64_t count, std::int64_t end, Device device, std::int32_t least) {
  if (!index || device != Device::kCpu) return;
  bool is_inside = true;
  for (std::int64_t i = 0; i < count; ++i) is_inside &= least <= index[i] && index[i] < end;
  for (std::int64_t i = 0; !is_inside && i < count; ++i)
    MINIFLOAT_CHECK(least <= index[i] && index[i] < end, function, ": expected ", name, " of ",
                    least, " to ", end - 1, ", got ", index[i], " at ", i);
}

}  // namespace minifloat
