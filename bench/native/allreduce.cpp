// Benchmark of the executor alone between forked processes: allreduce [world] [largest MiB]
// [zero-copy | copy] [algorithm | -] [staging buffer KiB]. Build it with tests/native/build.sh
// FOLDER bench/native/allreduce.cpp -O3.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "../../csrc/bootstrap/store.h"
#include "../../csrc/plan/error.h"
#include "../../csrc/rank_executor/executor.h"
#include "../../csrc/rank_executor/shm_transport.h"
#include "measure.h"

namespace pycollect::ipc {
namespace {

struct Options {
  int world = 2;
  std::size_t largest_bytes = std::size_t{128} << 20;
  bool zero_copy = false;
  std::string algorithm = {};
  std::size_t buffer_bytes = GroupSettings{}.buffer_bytes;
};

// A folder, in which a key is a file that gets its name once it is complete.
struct FolderStore final : Store {
  std::filesystem::path folder;
  explicit FolderStore(std::filesystem::path of) : folder(std::move(of)) {
    std::filesystem::create_directories(folder);
  }
  std::string path(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '_');
    return folder / key;
  }
  void post(const std::string& key, const std::string& value) override {
    std::ofstream(path(key) + ".part") << value;
    std::filesystem::rename(path(key) + ".part", path(key));
  }
  std::string read(const std::string& key, Deadline deadline) override {
    for (; Clock::now() < deadline; std::this_thread::sleep_for(std::chrono::microseconds(200)))
      if (std::ifstream file(path(key)); file) return {std::istreambuf_iterator<char>(file), {}};
    throw Timeout(text("no value was posted for ", key));
  }
};

void run_rank(Store& store, Rank rank, const Options& options) {
  GroupSettings settings;
  settings.buffer_bytes = options.buffer_bytes;
  settings.symmetric_heap_bytes = options.zero_copy ? options.largest_bytes + 4096 : 0;
  Group group(store, rank, options.world, settings);
  std::byte* data = nullptr;
  if (options.zero_copy) {
    const std::size_t at = group.layout().heap(rank);
    group.segment()->commit(at, options.largest_bytes + 4096);
    group.segment()->touch(group.layout().heaps, options.world * group.layout().heap_stride);
    // Offset the ranks' data like an allocator would, so that they do not share cache sets.
    data = group.heap(rank) + rank % 16 * 64;
  } else {
    data = static_cast<std::byte*>(mmap(nullptr, options.largest_bytes, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  std::memset(data, 1, options.largest_bytes);
  uint64_t call = 0;
  ShmTransport transport(group, {});
  // One deadline for all calls: reading the clock takes a third of a barrier, and Open MPI has no
  // deadlines.
  const Deadline deadline = Clock::now() + std::chrono::hours(1);
  CollectiveRequest request{.collective = Collective::all_reduce,
                            .dtype = DType::f32,
                            .algorithm = options.algorithm,
                            .in_place = true};
  request.input.segments.resize(1);
  request.input.blocks.resize(1);
  const auto reduce = [&](float* at, std::size_t n) {
    request.input.segments[0] = {reinterpret_cast<std::byte*>(at), n};
    request.input.blocks[0] = n;
    run(transport, request, call++, deadline);
  };
  const auto barrier = [&] {
    run(transport, {.collective = Collective::barrier, .tensors = 0}, call++, deadline);
  };
  bench::table({rank, options.world}, reinterpret_cast<float*>(data), options.largest_bytes, reduce,
               barrier);
}

// Returns true if the results of every rank were right.
bool run_all(const Options& options) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("allreduce." + std::to_string(getpid()));
  for (Rank r = 0; r < options.world; ++r)
    if (fork() == 0) {
      bench::pin(r);
      FolderStore store(folder);
      run_rank(store, r, options);
      std::_Exit(0);
    }
  bool right = true;
  for (int status = 0; ::wait(&status) > 0;) right = right && status == 0;
  std::filesystem::remove_all(folder);
  return right;
}

}  // namespace
}  // namespace pycollect::ipc

int main(int argc, char** argv) {
  pycollect::ipc::Options options;
  if (argc > 1) options.world = std::atoi(argv[1]);
  if (argc > 2) options.largest_bytes = std::strtoull(argv[2], nullptr, 10) << 20;
  if (argc > 3) options.zero_copy = std::string(argv[3]) == "zero-copy";
  if (argc > 4) options.algorithm = std::string(argv[4]) == "-" ? "" : argv[4];
  if (argc > 5) options.buffer_bytes = std::strtoull(argv[5], nullptr, 10) << 10;
  return pycollect::ipc::run_all(options) ? 0 : 1;
}
