// minifloat/norm.h: the checks before a backend is called.
#include "minifloat/norm.h"

#include "cpu/norm.h"
#include "minifloat/core/block.h"
#include "minifloat/error.h"
#include "on_device.h"
#include "quantize_checks.h"
#if defined(MINIFLOAT_WITH_CUDA)
#include "cuda/norm/norm.h"
#endif

namespace minifloat {
namespace {

void check_norm(const char* function, const Norm& of) {
  check_device(function, of.device);
  MINIFLOAT_CHECK(of.rows >= 0 && of.cols >= 0 && is_addressable({of.rows, of.cols}), function,
                  ": expected rows and columns of at most 2^48 elements, got ", of.rows, " and ",
                  of.cols);
  MINIFLOAT_CHECK(of.rows < (std::int64_t{1} << 31) && of.cols <= (1 << 30), function,
                  ": expected less than 2^31 rows and at most 2^30 columns, got ", of.rows, " and ",
                  of.cols);
  MINIFLOAT_CHECK(of.eps >= 0, function, ": expected eps of 0 or more, got ", of.eps);
  MINIFLOAT_CHECK(!of.bias || of.kind == NormKind::kLayer, function,
                  ": expected a bias with a LayerNorm alone");
}

}  // namespace

void norm(const Norm& of, void* y, const Execution& execution) {
  check_norm("norm", of);
  if (of.rows * of.cols == 0) return;
  MINIFLOAT_ON(of.device, norm(of, y, execution));
}

void quantize_norm(const Norm& of, const Operand* rowwise, const Operand* columnwise,
                   const Execution& execution) {
  check_norm("quantize_norm", of);
  check_quantize(of.y_at(of.x), rowwise, columnwise);
  if (of.rows * of.cols == 0) return quantize(of.y_at(of.x), rowwise, columnwise, execution);
  MINIFLOAT_ON(of.device, quantize_norm(of, rowwise, columnwise, execution));
}

void norm_statistics(const Norm& of, float* factors, float* means, const Execution& execution) {
  check_norm("norm_statistics", of);
  if (of.rows * of.cols == 0) return;
  MINIFLOAT_ON(of.device, norm_statistics(of, factors, means, execution));
}

}  // namespace minifloat
