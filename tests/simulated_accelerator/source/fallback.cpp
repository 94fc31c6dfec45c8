// Every operation without a kernel of its own: the CPU's kernel, with results that are late.
//
// [Note: late kernels]
// A kernel runs on the host's memory behind its arguments and writes into hidden memory. What the caller sees holds poison
// until the result is published, in the order of the stream's work. Two ways lead there:
// - The shapes of all results are known (operations in place, and with `out=`, which includes all structured
//   operations): the whole kernel is work of the stream, and the host goes on.
// - Else the host waits for the stream, computes, and only publishing is the stream's work.

#include "device.h"
#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <set>

namespace simulated {

namespace {

std::atomic<bool> kernels_run_ahead{true};

// --- Arguments

struct Written {
  at::Tensor tensor; // the caller's
  at::Tensor view; // the memory that the caller sees
  size_t argument;
  int64_t position; // in a list; -1 for a plain argument
  bool is_out;
};

struct Call {
  c10::OperatorHandle op;
  torch::jit::Stack arguments; // host tensors in place of the device's
  std::vector<Written> written;
  std::vector<at::Tensor> hidden; // what the kernel writes to, in the order of `written`
};

bool is_written(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (alias == nullptr) {
    return false;
  }
  const auto& inner = alias->containedTypes();
  return alias->isWrite() || std::any_of(inner.begin(), inner.end(), [](const auto& type) { return type.isWrite(); });
}

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      function(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      if (tensor.has_value()) {
        function(*tensor);
      }
    }
  }
}

// x[indices] brings the indices to x.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
      name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
}

// Return the device that an operation runs on; refuse tensors of several devices, as kernels of devices do.
int common_device(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!device && is_on_device(tensor)) {
        device = tensor.device();
      }
    });
  }
  if (!device) {
    for (const auto& argument : arguments) {
      if (argument.isDevice() && argument.toDevice().type() == kType) {
        device = argument.toDevice();
      }
    }
    return device && device->has_index() ? device->index() : current_device();
  }
  const bool any_host_tensor = takes_host_indices(op.schema().name());
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      const bool is_number = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0 && argument.isTensor();
      const bool is_allowed = !tensor.defined() || tensor.device() == *device || is_number || (tensor.is_cpu() && any_host_tensor);
      TORCH_CHECK(
          is_allowed,
          "Expected all tensors to be on the same device, but found at least two devices, ",
          *device,
          " and ",
          tensor.device(),
          "! (when checking arguments of ",
          op.schema().name(),
          ")");
    });
  }
  return device->index();
}

// Return the host's tensor for a kernel: a view of device memory. Numbers and indices on the host are read now.
at::Tensor for_kernel(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (is_on_device(tensor)) {
    return host_view(tensor);
  }
  auto copied = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copied.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copied;
}

Call prepare(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments, int device) {
  Call call{op, {}, {}, {}};
  const auto& schema = op.schema();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    const auto& argument = schema.arguments()[i];
    const bool written = is_written(argument);
    const auto note = [&](const at::Tensor& tensor, const at::Tensor& view, int64_t position) {
      if (written && is_on_device(tensor)) {
        call.written.push_back({tensor, view, i, position, argument.is_out()});
      }
    };
    if (value.isTensor()) {
      auto view = for_kernel(value.toTensor());
      note(value.toTensor(), view, -1);
      call.arguments.emplace_back(std::move(view));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> views;
      for (const at::Tensor& tensor : value.toTensorList()) {
        views.push_back(for_kernel(tensor));
        note(tensor, views.get(views.size() - 1), static_cast<int64_t>(views.size()) - 1);
      }
      call.arguments.emplace_back(std::move(views));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> views;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        views.push_back(tensor.has_value() ? std::optional(for_kernel(*tensor)) : std::nullopt);
      }
      call.arguments.emplace_back(std::move(views));
    } else if (value.isDevice()) {
      call.arguments.emplace_back(c10::Device(c10::DeviceType::CPU));
    } else if (value.isGenerator()) {
      call.arguments.emplace_back(host_generator(value.toGenerator()));
    } else if (
        value.isNone() && argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())) &&
        argument.type()->kind() == c10::TypeKind::OptionalType) {
      call.arguments.emplace_back(host_generator(default_generator(device)));
    } else {
      call.arguments.push_back(value);
    }
  }
  return call;
}

