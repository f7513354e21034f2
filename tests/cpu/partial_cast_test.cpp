// Partial casts against `quantize` of the whole weight, byte for byte: any cut into any number of
// shards, masters in either dtype, values of every kind, codes written in place or as fragments.
#include "minifloat/partial_cast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "harness.h"
#include "minifloat/core/rounding.h"
#include "minifloat/error.h"
#include "minifloat/transform.h"

namespace minifloat {
namespace {

const char* const kSpecs[] = {"e4m3/tensor",
                              "e5m2/tensor",
                              "e4m3/row",
                              "e4m3/row+exact",
                              "e4m3/1x128",
                              "e4m3/128x128",
                              "e4m3/1x128+exact",
                              "e4m3/128x128+exact",
                              "mxfp8",
                              "mxfp8/e5m2",
                              "mxfp8+floor",
                              "mxfp8/32x32",
                              "mxfp4",
                              "nvfp4",
                              "nvfp4/16x16",
                              "nvfp4+up",
                              "nvfp4/16x16+pow2",
                              "nvfp4/16x16+up",
                              "nvfp4+4over6",
                              "nvfp4/16x16+4over6",
                              "e4m3/tensor+delayed"};

struct Case {
  std::string spec;
  bool columnwise;
  std::int64_t rows, cols;
  DType master, compute;
  Kind kind;
  std::vector<std::int64_t> cuts;  // 0, …, rows * cols: a shard between each two
  std::string name() const {
    std::string text = spec + (columnwise ? " columnwise " : " ") + std::to_string(rows) + "x" +
                       std::to_string(cols) + " " + name_of(master) + " as " + name_of(compute) +
                       " cut at";
    for (const std::int64_t cut : cuts) text += " " + std::to_string(cut);
    return text;
  }
};

int bits_of(const Spec& spec) { return spec.elements == Elements::kE2m1 ? 4 : 8; }
std::int64_t pitch_of(const Spec& spec, std::int64_t cols) {
  return bits_of(spec) == 4 ? ceil_div<std::int64_t>(cols, 2) : cols;
}

// The shards of all ranks of a weight.
class World {
 public:
  World(const Case& c, const Matrix& x)
      : case_(c),
        spec_(Spec::parse(c.spec)),
        flat_codes_(c.rows * pitch_of(spec_, c.cols)),
        out_(spec_, read_shape({1, c.rows, c.cols}, c.columnwise)) {
    const AmaxGrid grid = amax_grid(spec_, c.columnwise, c.rows, c.cols);
    const WeightBlocks blocks = {c.rows, c.cols, grid.height, grid.width};
    const std::int64_t count = grid.count();
    reduced_ = Guarded<std::uint32_t>(count);
    std::fill_n(reduced_.data(), count, 0u);
    for (std::size_t i = 0; i + 1 < c.cuts.size(); ++i) {
      const Span shard = {c.cuts[i], c.cuts[i + 1]};
      const std::int64_t size = c.master == DType::kFloat32 ? 4 : 2;
      masters_.emplace_back(shard.size() * size);  // a copy, so that reading past it would show
      std::memcpy(masters_.back().data(),
                  static_cast<const std::uint8_t*>(x.ref().data) + shard.begin * size,
                  static_cast<std::size_t>(shard.size() * size));
      casts_.push_back({.spec = spec_,
                        .columnwise = c.columnwise,
                        .rows = c.rows,
                        .cols = c.cols,
                        .compute = c.compute,
                        .shard = shard,
                        .master = masters_.back().data(),
                        .dtype = c.master});
      if (!spec_.reads_values() || !blocks.are_split(shard.end)) continue;
      const std::int64_t end = blocks.around(shard.end).end;
      following_.emplace_back(end - shard.end);
      for (std::int64_t flat = shard.end; flat < end; ++flat)
        following_.back().data()[flat - shard.end] = x.at(0, flat / c.cols, flat % c.cols);
      casts_.back().following = following_.back().data();
    }
  }

  // Takes each rank's choices, and the largest of each as int32.
  void choose() {
    const auto count = static_cast<std::int64_t>(reduced_.size());
    std::vector<std::int32_t> largest(reduced_.size(), std::numeric_limits<std::int32_t>::min());
    for (PartialCast& cast : casts_) {
      Guarded<std::uint32_t> of_rank(count);
      std::copy_n(reduced_.data(), count, of_rank.data());
      cast.amaxes = of_rank.data();
      choose_scales({&cast, 1}, Device::kCpu);
      ASSERT_TRUE(of_rank.guards_hold());
      for (std::size_t i = 0; i < of_rank.size(); ++i)
        largest[i] = std::max(largest[i], static_cast<std::int32_t>(of_rank[i]));
      cast.has_chosen_scales = true;
    }
    for (std::size_t i = 0; i < largest.size(); ++i)
      reduced_.data()[i] = static_cast<std::uint32_t>(largest[i]);
  }

