#include "kernels.h"

#include "device.h"
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <limits>

namespace simulated {

namespace {

std::atomic<bool> float64_is_refused{false};
std::atomic<bool> moves_are_in_place{false};

const auto kDeviceKey = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

int64_t extent_of(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t extent = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {
      return 0;
    }
    extent += (sizes[i] - 1) * strides[i];
  }
  return extent;
}

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      !float64_is_refused || (dtype != at::kDouble && dtype != at::kComplexDouble),
      "Cannot convert a tensor to float64: this device does not support it. Please use float32 instead.");
}

int index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current_device();
}

} // namespace

void refuse_float64(bool refused) {
  float64_is_refused = refused;
}

void move_in_place(bool in_place) {
  moves_are_in_place = in_place;
}

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device) {
  check_dtype(dtype);
  const OnDevice guard(device);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kType), kDeviceKey, dtype);
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  }
  void* const data = tensor.unsafeGetTensorImpl()->mutable_data();
  TORCH_CHECK(data != nullptr, "the tensor's storage was resized to nothing");
  const auto options = at::TensorOptions(tensor.scalar_type());
  auto view = at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options);
  view._set_conj(tensor.is_conj()); // only copies meet them
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor hidden_copy(const at::Tensor& view, bool with_content) {
  const int64_t extent = extent_of(view.sizes(), view.strides());
  auto buffer = at::empty({extent}, at::TensorOptions(view.scalar_type()));
  if (with_content && extent > 0) {
    std::memcpy(buffer.data_ptr(), view.const_data_ptr(), extent * view.itemsize());
  }
  return at::as_strided(buffer, view.sizes(), view.strides());
}

void poison(const at::Tensor& view) {
  if (view.numel() == 0) {
    return;
  }
  if (view.scalar_type() == at::kBool) {
    view.fill_(true);
  } else if (view.is_non_overlapping_and_dense()) {
    std::memset(view.mutable_data_ptr(), kPoison, view.nbytes());
  } else if (view.is_floating_point() || view.is_complex()) {
    view.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    view.fill_(view.scalar_type() == at::kByte ? 255 : -1);
  }
}

void write(const at::Tensor& view, const at::Tensor& values) {
  const bool same_layout = view.scalar_type() == values.scalar_type() && view.sizes() == values.sizes() &&
      view.strides() == values.strides() && view.is_non_overlapping_and_dense() &&
      view.is_conj() == values.is_conj() && view.is_neg() == values.is_neg();
  if (view.numel() > 0 && same_layout) {
    std::memcpy(view.mutable_data_ptr(), values.const_data_ptr(), view.nbytes());
  } else if (view.numel() > 0) {
    view.copy_(values);
  }
}

// --- Making and viewing tensors

namespace {

at::Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "the device has strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  const auto type = c10::dtype_or_default(dtype);
  check_dtype(type);
  const OnDevice guard(index_of(device));
  return at::detail::empty_generic(sizes, c10::GetAllocator(kType), kDeviceKey, type, memory_format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "the device has strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  return new_tensor(sizes, strides, c10::dtype_or_default(dtype), index_of(device));
}

const at::Tensor& resize(
    const at::Tensor& self,
    at::IntArrayRef sizes,
    std::optional<at::MemoryFormat> memory_format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    const size_t needed = impl->numel() == 0
        ? 0
        : static_cast<size_t>(impl->numel() + impl->storage_offset()) * self.dtype().itemsize();
    if (needed > impl->unsafe_storage().nbytes()) {
      resize_storage(impl->unsafe_storage(), needed);
    }
  }
  if (memory_format.has_value()) {
    impl->empty_tensor_restride(*memory_format);
  }
  return self;
}

// These only write sizes, strides and storages, wherever the memory is: the CPU's kernels do.
void on_metadata(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// Return whether `a.data = b` is possible. torch knows its own devices only; with others `model.to` makes new parameters.
bool can_take_over(const at::Tensor& self, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || is_on_device(tensor));
  };
  return (moves_are_in_place && is_plain(self) && is_plain(from)) ||
      self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// --- Copies

bool share_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

// Copy in the order of a stream's work. `keep` is what the copy owns until then.
void copy_on(
    const QueuePtr& queue,
    const at::Tensor& from,
    const at::Tensor& to,
    bool poison_at_once,
    std::vector<at::Tensor> keep = {}) {
  if (poison_at_once && queue->is_idle()) { // nothing that comes before on this stream can still need it
    poison(to);
  }
  const auto pause = pause_of_copy(to.nbytes());
  queue->add([from, to, pause, keep = std::move(keep)]() {
    at::AutoDispatchBelowADInplaceOrView below;
    sleep_for(pause.before_reading);
    auto values = hidden_copy(to, /*with_content=*/false);
    values.copy_(from);
    poison(to);
    sleep_for(pause.before_writing);
    write(to, values);
  });
}

void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool is_late = non_blocking && is_pinned(source.const_data_ptr());
  count_call(is_late ? "copy to device" : non_blocking ? "staged copy to device" : "blocking copy to device");
  if (!non_blocking) {
    check_call("cudaStreamSynchronize");
  }
  const auto queue = current_queue(target.device().index());
  if (!non_blocking) {
    copy_on(queue, source, host_view(target), true);
    queue->synchronize();
  } else if (is_pinned(source.const_data_ptr())) {
    copy_on(queue, source, host_view(target), true); // the source must not change until then
  } else {
    copy_on(queue, source.clone(), host_view(target), true); // as CUDA: pageable memory is staged before the call returns
  }
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto queue = current_queue(source.device().index());
  const bool is_late = non_blocking && is_pinned(target.const_data_ptr());
  count_call(is_late ? "copy to host" : "blocking copy to host");
  if (!is_late) {
    check_call("cudaStreamSynchronize");
  }
  copy_on(queue, host_view(source), target, true);
  if (!is_late) {
    queue->synchronize();
  }
}

void copy_between(const at::Tensor& source, const at::Tensor& target, bool) {
  count_call("kernel");
  const auto from = current_queue(source.device().index()), to = current_queue(target.device().index());
  if (source.device() == target.device()) {
    copy_on(to, host_view(source), host_view(target), !share_storage(source, target));
    return;
  }
  from->wait_for(to->record()); // as CUDA: the copy is work of the source's stream, and the target's waits for it
  copy_on(from, host_view(source), host_view(target), false);
  to->wait_for(from->record());
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (target.numel() == 0) {
    return target;
  }
  const auto expanded = source.expand_as(target);
  if (!is_on_device(source)) {
    copy_to_device(expanded, target, non_blocking);
  } else if (!is_on_device(target)) {
    copy_to_host(expanded, target, non_blocking);
  } else {
    copy_between(expanded, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &can_take_over);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  for (const auto* name :
       {"as_strided",
        "view",
        "_reshape_alias",
        "unfold",
        "view_as_complex",
        "view_as_real",
        "is_set_to",
        "set_",
        "set_.source_Tensor",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_metadata>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &can_take_over);
}

// Copies resolve lazy conjugation and negation themselves: torch's way to resolve them is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace simulated
