// See transport.h. Before any work is enqueued, the ranks' processes exchange fingerprints through
// the segment, to check that their calls match and whether peers can access all tensors in place.
// So a refused call leaves nothing on a stream. A stream's wait is enqueued only after the peer's
// process has published that the matching signal is enqueued.
#include "transport.h"

#include "../plan/error.h"
#include "../rank_executor/chunk_loop.h"
#include "../rank_executor/program_choice.h"

namespace pycollect::cuda_ipc {
namespace {

// Bytes from which tensors are accessed in place instead of copied through staging buffers. An
// all_reduce always gains: the ranks synchronize twice either way (all have arrived, all have
// folded), and in place the fold is the only launch. In other collectives a rank that exposes a
// tensor waits until the peers are done with it, one synchronization more than staging needs. Below
// this size, which a GPU copies in about the time of one synchronization, copies are assumed to be
// cheaper. Not measured.
constexpr std::size_t kZeroCopyBytes = 1 << 20;

// Copies of one instruction that a copy engine makes one by one. A kernel makes all in one launch,
// and each copy costs the host about as much as a launch.
constexpr std::size_t kMaxEngineCopies = 4;

}  // namespace

bool CudaIpcTransport::may_use_tensors(Collective collective, std::size_t bytes) const {
  return collective == Collective::all_reduce || bytes >= kZeroCopyBytes;
}

void CudaIpcTransport::begin(const ipc::CollectiveRequest& request, const ipc::OpContext& context) {
  request_ = &request;
  context_ = &context;
  launch_ = {{}, request.dtype, request.op, ipc::fold_options(request, world())};
  // Loading may wait for all streams: before the call's first wait, so only for streams that run.
  ipc::abort_on_error(group(), context, [&] {
    const Device device = communicator_->stream().device;
    communicator_->gpu().on(device,
                            [&](cuda::Api& api) { api.load(device, request.dtype, request.op); });
  });
}

ipc::Agreement CudaIpcTransport::agree(const ipc::CallFingerprint& mine, ipc::ChunkLoop& loop) {
  const ipc::Agreement agreed = ipc::publish_and_agree(*this, mine, *request_, *context_);
  if (agreed.zero_copy) return agreed;
  ipc::abort_on_error(group(), *context_, [&] {
    wait_for_previous(next_run());
    signal(ipc::at_run(next_run()) + loop.enter(next_run(), true));
  });
  return agreed;
}

std::byte* CudaIpcTransport::find(Rank r, ipc::OperandBuffer where) const {
  const ipc::RegisteredOffsets& registered = group().rank_state(r).registered[context_->call & 1];
  const RemoteOffset offset =
      where == ipc::OperandBuffer::input ? registered.input : registered.output;
  try {
    return communicator_->symmetric_memory().at(communicator_->staging_buffer().device(), r,
                                                offset);
  } catch (const std::runtime_error& error) {
    if ((group().dead() >> r & 1) != 0)  // its death explains more than a failed fetch
      group().await([] { return false; }, {.missing = [r] { return std::vector<Rank>{r}; }},
                    *context_);
    const std::string why = text("rank ", r, "'s tensor cannot be reached: ", error.what());
    group().abort(text("it failed in ", context_->operation, ": ", why));
    throw CollectiveError(text(context_->operation, ": ", why));
  }
}

// Opens all peers' tensors before anything is enqueued.
void CudaIpcTransport::check_exposed(const ipc::RankProgram& rank_program, std::size_t) {
  reached_.assign(2 * static_cast<std::size_t>(world()), nullptr);
  for (const ipc::Instruction& instruction : rank_program.instructions)
    for (const ipc::Operand& o : instruction.operands) {
      if (ipc::is_staging(o.where) || o.rank == rank()) continue;
      std::byte*& at = reached_[index(o.rank, o.where)];
      if (at == nullptr) at = find(o.rank, o.where);
    }
}

void CudaIpcTransport::wait_for_previous(uint64_t run) {
  for (Rank r = 0; r < world(); ++r)
    if (r != rank()) wait(r, ipc::at_run(run - 1));
}

// Ranks that share a GPU have a context each, and the GPU runs kernels of one context at a time. A
// copy engine takes no part in that, so it fills this rank's staging buffer. Only kernels write
// tensors, because they read the guard.
bool CudaIpcTransport::copies_by_engine(const ipc::Rows& rows) const {
  const ipc::Instruction& instruction = rows.instruction();
  return topology(false) == Topology::cuda_ipc_buffers && rows.size() <= kMaxEngineCopies &&
         instruction.operands.size() == 2 && instruction.in_staging == 1 &&
         instruction.operands[0].rank == rank() && instruction.operands[1].rank == rank();
}

void CudaIpcTransport::copy_by_engine(const ipc::Rows& rows) {
  const Stream stream = communicator_->stream();
  communicator_->gpu().on(stream.device, [&](cuda::Api& api) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const ipc::Rows::RowView row = rows[i];
      const std::size_t bytes = row.count * item_bytes(launch_.dtype);
      const auto pitch = static_cast<std::ptrdiff_t>(bytes);
      api.copy(stream, {.dst = static_cast<std::byte*>(row.at[0]),
                        .src = static_cast<const std::byte*>(row.at[1]),
                        .dst_pitch = pitch,
                        .src_pitch = pitch,
                        .bytes = bytes,
                        .rows = 1,
                        .dst_device = stream.device,
                        .src_device = stream.device});
    }
  });
}

// Enqueues one launch, however many tensors the elements are spread over, or copies by an engine.
void CudaIpcTransport::launch(const ipc::Rows& rows) {
  if (copies_by_engine(rows)) return copy_by_engine(rows);
  const ipc::Instruction& instruction = rows.instruction();
  launch_.works.clear();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const ipc::Rows::RowView row = rows[i];
    const auto first = reinterpret_cast<std::byte* const*>(row.at);
    const auto dsts = first + instruction.dsts, end = first + instruction.operands.size();
    launch_.works.push_back({.dsts = {first, dsts},
                             .srcs = {dsts, end},
                             .count = row.count,
                             .finishes = instruction.finishes});
  }
  // After an abort, writes to staging buffers are harmless. The guard suppresses writes to tensors:
  // a tensor's owner has received the error by then, and may have freed the memory.
  launch_.guard = instruction.in_staging == instruction.dsts ? nullptr : communicator_->guard();
  communicator_->gpu().on(communicator_->stream().device,
                          [&](cuda::Api& api) { api.launch(communicator_->stream(), launch_); });
}

}  // namespace pycollect::cuda_ipc
