// The memory of a GPU that is not there (fake_gpu.h): files of this process, which others open by
// name, or by a descriptor that they fetch. Behind the memory is a page on which the processes
// count who has it open.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "../../plan/error.h"
#include "../../torch/job.h"
#include "fake_gpu.h"

namespace pycollect::dist {
namespace {

using shm::Descriptor;
using shm::Outlet;
using slabs::Device;
using slabs::Export;
using slabs::Handle;

struct Owner {
  Outlet::Ticket ticket;
  pid_t pid;
  int file;
  std::size_t bytes;
};

std::byte* map(int file, std::size_t bytes) {
  void* const at = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) throw std::runtime_error("made up: no address space");
  return static_cast<std::byte*>(at);
}

Descriptor open_by_name(const Owner& owner) {
  const std::string path = text("/proc/", owner.pid, "/fd/", owner.file);
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) throw std::runtime_error(text("made up: cannot open ", path));
  return file;
}

}  // namespace

class FakeGpu::Given final : public Export {
 public:
  Given(FakeGpu& gpu, bool fetched) : gpu_(gpu), fetched_(fetched) {}

  std::byte* allocate(Device device, std::size_t bytes) override;
  void free(Device device, std::byte* base) override;
  Key key_of(Device device, std::byte* base) override;
  std::byte* open(Device device, const Key& key) override;
  void close(Device device, std::byte* base) override;

 private:
  FakeGpu& gpu_;
  const bool fetched_;
};

std::byte* FakeGpu::Given::allocate(Device, std::size_t bytes) {
  const std::lock_guard lock(gpu_.streams_->mutex);
  gpu_.enter("allocate");
  gpu_.enter("out of memory");
  Descriptor file(memfd_create("pycollect_fake_gpu", MFD_CLOEXEC));
  if (!file || ftruncate(file.get(), static_cast<off_t>(bytes + kPage)) != 0)
    throw std::runtime_error("made up: out of memory");
  std::byte* const base = map(file.get(), bytes);
  std::memset(base, kPoison, bytes);
  gpu_.own_[base] = {base, bytes, file.release()};
  ++gpu_.books_["allocated"];
  return base;
}

void FakeGpu::Given::free(Device, std::byte* base) {
  const std::lock_guard lock(gpu_.streams_->mutex);
  const auto found = gpu_.own_.find(base);
  if (found == gpu_.own_.end()) gpu_.foul("memory was freed that was not allocated");
  const Memory memory = found->second;
  if (word_at(base + memory.bytes).load() != 0)
    gpu_.foul("memory was freed while others had it open");
  if (memory.offered) gpu_.outlet_->withdraw(*memory.offered);
  gpu_.own_.erase(found);
  munmap(base, memory.bytes + kPage);
  ::close(memory.file);
  --gpu_.books_["allocated"];
}

Export::Key FakeGpu::Given::key_of(Device, std::byte* base) {
  const std::lock_guard lock(gpu_.streams_->mutex);
  gpu_.enter("handle_of");
  gpu_.enter(fetched_ ? "fd" : "legacy");
  if (!gpu_.own_.contains(base))
    gpu_.foul("memory was handed over that was not allocated by itself");
  Memory& memory = gpu_.own_[base];
  if (fetched_ && !gpu_.outlet_) gpu_.outlet_.emplace();
  if (fetched_ && !memory.offered)
    memory.offered = gpu_.outlet_->offer(Descriptor(fcntl(memory.file, F_DUPFD_CLOEXEC, 0)));
  const Owner owner{memory.offered.value_or(Outlet::Ticket{}), getpid(), memory.file, memory.bytes};
  Key key = {};
  std::memcpy(key.data(), &owner, sizeof owner);
  return key;
}

std::byte* FakeGpu::Given::open(Device, const Key& key) {
  const std::lock_guard lock(gpu_.streams_->mutex);
  gpu_.enter("open");
  gpu_.enter(fetched_ ? "open by fd" : "open by name");
  Owner owner = {};
  std::memcpy(&owner, key.data(), sizeof owner);
  if (owner.pid == getpid()) gpu_.foul("a process cannot open what it has allocated itself");
  for (const auto& [base, memory] : gpu_.opened_)
    if (memory.key == key) gpu_.foul("memory was opened twice");
  Descriptor file = fetched_ ? fetch(owner.ticket) : open_by_name(owner);
  std::byte* const base = map(file.get(), owner.bytes);
  word_at(base + owner.bytes).fetch_add(1);
  gpu_.opened_[base] = {base, owner.bytes, file.release(), key};
  ++gpu_.books_["opened"];
  ++gpu_.books_[fetched_ ? "opened by fd" : "opened by name"];
  return base;
}

void FakeGpu::Given::close(Device, std::byte* base) {
  const std::lock_guard lock(gpu_.streams_->mutex);
  const auto found = gpu_.opened_.find(base);
  if (found == gpu_.opened_.end()) gpu_.foul("memory was closed that was not open");
  const Memory memory = found->second;
  word_at(base + memory.bytes).fetch_sub(1);
  gpu_.opened_.erase(found);
  munmap(base, memory.bytes + kPage);
  ::close(memory.file);
  --gpu_.books_["opened"];
}

slabs::Exports::Ways FakeGpu::both_ways() {
  slabs::Exports::Ways ways;
  for (const bool fetched : {false, true}) ways.push_back(std::make_unique<Given>(*this, fetched));
  return ways;
}

FakeGpu::FakeGpu(std::shared_ptr<FakeStreams> streams, const std::string& ipc)
    : streams_(std::move(streams)), exports_(both_ways(), ipc, &say_once) {
  streams_->run_by_themselves();
}

FakeGpu::~FakeGpu() {
  for (const auto* all : {&own_, &opened_})
    for (const auto& [base, memory] : *all) {
      munmap(base, memory.bytes + kPage);
      ::close(memory.file);
    }
}

std::byte* FakeGpu::allocate(Device device, std::size_t bytes) {
  return exports_.allocate(device, bytes);
}
// Whoever was out of memory has some then.
void FakeGpu::make_room(Device) {
  const std::lock_guard lock(streams_->mutex);
  enter("make_room");
  failing_.erase("out of memory");
}
void FakeGpu::free(Device device, std::byte* base) { exports_.free(device, base); }
Handle FakeGpu::handle_of(Device device, std::byte* base) {
  return exports_.handle_of(device, base);
}
std::byte* FakeGpu::open(Device device, const Handle& handle) {
  return exports_.open(device, handle);
}
void FakeGpu::close(Device device, std::byte* base) { exports_.close(device, base); }
bool FakeGpu::share_otherwise(Device device) { return exports_.share_otherwise(device); }

}  // namespace pycollect::dist
