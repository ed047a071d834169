// See backend.h: how a group begins, and how calls get into its queue.
#include "backend.h"

#include <algorithm>

#include "../../plan/error.h"
#include "runner.h"
#include "store_board.h"
#include "under_way.h"

namespace pycollect::dist {
namespace {

// By turns, so that a rank can fill one while others still read the other.
constexpr std::size_t kSlotsOfSlab = 2;
constexpr std::chrono::seconds kLook{1};  // any: what is waited for has a limit of its own
constexpr std::size_t kAlign = 128;       // of a slot, in bytes: whatever a kernel accesses

shm::Settings settings_of(const Options& o, int world) {
  return {.name = o.group_name.empty() ? "default" : o.group_name,
          .timeout = o.timeout,
          .slot_bytes = o.slot_bytes,
          .mailbox_bytes = shm::Mailbox::bytes(world),
          .arena_bytes = o.arena_bytes.value_or(shm::Arena::default_bytes(world)),
          .deck_bytes = slabs::Deck::bytes(world),
          .terms = text(" slab_bytes=", o.slab_bytes, " cuda_sync=", o.cuda_sync)};
}

std::shared_ptr<shm::Group> meet(const StorePtr& store, Seat seat, const Options& options) {
  StoreBoard board(store, seat.rank, shm::deadline_after(options.timeout));
  return std::make_shared<shm::Group>(board, seat.rank, seat.world,
                                      settings_of(options, seat.world));
}

}  // namespace

Backend::Backend(const StorePtr& store, Seat seat, OptionsPtr options)
    : c10d::Backend(seat.rank, seat.world),
      seat_(seat),
      options_(std::move(options)),
      ladder_(std::make_shared<Ladder>(
          std::make_shared<Devices>(options_->torch ? options_->torch : torch_runtime()),
          Ladder::Terms{options_->cuda_sync,
                        options_->slab_bytes / kSlotsOfSlab / kAlign * kAlign})),
      timeout_ms_(options_->timeout.count()),
      group_(meet(store, seat, *options_)),
      messages_(std::make_shared<Messages>(group_, ladder_)),
      allocator_(std::make_shared<ArenaAllocator>(*group_)),
      queue_(std::make_shared<Queue>(std::make_shared<Runner>(group_))),
      last_split_(c10::intrusive_ptr<c10d::Backend>()) {
  init();
  ladder_->allot(*group_);
  begin_life();
}

std::shared_ptr<shm::Group> Backend::group() const {
  const std::lock_guard lock(life_);
  return group_;
}

std::shared_ptr<ArenaAllocator> Backend::allocator() const {
  forks_.require_none("allocate_tensor");
  const std::lock_guard lock(life_);
  if (!allocator_) throw CollectiveError("allocate_tensor: the group has been destroyed");
  return allocator_;
}

// CUDA devices have a number.
bool Backend::supportsTensorAlloc(c10::DeviceIndex index) {
  const at::Device device = index < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, index);
  if (!forks_.none()) return false;  // a lock may be held by a thread that is not here
  const std::lock_guard lock(life_);
  if (!group_) return false;
  if (device.is_cuda() || ladder_->lends(device)) return ladder_->is_worth_reaching(device);
  return group_->layout().sizes.arena_bytes > 0;
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const at::Device device = options.device();
  require(device.is_cpu() || device.is_cuda(), "allocate_tensor: a tensor on ", device,
          " cannot lie in memory that processes share; ask for one on the CPU or a GPU");
  require(size >= 0, "allocate_tensor: the size is ", size);
  const auto arena = allocator();  // or throws: there is no group any more
  const at::ScalarType type = c10::typeMetaToScalarType(options.dtype());
  if (device.is_cuda() || ladder_->lends(device)) return ladder_->empty(device, size, type);
  return arena->empty({size}, type);
}

void Backend::abort() {
  if (!forks_.none()) return;
  coalescing_->close();
  if (const auto group = this->group()) group->abort("abort() was called");
}

c10d::ErrorType Backend::getError() {
  if (!forks_.none()) return c10d::ErrorType::COMM_ERROR;
  const auto group = this->group();
  if (!group) return c10d::ErrorType::SUCCESS;
  try {
    group->require_whole({"get_error", calls_, shm::Clock::now()});
    return c10d::ErrorType::SUCCESS;
  } catch (const Timeout&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const std::exception&) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  require(timeout.count() >= 0, "set_timeout: ", timeout.count(), " ms; it must not be negative");
  timeout_ms_ = timeout.count();
  options_->timeout = timeout;
}

