// See host_view.h. A cell (one chunk of one buffer of one rank) that ranks of another host read is
// sent there once for each value that it has, as soon as it is written.
#include "host_view.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "cell_map.h"
#include "error.h"
#include "verify.h"
#include "world_view.h"

namespace pycollect {
namespace {

constexpr int kNone = -1;

bool is_partial(const Slice& s) { return s.buffer == Buffer::partial; }
bool is_staged(const Slice& s) { return s.buffer != Buffer::input && s.buffer != Buffer::output; }

// Returns whether a rank copies a buffer of its own to other memory of its own.
bool copies_own(const Step& step) {
  const auto own = [&](const Slice& s) { return s.rank == step.owner(); };
  return step.srcs.size() == 1 && own(step.srcs[0]) && !is_staged(step.srcs[0]) &&
         std::all_of(step.dsts.begin(), step.dsts.end(),
                     [&](const Slice& d) { return own(d) && is_staged(d); });
}

// One value of a cell on its way to another host.
struct Route {
  Slice cell;
  int writer, first_reader;  // steps
  int host;                  // destination
  Rank to;                   // the only reader, or kNone if several ranks read it
  Rank sender = kNone, receiver = kNone;
  // The step that only copies the cell to a staged cell of the reader, if there is one: the cell is
  // received there.
  bool replaces_step = false;
  int number = 0;  // among the routes from the sender to the receiver
};

// Finds the routes from and to a host, or all of them, in the order of their first readers. Both
// hosts of a route find the same ones in the same order, because both have all steps that read it.
class Routing {
 public:
  Routing(const Plan& plan, bool in_place, const Hosts& hosts, int host, HostSenders senders)
      : plan_(plan),
        in_place_(in_place),
        hosts_(hosts),
        host_(host),
        senders_(senders),
        writer_(plan, kNone) {}

  void run() {
    for (int i = 0; i < static_cast<int>(plan_.steps.size()); ++i) visit(i);
    std::map<std::pair<Rank, Rank>, int> used;  // numbers of routes, by their ends
    for (Route& route : routes) {
      choose_ends(route);
      route.number = used[{route.sender, route.receiver}]++;
    }
  }

  std::vector<Route> routes;
  std::vector<std::vector<int>> routes_into;  // [step]: the routes of its sources

  // Returns whether every value on a route is the copy that a rank makes of its own buffer.
  bool only_copies() const {
    return std::all_of(routes.begin(), routes.end(),
                       [&](const Route& route) { return copies_own(plan_.steps[route.writer]); });
  }

 private:
  int cell(const Slice& s) const {
    int at = 0;
    each_cell(plan_, in_place_, s, [&](int c) { at = c; });
    return at;
  }
  bool passes(Rank from, Rank to) const {
    const int here = hosts_.of(from), there = hosts_.of(to);
    return here != there && (host_ == kAllHosts || here == host_ || there == host_);
  }

  void visit(int i) {
    const Step& step = plan_.steps[i];
    const Rank me = step.owner();
    routes_into.emplace_back();
    for (const Slice& s : step.srcs) {
      if (!passes(s.rank, me)) {
        routes_into.back().push_back(kNone);
        continue;
      }
      require(is_staged(s), "a step reads a buffer of a rank on another host");
      routes_into.back().push_back(read(s, i, me));
    }
    for (const Slice& d : step.dsts) {
      require(hosts_.of(d.rank) == hosts_.of(me), "a step of rank ", me, " writes memory of rank ",
              d.rank, ", which is on another host; choose another algorithm");
      writer_[cell(d)] = i;
    }
  }

  int read(const Slice& s, int i, Rank me) {
    const int at = cell(s), host = hosts_.of(me);
    const auto [known, is_new] = route_of_.emplace(int64_t{at} * hosts_.count() + host, 0);
    if (!is_new && routes[known->second].writer == writer_[at]) {
      Route& route = routes[known->second];
      if (route.to != me) route.to = kNone;
      route.replaces_step = false;
      return known->second;
    }
    const Step& step = plan_.steps[i];
    require(writer_[at] != kNone, "a step reads memory of rank ", s.rank,
            " that no step has written");
    const bool copies = step.srcs.size() == 1 && step.dsts.size() == 1 && is_staged(step.dsts[0]) &&
                        is_partial(s) == is_partial(step.dsts[0]);
    known->second = static_cast<int>(routes.size());
    routes.push_back({s, writer_[at], i, host, me, kNone, kNone, copies});
    return known->second;
  }

