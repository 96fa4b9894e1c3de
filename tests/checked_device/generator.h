// Random numbers of the device: those of a CPU generator with the same seed.

#pragma once

#include "checked_device/cpu_run.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>

namespace pd2 {

class CheckedGenerator final : public c10::GeneratorImpl {
 public:
  struct State {
    at::Generator on_cpu;    // what a CPU kernel draws from
    at::Tensor seed;         // of a graph's draw: the seed and the offset, on the device
    bool is_seeded = false;  // a launch of that draw has read them
  };

  // `seed`: what it draws is recorded, and it reads its seed there.
  explicit CheckedGenerator(int device, at::Tensor seed = {});

  State& state() const { return *state_; }

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  void set_current_seed(std::uint64_t seed) override { on_cpu("a seed").set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { on_cpu("an offset").set_offset(offset); }
  std::uint64_t get_offset() const override { return on_cpu("an offset").get_offset(); }
  std::uint64_t current_seed() const override { return on_cpu("a seed").current_seed(); }
  std::uint64_t seed() override { return on_cpu("a seed").seed(); }
  void set_state(const c10::TensorImpl& state) override {
    on_cpu("a state").unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu("a state").unsafeGetGeneratorImpl()->get_state();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

 private:
  CheckedGenerator(int device, std::shared_ptr<State> state);
  CheckedGenerator* clone_impl() const override;
  // As CUDA's, these cannot be asked of while the calling thread's work is recorded.
  at::Generator& on_cpu(const char* what) const;

  std::shared_ptr<State> state_;
};

// What a launch draws from.
class Drawing {
 public:
  // Before launch(): the seed of a recorded draw is memory that the launch reads.
  Drawing(const at::Generator& generator, CpuRun& run);

  // After it. Throws if what is recorded could not be drawn again.
  void check(const CpuRun& run) const;
  // For the CPU's kernel, each time that it runs.
  at::Generator generator() const;

 private:
  at::Generator on_cpu_;
  bool is_of_graph_ = false;
  at::Tensor seed_;  // a CPU tensor on its memory, if this launch is a graph's draw's first
};

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

}  // namespace pd2
