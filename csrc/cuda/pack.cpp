// See pack.h. Folds come first, then copies. A step with more destinations than a table holds
// becomes a fold to some of them, and copies from there to the others.
#include "pack.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "../plan/error.h"
#include "kernel_table.h"

namespace pycollect::cuda {
namespace {

// Blocks of a launch, as a multiple of those that the device runs at a time: enough that the last
// ones do not leave the others idle for long, few enough that the search for a block's row costs
// nothing.
constexpr int kWaves = 4;

constexpr std::size_t kHeadWords = sizeof(TableHead) / 8;

bool is_copy(const KernelRow& row) { return row.srcs.size() == 1; }
bool is_in_place(const KernelRow& row) {
  return row.dsts == row.srcs && (row.rows == 1 || row.dst_pitches == row.src_pitches);
}
uint64_t as_word(const std::byte* address) { return reinterpret_cast<uintptr_t>(address); }

// A row, and its form in a table.
struct Entry {
  const KernelRow* row;
  TableRow form;
  bool in_place;  // sources and destinations share one list
  uint64_t slots, moved;

  std::size_t words() const {
    const std::size_t n = form.n_srcs + (in_place ? 0 : form.n_dsts);
    return kRowWords + n * (form.pitched ? 2 : 1);
  }
};

// Bits that are set in the addresses of a row, or in which they differ.
struct Alignment {
  uint64_t all = 0;        // set in an address or a pitch
  uint64_t differing = 0;  // different in two addresses, or set in a pitch

  Alignment(const KernelRow& row, bool pitched) {
    const uint64_t first = as_word(row.dsts[0]);
    for (const auto* list : {&row.dsts, &row.srcs})
      for (const std::byte* address : *list) {
        all |= as_word(address);
        differing |= as_word(address) ^ first;
      }
    if (!pitched) return;
    for (const auto* list : {&row.dst_pitches, &row.src_pitches})
      for (const std::ptrdiff_t pitch : *list) differing |= static_cast<uint64_t>(pitch);
    all |= differing;
  }
};

bool is_one_line(const KernelRow& row, std::size_t line_bytes) {
  const auto follows = [&](std::ptrdiff_t pitch) {
    return pitch == static_cast<std::ptrdiff_t>(line_bytes);
  };
  return row.rows == 1 || (std::all_of(row.dst_pitches.begin(), row.dst_pitches.end(), follows) &&
                           std::all_of(row.src_pitches.begin(), row.src_pitches.end(), follows));
}

// Sets the width of the accesses, and the position of the first one.
void choose_width(TableRow& form, const KernelRow& row, const Alignment& alignment,
                  std::size_t unit) {
  const uint64_t differing = kPacketBytes | alignment.differing;
  uint64_t width = differing & -differing;  // the largest power of two that divides it
  if (!is_copy(row) && width < kPacketBytes) return;
  const uint64_t head_bytes = -as_word(row.dsts[0]) & (width - 1);
  if (head_bytes % unit != 0 || head_bytes > form.count * unit) {
    if (!is_copy(row)) return;
    width = 1;
  }
  form.width = static_cast<uint8_t>(width);
  form.head = static_cast<uint8_t>(width > 1 ? head_bytes / unit : 0);
}

Entry entry_of(const KernelRow& row, DType dtype, ReduceOp op) {
  const Unit unit = is_copy(row) ? Unit{} : kUnits[static_cast<int>(dtype)][static_cast<int>(op)];
  const std::size_t line_bytes = row.count * item_bytes(dtype), unit_bytes = unit.bytes;
  Entry entry{&row, {}, false, 0, 0};
  TableRow& form = entry.form;
  form.lines = is_one_line(row, line_bytes) ? 1 : row.rows;
  form.pitched = form.lines > 1;
  form.count = line_bytes / unit_bytes * (row.rows / form.lines);
  form.finishes = row.finishes;
  form.n_dsts = static_cast<uint16_t>(row.dsts.size());
  form.n_srcs = static_cast<uint16_t>(row.srcs.size());
  const Alignment alignment(row, form.pitched);
  require(alignment.all % unit.alignment == 0, "a GPU reads ", name(dtype), " at multiples of ",
          unit.alignment, " bytes only; copy the tensor to such memory first");
  choose_width(form, row, alignment, unit_bytes);
  const uint64_t per_wide = form.width / unit_bytes;
  const uint64_t wide = per_wide > 0 ? (form.count - form.head) / per_wide : 0;
  entry.slots = form.lines * (form.count - wide * per_wide + wide);
  entry.moved = form.lines * form.count * unit_bytes * (row.dsts.size() + row.srcs.size());
  entry.in_place = is_in_place(row);
  return entry;
}

std::size_t guard_words(const Launch& launch) { return launch.guard == nullptr ? 0 : 1; }

// The rows of a launch, without empty ones, and divided where they are too long for a table.
class PackedRows {
 public:
  PackedRows(const Launch& launch, const Limits& limits)
      : words_(limits.table_bytes / 8 - kHeadWords - kRowWords - guard_words(launch)) {
    for (const KernelRow& row : launch.rows)
      if (row.count > 0 && row.rows > 0 && !row.dsts.empty()) add(row);
  }
  std::vector<const KernelRow*> folds, copies;

