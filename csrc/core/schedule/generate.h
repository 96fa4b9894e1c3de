// Schedules by name.

#pragma once

#include "core/schedule/schedule.h"

#include <string_view>

namespace pd2 {

// d stages of the model, p = d / v ranks with v stages each (stage s on rank s mod p), m
// microbatches a batch:
//
//   name             m             method
//   2bw              m >= d        PipeDream-2BW (arXiv 2006.09503, section 3.1)
//   2bw_fresh        m >= d        2bw of which the first few forwards alone are late: those that
//                                  an update of one slot needs, see late_forwards()
//   2bw_eager        m >= 2d - 1   with twice the microbatches in flight, so that messages that
//                                  take up to half a stage's F + B hide behind the work
//   2bw_split        m >= d        with I before W (2BP, arXiv 2405.18047), so that messages of up
//                                  to half of W hide at no microbatch more in flight
//   interleaved_2bw  v m > (v + 1) p - 2, p divides m    interleaved without the flush
//   2bw_v, 2bw_v_two_thirds, 2bw_v_half, 2bw_v_min    v = 2, see v_shape.h: 2bw with stages r and
//                                  2 p - 1 - r on rank r and activations for about p, 2 p / 3,
//                                  p / 2 and p / 3 microbatches on all of them
//   pipedream        m = 1         weight stashing (arXiv 1806.03377): stage i is d - 1 - i late
//   1f1b             m >= 1        PipeDream-Flush (arXiv 2006.09503, section 3.2)
//   gpipe            m >= 1        arXiv 1811.06965
//   interleaved      p divides m   1f1b over v chunks a rank (arXiv 2104.04473, section 2.2)
//   looped_bfs       m >= 1        gpipe over v chunks a rank (arXiv 2211.05953)
//   zero_bubble      m >= 1        ZB-H1 (arXiv 2401.10241): W late, 1f1b's memory
//   zero_bubble_2p   m >= 1        ZB-H2: twice 1f1b's memory
//   interleaved_zero_bubble  p divides m    zero_bubble over v chunks a rank
//   zero_bubble_v, v_half, v_min    v = 2: the flushed forms of 2bw_v, 2bw_v_half and 2bw_v_min
//   chimera          m, d even     two pipelines in opposite directions (arXiv 2107.06925, section
//                                  3.1), units of d microbatches concatenated (section 3.5)
//   chimera_doubled  m, d even     with forward doubling (section 3.5): no bubbles between units
//                                  where B = 2 F, twice the activations. Backward halving is the
//                                  same grid with microbatches of half the size
//
// m is the batch's, of which chimera's pipelines take half each; d is the model's, of which chimera
// has two copies (see Schedule). The paper has m a multiple of d, or m < d; with what is between,
// the last unit is not full.
//
// The first five: delay 1, two weight versions. pipedream: delay d - 1 - i, d - i versions. The
// others: delay 0, one version. Only the interleaved ones and looped_bfs take v > 1.
//
// Throws ValueError for an unknown name and for numbers that the method's rule forbids.
Schedule make_schedule(std::string_view name, int num_stages, int num_microbatches,
                       int stages_per_rank = 1);

}  // namespace pd2
