// See kernel_launch.h. A fold with more destinations than fit in a kernel's arguments is divided
// into a fold that writes some of them, and copies from the first of these to the others. Therefore
// the kernels for folds are launched before those for copies.
#include "kernel_launch.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "../plan/error.h"
#include "elements.h"

namespace pycollect::cuda {
namespace {

// Blocks of a launch, as a multiple of the blocks that the device runs at a time: enough that
// multiprocessors are not idle for long while the last blocks run, and few enough that the search
// for a block's task costs nothing.
constexpr int kWaves = 4;

constexpr std::size_t kHeadWords = sizeof(ArgsHead) / 8;

bool is_copy(const KernelTask& task) { return task.srcs.size() == 1; }
bool is_in_place(const KernelTask& task) {
  return task.dsts == task.srcs && (task.rows == 1 || task.dst_pitches == task.src_pitches);
}
uint64_t as_word(const std::byte* address) { return reinterpret_cast<uintptr_t>(address); }

KernelKind kind_of(const KernelTask& task, const Launch& launch) {
  if (is_copy(task)) return KernelKind::copy;
  if (launch.options.widens) return KernelKind::widening_fold;
  const bool tree = launch.options.order == FoldOrder::tree && task.srcs.size() > kSameInBothOrders;
  return tree && order_matters(launch.dtype, launch.op) ? KernelKind::tree_fold : KernelKind::fold;
}

// A kernel task, and its form in the arguments of a kernel.
struct FormedTask {
  const KernelTask* task;
  TaskArgs form;
  bool in_place;      // sources and destinations share one list
  uint64_t accesses;  // number of accesses of each source and destination
  uint64_t moved;     // bytes read and written

  std::size_t words() const {
    const std::size_t n = form.n_srcs + (in_place ? 0 : form.n_dsts);
    return kTaskWords + n * (form.pitched ? 2 : 1);
  }
};

// Bits that are set in the addresses of a task, and bits in which the addresses differ.
struct Alignment {
  uint64_t all = 0;        // set in an address or a pitch
  uint64_t differing = 0;  // different in two addresses, or set in a pitch

