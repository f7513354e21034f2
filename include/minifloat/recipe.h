// The specs of three matrix products, y = x Wᵀ, dx = g W and dW = gᵀ x. An operand is listed as it
// is read, its contraction last, so that a product is a · bᵀ (x: [M, K], W: [N, K], g: [M, N]):
//
//     fprop:  y  [M, N] = x  [M, K] · W  [N, K]        contraction over K
//     dgrad:  dx [M, K] = g  [M, N] · Wᵀ [K, N]        over N: W is read columnwise
//     wgrad:  dW [N, K] = gᵀ [N, M] · xᵀ [K, M]        over M: both are read columnwise
//
// Backward may read the values of the codes that fprop read, instead of W or x: dgrad's W as
// fprop.w, wgrad's x as fprop.x. Their contraction is not that of their blocks, so a product reads
// them decoded, in the compute dtype. Of an operand that fprop reads as bf16 they are bf16.
//
//     product = operand "*" operand [ ",fast" ]
//     recipe  = preset | "fprop=" product " dgrad=" product " wgrad=" product
//     map     = glob ":" recipe { "; " glob ":" recipe }      the last match wins
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "minifloat/spec.h"

namespace minifloat {

struct Product {
  Spec a;             // x, g, g
  Spec b;             // W, W, x
  bool fast = false;  // fast accumulation of an FP8 product

  static Product parse(std::string_view text);
  std::string str() const;
  bool operator==(const Product&) const = default;
  bool is_bf16() const { return a.is_bf16() && b.is_bf16(); }
};

struct Recipe {
  Product fprop, dgrad, wgrad;

  // Parses a preset's name or the explicit form. Throws Error with position and reason.
  static Recipe parse(std::string_view text);
  std::string str() const;  // the preset's name where it is one
  bool operator==(const Recipe&) const = default;
  bool is_stochastic() const;
  bool is_delayed() const;
};

// Recipes by module name. A text without a glob gives its recipe to every module.
struct RecipeMap {
  std::vector<std::pair<std::string, Recipe>> entries;

  static RecipeMap parse(std::string_view text);
  std::string str() const;
  // Returns the recipe of the last glob that matches (* any characters, ? one character of UTF-8),
  // or null.
  const Recipe* find(std::string_view module) const;
  bool operator==(const RecipeMap&) const = default;
};

// Returns the names of the presets, in the order of the documentation.
const std::vector<std::string>& preset_names();

}  // namespace minifloat
