#include "rulebook.h"

#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace simulated {

namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr auto kWatchdogPeriod = Milliseconds(100);
constexpr auto kPollPeriod = Milliseconds(1);

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Communicator>> all;
  uint64_t made = 0;
  std::atomic<bool> dump_is_asked{false}; // never reset, as torch's
};

// Never destroyed: threads may use it until the process ends.
Registry& registry() {
  static auto* const instance = new Registry();
  return *instance;
}

thread_local int group_depth = 0;
thread_local std::vector<CommunicatorPtr> aborted_in_group;

struct Turns {
  std::mutex mutex;
  uint64_t taken = 0;
  std::set<uint64_t> open;
};

Turns& turns_of(int device) {
  static auto* const all = new std::array<Turns, kMostDevices>();
  return (*all)[device];
}

void end_process(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::abort(); // no Python, no exit hooks
}

} // namespace

Rules& rules() {
  static auto* const instance = new Rules();
  return *instance;
}

const std::map<std::string, int64_t>& default_settings() {
  static const auto* const defaults = new std::map<std::string, int64_t>{
      {"ASYNC_ERROR_HANDLING", 3},
      {"BLOCKING_WAIT", 0},
      {"ENABLE_MONITORING", 1},
      {"HEARTBEAT_TIMEOUT_SEC", 480},
      {"DUMP_ON_TIMEOUT", 1},
      {"WAIT_TIMEOUT_DUMP_MILSEC", 15000},
      {"ENABLE_TIMING", 0},
      {"USE_COMM_NONBLOCKING", 0},
      {"NONBLOCKING_TIMEOUT", 1800},
  };
  return *defaults;
}

int64_t setting(const std::string& name) {
  const char* const found = std::getenv(("TORCH_NCCL_" + name).c_str());
  return found == nullptr || *found == '\0' ? default_settings().at(name) : std::atoll(found);
}

void raise_backend_error(const std::string& text) {
  C10_THROW_ERROR(DistBackendError, text);
}

// --- What is carried

void check_types(Vendor vendor, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp* op) {
  using Kind = c10d::ReduceOp::RedOpType;
  const auto kind = op == nullptr ? Kind::SUM : Kind(op->op_);
  for (const auto& tensor : tensors) {
    const auto type = tensor.scalar_type();
    const bool is_known = type == at::kChar || type == at::kByte || type == at::kInt || type == at::kLong ||
        type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble || type == at::kBool ||
        at::isFloat8Type(type) || at::isComplexType(type);
    TORCH_CHECK_TYPE(is_known, "Input tensor data type is not supported for NCCL process group: ", type);
    TORCH_CHECK_TYPE(vendor != Vendor::kHccl || type != at::kDouble, "HCCL does not reduce ", type);
    TORCH_CHECK_TYPE(
        op == nullptr || !at::isFloat8Type(type) || type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2,
        "Unsupported Float8 type for NCCL reduction");
    TORCH_CHECK_TYPE(type != at::kBool || kind != Kind::AVG, "Cannot use ReduceOp.AVG with boolean inputs");
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "Tensors must be dense");
    TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    TORCH_CHECK_VALUE(
        !at::isComplexType(type) || kind == Kind::SUM || kind == Kind::AVG || kind == Kind::PREMUL_SUM,
        "this reduction does not take complex numbers");
  }
  TORCH_CHECK_VALUE(kind != Kind::BAND, "Cannot use ReduceOp.BAND with NCCL");
  TORCH_CHECK_VALUE(kind != Kind::BOR, "Cannot use ReduceOp.BOR with NCCL");
  TORCH_CHECK_VALUE(kind != Kind::BXOR, "Cannot use ReduceOp.BXOR with NCCL");
  TORCH_CHECK_VALUE(vendor != Vendor::kHccl || kind != Kind::AVG, "Cannot use ReduceOp.AVG with HCCL");
}

// --- Turns

