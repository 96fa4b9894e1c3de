#include "engine/run/keyed_random.h"

#include "core/check.h"
#include "engine/run/recorded_draws.h"
#include "engine/streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pd2 {
namespace {

// torch lets a thread send its operators' calls through registered functions; this is the key for
// which torch itself registers none.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

constexpr auto kNotAgain = " draws random numbers that a graph cannot draw again";

// The place of a backward, which several threads may execute. torch hands debug infos from the
// thread that calls autograd on to those.
struct SharedPlace : c10::DebugInfoBase {
  SharedPlace(const RandomPlace& first, bool is_recorded)
      : place(first), is_recorded(is_recorded) {}

  std::mutex mutex;
  RandomPlace place;
  const bool is_recorded;
};

// A kind of our own: in older releases a number, of which torch uses the first ones.
constexpr std::string_view kSharedName = "pipedream2bw: random numbers";
template <typename Kind>
constexpr Kind kind_of_ours() {
  if constexpr (std::is_enum_v<Kind>) {
    return static_cast<Kind>(0x70);
  } else {
    return Kind(&kSharedName);
  }
}
constexpr auto kShared = kind_of_ours<c10::DebugInfoKind>();

struct ThisThread {
  std::optional<RandomPlace> place;
  KeyedRandom::Options options;
  bool in_draw = false;               // inside an operator that draws: what it calls is part of it
  std::optional<std::uint64_t> seed;  // of the draw, until a generator has it
  RecordedDraws* recorded = nullptr;  // where a graph records the draws,
  at::Generator of_draw;              // and the generator of this one
  bool on_default = false;            // a device's default generator has it
  // For operators with a Generator argument, by device; made at the first draw there.
  std::unordered_map<c10::Device, at::Generator> generators;
  std::int64_t num_draws = 0;
};
thread_local ThisThread this_thread;

SharedPlace* shared_place() {
  return static_cast<SharedPlace*>(c10::ThreadLocalDebugInfo::get(kShared));
}

// The seed of the next draw. The thread has a place, or there is a shared one.
std::uint64_t take_seed() {
  if (this_thread.place) {
    return this_thread.place->take();
  }
  SharedPlace& shared = *shared_place();
  PD2_CHECK(!shared.is_recorded, "it draws random numbers in a backward");
  const std::lock_guard lock(shared.mutex);
  return shared.place.take();
}

bool is_default(const at::Generator& generator) {
  return generator == at::detail::getDefaultCPUGenerator() ||
         (has_streams(generator.device()) &&
          generator == at::globalContext().defaultGenerator(generator.device()));
}

at::Generator new_generator(c10::Device device) {
  return device.is_cpu() ? at::detail::createCPUGenerator()
                         : at::globalContext()
                               .getAcceleratorHooksInterface(device.type())
                               .getNewGenerator(device.index());
}

// While it lives, the device's default generator, from which operators without a Generator argument
// draw, has another seed, or the state of a recorded draw's generator. Threads of ours that draw
// there take turns, those of other devices apart. Nobody else may draw there meanwhile.
class SeededDevice {
 public:
  SeededDevice(c10::Device device, std::uint64_t seed, const at::Generator& recorded)
      : turn_(mutex(device)), generator_(at::globalContext().defaultGenerator(device)) {
    const std::lock_guard lock(generator_.mutex());
    if (recorded.defined()) {  // no state can be read then, but exchanged
      before_ = generator_.graphsafe_get_state();
      generator_.graphsafe_set_state(recorded);
    } else {
      state_ = generator_.get_state();
      generator_.set_current_seed(seed);
    }
    this_thread.on_default = true;
  }
  ~SeededDevice() {
    this_thread.on_default = false;
    const std::lock_guard lock(generator_.mutex());
    if (before_.defined()) {
      generator_.graphsafe_set_state(before_);
    } else {
      generator_.set_state(state_);
    }
  }
  SeededDevice(const SeededDevice&) = delete;
  SeededDevice& operator=(const SeededDevice&) = delete;

 private:
  static std::mutex& mutex(c10::Device device) {
    static std::array<std::mutex, std::numeric_limits<c10::DeviceIndex>::max() + 1> by_index;
    return by_index.at(device.index());
  }

  const std::lock_guard<std::mutex> turn_;
  at::Generator generator_;
  at::Generator before_;
  at::Tensor state_;
};

// An operator that draws random numbers.
class DrawingOperator : public c10::OperatorKernel {
 public:
  explicit DrawingOperator(const c10::FunctionSchema& schema)
      : name_(schema.name()),
        num_arguments_(schema.arguments().size()),
        repeats_in_graphs_(name_.find("efficient_attention") == std::string::npos &&
                           name_.find("_rnn") == std::string::npos),
        generator_(find(schema, is_generator)),
        dropout_(
            find(schema, [](const auto& argument) { return argument.name() == "dropout_p"; })) {}

