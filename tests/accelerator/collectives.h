// The backend of torch.distributed for the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

namespace {

// A collective that was started. `wait` makes the current stream wait, not the host.
struct Started : c10d::Work {
  Point end;
  c10::Device device;
  bool asked = false;
  Started(Point end, c10::Device device) : end(std::move(end)), device(device) {}
  bool wait(std::chrono::milliseconds) override {
    Guarded guard(state);
    streams[Guard().getStream(device).id()].join(end);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return is_over(end, asked); }
};

int collectives_before_failure = -1;  // this many more collectives of the process succeed; below 0: all

// A process runs all its collectives in the order of their launch. Otherwise ranks whose threads wait in different orders
// would block each other here, and would not on hardware, which runs two communicators at a time.
Clock before_collectives;

// Late collectives on a stream of their own, carried out by gloo. As with NCCL, collectives of one communicator match by
// their order alone: ranks whose orders differ get each other's data. If kinds or sizes differ too, NCCL hangs or gives
// any values. This backend gives NaN.
struct Collectives : c10d::Backend {
  using Run = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::chrono::milliseconds timeout;
  int stream = -1;  // made for the device of the first collective

  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int64_t milliseconds)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo), timeout(milliseconds) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), timeout);
  }

  // Whether all ranks run the same operation now.
  bool is_the_same_everywhere(const std::string& what, int64_t bytes) {
    if (getSize() == 1) return true;
    auto own = at::tensor({(int64_t)std::hash<std::string>()(what), bytes}, at::kLong).view({1, 2});
    auto all = at::empty({getSize(), 2}, at::kLong);
    gloo->_allgather_base(all, own)->wait();
    return all.eq(own).all().item<bool>();
  }

  Run start(const std::string& what, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes,
            std::function<void()> run) {
    if (collectives_before_failure >= 0)
      TORCH_CHECK_WITH(DistBackendError, collectives_before_failure-- > 0, "simccl: ", what, " failed, as was planned");
    c10::Device device = reads.empty() ? Guard().getDevice() : reads[0].device();
    if (stream < 0) stream = (int)Guard().getNewStream(device, 0).id();
    Guarded guard(state);
    auto& own = streams[stream];
    own.join(streams[Guard().getStream(device).id()]);
    begin(stream, what, reads, writes);
    std::vector<Range> ranges;
    int64_t bytes = 0;
    for (auto* tensors : {&reads, &writes})
      for (auto& each : *tensors) ranges.push_back(range_of(each));
    bool sizes_differ = what == "all_to_all";  // legally, from rank to rank
    for (auto& each : writes) bytes += sizes_differ ? 0 : (int64_t)each.nbytes();
    own.needs.join(before_collectives);
    enqueue(stream, true, std::move(ranges), [this, what, bytes, run, results = all_on_host(writes)] {
      if (is_the_same_everywhere(what, bytes)) return run();
      for (auto& each : results) memset(each.mutable_data_ptr(), 0xFF, each.nbytes());
    });
    before_collectives = own.needs;
    return c10::make_intrusive<Started>(own, device);
  }

  static std::vector<Tensor> all_on_host(const std::vector<Tensor>& tensors) {
    std::vector<Tensor> made;
    for (auto& each : tensors) made.push_back(on_host(each));
    return made;
  }

  static std::vector<std::vector<Tensor>> all_on_host(const std::vector<std::vector<Tensor>>& lists) {
    std::vector<std::vector<Tensor>> made;
    for (auto& each : lists) made.push_back(all_on_host(each));
    return made;
  }

  static std::vector<Tensor> joined(const std::vector<std::vector<Tensor>>& lists) {
    std::vector<Tensor> all;
    for (auto& each : lists) all.insert(all.end(), each.begin(), each.end());
    return all;
  }

  Run _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    return start("all_gather", {in}, {out}, [this, to = on_host(out).view(-1), from = on_host(in)]() mutable {
      auto own = from.reshape(-1).clone();  // it may be a part of `out`
      gloo->_allgather_base(to, own)->wait();
    });
  }

  Run allgather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in,
                const c10d::AllgatherOptions&) override {
    return start("all_gather", in, joined(out), [this, to = all_on_host(out), from = all_on_host(in)]() mutable {
      gloo->allgather(to, from)->wait();
    });
  }

  // As NCCL: sums are in the dtype of the tensors, rounded after each rank's part. For a mean, each part is divided first.
  Run _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    return start("reduce_scatter", {in}, {out}, [this, mean, to = on_host(out), from = on_host(in)] {
      auto part = (mean ? from.div(getSize()) : from).view({1, -1});
      auto parts = at::empty({getSize(), from.numel()}, from.options());
      gloo->_allgather_base(parts, part)->wait();
      auto own = parts.view({getSize(), getSize(), -1}).select(1, getRank());
      auto sum = own[0].clone();
      for (int64_t rank = 1; rank < getSize(); rank++) sum.add_(own[rank]);
      to.copy_(sum.view_as(to));
    });
  }

  Run alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                    const c10d::AllToAllOptions&) override {
    auto to_sizes = out_sizes, from_sizes = in_sizes;
    return start("all_to_all", {in}, {out}, [=, this, to = on_host(out), from = on_host(in)]() mutable {
      gloo->alltoall_base(to, from, to_sizes, from_sizes)->wait();
    });
  }

  Run allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return start("all_reduce", tensors, tensors, [this, options, on_host = all_on_host(tensors)]() mutable {
      gloo->allreduce(on_host, options)->wait();
    });
  }

  Run broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return start("broadcast", tensors, tensors, [this, options, on_host = all_on_host(tensors)]() mutable {
      gloo->broadcast(on_host, options)->wait();
    });
  }

  Run scatter(std::vector<Tensor>& out, std::vector<std::vector<Tensor>>& in,
              const c10d::ScatterOptions& options) override {
    return start("scatter", joined(in), out, [this, options, to = all_on_host(out), from = all_on_host(in)]() mutable {
      gloo->scatter(to, from, options)->wait();
    });
  }

  Run barrier(const c10d::BarrierOptions&) override {
    wait_for_everything();
    gloo->barrier()->wait();
    return start("barrier", {}, {}, [] {});
  }
};

}  // namespace
