#include "minifloat/spec.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "minifloat/core/eden.h"
#include "slice.h"

namespace minifloat {
namespace {

// The text before the flags. The first name of a spec is its canonical one.
struct Base {
  std::string_view name;
  Elements elements;
  ScaleRule rule;
  int block_rows, block_cols;
};
constexpr std::array kBases = {
    Base{"bf16", Elements::kBf16, ScaleRule::kNone, 0, 0},
    Base{"e4m3/tensor", Elements::kE4m3, ScaleRule::kTensor, 0, 0},
    Base{"e5m2/tensor", Elements::kE5m2, ScaleRule::kTensor, 0, 0},
    Base{"e4m3/row", Elements::kE4m3, ScaleRule::kRow, 0, 0},
    Base{"e4m3/1x128", Elements::kE4m3, ScaleRule::kBlock, 1, 128},
    Base{"e4m3/128x128", Elements::kE4m3, ScaleRule::kBlock, 128, 128},
    Base{"mxfp8", Elements::kE4m3, ScaleRule::kMx, 1, 32},
    Base{"mxfp8/e5m2", Elements::kE5m2, ScaleRule::kMx, 1, 32},
    Base{"mxfp8/32x32", Elements::kE4m3, ScaleRule::kMx, 32, 32},
    Base{"mxfp4", Elements::kE2m1, ScaleRule::kMx, 1, 32},
    Base{"nvfp4", Elements::kE2m1, ScaleRule::kNvfp4, 1, 16},
    Base{"nvfp4/16x16", Elements::kE2m1, ScaleRule::kNvfp4, 16, 16},
    Base{"nvfp4/row", Elements::kE2m1, ScaleRule::kNvfp4Row, 1, 16},
    Base{"e1m2/1x16", Elements::kE1m2, ScaleRule::kNvfp4, 1, 16},
    Base{"e1m2/16x16", Elements::kE1m2, ScaleRule::kNvfp4, 16, 16},
    Base{"e1m2/1x32", Elements::kE1m2, ScaleRule::kMx, 1, 32},
    Base{"mxfp8/1x32", Elements::kE4m3, ScaleRule::kMx, 1, 32},
    Base{"mxfp4/1x32", Elements::kE2m1, ScaleRule::kMx, 1, 32},
    Base{"nvfp4/1x16", Elements::kE2m1, ScaleRule::kNvfp4, 1, 16},
};

// The operands of fprop that backward can read.
constexpr std::array<std::pair<std::string_view, ForwardOperand>, 2> kOfForward = {
    {{"fprop.x", ForwardOperand::kX}, {"fprop.w", ForwardOperand::kW}}};

std::string base_names() {
  std::string names;
  for (const Base& base : kBases) names += (names.empty() ? "" : ", ") + std::string(base.name);
  return names;
}

constexpr std::string_view kOfTensors = "nvfp4 block scales below a scale of the tensor";

// A flag that rounds the scale, and the rules that it belongs to. One that reads values is E2M1's.
struct RoundingFlag {
  std::string_view name;
  ScaleRounding rounding;
  std::string_view of;  // the scales that it rounds
  std::array<ScaleRule, 2> rules;
  constexpr bool rounds(Elements elements, ScaleRule rule) const {
    return (rule == rules[0] || rule == rules[1]) &&
           (elements == Elements::kE2m1 || !reads_values(rounding));
  }
};
constexpr RoundingFlag of_one(std::string_view name, ScaleRounding rounding, ScaleRule rule,
                              std::string_view of) {
  return {name, rounding, of, {rule, rule}};
}
constexpr std::array kRoundingFlags = {
    RoundingFlag{"exact",
                 ScaleRounding::kExact,
                 "'/row', '/1x128' and '/128x128' scales of e4m3",
                 {ScaleRule::kRow, ScaleRule::kBlock}},
    of_one("floor", ScaleRounding::kFloor, ScaleRule::kMx, "mxfp8, mxfp4 and e1m2/1x32 scales"),
    RoundingFlag{"up",
                 ScaleRounding::kUp,
                 "nvfp4, e1m2/1x16 and e1m2/16x16 block scales",
                 {ScaleRule::kNvfp4, ScaleRule::kNvfp4Row}},
    of_one("pow2", ScaleRounding::kPowerOfTwo, ScaleRule::kNvfp4,
           "nvfp4, e1m2/1x16 and e1m2/16x16 block scales below a scale of the tensor"),
    of_one("4over6", ScaleRounding::kFourOverSix, ScaleRule::kNvfp4, kOfTensors),
    of_one("eden", ScaleRounding::kEden, ScaleRule::kNvfp4, kOfTensors),
};

constexpr std::array<std::pair<std::string_view, int>, 4> kTransforms = {
    {{"rht", 16}, {"rht32", 32}, {"rht64", 64}, {"rht128", 128}}};

// Returns "+exact, +floor, …".
std::string rounding_flags() {
  std::string names;
  for (const RoundingFlag& flag : kRoundingFlags)
    names += (names.empty() ? "+" : ", +") + std::string(flag.name);
  return names;
}

// Returns "sr, rht, … or eden": all flags.
std::string flag_names() {
  std::string names = "sr";
  for (const auto& [name, points] : kTransforms) names += ", " + std::string(name);
  names += ", delayed";
  for (const RoundingFlag& flag : kRoundingFlags)
    names += (&flag == &kRoundingFlags.back() ? " or " : ", ") + std::string(flag.name);
  return names;
}

// Sets what +eden names besides the rounding of scales: that it is stochastic, and the transform.
void set_eden(Spec& spec, const Slice& at) {
  if (spec.has_blocks_2d()) at.fail("'+eden' needs blocks of one row, nvfp4");
  if (spec.stochastic)
    at.fail("'+eden' rounds scales stochastically and codes to nearest; expected no '+sr'");
  if (spec.transform != 0) at.fail("'+eden' has a transform of its own; expected no +rht flag");
  spec.stochastic = true;
  spec.transform = kEdenPoints;
}

void set_rounding(Spec& spec, const RoundingFlag& flag, const Slice& at) {
  if (!flag.rounds(spec.elements, spec.rule))
    at.fail("'+", flag.name, "' rounds ", flag.of, " only");
  if (spec.scale_rounding != ScaleRounding::kDefault)
    at.fail("the scale's rounding is given twice; expected one of ", rounding_flags());
  if (flag.rounding == ScaleRounding::kEden) set_eden(spec, at);
  spec.scale_rounding = flag.rounding;
}

void set_flag(Spec& spec, const Slice& at) {
  const std::string_view name = at.text();
  if (spec.is_of_forward())
    at.fail(spec.str(), " has the values of fprop's codes and takes no flag, found '+", name, "'");
  if (spec.is_bf16()) at.fail("bf16 is the identity and takes no flag, found '+", name, "'");
  if (name == "sr") {
    if (spec.is_eden())
      at.fail("'+eden' rounds scales stochastically and codes to nearest; expected no '+sr'");
    if (spec.stochastic) at.fail("'+sr' is given twice");
    spec.stochastic = true;
    return;
  }
  if (name == "delayed") {
    if (spec.delayed) at.fail("'+delayed' is given twice");
    if (spec.rule != ScaleRule::kTensor)
      at.fail("'+delayed' needs tensor scaling, e4m3/tensor or e5m2/tensor");
    spec.delayed = true;
    return;
  }
  for (const RoundingFlag& flag : kRoundingFlags)
    if (name == flag.name) return set_rounding(spec, flag, at);
  for (const auto& [transform, points] : kTransforms)
    if (name == transform) {
      if (spec.is_eden()) at.fail("'+eden' has a transform of its own; expected no +rht flag");
      if (spec.transform != 0) at.fail("the transform is given twice; expected one +rht flag");
      spec.transform = points;
      return;
    }
  at.fail("'", name, "' is not a flag; expected ", flag_names());
}

}  // namespace

Spec parse_spec(const Slice& slice) {
  const std::vector<Slice> parts = slice.trimmed().split("+");
  const Slice& name = parts.front();
  Spec spec;
  bool is_found = false;
  for (const Base& base : kBases)
    if (name.text() == base.name) {
      spec.elements = base.elements;
      spec.rule = base.rule;
      spec.block_rows = base.block_rows;
      spec.block_cols = base.block_cols;
      is_found = true;
      break;
    }
  for (const auto& [text, operand] : kOfForward)
    if (name.text() == text) {
      spec.of_forward = operand;
      is_found = true;
    }
  if (!is_found)
    name.fail("'", name.text(),
              "' is not an operand, nor backward's fprop.w or fprop.x; expected one of ",
              base_names());
  for (std::size_t i = 1; i < parts.size(); ++i) set_flag(spec, parts[i]);
  return spec;
}

Spec Spec::parse(std::string_view text) { return parse_spec(Slice(text)); }

std::string Spec::str() const {
  for (const auto& [name, operand] : kOfForward)
    if (operand == of_forward) return std::string(name);
  std::string text;
  for (const Base& base : kBases)
    if (base.elements == elements && base.rule == rule && base.block_rows == block_rows &&
        base.block_cols == block_cols) {
      text = base.name;
      break;
    }
  for (const RoundingFlag& flag : kRoundingFlags)
    if (flag.rounding == scale_rounding) text += "+" + std::string(flag.name);
  if (delayed) text += "+delayed";
  if (rounds_codes_stochastically()) text += "+sr";
  for (const auto& [name, points] : kTransforms)
    if (points == transform && !is_eden()) text += "+" + std::string(name);
  return text;
}

bool Spec::is_valid() const {
  if (is_bf16()) return *this == Spec{};
  const auto is_one_of = [](const auto& list, auto fits) {
    return std::any_of(list.begin(), list.end(), fits);
  };
  return is_one_of(kBases,
                   [&](const Base& base) {
                     return base.elements == elements && base.rule == rule &&
                            base.block_rows == block_rows && base.block_cols == block_cols;
                   }) &&
         (scale_rounding == ScaleRounding::kDefault ||
          is_one_of(kRoundingFlags,
                    [&](const RoundingFlag& flag) {
                      return flag.rounding == scale_rounding && flag.rounds(elements, rule);
                    })) &&
         (is_eden() ? stochastic && transform == kEdenPoints && !has_blocks_2d()
                    : transform == 0 || is_one_of(kTransforms,
                                                  [&](const auto& named) {
                                                    return named.second == transform;
                                                  })) &&
         (!delayed || rule == ScaleRule::kTensor);
}

ScaleType Spec::scale_type() const {
  switch (block_rule(rule)) {
    case BlockRule::kE8m0: return ScaleType::kE8m0;
    case BlockRule::kE4m3: return ScaleType::kE4m3;
    case BlockRule::kFloat32: return ScaleType::kFloat32;
    case BlockRule::kNone: break;
  }
  return outer_scale(rule) == OuterScale::kNone ? ScaleType::kNone : ScaleType::kFloat32;
}

}  // namespace minifloat
