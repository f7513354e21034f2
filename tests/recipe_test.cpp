// The recipe grammar: texts round-trip, errors have positions. tests/tools/test_tables.py compares
// the presets with the table of docs/reference/grammar.md.
#include "minifloat/recipe.h"

#include <gtest/gtest.h>

#include <string>

#include "minifloat/error.h"

namespace minifloat {
namespace {

template <class Parsed>
std::string error_of(const std::string& text) {
  try {
    Parsed::parse(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Recipe, EveryPresetRoundTripsInBothForms) {
  for (const std::string& name : preset_names()) {
    const Recipe recipe = Recipe::parse(name);
    EXPECT_EQ(recipe.str(), name);
    const std::string full = "fprop=" + recipe.fprop.str() + " dgrad=" + recipe.dgrad.str() +
                             " wgrad=" + recipe.wgrad.str();
    EXPECT_EQ(Recipe::parse(full), recipe);
    EXPECT_EQ(Recipe::parse(full).str(), name);
  }
}

TEST(Recipe, OtherTextsKeepTheirForm) {
  const char* text = "fprop=mxfp8*bf16 dgrad=bf16*bf16 wgrad=nvfp4+sr+rht64*nvfp4+rht64";
  EXPECT_EQ(Recipe::parse(text).str(), text);
  EXPECT_TRUE(Recipe::parse(text).is_stochastic());
  EXPECT_FALSE(Recipe::parse("mxfp8").is_stochastic());
  EXPECT_TRUE(Recipe::parse("fp8_delayed").is_delayed());
}

TEST(Recipe, BackwardNamesOperandsOfForward) {
  const char* text = "fprop=mxfp4*nvfp4 dgrad=e4m3/row*fprop.w wgrad=bf16*fprop.x";
  const Recipe recipe = Recipe::parse(text);
  EXPECT_EQ(recipe.str(), text);
  EXPECT_EQ(recipe.dgrad.b.of_forward, ForwardOperand::kW);
  EXPECT_EQ(recipe.wgrad.b.of_forward, ForwardOperand::kX);
  EXPECT_TRUE(recipe.dgrad.b.is_bf16());
  EXPECT_FALSE(recipe.dgrad.b.is_valid());  // no cast takes a name
  EXPECT_EQ(Recipe::parse("fprop=bf16*bf16 dgrad=bf16*fprop.w wgrad=bf16*fprop.x").str(), "bf16");
  EXPECT_NE(error_of<Recipe>("fprop=bf16*fprop.w dgrad=bf16*bf16 wgrad=bf16*bf16")
                .find("expected fprop.w as the second operand of dgrad"),
            std::string::npos);
}

TEST(Recipe, RefusalsGiveTheReason) {
  EXPECT_NE(error_of<Product>("nvfp4+rht*nvfp4").find("must carry the same transform"),
            std::string::npos);
  EXPECT_NE(error_of<Product>("nvfp4+rht*bf16").find("must carry the same transform"),
            std::string::npos);
  EXPECT_NE(error_of<Product>("nvfp4*nvfp4,fast").find("',fast' is for products of FP8"),
            std::string::npos);
  EXPECT_NE(error_of<Product>("e4m3/row*bf16,fast").find("found bf16"), std::string::npos);
  EXPECT_NE(error_of<Product>("e4m3/row*e4m3/row,slow").find("position 18: expected 'fast'"),
            std::string::npos);
  EXPECT_NE(error_of<Product>("mxfp8").find("expected two operands"), std::string::npos);
  EXPECT_NE(error_of<Recipe>("nvfp5").find("'nvfp5' is not a recipe; expected bf16, "),
            std::string::npos);
  EXPECT_NE(error_of<Recipe>("fprop=bf16*bf16 wgrad=bf16*bf16").find("expected ' dgrad=…'"),
            std::string::npos);
  // the position counts from the start of the whole text, not of the operand
  EXPECT_NE(error_of<Recipe>("fprop=bf16*bf16 dgrad=bf16*bf16 wgrad=bf16*oops")
                .find("position 43: 'oops'"),
            std::string::npos);
}

TEST(RecipeMap, TheLastMatchWins) {
  const RecipeMap map = RecipeMap::parse("*: nvfp4; layers.0.*: bf16; *.w?: mxfp8");
  EXPECT_EQ(map.find("output")->str(), "nvfp4");
  EXPECT_EQ(map.find("layers.0.attention.wo")->str(), "mxfp8");
  EXPECT_EQ(map.find("layers.0.attention.out")->str(), "bf16");
  EXPECT_EQ(map.find("layers.10.attention.out")->str(), "nvfp4");
  EXPECT_EQ(RecipeMap::parse(map.str()), map);
}

TEST(RecipeMap, NamesThatNoGlobMatchesHaveNone) {
  EXPECT_EQ(RecipeMap::parse("layers.*: nvfp4").find("output"), nullptr);
  EXPECT_EQ(RecipeMap::parse("mxfp8").find("anything")->str(), "mxfp8");
  EXPECT_EQ(RecipeMap::parse("mxfp8").str(), "mxfp8");
}

TEST(RecipeMap, NamesMayHaveColons) {
  const RecipeMap map = RecipeMap::parse("*: nvfp4; towers.en:de.*: bf16; *:head: mxfp8");
  EXPECT_EQ(map.find("towers.en:de.up")->str(), "bf16");
  EXPECT_EQ(map.find("towers.en:fr.up")->str(), "nvfp4");
  EXPECT_EQ(map.find("en:head")->str(), "mxfp8");
  EXPECT_EQ(RecipeMap::parse(map.str()), map);
}

TEST(RecipeMap, ErrorsPoint) {
  EXPECT_NE(error_of<RecipeMap>("*: nvfp4; layers").find("position 10: expected 'glob: recipe'"),
            std::string::npos);
  EXPECT_NE(error_of<RecipeMap>(": nvfp4").find("expected a glob"), std::string::npos);
  EXPECT_NE(error_of<RecipeMap>("*: nvfp4; *.out: nope").find("position 17: 'nope'"),
            std::string::npos);
}

}  // namespace
}  // namespace minifloat
