#include "checked_device/generator.h"

#include "checked_device/graph.h"
#include "checked_device/runtime.h"
#include "checked_device/streams.h"

#include <string>
#include <utility>
#include <vector>

namespace pd2 {

CheckedGenerator::CheckedGenerator(int device, at::Tensor seed)
    : CheckedGenerator(device, std::make_shared<State>(
                                   State{at::detail::createCPUGenerator(), std::move(seed)})) {}

CheckedGenerator::CheckedGenerator(int device, std::shared_ptr<State> state)
    : c10::GeneratorImpl(checked_device(device),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(std::move(state)) {}

at::Generator& CheckedGenerator::on_cpu(const char* what) const {
  GraphRecording::refuse_here(std::string("to ask a generator for ") + what);
  return state_->on_cpu;
}

void CheckedGenerator::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) {
  state_ = c10::dynamic_intrusive_pointer_cast<CheckedGenerator>(other)->state_;
}

c10::intrusive_ptr<c10::GeneratorImpl> CheckedGenerator::graphsafe_get_state() const {
  return c10::intrusive_ptr<CheckedGenerator>::reclaim(
      new CheckedGenerator(device().index(), state_));
}

CheckedGenerator* CheckedGenerator::clone_impl() const {
  return new CheckedGenerator(
      device().index(), std::make_shared<State>(State{on_cpu("a clone").clone(), state_->seed}));
}

Drawing::Drawing(const at::Generator& generator, CpuRun& run) : on_cpu_(generator) {
  if (!generator.device().is_privateuseone()) return;
  auto& state = generator.get<CheckedGenerator>()->state();
  on_cpu_ = state.on_cpu;
  is_of_graph_ = state.seed.defined();
  if (is_of_graph_ && !std::exchange(state.is_seeded, true)) seed_ = run.read(state.seed);
}

void Drawing::check(const CpuRun& run) const {
  TORCH_CHECK(run.is_recorded() == is_of_graph_,
              is_of_graph_ ? "a graph's draw, but no graph" : "random numbers cannot be recorded");
}

at::Generator Drawing::generator() const {
  if (seed_.defined()) {
    const auto* const seed = seed_.const_data_ptr<std::int64_t>();
    at::Generator(on_cpu_).set_current_seed(static_cast<std::uint64_t>(seed[0]));
  }
  return on_cpu_;
}

const at::Generator& default_generator(int device) {
  static const auto generators = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < Runtime::kDevices; ++index) made.push_back(new_generator(index));
    return made;
  }();
  return generators.at(device < 0 ? current_device() : device);
}

at::Generator new_generator(int device) {
  return at::make_generator<CheckedGenerator>(device < 0 ? current_device() : device);
}

}  // namespace pd2
