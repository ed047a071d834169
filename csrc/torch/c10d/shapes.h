// What the tensors of one call must have in common; everything else about them is the binder's.
#pragma once
#include "binder.h"

namespace pycollect::dist {

// Numbered when there are several.
Label label_of(const Call& call, const char* list, const Tensors& all, std::size_t i);

void check_dtype(const at::Tensor& t, const Label& label, const at::Tensor& other,
                 const Label& other_label);
void check_size(const at::Tensor& t, const Label& label, const at::Tensor& other,
                const Label& other_label);  // the same number of elements
// `joined` is as large as `world` of the other.
void check_joined(const at::Tensor& joined, const Label& label, const at::Tensor& part,
                  const Label& part_label, int world);

// As many of the one as of the other, and at least one.
void check_pairs(const Call& call, const Tensors& outputs, const Tensors& inputs);
// One tensor for every rank.
void check_list(const Call& call, Seat seat, const Tensors& list);
// As many lists as tensors, and at least one.
void check_lists(const Call& call, Seat seat, const Tensors& tensors,
                 const std::vector<Tensors>& lists);
// Exactly one.
void check_one(const Call& call, const char* what, std::size_t given);

}  // namespace pycollect::dist
