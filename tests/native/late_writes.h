// Late ranks in zero-copy calls, included by executor_test.cpp: a late rank stops and throws once
// the group is aborted, and no rank writes to registered offsets outside a heap.
#pragma once

constexpr std::size_t kLateArena = 64 << 20;

struct HeapTensor {
  float* at;
  std::size_t count;
  CollectiveRequest all_reduce() const {
    return {.collective = Collective::all_reduce,
            .dtype = DType::f32,
            .in_place = true,
            .input = {{{reinterpret_cast<std::byte*>(at), count}}, {count}}};
  }
};

HeapTensor make_heap_tensor(Group& group, std::size_t count) {
  group.segment()->commit(group.layout().heap(group.rank()), count * sizeof(float));
  const HeapTensor made{reinterpret_cast<float*>(group.heap(group.rank())), count};
  std::fill_n(made.at, count, 1.0F);
  return made;
}

// Runs two ranks that are threads; returns the message of each rank's error, or "nothing".
template <class F>
std::array<std::string, 2> run_late(F&& body) {
  MapStore store;
  GroupSettings settings = pycollect::ipc::settings(4096, nullptr);
  settings.symmetric_heap_bytes = kLateArena;
  settings.segment = Segment::create(SegmentLayout({2, 4096, 0, kLateArena}).total);
  std::array<std::unique_ptr<Group>, 2> groups;
  std::array<std::string, 2> messages;
  const auto both = [](auto&& f) {
    std::thread other([&] { f(1); });
    f(0);
    other.join();
  };
  both([&](Rank r) { groups[r] = std::make_unique<Group>(store, r, 2, settings); });
  both([&](Rank r) {
    try {
      body(*groups[r]);
      messages[r] = "nothing";
    } catch (const CollectiveError& error) {
      messages[r] = error.what();
    }
  });
  return messages;
}

// Rank 1 aborts the group when it has written a sixteenth of its share.
void run_late_writer() {
  constexpr std::size_t kCount = 8 << 20;
  std::size_t changed = 0;
  const auto messages = run_late([&](Group& group) {
    const HeapTensor mine = make_heap_tensor(group, kCount);
    const cpu::ParallelFor late = [&](int64_t size, int64_t, const cpu::Body& body) {
      body(0, size / 16);
      if (group.rank() == 1) group.abort("the peers have given up");
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
  for (const std::string& message : messages)
    expect(message.find("the peers have given up") != message.npos,
           "a late rank throws another error: " + message);
  expect(changed <= kCount / 32, text(changed, " elements were written after that"));
}

// Rank 1 publishes a registered offset far beyond its symmetric heap.
void run_impossible_offset() {
  constexpr std::size_t kCount = 1 << 20;
  const auto messages = run_late([&](Group& group) {
    const HeapTensor mine = make_heap_tensor(group, kCount);
    const CollectiveRequest request = mine.all_reduce();
    if (group.rank() == 0) {
      ShmTransport transport(group, {});
      return run(transport, request, 0, soon());
    }
    CallFingerprint forged = fingerprint_of(request, 0);
    forged.set_registered(RegisteredOffsets{kLateArena - 64, uint64_t{1} << 60});
    ShmTransport transport(group, {});
    publish_and_agree(transport, forged, request, {"all_reduce", 0, soon()});
  });
  expect(messages[0].find("rank 1 exposed a tensor outside its shared memory") != messages[0].npos,
         messages[0]);
}
