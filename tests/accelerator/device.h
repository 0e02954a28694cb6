// What torch asks of a device: memory, streams and events. Also: tensors of the device seen as tensors of the host.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "order.h"

namespace {

using at::Tensor;
constexpr auto kSim = c10::DeviceType::PrivateUse1;

// ---- allocators

void give_back(void* memory) {
  Guarded guard(state);
  auto found = blocks.find((Address)memory);
  auto& block = found->second;
  Range range{found->first, found->first + block.size};
  loans.erase(
      std::remove_if(loans.begin(), loans.end(), [&](Loan& loan) { return loan.use.range.overlaps(range); }),
      loans.end());
  if (!block.pinned) {
    live[block.device()] -= block.size;
    Clock before = streams[block.home].before;
    before.join(host);
    bool wrong = false;
    for (auto& each : block.uses)
      if (!each.known_to(before) && !block.recorded.count(each.stream)) {
        wrong = true;
        mistake("memory of stream " + std::to_string(block.home) + " is freed while " + each.text() +
                " may still use it: nothing waited for that, and there was no record_stream");
      }
    if (wrong || late.empty()) memset(memory, 0xFF, block.size);
  }
  blocks.erase(found);
  graves.push_back({issued, memory});
  bury();
}

void* take(size_t size, size_t alignment, bool pinned) {
  if (!size) return nullptr;
  Guarded guard(state);
  auto &used = live[current_device], &most = peak[current_device];
  TORCH_CHECK_WITH(OutOfMemoryError, pinned || used + size <= limit, "sim out of memory: ", size, " bytes wanted, ",
                   used, " of ", limit, " are in use");
  void* memory;
  if (posix_memalign(&memory, alignment, (size + 511) / 512 * 512)) throw std::bad_alloc();
  memset(memory, 0xFF, size);
  auto& block = blocks[(Address)memory] = Block{size, pinned, current()};
  if (!pinned) {
    used += size;
    most = std::max(most, used);
    // A caching allocator reuses memory that tensors of the same stream may have used just before.
    Range whole{(Address)memory, (Address)memory + size};
    block.uses.push_back({whole, current(), launch(current()), true, "an earlier use of that memory"});
  }
  return memory;
}

struct DeviceMemory : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = take(size, 512, false);
    return {memory, memory, raw_deleter(), c10::Device(kSim, (c10::DeviceIndex)current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) { give_back(memory); };
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    Guarded guard(state);
    if (auto* block = block_at((Address)memory.get())) block->recorded.insert((int)stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Guarded guard(state);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      bytes->current = (int64_t)live[device];
      bytes->peak = (int64_t)peak[device];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Guarded guard(state);
    peak[device] = live[device];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Guarded guard(state);
    return {limit - live[device], limit};
  }
};

// As torch's own: freed memory is reused only after the copies from and to it have ended.
struct PinnedMemory : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = take(size, 4096, true);
    return {memory, memory, raw_deleter(), c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) { give_back(memory); };
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kSim, &device_memory);

// Pin existing memory, as cudaHostRegister does.
void register_memory(Address address, size_t size) {
  Guarded guard(state);
  blocks[address] = Block{size, true, current_device};
}

void unregister_memory(Address address) {
  Clock all;
  {
    Guarded guard(state);
    all = everything_late();
    auto& block = blocks.at(address);
    Range range{address, address + block.size};
    for (auto& each : block.uses)
      if (!each.known_to(host)) mistake("pinned memory is given back before the host knows that " + each.text() + " is done");
    loans.erase(
        std::remove_if(loans.begin(), loans.end(), [&](Loan& loan) { return loan.use.range.overlaps(range); }),
        loans.end());
    blocks.erase(address);
  }
  run_late(all);  // the memory will be unmapped
}

// ---- streams and events

// `asked`: the host has asked before whether the event is done.
struct Event {
  Point point;
  bool asked = false;
};

// The first answer is always no: on a real device, work that was launched may not have ended yet.
bool is_over(const Point& point, bool& asked) {
  {
    Guarded guard(state);
    if (is_done(point) && (asked || host.covers(point.before))) {
      host.join(point.before);
      return true;
    }
  }
  asked = true;
  run_late(point.late, false);  // so a host that polls reaches the end
  return false;
}

struct Guard : c10::impl::DeviceGuardImplInterface {
  static int number(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Device numbered_device(int device) { return c10::Device(kSim, (c10::DeviceIndex)device); }
  static c10::Stream numbered(int stream) {
    return c10::Stream(c10::Stream::UNSAFE, numbered_device(device_of_stream[stream]), stream);
  }
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return numbered_device(std::exchange(current_device, number(device)));
  }
  c10::Device getDevice() const override { return numbered_device(current_device); }
  void setDevice(c10::Device device) const override { current_device = number(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = number(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device device) const override { return numbered(current_streams[number(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return numbered(number(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Guarded guard(state);
    streams.emplace_back();
    device_of_stream.push_back(number(device));
    return numbered((int)streams.size() - 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return numbered(std::exchange(current_streams[stream.device_index()], (int)stream.id()));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete (Event*)*event;
    *event = new Event{point_of((int)stream.id())};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  void block(void* event, const c10::Stream& stream) const override {
    Guarded guard(state);
    if (event) streams[stream.id()].join(((Event*)event)->point);
  }
  bool queryEvent(void* event) const override {
    return !event || is_over(((Event*)event)->point, ((Event*)event)->asked);
  }
  bool queryStream(const c10::Stream& stream) const override {
    bool asked = true;
    return is_over(point_of((int)stream.id()), asked);
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host(point_of((int)stream.id())); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host(((Event*)event)->point);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_everything(); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    device_memory.recordStream(memory, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return (c10::DeviceIndex)std::exchange(current_device, (int)device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void* memory) const override {
    Guarded guard(state);
    auto* block = block_at((Address)memory);
    return Guard::numbered_device(block ? block->device() : current_device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard on(storage.device());
    auto memory = device_memory.allocate(size);
    if (size_t kept = std::min(size, impl->nbytes())) memcpy(memory.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(size);
  }
};
Hooks hooks;

// ---- tensors

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

Address start_of(const Tensor& tensor) {
  auto* data = (char*)tensor.storage().data();
  TORCH_CHECK(data || !tensor.numel(), "a tensor is used whose memory was freed");
  return (Address)(data ? data + tensor.storage_offset() * tensor.element_size() : nullptr);
}

Range range_of(const Tensor& tensor) {
  if (!tensor.numel()) return {0, 0};
  int64_t extent = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) extent += (tensor.size(i) - 1) * tensor.stride(i);
  return {start_of(tensor), start_of(tensor) + extent * tensor.element_size()};
}

// The same memory as a tensor of the host, which does not keep the memory alive.
Tensor on_host(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob((void*)start_of(tensor), tensor.sizes(), tensor.strides(), [](void*) {}, options);
}

// Record that the host launches an operation on a stream, with the tensors that it reads and writes.
void begin(int stream, const std::string& what, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes) {
  int64_t tick = launch(stream);
  for (auto& each : reads) use({range_of(each), stream, tick, false, what});
  for (auto& each : writes) use({range_of(each), stream, tick, true, what});
}

}  // namespace
