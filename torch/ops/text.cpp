// The ops on text: the grammar of specs and recipes, sizes and names. Python calls them, so that
// these rules have one definition.
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "minifloat/core/philox.h"
#include "ops/bridge.h"
#include "products/engines.h"

namespace minifloat {
namespace {

const char* name_of(Elements elements) {
  switch (elements) {
    case Elements::kBf16: return "bf16";
    case Elements::kE4m3: return "e4m3";
    case Elements::kE5m2: return "e5m2";
    case Elements::kE2m1: return "e2m1";
    case Elements::kE1m2: break;
  }
  return "e1m2";
}

const char* name_of(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::kNone: return "none";
    case ScaleRule::kTensor: return "tensor";
    case ScaleRule::kRow: return "row";
    case ScaleRule::kBlock: return "block";
    case ScaleRule::kMx: return "mx";
    case ScaleRule::kNvfp4:
    case ScaleRule::kNvfp4Row: break;
  }
  return "nvfp4";
}

// Returns the name of a scale's dtype. The ops themselves return one-byte scales as uint8.
const char* name_of(ScaleType type) {
  switch (type) {
    case ScaleType::kE8m0: return "float8_e8m0fnu";
    case ScaleType::kE4m3: return "float8_e4m3fn";
    case ScaleType::kNone:
    case ScaleType::kFloat32: break;
  }
  return "float32";
}

// The outputs of spec_info, in the order of its schema.
using Ints = std::vector<std::int64_t>;
using SpecInfo = std::tuple<std::string, std::string, std::string, std::string, std::string,
                            std::int64_t, double, Ints, Ints, std::int64_t, std::int64_t, bool,
                            bool, bool, bool, bool, bool, bool, bool>;
SpecInfo spec_info(const std::string& text) {
  const Spec& spec = bridge::parse_spec(text);
  const char* amax_of = spec.has_tensor_amax() ? "tensor" : spec.has_row_amax() ? "row" : "";
  const std::int64_t code_bits = spec.is_bf16() ? 16 : spec.code_bits();
  const std::int64_t block = std::int64_t{spec.block_rows} * spec.block_cols;
  const double scale_bits = 8.0 * static_cast<double>(spec.scale_bytes());
  return {spec.str(),
          name_of(spec.elements),
          name_of(spec.rule),
          name_of(spec.scale_type()),
          amax_of,
          code_bits,
          code_bits + (spec.has_blocks() ? scale_bits / block : 0),
          {spec.block_rows, spec.block_cols},
          {spec.row_alignment(), spec.col_alignment()},
          spec.group_unit(),
          spec.transform,
          spec.is_bf16(),
          spec.has_blocks(),
          spec.stochastic,
          spec.delayed,
          spec.is_fp4_by_powers_of_two(),
          spec.block_rows == spec.block_cols && !spec.has_row_amax() && spec.transform == 0,
          spec.is_eden(),
          spec.casts_rows_alone()};
}

// Returns the canonical specs of both operands, and whether the product accumulates fast.
std::tuple<std::string, std::string, bool> product_info(const std::string& text) {
  const Product& product = bridge::parse_product(text);
  return {product.a.str(), product.b.str(), product.fast};
}

// Returns the canonical text, then the three products: "a*b[,fast]".
std::vector<std::string> parse_recipe_text(const std::string& text) {
  const Recipe recipe = bridge::with_value_errors([&] { return Recipe::parse(text); });
  return {recipe.str(), recipe.fprop.str(), recipe.dgrad.str(), recipe.wgrad.str()};
}

// Returns the canonical text, then glob, recipe, glob, recipe, …
std::vector<std::string> parse_recipe_map_text(const std::string& text) {
  const RecipeMap map = bridge::with_value_errors([&] { return RecipeMap::parse(text); });
  std::vector<std::string> out = {map.str()};
  for (const auto& [glob, recipe] : map.entries) {
    out.push_back(glob);
    out.push_back(recipe.str());
  }
  return out;
}

// Returns the recipe of a module under a recipe map; "" where no glob matches.
std::string match_recipe_text(const std::string& text, const std::string& module) {
  const RecipeMap map = bridge::with_value_errors([&] { return RecipeMap::parse(text); });
  const Recipe* recipe = map.find(module);
  return recipe ? recipe->str() : std::string();
}

// Returns code_cols, padded_cols, scale rows and scale cols. The last two are 0 x 0 for one scale a
// matrix, rows x 0 for one a row.
std::vector<std::int64_t> spec_sizes(const std::string& text, std::int64_t rows,
                                     std::int64_t cols) {
  const Spec& spec = bridge::parse_spec(text);
  bridge::check_size("spec_sizes", "rows", rows);
  bridge::check_size("spec_sizes", "cols", cols);
  std::vector<std::int64_t> sizes = {spec.code_cols(cols), spec.padded_cols(cols), 0, 0};
  if (spec.has_row_amax()) sizes[2] = rows;
  if (spec.has_blocks()) {
    sizes[2] = spec.scale_rows(rows);
    sizes[3] = spec.scale_cols(cols);
  }
  return sizes;
}

void check_capability(const char* op, std::int64_t capability) {
  TORCH_CHECK_VALUE(0 <= capability && capability < 10'000, op,
                    ": expected a capability as 10 major + minor, got ", capability);
}

const torch_ops::Engine& engine_of(const Product& product, std::int64_t capability,
                                   torch_ops::ProductShape shape, const std::string& groups) {
  using torch_ops::GroupsAlong;
  check_capability("engine_of", capability);
  bridge::check_size("engine_of", "m", shape.m);
  bridge::check_size("engine_of", "n", shape.n);
  bridge::check_size("engine_of", "k", shape.k);
  shape.k = product.a.padded_cols(shape.k);
  shape.along = groups == "m"   ? GroupsAlong::kRows
                : groups == "k" ? GroupsAlong::kContraction
                                : GroupsAlong::kNone;
  TORCH_CHECK_VALUE(shape.along != GroupsAlong::kNone || groups.empty(),
                    "engine_of: expected groups as m, k or nothing, got ", groups);
  return torch_ops::engine_of(product, static_cast<int>(capability), shape);
}

// Returns the name of the engine that multiplies (m, k) · (n, k)ᵀ on a GPU of this capability.
// capability: 10 major + minor; 0: the CPU. groups: "m" or "k", the dimension along which groups
// lie; "": none.
std::string engine_name(const std::string& product, std::int64_t capability, std::int64_t m,
                        std::int64_t n, std::int64_t k, at::ScalarType out_dtype, bool bias,
                        const std::string& groups) {
  return engine_of(bridge::parse_product(product), capability,
                   {.m = m, .n = n, .k = k, .out_dtype = out_dtype, .has_bias = bias}, groups)
      .name;
}

// Returns what multiplies a product of sizes that every engine takes: the engine's name, whether it
// reads the codes themselves, and what it does. groups: as above.
std::tuple<std::string, bool, std::string> engine_info(const std::string& product,
                                                       std::int64_t capability,
                                                       const std::string& groups) {
  const Product& parsed = bridge::parse_product(product);
  const auto engine_on = [&](std::int64_t gpu) -> const torch_ops::Engine& {
    return engine_of(parsed, gpu, {.m = 128, .n = 128, .k = 128}, groups);
  };
  const torch_ops::Engine& engine = engine_on(capability);
  if (parsed.is_bf16()) return {engine.name, true, "a bf16 GEMM"};
  if (!engine.reads_values) return {engine.name, true, engine.does};
  std::string others;
  for (const int gpu : torch_ops::kGpus)
    if (!engine_on(gpu).reads_values)
      others +=
          (others.empty() ? "" : ", ") + std::to_string(gpu / 10) + "." + std::to_string(gpu % 10);
  const std::string where = others.empty()
                                ? "; no GPU multiplies these codes in this build"
                                : "; codes are multiplied by compute capability " + others;
  return {engine.name, false, engine.does + where};
}

std::int64_t stream(const std::string& name) {
  return static_cast<std::int64_t>(fnv1a64(name.data(), name.size()));
}

std::int64_t mix_seeds(std::int64_t seed, std::int64_t count) {
  return static_cast<std::int64_t>(
      mix_seed(static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(count)));
}

// Whether this build has the CUDA backend, on any machine.
bool has_cuda() {
#if defined(MINIFLOAT_WITH_CUDA)
  return true;
#else
  return false;
#endif
}

// Returns the GPU targets that this build has code for, by CMake's names; "": no CUDA backend.
std::string cuda_targets() {
#if defined(MINIFLOAT_WITH_CUDA)
  return MINIFLOAT_CUDA_TARGETS;
#else
  return "";
#endif
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) {
  m.impl("spec_info", spec_info);
  m.impl("product_info", product_info);
  m.impl("parse_recipe", parse_recipe_text);
  m.impl("parse_recipe_map", parse_recipe_map_text);
  m.impl("match_recipe", match_recipe_text);
  m.impl("preset_names", [] { return preset_names(); });
  m.impl("spec_sizes", spec_sizes);
  m.impl("engine_of", engine_name);
  m.impl("engine_info", engine_info);
  m.impl("assume_capability", [](std::int64_t capability) {
    check_capability("assume_capability", capability);
    torch_ops::assume_capability(static_cast<int>(capability));
  });
  m.impl("stream", stream);
  m.impl("mix_seed", mix_seeds);
  m.impl("has_cuda", has_cuda);
  m.impl("cuda_targets", cuda_targets);
}

}  // namespace minifloat
