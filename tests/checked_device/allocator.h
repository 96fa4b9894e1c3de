// The device's memory and pinned host memory.

#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace pd2 {

// Like CUDA's caching allocator: a freed block goes back to its stream, which may use it again at
// once, but for a block that was recorded on other streams: that comes back when their work so far
// is over. What else may still use a freed block when the next one is allocated is a race. New and
// freed memory holds NaN.
void register_allocator();

// Checks all freed blocks at once, each as an allocation on its stream does once the streams that
// it was recorded on are through.
void settle_memory();

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

// The device that the memory is on; -1 if it is none of theirs.
int device_of_memory(const void* pointer);

// Memory that belongs to graphs: a freed block of it serves only them, until the last one is gone.
struct GraphMemory;
std::shared_ptr<GraphMemory> new_graph_memory();
// From now on what is allocated for the stream comes from there.
void begin_graph_memory(std::size_t stream, const std::shared_ptr<GraphMemory>& memory);
// No more. What has been allocated since holds NaN; returns the bytes by which the memory grew.
std::int64_t end_graph_memory(std::size_t stream) noexcept;

// With a transfer that runs in a thread: as record_stream, but not counted.
void keep_for_stream(const c10::DataPtr& memory, std::size_t stream);

}  // namespace pd2
