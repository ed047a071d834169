// A GPU that is not there, which processes share: its memory is the host's, open to all of them,
// and its streams are lists (fake_streams.h). Refuses what CUDA refuses, keeps books of what it has
// given out, and remembers as a foul what CUDA would let pass and a job would hang or crash on.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../../slabs/gpu.h"
#include "fake_streams.h"

namespace pycollect::dist {

inline constexpr unsigned char kPoison = 0xA5;  // what nobody has written to yet
inline constexpr std::size_t kPage = 4096;

inline std::atomic<uint64_t>& word_at(std::byte* at) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(at);
}

class FakeGpu final : public slabs::Gpu {
 public:
  explicit FakeGpu(std::shared_ptr<FakeStreams> streams);
  ~FakeGpu() override;

  std::string identity(slabs::Device device) override;
  std::byte* allocate(slabs::Device device, std::size_t bytes) override;
  void make_room(slabs::Device device) override;
  void close(slabs::Device device, std::byte* opened) override;
  std::byte* adopt(slabs::Device device, std::byte* memory, std::size_t bytes) override;
  void forsake(slabs::Device device, std::byte* memory) override;
  slabs::Stream new_stream(slabs::Device device) override;
  void destroy(slabs::Stream stream) override;
  slabs::Event record(slabs::Stream stream) override;
  bool reached(slabs::Event event) override;
  void destroy(slabs::Event event) override;
  void write(slabs::Stream stream, std::byte* word, uint64_t value) override;
  void await(slabs::Stream stream, std::byte* word, uint64_t value) override;
  void launch(slabs::Stream stream, const slabs::Launch& launch) override;
  void fill(slabs::Stream stream, std::byte* memory, unsigned char value,
            std::size_t bytes) override;
  void read(slabs::Stream stream, void* host, const std::byte* memory, std::size_t bytes) override;

  // The scenery.
  void fail(const std::string& call, int in);   // the call of this name, after so many that go well
  void drop(const std::string& call, bool on);  // it says that it did it, and does nothing
  void live_on(const std::string& gpu);         // its identity
  void pace(double seconds);                    // between two steps of a stream
  std::map<std::string, int> books() const;  // what is given out now, and how often what was done
  std::vector<std::string> fouls() const;

 private:
  struct Memory {
    std::byte* base;
    std::size_t bytes;  // without the page of its own books
    int file;
  };
  struct Point;
  Exported exported(slabs::Device device, std::byte* memory) override;
  std::byte* map(slabs::Device device, const shm::Descriptor& memory, std::size_t bytes) override;
  void release(slabs::Device device, std::byte* memory) override;

  bool enter(const char* call);  // false: it is dropped
  [[noreturn]] void foul(const std::string& what);
  bool is_adopted(const std::byte* word) const;
  static std::size_t index(slabs::Stream stream);

  const std::shared_ptr<FakeStreams> streams_;
  std::string identity_ = "the GPU that is not there";
  std::map<std::byte*, Memory> own_, opened_;
  std::map<std::byte*, std::size_t> adopted_;
  std::map<std::string, int> books_, failing_;
  std::set<std::string> dropped_;
  std::vector<std::string> fouls_;
};

}  // namespace pycollect::dist
