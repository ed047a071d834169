// See shapes.h.
#include "shapes.h"

#include "../../plan/error.h"

namespace pycollect::dist {

ArgumentName label_of(const GroupCall& call, const char* list, const Tensors& all, std::size_t i) {
  return {call.name, list, all.size() == 1 ? -1 : static_cast<int>(i)};
}

void check_dtype(const at::Tensor& t, const ArgumentName& label, const at::Tensor& other,
                 const ArgumentName& other_label) {
  require_type(t.scalar_type() == other.scalar_type(), label.call, ": ", label, " is ",
               dtype_name(t), " and ", other_label, " is ", dtype_name(other),
               "; both must have the same dtype");
}

void check_size(const at::Tensor& t, const ArgumentName& label, const at::Tensor& other,
                const ArgumentName& other_label) {
  require(t.numel() == other.numel(), label.call, ": ", label, " has ", t.numel(), " elements and ",
          other_label, " has ", other.numel(), "; both must have the same number");
}

void check_joined(const at::Tensor& joined, const ArgumentName& label, const at::Tensor& part,
                  const ArgumentName& part_label, int world) {
  check_dtype(joined, label, part, part_label);
  require(joined.numel() == part.numel() * world, label.call, ": ", label, " has ", joined.numel(),
          " elements; it must have ", part.numel() * world, ", the ", part.numel(), " elements of ",
          part_label, " for each of ", world, " ranks");
}

void check_pairs(const GroupCall& call, const Tensors& outputs, const Tensors& inputs) {
  require(!outputs.empty() && outputs.size() == inputs.size(), call.name, ": ", outputs.size(),
          " outputs and ", inputs.size(), " inputs; pass one output for each input");
}

void check_list(const GroupCall& call, RankAndWorld me, const Tensors& list) {
  require(static_cast<int>(list.size()) == me.world, call.name, ": a list has ", list.size(),
          " tensors; pass one for each of ", me.world, " ranks");
}

void check_lists(const GroupCall& call, RankAndWorld me, const Tensors& tensors,
                 const std::vector<Tensors>& lists) {
  require(!tensors.empty() && lists.size() == tensors.size(), call.name, ": ", lists.size(),
          " lists for ", tensors.size(), " tensors; pass one list for each tensor");
  for (const Tensors& list : lists) check_list(call, me, list);
}

void check_one(const GroupCall& call, const char* what, std::size_t given) {
  require(given == 1, call.name, ": ", given, " ", what, " were passed; pass 1");
}

}  // namespace pycollect::dist
