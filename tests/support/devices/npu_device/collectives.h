// In place of a vendor's library (HCCL): collectives on the device's tensors, carried by gloo on the same memory and finished when the call returns.
#pragma once

#include "fallback.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace npu {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Its results are tensors of the device: gloo's own would be the CPU's.
struct Done final : c10d::Work {
  Done(c10d::OpType type, int rank, Tensors results)
      : c10d::Work(rank, type),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(results_));
    finish();
  }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = host(tensors);
    gloo_->broadcast(hosts, options)->wait();
    return done(c10d::OpType::BROADCAST, tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosts = host(tensors);
    auto summed = options;
    if (options.reduceOp == c10d::ReduceOp::AVG) summed.reduceOp = c10d::ReduceOp::SUM;
    gloo_->allreduce(hosts, summed)->wait();
    if (options.reduceOp == c10d::ReduceOp::AVG) {
      for (auto& tensor : hosts) tensor.div_(getSize());
    }
    return done(c10d::OpType::ALLREDUCE, tensors);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto hosts = host(inputs);
    std::vector<Tensors> gathered;
    Tensors results;
    for (auto& of : outputs) {
      gathered.push_back(host(of));
      results.insert(results.end(), of.begin(), of.end());
    }
    gloo_->allgather(gathered, hosts, options)->wait();
    return done(c10d::OpType::ALLGATHER, results);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = host(output), from = host(input);
    gloo_->_allgather_base(to, from, options)->wait();
    return done(c10d::OpType::_ALLGATHER_BASE, {output});
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = host(output), from = host(input);
    auto summed = options;
    if (options.reduceOp == c10d::ReduceOp::AVG) summed.reduceOp = c10d::ReduceOp::SUM;
    gloo_->_reduce_scatter_base(to, from, summed)->wait();
    if (options.reduceOp == c10d::ReduceOp::AVG) to.div_(getSize());
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
  }

  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = host(output), from = host(input);
    gloo_->alltoall_base(to, from, output_sizes, input_sizes, options)->wait();
    return done(c10d::OpType::ALLTOALL_BASE, {output});
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto plain = options;
    plain.device_ids.clear();
    plain.device.reset();
    gloo_->barrier(plain)->wait();
    return done(c10d::OpType::BARRIER, {});
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;

  at::Tensor host(const at::Tensor& tensor) const {
    arrive_on_device();
    TORCH_CHECK(tensor.device().type() == kNpu, name_, " takes ", kind(), " tensors, not one on ", tensor.device());
    return host_view(tensor);
  }

  Tensors host(const Tensors& tensors) const {
    Tensors hosts;
    for (const auto& tensor : tensors) hosts.push_back(host(tensor));
    return hosts;
  }

  WorkPtr done(c10d::OpType type, Tensors results) { return c10::make_intrusive<Done>(type, getRank(), results); }
};

}  // namespace npu
