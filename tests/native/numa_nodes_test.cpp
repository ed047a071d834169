// NUMA nodes: shares of the cores on made-up machines, and, with counting calls in place of
// fallocate and madvise, that each rank is the first to touch its own part of the shared memory.
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "../../csrc/group/placement.h"
#include "ranks.h"

namespace {

std::string committed;   // by this process: where each range begins and ends
int file = -1;           // the shared memory
long first_touched = 0;  // blocks that madvise allocated

long blocks() {
  struct stat found = {};
  return fstat(file, &found) == 0 ? found.st_blocks : 0;
}

// Held while a rank allocates blocks: those of another rank must not count as this one's.
struct BlocksLock {
  int program = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  BlocksLock() { flock(program, LOCK_EX); }
  ~BlocksLock() { close(program); }
};

}  // namespace

// NOLINTBEGIN: the C library's names
extern "C" int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  file = fd;
  if (mode == 0) committed += pycollect::text(offset, " ", offset + bytes, " ");
  const BlocksLock lock;
  return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, bytes));
}

extern "C" int madvise(void* at, std::size_t bytes, int advice) noexcept {
  const BlocksLock lock;
  const long before = blocks();
  const auto result = static_cast<int>(syscall(SYS_madvise, at, bytes, advice));
  if (advice == MADV_POPULATE_WRITE) first_touched += blocks() - before;
  return result;
}
// NOLINTEND

namespace pycollect::ipc {
namespace {

CoreSet cores(int begin, int end) {
  CoreSet set = {};
  for (int core = begin; core < end; ++core) set.set(core);
  return set;
}

void shares_cores() {
  const NumaNodes nodes{{0, cores(0, 32)}, {1, cores(32, 64)}};
  const CoreSet left = cores(0, 32), right = cores(32, 64), all = cores(0, 64), unknown = {};
  const auto shares = [&](const std::vector<CoreSet>& ranks) {
    std::string all_shares;
    for (Rank r = 0; r < static_cast<Rank>(ranks.size()); ++r)
      all_shares += text(core_share(nodes, ranks, r), " ");
    return all_shares;
  };
  expect_equal(shares({all, all, all, all}), "16 16 16 16 ");            // not bound
  expect_equal(shares({left, left, right, right}), "16 16 16 16 ");      // bound
  expect_equal(shares({left, right, right, right}), "32 10 10 10 ");     // unevenly
  expect_equal(shares({all, right, right}), "42 10 10 ");                // partly: 32 + 32 / 3
  expect_equal(shares({cores(0, 1), cores(1, 2), right}), "16 16 32 ");  // main threads only
  expect_equal(shares({unknown, left}), "0 32 ");
  expect_equal(shares(std::vector<CoreSet>(40, left)).substr(0, 4), "1 1 ");  // crowded
  expect(core_share({}, {all}, 0) == 0, "no nodes");
}

constexpr std::size_t kBuffer = 64 << 10;
constexpr Group::StagingRegions kRegions{
    .count = 2, .stride = kBuffer / 2, .bytes = 5'000};  // 8 KiB

// Returns what this rank committed, and a complaint if it touched a page that no rank had.
std::string commit_parts(RankContext& me) {
  committed.clear();
  Group group(me.store, me.rank, me.world, me.settings);
  for (int n = 0; n < 2; ++n)  // the second one finds all committed
    if (group.reserve_staging(uint64_t{1} << me.rank, kRegions) != (n == 0))
      return "committed again";
  if (first_touched != 0) return text(first_touched, " blocks were not committed");
  cpu_set_t own;
  CoreSet cores = {};
  sched_getaffinity(0, sizeof own, &own);
  for (std::size_t core = 0; core < cores.size(); ++core) cores[core] = CPU_ISSET(core, &own);
  if (group.fold_threads() != core_share(numa_nodes(), std::vector(me.world, cores), me.rank))
    return text(group.fold_threads(), " threads");
  return committed;
}

void ranks_commit_what_they_write() {
  constexpr int kWorld = 3;
  constexpr std::size_t kPage = SegmentLayout::kPage;
  GroupSettings settings;
  settings.timeout = 20s;
  settings.buffer_bytes = kBuffer;
  settings.mailbox_bytes = kWorld * (256 << 10);
  settings.mailbox_header_bytes = 2 * kPage;
  const SegmentLayout layout({kWorld, settings.buffer_bytes, settings.mailbox_bytes, 0});
  const auto ends = run(kWorld, settings, commit_parts);
  for (Rank r = 0; r < kWorld; ++r) {
    std::string wanted = text("0 ", SegmentLayout::up(sizeof(Control)), " ");
    if (r == 0) wanted += text("0 ", layout.mailboxes + settings.mailbox_header_bytes, " ");
    for (std::size_t i = 0; i < kRegions.count; ++i)
      for (const uint64_t buffer : {0, 1}) {
        const std::size_t at = layout.staging_buffer(r, buffer) + i * kRegions.stride;
        wanted += text(at / kPage * kPage, " ", SegmentLayout::up(at + 8192), " ");
      }
    expect_equal(ends[r].result, wanted);
  }
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  pycollect::ipc::shares_cores();
  pycollect::ipc::ranks_commit_what_they_write();
  std::puts("numa_nodes_test: all good");
}
