// Invalid records from a peer: they cause no access outside rings and buffers, the rank that reads
// one throws, and the group is aborted.
#pragma once
#include "../../csrc/send_recv/mail_area.h"
#include "mailbox_ranks.h"

namespace pycollect::ipc {

inline void expect_aborted(const Member& m, const TransferPtr& transfer) {
  try {
    m.wait(transfer);
    check(false, "nothing was thrown");
  } catch (const CollectiveError&) {
  }
  check(m.box.idle(), "a transfer is still pending");
  try {
    m.group.require_healthy(m.context());
    check(false, "the group is not aborted");
  } catch (const CollectiveError&) {
  }
}

// Writes `record` as the first record of the ring, without any check.
inline void write_first(const RingMemory& ring, const Record& record) {
  std::memcpy(ring.data, &record, sizeof record);
  ring.counters->written.store(detail::record_bytes(0));
}

inline void invalid_message(const Member& m, const Record& record) {
  if (m.rank == 1) return write_first(MailArea(m.group).rings(1, 0).messages, record);
  Bytes into(record.bytes);
  expect_aborted(m, m.box.receive(1, envelope(record.bytes, 0, 0), into.data()));
}

// A fragment beyond the end of its message is an error; a fragment of an unknown message has no
// effect.
inline void invalid_fragment(const Member& m) {
  constexpr uint32_t kBytes = 1 << 17, kHalf = kBytes / 2;
  const MailArea area(m.group);
  Bytes payload(kHalf + 1), into(kBytes);
  if (m.rank == 0) {
    const auto received = m.box.receive(1, envelope(kBytes - 1, 0, 0), into.data());
    expect_aborted(m, received);
    return check(received->moved() == kHalf);
  }
  Record record{.number = 1, .bytes = kBytes - 1, .kind = Record::rts};
  RingWriter(area.rings(1, 0).messages).push(record);
  RingWriter fragments(area.rings(1, 0).fragments);
  for (const auto& [number, bytes] : {std::pair{2u, kHalf}, {1u, kHalf}, {1u, kHalf}}) {
    record = {.number = number, .payload = bytes, .kind = Record::fragment};
    fragments.push(record, payload.data());
  }
}

inline const std::vector<Body> kInvalidRecords = {
    [](const Member& m) { invalid_message(m, {.number = 1, .bytes = 64, .payload = 1 << 30}); },
    [](const Member& m) { invalid_message(m, {.number = 1, .bytes = 64, .payload = 4096}); },
    invalid_fragment,
};

}  // namespace pycollect::ipc
