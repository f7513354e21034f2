// Products by cuBLASLt, whose matrices are column-major: it computes Dᵀ = b · aᵀ, whose columns are
// the rows of D.
//
//     D (m, n), rows adjacent  =  Dᵀ (n, m), columns adjacent  =  alpha · op(b) · op(a) + bias
//     with result.sum             Dᵀ                           =  alpha · op(b) · op(a) + Dᵀ
//
// Factors are read from device memory. Sums are fp32 in every reduction. The kernel that cuBLASLt's
// heuristic chooses is cached for later products of the same sizes: the heuristic takes longer than
// a launch.
#include "products/cublaslt.h"

#if defined(MINIFLOAT_WITH_CUBLASLT)
#include <ATen/ATen.h>
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>

#include "ops/bridge.h"
#include "ops/direct.h"
#endif

namespace minifloat::torch_ops {

#if defined(MINIFLOAT_WITH_CUBLASLT)
namespace {

constexpr std::int64_t kMaxWorkspace = 32 << 20;  // bytes: as cuBLAS recommends on Hopper

// The functions of cuBLASLt, which is not linked: they are looked up at the first product. By then
// torch's CUDA build has loaded the library from its own wheel. A torch without CUDA needs no
// cuBLASLt.
struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) init_product = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_product = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;

  // Looks up every function in the library of the major version that this file was compiled
  // against: the ABI of a major version is stable. Returns whether all functions were found.
  bool load() {
    const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* const handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (!handle) return false;
    bool complete = true;
    const auto find = [&](auto& function, const char* symbol) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
      complete = complete && function;
    };
    find(create, "cublasLtCreate");
    find(status_string, "cublasLtGetStatusString");
    find(init_product, "cublasLtMatmulDescInit_internal");
    find(set_product, "cublasLtMatmulDescSetAttribute");
    find(init_layout, "cublasLtMatrixLayoutInit_internal");
    find(init_preference, "cublasLtMatmulPreferenceInit_internal");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(matmul, "cublasLtMatmul");
    return complete;
  }
};

// Returns null where this process has no cuBLASLt.
const Library* library() {
  static Library functions;
  static const bool is_complete = functions.load();
  return is_complete ? &functions : nullptr;
}

void check(cublasStatus_t status) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "scaled_mm: expected cuBLASLt to succeed, got ",
              library()->status_string(status));
}

// Returns the handle of a device, which is never destroyed. The device is current.
cublasLtHandle_t handle_of(const c10::Device& device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = handles.try_emplace(device.index(), nullptr);
  if (is_new) {
    const cublasStatus_t status = library()->create(&entry->second);
    if (status != CUBLAS_STATUS_SUCCESS) handles.erase(entry);
    check(status);
  }
  return entry->second;
}

// The layout of a matrix (rows, k) in cuBLASLt's terms.
struct MatrixLayout {
  cublasOperation_t operation;  // from the stored columns to (rows, k)
  std::int64_t leading;         // elements from one column to the next

  bool operator<(const MatrixLayout& o) const {
    return std::tie(operation, leading) < std::tie(o.operation, o.leading);
  }
};

// Returns nullopt for strides that cuBLASLt cannot read.
std::optional<MatrixLayout> layout_of(const Tensor& x) {
  if (x.stride(1) == 1 && x.stride(0) >= x.size(1)) return MatrixLayout{CUBLAS_OP_T, x.stride(0)};
  if (x.stride(0) == 1 && x.stride(1) >= x.size(0)) return MatrixLayout{CUBLAS_OP_N, x.stride(1)};
  return std::nullopt;
}

std::uint32_t alignment_of(const Tensor& x) {  // bytes, a power of two, at most 256
  const auto address = reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) | 256;
  return static_cast<std::uint32_t>(address & -address);
}

// The scales of both FP8 operands; none: alpha in device memory is the factor of the product.
using ScaleModes = std::optional<std::pair<ScaleMode, ScaleMode>>;

std::int32_t attribute_of(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kRows: return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case ScaleMode::kBlocks1x128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleMode::kBlocks128x128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case ScaleMode::kTensor: break;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;  // the default
}

// The key of the cached kernels.
struct Problem {
  int device;
  std::int64_t m, n, k;
  MatrixLayout a, b;
  cudaDataType_t a_type, b_type, d_type;
  ScaleModes scale_modes;
  bool has_device_factor;
  bool fast;  // fast accumulation, of FP8 products
  bool has_bias;
  std::array<std::uint32_t, 3> alignment;  // of a, b, D

  auto key() const {
    return std::tie(device, m, n, k, a, b, a_type, b_type, d_type, scale_modes, has_device_factor,
                    fast, has_bias, alignment);
  }
  bool operator<(const Problem& o) const { return key() < o.key(); }
};

// The inputs of a kernel besides the matrices; null: none.
struct Pointers {
  const void* bias = nullptr;
  const void *a_scale = nullptr, *b_scale = nullptr;
};

