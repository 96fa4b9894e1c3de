"""PipelineTrainer with a process for each stage of each replica, against the stock Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("PIPEDREAM2BW_REQUIRE_ALL") != "1":
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")

from tests.runs.launch import run_ranks
from tests.runs.trainers import (
    assert_same_delayed_log,
    assert_same_log,
    assert_same_state,
    delayed,
    log_of,
    piped,
    state_of,
    stock,
)
from tests.samples.trainer_tasks import TASKS

pytestmark = pytest.mark.slow
IMPORTED = ("tests.runs.trainers",)  # importing transformers takes a processor four seconds
EACH_EPOCH: dict[str, Any] = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "optim": "sgd",  # Adam blows up the rounding of gradients that are truly zero
    "learning_rate": 0.1,
}


def by_stock(rank: int, world: int, task: str, folder: str, arguments: Any) -> Any:
    torch.set_num_threads(1)
    trainer = stock(TASKS[task], folder, **arguments)
    trainer.train()
    return log_of(trainer), state_of(trainer)


def by_pipeline(
    rank: int,
    world: int,
    task: str,
    folder: str,
    arguments: Any,
    pipeline: Any,
    resume: str | None = None,
) -> Any:
    torch.set_num_threads(1)
    trainer = piped(TASKS[task], folder, pipeline, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return log_of(trainer), state_of(trainer)


def check(
    task: str, folder: Path, world: int, pipeline: dict[str, Any], *, width: int = 1, **others: Any
) -> None:
    """Trains on so many processes, and as many replicas by DistributedDataParallel."""
    arguments = {**EACH_EPOCH, **others}
    if width == 1:
        want = by_stock(0, 1, task, str(folder / "stock"), arguments)
    else:
        given = [task, str(folder / "stock"), arguments]
        want = run_ranks(by_stock, width, args=given, rendezvous="environment", imported=IMPORTED)[
            0
        ].value
    given = [task, str(folder / "piped"), arguments, pipeline]
    results = run_ranks(
        by_pipeline, world, args=given, rendezvous="environment", imported=IMPORTED, timeout=150
    )
    logs = [result.value[0] for result in results]
    assert all(log == logs[0] for log in logs[1:]), logs
    assert_same_log(logs[0], want[0])
    assert_same_state(results[0].value[1], want[1], within=2e-6)


@pytest.mark.exhaustive  # two replicas of them do
@pytest.mark.parametrize("task", ["llama", "lora"])
def test_two_processes_train_as_the_stock_trainer(task: str, tmp_path: Path) -> None:
    check(task, tmp_path, 2, {"num_stages": 2, "schedule": "1f1b"})


@pytest.mark.exhaustive
def test_four_processes_train_as_the_stock_trainer(tmp_path: Path) -> None:
    check("gpt2", tmp_path, 4, {"num_stages": 4, "schedule": "1f1b"})


def test_two_replicas_train_as_the_stock_trainer_on_two_processes(tmp_path: Path) -> None:
    check("llama", tmp_path, 4, {"num_stages": 2, "schedule": "1f1b"}, width=2)


def test_two_processes_train_with_a_delay_and_go_on_with_the_same_bits(tmp_path: Path) -> None:
    trainer = delayed(TASKS["vit"], tmp_path / "oracle", **EACH_EPOCH)
    trainer.train()
    given: list[Any] = ["vit", str(tmp_path / "piped"), EACH_EPOCH, {"num_stages": 2}]
    first, *_ = run_ranks(
        by_pipeline, 2, args=given, rendezvous="environment", imported=IMPORTED, timeout=150
    )
    log, state = first.value
    assert_same_delayed_log(log, log_of(trainer))
    assert_same_state(state, state_of(trainer), within=2e-6)
    given = [*given, str(tmp_path / "piped" / "checkpoint-3")]
    results = run_ranks(
        by_pipeline, 2, args=given, rendezvous="environment", imported=IMPORTED, timeout=150
    )
    for result in results:
        resumed = result.value[0]
        assert resumed[:4] == log[:4]  # three steps and an evaluation
        assert {**resumed[4], "grad_norm": log[4]["grad_norm"]} == log[4]
        assert resumed[5:-1] == log[5:-1]
    for name, value in state.items():
        assert torch.equal(value, results[0].value[1][name]), name


def refuse(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    with pytest.raises(ValueError, match=r"processes: 2, num_stages: 3.* 3 processes are needed"):
        piped(TASKS["vit"], folder, {"num_stages": 3})
    trainer = piped(TASKS["llama"], folder, {"num_stages": 2}, max_steps=1)
    good = [row["labels"] for row in trainer.train_dataset]

    def fails_with(labels: list[torch.Tensor]) -> None:
        for row, its in zip(trainer.train_dataset, labels, strict=True):
            row["labels"] = its
        with pytest.raises(ValueError, match="microbatch 0: labels of shape"):
            trainer.train()

    fails_with([labels[:3] for labels in good])  # already in the example
    trainer.evaluate()  # makes the pipeline of good ones
    fails_with([labels[:3] for labels in good] if rank == 1 else good)


def test_what_cannot_be_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(
        refuse, 2, args=[str(tmp_path)], rendezvous="environment", imported=IMPORTED, timeout=90
    )


def fails_where_logits_are(rank: int, world: int, folder: str) -> str:
    torch.set_num_threads(1)
    trainer = piped(TASKS["vit"], folder, {"num_stages": 2}, max_steps=1)

    def fail(logits: Any, labels: Any) -> Any:
        raise KeyError("on purpose")

    trainer.preprocess_logits_for_metrics = fail
    trainer.compute_metrics = lambda prediction: {}
    try:
        trainer.evaluate()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_fails_on_the_last_rank_is_raised_on_all(tmp_path: Path) -> None:
    results = run_ranks(
        fails_where_logits_are,
        2,
        args=[str(tmp_path)],
        rendezvous="environment",
        imported=IMPORTED,
        timeout=60,
    )
    assert [result.value for result in results] == [
        "RuntimeError: rank 1: KeyError: 'on purpose'",
        "KeyError: 'on purpose'",
    ]
