#include "minifloat/recipe.h"

#include <array>

#include "slice.h"

namespace minifloat {
namespace {

// A preset and the explicit form of its recipe.
struct Preset {
  const char* name;
  const char* fprop;
  const char* dgrad;
  const char* wgrad;
};
constexpr std::array kPresets = {
    Preset{"bf16", "bf16*bf16", "bf16*bf16", "bf16*bf16"},
    Preset{"fp8_tensorwise", "e4m3/tensor*e4m3/tensor,fast", "e5m2/tensor*e4m3/tensor",
           "e5m2/tensor*e4m3/tensor"},
    Preset{"fp8_delayed", "e4m3/tensor+delayed*e4m3/tensor+delayed,fast",
           "e5m2/tensor+delayed*e4m3/tensor+delayed", "e5m2/tensor+delayed*e4m3/tensor+delayed"},
    Preset{"fp8_rowwise", "e4m3/row*e4m3/row,fast", "e4m3/row*e4m3/row", "e4m3/row*e4m3/row"},
    Preset{"fp8_rowwise_gw_hp", "e4m3/row*e4m3/row,fast", "e4m3/row*e4m3/row", "bf16*bf16"},
    Preset{"fp8_blockwise", "e4m3/1x128*e4m3/128x128", "e4m3/1x128*e4m3/128x128",
           "e4m3/1x128*e4m3/1x128"},
    Preset{"mxfp8", "mxfp8*mxfp8", "mxfp8*mxfp8", "mxfp8*mxfp8"},
    Preset{"mxfp8_2d", "mxfp8*mxfp8/32x32", "mxfp8*mxfp8/32x32", "mxfp8*mxfp8"},
    Preset{"mxfp4", "mxfp4*mxfp4", "mxfp4+sr+rht*mxfp4+rht", "mxfp4+sr+rht*mxfp4+rht"},
    Preset{"nvfp4", "nvfp4*nvfp4/16x16", "nvfp4+sr*nvfp4/16x16", "nvfp4+sr+rht*nvfp4+rht"},
    Preset{"nvfp4_pow2", "nvfp4+pow2*nvfp4+pow2", "nvfp4+pow2+sr*nvfp4+pow2",
           "nvfp4+pow2+sr+rht*nvfp4+pow2+rht"},
    Preset{"mxfp8_nvfp4", "mxfp8*mxfp8", "nvfp4+sr*nvfp4/16x16", "nvfp4+sr+rht*nvfp4+rht"},
    Preset{"nvfp4_mxfp8", "nvfp4*nvfp4/16x16", "mxfp8*mxfp8", "mxfp8*mxfp8"},
    Preset{"w4a8", "e4m3/row*mxfp4", "e4m3/row*e4m3/row", "e4m3/row*e4m3/row"},
    Preset{"w4a8_1x16", "e4m3/row*nvfp4+pow2", "e4m3/row*e4m3/row", "e4m3/row*e4m3/row"},
    Preset{"nvfp4_served", "nvfp4/row*nvfp4", "bf16*fprop.w", "bf16*fprop.x"},
    Preset{"mxfp4_weights_served", "bf16*mxfp4", "bf16*fprop.w", "bf16*bf16"},
    Preset{"fp8_blockwise_served", "e4m3/1x128+exact*e4m3/128x128+exact", "bf16*fprop.w",
           "bf16*fprop.x"},
};

Recipe from_preset(const Preset& preset) {
  return {Product::parse(preset.fprop), Product::parse(preset.dgrad), Product::parse(preset.wgrad)};
}

// Takes "fprop=" from the front of `rest` and the product before `next`; moves `rest` behind it.
Product take_product(Slice& rest, std::string_view name, std::string_view next) {
  rest = rest.trimmed();
  if (!rest.text().starts_with(name))
    rest.fail("expected '", name, "…', found '", rest.text(), "'");
  const Slice after(rest.whole, rest.begin + name.size(), rest.end);
  if (next.empty()) {
    rest = {after.whole, after.end, after.end};
    return parse_product(after);
  }
  const std::size_t at = after.text().find(next);
  if (at == std::string_view::npos)
    Slice(after.whole, after.end, after.end)
        .fail("expected '", next, "…' after the product of ", name);
  rest = {after.whole, after.begin + at, after.end};
  return parse_product({after.whole, after.begin, after.begin + at});
}

// Requires that operands of fprop are named where backward reads them, and have values there.
// Replaces the name of one that fprop reads as bf16.
void resolve_forward_operands(Recipe& recipe, const Slice& text) {
  for (const Spec& spec : {recipe.fprop.a, recipe.fprop.b, recipe.dgrad.a, recipe.wgrad.a})
    if (spec.is_of_forward())
      text.fail("expected ", spec.str(), " as the second operand of ",
                spec.of_forward == ForwardOperand::kW ? "dgrad" : "wgrad",
                ", which alone reads it");
  const auto resolve = [&](Spec& spec, const char* product, ForwardOperand own, const Spec& of) {
    if (!spec.is_of_forward()) return;
    if (spec.of_forward != own)
      text.fail("expected ", own == ForwardOperand::kW ? "fprop.w" : "fprop.x", " in ", product,
                ", found ", spec.str());
    if (of.is_eden())
      text.fail(spec.str(),
                " needs values of fprop's codes; expected no '+eden' there, whose "
                "transform each step draws anew, found ",
                of.str());
    if (of.is_bf16()) spec = Spec{};
  };
  resolve(recipe.dgrad.b, "dgrad", ForwardOperand::kW, recipe.fprop.b);
  resolve(recipe.wgrad.b, "wgrad", ForwardOperand::kX, recipe.fprop.a);
}

// Returns the first byte of the character after the one that begins at `at`.
std::size_t next_character(std::string_view text, std::size_t at) {
  do ++at;
  while (at < text.size() && is_continuation(text[at]));
  return at;
}

// Returns whether the glob, with * for any characters and ? for one, matches the whole name.
bool glob_matches(std::string_view glob, std::string_view name) {
  std::size_t g = 0, n = 0, star = std::string_view::npos, mark = 0;
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      mark = n;
    } else if (g < glob.size() && glob[g] == '?') {
      ++g;
      n = next_character(name, n);
    } else if (g < glob.size() && glob[g] == name[n]) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = mark = next_character(name, mark);
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

}  // namespace

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Preset& preset : kPresets) all.emplace_back(preset.name);
    return all;
  }();
  return names;
}

