#include "memory.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

namespace simulated {

namespace {

constexpr size_t kRounding = 64;
constexpr size_t kNoLimit = size_t(64) << 30;

// [Note: when freed memory changes]
// A block belongs to the stream that was current when it was allocated. Freeing it on the host makes it free for that
// stream at once: later work of the stream comes after the work that used it. Another stream that still uses it loses,
// unless `record_stream` told the allocator. On a GPU that shows when the block happens to be reused. Here every
// allocation of the stream may reuse every freed block: it poisons all of them, in the order of the stream's work. So a
// stream that first waits for the other, and then allocates, is right, as on a GPU.

struct Block {
  void* data;
  size_t size; // as reserved
  size_t requested = 0;
  int device;
  c10::StreamId stream;
  std::set<c10::StreamId> used_by; // other streams
  std::vector<MomentPtr> in_use_until;
};

struct Pool {
  std::multimap<size_t, Block*> free;
  std::vector<Block*> to_poison;
};

struct Memory {
  std::mutex mutex;
  size_t limit = kNoLimit;
  size_t outside = 0; // what libraries have taken
  std::map<c10::StreamId, Pool> pools;
  std::vector<Block*> leaving; // freed on the host, and still used by recorded streams
  std::map<const void*, Block*> live;
  c10::CachingDeviceAllocator::DeviceStats statistics;
};

Memory& memory_of(int device) {
  static auto* const memories = new std::array<Memory, kMostDevices>();
  return (*memories)[device];
}

void count(c10::CachingAllocator::StatArray& statistics, int64_t amount) {
  auto& all = statistics[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  amount >= 0 ? all.increase(amount) : all.decrease(-amount);
}

void* aligned_memory(size_t size) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, kRounding, size) == 0, "this machine has no ", size, " bytes for the device");
  return data;
}

void poison(const QueuePtr& queue, void* data, size_t size) {
  if (queue->is_idle()) {
    std::memset(data, kPoison, size);
  } else {
    queue->add([data, size] { std::memset(data, kPoison, size); }, /*at_once=*/true);
  }
}

void put_into_pool(Memory& memory, Block* block) {
  auto& pool = memory.pools[block->stream];
  pool.free.emplace(block->size, block);
  pool.to_poison.push_back(block);
}

