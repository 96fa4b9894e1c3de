// How ranks of a group exchange pieces of flat tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

namespace pd2 {

// Works that have begun, to be waited for. Every rank of the group begins the same ones, in one
// order.
using Exchange = std::vector<c10::intrusive_ptr<c10d::Work>>;

// Gives every other rank what `from` has for it, and takes what comes from it to its place in `to`;
// all ranks do so at once, each with another one than the others. By rank; this one's are not read.
Exchange swap_pieces(c10d::ProcessGroup& group, const std::vector<at::Tensor>& from,
                     const std::vector<at::Tensor>& to);

// Gives all others this rank's piece, and takes theirs. By rank; of any sizes, as all know.
Exchange give_pieces(c10d::ProcessGroup& group, const std::vector<at::Tensor>& pieces);

// The same of pieces of one size that lie one after the other in `all`, as one collective: `mine`
// is in its place there.
Exchange gather_in_place(c10d::ProcessGroup& group, const at::Tensor& all, const at::Tensor& mine);

// Takes a tensor from one rank to its place on another; the others only take part.
Exchange give_one(c10d::ProcessGroup& group, int from, int to, const at::Tensor& tensor);

Exchange broadcast_from(c10d::ProcessGroup& group, int rank, const at::Tensor& tensor);

}  // namespace pd2