// cuBLASLt's descriptors of one product. They are members, so that nothing is allocated.
class Descriptions {
 public:
  explicit Descriptions(const Problem& s, const Pointers& pointers) {
    check(library()->init_product(&product, sizeof(product), CUBLAS_COMPUTE_32F, CUDA_R_32F));
    if (s.scale_modes) set_scales(s, pointers);
    if (s.has_device_factor)
      set(CUBLASLT_MATMUL_DESC_POINTER_MODE, std::int32_t{CUBLASLT_POINTER_MODE_DEVICE});
    set(CUBLASLT_MATMUL_DESC_TRANSA, std::int32_t{s.b.operation});
    set(CUBLASLT_MATMUL_DESC_TRANSB,
        std::int32_t{s.a.operation == CUBLAS_OP_T ? CUBLAS_OP_N : CUBLAS_OP_T});
    if (s.has_bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_BIAS});
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, std::int32_t{CUDA_R_16BF});
    }
    check(layout(&b, s.b_type, s.n, s.k, s.b));
    check(layout(&a, s.a_type, s.m, s.k, s.a));
    check(library()->init_layout(&d, sizeof(d), s.d_type, static_cast<std::uint64_t>(s.n),
                                 static_cast<std::uint64_t>(s.m), s.n));
  }

  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, d;

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(library()->set_product(&product, attribute, &value, sizeof(value)));
  }
  void set_scales(const Problem& s, const Pointers& pointers) {
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, std::int8_t{s.fast});
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers.b_scale);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers.a_scale);
    const auto [a_mode, b_mode] = *s.scale_modes;
    if (b_mode != ScaleMode::kTensor) set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, attribute_of(b_mode));
    if (a_mode != ScaleMode::kTensor) set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, attribute_of(a_mode));
  }
  // Describes a matrix (rows, k). Stored by rows, it is a column-major (k, rows).
  static cublasStatus_t layout(cublasLtMatrixLayout_t out, cudaDataType_t type, std::int64_t rows,
                               std::int64_t k, const MatrixLayout& how) {
    const auto first = static_cast<std::uint64_t>(how.operation == CUBLAS_OP_T ? k : rows);
    const auto second = static_cast<std::uint64_t>(how.operation == CUBLAS_OP_T ? rows : k);
    return library()->init_layout(out, sizeof(*out), type, first, second, how.leading);
  }
};

// A kernel, and the workspace that it needs.
struct Kernel {
  cublasLtMatmulAlgo_t algorithm;
  std::int64_t workspace;  // bytes
};

// Returns the first kernel of cuBLASLt's heuristic, nullopt where it has none.
std::optional<Kernel> choose(cublasLtHandle_t handle, const Problem& s, Descriptions& described) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check(library()->init_preference(&preference, sizeof(preference)));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(library()->set_preference(&preference, attribute, &value, sizeof(value)));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kMaxWorkspace));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, s.alignment[1]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, s.alignment[0]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, s.alignment[2]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, s.alignment[2]);
  cublasLtMatmulHeuristicResult_t found = {};
  int count = 0;
  const cublasStatus_t status =
      library()->heuristic(handle, &described.product, &described.b, &described.a, &described.d,
                           &described.d, &preference, 1, &found, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || count == 0) return std::nullopt;
  check(status);
  return Kernel{found.algo, static_cast<std::int64_t>(found.workspaceSize)};
}

// Returns choose(), cached.
std::optional<Kernel> chosen(cublasLtHandle_t handle, const Problem& s, Descriptions& described) {
  static std::mutex mutex;
  static std::map<Problem, std::optional<Kernel>> cache;
  const std::lock_guard lock(mutex);
  if (const auto found = cache.find(s); found != cache.end()) return found->second;
  return cache.emplace(s, choose(handle, s, described)).first->second;
}

// alpha and beta in device memory: the product of the factors of both sides, and zero or one.
struct Scalars {
  Tensor memory;  // (2): beta, alpha
  const float *beta = memory.const_data_ptr<float>(), *alpha = beta + 1;
};

// alpha and beta, in host memory, of a product without a device factor.
struct HostScalars {
  static constexpr float kOne = 1, kZero = 0;
  explicit HostScalars(bool adds) : beta(adds ? &kOne : &kZero) {}
  const float *beta, *alpha = &kOne;
};

cudaDataType_t type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return CUDA_R_32F;
    case at::kFloat8_e4m3fn: return CUDA_R_8F_E4M3;
    case at::kFloat8_e5m2: return CUDA_R_8F_E5M2;
    default: return CUDA_R_16BF;
  }
}

// The operands of one product, and the form of its result.
struct Job {
  const Tensor &a, &b;  // (m, k), (n, k)
  Tensor bias;          // contiguous, bf16; undefined: none
  at::ScalarType dtype;
  ScaleModes scale_modes = {};
  bool has_device_factor = false;
  bool fast = false;
  const void *a_scale = nullptr, *b_scale = nullptr;
  const Tensor* sum = nullptr;  // fp32 (m, n), contiguous: D, to which the product is added
};

