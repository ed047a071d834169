// A single-producer, single-consumer queue between two processes: records, each a header and an
// optional payload, in a ring of shared memory. The writer and the reader each have a byte counter
// that only grows. The ring does not interpret tags or record kinds other than padding.
#pragma once
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../group/segment.h"
#include "../plan/error.h"

namespace pycollect::ipc {

struct Record {
  enum RecordKind : uint8_t {
    eager,     // the payload follows
    rts,       // request to send: the sender keeps the payload until the receiver's CTS
    rts_data,  // the same, and the data can go directly (see RemotePeers)
    fragment,  // the next part of the payload of message `number`
    cts,       // clear to send, to the sender: send the fragments of message `number`
    cts_data,  // to the sender: send the data of message `number` directly
    nack,      // to the sender: message `number` does not match a receive of `bytes`, `dtype`
    padding,   // up to the end of the ring: no record wraps around
  };
  uint64_t number = 0;  // sequence number among the sender's messages to this peer
  uint64_t bytes = 0;
  uint32_t tag = 0;
  uint32_t payload = 0;  // bytes that follow the header
  RecordKind kind = eager;
  uint8_t dtype = 0;
};
static_assert(sizeof(Record) == 32);  // a header and 32 bytes of payload fill one cache line

struct RingCounters {
  alignas(128) std::atomic<uint64_t> written{0};
  alignas(128) std::atomic<uint64_t> read{0};
};
static_assert(sizeof(RingCounters) == 256);

struct RingMemory {
  RingCounters* counters;
  std::byte* data;
  // `bytes` is a power of two, and the ring holds at least kFewest of the largest records. So a
  // ring without room for a record, even one that must skip the end of the ring, is over half full.
  static constexpr std::size_t kFewest = 4;
  std::size_t bytes;
  // The segment in which the data lies; its writer commits it. Null: it is committed.
  Segment* segment = nullptr;
};

namespace detail {
constexpr std::size_t kRecordUnit = 64;  // records begin at cache lines
constexpr std::size_t record_bytes(std::size_t payload) {
  return (sizeof(Record) + payload + kRecordUnit - 1) / kRecordUnit * kRecordUnit;
}
}  // namespace detail

class RingWriter {
 public:
  explicit RingWriter(const RingMemory& ring)
      : ring_(ring),
        written_(ring.counters->written.load()),
        read_(ring.counters->read.load()),
        committed_(ring.segment == nullptr ? ring.bytes : 0) {}

  // Returns false, without writing, if the ring has no room now, or no memory for more of it.
  // Throws as Segment::commit if there is no memory for the beginning of the ring.
  bool push(const Record& record, const std::byte* payload = nullptr) {
    const std::size_t need = detail::record_bytes(record.payload);
    const std::size_t tail = ring_.bytes - at();
    const std::size_t skipped = need > tail ? tail : 0;
    if (!has_room(skipped + need)) return false;
    if (written_ + skipped + need > committed_ && committed_ < ring_.bytes &&
        !commit(skipped + need))
      return false;
    if (skipped != 0) {
      const Record filler{.kind = Record::padding};
      std::memcpy(ring_.data + at(), &filler, sizeof filler);
      written_ += skipped;
    }
    std::byte* const to = ring_.data + at();
    std::memcpy(to, &record, sizeof record);
    if (payload != nullptr) std::memcpy(to + sizeof record, payload, record.payload);
    written_ += need;
    ring_.counters->written.store(written_, std::memory_order_seq_cst);  // see Doorbell
    return true;
  }
  uint64_t written() const { return written_; }
  std::size_t bytes() const { return ring_.bytes; }

 private:
  std::size_t at() const { return written_ & (ring_.bytes - 1); }
  bool has_room(std::size_t need) {
    if (ring_.bytes - (written_ - read_) >= need) return true;
    read_ = ring_.counters->read.load(std::memory_order_seq_cst);
    return ring_.bytes - (written_ - read_) >= need;
  }

  // In its first pass the writer commits the ring in steps that double.
  bool commit(std::size_t more) {
    const std::size_t end = std::max(std::bit_ceil(written_ + more), kLeastCommitted);
    const std::size_t bytes = std::min(end, ring_.bytes) - committed_;
    const std::size_t offset = ring_.data + committed_ - ring_.segment->data();
    try {
      ring_.segment->commit(offset, bytes);
    } catch (const std::runtime_error&) {
      if (committed_ == 0) throw;
      return false;
    }
    committed_ += bytes;
    return true;
  }
  static constexpr std::size_t kLeastCommitted = 4096;  // a page

  RingMemory ring_;
  uint64_t written_, read_;  // the writer's counter; last seen value of the reader's
  std::size_t committed_;    // bytes of the ring
};

class RingReader {
 public:
  explicit RingReader(const RingMemory& ring)
      : ring_(ring), read_(ring.counters->read.load()), written_(read_) {}

  // Returns the oldest unread record, or nullptr. Throws CollectiveError if the record is corrupt:
  // it would extend beyond the end of the ring.
  const Record* peek() {
    for (;;) {
      if (read_ == written_) written_ = ring_.counters->written.load(std::memory_order_seq_cst);
      if (read_ == written_) return nullptr;
      const Record* const record = reinterpret_cast<const Record*>(ring_.data + at());
      if (record->kind != Record::padding) {
        if (record->payload > ring_.bytes - at() - sizeof(Record))
          throw CollectiveError("another rank wrote an invalid message into the shared memory");
        return record;
      }
      read_ += ring_.bytes - at();
    }
  }
  const std::byte* payload() const { return ring_.data + at() + sizeof(Record); }
  void pop() {
    const auto* const record = reinterpret_cast<const Record*>(ring_.data + at());
    read_ += detail::record_bytes(record->payload);
    ring_.counters->read.store(read_, std::memory_order_seq_cst);
  }
  uint64_t read() const { return read_; }
  std::size_t bytes() const { return ring_.bytes; }
  // Returns true if the ring is so full that the writer may soon have to wait.
  bool crowded() const {
    return ring_.counters->written.load(std::memory_order_seq_cst) - read_ > ring_.bytes / 2;
  }

 private:
  std::size_t at() const { return read_ & (ring_.bytes - 1); }

  RingMemory ring_;
  uint64_t read_, written_;  // the reader's counter; last seen value of the writer's
};

}  // namespace pycollect::ipc
