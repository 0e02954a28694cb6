// The backend of torch.distributed for the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

namespace {

struct Started : c10d::Work {
  Point end;
  explicit Started(Point end) : end(std::move(end)) {}
  bool wait(std::chrono::milliseconds) override {
    Guarded guard(state);
    streams[current].join(end);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override {
    Guarded guard(state);
    return is_done(end);
  }
};

// One process runs all its collectives in the order of their launch: else ranks that wait for them in another order, as
// threads may, would block each other where hardware runs two communicators at a time.
Clock before_collectives;

// Collectives on a stream of their own, late; gloo carries them out.
struct Collectives : c10d::Backend {
  using Run = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::chrono::milliseconds timeout;
  int stream;

  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int64_t milliseconds)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo), timeout(milliseconds),
        stream((int)Guard().getNewStream(c10::Device(kSim, 0), 0).id()) {}

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(getBackendName(), timeout);
  }

  Run start(const std::string& what, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes,
            std::function<void()> run) {
    Guarded guard(state);
    auto& own = streams[stream];
    own.join(streams[current]);
    begin(stream, what, reads, writes);
    std::vector<Range> ranges;
    for (auto* tensors : {&reads, &writes})
      for (auto& each : *tensors) ranges.push_back(range_of(each));
    own.needs.join(before_collectives);
    enqueue(stream, true, std::move(ranges), std::move(run));
    before_collectives = own.needs;
    return c10::make_intrusive<Started>(own);
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
    return start("all_gather", {in}, {out}, [this, to = on_host(out), from = on_host(in)]() mutable {
      auto own = from.clone();  // it may be a part of `out`
      gloo->_allgather_base(to, own)->wait();
    });
  }

  Run allgather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in,
                const c10d::AllgatherOptions&) override {
    return start("all_gather", in, joined(out), [this, to = all_on_host(out), from = all_on_host(in)]() mutable {
      gloo->allgather(to, from)->wait();
    });
  }

  // Summed in fp32, where NCCL sums in the dtype of the tensors.
  Run _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    return start("reduce_scatter", {in}, {out}, [this, mean, to = on_host(out), from = on_host(in)] {
      std::vector<Tensor> sum{from.to(at::kFloat, false, true)};
      gloo->allreduce(sum)->wait();
      if (mean) sum[0].div_(getSize());
      to.copy_(sum[0].view({getSize(), -1})[getRank()].view_as(to));
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