  void choose_ends(Route& route) {
    const Rank from = route.cell.rank;
    const auto &there = hosts_.ranks(route.host), &here = hosts_.ranks(hosts_.of(from));
    route.sender = senders_ == HostSenders::first ? here[0] : from;
    route.receiver = route.replaces_step              ? plan_.steps[route.first_reader].owner()
                     : senders_ == HostSenders::first ? there[0]
                     : route.to != kNone              ? route.to
                                                      : there[hosts_.index(from) % there.size()];
  }

  const Plan& plan_;
  const bool in_place_;
  const Hosts& hosts_;
  const int host_;
  const HostSenders senders_;
  CellMap<int> writer_;                        // the last step that wrote the cell
  std::unordered_map<int64_t, int> route_of_;  // [cell * hosts + host]: of the current value
};

// Returns for each step the number of a chunk of the caller's buffers that has the size of what the
// step moves. A value in host memory may have another chunk's index than the one it was copied
// from.
std::vector<int> chunks_of_steps(const Plan& plan, bool in_place) {
  CellMap<int> held(plan, 0);  // of host memory: the chunk of the cell's value
  std::vector<int> result;     // [step]
  const auto cell = [&](const Slice& s) {
    int at = 0;
    each_cell(plan, in_place, s, [&](int c) { at = c; });
    return at;
  };
  for (const Step& step : plan.steps) {
    int chunk = kNone;
    for (const Slices* side : {&step.srcs, &step.dsts})
      for (const Slice& s : *side)
        if (s.buffer != Buffer::host) chunk = s.first;
    if (chunk == kNone) chunk = held[cell(step.srcs[0])];
    for (const Slice& d : step.dsts)
      if (d.buffer == Buffer::host) held[cell(d)] = chunk;
    result.push_back(chunk);
  }
  return result;
}

class ViewBuilder {
 public:
  ViewBuilder(const Plan& plan, bool in_place, const Hosts& hosts, int host, const Routing& routing)
      : plan_(plan),
        in_place_(in_place),
        hosts_(hosts),
        host_(host),
        routing_(routing),
        chunk_of_(chunks_of_steps(plan, in_place)),
        finishes_(pycollect::finishes(plan, in_place)),
        places_(routing.routes.size()),
        received_(plan.world),
        sends_after_(plan.steps.size()) {
    view_.chunks = plan.chunks;
    if (host == kAllHosts) {
      view_.world_rank.resize(plan.world);
      std::iota(view_.world_rank.begin(), view_.world_rank.end(), 0);
    } else {
      view_.world_rank = hosts.ranks(host);
    }
    place_sends();
    for (int t = 0; t < static_cast<int>(routing.routes.size()); ++t)
      if (has(routing.routes[t].host)) assign_place(t);
    view_.plan.world = static_cast<int>(view_.world_rank.size());
    view_.plan.chunks = plan.chunks + most_received_;
    touched_.resize(cells(view_.plan));
    held_.resize(view_.plan.world);
    held_partial_.resize(view_.plan.world);
  }

  HostView run() {
    for (int i = 0; i < static_cast<int>(plan_.steps.size()); ++i) {
      const Step& step = plan_.steps[i];
      if (has(hosts_.of(step.owner()))) add_step(i, step);
      for (const int t : sends_after_[i]) add_send(t);
    }
    view_.cells = *std::max_element(held_.begin(), held_.end());
    view_.partial_cells = *std::max_element(held_partial_.begin(), held_partial_.end());
    return std::move(view_);
  }

 private:
  // A rank sends a value as soon as it is written, but after the values that the same receiver
  // reads before it: receives are posted in the order in which the sender sends.
  void place_sends() {
    std::map<std::pair<Rank, Rank>, int> last;  // by the ends: the step after which the last one is
    const int first = last_own_copy();
    for (int t = 0; t < static_cast<int>(routing_.routes.size()); ++t) {
      const Route& route = routing_.routes[t];
      if (hosts_.of(route.sender) != host_) continue;
      int& after = last.emplace(std::pair(route.sender, route.receiver), first).first->second;
      after = std::max(after, route.writer);
      sends_after_[after].push_back(t);
    }
  }

  // Returns the last of the host's first steps, with which ranks copy their own buffers: these come
  // before all sends, because they can run before the ranks have agreed on the call.
  int last_own_copy() const {
    int last = 0;
    for (int i = 0; i < static_cast<int>(plan_.steps.size()); ++i) {
      if (!has(hosts_.of(plan_.steps[i].owner()))) continue;
      if (!copies_own(plan_.steps[i])) break;
      last = i;
    }
    return last;
  }

