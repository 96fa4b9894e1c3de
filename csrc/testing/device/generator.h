// Random numbers of the device: those of a CPU generator with the same seed.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace pd2 {

class CheckedGenerator final : public c10::GeneratorImpl {
 public:
  explicit CheckedGenerator(int device);

  // What a CPU kernel draws from.
  const at::Generator& on_cpu() const { return on_cpu_; }

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  void set_current_seed(std::uint64_t seed) override { on_cpu_.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { on_cpu_.set_offset(offset); }
  std::uint64_t get_offset() const override { return on_cpu_.get_offset(); }
  std::uint64_t current_seed() const override { return on_cpu_.current_seed(); }
  std::uint64_t seed() override { return on_cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    on_cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  CheckedGenerator* clone_impl() const override;

  at::Generator on_cpu_;
};

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

}  // namespace pd2
