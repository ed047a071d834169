// Runs the device's kernels on host memory: the same arguments and functions, one thread after
// another. Every access is checked for alignment, as on a device, and recorded. Not covered: the
// device's inline loads and stores, its fp16 conversions, and timing. And copies by the host.
#include <c10/util/Half.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../../cuda/copy_kernel.h"
#include "../../cuda/kernel_launch.h"
#include "../../cuda/tree_kernel.h"
#include "../../plan/error.h"
#include "../../torch/threads.h"
#include "bind.h"

namespace pycollect {
namespace cuda {
namespace {

namespace py = pybind11;

struct WatchedAccess {
  uint64_t at;
  std::size_t bytes;
};

// Memory accessor for the kernels: loads and stores host memory, checks alignment, and records the
// accesses.
struct Watched {
  std::vector<WatchedAccess>&loads, &stores;

  template <class V>
  [[gnu::noinline]] V load(uint64_t at) const {
    V v;
    loads.push_back(checked<V>(at));
    std::memcpy(&v, reinterpret_cast<const void*>(at), sizeof v);
    return v;
  }
  template <class V>
  [[gnu::noinline]] void store(uint64_t at, V v) const {
    stores.push_back(checked<V>(at));
    std::memcpy(reinterpret_cast<void*>(at), &v, sizeof v);
  }
  template <class Body>
  static void repeat(int n, Body body) {
    for (int i = 0; i < n; ++i) body(i);
  }
  static float widened(uint16_t half) { return c10::Half(half, c10::Half::from_bits()); }
  static uint16_t narrowed(float value) { return c10::Half(value).x; }