void collect_leaving(Memory& memory) {
  auto& leaving = memory.leaving;
  for (size_t i = 0; i < leaving.size();) {
    auto& moments = leaving[i]->in_use_until;
    while (!moments.empty() && moments.back()->has_passed()) {
      moments.pop_back();
    }
    if (moments.empty()) {
      put_into_pool(memory, leaving[i]);
      leaving.erase(leaving.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (in_bad_fork()) { // the parent's
    return;
  }
  auto& memory = memory_of(block->device);
  std::vector<MomentPtr> moments;
  for (const auto stream : block->used_by) {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(block->device));
    moments.push_back(queue_of(c10::Stream(c10::Stream::UNSAFE, device, stream))->record());
  }
  std::lock_guard lock(memory.mutex);
  memory.live.erase(block->data);
  count(memory.statistics.allocated_bytes, -static_cast<int64_t>(block->requested));
  count(memory.statistics.allocation, -1);
  block->used_by.clear();
  if (moments.empty()) {
    put_into_pool(memory, block);
  } else {
    block->in_use_until = std::move(moments);
    memory.leaving.push_back(block);
  }
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const int index = current_device();
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(index));
    if (size == 0) {
      return {nullptr, device};
    }
    open_context(index);
    Block* block = take(index, size);
    return {block->data, block, &free_block, device};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* target, const void* source, size_t size) const override {
    const auto queue = current_queue(current_device());
    queue->synchronize();
    default_copy_data(target, source, size);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int device = 0; device < device_count(); ++device) {
      if (has_context(device)) {
        release_cache(device);
      }
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get() == nullptr || pointer.get_deleter() != &free_block) {
      return;
    }
    auto* block = static_cast<Block*>(pointer.get_context());
    std::lock_guard lock(memory_of(block->device).mutex);
    if (stream.id() != block->stream) {
      block->used_by.insert(stream.id());
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto& memory = checked(device);
    std::lock_guard lock(memory.mutex);
    return memory.statistics;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_all_statistics(device, [](auto& statistic) { statistic.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    for_all_statistics(device, [](auto& statistic) { statistic.reset_peak(); });
  }

  // Not marked as override: torch 2.9 does not have it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    open_context(device);
    auto& memory = checked(device);
    std::lock_guard lock(memory.mutex);
    const size_t reserved = reserved_bytes(memory);
    return {memory.limit > reserved ? memory.limit - reserved : 0, memory.limit};
  }

 private:
  static Memory& checked(int device) {
    check_device(device);
    return memory_of(device);
  }

  static size_t reserved_bytes(Memory& memory) {
    return memory.statistics.reserved_bytes[0].current + memory.outside;
  }

  template <typename Function>
  static void for_all_statistics(int device, Function function) {
    auto& memory = checked(device);
    std::lock_guard lock(memory.mutex);
    auto& statistics = memory.statistics;
    for (auto* array : {&statistics.allocation, &statistics.segment, &statistics.allocated_bytes, &statistics.reserved_bytes}) {
      for (auto& statistic : *array) {
        function(statistic);
      }
    }
  }

  static Block* take(int device, size_t size) {
    auto& memory = memory_of(device);
    const auto stream = current_stream(device);
    const auto queue = queue_of(stream);
    const size_t rounded = (size + kRounding - 1) / kRounding * kRounding;
    Block* block = nullptr;
    {
      std::lock_guard lock(memory.mutex);
      collect_leaving(memory);
      auto& pool = memory.pools[stream.id()];
      for (auto* freed : pool.to_poison) { // see [Note: when freed memory changes]
        poison(queue, freed->data, freed->size);
      }
      pool.to_poison.clear();
      const auto found = pool.free.lower_bound(rounded);
      if (found != pool.free.end() && found->first <= 2 * rounded) {
        block = found->second;
        pool.free.erase(found);
      }
    }
    if (block == nullptr) {
      block = reserve(device, stream.id(), rounded, size);
    }
    std::lock_guard lock(memory.mutex);
    block->requested = size;
    memory.live[block->data] = block;
    count(memory.statistics.allocated_bytes, static_cast<int64_t>(size));
    count(memory.statistics.allocation, 1);
    return block;
  }

  static Block* reserve(int device, c10::StreamId stream, size_t rounded, size_t size) {
    auto& memory = memory_of(device);
    const auto is_too_much = [&] {
      std::lock_guard lock(memory.mutex);
      return reserved_bytes(memory) + rounded > memory.limit;
    };
    if (is_too_much()) {
      release_cache(device);
    }
    if (is_too_much()) {
      std::lock_guard lock(memory.mutex);
      ++memory.statistics.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          c10::get_privateuse1_backend(),
          " out of memory. Tried to allocate ",
          size,
          " bytes on device ",
          device,
          ", which has ",
          memory.limit,
          " bytes and uses ",
          reserved_bytes(memory),
          ".");
    }
    check_call("cudaMalloc");
    auto* block = new Block{aligned_memory(rounded), rounded, size, device, stream, {}, {}};
    std::memset(block->data, kPoison, rounded);
    std::lock_guard lock(memory.mutex);
    count(memory.statistics.reserved_bytes, static_cast<int64_t>(rounded));
    count(memory.statistics.segment, 1);
    return block;
  }

  // Give the memory of free blocks back. Work may still use it: wait for all of it, as cudaFree does. While the host waits
  // for one stream, another thread may add work to a stream that was waited for, and free what that work uses.
  static void release_cache(int device) {
    auto& memory = memory_of(device);
    synchronize_device(device);
    std::unique_lock lock(memory.mutex);
    while (!is_idle(device)) {
      lock.unlock();
      synchronize_device(device);
      lock.lock();
    }
    collect_leaving(memory);
    for (auto& [stream, pool] : memory.pools) {
      for (const auto& [size, block] : pool.free) {
        count(memory.statistics.reserved_bytes, -static_cast<int64_t>(size));
        count(memory.statistics.segment, -1);
        std::free(block->data);
        delete block;
      }
      pool.free.clear();
      pool.to_poison.clear();
    }
  }
};

// The same memory of a device type that has no `DeviceAllocator` (MPS, NPU): `torch.accelerator.empty_cache` raises.
class PlainMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    return device_allocator()->allocate(size);
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    device_allocator()->copy_data(target, source, size);
  }
};

// --- Pinned memory

struct PinnedBlock {
  size_t size; // as taken
  size_t asked; // 0 while nobody holds it
};

struct Pinned {
  std::mutex mutex;
  std::map<const char*, PinnedBlock> blocks;
  std::multimap<size_t, char*> kept;
  PinnedStatistics statistics;
};

Pinned& pinned() {
  static auto* const instance = new Pinned();
  return *instance;
}

size_t largest_rounded() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_round_threshold();
#else
  return SIZE_MAX;
#endif
}

size_t largest_kept() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_cached_size();
#else
  return SIZE_MAX;
#endif
}

size_t power_of_two_from(size_t size) {
  size_t found = 1;
  while (found < size) {
    found *= 2;
  }
  return found;
}

