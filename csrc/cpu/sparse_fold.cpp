// See sparse_fold.h. A merge of sorted lists finds the runs; a fold for each run adds them up.
#include "sparse_fold.h"

#include <algorithm>
#include <functional>

namespace pycollect::cpu {

SparseFold::SparseFold(std::vector<EntryList> tensors, const EntryFormat& format)
    : tensors_(std::move(tensors)), format_(format) {
  for (std::size_t t = 0; t < tensors_.size(); ++t) push({static_cast<int>(t), 0});
  while (!heap_.empty()) take_next();
}

// Returns a number less than, equal to, or greater than 0 as the index of one entry is to the
// other's.
int SparseFold::compare(const EntryRef& one, const EntryRef& other) const {
  const int64_t *const a = index(one), *const b = index(other);
  for (int64_t d = 0; d < format_.dims; ++d)
    if (a[d] != b[d]) return a[d] < b[d] ? -1 : 1;
  return 0;
}

bool SparseFold::is_after(const EntryRef& one, const EntryRef& other) const {
  const int order = compare(one, other);
  return order != 0 ? order > 0 : one.tensor > other.tensor;
}

void SparseFold::push(const EntryRef& ref) {
  if (ref.entry == tensors_[ref.tensor].count) return;
  heap_.push_back(ref);
  std::push_heap(heap_.begin(), heap_.end(), std::bind_front(&SparseFold::is_after, this));
}

SparseFold::EntryRef SparseFold::pop() {
  std::pop_heap(heap_.begin(), heap_.end(), std::bind_front(&SparseFold::is_after, this));
  const EntryRef least = heap_.back();
  heap_.pop_back();
  return least;
}

// Takes the entries of all tensors at the least index.
void SparseFold::take_next() {
  const std::size_t begin = refs_.size();
  do refs_.push_back(pop());
  while (!heap_.empty() && compare(heap_.front(), refs_[begin]) == 0);
  const auto taken = static_cast<int>(refs_.size() - begin);
  for (int i = 0; i < taken; ++i) push({refs_[begin + i].tensor, refs_[begin + i].entry + 1});
  ++count_;
  if (continues_last_run(begin, taken)) {
    ++runs_.back().count;
    refs_.resize(begin);
  } else {
    runs_.push_back({begin, taken, 1});
  }
}

bool SparseFold::continues_last_run(std::size_t begin, int tensors) const {
  if (runs_.empty() || runs_.back().tensors != tensors) return false;
  for (int i = 0; i < tensors; ++i)
    if (refs_[runs_.back().refs + i].tensor != refs_[begin + i].tensor) return false;
  return true;
}

void SparseFold::write(int64_t* indices, std::byte* values, ReduceOp op,
                       const FoldOptions& options) const {
  const Fold fold = find_fold(format_.dtype, op);
  const std::size_t bytes = format_.elements * item_bytes(format_.dtype);
  std::vector<void*> from;
  for (const EntryRun& run : runs_) {
    from.clear();
    for (int i = 0; i < run.tensors; ++i) {
      const EntryRef& ref = refs_[run.refs + i];
      from.push_back(const_cast<std::byte*>(tensors_[ref.tensor].values) + ref.entry * bytes);
    }
    void* const into = values;
    if (bytes > 0)
      fold({&into, 1}, {from.data(), run.tensors}, run.count * format_.elements, options);
    const int64_t* const first = index(refs_[run.refs]);
    for (int64_t d = 0; d < format_.dims; ++d)
      for (int64_t i = 0; i < run.count; ++i) indices[d * count_ + i] = first[i * format_.dims + d];
    values += run.count * bytes;
    indices += run.count;
  }
}

}  // namespace pycollect::cpu
