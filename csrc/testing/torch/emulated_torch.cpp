// See emulated_torch.h.
#include "emulated_torch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "../../torch/c10d/gil_release.h"
#include "../../torch/prepared_call.h"
#include "../../torch/threads.h"

namespace pycollect::dist {
namespace {

using cuda::Emulator;
using cuda::Stream;

constexpr cuda::Device kDevice = -1;  // torch's index of the CPU

// The stream that is current in the calling thread, instead of the caller's.
struct Current {
  const EmulatedTorch* of = nullptr;
  Stream stream = {};
};
thread_local Current current_of_thread;

}  // namespace

EmulatedTorch::EmulatedTorch(bool eager, bool own_thread)
    : emulator_(Emulator::running(eager)),
      mutex_(emulator_->streams().mutex),
      cache_(std::make_shared<EmulatedCache>(emulator_)),
      pinned_(std::make_shared<EmulatedCache>(emulator_)),
      foreign_(std::make_shared<EmulatedCache>(emulator_)),
      caller_(emulator_->create_stream_of(Emulator::Owner::caller, kDevice)),
      second_(emulator_->create_stream_of(Emulator::Owner::caller, kDevice)),
      current_(caller_) {
  if (own_thread) emulator_->streams().start_thread();
}

EmulatedTorch::~EmulatedTorch() {
  const GilRelease without;
  emulator_->streams().stop();
}

bool EmulatedTorch::serves(const at::Tensor& tensor) const {
  const cuda::EmulatedStreams::Lock lock(mutex_);
  return tensor.is_cpu() && std::none_of(on_host_.begin(), on_host_.end(), [&](const auto& s) {
           return s.is_alias_of(tensor.storage());
         });
}

Stream EmulatedTorch::current_stream(at::Device) {
  if (current_of_thread.of == this) return current_of_thread.stream;
  const cuda::EmulatedStreams::Lock lock(mutex_);
  return current_;
}

Stream EmulatedTorch::new_stream(at::Device) {
  return emulator_->create_stream_of(Emulator::Owner::group, kDevice);
}

void EmulatedTorch::with_streams(c10::ArrayRef<Stream> streams, c10::function_ref<void()> act) {
  struct Under {
    explicit Under(Current now) : before(std::exchange(current_of_thread, now)) {}
    ~Under() { current_of_thread = before; }
    const Current before;
  } const under({this, streams.front()});
  act();
}

// Drains the streams before `act` completes the future: a torch future of CPU tensors has no
// streams to wait on, and its waiters read the tensors at once.
void EmulatedTorch::complete(c10::ArrayRef<Stream> streams, c10::function_ref<void()> act) {
  if (emulator_->drains_waits()) {
    emulator_->streams().drain(number(caller_));
    for (Stream s : streams) emulator_->streams().drain(number(s));
  }
  act();
}

at::Tensor EmulatedTorch::empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  return cache_->empty(sizes, type, number(current_stream(device)), false);
}

at::Tensor EmulatedTorch::empty_pinned(at::IntArrayRef sizes, at::ScalarType type) {
  emulator_->enter("empty_pinned");
  return pinned_->empty(sizes, type, EmulatedCache::kNoStream, true);
}

bool EmulatedTorch::record_stream(const at::Tensor& tensor, Stream stream) {
  const cuda::EmulatedStreams::Lock lock(mutex_);
  if (foreign_->owns(tensor)) return false;
  if (cache_->record(tensor, number(stream)) || !serves(tensor)) return true;
  // A tensor of the CPU allocator is kept alive by an item of work, until all earlier work is done.
  std::erase_if(kept_, [](const auto& old) { return old.second.expired(); });
  kept_.emplace_back(stream, tensor.storage().getWeakStorageImpl());
  emulator_->streams().enqueue(number(stream), [tensor] { return tensor.defined(); });
  return true;
}

at::Tensor EmulatedTorch::empty_foreign(int64_t count) {
  return foreign_->empty({count}, at::kFloat, EmulatedCache::kNoStream, false);
}

// Returns whether the stream may use the tensor's memory. Memory of a cache is not checked: without
// a record, its reuse gives wrong numbers.
bool EmulatedTorch::is_kept(const at::Tensor& tensor, Stream stream) const {
  return stream == current_ || !serves(tensor) || cache_->owns(tensor) || pinned_->owns(tensor) ||
         foreign_->owns(tensor) || std::any_of(kept_.begin(), kept_.end(), [&](const auto& kept) {
           return kept.first == stream && kept.second == tensor.storage().getWeakStorageImpl();
         });
}