  bool has(int host) const { return host_ == kAllHosts || host == host_; }
  Rank local(Rank r) const { return host_ == kAllHosts ? r : hosts_.index(r); }
  Slice local(const Slice& s) const { return {local(s.rank), s.buffer, s.first, s.count}; }

  // Chooses the cell that receives the route's data.
  void assign_place(int t) {
    const Route& route = routing_.routes[t];
    if (route.replaces_step) {
      places_[t] = local(plan_.steps[route.first_reader].dsts[0]);
      return;
    }
    int& used = received_[route.receiver];
    places_[t] = {local(route.receiver), is_partial(route.cell) ? Buffer::partial : Buffer::host,
                  plan_.chunks + used++};
    most_received_ = std::max(most_received_, used);
  }

  void add_step(int i, const Step& step) {
    Step mine;
    mine.by = local(step.owner());
    bool received = false;
    for (std::size_t k = 0; k < step.srcs.size(); ++k) {
      const int t = routing_.routes_into[i][k];
      if (t != kNone && routing_.routes[t].first_reader == i) {
        add_receive(t);
        received |= routing_.routes[t].replaces_step;
      }
      mine.srcs.push_back(t == kNone ? local(step.srcs[k]) : places_[t]);
    }
    if (received) return;
    for (const Slice& d : step.dsts) mine.dsts.push_back(local(d));
    add(std::move(mine), {}, chunk_of_[i], finishes_[i]);
  }

  void add_receive(int t) {
    const Route& route = routing_.routes[t];
    bool& early = early_.emplace(std::pair(route.sender, route.receiver), true).first->second;
    each_cell(view_.plan, in_place_, places_[t], [&](int c) { early &= !touched_[c]; });
    Slices srcs;
    if (host_ == kAllHosts) srcs.push_back(route.cell);
    add({{places_[t]}, std::move(srcs), local(route.receiver)},
        HostTransfer{HostTransfer::Direction::receive, route.sender, route.number, early},
        chunk_of_[route.writer], false);
  }

  void add_send(int t) {
    const Route& route = routing_.routes[t];
    add({{}, {local(route.cell)}, local(route.sender)},
        HostTransfer{HostTransfer::Direction::send, route.receiver, route.number, false},
        chunk_of_[route.writer], false);
  }

  void add(Step step, std::optional<HostTransfer> transfer, int chunk, bool finishes) {
    for (const Slices* side : {&step.dsts, &step.srcs})
      for (const Slice& s : *side)
        each_cell(view_.plan, in_place_, s, [&](int c) {
          if (is_staged(s) && !touched_[c]) ++(is_partial(s) ? held_partial_ : held_)[s.rank];
          touched_[c] = true;
        });
    view_.plan.steps.push_back(std::move(step));
    view_.transfers.push_back(transfer);
    view_.chunk_of.push_back(chunk);
    view_.finishes.push_back(finishes);
  }

  const Plan& plan_;
  const bool in_place_;
  const Hosts& hosts_;
  const int host_;
  const Routing& routing_;
  const std::vector<int> chunk_of_;
  const std::vector<bool> finishes_;
  std::vector<Slice> places_;                    // [route into this host]
  std::vector<int> received_;                    // [rank]: cells received there
  std::vector<std::vector<int>> sends_after_;    // [step]: routes from this host
  std::vector<bool> touched_;                    // [cell of the view]: an earlier step uses it
  std::vector<int> held_, held_partial_;         // [rank of the view]: staged cells that it has
  std::map<std::pair<Rank, Rank>, bool> early_;  // by the ends: all receives so far are early
  int most_received_ = 0;
  HostView view_{};
};

}  // namespace

HostView host_view(const Plan& staged, bool in_place, const Hosts* given, int host,
                   HostSenders senders) {
  const Hosts hosts = hosts_or_one(given, staged.world);
  Routing routing(staged, in_place, hosts, host, senders);
  routing.run();
  HostView view = ViewBuilder(staged, in_place, hosts, host, routing).run();
  view.packs = senders == HostSenders::first && hosts.count() > 1 && routing.only_copies();
  return view;
}

HostView world_view(const Plan& staged, bool in_place, const Hosts& hosts, HostSenders senders) {
  return host_view(staged, in_place, &hosts, kAllHosts, senders);
}

}  // namespace pycollect
