// Late ranks in zero-copy calls, included by executor_test.cpp: a late rank stops and throws once
// the others have given up, and no rank writes to impossible registered offsets.
#pragma once

constexpr std::size_t kLateArena = 64 << 20;

struct Placed {
  float* at;
  std::size_t count;
  Request all_reduce() const {
    return {.collective = Collective::all_reduce,
            .dtype = DType::f32,
            .in_place = true,
            .input = {{{reinterpret_cast<std::byte*>(at), count}}, {count}}};
  }
};

Placed zero_copy(Group& group, std::size_t count) {
  group.segment()->commit(group.layout().heap(group.rank()), count * sizeof(float));
  const Placed it{reinterpret_cast<float*>(group.heap(group.rank())), count};
  std::fill_n(it.at, count, 1.0F);
  return it;
}

// Runs two ranks that are threads; returns the message of each rank's error, or "nothing".
template <class F>
std::array<std::string, 2> run_late(F&& body) {
  MapStore store;
  Settings settings = pycollect::shm::settings(4096, nullptr);
  settings.symmetric_heap_bytes = kLateArena;
  settings.segment = Segment::create(Layout({2, 4096, 0, kLateArena}).total);
  std::array<std::unique_ptr<Group>, 2> groups;
  std::array<std::string, 2> said;
  const auto both = [](auto&& f) {
    std::thread other([&] { f(1); });
    f(0);
    other.join();
  };
  both([&](Rank r) { groups[r] = std::make_unique<Group>(store, r, 2, settings); });
  both([&](Rank r) {
    try {
      body(*groups[r]);
      said[r] = "nothing";
    } catch (const CollectiveError& error) {
      said[r] = error.what();
    }
  });
  return said;
}

// Rank 1 aborts the group when it has written a sixteenth of its share.
void run_late_writer() {
  constexpr std::size_t kCount = 8 << 20;
  std::size_t changed = 0;
  const auto said = run_late([&](Group& group) {
    const Placed mine = zero_copy(group, kCount);
    const cpu::ParallelFor late = [&](int64_t size, int64_t, const cpu::Body& body) {
      body(0, size / 16);
      if (group.rank() == 1) group.abort("nobody waits any longer");
      body(size / 16, size);
    };
    const cpu::ParallelFor threads = group.rank() == 1 ? late : cpu::ParallelFor();
    try {
      ShmTransport transport(group, threads);
      run(transport, mine.all_reduce(), 0, soon());
    } catch (const CollectiveError&) {
      if (group.rank() == 1) {
        const auto* other = reinterpret_cast<const float*>(group.heap(0)) + kCount / 2;
        changed = std::count_if(other, other + kCount / 2, [](float x) { return x != 1; });
      }
      throw;
    }
  });
  for (const std::string& words : said)
    expect(words.find("nobody waits any longer") != words.npos, "a late rank is told: " + words);
  expect(changed <= kCount / 32, text(changed, " elements were written after that"));
}

// Rank 1 publishes a registered offset far beyond its symmetric heap.
void run_impossible_place() {
  constexpr std::size_t kCount = 1 << 20;
  const auto said = run_late([&](Group& group) {
    const Placed mine = zero_copy(group, kCount);
    const Request request = mine.all_reduce();
    if (group.rank() == 0) {
      ShmTransport transport(group, {});
      return run(transport, request, 0, soon());
    }
    CallFingerprint lie = fingerprint_of(request, 0);
    lie.offer(RegisteredOffsets{kLateArena - 64, uint64_t{1} << 60});
    publish_and_agree(group, lie, request, {"all_reduce", 0, soon()});
  });
  expect(said[0].find("rank 1 exposed a tensor outside its shared memory") != said[0].npos,
         said[0]);
}
