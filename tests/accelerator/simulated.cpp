// A pretend accelerator in host memory, for tests. What it models, and what not, is said in device.py.
//
// One mutex, `state`, guards everything here. `running` is held while late work runs; it is never taken with `state` held.
// Late work holds no tensor, so that it needs neither Python nor memory that was freed: such memory stays mapped until
// the work that was there before has run.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace {

using at::Tensor;
using Guarded = std::lock_guard<std::recursive_mutex>;
using Address = uintptr_t;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDefault = 0;

std::recursive_mutex state;
std::mutex running;
thread_local int current = kDefault;  // number of this thread's current stream

std::vector<std::string> mistakes;

void mistake(const std::string& text) {
  if (mistakes.size() < 100) mistakes.push_back(text);
}

// ---- order: vector clocks

// For each stream the number of its last operation that is known to be before something.
struct Clock {
  std::vector<int64_t> ticks;
  int64_t at(int stream) const { return stream < (int)ticks.size() ? ticks[stream] : 0; }
  void join(const Clock& other) {
    if (ticks.size() < other.ticks.size()) ticks.resize(other.ticks.size());
    for (size_t i = 0; i < other.ticks.size(); i++) ticks[i] = std::max(ticks[i], other.ticks[i]);
  }
};

// A point in a stream: what is before it, the last late work that a kernel after it needs, and the last before it.
struct Point {
  Clock before;
  int64_t needs = 0, last = 0;
  void join(const Point& other) {
    before.join(other.before);
    needs = std::max(needs, other.needs);
    last = std::max(last, other.last);
  }
};

std::vector<Point> streams(1);
Clock host;  // what the host knows to be done

// The host launches an operation on a stream; the operation's number.
int64_t launch(int stream) {
  auto& before = streams[stream].before;
  before.join(host);
  if ((int)before.ticks.size() <= stream) before.ticks.resize(stream + 1);
  return ++before.ticks[stream];
}

// ---- memory and who used it

struct Range {
  Address low, high;
  bool overlaps(const Range& other) const { return low < other.high && other.low < high; }
  bool contains(const Range& other) const { return low <= other.low && other.high <= high; }
};

struct Use {
  Range range;
  int stream;
  int64_t tick;
  bool writes;
  std::string what;
  bool known_to(const Clock& clock) const { return clock.at(stream) >= tick; }
  std::string text() const { return what + " of stream " + std::to_string(stream); }
};

struct Block {
  size_t size;
  bool pinned;
  int home;  // the stream that allocated it
  std::vector<Use> uses;
  std::set<int> recorded;
};

std::map<Address, Block> blocks;
size_t live = 0, peak = 0, limit = size_t(1) << 30;

Block* block_at(Address address) {
  auto found = blocks.upper_bound(address);
  if (found == blocks.begin()) return nullptr;
  --found;
  return address < found->first + found->second.size ? &found->second : nullptr;
}

bool is_pinned(const void* address) {
  Guarded guard(state);
  auto* block = block_at((Address)address);
  return block && block->pinned;
}

// Pinned memory that a copy reads, until the host knows that the copy is done.
struct Loan {
  Use use;
  std::string content;
};
std::vector<Loan> loans;

void settle_loans(const std::function<bool(const Loan&)>& ends) {
  std::vector<Loan> left;
  for (auto& loan : loans) {
    auto& range = loan.use.range;
    if (memcmp((void*)range.low, loan.content.data(), range.high - range.low))
      mistake("the host changed pinned memory before it knew that " + loan.use.text() + " had read it");
    else if (!ends(loan))
      left.push_back(std::move(loan));
  }
  loans = std::move(left);
}

void use(const Use& now) {
  auto* block = now.range.low < now.range.high ? block_at(now.range.low) : nullptr;
  if (!block) return;
  if (block->pinned && now.writes)
    settle_loans([&](const Loan& loan) { return loan.use.range.overlaps(now.range); });
  auto& before = streams[now.stream].before;
  std::vector<Use> left;
  for (auto& earlier : block->uses) {
    bool ordered = earlier.known_to(before), conflict = earlier.writes || now.writes;
    if (conflict && !ordered && earlier.range.overlaps(now.range))
      mistake(now.text() + (now.writes ? " writes" : " reads") + " what " + earlier.text() +
              (earlier.writes ? " writes" : " reads") + ", and nothing orders them");
    bool replaced = ordered && now.range.contains(earlier.range) && (now.writes || !earlier.writes);
    if (!replaced) left.push_back(std::move(earlier));
  }
  left.push_back(now);
  block->uses = std::move(left);
}

