// Device memory with a limit, statistics and reuse per stream; pinned host memory.
#pragma once

#include "streams.h"

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

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

} // namespace simulated
