"""A checkpoint is damaged in many ways, and what verifies, loads and resumes must notice each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipedream2bw as pd2
from pipedream2bw.checkpoint.commit import CORRUPT, steps_in
from pipedream2bw.checkpoint.folder import INDEX, MANIFEST, Folder
from pipedream2bw.checkpoint.source import damage_of
from pipedream2bw.errors import DamagedCheckpoint
from pipedream2bw.runtime.local_stages import LocalStage
from tests.runs.saved import saved

OLDER, NEWEST = 2, 4
WIDTHS = {"momentum": 64, "split masters": 6}
"""Of the layers, by kind. The first one's files of tensors have several blocks of 4 KiB."""
KINDS = tuple(WIDTHS)


def make_pipe(kind: str, seed: int) -> tuple[pd2.PipelineModule, pd2.PipelineOptimizer]:
    """Two stages with dropout and buffers: momentum in float32, or Adam with split masters."""
    torch.manual_seed(seed)
    width = WIDTHS[kind]
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1)]
    halves = {"precision": "bf16", "split_master": True} if kind == "split masters" else {}
    pipe = pd2.PipelineModule(
        nn.Sequential(*layers),
        _loss,
        num_stages=2,
        num_microbatches=2,
        example_args=(torch.zeros(2, width),),
        timeout=20.0,
        **halves,
    )
    parameters = list(pipe.parameters())
    if kind == "split masters":
        return pipe, pd2.PipelineOptimizer(torch.optim.AdamW(parameters, lr=0.01))
    return pipe, pd2.PipelineOptimizer(torch.optim.SGD(parameters, lr=0.05, momentum=0.9))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(output.float(), target)


_INDEX = "the index"
"""Of the weights' files. It is for other programs, and made of what the manifest says."""

_NOT_LOADED = "buffers among the weights"
"""Copies of the first replica's for other programs; each replica's own are in the ranks' files."""

_BESIDE = "files beside"


@dataclasses.dataclass
class Counts:
    """What became of damages: how many were made, refused, and made no difference to what is read.

    Attributes:
        not_read: loaded to the same bits, by the bytes where they were.
    """

    made: int = 0
    verified: int = 0
    loaded: int = 0
    resumed: int = 0
    not_read: dict[str, int] = dataclasses.field(default_factory=dict)


