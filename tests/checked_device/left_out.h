// One ordering that a test leaves out, and what it was needed for.

#pragma once

#include "checked_device/accesses.h"
#include "checked_device/clock.h"

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

namespace pd2 {

// What orders work, and can be left out: see Runtime::drop_nth.
// `peer_wait`: for another process.
enum class Ordering { stream_wait, record_stream, host_wait, peer_wait };

// What the work that came after an ordering that was left out says of it:
//   implied   other orderings put all of it after what the missing one would have
//   unneeded  some of it was not put there, but uses no memory beside that, unless both read
//   open      neither: it is a race, which must have been found
enum class Verdict { implied, unneeded, open };

// Judges by clocks and by all uses since drop_nth(), not by what AccessLog keeps of them, so that a
// fault there shows: as an open verdict without an error. Not thread-safe.
class LeftOut {
 public:
  // `given`: all that streams have been given; what of it is not known to be over by then counts as
  // using all memory.
  void drop_nth(Ordering kind, std::uint64_t n, const Clock& given);
  std::uint64_t count(Ordering kind) const;
  // Counts one; true if it must be left out.
  bool leave_out(Ordering kind);
  // nullopt if none was left out.
  std::optional<Verdict> verdict() const { return verdict_; }

  // A wait for `clock` was left out. It counts as the `tick` of its stream, so that all that comes
  // after it, on any stream, can be told; without a stream it is the host's, and all comes after.
  void begin_wait(const Clock& clock, const Clock& known, std::optional<Launch> at);
  // A record_stream; `is_twice`: the memory is kept for the stream without it.
  void begin_record(bool is_twice) { verdict_ = is_twice ? Verdict::implied : Verdict::open; }
  // The block may be used again by work that knows this.
  void end_record(const Use& block, const Clock& known);

  void add(const LaunchPtr& launch, std::span<const Use> uses);
  // Work that knows this uses memory.
  void judge(const Clock& known, std::span<const Use> uses);
  // Of this memory's uses those that are over by the clock, or all.
  void forget(Address begin, Address end, const Clock* over);

 private:
  struct Used {
    LaunchPtr launch;
    Use use;
  };
  static bool conflicts(const Used& before, const Use& use, const Clock& known);

  struct Count {
    std::uint64_t done = 0;
    std::uint64_t dropped = 0;
  };
  std::map<Ordering, Count> counts_;
  std::optional<Verdict> verdict_;
  bool is_noting_ = false;
  Clock given_;             // before its uses were noted
  std::vector<Used> used_;  // of a wait that was left out: what it was for alone
  struct Wait {
    Clock clock;
    std::optional<Launch> at;
  };
  std::optional<Wait> wait_;
};

}  // namespace pd2