  // Whether calls of an operator are to come here. Of operators that consist of others, these do.
  static bool is_one(const c10::OperatorHandle& op) {
    const c10::FunctionSchema& schema = op.schema();
    if (find(schema, is_generator)) {
      return true;
    }
    const auto is_tensor = [](const c10::Argument& result) {
      return result.type()->isSubtypeOf(*c10::TensorType::get());
    };
    const auto has_seed = [](const c10::Argument& argument) {
      return argument.name().find("seed") != std::string::npos;
    };
    return op.hasTag(at::Tag::nondeterministic_seeded) &&
           !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
           std::ranges::any_of(schema.returns(), is_tensor) && !find(schema, has_seed);
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    ThisThread& here = this_thread;
    const auto next = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
    // A fake tensor's, or another one's that will call operators of its own.
    const bool is_fake = keys.has(c10::DispatchKey::Python) && !is_modes(*stack);
    const bool begins = !here.in_draw && (here.place || shared_place()) && draws(*stack) &&
                        (!is_fake || here.options.counts_fakes);
    if (!begins && !here.in_draw) {
      op.redispatchBoxed(next, stack);
      return;
    }
    const Draw draw(here, begins);
    const std::optional<c10::Device> device =
        is_fake ? std::nullopt : give_generator(here, keys, *stack);
    if (device) {
      const SeededDevice seeded(*device, *std::exchange(here.seed, std::nullopt), here.of_draw);
      op.redispatchBoxed(next, stack);
    } else if (here.seed && !is_fake && keys.has(c10::DispatchKey::Python)) {
      // No generator has the seed yet, and what a mode calls does not come here: past all modes.
      constexpr c10::DispatchKeySet kModes{c10::DispatchKey::Python,
                                           c10::DispatchKey::PythonTLSSnapshot};
      const c10::impl::ExcludeDispatchKeyGuard past(kModes);
      op.redispatchBoxed(next - kModes, stack);
    } else {
      op.redispatchBoxed(next, stack);
    }
  }

 private:
  using Arguments = torch::jit::Stack;

  class Draw {
   public:
    Draw(ThisThread& here, bool begins) : here_(here), begins_(begins) {
      if (begins_) {
        if (here_.recorded) {
          here_.of_draw = here_.recorded->next(*here_.place);
        }
        here_.seed = take_seed();
        here_.in_draw = true;
        ++here_.num_draws;
      }
    }
    ~Draw() {
      if (begins_) {
        here_.in_draw = false;
        here_.seed.reset();
        here_.of_draw = {};
      }
    }
    Draw(const Draw&) = delete;
    Draw& operator=(const Draw&) = delete;

   private:
    ThisThread& here_;
    const bool begins_;
  };

  static bool is_generator(const c10::Argument& argument) {
    static const auto type = c10::OptionalType::create(c10::GeneratorType::get());
    return *argument.type() == *type;
  }

  template <typename Predicate>
  static std::optional<std::size_t> find(const c10::FunctionSchema& schema, Predicate is_it) {
    const auto& arguments = schema.arguments();
    const auto found = std::ranges::find_if(arguments, is_it);
    return found == arguments.end() ? std::nullopt
                                    : std::optional<std::size_t>(found - arguments.begin());
  }

  c10::IValue& argument(Arguments& stack, std::size_t position) const {
    return stack[stack.size() - num_arguments_ + position];
  }

  bool draws(Arguments& stack) const {
    if (dropout_) {
      const c10::IValue& dropout = argument(stack, *dropout_);
      return !dropout.isDouble() || dropout.toDouble() != 0;
    }
    if (!generator_) {
      return true;
    }
    c10::IValue& given = argument(stack, *generator_);
    if (!given.isNone() && is_default(given.toGenerator())) {
      given = c10::IValue();
    }
    PD2_CHECK(given.isNone() || !this_thread.recorded, name_, kNotAgain);
    PD2_CHECK(given.isNone() || !this_thread.options.repeats, "recompute: ", name_,
              " draws from a torch.Generator of the model's own: what is run again has to draw "
              "from torch's default generator");
    return given.isNone();
  }

