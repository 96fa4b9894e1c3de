// Whether a schedule is legal, and if not, where it goes wrong.

#pragma once

#include "core/schedule/schedule.h"

namespace pd2 {

// Runs the schedule on paper (a long run, then runs of one, two, ... batches, each drained) and
// throws ScheduleError for the first broken rule (Deadlock for the last one). The text states the
// rule, what was expected and what was found, then shows the grid, ranks as rows, with the
// offending cell marked: >2B0<.
//
// Rules:
//  1. sizes: one rank per stage in placement, one num_versions per stage, every rank has lists;
//     one pipeline, or two with the copies of a stage on two ranks and of one delay;
//  2. an action's stage exists and lives on the rank that runs it;
//  3. microbatch numbers: 0 <= n < m in the prologue, -m d <= n < m in steady and epilogue;
//  4. each stage does F, B (or I and W) once per microbatch and U once per batch; a drain leaves
//     nothing behind;
//  5. B and I come after the microbatch's F on the same stage, W after its I;
//  6. on each stage forwards, and backwards, are in microbatch order: gradients add up, buffers
//     (BatchNorm) change and messages travel in that order;
//  7. U comes after its batch's last B (W) and before the first of the next batch: there is one
//     gradient buffer;
//  8. batch t's forwards read version max(t - delay, 0): its U is done by then, and from the
//     oldest version read by a microbatch in flight (or to come) to the newest there are never
//     more than num_versions, which holds just if num_versions > delay;
//  9. no deadlock with sends that don't block: F waits for F of the stage before in its pipeline,
//     B and I for B or I of the stage after, and U until the stage's copy in the other pipeline has
//     come to its own: their gradients are added up.
void validate(const Schedule& schedule);

// Rules 1 to 3 alone, which make it safe to run the lists.
void check_form(const Schedule& schedule);

}  // namespace pd2
