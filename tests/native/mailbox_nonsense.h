// What a peer has written that makes no sense: nothing is read or written because of it beyond
// where messages are, whoever meets it raises, and the group is broken.
#pragma once
#include "../../csrc/shm/mail_area.h"
#include "mailbox_ranks.h"

namespace pycollect::shm {

inline void is_told(const Member& m, const TransferPtr& transfer) {
  try {
    m.wait(transfer);
    check(false, "nothing was raised");
  } catch (const CollectiveError&) {
  }
  check(m.box.idle(), "something is still under way");
  try {
    m.group.require_whole(m.occasion());
    check(false, "the group is whole");
  } catch (const CollectiveError&) {
  }
}

// As the first record of the ring, whatever it says.
inline void write_first(const RingPlace& ring, const Record& record) {
  std::memcpy(ring.data, &record, sizeof record);
  ring.counters->written.store(detail::record_bytes(0));
}

inline void nonsense_message(const Member& m, const Record& record) {
  if (m.rank == 1) return write_first(MailArea(m.group.mailboxes(), 2).messages(1, 0), record);
  Bytes into(record.bytes);
  is_told(m, m.box.receive(1, of(record.bytes, 0, 0), into.data()));
}

inline void nonsense_lane(const Member& m) {
  const Bytes data(1 << 20);
  if (m.rank == 0) return is_told(m, m.box.send(1, of(data.size()), data.data()));
  RingWriter(MailArea(m.group.mailboxes(), 2).answers(0, 1))
      .push({.number = 1, .tag = 1 << 20, .kind = Record::grant});
}

inline const std::vector<Body> kNonsense = {
    [](const Member& m) { nonsense_message(m, {.number = 1, .bytes = 64, .payload = 1 << 30}); },
    [](const Member& m) { nonsense_message(m, {.number = 1, .bytes = 64, .payload = 4096}); },
    nonsense_lane,
};

}  // namespace pycollect::shm
