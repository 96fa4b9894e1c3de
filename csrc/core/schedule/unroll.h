// A schedule's lists, repeated over the batches of one run: what each rank does from an empty
// pipeline to an empty pipeline.

#pragma once

#include "core/schedule/schedule.h"

#include <cstdint>
#include <string>
#include <vector>

namespace pd2 {

enum class ListKind { kPrologue, kSteady, kEpilogue };

const char* to_string(ListKind list);
const std::vector<Action>& actions(const RankActions& rank, ListKind list);

// The place of an action in a schedule's lists.
struct Cell {
  int rank = 0;
  ListKind list = ListKind::kPrologue;
  int index = 0;

  bool operator==(const Cell&) const = default;
};

// An action with its microbatch counted from the start of training: batch t's first is t * m.
struct Step {
  int stage = 0;
  ActionKind kind = ActionKind::kForward;
  std::int64_t microbatch = 0;
  Cell cell;
};

// The batch of a microbatch counted from the start of training.
int batch_of(std::int64_t microbatch, int num_microbatches);

// The same of one that counts as a list's actions do: -1 for the batch before the list's.
int batch_in_list(int microbatch, int num_microbatches);

// For messages: "microbatch 1 of batch 0".
std::string place(std::int64_t microbatch, int num_microbatches);

// For messages, the action as the grid writes it: "0B-1 (steady, microbatch 3 of batch 0)".
std::string describe(const Schedule& schedule, const Step& step);

// How many batches the furthest action is behind the batch that is being run.
int most_batches_behind(const Schedule& schedule);

// The same of its latest forward: a batch's loss comes while so many more are run, or in a drain.
int forward_batches_behind(const Schedule& schedule);

// The rank's stages in the order in which a batch's updates happen.
std::vector<int> update_order(const Schedule& schedule, int rank);

// One rank's steps when batches first_batch .. first_batch + num_batches - 1 run, then a drain.
std::vector<Step> unroll(const Schedule& schedule, int rank, int first_batch, int num_batches);

// The same of every rank.
std::vector<std::vector<Step>> unroll(const Schedule& schedule, int first_batch, int num_batches);

}  // namespace pd2
