// Grouped products by CUTLASS's persistent kernels for Hopper: TMA loads, warpgroup products, and
// scales of rows and columns and a bias in the epilogue, so that a result is rounded once.
//
//     1  one launch writes the sizes, addresses and strides of each group, from the table
//     2  one launch multiplies: blocks take tiles of all groups in turn
//
// Fp8Sums, Bf16Sums and BlockSums below define the operands and their sums. All kernels are in one
// unit: most of its compile time goes into templates of layouts, which all of them share.
#include <array>
#include <atomic>
#include <cstddef>
#include <type_traits>

#include "cuda/common/launch.h"
#include "cuda/products/grouped.h"

// CUTLASS's own headers do not compile without warnings.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#include <cutlass/cutlass.h>

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/detail/blockwise_scale_layout.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#pragma GCC diagnostic pop

namespace minifloat::cuda {
namespace {

constexpr const char* kName = "grouped_product";

template <int... kSizes>
using Shape = cute::Shape<cute::Int<kSizes>...>;
using RowMajor = cutlass::layout::RowMajor*;  // pointers: one a group
using ColumnMajor = cutlass::layout::ColumnMajor*;

// FP8 codes under scales of rows or groups, which the epilogue multiplies. Exact accumulation adds
// the tensor cores' sums of 128 terms in fp32 registers, which leave room for narrower tiles.
template <class A, bool kFast>
struct Fp8Sums {
  using ElementA = A;
  using ElementB = cutlass::float_e4m3_t;
  using LayoutA = RowMajor;
  using LayoutB = ColumnMajor;
  using Tile = std::conditional_t<kFast, Shape<128, 256, 128>, Shape<128, 192, 128>>;
  using Schedule =
      std::conditional_t<kFast,
                         cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8FastAccum,
                         cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>;
  static constexpr bool kHasBlocks = false;
};

// bf16 values, with pending factors in the place of scales.
struct Bf16Sums {
  using ElementA = cutlass::bfloat16_t;
  using ElementB = cutlass::bfloat16_t;
  using LayoutA = RowMajor;
  using LayoutB = ColumnMajor;
  using Tile = Shape<128, 256, 64>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  static constexpr bool kHasBlocks = false;
};

// E4M3 codes under scales of 1x128 blocks times those of (kRowsOfB)x128 blocks: the sums of each
// block are scaled and added in fp32 registers. kMajor: which dimension of the scales is adjacent.
template <int kRowsOfB, cute::GMMA::Major kMajor>
struct BlockSums {
  using Config = cutlass::detail::Sm90BlockwiseScaleConfig<1, kRowsOfB, 128, kMajor, kMajor>;
  using LayoutOfScaleA = decltype(Config::deduce_layoutSFA());
  using LayoutOfScaleB = decltype(Config::deduce_layoutSFB());
  using ElementA = cutlass::float_e4m3_t;
  using ElementB = cutlass::float_e4m3_t;
  using LayoutA = cute::tuple<RowMajor, LayoutOfScaleA*>;
  using LayoutB = cute::tuple<ColumnMajor, LayoutOfScaleB*>;
  using Tile = Shape<128, 128, 128>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise;
  static constexpr bool kHasBlocks = true;
};

template <class Sums>
struct GroupedGemm {
  using Int = std::int64_t;
  using Tile = typename Sums::Tile;
  using Cluster = Shape<2, 1, 1>;
  using ElementA = typename Sums::ElementA;
  using ElementB = typename Sums::ElementB;
  using Bf16 = cutlass::bfloat16_t;
  static constexpr bool kHasBlocks = Sums::kHasBlocks;
  template <class Element>
  static constexpr int kAlignment = 16 / static_cast<int>(sizeof(Element));

  // ---- The epilogue: sums * scale of the row * scale of the column + bias. An absent scale is 1.
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  template <template <class> class Op, class Out>
  using Compute = cutlass::epilogue::fusion::Sm90Compute<Op, Out, float, kRound>;
  // The strides of scales: one a row or column, or one a group.
  using OfRows = cutlass::epilogue::fusion::Sm90ColBroadcast<0, Tile, float*, float,
                                                             cute::Stride<bool, cute::_0, Int>>;
  template <class Element>
  using OfColumns = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, Element*, float,
                                                                cute::Stride<cute::_0, bool, Int>>;
  using ScaledRows = cutlass::epilogue::fusion::Sm90EVT<Compute<cutlass::multiplies, float>, OfRows,
                                                        cutlass::epilogue::fusion::Sm90AccFetch>;
  using Scaled =
      cutlass::epilogue::fusion::Sm90EVT<Compute<cutlass::homogeneous_multiply_add, Bf16>,
                                         OfColumns<float>, ScaledRows, OfColumns<Bf16>>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, 8, Bf16,
      RowMajor, 8, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative, Scaled>::CollectiveOp;

