// The registry of all algorithms, by collective and name, for the tests, the benchmark, the
// analysis and the selector. An algorithm is one file in csrc/algorithms that ends with constants
// of type `RegisterAlgorithm`.
#pragma once
#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "dtype.h"
#include "plan.h"

namespace pycollect {

enum class Collective : uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  scatter,
  gather,
  barrier
};
inline constexpr std::array kCollectiveNames{"all_reduce", "reduce",         "broadcast",
                                             "all_gather", "reduce_scatter", "all_to_all",
                                             "scatter",    "gather",         "barrier"};
constexpr const char* name(Collective c) { return kCollectiveNames[static_cast<std::size_t>(c)]; }
Collective collective_of(std::string_view name);  // throws ValueError

// The order in which a reduction adds the ranks' data.
enum class Order : uint8_t {
  exact,   // left fold in rank order, rounded once: for every dtype
  native,  // left fold, rounded at every hop: for dtypes that accumulate in themselves
  other,   // not the left fold in rank order
};
inline constexpr std::array kOrderNames{"exact", "native", "other"};
constexpr const char* name(Order o) { return kOrderNames[static_cast<std::size_t>(o)]; }

// The parameters from which an algorithm makes a plan.
struct AlgorithmParams {
  int world;
  Rank root = 0;
  int pieces = 4;  // number of pieces, for algorithms with a pipeline
};

struct Algorithm {
  const char* name;
  Collective collective;
  Plan (*make)(const AlgorithmParams&);  // only called for a world of two or more
  const char* cost;  // for display: rounds, and bytes that a rank sends, for S bytes
  Order order = Order::exact;
  bool in_place = true;  // may output and input be the same memory?

  Plan operator()(
      const AlgorithmParams& params) const;  // in a world of one: a copy (a barrier: no step)
  // Returns whether the algorithm keeps the numerical contract for this type.
  bool keeps_contract(DType t) const {
    return order == Order::exact || is_integer(t) ||
           (order == Order::native && accumulates_in_itself(t));
  }
};

const std::vector<Algorithm>& registry();  // by collective, then order, then name
std::vector<const Algorithm*> algorithms(Collective collective);
bool has_algorithm(Collective collective, std::string_view name);
const Algorithm& find(Collective collective,
                      std::string_view name);  // throws ValueError, with the existing names

// Registers an algorithm. Only at load time: the first use of the registry freezes it.
struct RegisterAlgorithm {
  explicit RegisterAlgorithm(const Algorithm& algorithm);
};

}  // namespace pycollect
