// The allocator of the symmetric heap: blocks do not overlap, free memory is used again, and a
// forked child can neither allocate nor free.
#include "../../csrc/group/symmetric_heap.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <cstring>
#include <random>
#include <set>

#include "ranks.h"

namespace pycollect::ipc {
namespace {

constexpr std::size_t kMiB = 1 << 20;

std::unique_ptr<Group> make_group(std::size_t symmetric_heap_bytes) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  GroupSettings settings = quick_settings();
  settings.symmetric_heap_bytes = symmetric_heap_bytes;
  return std::make_unique<Group>(store, 0, 1, settings);
}

std::size_t committed_bytes(const Segment& segment) {
  struct stat found = {};
  fstat(segment.descriptor(), &found);
  return found.st_blocks * 512;
}

// Blocks do not overlap, and every byte of a block is writable.
void blocks_do_not_overlap() {
  const auto group = make_group(1024 * kMiB);
  SymmetricHeap heap(*group);
  std::mt19937 random(3);
  struct Block {
    std::size_t offset, bytes;
    unsigned char mark;
  };
  std::vector<Block> blocks;
  const auto release = [&] {
    const auto [offset, bytes, mark] = blocks.back();
    const auto* at = reinterpret_cast<unsigned char*>(heap.data() + offset);
    for (std::size_t k = 0; k < bytes; k += 1 + bytes / 1000) expect(at[k] == mark, "overwritten");
    expect(bytes == 0 || at[bytes - 1] == mark, "overwritten at its end");
    heap.free(offset);
    blocks.pop_back();
  };
  for (int i = 0; i < 6000; ++i) {
    if (blocks.empty() || random() % 100 < (heap.usage().used < 100 * kMiB ? 60 : 40)) {
      const std::size_t bytes = random() >> (11 + random() % 21);
      blocks.push_back({heap.allocate(bytes), bytes, static_cast<unsigned char>(i)});
      expect(blocks.back().offset % SymmetricHeap::kAlignment == 0, "not aligned");
      std::memset(heap.data() + blocks.back().offset, blocks.back().mark, bytes);
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      release();
    }
  }
  while (!blocks.empty()) release();
  expect(heap.usage().used == 0, "blocks are left");
  const std::size_t before = committed_bytes(*group->segment());
  for (int i = 0; i < 100; ++i) {
    const std::size_t a = heap.allocate(4 * kMiB), b = heap.allocate(kMiB / 2);
    heap.free(a), heap.free(b);
  }
  expect(committed_bytes(*group->segment()) == before, "freed memory was not used again");
}

void reports_exhaustion() {
  const auto small = make_group(8 * kMiB);
  SymmetricHeap heap(*small);
  const std::size_t block = heap.allocate(5 * kMiB);
  expect_part(refusal([&] { heap.allocate(9 * kMiB); }), "does not fit into");
  expect_part(refusal([&] { heap.allocate(~std::size_t{0}); }), "does not fit into");
  expect_part(refusal([&] { heap.allocate(5 * kMiB); }), "no place for");
  heap.free(block);
  heap.allocate(6 * kMiB);
  const auto large = make_group(std::size_t{1} << 40);
  SymmetricHeap vast(*large);
  const std::string message = refusal([&] { vast.allocate(std::size_t{1} << 39); });
  expect(contains(message, "no memory for 524289 MiB of shared memory: "), message);
  vast.free(vast.allocate(kMiB));
}

// After an abort no memory is reused: peers may still access tensors of the aborted call.
void aborted_heap_is_frozen() {
  const auto group = make_group(64 * kMiB);
  SymmetricHeap heap(*group);
  const std::size_t free = heap.allocate(2 * kMiB), block = heap.allocate(kMiB);
  heap.free(free);
  group->abort("a test");
  const std::size_t before = heap.usage().used;
  heap.free(block);
  expect(heap.usage().used == before, "a block was freed");
  expect_equal(refusal([&] { heap.allocate(kMiB); }),
               "PeerLost: allocate_tensor #3 of group 'default': rank 0 aborted the group: a test");
}

void child_cannot_allocate_or_free() {
  const auto group = make_group(2048 * kMiB);
  SymmetricHeap heap(*group);
  const std::size_t block = heap.allocate(600 * kMiB);
  std::memset(heap.data() + block, 7, 600 * kMiB);
  expect_in_child([&] {
    heap.free(block);
    expect_part(refusal([&] { heap.allocate(1); }), "forked child");
  });
  expect(heap.data()[block + 300 * kMiB] == std::byte{7}, "the child freed its parent's memory");
}

// In a heap that outlives its group.
void staggers_large_blocks() {
  SymmetricHeap heap(*make_group(64 * kMiB));
  std::set<std::size_t> offsets;
  for (int i = 0; i < 8; ++i) {
    const std::size_t block = heap.allocate(kMiB);
    std::memset(heap.data() + block, 1, kMiB);
    offsets.insert(block % 4096);
  }
  expect(offsets.size() == 8, "blocks of one size begin at the same place of a page");
}

void default_size_fits_address_space() {
  for (int world : {1, 2, 64}) {
    const std::size_t bytes = SymmetricHeap::default_bytes(world);
    expect(bytes % 4096 == 0 && bytes >= (std::size_t{1} << 30), "too small");
    expect(bytes * world <= std::size_t{1} << 42, "too large");
  }
  rlimit limit = {};
  getrlimit(RLIMIT_AS, &limit);
  const rlimit small = {std::size_t{16} << 30, limit.rlim_max};
  setrlimit(RLIMIT_AS, &small);
  expect(SymmetricHeap::default_bytes(8) <= 256 * kMiB, "ignores the limit");
  setrlimit(RLIMIT_AS, &limit);
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  blocks_do_not_overlap();
  reports_exhaustion();
  aborted_heap_is_frozen();
  child_cannot_allocate_or_free();
  staggers_large_blocks();
  default_size_fits_address_space();
  std::puts("symmetric_heap_test: all good");
}