  Alignment(const KernelTask& task, bool pitched) {
    const uint64_t first = as_word(task.dsts[0]);
    for (const auto* list : {&task.dsts, &task.srcs})
      for (const std::byte* address : *list) {
        all |= as_word(address);
        differing |= as_word(address) ^ first;
      }
    if (!pitched) return;
    for (const auto* list : {&task.dst_pitches, &task.src_pitches})
      for (const std::ptrdiff_t pitch : *list) differing |= static_cast<uint64_t>(pitch);
    all |= differing;
  }
};

bool is_one_row(const KernelTask& task, std::size_t row_bytes) {
  const auto follows = [&](std::ptrdiff_t pitch) {
    return pitch == static_cast<std::ptrdiff_t>(row_bytes);
  };
  return task.rows == 1 ||
         (std::all_of(task.dst_pitches.begin(), task.dst_pitches.end(), follows) &&
          std::all_of(task.src_pitches.begin(), task.src_pitches.end(), follows));
}

// Whether a kernel accesses only units, as those in tree order do except in their frequent cases.
bool has_only_units(KernelKind kind, const TaskArgs& form, DType dtype, ReduceOp op) {
  if (kind != KernelKind::tree_fold) return kind == KernelKind::widening_fold;
  const bool is_hot = kHotKernels[static_cast<int>(dtype)][static_cast<int>(op)];
  return !is_hot || form.pitched || (form.n_srcs != 4 && form.n_srcs != 8);
}

// Sets the width of the accesses, and the position of the first one. A fold has two widths only:
// those between a unit and a packet would save instructions, which do not limit it, and double the
// kernels' code.
void choose_width(TaskArgs& form, const KernelTask& task, const Alignment& alignment,
                  std::size_t unit) {
  const uint64_t differing = kPacketBytes | alignment.differing;
  uint64_t width = differing & -differing;  // the largest power of two that divides it
  uint64_t head_bytes = -as_word(task.dsts[0]) & (width - 1);
  const bool between = !is_copy(task) && width < kPacketBytes;
  if (between || head_bytes % unit != 0 || head_bytes > form.count * unit) {
    width = unit <= kMaxStripedBytes ? unit : 0;
    head_bytes = 0;
  }
  form.width = static_cast<uint8_t>(width);
  form.head = static_cast<uint8_t>(head_bytes / unit);
}

FormedTask formed_task(const KernelTask& task, KernelKind kind, DType dtype, ReduceOp op) {
  const UnitSize unit =
      is_copy(task) ? UnitSize{} : kUnits[static_cast<int>(dtype)][static_cast<int>(op)];
  const std::size_t row_bytes = task.count * item_bytes(dtype), unit_bytes = unit.bytes;
  FormedTask formed{&task, {}, false, 0, 0};
  TaskArgs& form = formed.form;
  form.rows = is_one_row(task, row_bytes) ? 1 : task.rows;
  form.pitched = form.rows > 1;
  form.count = row_bytes / unit_bytes * (task.rows / form.rows);
  form.finishes = task.finishes;
  form.n_dsts = static_cast<uint16_t>(task.dsts.size());
  form.n_srcs = static_cast<uint16_t>(task.srcs.size());
  const Alignment alignment(task, form.pitched);
  require(alignment.all % unit.alignment == 0, "a GPU reads ", name(dtype), " at multiples of ",
          unit.alignment, " bytes only; copy the tensor to such memory first");
  choose_width(form, task, alignment, unit_bytes);
  const bool in_packets = kind != KernelKind::tree_fold || form.width == kPacketBytes;
  if (!in_packets || has_only_units(kind, form, dtype, op)) form.width = form.head = 0;
  const int wide_bytes = is_copy(task) ? form.width : kPacketBytes;
  formed.accesses = form.rows * RowAccesses(form, wide_bytes, unit.bytes).size();
  formed.moved = form.rows * form.count * unit_bytes * (task.dsts.size() + task.srcs.size());
  formed.in_place = is_in_place(task);
  return formed;
}

// The tasks of a launch, without empty ones. Tasks with too many pointers for the arguments of one
// kernel are divided.
class SplitTasks {
 public:
  explicit SplitTasks(const Launch& launch) : launch_(launch) {
    for (const KernelTask& task : launch.tasks)
      if (task.count > 0 && task.rows > 0 && !task.dsts.empty()) add(task);
  }
  const std::vector<const KernelTask*>& of(KernelKind kind) const {
    return tasks_[static_cast<int>(kind)];
  }

 private:
  void add(const KernelTask& task) {
    const std::size_t max_pointers = most_addresses(task.rows > 1);
    const std::size_t n = task.srcs.size() + (is_in_place(task) ? 0 : task.dsts.size());
    if (n <= max_pointers) return add_whole(task);
    require(task.srcs.size() < max_pointers, "a GPU folds up to ", max_pointers - 1,
            " sources at once; there are ", task.srcs.size());
    std::size_t done = max_pointers - task.srcs.size();
    add_part(task, task, 0, done);
    KernelTask other = task;
    if (!is_copy(task)) {
      other.srcs = {task.dsts[0]};
      if (task.rows > 1) other.src_pitches = {task.dst_pitches[0]};
    }
    for (; done < task.dsts.size(); done += max_pointers - 1)
      add_part(other, task, done, std::min(done + max_pointers - 1, task.dsts.size()));
  }

  // Adds `part` with the destinations [begin, end) of `task`.
  void add_part(KernelTask part, const KernelTask& task, std::size_t begin, std::size_t end) {
    part.dsts.assign(task.dsts.begin() + begin, task.dsts.begin() + end);
    if (task.rows > 1)
      part.dst_pitches.assign(task.dst_pitches.begin() + begin, task.dst_pitches.begin() + end);
    parts_.push_back(std::move(part));
    add_whole(parts_.back());
  }
  void add_whole(const KernelTask& task) {
    tasks_[static_cast<int>(kind_of(task, launch_))].push_back(&task);
  }

