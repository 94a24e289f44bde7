// What torch asks of a device: which one is current, streams and events, a generator of its own.
#pragma once

#include "copies.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <vector>

namespace npu {

inline thread_local std::array<c10::StreamId, kMostDevices> current_stream{};

inline c10::Stream stream_of(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, index_of(device)), id);
}

inline c10::Stream stream_now(c10::DeviceIndex device) {
  return stream_of({kNpu, device}, current_stream[device]);
}

// A clock reading, and the last copy before it on its stream.
struct Event {
  double milliseconds;
  c10::Stream stream;
  uint64_t last_copy;

  void wait() const { arrive_of_stream(stream, last_copy); }
};

// Operators are done when the call returns; only copies that do not wait are late (copies.h).
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device getDevice() const override { return {kNpu, current_device}; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setDevice(c10::Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current_stream[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return stream_of(device, ++made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& id = current_stream[index_of(stream.device())];
    const c10::StreamId before = id;
    id = stream.id();
    return stream_of(stream.device(), before);
  }
  bool queryStream(const c10::Stream& stream) const override {
    arrive_of_stream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { arrive_of_stream(stream); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { arrive_of_device(index < 0 ? current_device : index); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const auto made = new Event{std::chrono::duration<double, std::milli>(now).count(), stream, last_copy};
    delete static_cast<Event*>(std::exchange(*event, made));
  }
  void block(void* event, const c10::Stream&) const override {
    if (event) static_cast<Event*>(event)->wait();
  }
  bool queryEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->wait();
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return static_cast<Event*>(to)->milliseconds - static_cast<Event*>(from)->milliseconds;
  }
};

// A generator of the device. CPU kernels draw from its twin, so its state is never copied.
struct Generator final : c10::GeneratorImpl {
  at::Generator twin;

  Generator(c10::DeviceIndex index, at::Generator twin)
      : c10::GeneratorImpl({kNpu, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), twin(std::move(twin)) {}
  explicit Generator(c10::DeviceIndex index)
      : Generator(index, at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}

  void set_current_seed(uint64_t seed) override { twin.set_current_seed(seed); }
  uint64_t current_seed() const override { return twin.current_seed(); }
  uint64_t seed() override { return twin.seed(); }
  void set_offset(uint64_t offset) override { twin.set_offset(offset); }
  uint64_t get_offset() const override { return twin.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { twin.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return twin.unsafeGetGeneratorImpl()->get_state(); }

 private:
  Generator* clone_impl() const override { return new Generator(device_.index(), twin.clone()); }
};

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static const std::vector<at::Generator> made = [] {
    std::vector<at::Generator> generators;
    for (int i = 0; i < device_count(); ++i) {
      generators.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    }
    return generators;
  }();
  return made.at(index < 0 ? current_device : index);
}

inline at::Generator twin_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->twin;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = checked(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, checked(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : checked(index));
  }
  at::Device getDeviceFromPtr(void* data) const override {
    Header header;
    std::memcpy(&header, static_cast<char*>(data) - kMargin, sizeof header);
    TORCH_CHECK(header.mark == kMark, "this is not where a block of NPU memory begins");
    return {kNpu, header.device};
  }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* block = storage.unsafeGetStorageImpl();
    auto data = memory.allocate_on(bytes, index_of(block->device()));
    if (block->data() && bytes) std::memcpy(data.get(), block->data(), std::min(bytes, block->nbytes()));
    block->set_data_ptr_noswap(std::move(data));
    block->set_nbytes(bytes);
  }
};

}  // namespace npu
