// See gloo_channel.h.
#include "gloo_channel.h"

#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <sstream>
#include <thread>

#include "../../../group/system.h"
#include "../../../plan/error.h"
#include "../interpreter.h"
#include "../torch_store.h"

namespace pycollect::dist {
namespace {

// A wait of Gloo that runs out of time closes all connections, before this rank can say why. So a
// wait is interrupted when its time is over, and Gloo's own limit is this much later.
constexpr std::chrono::seconds kGrace{1};

// How long a rank waits until its peers have its goodbye.
constexpr std::chrono::milliseconds kGoodbyeTime{500};

// Limits of the timeout that is passed to a work: zero stands for the group's, and Gloo adds it to
// a clock of nanoseconds.
constexpr std::chrono::milliseconds kLeastTimeout{1}, kMostTimeout = std::chrono::hours(24 * 365);

// How long a rank waits for another one before it publishes that: if it times out, it names the
// rank at the end of a chain of ranks that wait for each other.
constexpr std::chrono::seconds kPublishTime{1};

// How long a rank goes on to connect when the store has failed: all addresses may be known, and the
// rank that serves the store may have left.
constexpr std::chrono::milliseconds kStoreLossTime = 2 * ipc::kLossTime;

constexpr char kGivenUp[] = "given up";  // key of the cause

std::string encode(const ipc::AbortCause& cause) { return text(cause.kind, ' ', cause.text); }
ipc::AbortCause decode(const std::string& value) {
  std::istringstream in(value);
  ipc::AbortCause cause;
  std::getline(in >> cause.kind >> std::ws, cause.text, '\0');
  return cause;
}

using TorchWorkPtr = c10::intrusive_ptr<c10d::Work>;

// Transfers have no events in profiles: one may be awaited after the profile in which it began has
// ended, and would write into freed memory.
TorchWorkPtr begin(c10d::Backend& gloo, bool sends, Rank peer, int number, std::byte* at,
                   std::size_t bytes) {
  const at::DisableRecordFunctionGuard no_event;
  std::vector<at::Tensor> tensors{
      at::from_blob(at, {static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte))};
  return sends ? gloo.send(tensors, peer, number) : gloo.recv(tensors, peer, number);
}

// Returns false if it was interrupted.
bool wait_once(c10d::Work& work, ipc::Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - ipc::Clock::now());
  try {
    return work.wait(std::clamp(left, kLeastTimeout, kMostTimeout));
  } catch (const std::exception& error) {
    throw ipc::ChannelFailure(first_line(error.what()), ipc::Clock::now() >= deadline);
  }
}

// Waits for a transfer of a connection that is closed. Gloo may tell of interruptions first: one of
// the close, and one of a thread that looked at the waits.
void await_closed(c10d::Work& work) {
  try {
    for (int interruptions = 0; interruptions <= 2; ++interruptions)
      if (wait_once(work, ipc::Clock::now())) return;
  } catch (const ipc::ChannelFailure&) {
  }
  throw ipc::ChannelFailure("the connections are closed", false);
}

ipc::Deadline with_grace(ipc::Deadline deadline) {
  return std::min(deadline, ipc::Deadline::max() - kGrace) + kGrace;
}

}  // namespace

// What a rank tells a peer at last, as it travels: an AbortCause.
struct GoodbyeMessage {
  uint64_t first_call = 0;
  uint32_t kind = ipc::AbortRecord::healthy;
  std::array<char, 1003> text{};
  mutable uint8_t said = 0;  // 1; the last byte to arrive

  bool has_come() const { return std::atomic_ref(said).load() != 0; }
};
static_assert(offsetof(GoodbyeMessage, said) + 1 == sizeof(GoodbyeMessage));

// The last receives from a peer, which begin when this rank connects to it: there may be no memory
// later.
struct GlooChannel::PeerEnd {
  GoodbyeMessage goodbye;
  std::byte nothing{};
  TorchWorkPtr goodbye_work = {}, never = {};
};

struct GlooChannel::BrokenConnection {
  Rank peer;
  std::string why;
};

struct GlooChannel::GlooTransfer final : ipc::HostTransfer {
  using HostTransfer::HostTransfer;
  TorchWorkPtr work = {};  // has addresses in the owner's memory, which outlives it
};

// --- before the ranks are connected

