// Grouped FP8 products by CUTLASS's persistent kernels for Hopper: TMA loads, warpgroup products,
// and scales of rows and columns in the epilogue, so that a result is rounded once.
//
//     1  one launch writes the sizes, addresses and strides of each group, from the table
//     2  one launch multiplies: blocks take tiles of all groups in turn
//
// Exact accumulation adds the tensor cores' sums of 128 terms in fp32 registers, which leave room
// for tiles of half the size.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/products/grouped_fp8.h"

// CUTLASS's own headers do not compile without warnings.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#include <cutlass/cutlass.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#pragma GCC diagnostic pop

namespace minifloat::cuda {

template <class A, bool kFast>
struct GroupedFp8 {
  using Int = std::int64_t;
  template <int... kSizes>
  using Shape = cute::Shape<cute::Int<kSizes>...>;
  using Tile = std::conditional_t<kFast, Shape<128, 256, 128>, Shape<128, 128, 128>>;
  using Cluster = Shape<2, 1, 1>;
  using B = cutlass::float_e4m3_t;
  using Bf16 = cutlass::bfloat16_t;
  using RowMajor = cutlass::layout::RowMajor*;  // pointers: one a group
  using ColumnMajor = cutlass::layout::ColumnMajor*;
  using Schedule =
      std::conditional_t<kFast,
                         cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8FastAccum,
                         cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>;

  // ---- The epilogue: sums * scale of the row * scale of the column
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  template <class Out>
  using Multiply = cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, Out, float, kRound>;
  // The strides of scales: one a row or column, or one a group.
  using OfRows = cutlass::epilogue::fusion::Sm90ColBroadcast<0, Tile, float*, float,
                                                             cute::Stride<bool, cute::_0, Int>>;
  using OfColumns = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float*, float,
                                                                cute::Stride<cute::_0, bool, Int>>;
  using ScaledRows = cutlass::epilogue::fusion::Sm90EVT<Multiply<float>, OfRows,
                                                        cutlass::epilogue::fusion::Sm90AccFetch>;
  using Scaled = cutlass::epilogue::fusion::Sm90EVT<Multiply<Bf16>, OfColumns, ScaledRows>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, 8, Bf16,
      RowMajor, 8, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative, Scaled>::CollectiveOp;

  // ---- The sums
  static constexpr int kEpilogueBytes = static_cast<int>(sizeof(typename Epilogue::SharedStorage));
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, A, RowMajor, 16, B, ColumnMajor, 16,
      float, Tile, Cluster, cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>,
      Schedule>::CollectiveOp;

  using Sizes = cute::Shape<int, int, int>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Sizes>,
                                                      Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

// The numbers of one group as the kernel reads them, in arrays of `count`.
template <class G>
struct GroupArrays {
  typename G::Sizes* sizes;
  const typename G::Kernel::ElementA** a;
  const typename G::B** b;
  const float** a_scale;
  const float** b_scale;
  typename G::Bf16** out;
  typename G::Kernel::InternalStrideA* a_stride;
  typename G::Kernel::InternalStrideB* b_stride;
  typename G::Kernel::InternalStrideD* out_stride;

  static constexpr std::size_t kBytes = 5 * sizeof(void*) + sizeof(*sizes) + sizeof(*a_stride) +
                                        sizeof(*b_stride) + sizeof(*out_stride);

