// Available memory under the limits of control groups: in made-up folders of version 1 and 2 and,
// where permitted, in a real group, which kills processes that exceed its limit.
#include "../../csrc/group/available_memory.h"

#include <fstream>

#include "../../csrc/group/segment.h"
#include "group_ranks.h"

namespace pycollect::ipc {
namespace {

constexpr std::size_t kMiB = 1 << 20;

void write(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << content << '\n';
}

void expect_available(const AvailableMemory& got, std::size_t bytes, const std::string& where) {
  expect(got.bytes == bytes, text("got ", got.bytes, ", not ", bytes));
  expect_equal(got.where, where);
}

// The group with the least available memory counts, of a group and its ancestors. Pages of files
// count as free, and swap as far as the group may use it.
void reads_cgroup_v2() {
  const TemporaryFolder folder;
  const fs::path root = folder.path(), list = root / "list";
  const auto available_with = [&](std::size_t swap) {
    return available_in_cgroups(list, root, swap);
  };
  write(list, "0::/job/step");
  expect_available(available_with(7), SIZE_MAX, "");  // no limits at all
  write(root / "job/step/memory.max", "max");
  expect_available(available_with(7), SIZE_MAX, "");
  write(root / "job/memory.max", "1000");
  write(root / "job/memory.current", "900");
  expect_available(available_with(0), 100, "in the control group /job");
  expect_available(available_with(7), 107, "in the control group /job");
  write(root / "job/memory.stat", "anon 500\ninactive_file 30\nactive_file 20\nshmem 50");
  expect_available(available_with(7), 157, "in the control group /job");
  write(root / "job/memory.swap.max", "5");
  write(root / "job/memory.swap.current", "4");
  expect_available(available_with(7), 151, "in the control group /job");
  write(root / "job/memory.swap.max", "max");
  expect_available(available_with(7), 157, "in the control group /job");
  write(root / "job/step/memory.max", "60");
  write(root / "job/step/memory.current", "90");
  expect_available(available_with(0), 0, "in the control group /job/step");
}

void reads_cgroup_v1() {
  const TemporaryFolder folder;
  const fs::path root = folder.path(), list = root / "list", job = root / "memory/job";
  const auto available_with = [&](std::size_t swap) {
    return available_in_cgroups(list, root, swap);
  };
  write(list, "4:cpu:/other\n3:hugetlb,memory:/job\n0::/");
  write(root / "memory/memory.limit_in_bytes", "9223372036854771712");
  write(job / "memory.limit_in_bytes", "1000");
  write(job / "memory.usage_in_bytes", "900");
  write(job / "memory.stat", "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20");
  expect_available(available_with(7), 157, "in the control group /job");
  write(job / "memory.memsw.limit_in_bytes", "1001");
  write(job / "memory.memsw.usage_in_bytes", "900");
  expect_available(available_with(7), 151, "in the control group /job");
  // In a container, the root group may be listed with its name on the host.
  write(list, "3:memory:/docker/4711");
  write(root / "memory/memory.limit_in_bytes", "200");
  write(root / "memory/memory.usage_in_bytes", "50");
  expect_available(available_with(0), 150, "in the control group /");
}

// Moves this process to a new control group of `bytes`; returns false where that is not permitted.
bool join_group(const fs::path& folder, bool second, std::size_t bytes) {
  std::error_code error;
  if (!fs::create_directory(folder, error)) return false;
  std::ofstream limit(folder / (second ? "memory.max" : "memory.limit_in_bytes"));
  limit << bytes << std::flush;
  std::ofstream members(folder / "cgroup.procs");
  members << getpid() << std::flush;
  return limit.good() && members.good();
}

void throws_before_the_oom_killer() {
  const std::string name = text("pycollect-", getpid());
  const fs::path one = "/sys/fs/cgroup/memory" / fs::path(name),
                 two = "/sys/fs/cgroup" / fs::path(name);
  const pid_t pid = fork();
  if (pid == 0) {
    const bool second = !fs::exists(one.parent_path());
    if (!join_group(second ? two : one, second, 64 * kMiB)) _exit(77);
    const auto segment = Segment::create(1024 * kMiB);
    segment->commit(0, 16 * kMiB);
    const std::string message = attempt([&] {
      segment->commit(0, 256 * kMiB);
      return std::string("committed");
    });
    expect(contains(message, "no memory for 256 MiB of shared memory") &&
               contains(message, text("in the control group /", name)),
           message);
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  for (const fs::path& folder : {one, two}) rmdir(folder.c_str());
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
