// Collects the algorithms that their files register while the library loads, in any order, and
// freezes them, sorted, at the first use.
#include "registry.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "error.h"

namespace pycollect {
namespace {

// A function's static is constructed at its first use, so every file's `RegisterAlgorithm` can use
// it.
struct Registrations {
  std::vector<Algorithm> algorithms;
  bool frozen = false;
};
Registrations& registrations() {
  static Registrations it;
  return it;
}

auto key(const Algorithm& a) { return std::tuple(a.collective, a.order, std::string_view(a.name)); }
auto place(const Algorithm& a) { return std::pair(a.collective, std::string_view(a.name)); }

std::vector<Algorithm> freeze() {
  registrations().frozen = true;
  std::vector<Algorithm> all = registrations().algorithms;
  auto by = [](auto f) { return [f](const auto& a, const auto& b) { return f(a) < f(b); }; };
  std::sort(all.begin(), all.end(), by(place));
  for (std::size_t i = 1; i < all.size(); ++i)
    if (place(all[i - 1]) == place(all[i]))
      throw std::logic_error(text("two algorithms for ", name(all[i].collective), " are called '",
                                  all[i].name, "'; rename one of the files in csrc/algorithms"));
  std::sort(all.begin(), all.end(), by(key));
  return all;
}

}  // namespace

RegisterAlgorithm::RegisterAlgorithm(const Algorithm& algorithm) {
  if (registrations().frozen)
    throw std::logic_error(
        text("algorithm '", algorithm.name,
             "' is registered after the first use of the registry, which froze it"));
  registrations().algorithms.push_back(algorithm);
}

const std::vector<Algorithm>& registry() {
  static const std::vector<Algorithm> frozen = freeze();
  return frozen;
}

std::vector<const Algorithm*> algorithms(Collective collective) {
  std::vector<const Algorithm*> found;
  for (const Algorithm& a : registry())
    if (a.collective == collective) found.push_back(&a);
  return found;
}

bool has_algorithm(Collective collective, std::string_view name) {
  return std::ranges::any_of(
      registry(), [&](const Algorithm& a) { return a.collective == collective && a.name == name; });
}

const Algorithm& find(Collective collective, std::string_view wanted) {
  for (const Algorithm& a : registry())
    if (a.collective == collective && a.name == wanted) return a;
  std::string names;
  for (const Algorithm* a : algorithms(collective))
    names += text(names.empty() ? "'" : ", '", a->name, "'");
  throw std::invalid_argument(
      text("there is no ", name(collective), " algorithm '", wanted, "'; choose one of ", names));
}

Collective collective_of(std::string_view wanted) {
  std::string names;
  for (std::size_t i = 0; i < kCollectiveNames.size(); ++i) {
    if (kCollectiveNames[i] == wanted) return static_cast<Collective>(i);
    names += text(names.empty() ? "'" : ", '", kCollectiveNames[i], "'");
  }
  throw std::invalid_argument(text("there is no collective '", wanted, "'; choose one of ", names));
}

Plan Algorithm::operator()(const AlgorithmParams& params) const {
  require(params.world >= 1, "a world has at least one rank, not ", params.world);
  require(params.root >= 0 && params.root < params.world, "root ", params.root,
          " is not a rank of a world of ", params.world);
  require(params.pieces >= 1, "a pipeline has at least one piece, not ", params.pieces);
  if (params.world > 1) return make(params);
  Plan alone{1, 1};
  if (collective != Collective::barrier) alone.copy(out(0, 0), in(0, 0));
  return alone;
}

}  // namespace pycollect
