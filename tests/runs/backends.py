"""Training in processes whose group was made without saying for which devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import pipedream2bw as pd2

JOINS = ("init_process_group()", "init_device_mesh()")
_M, _WIDTH, _BATCHES = 2, 4, 3


def join(how: str, device_type: str, shape: tuple[int, int]) -> Any:
    """Makes the process group as a user may; gives the mesh of replicas and stages, if any."""
    if how == "init_device_mesh()":
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp", "pp"))
    if how == "init_process_group()":
        dist.init_process_group()
    else:
        dist.init_process_group(how)
    return None


def check_training(device: str, width: int, mesh: Any = None) -> None:
    """Trains on that device in all processes, and compares with torch on the unsplit model.

    Args:
        mesh: None: the processes are told by their numbers.
    """
    world, replica = dist.get_world_size(), dist.get_rank() // (dist.get_world_size() // width)
    depth = world // width
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth)))
    rows = torch.randn(_BATCHES, width, 2 * _M, _WIDTH)
    want = _stock(model, rows, replica)
    pipe = pd2.PipelineModule(
        [layer.to(device) for layer in model],
        mse_loss,
        num_stages=depth,
        num_microbatches=_M,
        schedule="1f1b",
        example_args=(torch.zeros(1, _WIDTH, device=device),),
        **({"width": width} if mesh is None else {"mesh": mesh}),
    )
    with pipe:
        opt = pd2.PipelineOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), max_grad_norm=0.5)
        losses = []
        for batch in rows[:, replica].to(device):
            losses.append(pipe.train_step(batch, target=batch))
            opt.step()
        got = [float(loss) for loss in losses]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)  # replicas add up otherwise
        assert pipe.mesh.mesh.shape == (width, depth)


def _stock(model: nn.Module, rows: torch.Tensor, replica: int) -> list[float]:
    """The losses of one replica's rows, as all rows' mean is minimised."""
    copy = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in model.children()))
    copy.load_state_dict(model.state_dict())
    opt = torch.optim.SGD(copy.parameters(), lr=0.1)
    losses = []
    for of_replicas in rows:
        with torch.no_grad():
            losses.append(float(mse_loss(copy(of_replicas[replica]), of_replicas[replica])))
        batch = of_replicas.flatten(0, 1)
        opt.zero_grad()
        mse_loss(copy(batch), batch).backward()
        nn.utils.clip_grad_norm_(copy.parameters(), 0.5)
        opt.step()
    return losses
