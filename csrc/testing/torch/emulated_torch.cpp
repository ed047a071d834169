// See emulated_torch.h.
#include "emulated_torch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../../torch/c10d/interpreter.h"
#include "../../torch/gpus.h"
#include "../../torch/threads.h"

namespace pycollect {
namespace {

constexpr std::size_t kUnit = 512;  // bytes; torch rounds sizes up to a multiple

}  // namespace

// Pinned memory gets new content, because the host writes it before any stream uses it.
std::byte* EmulatedCache::take(Use use) {
  use.bytes = std::max<std::size_t>((use.bytes + kUnit - 1) / kUnit, 1) * kUnit;
  std::byte* best = nullptr;
  for (auto& [memory, block] : blocks_)
    if (block.use == use && is_free(block) &&
        (best == nullptr || blocks_.at(best).release_number < block.release_number))
      best = memory;
  if (best == nullptr) {
    const bool pinned = use.device == cuda::kHost;
    best = emulator_->allocate(pinned ? cuda::MemoryKind::pinned : cuda::MemoryKind::device,
                               use.device, use.bytes);
    blocks_.emplace(best, CachedBlock{use});
  }
  CachedBlock& block = blocks_.at(best);
  for (const Awaited& a : std::exchange(block.awaited, {})) emulator_->log_passed(a.logged);
  if (use.device == cuda::kHost)
    emulator_->host_work("new content of pinned memory", {{best, use.bytes, true, 0}},
                         [&] { std::memset(best, cuda::kPoison, use.bytes); });
  block.in_use = true;
  return best;
}

// Torch's allocators ask events which work is done.
bool EmulatedCache::is_free(const CachedBlock& block) const {
  return !block.in_use &&
         std::all_of(block.awaited.begin(), block.awaited.end(),
                     [&](const Awaited& a) { return emulator_->streams().passed(a.point); });
}

void EmulatedCache::release(std::byte* memory) {
  const auto lock = emulator_->locked();
  CachedBlock& block = blocks_.at(memory);
  block.in_use = false;
  block.release_number = ++releases_;
  for (std::size_t stream : block.used_on)
    block.awaited.push_back({emulator_->streams().end(stream), emulator_->log_point(stream)});
  block.used_on.clear();
}

EmulatedCache::CachedBlock* EmulatedCache::find(const void* address) const {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(address));
  const auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) return nullptr;
  const auto& [memory, block] = *std::prev(after);
  return at < memory + block.use.bytes ? const_cast<CachedBlock*>(&block) : nullptr;
}

bool EmulatedCache::is_pinned(const void* address) const {
  const CachedBlock* const block = find(address);
  return block != nullptr && block->use.device == cuda::kHost;
}

bool EmulatedCache::record(const void* address, std::size_t stream) {
  CachedBlock* const block = find(address);
  if (block == nullptr || block->use.foreign) return false;
  auto& used = block->used_on;
  if (stream != block->use.stream && std::find(used.begin(), used.end(), stream) == used.end())
    used.push_back(stream);
  return true;
}

int EmulatedCache::in_use() const {
  return static_cast<int>(std::count_if(blocks_.begin(), blocks_.end(),
                                        [](const auto& entry) { return entry.second.in_use; }));
}

using cuda::Device;
using cuda::Emulator;
using cuda::Stream;
using cuda::WorkOrder;

namespace {

// The streams that are current in the calling thread, instead of the callers'.
struct Current {
  uint64_t of = 0;                   // number of the runtime
  std::vector<Stream> streams = {};  // at most one of each device
};
thread_local Current current_of_thread;

std::atomic<uint64_t> runtimes = 0;  // number of runtimes made so far

std::byte* memory_of(const at::Tensor& t) {
  return static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr()));
}

// The bytes from the first element to the end of the last one.
std::size_t extent_of(const at::Tensor& t) {
  std::size_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return t.numel() == 0 ? 0 : (last + 1) * t.element_size();
}

}  // namespace

EmulatedTorch::EmulatedTorch(c10::DeviceType kind, int devices)
    : kind_(kind),
      number_(++runtimes),
      emulator_(std::make_shared<Emulator>(devices, kind == c10::DeviceType::CPU)),
      cache_(std::make_shared<EmulatedCache>(emulator_)) {
  for (Device d = 0; d < devices; ++d) current_.push_back(emulator_->create_stream(d, true));
  connect(true);
  if (has_index()) return;
  const std::shared_ptr<TorchRuntime> not_owned(std::shared_ptr<void>(), this);
  list_calls_ = std::make_shared<GpuCalls>(not_owned, kLists);
}

