// check_round() of joint_call.h.
#include "../../../plan/error.h"
#include "../../../rank_executor/fingerprint.h"
#include "joint_call.h"

namespace pycollect::dist {
namespace {

using ipc::CallFingerprint;
using ipc::CollectiveRequest;
using RequestList =
    std::vector<const CollectiveRequest*>;  // of one rank, in the order of its calls

RequestList requests_of(const RankCalls& calls) {
  RequestList all;
  for (const CollectiveWorkPtr& work : calls.works)
    for (const CollectiveRequest& request : work->call().requests) all.push_back(&request);
  return all;
}

// What all ranks have published about one request, or about all of their requests.
class Publications {
 public:
  explicit Publications(std::size_t world)
      : fingerprints_(world), details_(world), counts_(world) {}

  void publish(Rank r, const CallFingerprint& mine, const CollectiveRequest* request) {
    fingerprints_[r] = mine.fingerprint;
    ipc::describe(details_[r], mine);
    if (request == nullptr || !request->irregular) return;
    counts_[r].resize(2 * fingerprints_.size());
    ipc::write_counts(counts(r), *request, world());
  }
  void refuse(Rank r, const GroupCall& refused, uint64_t number) {
    const CallFingerprint mine = ipc::refusal_of(refused.collective, number);
    fingerprints_[r] = mine.fingerprint;
    ipc::describe(details_[r], mine);
    ipc::describe_refusal(details_[r], refused.refusal);
  }

  bool are_alike() const {
    for (const ipc::Fingerprint& f : fingerprints_)
      if (!ipc::is_same(f, fingerprints_[0].fingerprint_hash)) return false;
    return true;
  }
  void check() {
    if (!are_alike()) ipc::throw_mismatch(world(), published());
  }
  void check_counts(Collective collective) { ipc::check_counts(collective, world(), published()); }

 private:
  int world() const { return static_cast<int>(fingerprints_.size()); }
  ipc::ElementCounts counts(Rank r) {
    return {counts_[r].data(), counts_[r].data() + fingerprints_.size()};
  }
  ipc::PublishedCalls published() {
    return
        [this](Rank r) -> ipc::PublishedCall { return {fingerprints_[r], details_[r], counts(r)}; };
  }

  std::vector<ipc::Fingerprint> fingerprints_;
  std::vector<ipc::FingerprintDetails> details_;
  std::vector<std::vector<uint64_t>> counts_;
};

// Returns whether two ranks make the same requests, as far as fingerprints of regular requests
// tell.
bool are_alike(const RequestList& one, const RequestList& other) {
  for (std::size_t i = 0; i < one.size(); ++i)
    if (one[i]->irregular || ipc::fingerprint_hash(*one[i]) != ipc::fingerprint_hash(*other[i]))
      return false;
  return true;
}

bool any_refused(const std::vector<const RankCalls*>& calls) {
  for (const RankCalls* c : calls)
    if (c->refused) return true;
  return false;
}

void check_request(const std::vector<RequestList>& requests, std::size_t i, uint64_t number) {
  Publications all(requests.size());
  for (std::size_t r = 0; r < requests.size(); ++r) {
    CallFingerprint mine = ipc::fingerprint_of(*requests[r][i], number);
    mine.description.part = static_cast<uint32_t>(i);
    mine.description.parts = static_cast<uint32_t>(requests[r].size());
    all.publish(static_cast<Rank>(r), mine, requests[r][i]);
  }
  all.check();
  if (requests[0][i]->irregular) all.check_counts(requests[0][i]->collective);
}

// Throws if a rank has refused, or has another number of requests.
void check_together(const std::vector<const RankCalls*>& calls,
                    const std::vector<RequestList>& requests, uint64_t number) {
  Publications all(calls.size());
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (calls[r]->refused) {
      all.refuse(static_cast<Rank>(r), calls[r]->refused->call(), number);
      continue;
    }
    const RequestList& own = requests[r];
    all.publish(static_cast<Rank>(r), ipc::fingerprint_of(own, number), own.front());
  }
  all.check();
}

}  // namespace

void check_round(const std::vector<const RankCalls*>& calls, uint64_t number) {
  std::vector<RequestList> requests;
  bool equally_many = !any_refused(calls);
  bool alike = equally_many;
  for (const RankCalls* c : calls) {
    requests.push_back(requests_of(*c));
    equally_many &= requests.back().size() == requests.front().size();
    alike &= equally_many && are_alike(requests.back(), requests.front());
  }
  if (alike) return;
  if (!equally_many) check_together(calls, requests, number);
  for (std::size_t i = 0; i < requests.front().size(); ++i) check_request(requests, i, number);
}

}  // namespace pycollect::dist
