#include "testing/device/generator.h"

#include "testing/device/runtime.h"
#include "testing/device/streams.h"

#include <vector>

namespace pd2 {

CheckedGenerator::CheckedGenerator(int device)
    : c10::GeneratorImpl(checked_device(device),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      on_cpu_(at::detail::createCPUGenerator()) {}

CheckedGenerator* CheckedGenerator::clone_impl() const {
  auto* const copy = new CheckedGenerator(device().index());
  copy->on_cpu_ = on_cpu_.clone();
  return copy;
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
