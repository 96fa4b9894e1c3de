#pragma once

namespace pd2 {

// Tells torch of the devices, their streams, events and generators, and of pinned memory.
void register_hooks();

// How much faster the devices' clock runs than the host's, for times between events: 1 at first.
void set_clock_rate(double rate);

}  // namespace pd2
