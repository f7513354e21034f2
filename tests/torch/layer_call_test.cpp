// The arguments of layers' ops, read by their names in a schema.
#include "layers/layer_call.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

namespace minifloat::torch_ops {
namespace {

c10::FunctionSchema schema_of(const std::string& second) {
  return {
      "minifloat::probe",
      "",
      {c10::Argument("x", c10::TensorType::get()), c10::Argument(second, c10::StringType::get()),
       c10::Argument("stream", c10::IntType::get())},
      {}};
}

const std::vector<c10::IValue> kValues = {at::ones({2, 3}), std::string("mxfp8"), std::int64_t{5}};

std::string error_of(const c10::FunctionSchema& schema) {
  try {
    LayerCall(schema, kValues);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  }
  return "";
}

TEST(LayerCall, ReadsArgumentsByName) {
  const LayerCall call(schema_of("recipe"), kValues);
  EXPECT_EQ(call.x.numel(), 6);
  EXPECT_EQ(call.recipe, "mxfp8");
  EXPECT_EQ(call.streams, std::vector<std::int64_t>{5});
}

TEST(LayerCall, AnErrorLeavesNoReadersOfThatSchema) {
  const c10::FunctionSchema schema = schema_of("recipee");
  const std::string first = error_of(schema);
  EXPECT_NE(first.find("no reader of recipee"), std::string::npos) << first;
  EXPECT_EQ(error_of(schema), first);  // the table of the thread had a part of them
}

}  // namespace
}  // namespace minifloat::torch_ops