// --- Running

bool has_generator(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const auto& argument) {
    return argument.type()->str().find("Generator") != std::string::npos;
  });
}

// Lets kernels without a generator among their arguments draw from a device's.
class DrawingFrom {
 public:
  explicit DrawingFrom(int device)
      : lock_(mutex()), generator_(host_generator(default_generator(device))), host_(at::detail::getDefaultCPUGenerator()) {
    before_ = host_.get_state();
    host_.set_state(generator_.get_state());
  }
  ~DrawingFrom() {
    generator_.set_state(host_.get_state());
    host_.set_state(before_);
  }

 private:
  static std::mutex& mutex() {
    static auto* const instance = new std::mutex();
    return *instance;
  }

  std::lock_guard<std::mutex> lock_;
  at::Generator generator_;
  at::Generator host_;
  at::Tensor before_;
};

// Run the CPU's kernel: what it writes stays hidden.
torch::jit::Stack compute(Call& call) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  for (const auto& written : call.written) {
    // An empty `out` gets the kernel's own shape, without torch's warning of resizing.
    auto hidden = written.is_out && written.position < 0 ? at::empty({0}, written.view.options())
                                                         : hidden_copy(written.view, /*with_content=*/true);
    if (written.position < 0) {
      call.arguments[written.argument] = hidden;
    } else {
      call.arguments[written.argument].toTensorList().set(written.position, hidden);
    }
    call.hidden.push_back(std::move(hidden));
  }
  auto stack = call.arguments;
  call.op.callBoxed(&stack);
  return stack;
}

// --- Results

// Publish results on a stream: the caller sees poison until then.
void publish(const QueuePtr& queue, std::vector<std::pair<at::Tensor, at::Tensor>> results) {
  at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& [view, values] : results) {
    poison(view);
  }
  if (!results.empty()) {
    const auto pause = pause_of_kernel();
    queue->add([results = std::move(results), pause] {
      at::AutoDispatchBelowADInplaceOrView inner;
      sleep_for(pause.before_reading + pause.before_writing);
      for (const auto& [view, values] : results) {
        write(view, values);
      }
    });
  }
}

void compute_now(Call& call, int device, bool draws, torch::jit::Stack* stack) {
  const auto queue = current_queue(device);
  queue->synchronize();
  torch::jit::Stack results;
  if (draws && !has_generator(call.op.schema())) {
    const DrawingFrom generator(device);
    results = compute(call);
  } else {
    results = compute(call);
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> late;
  for (size_t i = 0; i < call.written.size(); ++i) {
    const auto& written = call.written[i];
    const auto& hidden = call.hidden[i];
    if (hidden.sizes() != written.tensor.sizes()) {
      written.tensor.resize_(hidden.sizes());
    }
    late.emplace_back(host_view(written.tensor), hidden);
  }
  const auto placed = [&](const at::Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    for (size_t i = 0; i < call.hidden.size(); ++i) {
      if (result.is_same(call.hidden[i])) {
        return call.written[i].tensor;
      }
    }
    TORCH_CHECK(result.layout() == at::kStrided, call.op.schema().name(), " gives a tensor that the device does not have");
    const auto dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
    auto tensor = new_tensor(dense.sizes(), dense.strides(), dense.scalar_type(), device);
    // A result may be a view of an argument's memory, which later work changes.
    late.emplace_back(host_view(tensor), hidden_copy(dense, true));
    return tensor;
  };
  for (const auto& result : results) {
    if (result.isTensor()) {
      stack->emplace_back(placed(result.toTensor()));
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : result.toTensorList()) {
        tensors.push_back(placed(tensor));
      }
      stack->emplace_back(std::move(tensors));
    } else {
      stack->push_back(result);
    }
  }
  publish(queue, std::move(late));
}

