// What NCCL and its neighbours do where a backend of the host would wait, raise or go on: see rules.py for the sources.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <map>
#include <thread>

namespace simulated {

enum class Vendor { kNone, kNccl, kXccl, kHccl };

struct Rules {
  Vendor vendor = Vendor::kNone; // of communicators that are made from now on
  bool failures_are_told = false; // the network reports a lost peer; else its collectives just stay
  bool destroy_waits = true; // for what is pending: the sources disagree
  size_t bytes_of_first_use = 0; // that a communicator takes for each kind of collective
};
Rules& rules();

// Return a variable of ProcessGroupNCCL, or its default.
int64_t setting(const std::string& name);
const std::map<std::string, int64_t>& default_settings();

[[noreturn]] void raise_backend_error(const std::string& text);

void check_types(Vendor vendor, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp* op);

// The turn of a collective on its device: all of them run one after another, in the order in which they were enqueued.
class Turn {
 public:
  explicit Turn(int device);
  ~Turn();
  bool has_come() const;

 private:
  const int device_;
  const uint64_t number_;
};

// One collective that was enqueued.
struct Flight {
  std::string name;
  Clock::time_point created = Clock::now();
  MomentPtr end;
  std::chrono::milliseconds timeout{0};
  std::exception_ptr error; // guarded by the communicator
};
using FlightPtr = std::shared_ptr<Flight>;

// A communicator, with the watchdog of its process group.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(int rank, int size, c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout, std::function<void()> interrupt);

  ~Communicator();

  void start();
  void let_go(); // nobody destroyed it
  void set_timeout(std::chrono::milliseconds timeout);
  Vendor vendor() const {
    return vendor_;
  }

  // Before a collective: raise if it was aborted; connect, and take memory, at the first use.
  void enter(int device, const std::string& kind);
  FlightPtr launch(const std::string& name, MomentPtr end);

  bool is_completed(const FlightPtr& flight);
  void wait(const FlightPtr& flight, std::chrono::milliseconds timeout); // the host waits
  void require_no_error(const FlightPtr& flight);

  // A collective cannot go on: its peer is lost.
  void lose_peer(const std::string& text);
  bool agrees(uint64_t number, const std::string& signature);

  void abort();
  void shutdown();
  c10d::ErrorType error() const {
    return error_;
  }
  bool is_aborted() const {
    return is_aborted_;
  }

  static void start_group();
  static void end_group();
  static void forget_first(); // the next one is the first of the process

 private:
  static void abort_together(const std::vector<std::shared_ptr<Communicator>>& chosen);
  void mark_aborted();
  void connect(int device);
  void watch();
  void monitor();
  void report(c10d::ErrorType error, const std::string& text);
  void free_memory();
  std::vector<FlightPtr> pending();

  const int rank_;
  const int size_;
  const Vendor vendor_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<int64_t> timeout_ms_;
  const std::function<void()> interrupt_;
  const int64_t mode_, blocking_wait_, nonblocking_, nonblocking_seconds_, dump_ms_, heartbeat_seconds_, monitors_, dumps_;

  std::mutex connecting_;
  bool is_connected_ = false;
  int device_ = -1;
  std::map<std::string, size_t> memory_;

  mutable std::mutex mutex_;
  std::vector<FlightPtr> flights_;
  std::string lost_;
  std::atomic<bool> is_aborted_{false};
  std::atomic<bool> is_ended_{false};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::thread watchdog_;
};
using CommunicatorPtr = std::shared_ptr<Communicator>;

} // namespace simulated
