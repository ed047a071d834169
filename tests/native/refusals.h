// Ranks that make different calls, included by executor_test.cpp: every rank throws the same
// message, no output is written, and the group stays usable.
#pragma once

struct Buffers {
  std::vector<float> in = std::vector<float>(512, 1), out = std::vector<float>(512, -1);
  CallBuffer buffer(bool output, Sizes blocks) {
    std::vector<float>& all = output ? out : in;
    return {{{reinterpret_cast<std::byte*>(all.data()), sum(blocks)}}, blocks};
  }
};

CollectiveRequest all_reduce_of(Buffers& b, std::size_t n) {
  return {.collective = Collective::all_reduce,
          .dtype = DType::f32,
          .input = b.buffer(false, {n}),
          .output = b.buffer(true, {n})};
}

// Returns the message of the std::invalid_argument that `f` throws, or "nothing".
template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing";
}

// `change` changes the last rank's request; every rank's message must contain `expected`.
void expect_mismatch(Member& me, const std::function<void(CollectiveRequest&, Buffers&)>& change,
                     const std::string& expected) {
  Buffers b;
  CollectiveRequest request = all_reduce_of(b, 100);
  const bool last = me.group.rank() == me.group.world() - 1;
  if (last) change(request, b);
  const std::string message = refusal([&] { me.run(request); });
  expect(message.find(expected) != std::string::npos,
         text("wanted '", expected, "', got '", message, "'"));
  expect(b.out == std::vector<float>(512, -1), "an output was written before all agreed");
  Buffers after;
  me.run(all_reduce_of(after, 100));
  expect(after.out[99] == static_cast<float>(me.group.world()) && after.out[100] == -1,
         "the group does not work after: " + expected);
}

void run_differences(Member& me) {
  const std::string last = text("rank ", me.group.world() - 1, " ");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers& b) { r = all_reduce_of(b, 99); },
      last + "called all_reduce of 99 float32, op sum, rank 0 called all_reduce of 100 float32");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers&) { r.dtype = DType::i32; },
      last + "called all_reduce of 100 int32");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers&) { r.op = ReduceOp::max; }, "op max, rank 0 called");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers&) { r.collective = Collective::broadcast; },
      "called broadcast of 100 float32, root 0");
  expect_mismatch(
      me,
      [](CollectiveRequest& r, Buffers&) { r = {.collective = Collective::barrier, .tensors = 0}; },
      last + "called barrier, rank 0 called all_reduce");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers&) { r.algorithm = "chain"; },
      "with different algorithms");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers&) { r.tensors = 7; }, "in 7 tensors, rank 0 called");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers&) { r.op = ReduceOp::bor; },
      "bor is not defined for float32");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers&) { r.algorithm = "none"; },
      "there is no all_reduce algorithm");
  expect_mismatch(
      me, [](CollectiveRequest& r, Buffers& b) { r.output = b.buffer(true, {7}); },
      "the output has 7");
}

// Several refusals in a row, also by rank 0; the other ranks' messages name the refusing rank.
void run_refused(Member& me) {
  for (int i = 0; i < 5; ++i) {
    const Rank refusing = i % me.group.world();
    Buffers b;
    if (me.group.rank() == refusing) {
      refuse(me.transport, Collective::all_reduce, me.call++, soon(),
             "all_reduce: it is not contiguous");
    } else {
      const std::string message = refusal([&] { me.run(all_reduce_of(b, 100)); });
      expect(message == text("rank ", refusing, " refused all_reduce: it is not contiguous"),
             message);
      expect(b.out[0] == -1, "an output was written though a rank refused");
    }
  }
}

void run_different_blocks(Member& me) {
  const int world = me.group.world();
  Buffers b;
  Sizes sent(world, 3), received(world, 3);
  if (me.group.rank() == 1) received[0] = 4;
  CollectiveRequest request{.collective = Collective::all_to_all,
                            .dtype = DType::f32,
                            .input = b.buffer(false, sent),
                            .output = b.buffer(true, received),
                            .irregular = true};
  const std::string message = refusal([&] { me.run(request); });
  expect(message == "all_to_all: rank 0 sends 3 elements to rank 1, which has room for 4", message);
  Sizes blocks(world, 5);
  if (me.group.rank() == 1) blocks[1] = 4, blocks[0] = 6;
  request = {.collective = Collective::reduce_scatter,
             .dtype = DType::f32,
             .input = b.buffer(false, blocks),
             .output = b.buffer(true, {blocks[me.group.rank()]})};
  const std::string other = refusal([&] { me.run(request); });
  expect(other.find("tensors of different sizes") != std::string::npos, other);
}

void run_refusals(Member& me) {
  for (int i = 0; i < 3; ++i) {
    run_differences(me);
    run_refused(me);
    run_different_blocks(me);
  }
  run_cases(me, 20, 7);
}