// Return whether all results are tensors that the caller gave, so that nothing has to be known of them now.
bool can_run_ahead(const Call& call, bool draws) {
  const auto& schema = call.op.schema();
  if (!kernels_run_ahead || draws || call.written.empty() || schema.name().rfind("aten::", 0) != 0) {
    return false;
  }
  const auto is_given = [](const c10::Argument& result) { return result.type()->kind() == c10::TypeKind::TensorType && is_written(result); };
  return std::all_of(schema.returns().begin(), schema.returns().end(), is_given) &&
      std::none_of(call.written.begin(), call.written.end(), [](const Written& written) {
           return written.is_out && written.tensor.numel() == 0;
         });
}

void compute_later(Call call, int device, torch::jit::Stack* stack) {
  for (const auto& result : call.op.schema().returns()) {
    const auto& name = *result.alias_info()->beforeSets().begin();
    for (const auto& written : call.written) {
      const auto* alias = call.op.schema().arguments()[written.argument].alias_info();
      if (written.position < 0 && alias->beforeSets().count(name) > 0) {
        stack->emplace_back(written.tensor);
        break;
      }
    }
  }
  for (auto& written : call.written) {
    written.tensor = at::Tensor(); // work of a stream must not keep memory alive
  }
  const auto pause = pause_of_kernel();
  current_queue(device)->add([call = std::move(call), pause]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    sleep_for(pause.before_reading);
    compute(call);
    for (size_t i = 0; i < call.written.size(); ++i) {
      TORCH_CHECK(
          call.hidden[i].sizes() == call.written[i].view.sizes(),
          call.op.schema().name(),
          " was given an output of another shape");
      poison(call.written[i].view);
    }
    sleep_for(pause.before_writing);
    for (size_t i = 0; i < call.written.size(); ++i) {
      write(call.written[i].view, call.hidden[i]);
    }
  });
}

// Count a kernel, or what waits for the device: its result is a number of the host, or has a size that depends on values.
void note_call(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  static const auto* const waiting = new std::set<std::string>{
      "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave"};
  const auto& name = op.schema().name();
  bool waits = waiting->count(name) > 0;
  if (takes_host_indices(name)) {
    for_each_tensor(arguments[1], [&](const at::Tensor& index) {
      waits = waits || (index.defined() && is_on_device(index) && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte));
    });
  }
  if (waits) {
    check_call(name.c_str());
    count_call("sync");
    count_call("sync of " + name);
  } else {
    count_call("kernel");
    count_call("kernel " + name);
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  for (const auto& result : schema.returns()) {
    TORCH_CHECK(
        result.alias_info() == nullptr || is_written(result) , schema.name(), " is a view, which the device does not have");
  }
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  const int device = common_device(op, arguments);
  const OnDevice guard(device);
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  note_call(op, arguments);
  auto call = prepare(op, arguments, device);
  const std::vector<c10::IValue> kept(arguments.begin(), arguments.end());
  torch::jit::drop(*stack, schema.arguments().size());
  if (can_run_ahead(call, draws)) {
    compute_later(std::move(call), device, stack);
  } else {
    compute_now(call, device, draws, stack);
  }
}

} // namespace

void run_kernels_ahead(bool ahead) {
  kernels_run_ahead = ahead;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// These choose a kernel by the name of the device, and know none for ours.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());

  // torch composes these from others where a device has no kernel. The CPU's own gives the CPU's numbers, bit for bit.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() == std::optional<std::string_view>("aten") && op.has_value() &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      const auto full_name = c10::toString(name);
      m.impl(full_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

} // namespace simulated
