#include "streams.h"

#include <Python.h>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <random>
#include <thread>

namespace simulated {

namespace {

constexpr size_t kLongestQueue = 1024; // the host waits where it is further ahead, as with CUDA
constexpr auto kIdleThreadEnds = std::chrono::milliseconds(500);

struct Device {
  std::atomic<bool> has_context{false};
  std::map<c10::StreamId, QueuePtr> streams;
  int64_t next_stream = 0;
  c10::StreamId next_own_stream = kPoolSize + 1;
  std::string error; // of work that failed: whoever waits next gets it
};

struct State {
  std::mutex mutex;
  std::atomic<int> count{2};
  std::array<Device, kMostDevices> devices;
  std::atomic<bool> any_context{false};
  std::atomic<bool> bad_fork{false};
  std::atomic<bool> drop_waits{false};

  std::mutex delays_mutex;
  Delays delays{4e9, 50e-6, 50e-6, 0};
  std::mt19937_64 jitter{0};
};

// Never destroyed: threads may use it until the process ends.
State& state() {
  static State* const instance = new State();
  return *instance;
}

thread_local int the_current_device = 0;
thread_local std::array<int64_t, kMostDevices> the_current_streams{};

void note_fork() {
  if (state().any_context) {
    state().bad_fork = true;
  }
}

} // namespace

// --- Devices and contexts

int device_count() {
  return state().count;
}

void set_device_count(int count) {
  TORCH_CHECK(count >= 1 && count <= kMostDevices, "1 to ", kMostDevices, " devices, not ", count);
  state().count = count;
}

int current_device() {
  return the_current_device;
}

void set_current_device(int device) {
  check_device(device);
  the_current_device = device;
}

void check_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(),
      "invalid device ordinal ",
      device,
      ": there are ",
      device_count(),
      " devices");
}

void open_context(int device) {
  check_device(device);
  TORCH_CHECK(
      !state().bad_fork,
      "Cannot re-initialize the device in a forked subprocess. To use it with multiprocessing, use the 'spawn' start method.");
  if (!state().devices[device].has_context.exchange(true) && !state().any_context.exchange(true)) {
    pthread_atfork(nullptr, nullptr, note_fork);
  }
}

bool has_context(int device) {
  return device >= 0 && device < kMostDevices && !state().bad_fork && state().devices[device].has_context;
}

bool in_bad_fork() {
  return state().bad_fork;
}

// --- Delays

void set_delays(const Delays& delays) {
  std::lock_guard lock(state().delays_mutex);
  state().delays = delays;
  state().jitter.seed(delays.jitter_seed);
}

Delays delays() {
  std::lock_guard lock(state().delays_mutex);
  return state().delays;
}

namespace {

// Take between half and one and a half times the time, and now and then much longer: so a race that is nearly always won
// shows, too.
Pause pause_of(double seconds) {
  std::lock_guard lock(state().delays_mutex);
  if (seconds <= 0) {
    return {};
  }
  std::uniform_real_distribution<double> part(0, 1);
  double factor = part(state().jitter) + 0.5;
  if (part(state().jitter) < 1.0 / 64) {
    factor *= 16;
  }
  const double before = part(state().jitter);
  return {Seconds(seconds * factor * before), Seconds(seconds * factor * (1 - before))};
}

} // namespace

Pause pause_of_copy(size_t num_bytes) {
  const Delays now = delays();
  const double transfer = now.copy_bytes_per_second > 0 ? num_bytes / now.copy_bytes_per_second : 0;
  return pause_of(now.copy_latency + transfer);
}

Pause pause_of_kernel() {
  return pause_of(delays().kernel_time);
}

void sleep_for(Seconds time) {
  if (time.count() > 0) {
    std::this_thread::sleep_for(time);
  }
}

// --- Moments

void Moment::pass() {
  {
    std::lock_guard lock(mutex_);
    passed_ = true;
    when_ = Clock::now();
  }
  changed_.notify_all();
}

bool Moment::has_passed() const {
  std::lock_guard lock(mutex_);
  return passed_;
}

void Moment::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return passed_; });
}

Clock::time_point Moment::when() const {
  std::lock_guard lock(mutex_);
  return when_;
}

