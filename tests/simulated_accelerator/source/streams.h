// Streams that execute later on threads of their own, events, and the model of delays.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;
constexpr int64_t kPoolSize = 32; // as CUDA: the 33rd new stream is the first again

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// --- Devices and contexts

int device_count();
void set_device_count(int count);
int current_device();
void set_current_device(int device);
void check_device(int device);

// Makes a device the current one for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) : before_(current_device()) {
    set_current_device(device);
  }
  ~OnDevice() {
    set_current_device(before_);
  }

 private:
  const int before_;
};

// Note that this process uses a device. A child that is forked later must not: its parent's threads do not exist in it.
void open_context(int device);
bool has_context(int device);
bool in_bad_fork();

// --- Delays

struct Delays {
  double copy_bytes_per_second;
  double copy_latency;
  double kernel_time;
  uint64_t jitter_seed;
};
void set_delays(const Delays& delays);
Delays delays();

// Delays of one piece of work: before it reads, and between reading and writing.
struct Pause {
  Seconds before_reading{0};
  Seconds before_writing{0};
};
Pause pause_of_copy(size_t num_bytes);
Pause pause_of_kernel();
void sleep_for(Seconds time);

// --- Streams

// A point in a stream's work, which other streams and the host wait for.
class Moment {
 public:
  void pass();
  bool has_passed() const;
  void wait() const;
  Clock::time_point when() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
  Clock::time_point when_;
};
using MomentPtr = std::shared_ptr<Moment>;

// Work in order. Its thread starts with the first piece and ends when there was none for a while.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  explicit Queue(int device) : device_(device) {}

  // The host waits if it is far ahead, except `at_once`, which is for callers that hold a lock.
  void add(std::function<void()> work, bool at_once = false);
  MomentPtr record();
  void wait_for(MomentPtr moment); // lets later work wait; the host goes on
  bool is_idle();
  void synchronize(); // lets the host wait; raises the errors of work
  int device() const {
    return device_;
  }

 private:
  void run();
  bool is_full();

  const int device_;
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable has_finished_;
  std::deque<std::function<void()>> waiting_;
  uint64_t added_ = 0;
  uint64_t finished_ = 0;
  bool has_thread_ = false;
};
using QueuePtr = std::shared_ptr<Queue>;

QueuePtr queue_of(const c10::Stream& stream);
c10::Stream current_stream(int device);
c10::Stream default_stream(int device);
c10::Stream new_stream(int device); // one of a pool, as CUDA's
c10::Stream own_stream(int device); // one that nobody shares, until it is released
void release_stream(const c10::Stream& stream);
c10::Stream exchange_stream(const c10::Stream& stream);
QueuePtr current_queue(int device);
void synchronize_device(int device);
bool is_idle(int device);
void forget_errors();

// --- Captures

enum class Capture { kNone, kGlobal, kThreadLocal, kRelaxed };

// [Note: captures] Kernels run as always while a stream is captured; what is modelled is which calls are illegal then.
void begin_capture(Capture mode);
void end_capture(); // raises if an illegal call has invalidated it
bool is_capturing(); // the calling thread
void set_thread_mode(Capture mode); // of the calling thread: how it interacts with captures of others
void set_queries_break_local_captures(bool so); // as on ROCm

// Before a call that is unsafe during a capture: raise, and invalidate the capture.
void check_call(const char* call);
[[noreturn]] void query_of_captured_event();

// --- Counts

void count_call(const std::string& name);
std::vector<std::pair<std::string, uint64_t>> counted_calls();
void forget_counts();
void set_query_time(double seconds); // how long a query of an event takes: torch holds Python's lock meanwhile

// --- Deliberate faults

// Let streams not wait for each other: what relies on it must then be seen to fail.
void set_waits_are_dropped(bool dropped);
bool waits_are_dropped();

// Releases Python's lock for as long as the host waits.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();

 private:
  void* state_ = nullptr;
};

} // namespace simulated
