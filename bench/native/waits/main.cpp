// Measures the synchronisation of processes on one GPU by one way of waiting, or whether a blocked
// stream keeps others from running. Prints one line of JSON.
//   waits WAY WORLD [bytes a rank] [rounds] [seconds]
// WAY: device pinned events host staged, or blocked-device blocked-pinned. Exit status 77 without a
// GPU. At the time limit a watchdog releases the streams that wait on pinned memory by a plain
// store, and kills the remaining processes two seconds later. CUDA is not used before the fork.
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>

#include "blocked.h"
#include "watchdog.h"
#include "ways.h"

namespace waits {
namespace {

constexpr int kWarmup = 10, kBatch = 50, kMostBatches = 10;
constexpr double kShare = 0.3;  // of the time limit for single rounds, and the same for batches

struct Wanted {
  std::string way;
  int world = 2;
  std::size_t words = 512;
  int rounds = 500;
  double seconds = 20;
  bool blocked() const { return way.starts_with("blocked-"); }
  bool pinned() const { return way.ends_with("pinned"); }
};

// The memory and events of all ranks, as opened by one rank.
struct Opened {
  std::vector<Word*> words, counters;
  std::vector<Event> events;
  Word* wrong;
};

// A rank's memory: its words, then a line with its counter, then a line with its count of errors.
constexpr std::size_t kLineWords = sizeof(RankState) / sizeof(Word);

Opened open_all(Device& device, Rendezvous& meeting, const Wanted& wanted) {
  Page& page = meeting.page();
  OfRank& mine = meeting.mine();
  const std::size_t words = (wanted.words + kLineWords - 1) / kLineWords * kLineWords;
  Word* const own = device.allocate(words + 2 * kLineWords, mine.memory);
  const Event event = device.new_event(mine.event);
  auto* const pinned = reinterpret_cast<std::byte*>(device.pin(&page, page_bytes(page.slot_words)));
  meeting.all(true);
  Opened found{.words = {}, .counters = {}, .events = {}, .wrong = own + words + kLineWords};
  for (int r = 0; r < meeting.world(); ++r) {
    const bool is_mine = r == meeting.rank();
    OfRank& peer = meeting.of(r);
    Word* const base = is_mine ? own : device.open(peer.memory);
    const auto at =
        reinterpret_cast<std::byte*>(&peer.counter) - reinterpret_cast<std::byte*>(&page);
    found.words.push_back(base);
    found.counters.push_back(wanted.pinned() ? reinterpret_cast<Word*>(pinned + at) : base + words);
    found.events.push_back(is_mine ? event : device.open_event(peer.event));
  }
  meeting.all(true);
  return found;
}

std::unique_ptr<Way> make_way(const std::string& name, const Station& station,
                              const Opened& opened) {
  if (name == "device" || name == "pinned")
    return std::make_unique<Counters>(station, opened.counters);
  if (name == "events") return std::make_unique<Events>(station, opened.events);
  if (name == "host") return std::make_unique<Hosts>(station);
  return std::make_unique<Staged>(station);
}

// Sets the numbers of samples and batches, equal on all ranks. Rank 0 computes them from the time
// of the first rounds, so that a slow way ends in time as well.
void plan(const Station& s, const Wanted& wanted, double seconds_each) {
  OfRank& first = s.meeting.of(0);
  if (s.meeting.rank() == 0) {
    const double share = wanted.seconds * kShare / seconds_each;
    first.samples = std::clamp(static_cast<int>(share), 3, std::min(wanted.rounds, kMostSamples));
    first.batches = std::clamp(static_cast<int>(share / kBatch), 1, kMostBatches);
  }
  s.meeting.all();
}

// Times single rounds until this rank's stream is done; then batches without synchronisation.
void time_rounds(Way& way, const Station& s, const Wanted& wanted) {
  OfRank& mine = s.meeting.mine();
  Word round = 0;
  const auto seconds = [&](int rounds) {
    s.meeting.all();
    const double begin = now();
    for (int i = 0; i < rounds; ++i) way.publish_and_agree(++round);
    s.device.synchronize(s.stream);
    return now() - begin;
  };
  seconds(kWarmup);
  plan(s, wanted, seconds(kWarmup) / kWarmup);
  for (int i = 0; i < s.meeting.of(0).samples; ++i) mine.round[i] = seconds(1);
  for (int i = 0; i < s.meeting.of(0).batches; ++i) mine.batch[i] = seconds(kBatch) / kBatch;
  s.device.copy(s.stream, s.meeting.page().staging_buffer(s.meeting.rank()), s.wrong, sizeof(Word));
  s.device.synchronize(s.stream);
  mine.wrong = s.meeting.page().staging_buffer(s.meeting.rank())[0];
}

void run_rank(Rendezvous& meeting, const Wanted& wanted) {
  const auto device = make_device();
  const Opened opened = open_all(*device, meeting, wanted);
  meeting.mine().stage.value.store(kRunning);
  if (wanted.blocked()) {
    Blocked(*device, meeting, opened.words[meeting.rank()], opened.counters, wanted.pinned()).run();
  } else {
    const Station station{*device,      meeting,      device->new_stream(),
                          opened.words, wanted.words, opened.wrong};
    time_rounds(*make_way(wanted.way, station, opened), station, wanted);
  }
  meeting.all(true);  // no rank frees its memory while a peer may use it
  meeting.mine().stage.value.store(kFinished);
}

[[noreturn]] void child(Page& page, int rank, const Wanted& wanted) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Rendezvous meeting(page, rank, wanted.world);
  int status = 0;
  try {
    run_rank(meeting, wanted);
  } catch (const NoDevice& error) {
    std::snprintf(meeting.mine().failure, sizeof(OfRank::failure), "%s", error.what());
    status = kNoDevice;
  } catch (const std::exception& error) {
    std::snprintf(meeting.mine().failure, sizeof(OfRank::failure), "%s", error.what());
    status = 1;
  }
  if (status != 0) page.stop.value.store(1);
  // Skip CUDA's destructors, which could wait for a stream that no rank releases.
  _exit(status);
}

// Returns a percentile in microseconds of the samples' times on their slowest rank.
double percentile(const Page& page, int world, int count, double (OfRank::*of)[kMostSamples],
                  double share) {
  std::vector<double> slowest(count, 0);
  for (int i = 0; i < count; ++i)
    for (int r = 0; r < world; ++r) slowest[i] = std::max(slowest[i], (page.ranks[r].*of)[i]);
  std::sort(slowest.begin(), slowest.end());
  return slowest[std::min(count - 1, static_cast<int>(share * count))] * 1e6;
}

void print_rounds(const Page& page, const Wanted& wanted) {
  Word wrong = 0;
  for (int r = 0; r < wanted.world; ++r) wrong += page.ranks[r].wrong;
  const int count = page.ranks[0].samples;
  const auto of = [&](double (OfRank::*samples)[kMostSamples], int n, double share) {
    return percentile(page, wanted.world, n, samples, share);
  };
  std::printf(", \"round_us\": %.3f, \"round_p99_us\": %.3f, \"batch_us\": %.3f, \"wrong\": %llu",
              of(&OfRank::round, count, 0.5), of(&OfRank::round, count, 0.99),
              of(&OfRank::batch, page.ranks[0].batches, 0.5),
              static_cast<unsigned long long>(wrong));
}

void print_blocked(const Page& page, const Wanted& wanted, bool ran) {
  const double* const worker = page.ranks[wanted.world - 1].values;
  bool held = true, second_ran = true;
  double second = 0, released = 0;
  for (int r = 0; r < wanted.world - 1; ++r) {
    const double* const v = page.ranks[r].values;
    held = held && v[kHeld] == 1;
    second_ran = second_ran && v[kOwnSecondStream] >= 0;
    second = std::max(second, v[kOwnSecondStream]);
    released = std::max(released, v[kUntilReleased]);
  }
  std::printf(
      ", \"held\": %s, \"other_process_ran\": %s, \"free_us\": %.3f, \"free_burst_us\": %.3f",
      held ? "true" : "false", ran ? "true" : "false", worker[kFree], worker[kFreeBurst]);
  if (!ran) return;
  std::printf(", \"beside_us\": %.3f, \"beside_burst_us\": %.3f, \"own_second_stream_ran\": %s",
              worker[kBlocked], worker[kBlockedBurst], second_ran ? "true" : "false");
  std::printf(", \"second_us\": %.3f, \"until_released_us\": %.3f", second, released);
}

// Returns the failure of a rank, preferring an original error to that of a rank stopped by it.
std::string failure_of(const Page& page, int world) {
  std::string found;
  for (int r = 0; r < world; ++r) {
    const std::string said = page.ranks[r].failure;
    if (!said.empty() && (found.empty() || found == Stopped().what())) found = said;
  }
  for (char& c : found)
    if (c == '"' || c == '\\' || c == '\n') c = '\'';
  return found;
}

int report(const Page& page, const Wanted& wanted, const Watchdog& dog, bool in_time) {
  const std::string failure = failure_of(page, wanted.world);
  if (dog.worst() == kNoDevice) {
    std::printf("%s\n", failure.c_str());
    return kNoDevice;
  }
  const bool beside = !in_time && wanted.blocked() && dog.stages().back() == kBesideBlocked;
  const bool failed = in_time && dog.worst() != 0;
  std::printf("{\"way\": \"%s\", \"world\": %d, \"bytes\": %zu, \"status\": \"%s\"",
              wanted.way.c_str(), wanted.world, wanted.words * sizeof(Word),
              failed              ? "failed"
              : in_time || beside ? "ok"
                                  : "time is up");
  if (in_time && !failed && !wanted.blocked()) print_rounds(page, wanted);
  if ((in_time && !failed && wanted.blocked()) || beside) print_blocked(page, wanted, !beside);
  if (!in_time) std::printf(", \"ended_when_released\": %s", dog.released() ? "true" : "false");
  if (failed) std::printf(", \"failure\": \"%s\"", failure.c_str());
  std::printf("}\n");
  return failed ? 1 : 0;
}

int run(const Wanted& wanted) {
  prepare();
  Page& page = *new_page(wanted.words);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < wanted.world; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid == 0) child(page, rank, wanted);
    ranks.push_back(pid);
  }
  Watchdog dog(page, ranks);
  const bool in_time = dog.watch(wanted.seconds);
  return report(page, wanted, dog, in_time);
}

Wanted parse(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto known = {"device", "pinned",         "events",        "host",
                      "staged", "blocked-device", "blocked-pinned"};
  Wanted wanted;
  if (words.size() < 2 || std::find(known.begin(), known.end(), words[0]) == known.end())
    throw std::runtime_error("usage: waits WAY WORLD [bytes a rank] [rounds] [seconds]");
  wanted.way = words[0];
  wanted.world = std::stoi(words[1]);
  if (words.size() > 2)
    wanted.words = std::max<std::size_t>(1, std::stoul(words[2]) / sizeof(Word));
  if (words.size() > 3) wanted.rounds = std::max(1, std::stoi(words[3]));
  if (words.size() > 4) wanted.seconds = std::stod(words[4]);
  if (wanted.world < 2 || wanted.world > kMaxRanks)
    throw std::runtime_error("WORLD must be from 2 to " + std::to_string(kMaxRanks));
  return wanted;
}

}  // namespace
}  // namespace waits

int main(int argc, char** argv) {
  try {
    return waits::run(waits::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "waits: %s\n", error.what());
    return 2;
  }
}