// --- Streams

namespace {

void keep_error(int device, const std::string& message) {
  std::lock_guard lock(state().mutex);
  auto& kept = state().devices[device].error;
  kept = kept.empty() ? message : kept;
}

} // namespace

void Queue::add(std::function<void()> work, bool at_once) {
  open_context(device_);
  if (!at_once && is_full()) {
    WithoutGil released; // whoever holds the mutex must never wait for Python's lock
    std::unique_lock lock(mutex_);
    has_finished_.wait(lock, [this] { return waiting_.size() < kLongestQueue; });
  }
  std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(work));
  ++added_;
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  has_work_.notify_one();
}

void Queue::run() {
  at::init_num_threads(); // as many as the process was told to use: else sums differ in the last bit
  std::unique_lock lock(mutex_);
  while (true) {
    if (!has_work_.wait_for(lock, kIdleThreadEnds, [this] { return !waiting_.empty(); })) {
      has_thread_ = false;
      return;
    }
    {
      auto work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      try {
        work();
      } catch (const c10::Error& error) {
        keep_error(device_, error.what_without_backtrace());
      } catch (const std::exception& error) {
        keep_error(device_, error.what());
      }
    } // what the work holds is freed before it counts as finished
    lock.lock();
    ++finished_;
    has_finished_.notify_all();
  }
}

MomentPtr Queue::record() {
  auto moment = std::make_shared<Moment>();
  if (is_idle()) {
    moment->pass();
  } else {
    add([moment] { moment->pass(); });
  }
  return moment;
}

void Queue::wait_for(MomentPtr moment) {
  if (!waits_are_dropped() && !moment->has_passed()) {
    add([moment = std::move(moment)] { moment->wait(); });
  }
}

bool Queue::is_idle() {
  std::lock_guard lock(mutex_);
  return added_ == finished_;
}

bool Queue::is_full() {
  std::lock_guard lock(mutex_);
  return waiting_.size() >= kLongestQueue;
}

void Queue::synchronize() {
  if (!is_idle()) {
    WithoutGil released;
    std::unique_lock lock(mutex_);
    const uint64_t last = added_;
    has_finished_.wait(lock, [&] { return finished_ >= last; });
  }
  std::string error;
  {
    std::lock_guard lock(state().mutex);
    error.swap(state().devices[device_].error);
  }
  TORCH_CHECK(error.empty(), "an earlier operation failed on device ", device_, ": ", error);
}

QueuePtr queue_of(const c10::Stream& stream) {
  const int device = stream.device_index();
  check_device(device);
  std::lock_guard lock(state().mutex);
  auto& queue = state().devices[device].streams[stream.id()];
  if (!queue) {
    queue = std::make_shared<Queue>(device);
  }
  return queue;
}

namespace {

c10::Stream make_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
}

} // namespace

c10::Stream current_stream(int device) {
  check_device(device);
  return make_stream(device, the_current_streams[device]);
}

c10::Stream default_stream(int device) {
  return make_stream(device, 0);
}

c10::Stream new_stream(int device) {
  open_context(device);
  count_call("stream");
  std::lock_guard lock(state().mutex);
  const int64_t number = state().devices[device].next_stream++;
  return make_stream(device, 1 + number % kPoolSize);
}

c10::Stream own_stream(int device) {
  open_context(device);
  std::lock_guard lock(state().mutex);
  return make_stream(device, state().devices[device].next_own_stream++);
}

void release_stream(const c10::Stream& stream) {
  std::lock_guard lock(state().mutex);
  state().devices[stream.device_index()].streams.erase(stream.id());
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const int device = stream.device_index();
  const auto before = current_stream(device);
  the_current_streams[device] = stream.id();
  return before;
}

QueuePtr current_queue(int device) {
  return queue_of(current_stream(device));
}

namespace {

std::vector<QueuePtr> queues_of(int device) {
  std::vector<QueuePtr> queues;
  std::lock_guard lock(state().mutex);
  for (const auto& [id, queue] : state().devices[device].streams) {
    queues.push_back(queue);
  }
  return queues;
}

} // namespace

void synchronize_device(int device) {
  open_context(device);
  for (const auto& queue : queues_of(device)) {
    queue->synchronize();
  }
}

