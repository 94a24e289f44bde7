// The few operators that are the device's own: making memory, viewing it, copying it.
#pragma once

#include "fallback.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace npu {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline c10::Device device_for(std::optional<at::Device> device) {
  return {kNpu, device ? index_of(*device) : current_device};
}

inline at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_for(device));
  return at::detail::empty_generic(sizes, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_for(device));
  return at::detail::empty_strided_generic(sizes, strides, &memory, kKeys, c10::dtype_or_default(dtype));
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto stream = stream_now((to.is_cpu() ? from : to).device().index());
  // memory of the host that is not pinned is read at once, through a buffer
  const bool late_read = non_blocking && from.is_cpu() && pinned_memory.holds(from.storage().data());
  if (!late_read) arrive_on_device();
  if (late_read || (non_blocking && to.is_cpu())) {
    copy_late(from, to, stream);
    return to;
  }
  if (to.is_cpu()) arrive_of_stream(stream);
  host_view(to).copy_(host_view(from));
  return to;
}

inline const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() && bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize(to, from.sym_sizes(), std::nullopt);
  return copy_from(from, to, false);
}

inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device() == self.device(), "set_: a tensor on ", self.device(), " and memory on ", source.device());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.data()) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {length}, {});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &memory, true), 0, {0}, {});
}

// Lets `module.to("npu")` change parameters in place, so that tied weights stay tied. torch-npu says the same.
inline bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.device().type() == kNpu);
  };
  return dense(self) && dense(from);
}

// Autocast without a template per operator: cast the floating-point tensors among the arguments, call again.
inline void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = at::autocast::cached_cast(dtype, value.toTensor(), kNpu);
  }
  op.callBoxed(stack);
}

inline void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  autocast(op, stack, at::autocast::get_autocast_dtype(kNpu));
}

inline void in_float(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  autocast(op, stack, at::kFloat);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("record_stream", +[](at::Tensor&, c10::Stream) {});
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "conv1d", "scaled_dot_product_attention"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
  }
  for (const char* name : {"softmax.int", "log_softmax.int", "layer_norm", "cumsum", "rsqrt"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float>());
  }
}

}  // namespace npu
