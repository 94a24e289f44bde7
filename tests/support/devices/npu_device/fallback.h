// Computing: every operator runs its CPU kernel on the same memory, once all tensors were found on one device.
#pragma once

#include "device.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>

#include <map>
#include <string>
#include <unordered_map>

namespace npu {

inline at::Tensor make_tensor(
    c10::Storage storage, c10::DispatchKey key, caffe2::TypeMeta dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
    int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

// CPU tensors on the memory of NPU tensors. Tensors that share memory on the device share it here.
class HostViews {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    auto* block = tensor.storage().unsafeGetStorageImpl();
    auto& host = storages_[block];
    if (!host) {
      // With an allocator, for kernels that make an output larger: their memory is then not the device's (`commit`).
      host = c10::Storage(
          c10::Storage::use_byte_size_t(), block->nbytes(), c10::DataPtr(block->mutable_data(), c10::kCPU),
          c10::GetAllocator(c10::kCPU), true);
      devices_.emplace(host.unsafeGetStorageImpl(), tensor.storage());
    }
    auto view = make_tensor(
        host, c10::DispatchKey::CPU, tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) view._set_conj(true);
    if (tensor.is_neg()) view._set_neg(true);
    return view;
  }

  // Returns an NPU tensor on the memory of which a kernel returned a view, or nothing.
  std::optional<at::Tensor> on_device(const at::Tensor& host) const {
    const auto found = devices_.find(host.storage().unsafeGetStorageImpl());
    if (found == devices_.end()) return std::nullopt;
    return make_tensor(
        found->second, c10::DispatchKey::PrivateUse1, host.dtype(), host.sizes(), host.strides(),
        host.storage_offset());
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> devices_;
};

inline at::Tensor host_view(const at::Tensor& tensor) {
  return tensor.device().type() == kNpu ? HostViews().of(tensor) : tensor;
}

inline std::map<std::string, int64_t> calls;  // operator -> how often it went through the fallback
inline std::mutex calls_lock;

// One call of an operator, from NPU tensors to NPU tensors.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op), name_(c10::toString(op.operator_name())) {}

  void run(torch::jit::Stack* stack) {
    {
      const std::lock_guard<std::mutex> guard(calls_lock);
      ++calls[name_];
    }
    const auto& arguments = op_.schema().arguments();
    const auto first = stack->size() - arguments.size();
    bool draws = false;
    for (size_t i = 0; i < arguments.size(); ++i) find_device((*stack)[first + i]);
    TORCH_CHECK(device_, name_, ": no argument says which ", kind(), " it is for");
    arrive_on_device();
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack)[first + i];
      const auto* alias = arguments[i].alias_info();
      value = to_host(value, arguments[i], alias && alias->isWrite(), draws);
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      if (draws || !op_.hasTag(at::Tag::nondeterministic_seeded)) {
        op_.callBoxed(stack);
      } else {  // no generator is given: the kernel draws from the default one of the CPU
        auto host = at::detail::getDefaultCPUGenerator();
        auto mine = twin_of(default_generator(device_->index()));
        const auto before = host.get_state();
        host.set_state(mine.get_state());
        op_.callBoxed(stack);
        mine.set_state(host.get_state());
        host.set_state(before);
      }
    }
    for (auto& [device, host] : written_) commit(device, host);
    const auto results = op_.schema().returns().size();
    for (size_t i = stack->size() - results; i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      if (!value.isTensor() && !value.isTensorList() && !value.isNone()) arrive_of_stream(stream_now(device_->index()));
      value = to_device(value);
    }
  }

 private:
  const c10::OperatorHandle& op_;
  const std::string name_;
  std::optional<c10::Device> device_;
  HostViews views_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;

  void find_device(const c10::IValue& value) {
    const auto note = [this](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.device().type() == kNpu && !device_) device_ = tensor.device();
    };
    if (value.isTensor()) {
      note(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) note(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor) note(*tensor);
      }
    } else if (value.isDevice() && !device_ && value.toDevice().type() == kNpu) {
      device_ = c10::Device(kNpu, index_of(value.toDevice()));
    }
  }

  c10::IValue to_host(const c10::IValue& value, const c10::Argument& argument, bool writes, bool& draws) {
    if (value.isTensor()) return to_host(value.toTensor(), argument, writes);
    if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& tensor : value.toTensorVector()) hosts.push_back(to_host(tensor, argument, writes));
      return hosts;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        hosts.push_back(tensor ? std::optional(to_host(*tensor, argument, writes)) : std::nullopt);
      }
      return hosts;
    }
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isGenerator() && value.toGenerator().device().type() == kNpu) {
      draws = true;
      return twin_of(value.toGenerator());
    }
    return value;
  }

  at::Tensor to_host(const at::Tensor& tensor, const c10::Argument& argument, bool writes) {
    if (!tensor.defined()) return tensor;
    if (tensor.device() == *device_) {
      TORCH_CHECK(tensor.has_storage(), name_, ": the simulated device has dense tensors only");
      auto host = views_.of(tensor);
      if (writes) written_.emplace_back(tensor, host);
      return host;
    }
    TORCH_CHECK(
        tensor.device().is_cpu() && !writes && (tensor.dim() == 0 || is_index(argument)),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
        tensor.device(), "! (when checking argument ", argument.name(), " in method ", name_, ")");
    return tensor;
  }

  // Devices take numbers as CPU tensors without dimensions, and indices of CPU tensors (a[i], a[i] = b).
  bool is_index(const c10::Argument& argument) const {
    return argument.name() == "indices" && name_.find("aten::") == 0 && name_.find("index") != std::string::npos &&
        argument.type()->kind() == c10::TypeKind::ListType;
  }

  // A kernel may have given an output other sizes, and other memory for them.
  static void commit(const at::Tensor& device, const at::Tensor& host) {
    auto* block = device.storage().unsafeGetStorageImpl();
    auto* made = host.storage().unsafeGetStorageImpl();
    if (made->data() != block->data()) {
      if (made->nbytes() != block->nbytes()) Hooks().resizePrivateUse1Bytes(device.storage(), made->nbytes());
      if (made->nbytes()) std::memcpy(block->mutable_data(), made->data(), made->nbytes());
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides()) {
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& host : value.toTensorVector()) tensors.push_back(to_device(host));
      return tensors;
    }
    return value;
  }

  at::Tensor to_device(const at::Tensor& host) {
    if (!host.defined()) return host;
    for (const auto& [device, view] : written_) {
      if (view.unsafeGetTensorImpl() == host.unsafeGetTensorImpl()) return device;
    }
    if (auto view = views_.on_device(host)) return *view;
    const bool dense = host.is_non_overlapping_and_dense();
    const at::Tensor source = dense ? host : host.contiguous();
    auto result = at::empty_strided(source.sizes(), source.strides(), host.options().device(*device_));
    if (source.numel()) std::memcpy(result.mutable_data_ptr(), source.const_data_ptr(), source.numel() * source.itemsize());
    return result;
  }
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op).run(stack);
}

}  // namespace npu
