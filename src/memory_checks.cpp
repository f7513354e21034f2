#include "memory_checks.h"

#include <algorithm>

#include "minifloat/core/block.h"

namespace minifloat {

void Memory::require_address(const char* name, const void* at, std::int64_t alignment) const {
  MINIFLOAT_CHECK(at, function_, ": expected memory for ", name, ", got null");
  const auto past =
      reinterpret_cast<std::uintptr_t>(at) & (static_cast<std::uintptr_t>(alignment) - 1);
  MINIFLOAT_CHECK(past == 0, function_, ": expected ", name, " at a multiple of ", alignment,
                  " bytes, got ", past, " bytes past one");
}

void Memory::add(const char* name, const void* at, std::int64_t bytes, std::int64_t alignment,
                 bool is_written) {
  if (bytes == 0) return;
  require_address(name, at, alignment);
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  ranges_.push_back({begin, begin + static_cast<std::uintptr_t>(bytes), name, is_written});
}

Memory::Range Memory::range_of(const char* name, const MemoryRows& rows) const {
  check_stride(function_, rows.count, rows.stride);
  require_address(name, rows.first, rows.alignment);
  const std::int64_t last = (rows.count - 1) * rows.stride;
  const auto first = reinterpret_cast<std::uintptr_t>(rows.first);
  return {first + static_cast<std::uintptr_t>(std::min<std::int64_t>(last, 0)),
          first + static_cast<std::uintptr_t>(std::max<std::int64_t>(last, 0) + rows.bytes), name,
          false};
}

void Memory::reads_rows(const char* name, const MemoryRows& rows) {
  if (rows.count * rows.bytes == 0) return;
  ranges_.push_back(range_of(name, rows));
}

void Memory::writes_rows(const char* name, const MemoryRows& rows) {
  if (rows.count * rows.bytes == 0) return;
  MINIFLOAT_CHECK(rows.count <= 1 || rows.stride >= rows.bytes || rows.stride <= -rows.bytes,
                  function_, ": expected rows of ", name, " apart by their ", rows.bytes,
                  " bytes or more, got ", rows.stride);
  Range range = range_of(name, rows);
  range.is_written = true;
  ranges_.push_back(range);
}

void Memory::writes_rows(const char* name, const MemoryRows& rows, const char* other_name,
                         const MemoryRows& other) {
  writes_rows(name, rows);
  writes_rows(other_name, other);
  if (rows.count * rows.bytes == 0 || other.count * other.bytes == 0) return;
  Range& merged = ranges_[ranges_.size() - 2];
  const Range second = ranges_.back();
  if (second.begin >= merged.end || merged.begin >= second.end || rows.count <= 1) return;
  // Where the other's rows begin in a row of this one.
  const std::int64_t pitch = std::abs(rows.stride);
  const auto pitch_bytes = static_cast<std::uintptr_t>(pitch);
  const auto a = reinterpret_cast<std::uintptr_t>(rows.first) % pitch_bytes,
             b = reinterpret_cast<std::uintptr_t>(other.first) % pitch_bytes;
  const auto at = static_cast<std::int64_t>((b + pitch_bytes - a) % pitch_bytes);
  MINIFLOAT_CHECK(at >= rows.bytes && at + other.bytes <= pitch, function_, ": expected ", name,
                  " and ", other_name, " side by side, got rows of ", rows.bytes, " and ",
                  other.bytes, " bytes that begin ", at, " of ", pitch, " bytes apart");
  merged.begin = std::min(merged.begin, second.begin);
  merged.end = std::max(merged.end, second.end);
  ranges_.pop_back();
}

void Memory::require_apart() {
  std::sort(ranges_.begin(), ranges_.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  // Of the ranges before: the one that ends last, and the one of those written.
  const Range* last = nullptr;
  const Range* last_written = nullptr;
  for (const Range& range : ranges_) {
    const Range* const before = range.is_written ? last : last_written;
    MINIFLOAT_CHECK(!before || before->end <= range.begin, function_,
                    ": expected memory of its own for what is written, got ", before->name, " and ",
                    range.name, " that overlap");
    if (!last || range.end > last->end) last = &range;
    if (range.is_written && (!last_written || range.end > last_written->end)) last_written = &range;
  }
  ranges_.clear();
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
