#include "engine/weights/weight_store.h"

#include "core/check.h"

#include <gtest/gtest.h>

namespace pd2 {
namespace {

TEST(WeightStoreTest, BatchesReadTheVersionOneStepBack) {
  WeightStore store(2);
  EXPECT_EQ(store.version_of_batch(0, 1), 0);
  EXPECT_EQ(store.version_of_batch(1, 1), 0);
  EXPECT_EQ(store.version_of_batch(2, 1), 1);
  EXPECT_EQ(store.version_of_batch(7, 0), 7);
}

TEST(WeightStoreTest, WritingAPinnedVersionThrowsUntilItsLastReaderIsDone) {
  WeightStore store(2);
  store.pin(0);
  store.pin(0);
  EXPECT_EQ(store.slot_to_write(store.newest() + 1), 1);
  store.publish();                                                    // W(1)
  EXPECT_THROW(store.slot_to_write(store.newest() + 1), ValueError);  // W(2) would overwrite W(0)
  store.unpin(0);
  EXPECT_THROW(store.publish(), ValueError);
  store.unpin(0);
  EXPECT_EQ(store.slot_to_write(store.newest() + 1), 0);
  store.publish();
  EXPECT_EQ(store.newest(), 2);
}

TEST(WeightStoreTest, WithOneSlotTheStepIsInPlaceAndOnlyWhenNobodyReads) {
  WeightStore store(1);
  store.pin(0);
  EXPECT_THROW(store.slot_to_write(store.newest() + 1), ValueError);
  store.unpin(0);
  EXPECT_EQ(store.slot_to_write(store.newest() + 1), store.slot(store.newest()));
}

TEST(WeightStoreTest, AVersionThatIsGoneOrNotThereYetCannotBeRead) {
  WeightStore store(2);
  EXPECT_THROW(store.pin(1), ValueError);
  EXPECT_THROW(store.pin(-1), ValueError);
  store.publish();
  store.publish();  // W(0) is overwritten
  EXPECT_THROW(store.pin(0), ValueError);
  store.pin(1);
  store.pin(2);
  EXPECT_THROW(store.unpin(0), ValueError);
}

TEST(WeightStoreTest, UnpinningMoreOftenThanPinningThrows) {
  WeightStore store(2);
  store.pin(0);
  store.unpin(0);
  EXPECT_THROW(store.unpin(0), ValueError);
}

TEST(WeightStoreTest, LoadedVersionsAreReadAsIfTheyHadBeenMade) {
  WeightStore store(3);
  store.load(6, 7);
  EXPECT_EQ(store.newest(), 7);
  EXPECT_EQ(store.version_of_batch(7, 1), 6);
  EXPECT_EQ(store.version_of_batch(7, 2), 6);  // older ones are not there
  EXPECT_THROW(store.pin(5), ValueError);
  store.pin(6);
  EXPECT_THROW(store.load(1, 2), ValueError);
  store.unpin(6);
  store.publish();
  EXPECT_EQ(store.version_of_batch(8, 1), 7);
  store.load(2, 2);
  EXPECT_EQ(store.version_of_batch(2, 1), 2);
  EXPECT_THROW(store.load(3, 2), ValueError);
  EXPECT_THROW(store.load(0, 3), ValueError);
}

TEST(WeightStoreTest, LiveVersionsAreTheNewestAndThePinnedOnes) {
  WeightStore store(2);
  EXPECT_EQ(store.most_live_versions(), 1);
  store.publish();
  EXPECT_EQ(store.most_live_versions(), 1);  // W(0) was dead
  store.pin(1);
  EXPECT_EQ(store.begin_next(), 0);  // W(2) beside the pinned W(1)
  EXPECT_EQ(store.most_live_versions(), 2);
  store.publish();
  store.unpin(1);
  store.begin_next();
  store.publish();
  EXPECT_EQ(store.most_live_versions(), 2);
}

TEST(WeightStoreTest, ResetStartsTheDelayAnew) {
  WeightStore store(2);
  store.publish();
  store.publish();
  store.publish();  // newest W(3), batch 3 would read W(2)
  store.reset();
  EXPECT_EQ(store.version_of_batch(3, 1), 3);
  EXPECT_EQ(store.version_of_batch(4, 1), 3);
  EXPECT_EQ(store.version_of_batch(5, 1), 4);
  store.pin(3);
  EXPECT_THROW(store.reset(), ValueError);
}

TEST(WeightStoreTest, WithASlotMoreTheNextVersionHasItsOwnPlace) {
  WeightStore store(3, 4);
  store.pin(4);
  EXPECT_THROW(store.pin(3), ValueError);  // has not been there
  EXPECT_EQ(store.slot_to_write(5), 2);
  store.publish();
  store.pin(5);
  EXPECT_EQ(store.slot_to_write(6), 0);
  EXPECT_THROW(store.slot_to_write(7), ValueError);  // W(4) is there
  store.unpin(4);
  EXPECT_EQ(store.slot_to_write(7), 1);
}

TEST(WeightStoreTest, AStoreWithoutSlotsIsRefused) { EXPECT_THROW(WeightStore(0), ValueError); }

}  // namespace
}  // namespace pd2