// Computes Dᵀ = op(b) · op(a) and returns D. `scalars()` returns alpha and beta; it is called
// after a kernel is found. Returns nullopt where cuBLASLt has no kernel.
template <class ScalarsOf>
std::optional<Tensor> multiply(const Job& job, const bridge::ExecutionOn& here, ScalarsOf scalars) {
  const auto layout_a = layout_of(job.a), layout_b = layout_of(job.b);
  if (!layout_a || !layout_b) return std::nullopt;
  const Execution& execution = here;
  const Tensor out =
      job.sum ? *job.sum : direct_empty(job.a, {job.a.size(0), job.b.size(0)}, job.dtype);
  const Problem problem = {
      .device = job.a.device().index(),
      .m = job.a.size(0),
      .n = job.b.size(0),
      .k = job.a.size(1),
      .a = *layout_a,
      .b = *layout_b,
      .a_type = type_of(job.a.scalar_type()),
      .b_type = type_of(job.b.scalar_type()),
      .d_type = type_of(job.dtype),
      .scale_modes = job.scale_modes,
      .has_device_factor = job.has_device_factor,
      .fast = job.fast,
      .has_bias = job.bias.defined(),
      .alignment = {alignment_of(job.a), alignment_of(job.b), alignment_of(out)}};
  const cublasLtHandle_t handle = handle_of(job.a.device());
  Descriptions described(problem, {job.bias.defined() ? job.bias.const_data_ptr() : nullptr,
                                   job.a_scale, job.b_scale});
  const auto kernel = chosen(handle, problem, described);
  if (!kernel) return std::nullopt;

  const auto stream = static_cast<cudaStream_t>(execution.stream);
  const auto factors = scalars();
  Tensor workspace;  // undefined: the kernel needs none
  if (kernel->workspace > 0) workspace = direct_empty(job.a, {kernel->workspace}, at::kByte);
  void* d = out.mutable_data_ptr();
  const cublasStatus_t status = library()->matmul(
      handle, &described.product, factors.alpha, job.b.const_data_ptr(), &described.b,
      job.a.const_data_ptr(), &described.a, factors.beta, d, &described.d, d, &described.d,
      &kernel->algorithm, workspace.defined() ? workspace.mutable_data_ptr() : nullptr,
      static_cast<std::size_t>(kernel->workspace), stream);
  // The heuristic does not read beta, so a kernel may refuse to add. Nothing is launched then.
  if (job.sum && (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE))
    return std::nullopt;
  check(status);
  return out;
}

}  // namespace

std::optional<Tensor> product_of_values(const Tensor& a, const Tensor& b, const Result& result) {
  if (!library() || a.numel() == 0 || b.numel() == 0) return std::nullopt;
  const bridge::ExecutionOn here(a);
  const Job job = {.a = a, .b = b, .bias = Tensor(), .dtype = result.dtype, .sum = result.sum};
  return multiply(job, here, [&] { return HostScalars(result.sum); });
}

std::optional<Tensor> product_by_device_factor(const ExactSide& a, const ExactSide& b,
                                               const Result& result) {
  if (!library() || (result.bias && result.dtype != at::kBFloat16)) return std::nullopt;
  const bridge::ExecutionOn here(a.values);
  const Job job = {.a = a.values,
                   .b = b.values,
                   .bias = result.bias ? result.bias->contiguous() : Tensor(),
                   .dtype = result.dtype,
                   .has_device_factor = true,
                   .sum = result.sum};
  return multiply(job, here, [&] {
    const Tensor factor = product_factor_of(a.factor, b.factor, a.values, here);
    if (result.sum) factor.select(0, 0).fill_(1);  // beta
    return Scalars{factor};
  });
}

std::optional<Tensor> product_of_codes(const Fp8Codes& a, const Fp8Codes& b, bool fast,
                                       const Result& result) {
  if (!library()) return std::nullopt;
  const bridge::ExecutionOn here(a.codes);
  const Job job = {.a = a.codes,
                   .b = b.codes,
                   .bias = result.bias ? result.bias->contiguous() : Tensor(),
                   .dtype = result.dtype,
                   .scale_modes = std::pair(a.mode, b.mode),
                   .fast = fast,
                   .a_scale = a.scale.const_data_ptr(),
                   .b_scale = b.scale.const_data_ptr(),
                   .sum = result.sum};
  return multiply(job, here, [&] { return HostScalars(result.sum); });
}
#else
std::optional<Tensor> product_of_values(const Tensor&, const Tensor&, const Result&) {
  return std::nullopt;
}
std::optional<Tensor> product_by_device_factor(const ExactSide&, const ExactSide&, const Result&) {
  return std::nullopt;
}
std::optional<Tensor> product_of_codes(const Fp8Codes&, const Fp8Codes&, bool, const Result&) {
  return std::nullopt;
}
#endif

}  // namespace minifloat::torch_ops
