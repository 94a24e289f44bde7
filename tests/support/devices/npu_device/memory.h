// Memory of the simulated devices: host memory with a mark at each end, a capacity per device, and statistics.
// What kind of device it is ("npu") torch has been told before this is loaded; nothing here names one.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace npu {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;
inline thread_local c10::DeviceIndex current_device = 0;

inline std::string kind() {
  return c10::get_privateuse1_backend();
}

inline std::string upper_kind() {
  std::string name = kind();
  for (char& letter : name) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  return name;
}

// Reads SIMULATED_NPU_<name>, where the device is an npu.
inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(("SIMULATED_" + upper_kind() + "_" + name).c_str());
  return text && *text ? std::atoll(text) : otherwise;
}

// Read at each call: a process forked after the import may have another number than the first.
inline int visible_devices = kMostDevices;

inline int device_count() {
  return std::min(visible_devices, std::clamp<int>(setting("DEVICES", 1), 0, kMostDevices));
}

inline c10::DeviceIndex checked(int64_t index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "invalid ", kind(), " device ", index, ": there are ", device_count());
  return static_cast<c10::DeviceIndex>(index);
}

inline c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? checked(device.index()) : current_device;
}

// What stands before a block's bytes. The same mark stands after them.
struct Header {
  uint64_t mark;
  size_t bytes;
  c10::DeviceIndex device;
};
constexpr uint64_t kMark = 0x6e70752d6d656d6f;
constexpr size_t kMargin = 64;
static_assert(sizeof(Header) <= kMargin);

struct Usage {
  size_t used = 0, peak = 0, refused = 0;
};

struct Memory final : c10::DeviceAllocator {
  std::mutex lock;
  std::array<Usage, kMostDevices> usage;
  std::atomic<size_t> capacity{static_cast<size_t>(setting("MB", 4096)) << 20};

  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(bytes, current_device);
  }

  c10::DataPtr allocate_on(size_t bytes, c10::DeviceIndex device) {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(kNpu, device)};
    reserve(bytes, device);
    auto* base = static_cast<char*>(std::malloc(bytes + 2 * kMargin + kMargin));
    TORCH_CHECK(base, "the host of the simulated device has no memory left");
    auto* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base) + 2 * kMargin) & ~(kMargin - 1));
    std::memcpy(start - sizeof(void*), &base, sizeof base);
    const Header header{kMark, bytes, device};
    std::memcpy(start - kMargin, &header, sizeof header);
    std::memset(start, 0xff, bytes);  // NaN, -1: nobody may count on what new memory holds
    std::memcpy(start + bytes, &kMark, sizeof kMark);
    return {start, start, &release, c10::Device(kNpu, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> guard(lock);
    const Usage& of = usage[checked(device)];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* stat : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
      stat->current = of.used;
      stat->peak = of.peak;
    }
    stats.num_ooms = of.refused;
    return stats;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> guard(lock);
    usage[checked(device)].peak = usage[device].used;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> guard(lock);
    const size_t used = usage[checked(device)].used, total = capacity;
    return {total - std::min(total, used), total};
  }

 private:
  void reserve(size_t bytes, c10::DeviceIndex device) {
    const std::lock_guard<std::mutex> guard(lock);
    Usage& of = usage[device];
    const size_t total = capacity;
    if (of.used + bytes > total) {
      ++of.refused;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, upper_kind(), " out of memory. Tried to allocate ", bytes, " bytes (device ", int(device),
          "; ", total, " bytes total capacity; ", of.used, " bytes already allocated; ", total - std::min(total, of.used),
          " bytes free)");
    }
    of.used += bytes;
    of.peak = std::max(of.peak, of.used);
  }

  static void release(void* data);
};

inline Memory memory;

inline void Memory::release(void* data) {
  if (!data) return;
  auto* start = static_cast<char*>(data);
  Header header;
  std::memcpy(&header, start - kMargin, sizeof header);
  if (header.mark != kMark || std::memcmp(start + header.bytes, &kMark, sizeof kMark) != 0) {
    std::fprintf(stderr, "simulated device: memory beside a block was overwritten, or it is not the device's\n");
    std::abort();
  }
  void* base;
  std::memcpy(&base, start - sizeof base, sizeof base);
  {
    const std::lock_guard<std::mutex> guard(memory.lock);
    memory.usage[header.device].used -= header.bytes;
  }
  std::free(base);
}

// Host memory that a device could read by itself. It is known as such, and otherwise like any other.
struct PinnedMemory final : c10::Allocator {
  std::mutex lock;
  std::set<const void*> blocks;

  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    const std::lock_guard<std::mutex> guard(lock);
    blocks.insert(data);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  bool holds(const void* data) {
    const std::lock_guard<std::mutex> guard(lock);
    return blocks.count(data) > 0;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* data);
};

inline PinnedMemory pinned_memory;

inline void PinnedMemory::release(void* data) {
  {
    const std::lock_guard<std::mutex> guard(pinned_memory.lock);
    pinned_memory.blocks.erase(data);
  }
  c10::free_cpu(data);
}

}  // namespace npu
