#include "engine/update/device_work.h"

#include "engine/streams.h"

#include <gtest/gtest.h>

#include <optional>

namespace pd2 {
namespace {

// What the engine asks in turn while it waits for a device to come to rest.
void note(DeviceWork& work) {
  work.is_done();
  work.confirm(work.num_done());
}

TEST(DeviceWork, IsDoneOnceTheUpdateIs) {
  const StageStreams streams(c10::Device(c10::kCPU));
  DeviceWork work(streams);
  EXPECT_TRUE(work.is_done());
  work.begin_update();
  EXPECT_FALSE(work.is_done());
  work.end_update(std::nullopt);
  EXPECT_TRUE(work.is_done());
  work.begin_update();
  work.drop_update();
  EXPECT_TRUE(work.is_done());
}

TEST(DeviceWork, IsSpoiltIfAnUpdateWasNotConfirmedWhenItWasCutOff) {
  const StageStreams streams(c10::Device(c10::kCPU));
  DeviceWork done(streams);
  done.begin_update();
  done.end_update(std::nullopt);
  note(done);
  done.cut_off();
  EXPECT_FALSE(done.is_spoilt());
  done.begin_update();
  done.drop_update();  // as the pipeline has failed
  EXPECT_FALSE(done.is_spoilt());

  DeviceWork under_way(streams);
  under_way.begin_update();
  note(under_way);
  under_way.cut_off();
  EXPECT_TRUE(under_way.is_spoilt());

  DeviceWork late(streams);  // done after the last confirmation: of what, nobody knows
  late.begin_update();
  note(late);
  late.end_update(std::nullopt);
  late.is_done();
  late.cut_off();
  EXPECT_TRUE(late.is_spoilt());
}

}  // namespace
}  // namespace pd2
