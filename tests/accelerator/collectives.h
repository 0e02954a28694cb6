// The backend of torch.distributed for the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

namespace {

// A collective that was started. `wait` makes the current stream wait, not the host. As NCCL's, it keeps its tensors until
// then.
struct Started : c10d::Work {
  Point end;
  c10::Device device;
  std::vector<Tensor> tensors;
  bool asked = false;
  Started(Point end, c10::Device device, std::vector<Tensor> tensors)
      : end(std::move(end)), device(device), tensors(std::move(tensors)) {}
  bool wait(std::chrono::milliseconds) override {
    {
      Guarded guard(state);
      streams[Guard().getStream(device).id()].join(end);
    }
    tensors.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return is_over(end, asked); }
};

int collectives_before_failure = -1;  // this many more collectives of the process succeed; below 0: all

// A process runs all its collectives in the order of their launch. Otherwise ranks whose threads wait in different orders
// would block each other here, and would not on hardware, which runs two communicators at a time.
Clock before_collectives;

// One side of a message between two ranks.
struct Message {
  bool is_sent;
  int peer;
  Tensor tensor;
};

// Late collectives on a stream of their own, carried out by gloo. As with NCCL, collectives of one communicator match by
// their order alone: ranks whose orders differ get each other's data. If kinds or sizes differ too, NCCL hangs or gives
// any values. This backend gives NaN.
struct Collectives : c10d::Backend {
  using Run = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::chrono::milliseconds timeout;
  // Made for the device of the first use. Collectives and groups of messages have one, messages outside of groups have
  // one for each peer.
  std::map<int, int> own_streams;
  static constexpr int kAllRanks = -1;
  bool in_group = false;
  std::vector<Message> grouped;

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

  // A collective of all ranks.
  Run start(const std::string& what, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes,
            std::function<void()> run) {
    TORCH_CHECK(!in_group, "simccl: ", what, " in a group: only messages are grouped");
    int64_t bytes = 0;
    bool sizes_differ = what == "all_to_all";  // legally, from rank to rank
    for (auto& each : writes) bytes += sizes_differ ? 0 : (int64_t)each.nbytes();
    return run_later(kAllRanks, what, reads, writes, [this, what, bytes, run, results = all_on_host(writes)] {
      if (is_the_same_everywhere(what, bytes)) return run();
      for (auto& each : results) memset(each.mutable_data_ptr(), 0xFF, each.nbytes());
    });
  }

  Run run_later(int peer, const std::string& what, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes,
                std::function<void()> run) {
    if (collectives_before_failure >= 0)
      TORCH_CHECK_WITH(DistBackendError, collectives_before_failure-- > 0, "simccl: ", what, " failed, as was planned");
    auto& some = reads.empty() ? writes : reads;
    c10::Device device = some.empty() ? Guard().getDevice() : some[0].device();
    if (!own_streams.count(peer)) own_streams[peer] = (int)Guard().getNewStream(device, 0).id();
    int stream = own_streams[peer];
    Guarded guard(state);
    auto& own = streams[stream];
    own.join(streams[Guard().getStream(device).id()]);
    begin(stream, what, reads, writes);
    auto tensors = joined({reads, writes});
    std::vector<Range> ranges;
    for (auto& each : tensors) ranges.push_back(range_of(each));
    own.needs.join(before_collectives);
    enqueue(stream, true, std::move(ranges), std::move(run));
    before_collectives = own.needs;
    return c10::make_intrusive<Started>(own, device, tensors);
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

  Run _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    std::vector<Tensor> outs{out}, ins{in};
    return allgather_into_tensor_coalesced(outs, ins, options);
  }

  Run allgather_into_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins,
                                      const c10d::AllgatherOptions&) override {
    return start("all_gather", ins, outs, [this, to = all_on_host(outs), from = all_on_host(ins)] {
      for (size_t i = 0; i < to.size(); i++) {
        auto full = to[i].view(-1), own = from[i].reshape(-1).clone();  // it may be a part of `full`
        gloo->_allgather_base(full, own)->wait();
      }
    });
  }