namespace {

uint64_t take_turn(int device) {
  auto& turns = turns_of(device);
  std::lock_guard lock(turns.mutex);
  turns.open.insert(++turns.taken);
  return turns.taken;
}

} // namespace

Turn::Turn(int device) : device_(device), number_(take_turn(device)) {}

Turn::~Turn() {
  auto& turns = turns_of(device_);
  std::lock_guard lock(turns.mutex);
  turns.open.erase(number_);
}

bool Turn::has_come() const {
  auto& turns = turns_of(device_);
  std::lock_guard lock(turns.mutex);
  return *turns.open.begin() == number_;
}

// --- Communicators

Communicator::Communicator(
    int rank, int size, c10::intrusive_ptr<c10d::Store> store, Milliseconds timeout, std::function<void()> interrupt)
    : rank_(rank),
      size_(size),
      vendor_(rules().vendor),
      store_(std::move(store)),
      timeout_ms_(timeout.count()),
      interrupt_(std::move(interrupt)),
      mode_(setting("ASYNC_ERROR_HANDLING")),
      blocking_wait_(setting("BLOCKING_WAIT")),
      nonblocking_(setting("USE_COMM_NONBLOCKING")),
      nonblocking_seconds_(setting("NONBLOCKING_TIMEOUT")),
      dump_ms_(setting("WAIT_TIMEOUT_DUMP_MILSEC")),
      heartbeat_seconds_(setting("HEARTBEAT_TIMEOUT_SEC")),
      monitors_(setting("ENABLE_MONITORING")),
      dumps_(setting("DUMP_ON_TIMEOUT")) {}

void Communicator::start() {
  bool is_first;
  {
    std::lock_guard lock(registry().mutex);
    registry().all.push_back(weak_from_this());
    is_first = registry().made++ == 0;
  }
  if (vendor_ != Vendor::kNccl) {
    return;
  }
  if (!blocking_wait_) {
    watchdog_ = std::thread([self = shared_from_this()] { self->watch(); });
  }
  if (is_first && monitors_) {
    std::thread([self = shared_from_this()] { self->monitor(); }).detach();
  }
}

Communicator::~Communicator() {
  if (watchdog_.joinable()) {
    watchdog_.detach();
  }
}

void Communicator::let_go() {
  mark_aborted();
}

void Communicator::forget_first() {
  std::lock_guard lock(registry().mutex);
  registry().made = 0;
  registry().dump_is_asked = false;
}

void Communicator::set_timeout(Milliseconds timeout) {
  timeout_ms_ = timeout.count();
}

void Communicator::enter(int device, const std::string& kind) {
  if (is_aborted_) {
    raise_backend_error(c10::str("NCCL communicator was aborted on rank ", rank_, "."));
  }
  {
    WithoutGil released;
    std::lock_guard lock(connecting_);
    if (!is_connected_) {
      connect(device);
    }
    const size_t wanted = memory_.count(kind) > 0 ? 0 : rules().bytes_of_first_use;
    if (wanted > 0 && !take_outside(device, wanted)) {
      raise_backend_error(c10::str(
          "NCCL error: ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc ", wanted, " bytes"));
    }
    memory_[kind] += wanted;
  }
}

