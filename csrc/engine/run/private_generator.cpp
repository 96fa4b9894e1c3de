#include "engine/run/private_generator.h"

#include "core/check.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// torch lets a thread send its operators' calls through registered functions; this is the key for
// which torch itself registers none.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local at::Generator* drawn_from = nullptr;
thread_local std::optional<std::uint64_t> forward_seed;

bool is_generator(const c10::Argument& argument) {
  return *argument.type() == *c10::OptionalType::create(c10::GeneratorType::get());
}

// An operator with a `Generator? generator` argument.
void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  // Factory calls are dispatched a second time with their output.
  for (std::size_t i = 0; i < arguments.size() && keys.has(c10::DispatchKey::CPU); ++i) {
    c10::IValue& value = stack->at(stack->size() - arguments.size() + i);
    if (!is_generator(arguments[i])) {
      continue;
    }
    if (value.isNone()) {
      PD2_CHECK(drawn_from, "recompute: random numbers are drawn in the backward, by ",
                op.schema().name(),
                ": a stage that recomputes may not contain a checkpoint (torch.utils.checkpoint) "
                "around what draws random numbers, as that would draw others than its forward did");
      value = *drawn_from;
    } else {
      PD2_CHECK(drawn_from && value.toGenerator() == *drawn_from, "recompute: ", op.schema().name(),
                " draws from a torch.Generator of the model's own: what is run again has to draw "
                "from torch's default generator");
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

// Registered once, at the first use; lasts as long as the process.
void register_operators() {
  static const auto* registrations = [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    auto* made = new std::vector<c10::RegistrationHandleRAII>();
    if (!dispatcher.hasBackendFallbackForDispatchKey(kKey)) {
      made->push_back(dispatcher.registerFallback(kKey, c10::KernelFunction::makeFallthrough(),
                                                  "pipedream2bw: all other operators"));
    }
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (op && std::ranges::any_of(op->schema().arguments(), is_generator)) {
        made->push_back(dispatcher.registerImpl(
            name, kKey, c10::KernelFunction::makeFromBoxedFunction<&draw>(), std::nullopt, nullptr,
            "pipedream2bw: random numbers that can be drawn again"));
      }
    }
    return made;
  }();
  (void)registrations;
}

}  // namespace

std::uint64_t draw_seed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t value) {
  // SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
  std::uint64_t z = seed + 0x9e3779b97f4a7c15u * (value + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

ForwardSeeds::ForwardSeeds(std::uint64_t seed) : outer_(std::exchange(forward_seed, seed)) {}

ForwardSeeds::~ForwardSeeds() { forward_seed = outer_; }

std::uint64_t next_seed() {
  PD2_CHECK(forward_seed, "seeds are given in a stage's forward only");
  *forward_seed = mix_seed(*forward_seed, 0);
  return *forward_seed;
}

PrivateGenerator::PrivateGenerator(std::optional<std::uint64_t> seed)
    : generator_(seed ? std::make_unique<at::Generator>(at::detail::createCPUGenerator(*seed))
                      : nullptr),
      outer_(std::exchange(drawn_from, generator_.get())),
      guard_((register_operators(), kKey)) {}

PrivateGenerator::~PrivateGenerator() { drawn_from = outer_; }

}  // namespace pd2
