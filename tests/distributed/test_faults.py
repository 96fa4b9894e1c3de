"""Under processes: whatever ends one rank ends all, soon, with the first cause on every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.optimizer import optimizer
from tests.exhaustive import exhaustive
from tests.runs.launch import RankResult, run_ranks
from tests.runs.transports import GLOO, OF_TWO_RANKS, SHARED_MEMORY, TWO_MACHINES, over

X = torch.arange(24.0).reshape(6, 4).sin()
Y = torch.arange(24.0).reshape(6, 4).cos()
SOON = 20.0
"""Seconds until every rank has ended its pipeline; far less than the pipeline's timeout of 300."""


class Failing(nn.Linear):
    """Does ``fail`` in one forward: microbatch 1 of ``batch``."""

    def __init__(self, fail: Callable[[torch.Tensor], torch.Tensor], batch: int) -> None:
        super().__init__(4, 4)
        self.fail, self.call = fail, 3 * batch + 1
        self.calls = [0]  # shared with the pipeline's copies of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if threading.current_thread() is threading.main_thread():
            return x  # the capture
        self.calls[0] += 1
        return self.fail(x) if self.calls[0] == self.call + 1 else x


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        raise ZeroDivisionError("on purpose")


def raise_error(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("on purpose")


def make_nan(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan")


def kill(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def vanish(x: torch.Tensor) -> torch.Tensor:
    os._exit(7)


def sleep(x: torch.Tensor) -> torch.Tensor:
    time.sleep(3)
    return x


def hang(x: torch.Tensor) -> torch.Tensor:
    time.sleep(6)
    return x


class Fault:
    """One pipeline that trains until ``fail`` ends it, on ``stage`` of ``replica``."""

    def __init__(
        self,
        rank: int,
        num_stages: int,
        width: int,
        fail: Callable[[torch.Tensor], torch.Tensor],
        stage: int,
        batch: int = 2,
        replica: int = 0,
        target: torch.Tensor = Y,
        before: Callable[[], Any] = lambda: None,
        pause: float = 0.0,
        timeout: float = 300.0,
    ) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(num_stages)]
        fails_here = rank == replica * num_stages + stage
        layers[stage] = Failing(fail if fails_here else lambda x: x, batch)
        self.pipe = pd2.PipelineModule(
            layers,
            mse_loss,
            num_microbatches=3,
            width=width,
            example_args=(X[:1],),
            timeout=timeout,
        )
        self.target = target
        self.before = before
        self.pause = pause

    def outcome(self) -> dict[str, Any]:
        """What this rank's caller sees."""
        start = time.monotonic()
        seen: dict[str, Any] = {"kind": "", "text": "", "again": "", "cause": ""}
        try:
            self.before()
            self.train()
        except BaseException as error:
            seen["kind"], seen["text"] = type(error).__name__, str(error)
            seen["cause"] = type(error.__cause__).__name__
            seen["shown"] = "".join(traceback.format_exception(error))
            seen["data"] = dict(vars(error))
        seen["seconds"] = time.monotonic() - start
        try:
            self.pipe.flush()
        except RuntimeError as error:
            seen["again"] = str(error)
            seen["again as before"] = type(error).__name__, dict(vars(error))
            seen["again shown"] = "".join(traceback.format_exception(error))
        self.pipe.close()
        return seen

    def train(self) -> None:
        optimizer = pd2.PipelineOptimizer(torch.optim.SGD(self.pipe.parameters(), lr=0.1))
        for _ in range(8):
            self.loss = self.pipe.train_step(X, target=self.target)
            optimizer.step()
            time.sleep(self.pause)
        self.pipe.flush()
        float(self.loss)


def interrupt_soon() -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()


# ---------------------------------------------------------------- what the ranks run


def two_stages(rank: int, world: int) -> dict[str, dict[str, Any]]:
    seen = {
        "backward": Fault(rank, 2, 1, RaisesInBackward.apply, stage=0, batch=1).outcome(),
        "target": Fault(rank, 2, 1, make_nan, 0, target=torch.zeros(6, 3)).outcome(),
        "nan": Fault(rank, 2, 1, make_nan, stage=0).outcome(),
        "interrupt all": Fault(rank, 2, 1, sleep, stage=1, before=interrupt_soon).outcome(),
        "interrupt one": Fault(
            rank, 2, 1, sleep, 0, before=interrupt_soon if rank == 1 else lambda: None
        ).outcome(),
    }
    busy = Fault(rank, 2, 1, raise_error, stage=0, batch=0, pause=5.0 if rank == 0 else 0.0)
    return seen | {"busy": busy.outcome()}


def three_stages(rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {
        f"forward {stage}": Fault(rank, 3, 1, raise_error, stage, batch=stage).outcome()
        for stage in range(3)
    }


def two_replicas(rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {
        "forward": Fault(rank, 2, 2, raise_error, stage=1, replica=1).outcome(),
        "backward": Fault(rank, 2, 2, RaisesInBackward.apply, stage=0, replica=0).outcome(),
        "killed": Fault(rank, 2, 2, kill, stage=1, replica=1).outcome(),
    }


def killed_in_the_middle(rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {"killed": Fault(rank, 3, 1, kill, stage=1).outcome()}


def hanging(rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {"hanging": Fault(rank, 3, 1, hang, stage=1, timeout=2.0).outcome()}


def vanished(rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {"vanished": Fault(rank, 2, 1, vanish, stage=0).outcome()}


# ---------------------------------------------------------------- what they must have seen


def assert_cause(seen: dict[str, Any], *words: str, kind: str = "StageError") -> None:
    """The call that failed and the next one raise the same error, with these words, soon."""
    assert seen["kind"] == kind, seen
    assert seen["again as before"] == (kind, seen["data"]), seen
    for word in words:
        assert word in seen["text"], (word, seen)
        assert word in seen["again"], (word, seen)
    assert seen["seconds"] < SOON, seen


def assert_discarded(seen: dict[str, Any], *words: str, first: int) -> None:
    """A call raises an error with these words, soon; the next one works."""
    assert seen["kind"] == "StageError", seen
    assert seen["again"] == "", seen
    for word in words:
        assert word in seen["text"], (word, seen)
    assert seen["data"]["discarded"][0] == first, seen
    assert seen["seconds"] < SOON, seen


@pytest.fixture(scope="module", params=OF_TWO_RANKS)
def of_two_stages(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    results = run_ranks(over, 2, args=(request.param, two_stages), timeout=150)
    return [result.value for result in results]


@pytest.mark.slow
def test_an_error_in_a_backward_is_known_to_all(of_two_stages: list[dict[str, Any]]) -> None:
    for seen in of_two_stages:
        assert_discarded(
            seen["backward"],
            "stage 0, batch 1, microbatch 1, backward: ZeroDivisionError: on purpose",
            first=1,
        )
        assert_data(seen["backward"], stage=0, batch=1, microbatch=1, action="backward")
        assert "in backward" in seen["backward"]["shown"]
    causes = [seen["backward"]["cause"] for seen in of_two_stages]
    assert causes == ["ZeroDivisionError", "RemoteTraceback"]


@pytest.mark.slow
def test_a_target_of_the_wrong_shape_is_known_to_all(of_two_stages: list[dict[str, Any]]) -> None:
    for seen in of_two_stages:
        assert_discarded(
            seen["target"],
            "stage 1, batch 0, microbatch 0, forward: RuntimeError: ",
            "must match the size of tensor b (3)",
            first=0,
        )


@pytest.mark.slow
def test_numbers_that_are_no_numbers_are_no_error(of_two_stages: list[dict[str, Any]]) -> None:
    for seen in of_two_stages:
        assert seen["nan"]["kind"] == "", seen


@pytest.mark.slow
def test_an_interrupt_of_all_ranks_ends_all(of_two_stages: list[dict[str, Any]]) -> None:
    for seen in of_two_stages:
        interrupted = seen["interrupt all"]
        # Whom the other's end reaches first sees that.
        assert interrupted["kind"] in ("KeyboardInterrupt", "StageError"), seen
        assert "KeyboardInterrupt" in interrupted["again"], seen
        assert interrupted["seconds"] < SOON


@pytest.mark.slow
def test_an_interrupt_of_one_rank_ends_all(of_two_stages: list[dict[str, Any]]) -> None:
    other, interrupted = (seen["interrupt one"] for seen in of_two_stages)
    assert interrupted["kind"] == "KeyboardInterrupt", interrupted
    assert_cause(other, "rank 1 (stage 1), batch ", "KeyboardInterrupt")
    told = other["data"]
    assert (told["rank"], told["stage"], told["cause"]) == (1, 1, "KeyboardInterrupt")
    assert told["batch"] is not None
    assert other["cause"] == "RemoteTraceback"


@pytest.mark.slow
def test_a_rank_whose_main_thread_is_busy_tells_its_failure(
    of_two_stages: list[dict[str, Any]],
) -> None:
    seen = of_two_stages[1]["busy"]
    words = "stage 0, batch 0, microbatch 1, forward: ", "ZeroDivisionError"
    assert_discarded(seen, *words, first=0)


@pytest.mark.slow
def test_an_error_in_a_forward_is_known_to_all() -> None:
    values = [result.value for result in run_ranks(three_stages, 3, timeout=150)]
    for stage in range(3):
        for rank, value in enumerate(values):
            seen = value[f"forward {stage}"]
            assert_discarded(
                seen,
                f"stage {stage}, batch {stage}, microbatch 1, forward: ",
                "ZeroDivisionError: on purpose",
                first=stage,
            )
            assert_data(seen, stage=stage, batch=stage, microbatch=1, action="forward")
            assert seen["cause"] == ("ZeroDivisionError" if rank == stage else "RemoteTraceback")
            assert "in raise_error" in seen["shown"]
            assert 'raise ZeroDivisionError("on purpose")' in seen["shown"]


def assert_data(seen: dict[str, Any], *, stage: int, **data: Any) -> None:
    """The error's attributes, of a first replica whose stages are its ranks."""
    want = {"rank": stage, "stage": stage, "replica": 0, "cause": "ZeroDivisionError: on purpose"}
    for name in ("discarded",):
        want[name] = seen["data"][name]
    assert seen["data"] == want | data, seen


def assert_lost(results: list[RankResult], fault: str, rank: int, exit_code: int) -> None:
    for result in results:
        if result.rank == rank:
            assert result.exit_code == exit_code, str(result)
        else:
            assert result.exit_code == 0, str(result)
            seen = result.value[fault]
            assert_cause(seen, "stage ", kind="PeerLost")
            assert seen["data"]["rank"] in (rank, None), seen
            assert seen["data"]["action"] is not None
            assert any(
                place in seen["text"]
                for place in ("forward", "backward", "update", "loss", "train_step")
            ), seen


@pytest.mark.slow
def test_an_error_in_one_replica_discards_the_batch_of_all_and_a_killed_one_ends_all() -> None:
    results = run_ranks(two_replicas, 4, timeout=150, expect_failure=True)
    for result in results[:3]:
        assert_discarded(
            result.value["forward"],
            "stage 1 of replica 1, batch 2, microbatch 1, forward: ",
            "ZeroDivisionError: on purpose",
            first=2,
        )
        failed = result.value["forward"]["data"]
        assert (failed["rank"], failed["stage"], failed["replica"]) == (3, 1, 1)
        assert_discarded(
            result.value["backward"],
            "stage 0 of replica 0, batch 2, microbatch 1, backward: ",
            "ZeroDivisionError: on purpose",
            first=2,
        )
    assert_lost(results, "killed", 3, -signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [SHARED_MEMORY, TWO_MACHINES, *exhaustive(GLOO)])
def test_a_killed_stage_ends_all_others(transport: str) -> None:
    results = run_ranks(
        over, 3, args=(transport, killed_in_the_middle), timeout=150, expect_failure=True
    )
    assert_lost(results, "killed", 1, -signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [SHARED_MEMORY, TWO_MACHINES, *exhaustive(GLOO)])
def test_a_stage_that_hangs_is_a_timeout_of_all(transport: str) -> None:
    for result in run_ranks(over, 3, args=(transport, hanging), timeout=150):
        seen = result.value["hanging"]
        assert_cause(seen, kind="PeerTimeout")
        assert seen["data"]["stage"] is not None, seen
        assert seen["data"]["cause"]


@pytest.mark.slow
def test_a_stage_that_exits_without_a_word_ends_all_others() -> None:
    results = run_ranks(vanished, 2, timeout=150, rendezvous="environment", expect_failure=True)
    assert_lost(results, "vanished", 0, 7)


def leaves_while_an_optimizer_is_made(rank: int, world: int, width: int) -> str:
    """What the other rank gets; it can close the pipeline then. Replicas share their state."""
    x = torch.zeros(2, 4)
    layers = [nn.Linear(4, 4) for _ in range(world // width)]
    options: dict[str, Any] = {"num_microbatches": 2, "example_args": (x[:1],), "width": width}
    pipe = pd2.PipelineModule(layers, mse_loss, **options, timeout=5.0)
    if rank == 1 and width == 1:
        optimizer.let_updates_wait = lambda *_, **__: os._exit(7)
    elif rank == 1:
        pipe.session.grid.join_savers = lambda: os._exit(7)
    with pytest.raises((pd2.errors.PeerLost, pd2.errors.PeerTimeout)) as raised:
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pd2.PipelineOptimizer(sgd, shard_state=width > 1)
    pipe.close()
    return str(raised.value)


@pytest.mark.parametrize("width", [1, 2])
def test_a_rank_that_ends_while_an_optimizer_is_made_ends_the_pipeline(width: int) -> None:
    results = run_ranks(
        leaves_while_an_optimizer_is_made, 2, args=(width,), timeout=60, expect_failure=True
    )
    assert results[1].exit_code == 7
    lost = "rank 1" if width == 1 else "a rank was lost while making a group"
    assert lost in results[0].value