EmulatedTorch::~EmulatedTorch() {
  const dist::GilRelease without;
  emulator_->streams().stop();
}

bool EmulatedTorch::serves(const at::Tensor& tensor) const {
  const Lock lock = emulator_->locked();
  return has(tensor.device()) && std::none_of(on_host_.begin(), on_host_.end(), [&](const auto& s) {
           return s.is_alias_of(tensor.storage());
         });
}

at::Device EmulatedTorch::with_index(at::Device device) const {
  return device.has_index() || !has_index() ? device : at::Device(kind_, 0);
}

// --- streams ------------------------------------------------------------------------------------

Stream EmulatedTorch::current_stream(at::Device device) {
  const Device index = index_of(device);
  if (current_of_thread.of == number_)
    for (const Stream& s : current_of_thread.streams)
      if (s.device == index) return s;
  const Lock lock = emulator_->locked();
  return current_.at(index);
}

// The emulator numbers its streams from 1.
Stream EmulatedTorch::stream_of(c10::Stream stream) {
  if (!has_index()) return current_stream(at::kCPU);
  return {stream.device_index(), reinterpret_cast<void*>(stream.id())};
}

Stream EmulatedTorch::new_stream(at::Device device) {
  const Lock lock = emulator_->locked();
  const auto& streams = emulator_->streams();
  const auto idle = std::find_if(idle_.begin(), idle_.end(), [&](const Stream& s) {
    return s.device == index_of(device) && streams.passed(streams.end(number(s)));
  });
  if (idle == idle_.end()) return emulator_->create_stream(index_of(device), false);
  const Stream found = *idle;
  idle_.erase(idle);
  return found;
}

void EmulatedTorch::give_back(Stream stream) {
  const Lock lock = emulator_->locked();
  idle_.push_back(stream);
}

void EmulatedTorch::connect(bool on) {
  connected_ = on;
  for (Device from = 0; from < devices(); ++from)
    for (Device to = 0; to < devices(); ++to) emulator_->connect(from, to, on || from == to);
}

void EmulatedTorch::with_streams(c10::ArrayRef<Stream> streams, c10::function_ref<void()> act) {
  Current now{number_, streams.vec()};
  if (current_of_thread.of == number_)
    for (const Stream& s : current_of_thread.streams)
      if (std::none_of(streams.begin(), streams.end(),
                       [&](const Stream& other) { return other.device == s.device; }))
        now.streams.push_back(s);
  struct Under {
    explicit Under(Current now) : before(std::exchange(current_of_thread, std::move(now))) {}
    ~Under() { current_of_thread = before; }
    const Current before;
  } const under(std::move(now));
  act();
}

// Drains the streams before `act` completes the future: a torch future of CPU tensors has no
// streams to wait on, and its waiters read the tensors at once.
void EmulatedTorch::complete(c10::ArrayRef<Stream> streams, c10::function_ref<void()> act) {
  if (!emulator_->drains_waits()) return act();
  std::vector<Stream> all = streams.vec();
  {
    const Lock lock = emulator_->locked();
    all.insert(all.end(), current_.begin(), current_.end());
  }
  for (Stream s : all) emulator_->streams().drain(number(s));
  act();
}

void EmulatedTorch::use(Stream stream) {
  const Lock lock = emulator_->locked();
  current_.at(stream.device) = stream;
}

void EmulatedTorch::use_own_stream() {
  current_of_thread = {number_, {emulator_->create_stream(0, true)}};
}

void EmulatedTorch::finish() {
  emulator_->finish(current_stream(has_index() ? at::Device(kind_, 0) : at::kCPU));
}

// Torch returns memory to a graph's pool only on the device on which the capture has begun.
uint64_t EmulatedTorch::pool_of(Stream stream) const {
  if (stream.device != capture_device_) return 0;
  cuda::DeviceGuard device(*emulator_);
  device.use(stream.device);
  return emulator_->capture_id(stream);
}

void EmulatedTorch::begin_capture(Stream stream, bool by_torch) {
  if (by_torch) capture_device_ = stream.device;
  emulator_->begin_capture(stream);
}

int EmulatedTorch::end_capture(Stream stream) {
  capture_device_ = cuda::kHost;
  return emulator_->end_capture(stream);
}

