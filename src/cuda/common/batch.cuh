// Many tensors in one launch. A table on the device describes them, and each block of threads finds
// the entry of its tile.
//
//     firsts    each entry's first tile; tiles are numbered through, entry after entry
//     entries   the kernel's descriptions
//
// A launch (and a graph) takes the table by value, as kernel parameters: no host memory has to
// outlive the call, and nothing waits. One launch takes up to 30 KB of the table.
#pragma once

#include <cstring>
#include <vector>

#include "cuda/common/launch.h"
#include "cuda/common/layout.h"
#include "cuda/common/tile.cuh"

namespace minifloat::cuda {

template <unsigned kBytes>
struct Parcel {
  uint4 chunks[kBytes / 16];
};
template <unsigned kBytes>
__global__ void unpack(const __grid_constant__ Parcel<kBytes> parcel, uint4* to, unsigned chunks) {
  for (unsigned i = threadIdx.x; i < chunks; i += blockDim.x) to[i] = parcel.chunks[i];
}

template <unsigned kBytes>
void send(const std::uint8_t* bytes, std::size_t count, void* to, cudaStream_t stream) {
  Parcel<kBytes> parcel;
  std::memcpy(&parcel, bytes, count);
  const auto chunks = static_cast<unsigned>(ceil_div<std::size_t>(count, 16));
  unpack<kBytes><<<1, 256, 0, stream>>>(parcel, static_cast<uint4*>(to), chunks);
  check_launch("table");
}

template <class Entry>
struct TableView {
  const Entry* entries;
  const std::uint32_t* firsts;
  std::uint32_t count;
};

// A table that the host builds entry by entry and sends once.
template <class Entry>
class Table {
 public:
  // Adds an entry of `tiles` tiles; an entry without any is left out.
  void add(const Entry& entry, std::int64_t tiles) {
    if (tiles == 0) return;
    firsts_.push_back(static_cast<std::uint32_t>(tiles_));
    entries_.push_back(entry);
    tiles_ += tiles;
  }
  bool empty() const { return entries_.empty(); }
  unsigned grid(const char* kernel) const { return grid_of(tiles_, kernel); }

  std::size_t bytes() const { return entries_at() + entries_.size() * sizeof(Entry); }
  // Sends the table.   memory: (bytes()), aligned to 16 and rounded up to it
  TableView<Entry> send_to(std::uint8_t* memory, cudaStream_t stream) const {
    constexpr std::size_t kSmall = 1024, kLarge = 30 * 1024;
    std::vector<std::uint8_t> image(bytes());
    std::memcpy(image.data(), firsts_.data(), firsts_.size() * sizeof(std::uint32_t));
    std::memcpy(image.data() + entries_at(), entries_.data(), entries_.size() * sizeof(Entry));
    for (std::size_t at = 0; at < image.size(); at += kLarge) {
      const std::size_t left = std::min(image.size() - at, kLarge);
      if (left <= kSmall)
        send<kSmall>(image.data() + at, left, memory + at, stream);
      else
        send<kLarge>(image.data() + at, left, memory + at, stream);
    }
    return {reinterpret_cast<const Entry*>(memory + entries_at()),
            reinterpret_cast<const std::uint32_t*>(memory),
            static_cast<std::uint32_t>(entries_.size())};
  }

 private:
  std::size_t entries_at() const {
    return round_up<std::size_t>(firsts_.size() * sizeof(std::uint32_t), 16);
  }
  std::vector<std::uint32_t> firsts_;
  std::vector<Entry> entries_;
  std::int64_t tiles_ = 0;
};

// Launches kernel(view of the table), a block of kThreads a tile.   shared: bytes of dynamic shared
// memory
template <class Entry, class Kernel>
void launch_over(const Table<Entry>& table, Kernel kernel, const char* name,
                 const Execution& execution, std::size_t shared = 0) {
  if (table.empty()) return;
  const Scratch scratch(round_up<std::size_t>(table.bytes(), 16), execution);
  const auto view = table.send_to(scratch.as<std::uint8_t>(), cuda_stream(execution));
  allow_shared(kernel, shared, name);
  kernel<<<table.grid(name), kThreads, shared, cuda_stream(execution)>>>(view);
  check_launch(name);
}

// Copies the entry of this block's tile into shared memory, and returns the tile's number within
// the entry. Every warp searches by itself, 32 ways at a time, for the last entry that begins at or
// before the tile.
template <class Entry>
__device__ __forceinline__ std::uint32_t find_entry(const TableView<Entry>& table, Entry& shared) {
  static_assert(sizeof(Entry) % 16 == 0 && alignof(Entry) == 16);
  const std::uint32_t tile = blockIdx.x, lane = threadIdx.x % 32;
  std::uint32_t low = 0, count = table.count;
  while (count > 1) {
    const std::uint32_t step = (count + 31) / 32, at = lane * step;
    const bool begins_before = at < count && __ldg(table.firsts + low + at) <= tile;
    const std::uint32_t last = 31 - __clz(__ballot_sync(kAllLanes, begins_before));
    low += last * step;
    count = min(step, count - last * step);
  }
  const uint4* from = reinterpret_cast<const uint4*>(table.entries + low);
  for (unsigned i = threadIdx.x; i < sizeof(Entry) / 16; i += kThreads)
    reinterpret_cast<uint4*>(&shared)[i] = __ldg(from + i);
  __syncthreads();
  return tile - __ldg(table.firsts + low);
}

}  // namespace minifloat::cuda