void Meeting::await_all(ipc::Group& group, const ipc::OpContext& context) {
  std::vector<std::string> everybody;
  for (Rank r = 0; r < group.all_ranks(); ++r)
    everybody.push_back(text("here/", group.world_rank(r)));
  keys_->set(everybody[group.rank()], "1");
  bool all = false;
  const auto late = [&] {
    std::vector<Rank> found;
    for (Rank r = 0; r < group.all_ranks(); ++r)
      if (!keys_->check({everybody[r]})) found.push_back(r);
    return found;
  };
  poll_until([&] { return all; }, late, [&] { all = keys_->check(everybody); }, group, context);
}

void Meeting::await(ipc::FunctionRef<bool()> ready, const std::atomic<Rank>& awaited,
                    ipc::FunctionRef<void()> look, ipc::Group& group,
                    const ipc::OpContext& context) {
  const auto begin = ipc::Clock::now();
  const auto publishes = std::min(begin + kPublishTime, begin + (context.deadline - begin) / 2);
  const auto key = [](Rank of) { return text("awaited/", of); };
  Rank published = me_;
  const auto poll = [&] {
    const Rank now = awaited;
    if (now == published || ipc::Clock::now() < publishes) return;
    keys_->set(key(me_), text(now));
    published = now;
  };
  // The rank for which others wait, directly or not, and which publishes none itself. If ranks wait
  // for each other in a circle, one of them has published that before it stopped.
  const auto late = [&] {
    std::set<Rank> found{me_};
    for (Rank r = awaited; found.insert(r).second; r = std::stoi(keys_->get_to_str(key(r))))
      if (!keys_->check({key(r)})) {
        found = {r};
        break;
      }
    std::vector<Rank> numbers;
    for (Rank r = 0; r < group.all_ranks(); ++r)
      if (group.world_rank(r) != me_ && found.contains(group.world_rank(r))) numbers.push_back(r);
    return numbers;
  };
  poll_until(ready, late, poll, group, context, look);
}

void Meeting::poll_until(ipc::FunctionRef<bool()> ready, ipc::FunctionRef<std::vector<Rank>()> late,
                         ipc::FunctionRef<void()> poll, ipc::Group& group,
                         const ipc::OpContext& context, ipc::FunctionRef<void()> look) {
  const auto begin = ipc::Clock::now();
  ipc::Deadline due = begin, fails = ipc::Deadline::max();
  const auto use_store = [&](const auto& use) {
    try {
      if (store_failure_.empty()) use();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      rethrow_interrupt(error);
      store_failure_ = store_failed(error);
      fails = std::min(context.deadline, ipc::Clock::now() + kStoreLossTime);
    }
  };
  const auto fail_without_store = [&] {
    if (ipc::Clock::now() < fails || ready()) return;
    group.fail(ipc::AbortRecord::lost, store_failure_, context);
  };
  const auto check = [&] {
    group.abort_if_died();
    fail_without_store();
    const auto now = ipc::Clock::now();
    if (now < due) return;
    due = now + store_pause(now - begin);
    use_store([&] {
      if (keys_->check({kGivenUp})) return group.abort(decode(keys_->get_to_str(kGivenUp)));
      poll();
    });
    if (look && store_failure_.empty()) look();
  };
  const auto missing = [&] {
    std::vector<Rank> found;
    if (ipc::Clock::now() < context.deadline) return found;  // one that has left is no failure
    use_store([&] { found = late(); });
    fail_without_store();
    return found;
  };
  group.await(ready, {.missing = missing, .check = check}, context);
}

void Meeting::give_up(ipc::Group* group, const std::exception& error) noexcept {
  try {
    if (is_store_failure(error)) store_failure_ = store_failed(error);
    ipc::AbortCause cause{.text = store_failure_};
    if (cause.text.empty()) cause.text = text("rank ", me_, " gave up: ", first_line(error.what()));
    if (group != nullptr) {
      if (group->is_healthy()) group->abort(cause);
      cause = group->abort_cause();
    }
    if (!store_failure_.empty()) return;
    if (!keys_->check({kGivenUp})) keys_->set(kGivenUp, encode(cause));
    // The others read it, before the store may end with this process.
    if (me_ == 0) std::this_thread::sleep_for(ipc::kLossTime);
  } catch (const std::exception&) {
    // The others find that the store has failed, or that the connections have broken.
  }
}

// --- connections

