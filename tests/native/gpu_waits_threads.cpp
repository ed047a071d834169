// A fake device for the probe of waits (bench/native/gpu_waits), without a GPU: a stream is a
// thread, and device memory is a mapping that all processes share. WAITS_FAKE=none: no device;
// =deaf: writes of streams are lost; =hasty: waits do not wait; =exclusive: no other stream runs
// while one waits; =private: processes share neither device memory nor events.
#include <sys/mman.h>

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>

#include "../../bench/native/gpu_waits/page.h"

namespace gpu_waits {
namespace {

constexpr std::size_t kArenaBytes = 64 << 20;

struct Arena {
  std::atomic<std::size_t> used;
  std::atomic<int> busy;  // number of waiting streams, where waits are exclusive
};
Arena* arena = nullptr;

bool fake_is(const char* what) {
  const char* const wanted = std::getenv("WAITS_FAKE");
  return wanted != nullptr && std::string(wanted) == what;
}

std::atomic<Word>& counter(Word* at) { return *reinterpret_cast<std::atomic<Word>*>(at); }

class Thread {
 public:
  Thread() : worker_([this] { run(); }) { worker_.detach(); }

  void add(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_idle(); });
  }
  bool is_done() {
    const std::lock_guard lock(mutex_);
    return is_idle();
  }

 private:
  bool is_idle() const { return work_.empty() && !busy_; }

  void run() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [this] { return !work_.empty(); });
      const auto work = std::move(work_.front());
      work_.pop_front();
      busy_ = true;
      lock.unlock();
      work();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false;
  std::thread worker_;
};

class Fake final : public Device {
 public:
  Word* allocate(std::size_t words) override {
    const std::size_t at = arena->used.fetch_add(words * sizeof(Word));
    if (at + words * sizeof(Word) > kArenaBytes) throw std::runtime_error("the arena is full");
    return at_offset(at);
  }
  Handle share(Word* at) override {
    if (fake_is("private")) throw std::runtime_error("nothing is shared: WAITS_FAKE is private");
    const std::size_t offset =
        reinterpret_cast<std::byte*>(at) - reinterpret_cast<std::byte*>(arena);
    Handle handle;
    std::memcpy(handle.data(), &offset, sizeof offset);
    return handle;
  }
  Word* open(const Handle& handle) override {
    std::size_t at = 0;
    std::memcpy(&at, handle.data(), sizeof at);
    return at_offset(at);
  }
  Word* pin(void* host, std::size_t) override { return static_cast<Word*>(host); }

  Stream new_stream() override { return new Thread; }
  void synchronize(Stream stream) override { of(stream).synchronize(); }
  bool is_done(Stream stream) override { return of(stream).is_done(); }

  // An event is two counters: how often it was recorded, and how many of these streams have passed.
  Event new_event(Handle& handle) override {
    Word* const counters = allocate(2);
    handle = share(counters);
    return counters;
  }
  Event open_event(const Handle& handle) override { return open(handle); }
  void record(Event event, Stream stream) override {
    auto* const counters = static_cast<Word*>(event);
    write(stream, counters + 1, ++counter(counters));
  }
  void wait_event(Stream stream, Event event) override {
    auto* const counters = static_cast<Word*>(event);
    wait(stream, counters + 1, counter(counters));
  }

  void write(Stream stream, Word* at, Word value) override {
    if (fake_is("deaf")) return;
    of(stream).add([=] { counter(at) = value; });
  }
  void wait(Stream stream, Word* at, Word least) override {
    const bool exclusive = fake_is("exclusive");
    if (fake_is("hasty")) return;
    of(stream).add([=] {
      if (counter(at) >= least) return;
      arena->busy += exclusive;
      while (counter(at) < least) sched_yield();
      arena->busy -= exclusive;
    });
  }

  void copy(Stream stream, void* to, const void* from, std::size_t bytes) override {
    work(stream, [=] { std::memcpy(to, from, bytes); });
  }
  void fill(Stream stream, Word* words, std::size_t count, Word value) override {
    work(stream, [=] {
      // In every round some ranks are late, so that a missing wait is found.
      if (fake_is("hasty") && value % 2 == 1)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::fill(words, words + count, value);
    });
  }
  void copy_by_kernel(Stream stream, Word* to, const Word* from, std::size_t count) override {
    copy(stream, to, from, count * sizeof(Word));
  }
  void sum(Stream stream, const std::vector<Word*>& of, std::size_t count) override {
    work(stream, [=] {
      for (std::size_t i = 0; i < count; ++i) {
        Word sum = 0;
        for (const Word* words : of) sum += words[i];
        for (Word* words : of) words[i] = sum;
      }
    });
  }
  void compare(Stream stream, const Word* words, std::size_t count, Word wanted,
               Word* wrong) override {
    work(stream, [=] {
      for (std::size_t i = 0; i < count; ++i) *wrong += words[i] != wanted;
    });
  }

 private:
  static Thread& of(Stream stream) { return *static_cast<Thread*>(stream); }
  static Word* at_offset(std::size_t at) {
    return reinterpret_cast<Word*>(reinterpret_cast<std::byte*>(arena) + at);
  }
  void work(Stream stream, std::function<void()> what) {
    of(stream).add([what = std::move(what)] {
      while (arena->busy > 0) sched_yield();
      what();
    });
  }
};

}  // namespace

void prepare() {
  void* const at =
      mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::runtime_error("mmap: no memory for the arena");
  arena = new (at) Arena{.used = 4096, .busy = 0};
}

std::unique_ptr<Device> make_device() {
  if (fake_is("none")) throw NoDevice("no GPU here: WAITS_FAKE is none");
  return std::make_unique<Fake>();
}

}  // namespace gpu_waits