// In two phases: until rank 0 has published the id of the communicator, within the timeout; and until all have come,
// without one. No work exists yet, so neither the watchdog nor the recorder knows of it.
void Communicator::connect(int device) {
  device_ = device;
  const auto first_until = Clock::now() + Milliseconds(timeout_ms_);
  if (rank_ == 0) {
    store_->set("0", "id");
  }
  while (!store_->check({"0"})) {
    if (Clock::now() > first_until) {
      raise_backend_error(c10::str("[", rank_, "] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store. "
                                   "Rank 0 may have died."));
    }
    std::this_thread::sleep_for(kPollPeriod);
  }
  const auto place = c10::str(device), mine = c10::str(rank_);
  const auto found = store_->compareSet("device/" + place, std::vector<uint8_t>{}, std::vector<uint8_t>(mine.begin(), mine.end()));
  if (std::string(found.begin(), found.end()) != mine) {
    raise_backend_error(c10::str("Duplicate GPU detected : rank ", rank_, " and rank ", std::string(found.begin(), found.end()), " both on device ", device));
  }
  const bool hangs = std::getenv("SIMULATED_P2P_FAULT") != nullptr && std::getenv("NCCL_P2P_DISABLE") == nullptr;
  store_->add("arrived", 1);
  const auto until = Clock::now() + std::chrono::seconds(nonblocking_seconds_);
  while (hangs || store_->add("arrived", 0) < size_) {
    if (nonblocking_ && (is_aborted_ || Clock::now() > until)) {
      raise_backend_error(is_aborted_ ? c10::str("NCCL communicator was aborted on rank ", rank_, ".")
                                      : "NCCL timeout when waiting for nonblocking call to become successful.");
    }
    std::this_thread::sleep_for(kPollPeriod);
  }
  is_connected_ = true;
}

FlightPtr Communicator::launch(const std::string& name, MomentPtr end) {
  auto flight = std::make_shared<Flight>();
  flight->name = name;
  flight->end = std::move(end);
  flight->timeout = Milliseconds(timeout_ms_);
  std::lock_guard lock(mutex_);
  flights_.push_back(flight);
  return flight;
}

std::vector<FlightPtr> Communicator::pending() {
  std::lock_guard lock(mutex_);
  flights_.erase(
      std::remove_if(flights_.begin(), flights_.end(), [](const auto& flight) { return flight->end->has_passed(); }),
      flights_.end());
  return flights_;
}

bool Communicator::is_completed(const FlightPtr& flight) {
  std::lock_guard lock(mutex_);
  if (flight->error) {
    return true;
  }
  if (!lost_.empty()) { // the state of the communicator, as ncclCommGetAsyncError gives it
    flight->error = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, 0}, "NCCL communicator error: " + lost_));
    return true;
  }
  return flight->end->has_passed();
}

void Communicator::require_no_error(const FlightPtr& flight) {
  std::lock_guard lock(mutex_);
  if (flight->error) {
    std::rethrow_exception(flight->error);
  }
}

void Communicator::wait(const FlightPtr& flight, Milliseconds timeout) {
  if (timeout.count() == 0 && blocking_wait_) {
    timeout = flight->timeout;
  }
  const bool ignores = vendor_ == Vendor::kHccl && std::getenv("HCCL_BLOCKING_WAIT") == nullptr;
  if (timeout.count() != 0 && !ignores) {
    WithoutGil released;
    while (!is_completed(flight)) {
      if (Clock::now() - flight->created >= timeout) { // since the creation of the work, not since the call
        {
          std::lock_guard lock(mutex_);
          flight->error = std::make_exception_ptr(c10::DistBackendError(
              {__func__, __FILE__, 0},
              c10::str("[Rank ", rank_, "] Work ", flight->name, " timed out in blocking wait.")));
        }
        if (vendor_ != Vendor::kXccl) {
          abort_together({shared_from_this()});
        }
        break;
      }
      std::this_thread::sleep_for(kPollPeriod);
    }
  }
  require_no_error(flight);
}

void Communicator::lose_peer(const std::string& text) {
  if (rules().failures_are_told) {
    std::lock_guard lock(mutex_);
    lost_ = text;
  }
}

bool Communicator::agrees(uint64_t number, const std::string& signature) {
  const auto found = store_->compareSet(
      "order/" + std::to_string(number), std::vector<uint8_t>{}, std::vector<uint8_t>(signature.begin(), signature.end()));
  return std::string(found.begin(), found.end()) == signature;
}

// --- The end

void Communicator::start_group() {
  ++group_depth;
}

void Communicator::end_group() {
  if (--group_depth == 0) {
    auto chosen = std::move(aborted_in_group);
    aborted_in_group.clear();
    abort_together(chosen);
  }
}

