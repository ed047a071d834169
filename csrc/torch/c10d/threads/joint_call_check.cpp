// check_joint_call() of joint_call.h.
#include "../../../plan/error.h"
#include "../../../rank_executor/fingerprint.h"
#include "joint_call.h"

namespace pycollect::dist {
namespace {

using ipc::CallFingerprint;
using ipc::CollectiveRequest;
using RequestList =
    std::vector<const CollectiveRequest*>;  // of one rank, in the order of its calls

RequestList requests_of(const PostedCalls& calls) {
  RequestList all;
  for (const CollectiveWorkPtr& work : calls.works)
    for (const CollectiveRequest& request : work->call().requests) all.push_back(&request);
  return all;
}

// What one rank publishes about one request, or about all of its requests.
struct Publication {
  ipc::Fingerprint fingerprint = {};
  ipc::FingerprintDetails details = {};
  std::vector<uint64_t> counts = {};  // of an irregular request
};
using Publications = std::vector<Publication>;  // [rank]

Publication publication(const CallFingerprint& mine) {
  Publication made{mine.fingerprint};
  ipc::describe(made.details, mine);
  return made;
}

// `irregular`: the collective whose counts are compared.
void check(Publications& all, std::optional<Collective> irregular = {}) {
  const auto world = static_cast<int>(all.size());
  const auto published = [&](Rank r) -> ipc::PublishedCall {
    uint64_t* const sent = all[r].counts.data();
    return {all[r].fingerprint, all[r].details, {sent, sent + world}};
  };
  for (const Publication& of_rank : all)
    if (!ipc::is_same(of_rank.fingerprint, all[0].fingerprint.fingerprint_hash))
      ipc::throw_mismatch(world, published);
  if (irregular) ipc::check_counts(*irregular, world, published);
}

// Returns whether two ranks make the same requests, as far as fingerprints of regular requests
// tell.
bool are_same(const RequestList& one, const RequestList& other) {
  for (std::size_t i = 0; i < one.size(); ++i)
    if (one[i]->irregular || ipc::fingerprint_hash(*one[i]) != ipc::fingerprint_hash(*other[i]))
      return false;
  return true;
}

bool any_refused(const std::vector<const PostedCalls*>& calls) {
  for (const PostedCalls* c : calls)
    if (c->refused) return true;
  return false;
}

void check_request(const std::vector<RequestList>& requests, std::size_t i, uint64_t number) {
  const auto world = static_cast<int>(requests.size());
  Publications all;
  for (const RequestList& own : requests) {
    CallFingerprint mine = ipc::fingerprint_of(*own[i], number);
    mine.description.part = static_cast<uint32_t>(i);
    mine.description.parts = static_cast<uint32_t>(own.size());
    std::vector<uint64_t>& counts = all.emplace_back(publication(mine)).counts;
    counts.resize(own[i]->irregular ? 2 * world : 0);
    if (own[i]->irregular)
      ipc::write_counts({counts.data(), counts.data() + world}, *own[i], world);
  }
  const CollectiveRequest& first = *requests[0][i];
  check(all, first.irregular ? std::optional(first.collective) : std::nullopt);
}

// Throws if a rank has refused, or has another number of requests.
void check_together(const std::vector<const PostedCalls*>& calls,
                    const std::vector<RequestList>& requests, uint64_t number) {
  Publications all;
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (!calls[r]->refused) {
      all.push_back(publication(ipc::fingerprint_of(requests[r], number)));
      continue;
    }
    const GroupCall& refused = calls[r]->refused->call();
    all.push_back(publication(ipc::refusal_of(refused.collective, number)));
    ipc::describe_refusal(all.back().details, refused.refusal);
  }
  check(all);
}

}  // namespace

void check_joint_call(const std::vector<const PostedCalls*>& calls, uint64_t number) {
  std::vector<RequestList> requests;
  bool equally_many = !any_refused(calls);
  bool same = equally_many;
  for (const PostedCalls* c : calls) {
    requests.push_back(requests_of(*c));
    equally_many &= requests.back().size() == requests.front().size();
    same &= equally_many && are_same(requests.back(), requests.front());
  }
  if (same) return;
  if (!equally_many) check_together(calls, requests, number);
  for (std::size_t i = 0; i < requests.front().size(); ++i) check_request(requests, i, number);
}

}  // namespace pycollect::dist
