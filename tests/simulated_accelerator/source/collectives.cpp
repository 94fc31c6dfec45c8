#include "collectives.h"

#include "kernels.h"
#include "memory.h"
#include "recorder.h"
#include "rulebook.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <set>

namespace simulated {

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// --- Work

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(
      int rank, c10d::OpType type, c10::Stream stream, Tensors outputs, Tensors inputs, bool host_waits, MomentPtr end,
      CommunicatorPtr communicator, FlightPtr flight)
      : c10d::Work(rank, type),
        stream_(stream),
        outputs_(std::move(outputs)),
        end_(std::move(end)),
        host_waits_(host_waits),
        communicator_(std::move(communicator)),
        flight_(std::move(flight)) {
    kept_ = outputs_;
    kept_.insert(kept_.end(), inputs.begin(), inputs.end());
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    const auto before = exchange_stream(stream); // the future remembers where its value is ready
    future_->markCompleted(at::IValue(outputs_));
    exchange_stream(before);
  }

  bool isCompleted() override {
    return communicator_ ? communicator_->is_completed(flight_) : end_->has_passed();
  }
  bool isSuccess() const override {
    TORCH_CHECK(!communicator_, "WorkNCCL::isSuccess() is deprecated");
    return end_->has_passed();
  }
  std::exception_ptr exception() const override {
    return flight_ ? flight_->error : nullptr;
  }
  // Let the current stream wait, as NCCL's work does; the host goes on.
  void synchronize() override {
    current_queue(stream_.device_index())->wait_for(end_);
    kept_.clear(); // freed memory is now ordered after the collective
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    synchronize();
    if (communicator_) {
      communicator_->wait(flight_, timeout);
    }
    if (host_waits_) {
      WithoutGil released;
      end_->wait();
    }
    return true;
  }
  void blockCurrentStream() override {
    synchronize();
  }
  Tensors result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const c10::Stream stream_;
  Tensors outputs_;
  Tensors kept_; // until the current stream waits: the other stream uses them
  MomentPtr end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  const bool host_waits_;
  const CommunicatorPtr communicator_; // under the rules of a vendor
  const FlightPtr flight_;
};

// --- Reductions that the host's backend does not have

struct Reduction {
  c10d::ReduceOp op;
  std::optional<double> factor_before;
  at::Tensor tensor_factor;
  bool is_mean = false;

  explicit Reduction(const c10d::ReduceOp& wanted) : op(wanted) {
    if (wanted.op_ == c10d::ReduceOp::AVG) {
      op = c10d::ReduceOp::SUM;
      is_mean = true;
    } else if (wanted.op_ == c10d::ReduceOp::PREMUL_SUM) {
      const auto* supplement = reinterpret_cast<const c10d::NCCLPreMulSumSupplement*>(wanted.supplement_.get());
      TORCH_CHECK(!supplement->tensor_factor.defined(), "a factor on the device is not supported");
      factor_before = supplement->double_factor;
      op = c10d::ReduceOp::SUM;
    }
  }
  void before(const Tensors& tensors) const {
    if (factor_before) {
      for (const auto& tensor : tensors) {
        tensor.mul_(*factor_before);
      }
    }
  }
  void after(const Tensors& tensors, int size) const {
    if (is_mean) {
      for (const auto& tensor : tensors) {
        at::isIntegralType(tensor.scalar_type(), true) ? tensor.floor_divide_(size) : tensor.div_(size);
      }
    }
  }
};

// --- The end of a wait

struct Interrupted {};

// Ends the waits of one backend for other processes, as NCCL's abort does.
class Interruption : public std::enable_shared_from_this<Interruption> {
 public:
  void request() {
    std::lock_guard lock(mutex_);
    is_requested_ = true;
    for (const auto& message : messages_) {
      message->abort();
    }
    changed_.notify_all();
  }

  void check() {
    std::lock_guard lock(mutex_);
    check_locked();
  }

