// The checks of the memory that a caller passes to one call: it is there, aligned as its elements,
// and nothing that is written lies in other memory of the call.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "minifloat/error.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// Rows of memory, in bytes: `bytes` each, `stride` apart, perhaps backwards.
struct MemoryRows {
  const void* first = nullptr;
  std::int64_t count = 0, bytes = 0, stride = 0;
  std::int64_t alignment = 1;  // of elements
};

class Memory {
 public:
  explicit Memory(const char* function) : function_(function) {}

  // Require memory of `bytes` bytes, which the call reads or writes; null: none is there.
  //   alignment: bytes, a power of two
  void reads(const char* name, const void* at, std::int64_t bytes, std::int64_t alignment = 1) {
    add(name, at, bytes, alignment, false);
  }
  void writes(const char* name, const void* at, std::int64_t bytes, std::int64_t alignment = 1) {
    add(name, at, bytes, alignment, true);
  }
  // Require rows. Those that are read may overlap, those that are written may not. Rows of one
  // stride may lie side by side with other rows.
  void reads_rows(const char* name, const MemoryRows& rows);
  void writes_rows(const char* name, const MemoryRows& rows);

  // Requires that nothing which is written overlaps anything else, and forgets all. The last check.
  void require_apart();

 private:
  // The bytes [begin, end): rows of `bytes` bytes, `stride` > 0 apart, or one of all.
  struct Range {
    std::uintptr_t begin, end, stride, bytes;
    const char* name;
    bool is_written;
  };
  void add(const char* name, const void* at, std::int64_t bytes, std::int64_t alignment,
           bool is_written) {
    if (bytes == 0) return;
    require_address(name, at, alignment);
    const auto begin = reinterpret_cast<std::uintptr_t>(at);
    add({begin, begin + static_cast<std::uintptr_t>(bytes), 0, 0, name, is_written});
  }
  void add(const Range& range) {
    if (count_ < few_.size())
      few_[count_++] = range;
    else
      add_to_many(range);
  }
  void add_to_many(const Range& range);
  void add_rows(const char* name, const MemoryRows& rows, bool is_written);
  void require_address(const char* name, const void* at, std::int64_t alignment) const;
  static bool are_side_by_side(const Range& a, const Range& b);

  // Most calls have few ranges: no memory is allocated for those.
  const char* function_;
  std::array<Range, 16> few_;
  std::size_t count_ = 0;    // of few_
  std::vector<Range> many_;  // those past few_; with them, all
};

inline std::int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
inline std::int64_t bytes_of_table(const GroupTable& groups) {
  return kGroupTableRows * (groups.count + std::int64_t{1}) * 4;
}

// Returns the rows of a matrix whose memory is checked: those before the last group's end, at least
// one. On CUDA the host does not know the end, and one row is checked.
inline std::int64_t rows_in_memory(const GroupTable& groups, Device device, std::int64_t rows) {
  if (!groups) return rows;
  const std::int64_t end = device == Device::kCpu ? groups.of_rows()[groups.count] : 1;
  return std::min(rows, std::max<std::int64_t>(end, 1));
}

void check_dtype(const char* function, DType dtype);

// Requires a size, a count or a stride that memory can have.
void check_size(const char* function, const char* name, std::int64_t size);
void check_stride(const char* function, std::int64_t count, std::int64_t stride);

// Requires entries of an index on the CPU within [least, end). Those of another device are not
// copied to the host.
void check_index(const char* function, const char* name, const std::int32_t* index,
                 std::int64_t count, std::int64_t end, Device device, std::int32_t least = 0);

}  // namespace minifloat
