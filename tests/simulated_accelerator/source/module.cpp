// What Python sees of the device.

#include "collectives.h"
#include "device.h"
#include "kernels.h"
#include "memory.h"
#include "recorder.h"
#include "rulebook.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using namespace simulated;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_allocator(/*with_statistics=*/true);
  register_hooks();

  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("has_context", &has_context);
  m.def("in_bad_fork", &in_bad_fork);
  m.def("synchronize", &synchronize_device);
  m.def("default_generator", &default_generator);
  m.def("forget_errors", &forget_errors);
  bind_collectives(m);
  m.def("recorded_entries", &recorded_entries);
  m.def("set_failures_are_silent", &set_failures_are_silent);
  m.def("failures_are_silent", &failures_are_silent);
  m.def("interrupt_collectives", &interrupt_collectives);

  m.def("set_memory_limit", &set_memory_limit);
  m.def("memory_limit", &memory_limit);
  m.def("memory_info", [](int device) {
    open_context(device);
    const int64_t reserved = device_allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device)).reserved_bytes[0].current +
        static_cast<int64_t>(bytes_outside(device));
    const auto total = static_cast<int64_t>(memory_limit(device));
    return std::make_pair(std::max<int64_t>(total - reserved, 0), total);
  });
  m.def("memory_statistics", [](int device) {
    const auto statistics = device_allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto &allocated = statistics.allocated_bytes[0], &reserved = statistics.reserved_bytes[0];
    return std::make_tuple(allocated.current, allocated.peak, reserved.current, reserved.peak);
  });
  m.def("reset_peak_statistics", [](int device) { device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("empty_cache", [] { device_allocator()->emptyCache(); });
  m.def("register_allocator", &register_allocator);

  m.def(
      "set_rules",
      [](const std::string& vendor, bool failures_are_told, bool destroy_waits, size_t bytes_of_first_use) {
        const std::map<std::string, Vendor> known{
            {"", Vendor::kNone}, {"nccl", Vendor::kNccl}, {"xccl", Vendor::kXccl}, {"hccl", Vendor::kHccl}};
        rules() = {known.at(vendor), failures_are_told, destroy_waits, bytes_of_first_use};
        Communicator::forget_first();
      });
  m.def("default_settings", [] { return default_settings(); });
  m.def("bytes_outside", &bytes_outside);

  m.def("begin_capture", [](const std::string& mode) {
    const std::map<std::string, Capture> known{
        {"global", Capture::kGlobal}, {"thread_local", Capture::kThreadLocal}, {"relaxed", Capture::kRelaxed}};
    begin_capture(known.at(mode));
  });
  m.def("end_capture", &end_capture);
  m.def("is_capturing", &is_capturing);
  m.def("set_thread_is_relaxed", [](bool relaxed) { set_thread_mode(relaxed ? Capture::kRelaxed : Capture::kGlobal); });
  m.def("set_queries_break_local_captures", &set_queries_break_local_captures);

  m.def("counted_calls", &counted_calls);
  m.def("forget_counts", &forget_counts);
  m.def("set_query_time", &set_query_time);

  m.def("pinned_statistics", [] {
    const auto found = pinned_statistics();
    return std::make_tuple(found.asked, found.taken, found.most_taken, found.allocations);
  });
  m.def("empty_pinned_cache", &empty_pinned_cache);

  m.def("refuse_float64", &refuse_float64);
  m.def("move_in_place", &move_in_place);
  m.def("run_kernels_ahead", &run_kernels_ahead);
  m.def("set_waits_are_dropped", &set_waits_are_dropped);
  m.def(
      "set_delays",
      [](double copy_bytes_per_second, double copy_latency, double kernel_time, uint64_t jitter_seed) {
        set_delays({copy_bytes_per_second, copy_latency, kernel_time, jitter_seed});
      });
  m.def("delays", [] {
    const auto now = delays();
    return std::make_tuple(now.copy_bytes_per_second, now.copy_latency, now.kernel_time, now.jitter_seed);
  });
}