  void wait_until_requested() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_requested_; });
  }

  void wait_for(const WorkPtr& work) {
    const auto has_ended = std::make_shared<bool>(false);
    work->getFuture()->addCallback([self = shared_from_this(), has_ended](c10::ivalue::Future&) {
      std::lock_guard lock(self->mutex_);
      *has_ended = true;
      self->changed_.notify_all();
    });
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return *has_ended || is_requested_; });
      check_locked();
    }
    work->wait(); // raises its error
  }

  // Messages of gloo have no future, but can be interrupted.
  void wait_for_message(const WorkPtr& work) {
    {
      std::lock_guard lock(mutex_);
      check_locked();
      messages_.insert(work);
    }
    std::exception_ptr error;
    try {
      work->wait();
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(mutex_);
    messages_.erase(work);
    check_locked();
    if (error) {
      std::rethrow_exception(error);
    }
  }

 private:
  void check_locked() const {
    if (is_requested_) {
      throw Interrupted();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_requested_ = false;
  std::set<WorkPtr> messages_;
};
using InterruptionPtr = std::shared_ptr<Interruption>;

// Of the collective that a stream's thread executes.
thread_local Interruption* the_interruption = nullptr;

void finish(const WorkPtr& work) {
  the_interruption->wait_for(work);
}

void finish_message(const WorkPtr& work) {
  the_interruption->wait_for_message(work);
}

std::atomic<bool> failures_stay{false};

struct Interruptions {
  std::mutex mutex;
  std::vector<std::weak_ptr<Interruption>> all;
};

// Never destroyed: threads may use it until the process ends.
Interruptions& interruptions() {
  static Interruptions* const instance = new Interruptions();
  return *instance;
}

InterruptionPtr new_interruption() {
  auto made = std::make_shared<Interruption>();
  std::lock_guard lock(interruptions().mutex);
  interruptions().all.push_back(made);
  return made;
}

// Execute a collective. One whose peer is lost fails, or stays until it is interrupted, as NCCL's do in one machine.
// An interrupted one ends without a result, and the stream goes on.
void execute(Interruption& interruption, Recorded& entry, const std::function<void()>& collective, bool shows_start) {
  if (shows_start) {
    entry.progress = Progress::kStarted;
  }
  the_interruption = &interruption;
  std::exception_ptr error;
  try {
    interruption.check();
    collective();
  } catch (const Interrupted&) {
  } catch (...) {
    error = std::current_exception();
    if (failures_stay) {
      interruption.wait_until_requested();
      error = nullptr;
    }
  }
  entry.progress = Progress::kCompleted;
  if (error) {
    std::rethrow_exception(error);
  }
}

// Execute one under the rules of a vendor: it never fails by itself, and what an aborted one leaves is poison.
void execute_by_the_rules(
    Interruption& interruption, Communicator& communicator, Recorded& entry, const std::function<void()>& collective,
    const Tensors& outputs, bool shows_start) {
  if (shows_start) {
    entry.progress = Progress::kStarted;
  }
  the_interruption = &interruption;
  try {
    try {
      interruption.check();
      collective();
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      communicator.lose_peer(error.what());
      interruption.wait_until_requested();
      throw Interrupted();
    }
  } catch (const Interrupted&) {
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& view : outputs) {
      poison(view);
    }
  }
  entry.progress = Progress::kCompleted;
}

// --- Names

// What NCCL's recorder calls an operation.
std::string name_of(c10d::OpType type, int rank, int peer) {
  switch (type) {
    case c10d::OpType::BROADCAST:
      return "broadcast";
    case c10d::OpType::ALLREDUCE:
      return "all_reduce";
    case c10d::OpType::REDUCE:
      return "reduce";
    case c10d::OpType::ALLGATHER:
      return "all_gather";
    case c10d::OpType::_ALLGATHER_BASE:
      return "_all_gather_base";
    case c10d::OpType::GATHER:
      return "gather";
    case c10d::OpType::SCATTER:
      return "scatter";
    case c10d::OpType::REDUCE_SCATTER:
      return "reduce_scatter";
    case c10d::OpType::_REDUCE_SCATTER_BASE:
      return "_reduce_scatter_base";
    case c10d::OpType::ALLTOALL:
    case c10d::OpType::ALLTOALL_BASE:
      return "all_to_all";
    case c10d::OpType::BARRIER:
      return "all_reduce_barrier";
    case c10d::OpType::SEND:
      return c10::str("send ", rank, "->", peer);
    case c10d::OpType::RECV:
    case c10d::OpType::RECVANYSOURCE:
      return c10::str("recv ", rank, "<-", peer);
    default:
      return c10d::opTypeToString(type);
  }
}

// --- The backend

// What a collective does on the host: with copies of its outputs and inputs.
using Body = std::function<void(c10d::Backend& host, Tensors& outputs, Tensors& inputs)>;

enum Lane : int { kCollectives = 0, kSend = 1, kReceive = 2 };

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> host, c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout)
      : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)), interruption_(new_interruption()) {
    if (rules().vendor != Vendor::kNone) {
      communicator_ = std::make_shared<Communicator>(
          rank_, size_, std::move(store), timeout, [interruption = interruption_] { interruption->request(); });
      communicator_->start();
      host_->setTimeout(std::chrono::hours(20 * 24)); // NCCL's kernels do not time out: its watchdog ends them
    }
  }

  ~Collectives() override {
    if (communicator_) {
      communicator_->let_go();
    }
    for (const auto& [key, stream] : streams_) {
      release_stream(stream);
    }
  }

  const std::string getBackendName() const override {
    return "simulated";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    communicator_ ? communicator_->set_timeout(timeout) : host_->setTimeout(timeout);
  }
  c10d::ErrorType getError() override {
    return communicator_ ? communicator_->error() : c10d::ErrorType::SUCCESS;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return collectives_;
  }
  // End the waits for other processes. The host's backend stays until the process ends: its threads may never return.
  void abort() override {
    if (!is_kept_.exchange(true)) {
      new c10::intrusive_ptr<c10d::Backend>(host_);
    }
    communicator_ ? communicator_->abort() : interruption_->request();
  }
  void shutdown() override {
    if (communicator_) {
      communicator_->shutdown();
    }
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return start(Call{options.asyncOp}, c10d::OpType::BROADCAST, tensors, {}, [options](auto& host, auto& out, auto&) {
      finish(host.broadcast(out, options));
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start(Call{options.asyncOp, &options.reduceOp}, c10d::OpType::ALLREDUCE, tensors, {}, [options, size = size_](auto& host, auto& out, auto&) {
      const Reduction reduction(options.reduceOp);
      reduction.before(out);
      for (auto& tensor : out) {
        Tensors one{tensor};
        c10d::AllreduceOptions simple;
        simple.reduceOp = reduction.op;
        finish(host.allreduce(one, simple));
      }
      reduction.after(out, size);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return start(Call{options.asyncOp, &options.reduceOp}, c10d::OpType::REDUCE, tensors, {}, [options, size = size_](auto& host, auto& out, auto&) {
      const Reduction reduction(options.reduceOp);
      auto simple = options;
      simple.reduceOp = reduction.op;
      reduction.before(out);
      finish(host.reduce(out, simple));
      reduction.after(out, size);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return start(Call{options.asyncOp}, c10d::OpType::ALLGATHER, outputs.at(0), inputs, [options](auto& host, auto& out, auto& in) {
      std::vector<Tensors> lists{out};
      finish(host.allgather(lists, in, options));
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    check_sizes(output, input, "output tensor size must be equal to world_size times input tensor size");
    return start(Call{options.asyncOp}, c10d::OpType::_ALLGATHER_BASE, {output}, {input}, [options](auto& host, auto& out, auto& in) {
      finish(host._allgather_base(out[0], in[0], options));
    });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options)
      override {
    return start(Call{options.asyncOp}, c10d::OpType::_ALLGATHER_BASE, outputs, inputs, [options](auto& host, auto& out, auto& in) {
      for (size_t i = 0; i < in.size(); ++i) {
        finish(host._allgather_base(out[i], in[i], options));
      }
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const Tensors all = outputs.empty() ? Tensors{} : outputs[0];
    return start(Call{options.asyncOp}, c10d::OpType::GATHER, all, inputs, [options](auto& host, auto& out, auto& in) {
      std::vector<Tensors> lists;
      if (!out.empty()) {
        lists.push_back(out);
      }
      finish(host.gather(lists, in, options));
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const Tensors all = inputs.empty() ? Tensors{} : inputs[0];
    return start(Call{options.asyncOp}, c10d::OpType::SCATTER, outputs, all, [options](auto& host, auto& out, auto& in) {
      std::vector<Tensors> lists;
      if (!in.empty()) {
        lists.push_back(in);
      }
      finish(host.scatter(out, lists, options));
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options)
      override {
    return start(Call{options.asyncOp, &options.reduceOp}, c10d::OpType::REDUCE_SCATTER, outputs, inputs.at(0), [options, rank = rank_, size = size_](auto& host, auto& out, auto& in) {
      reduce_all(host, in, options.reduceOp, size);
      out[0].copy_(in[rank]);
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options)
      override {
    check_sizes(input, output, "input tensor must be the same size as output size times world size");
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options)
      override {
    return start(Call{options.asyncOp, &options.reduceOp}, c10d::OpType::_REDUCE_SCATTER_BASE, outputs, inputs, [options, size = size_](auto& host, auto& out, auto& in) {
      const Reduction reduction(options.reduceOp);
      auto simple = options;
      simple.reduceOp = reduction.op;
      reduction.before(in);
      for (size_t i = 0; i < in.size(); ++i) {
        host._reduce_scatter_base(out[i], in[i], simple)->wait(); // gloo's has no future, and is not interrupted
      }
      reduction.after(out, size);
    });
  }

  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return start(Call{options.asyncOp}, c10d::OpType::ALLTOALL_BASE, {output}, {input}, [=](auto& host, auto& out, auto& in) {
      auto sizes_out = output_sizes, sizes_in = input_sizes;
      finish(host.alltoall_base(out[0], in[0], sizes_out, sizes_in, options));
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return start(Call{options.asyncOp}, c10d::OpType::ALLTOALL, outputs, inputs, [options](auto& host, auto& out, auto& in) {
      Tensors flat_in, flat_out;
      std::vector<int64_t> sizes_in, sizes_out;
      for (const auto& tensor : in) {
        flat_in.push_back(tensor.reshape({-1}));
        sizes_in.push_back(tensor.numel());
      }
      for (const auto& tensor : out) {
        flat_out.push_back(tensor.reshape({-1}));
        sizes_out.push_back(tensor.numel());
      }
      auto sent = at::cat(flat_in), received = at::cat(flat_out);
      auto taken_out = sizes_out, taken_in = sizes_in; // the call takes them
      finish(host.alltoall_base(received, sent, taken_out, taken_in, options));
      const auto parts = received.split_with_sizes(sizes_out);
      for (size_t i = 0; i < out.size(); ++i) {
        out[i].copy_(parts[i].view(out[i].sizes()));
      }
    });
  }

  WorkPtr send(Tensors& tensors, int target, int given_tag) override {
    const int tag = communicator_ ? 0 : given_tag;
    return start(Call{}, c10d::OpType::SEND, {}, tensors, [target, tag](auto& host, auto&, auto& in) {
      finish_message(host.send(in, target, tag));
    }, kSend, target);
  }

  WorkPtr recv(Tensors& tensors, int source, int given_tag) override {
    const int tag = communicator_ ? 0 : given_tag;
    return start(Call{}, c10d::OpType::RECV, tensors, {}, [source, tag](auto& host, auto& out, auto&) {
      finish_message(host.recv(out, source, tag));
    }, kReceive, source);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    TORCH_CHECK_NOT_IMPLEMENTED(!communicator_, "ProcessGroupNCCL does not support recvAnysource");
    return start(Call{}, c10d::OpType::RECVANYSOURCE, tensors, {}, [tag](auto& host, auto& out, auto&) {
      finish_message(host.recvAnysource(out, tag));
    }, kReceive, -1);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions simple;
    if (!communicator_) { // NCCL ignores those of single calls
      simple.timeout = options.timeout;
    }
    const auto device = options.device && options.device->type() == kType && options.device->has_index()
        ? options.device->index()
        : options.device_ids.empty() ? current_device() : static_cast<int>(options.device_ids[0]);
    const auto before = current_queue(device);
    auto work = start_on(Call{options.asyncOp}, device, c10d::OpType::BARRIER, {}, {}, [simple](auto& host, auto&, auto&) {
      finish(host.barrier(simple));
    }, kCollectives, 0);
    if (!work) {
      const auto reached = before->record();
      WithoutGil released;
      reached->wait();
    }
    return work;
  }

 private:
  void check_sizes(const at::Tensor& whole, const at::Tensor& part, const char* text) const {
    if (communicator_) {
      TORCH_CHECK_TYPE(whole.scalar_type() == part.scalar_type(), "the tensors must have the same type");
      TORCH_CHECK_VALUE(whole.numel() == part.numel() * size_, text);
    }
  }

  static void reduce_all(c10d::Backend& host, Tensors& tensors, const c10d::ReduceOp& op, int size) {
    const Reduction reduction(op);
    c10d::AllreduceOptions options;
    options.reduceOp = reduction.op;
    reduction.before(tensors);
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      finish(host.allreduce(one, options));
    }
    reduction.after(tensors, size);
  }

  // How a collective was called.
  struct Call {
    bool is_async = true;
    const c10d::ReduceOp* op = nullptr;
  };

  WorkPtr start(Call call, c10d::OpType type, Tensors outputs, Tensors inputs, Body body, Lane lane = kCollectives, int peer = 0) {
    const auto& first = outputs.empty() ? inputs.at(0) : outputs[0];
    return start_on(call, first.device().index(), type, std::move(outputs), std::move(inputs), std::move(body), lane, peer);
  }

  // Under the rules one that is not asynchronous runs on the current stream, and gives no work.
  WorkPtr start_on(
      Call call, int device, c10d::OpType type, Tensors outputs, Tensors inputs, Body body, Lane lane, int peer) {
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto* tensors : {&outputs, &inputs}) {
      for (const auto& tensor : *tensors) {
        TORCH_CHECK(is_on_device(tensor) && tensor.device().index() == device, "tensors of one collective must be on one device");
      }
    }
    std::shared_ptr<Turn> turn;
    std::string signature;
    if (communicator_) {
      check_types(communicator_->vendor(), outputs, call.op);
      check_types(communicator_->vendor(), inputs, call.op);
      communicator_->enter(device, name_of(type, rank_, peer));
      if (lane == kCollectives) {
        turn = std::make_shared<Turn>(device);
        signature = signature_of(type, outputs, inputs);
      }
    }
    const bool is_sync = communicator_ && !call.is_async && lane == kCollectives;
    const auto stream = is_sync ? current_stream(device) : stream_of(device, lane, peer);
    const auto queue = queue_of(stream);
    queue->wait_for(current_queue(device)->record());
    Tensors out_views, in_views;
    size_t num_bytes = 0;
    for (const auto& tensor : outputs) {
      out_views.push_back(host_view(tensor));
      num_bytes += tensor.nbytes();
    }
    for (const auto& tensor : inputs) {
      in_views.push_back(host_view(tensor));
      num_bytes += tensor.nbytes();
    }
    auto entry = new_record(type, outputs, inputs, lane, peer);
    const uint64_t number = entry->collective_number;
    auto collective = [host = host_, out_views, in_views, body = std::move(body), pause = pause_of_copy(num_bytes),
                       communicator = communicator_, interruption = interruption_, turn, number, signature] {
      at::AutoDispatchBelowADInplaceOrView inner;
      if (turn) {
        while (!turn->has_come()) {
          interruption->check();
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        if (!communicator->agrees(number, signature)) { // the ranks called different collectives: nobody says so
          interruption->wait_until_requested();
          interruption->check();
        }
      }
      sleep_for(pause.before_reading);
      Tensors hidden_out, hidden_in;
      for (const auto& view : out_views) {
        hidden_out.push_back(view.clone(at::MemoryFormat::Contiguous));
      }
      for (const auto& view : in_views) {
        hidden_in.push_back(view.clone(at::MemoryFormat::Contiguous));
      }
      body(*host, hidden_out, hidden_in);
      for (const auto& view : out_views) {
        poison(view);
      }
      sleep_for(pause.before_writing);
      for (size_t i = 0; i < out_views.size(); ++i) {
        write(out_views[i], hidden_out[i]);
      }
    };
    if (!communicator_) {
      queue->add([entry, interruption = interruption_, collective = std::move(collective)] {
        execute(*interruption, *entry, collective, true);
      });
    } else {
      queue->add([entry, interruption = interruption_, communicator = communicator_, out_views, turn,
                  collective = std::move(collective), shows_start = setting("ENABLE_TIMING") != 0] {
        execute_by_the_rules(*interruption, *communicator, *entry, collective, out_views, shows_start);
      });
      turn.reset(); // the work holds it until it has ended
    }
    auto end = queue->record();
    const auto flight = communicator_ ? communicator_->launch(entry->name, end) : nullptr;
    if (is_sync) {
      return nullptr;
    }
    const bool host_waits = type == c10d::OpType::BARRIER;
    return c10::make_intrusive<CollectiveWork>(
        rank_, type, stream, std::move(outputs), std::move(inputs), host_waits, end, communicator_, flight);
  }

  // What all ranks must have in common.
  std::string signature_of(c10d::OpType type, const Tensors& outputs, const Tensors& inputs) const {
    auto found = name_of(type, rank_, 0);
    const bool has_equal_sizes = type == c10d::OpType::ALLREDUCE || type == c10d::OpType::BROADCAST ||
        type == c10d::OpType::_ALLGATHER_BASE || type == c10d::OpType::_REDUCE_SCATTER_BASE;
    if (has_equal_sizes) {
      for (const auto& tensor : outputs) {
        found += c10::str(" ", tensor.scalar_type(), " ", tensor.numel());
      }
    }
    return found;
  }

  RecordedPtr new_record(c10d::OpType type, const Tensors& outputs, const Tensors& inputs, Lane lane, int peer) {
    auto entry = std::make_shared<Recorded>();
    entry->group_name = getGroupUid();
    entry->group_description = getGroupDesc();
    entry->name = "simulated:" + name_of(type, rank_, peer);
    entry->is_message = lane != kCollectives;
    entry->collective_number = entry->is_message ? collectives_.load() : ++collectives_;
    entry->message_number = entry->is_message ? ++messages_ : messages_.load();
    entry->inputs = TensorSizes(inputs.empty() ? outputs : inputs);
    entry->outputs = TensorSizes(outputs);
    record(entry);
    return entry;
  }

  // Messages to and from each peer have streams of their own, so that a pair that sends to each other is not stuck.
  c10::Stream stream_of(int device, Lane lane, int peer) {
    std::lock_guard lock(mutex_);
    const auto key = std::make_tuple(device, lane, peer);
    auto found = streams_.find(key);
    if (found == streams_.end()) {
      found = streams_.emplace(key, own_stream(device)).first;
    }
    return found->second;
  }

  c10::intrusive_ptr<c10d::Backend> host_;
  std::mutex mutex_;
  std::map<std::tuple<int, Lane, int>, c10::Stream> streams_;
  InterruptionPtr interruption_;
  CommunicatorPtr communicator_; // under the rules of a vendor
  std::atomic<bool> is_kept_{false};
  std::atomic<uint64_t> collectives_{0}; // how many were started, without messages
  std::atomic<uint64_t> messages_{0};
};

} // namespace

void set_failures_are_silent(bool silent) {
  failures_stay = silent;
}

bool failures_are_silent() {
  return failures_stay;
}

void interrupt_collectives() {
  std::lock_guard lock(interruptions().mutex);
  for (const auto& each : interruptions().all) {
    if (const auto interruption = each.lock()) {
      interruption->request();
    }
  }
}

void bind_collectives(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(module, "Collectives")
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Backend>& host, const c10::intrusive_ptr<c10d::Store>& store, double timeout) {
            return c10::make_intrusive<Collectives>(host, store, std::chrono::milliseconds(static_cast<int64_t>(1000 * timeout)));
          }))
      .def("get_error", &Collectives::getError)
      .def("_group_start", [](Collectives&) { Communicator::start_group(); })
      .def("_group_end", [](Collectives&) { Communicator::end_group(); });
}

} // namespace simulated