  // ---- The sums
  static constexpr int kEpilogueBytes = static_cast<int>(sizeof(typename Epilogue::SharedStorage));
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, typename Sums::LayoutA,
      kAlignment<ElementA>, ElementB, typename Sums::LayoutB, kAlignment<ElementB>, float, Tile,
      Cluster, cutlass::gemm::collective::StageCountAutoCarveout<kEpilogueBytes>,
      typename Sums::Schedule>::CollectiveOp;

  using Sizes = cute::Shape<int, int, int>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Sizes>,
                                                      Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

// The numbers of one group as the kernel reads them, in arrays of `count`.
template <class G>
struct GroupArrays {
  typename G::Sizes* sizes;
  const typename G::ElementA** a;
  const typename G::ElementB** b;
  const float** a_scale;
  const float** b_scale;
  const typename G::Bf16** bias;
  typename G::Bf16** out;
  typename G::Kernel::InternalStrideA* a_stride;
  typename G::Kernel::InternalStrideB* b_stride;
  typename G::Kernel::InternalStrideD* out_stride;

  static constexpr std::size_t kBytes = 6 * sizeof(void*) + sizeof(*sizes) + sizeof(*a_stride) +
                                        sizeof(*b_stride) + sizeof(*out_stride);

  GroupArrays(std::byte* memory, std::size_t count) {
    const auto take = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
      memory += count * sizeof(*array);
    };
    take(a), take(b), take(a_scale), take(b_scale), take(bias), take(out);
    take(a_stride), take(b_stride), take(out_stride), take(sizes);
  }
};

// The beginning of a group in an operand.
struct GroupStart {
  std::int64_t matrix;  // the group, where the operand is one matrix a group; else 0
  std::int64_t rows;    // of a matrix
  std::int64_t row, col;
};

// Returns the index of group e's first scale.   start: of the group in the operand
__device__ std::int64_t first_scale(GroupScales scales, int e, const GroupStart& start,
                                    std::int64_t k, bool is_along_rows) {
  const auto blocks = [](std::int64_t length) { return (length + 127) / 128; };
  switch (scales) {
    case GroupScales::kNone: return 0;
    case GroupScales::kGroups: return e;
    case GroupScales::kRows:
      return is_along_rows ? start.matrix * start.rows + start.row : e * start.rows;
    case GroupScales::k1x128:
      return is_along_rows ? start.row * blocks(k) : start.col / 128 * start.rows;
    case GroupScales::k128x128: return start.matrix * blocks(start.rows) * blocks(k);
  }
  return 0;
}

template <class G>
__global__ void write_groups(const __grid_constant__ GroupedProduct p, const std::int32_t* bounds,
                             GroupArrays<G> to) {
  const int e = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (e >= p.groups.count) return;
  const bool along_rows = p.groups.unit == 0;
  const std::int64_t begin = bounds[e], length = bounds[e + 1] - begin;
  to.sizes[e] = {static_cast<int>(along_rows ? length : p.m), static_cast<int>(p.n),
                 static_cast<int>(along_rows ? p.k : length)};
  const GroupStart a = {
      .matrix = 0, .rows = p.m, .row = along_rows ? begin : 0, .col = along_rows ? 0 : begin};
  const GroupStart b = {.matrix = along_rows ? e : 0, .rows = p.n, .row = 0, .col = a.col};
  using A = typename G::ElementA;
  using B = typename G::ElementB;
  using Bf16 = typename G::Bf16;
  to.a[e] = static_cast<const A*>(p.a.values) + a.row * p.k + a.col;
  to.b[e] = static_cast<const B*>(p.b.values) + b.matrix * p.n * p.k + b.col;
  to.out[e] = reinterpret_cast<Bf16*>(p.out) + (along_rows ? begin : e * p.m) * p.n;
  to.bias[e] = reinterpret_cast<const Bf16*>(p.bias) + e * p.n;
  to.a_scale[e] = p.a.scale + first_scale(p.a.scales, e, a, p.k, along_rows);
  to.b_scale[e] = p.b.scale + first_scale(p.b.scales, e, b, p.k, along_rows);
  to.a_stride[e] = {p.k, {}, {}};
  to.b_stride[e] = {p.k, {}, {}};
  to.out_stride[e] = {p.n, {}, {}};
}

// Returns the current device and its number of SMs, asked once for each device.
cutlass::KernelHardwareInfo hardware_of_device() {
  static std::array<std::atomic<int>, 64> known = {};
  cutlass::KernelHardwareInfo info;
  check(cudaGetDevice(&info.device_id), kName);
  const auto index = static_cast<std::size_t>(info.device_id);
  info.sm_count = index < known.size() ? known[index].load() : 0;
  if (info.sm_count > 0) return info;
  check(cudaDeviceGetAttribute(&info.sm_count, cudaDevAttrMultiProcessorCount, info.device_id),
        kName);
  if (index < known.size()) known[index] = info.sm_count;
  return info;
}

// Returns the operands as the sums read them.
template <class G>
typename G::Mainloop::Arguments operands_of(const GroupArrays<G>& arrays) {
  if constexpr (G::kHasBlocks)  // the kernel computes the layouts of scales from the sizes
    return {arrays.a,       arrays.a_stride, arrays.b,       arrays.b_stride,
            arrays.a_scale, nullptr,         arrays.b_scale, nullptr};
  else
    return {arrays.a, arrays.a_stride, arrays.b, arrays.b_stride};
}

// Returns the epilogue's scales and bias.
template <class G>
auto scales_of(const GroupedProduct& p, const GroupArrays<G>& arrays) {
  const auto in_epilogue = [](const GroupedOperand& x, const float** scale) {
    return G::kHasBlocks || x.scales == GroupScales::kNone ? nullptr : scale;
  };
  const auto has_rows = [](const GroupedOperand& x) { return x.scales == GroupScales::kRows; };
  const typename G::OfRows::Arguments of_rows = {
      in_epilogue(p.a, arrays.a_scale), 1.0f, {has_rows(p.a), {}, 0}};
  const typename G::template OfColumns<float>::Arguments of_columns = {
      in_epilogue(p.b, arrays.b_scale), 1.0f, {{}, has_rows(p.b), 0}};
  const typename G::template OfColumns<typename G::Bf16>::Arguments of_bias = {
      p.bias ? arrays.bias : nullptr, typename G::Bf16(0.0f), {{}, true, 0}};
  return typename G::Scaled::Arguments{of_columns, {of_rows, {}, {}}, of_bias, {}};
}

template <class G>
void launch_grouped(const GroupedProduct& p, const Execution& execution) {
  const auto count = static_cast<std::size_t>(p.groups.count);
  const Scratch memory(GroupArrays<G>::kBytes * count, execution);
  const GroupArrays<G> arrays(memory.as<std::byte>(), count);
  const typename G::Gemm::Arguments arguments = {
      cutlass::gemm::GemmUniversalMode::kGrouped,
      {p.groups.count, arrays.sizes, nullptr},
      operands_of<G>(arrays),
      {scales_of<G>(p, arrays), nullptr, nullptr, arrays.out, arrays.out_stride},
      hardware_of_device()};
  const auto is_done = [](cutlass::Status s) { return s == cutlass::Status::kSuccess; };
  // CUTLASS cannot see the groups' sizes, which are on the device: src/grouped_product.cpp checks
  // the lengths and addresses that hold for all groups.
  MINIFLOAT_CHECK(is_done(G::Gemm::can_implement(arguments)), kName,
                  ": expected operands that CUTLASS's kernel multiplies");
  const Scratch workspace(G::Gemm::get_workspace_size(arguments), execution);

  constexpr unsigned kThreads = 128;
  write_groups<G><<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0,
                    cuda_stream(execution)>>>(p, p.groups.under(p.groups.unit), arrays);
  check_launch(kName);
  typename G::Gemm gemm;
  MINIFLOAT_CHECK(
      is_done(gemm.initialize(arguments, workspace.as<void>(), cuda_stream(execution))) &&
          is_done(gemm.run(cuda_stream(execution))),
      kName, ": expected the kernel to start, got ", cudaGetErrorString(cudaGetLastError()));
}

template <class A>
void launch_fp8(const GroupedProduct& p, const Execution& execution) {
  p.fast ? launch_grouped<GroupedGemm<Fp8Sums<A, true>>>(p, execution)
         : launch_grouped<GroupedGemm<Fp8Sums<A, false>>>(p, execution);
}

}  // namespace

void grouped_product(const GroupedProduct& p, const Execution& execution) {
  using BlocksByRows = BlockSums<128, cute::GMMA::Major::K>;
  using BlocksByColumns = BlockSums<1, cute::GMMA::Major::MN>;
  if (p.a.elements == Elements::kBf16) return launch_grouped<GroupedGemm<Bf16Sums>>(p, execution);
  if (p.a.elements == Elements::kE5m2) return launch_fp8<cutlass::float_e5m2_t>(p, execution);
  if (p.a.scales != GroupScales::k1x128) return launch_fp8<cutlass::float_e4m3_t>(p, execution);
  p.groups.unit == 0 ? launch_grouped<GroupedGemm<BlocksByRows>>(p, execution)
                     : launch_grouped<GroupedGemm<BlocksByColumns>>(p, execution);
}

}  // namespace minifloat::cuda
