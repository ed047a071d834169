// Predicts the seconds of a collective over several hosts, of one process per rank: a simulation of
// the events of the ranks' programs and of the messages between hosts. Every host has a memory and
// a link to the network in each direction, which its ranks share; copies within a host cost a
// rank's own time as well. Not modelled: the processor's time for the network, other traffic.
#pragma once
#include "../plan/world_view.h"
#include "predict.h"

namespace pycollect {

struct HostsCall {
  double bytes;         // of a rank's largest buffer, divided evenly into the caller's chunks
  double buffer_bytes;  // of a staging buffer; larger data passes through it in several runs
};

// A plan over several hosts, with the programs of all ranks: those that they run.
struct LoweredWorldView {
  Hosts hosts;
  bool in_place;
  bool irregular;  // ranks know their own blocks' sizes only, which the hosts compare
  HostView view;
  Program program;

  LoweredWorldView(const Plan& plan, bool in_place, bool irregular, const Hosts& hosts,
                   HostSenders senders);
};

// Returns the number of runs that the call takes.
int64_t runs(const HostView& view, const HostsCall& call);

// The spans are those of the first runs: of each, all ranks' entries, the steps as written, all
// ranks' exits. A message's span ends when its last byte has arrived; it takes none of the time of
// the rank that receives it. Throws ValueError for an invalid model or call.
Prediction predict(const LoweredWorldView& world, const HostsCall& call, const CostModel& model);

}  // namespace pycollect
