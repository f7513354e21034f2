// Equal bytes from every vector unit that this machine has: a tile loaded, transformed and encoded
// by the code compiled for each; and a row of SwiGLU.
#include "cpu/targets.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/encode_tile.h"
#include "cpu/swiglu_row.h"
#include "harness.h"

namespace minifloat::cpu {
namespace {

struct Job {
  const TensorRef* x;
  bool columnwise;
  const OperandPlan* plan;
};

// The steps of src/cpu/quantize.cpp for a tile, in one function.
template <class F>
struct QuantizeTile {
  MINIFLOAT_INLINE static void run(const Job& job) {
    const auto memory = std::make_unique<TileMemory>();
    const TileRange range = {0, 0, 0, job.plan->rows, job.plan->cols};
    const LoadArgs load = {
        job.x,  job.columnwise, job.plan->operand.spec.transform, repeated_signs(kHadamardSigns),
        &range, memory.get()};
    const TileView<std::uint16_t> tile = load.points > 0
                                             ? LoadTransformedTile<std::uint16_t>::run(load)
                                             : LoadTile<std::uint16_t>::run(load);
    EncodeTile<F, std::uint16_t>::run({job.plan, &range, tile});
  }
};

template <class F>
void expect_alike(const char* text) {
  for (const bool columnwise : {false, true}) {
    const Matrix x({1, 100, 77}, DType::kBFloat16, Kind::kSpecial);
    const Spec spec = Spec::parse(text);
    const Shape read = read_shape(x.shape(), columnwise);
    const TensorScale tensor =
        scale_of_tensor<F>(spec.rule, spec.scale_rounding, magnitude_bits(900.0f));
    const auto quantized_by = [&](void (*run)(const Job&)) {
      Outputs out(spec, read);
      OperandPlan plan = {.operand = operand_of({.spec = spec}, out),
                          .batch = 1,
                          .rows = read.rows,
                          .cols = read.cols,
                          .padded = spec.padded_cols(read.cols),
                          .code_pitch = spec.code_cols(read.cols),
                          .scale_rows = spec.scale_rows(read.rows),
                          .scale_cols = spec.scale_cols(read.cols),
                          .tensor = &tensor,
                          .random = {.key = 5}};
      const TensorRef ref = x.ref();
      run({&ref, columnwise, &plan});
      EXPECT_TRUE(out.guards_hold());
      return out;
    };
    using Kernel = QuantizeTile<F>;
    const Outputs baseline = quantized_by([](const Job& job) { run_baseline<Kernel>(job); });
    const auto expect_baseline = [&](void (*run)(const Job&)) {
      EXPECT_TRUE(quantized_by(run) == baseline) << text;
    };
    expect_baseline([](const Job& job) { run_widest<Kernel>(job); });
#if defined(__x86_64__)
    if (vector_unit() != VectorUnit::kBaseline)
      expect_baseline([](const Job& job) { run_avx2<Kernel>(job); });
    if (vector_unit() == VectorUnit::kAvx512)
      expect_baseline([](const Job& job) { run_avx512<Kernel>(job); });
#endif
  }
}

TEST(Targets, EveryVectorUnitGivesTheSameBytes) {
  for (const char* spec : {"nvfp4", "nvfp4/16x16", "nvfp4+rht", "mxfp4+floor", "mxfp4+rht128"})
    expect_alike<E2M1>(spec);
  for (const char* spec : {"nvfp4+4over6", "nvfp4/16x16+4over6", "nvfp4/16x16+4over6+rht"})
    expect_alike<E2M1>(spec);
  for (const char* spec :
       {"nvfp4+sr", "nvfp4+sr+rht32", "nvfp4+4over6+sr", "mxfp4+sr", "nvfp4+eden"})
    expect_alike<E2M1>(spec);
  for (const char* spec : {"e1m2/1x16+rht", "e1m2/16x16+pow2", "e1m2/1x32+sr+rht"})
    expect_alike<E1M2>(spec);
  for (const char* spec : {"mxfp8", "mxfp8/32x32+rht64", "e4m3/1x128", "e4m3/128x128"})
    expect_alike<E4M3>(spec);
  expect_alike<E5M2>("mxfp8/e5m2+sr");
}

// A row of values from far below to far above the sigmoid's range, and its results.
template <class T>
struct Row {
  static constexpr int kCols = 700;
  std::vector<T> in = std::vector<T>(3 * kCols), out = std::vector<T>(3 * kCols);
  SwiGluRow<T> row = {.gate = in.data(),
                      .up = in.data() + kCols,
                      .dh = in.data() + 2 * kCols,
                      .width = kCols,
                      .weight = 0.7f,
                      .form = {2, 1.702f},
                      .h = out.data(),
                      .d_gate = out.data() + kCols,
                      .d_up = out.data() + 2 * kCols};
  float d_weight = 0;

  Row() {
    for (std::size_t i = 0; i < in.size(); ++i)
      store_value(&in[i], static_cast<float>(static_cast<int>(i * 37 % 2001) - 1000) * 0.13f);
  }
};

template <class T, bool kHasLimit, Activation kActivation = Activation::kSilu>
void expect_rows_alike() {
  using Rows = Row<T>;
  const auto results_of = [](auto forward, auto backward) {
    Rows r;
    forward(r.row);
    r.d_weight = backward(r.row);
    return std::pair{r.out, r.d_weight};
  };
  using Row = SwiGluRow<T>;
  using F = SwiGluForward<T, kHasLimit, 1, kActivation>;
  using B = SwiGluBackward<T, kHasLimit, 1, kActivation>;
  const auto baseline = results_of([](const Row& row) { run_baseline<F>(row); },
                                   [](const Row& row) { return run_baseline<B>(row); });
  EXPECT_TRUE(baseline == results_of([](const Row& row) { run_widest<F>(row); },
                                     [](const Row& row) { return run_widest<B>(row); }));
#if defined(__x86_64__)
  if (vector_unit() != VectorUnit::kBaseline) {
    EXPECT_TRUE(baseline == results_of([](const Row& row) { run_avx2<F>(row); },
                                       [](const Row& row) { return run_avx2<B>(row); }));
  }
#endif
}

TEST(Targets, EveryVectorUnitGivesTheSameSwiGlu) {
  expect_rows_alike<float, false>();
  expect_rows_alike<float, true>();
  expect_rows_alike<std::uint16_t, false>();
  expect_rows_alike<std::uint16_t, true>();
  expect_rows_alike<float, false, Activation::kGelu>();
  expect_rows_alike<float, false, Activation::kGeluTanh>();
}

}  // namespace
}  // namespace minifloat::cpu