void free_pinned(void* data) {
  if (in_bad_fork()) {
    return; // the parent's
  }
  std::lock_guard lock(pinned().mutex);
  const auto found = pinned().blocks.find(static_cast<const char*>(data));
  auto& [size, asked] = found->second;
  pinned().statistics.asked -= asked;
  asked = 0;
  if (size <= largest_kept()) {
    pinned().kept.emplace(size, static_cast<char*>(data));
  } else {
    pinned().statistics.taken -= size;
    pinned().blocks.erase(found);
    std::free(data);
  }
}

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    open_context(current_device());
    const bool is_rounded = size <= largest_rounded() && size <= largest_kept();
    const size_t wanted = is_rounded ? power_of_two_from(size) : size;
    void* data = nullptr;
    {
      std::lock_guard lock(pinned().mutex);
      const auto found = pinned().kept.find(wanted);
      if (found != pinned().kept.end()) {
        data = found->second;
        pinned().kept.erase(found);
      }
    }
    if (data == nullptr) {
      check_call("cudaHostAlloc");
      data = aligned_memory(wanted);
      std::lock_guard lock(pinned().mutex);
      auto& statistics = pinned().statistics;
      statistics.taken += wanted;
      statistics.most_taken = std::max(statistics.most_taken, statistics.taken);
      ++statistics.allocations;
    }
    std::memset(data, kPoison, size);
    std::lock_guard lock(pinned().mutex);
    pinned().blocks[static_cast<const char*>(data)] = {wanted, size};
    pinned().statistics.asked += size;
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true; // pending copies hold the tensors that they read
  }
  void empty_cache() override {
    empty_pinned_cache();
  }
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* const instance = new DeviceMemory();
  return instance;
}

void register_allocator(bool with_statistics) {
  at::setHostAllocator(kType, pinned_allocator());
  static auto* const plain = new PlainMemory();
  c10::Allocator* const chosen = with_statistics ? static_cast<c10::Allocator*>(device_allocator()) : plain;
  c10::SetAllocator(kType, chosen);
}

void set_memory_limit(int device, size_t num_bytes) {
  check_device(device);
  std::lock_guard lock(memory_of(device).mutex);
  memory_of(device).limit = num_bytes;
}

size_t memory_limit(int device) {
  check_device(device);
  std::lock_guard lock(memory_of(device).mutex);
  return memory_of(device).limit;
}

int device_of_pointer(const void* pointer) {
  for (int device = 0; device < kMostDevices; ++device) {
    auto& memory = memory_of(device);
    std::lock_guard lock(memory.mutex);
    auto after = memory.live.upper_bound(pointer);
    if (after != memory.live.begin()) {
      const Block* block = std::prev(after)->second;
      if (pointer < static_cast<const char*>(block->data) + block->size) {
        return device;
      }
    }
  }
  return -1;
}

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  const int device = storage.device().index();
  const OnDevice guard(device);
  auto pointer = device_allocator()->allocate(num_bytes);
  const size_t kept = std::min(impl->nbytes(), num_bytes);
  if (kept > 0) {
    const auto queue = current_queue(device);
    queue->add([target = pointer.get(), source = impl->data(), kept, pause = pause_of_copy(kept)] {
      sleep_for(pause.before_reading);
      std::memcpy(target, source, kept);
    });
  }
  impl->set_data_ptr_noswap(std::move(pointer)); // the old memory is free for later work of the stream
  impl->set_nbytes(num_bytes);
}

at::HostAllocator* pinned_allocator() {
  static auto* const instance = new PinnedMemory();
  return instance;
}

PinnedStatistics pinned_statistics() {
  std::lock_guard lock(pinned().mutex);
  return pinned().statistics;
}

void empty_pinned_cache() {
  check_call("cudaFreeHost");
  std::lock_guard lock(pinned().mutex);
  for (const auto& [size, data] : pinned().kept) {
    pinned().statistics.taken -= size;
    pinned().blocks.erase(data);
    std::free(data);
  }
  pinned().kept.clear();
}

bool is_pinned(const void* pointer) {
  const auto* address = static_cast<const char*>(pointer);
  std::lock_guard lock(pinned().mutex);
  auto after = pinned().blocks.upper_bound(address);
  if (after == pinned().blocks.begin()) {
    return false;
  }
  const auto& [start, block] = *std::prev(after);
  return address < start + block.asked;
}

bool take_outside(int device, size_t num_bytes) {
  check_device(device);
  auto& memory = memory_of(device);
  std::lock_guard lock(memory.mutex);
  if (static_cast<size_t>(memory.statistics.reserved_bytes[0].current) + memory.outside + num_bytes > memory.limit) {
    return false;
  }
  memory.outside += num_bytes;
  return true;
}

void give_back_outside(int device, size_t num_bytes) {
  if (num_bytes > 0) {
    auto& memory = memory_of(device);
    std::lock_guard lock(memory.mutex);
    memory.outside -= num_bytes;
  }
}

size_t bytes_outside(int device) {
  check_device(device);
  std::lock_guard lock(memory_of(device).mutex);
  return memory_of(device).outside;
}

} // namespace simulated
