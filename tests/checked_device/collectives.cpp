// The operations of CheckedProcessGroup, made of messages.
#include "checked_device/process_group.h"
#include "checked_device/streams.h"

#include <ATen/ATen.h>

#include <atomic>
#include <utility>

namespace pd2 {
namespace {

using Part = std::function<void(Wire&)>;

std::atomic<bool> eager_sends = false;

// The tensor's memory, in the order it lies there.
at::Tensor memory_of(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), {tensor.numel()},
                       tensor.options().device(at::kCPU));
}

void send(Wire& wire, const at::Tensor& tensor, int peer) {
  wire.begin_send(tensor.const_data_ptr(), tensor.nbytes(), peer);
}

void receive(Wire& wire, const at::Tensor& tensor, int peer) {
  wire.begin_receive(tensor.mutable_data_ptr(), tensor.nbytes(), peer);
}

// In the order of the ranks.
void reduce_into(const at::Tensor& result, const std::vector<at::Tensor>& parts,
                 const c10d::ReduceOp& op) {
  at::Tensor sum = parts.at(0).clone();
  for (std::size_t rank = 1; rank < parts.size(); ++rank) {
    const at::Tensor& part = parts[rank];
    switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        sum.add_(part);
        break;
      case c10d::ReduceOp::PRODUCT:
        sum.mul_(part);
        break;
      case c10d::ReduceOp::MIN:
        sum = at::minimum(sum, part);
        break;
      case c10d::ReduceOp::MAX:
        sum = at::maximum(sum, part);
        break;
      default:
        TORCH_CHECK(false, "checked: no such reduction");
    }
  }
  if (op == c10d::ReduceOp::AVG) sum.div_(static_cast<double>(parts.size()));
  result.copy_(sum);
}

// Of every rank, at the root.
std::vector<at::Tensor> gather(Wire& wire, const at::Tensor& own, int rank, int size) {
  std::vector<at::Tensor> parts;
  for (int from = 0; from < size; ++from) {
    parts.push_back(from == rank ? own : at::empty_like(own));
    if (from != rank) receive(wire, parts.back(), from);
  }
  wire.finish();
  return parts;
}

Part reduction(at::Tensor own, int root, bool to_all, c10d::ReduceOp op, std::pair<int, int> me) {
  return [=](Wire& wire) {
    const auto [rank, size] = me;
    if (rank != root) {
      send(wire, own, root);
      wire.finish();
      if (to_all) receive(wire, own, root);
    } else {
      reduce_into(own, gather(wire, own, rank, size), op);
      for (int to = 0; to_all && to < size; ++to) {
        if (to != root) send(wire, own, to);
      }
    }
    wire.finish();
  };
}

}  // namespace

using WorkPtr = CheckedProcessGroup::WorkPtr;

void CheckedProcessGroup::set_eager_sends(bool eager) { eager_sends = eager; }

WorkPtr CheckedProcessGroup::send(Tensors& tensors, int destination, int) {
  Operation operation{"send to rank " + std::to_string(destination), tensors, {}, {}, destination};
  for (const at::Tensor& tensor : tensors) {
    operation.parts.emplace_back([memory = memory_of(tensor), destination](Wire& wire) {
      if (eager_sends) {
        wire.send_eagerly(memory.const_data_ptr(), memory.nbytes(), destination);
      } else {
        pd2::send(wire, memory, destination);
      }
    });
  }
  return post(std::move(operation));
}

WorkPtr CheckedProcessGroup::recv(Tensors& tensors, int source, int) {
  Operation operation{"receive from rank " + std::to_string(source), {}, tensors, {}, source};
  for (const at::Tensor& tensor : tensors) {
    operation.parts.emplace_back(
        [memory = memory_of(tensor), source](Wire& wire) { receive(wire, memory, source); });
  }
  return post(std::move(operation));
}

WorkPtr CheckedProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  Operation operation{"broadcast", {}, {}, {}};
  (rank_ == root ? operation.reads : operation.writes) = tensors;
  for (const at::Tensor& tensor : tensors) {
    operation.parts.emplace_back([=, this, memory = memory_of(tensor)](Wire& wire) {
      for (int to = 0; rank_ == root && to < size_; ++to) {
        if (to != root) pd2::send(wire, memory, to);
      }
      if (rank_ != root) receive(wire, memory, root);
    });
  }
  return post(std::move(operation));
}

WorkPtr CheckedProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Operation operation{"all-reduce", {}, tensors, {}};
  for (const at::Tensor& tensor : tensors) {
    operation.parts.push_back(
        reduction(memory_of(tensor), 0, true, options.reduceOp, {rank_, size_}));
  }
  return post(std::move(operation));
}

