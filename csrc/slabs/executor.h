// One rank's side of a collective of tensors on GPUs, between processes: what shm/executor.h does,
// with slabs for slots and streams for threads. Returns when all is enqueued.
#pragma once
#include "../shm/executor.h"
#include "dock.h"

namespace pycollect::slabs {

// The request's sides are memory of the dock's GPU, as the dock's stream finds it. Throws what
// shm::run does; after anything but std::invalid_argument the stream may have begun to move things.
void run(Dock& dock, const shm::Request& request, uint64_t call, shm::Deadline deadline);

// Throws std::invalid_argument if `run` would before the others hear of the request.
void check(const Dock& dock, const shm::Request& request);

}  // namespace pycollect::slabs
