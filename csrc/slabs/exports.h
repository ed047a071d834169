// The ways in which a GPU's memory is given to other processes. A device takes the first that works
// for it, tried out when memory is first asked for; handles say which it was, so that ranks need
// not take the same. Knows no CUDA: the ways are handed in.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu.h"

namespace pycollect::slabs {

class Export {
 public:
  using Key = std::array<std::byte, 64>;  // with which another process opens the memory

  virtual ~Export() = default;
  // As those of Gpu.
  virtual std::byte* allocate(Device device, std::size_t bytes) = 0;
  virtual void free(Device device, std::byte* memory) = 0;
  virtual Key key_of(Device device, std::byte* memory) = 0;
  virtual std::byte* open(Device device, const Key& key) = 0;
  virtual void close(Device device, std::byte* opened) = 0;
};
static_assert(sizeof(Handle) == sizeof(uint64_t) + sizeof(Export::Key));

inline constexpr const char* kBestExport = "best";
// That, and the ways by name, the preferred one first: CUDA's own handles, file descriptors.
std::vector<const char*> export_names();
// Throws std::invalid_argument, which lists them.
void check_export(const std::string& name);

// What Gpu says of memory, from any thread.
class Exports {
 public:
  using Ways = std::vector<std::unique_ptr<Export>>;  // in the order of their names
  using Say = std::function<void(const std::string& line)>;
  Exports(Ways ways, std::string wanted, Say say);

  std::byte* allocate(Device device, std::size_t bytes);
  void free(Device device, std::byte* memory);
  Handle handle_of(Device device, std::byte* memory);
  std::byte* open(Device device, const Handle& handle);
  void close(Device device, std::byte* opened);
  bool share_otherwise(Device device);

 private:
  using Known = std::map<std::byte*, uint64_t>;  // the number of its way
  uint64_t way_of(Device device);
  uint64_t decide(Device device);
  uint64_t first_from(uint64_t way, Device device, std::string refused) const;
  Export& known(const Known& all, std::byte* memory) const;

  const Ways ways_;
  const std::string wanted_;
  const Say say_;
  std::mutex mutex_;
  std::map<Device, uint64_t> decided_;
  Known own_, opened_;
};

}  // namespace pycollect::slabs
