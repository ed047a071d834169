// A queue from one process to one other: records, each a header and perhaps the bytes of a message,
// in a ring of shared memory. One side writes, the other reads; each has a counter of bytes that
// only grows. Knows nothing of tags or of what the records mean.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../plan/error.h"

namespace pycollect::shm {

struct Record {
  enum Kind : uint8_t {
    whole,    // a message with its bytes
    large,    // a message whose bytes the sender keeps until it is asked for them
    piece,    // of message `number`, the bytes behind those of the pieces before
    request,  // to the sender: the pieces of message `number`
    refusal,  // to the sender: message `number` does not fit a receive of `bytes` and `dtype`
    filler,   // nothing, to the end of the ring: no record is cut in two
  };
  uint64_t number = 0;  // of the sender's messages to this peer
  uint64_t bytes = 0;
  uint32_t tag = 0;
  uint32_t payload = 0;  // bytes that follow the header
  Kind kind = whole;
  uint8_t dtype = 0;
};
static_assert(sizeof(Record) == 32);  // with 32 bytes of payload: one line of the cache

struct RingCounters {
  alignas(128) std::atomic<uint64_t> written{0};
  alignas(128) std::atomic<uint64_t> read{0};
};
static_assert(sizeof(RingCounters) == 256);

struct RingPlace {
  RingCounters* counters;
  std::byte* data;
  // A power of two, and so many of the largest records: where there is no room for one, even if it
  // cannot begin before the end of the ring, more than half is in use.
  static constexpr std::size_t kFewest = 4;
  std::size_t bytes;
};

namespace detail {
constexpr std::size_t kRecordUnit = 64;  // records begin at lines of the cache
constexpr std::size_t record_bytes(std::size_t payload) {
  return (sizeof(Record) + payload + kRecordUnit - 1) / kRecordUnit * kRecordUnit;
}
}  // namespace detail

class RingWriter {
 public:
  explicit RingWriter(const RingPlace& place)
      : place_(place), written_(place.counters->written.load()), read_(written_) {
    read_ = place.counters->read.load();
  }

  // Returns false, and writes nothing, when there is no room now.
  bool push(const Record& record, const std::byte* payload = nullptr) {
    const std::size_t need = detail::record_bytes(record.payload);
    const std::size_t tail = place_.bytes - at();
    const std::size_t skipped = need > tail ? tail : 0;
    if (!has_room(skipped + need)) return false;
    if (skipped != 0) {
      const Record filler{.kind = Record::filler};
      std::memcpy(place_.data + at(), &filler, sizeof filler);
      written_ += skipped;
    }
    std::byte* const to = place_.data + at();
    std::memcpy(to, &record, sizeof record);
    if (payload != nullptr) std::memcpy(to + sizeof record, payload, record.payload);
    written_ += need;
    place_.counters->written.store(written_, std::memory_order_seq_cst);  // see Bell
    return true;
  }
  uint64_t written() const { return written_; }

 private:
  std::size_t at() const { return written_ & (place_.bytes - 1); }
  bool has_room(std::size_t need) {
    if (place_.bytes - (written_ - read_) >= need) return true;
    read_ = place_.counters->read.load(std::memory_order_seq_cst);
    return place_.bytes - (written_ - read_) >= need;
  }

  RingPlace place_;
  uint64_t written_, read_;  // what this side has written; what it last saw of the other
};

class RingReader {
 public:
  explicit RingReader(const RingPlace& place)
      : place_(place), read_(place.counters->read.load()), written_(read_) {}

  // The record that was written first of those still there, or nullptr. Throws CollectiveError when
  // it cannot have been: the ring ends before it does.
  const Record* peek() {
    for (;;) {
      if (read_ == written_) written_ = place_.counters->written.load(std::memory_order_seq_cst);
      if (read_ == written_) return nullptr;
      const Record* const record = reinterpret_cast<const Record*>(place_.data + at());
      if (record->kind != Record::filler) {
        if (record->payload > place_.bytes - at() - sizeof(Record))
          throw CollectiveError("a message of another rank does not fit into the shared memory");
        return record;
      }
      read_ += place_.bytes - at();
    }
  }
  const std::byte* payload() const { return place_.data + at() + sizeof(Record); }
  void pop() {
    const auto* const record = reinterpret_cast<const Record*>(place_.data + at());
    read_ += detail::record_bytes(record->payload);
    place_.counters->read.store(read_, std::memory_order_seq_cst);
  }
  uint64_t read() const { return read_; }
  // Is so much in it that the writer may soon have to wait?
  bool crowded() const {
    return place_.counters->written.load(std::memory_order_seq_cst) - read_ > place_.bytes / 2;
  }

 private:
  std::size_t at() const { return read_ & (place_.bytes - 1); }

  RingPlace place_;
  uint64_t read_, written_;  // what this side has read; what it last saw of the other
};

}  // namespace pycollect::shm
