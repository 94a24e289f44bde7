// Computing for the real torch-npu on host memory: aten's operators run their CPU kernels in the place of its own.
//
// An operator is given over by name, after torch-npu registered it. Memory and views stay torch-npu's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

std::map<std::string, int64_t> calls;  // operator -> how often it ran on the host

bool is_npu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kNpu;
}

// A generator of the host that goes on where the device's is, which moves on by one.
at::Generator twin_of(at::Generator device) {
  const uint64_t offset = device.get_offset();
  device.set_offset(offset + 4);  // a multiple of 4, as philox counts
  return at::make_generator<at::CPUGeneratorImpl>(device.current_seed() + 0x9E3779B97F4A7C15ull * offset);
}

// cpu_fallback takes tensors of the host beside the device's without a word, which no device does.
void check_devices(const std::string& name, const torch::jit::Stack& stack, size_t count) {
  bool device = false, host = false;
  const auto note = [&](const at::Tensor& tensor) {
    device = device || is_npu(tensor);
    host = host || (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0);  // numbers may come as tensors
  };
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isTensor()) note(stack[i].toTensor());
    if (!stack[i].isTensorList()) continue;  // lists of optional ones are indices, which may lie on the host
    for (const at::Tensor& tensor : stack[i].toTensorVector()) note(tensor);
  }
  TORCH_CHECK(
      !(device && host), "Expected all tensors to be on the same device, but found at least two devices, npu:0 "
      "and cpu! (in method ", name, ")");
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = c10::toString(op.operator_name());
  const auto count = op.schema().arguments().size();
  check_devices(name, *stack, count);
  ++calls[name];
  bool given = false;
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    given = given || value.isGenerator();
    if (value.isGenerator() && value.toGenerator().device().type() == kNpu) value = twin_of(value.toGenerator());
  }
  if (given || !op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  // The kernel draws from the host's default generator: for this call it goes on where the device's is.
  auto host = at::detail::getDefaultCPUGenerator();
  const auto before = host.get_state();
  host.set_state(twin_of(at::globalContext().defaultGenerator(c10::Device(kNpu, 0))).get_state());
  at::native::cpu_fallback(op, stack);
  host.set_state(before);
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!is_npu(tensor)) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options, at::kCPU);
}

at::Tensor& copy_into(at::Tensor& to, const at::Tensor& from, bool) {
  const at::NoGradGuard guard;
  if (to.numel()) host_view(to).copy_(host_view(from).expand_as(to));
  return to;
}

at::Tensor clone_of(const at::Tensor& from, std::optional<at::MemoryFormat> format) {
  auto to = at::empty_like(from, from.options(), format);
  return copy_into(to, from, false);
}

at::Tensor contiguous_of(const at::Tensor& from, at::MemoryFormat format) {
  return from.is_contiguous(format) ? from : clone_of(from, format);
}

at::Tensor to_copy(
    const at::Tensor& from, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, bool, std::optional<at::MemoryFormat> format) {
  const auto options = from.options().dtype(dtype.value_or(from.scalar_type())).device(device.value_or(from.device()));
  auto to = at::empty_like(from, options.requires_grad(false), format);
  return copy_into(to, from, false);
}

std::vector<std::unique_ptr<torch::Library>> libraries;  // as long as these live, so does what they registered

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("give_over", [](const std::vector<std::string>& names) {
    auto library =
        std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    library->impl("copy_", copy_into);
    library->impl("clone", clone_of);
    library->impl("contiguous", contiguous_of);
    library->impl("_to_copy", to_copy);
    for (const auto& name : names) library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
    libraries.push_back(std::move(library));
  });
  m.def("calls", [] { return calls; });
}
