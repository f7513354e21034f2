// Groups of rows: the table that is built from their ends, and what ops with groups leave alone.
// Nothing of a row past the last group is read, and nothing outside of the groups is written.
#include "minifloat/groups.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "harness.h"
#include "minifloat/error.h"
#include "minifloat/quantize.h"
#include "minifloat/transform.h"

namespace minifloat {
namespace {

// ---- The table ----------------------------------------------------------------------------------
Guarded<std::int32_t> table_of(const std::vector<std::int32_t>& offs, std::int64_t rows) {
  const auto count = static_cast<std::int64_t>(offs.size());
  Guarded<std::int32_t> table(kGroupTableRows * (count + 1));
  build_group_table(offs.data(), count, rows, table.data(), Device::kCpu, {});
  EXPECT_TRUE(table.guards_hold());
  return table;
}

void expect_table(const std::vector<std::int32_t>& offs, std::int64_t rows,
                  const std::vector<std::int32_t>& want) {
  const Guarded<std::int32_t> table = table_of(offs, rows);
  EXPECT_EQ(std::vector<std::int32_t>(table.data(), table.data() + table.size()), want);
}

TEST(GroupTable, Boundaries) {
  expect_table({0, 5, 40}, 50, {0, 0,   5,   40,   //
                                0, 16,  32,  80,   // unit 16
                                0, 32,  64,  128,  //
                                0, 64,  128, 192,  //
                                0, 128, 256, 384});
  expect_table({}, 50, {0, 0, 0, 0, 0});
}

TEST(GroupTable, MovesEndsToTheNearestLegalOnes) {
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min(),
                         kLargest = std::numeric_limits<std::int32_t>::max();
  const std::vector<std::int32_t> moved[] = {
      {-3, 20, 7, 60, 40}, {kLeast, 20, kLeast, kLargest, 0}, {-1, 20, 19, 51, 49}};
  for (const auto& offs : moved) EXPECT_EQ(table_of(offs, 50), table_of({0, 20, 20, 50, 50}, 50));
}

TEST(GroupTable, RefusesRowsThatAreNotThere) {
  const std::vector<float> values(4 * 32, 1.0f);
  const Guarded<std::int32_t> table = table_of({3}, 5);
  std::vector<std::int32_t> rows_from = {0, 3, 1, 1000, 1000};  // rows past the group are not read
  Guarded<float> out(5);
  const TensorRef x = {.data = values.data(),
                       .rows = 5,
                       .cols = 32,
                       .row_stride = 32,
                       .groups = {table.data(), 1, 0},
                       .rows_from = rows_from.data(),
                       .from_rows = 4};
  amax(x, {.spec = Spec::parse("e4m3/row")}, out.data());
  EXPECT_EQ(out[2], 1.0f);
  for (const std::int32_t bad : {4, 1000, -1}) {
    rows_from[1] = bad;
    Guarded<float> refused(5);
    EXPECT_THROW(amax(x, {.spec = Spec::parse("e4m3/row")}, refused.data()), Error);
    EXPECT_TRUE(refused.untouched());
  }
}

TEST(GroupTable, RefusesTooManyGroupsAndRows) {
  std::int32_t end = 0, table[2 * kGroupTableRows] = {};
  const auto build = [&](std::int64_t groups, std::int64_t rows) {
    build_group_table(&end, groups, rows, table, Device::kCpu, {});
  };
  EXPECT_THROW(build(kMostGroups + 1, 1), Error);
  EXPECT_THROW(build(1, -1), Error);
  EXPECT_THROW(build(1, (std::int64_t{1} << 31) - 128), Error);
}

// ---- Casts --------------------------------------------------------------------------------------
constexpr std::int64_t kRows = 70, kEnd = 45, kCols = 48;  // rows past kEnd are in no group
constexpr int kGroups = 4, kUnit = 128;
constexpr std::int64_t kLength = 128 + kUnit * kGroups;  // columns that are allocated
constexpr std::int64_t kWritten = kUnit * kGroups;

// Values of kRows rows, of which memory holds the first kEnd: AddressSanitizer finds a read past.
class GroupedValues : public ::testing::Test {
 protected:
  TensorRef ref() const {
    TensorRef x = values_.ref();
    x.rows = kRows;
    x.groups = {table_.data(), kGroups, kUnit};
    return x;
  }
  const Matrix values_{{1, kEnd, kCols}, DType::kFloat32, Kind::kWide};
  const Guarded<std::int32_t> table_ = table_of({0, 5, 5, kEnd}, kRows);
  const std::vector<std::int32_t> row_ids_ = std::vector<std::int32_t>(kEnd, 7);
};

// Returns outputs of a direction, with a scale and an amax of each group where a tensor has one.
Outputs grouped_outputs(const Spec& spec, bool columnwise) {
  Outputs out(spec, columnwise ? Shape{1, kCols, kLength} : Shape{1, kRows, kCols});
  if (spec.has_blocks() && !spec.has_tensor_amax()) return out;
  const bool by_row = spec.has_row_amax();
  const std::int64_t count = !by_row ? kGroups : columnwise ? kGroups * kCols : kRows;
  out.amax = Guarded<float>(count);
  if (!spec.has_blocks()) out.scale = Guarded<std::uint8_t>(4 * count);
  return out;
}

// Count the entries outside of the groups that differ from those of untouched memory. The buffer is
// (lines, pitch); the first `inside` lines, or entries of each line, are in groups.
template <class T>
std::size_t touched_lines(const Guarded<T>& buffer, std::int64_t pitch, std::int64_t inside) {
  const Guarded<T> untouched(static_cast<std::int64_t>(buffer.size()));
  std::size_t touched = 0;
  for (auto i = static_cast<std::size_t>(inside * pitch); i < buffer.size(); ++i)
    touched += std::memcmp(&buffer.data()[i], &untouched.data()[i], sizeof(T)) != 0;
  return touched;
}
template <class T>
std::size_t touched_columns(const Guarded<T>& buffer, std::int64_t pitch, std::int64_t inside) {
  const Guarded<T> untouched(static_cast<std::int64_t>(buffer.size()));
  std::size_t touched = 0;
  for (std::size_t i = 0; i < buffer.size(); ++i)
    if (static_cast<std::int64_t>(i) % pitch >= inside)
      touched += std::memcmp(&buffer.data()[i], &untouched.data()[i], sizeof(T)) != 0;
  return touched;
}

const char* const kSpecs[] = {"e4m3/tensor",  "e5m2/tensor+rht", "e4m3/row",     "e4m3/row+exact",
                              "e4m3/1x128",   "mxfp8+sr",        "mxfp4+rht128", "nvfp4+sr+rht",
                              "nvfp4+4over6", "nvfp4+eden"};

TEST_F(GroupedValues, QuantizeWritesGroupsAlone) {
  for (const char* text : kSpecs) {
    const Spec spec = Spec::parse(text);
    const int scale_bytes = spec.scale_type() == ScaleType::kFloat32 ? 4 : 1;
    Outputs row_out = grouped_outputs(spec, false), col_out = grouped_outputs(spec, true);
    Operand row = operand_of({.spec = spec}, row_out);
    const Operand col = operand_of({.spec = spec}, col_out);
    row.random.row_ids = row_ids_.data();
    quantize(ref(), &row, &col);
    EXPECT_TRUE(row_out.guards_hold() && col_out.guards_hold()) << text;

    EXPECT_EQ(touched_lines(row_out.codes, spec.code_cols(kCols), kEnd), 0u) << text;
    EXPECT_EQ(touched_lines(row_out.decoded, spec.padded_cols(kCols), kEnd), 0u) << text;
    const std::int64_t scales = spec.has_blocks() ? spec.scale_cols(kCols) : 1;
    if (spec.has_blocks() || spec.has_row_amax()) {
      EXPECT_EQ(touched_lines(row_out.scale, scales * scale_bytes, kEnd), 0u) << text;
    }
    if (spec.has_row_amax()) {
      EXPECT_EQ(touched_lines(row_out.amax, 1, kEnd), 0u) << text;
    }

    const std::int64_t bytes = spec.code_cols(kLength), written = spec.code_cols(kWritten);
    EXPECT_EQ(touched_columns(col_out.codes, bytes, written), 0u) << text;
    EXPECT_EQ(touched_columns(col_out.decoded, kLength, kWritten), 0u) << text;
    if (spec.has_blocks()) {
      const std::int64_t pitch = spec.scale_cols(kLength) * scale_bytes;
      const std::int64_t inside = spec.scale_cols(kWritten) * scale_bytes;
      EXPECT_EQ(touched_columns(col_out.scale, pitch, inside), 0u) << text;
    }
  }
}

TEST_F(GroupedValues, AmaxAndHadamardWriteGroupsAlone) {
  Guarded<float> of_rows(kRows), of_groups(kGroups);
  amax(ref(), {Spec::parse("e4m3/row")}, of_rows.data());
  amax(ref(), {Spec::parse("nvfp4+rht")}, of_groups.data());
  EXPECT_TRUE(of_rows.guards_hold() && of_groups.guards_hold());
  EXPECT_EQ(touched_lines(of_rows, 1, kEnd), 0u);

  Guarded<std::uint16_t> rows(kRows * kCols), columns(kCols * kLength);
  hadamard(ref(), 16, false, kHadamardSigns, rows.data());
  hadamard(ref(), 16, true, kHadamardSigns, columns.data());
  EXPECT_TRUE(rows.guards_hold() && columns.guards_hold());
  EXPECT_EQ(touched_lines(rows, kCols, kEnd), 0u);
  EXPECT_EQ(touched_columns(columns, kLength, kWritten), 0u);
}

TEST_F(GroupedValues, ReadersWriteGroupsAlone) {
  for (const bool columnwise : {false, true}) {
    const Spec spec = Spec::parse("nvfp4+pow2");
    Outputs out = grouped_outputs(spec, columnwise);
    const Operand operand = operand_of({.spec = spec}, out);
    quantize(ref(), columnwise ? nullptr : &operand, columnwise ? &operand : nullptr);
    const std::int64_t lines = columnwise ? kCols : kRows, pitch = columnwise ? kLength : kCols;
    const Quantized q = {.spec = spec,
                         .codes = out.codes.data(),
                         .scale = out.scale.data(),
                         .amax = out.amax.data(),
                         .rows = lines,
                         .cols = pitch,
                         .groups = {table_.data(), kGroups, columnwise ? kUnit : 0}};
    Guarded<float> values(lines * pitch);
    Guarded<std::uint16_t> decoded(lines * pitch);
    Guarded<std::uint8_t> codes(lines * pitch);
    Guarded<float> row_scale(columnwise ? kGroups * kCols : kRows);
    dequantize(q, DType::kFloat32, values.data());
    decode_for_product(q, decoded.data());
    fp4_as_fp8({q, codes.data(), row_scale.data()});
    EXPECT_TRUE(values.guards_hold() && decoded.guards_hold());
    EXPECT_TRUE(codes.guards_hold() && row_scale.guards_hold());
    const auto touched = [&](const auto& buffer) {
      return columnwise ? touched_columns(buffer, pitch, kWritten)
                        : touched_lines(buffer, pitch, kEnd);
    };
    EXPECT_EQ(touched(values), 0u);
    EXPECT_EQ(touched(decoded), 0u);
    EXPECT_EQ(touched(codes), 0u);
    if (!columnwise) {
      EXPECT_EQ(touched_lines(row_scale, 1, kEnd), 0u);
    }
  }
}

TEST_F(GroupedValues, RefusesATableOfOtherRows) {
  const Spec spec = Spec::parse("mxfp8");
  Outputs out = grouped_outputs(spec, false);
  const Operand operand = operand_of({.spec = spec}, out);
  TensorRef x = ref();
  x.rows = kEnd - 1;
  EXPECT_THROW(quantize(x, &operand, nullptr), Error);
  Guarded<std::int32_t> spoilt = table_;
  spoilt.data()[1] = kEnd;  // the next boundary falls
  x = ref();
  x.groups.table = spoilt.data();
  EXPECT_THROW(quantize(x, &operand, nullptr), Error);
  EXPECT_TRUE(out.untouched());
}

}  // namespace
}  // namespace minifloat
