// Checks of the tensors of one call against each other; the binder checks each tensor alone.
#pragma once
#include "binder.h"

namespace pycollect::dist {

// Returns the label of `all[i]`, with its index if the list has several tensors.
ArgumentName label_of(const GroupCall& call, const char* list, const Tensors& all, std::size_t i);

void check_dtype(const at::Tensor& t, const ArgumentName& label, const at::Tensor& other,
                 const ArgumentName& other_label);
void check_size(const at::Tensor& t, const ArgumentName& label, const at::Tensor& other,
                const ArgumentName& other_label);  // requires equal element counts
// Requires the dtype of `part` and `world` times its number of elements.
void check_joined(const at::Tensor& joined, const ArgumentName& label, const at::Tensor& part,
                  const ArgumentName& part_label, int world);

// Requires as many outputs as inputs, and at least one.
void check_pairs(const GroupCall& call, const Tensors& outputs, const Tensors& inputs);
// Requires one tensor for every rank.
void check_list(const GroupCall& call, RankAndWorld me, const Tensors& list);
// Requires as many lists as tensors, at least one, and one tensor per rank in each list.
void check_lists(const GroupCall& call, RankAndWorld me, const Tensors& tensors,
                 const std::vector<Tensors>& lists);
// Requires exactly one tensor.
void check_one(const GroupCall& call, const char* what, std::size_t given);

}  // namespace pycollect::dist
