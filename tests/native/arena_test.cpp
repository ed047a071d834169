// The allocator of shared memory: blocks that do not overlap, memory that comes and goes, and who
// may free what.
#include "../../csrc/shm/arena.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <random>

#include "group_ranks.h"

namespace pycollect::shm {
namespace {

constexpr std::size_t kMiB = 1 << 20;

std::unique_ptr<Group> alone(std::size_t arena_bytes) {
  MapBoard board;
  Settings settings = quick();
  settings.arena_bytes = arena_bytes;
  return std::make_unique<Group>(board, 0, 1, settings);
}

std::size_t memory_of(const Segment& segment) {
  struct stat found = {};
  fstat(segment.descriptor(), &found);
  return found.st_blocks * 512;
}

// Whole pages of a block belong to nobody else, and every byte of it is writable.
void keeps_blocks_apart() {
  const auto group = alone(1024 * kMiB);
  Arena arena(*group);
  std::mt19937 random(3);
  struct Block {
    std::size_t offset, bytes;
    unsigned char mark;
  };
  std::vector<Block> blocks;
  std::size_t used = 0;
  for (int i = 0; i < 6000; ++i) {
    if (blocks.empty() || random() % 100 < (used < 100 * kMiB ? 60 : 40)) {
      const std::size_t bytes = random() >> (11 + random() % 21);
      const Block block{arena.allocate(bytes), bytes, static_cast<unsigned char>(i)};
      expect(block.offset % Arena::kAlignment == 0, "not aligned");
      std::memset(arena.data() + block.offset, block.mark, bytes);
      blocks.push_back(block);
      used += bytes;
      continue;
    }
    std::swap(blocks[random() % blocks.size()], blocks.back());
    const Block block = blocks.back();
    blocks.pop_back();
    const auto* bytes = reinterpret_cast<unsigned char*>(arena.data() + block.offset);
    for (std::size_t k = 0; k < block.bytes; k += 1 + block.bytes / 1000)
      expect(bytes[k] == block.mark, "overwritten");
    expect(block.bytes == 0 || bytes[block.bytes - 1] == block.mark, "overwritten at its end");
    arena.free(block.offset);
    used -= block.bytes;
  }
  for (const Block& block : blocks) arena.free(block.offset);
  expect(arena.use().used == 0, "blocks are left");
  expect(arena.use().kept <= 256 * kMiB + 64 * kMiB, "too much is kept");
}

void reuses_memory() {
  const auto group = alone(1024 * kMiB);
  Arena arena(*group);
  const std::size_t first = arena.allocate(5 * kMiB);
  arena.free(first);
  const std::size_t before = memory_of(*group->segment());
  for (int i = 0; i < 100; ++i) {
    const std::size_t a = arena.allocate(4 * kMiB), b = arena.allocate(kMiB / 2);
    expect(a != b, "the same block twice");
    arena.free(a), arena.free(b);
  }
  expect(memory_of(*group->segment()) == before, "grew");
}

void gives_memory_back() {
  const auto group = alone(4096 * kMiB);
  Arena arena(*group);
  std::vector<std::size_t> blocks;
  for (int i = 0; i < 12; ++i) {
    blocks.push_back(arena.allocate(48 * kMiB));
    std::memset(arena.data() + blocks.back(), 7, 48 * kMiB);
  }
  expect(memory_of(*group->segment()) > 576 * kMiB, "was not committed");
  const std::size_t kept = blocks.back();
  while (blocks.size() > 1) {
    arena.free(blocks.front());
    blocks.erase(blocks.begin());
    for (std::size_t block : blocks)
      for (std::size_t i : {std::size_t{0}, 24 * kMiB, 48 * kMiB - 1})
        expect(arena.data()[block + i] == std::byte{7}, "somebody's memory was given back");
  }
  expect(memory_of(*group->segment()) < 448 * kMiB, "was not given back");
  for (int i = 0; i < 11; ++i) {  // and is got again
    const std::size_t block = arena.allocate(48 * kMiB);
    std::memset(arena.data() + block, 1, 48 * kMiB);
  }
  expect(arena.data()[kept] == std::byte{7}, "overwritten");
}

std::string refusal(const std::function<void()>& body) {
  return attempt([&] {
    body();
    return "nothing";
  });
}

void says_when_there_is_no_more() {
  const auto small = alone(8 * kMiB);
  Arena arena(*small);
  const std::size_t block = arena.allocate(5 * kMiB);
  expect(contains(refusal([&] { arena.allocate(9 * kMiB); }), "does not fit into"), "too large");
  expect(contains(refusal([&] { arena.allocate(~std::size_t{0}); }), "does not fit into"), "wraps");
  expect(contains(refusal([&] { arena.allocate(5 * kMiB); }), "no place for"), "full");
  arena.free(block);
  arena.allocate(6 * kMiB);
  const auto large = alone(std::size_t{1} << 40);
  Arena vast(*large);
  const std::string said = refusal([&] { vast.allocate(std::size_t{1} << 39); });
  expect(contains(said, "no memory for 524289 MiB to share: "), said);
  vast.free(vast.allocate(kMiB));
}

void outlives_its_group() {
  std::unique_ptr<Arena> arena;
  {
    const auto group = alone(64 * kMiB);
    arena = std::make_unique<Arena>(*group);
  }
  std::memset(arena->data() + arena->allocate(kMiB), 1, kMiB);
}

// Others may go on with what they were lent in the call that broke it.
void keeps_everything_of_a_broken_group() {
  const auto group = alone(64 * kMiB);
  auto arena = std::make_unique<Arena>(*group);
  const std::size_t free = arena->allocate(2 * kMiB), block = arena->allocate(kMiB);
  arena->free(free);
  group->abort("it was tired");
  const std::size_t before = arena->use().used;
  arena->free(block);
  expect(arena->use().used == before, "a block was taken back");
  const std::string said = refusal([&] { arena->allocate(kMiB); });
  expect_equal(said,
               "PeerLost: allocate_tensor #3 of group 'default': rank 0 aborted the group: it was "
               "tired");
}

void leaves_the_parents_alone() {
  const auto group = alone(2048 * kMiB);
  Arena arena(*group);
  const std::size_t block = arena.allocate(600 * kMiB);
  std::memset(arena.data() + block, 7, 600 * kMiB);
  const pid_t child = fork();
  if (child == 0) {
    arena.free(block);
    _exit(contains(refusal([&] { arena.allocate(1); }), "forked child") ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(status == 0, "a child may not allocate");
  expect(arena.data()[block + 300 * kMiB] == std::byte{7}, "the child freed its parent's memory");
}

void keeps_large_blocks_off_the_same_sets() {
  const auto group = alone(64 * kMiB);
  Arena arena(*group);
  std::set<std::size_t> places;
  for (int i = 0; i < 8; ++i) places.insert(arena.allocate(kMiB) % 4096);
  expect(places.size() == 8, "blocks of one size begin at the same place of a page");
}

void fits_into_address_space() {
  for (int world : {1, 2, 64}) {
    const std::size_t bytes = Arena::default_bytes(world);
    expect(bytes % 4096 == 0 && bytes >= (std::size_t{1} << 30), "too small");
    expect(bytes * world <= std::size_t{1} << 42, "too large");
  }
  rlimit limit = {};
  getrlimit(RLIMIT_AS, &limit);
  const rlimit small = {std::size_t{16} << 30, limit.rlim_max};
  setrlimit(RLIMIT_AS, &small);
  expect(Arena::default_bytes(8) <= 256 * kMiB, "heeds no limit");
  setrlimit(RLIMIT_AS, &limit);
}

}  // namespace
}  // namespace pycollect::shm

int main() {
  using namespace pycollect::shm;
  keeps_blocks_apart();
  reuses_memory();
  gives_memory_back();
  says_when_there_is_no_more();
  outlives_its_group();
  keeps_everything_of_a_broken_group();
  leaves_the_parents_alone();
  keeps_large_blocks_off_the_same_sets();
  fits_into_address_space();
  std::puts("arena_test: all good");
}
