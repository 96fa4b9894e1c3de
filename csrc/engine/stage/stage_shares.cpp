// What each replica has of a stage whose replicas share out masters and optimizer state.
#include "core/check.h"
#include "engine/stage/stage.h"
#include "engine/weights/split_master.h"

#include <algorithm>
#include <utility>

namespace pd2 {

void Stage::share(bool shares, const std::vector<bool>& may_cut, bool norms,
                  const std::function<bool()>& is_stopped) {
  if (!replicas_ || (!shares && !is_shared())) {
    return;
  }
  if (shares && is_shared()) {  // perhaps in another way
    share(false, {}, false, is_stopped);
  }
  PD2_ASSERT(!host_ || !shares, "the host steps whole buffers");
  std::vector<at::Tensor> wholes(masters_.size());
  for (std::size_t buffer = 0; buffer < masters_.size(); ++buffer) {
    if (masters_[buffer].defined()) {
      wholes[buffer] = shares ? masters_[buffer] : whole_buffer(buffer);
    }
  }
  if (!shares) {
    replicas_->gather(nullptr, wholes, is_stopped);
  }
  std::vector<ReplicaSum::Range> wanted;
  const auto want = [&](std::size_t parameter, bool is_for_all) {
    const ParameterView& view = view_of(parameter);
    wanted.push_back(
        {places_[parameter].buffer, view.offset, view.offset + view.numel, is_for_all});
  };
  std::vector<bool> is_tied(places_.size(), false);
  for (const Tie& tie : ties_) {  // whose sum each replica makes of its own stages' gradients
    for (const std::size_t parameter : tie.parameters) {
      is_tied[parameter] = true;
      want(parameter, /*is_for_all=*/true);
    }
  }
  MayCut cuts(packings_.size());
  for (std::size_t i = 0; i < places_.size() && shares; ++i) {  // in the packing's order
    cuts[places_[i].buffer].push_back(may_cut.at(i));
    if (may_cut[i] && norms && !is_tied[i]) {
      want(i, /*is_for_all=*/false);
    }
  }
  optimizers_.clear();
  stepped_.clear();
  replicas_->share(shares, shares ? cuts : MayCut{}, wanted);
  owned_.assign(shares ? places_.size() : 0, {});
  for (const Share& share : replicas_->shares()) {
    for (std::size_t i = 0; i < owned_.size(); ++i) {
      if (places_[i].buffer != share.dtype || places_[i].index < share.first ||
          places_[i].index >= share.last) {
        continue;
      }
      const ParameterView& view = view_of(i);
      const std::int64_t begin = std::max(share.begin - view.offset, std::int64_t{0});
      const std::int64_t end = std::min(share.end - view.offset, view.numel);
      owned_[i].by.push_back({share.rank, begin, end - begin});
      if (share.rank == replicas_->rank()) {
        owned_[i].is_mine = true;
        owned_[i].mine = owned_[i].by.back();
      }
    }
  }
  for (std::size_t buffer = 0; buffer < masters_.size(); ++buffer) {
    const at::Tensor& whole = wholes[buffer];
    if (!whole.defined() || !shares) {
      masters_[buffer] = whole;
      continue;
    }
    std::int64_t numel = 0;
    for (const Share& share : shares_of(buffer)) {
      numel += share.end - share.begin;
    }
    masters_[buffer] = zeros_on_huge_pages(numel, whole.options());
    for (const Share& share : shares_of(buffer)) {
      const std::int64_t length = share.end - share.begin;
      range_of_masters(buffer, share.begin, length).copy_(whole.narrow(0, share.begin, length));
    }
  }
}

std::vector<Share> Stage::shares_of(std::size_t buffer) const {
  if (!is_shared()) {
    const FlatPacking& packing = *packings_[buffer];
    return {{buffer, 0, 0, packing.views().size(), 0, packing.numel()}};
  }
  std::vector<Share> mine;
  for (const Share& share : replicas_->shares()) {
    if (share.dtype == buffer && share.rank == replicas_->rank()) {
      mine.push_back(share);
    }
  }
  return mine;
}

at::Tensor Stage::range_of_masters(std::size_t buffer, std::int64_t begin,
                                   std::int64_t numel) const {
  if (!masters_[buffer].defined()) {
    return {};
  }
  const std::vector<Share> mine = shares_of(buffer);
  const auto share = std::ranges::find_if(
      mine, [&](const Share& each) { return each.begin <= begin && begin + numel <= each.end; });
  PD2_ASSERT(share != mine.end(), "elements from ", begin, " on are another replica's");
  std::int64_t before = 0;  // shares lie one after the other
  for (auto each = mine.begin(); each != share; ++each) {
    before += each->end - each->begin;
  }
  return masters_[buffer].narrow(0, before + begin - share->begin, numel);
}

Stage::Elements Stage::elements(std::size_t parameter) const {
  return owned_.empty() ? Elements{0, 0, view_of(parameter).numel} : owned_.at(parameter).mine;
}

std::vector<Stage::Elements> Stage::owners(std::size_t parameter) const {
  return owned_.empty() ? std::vector{elements(parameter)} : owned_.at(parameter).by;
}

at::Tensor Stage::kept_master(std::size_t parameter) const {
  const Place& place = places_.at(parameter);
  if (!masters_[place.buffer].defined() || !owns(parameter)) {
    return {};
  }
  const ParameterView& view = view_of(parameter);
  const auto [rank, begin, numel] = elements(parameter);
  const at::Tensor kept = range_of_masters(place.buffer, view.offset + begin, numel);
  return is_whole(parameter) ? kept.as_strided(view.sizes, view.strides) : kept;
}

at::Tensor Stage::mine(std::size_t parameter, const at::Tensor& whole) const {
  const auto [rank, begin, numel] = elements(parameter);
  return whole.as_strided({numel}, {1}, whole.storage_offset() + begin);
}

at::Tensor Stage::whole_buffer(std::size_t buffer) const {
  const at::Tensor whole = packings_[buffer]->allocate(masters_[buffer].scalar_type());
  for (const Share& share : shares_of(buffer)) {
    const std::int64_t length = share.end - share.begin;
    whole.narrow(0, share.begin, length).copy_(range_of_masters(buffer, share.begin, length));
  }
  return whole;
}

std::vector<at::Tensor> Stage::whole_masters(const std::function<bool()>& is_stopped) {
  const int newest = versions_.slot(versions_.newest());
  std::vector<at::Tensor> wholes(masters_.size()), masters(places_.size());
  for (std::size_t buffer = 0; buffer < masters_.size() && is_shared(); ++buffer) {
    if (masters_[buffer].defined()) {
      wholes[buffer] = whole_buffer(buffer);
    }
  }
  if (is_shared()) {
    replicas_->settle(is_stopped);
    replicas_->gather(nullptr, wholes, is_stopped);
  }
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (!is_shared() && hides_master(i)) {
      masters[i] = master(newest, i);
    } else if (is_shared() && wholes[place.buffer].defined()) {
      const at::Tensor kept = packings_[place.buffer]->view(wholes[place.buffer], place.index);
      masters[i] = has_split_master(i) ? join_master(weight(newest, i), kept) : kept;
    }
  }
  return masters;
}

void Stage::exchange_shares(const std::function<bool()>& is_stopped) {
  const auto sum = std::exchange(update_.sum, nullptr);
  if (sum && update_.is_stepped) {
    replicas_->gather(sum.get(), slots_[update_.to], is_stopped);
  } else if (sum) {  // anything will do
    std::vector<at::Tensor> gradients;
    for (std::size_t buffer = 0; buffer < packings_.size(); ++buffer) {
      const at::ScalarType dtype = packings_[buffer]->dtype();
      const at::Tensor bytes = gradients_[buffer]->gradients(update_.gradients).view(at::kByte);
      const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
      gradients.push_back(bytes.narrow(0, 0, packings_[buffer]->numel() * size).view(dtype));
    }
    replicas_->gather(sum.get(), gradients, is_stopped);
  }
}

}  // namespace pd2
