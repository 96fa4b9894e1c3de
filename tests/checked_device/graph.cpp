#include "checked_device/graph.h"

#include "checked_device/allocator.h"
#include "checked_device/cpu_run.h"
#include "checked_device/generator.h"
#include "checked_device/runtime.h"
#include "checked_device/streams.h"
#include "checked_device/this_thread_text.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace pd2 {
namespace {

struct UnderWay {
  GraphRecording* recording;
  std::thread::id thread;
  std::uint64_t number;
};

std::mutex mutex;
std::map<StreamNumber, UnderWay> recordings;
std::uint64_t num_recordings = 0;
thread_local bool is_recording_here = false;

class CheckedGraph final : public DeviceGraph, public GraphRecording {
 public:
  explicit CheckedGraph(const CheckedGraph* beside)
      : memory_(beside ? beside->memory_ : new_graph_memory()) {}

  void begin(std::int64_t) override {
    stream_ = current_stream_number(current_device());
    {
      const std::lock_guard lock(mutex);
      const UnderWay mine{this, std::this_thread::get_id(), ++num_recordings};
      TORCH_CHECK(recordings.emplace(*stream_, mine).second, "the stream's work is recorded");
    }
    is_recording_here = true;
    begin_graph_memory(*stream_, memory_);
  }
  void end() override { stop(); }
  void abandon() noexcept override {
    stop();
    steps_.clear();
  }

  at::Generator generator(const at::Tensor& seed) override {
    return at::make_generator<CheckedGenerator>(seed.device().index(), seed);
  }

  void replay() override {
    auto& runtime = Runtime::instance();
    const auto stream = current_stream_number(current_device());
    for (const Step& step : steps_) {
      const auto launch = runtime.launch(stream, step.name, step.uses);
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      const at::DisableRecordFunctionGuard no_host_access;
      const auto results = step.again();
      for (const Made& made : step.made) {
        const at::Tensor& result = results.at(made.result);
        TORCH_CHECK(result.storage().nbytes() == made.bytes, step.name, ": recorded with ",
                    made.bytes, " bytes, now ", result.storage().nbytes());
        if (made.bytes > 0) std::memcpy(made.data, result.storage().data(), made.bytes);
        runtime.add_writes(launch, made.writes);
      }
    }
    runtime.count_as_one(steps_.size());
  }
  std::int64_t bytes() const override { return bytes_; }

  void keep(const std::vector<Use>& uses) override {
    for (const Use& use : uses) {
      const auto* const data = reinterpret_cast<const char*>(use.begin);
      kept_.push_back({use.begin, std::vector<char>(data, data + use.bytes)});
    }
  }
  void add(std::string name, std::vector<Use> uses, std::function<std::vector<at::Tensor>()> again,
           const std::vector<at::Tensor>& made) override {
    Step step{std::move(name), std::move(uses), std::move(again), {}};
    for (std::size_t i = 0; i < made.size(); ++i) {
      const at::Tensor& tensor = made[i];
      if (!tensor.defined()) continue;
      const auto begin = reinterpret_cast<Address>(tensor.storage().data());
      const bool was_there = std::ranges::any_of(step.uses, [&](const Use& use) {
        return use.begin >= begin && use.begin < begin + tensor.storage().nbytes();
      });
      if (was_there) continue;  // an argument, or a view of one
      Made& one = step.made.emplace_back();
      one.result = i;
      one.data = tensor.storage().mutable_data();
      one.bytes = tensor.storage().nbytes();
      add_uses(one.writes, tensor, true);
    }
    steps_.push_back(std::move(step));
  }

 private:
  struct Made {
    std::size_t result;
    void* data;
    std::size_t bytes;
    std::vector<Use> writes;
  };
  struct Step {
    std::string name;
    std::vector<Use> uses;
    std::function<std::vector<at::Tensor>()> again;
    std::vector<Made> made;
  };
  struct Kept {
    Address begin;
    std::vector<char> bytes;
  };

  // What the operators wrote is taken back; the graph's own memory holds nothing.
  void stop() noexcept {
    {
      const std::lock_guard lock(mutex);
      recordings.erase(*stream_);
    }
    is_recording_here = false;
    for (auto kept = kept_.rbegin(); kept != kept_.rend(); ++kept) {
      std::memcpy(reinterpret_cast<void*>(kept->begin), kept->bytes.data(), kept->bytes.size());
    }
    kept_.clear();
    bytes_ = end_graph_memory(*stream_);
  }

  const std::shared_ptr<GraphMemory> memory_;
  std::optional<StreamNumber> stream_;
  std::vector<Kept> kept_;
  std::vector<Step> steps_;
  std::int64_t bytes_ = 0;
};

std::unique_ptr<DeviceGraph> make_graph(const DeviceGraph* beside) {
  return std::make_unique<CheckedGraph>(static_cast<const CheckedGraph*>(beside));
}

}  // namespace

GraphRecording* GraphRecording::of(StreamNumber stream) {
  const std::lock_guard lock(mutex);
  const auto found = recordings.find(stream);
  return found == recordings.end() ? nullptr : found->second.recording;
}

void GraphRecording::refuse(StreamNumber stream, const std::string& what) {
  TORCH_CHECK(of(stream) == nullptr, what, " cannot be recorded");
}

void GraphRecording::refuse_here(const std::string& what) {
  TORCH_CHECK(!is_recording_here, what, " cannot be recorded");
}

std::uint64_t GraphRecording::of_event(StreamNumber stream) {
  {
    const std::lock_guard lock(mutex);
    const auto found = recordings.find(stream);
    if (found == recordings.end()) return 0;
    if (found->second.thread == std::this_thread::get_id()) return found->second.number;
  }
  const std::string error = "an event, by " + this_thread_text() + ", of stream " +
                            std::to_string(stream) + ", whose work another thread records";
  Runtime::instance().report(error);
  TORCH_CHECK(false, error);
}

void GraphRecording::refuse_wait(std::uint64_t number, std::optional<StreamNumber> stream) {
  if (number == 0) return;
  const std::lock_guard lock(mutex);
  const auto found = stream ? recordings.find(*stream) : recordings.end();
  TORCH_CHECK(found != recordings.end() && found->second.number == number, "that ",
              stream ? "another stream" : "the host",
              " waits for an event of a recorded stream cannot be recorded");
}

const MakeDeviceGraph kCheckedGraphs = &make_graph;

}  // namespace pd2