class Victim:
    """A run with two checkpoints, of which the newest is damaged again and again.

    Args:
        path: an empty folder.
    """

    def __init__(self, path: Path, kind: str, seed: int = 0) -> None:
        self._log = logging.getLogger("pipedream2bw")
        self._level = self._log.level
        self._log.setLevel(logging.ERROR)  # each resume warns, as it should
        self.path = path
        self.folder = Folder(path)
        self.counts = Counts()
        self._batches = [torch.randn(2, 8, WIDTHS[kind]) for _ in range(2 * NEWEST)]
        pipe, opt = make_pipe(kind, seed)
        self._whole: dict[int, Any] = {}
        with contextlib.closing(pipe):
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 3)
            for batch in range(1, NEWEST + 1):
                self._train(pipe, opt, batch)
                scheduler.step()
                if batch in (OLDER, NEWEST):
                    pd2.save(path, pipe, opt, schedulers=[scheduler]).wait()
                    self._whole[batch] = state_of(pipe, opt, scheduler)
        self.place, self._older = saved(path, NEWEST), saved(path, OLDER)
        self.files = sorted(each.name for each in self.place.iterdir())
        self.pipe, self.opt = make_pipe(kind, seed + 1)
        self._scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 3)
        self._ckpt = pd2.Checkpointer(
            path, self.pipe, self.opt, schedulers=[self._scheduler], every=1000, preempt=()
        )
        # The run that is loaded into is one under way, which has state that could be touched.
        for batch in range(1, 4):
            self._train(self.pipe, self.opt, batch)
            self._scheduler.step()
        assert list(damage_of(self.folder, self.place.name, sums=True)) == []
        self.check_resume(NEWEST)

        self._buffers = {name for name, _ in self.pipe.named_buffers()}

    def _train(self, pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, batch: int) -> None:
        x, y = self._batches[batch]
        pipe.train_step(x, target=y)
        opt.step()

    def close(self) -> None:
        self._ckpt.close()
        self.pipe.close()
        self._log.setLevel(self._level)

    def begin_counting(self) -> None:
        self.counts = Counts()

    def state(self) -> dict[str, Any]:
        return state_of(self.pipe, self.opt, self._scheduler)

    # ------------------------------------------------------------------ what has to be noticed

    def check(
        self, file_name: str, what: str, *, load: bool = True, resume: bool = False, quiet: str = ""
    ) -> None:
        """Raises AssertionError if the damage is not refused by the file's name.

        Args:
            load: whether it is also loaded, and resumed from.
            quiet: what is damaged if no load reads it, and so gives the same bits; "" if it must
                be refused.
        """
        self.counts.made += 1
        about = f"{what}, {self.place.name}/{file_name}"
        found = list(damage_of(self.folder, self.place.name, sums=True))
        if not found or not all(f"{self.place.name}/{file_name}" in line for line in found):
            raise AssertionError(f"{about}: verify says {found}")
        self.counts.verified += 1
        if load:
            self.check_load(file_name, about, quiet)
        if resume:
            self.check_resume(NEWEST if quiet == _INDEX else OLDER)

    def check_load(self, file_name: str, about: str, quiet: str = "") -> None:
        before = self.state()
        try:
            pd2.load(self.path, self.pipe, self.opt, step=NEWEST, schedulers=[self._scheduler])
        except DamagedCheckpoint as error:
            if f"{self.place.name}/{file_name}" not in str(error):
                raise AssertionError(f"{about}: refused as {error}") from error
            if differ := differences(self.state(), before):
                raise AssertionError(f"{about}: refused, but it has changed {differ}") from error
            self.counts.loaded += 1
            return
        if not quiet:
            raise AssertionError(f"{about}: loaded")
        if differ := differences(self.state(), self._whole[NEWEST]):
            raise AssertionError(f"{about}: loaded to other bits: {differ}")
        self.counts.not_read[quiet] = self.counts.not_read.get(quiet, 0) + 1

    def check_resume(self, start: int) -> None:
        """The run goes on from that checkpoint, with its bits; a damaged one is put back."""
        found = self._ckpt.resume()
        if found != start:
            raise AssertionError(f"resume() took {found}, it must take {start}")
        if differ := differences(self.state(), self._whole[start]):
            raise AssertionError(f"resume() from {start} has other bits: {differ}")
        (self.place / CORRUPT).unlink(missing_ok=True)
        if start != NEWEST:
            self.counts.resumed += 1

    @contextlib.contextmanager
    def changed(self, file_name: str, data: bytes | None) -> Iterator[None]:
        """The file of the newest checkpoint has these bytes, or is gone, and is then as before."""
        path = self.place / file_name
        before = path.read_bytes()
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        try:
            yield
        finally:
            path.write_bytes(before)

    # ------------------------------------------------------------------ damages

    def flip(self, count: int, draw: random.Random, *, loads: float, resumes: float) -> None:
        """Flips a random bit of all files, so often; each bit is as likely as any other.

        Args:
            loads, resumes: the shares after which the checkpoint is loaded, or resumed from.
        """
        whole = {name: (self.place / name).read_bytes() for name in self.files}
        sizes = [len(whole[name]) for name in self.files]
        for _ in range(count):
            (name,) = draw.choices(self.files, sizes)
            data, bit = bytearray(whole[name]), draw.randrange(8 * len(whole[name]))
            data[bit // 8] ^= 1 << bit % 8
            path = self.place / name
            path.write_bytes(data)
            self.check(
                name,
                f"bit {bit} flipped",
                load=draw.random() < loads,
                resume=draw.random() < resumes,
                quiet=self._not_read(name, whole[name], bytes(data)),
            )
            path.write_bytes(whole[name])

    def _not_read(self, name: str, before: bytes, after: bytes) -> str:
        """What is changed in a file if no load reads it, otherwise an empty string."""
        if name == INDEX:
            return _INDEX
        if not name.endswith(".safetensors") or before[:8] != after[:8]:
            return ""
        end = 8 + int.from_bytes(before[:8], "little")
        header = json.loads(before[8:end])
        if before[8:end] == after[8:end]:
            changed = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
            offsets = {key: entry["data_offsets"] for key, entry in header.items() if key[0] != "_"}
            (tensor,) = (k for k, (a, b) in offsets.items() if a <= changed - end < b)
            is_copy = name.startswith("model-") and tensor in self._buffers
            return _NOT_LOADED if is_copy else ""
        return ""

    def cut(self, every: int) -> None:
        """Cuts each file at all multiples, and by a byte."""
        for name in self.files:
            data = (self.place / name).read_bytes()
            for size in {*range(0, len(data), every), len(data) - 1}:
                with self.changed(name, data[:size]):
                    self.check(name, f"cut at {size}", resume=True, quiet=_INDEX * (name == INDEX))

    def lose_and_replace(self) -> None:
        """Each file is missing, a folder, empty of sense, or the older checkpoint's."""
        for name in self.files:
            quiet = _INDEX * (name == INDEX)
            other = (self._older / name).read_bytes()
            for what, data in (("random", random.Random(0).randbytes(500)), ("other", other)):
                if data != (self.place / name).read_bytes():
                    with self.changed(name, data):
                        self.check(name, f"{what} bytes", resume=True, quiet=quiet)
            with self.changed(name, None):
                if name == MANIFEST:  # without which it is no checkpoint
                    assert steps_in(self.folder) == [OLDER]
                    self.check_resume(OLDER)
                else:
                    self.check(name, "missing", resume=True, quiet=quiet)
                (self.place / name).mkdir()
                self.check(name, "a folder", resume=True, quiet=quiet)
                (self.place / name).rmdir()

    def lie_about_headers(self) -> None:
        """Headers of tensors' files are as long as no file is."""
        for name in self.files:
            if name.endswith(".safetensors"):
                data = (self.place / name).read_bytes()
                for length in (2**63, 2**63 - 1, 2**64 - 1, 10**8 + 1, len(data) - 7):
                    with self.changed(name, length.to_bytes(8, "little") + data[8:]):
                        self.check(name, f"a header of {length} bytes", resume=True)

    def lie_about_sums(self) -> None:
        """A manifest that is whole gives other sums of a file, or of a tensor."""
        text = (self.place / MANIFEST).read_bytes()
        document = json.loads(text)
        for name, of_file in document["files"].items():
            for tensor in (None, *of_file["tensors"]):
                changed = json.loads(text)
                del changed["sum"]
                where = changed["files"][name]
                if tensor is None:
                    where["header_sum"] ^= 1
                else:
                    where["tensors"][tensor] ^= 1
                rest = json.dumps(changed)[1:].encode()
                with self.changed(MANIFEST, b'{"sum": "%08x",' % zlib.crc32(rest) + rest):
                    is_copy = name.startswith("model-") and tensor in self._buffers
                    quiet = _NOT_LOADED if is_copy else ""
                    self.check(
                        name, f"another sum of {tensor or 'its header'}", resume=True, quiet=quiet
                    )

    def add_foreign_files(self) -> None:
        """What does not belong to a checkpoint makes no difference, and stays."""
        others = [
            (self.place / "config.json", b"{}"),
            (self.place / "model-00009-of-00009.safetensors", b"foreign"),
            (self.place / "part-00000.json", b"{"),
            (self.path / "step-00000009", None),
            (self.path / "step-00000010-a", b"a file"),
            (self.path / "step-9", None),
            (self.path / "notes.txt", b"notes"),
            (self.path / "step-00000008.corrupt", None),
        ]
        for path, data in others:
            path.mkdir() if data is None else path.write_bytes(data)
        assert list(damage_of(self.folder, self.place.name, sums=True)) == []
        self.check_resume(NEWEST)
        for path, data in others:
            path.rmdir() if data is None else path.unlink()
            self.counts.made += 1
            self.counts.not_read[_BESIDE] = self.counts.not_read.get(_BESIDE, 0) + 1


def state_of(
    pipe: pd2.PipelineModule, opt: pd2.PipelineOptimizer, scheduler: Any
) -> dict[str, Any]:
    """All that a load changes, as JSON-like values and copied tensors."""
    pipe.flush()
    opt.state_dict()  # which fetches the moments
    weights = {f"weight {name}": value for name, value in pipe.state_dict().items()}
    older = {
        f"older weight {name}": value
        for stage in pipe.session.stages
        for name, value in _weights_of_next_batch(pipe, stage).items()
    }
    buffers = {f"buffer {name}": value for name, value in pipe.named_buffers()}
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    moments = {
        f"{key} {names[id(parameter)]}": value
        for parameter, state in opt.state.items()
        for key, value in state.items()
    }
    session = pipe.session
    generators = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": repr(numpy.random.get_state()),
    }
    numbers = {
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups],
        "scheduler": dict(scheduler.state_dict()),
        "seed": pipe.random_seed,
        "updates": session.accumulation.num_updates,
        "train_steps": session.num_train_steps,
    }
    everything = weights | older | buffers | moments | generators | numbers
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in everything.items()
    }


def _weights_of_next_batch(pipe: pd2.PipelineModule, stage: LocalStage) -> dict[str, torch.Tensor]:
    """W(t-1) of a stage, which batch t reads."""
    engine, batch = stage.weights.engine, pipe.session.accumulation.num_updates
    slot = engine.slot_of(stage.executor.version_of_batch(stage.index, batch))
    return {name: engine.weight(slot, i) for i, name in enumerate(stage.weights.trainable)}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what differs in a bit."""
    found = sorted(set(one) ^ set(other))
    for name in set(one).intersection(other):
        a, b = one[name], other[name]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            same = a.dtype == b.dtype and torch.equal(a, b)
        else:
            same = a == b
        found += [] if same else [name]
    return found
