// See executor.h. All ranks agree on a call before any output is written. The path of a small call
// allocates no memory.
#include "executor.h"

#include "../plan/error.h"
#include "agreement.h"
#include "chunk_loop.h"
#include "program_choice.h"

namespace pycollect::ipc {
namespace {

// Checks and prepares a request. Every reason to refuse it is found before the call is published.
struct Prepared {
  CallBuffers buffers;
  const std::size_t bytes;        // size of all blocks; 0 if a rank cannot compute it
  const RankProgram& in_buffers;  // program whose ranks access only each other's staging buffers
  const RankProgram* const in_tensors;  // zero-copy program; null: too slow, or impossible

  Prepared(const Transport& transport, const CollectiveRequest& request)
      : buffers(request, transport.rank(), transport.world()),
        bytes(buffers.elements() * buffers.item()),
        in_buffers(rank_program(transport, request, false)),
        in_tensors(transport.may_use_tensors(bytes) ? &rank_program(transport, request, true)
                                                    : nullptr) {
    require_type(reduces(request.dtype, request.op), name(request.op), " is not defined for ",
                 name(request.dtype));
    check_sizes_known(request, in_buffers);
  }

  // Returns the registered offsets of the exposed buffers if each is contiguous and registered.
  std::optional<RegisteredOffsets> find_registered(const Transport& transport) const {
    if (in_tensors == nullptr) return {};
    RegisteredOffsets registered;
    const auto find = [&](OperandBuffer where, bool exposed, uint64_t& at) {
      if (!exposed) return true;
      const SegmentList& m = buffers.memory(where);
      if (!m.is_contiguous() || m.base() == nullptr) return false;
      const std::optional<uint64_t> found = transport.registered_offset(m.base());
      at = found.value_or(0);
      return found.has_value();
    };
    if (!find(OperandBuffer::input, in_tensors->exposes_input, registered.input) ||
        !find(OperandBuffer::output, in_tensors->exposes_output, registered.output))
      return {};
    return registered;
  }

 private:
  const RankProgram& rank_program(const Transport& transport, const CollectiveRequest& request,
                                  bool tensors) const {
    const RankProgram& found = program_for(
        {transport.rank(), transport.world(), transport.hosts()}, request,
        {bytes, transport.topology(tensors), transport.buffer_bytes(), transport.keeps_order()});
    region_bytes(transport.buffer_bytes(), found, buffers.widening());
    return found;
  }
};

void refuse_at(Transport& transport, Collective collective, const OpContext& context,
               std::string_view why) {
  Group& group = transport.group();
  const uint64_t run = group.run_number();
  const CallFingerprint refusal{collective, context.call, {.flags = Fingerprint::refused}};
  begin(group, run, context);
  publish_refusal(group, refusal, why);
  group.advance(at_run(run + 1));
  transport.reject(refusal, context, text("rank ", transport.rank(), " refused ", why));
}

Prepared prepare(Transport& transport, const CollectiveRequest& request, const OpContext& context) {
  try {
    transport.begin(request, context);
    return Prepared(transport, request);
  } catch (const std::invalid_argument& error) {
    refuse_at(transport, request.called(), context,
              text(name(request.called()), ": ", error.what()));
    throw;
  }
}

// Prepares the loop for the program in the staging buffers, and these for both programs. A lack of
// memory is a refusal of the call.
void reserve(Prepared& p, ChunkLoop& loop, const CollectiveRequest& request,
             const OpContext& context) {
  Transport& transport = loop.transport();
  try {
    if (p.in_tensors != nullptr && p.in_tensors->stages()) {
      p.buffers.divide(p.in_tensors->chunks);
      loop.use(*p.in_tensors, false);
      loop.reserve();
    }
    p.buffers.divide(p.in_buffers.chunks);
    loop.use(p.in_buffers, request.irregular);
    loop.reserve();
  } catch (const std::exception& error) {
    refuse_at(transport, request.called(), context,
              text(name(request.called()), ": ", error.what()));
    throw;
  }
}

}  // namespace

void check(const Transport& transport, const CollectiveRequest& request) {
  if (request.tensors != 0) Prepared(transport, request);
}

// One combined fingerprint shows whether all requests match. The ranks exchange a fingerprint of
// each request only if they do not match, and of an irregular request to compare its counts.
void agree_on_all(Transport& transport, const std::vector<const CollectiveRequest*>& requests,
                  uint64_t& calls, Deadline deadline) {
  const CollectiveRequest& first = *requests.front();
  const auto parts = static_cast<uint32_t>(requests.size());
  const auto context = [&](const CollectiveRequest& r) {
    return OpContext{name(r.called()), calls++, deadline};
  };
  const auto exchange_part = [&](uint32_t i) {
    const OpContext own = context(*requests[i]);
    CallFingerprint mine = fingerprint_of(*requests[i], own.call);
    mine.part = i;
    mine.parts = parts;
    publish_and_agree(transport, mine, *requests[i], own);
  };
  const OpContext together = context(first);
  CallFingerprint all{first.called(),
                      together.call,
                      {.fingerprint_hash = fingerprint_hash(requests, together.call)}};
  all.parts = parts;
  try {
    publish_and_agree(transport, all, first, together);
  } catch (const std::invalid_argument&) {
    if (!transport.all_publish_as_many(all)) throw;
    for (uint32_t i = 0; i < parts; ++i) exchange_part(i);  // one of these throws
    throw;
  }
  for (uint32_t i = 0; i < parts; ++i)
    if (requests[i]->irregular) exchange_part(i);
}

void run(Transport& transport, const CollectiveRequest& request, uint64_t call, Deadline deadline) {
  const OpContext context{name(request.called()), call, deadline};
  Group& group = transport.group();
  group.update_call();
  group.require_run(context);
  if (request.tensors == 0) {
    publish_and_agree(transport, fingerprint_of(request, call), request, context);
    return;
  }
  Prepared p = prepare(transport, request, context);
  const uint64_t first = transport.next_run();
  ChunkLoop loop(transport, p.buffers);
  reserve(p, loop, request, context);
  CallFingerprint mine = fingerprint_of(request, call);
  mine.fingerprint.pieces = loop.pieces();
  mine.set_registered(p.find_registered(transport));
  const Agreement agreed = transport.agree(mine, loop);
  abort_on_error(group, context, [&] {
    if (agreed.zero_copy) {
      transport.check_exposed(p.bytes);
      p.buffers.divide(p.in_tensors->chunks);
      loop.use(*p.in_tensors, false);
    } else {
      loop.agree(agreed.pieces, agreed.piece);
    }
    loop.run(first);
  });
  group.update_call();
}

void refuse(Transport& transport, Collective collective, uint64_t call, Deadline deadline,
            std::string_view why) {
  const OpContext context{name(collective), call, deadline};
  transport.group().update_call();
  transport.group().require_run(context);
  refuse_at(transport, collective, context, why);
}

}  // namespace pycollect::ipc
