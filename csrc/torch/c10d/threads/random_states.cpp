// See random_states.h.
#include "random_states.h"

#include <ATen/Context.h>

#include <mutex>

namespace pycollect::dist {
namespace {

at::CPUGeneratorImpl& cpu_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

// Returns the generator of a device that is in use. Creating it would initialize CUDA.
std::optional<at::Generator> cuda_generator(c10::DeviceIndex device) {
  if (!at::detail::getCUDAHooks().hasPrimaryContext(device)) return {};
  return at::globalContext().defaultGenerator(at::Device(at::kCUDA, device));
}

c10::DeviceIndex cuda_devices() {
  return at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : c10::DeviceIndex{0};
}

}  // namespace

RandomStates::RandomStates(int world) : states_(world, current()) {}

RandomStates::RandomState RandomStates::current() {
  at::CPUGeneratorImpl& cpu = cpu_generator();
  const std::lock_guard lock(cpu.mutex_);
  RandomState state{
      cpu.engine(), cpu.next_float_normal_sample(), cpu.next_double_normal_sample(), {}};
  for (c10::DeviceIndex d = 0; d < cuda_devices(); ++d) {
    auto generator = cuda_generator(d);
    state.cuda.emplace_back();
    if (!generator) continue;
    const std::lock_guard device_lock(generator->mutex());
    state.cuda.back() = CudaState{generator->current_seed(), generator->get_offset()};
  }
  return state;
}

void RandomStates::save(Rank rank) { states_[rank] = current(); }

void RandomStates::load(Rank rank) {
  const RandomState& state = states_[rank];
  at::CPUGeneratorImpl& cpu = cpu_generator();
  const std::lock_guard lock(cpu.mutex_);
  cpu.set_engine(state.engine);
  cpu.set_next_float_normal_sample(state.next_float);
  cpu.set_next_double_normal_sample(state.next_double);
  for (std::size_t d = 0; d < state.cuda.size(); ++d) {
    if (!state.cuda[d]) continue;
    auto generator = cuda_generator(static_cast<c10::DeviceIndex>(d));
    if (!generator) continue;
    const std::lock_guard device_lock(generator->mutex());
    generator->set_current_seed(state.cuda[d]->seed);
    generator->set_offset(state.cuda[d]->offset);
  }
}

}  // namespace pycollect::dist
