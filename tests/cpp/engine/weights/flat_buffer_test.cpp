#include "engine/weights/flat_buffer.h"

#include "core/check.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <vector>

namespace pd2 {
namespace {

TEST(FlatPackingTest, EveryParameterBeginsOnACacheLineAndKeepsItsShape) {
  const std::vector<at::Tensor> parameters{at::ones({3, 5}), at::ones({7}), at::ones({16}),
                                           at::ones({})};
  const FlatPacking packing(parameters);
  const at::Tensor flat = packing.allocate(at::kFloat);
  EXPECT_EQ(packing.parameter_numel(), 15 + 7 + 16 + 1);
  EXPECT_EQ(flat.numel(), 16 + 16 + 16 + 16);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor view = packing.view(flat, i);
    EXPECT_EQ(view.sizes(), parameters[i].sizes());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.const_data_ptr()) % 64, 0u);
  }
}

TEST(FlatPackingTest, OnADeviceEveryParameterBeginsWhereItsAllocatorWouldBeginIt) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::TensorOptions on_device = at::TensorOptions(dtype).device(at::kMeta);
    const FlatPacking packing({at::empty({3, 5}, on_device), at::empty({300}, on_device)});
    const auto size = static_cast<std::int64_t>(at::elementSize(dtype));
    EXPECT_EQ(packing.views()[1].offset * size, 512);
    EXPECT_EQ(packing.numel() * size % 512, 0);
    EXPECT_EQ(packing.parameter_numel(), 315);
  }
}

TEST(FlatPackingTest, ViewsShareTheBufferAndDoNotOverlap) {
  const FlatPacking packing({at::ones({3}), at::ones({3})});
  at::Tensor flat = packing.allocate(at::kFloat);
  packing.view(flat, 0).fill_(1);
  packing.view(flat, 1).fill_(2);
  EXPECT_EQ(flat.sum().item<float>(), 9);  // the padding stays zero
  EXPECT_EQ(packing.view(flat, 0).sum().item<float>(), 3);
}

TEST(FlatPackingTest, LargeBuffersBeginAtPlacesOfTheirOwn) {
  const FlatPacking packing({at::ones({3}), at::ones({1 << 20})});
  std::set<std::uintptr_t> places;
  std::vector<at::Tensor> buffers;
  for (int i = 0; i < 8; ++i) {
    const at::Tensor& flat = buffers.emplace_back(packing.allocate(at::kFloat));
    places.insert(reinterpret_cast<std::uintptr_t>(flat.const_data_ptr()) % (256 << 10));
    EXPECT_EQ(*places.begin() % 64, 0u);
    EXPECT_EQ(flat.count_nonzero().item<std::int64_t>(), 0);
    packing.view(flat, 0).fill_(1);
    packing.view(flat, 1).fill_(2);
    EXPECT_EQ(flat.narrow(0, 0, 3).sum().item<float>(), 3);
    EXPECT_EQ(flat.narrow(0, 16, 1 << 20).sum().item<float>(), 2 << 20);
  }
  EXPECT_EQ(places.size(), 8u);
}

TEST(FlatPackingTest, DenseStridesAreKept) {
  const at::Tensor channels_last =
      at::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast);
  const FlatPacking packing({channels_last});
  EXPECT_EQ(packing.view(packing.allocate(at::kFloat), 0).strides(), channels_last.strides());
}

TEST(FlatPackingTest, AnExpandedParameterGetsMemoryForEveryElement) {
  const at::Tensor expanded = at::ones({1}).expand({4, 4});
  const FlatPacking packing({expanded});
  at::Tensor view = packing.view(packing.allocate(at::kFloat), 0);
  view.copy_(at::arange(16).reshape({4, 4}));
  EXPECT_EQ(view.sum().item<float>(), 120);
}

TEST(FlatPackingTest, MixedDtypesAreRefused) {
  EXPECT_THROW(FlatPacking({at::ones({2}), at::ones({2}, at::kDouble)}), ValueError);
}

}  // namespace
}  // namespace pd2
