// See remote_messages.h.
#include "remote_messages.h"

#include <algorithm>

#include "../../../group/new_thread.h"
#include "../../../plan/error.h"
#include "../in_flight_guard.h"
#include "remote_message.h"

namespace pycollect::dist {
namespace {

// Number of messages that may be open before sends are ended that nobody waits for.
constexpr std::size_t kMostOpen = 64;

}  // namespace

RemoteMessages::RemoteMessages(std::shared_ptr<ipc::Group> group, ipc::HostsLink link,
                               std::shared_ptr<ProcessGroupWire> wire)
    : group_(std::move(group)), link_(std::move(link)), wire_(std::move(wire)) {}

RemoteMessages::~RemoteMessages() = default;

WorkPtr RemoteMessages::submit(const P2POp& op, const char* name, bool receives) {
  fork_guard_.require_not_forked(name);
  require(op.tag < kRemoteTags, name, ": tag is ", op.tag, "; between hosts it must be less than ",
          kRemoteTags);
  const InFlightGuard in_flight;
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    if (!accepting_) throw CollectiveError(text(name, ": the group has been destroyed"));
    number = next_number_++;
  }
  const auto message =
      c10::make_intrusive<RemoteMessage>(shared_from_this(), op, number, name, receives);
  link_.run(*group_, {name, number, ipc::deadline_after(op.timeout)}, *op.peer,
            [&] { wire_->await_connected(*op.peer, ipc::deadline_after(op.timeout)); });
  {
    const std::lock_guard posting(posting_mutex_);
    message->post();
  }
  {
    const std::lock_guard lock(mutex_);
    open_.push_back(message);
  }
  if (receives && !message->is_eager()) message->start();  // the sender may wait for this rank
  end_sends();
  return message;
}

void RemoteMessages::end_sends() {
  {
    const std::lock_guard lock(mutex_);
    if (ending_sends_ || !excess_send()) return;
    ending_sends_ = true;
  }
  const bool begun = run_in_thread([this] {
    std::unique_lock lock(mutex_);
    while (const MessagePtr send = excess_send()) {
      lock.unlock();
      send->run();
      lock.lock();
    }
    ending_sends_ = false;
  });
  if (begun) return;
  const std::lock_guard lock(mutex_);
  ending_sends_ = false;
}

RemoteMessages::MessagePtr RemoteMessages::excess_send() const {
  if (open_.size() <= kMostOpen) return {};
  const auto sent = std::find_if(open_.begin(), open_.end(), [](const auto& open) {
    return !open->receives() && !open->is_running();
  });
  return sent == open_.end() ? MessagePtr() : *sent;
}

WorkPtr RemoteMessages::send(const P2POp& op) { return submit(op, "send", false); }
WorkPtr RemoteMessages::receive(const P2POp& op) { return submit(op, "recv", true); }

bool RemoteMessages::run_in_thread(std::function<void()> task) {
  join_ended();
  const std::lock_guard lock(mutex_);
  MessageThread& made = threads_.emplace_back();
  try {
    made.thread = ipc::new_thread([this, &made, task = std::move(task)]() mutable {
      task();
      task = nullptr;
      const std::lock_guard ending(mutex_);
      made.ended = true;
      changed_.notify_all();
    });
  } catch (const std::exception&) {
    threads_.pop_back();
    return false;
  }
  return true;
}

void RemoteMessages::join_ended() {
  std::list<MessageThread> ended;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = threads_.begin(); it != threads_.end();) {
      const auto next = std::next(it);
      if (it->ended) ended.splice(ended.end(), threads_, it);
      it = next;
    }
  }
  for (MessageThread& each : ended) each.thread.join();
}

void RemoteMessages::forget(const RemoteMessage* message) {
  MessagePtr released;  // without the mutex: it may hold the last reference
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const auto& open) { return open.get() == message; });
  if (found == open_.end()) return;
  released = std::move(*found);
  open_.erase(found);
}

void RemoteMessages::close(ipc::Deadline deadline) {
  std::vector<MessagePtr> open;
  std::unique_lock lock(mutex_);
  accepting_ = false;
  open = open_;
  lock.unlock();
  const auto all_ended = [&] {
    return std::all_of(threads_.begin(), threads_.end(), [](const auto& t) { return t.ended; });
  };
  for (const auto& message : open)
    if (!message->is_running()) message->run(deadline);
  lock.lock();
  if (!changed_.wait_until(lock, deadline, all_ended)) {
    lock.unlock();
    group_->abort("it was destroyed while messages were under way");
    wire_->abort();
    lock.lock();
    changed_.wait(lock, all_ended);
  }
  lock.unlock();
  join_ended();
}

}  // namespace pycollect::dist