WorkPtr CheckedProcessGroup::allreduce_coalesced(Tensors& tensors,
                                                 const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr CheckedProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const int root = static_cast<int>(options.rootRank);
  Operation operation{"reduce", {}, tensors, {}};
  for (const at::Tensor& tensor : tensors) {
    operation.parts.push_back(
        reduction(memory_of(tensor), root, false, options.reduceOp, {rank_, size_}));
  }
  return post(std::move(operation));
}

WorkPtr CheckedProcessGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions&) {
  TORCH_CHECK(outputs.size() == inputs.size(), "allgather: outputs: ", outputs.size(),
              ", inputs: ", inputs.size());
  Operation operation{"all-gather", inputs, {}, {}};
  for (std::size_t at = 0; at < inputs.size(); ++at) {
    TORCH_CHECK(static_cast<int>(outputs[at].size()) == size_,
                "allgather: outputs: ", outputs[at].size(), ", ranks: ", size_);
    Tensors parts;
    for (const at::Tensor& output : outputs[at]) {
      TORCH_CHECK(output.numel() == inputs[at].numel(),
                  "allgather: elements of an output: ", output.numel(),
                  ", of the input: ", inputs[at].numel());
      operation.writes.push_back(output);
      parts.push_back(memory_of(output));
    }
    operation.parts.emplace_back([=, this, own = memory_of(inputs[at])](Wire& wire) {
      if (parts[rank_].const_data_ptr() != own.const_data_ptr()) parts[rank_].copy_(own);
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        pd2::send(wire, own, peer);
        receive(wire, parts[peer], peer);
      }
    });
  }
  return post(std::move(operation));
}

WorkPtr CheckedProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::AllgatherOptions& options) {
  Tensors inputs = {input};
  std::vector<Tensors> outputs = {output.view({size_, -1}).unbind()};
  return allgather(outputs, inputs, options);
}

WorkPtr CheckedProcessGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  std::vector<Tensors> lists;
  for (const at::Tensor& output : outputs) lists.push_back(output.view({size_, -1}).unbind());
  return allgather(lists, inputs, options);
}

WorkPtr CheckedProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                           std::vector<int64_t>& output_sizes,
                                           std::vector<int64_t>& input_sizes,
                                           const c10d::AllToAllOptions&) {
  Operation operation{"all-to-all", {input}, {output}, {}};
  operation.is_in_pairs = true;
  const Tensors to = memory_of(output).split_with_sizes(output_sizes);
  const Tensors from = memory_of(input).split_with_sizes(input_sizes);
  TORCH_CHECK(static_cast<int>(to.size()) == size_ && static_cast<int>(from.size()) == size_,
              "all-to-all: pieces: ", from.size(), " to ", to.size(), ", ranks: ", size_);
  operation.parts.emplace_back([=, this](Wire& wire) {
    to[rank_].copy_(from[rank_]);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      pd2::send(wire, from[peer], peer);
      receive(wire, to[peer], peer);
    }
  });
  return post(std::move(operation));
}

WorkPtr CheckedProcessGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter: outputs: ", outputs.size(),
              ", inputs: ", inputs.size());
  Operation operation{"reduce-scatter", {}, outputs, {}};
  for (std::size_t at = 0; at < outputs.size(); ++at) {
    TORCH_CHECK(static_cast<int>(inputs[at].size()) == size_,
                "reduce_scatter: inputs: ", inputs[at].size(), ", ranks: ", size_);
    Tensors parts;
    for (const at::Tensor& input : inputs[at]) {
      operation.reads.push_back(input);
      parts.push_back(memory_of(input));
    }
    operation.parts.emplace_back(
        [=, this, op = options.reduceOp, result = memory_of(outputs[at])](Wire& wire) {
          for (int peer = 0; peer < size_; ++peer) {
            if (peer != rank_) pd2::send(wire, parts[peer], peer);
          }
          reduce_into(result, pd2::gather(wire, parts[rank_], rank_, size_), op);
        });
  }
  return post(std::move(operation));
}

WorkPtr CheckedProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::ReduceScatterOptions& options) {
  Tensors outputs = {output};
  std::vector<Tensors> inputs = {input.view({size_, -1}).unbind()};
  return reduce_scatter(outputs, inputs, options);
}

WorkPtr CheckedProcessGroup::barrier(const c10d::BarrierOptions& options) {
  const int device =
      options.device_ids.empty() ? current_device() : static_cast<int>(options.device_ids[0]);
  const auto flag = at::zeros({1}, at::TensorOptions().device(checked_device(device)));
  Operation operation{"barrier", {}, {flag}, {}};
  operation.on_host = true;
  operation.parts.push_back(
      reduction(memory_of(flag), 0, true, c10d::ReduceOp::SUM, {rank_, size_}));
  return post(std::move(operation));
}

}  // namespace pd2
