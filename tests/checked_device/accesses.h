// The last write and the reads since of every byte of an allocation.

#pragma once

#include "checked_device/clock.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace pd2 {

// One operator, copy or transfer on a stream.
struct Launch {
  StreamNumber stream;
  Tick tick;
  std::string name;
  std::string where;  // the stream and the host thread, in words

  bool is_in(const Clock& known) const { return known.at(stream) >= tick; }
  std::string text() const { return "'" + name + "' on " + where; }
};

using LaunchPtr = std::shared_ptr<const Launch>;
using Address = std::uintptr_t;

struct Use {
  Address begin;
  std::size_t bytes;
  bool is_write;
};

// Not thread-safe.
class AccessLog {
 public:
  // An earlier access that the clock does not know to be over and that must not run beside this
  // one; nullptr if there is none.
  LaunchPtr conflict(const Use& use, const Clock& known) const;
  void add(const Use& use, const LaunchPtr& launch);
  // Drops the accesses that are over by this clock.
  void forget(const Clock& over);
  void clear() { parts_.clear(); }

 private:
  struct Part {
    Address end;
    LaunchPtr write;
    std::vector<LaunchPtr> reads;  // since the write, the last one of each stream
  };

  void split(Address at);

  std::map<Address, Part> parts_;  // by begin; they do not overlap
};

}  // namespace pd2
