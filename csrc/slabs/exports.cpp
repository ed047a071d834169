#include "exports.h"

#include <cstring>

#include "../plan/error.h"
#include "../plan/names.h"

namespace pycollect::slabs {
namespace {

constexpr std::array kNames{"legacy", "fd"};
// To try a way with: a page of the GPU's.
constexpr std::size_t kTrialBytes = 2 << 20;

void try_out(Export& way, Device device) {
  std::byte* const memory = way.allocate(device, kTrialBytes);
  try {
    way.key_of(device, memory);
  } catch (...) {
    way.free(device, memory);
    throw;
  }
  way.free(device, memory);
}

}  // namespace

std::vector<const char*> export_names() {
  std::vector<const char*> names{kBestExport};
  names.insert(names.end(), kNames.begin(), kNames.end());
  return names;
}

void check_export(const std::string& name) { find_name("cuda_ipc", name, export_names()); }

Exports::Exports(Ways ways, std::string wanted, Say say)
    : ways_(std::move(ways)), wanted_(std::move(wanted)), say_(std::move(say)) {
  check_export(wanted_);
}

uint64_t Exports::way_of(Device device) {
  const auto found = decided_.find(device);
  if (found != decided_.end()) return found->second;
  return decided_[device] = decide(device);
}

// One that was named need not be tried: what it throws is the answer.
uint64_t Exports::decide(Device device) {
  for (uint64_t way = 0; way < kNames.size(); ++way)
    if (wanted_ == kNames[way]) return way;
  return first_from(0, device, {});
}

// `refused` is what was wrong with those before.
uint64_t Exports::first_from(uint64_t way, Device device, std::string refused) const {
  for (; way < ways_.size(); ++way) {
    try {
      try_out(*ways_[way], device);
      if (!refused.empty())
        say_(text("the memory of cuda:", device,
                  " goes to other processes by PYCOLLECT_CUDA_IPC=", kNames[way], "; ", refused));
      return way;
    } catch (const std::runtime_error& error) {
      refused += text(refused.empty() ? "" : "; ", kNames[way], ": ", error.what());
    }
  }
  throw std::runtime_error(text("no way to give memory to other processes works; ", refused));
}

Export& Exports::known(const Known& all, std::byte* memory) const {
  const auto found = all.find(memory);
  if (found == all.end()) throw std::logic_error("that memory is not of this process's slabs");
  return *ways_[found->second];
}

std::byte* Exports::allocate(Device device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t way = way_of(device);
  std::byte* const memory = ways_[way]->allocate(device, bytes);
  own_[memory] = way;
  return memory;
}

void Exports::free(Device device, std::byte* memory) {
  const std::lock_guard lock(mutex_);
  Export& way = known(own_, memory);
  own_.erase(memory);
  way.free(device, memory);
}

Handle Exports::handle_of(Device device, std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const Export::Key key = known(own_, memory).key_of(device, memory);
  const uint64_t way = own_.at(memory);
  Handle handle = {};
  std::memcpy(handle.data(), &way, sizeof way);
  std::memcpy(handle.data() + sizeof way, key.data(), key.size());
  return handle;
}

std::byte* Exports::open(Device device, const Handle& handle) {
  uint64_t way = 0;
  Export::Key key = {};
  std::memcpy(&way, handle.data(), sizeof way);
  std::memcpy(key.data(), handle.data() + sizeof way, key.size());
  if (way >= ways_.size()) throw std::logic_error("a handle of memory that is none");
  const std::lock_guard lock(mutex_);
  std::byte* const memory = ways_[way]->open(device, key);
  opened_[memory] = way;
  return memory;
}

bool Exports::share_otherwise(Device device) {
  const std::lock_guard lock(mutex_);
  const auto found = decided_.find(device);
  if (wanted_ != kBestExport || found == decided_.end()) return false;
  try {
    const std::string why = text(kNames[found->second], ": other processes could not open it");
    found->second = first_from(found->second + 1, device, why);
  } catch (const std::runtime_error&) {  // or it is the last one
    return false;
  }
  return true;
}

void Exports::close(Device device, std::byte* opened) {
  const std::lock_guard lock(mutex_);
  Export& way = known(opened_, opened);
  opened_.erase(opened);
  way.close(device, opened);
}

}  // namespace pycollect::slabs