  Run allgather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in,
                const c10d::AllgatherOptions&) override {
    return start("all_gather", in, joined(out), [this, to = all_on_host(out), from = all_on_host(in)]() mutable {
      gloo->allgather(to, from)->wait();
    });
  }

  Run _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    std::vector<Tensor> outs{out}, ins{in};
    return reduce_scatter_tensor_coalesced(outs, ins, options);
  }

  Run reduce_scatter_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins,
                                      const c10d::ReduceScatterOptions& options) override {
    bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    return start("reduce_scatter", ins, outs, [this, mean, to = all_on_host(outs), from = all_on_host(ins)] {
      for (size_t i = 0; i < to.size(); i++) reduce_scatter_now(to[i], from[i], mean);
    });
  }

  // As NCCL: sums are in the dtype of the tensors, rounded after each rank's part. For a mean, each part is divided first.
  void reduce_scatter_now(const Tensor& to, const Tensor& from, bool mean) {
    auto part = (mean ? from.div(getSize()) : from).view({1, -1});
    auto parts = at::empty({getSize(), from.numel()}, from.options());
    gloo->_allgather_base(parts, part)->wait();
    auto own = parts.view({getSize(), getSize(), -1}).select(1, getRank());
    auto sum = own[0].clone();
    for (int64_t rank = 1; rank < getSize(); rank++) sum.add_(own[rank]);
    to.copy_(sum.view_as(to));
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

  // ---- messages between two ranks

  Run send(std::vector<Tensor>& tensors, int peer, int) override { return pass({true, peer, tensors.at(0)}); }
  Run recv(std::vector<Tensor>& tensors, int peer, int) override { return pass({false, peer, tensors.at(0)}); }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { in_group = true; }
  Run endCoalescing() override {
    in_group = false;
    return pass_together(kAllRanks, std::exchange(grouped, {}));
  }

  Run pass(const Message& message) {
    TORCH_CHECK(message.tensor.is_contiguous(), "simccl: a message must be contiguous");
    if (!in_group) return pass_together(message.peer, {message});
    grouped.push_back(message);
    return c10::make_intrusive<Started>(Point(), message.tensor.device(), std::vector<Tensor>());
  }

  Run pass_together(int peer, const std::vector<Message>& messages) {
    std::vector<Tensor> sent, received;
    std::vector<Message> seen_by_host;
    for (auto& each : messages) {
      (each.is_sent ? sent : received).push_back(each.tensor);
      seen_by_host.push_back({each.is_sent, each.peer, on_host(each.tensor)});
    }
    std::string what = received.empty() ? "send" : sent.empty() ? "recv" : "a group of messages";
    return run_later(peer, what, sent, received, [this, seen_by_host] { pass_now(seen_by_host); });
  }

  // As NCCL: messages match by their order alone, in each direction between two ranks, and a send ends only when the
  // other side receives. So ranks that both send first block each other, unless these sends are in groups. A message is
  // NaN if the two sides name other sizes.
  void pass_now(const std::vector<Message>& messages) {
    enum Tag { kSize, kContent, kReceives };
    std::vector<Run> ends;
    auto size = [](const Tensor& tensor) { return std::vector<Tensor>{at::tensor({(int64_t)tensor.nbytes()}, at::kLong)}; };
    std::list<std::vector<Tensor>> held;
    auto send_as = [&](Tag tag, int peer, std::vector<Tensor> what) {
      ends.push_back(gloo->send(held.emplace_back(std::move(what)), peer, tag));
    };
    for (auto& [is_sent, peer, tensor] : messages) {
      send_as(is_sent ? kSize : kReceives, peer, size(tensor));
      if (is_sent) send_as(kContent, peer, {tensor});
    }
    for (auto& [is_sent, peer, tensor] : messages) {
      if (is_sent) continue;
      auto theirs = size(tensor);
      gloo->recv(theirs, peer, kSize)->wait();
      std::vector<Tensor> content{at::empty({theirs[0].item<int64_t>()}, at::kByte)};
      gloo->recv(content, peer, kContent)->wait();
      if (content[0].nbytes() == tensor.nbytes())
        memcpy(tensor.mutable_data_ptr(), content[0].const_data_ptr(), tensor.nbytes());
      else
        memset(tensor.mutable_data_ptr(), 0xFF, tensor.nbytes());
    }
    for (auto& [is_sent, peer, tensor] : messages) {
      if (!is_sent) continue;
      auto theirs = size(tensor);
      gloo->recv(theirs, peer, kReceives)->wait();
    }
    for (auto& each : ends) each->wait();
  }

  Run barrier(const c10d::BarrierOptions&) override {
    wait_for_everything();
    gloo->barrier()->wait();
    return start("barrier", {}, {}, [] {});
  }
};

}  // namespace
