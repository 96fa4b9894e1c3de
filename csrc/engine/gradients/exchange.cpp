#include "engine/gradients/exchange.h"

#include "engine/channels/coalescing.h"

#include <cstdint>
#include <optional>
#include <utility>

namespace pd2 {
namespace {

using Sizes = std::vector<std::int64_t>;

// Two names of one function, the first of which older releases of torch do not have.
template <typename Group>
c10::intrusive_ptr<c10d::Work> all_to_all(Group& group, at::Tensor to, at::Tensor from,
                                          Sizes to_sizes, Sizes from_sizes) {
  if constexpr (requires { group.all_to_all_single(to, from, to_sizes, from_sizes); }) {
    return group.all_to_all_single(to, from, to_sizes, from_sizes);
  } else {
    return group.alltoall_base(to, from, to_sizes, from_sizes);
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather(Group& group, at::Tensor to, at::Tensor from) {
  if constexpr (requires { group.all_gather_single(to, from); }) {
    return group.all_gather_single(to, from);
  } else {
    return group._allgather_base(to, from);
  }
}

// gloo sends neither int16, which split masters are, nor every release bfloat16.
at::Tensor bytes_of(const at::Tensor& piece) { return piece.view(at::kByte); }

// By `begin`(taker, what it gets, giver, where that goes): with every other rank at another time.
template <typename Begin>
void for_each_pair(c10d::ProcessGroup& group, const std::vector<at::Tensor>& from,
                   const std::vector<at::Tensor>& to, Begin begin) {
  const int rank = group.getRank(), size = group.getSize();
  for (int distance = 1; distance < size; ++distance) {
    const int taker = (rank + distance) % size, giver = (rank + size - distance) % size;
    begin(taker, bytes_of(from[taker]), giver, bytes_of(to[giver]));
  }
}

Exchange swap_at_once(c10d::ProcessGroup& group, const std::vector<at::Tensor>& from,
                      const std::vector<at::Tensor>& to) {
  std::optional<Coalescing> as_one;
  const auto begin = [&](const at::Tensor& piece, auto transfer) {
    std::vector<at::Tensor> one{piece};
    if (piece.numel() > 0) {
      if (!as_one) {
        as_one.emplace(group, piece.device().type());
      }
      transfer(one);
    }
  };
  for_each_pair(group, from, to, [&](int taker, at::Tensor sent, int giver, at::Tensor received) {
    begin(sent, [&](auto& one) { group.send(one, taker, /*tag=*/0); });
    begin(received, [&](auto& one) { group.recv(one, giver, /*tag=*/0); });
  });
  return as_one ? Exchange{as_one->end()} : Exchange{};
}

}  // namespace

// One all-to-all would need what it sends in one tensor, and so copies; pieces stay where they are
// if each is the only one of a transfer.
Exchange swap_pieces(c10d::ProcessGroup& group, const std::vector<at::Tensor>& from,
                     const std::vector<at::Tensor>& to) {
  if (Coalescing::is_possible(group, from.front().device().type())) {
    return swap_at_once(group, from, to);
  }
  const int size = group.getSize();
  Exchange exchange;
  for_each_pair(group, from, to, [&](int taker, at::Tensor sent, int giver, at::Tensor received) {
    Sizes sent_sizes(size, 0), received_sizes(size, 0);
    sent_sizes[taker] = sent.numel();
    received_sizes[giver] = received.numel();
    exchange.push_back(
        all_to_all(group, received, sent, std::move(received_sizes), std::move(sent_sizes)));
  });
  return exchange;
}

Exchange give_pieces(c10d::ProcessGroup& group, const std::vector<at::Tensor>& pieces) {
  return swap_pieces(group, std::vector<at::Tensor>(pieces.size(), pieces[group.getRank()]),
                     pieces);
}

Exchange gather_in_place(c10d::ProcessGroup& group, const at::Tensor& all, const at::Tensor& mine) {
  return {all_gather(group, all, mine)};
}

Exchange give_one(c10d::ProcessGroup& group, int from, int to, const at::Tensor& tensor) {
  const at::Tensor whole = bytes_of(tensor), none = whole.narrow(0, 0, 0);
  const int rank = group.getRank();
  Sizes sent(group.getSize(), 0), received(group.getSize(), 0);
  sent[to] = rank == from ? whole.numel() : 0;
  received[from] = rank == to ? whole.numel() : 0;
  return {all_to_all(group, rank == to ? whole : none, rank == from ? whole : none,
                     std::move(received), std::move(sent))};
}

Exchange broadcast_from(c10d::ProcessGroup& group, int rank, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{bytes_of(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = rank;
  return {group.broadcast(tensors, options)};
}

}  // namespace pd2