  // Whether Python code of modes alone will see the call, as under selective checkpoints. What it
  // calls does not come here: the draw is this call's. A tensor's own code, and modes that trace,
  // compute nothing by themselves.
  bool is_modes(Arguments& stack) const {
    using Modes = c10::impl::TorchDispatchModeTLS;
    using Key = c10::impl::TorchDispatchModeKey;
    const auto is_python = [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
    };
    for (std::size_t i = 0; i < num_arguments_; ++i) {
      const c10::IValue& value = argument(stack, i);
      if ((value.isTensor() && is_python(value.toTensor())) ||
          (value.isTensorList() && std::ranges::any_of(value.toTensorVector(), is_python))) {
        return false;
      }
    }
    return std::ranges::none_of(std::array{Key::FAKE, Key::PROXY, Key::FUNCTIONAL},
                                [](Key key) { return Modes::get_mode(key).has_value(); });
  }

  // The device whose tensors the operator uses; none of factory calls, which have no device's key
  // and call others with their output.
  std::optional<c10::Device> device_of(c10::DispatchKeySet keys, Arguments& stack) const {
    if (keys.has(c10::DispatchKey::CPU)) {
      return c10::Device(c10::kCPU);
    }
    for (std::size_t i = 0; i < num_arguments_; ++i) {
      const c10::IValue& value = argument(stack, i);
      if (value.isTensor() && has_streams(value.toTensor().device())) {
        return value.toTensor().device();
      }
    }
    return std::nullopt;
  }

  // Gives an operator with a Generator argument this thread's generator; returns the device where
  // one without draws first.
  std::optional<c10::Device> give_generator(ThisThread& here, c10::DispatchKeySet keys,
                                            Arguments& stack) const {
    const std::optional<c10::Device> device = device_of(keys, stack);
    if (!device || here.on_default) {
      return std::nullopt;
    }
    PD2_CHECK(!here.recorded || (repeats_in_graphs_ && *device == here.of_draw.device()), name_,
              kNotAgain);
    if (!generator_) {
      return here.seed && !device->is_cpu() ? device : std::nullopt;
    }
    if (argument(stack, *generator_).isNone()) {
      at::Generator& mine = here.recorded ? here.of_draw : here.generators[*device];
      if (!mine.defined()) {
        mine = new_generator(*device);
      }
      if (here.seed && !here.recorded) {
        const std::lock_guard lock(mine.mutex());
        mine.set_current_seed(*std::exchange(here.seed, std::nullopt));
      }
      argument(stack, *generator_) = mine;
    }
    return std::nullopt;
  }

  const std::string name_;
  const std::size_t num_arguments_;
  // Attention that saves memory makes its backward read the seed where the forward was executed:
  // one that is not recorded would look for it on the host. cuDNN's networks keep numbers for
  // themselves.
  const bool repeats_in_graphs_;
  const std::optional<std::size_t> generator_;
  const std::optional<std::size_t> dropout_;  // a probability; 0: nothing is drawn
};

// Once, at the first use; lasts as long as the process.
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
      if (op && DrawingOperator::is_one(*op)) {
        made->push_back(
            dispatcher.registerImpl(name, kKey,
                                    c10::KernelFunction::makeFromBoxedFunctor(
                                        std::make_unique<DrawingOperator>(op->schema())),
                                    std::nullopt, nullptr, "pipedream2bw: random numbers by key"));
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

std::uint64_t RandomPlace::take() {
  if (left == 0) {
    return mix_seed(mix_seed(key, number), ++num_more);
  }
  left -= left == kAll ? 0 : 1;
  return mix_seed(mix_seed(key, number++), 0);
}

KeyedRandom::KeyedRandom(const std::optional<RandomPlace>& place, Options options)
    : outer_(this_thread.place), outer_options_(this_thread.options) {
  if (place) {
    register_operators();
    this_thread.place = place;
    this_thread.options = options;
    guard_.emplace(kKey);
    if (options.is_of_backward) {
      this_thread.place.reset();
      shared_.emplace(kShared, std::make_shared<SharedPlace>(*place, options.is_recorded));
    }
  }
}

KeyedRandom::~KeyedRandom() {
  this_thread.place = outer_;
  this_thread.options = outer_options_;
}

bool is_keyed() { return c10::impl::tls_is_dispatch_key_included(kKey); }

std::optional<RandomPlace> random_place() {
  if (this_thread.recorded) {
    this_thread.recorded->give_place_away();
  }
  return this_thread.place;
}

std::int64_t num_draws() { return this_thread.num_draws; }

void set_random_place(const std::optional<RandomPlace>& place) {
  PD2_CHECK(is_keyed(), "set_random_place: the thread draws from torch's default generator");
  this_thread.place = place;
}

void set_recorded_draws(RecordedDraws* draws) { this_thread.recorded = draws; }

void number_draws(std::uint64_t number, std::uint64_t count) {
  if (std::optional<RandomPlace>& place = this_thread.place) {
    *place = {place->key, number, count, 0};
  }
}

}  // namespace pd2