Product parse_product(const Slice& slice) {
  const Slice body = slice.trimmed();
  const auto [operands, accumulation] = body.cut(",");
  const auto [a, b] = operands.cut("*");
  if (b.begin == operands.end && !operands.text().ends_with("*"))
    operands.fail("expected two operands with '*' between them, found '", operands.text(), "'");
  Product product{parse_spec(a), parse_spec(b), false};
  if (product.a.transform != product.b.transform || product.a.is_eden() != product.b.is_eden())
    b.fail("the operands of a product must carry the same transform, found ", product.a.str(),
           " and ", product.b.str());
  if (accumulation.begin != operands.end) {
    const Slice flag = accumulation.trimmed();
    if (flag.text() != "fast") flag.fail("expected 'fast' after ',', found '", flag.text(), "'");
    for (const Spec& spec : {product.a, product.b})  // no engine supports it for block scales
      if (spec.rule != ScaleRule::kTensor && spec.rule != ScaleRule::kRow)
        flag.fail("',fast' is for products of FP8 operands with tensor or row scales, found ",
                  spec.str());
    product.fast = true;
  }
  return product;
}

Product Product::parse(std::string_view text) { return parse_product(Slice(text)); }

std::string Product::str() const { return a.str() + "*" + b.str() + (fast ? ",fast" : ""); }

Recipe parse_recipe(const Slice& slice) {
  Slice rest = slice.trimmed();
  for (const Preset& preset : kPresets)
    if (rest.text() == preset.name) return from_preset(preset);
  if (!rest.text().starts_with("fprop=")) {
    std::string names;
    for (const std::string& name : preset_names()) names += name + ", ";
    rest.fail("'", rest.text(), "' is not a recipe; expected ", names,
              "or 'fprop=… dgrad=… wgrad=…'");
  }
  Recipe recipe;
  recipe.fprop = take_product(rest, "fprop=", " dgrad=");
  recipe.dgrad = take_product(rest, "dgrad=", " wgrad=");
  recipe.wgrad = take_product(rest, "wgrad=", "");
  resolve_forward_operands(recipe, slice);
  for (const Spec& of_weight : {recipe.fprop.b, recipe.dgrad.b})
    if (of_weight.has_outer_amax() && of_weight.has_row_amax())
      slice.fail(
          "nvfp4/row is a format of tokens and their gradients; expected a scale of the "
          "tensor, nvfp4 or nvfp4/16x16, for the weight, found ",
          of_weight.str());
  return recipe;
}

Recipe Recipe::parse(std::string_view text) { return parse_recipe(Slice(text)); }

std::string Recipe::str() const {
  for (const Preset& preset : kPresets)
    if (from_preset(preset) == *this) return preset.name;
  return "fprop=" + fprop.str() + " dgrad=" + dgrad.str() + " wgrad=" + wgrad.str();
}

bool Recipe::is_stochastic() const {
  for (const Product* p : {&fprop, &dgrad, &wgrad})
    if (p->a.stochastic || p->b.stochastic) return true;
  return false;
}

bool Recipe::is_delayed() const {
  for (const Product* p : {&fprop, &dgrad, &wgrad})
    if (p->a.delayed || p->b.delayed) return true;
  return false;
}

RecipeMap RecipeMap::parse(std::string_view text) {
  RecipeMap map;
  const Slice whole = Slice(text).trimmed();
  if (whole.text().find(':') == std::string_view::npos) {
    map.entries.emplace_back("*", parse_recipe(whole));
    return map;
  }
  for (const Slice& entry : whole.split(";")) {
    const Slice part = entry.trimmed();
    if (part.text().find(':') == std::string_view::npos)
      part.fail("expected 'glob: recipe', found '", part.text(), "'");
    const auto [glob, recipe] = part.cut_at_last(":");  // a name may have one, a recipe has none
    if (glob.trimmed().empty()) part.fail("expected a glob of module names before ':'");
    map.entries.emplace_back(glob.trimmed().text(), parse_recipe(recipe));
  }
  return map;
}

std::string RecipeMap::str() const {
  if (entries.size() == 1 && entries.front().first == "*") return entries.front().second.str();
  std::string text;
  for (const auto& [glob, recipe] : entries)
    text += (text.empty() ? "" : "; ") + glob + ": " + recipe.str();
  return text;
}

const Recipe* RecipeMap::find(std::string_view module) const {
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry)
    if (glob_matches(entry->first, module)) return &entry->second;
  return nullptr;
}

}  // namespace minifloat
