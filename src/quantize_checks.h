// The checks of the arguments of casts, for each function that casts or reads codes. The memory
// that a check finds is added to `memory`, whose require_apart is the last check.
#pragma once

#include "memory_checks.h"
#include "minifloat/quantize.h"

namespace minifloat {

// Require sizes that memory can have.
void check_sizes(const char* function, std::int64_t batch, std::int64_t rows, std::int64_t cols);
// Requires a spec that Spec::parse returns.
void check_spec(const char* function, const Spec& spec);
// Requires a random state.
void check_random(const char* function, const Spec& spec, const Random& random, Memory& memory);

// Checks the values of x, their groups among rows, and the memory of both.
void check_values(const char* function, const TensorRef& x, Memory& memory);
// Checks the unit of the groups of x, where there are any, after check_values. unit: the least of
// the columnwise operand; 0: none is read.
void check_groups(const char* function, const TensorRef& x, std::int64_t unit);
// Checks them for one direction under a spec.
void check_groups(const char* function, const TensorRef& x, const Spec& spec, bool columnwise);
// Returns the number of amaxes of x as read under a spec.
std::int64_t amaxes_of(const TensorRef& x, const Spec& spec, bool columnwise);

// Checks the operands of a cast of values like x, whose memory is not looked at.
void check_operands(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                    Memory& memory);

// Checks an operand whose codes are read.
void check_quantized(const char* function, const Quantized& q, Memory& memory);
// Checks the parts of an operand that its tensor factor is computed from.
void check_tensor_factor(const char* function, const Quantized& q, Memory& memory);
// Returns whether any code of the operand is read.
inline bool has_elements(const Quantized& q) { return q.parts() * q.rows * q.cols > 0; }

}  // namespace minifloat