// ---- late work

struct Late {
  int64_t number;
  std::vector<Range> ranges;
  std::function<void()> run;
};
std::deque<Late> late;
int64_t issued = 0, finished = 0;
std::deque<std::pair<int64_t, void*>> graves;  // freed memory, and the late work before that

void bury() {
  for (; !graves.empty() && graves.front().first <= finished; graves.pop_front()) free(graves.front().second);
}

// Run late work up to a number, in the order of its launch, which no event contradicts.
void run_until(int64_t number) {
  std::lock_guard<std::mutex> alone(running);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  while (true) {
    Late next;
    {
      Guarded guard(state);
      if (late.empty() || late.front().number > number) return;
      next = std::move(late.front());
      late.pop_front();
    }
    next.run();
    Guarded guard(state);
    finished = next.number;
    bury();
  }
}

void run_what_touches(const Range& range) {
  int64_t last = 0;
  {
    Guarded guard(state);
    for (auto& each : late)
      for (auto& other : each.ranges)
        if (other.overlaps(range)) last = each.number;
  }
  run_until(last);
}

int64_t enqueue(std::vector<Range> ranges, std::function<void()> run) {
  late.push_back({++issued, std::move(ranges), std::move(run)});
  return issued;
}

// For a thread that calls this now and then: if nothing has moved since the last call, all late work runs.
void go_on_if_idle() {
  static int64_t seen = 0;
  int64_t last = 0;
  {
    Guarded guard(state);
    int64_t moved = issued + finished;
    if (seen == moved) last = issued;
    seen = moved;
  }
  run_until(last);
}

// The host waits for a point.
void wait_on_host(const Point& point) {
  run_until(point.last);
  Guarded guard(state);
  host.join(point.before);
  settle_loans([](const Loan& loan) { return loan.use.known_to(host); });
}

Point point_of(int stream) {
  Guarded guard(state);
  return streams[stream];
}

void wait_for_everything() {
  Point all;
  {
    Guarded guard(state);
    for (auto& each : streams) all.join(each);
    all.last = issued;
  }
  wait_on_host(all);
}

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
    live -= block.size;
    Clock before = streams[block.home].before;
    before.join(host);
    bool wrong = false;
    for (auto& each : block.uses)
      if (!each.known_to(before) && !block.recorded.count(each.stream)) {
        wrong = true;
        mistake("memory of stream " + std::to_string(block.home) + " is freed while " + each.text() +
                " may still use it: nothing waited for that, and there was no record_stream");
      }
    if (wrong || issued == finished) memset(memory, 0xFF, block.size);
  }
  blocks.erase(found);
  graves.push_back({issued, memory});
  bury();
}

void* take(size_t size, size_t alignment, bool pinned) {
  if (!size) return nullptr;
  Guarded guard(state);
  TORCH_CHECK_WITH(OutOfMemoryError, pinned || live + size <= limit, "sim out of memory: ", size, " bytes wanted, ",
                   live, " of ", limit, " are in use");
  void* memory;
  if (posix_memalign(&memory, alignment, (size + 511) / 512 * 512)) throw std::bad_alloc();
  memset(memory, 0xFF, size);
  auto& block = blocks[(Address)memory] = Block{size, pinned, current};
  if (!pinned) {
    live += size;
    peak = std::max(peak, live);
    // A caching allocator hands on what tensors of the same stream have used, maybe just now.
    Range whole{(Address)memory, (Address)memory + size};
    block.uses.push_back({whole, current, launch(current), true, "an earlier use of that memory"});
  }
  return memory;
}

struct DeviceMemory : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = take(size, 512, false);
    return {memory, memory, raw_deleter(), c10::Device(kSim, 0)};
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
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Guarded guard(state);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      bytes->current = (int64_t)live;
      bytes->peak = (int64_t)peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    Guarded guard(state);
    peak = live;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Guarded guard(state);
    return {limit - live, limit};
  }
};

// As torch's: memory that dies is used again only after the copies from and to it.
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