Call Backend::new_call(const Ask& ask) const {
  const bool given = is_limit(ask.timeout);
  return {.collective = ask.collective,
          .name = ask.name,
          .algorithm = options_->algorithm,
          .devices = ladder_->devices().get(),
          .timeout = given ? ask.timeout : std::chrono::milliseconds(timeout_ms_)};
}

// In its place in the queue, like the call that it stands for.
void Backend::tell(const Refusal& refusal, Call call) {
  if (refusal.told.empty()) return;
  call.refusal = shortened(refusal.told);
  queue_->run(std::move(call));
}

// In a call of the group's before the one that needs it, so that ranks which were asked for
// something else are told so.
void Backend::rendezvous(const Call& before, at::Device device) {
  const std::lock_guard lock(meeting_);
  if (!ladder_->is_to_meet()) return;
  Call call{.collective = before.collective,
            .name = before.name,
            .timeout = before.timeout,
            .requests = {{.collective = before.collective, .tensors = 0, .on_gpus = true}},
            .then = [ladder = ladder_, group = group(), device](const shm::Occasion& occasion) {
              ladder->meet(group, device, occasion);
            }};
  // Without this thread's help: of the calls before it, a callback may come here as well.
  const auto work = queue_->push(std::move(call));
  while (!queue_->wait_until(*work, shm::Clock::now() + kLook)) {
  }
  if (const auto error = work->exception()) std::rethrow_exception(error);
}

// Null: the call's tensors are in host memory. A capture is refused with the other arguments.
std::shared_ptr<Passage> Backend::begin(const Call& call, const at::Tensor* first) {
  if (first == nullptr || !first->defined() || !call.devices->serves(*first)) return nullptr;
  if (!call.devices->is_capturing(first->device())) rendezvous(call, first->device());
  return ladder_->begin();
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  const Ask ask{Collective::barrier, "init_process_group", kNoTimeout, false};
  forks_.require_none(ask.name);
  if (!ladder_->devices()->has(device)) return;
  rendezvous(new_call(ask), device);
  ladder_->begin();  // or throws: the rung that was named does not work
}

// What is wrong with a call, if anything is. All ranks raise one sentence.
std::optional<Refusal> Backend::attempt(const Ask& ask, const char* manner, Call& call,
                                        Build build) const {
  const auto what = [&](std::string_view why) {
    const std::string operation = text(ask.name, ": ");
    if (why.starts_with(operation)) why.remove_prefix(operation.size());
    return text(manner, pycollect::name(ask.collective), ": ", why);
  };
  const auto sentence = [&](std::string_view why) {
    return text("rank ", seat_.rank, " refused ", what(why));
  };
  try {
    build(call);
    return std::nullopt;
  } catch (const TypeMismatch& error) {
    const std::string why = error.what();
    return Refusal{what(why), std::make_exception_ptr(TypeMismatch(sentence(why)))};
  } catch (const std::invalid_argument& error) {
    const std::string why = error.what();
    return Refusal{what(why), std::make_exception_ptr(std::invalid_argument(sentence(why)))};
  } catch (const std::exception& error) {
    return Refusal{what(error.what()), std::current_exception()};
  }
}

WorkPtr Backend::collective(const Ask& ask, const at::Tensor* first, Build build) {
  const UnderWay under_way;
  forks_.require_none(ask.name);
  Call call = new_call(ask);
  call.number = calls_++;  // also of what is refused: the ranks count alike
  if (CoalescedList* const list = coalescing_->find())
    return coalesce(*list, ask, std::move(call), first, build);
  call.passage = begin(call, first);
  if (const auto refusal = attempt(ask, "", call, build)) {
    tell(*refusal, new_call(ask));
    std::rethrow_exception(refusal->error);
  }
  return ask.later ? queue_->push(std::move(call)) : queue_->run(std::move(call));
}

// torch asks once for each kind of device, with one store: both are to have the same group.
c10::intrusive_ptr<c10d::Backend> Backend::split(
    const StorePtr& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  forks_.require_none("split");
  const auto mine = std::find(ranks.begin(), ranks.end(), seat_.rank);
  if (mine == ranks.end()) return {};
  if (auto last = last_split_.lock(); last && last_split_name_ == options->group_name) return last;
  const auto* given = dynamic_cast<const dist::Options*>(options.get());
  auto own = c10::make_intrusive<dist::Options>(given != nullptr ? *given : *options_);
  own->timeout = options->timeout;
  own->group_name = options->group_name;
  const Seat seat{static_cast<Rank>(mine - ranks.begin()), static_cast<int>(ranks.size())};
  auto made = c10::make_intrusive<Backend>(store->clone(), seat, std::move(own));
  last_split_ = c10::weak_intrusive_ptr<c10d::Backend>(made);
  last_split_name_ = options->group_name;
  return made;
}

}  // namespace pycollect::dist
