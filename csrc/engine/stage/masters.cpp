#include "engine/stage/masters.h"

#include "core/check.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

#include <algorithm>

namespace pd2 {
namespace {

// Float32 weights in two buffers of 16 bits, as whole tensors: see kernels/half.h. `high` is
// bfloat16, `remainder` int16, both contiguous and of one shape.
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

}  // namespace

Masters::Masters(const StageLayout& layout, const Slots& slots, GradientPath& gradients)
    : layout_(layout), slots_(slots), gradients_(gradients), host_(gradients.host()) {
  for (const auto& [packing, names, of_gradients, master] : layout.buffers()) {
    at::Tensor& flat = flats_.emplace_back();
    if (master && host_) {
      flat = zeros_on_huge_pages(packing.numel(), at::device(at::kCPU).dtype(*master));
    } else if (master) {
      flat = packing.allocate(*master);
    }
  }
}

at::Tensor Masters::newest(int slot, std::size_t parameter) const {
  const auto [buffer, index] = layout_.place(parameter);
  return host_ ? host_->weight(buffer, index) : slots_.weight(slot, parameter);
}

at::Tensor Masters::of(int slot, std::size_t parameter) const {
  if (!flats_[layout_.place(parameter).buffer].defined()) {
    return slots_.weight(slot, parameter);
  }
  if (host_) {
    host_->take_changes(slots_.flat(slot), flats_);
  }
  const at::Tensor kept = this->kept(parameter);
  const at::Tensor newest = this->newest(slot, parameter);
  if (kept.defined() && is_whole(parameter)) {
    return is_split(parameter) ? join_master(newest, kept) : kept;
  }
  const at::Tensor rounded = newest.to(at::kFloat);
  if (kept.defined()) {
    mine(parameter, rounded)
        .copy_(is_split(parameter) ? join_master(mine(parameter, newest), kept) : kept);
  }
  return rounded;
}

void Masters::set(std::size_t parameter, const at::Tensor& value) {
  const at::Tensor weight = newest(slots_.newest(), parameter);
  at::Tensor kept = this->kept(parameter);
  const at::Tensor part = kept.defined() && !is_whole(parameter) ? kept : at::Tensor();
  if (!kept.defined() || part.defined()) {  // another replica's, whose rounding is here
    kept = at::empty_like(weight, flats_[layout_.place(parameter).buffer].options());
  }
  if (is_split(parameter)) {
    split_master(value.to(kept.device()), weight, kept);
  } else {
    kept.copy_(value);
    weight.copy_(kept);
  }
  if (part.defined()) {
    part.copy_(mine(parameter, kept));
  }
  if (host_) {
    slots_.weight(slots_.newest(), parameter).copy_(weight);
  }
}

void Masters::set_weight(std::size_t parameter, const at::Tensor& value) {
  slots_.weight(slots_.newest(), parameter).copy_(value);
  if (host_) {
    newest(slots_.newest(), parameter).copy_(value);
  }
}

bool Masters::is_split(std::size_t parameter) const {
  return layout_.buffers()[layout_.place(parameter).buffer].master == at::kShort;
}

bool Masters::hides(std::size_t parameter) const {
  return flats_[layout_.place(parameter).buffer].defined() &&
         (is_split(parameter) || host_ || gradients_.is_shared());
}

std::vector<at::Tensor> Masters::hidden(const std::function<bool()>& is_stopped) {
  const bool is_shared = gradients_.is_shared();
  std::vector<at::Tensor> wholes(flats_.size()), hidden(layout_.num_parameters());
  for (std::size_t buffer = 0; buffer < flats_.size() && is_shared; ++buffer) {
    if (flats_[buffer].defined()) {
      wholes[buffer] = whole_buffer(buffer);
    }
  }
  if (is_shared) {
    gradients_.replicas()->settle(is_stopped);
    gradients_.replicas()->gather(nullptr, wholes, is_stopped);
  }
  for (std::size_t i = 0; i < hidden.size(); ++i) {
    if (hides(i) && !is_shared) {
      hidden[i] = of(slots_.newest(), i);
    } else if (hides(i)) {
      const at::Tensor kept = layout_.view(wholes, i);
      hidden[i] = is_split(i) ? join_master(slots_.weight(slots_.newest(), i), kept) : kept;
    }
  }
  return hidden;
}

void Masters::share(bool shares, const std::vector<bool>& may_cut, bool norms,
                    const std::function<bool()>& is_stopped) {
  ReplicaSum* replicas = gradients_.replicas();
  if (shares && replicas->is_shared()) {  // perhaps in another way
    share(false, {}, false, is_stopped);
  }
  PD2_ASSERT(!host_ || !shares, "the host steps whole buffers");
  std::vector<at::Tensor> wholes = flats_;
  for (std::size_t buffer = 0; buffer < flats_.size() && !shares; ++buffer) {
    if (flats_[buffer].defined()) {
      wholes[buffer] = whole_buffer(buffer);
    }
  }
  if (!shares) {
    replicas->gather(nullptr, wholes, is_stopped);
  }
  gradients_.share(shares, may_cut, norms);
  owned_.assign(shares ? layout_.num_parameters() : 0, {});
  for (const Share& share : replicas->shares()) {
    for (std::size_t i = 0; i < owned_.size(); ++i) {
      const auto [buffer, index] = layout_.place(i);
      if (buffer != share.dtype || index < share.first || index >= share.last) {
        continue;
      }
      const ParameterView& view = layout_.view(i);
      const std::int64_t begin = std::max(share.begin - view.offset, std::int64_t{0});
      const std::int64_t end = std::min(share.end - view.offset, view.numel);
      owned_[i].by.push_back({share.rank, begin, end - begin});
      if (share.rank == replicas->rank()) {
        owned_[i].is_mine = true;
        owned_[i].mine = owned_[i].by.back();
      }
    }
  }
  for (std::size_t buffer = 0; buffer < flats_.size(); ++buffer) {
    const at::Tensor& whole = wholes[buffer];
    flats_[buffer] = whole;
    if (!whole.defined() || !shares) {
      continue;
    }
    std::int64_t numel = 0;
    for (const Share& share : shares_of(buffer)) {
      numel += share.end - share.begin;
    }
    flats_[buffer] = zeros_on_huge_pages(numel, whole.options());
    for (const Share& share : shares_of(buffer)) {
      const std::int64_t length = share.end - share.begin;
      range(buffer, share.begin, length).copy_(whole.narrow(0, share.begin, length));
    }
  }
}

std::vector<Share> Masters::shares_of(std::size_t buffer) const {
  if (!gradients_.is_shared()) {
    const FlatPacking& packing = layout_.packing(buffer);
    return {{buffer, 0, 0, packing.views().size(), 0, packing.numel()}};
  }
  std::vector<Share> mine;
  for (const Share& share : gradients_.replicas()->shares()) {
    if (share.dtype == buffer && share.rank == gradients_.replicas()->rank()) {
      mine.push_back(share);
    }
  }
  return mine;
}

at::Tensor Masters::range(std::size_t buffer, std::int64_t begin, std::int64_t numel) const {
  if (!flats_[buffer].defined()) {
    return {};
  }
  std::int64_t before = 0;  // shares lie one after the other
  for (const Share& share : shares_of(buffer)) {
    if (share.begin <= begin && begin + numel <= share.end) {
      return flats_[buffer].narrow(0, before + begin - share.begin, numel);
    }
    before += share.end - share.begin;
  }
  PD2_ASSERT(false, "elements from ", begin, " on are another replica's");
  return {};
}

Masters::Elements Masters::elements(std::size_t parameter) const {
  return owned_.empty() ? Elements{0, 0, layout_.view(parameter).numel} : owned_.at(parameter).mine;
}

std::vector<Masters::Elements> Masters::owners(std::size_t parameter) const {
  return owned_.empty() ? std::vector{elements(parameter)} : owned_.at(parameter).by;
}

at::Tensor Masters::kept(std::size_t parameter) const {
  const std::size_t buffer = layout_.place(parameter).buffer;
  if (!flats_[buffer].defined() || !owns(parameter)) {
    return {};
  }
  const ParameterView& view = layout_.view(parameter);
  const auto [rank, begin, numel] = elements(parameter);
  const at::Tensor kept = range(buffer, view.offset + begin, numel);
  return is_whole(parameter) ? kept.as_strided(view.sizes, view.strides) : kept;
}

at::Tensor Masters::mine(std::size_t parameter, const at::Tensor& whole) const {
  const auto [rank, begin, numel] = elements(parameter);
  return whole.as_strided({numel}, {1}, whole.storage_offset() + begin);
}

at::Tensor Masters::whole_buffer(std::size_t buffer) const {
  const at::Tensor whole = layout_.packing(buffer).allocate(flats_[buffer].scalar_type());
  for (const Share& share : shares_of(buffer)) {
    const std::int64_t length = share.end - share.begin;
    whole.narrow(0, share.begin, length).copy_(range(buffer, share.begin, length));
  }
  return whole;
}

}  // namespace pd2