  void reduce() {
    for (PartialCast& cast : casts_) {
      Guarded<std::uint32_t> of_rank(static_cast<std::int64_t>(reduced_.size()));
      std::fill_n(of_rank.data(), of_rank.size(), 0u);
      cast.amaxes = of_rank.data();
      partial_amax({&cast, 1}, Device::kCpu);
      ASSERT_TRUE(of_rank.guards_hold());
      for (std::size_t i = 0; i < of_rank.size(); ++i)
        reduced_.data()[i] = std::max(reduced_[i], of_rank[i]);
    }
  }

  // Casts in place, into one buffer full of other bits that is passed from rank to rank, or as
  // fragments that are ORed together.
  void cast(bool in_place, float active_amax) {
    std::fill_n(flat_codes_.data(), flat_codes_.size(), std::uint8_t{0xFF});
    if (!in_place) std::fill_n(flat_codes_.data(), flat_codes_.size(), std::uint8_t{0});
    for (PartialCast& cast : casts_) {
      const Span bytes = FlatShard{cast.cols, cast.shard}.code_bytes(bits_of(spec_));
      Guarded<std::uint8_t> fragment(bytes.size());
      cast.amaxes = reduced_.data();
      cast.scale = out_.scale.data();
      cast.amax = out_.amax.size() > 0 ? out_.amax.data() : nullptr;
      if (spec_.delayed) out_.amax.data()[0] = active_amax;
      cast.codes = in_place ? flat_codes_.data() : fragment.data();
      cast.first_byte = in_place ? 0 : bytes.begin;
      cast.keeps_other_nibbles = in_place;
      partial_cast({&cast, 1}, Device::kCpu);
      ASSERT_TRUE(fragment.guards_hold());
      if (!in_place)
        for (std::int64_t b = 0; b < bytes.size(); ++b)
          flat_codes_.data()[bytes.begin + b] |= fragment.data()[b];
    }
    const int bits = bits_of(spec_);
    if (case_.columnwise) {
      const Transpose job = {flat_codes_.data(), out_.codes.data(), case_.rows, case_.cols, bits};
      transpose_many({&job, 1}, Device::kCpu);
    } else {
      std::copy_n(flat_codes_.data(), flat_codes_.size(), out_.codes.data());
    }
    ASSERT_TRUE(flat_codes_.guards_hold() && out_.guards_hold());
  }

  const Outputs& outputs() const { return out_; }