  GroupArrays(std::byte* memory, std::size_t count) {
    const auto take = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
      memory += count * sizeof(*array);
    };
    take(a), take(b), take(a_scale), take(b_scale), take(out);
    take(a_stride), take(b_stride), take(out_stride), take(sizes);
  }
};

template <class G>
__global__ void write_groups(const __grid_constant__ GroupedFp8Product p,
                             const std::int32_t* bounds, GroupArrays<G> to) {
  const int e = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (e >= p.groups.count) return;
  const bool along_rows = p.groups.unit == 0;
  const std::int64_t begin = bounds[e], length = bounds[e + 1] - begin;
  const std::int64_t rows = along_rows ? length : p.m, row = along_rows ? begin : 0;
  to.sizes[e] = {static_cast<int>(rows), static_cast<int>(p.n),
                 static_cast<int>(along_rows ? p.k : length)};
  const std::int64_t col = along_rows ? 0 : begin;
  using A = typename G::Kernel::ElementA;
  using B = typename G::B;
  to.a[e] = reinterpret_cast<const A*>(p.a.codes) + row * p.k + col;
  to.b[e] = reinterpret_cast<const B*>(p.b.codes) + (along_rows ? e * p.n * p.k : col);
  to.out[e] = reinterpret_cast<typename G::Bf16*>(p.out) + (along_rows ? row : e * p.m) * p.n;
  const std::int64_t first = along_rows ? row : e * p.m;
  to.a_scale[e] = p.a.scale + (p.a.has_row_scales ? first : e);
  to.b_scale[e] = p.b.scale + (p.b.has_row_scales ? e * p.n : e);
  to.a_stride[e] = {p.k, {}, {}};
  to.b_stride[e] = {p.k, {}, {}};
  to.out_stride[e] = {p.n, {}, {}};
}

// Returns what CUTLASS asks of the current device, queried once for each.
template <class Kernel>
cutlass::KernelHardwareInfo hardware_of_device() {
  static std::array<std::atomic<int>, 64> sm_counts = {};
  int device = 0;
  check(cudaGetDevice(&device), "grouped_fp8_product");
  std::atomic<int>& count = sm_counts[static_cast<std::size_t>(device) % sm_counts.size()];
  if (count == 0) {
    int queried = 0;
    check(cudaDeviceGetAttribute(&queried, cudaDevAttrMultiProcessorCount, device),
          "grouped_fp8_product");
    count = queried;
  }
  cutlass::KernelHardwareInfo info;
  info.device_id = device;
  info.sm_count = count;
  return info;
}

template <class A, bool kFast>
void launch_grouped_kernel(const GroupedFp8Product& p, const Execution& execution) {
  using G = GroupedFp8<A, kFast>;
  constexpr const char* kName = "grouped_fp8_product";
  const auto count = static_cast<std::size_t>(p.groups.count);
  const Scratch memory(GroupArrays<G>::kBytes * count, execution);
  const GroupArrays<G> arrays(memory.as<std::byte>(), count);
  constexpr unsigned kThreads = 128;
  write_groups<G><<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0,
                    cuda_stream(execution)>>>(p, p.groups.under(p.groups.unit), arrays);
  check_launch(kName);

  const typename G::OfRows::Arguments of_rows = {arrays.a_scale, 1.0f, {p.a.has_row_scales, {}, 0}};
  const typename G::OfColumns::Arguments of_columns = {
      arrays.b_scale, 1.0f, {{}, p.b.has_row_scales, 0}};
  const typename G::Gemm::Arguments arguments = {
      cutlass::gemm::GemmUniversalMode::kGrouped,
      {p.groups.count, arrays.sizes, nullptr},
      {arrays.a, arrays.a_stride, arrays.b, arrays.b_stride},
      {{of_columns, {of_rows, {}, {}}, {}}, nullptr, nullptr, arrays.out, arrays.out_stride},
      hardware_of_device<typename G::Kernel>()};
  const Scratch workspace(G::Gemm::get_workspace_size(arguments), execution);
  typename G::Gemm gemm;
  const auto is_done = [](cutlass::Status s) { return s == cutlass::Status::kSuccess; };
  MINIFLOAT_CHECK(
      is_done(gemm.initialize(arguments, workspace.as<void>(), cuda_stream(execution))) &&
          is_done(gemm.run(cuda_stream(execution))),
      kName, ": expected the kernel to start, got ", cudaGetErrorString(cudaGetLastError()));
}

template <class A>
void launch_grouped(const GroupedFp8Product& p, const Execution& execution) {
  p.fast ? launch_grouped_kernel<A, true>(p, execution)
         : launch_grouped_kernel<A, false>(p, execution);
}

}  // namespace minifloat::cuda