// Memory that was there before is pinned, as by cudaHostRegister.
void register_memory(Address address, size_t size) {
  Guarded guard(state);
  blocks[address] = Block{size, true, kDefault};
}

void unregister_memory(Address address) {
  {
    Guarded guard(state);
    auto& block = blocks.at(address);
    Range range{address, address + block.size};
    for (auto& each : block.uses)
      if (!each.known_to(host)) mistake("pinned memory is given back before the host knows that " + each.text() + " is done");
    loans.erase(
        std::remove_if(loans.begin(), loans.end(), [&](Loan& loan) { return loan.use.range.overlaps(range); }),
        loans.end());
    blocks.erase(address);
  }
  run_until(INT64_MAX);  // the memory will be unmapped
}

// ---- streams and events

struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::Device only() const { return c10::Device(kSim, 0); }
  c10::Stream numbered(int stream) const { return c10::Stream(c10::Stream::UNSAFE, only(), stream); }
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Device getDevice() const override { return only(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return numbered(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return numbered(kDefault); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Guarded guard(state);
    streams.emplace_back();
    return numbered((int)streams.size() - 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto former = numbered(current);
    current = (int)stream.id();
    return former;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Point();
    *(Point*)*event = point_of((int)stream.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Point*)event; }
  void block(void* event, const c10::Stream& stream) const override {
    Guarded guard(state);
    if (event) streams[stream.id()].join(*(Point*)event);
  }
  bool is_over(const Point& point) const {
    int64_t next = 0;
    {
      Guarded guard(state);
      if (finished >= point.last) {
        host.join(point.before);
        return true;
      }
      if (!late.empty()) next = late.front().number;
    }
    run_until(next);  // a host that asks again and again gives the device time
    return false;
  }
  bool queryEvent(void* event) const override { return !event || is_over(*(Point*)event); }
  bool queryStream(const c10::Stream& stream) const override { return is_over(point_of((int)stream.id())); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host(point_of((int)stream.id())); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host(*(Point*)event);
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
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kSim, 0); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
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

// The same memory as a tensor of the host, which does not keep it.
Tensor on_host(const Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob((void*)start_of(tensor), tensor.sizes(), tensor.strides(), [](void*) {}, options);
}

// The host launches an operation on a stream: what it reads and what it writes.
void begin(int stream, const std::string& what, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes) {
  int64_t tick = launch(stream);
  for (auto& each : reads) use({range_of(each), stream, tick, false, what});
  for (auto& each : writes) use({range_of(each), stream, tick, true, what});
}

// ---- operators

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// What this stream launched and waits for has run, so that a kernel may read it.
void run_what_is_needed() { run_until(point_of(current).needs); }

// From pinned memory, to it, or between tensors of the device: late. From the default stream a copy to pinned memory
// has read its source, but not written yet: so later kernels need not wait for it.
void copy_late(const Tensor& from, const Tensor& to, const std::string& what) {
  bool out = !on_device(to), in = !on_device(from), snapshot = out && current == kDefault;
  Range source = range_of(from), target = range_of(to);
  if (in || out) run_what_touches(in ? source : target);
  if (snapshot) run_what_is_needed();
  Tensor a = on_host(from), b = on_host(to);
  if (snapshot) a = a.clone();
  Guarded guard(state);
  begin(current, what, {from}, {to});
  // Who reads too early reads this.
  if (out && to.is_contiguous()) memset((void*)target.low, 0xFF, target.high - target.low);
  if (in) {
    auto content = std::string((char*)source.low, source.high - source.low);
    loans.push_back({{source, current, streams[current].before.at(current), false, what}, std::move(content)});
  }
  auto& point = streams[current];
  point.last = enqueue({source, target}, [a, b] { b.copy_(a); });
  if (!snapshot) point.needs = point.last;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool in = !on_device(from), out = !on_device(to);
  std::string what = in ? "a copy from the host" : out ? "a copy to the host" : "a copy";
  bool is_late = in || out ? non_blocking && is_pinned((in ? from : to).const_data_ptr()) : current != kDefault;
  if (!to.numel()) return to;
  if (is_late) {
    copy_late(from, to, what);
    return to;
  }
  run_what_is_needed();
  if (in || out) run_what_touches(range_of(in ? from : to));
  {
    Guarded guard(state);
    begin(current, what, {from}, {to});
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  on_host(to).copy_(on_host(from));
  if (in || out) wait_on_host(point_of(current));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  {
    Guarded guard(state);
    begin(current, "item", {tensor}, {});
  }
  wait_on_host(point_of(current));
  return at::_local_scalar_dense(on_host(tensor));
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  device_memory.recordStream(tensor.storage().data_ptr(), stream);
}

// 0 is the one made of plain operators.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}

// One call of an operator's kernel for the CPU, on the memory of tensors of the device.
struct Call {
  const c10::FunctionSchema& schema;
  torch::jit::Stack& stack;
  size_t first;  // of the arguments in the stack
  std::vector<c10::IValue> given;
  std::vector<Tensor> reads, writes, stand_ins, originals;

  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema(op.schema()), stack(stack), first(stack.size() - schema.arguments().size()),
        given(stack.begin() + (int64_t)first, stack.end()) {
    for (size_t i = 0; i < given.size(); i++) {
      auto* alias = schema.arguments()[i].alias_info();
      stack[first + i] = argument(given[i], alias && alias->isWrite());
    }
  }

  c10::IValue argument(const c10::IValue& value, bool writes) {
    if (value.isTensor()) return stand_in(value.toTensor(), writes);
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(stand_in(each, writes));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
        list.push_back(each ? std::optional<Tensor>(stand_in(*each, writes)) : each);
      return list;
    }
    return value;
  }

  Tensor stand_in(const Tensor& tensor, bool is_written) {
    if (!on_device(tensor)) return tensor;
    (is_written ? writes : reads).push_back(tensor);
    // What an `out` without elements becomes is the kernel's to say.
    bool to_be_sized = is_written && !tensor.numel();
    auto made = to_be_sized ? at::empty({0}, at::TensorOptions().dtype(tensor.dtype())) : on_host(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    originals.push_back(tensor);
    stand_ins.push_back(made);
    return made;
  }

  // Replaces what the kernel returned by tensors of the device; whether there was anything else than tensors.
  bool take_results() {
    bool values = false;
    size_t count = schema.returns().size(), at = stack.size() - count;
    for (size_t i = 0; i < count; i++) {
      auto& slot = stack[at + i];
      if (slot.isTensor()) {
        slot = result(slot.toTensor());
      } else if (slot.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : slot.toTensorVector()) list.push_back(result(each));
        slot = list;
      } else {
        values = values || !slot.isNone();
      }
    }
    return values;
  }

  Tensor result(const Tensor& made) {
    if (!made.defined() || on_device(made)) return made;
    for (size_t i = 0; i < stand_ins.size(); i++) {
      if (made.is_same(stand_ins[i])) {
        if (originals[i].sizes() != made.sizes()) fill(at::native::resize_(originals[i], made.sizes()), made);
        return originals[i];
      }
      if (made.numel() && made.storage().data() == stand_ins[i].storage().data())  // a view
        return at::native::as_strided_tensorimpl(originals[i], made.sizes(), made.strides(),
                                                 originals[i].storage_offset() + made.storage_offset());
    }
    auto kept = empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, {}, {});
    fill(kept, made);
    return kept;
  }

  void fill(const Tensor& kept, const Tensor& made) {
    on_host(kept).copy_(made);
    Guarded guard(state);
    begin(current, schema.name(), {}, {kept});
  }
};

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_what_is_needed();
  Call call(op, *stack);
  {
    Guarded guard(state);
    begin(current, call.schema.name(), call.reads, call.writes);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (call.take_results()) wait_on_host(point_of(current));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", choose_attention);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", at::native::resize_);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
}

// ---- collectives

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
    return finished >= end.last;
  }
};

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
    own.needs = own.last = enqueue(std::move(ranges), std::move(run));
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

PYBIND11_MODULE(simulated, module) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  using released = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo, int64_t milliseconds) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Collectives>(gloo, milliseconds));
  });
  module.def("register_memory", &register_memory, released());
  module.def("unregister_memory", &unregister_memory, released());
  module.def("go_on_if_idle", &go_on_if_idle, released());
  module.def("pending", [] { return issued - finished; }, released());
  module.def("mistakes", [] {
    Guarded guard(state);
    settle_loans([](const Loan&) { return false; });
    auto found = std::move(mistakes);
    mistakes.clear();
    return found;
  }, released());
  module.def("set_limit", [](size_t bytes) { limit = bytes; }, released());
}
