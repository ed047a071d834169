// Available memory under the limits of control groups: in made-up folders of version 1 and 2 and,
// where permitted, in a real group, which kills processes that exceed its limit.
#include "../../csrc/group/available_memory.h"

#include <optional>

#include "ranks.h"

namespace pycollect::ipc {
namespace {

constexpr std::size_t kMiB = 1 << 20;

// Writes one file after the other, and then reads the available memory, if it is given: its bytes
// and the control group that limits it.
struct CgroupChange {
  const char *file, *content;
  std::size_t swap = 0;
  std::optional<std::size_t> bytes = {};
  const char* where = "/job";
};
void check_changes(std::initializer_list<CgroupChange> changes) {
  const TemporaryFolder folder;
  const fs::path root = folder.path();
  for (const CgroupChange& change : changes) {
    write(root / change.file, change.content);
    if (!change.bytes) continue;
    const AvailableMemory got = available_in_cgroups(root / "list", root, change.swap);
    const std::string where = *change.bytes == SIZE_MAX ? "" : "in the control group ";
    expect_equal(
        text(change.file, " ", got.bytes, " ", got.where),
        text(change.file, " ", *change.bytes, " ", where, where.empty() ? "" : change.where));
  }
}

// The group with the least available memory counts, of a group and its ancestors. Pages of files
// count as free, and swap as far as the group may use it.
void reads_cgroup_v2() {
  check_changes({{"list", "0::/job/step", 7, SIZE_MAX},
                 {"job/step/memory.max", "max", 7, SIZE_MAX},
                 {"job/memory.max", "1000"},
                 {"job/memory.current", "900", 0, 100},
                 {"job/memory.current", "900", 7, 107},
                 {"job/memory.stat", "anon 500\ninactive_file 30\nactive_file 20\nshmem 5", 7, 157},
                 {"job/memory.swap.max", "5"},
                 {"job/memory.swap.current", "4", 7, 151},
                 {"job/memory.swap.max", "max", 7, 157},
                 {"job/step/memory.max", "60"},
                 {"job/step/memory.current", "90", 0, 0, "/job/step"}});
}

// In a container, the root group may be listed with its name on the host.
void reads_cgroup_v1() {
  check_changes(
      {{"memory/memory.limit_in_bytes", "9223372036854771712"},
       {"memory/job/memory.limit_in_bytes", "1000"},
       {"memory/job/memory.usage_in_bytes", "900"},
       {"memory/job/memory.stat", "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20"},
       {"list", "4:cpu:/other\n3:hugetlb,memory:/job\n0::/", 7, 157},
       {"memory/job/memory.memsw.limit_in_bytes", "1001"},
       {"memory/job/memory.memsw.usage_in_bytes", "900", 7, 151},
       {"list", "3:memory:/docker/4711"},
       {"memory/memory.limit_in_bytes", "200"},
       {"memory/memory.usage_in_bytes", "50", 0, 150, "/"}});
}

// Moves this process to a new control group of `bytes`; returns false where that is not permitted.
bool join_group(const fs::path& folder, const char* limit_file, std::size_t bytes) {
  std::error_code error;
  if (!fs::create_directory(folder, error)) return false;
  std::ofstream limit(folder / limit_file), members(folder / "cgroup.procs");
  limit << bytes << std::flush;
  members << getpid() << std::flush;
  return limit.good() && members.good();
}

void throws_before_the_oom_killer() {
  const bool first = fs::exists("/sys/fs/cgroup/memory");
  const std::string name = text("pycollect-", getpid());
  const fs::path folder = fs::path(first ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup") / name;
  const int status = status_of_child([&] {
    if (!join_group(folder, first ? "memory.limit_in_bytes" : "memory.max", 64 * kMiB)) return 77;
    const auto segment = Segment::create(1024 * kMiB);
    segment->commit(0, 16 * kMiB);
    const std::string message = refusal([&] { segment->commit(0, 256 * kMiB); });
    expect_part(message, "no memory for 256 MiB of shared memory");
    expect_part(message, text("in the control group /", name));
    return 0;
  });
  rmdir(folder.c_str());
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
    std::puts("  SKIPPED: no right to make a control group");
  else
    expect(status == 0, "failed or killed where the control group's memory is full");
}

}  // namespace
}  // namespace pycollect::ipc

int main() {
  using namespace pycollect::ipc;
  reads_cgroup_v2();
  reads_cgroup_v1();
  throws_before_the_oom_killer();
  std::puts("available_memory_test: all good");
}
