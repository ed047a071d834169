// Measures the synchronisation of processes on one GPU by one way of waiting, or whether a blocked
// stream keeps other streams from running. Prints one line of JSON.
//   waits WAY WORLD [bytes per rank] [rounds] [seconds]
// WAY: device pinned slots-pinned engine-pinned events host staged, or blocked-device
// blocked-pinned. The exit status without a GPU is 77. At the time limit a watchdog releases the
// streams that wait on pinned memory by a plain store, and kills the remaining processes two
// seconds later. CUDA is not used before the fork.
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>

#include "blocked.h"
#include "watchdog.h"
#include "ways.h"

namespace gpu_waits {
namespace {

constexpr int kWarmup = 10, kBatch = 50, kMostBatches = 10;
constexpr double kTimeShare = 0.3;  // of the time limit: for single rounds, and again for batches

struct Options {
  std::string way;
  int world = 2;
  std::size_t words = 512;
  int rounds = 500;
  double seconds = 20;
  bool blocked() const { return way.starts_with("blocked-"); }
  bool pinned() const { return way.ends_with("pinned"); }
  // Whether ranks access the device memory of others.
  bool memory() const { return way != "staged" && way != "blocked-pinned"; }
  bool events() const { return way == "events"; }
};

// Memory and events of all ranks, opened in this process if the way uses them: where a machine
// refuses to share memory or events, the other ways still have results.
struct SharedResources {
  std::vector<Word*> words, slots, counters;
  std::vector<Event> events;
  Word* wrong;
};

// Device memory of a rank: its words, its counter, and its number of wrong words; the latter two
// have their own lines.
constexpr std::size_t kLineWords = sizeof(PaddedCounter) / sizeof(Word);

SharedResources open_all(Device& device, ProcessGroup& group, const Options& options) {
  Page& page = group.page();
  RankState& mine = group.mine();
  const std::size_t words = (options.words + kLineWords - 1) / kLineWords * kLineWords;
  Word* const own = device.allocate(2 * words + 2 * kLineWords);
  if (options.memory()) mine.memory = device.share(own);
  const Event event = options.events() ? device.new_event(mine.event) : nullptr;
  auto* const pinned =
      reinterpret_cast<std::byte*>(device.pin(&page, page_bytes(page.buffer_words)));
  group.barrier(true);
  SharedResources result{
      .words = {}, .slots = {}, .counters = {}, .events = {}, .wrong = own + words + kLineWords};
  for (int r = 0; r < group.world(); ++r) {
    const bool is_mine = r == group.rank();
    RankState& peer = group.rank_state(r);
    Word* const base = is_mine ? own : options.memory() ? device.open(peer.memory) : nullptr;
    const auto at =
        reinterpret_cast<std::byte*>(&peer.counter) - reinterpret_cast<std::byte*>(&page);
    result.words.push_back(base);
    result.slots.push_back(base + words + 2 * kLineWords);
    result.counters.push_back(options.pinned() ? reinterpret_cast<Word*>(pinned + at)
                                               : base + words);
    if (options.events()) result.events.push_back(is_mine ? event : device.open_event(peer.event));
  }
  group.barrier(true);
  return result;
}

std::unique_ptr<Way> make_way(const std::string& name, const RankContext& context,
                              const SharedResources& shared) {
  if (name == "device" || name == "pinned")
    return std::make_unique<Counters>(context, shared.counters);
  if (name.ends_with("-pinned"))
    return std::make_unique<Slots>(context, shared.counters, name == "engine-pinned");
  if (name == "events") return std::make_unique<Events>(context, shared.events);
  if (name == "host") return std::make_unique<Hosts>(context);
  return std::make_unique<Staged>(context);
}

// Sets the numbers of samples and batches, equal on all ranks. Rank 0 computes them from the time
// of the first rounds, so that a slow way ends before the time limit, too.
void set_counts(const RankContext& context, const Options& options, double seconds_each) {
  RankState& first = context.group.rank_state(0);
  if (context.group.rank() == 0) {
    const double share = options.seconds * kTimeShare / seconds_each;
    first.samples = std::clamp(static_cast<int>(share), 3, std::min(options.rounds, kMaxSamples));
    first.batches = std::clamp(static_cast<int>(share / kBatch), 1, kMostBatches);
  }
  context.group.barrier();
}

// Times single rounds until the stream of this rank is done, then batches of rounds without
// synchronisation in between.
void time_rounds(Way& way, const RankContext& context, const Options& options) {
  RankState& mine = context.group.mine();
  Word round = 0;
  const auto seconds = [&](int rounds) {
    context.group.barrier();
    const double begin = now();
    for (int i = 0; i < rounds; ++i) way.exchange(++round);
    context.device.synchronize(context.stream);
    return now() - begin;
  };
  seconds(kWarmup);
  set_counts(context, options, seconds(kWarmup) / kWarmup);
  for (int i = 0; i < context.group.rank_state(0).samples; ++i) mine.round[i] = seconds(1);
  for (int i = 0; i < context.group.rank_state(0).batches; ++i)
    mine.batch[i] = seconds(kBatch) / kBatch;
  context.device.copy(context.stream, context.group.page().staging_buffer(context.group.rank()),
                      context.wrong, sizeof(Word));
  context.device.synchronize(context.stream);
  mine.wrong = context.group.page().staging_buffer(context.group.rank())[0];
}

void run_rank(ProcessGroup& group, const Options& options) {
  const auto device = make_device();
  const SharedResources shared = open_all(*device, group, options);
  group.mine().stage.value.store(kRunning);
  if (options.blocked()) {
    Blocked(*device, group, shared.words[group.rank()], shared.counters, options.pinned()).run();
  } else {
    const RankContext context{*device,      group,         device->new_stream(), shared.words,
                              shared.slots, options.words, shared.wrong};
    time_rounds(*make_way(options.way, context, shared), context, options);
  }
  group.barrier(true);  // no rank frees its memory while a peer may use it
  group.mine().stage.value.store(kFinished);
}

[[noreturn]] void child(Page& page, int rank, const Options& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  ProcessGroup group(page, rank, options.world);
  int status = 0;
  try {
    run_rank(group, options);
  } catch (const NoDevice& error) {
    std::snprintf(group.mine().failure, sizeof(RankState::failure), "%s", error.what());
    status = kNoDevice;
  } catch (const std::exception& error) {
    std::snprintf(group.mine().failure, sizeof(RankState::failure), "%s", error.what());
    status = 1;
  }
  if (status != 0) page.stop.value.store(1);
  // Skip CUDA's destructors, which could wait for a stream that no rank releases.
  _exit(status);
}

// Returns a percentile, in microseconds, of the times of the samples on their slowest rank.
double percentile(const Page& page, int world, int count, double (RankState::*samples)[kMaxSamples],
                  double share) {
  std::vector<double> slowest(count, 0);
  for (int i = 0; i < count; ++i)
    for (int r = 0; r < world; ++r) slowest[i] = std::max(slowest[i], (page.ranks[r].*samples)[i]);
  std::sort(slowest.begin(), slowest.end());
  return slowest[std::min(count - 1, static_cast<int>(share * count))] * 1e6;
}

void print_rounds(const Page& page, const Options& options) {
  Word wrong = 0;
  for (int r = 0; r < options.world; ++r) wrong += page.ranks[r].wrong;
  const int count = page.ranks[0].samples;
  const auto us = [&](double (RankState::*samples)[kMaxSamples], int n, double share) {
    return percentile(page, options.world, n, samples, share);
  };
  std::printf(", \"round_us\": %.3f, \"round_p99_us\": %.3f, \"batch_us\": %.3f, \"wrong\": %llu",
              us(&RankState::round, count, 0.5), us(&RankState::round, count, 0.99),
              us(&RankState::batch, page.ranks[0].batches, 0.5),
              static_cast<unsigned long long>(wrong));
}

void print_blocked(const Page& page, const Options& options, bool other_process_ran) {
  const double* const worker = page.ranks[options.world - 1].values;
  bool held = true, second_ran = true;
  double second = 0, released = 0;
  for (int r = 0; r < options.world - 1; ++r) {
    const double* const v = page.ranks[r].values;
    held = held && v[kHeld] == 1;
    second_ran = second_ran && v[kOwnSecondStream] >= 0;
    second = std::max(second, v[kOwnSecondStream]);
    released = std::max(released, v[kUntilReleased]);
  }
  std::printf(
      ", \"held\": %s, \"other_process_ran\": %s, \"free_us\": %.3f, \"free_burst_us\": %.3f",
      held ? "true" : "false", other_process_ran ? "true" : "false", worker[kFree],
      worker[kFreeBurst]);
  if (!other_process_ran) return;
  std::printf(", \"beside_us\": %.3f, \"beside_burst_us\": %.3f, \"own_second_stream_ran\": %s",
              worker[kBlocked], worker[kBlockedBurst], second_ran ? "true" : "false");
  std::printf(", \"second_us\": %.3f, \"until_released_us\": %.3f", second, released);
}

// Returns the error of a rank. Errors of ranks that were only stopped count if there is no other.
std::string failure_of(const Page& page, int world) {
  std::string failure;
  for (int r = 0; r < world; ++r) {
    const std::string error = page.ranks[r].failure;
    if (!error.empty() && (failure.empty() || failure == Stopped().what())) failure = error;
  }
  for (char& c : failure)
    if (c == '"' || c == '\\' || c == '\n') c = '\'';
  return failure;
}

int report(const Page& page, const Options& options, const Watchdog& watchdog, bool in_time) {
  const std::string failure = failure_of(page, options.world);
  if (watchdog.exit_status() == kNoDevice) {
    std::printf("%s\n", failure.c_str());
    return kNoDevice;
  }
  const bool blocked_until_limit =
      !in_time && options.blocked() && watchdog.stages().back() == kMeasuringWhileBlocked;
  const bool failed = in_time && watchdog.exit_status() != 0;
  std::printf("{\"way\": \"%s\", \"world\": %d, \"bytes\": %zu, \"status\": \"%s\"",
              options.way.c_str(), options.world, options.words * sizeof(Word),
              failed                           ? "failed"
              : in_time || blocked_until_limit ? "ok"
                                               : "time is up");
  if (in_time && !failed && !options.blocked()) print_rounds(page, options);
  if ((in_time && !failed && options.blocked()) || blocked_until_limit)
    print_blocked(page, options, !blocked_until_limit);
  if (!in_time)
    std::printf(", \"ended_when_released\": %s", watchdog.released() ? "true" : "false");
  if (failed) std::printf(", \"failure\": \"%s\"", failure.c_str());
  std::printf("}\n");
  return failed ? 1 : 0;
}

int run(const Options& options) {
  prepare();
  Page& page = *new_page(options.words);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < options.world; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid == 0) child(page, rank, options);
    ranks.push_back(pid);
  }
  Watchdog watchdog(page, ranks);
  const bool in_time = watchdog.watch(options.seconds);
  return report(page, options, watchdog, in_time);
}

Options parse(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto known = {"device", "pinned", "slots-pinned",   "engine-pinned", "events",
                      "host",   "staged", "blocked-device", "blocked-pinned"};
  Options options;
  if (words.size() < 2 || std::find(known.begin(), known.end(), words[0]) == known.end())
    throw std::runtime_error("usage: gpu_waits WAY WORLD [bytes per rank] [rounds] [seconds]");
  options.way = words[0];
  options.world = std::stoi(words[1]);
  if (words.size() > 2)
    options.words = std::max<std::size_t>(1, std::stoul(words[2]) / sizeof(Word));
  if (words.size() > 3) options.rounds = std::max(1, std::stoi(words[3]));
  if (words.size() > 4) options.seconds = std::stod(words[4]);
  if (options.world < 2 || options.world > kMaxRanks)
    throw std::runtime_error("WORLD is " + words[1] + ", and must be from 2 to " +
                             std::to_string(kMaxRanks));
  return options;
}

}  // namespace
}  // namespace gpu_waits

int main(int argc, char** argv) {
  try {
    return gpu_waits::run(gpu_waits::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_waits: %s\n", error.what());
    return 2;
  }
}
