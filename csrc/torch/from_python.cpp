#include "from_python.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "../plan/error.h"
#include "gpus.h"

namespace pycollect {
namespace {

// Returns a list or a tuple as it is, and any other sequence as a list. Refuses tensors and arrays:
// they are sequences of their rows, but a single one in place of a list is a mistake.
py::object items_of(py::handle list, const ArgumentName& label) {
  if (PyList_CheckExact(list.ptr()) || PyTuple_CheckExact(list.ptr())) [[likely]]
    return py::reinterpret_borrow<py::object>(list);
  const bool sequence = PySequence_Check(list.ptr()) && !PyUnicode_Check(list.ptr()) &&
                        !THPVariable_Check(list.ptr()) && !py::hasattr(list, "__dlpack__");
  require_type(sequence, label.call, ": ", label, " is a ", Py_TYPE(list.ptr())->tp_name,
               "; pass a list with one tensor per rank");
  auto items = py::reinterpret_steal<py::object>(PySequence_Fast(list.ptr(), "not a sequence"));
  if (!items) throw py::error_already_set();  // of the sequence's own functions
  return items;
}

std::size_t size_of(const py::object& items) { return PySequence_Fast_GET_SIZE(items.ptr()); }
py::handle item_of(const py::object& items, std::size_t i) {
  return PySequence_Fast_GET_ITEM(items.ptr(), i);
}

// Returns the result of __index__, or null if the object is not an integer: tensors and arrays have
// __index__, but raise TypeError when it is called on other than one integer.
py::object index_of(py::handle number) {
  const bool is_flag =
      PyBool_Check(number.ptr()) || (THPVariable_Check(number.ptr()) &&
                                     THPVariable_Unpack(number.ptr()).scalar_type() == at::kBool);
  if (is_flag || !PyIndex_Check(number.ptr())) return {};
  auto whole = py::reinterpret_steal<py::object>(PyNumber_Index(number.ptr()));
  if (!whole && !PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
  PyErr_Clear();
  return whole;
}

// Adds the stream on which the array's owner uses it: the one it names, or else the current stream,
// with which the owner's library has ordered its work. CUDA's handle of the legacy default stream
// is 1; torch's is null.
void add_producer(py::handle stream, at::Device device, Producers& producers) {
  if (device.is_cpu() || !supports(device)) return;
  cuda::Stream found;
  if (stream.is_none()) {
    found = gpu_calls(device.type()).runtime().current_stream(device);
  } else {
    const auto handle = stream.cast<uintptr_t>();
    found = {device.index(), reinterpret_cast<void*>(handle == 1 ? 0 : handle)};
  }
  if (std::find(producers.begin(), producers.end(), found) == producers.end())
    producers.push_back(found);
}

}  // namespace

at::Tensor tensor_from(py::handle item, AccessMode access, const ArgumentName& label,
                       Producers& producers) {
  if (THPVariable_Check(item.ptr())) [[likely]]
    return THPVariable_Unpack(item.ptr());
  const py::module_ interop = py::module_::import("pycollect.interop");
  const py::object stream = interop.attr("producer_stream")(item);
  const std::string where = text(label.call, ": ", label);
  auto tensor = interop.attr("as_tensor")(item, access == AccessMode::write, where, stream)
                    .cast<at::Tensor>();
  add_producer(stream, tensor.device(), producers);
  return tensor;
}

Tensors tensors_from(py::handle list, AccessOf access, const char* call, Producers& producers,
                     const char* name) {
  const py::object items = items_of(list, {call, name});
  Tensors tensors;
  tensors.reserve(size_of(items));
  for (std::size_t i = 0; i < size_of(items); ++i)
    tensors.push_back(tensor_from(item_of(items, i), access(static_cast<int>(i)),
                                  {call, name, static_cast<int>(i)}, producers));
  return tensors;
}

TensorGrid grid_from(py::handle lists, AccessOf access, const char* call, Producers& producers) {
  constexpr const char* kName = "tensor_lists";
  const py::object ranks = items_of(lists, {call, kName});
  TensorGrid grid{{}, static_cast<int>(size_of(ranks)), kName, true};
  std::size_t width = 0;
  for (Rank r = 0; r < grid.world; ++r) {
    const py::object items = items_of(item_of(ranks, r), {call, kName, r});
    if (r == 0) width = size_of(items), grid.flat.resize(width * grid.world);
    require(size_of(items) == width, call, ": ", kName, "[", r, "] has ", size_of(items),
            " tensors and ", kName, "[0] has ", width, "; all ranks must have the same number");
    for (std::size_t i = 0; i < width; ++i)
      grid.flat[i * grid.world + r] =
          tensor_from(item_of(items, i), access(r), grid.label(call, i, r), producers);
  }
  return grid;
}

int64_t int_from(py::handle number, const char* call, const char* name) {
  const auto whole = PyLong_CheckExact(number.ptr()) ? py::reinterpret_borrow<py::object>(number)
                                                     : index_of(number);
  require_type(static_cast<bool>(whole), call, ": ", name, " is a ", Py_TYPE(number.ptr())->tp_name,
               "; pass an int");
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(whole.ptr(), &overflow);
  require(overflow == 0, call, ": ", name, " does not fit 64 bits");
  return value;
}

double real_from(py::handle number, const char* call, const char* name) {
  const PyNumberMethods* as_number = Py_TYPE(number.ptr())->tp_as_number;
  const bool is_number =
      as_number != nullptr && (as_number->nb_float != nullptr || PyIndex_Check(number.ptr()));
  double value = -1;
  if (is_number && !PyBool_Check(number.ptr())) value = PyFloat_AsDouble(number.ptr());
  const bool failed = PyErr_Occurred() != nullptr;
  const bool too_large = failed && PyErr_ExceptionMatches(PyExc_OverflowError);
  PyErr_Clear();
  require(!too_large, call, ": ", name, " is larger than any float");
  require_type(is_number && !PyBool_Check(number.ptr()) && !failed, call, ": ", name, " is a ",
               Py_TYPE(number.ptr())->tp_name, "; pass a number");
  return value;
}

bool flag_from(py::handle flag, const char* call, const char* name) {
  if (flag.ptr() == Py_True) return true;
  if (flag.ptr() == Py_False) [[likely]]
    return false;
  py::detail::make_caster<bool> numpy_bool;  // the result of NumPy's comparisons
  require_type(numpy_bool.load(flag, false), call, ": ", name, " is a ",
               Py_TYPE(flag.ptr())->tp_name, "; pass True or False");
  return py::detail::cast_op<bool>(numpy_bool);
}

std::string_view string_from(py::handle string, const char* call, const char* name,
                             const char* hint) {
  require_type(PyUnicode_Check(string.ptr()), call, ": ", name, " is a ",
               Py_TYPE(string.ptr())->tp_name, "; pass ", hint);
  Py_ssize_t length = 0;
  const char* data = PyUnicode_AsUTF8AndSize(string.ptr(), &length);
  if (data == nullptr) PyErr_Clear();  // the string has a lone surrogate
  require(data != nullptr, call, ": ", name, " cannot be encoded as UTF-8; pass ", hint);
  return {data, static_cast<std::size_t>(length)};
}

ReduceOp op_from(py::handle op, const char* call) {
  constexpr const char* kHint = "a name such as 'sum' or a torch.distributed.ReduceOp";
  if (PyUnicode_Check(op.ptr())) [[likely]]
    return op_named(string_from(op, call, "op", kHint), call);
  const py::object name = py::module_::import("pycollect.interop").attr("op_name")(op, call);
  return op_named(string_from(name, call, "op", kHint), call);
}

std::string_view algorithm_from(py::handle name, const char* call) {
  if (name.is_none()) return {};
  constexpr const char* kHint = "a name out of pycollect.algorithms(), or None";
  const std::string_view algorithm = string_from(name, call, "algorithm", kHint);
  require(!algorithm.empty(), call, ": algorithm is ''; pass ", kHint);
  return algorithm;
}

Streams streams_from(py::handle streams, const std::vector<at::Device>& devices, const char* call) {
  if (streams.is_none()) return {};
  const py::object items = items_of(streams, {call, "streams"});
  require(size_of(items) == devices.size(), call, ": streams has ", size_of(items),
          " items; needed are ", devices.size(), ", one per rank");
  Streams result;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    const py::handle item = item_of(items, i);
    result.emplace_back();
    if (item.is_none()) continue;
    require(!devices[i].is_cpu(), call, ": streams[", i,
            "] belongs to a CPU tensor, which has no stream; pass None for it");
    require_type(py::hasattr(item, "stream_id") && py::hasattr(item, "device_index"), call,
                 ": streams[", i, "] is a ", Py_TYPE(item.ptr())->tp_name,
                 "; pass a torch.cuda.Stream or None");
    const auto index = item.attr("device_index").cast<c10::DeviceIndex>();
    require(index == devices[i].index(), call, ": streams[", i,
            "] is a stream of cuda:", static_cast<int>(index), ", but the rank's tensor is on ",
            devices[i], "; pass a stream of that device");
    result.back() = c10::Stream::unpack3(item.attr("stream_id").cast<c10::StreamId>(), index,
                                         devices[i].type());
  }
  return result;
}

}  // namespace pycollect
