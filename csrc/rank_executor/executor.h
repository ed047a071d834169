// Executes one rank's part of a collective between processes. Data that the plan moves between
// ranks passes through the group's staging buffers, piece by piece, in two buffers alternately;
// very little data goes with the entry into the call. Tensors that all ranks can access are read
// and written in place. This layer does not use torch.
#pragma once
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "agreement.h"
#include "prepared_request.h"
#include "program_run.h"

namespace pycollect::ipc {

// Executes the calls of one rank, one at a time. All ranks make the same calls in the same order;
// `call` numbers them consecutively, refused calls included.
class CollectiveExecutor {
 public:
  virtual ~CollectiveExecutor() = default;
  // Runs the request in the calling thread, together with the other ranks. Throws
  // std::invalid_argument on all ranks alike, before data has moved except into staging buffers,
  // when the ranks' requests do not match; PeerLost and Timeout as Group::await does.
  virtual void run(const CollectiveRequest& request, uint64_t call, Deadline deadline) = 0;
  // Throws std::invalid_argument if `run` would refuse the request before publishing it.
  virtual void check(const CollectiveRequest& request) = 0;
  // Checks that several requests of one operation match on all ranks, so that either all of them
  // run or none. Takes the same number of call numbers from `calls` on all ranks. Throws as `run`
  // does, for the first request that differs.
  void agree_on_all(const std::vector<const CollectiveRequest*>& requests, uint64_t& calls,
                    Deadline deadline);
  // Publishes a refusal instead of running a call. All peers throw `why`, which begins with the
  // name of the refused operation. Waits only for peers that have not begun the previous call.
  virtual void refuse(Collective collective, uint64_t call, Deadline deadline,
                      std::string_view why) = 0;

 protected:
  // Makes the ranks agree on a call in which no data moves. Throws as `run` does.
  virtual void agree(const CollectiveRequest& request, const CallFingerprint& mine,
                     Deadline deadline) = 0;
  // Called after an agreement on several requests has thrown. Returns true if every rank has as
  // many requests as this one and none has refused.
  virtual bool all_publish_as_many(const CallFingerprint& mine) const = 0;
};

// The executor of a rank whose peers are on the same host.
class RankExecutor final : public CollectiveExecutor {
 public:
  RankExecutor(Group& group, cpu::ParallelFor parallel_for);

  void run(const CollectiveRequest& request, uint64_t call, Deadline deadline) override;
  void check(const CollectiveRequest& request) override;
  void refuse(Collective collective, uint64_t call, Deadline deadline,
              std::string_view why) override;

 protected:
  void agree(const CollectiveRequest& request, const CallFingerprint& mine,
             Deadline deadline) override;
  bool all_publish_as_many(const CallFingerprint& mine) const override {
    return ipc::all_publish_as_many(group_, mine);
  }

 private:
  OpContext begin(const CollectiveRequest& request, uint64_t call, Deadline deadline);
  const PreparedRequest& prepare(const CollectiveRequest& request, const OpContext& context);
  void reserve(const PreparedRequest& prepared, const BoundProgram& program);
  std::optional<RegisteredOffsets> find_registered(const CollectiveRequest& request,
                                                   const BoundProgram& bound) const;
  void publish_refusal(Collective collective, const OpContext& context, std::string_view why);
  Agreement await_agreement(const CallFingerprint& mine, uint64_t run, const OpContext& context,
                            ProgramRun* data);

  Group& group_;
  RequestCache cache_;
  ProgramRun program_;
  // Regions of staging buffers that ranks (a mask) have committed for the current call, and that
  // are not mapped into this process.
  std::vector<std::pair<uint64_t, Group::StagingRegions>> unmapped_;
};

}  // namespace pycollect::ipc
