// send and recv of CPU tensors between ranks on different hosts. The first message on the wire has
// the envelope and, if it is small, the data. Large data follows in a second one, which the
// receiver posts when it has the first, and answers with its own envelope, so that both ends know
// of a mismatch. A thread waits for a message of which no caller waits for the end.
#pragma once
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "../../../group/fork_guard.h"
#include "../../../hosts/hosts_link.h"
#include "../point_to_point.h"
#include "process_group_wire.h"

namespace pycollect::dist {

class RemoteMessage;

class RemoteMessages final : public std::enable_shared_from_this<RemoteMessages> {
 public:
  RemoteMessages(std::shared_ptr<ipc::Group> group, ipc::HostsLink link,
                 std::shared_ptr<ProcessGroupWire> wire);
  ~RemoteMessages();

  // `op.peer` is a rank of the world on another host.
  WorkPtr send(const P2POp& op);
  WorkPtr receive(const P2POp& op);
  // Waits until the deadline for messages under way; those left are failed by closing the wire.
  void close(ipc::Deadline deadline);

 private:
  friend class RemoteMessage;
  using MessagePtr = c10::intrusive_ptr<RemoteMessage>;
  WorkPtr submit(const P2POp& op, const char* name, bool receives);
  // Runs `task` in a thread of its own, and returns whether there can be one.
  bool run_in_thread(std::function<void()> task);
  void join_ended();
  // Ends sends in a thread if there are many. That a send has ended is found by waiting for it,
  // which its caller may never do.
  void end_sends();
  // Returns the oldest send if many messages are open, else null. Under the mutex.
  MessagePtr excess_send() const;
  void forget(const RemoteMessage* message);
  Rank me() const { return group_->world_rank(group_->rank()); }

  const std::shared_ptr<ipc::Group> group_;
  const ipc::HostsLink link_;
  const std::shared_ptr<ProcessGroupWire> wire_;
  std::mutex posting_mutex_;  // keeps the order of messages; never locked under mutex_
  const ipc::ForkGuard fork_guard_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool accepting_ = true, ending_sends_ = false;
  uint64_t next_number_ = 0;
  std::vector<MessagePtr> open_;
  struct MessageThread {
    std::thread thread;
    bool ended = false;  // it uses nothing of this object any more
  };
  std::list<MessageThread> threads_;
};

}  // namespace pycollect::dist
