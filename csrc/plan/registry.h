// Every algorithm, by collective and name: what the tests, the benchmark, the simulator and the
// selector iterate. An algorithm is one file in csrc/algorithms that ends with `static const
// Register`.
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

// Is the result the left fold in rank order?
enum class Order : uint8_t {
  exact,   // yes, rounded once: for every dtype
  native,  // yes, but rounded at every hop: for dtypes that accumulate in themselves
  other,   // no
};
inline constexpr std::array kOrderNames{"exact", "native", "other"};
constexpr const char* name(Order o) { return kOrderNames[static_cast<std::size_t>(o)]; }

// What an algorithm is asked for.
struct Ask {
  int world;
  Rank root = 0;
  int pieces = 4;  // of a pipeline, for algorithms that have one
};

struct Algorithm {
  const char* name;
  Collective collective;
  Plan (*make)(const Ask&);  // only called for a world of two and more
  const char* cost;          // rounds, and bytes a rank sends, of S bytes: for people
  Order order = Order::exact;
  bool in_place = true;  // may output and input be the same memory?

  Plan operator()(const Ask& ask) const;  // a world of one is a copy, whatever the collective
  // Does it keep the numerical contract for this type?
  bool canonical(DType t) const {
    return order == Order::exact || (order == Order::native && accumulates_in_itself(t));
  }
};

const std::vector<Algorithm>& registry();  // by collective, then order, then name
std::vector<const Algorithm*> algorithms(Collective collective);  // of one collective
const Algorithm& find(Collective collective,
                      std::string_view name);  // throws ValueError, with the names there are

// Only at load time: the registry is frozen by the first look at it.
struct Register {
  explicit Register(const Algorithm& algorithm);
};

}  // namespace pycollect