void EmulatedTorch::enqueue(const char* call, std::initializer_list<at::Tensor> used,
                            std::function<void()> act) {
  const cuda::EmulatedStreams::Lock lock(mutex_);
  const Stream stream = current_stream(at::kCPU);
  for (const at::Tensor& t : used) {
    if (!is_kept(t, stream))
      throw std::logic_error(
          "work on memory that was not recorded on the stream: call record_stream first");
    pinned_->record(t, number(stream));
  }
  const cuda::CaptureModeGuard guard(*emulator_, kDevice);
  emulator_->enqueue(stream, call, [act = std::move(act)] {
    act();
    return true;
  });
}

// Returns the tensor that work on a stream uses. For memory of a cache, this is an alias that does
// not keep the memory alive, as with torch's own work; otherwise the tensor itself.
at::Tensor EmulatedTorch::stream_alias(const at::Tensor& tensor) const {
  if (!cache_->owns(tensor) && !pinned_->owns(tensor) && !foreign_->owns(tensor)) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions(tensor.scalar_type()));
}

// Enqueues one launch for each level of a plan.
void EmulatedTorch::run_list_call(const PreparedCall& call) {
  const cuda::EmulatedStreams::Lock lock(mutex_);
  const Stream stream = current_stream(at::kCPU);
  const cuda::CaptureModeGuard guard(*emulator_, kDevice);
  for (const DtypePlan& part : call.parts)
    for (const std::vector<TaskId>& level : part.compiled->levels) {
      cuda::Launch launch{{}, part.dtype, part.op, part.options};
      for (const TaskId& task : level) {
        const int at = part.compiled->program[task.rank][task.index].step;
        if (at == kAllBuffers) continue;
        const Step& step = part.compiled->plan.steps[at];
        for (const Binding& binding : part.bindings) {
          const auto addresses = [&](const Slices& slices) {
            std::vector<std::byte*> all;
            for (const Slice& s : slices)
              all.push_back(address(binding, s, item_bytes(part.dtype)));
            return all;
          };
          if (elements(binding, step) == 0) continue;
          launch.works.push_back({.dsts = addresses(step.dsts),
                                  .srcs = addresses(step.srcs),
                                  .count = elements(binding, step),
                                  .finishes = part.compiled->finishes[at]});
        }
      }
      if (!launch.works.empty()) emulator_->launch(stream, launch);
    }
}

void EmulatedTorch::use_own_stream() {
  current_of_thread = {this, emulator_->create_stream_of(Emulator::Owner::caller, kDevice)};
}

void EmulatedTorch::copy(const at::Tensor& to, const at::Tensor& from) {
  enqueue("copy_", {to, from},
          [to = stream_alias(to), from = stream_alias(from)] { copy_strided(to, from); });
}

void EmulatedTorch::compute(const at::Tensor& into, const at::Tensor& from,
                            const Computation& how) {
  enqueue("compute", {into, from}, [into, from, how] { how(into); });
}

void EmulatedTorch::put_on_host(const at::Tensor& tensor) {
  const cuda::EmulatedStreams::Lock lock(mutex_);
  on_host_.push_back(tensor.storage());
}

void EmulatedTorch::fill_later(const at::Tensor& tensor, double value) {
  const cuda::EmulatedStreams::Lock lock(mutex_);
  at::Tensor values(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
  values.fill_(value);
  emulator_->streams().enqueue(number(current_stream(at::kCPU)),
                               [to = stream_alias(tensor), values] {
                                 copy_strided(to, values);
                                 return true;
                               });
}

void EmulatedTorch::use_second_stream(bool on) {
  const cuda::EmulatedStreams::Lock lock(mutex_);
  current_ = on ? second_ : caller_;
}

void EmulatedTorch::finish_caller() { emulator_->streams().drain(number(caller_)); }

void EmulatedTorch::finish_own_stream() {
  emulator_->streams().drain(number(current_stream(at::kCPU)));
}

void EmulatedTorch::stall(bool on, int after) {
  const cuda::EmulatedStreams::Lock lock(mutex_);
  if (on)
    emulator_->streams().stall(number(caller_), after);
  else
    emulator_->streams().resume();
}

void EmulatedTorch::capture(bool on) {
  if (on)
    emulator_->begin_capture(caller_);
  else if (emulator_->captures())
    emulator_->end_capture(caller_);
}

}  // namespace pycollect::dist
