// What collectives were asked for, in the format of NCCL's flight recorder.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace simulated {

enum class Progress { kScheduled, kStarted, kCompleted };

struct TensorSizes {
  std::vector<std::vector<int64_t>> sizes;
  std::vector<std::string> dtypes;

  TensorSizes() = default;
  explicit TensorSizes(const std::vector<at::Tensor>& tensors);
};

// A collective or a message between two ranks, from the call on.
struct Recorded {
  std::string group_name;
  std::string group_description;
  std::string name;
  uint64_t collective_number = 0; // in its group: messages have those of their own
  uint64_t message_number = 0;
  bool is_message = false;
  TensorSizes inputs;
  TensorSizes outputs;

  uint64_t id = 0;
  int64_t created_ns = 0;
  std::shared_ptr<torch::CapturedTraceback> traceback;
  std::atomic<Progress> progress{Progress::kScheduled};
};
using RecordedPtr = std::shared_ptr<Recorded>;

// Keep what is about to be enqueued, with the Python frames of this thread; one of autograd's has none.
void record(const RecordedPtr& entry);

// Return the kept entries as dictionaries, oldest first.
pybind11::list recorded_entries(bool with_frames, bool only_active);

} // namespace simulated
