// The arguments that every function takes: memory that the caller owns, and where to run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "minifloat/groups.h"

namespace minifloat {

// Where memory lies. A build without the CUDA backend throws Error for kCuda.
enum class Device : std::uint8_t { kCpu, kCuda };
enum class DType : std::uint8_t { kFloat32, kBFloat16 };

// A batch of row-major matrices. Element (e, r, c) lies at data + e * batch_stride + r * row_stride
// + c, strides in elements, columns adjacent.
struct TensorRef {
  const void* data = nullptr;  // (batch, rows, cols)
  DType dtype = DType::kFloat32;
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  Device device = Device::kCpu;
  GroupTable groups = {};  // of the rows, with a batch of 1
  // Of each row, its row in the memory at `data`, which has from_rows of them; null: its position.
  // With groups alone. A row out of range raises Error on the CPU; a GPU reads the last one.
  const std::int32_t* rows_from = nullptr;
  std::int64_t from_rows = 0;
};

// A function that calls body(context, begin, end) over disjoint ranges that cover [0, count),
// perhaps at once.
using ParallelFor = void (*)(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                             void* context);

// The threads, stream and memory of one call; always the last argument.
//
// A call on the CPU is done when it returns. One on CUDA launches kernels on the host thread's
// current device, which must be that of the memory, and returns without a wait for them. Device
// memory must live until the stream has passed the call; what lies on the host, structs and spans,
// until the call returns. Host threads may call at once, where none writes what another reads or
// writes.
struct Execution {
  ParallelFor parallel_for = nullptr;  // CPU: null starts the library's threads, one a core
  void* stream = nullptr;              // CUDA: the cudaStream_t; null: the legacy default stream
  // CUDA: allocates scratch for the kernels of this call, perhaps several times: device memory in
  // stream order, at a multiple of 256 bytes as cudaMalloc's. The caller frees it, once the stream
  // has passed the call. A null result raises Error. Null: cudaMallocAsync, freed by the library.
  //   Casts: an amax a tensor, row and column, and FP4 codes and scales beside Operand::as_fp8.
  //   Functions of experts.h: these, and up to three matrices (rows, width) of the dtype.
  //   Lists, groups: less than 1 KiB for each entry; grouped_product: CUTLASS's workspace too.
  void* (*allocate)(std::size_t bytes, void* context) = nullptr;
  void* allocate_context = nullptr;
};

}  // namespace minifloat
