// See random_states.h.
#include "random_states.h"

#include <ATen/Context.h>

#include <mutex>

namespace pycollect::dist {
namespace {

at::CPUGeneratorImpl& cpu_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

std::vector<at::Generator> generators_of_gpus() {
  std::vector<at::Generator> found;
  const c10::DeviceIndex devices = at::detail::getCUDAHooks().deviceCount();
  for (c10::DeviceIndex d = 0; d < devices; ++d)
    found.push_back(at::globalContext().defaultGenerator(at::Device(at::kCUDA, d)));
  return found;
}

}  // namespace

RandomStates::RandomStates(int world, bool cuda)
    : before_(current(cuda)), states_(world, before_) {}

RandomStates::RandomState RandomStates::current(bool cuda) {
  at::CPUGeneratorImpl& cpu = cpu_generator();
  const std::lock_guard lock(cpu.mutex_);
  RandomState state{
      cpu.engine(), cpu.next_float_normal_sample(), cpu.next_double_normal_sample(), {}};
  if (!cuda) return state;
  for (at::Generator generator : generators_of_gpus()) {
    const std::lock_guard device_lock(generator.mutex());
    state.cuda.push_back({generator.current_seed(), generator.get_offset()});
  }
  return state;
}

// If CUDA has been initialized since the state was saved, the GPUs get the seed of the CPU:
// torch.manual_seed sets both.
void RandomStates::set(const RandomState& state, bool cuda) {
  at::CPUGeneratorImpl& cpu = cpu_generator();
  const std::lock_guard lock(cpu.mutex_);
  cpu.set_engine(state.engine);
  cpu.set_next_float_normal_sample(state.next_float);
  cpu.set_next_double_normal_sample(state.next_double);
  if (!cuda) return;
  std::vector<at::Generator> generators = generators_of_gpus();
  for (std::size_t d = 0; d < generators.size(); ++d) {
    at::Generator& generator = generators[d];
    const std::lock_guard device_lock(generator.mutex());
    const CudaState of_seed{state.engine.seed(), 0};
    const CudaState& own = state.cuda.empty() ? of_seed : state.cuda[d];
    generator.set_current_seed(own.seed);
    generator.set_offset(own.offset);
  }
}

}  // namespace pycollect::dist
