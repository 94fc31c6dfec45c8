#include "recorder.h"

#include <c10/util/ApproximateClock.h>

#include <deque>
#include <mutex>

namespace simulated {

namespace {

constexpr size_t kMostEntries = 2000; // as NCCL's

struct Kept {
  std::mutex mutex;
  std::deque<RecordedPtr> entries;
  uint64_t next_id = 0;
};

// Never destroyed: it holds what belongs to Python, which may have ended.
Kept& kept() {
  static Kept* const instance = new Kept();
  return *instance;
}

const char* name_of(Progress progress) {
  return progress == Progress::kScheduled ? "scheduled" : progress == Progress::kStarted ? "started" : "completed";
}

pybind11::dict as_dictionary(const Recorded& entry) {
  pybind11::dict found;
  found["record_id"] = entry.id;
  found["process_group"] = pybind11::make_tuple(entry.group_name, entry.group_description);
  found["collective_seq_id"] = entry.collective_number;
  found["p2p_seq_id"] = entry.message_number;
  found["is_p2p"] = entry.is_message;
  found["profiling_name"] = entry.name;
  found["time_created_ns"] = entry.created_ns;
  found["input_sizes"] = entry.inputs.sizes;
  found["input_dtypes"] = entry.inputs.dtypes;
  found["output_sizes"] = entry.outputs.sizes;
  found["output_dtypes"] = entry.outputs.dtypes;
  found["state"] = name_of(entry.progress);
  found["retired"] = entry.progress == Progress::kCompleted;
  return found;
}

pybind11::list frames_of(const torch::SymbolizedTracebacks& symbolized, const std::vector<uint64_t>& traceback) {
  pybind11::list frames;
  for (const auto index : traceback) {
    const auto& frame = symbolized.all_frames.at(index);
    pybind11::dict found;
    found["name"] = frame.funcname;
    found["filename"] = frame.filename;
    found["line"] = frame.lineno;
    frames.append(found);
  }
  return frames;
}

} // namespace

TensorSizes::TensorSizes(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    sizes.push_back(tensor.sizes().vec());
    dtypes.emplace_back(c10::toString(tensor.scalar_type()));
  }
}

void record(const RecordedPtr& entry) {
  entry->created_ns = c10::getTime();
  entry->traceback = torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
  std::lock_guard lock(kept().mutex);
  entry->id = kept().next_id++;
  kept().entries.push_back(entry);
  if (kept().entries.size() > kMostEntries) {
    kept().entries.pop_front();
  }
}

pybind11::list recorded_entries(bool with_frames, bool only_active) {
  std::vector<RecordedPtr> entries;
  {
    std::lock_guard lock(kept().mutex);
    for (const auto& entry : kept().entries) {
      if (!only_active || entry->progress != Progress::kCompleted) {
        entries.push_back(entry);
      }
    }
  }
  torch::SymbolizedTracebacks symbolized;
  if (with_frames) {
    std::vector<torch::CapturedTraceback*> tracebacks;
    for (const auto& entry : entries) {
      tracebacks.push_back(entry->traceback.get());
    }
    symbolized = torch::symbolize(tracebacks);
  }
  pybind11::list found;
  for (size_t i = 0; i < entries.size(); ++i) {
    auto dictionary = as_dictionary(*entries[i]);
    if (with_frames) {
      dictionary["frames"] = frames_of(symbolized, symbolized.tracebacks.at(i));
    }
    found.append(dictionary);
  }
  return found;
}

} // namespace simulated