// --- memory -------------------------------------------------------------------------------------

at::Tensor EmulatedTorch::tensor_in(EmulatedCache::Use use, at::IntArrayRef sizes,
                                    at::ScalarType type, at::Device device, int64_t offset) {
  const Lock lock = emulator_->locked();
  const auto count = static_cast<std::size_t>(c10::multiply_integers(sizes));
  use.bytes = count * at::elementSize(type) + offset;
  std::byte* const memory = cache_->take(use);
  const auto release = [cache = cache_, memory](void*) { cache->release(memory); };
  return at::for_blob(memory + offset, sizes)
      .deleter(release)
      .target_device(device)
      .options(at::TensorOptions(type).device(device))
      .make_tensor();
}

at::Tensor EmulatedTorch::empty(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  const Stream stream = current_stream(device);
  return tensor_in({0, stream.device, number(stream), pool_of(stream)}, sizes, type, device);
}

// The tensor is not marked as pinned, because torch asks the accelerator, and there is none.
at::Tensor EmulatedTorch::empty_pinned(at::IntArrayRef sizes, at::ScalarType type) {
  emulator_->require_no_capture("allocation of pinned memory");
  emulator_->enter("empty_pinned");
  return tensor_in({0, cuda::kHost, EmulatedCache::kNoStream}, sizes, type, at::kCPU);
}

at::Tensor EmulatedTorch::empty_foreign(int64_t count, c10::DeviceIndex device, int64_t offset) {
  const EmulatedCache::Use use{
      .bytes = 0, .device = device, .stream = EmulatedCache::kNoStream, .foreign = true};
  return tensor_in(use, {count}, at::kFloat, has_index() ? at::Device(kind_, device) : at::kCPU,
                   offset);
}

bool EmulatedTorch::record_stream(const at::Tensor& tensor, Stream stream) {
  const Lock lock = emulator_->locked();
  ++recorded_;
  if (emulator_->skips("record_stream")) return true;
  const void* const memory = tensor.storage().data();
  if (cache_->owns(memory)) return cache_->record(memory, number(stream));
  if (has_index() || !serves(tensor)) return !has_index();
  // A tensor of the CPU allocator is kept alive by an item of work, until all earlier work is done.
  std::erase_if(kept_, [](const auto& old) { return old.second.expired(); });
  kept_.emplace_back(stream, tensor.storage().getWeakStorageImpl());
  emulator_->streams().enqueue(number(stream), [tensor] { return tensor.defined(); });
  return true;
}

bool EmulatedTorch::is_pageable(const void* address) {
  return emulator_->kind_of(static_cast<const std::byte*>(address)) == cuda::MemoryKind::pageable;
}

void EmulatedTorch::adopt(const at::Tensor& tensor, bool pinned) {
  emulator_->adopt(pinned ? cuda::MemoryKind::pinned : cuda::MemoryKind::pageable,
                   memory_of(tensor), tensor.nbytes());
  adopted_.push_back(tensor);
}

void EmulatedTorch::put_on_host(const at::Tensor& tensor) {
  const Lock lock = emulator_->locked();
  on_host_.push_back(tensor.storage());
}

int EmulatedTorch::blocks_in_use() const {
  const Lock lock = emulator_->locked();
  return cache_->in_use();
}

// --- work ---------------------------------------------------------------------------------------

// Returns whether the stream may use the tensor's memory. Memory of the cache is not checked:
// without a record, its reuse gives wrong numbers.
bool EmulatedTorch::is_kept(const at::Tensor& tensor, Stream stream) const {
  return has_index() || stream == current_[0] || !serves(tensor) ||
         cache_->owns(tensor.storage().data()) ||
         std::any_of(kept_.begin(), kept_.end(), [&](const auto& kept) {
           return kept.first == stream && kept.second == tensor.storage().getWeakStorageImpl();
         });
}

// Returns the tensor that work on a stream uses, as a CPU tensor. For memory of the cache, it does
// not keep the memory alive, as with torch's own work.
at::Tensor EmulatedTorch::host_view(const at::Tensor& t) const {
  if (!cache_->owns(t.storage().data())) return t;
  return at::from_blob(memory_of(t), t.sizes(), t.strides(), at::TensorOptions(t.scalar_type()));
}

