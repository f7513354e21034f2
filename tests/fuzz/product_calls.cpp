// Calls of grouped products. Their memory is a GPU's, so legal arguments are for builds without
// the kernels, which refuse them last.
#include "fuzz/call.h"
#include "minifloat/error.h"
#include "minifloat/grouped_product.h"

namespace minifloat::fuzz {
namespace {

// Draws the scales of an operand of `rows` rows, each of `blocks` blocks of 128.
void add_operand(Call& call, GroupedOperand& x, const char* name, std::int64_t elements,
                 std::int64_t scales) {
  call.input(name, x.values, elements, x.elements == Elements::kBf16 ? 2 : 1);
  if (elements > 0)
    call.fault(std::string(name) + " 8 bytes past a multiple of 16",
               [&x] { x.values = static_cast<const std::uint8_t*>(x.values) + 8; });
  if (x.scales != GroupScales::kNone) call.input("scales", x.scale, scales);
  call.wrong("elements, scales of", x.elements, x.scales);
}

struct Product : Named<"grouped_product"> {
  GroupedProduct p;
  void draw(Call& call) {
    if (!has_grouped_products()) call.refusal = "expected a build with CUTLASS's headers, got none";
    const bool is_along_rows = call.one_in(2), has_blocks = call.one_in(3),
               is_bf16 = !has_blocks && call.one_in(3);
    p.m = 1 + call.below(40), p.n = 8 * (1 + call.below(20)), p.k = 16 * (1 + call.below(20));
    p.groups.count = static_cast<int>(1 + call.below(4));
    p.groups.unit = is_along_rows ? 0 : has_blocks ? 128 : 16;
    const std::int64_t groups = p.groups.count, blocks = ceil_div<std::int64_t>(p.k, 128),
                       b_rows = is_along_rows ? groups * p.n : p.n;
    call.input("the table", p.groups.table, kGroupTableRows * (groups + 1));
    if (is_bf16) p.a.elements = p.b.elements = Elements::kBf16;
    p.a.scales = p.b.scales = has_blocks ? GroupScales::k1x128
                              : is_bf16  ? GroupScales::kNone
                                         : call.one_of({GroupScales::kRows, GroupScales::kGroups});
    if (has_blocks && is_along_rows) p.b.scales = GroupScales::k128x128;
    const bool are_rows = p.a.scales == GroupScales::kRows;
    const std::int64_t of_a = has_blocks ? p.m * blocks : groups * (are_rows ? p.m : 1),
                       of_b = p.b.scales == GroupScales::k128x128
                                  ? groups * ceil_div<std::int64_t>(p.n, 128) * blocks
                              : has_blocks ? p.n * blocks
                                           : groups * (are_rows ? p.n : 1);
    add_operand(call, p.a, "a", p.m * p.k, is_along_rows && are_rows ? p.m : of_a);
    add_operand(call, p.b, "b", b_rows * p.k, of_b);
    if (is_along_rows) call.optional("bias", p.bias, groups * p.n);
    call.output("out", p.out, (is_along_rows ? 1 : groups) * p.m * p.n);
    call.wrong("m, n, k", p.m, p.n, p.k);
    call.bad("n off a multiple of 8", p.n, {p.n + 4});
    call.bad("k off a multiple of 8", p.k, {p.k + 4});
    call.bad("groups", p.groups.count, {-1, 0, 1 << 20});
    call.bad("unit", p.groups.unit, {-1, 8, 24, 256});
    call.bad("a of other elements than b", p.a.elements, {Elements::kE2m1});
    if (!is_along_rows) call.bad<const std::uint16_t*>("a bias", p.bias, {p.out});
  }
  void run() const { grouped_product(p, {}); }
};

// Returns whether there is a kernel, for any operands.
struct HasKernel : Named<"has_grouped_kernel"> {
  GroupedOperand a, b;
  void draw(Call& call) {
    a.scales = b.scales = call.one_of({GroupScales::kNone, GroupScales::kRows});
    call.wrong("elements of a, scales of a, elements of b, scales of b", a.elements, a.scales,
               b.elements, b.scales);
  }
  void run() const {
    if (!has_grouped_kernel(a, b, true) && !has_grouped_kernel(a, b, false)) fail("no kernel");
  }
};

}  // namespace

const std::vector<Function> kProducts = functions<Product, HasKernel>();

}  // namespace minifloat::fuzz
