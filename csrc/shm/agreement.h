// How ranks find out, before anything is written, that all of them were asked for the same: a
// signature each, and for people a description, published with the counter that they poll anyway.
#pragma once
#include <optional>
#include <string_view>

#include "../plan/error.h"
#include "executor.h"
#include "sides.h"

namespace pycollect::shm {

// What a rank says of a call.
struct Statement {
  Collective collective = Collective::barrier;
  uint64_t call = 0;
  Post post = {};
  Places places = {};
  uint32_t part = 0, parts = 1;  // see Description

  void offer(const std::optional<Places>& found) {
    if (!found) return;
    places = *found;
    post.flags |= Post::placed;
  }
};

struct Agreed {
  uint32_t pieces = 0;  // the most that any rank says
  bool placed = true;   // all ranks have offered places
};

// Of the request alone: it takes one piece, and offers no places.
Statement statement(const Request& request, uint64_t call);

// Equal on ranks that were asked for the same.
uint64_t signature(const Request& request, uint64_t call);
uint64_t signature(const std::vector<const Request*>& requests, uint64_t call);

// Of the next run, the host's counters being what numbers them.
uint64_t run_number(const Group& group);

// Waits until the slot of the run before the last may be overwritten: everybody has finished it.
// Before a call's first run `begin` does, and sees to its post too: a rank that refused the last
// call has not waited for the others' posts.
void begin(Group& group, uint64_t run, const Occasion& occasion);
void settle(Group& group, uint64_t run, const Occasion& occasion);
// Writes the post. It counts as soon as the counter is advanced beyond `at_run(run)`.
void state(Group& group, const Statement& statement, const Request* request);
void state_refusal(Group& group, const Statement& statement, std::string_view why);

// Waits for everybody's post. Throws std::invalid_argument, on every rank the same, if they are not
// alike.
Agreed agree(Group& group, const Statement& mine, uint64_t run, const Occasion& occasion);
// Posts, and does both: a run by itself, and nothing behind it.
Agreed exchange(Group& group, const Statement& mine, const Request& request,
                const Occasion& occasion);
// When that has thrown for several requests at once: has every rank as many, and refused nothing?
bool all_state_as_many(Group& group, const Statement& mine);

// Whoever cannot go on in the middle of a call takes the others with it: they would wait for it.
template <class F>
void whole_or_broken(Group& group, const Occasion& occasion, F&& f) {
  try {
    f();
  } catch (const CollectiveError&) {
    throw;
  } catch (const std::exception& error) {
    group.abort(text("it failed in ", occasion.operation, ": ", error.what()));
    throw;
  }
}

}  // namespace pycollect::shm