// The first of the tensors is written, the others are read.
std::vector<MemoryAccess> EmulatedTorch::accesses(std::initializer_list<at::Tensor> used) const {
  std::vector<MemoryAccess> all;
  for (const at::Tensor& t : used)
    if (emulator_->knows(memory_of(t)))
      all.push_back({memory_of(t), extent_of(t), &t == used.begin(), 0});
  return all;
}

void EmulatedTorch::enqueue(const char* call, std::initializer_list<at::Tensor> used,
                            std::function<void()> act) {
  const Lock lock = emulator_->locked();
  const at::Tensor& placed = has(used.begin()->device()) ? *used.begin() : *(used.end() - 1);
  const Stream stream = current_stream(placed.device());
  for (const at::Tensor& t : used) {
    if (!is_kept(t, stream))
      throw std::logic_error(
          "work on memory that was not recorded on the stream: call record_stream first");
    if (cache_->is_pinned(memory_of(t))) cache_->record(memory_of(t), number(stream));
  }
  const cuda::CaptureModeGuard guard(*emulator_, stream.device);
  emulator_->enqueue(stream, call, accesses(used), std::move(act));
}

void EmulatedTorch::run_list_call(const ListCall& call) {
  if (has_index()) return gpu_calls(kind_).run(call);
  ListCall placed{.name = call.name,
                  .plans = call.plans};  // on the device that the CPU tensors stand for
  placed.devices.assign(call.devices.size(), at::Device(kLists, 0));
  cuda::demand(call.layout_copies.empty() && call.producers.empty() && call.streams.empty(),
               "a joint call of ranks as threads with more than dense tensors");
  placed.peer_access = call.peer_access;
  list_calls_->run(placed);
}

void EmulatedTorch::copy(const at::Tensor& to, const at::Tensor& from) {
  enqueue("copy_", {to, from},
          [to = host_view(to), from = host_view(from)] { copy_strided(to, from); });
}

void EmulatedTorch::compute(const at::Tensor& into, const at::Tensor& from,
                            const Computation& how) {
  enqueue("compute", {into, from}, [into, from, how] { how(into); });
}

void EmulatedTorch::caller_work(const at::Tensor& on, StreamOrNone stream, const char* what,
                                std::vector<MemoryAccess> accesses, std::function<void()> act) {
  if (!stream && on.is_cpu() && has_index())
    return emulator_->host_work(what, std::move(accesses), act);
  emulator_->caller_work(stream ? *stream : current_stream(on.device()), what, std::move(accesses),
                         std::move(act));
}

void EmulatedTorch::write(const at::Tensor& tensor, const at::Tensor& values, StreamOrNone stream) {
  const Lock lock = emulator_->locked();
  caller_work(tensor, stream, "the caller's write", accesses({tensor}),
              [to = host_view(tensor), from = values.clone()] { to.copy_(from); });
}

at::Tensor EmulatedTorch::read(const at::Tensor& tensor, StreamOrNone stream) {
  const Lock lock = emulator_->locked();
  at::Tensor values(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));
  caller_work(tensor, stream, "the caller's read", accesses({values, tensor}),
              [to = values, from = host_view(tensor)] { to.copy_(from); });
  return values;
}

void EmulatedTorch::stall(Stream stream) {
  const Lock lock = emulator_->locked();
  emulator_->streams().stall(number(stream));
}

void EmulatedTorch::resume() {
  const Lock lock = emulator_->locked();
  emulator_->streams().resume();
}

void EmulatedTorch::run(int64_t seed) {
  emulator_->streams().set_order(WorkOrder::random, static_cast<uint64_t>(seed));
  cuda::demand(emulator_->streams().drain_all(std::chrono::seconds(10)), "a deadlock of streams");
  emulator_->streams().set_order(WorkOrder::late);
  emulator_->clear_log();
}

namespace {

// Torch's functions on tensors of the emulated kind of device: those that make, view and copy them.
EmulatedTorch& emulated() {
  return dynamic_cast<EmulatedTorch&>(gpu_calls(EmulatedTorch::kLists).runtime());
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  return emulated().empty(sizes, type.value_or(at::kFloat), *device);
}

// Only of dense tensors.
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  return at::native::as_strided_tensorimpl(
      emulated().empty(sizes, type.value_or(at::kFloat), *device), sizes, strides, std::nullopt);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
  emulated().copy(to, from);
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("copy_", &copy_);
}

}  // namespace

}  // namespace pycollect
