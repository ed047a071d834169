#include "declarations.h"

#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <cstring>

#include "../plan/error.h"

namespace pycollect {
namespace {

using Self = const Parameter&;
using Value = const c10::IValue&;

void take_tensors(PythonCall& call, py::handle list, Self self) {
  const auto access = [&](int rank) {
    return self.role == Parameter::written ? access_of(call.args, rank) : AccessMode::read;
  };
  Tensors tensors = tensors_from(list, access, call.args.call, call.producers);
  const auto world = static_cast<int>(tensors.size());
  call.args.inputs = {std::move(tensors), world};
}
void take_tensors(ListArgs& args, Value list) {
  args.inputs.flat = list.toTensorVector();
  args.inputs.world = static_cast<int>(args.inputs.flat.size());
}

void take_lists(PythonCall& call, py::handle lists, Self) {
  const auto access = [&](int rank) { return access_of(call.args, rank); };
  call.args.inputs = grid_from(lists, access, call.args.call, call.producers);
}
// Orders the tensors of an operator, which are [rank][index], as those of a call.
void take_world(ListArgs& args, Value value) {
  const int64_t world = value.toInt();
  const Tensors tensors = std::move(args.inputs.flat);
  const auto size = static_cast<int64_t>(tensors.size());
  require(world > 0 && size % world == 0, args.call, ": ", size, " tensors for ", world,
          " ranks; pass equally many for each");
  args.inputs = {{}, static_cast<int>(world), "tensor_lists", true};
  for (int64_t i = 0; i < size / world; ++i)
    for (int64_t r = 0; r < world; ++r) args.inputs.flat.push_back(tensors[r * (size / world) + i]);
}

void take_tensor(PythonCall& call, py::handle tensor, Self self) {
  const AccessMode access = self.role == Parameter::written ? AccessMode::write : AccessMode::read;
  Tensors& taken = call.args.inputs.flat;
  taken.insert(taken.begin(),
               tensor_from(tensor, access, {call.args.call, self.name}, call.producers));
}
void take_tensor(ListArgs& args, Value tensor) { args.inputs.flat.push_back(tensor.toTensor()); }

void take_op(PythonCall& call, py::handle op, Self) { call.args.op = op_from(op, call.args.call); }
void take_op(ListArgs& args, Value op) { args.op = op_named(op.toStringView(), args.call); }

template <int64_t ListArgs::* kMember>
void take_int(PythonCall& call, py::handle number, Self self) {
  call.args.*kMember = int_from(number, call.args.call, self.name);
}
template <int64_t ListArgs::* kMember>
void take_int(ListArgs& args, Value number) {
  args.*kMember = number.toInt();
}

void take_order(PythonCall& call, py::handle order, Self self) {
  // The default of the functions, which is the interned string itself, costs nothing.
  static PyObject* const usual = PyUnicode_InternFromString(name(FoldOrder::rank));
  if (order.ptr() == usual) return;
  constexpr const char* hint = "'rank' or 'tree'";
  const std::string_view name = string_from(order, call.args.call, self.name, hint);
  call.args.order = order_named(name, call.args.call);
}
void take_order(ListArgs& args, Value order) {
  args.order = order_named(order.toStringView(), args.call);
}

void take_dtype(PythonCall& call, py::handle dtype, Self self) {
  if (dtype.is_none()) return;
  require_type(THPDtype_Check(dtype.ptr()), call.args.call, ": ", self.name, " is a ",
               Py_TYPE(dtype.ptr())->tp_name, "; pass a torch.dtype, or None");
  call.args.dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}
void take_dtype(ListArgs& args, Value dtype) {
  if (!dtype.isNone()) args.dtype = dtype.toScalarType();
}

void take_algorithm(PythonCall& call, py::handle name, Self) {
  call.args.algorithm = algorithm_from(name, call.args.call);
}
void take_algorithm(ListArgs& args, Value name) {
  if (!name.isNone()) args.algorithm = name.toStringView();
}

// Takes the block sizes of one rank.
void add_sizes(PythonCall& call, py::handle sizes, Self self) {
  require_type(PySequence_Check(sizes.ptr()) && !PyUnicode_Check(sizes.ptr()), call.args.call, ": ",
               self.name, " is a ", Py_TYPE(sizes.ptr())->tp_name, "; pass a list of ints");
  auto& added = call.args.sizes->emplace_back();
  for (py::handle s : sizes) added.push_back(int_from(s, call.args.call, self.name));
}
void take_chunk_sizes(PythonCall& call, py::handle sizes, Self self) {
  if (sizes.is_none()) return;
  call.args.sizes.emplace();
  add_sizes(call, sizes, self);
}
// Takes one list of sizes for all ranks, or one list per rank.
void take_split_sizes(PythonCall& call, py::handle sizes, Self self) {
  const bool nested = PySequence_Check(sizes.ptr()) && py::len(sizes) > 0 &&
                      PySequence_Check(sizes[py::int_(0)].ptr());
  if (!nested) return take_chunk_sizes(call, sizes, self);
  call.args.sizes.emplace();
  for (py::handle s : sizes) add_sizes(call, s, self);
}
void take_chunk_sizes(ListArgs& args, Value sizes) {
  if (sizes.isNone()) return;
  auto& taken = args.sizes.emplace(1)[0];
  for (Value size : sizes.toListRef()) taken.push_back(size.toInt());
}
// The sizes of an operator: one for each rank, which all ranks share, or those of all ranks one
// after the other.
void take_split_sizes(ListArgs& args, Value value) {
  take_chunk_sizes(args, value);
  const std::size_t world = args.inputs.flat.size();
  require(world > 0, args.call, ": tensors is empty; pass one tensor per rank");
  if (!args.sizes || args.sizes->front().size() <= world) return;
  const std::vector<int64_t> all = std::move(args.sizes->front());
  args.sizes->clear();
  for (std::size_t at = 0; at < all.size(); at += world)
    args.sizes->emplace_back(all.begin() + at, all.begin() + std::min(at + world, all.size()));
}

// Takes a list of devices from Python, and names of an operator: torch.export cannot save a list of
// devices.
void take_devices(PythonCall& call, py::handle devices, Self) {
  call.args.devices = devices.cast<DeviceList>();
}
void take_devices(ListArgs& args, Value names) {
  for (Value name : names.toListRef()) args.devices.emplace_back(name.toStringRef());
}
void take_device(ListArgs& args, Value device) {
  if (!device.isNone()) args.devices = {device.toDevice()};
}

void take_outs(PythonCall& call, py::handle list, Self self) {
  if (list.is_none()) return;
  call.args.out = tensors_from(list, write_access, call.args.call, call.producers, self.name);
}
void take_outs(ListArgs& args, Value list) { args.out = list.toTensorVector(); }
void take_out(PythonCall& call, py::handle tensor, Self self) {
  if (tensor.is_none()) return;
  const ArgumentName label{call.args.call, self.name};
  call.args.out = {tensor_from(tensor, AccessMode::write, label, call.producers)};
}
void take_out(ListArgs& args, Value tensor) { args.out = Tensors{tensor.toTensor()}; }

constexpr auto kWritten = Parameter::written;
constexpr auto kRoot = &ListArgs::root, kAlong = &ListArgs::dim;
constexpr const char* kSchema = "Tensor[] tensors";

const Parameter kTensors{"tensors", kSchema, take_tensors, take_tensors, kWritten};
const Parameter kLists{"tensor_lists", kSchema, take_lists, take_tensors, kWritten};
const Parameter kWorld{"world", "int world", nullptr, take_world};
const Parameter kInputs{"tensors", kSchema, take_tensors, take_tensors};
const Parameter kTensor{"tensor", "Tensor tensor", take_tensor, take_tensor};
const Parameter kTo{"dst", "Tensor dst", take_tensor, take_tensor, kWritten};
const Parameter kFrom{"src", "Tensor src", take_tensor, take_tensor};
const Parameter kOp{"op", "str op='sum'", take_op, take_op};
const Parameter kDst{"dst", "int dst=0", take_int<kRoot>, take_int<kRoot>};
const Parameter kSrc{"src", "int src=0", take_int<kRoot>, take_int<kRoot>};
const Parameter kDim{"dim", "int dim=0", take_int<kAlong>, take_int<kAlong>};
const Parameter kAlgorithm{"algorithm", "str? algorithm=None", take_algorithm, take_algorithm,
                           Parameter::keyword};
const Parameter kOrder{"order", "str order='rank'", take_order, take_order, Parameter::keyword};
const Parameter kDtype{"dtype", "ScalarType? dtype=None", take_dtype, take_dtype,
                       Parameter::keyword};
const Parameter kSplits{"split_sizes", "SymInt[]? split_sizes=None", take_split_sizes,
                        take_split_sizes};
const Parameter kChunks{"chunk_sizes", "SymInt[]? chunk_sizes=None", take_chunk_sizes,
                        take_chunk_sizes};
const Parameter kDevices{"devices", "str[] devices", take_devices, take_devices};
const Parameter kDevice{"device", "Device device", nullptr, take_device};
const Parameter kTarget{"device", "Device? device=None", take_devices, take_device};
const Parameter kOut{"out", "Tensor(a!)[] out", take_outs, take_outs, Parameter::out};
const Parameter kOneOut{"out", "Tensor(a!) out", take_out, take_out, Parameter::out};

Operator operator_of(const Declaration& d, Form form) {
  std::string name = d.name, arguments;
  if (form == Form::in_place && name.back() != '_') name += '_';
  if (form == Form::out) name += ".out";
  std::vector<const Parameter*> parameters;
  bool keywords = false;
  for (const Parameter* p : d.parameters) {
    if (p->role == Parameter::out && form != Form::out) continue;
    parameters.push_back(p);
    const bool keyword = p->role == Parameter::keyword || p->role == Parameter::out;
    if (!arguments.empty()) arguments += ", ";
    if (keyword && !keywords) arguments += "*, ";
    keywords = keywords || keyword;
    std::string schema = p->schema;
    if (form == Form::in_place && p->role == kWritten) schema.insert(std::strlen("Tensor"), "(a!)");
    arguments += schema;
  }
  const char* result = form == Form::functional ? d.result : "()";
  return {form, name, name + "(" + arguments + ") -> " + result, std::move(parameters)};
}

}  // namespace

const std::vector<Declaration>& declarations() {
  using enum Collective;
  constexpr auto blocks = block_collective;
  constexpr const char *one = "Tensor", *many = "Tensor[]";
  static const std::vector<Declaration> all{
      {"all_reduce", all_reduce, in_place, {&kTensors, &kOp, &kAlgorithm, &kOrder}, many},
      {"all_reduce_coalesced",
       all_reduce,
       in_place,
       {&kLists, &kWorld, &kOp, &kAlgorithm, &kOrder}},
      {"reduce", reduce, in_place, {&kTensors, &kDst, &kOp, &kAlgorithm, &kOrder}, one},
      {"broadcast", broadcast, in_place, {&kTensors, &kSrc, &kAlgorithm}, many},
      {"broadcast_coalesced", broadcast, in_place, {&kLists, &kWorld, &kSrc}},
      {"all_gather", all_gather, blocks, {&kInputs, &kDim, &kAlgorithm, &kOut}, many},
      {"reduce_scatter",
       reduce_scatter,
       blocks,
       {&kInputs, &kOp, &kDim, &kAlgorithm, &kOrder, &kOut},
       many},
      {"tree_sum", reduce, tree_sum, {&kInputs, &kDtype}, one},
      {"all_to_all", all_to_all, blocks, {&kInputs, &kDim, &kSplits, &kOut}, many},
      {"scatter", scatter, blocks, {&kTensor, &kDevices, &kChunks, &kDim, &kOut}, many},
      {"gather", gather, blocks, {&kInputs, &kTarget, &kDim, &kOneOut}, one},
      {"replicate", broadcast, replicate, {&kInputs, &kDevices}, many},
      {"copy_", scatter, copy, {&kTo, &kFrom}},
      {"copy", scatter, copy, {&kTensor, &kDevice}, one, false},
  };
  return all;
}

std::vector<Operator> operators_of(const Declaration& d) {
  const auto has = [&](Parameter::Role role) {
    return std::any_of(d.parameters.begin(), d.parameters.end(),
                       [&](const Parameter* p) { return p->role == role; });
  };
  std::vector<Operator> all;
  if (d.result != nullptr) all.push_back(operator_of(d, Form::functional));
  if (has(kWritten)) all.push_back(operator_of(d, Form::in_place));
  if (has(Parameter::out)) all.push_back(operator_of(d, Form::out));
  return all;
}

}  // namespace pycollect
