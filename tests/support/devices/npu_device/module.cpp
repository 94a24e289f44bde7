// The Python module of a simulated device, and the one file that is compiled.
#include "collectives.h"
#include "kernels.h"

#include <torch/csrc/utils/pybind.h>

REGISTER_ALLOCATOR(npu::kNpu, &npu::memory)

namespace {

const c10::impl::DeviceGuardImplRegistrar guard(npu::kNpu, new npu::Guard());
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new npu::Hooks());
  return true;
}();

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &npu::device_count);
  m.def("leave_devices", [](int count) { npu::visible_devices = std::clamp(count, 0, npu::device_count()); });
  m.def("current_device", [] { return int(npu::current_device); });
  m.def("set_device", [](int64_t index) { npu::current_device = npu::checked(index); });
  m.def("default_generator", [](int64_t index) { return npu::default_generator(npu::checked(index)); });
  m.def("set_capacity", [](size_t bytes) { npu::memory.capacity = bytes; });
  m.def("calls", [] {
    const std::lock_guard<std::mutex> guard(npu::calls_lock);
    return npu::calls;
  });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo, std::string name) {
    auto made = c10::make_intrusive<npu::Collectives>(std::move(gloo), std::move(name));
    return c10::intrusive_ptr<c10d::Backend>(std::move(made));
  });
}
