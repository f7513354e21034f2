// The checks of the memory that a caller passes to one call: it is there, aligned as its elements,
// and nothing that is written lies in other memory of the call.
#pragma once

#include <algorithm>
#include <cstdint>
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
  explicit Memory(const char* function) : function_(function) { ranges_.reserve(24); }

  // Require memory of `bytes` bytes, which the call reads or writes; null: none is there.
  //   alignment: bytes, a power of two
  void reads(const char* name, const void* at, std::int64_t bytes, std::int64_t alignment = 1) {
    add(name, at, bytes, alignment, false);
  }
  void writes(const char* name, const void* at, std::int64_t bytes, std::int64_t alignment = 1) {
    add(name, at, bytes, alignment, true);
  }
  // Require rows. Those that are read may overlap, those that are written may not.
  void reads_rows(const char* name, const MemoryRows& rows);
  void writes_rows(const char* name, const MemoryRows& rows);
  // Requires rows of two kinds that are written: in memories of their own, or side by side in rows
  // of one memory. They have one count and one stride.
  void writes_rows(const char* name, const MemoryRows& rows, const char* other_name,
                   const MemoryRows& other);

  // Requires that no range which is written overlaps another, and forgets all. The last check.
  void require_apart();

 private:
  struct Range {
    std::uintptr_t begin, end;
    const char* name;
    bool is_written;
  };
  void add(const char* name, const void* at, std::int64_t bytes, std::int64_t alignment,
           bool is_written);
  void require_address(const char* name, const void* at, std::int64_t alignment) const;
  Range range_of(const char* name, const MemoryRows& rows) const;

  const char* function_;
  std::vector<Range> ranges_;
};

inline std::int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
inline std::int64_t bytes_of_table(const GroupTable& groups) {
  return kGroupTableRows * (groups.count + std::int64_t{1}) * 4;
}

// Returns the rows of a matrix that have memory: those before the last group's end, and one where
// only the device knows that.
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