 private:
  void add(const KernelRow& row) {
    const std::size_t max_pointers = row.rows > 1 ? words_ / 2 : words_;
    const std::size_t n = row.srcs.size() + (is_in_place(row) ? 0 : row.dsts.size());
    if (n <= max_pointers) return (is_copy(row) ? copies : folds).push_back(&row);
    require(row.srcs.size() < max_pointers, "a GPU folds up to ", max_pointers - 1,
            " sources at once; there are ", row.srcs.size());
    std::size_t done = max_pointers - row.srcs.size();
    add_part(row, row, 0, done);
    KernelRow other = row;
    if (!is_copy(row)) {
      other.srcs = {row.dsts[0]};
      if (row.rows > 1) other.src_pitches = {row.dst_pitches[0]};
    }
    for (; done < row.dsts.size(); done += max_pointers - 1)
      add_part(other, row, done, std::min(done + max_pointers - 1, row.dsts.size()));
  }

  // Adds `part` with the destinations [begin, end) of `row`.
  void add_part(KernelRow part, const KernelRow& row, std::size_t begin, std::size_t end) {
    part.dsts.assign(row.dsts.begin() + begin, row.dsts.begin() + end);
    if (row.rows > 1)
      part.dst_pitches.assign(row.dst_pitches.begin() + begin, row.dst_pitches.begin() + end);
    parts_.push_back(std::move(part));
    (is_copy(parts_.back()) ? copies : folds).push_back(&parts_.back());
  }

  const std::size_t words_;      // for the lists of a table with one row
  std::deque<KernelRow> parts_;  // a deque: pointers to its elements stay valid
};

// Fills tables with entries, in order.
class Packer {
 public:
  Packer(const Launch& launch, const Limits& limits,
         const std::function<void(const Packed&)>& issue)
      : limits_(limits),
        guard_(launch.guard),
        fixed_(kHeadWords + guard_words(launch)),
        issue_(issue) {
    table_.head.float8 = launch.options.float8;
    if (launch.op != ReduceOp::avg) return;
    table_.head.world = launch.options.world;
    table_.head.inverse = 1.0 / launch.options.world;
    table_.head.inverse_f32 = static_cast<float>(table_.head.inverse);
  }

  void pack(KernelKind kind, const std::vector<Entry>& entries) {
    for (auto first = entries.begin(); first != entries.end();) {
      std::size_t words = fixed_;
      uint64_t moved = 0;
      auto last = first;
      for (; last != entries.end() && words + last->words() <= limits_.table_bytes / 8; ++last) {
        words += last->words();
        moved += last->moved;
      }
      table_.head.rows = static_cast<uint32_t>(last - first);
      used_ = 0;
      blocks_ = 0;
      for (uint64_t* at = table_.words; first != last; ++first, at += kRowWords) {
        const auto row = std::bit_cast<RowWords>(placed(*first, moved));
        std::copy(row.at, row.at + kRowWords, at);
      }
      if (guard_ != nullptr) add_guard();
      issue_({kind, table_, words * 8, blocks_});
    }
  }

 private:
  // Appends the guard's address to the lists.
  void add_guard() {
    const std::size_t at = table_.head.rows * kRowWords + used_++;
    table_.words[at] = as_word(guard_);
    table_.head.guard = static_cast<uint16_t>(at);
  }

  TableRow placed(const Entry& entry, uint64_t moved) {
    TableRow row = entry.form;
    row.first_block = blocks_;
    row.dsts = list(entry.row->dsts, entry.row->dst_pitches, row.pitched);
    row.srcs =
        entry.in_place ? row.dsts : list(entry.row->srcs, entry.row->src_pitches, row.pitched);
    // One slot per thread, or fewer blocks if the row's share of the moved bytes is smaller.
    const uint64_t budget = static_cast<uint64_t>(limits_.multiprocessors) * kBlocksPerSm * kWaves;
    const uint64_t fair = 1 + budget * entry.moved / moved;
    blocks_ += static_cast<uint32_t>(std::min((entry.slots + kThreads - 1) / kThreads, fair));
    return row;
  }

  uint16_t list(const std::vector<std::byte*>& addresses,
                const std::vector<std::ptrdiff_t>& pitches, bool pitched) {
    const std::size_t begin = used_;
    uint64_t* const lists = table_.words + table_.head.rows * kRowWords;
    for (const std::byte* address : addresses) lists[used_++] = as_word(address);
    if (pitched)
      for (const std::ptrdiff_t pitch : pitches) lists[used_++] = static_cast<uint64_t>(pitch);
    return static_cast<uint16_t>(begin);
  }

  const Limits& limits_;
  const std::byte* const guard_;
  const std::size_t fixed_;  // words of every table besides rows and lists
  const std::function<void(const Packed&)>& issue_;
  LargeTable table_;
  std::size_t used_ = 0;  // words of lists
  uint32_t blocks_ = 0;
};

}  // namespace

void for_each_table(const Launch& launch, const Limits& limits,
                    const std::function<void(const Packed&)>& issue) {
  require_type(reduces(launch.dtype, launch.op), name(launch.op), " is not defined for ",
               name(launch.dtype));
  const PackedRows rows(launch, limits);
  Packer packer(launch, limits, issue);
  std::vector<Entry> entries;
  for (const KernelKind kind : {KernelKind::fold, KernelKind::copy}) {
    entries.clear();
    for (const KernelRow* row : kind == KernelKind::fold ? rows.folds : rows.copies)
      entries.push_back(entry_of(*row, launch.dtype, launch.op));
    packer.pack(kind, entries);
  }
}

}  // namespace pycollect::cuda
