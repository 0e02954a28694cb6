// The order of work: vector clocks, the uses of memory, and the work that runs late.
//
// One mutex, `state`, guards everything. `running` is held while late work runs. It is never taken while `state` is held.
// Late work holds no tensors, so it does not need Python. Memory that was freed stays mapped until all late work from
// before that has run.
#pragma once

#include <Python.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

// Take a mutex, and release Python's lock while waiting: the thread that holds the mutex may need it to copy a tensor.
template <class Mutex>
void lock(Mutex& mutex) {
  if (mutex.try_lock()) return;
  PyThreadState* python = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  mutex.lock();
  if (python) PyEval_RestoreThread(python);
}

struct Guarded {
  std::recursive_mutex& mutex;
  explicit Guarded(std::recursive_mutex& mutex) : mutex(mutex) { lock(mutex); }
  ~Guarded() { mutex.unlock(); }
};

using Address = uintptr_t;
constexpr int kDevices = 2;

std::recursive_mutex state;
std::mutex running;
// Streams have numbers. Those below `kDevices` are the default streams of the devices with these numbers.
thread_local int current_device = 0;
thread_local int current_streams[kDevices] = {0, 1};  // of this thread, by device
std::vector<int> device_of_stream{0, 1};

int current() { return current_streams[current_device]; }
bool is_default(int stream) { return stream < kDevices; }

std::vector<std::string> mistakes;

void mistake(const std::string& text) {
  if (mistakes.size() < 100) mistakes.push_back(text);
}

// ---- order: vector clocks

// For each stream, the number of its last operation that is included. All earlier ones are included too.
struct Clock {
  std::vector<int64_t> ticks;
  int64_t at(int stream) const { return stream < (int)ticks.size() ? ticks[stream] : 0; }
  void set(int stream, int64_t tick) {
    if ((int)ticks.size() <= stream) ticks.resize(stream + 1);
    ticks[stream] = tick;
  }
  bool covers(const Clock& other) const {
    for (size_t i = 0; i < other.ticks.size(); i++)
      if (other.ticks[i] > at((int)i)) return false;
    return true;
  }
  void join(const Clock& other) {
    if (ticks.size() < other.ticks.size()) ticks.resize(other.ticks.size());
    for (size_t i = 0; i < other.ticks.size(); i++) ticks[i] = std::max(ticks[i], other.ticks[i]);
  }
};

// A point in a stream.
struct Point {
  Clock before;  // all work before it
  Clock late;    // the late part of `before`, as numbers of `Late`
  Clock needs;   // the part of `late` that must run before a later kernel; the rest are copies that have read their source
  void join(const Point& other) {
    before.join(other.before);
    late.join(other.late);
    needs.join(other.needs);
  }
};

std::vector<Point> streams(kDevices);
Clock host;  // what the host knows to be done

// The host launches an operation on a stream. Returns the operation's number.
int64_t launch(int stream) {
  auto& before = streams[stream].before;
  before.join(host);
  before.set(stream, before.at(stream) + 1);
  return before.at(stream);
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
  int device() const { return device_of_stream[home]; }
  std::vector<Use> uses;
  std::set<int> recorded;
};

std::map<Address, Block> blocks;
// For each device: bytes in use, the most since the last reset, and the limit.
size_t live[kDevices] = {}, peak[kDevices] = {}, limit = size_t(1) << 30;

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

// Pinned memory that a copy reads. A loan ends when the host knows that the copy is done.
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
  int stream;
  Clock needs;  // the late work that must run before it, and itself
  std::vector<Range> ranges;
  std::function<void()> run;
};
std::list<Late> late;
int64_t issued = 0;       // the number of the newest late work
int64_t now_running = 0;  // the number of the work that runs now, or 0
int64_t ended = 0;        // how many have run
std::deque<std::pair<int64_t, void*>> graves;  // freed memory, with the number of the newest late work at that time

void bury() {
  int64_t oldest = late.empty() ? issued + 1 : late.front().number;
  if (now_running) oldest = std::min(oldest, now_running);
  for (; !graves.empty() && graves.front().first < oldest; graves.pop_front()) free(graves.front().second);
}

bool is_wanted(const Late& each, const Clock& wanted) { return each.number <= wanted.at(each.stream); }

// Run the wanted late work and what it needs, in the order of launch, which agrees with all events. If other late work is
// running now, it may never end: then a caller that does not insist returns at once.
void run_late(const Clock& wanted, bool insists = true) {
  if (insists)
    lock(running);
  else if (!running.try_lock())
    return;
  std::lock_guard<std::mutex> alone(running, std::adopt_lock);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  while (true) {
    std::list<Late> next;
    {
      Guarded guard(state);
      auto found = std::find_if(late.begin(), late.end(), [&](Late& each) { return is_wanted(each, wanted); });
      if (found == late.end()) return;
      now_running = found->number;
      next.splice(next.end(), late, found);
    }
    next.front().run();
    Guarded guard(state);
    now_running = 0;
    ended++;
    bury();
  }
}

Clock everything_late() {
  Clock all;
  for (auto& each : late) all.join(each.needs);
  return all;
}

void run_what_touches(const Range& range) {
  Clock wanted;
  {
    Guarded guard(state);
    for (auto& each : late)
      for (auto& other : each.ranges)
        if (other.overlaps(range)) wanted.join(each.needs);
  }
  run_late(wanted);
}

// Append late work to a stream.
void enqueue(int stream, bool is_read, std::vector<Range> ranges, std::function<void()> run) {
  auto& point = streams[stream];
  Clock needs = point.needs;
  needs.set(stream, ++issued);
  point.late.join(needs);
  if (is_read) point.needs = needs;
  late.push_back({issued, stream, needs, std::move(ranges), std::move(run)});
}

// A thread calls this at intervals. If nothing has moved since its last call, all late work runs.
void go_on_if_idle() {
  static int64_t seen = 0;
  Clock wanted;
  {
    Guarded guard(state);
    if (seen == issued + ended) wanted = everything_late();
    seen = issued + ended;
  }
  run_late(wanted, false);
}

int64_t host_waits = 0;  // how often the host has waited

// Let the host wait for a point.
void wait_on_host(const Point& point) {
  run_late(point.late);
  Guarded guard(state);
  host_waits++;
  host.join(point.before);
  settle_loans([](const Loan& loan) { return loan.use.known_to(host); });
}

bool is_done(const Point& point) {
  return !now_running && std::none_of(late.begin(), late.end(), [&](Late& each) { return is_wanted(each, point.late); });
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
  }
  wait_on_host(all);
}

}  // namespace
