// The sums of a normalised row against plain loops in the order of docs/numerics.md, and the row
// compiled for each vector unit.
#include "cpu/norm_row.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

namespace minifloat::cpu {
namespace {

// Returns the sum by halves: of elements that are n / 2 apart, then n / 4, … 1.
float by_halves(std::vector<float> v) {
  while (v.size() > 1) {
    const std::size_t half = v.size() / 2;
    for (std::size_t i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
    v.resize(half);
  }
  return v[0];
}

float oracle_sum(const std::vector<float>& x, float mean, bool squares) {
  std::vector<std::vector<float>> partial(256, std::vector<float>(8, 0.0f));
  for (std::size_t c = 0; c < x.size(); ++c) {
    float& to = partial[c / 16 % 256][c % 8];
    const float d = x[c] - mean;
    to = squares ? std::fma(d, d, to) : to + x[c];
  }
  std::vector<float> of_runs;
  for (std::size_t run = 0; run < 8; ++run) {
    std::vector<float> of_units;
    for (std::size_t unit = 0; unit < 32; ++unit)
      of_units.push_back(by_halves(partial[run * 32 + unit]));
    of_runs.push_back(by_halves(of_units));
  }
  return by_halves(of_runs);
}

std::vector<float> row_of(std::size_t cols) {
  std::vector<float> x(cols);
  for (std::size_t i = 0; i < cols; ++i)
    x[i] = static_cast<float>(static_cast<int>((i * i + 37 * i) % 2003) - 900) * 0.013f;
  return x;
}

TEST(NormRow, SumsHaveTheOrderOfTheirDefinition) {
  for (const std::size_t cols : {1, 7, 8, 15, 16, 17, 255, 512, 4095, 4096, 4097, 9000, 33000}) {
    const std::vector<float> x = row_of(cols);
    const auto count = static_cast<std::int64_t>(cols);
    const float sum = oracle_sum(x, 0, false), mean = sum / static_cast<float>(cols);
    EXPECT_EQ(sum_of_row<false>(x.data(), count, 0.0f), sum) << cols;
    EXPECT_EQ(sum_of_row<true>(x.data(), count, mean), oracle_sum(x, mean, true)) << cols;
  }
}

template <class T, NormKind kKind>
void expect_rows_alike(std::size_t cols) {
  const std::vector<float> values = row_of(cols);
  std::vector<T> x(cols);
  for (std::size_t i = 0; i < cols; ++i) store_value(&x[i], values[i]);
  const auto result_of = [&](auto run) {
    std::vector<T> y(cols);
    const RowStatistics found = run(NormRow<T>{.x = x.data(),
                                               .cols = static_cast<std::int64_t>(cols),
                                               .weight = values.data(),
                                               .bias = values.data(),
                                               .eps = 1e-5f,
                                               .y = y.data()});
    return std::pair{y, std::pair{found.mean, found.factor}};
  };
  using F = NormaliseRow<T, kKind>;
  const auto baseline = result_of([](const auto& row) { return run_baseline<F>(row); });
  EXPECT_TRUE(baseline == result_of([](const auto& row) { return run_widest<F>(row); }));
#if defined(__x86_64__)
  if (vector_unit() != VectorUnit::kBaseline) {
    EXPECT_TRUE(baseline == result_of([](const auto& row) { return run_avx2<F>(row); }));
  }
#endif
}

TEST(NormRow, EveryVectorUnitGivesTheSameRow) {
  for (const std::size_t cols : {1, 31, 700, 5000}) {
    expect_rows_alike<float, NormKind::kRms>(cols);
    expect_rows_alike<float, NormKind::kLayer>(cols);
    expect_rows_alike<std::uint16_t, NormKind::kRmsRounded>(cols);
    expect_rows_alike<std::uint16_t, NormKind::kLayer>(cols);
  }
}

}  // namespace
}  // namespace minifloat::cpu