GlooChannel::GlooChannel(Hosts hosts, std::vector<std::string> names, Rank me, TorchBackendPtr gloo)
    : HostChannel(std::move(hosts), std::move(names)),
      gloo_(std::move(gloo)),
      peers_(this->hosts().meeting_order(me)),
      ends_(this->hosts().world()),
      unjoined_{ipc::AbortRecord::lost, text("rank ", me, " could not join the group")} {}

GlooChannel::~GlooChannel() {
  if (begun_ == peers_.size()) close(unjoined_);
}

// Gloo's connecting cannot be interrupted, so another thread does it, which lasts longer if this
// one gives up. Ranks that never come are found before: Gloo would block the store until they do.
void GlooChannel::connect(ipc::Group& group, Meeting& meeting, const ipc::OpContext& context) {
  meeting.await_all(group, context);
  std::thread thread = ipc::new_thread(
      [all = shared_from_this(), deadline = context.deadline] { all->connect_all(deadline); });
  std::optional<BrokenConnection> broken;
  ipc::Deadline fails = ipc::Deadline::max();
  const auto look = [&] {
    if (!broken && (broken = find_broken())) fails = ipc::Clock::now() + ipc::kLossTime;
    if (ipc::Clock::now() >= fails)  // no other rank has told the cause
      group.fail(ipc::AbortRecord::lost,
                 text("no connection to ", describe(broken->peer), ": ", broken->why), context);
  };
  try {
    meeting.await([&] { return connected_.load(); }, awaited_, look, group, context);
  } catch (...) {
    given_up_ = true;
    thread.detach();
    throw;
  }
  thread.join();
}

void GlooChannel::connect_all(ipc::Deadline deadline) {
  try {
    for (const Rank peer : peers_) {
      if (given_up_) return;
      awaited_ = peer;
      PeerEnd& end = ends_[peer];
      auto* const goodbye = reinterpret_cast<std::byte*>(&end.goodbye);
      end.goodbye_work = begin(*gloo_, false, peer, kGoodbye, goodbye, sizeof end.goodbye);
      end.never = begin(*gloo_, false, peer, kNever, &end.nothing, 1);
      ++begun_;
    }
    exchange(kConnected, deadline);     // from a peer: all its connections are there
    exchange(kAllConnected, deadline);  // from all peers: so are those of all ranks
    connected_ = true;
  } catch (const std::exception&) {
    failure_ = std::current_exception();
    has_failed_ = true;
  }
}

// Sends each peer a byte, and waits for one of each.
void GlooChannel::exchange(int number, ipc::Deadline deadline) {
  std::vector<std::byte> bytes(peers_.size() + 1);
  std::vector<TorchWorkPtr> works;
  for (std::size_t i = 0; i < peers_.size(); ++i)
    works.push_back(begin(*gloo_, false, peers_[i], number, &bytes[i], 1));
  for (const Rank peer : peers_)
    works.push_back(begin(*gloo_, true, peer, number, &bytes.back(), 1));
  for (std::size_t i = 0; i < works.size(); ++i) {
    awaited_ = peers_[i % peers_.size()];
    wait_once(*works[i], with_grace(deadline));
  }
}

// Returns a connection that has broken while others are made. An interrupted wait tells so at once.
std::optional<GlooChannel::BrokenConnection> GlooChannel::find_broken() {
  Rank peer = awaited_;
  try {
    if (has_failed_) {
      peer = awaited_;  // the last one
      std::rethrow_exception(failure_);
    }
    for (std::size_t i = 0; i < begun_; ++i) {
      peer = peers_[i];
      if (ends_[peer].goodbye.has_come()) continue;
      ends_[peer].goodbye_work->abort();
      wait_once(*ends_[peer].goodbye_work, ipc::Clock::now());
    }
    return std::nullopt;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return {{peer, first_line(error.what())}};
  }
}

ipc::HostTransferPtr GlooChannel::post(bool sends, Rank peer, int number, std::byte* at,
                                       std::size_t bytes, ipc::MemoryOwner owner) {
  const auto made = std::make_shared<GlooTransfer>(peer, std::move(owner));
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw ipc::ChannelFailure("the connections are closed", false);
    open_.insert(made);  // before it begins: one that is dropped then would end the connection
  }
  try {
    made->work = begin(*gloo_, sends, peer, number, at, bytes);
  } catch (const std::exception& error) {
    drop(made);
    throw ipc::ChannelFailure(first_line(error.what()), false);
  }
  return made;
}

