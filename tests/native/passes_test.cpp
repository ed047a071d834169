// Plans rewritten for processes: correct, the same order of additions, only reachable buffers, and
// no race within a run or between successive runs in alternate staging buffers.
#include "../../csrc/plan/passes.h"

#include "../../csrc/analysis/races.h"
#include "../../csrc/plan/error.h"
#include "../../csrc/plan/program.h"
#include "../../csrc/plan/registry.h"
#include "../../csrc/plan/verify.h"
#include "expect.h"

namespace pycollect {
namespace {

struct Open {
  bool input, output;
};
constexpr Open kShut{false, false}, kOpens[]{kShut, {true, false}, {false, true}, {true, true}};

bool is_staged(const Slice& s) { return s.buffer == Buffer::scratch || s.buffer == Buffer::host; }

void check_reach(const Plan& plan, const Open& open, const std::string& what) {
  for (const Step& step : plan.steps)
    for (const Slices* side : {&step.dsts, &step.srcs})
      for (const Slice& s : *side) {
        const bool is_reachable = is_staged(s) || s.rank == step.owner() ||
                                  (s.buffer == Buffer::input ? open.input : open.output);
        expect(is_reachable, what + ": a step accesses a buffer that its rank does not reach");
        expect(s.count == 1, what + ": a slice has several chunks, and a region holds one");
      }
}

// Replays three runs in a row, each on its own chunks of the call buffers and in two alternate
// staging buffers. Only the executor's rule orders them: a rank begins a run when every rank has
// finished the run before the previous one.
RaceReport replay_runs(const Plan& plan, bool in_place, bool rule) {
  constexpr int kRuns = 3;
  const Program single = lower(plan, in_place, LevelPolicy::any, kInOutBuffers);
  Plan all{plan.world, kRuns * plan.chunks};
  Program program(plan.world);
  const auto shifted = [&](Slices slices, int run) {
    for (Slice& s : slices) s.first += (is_staged(s) ? run & 1 : run) * plan.chunks;
    return slices;
  };
  for (int run = 0; run < kRuns; ++run) {
    for (const Step& step : plan.steps)
      all.steps.push_back({shifted(step.dsts, run), shifted(step.srcs, run), step.owner()});
    for (Rank r = 0; r < plan.world; ++r) {
      const auto before = program[r].size();
      for (Task task : single[r]) {
        if (task.step >= 0) task.step += run * static_cast<int>(plan.steps.size());
        for (Wait& w : task.waits) w.count += run * static_cast<int>(single[w.rank].size());
        program[r].push_back(std::move(task));
      }
      for (Rank other = 0; rule && run == kRuns - 1 && other < plan.world; ++other)
        if (other != r)
          program[r][before].waits.push_back({other, static_cast<int>(single[other].size())});
    }
  }
  return find_races(all, program, in_place);
}

void check_runs(const Plan& plan, bool in_place, const std::string& what) {
  const RaceReport one =
      find_races(plan, lower(plan, in_place, LevelPolicy::any, kInOutBuffers), in_place);
  expect(one.defect.empty(), what + ": " + one.defect);
  const RaceReport three = replay_runs(plan, in_place, true);
  expect(three.defect.empty(), what + ", three runs: " + three.defect);
}

bool has_root(Collective c) {
  return c == Collective::reduce || c == Collective::broadcast || c == Collective::scatter ||
         c == Collective::gather;
}

void check_registry(int most) {
  int plans = 0;
  for (const Algorithm& a : registry())
    for (int world = 1; world <= most; ++world)
      for (const Rank root : {0, world / 2, world - 1})
        for (const bool in_place : {false, true})
          for (const Open& open : kOpens) {
            if (in_place && (!a.in_place || open.input != open.output)) continue;
            if (root > 0 && !has_root(a.collective)) continue;
            if (a.collective == Collective::barrier) continue;  // it moves no data
            const std::string what = text(name(a.collective), "/", a.name, " W=", world,
                                          " root=", root, in_place ? " in place" : "",
                                          open.input ? " in" : "", open.output ? " out" : "");
            const Plan plain = a({world, root, 3});
            const Plan made = for_processes(plain, in_place, open.input, open.output);
            const Verification was = verify(a.collective, plain, root, in_place);
            const Verification is = verify(a.collective, made, root, in_place);
            expect(is.right(), what + ": " + is.defect);
            expect(is.order == was.order, what + ": adds in another order");
            check_reach(made, open, what);
            check_runs(made, in_place, what);
            ++plans;
            // In other plans every rank waits for all others in each run, which keeps runs apart.
            const bool one_way = has_root(a.collective) && a.name == std::string_view("direct") &&
                                 world > 1 && !open.input && !open.output;
            expect(!one_way || !replay_runs(made, in_place, false).defect.empty(),
                   what + ": no race was found without the rule that keeps runs apart");
          }
  std::printf("%d plans of the registry: right\n", plans);
}

// Numbers of each rank's steps, as a rank needs them: copies into its staging buffer, folds with
// all their destinations, copies out of staging buffers.
void check_steps(const char* name, Open open, const std::function<std::string(int)>& wanted) {
  for (const int world : {2, 3, 8}) {
    const Plan made = for_processes(find(Collective::all_reduce, name)({world, 0, 4}), true,
                                    open.input, open.output);
    for (Rank r = 0; r < world; ++r) {
      std::size_t in = 0, folds = 0, dsts = 0, out = 0;
      for (const Step& step : made.steps) {
        if (step.owner() != r) continue;
        ++(step.srcs.size() > 1 ? folds : is_staged(step.dsts[0]) ? in : out);
        if (step.srcs.size() > 1) dsts += step.dsts.size();
      }
      expect_equal(text(name, ": ", in, " ", folds, " ", dsts, " ", out),
                   text(name, ": ", wanted(world)));
    }
  }
}

}  // namespace

void test(bool quick) {
  for (const char* name : {"two_shot", "fused"})
    check_steps(name, kShut, [](int w) { return text(w - 1, " 1 2 ", w - 1); });
  check_steps("one_shot", kShut, [](int) { return "1 1 1 0"; });
  check_steps("fused", {true, true}, [](int w) { return text("0 1 ", w, " 0"); });
  check_registry(quick ? 5 : 9);
}

}  // namespace pycollect

int main(int argc, char** argv) { pycollect::test(argc > 1 && std::string(argv[1]) == "quick"); }
