// The operand grammar: every spec of the table round-trips, and every error says where and why.
#include "minifloat/spec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "minifloat/error.h"

namespace minifloat {
namespace {

// Returns the message of the error of parsing; "" where the text parses.
std::string error_of(const std::string& text) {
  try {
    Spec::parse(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Returns the names of a list "a, b, c".
std::vector<std::string> names_of(std::string_view list) {
  std::vector<std::string> names;
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(", "), list.size());
    names.emplace_back(list.substr(0, comma));
    list.remove_prefix(std::min(comma + 2, list.size()));
  }
  return names;
}

// Returns whether an enumeration has the value: a compiler then writes its name here.
template <auto kValue>
constexpr bool is_named() {
  constexpr std::string_view text = __PRETTY_FUNCTION__;
  return text.find("::k", text.rfind("kValue = ")) != std::string_view::npos;
}
template <class Enum>
constexpr std::size_t count_of() {
  return []<std::size_t... i>(std::index_sequence<i...>) {
    return (std::size_t{is_named<static_cast<Enum>(i)>()} + ...);
  }(std::make_index_sequence<32>());
}

TEST(Spec, EveryValueOfTheEnumerationsHasAText) {
  ASSERT_EQ(kAllElements.size(), count_of<Elements>());
  const std::string error = error_of("?"), before = "expected one of ";
  std::set<Elements> elements;
  std::set<ScaleRule> rules;
  std::set<ScaleType> types;
  for (const std::string& name : names_of(error.substr(error.find(before) + before.size()))) {
    const Spec spec = Spec::parse(name);
    elements.insert(spec.elements);
    rules.insert(spec.rule);
    types.insert(spec.scale_type());
  }
  EXPECT_EQ(elements, std::set<Elements>(kAllElements.begin(), kAllElements.end()));
  EXPECT_EQ(rules.size(), count_of<ScaleRule>());
  EXPECT_EQ(types.size(), count_of<ScaleType>());
  std::set<std::string> flags;
  for (std::size_t i = 0; i < count_of<ScaleRounding>(); ++i)
    flags.insert(Spec{.scale_rounding = static_cast<ScaleRounding>(i)}.str());
  EXPECT_EQ(flags.size(), count_of<ScaleRounding>());
}

TEST(Spec, CanonicalTextsParseToThemselves) {
  for (const char* text : {"bf16",
                           "e4m3/tensor",
                           "e5m2/tensor",
                           "e4m3/row",
                           "e4m3/row+exact",
                           "e4m3/1x128",
                           "e4m3/128x128",
                           "e4m3/1x128+exact",
                           "e4m3/128x128+exact+sr",
                           "nvfp4/row",
                           "nvfp4/row+up+sr+rht",
                           "mxfp8",
                           "mxfp8/e5m2",
                           "mxfp8/32x32",
                           "mxfp8/e5m2+floor",
                           "mxfp4",
                           "mxfp4+floor+sr+rht128",
                           "nvfp4",
                           "nvfp4/16x16",
                           "nvfp4+up",
                           "nvfp4+pow2+sr+rht",
                           "nvfp4/16x16+pow2",
                           "nvfp4+4over6",
                           "nvfp4/16x16+4over6+sr+rht128",
                           "nvfp4+eden",
                           "e1m2/1x16",
                           "e1m2/1x16+pow2+sr+rht",
                           "e1m2/16x16+up",
                           "e1m2/1x32+floor+sr+rht128",
                           "e4m3/tensor+delayed",
                           "e5m2/tensor+delayed+sr",
                           "nvfp4+sr+rht32",
                           "e4m3/1x128+rht64"})
    EXPECT_EQ(Spec::parse(text).str(), text);
}

TEST(Spec, OtherSpellingsAreEqual) {
  EXPECT_EQ(Spec::parse("nvfp4+rht+sr"), Spec::parse("nvfp4+sr+rht"));
  EXPECT_EQ(Spec::parse("nvfp4/1x16"), Spec::parse("nvfp4"));
  EXPECT_EQ(Spec::parse("mxfp8/1x32"), Spec::parse("mxfp8"));
  EXPECT_EQ(Spec::parse(" mxfp4 "), Spec::parse("mxfp4/1x32"));
  EXPECT_NE(Spec::parse("nvfp4"), Spec::parse("nvfp4+up"));
}

TEST(Spec, FieldsSayWhatTheTextSays) {
  const Spec s = Spec::parse("nvfp4/16x16+pow2+sr+rht32");
  EXPECT_EQ(s.elements, Elements::kE2m1);
  EXPECT_EQ(s.rule, ScaleRule::kNvfp4);
  EXPECT_EQ(s.block_rows, 16);
  EXPECT_EQ(s.block_cols, 16);
  EXPECT_EQ(s.scale_rounding, ScaleRounding::kPowerOfTwo);
  EXPECT_TRUE(s.stochastic);
  EXPECT_FALSE(s.delayed);
  EXPECT_EQ(s.transform, 32);
  EXPECT_EQ(s.scale_type(), ScaleType::kE4m3);
}

TEST(Spec, EdenIsStochasticAndTransformed) {
  const Spec s = Spec::parse("nvfp4+eden");
  EXPECT_TRUE(s.stochastic);
  EXPECT_FALSE(s.rounds_codes_stochastically());
  EXPECT_EQ(s.transform, 128);
  EXPECT_EQ(s.group_unit(), 128);
}

TEST(Spec, SizesCountShortBlocksAndWholeTransforms) {
  const Spec nvfp4 = Spec::parse("nvfp4");
  EXPECT_EQ(nvfp4.padded_cols<std::int64_t>(33), 33);
  EXPECT_EQ(nvfp4.code_cols<std::int64_t>(33), 17);  // two a byte, the last half empty
  EXPECT_EQ(nvfp4.scale_cols<std::int64_t>(33), 3);
  EXPECT_EQ(Spec::parse("nvfp4/16x16").scale_rows<std::int64_t>(17), 2);

  const Spec transformed = Spec::parse("nvfp4+rht64");
  EXPECT_EQ(transformed.padded_cols<std::int64_t>(33), 64);
  EXPECT_EQ(transformed.code_cols<std::int64_t>(33), 32);
  EXPECT_EQ(transformed.scale_cols<std::int64_t>(33), 4);
  EXPECT_EQ(Spec::parse("e4m3/1x128").scale_cols<std::int64_t>(129), 2);
}

TEST(Spec, ErrorsNamePositionFindingAndChoice) {
  EXPECT_EQ(error_of("nvfp4+srx"),
            "'nvfp4+srx', position 6: 'srx' is not a flag; expected sr, rht, rht32, rht64, rht128, "
            "delayed, "
            "exact, floor, up, pow2, 4over6 or eden");
  EXPECT_NE(error_of("fp8").find(
                "'fp8', position 0: 'fp8' is not an operand, nor backward's fprop.w or "),
            std::string::npos);
  EXPECT_NE(error_of("").find("position 0"), std::string::npos);
  EXPECT_NE(error_of("nvfp4+delayed").find("position 6: '+delayed' needs tensor scaling"),
            std::string::npos);
  EXPECT_NE(error_of("mxfp8+up")
                .find("position 6: '+up' rounds nvfp4, e1m2/1x16 and e1m2/16x16 block scales only"),
            std::string::npos);
  EXPECT_NE(error_of("mxfp8+exact")
                .find("'+exact' rounds '/row', '/1x128' and '/128x128' scales of e4m3 only"),
            std::string::npos);
  EXPECT_NE(
      error_of("nvfp4/row+pow2")
          .find("'+pow2' rounds nvfp4, e1m2/1x16 and e1m2/16x16 block scales below a scale of "
                "the tensor only"),
      std::string::npos);
  for (const char* flag : {"4over6", "eden"})
    for (const char* base : {"nvfp4/row+", "e1m2/1x16+", "e1m2/16x16+"})
      EXPECT_NE(error_of(std::string(base) + flag)
                    .find("rounds nvfp4 block scales below a scale of the tensor only"),
                std::string::npos)
          << base << flag;
  EXPECT_NE(error_of("nvfp4+floor").find("'+floor'"), std::string::npos);
  EXPECT_NE(error_of("bf16+sr").find("takes no flag"), std::string::npos);
}

TEST(Spec, ContradictionsAreRefused) {
  EXPECT_EQ(error_of("nvfp4+up+4over6"),
            "'nvfp4+up+4over6', position 9: the scale's rounding is given twice; expected one of "
            "+exact, +floor, +up, +pow2, +4over6, +eden");
  EXPECT_EQ(error_of("nvfp4+eden+sr"),
            "'nvfp4+eden+sr', position 11: '+eden' rounds scales stochastically and codes to "
            "nearest; expected no '+sr'");
  EXPECT_EQ(error_of("nvfp4+rht128+eden"),
            "'nvfp4+rht128+eden', position 13: '+eden' has a transform of its own; expected no "
            "+rht flag");
  EXPECT_EQ(error_of("nvfp4/16x16+eden"),
            "'nvfp4/16x16+eden', position 12: '+eden' needs blocks of one row, nvfp4");
  for (const char* text : {"nvfp4+sr+eden", "nvfp4+eden+rht", "nvfp4+eden+pow2", "nvfp4+up+eden",
                           "mxfp4+eden", "e4m3/tensor+eden", "nvfp4+eden+eden"})
    EXPECT_NE(error_of(text), "") << text;
  for (const char* text : {"nvfp4+up+4over6", "nvfp4+4over6+pow2", "mxfp4+4over6", "nvfp4+up+pow2",
                           "nvfp4+sr+sr", "nvfp4+rht+rht32", "e4m3/tensor+delayed+delayed",
                           "nvfp4+", "mxfp4/32x32", "nvfp4/32x32", "e5m2/row", "e4m3", "nvfp4 +sr"})
    EXPECT_NE(error_of(text), "") << text;
}

}  // namespace
}  // namespace minifloat
