// A stage's forwards and backwards, recorded as graphs of its device.
#pragma once

#include "engine/run/device_graph.h"
#include "engine/run/history.h"
#include "engine/run/run.h"
#include "engine/run/split_backward.h"
#include "engine/stage/stage.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pd2 {

// What a stage's graphs have done since the pipeline was made.
struct GraphReport {
  std::int64_t num_graphs = 0;  // now
  std::int64_t bytes = 0;       // of their memory, now
  std::int64_t forwards = 0;    // that were given to the device as graphs
  std::int64_t backwards = 0;
  std::map<std::string, std::int64_t> others;  // by reason: actions that were executed as usual
};

// The first microbatches of a kind are executed as usual, so that libraries make what they need.
// Then forwards are recorded: one for each version slot and each microbatch that is in flight at a
// time, because what a backward needs stays in the graph's memory until then. A microbatch's inputs
// are copied to the recorded addresses, and what it sends is copied from there, so that no other
// stage knows of graphs.
//
// autograd's nodes of a recorded forward are kept: its backward can be recorded again, for another
// gradient buffer or as the one that writes there first, and can be executed as usual where it
// cannot be recorded.
//
// Used by the executor's thread, but for report().
class ActionGraphs {
 public:
  // Null if the stage's actions are not to be recorded.
  static std::unique_ptr<ActionGraphs> of(const ExecutorSetup& setup, const StageSetup& mine);

  // The actions are executed as usual, for that reason, unless it is empty.
  ActionGraphs(Stage& stage, const GraphSetup& setup, std::string refusal);

  class Recording;
  // Microbatches that are alike but for the numbers in their tensors.
  struct Kind {
    std::string refusal{};  // why they cannot be recorded
    int forwards = 0;       // executed as usual
    int backwards = 0;
    std::int64_t bytes = 0;  // about what one takes
    std::int64_t draws = 0;  // of random numbers, in the last of these forwards
    std::map<int, std::vector<std::shared_ptr<Recording>>> recorded{};  // by slot
  };
  // A microbatch's use of the graphs. While it lives, no other one uses the forward.
  struct Use {
    int wiring = 0;
    LayoutId layout = 0;
    std::optional<std::uint64_t> random_key = std::nullopt;  // none: torch's own numbers
    Kind* kind = nullptr;
    std::shared_ptr<Recording> recording = nullptr;  // null: the forward was executed as usual,
    std::string reason{};                            // for that reason
  };

  // Executes a forward. `run` is it; `use` says of which wiring and layout. Throws ValueError if it
  // cannot be recorded and has to be, and what `run` throws.
  ForwardResult forward(ForwardCall call, const Forward& run, Use& use, History& history);
  // Executes its backward. `begins_early`: the hooks in it begin something with the batch's
  // gradients (GradientPath::begins_early()), which is not to be recorded.
  void backward(const Use& use, const Incoming& incoming, bool begins_early);

  // Forgets all that is recorded.
  void clear();
  // From any thread.
  GraphReport report() const;

 private:
  // Sets what there is, or the reason why there is nothing.
  void find_or_record(const ForwardCall& call, const Forward& run, const GivenInputs& given,
                      Use& use);
  // Forgets recordings that are not used any more. False: there is no room for another one.
  bool make_room();
  std::shared_ptr<Recording> record(ForwardCall call, const Forward& run, const GivenInputs& given,
                                    const Use& use) const;
  ForwardResult replay_forward(const Use& use, const std::vector<at::Tensor>& inputs);
  // False: the caller has to execute the backward.
  bool replay_backward(Recording& forward, const Incoming& incoming, Kind& kind);
  // Records no more of the kind. Throws ValueError if all has to be recorded.
  void refuse(Kind& kind, std::string_view action, std::string_view reason) const;
  void count(const std::string& reason);
  void update_report();

  Stage& stage_;
  const GraphSetup& setup_;
  const MakeDeviceGraph* const make_;  // null: there is a refusal
  const std::string refusal_;
  std::map<std::string, Kind> kinds_;
  std::int64_t uses_ = 0;  // forwards so far
  mutable std::mutex mutex_;
  GraphReport report_;
};

}  // namespace pd2
