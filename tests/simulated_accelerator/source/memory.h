// Device memory with a limit, statistics and reuse per stream; pinned host memory.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

namespace simulated {

// What memory holds that nobody has written: NaN in every floating-point format, -1 in integers.
constexpr int kPoison = 0xFF;

c10::DeviceAllocator* device_allocator();
void register_allocator(bool with_statistics);
void set_memory_limit(int device, size_t num_bytes);
size_t memory_limit(int device);
int device_of_pointer(const void* pointer); // -1 where it is no device memory

// Change the size of a storage in the order of the current stream's work, and keep what it held.
void resize_storage(const c10::Storage& storage, size_t num_bytes);

// Memory that libraries take from the device's driver: torch's allocator knows nothing of it. False where none is left.
bool take_outside(int device, size_t num_bytes);
void give_back_outside(int device, size_t num_bytes);
size_t bytes_outside(int device);

// Pinned memory as CUDA's allocator of the host gives it: rounded up to a power of two, and kept when it is freed.
// torch's settings of its own allocator apply: pinned_max_round_threshold_mb and pinned_max_cached_size_mb.
struct PinnedStatistics {
  size_t asked = 0; // by those who hold it
  size_t taken = 0; // from the system
  size_t most_taken = 0;
  uint64_t allocations = 0; // from the system
};
PinnedStatistics pinned_statistics();
void empty_pinned_cache();

at::HostAllocator* pinned_allocator();
bool is_pinned(const void* pointer);

} // namespace simulated
