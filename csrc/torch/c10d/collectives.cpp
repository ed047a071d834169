// torch's names for the collectives, each as the call that builders.h makes of it.
#include <algorithm>

#include "../../plan/error.h"
#include "backend.h"

namespace pycollect::dist {
namespace {

const at::Tensor* first(const Tensors& tensors) {
  return tensors.empty() ? nullptr : &tensors.front();
}
const at::Tensor* first(const TensorLists& lists) {
  return lists.empty() ? nullptr : first(lists.front());
}

}  // namespace

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
  return collective({Collective::all_reduce, "all_reduce", o.timeout, o.asyncOp}, first(tensors),
                    [&](Call& call) { dist::all_reduce(call, seat_, tensors, o.reduceOp); });
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) {
  return collective({Collective::all_reduce, "all_reduce_coalesced", o.timeout, o.asyncOp},
                    first(tensors),
                    [&](Call& call) { dist::all_reduce(call, seat_, tensors, o.reduceOp); });
}

WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) {
  return allreduce(tensors, o);  // which says why it refuses them
}

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
  return collective(
      {Collective::reduce, "reduce", o.timeout, o.asyncOp}, first(tensors),
      [&](Call& call) { dist::reduce(call, seat_, tensors, o.reduceOp, o.rootRank); });
}

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
  return collective({Collective::broadcast, "broadcast", o.timeout, o.asyncOp}, first(tensors),
                    [&](Call& call) { dist::broadcast(call, seat_, tensors, o.rootRank); });
}

namespace {

void nothing(Call& call) {
  call.requests.push_back({.collective = Collective::barrier, .tensors = 0});
}

}  // namespace

WorkPtr Backend::barrier(const c10d::BarrierOptions& o) {
  return collective({Collective::barrier, "barrier", o.timeout, o.asyncOp}, nullptr, nothing);
}

// Whoever is missing is named by every rank that is there, all of them at once.
void Backend::monitoredBarrier(const c10d::BarrierOptions& o, bool /*wait_all_ranks*/) {
  const auto work =
      collective({Collective::barrier, "monitored_barrier", o.timeout, false}, nullptr, nothing);
  if (work) work->wait();  // else it is coalesced, and the end of that waits for it
}

WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) {
  return collective({Collective::all_gather, "all_gather", o.timeout, o.asyncOp}, first(outputs),
                    [&](Call& call) { dist::all_gather(call, seat_, outputs, inputs); });
}

// Its lists are [rank][tensor].
WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& o) {
  return collective({Collective::all_gather, "all_gather_coalesced", o.timeout, o.asyncOp},
                    first(outputs), [&](Call& call) {
                      require(static_cast<int>(outputs.size()) == seat_.world, call.name, ": ",
                              outputs.size(), " output lists; ", seat_.world, " ranks need ",
                              seat_.world);
                      TensorLists by_tensor(inputs.size());
                      for (const Tensors& of_rank : outputs) {
                        require(of_rank.size() == inputs.size(), call.name, ": an output list has ",
                                of_rank.size(), " tensors for ", inputs.size(), " inputs");
                        for (std::size_t i = 0; i < inputs.size(); ++i)
                          by_tensor[i].push_back(of_rank[i]);
                      }
                      dist::all_gather(call, seat_, by_tensor, inputs);
                    });
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& o) {
  return collective({Collective::all_gather, "all_gather_into_tensor", o.timeout, o.asyncOp},
                    &output,
                    [&](Call& call) { dist::all_gather_single(call, seat_, {output}, {input}); });
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& o) {
  return collective(
      {Collective::all_gather, "all_gather_into_tensor_coalesced", o.timeout, o.asyncOp},
      first(outputs), [&](Call& call) { dist::all_gather_single(call, seat_, outputs, inputs); });
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                const c10d::ReduceScatterOptions& o) {
  return collective(
      {Collective::reduce_scatter, "reduce_scatter", o.timeout, o.asyncOp}, first(outputs),
      [&](Call& call) { dist::reduce_scatter(call, seat_, outputs, inputs, o.reduceOp); });
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& o) {
  return collective(
      {Collective::reduce_scatter, "reduce_scatter_tensor", o.timeout, o.asyncOp}, &output,
      [&](Call& call) { dist::reduce_scatter_single(call, seat_, {output}, {input}, o.reduceOp); });
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& o) {
  return collective(
      {Collective::reduce_scatter, "reduce_scatter_tensor_coalesced", o.timeout, o.asyncOp},
      first(outputs),
      [&](Call& call) { dist::reduce_scatter_single(call, seat_, outputs, inputs, o.reduceOp); });
}

WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& o) {
  return collective({Collective::gather, "gather", o.timeout, o.asyncOp},
                    outputs.empty() ? first(inputs) : first(outputs),
                    [&](Call& call) { dist::gather(call, seat_, outputs, inputs, o.rootRank); });
}

WorkPtr Backend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                    const c10d::GatherOptions& o) {
  return collective({Collective::gather, "gather_into_tensor", o.timeout, o.asyncOp},
                    seat_.rank == o.rootRank ? &output : &input, [&](Call& call) {
                      dist::gather_single(call, seat_, output, input, o.rootRank);
                    });
}

WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& o) {
  return collective({Collective::scatter, "scatter", o.timeout, o.asyncOp}, first(outputs),
                    [&](Call& call) { dist::scatter(call, seat_, outputs, inputs, o.rootRank); });
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) {
  return collective({Collective::all_to_all, "all_to_all", o.timeout, o.asyncOp}, first(outputs),
                    [&](Call& call) { dist::all_to_all(call, seat_, outputs, inputs); });
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_sizes,
                               std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& o) {
  return collective({Collective::all_to_all, "all_to_all_single", o.timeout, o.asyncOp}, &output,
                    [&](Call& call) {
                      dist::all_to_all_single(call, seat_, output, input,
                                              {output_sizes, input_sizes});
                    });
}

std::shared_ptr<Messages> Backend::messages(const char* name) const {
  forks_.require_none(name);
  const std::lock_guard lock(life_);
  if (!messages_) throw CollectiveError(text(name, ": the group has been destroyed"));
  return messages_;
}

WorkPtr Backend::message(const char* name, const Tensors& tensors, std::optional<Rank> peer,
                         int tag, bool receives) {
  const auto messages = this->messages(name);
  const auto letter = [&]() -> Messages::Letter {
    require(tensors.size() == 1, name, ": ", tensors.size(), " tensors were passed; pass 1");
    return {tensors[0], peer, tag, std::chrono::milliseconds(timeout_ms_)};
  };
  if (CoalescedList* const list = coalescing_->find())
    return coalesce(*list, *messages, name, receives, letter);
  return receives ? messages->receive(letter()) : messages->send(letter());
}

WorkPtr Backend::send(Tensors& tensors, int to, int tag) {
  return message("send", tensors, to, tag, false);
}
WorkPtr Backend::recv(Tensors& tensors, int from, int tag) {
  return message("recv", tensors, from, tag, true);
}
WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return message("recv", tensors, std::nullopt, tag, true);
}

}  // namespace pycollect::dist