bool is_idle(int device) {
  const auto queues = queues_of(device);
  return std::all_of(queues.begin(), queues.end(), [](const auto& queue) { return queue->is_idle(); });
}

void forget_errors() {
  std::lock_guard lock(state().mutex);
  for (auto& device : state().devices) {
    device.error.clear();
  }
}

// --- Captures

namespace {

struct Captured {
  std::mutex mutex;
  Capture mode = Capture::kNone;
  std::thread::id thread;
  bool is_invalid = false;
  bool queries_break_local = false;
};

Captured& captured() {
  static auto* const instance = new Captured();
  return *instance;
}

thread_local Capture mode_of_thread = Capture::kGlobal;

bool is_query(const std::string& call) {
  return call.find("Query") != std::string::npos;
}

} // namespace

void begin_capture(Capture mode) {
  std::lock_guard lock(captured().mutex);
  TORCH_CHECK(captured().mode == Capture::kNone, "a capture is under way");
  captured().mode = mode;
  captured().thread = std::this_thread::get_id();
  captured().is_invalid = false;
}

void end_capture() {
  std::lock_guard lock(captured().mutex);
  TORCH_CHECK(
      captured().thread == std::this_thread::get_id(),
      "CUDA error: attempt to terminate a thread-local capture sequence from another thread (cudaErrorStreamCaptureWrongThread)");
  captured().mode = Capture::kNone;
  TORCH_CHECK(
      !captured().is_invalid, "CUDA error: operation failed due to a previous error during capture (cudaErrorStreamCaptureInvalidated)");
}

bool is_capturing() {
  std::lock_guard lock(captured().mutex);
  return captured().mode != Capture::kNone && captured().thread == std::this_thread::get_id();
}

void set_thread_mode(Capture mode) {
  mode_of_thread = mode;
}

void set_queries_break_local_captures(bool so) {
  std::lock_guard lock(captured().mutex);
  captured().queries_break_local = so;
}

void check_call(const char* call) {
  std::lock_guard lock(captured().mutex);
  const bool is_own = captured().thread == std::this_thread::get_id();
  const bool is_rocm = captured().queries_break_local && is_query(call);
  bool is_illegal = false;
  if (captured().mode == Capture::kGlobal) {
    is_illegal = is_own || mode_of_thread == Capture::kGlobal || is_rocm;
  } else if (captured().mode == Capture::kThreadLocal) {
    is_illegal = is_own || is_rocm;
  }
  if (is_illegal) {
    captured().is_invalid = true;
    TORCH_CHECK(
        false, "CUDA error: operation not permitted when stream is capturing (cudaErrorStreamCaptureUnsupported): ", call);
  }
}

void query_of_captured_event() {
  std::lock_guard lock(captured().mutex);
  captured().is_invalid = true;
  TORCH_CHECK(false, "CUDA error: operation not permitted on an event last recorded in a capturing stream (cudaErrorCapturedEvent)");
}

// --- Counts

namespace {

struct Counted {
  std::mutex mutex;
  std::map<std::string, uint64_t> calls;
  std::atomic<double> query_time{0};
};

Counted& counted() {
  static auto* const instance = new Counted();
  return *instance;
}

} // namespace

void count_call(const std::string& name) {
  const bool asks = is_query(name);
  {
    std::lock_guard lock(counted().mutex);
    ++counted().calls[name];
    if (asks) {
      ++counted().calls[name + "@" + std::to_string(gettid())];
    }
  }
  if (asks) {
    sleep_for(Seconds(counted().query_time.load()));
  }
}

std::vector<std::pair<std::string, uint64_t>> counted_calls() {
  std::lock_guard lock(counted().mutex);
  return {counted().calls.begin(), counted().calls.end()};
}

void forget_counts() {
  std::lock_guard lock(counted().mutex);
  counted().calls.clear();
}

void set_query_time(double seconds) {
  counted().query_time = seconds;
}

// --- Deliberate faults

void set_waits_are_dropped(bool dropped) {
  state().drop_waits = dropped;
}

bool waits_are_dropped() {
  return state().drop_waits;
}

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    state_ = PyEval_SaveThread();
  }
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

} // namespace simulated
