// The memory of a GPU that is not there (fake_gpu.h): files of this process, which others map by a
// descriptor. Behind the memory is a page on which the processes count who has it open.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "fake_gpu.h"

namespace pycollect::dist {
namespace {

using shm::Descriptor;
using slabs::Device;

std::byte* mapped(int file, std::size_t bytes) {
  void* const at = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) throw std::runtime_error("made up: no address space");
  return static_cast<std::byte*>(at);
}

bool is_one_file(int a, int b) {
  struct stat x = {}, y = {};
  return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_ino == y.st_ino && x.st_dev == y.st_dev;
}

}  // namespace

FakeGpu::FakeGpu(std::shared_ptr<FakeStreams> streams) : streams_(std::move(streams)) {
  streams_->run_by_themselves();
}

FakeGpu::~FakeGpu() {
  for (const auto* all : {&own_, &opened_})
    for (const auto& [base, memory] : *all) {
      munmap(base, memory.bytes + kPage);
      ::close(memory.file);
    }
}

std::byte* FakeGpu::allocate(Device, std::size_t bytes) {
  const std::lock_guard lock(streams_->mutex);
  enter("allocate");
  enter("out of memory");
  Descriptor file(memfd_create("pycollect_fake_gpu", MFD_CLOEXEC));
  if (!file || ftruncate(file.get(), static_cast<off_t>(bytes + kPage)) != 0)
    throw std::runtime_error("made up: out of memory");
  std::byte* const base = mapped(file.get(), bytes);
  std::memset(base, kPoison, bytes);
  own_[base] = {base, bytes, file.release()};
  ++books_["allocated"];
  return base;
}

// Whoever was out of memory has some then.
void FakeGpu::make_room(Device) {
  const std::lock_guard lock(streams_->mutex);
  enter("make_room");
  failing_.erase("out of memory");
}

void FakeGpu::release(Device, std::byte* base) {
  const std::lock_guard lock(streams_->mutex);
  const auto found = own_.find(base);
  if (found == own_.end()) foul("memory was freed that was not allocated");
  const Memory memory = found->second;
  if (word_at(base + memory.bytes).load() != 0) foul("memory was freed while others had it open");
  own_.erase(found);
  munmap(base, memory.bytes + kPage);
  ::close(memory.file);
  --books_["allocated"];
}

slabs::Gpu::Exported FakeGpu::exported(Device, std::byte* base) {
  const std::lock_guard lock(streams_->mutex);
  enter("handle_of");
  if (!own_.contains(base)) foul("memory was handed over that was not allocated by itself");
  const Memory& memory = own_[base];
  return {Descriptor(fcntl(memory.file, F_DUPFD_CLOEXEC, 0)), memory.bytes};
}

std::byte* FakeGpu::map(Device, const Descriptor& descriptor, std::size_t bytes) {
  const std::lock_guard lock(streams_->mutex);
  enter("open");
  for (const auto& [base, memory] : own_)
    if (is_one_file(memory.file, descriptor.get()))
      foul("a process cannot open what it has allocated itself");
  for (const auto& [base, memory] : opened_)
    if (is_one_file(memory.file, descriptor.get())) foul("memory was opened twice");
  Descriptor file(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
  std::byte* const base = mapped(file.get(), bytes);
  word_at(base + bytes).fetch_add(1);
  opened_[base] = {base, bytes, file.release()};
  ++books_["opened"];
  return base;
}

void FakeGpu::close(Device, std::byte* base) {
  const std::lock_guard lock(streams_->mutex);
  const auto found = opened_.find(base);
  if (found == opened_.end()) foul("memory was closed that was not open");
  const Memory memory = found->second;
  word_at(base + memory.bytes).fetch_sub(1);
  opened_.erase(found);
  munmap(base, memory.bytes + kPage);
  ::close(memory.file);
  --books_["opened"];
}

}  // namespace pycollect::dist
