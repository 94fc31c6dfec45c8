#include "device.h"

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

namespace simulated {

namespace {

c10::Device device_at(int index) {
  return c10::Device(kType, static_cast<c10::DeviceIndex>(index));
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

// --- Events

struct Event {
  MomentPtr moment;
  int device;
  bool is_captured = false;
};

// --- Current device and stream

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return device_at(current_device());
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < device_count()) {
      set_current_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    check_call("cudaStreamQuery");
    count_call("cudaStreamQuery");
    return queue_of(stream)->is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    open_context(stream.device_index());
    check_call("cudaStreamSynchronize");
    count_call("sync");
    queue_of(stream)->synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_call("cudaDeviceSynchronize");
    count_call("sync");
    synchronize_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto* recorded = static_cast<Event*>(*event);
    recorded->device = stream.device_index();
    recorded->moment = queue_of(stream)->record();
    recorded->is_captured = is_capturing();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      queue_of(stream)->wait_for(static_cast<Event*>(event)->moment);
    }
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) {
      if (static_cast<Event*>(event)->is_captured) {
        query_of_captured_event();
      }
      check_call("cudaEventQuery");
      count_call("cudaEventQuery");
    }
    return event == nullptr || static_cast<Event*>(event)->moment->has_passed();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      if (static_cast<Event*>(event)->is_captured) {
        query_of_captured_event();
      }
      check_call("cudaEventSynchronize");
      count_call("sync");
      WithoutGil released;
      static_cast<Event*>(event)->moment->wait();
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before calculating elapsed time.");
    const auto &start = static_cast<Event*>(first)->moment, &end = static_cast<Event*>(second)->moment;
    TORCH_CHECK(
        start->has_passed() && end->has_passed(), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(end->when() - start->when()).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- Generators

class Generator final : public c10::GeneratorImpl {
 public:
  Generator(int device, at::Generator host)
      : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host_.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "the generator has no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "the generator has no offset");
  }
  uint64_t current_seed() const override {
    return host_.current_seed();
  }
  uint64_t seed() override {
    return host_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }
  const at::Generator& host() const {
    return host_;
  }

 private:
  c10::GeneratorImpl* clone_impl() const override {
    return new Generator(device_.index(), host_.clone());
  }

  at::Generator host_;
};

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}

// --- Hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return has_context(device);
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    if (device >= 0) {
      set_current_device(device);
    }
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of_pointer(data);
    TORCH_CHECK(device >= 0, "the pointer is not in the memory of a device");
    return device_at(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

} // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

const at::Generator& default_generator(int device) {
  check_device(device);
  static auto* const generators = [] {
    auto* made = new std::array<at::Generator, kMostDevices>();
    for (int index = 0; index < kMostDevices; ++index) {
      (*made)[index] = new_generator(index);
    }
    return made;
  }();
  return (*generators)[device];
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kType,
      "Expected a '",
      c10::get_privateuse1_backend(),
      "' device type for generator but found '",
      c10::DeviceTypeName(generator.device().type(), true),
      "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host();
}

} // namespace simulated