 private:
  const Case& case_;
  Spec spec_;
  Guarded<std::uint8_t> flat_codes_;
  Guarded<std::uint32_t> reduced_;
  std::vector<Guarded<std::uint8_t>> masters_;
  std::vector<Guarded<float>> following_;
  std::vector<PartialCast> casts_;
  Outputs out_;
};

// Returns x rounded to the compute dtype.
Matrix computed(const Matrix& x, DType compute) {
  if (compute == DType::kFloat32 || x.dtype() == DType::kBFloat16) return x;
  std::vector<float> values;
  for (std::int64_t i = 0; i < x.shape().elements(); ++i)
    values.push_back(round_to_bf16(x.at(0, i / x.shape().cols, i % x.shape().cols)));
  return Matrix(x.shape(), DType::kBFloat16, values);
}

void expect_whole(const Case& c) {
  const Matrix x({1, c.rows, c.cols}, c.master, c.kind, 11);
  const Matrix seen = computed(x, c.compute);
  const Spec spec = Spec::parse(c.spec);
  const float active_amax = 1.5f;
  Request request{.spec = spec};
  if (spec.delayed) request.given_amax = &active_amax;
  const Outputs whole = quantized(seen.ref(), request, c.columnwise);
  for (const bool in_place : {true, false}) {
    World world(c, x);
    world.reduce();
    if (spec.reads_values() && c.cuts.size() > 2) world.choose();
    world.cast(in_place, active_amax);
    ASSERT_TRUE(world.outputs().amax == whole.amax) << "amax: " << c.name();
    ASSERT_TRUE(world.outputs().scale == whole.scale) << "scale: " << c.name();
    ASSERT_TRUE(world.outputs().codes == whole.codes)
        << "codes: " << c.name() << (in_place ? " in place" : " as fragments");
  }
}

std::vector<std::int64_t> random_cuts(std::int64_t elements, int shards, std::mt19937& random) {
  std::vector<std::int64_t> cuts = {0, elements};
  for (int i = 1; i < shards; ++i)
    cuts.push_back(static_cast<std::int64_t>(random()) % (elements + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

TEST(PartialCast, AnyCutGivesTheBytesOfTheWhole) {
  std::mt19937 random(3);
  const std::pair<std::int64_t, std::int64_t> shapes[] = {
      {16, 16}, {32, 96}, {48, 33}, {1, 70}, {70, 1}, {130, 144}, {300, 20}, {17, 31}};
  for (const char* const spec : kSpecs)
    for (const auto& [rows, cols] : shapes)
      for (const bool columnwise : {false, true}) {
        const auto pick = random();
        const DType master = pick % 4 == 0 ? DType::kBFloat16 : DType::kFloat32;
        const DType compute = pick % 3 == 0 ? DType::kFloat32 : DType::kBFloat16;
        const Kind kind = pick % 5 == 0 ? Kind::kSpecial : pick % 2 ? Kind::kWide : Kind::kModerate;
        expect_whole({spec, columnwise, rows, cols, master, compute, kind,
                      random_cuts(rows * cols, 1 + static_cast<int>(random() % 6), random)});
        if (HasFatalFailure()) return;
      }
}

// A rule that reads values: cuts between blocks, where no values follow a shard.
TEST(PartialCast, CutsBetweenBlocksGiveTheBytesOfTheWhole) {
  std::mt19937 random(5);
  const std::pair<std::int64_t, std::int64_t> shapes[] = {
      {16, 16}, {64, 96}, {48, 33}, {1, 70}, {70, 1}, {130, 144}, {300, 20}, {17, 31}};
  for (const char* const spec : {"nvfp4+4over6", "nvfp4/16x16+4over6"})
    for (const auto& [rows, cols] : shapes)
      for (const bool columnwise : {false, true})
        for (const int shards : {1, 2, 5}) {
          const auto pick = random();
          const DType master = pick % 4 == 0 ? DType::kBFloat16 : DType::kFloat32;
          const DType compute = pick % 3 == 0 ? DType::kFloat32 : DType::kBFloat16;
          const Kind kind = pick % 5 == 0 ? Kind::kSpecial
                            : pick % 2    ? Kind::kWide
                                          : Kind::kModerate;
          const AmaxGrid grid = amax_grid(Spec::parse(spec), columnwise, rows, cols);
          std::vector<std::int64_t> cuts = {0, rows * cols};
          for (int i = 1; i < shards; ++i)
            cuts.push_back(std::min(
                static_cast<std::int64_t>(random() % 1000) % (grid.rows + 1) * grid.height * cols,
                rows * cols));
          if (grid.height == 1 && grid.cols > 1) cuts.push_back(grid.width);  // within a row
          std::sort(cuts.begin(), cuts.end());
          expect_whole({spec, columnwise, rows, cols, master, compute, kind, cuts});
          if (HasFatalFailure()) return;
        }
}

TEST(PartialCast, ChoicesOfSplitBlocksNeedTheValuesThatFollow) {
  std::vector<float> master(32 * 32, 1.0f);
  std::vector<std::uint32_t> amaxes(5, 7u);
  PartialCast cast = {.spec = Spec::parse("nvfp4/16x16+4over6"),
                      .rows = 32,
                      .cols = 32,
                      .compute = DType::kFloat32,
                      .shard = {0, 32 * 15},
                      .master = master.data(),
                      .amaxes = amaxes.data()};
  try {
    choose_scales({&cast, 1}, Device::kCpu);
    FAIL() << "part of a block was read as a block";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "choose_scales: nvfp4/16x16+4over6 reads the values of whole blocks; expected a "
                 "shard that ends between blocks of 16 x 16, or the values that follow it, got "
                 "[0, 480) of 32 x 32");
  }
  EXPECT_EQ(amaxes, std::vector<std::uint32_t>(5, 7u));  // nothing is written
  cast.following = master.data();
  EXPECT_NO_THROW(choose_scales({&cast, 1}, Device::kCpu));
  PartialCast half = cast;
  std::vector<std::uint8_t> codes(32 * 16), scale(4);
  half.shard = {0, 32 * 16}, half.codes = codes.data(), half.scale = scale.data();
  EXPECT_THROW(partial_cast({&half, 1}, Device::kCpu), Error);  // no other rank's choices
}

TEST(PartialCast, EveryCutOfASmallWeight) {
  for (const char* const spec :
       {"nvfp4/16x16", "nvfp4", "mxfp8/32x32", "e4m3/tensor", "nvfp4+4over6", "nvfp4/16x16+4over6"})
    for (std::int64_t cut = 0; cut <= 17 * 19; ++cut) {
      expect_whole({spec,
                    cut % 2 == 0,
                    17,
                    19,
                    DType::kFloat32,
                    DType::kBFloat16,
                    Kind::kWide,
                    {0, cut, std::min<std::int64_t>(cut + 3, 17 * 19), 17 * 19}});
      if (HasFatalFailure()) return;
    }
}

TEST(PartialCast, ManyWeightsAtOnceAreEachAlone) {
  std::vector<PartialCast> casts;
  std::vector<Matrix> masters;
  std::vector<Guarded<std::uint32_t>> amaxes;
  std::vector<Guarded<std::uint8_t>> buffers;
  std::vector<Outputs> outs;
  const std::size_t count = std::size(kSpecs) - 1;  // all except the delayed one
  for (std::size_t i = 0; i < count; ++i)
    masters.emplace_back(Shape{1, 40 + static_cast<std::int64_t>(i), 64}, DType::kFloat32,
                         Kind::kWide, i + 1);
  for (std::size_t i = 0; i < count; ++i) {
    const Spec spec = Spec::parse(kSpecs[i]);
    const Shape& s = masters[i].shape();
    amaxes.emplace_back(amax_grid(spec, false, s.rows, s.cols).count());
    outs.emplace_back(spec, s);
    casts.push_back({.spec = spec,
                     .rows = s.rows,
                     .cols = s.cols,
                     .compute = DType::kFloat32,
                     .shard = {0, s.rows * s.cols},
                     .master = masters[i].ref().data});
  }
  for (std::size_t i = 0; i < count; ++i) {
    casts[i].amaxes = amaxes[i].data();
    casts[i].codes = outs[i].codes.data();
    casts[i].scale = outs[i].scale.data();
    casts[i].amax = outs[i].amax.size() > 0 ? outs[i].amax.data() : nullptr;
  }
  for (Guarded<std::uint32_t>& of_weight : amaxes)
    std::fill_n(of_weight.data(), of_weight.size(), 0u);
  partial_amax(casts, Device::kCpu);
  partial_cast(casts, Device::kCpu);
  for (std::size_t i = 0; i < count; ++i) {
    const Outputs whole = quantized(masters[i].ref(), {.spec = casts[i].spec}, false);
    EXPECT_TRUE(outs[i].codes == whole.codes && outs[i].scale == whole.scale &&
                outs[i].amax == whole.amax)
        << kSpecs[i];
  }
}

TEST(PartialCast, TransposesOfEveryWidth) {
  for (const int bits : {4, 8, 32}) {
    const std::int64_t rows = 67, cols = 131;
    const std::int64_t pitch = bits == 4 ? (cols + 1) / 2 : cols * bits / 8;
    const std::int64_t back = bits == 4 ? (rows + 1) / 2 : rows * bits / 8;
    Guarded<std::uint8_t> in(rows * pitch), out(cols * back), again(rows * pitch);
    for (std::size_t i = 0; i < in.size(); ++i)
      in.data()[i] = static_cast<std::uint8_t>(i * 37 + i / 251);
    if (bits == 4)
      for (std::int64_t r = 0; r < rows; ++r) in.data()[(r + 1) * pitch - 1] &= 0x0F;
    const Transpose there[] = {{in.data(), out.data(), rows, cols, bits}};
    const Transpose home[] = {{out.data(), again.data(), cols, rows, bits}};
    transpose_many(there, Device::kCpu);
    transpose_many(home, Device::kCpu);
    ASSERT_TRUE(out.guards_hold());
    EXPECT_TRUE(again == in) << bits;
    const std::int64_t r = 5, c = 100;
    const auto element = [&](const Guarded<std::uint8_t>& m, std::int64_t row_bytes, std::int64_t i,
                             std::int64_t k) -> std::uint32_t {
      const std::uint8_t* row = m.data() + i * row_bytes;
      return bits == 4 ? nibble(row, k) : row[k * bits / 8];
    };
    EXPECT_EQ(element(out, back, c, r), element(in, pitch, r, c)) << bits;
  }
}

TEST(PartialCast, RefusesBeforeItWrites) {
  Guarded<std::uint32_t> amaxes(64);
  const float master[32] = {};
  PartialCast cast = {.spec = Spec::parse("nvfp4/16x16"),
                      .rows = 2,
                      .cols = 16,
                      .shard = {0, 33},
                      .master = master,
                      .amaxes = amaxes.data()};
  EXPECT_THROW(partial_amax({&cast, 1}, Device::kCpu), Error);
  cast.shard = {0, 32};
  cast.spec = Spec::parse("nvfp4+sr");
  EXPECT_THROW(partial_amax({&cast, 1}, Device::kCpu), Error);
  cast.spec = Spec::parse("nvfp4/16x16");
  EXPECT_THROW(partial_cast({&cast, 1}, Device::kCpu), Error);  // no scale, no codes
  EXPECT_TRUE(amaxes.untouched());
}

}  // namespace
}  // namespace minifloat
