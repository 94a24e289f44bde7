// Copies that do not wait, as real devices make them: the host sees their result at the next synchronization, NaN before;
// the device reads pinned host memory late, right before its next operator, so that it sees what the host wrote there meanwhile.
#pragma once

#include "memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/Stream.h>

#include <limits>
#include <list>
#include <optional>

namespace npu {

at::Tensor host_view(const at::Tensor& tensor);

struct LateCopy {
  at::Tensor from, to;  // to the host: `from` is in host memory, with the values at the time of the call
  c10::Stream stream;
  uint64_t number;

  bool to_host() const { return to.is_cpu(); }
  void arrive() const { host_view(to).copy_(host_view(from)); }
};

inline std::recursive_mutex late_lock;
inline std::list<LateCopy> late_copies;
inline uint64_t last_copy = 0;

inline void fill_unread(at::Tensor host) {
  if (host.is_floating_point() || host.is_complex()) {
    host.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    host.fill_(host.scalar_type() == at::kBool ? 1 : -1);
  }
}

inline void copy_late(const at::Tensor& from, const at::Tensor& to, c10::Stream stream) {
  const std::lock_guard<std::recursive_mutex> guard(late_lock);
  const auto source = to.is_cpu() ? host_view(from).to(to.scalar_type(), false, true) : from;
  late_copies.push_back({source, to, stream, ++last_copy});
  fill_unread(host_view(to));
}

template <class Predicate>
void arrive(Predicate is_due) {
  const std::lock_guard<std::recursive_mutex> guard(late_lock);
  for (auto each = late_copies.begin(); each != late_copies.end();) {
    if (is_due(*each)) {
      each->arrive();
      each = late_copies.erase(each);
    } else {
      ++each;
    }
  }
}

// All copies to the device arrive; of those to the host, the ones whose memory a copy to the device reads.
inline void arrive_on_device() {
  const std::lock_guard<std::recursive_mutex> guard(late_lock);
  std::vector<c10::StorageImpl*> sources;
  for (const auto& each : late_copies) {
    if (!each.to_host()) sources.push_back(each.from.storage().unsafeGetStorageImpl());
  }
  if (sources.empty()) return;
  arrive([&](const LateCopy& each) {
    const auto is_source = [&](c10::StorageImpl* source) { return source == each.to.storage().unsafeGetStorageImpl(); };
    return !each.to_host() || std::any_of(sources.begin(), sources.end(), is_source);
  });
}

inline void arrive_of_stream(c10::Stream stream, uint64_t until = std::numeric_limits<uint64_t>::max()) {
  arrive([&](const LateCopy& each) { return each.stream == stream && each.number <= until; });
}

inline void arrive_of_device(c10::DeviceIndex device) {
  arrive([&](const LateCopy& each) { return each.stream.device_index() == device; });
}

}  // namespace npu