ipc::HostTransferPtr GlooChannel::send(Rank to, int number, const std::byte* at, std::size_t bytes,
                                       ipc::MemoryOwner owner) {
  return post(true, to, number, const_cast<std::byte*>(at), bytes, std::move(owner));
}

ipc::HostTransferPtr GlooChannel::receive(Rank from, int number, std::byte* at, std::size_t bytes,
                                          ipc::MemoryOwner owner) {
  return post(false, from, number, at, bytes, std::move(owner));
}

void GlooChannel::await(const ipc::HostTransferPtr& transfer, ipc::Deadline deadline) {
  await(*static_cast<GlooTransfer&>(*transfer).work, deadline);
  drop(transfer);
}

void GlooChannel::drop(const ipc::HostTransferPtr& transfer) {
  const std::lock_guard lock(mutex_);
  open_.erase(transfer);
}

void GlooChannel::await_goodbye(Rank peer) {
  await(*ends_[peer].goodbye_work, ipc::Deadline::max());
}

// Gloo tells first that a wait has been interrupted, and in the next wait that the transfer was
// complete. It does not end the wait for a message that was half moved when its connection broke,
// so waits are interrupted when the connections are closed.
void GlooChannel::await(c10d::Work& work, ipc::Deadline deadline) {
  const bool looks = handles_signals();
  struct Registered {
    GlooChannel& all;
    std::list<GlooWait>::iterator wait;
    ~Registered() {
      const std::lock_guard lock(all.mutex_);
      all.waits_.erase(wait);
    }
  };
  const Registered registered{*this, [&] {
                                const std::lock_guard lock(mutex_);
                                return waits_.insert(waits_.end(), {work, deadline, looks});
                              }()};
  while (is_closed() || !wait_once(work, with_grace(deadline))) {
    if (is_closed()) return await_closed(work);
    if (ipc::Clock::now() >= deadline) throw ipc::ChannelFailure("Timed out", true);
    if (looks) check_signals();
  }
}

void GlooChannel::look_at_waits() {
  const auto now = ipc::Clock::now();
  const std::lock_guard lock(mutex_);
  for (const GlooWait& wait : waits_)
    if (wait.looks || now >= wait.deadline) wait.work.abort();
}

std::optional<ipc::AbortCause> GlooChannel::goodbye_of(Rank peer) const {
  const GoodbyeMessage& message = ends_[peer].goodbye;
  if (!message.has_come()) return std::nullopt;
  return ipc::AbortCause{message.kind, message.text.data(), message.first_call};
}

// A wait of Gloo that runs out of time closes all connections: at the end, that for a message which
// never comes.
void GlooChannel::close(const ipc::AbortCause& why) {
  const GilRelease no_gil;  // which a tensor may need that another thread releases here
  const std::lock_guard closing(closing_mutex_);  // another thread may not have sent the goodbyes
  if (is_closed()) return;
  GoodbyeMessage message{.first_call = why.first_call, .kind = why.kind, .said = 1};
  why.text.copy(message.text.data(), message.text.size() - 1);
  auto* const bytes = reinterpret_cast<std::byte*>(&message);
  const ipc::Deadline soon = ipc::Clock::now() + kGoodbyeTime;
  std::vector<TorchWorkPtr> sends;
  const auto unless_gone = [](const auto& act) {
    try {
      act();
    } catch (const std::exception&) {
      // That rank has left or died, or all connections are closed.
    }
  };
  unless_gone([&] { sends.reserve(peers_.size()); });
  for (const Rank peer : peers_)
    unless_gone([&] {  // a send to a rank that has closed may last until its limit
      if (!ends_[peer].goodbye.has_come())
        sends.push_back(begin(*gloo_, true, peer, kGoodbye, bytes, sizeof message));
    });
  for (const TorchWorkPtr& send : sends) unless_gone([&] { wait_once(*send, soon); });
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  for (const Rank peer : peers_) unless_gone([&] { ends_[peer].never->wait(kLeastTimeout); });
  std::set<ipc::HostTransferPtr> open;  // released without the lock: tensors may need the GIL
  const std::lock_guard lock(mutex_);
  open.swap(open_);
  for (const GlooWait& wait : waits_) wait.work.abort();
}

bool GlooChannel::is_closed() {
  const std::lock_guard lock(mutex_);
  return closed_;
}

}  // namespace pycollect::dist
