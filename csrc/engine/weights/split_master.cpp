#include "engine/weights/split_master.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

namespace pd2 {

at::Tensor join_master(const at::Tensor& high, const at::Tensor& remainder) {
  const at::Tensor bits = high.view(at::kShort).to(at::kInt).bitwise_left_shift(16);
  return bits.add_(remainder).view(at::kFloat);
}

void split_master(const at::Tensor& master, const at::Tensor& high, const at::Tensor& remainder) {
  const at::Tensor given = master.contiguous().view(at::kInt);
  const at::Tensor bits =
      at::where(master.isnan(), at::full_like(given, std::int32_t{0x7FC00000}), given);
  // To int16 means the lower half, with its sign.
  remainder.copy_(bits.to(at::kShort));
  high.view(at::kShort).copy_(bits.add(0x8000).bitwise_right_shift(16).to(at::kShort));
}

}  // namespace pd2
