// What a rehearsal is of: a plan, ranks on devices, streams, and how memory is cut.
#pragma once
#include <vector>

#include "../cuda/ring.h"
#include "../plan/compiled.h"
#include "../plan/offsets.h"

namespace pycollect::cuda {

inline constexpr Device kPageableHost = -2;  // of a rank: on the host, and not pinned

enum class Workers { callers, devices, ranks };  // who runs: the callers' streams, or our own

enum class Cut { uneven, each, even };  // sizes differ, also from rank to rank, or are the same

struct Scene {
  Plan plan;
  bool in_place = false;
  Pace pace = Pace::any;
  std::vector<Device> devices;  // [rank]; kHost: in pinned memory; or kPageableHost
  bool callers_apart = false;   // a current stream for each rank, not for each device
  Workers workers = Workers::devices;
  bool lanes = false;  // senders and receivers of their own
  bool hub = false;
  bool host_waits = true;  // for ranks on the host, else they are as asynchronous as others
  bool peers = true;       // do the devices reach each other? else the plan is staged
  int pieces = 1;          // of a staged plan's chunks
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int bindings = 1;          // tensors; every second one has two rows
  RingSize ring = {256, 3};  // so small that whatever can be cut is, and pieces are used again
};

int devices_of(const Scene& scene);   // how many there must be
Compiled staged(const Scene& scene);  // as it runs there

// How `plan`, which is `written` or what became of it, is cut: chunks of unlike sizes; what a rank
// gives another of unlike sizes too (all-to-all-v); or all alike. No piece is empty.
Offsets cut_as(Cut how, const Plan& written, const Plan& plan, int pieces, int number);

// The first of these that the plan allows.
Cut how_to_cut(const Plan& written, const Plan& run, int pieces, int bindings);

// Numbers that show in which order they were added.
std::vector<std::byte> numbers(std::size_t bytes, DType type, uint64_t seed);

}  // namespace pycollect::cuda