  const Launch& launch_;
  std::array<std::vector<const KernelTask*>, kKernelKinds.size()> tasks_;
  std::deque<KernelTask> parts_;  // a deque: pointers to its elements stay valid
};

// Fills the arguments of one kernel after another with tasks, in order, and issues each launch.
class Packer {
 public:
  Packer(const Launch& launch, int multiprocessors,
         const std::function<void(const KernelLaunch&)>& issue)
      : multiprocessors_(multiprocessors), issue_(issue) {
    args_.head.float8 = launch.options.float8;
    if (launch.op != ReduceOp::avg) return;
    args_.head.world = launch.options.world;
    args_.head.inverse = 1.0 / launch.options.world;
    args_.head.inverse_f32 = static_cast<float>(args_.head.inverse);
  }

  void pack(KernelKind kind, const std::vector<FormedTask>& tasks) {
    for (auto first = tasks.begin(); first != tasks.end();) {
      std::size_t words = kHeadWords;
      uint64_t moved = 0;
      auto last = first;
      for (; last != tasks.end() && words + last->words() <= sizeof(KernelArgs) / 8; ++last) {
        words += last->words();
        moved += last->moved;
      }
      args_.head.tasks = static_cast<uint32_t>(last - first);
      used_ = 0;
      blocks_ = 0;
      placed_bytes_ = 0;
      for (uint64_t* at = args_.words; first != last; ++first, at += kTaskWords) {
        const auto task = std::bit_cast<TaskWords>(placed(*first, moved));
        std::copy(task.at, task.at + kTaskWords, at);
      }
      issue_({kind, args_, words * 8, blocks_});
    }
  }

 private:
  TaskArgs placed(const FormedTask& formed, uint64_t moved) {
    TaskArgs task = formed.form;
    task.first_block = blocks_;
    task.dsts = list(formed.task->dsts, formed.task->dst_pitches, task.pitched);
    task.srcs = formed.in_place ? task.dsts
                                : list(formed.task->srcs, formed.task->src_pitches, task.pitched);
    // One access per thread, or fewer blocks if the task's share of the moved bytes is smaller. The
    // shares are differences of rounded running totals, so that they sum to the budget: one block
    // more than whole waves would run alone on the device.
    const uint64_t budget = static_cast<uint64_t>(multiprocessors_) * kBlocksPerSm * kWaves;
    const uint64_t before = budget * placed_bytes_ / moved;
    placed_bytes_ += formed.moved;
    const uint64_t fair = std::max<uint64_t>(budget * placed_bytes_ / moved - before, 1);
    blocks_ += static_cast<uint32_t>(std::min((formed.accesses + kThreads - 1) / kThreads, fair));
    return task;
  }

  uint16_t list(const std::vector<std::byte*>& addresses,
                const std::vector<std::ptrdiff_t>& pitches, bool pitched) {
    const std::size_t begin = used_;
    uint64_t* const lists = args_.words + args_.head.tasks * kTaskWords;
    for (const std::byte* address : addresses) lists[used_++] = as_word(address);
    if (pitched)
      for (const std::ptrdiff_t pitch : pitches) lists[used_++] = static_cast<uint64_t>(pitch);
    return static_cast<uint16_t>(begin);
  }

  const int multiprocessors_;
  const std::function<void(const KernelLaunch&)>& issue_;
  KernelArgs args_;
  std::size_t used_ = 0;  // words of lists
  uint32_t blocks_ = 0;
  uint64_t placed_bytes_ = 0;  // bytes moved by the tasks placed so far
};

}  // namespace

void split_launch(const Launch& launch, int multiprocessors,
                  const std::function<void(const KernelLaunch&)>& issue) {
  require_type(reduces(launch.dtype, launch.op), name(launch.op), " is not defined for ",
               name(launch.dtype));
  const SplitTasks tasks(launch);
  Packer packer(launch, multiprocessors, issue);
  std::vector<FormedTask> formed_tasks;
  for (const KernelKind kind : kKernelKinds) {
    formed_tasks.clear();
    for (const KernelTask* task : tasks.of(kind))
      formed_tasks.push_back(formed_task(*task, kind, launch.dtype, launch.op));
    packer.pack(kind, formed_tasks);
  }
}

}  // namespace pycollect::cuda