void Communicator::abort() {
  if (vendor_ == Vendor::kXccl) {
    return; // of the base class: nothing
  }
  if (group_depth > 0) {
    aborted_in_group.push_back(shared_from_this());
  } else {
    abort_together({shared_from_this()});
  }
}

void Communicator::mark_aborted() {
  is_ended_ = true;
  if (!is_aborted_.exchange(true)) {
    interrupt_();
    free_memory();
  }
}

// An abort may synchronise the device: it waits for what other communicators have there, unless they are aborted in the
// same call.
void Communicator::abort_together(const std::vector<CommunicatorPtr>& chosen) {
  WithoutGil released;
  std::vector<CommunicatorPtr> others;
  {
    std::lock_guard lock(registry().mutex);
    for (const auto& each : registry().all) {
      const auto other = each.lock();
      if (other && !other->is_aborted_ && std::find(chosen.begin(), chosen.end(), other) == chosen.end()) {
        others.push_back(other);
      }
    }
  }
  auto until = Clock::time_point::max();
  for (const auto& each : chosen) {
    until = std::min(until, Clock::now() + Milliseconds(each->timeout_ms_));
    each->mark_aborted();
  }
  for (const auto& other : others) {
    for (const auto& flight : other->pending()) {
      while (!flight->end->has_passed() && !other->is_aborted_) {
        if (Clock::now() > until) {
          raise_backend_error("Aborting the communicator did not end within the timeout of its group.");
        }
        std::this_thread::sleep_for(kPollPeriod);
      }
    }
  }
}

void Communicator::shutdown() {
  WithoutGil released;
  if (vendor_ == Vendor::kXccl) {
    return;
  }
  while (rules().destroy_waits && !is_aborted_ && !pending().empty()) {
    std::this_thread::sleep_for(kPollPeriod); // a flush has no timeout
  }
  is_ended_ = true;
  if (watchdog_.joinable()) {
    watchdog_.join();
  }
  free_memory();
}

void Communicator::free_memory() {
  for (const auto& [kind, num_bytes] : memory_) {
    give_back_outside(device_, num_bytes);
  }
  memory_.clear();
}

// --- The watchdog and the monitor

void Communicator::watch() {
  while (!is_ended_) {
    std::this_thread::sleep_for(kWatchdogPeriod);
    std::string lost;
    {
      std::lock_guard lock(mutex_);
      lost = lost_;
    }
    if (!lost.empty() && !is_aborted_) {
      return report(c10d::ErrorType::COMM_ERROR, "NCCL communicator error: " + lost);
    }
    for (const auto& flight : pending()) {
      if (Clock::now() - flight->created >= flight->timeout && !is_aborted_) {
        return report(c10d::ErrorType::TIMEOUT, "Watchdog caught collective operation timeout: " + flight->name);
      }
    }
  }
}

void Communicator::report(c10d::ErrorType error, const std::string& text) {
  error_ = error;
  std::fprintf(stderr, "[Rank %d] %s\n", rank_, text.c_str());
  registry().dump_is_asked = true;
  std::this_thread::sleep_for(4 * Milliseconds(dump_ms_));
  if (mode_ == 1 || mode_ == 2) {
    abort_together({shared_from_this()});
  }
  if (mode_ == 1 || mode_ == 3) {
    end_process(c10::str("[Rank ", rank_, "] To avoid data inconsistency, we are taking the entire process down. ", text));
  }
}

// Of the first communicator of the process.
void Communicator::monitor() {
  while (!is_ended_) {
    std::this_thread::sleep_for(kWatchdogPeriod);
    if (dumps_ && registry().dump_is_asked) {
      const auto until = Clock::now() + std::chrono::seconds(heartbeat_seconds_);
      while (Clock::now() < until) {
        if (is_ended_) {
          return;
        }
        std::this_thread::sleep_for(kPollPeriod);
      }
      end_process(c10::str("[Rank ", rank_, "] HeartbeatMonitor: terminating the process."));
    }
  }
}

} // namespace simulated