 private:
  template <class V>
  static WatchedAccess checked(uint64_t at) {
    if (at % alignof(V) != 0)
      throw std::runtime_error(text("misaligned access of ", sizeof(V), " bytes"));
    return {at, sizeof(V)};
  }
};

using Run = void (*)(const ArgsHead&, const uint64_t* words, ThreadId, const Watched&);

Run find_run(KernelKind kind, DType dtype, ReduceOp op) {
  if (kind == KernelKind::copy) return &run_copies<Watched>;
  using Runs = std::array<Run, kKernelKinds.size()>;
  static constexpr auto kRuns = kernel_table<Runs>([](auto kernel) -> Runs {
    using T = typename decltype(kernel)::Type;
    using Op = typename decltype(kernel)::Operation;
    Runs runs{&run_folds<T, Op, Watched>};
    if constexpr (order_matters_on<T, Op>) runs[1] = &run_tree_folds<T, Op, T, Watched>;
    if constexpr (is_narrow<T>) runs[2] = &run_tree_folds<T, Op, float, Watched>;
    return runs;
  });
  return kRuns[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)]
              [static_cast<std::size_t>(kind)];
}

// Returns the number of bytes accessed, and the number of bytes accessed again.
std::pair<std::size_t, std::size_t> counted(std::vector<WatchedAccess>& accesses) {
  std::sort(accesses.begin(), accesses.end(),
            [](const WatchedAccess& a, const WatchedAccess& b) { return a.at < b.at; });
  std::size_t bytes = 0, twice = 0;
  uint64_t end = 0;
  for (const WatchedAccess& a : accesses) {
    bytes += a.bytes;
    twice += std::min<uint64_t>(a.bytes, end > a.at ? end - a.at : 0);
    end = std::max<uint64_t>(end, a.at + a.bytes);
  }
  return {bytes, twice};
}

std::size_t widest(const std::vector<WatchedAccess>& accesses) {
  std::size_t result = 0;
  for (const WatchedAccess& a : accesses) result = std::max(result, a.bytes);
  return result;
}

py::dict run(const Launch& launch, const KernelLaunch& kernel_launch) {
  const Run body = find_run(kernel_launch.kind, launch.dtype, launch.op);
  std::vector<WatchedAccess> loads, stores;
  std::vector<std::size_t> moved;  // [block]
  for (uint32_t block = 0; block < kernel_launch.blocks; ++block) {
    const std::size_t before = loads.size() + stores.size();
    for (uint32_t thread = 0; thread < kThreads; ++thread)
      body(kernel_launch.args.head, kernel_launch.args.words, {block, kernel_launch.blocks, thread},
           Watched{loads, stores});
    moved.push_back(loads.size() + stores.size() - before);
  }
  py::dict result;
  constexpr std::array kinds{"fold", "tree_fold", "widening_fold", "copy"};
  result["kind"] = kinds[static_cast<std::size_t>(kernel_launch.kind)];
  result["tasks"] = kernel_launch.args.head.tasks;
  result["args_bytes"] = kernel_launch.bytes;
  result["accesses"] = moved;
  result["widest_load"] = widest(loads);
  result["widest_store"] = widest(stores);
  for (auto& [name, accesses] : {std::pair{"loaded", &loads}, std::pair{"stored", &stores}}) {
    const auto [bytes, twice] = counted(*accesses);
    result[name] = bytes;
    result[py::str(text(name, "_twice"))] = twice;
  }
  return result;
}

std::vector<std::byte*> pointers(const std::vector<std::uintptr_t>& addresses) {
  std::vector<std::byte*> result;
  for (const std::uintptr_t a : addresses) result.push_back(reinterpret_cast<std::byte*>(a));
  return result;
}

using Addresses = std::vector<std::uintptr_t>;
using Pitches = std::vector<std::ptrdiff_t>;
// Destinations, sources, their pitches in bytes, elements of a row, rows, whether `avg` divides.
using KernelTaskTuple =
    std::tuple<Addresses, Addresses, Pitches, Pitches, std::size_t, std::size_t, bool>;

// Runs the tasks, and returns for each launch its kind and size, and how it accessed memory.
// `float8`: the bytes of overflow, infinity and NaN, in float8_e4m3fn and in float8_e5m2. `order`:
// "rank" or "tree"; `widens`: the destinations are float32.
std::vector<py::dict> emulate_launch(const std::vector<KernelTaskTuple>& tasks,
                                     const std::string& dtype, const std::string& op, int world,
                                     int multiprocessors, const std::array<uint8_t, 6>& float8,
                                     const std::string& order, bool widens) {
  Launch launch{{},
                static_cast<DType>(find_name("dtype", dtype, kDTypeNames)),
                static_cast<ReduceOp>(find_name("op", op, kReduceOpNames)),
                {.world = world,
                 .order = static_cast<FoldOrder>(find_name("order", order, kFoldOrderNames)),
                 .widens = widens,
                 .float8 = std::bit_cast<Float8Specials>(float8)}};
  for (const auto& [dsts, srcs, dst_pitches, src_pitches, count, rows, finishes] : tasks)
    launch.tasks.push_back(
        {pointers(dsts), pointers(srcs), dst_pitches, src_pitches, count, rows, finishes});
  std::vector<py::dict> launches;
  split_launch(launch, multiprocessors, [&](const KernelLaunch& kernel_launch) {
    launches.push_back(run(launch, kernel_launch));
  });
  return launches;
}

// Copies rows of `bytes` bytes between two tensors. `pitches`: bytes from one row to the next, in
// `dst` and in `src`.
void copy_rows(const at::Tensor& dst, const at::Tensor& src, std::size_t bytes, std::size_t rows,
               std::pair<std::ptrdiff_t, std::ptrdiff_t> pitches) {
  copy_on_host({static_cast<std::byte*>(dst.mutable_data_ptr()),
                static_cast<const std::byte*>(src.const_data_ptr()), pitches.first, pitches.second,
                bytes, rows, kHost, kHost});
}

}  // namespace
}  // namespace cuda

void bind_kernels(pybind11::module_& m) {
  using namespace cuda;
  m.def("emulate_launch", &emulate_launch, py::arg("tasks"), py::arg("dtype"), py::arg("op"),
        py::arg("world"), py::arg("multiprocessors"), py::arg("float8"), py::arg("order") = "rank",
        py::arg("widens") = false);
  m.def("copy_rows", &copy_rows, py::arg("dst"), py::arg("src"), py::arg("bytes"), py::arg("rows"),
        py::arg("pitches"));
}

}  // namespace pycollect
