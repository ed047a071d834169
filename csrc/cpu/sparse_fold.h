// Adds up sparse tensors, given by their entries: an index and the values there. Where an index
// occurs in several tensors, their values are folded in the order of the tensors; a tensor without
// an entry there adds nothing, not 0.0.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fold.h"

namespace pycollect::cpu {

struct EntryList {          // the entries of one tensor; the indices are sorted and unique
  const int64_t* indices;   // [entry][dimension]
  const std::byte* values;  // [entry][element]
  int64_t count;
};

struct EntryFormat {
  int64_t dims;          // numbers of an index
  std::size_t elements;  // values of an entry
  DType dtype;
};

class SparseFold {
 public:
  SparseFold(std::vector<EntryList> tensors, const EntryFormat& format);

  int64_t count() const { return count_; }  // entries of the result
  // Writes the result, sorted by index: indices as [dimension][entry], values as [entry][element].
  void write(int64_t* indices, std::byte* values, ReduceOp op, const FoldOptions& options) const;

 private:
  struct EntryRef {
    int tensor;
    int64_t entry;
  };
  // Successive entries of the result that have values from the same tensors. They are successive in
  // each of these tensors, too, so that one fold adds them up.
  struct EntryRun {
    std::size_t refs;  // place of its first EntryRef
    int tensors;
    int64_t count;
  };
  const int64_t* index(const EntryRef& ref) const {
    return tensors_[ref.tensor].indices + ref.entry * format_.dims;
  }
  int compare(const EntryRef& one, const EntryRef& other) const;
  bool is_after(const EntryRef& one, const EntryRef& other) const;  // in the order of the result
  void push(const EntryRef& ref);
  EntryRef pop();
  void take_next();
  bool continues_last_run(std::size_t begin, int tensors) const;

  const std::vector<EntryList> tensors_;
  const EntryFormat format_;
  std::vector<EntryRef> heap_;  // the next entry of each tensor; the least one is in front
  std::vector<EntryRun> runs_;
  std::vector<EntryRef> refs_;
  int64_t count_ = 0;
};

}  // namespace pycollect::cpu
