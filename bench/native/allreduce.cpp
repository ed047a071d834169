// Benchmark of the executor alone between forked processes: allreduce WORLD LARGEST_MIB
// [zero-copy]. Built by bench/executor_bandwidth.py.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "../../csrc/rank_executor/executor.h"
#include "../../tests/native/file_store.h"
#include "measure.h"

namespace pycollect::ipc {
namespace {

void run_rank(Store& store, Rank rank, int world, std::size_t largest_bytes, bool zero_copy) {
  GroupSettings settings;
  settings.symmetric_heap_bytes = zero_copy ? largest_bytes + 4096 : 0;
  Group group(store, rank, world, settings);
  std::byte* data = nullptr;
  if (zero_copy) {
    const std::size_t at = group.layout().heap(rank);
    group.segment()->commit(at, largest_bytes + 4096);
    group.segment()->touch(group.layout().heaps, world * group.layout().heap_stride);
    // Offset the ranks' data like an allocator would, so that they do not share cache sets.
    data = group.heap(rank) + rank % 16 * 64;
  } else {
    data = static_cast<std::byte*>(
        mmap(nullptr, largest_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  std::memset(data, 1, largest_bytes);
  uint64_t call = 0;
  RankExecutor executor(group, {});
  // One deadline for all calls: reading the clock takes a third of a barrier, and Open MPI has no
  // deadlines.
  const Deadline deadline = Clock::now() + std::chrono::hours(1);
  CollectiveRequest request{
      .collective = Collective::all_reduce, .dtype = DType::f32, .in_place = true};
  CallBufferMemory memory{std::vector<BufferSpan>(1), Sizes(1)};
  request.input = memory.view();
  const auto reduce = [&](float* at, std::size_t n) {
    memory.spans[0] = {reinterpret_cast<std::byte*>(at), n};
    memory.blocks[0] = n;
    executor.run(request, call++, deadline);
  };
  const auto barrier = [&] {
    executor.run({.collective = Collective::barrier, .tensors = 0}, call++, deadline);
  };
  bench::RankBench{rank, world, reduce, barrier}.print(reinterpret_cast<float*>(data),
                                                       largest_bytes);
}

}  // namespace
}  // namespace pycollect::ipc

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int world = std::atoi(argv[1]);
  const std::size_t largest_bytes = std::strtoull(argv[2], nullptr, 10) << 20;
  const auto folder =
      std::filesystem::temp_directory_path() / ("allreduce." + std::to_string(getpid()));
  for (int rank = 0; rank < world; ++rank)
    if (fork() == 0) {
      bench::pin(rank);
      pycollect::ipc::FileStore store(folder);
      pycollect::ipc::run_rank(store, rank, world, largest_bytes, argc > 3);
      std::_Exit(0);
    }
  bool right = true;  // the results of every rank
  for (int status = 0; ::wait(&status) > 0;) right = right && status == 0;
  std::filesystem::remove_all(folder);
  return right ? 0 : 1;
}
