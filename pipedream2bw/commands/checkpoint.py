"""``pipedream2bw checkpoint``: what is in checkpoints, whether it is whole, and other formats."""

from __future__ import annotations

import argparse
from typing import Any

from ..checkpoint.exporting import EXPORT_FORMATS, export
from ..checkpoint.folder import Folder, name_of
from ..checkpoint.importing import import_weights
from ..checkpoint.inspecting import damage_of, num_parameters
from ..checkpoint.manifest import read_manifest
from ..checkpoint.source import Source
from ..planning.units import format_bytes
from ..table import table


def add_checkpoint_command(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "checkpoint",
        help="list, verify, show, export and import checkpoints",
        description="Works on the folder of a run's checkpoints. Paths may be URLs that fsspec "
        "knows, such as s3://bucket/run.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    which = "its number; default: "

    ls = actions.add_parser("ls", help="a table of the checkpoints")
    _add_path(ls)
    ls.set_defaults(run=_ls)

    verify = actions.add_parser(
        "verify", help="read every byte and name what is damaged; then the exit code is 1"
    )
    _add_path(verify, f"{which}all")
    verify.set_defaults(run=_verify)

    show = actions.add_parser("show", help="what a checkpoint says, and its tensors")
    _add_path(show, f"{which}the newest")
    show.set_defaults(run=_show)

    to_others = actions.add_parser("export", help="write a checkpoint's weights in another format")
    _add_path(to_others, f"{which}the newest")
    to_others.add_argument(
        "--to",
        required=True,
        choices=EXPORT_FORMATS,
        help="hf: a Hugging Face folder of safetensors; torch: one file of torch.save; dcp: a "
        "folder of torch.distributed.checkpoint, with moments",
    )
    to_others.add_argument("out", metavar="OUT", help="a new folder or file")
    to_others.set_defaults(run=_export)

    of_others = actions.add_parser(
        "import", help="make weights in another format the checkpoint that a new run begins with"
    )
    of_others.add_argument(
        "weights",
        metavar="FROM",
        help="safetensors, a file of torch.save, the index of files of either, a Hugging Face "
        "folder, or a folder of torch.distributed.checkpoint; a path of this machine",
    )
    of_others.add_argument("out", metavar="OUT", help="the folder of the new run's checkpoints")
    of_others.add_argument(
        "--prefix", default="", metavar="TEXT", help="of the wanted names; it is removed"
    )
    of_others.set_defaults(run=_import)


def _add_path(parser: argparse.ArgumentParser, step: str | None = None) -> None:
    parser.add_argument("path", metavar="PATH", help="the folder of the checkpoints")
    if step is not None:
        parser.add_argument("--step", type=int, metavar="N", help=step)


def _steps(given: argparse.Namespace) -> tuple[Folder, list[int]]:
    """The folder, and its checkpoints that are meant, newest first."""
    folder = Folder(given.path)
    steps = folder.steps()
    step = getattr(given, "step", None)
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{given.path}: no checkpoint {step}, there are {known}")
    if not steps:
        raise ValueError(f"{given.path}: 0 checkpoints, there must be 1")
    return folder, steps if step is None else [step]


def _newest(given: argparse.Namespace) -> Source:
    folder, steps = _steps(given)
    return Source(folder, read_manifest(folder, steps[0]))


def _ls(given: argparse.Namespace) -> None:
    folder, steps = _steps(given)
    rows, damage = [], []
    for step in reversed(steps):
        found = list(damage_of(folder, step, sums=False))
        damage += found
        time = folder.written(step)
        when = f"{time:%Y-%m-%d %H:%M:%S}" if time is not None else "-"
        about = ("-",) * 5
        if not found:
            source = Source(folder, read_manifest(folder, step))
            settings = source.manifest.settings
            about = (
                format_bytes(source.manifest.nbytes),
                f"{num_parameters(source):,}",
                settings.schedule if settings else "imported",
                str(settings.num_stages) if settings else "-",
                str(settings.width) if settings else "-",
            )
        rows.append((str(step), when, *about, "damaged" if found else "whole"))
    columns = ("step", "written", "size", "parameters", "schedule", "stages", "width", "sizes")
    print(table(f"{given.path}: {len(steps)} checkpoints", columns, rows))
    print("".join(f"{line}\n" for line in damage), end="")


def _verify(given: argparse.Namespace) -> int:
    folder, steps = _steps(given)
    is_damaged = False
    for step in steps:
        found = False
        for line in damage_of(folder, step, sums=True):
            found = is_damaged = True
            print(line)
        if not found:
            manifest = read_manifest(folder, step)
            size = format_bytes(manifest.nbytes)
            print(f"{name_of(step)}: whole, {len(manifest.files)} files of tensors, {size}")
    return int(is_damaged)


def _show(given: argparse.Namespace) -> None:
    source = _newest(given)
    manifest = source.manifest
    settings = manifest.settings
    print(f"{source.name}: {manifest.batch} optimizer steps, {manifest.train_steps} train_steps")
    if settings is None:
        print("imported weights, without a run")
    else:
        print(
            f"schedule {settings.schedule}, {settings.num_stages} stages on {settings.num_ranks} "
            f"ranks, width {settings.width}, {settings.num_microbatches} microbatches, "
            f"{settings.precision}, torch {settings.torch}"
        )
        print(f"random seed: {manifest.random_seed}, trained parameters: {len(manifest.trainable)}")
    for optimizer in (manifest.optimizer or {}).get("optimizers", ()):
        for group in optimizer["groups"]:
            options = ", ".join(f"{key}={value}" for key, value in group.items())
            print(f"{optimizer['kind']}: {options}")
    for name, first in manifest.tied.items():
        print(f"{name} is {first}")
    rows = []
    for file_name, saved in manifest.files.items():
        for name in saved.tensors:
            entry = source.entry(name, file_name)
            dtype = str(entry.dtype).removeprefix("torch.")
            rows.append((name, dtype, str(list(entry.shape)), file_name))
    title = f"{len(rows)} tensors, {format_bytes(manifest.nbytes)}"
    print(table(title, ("name", "dtype", "shape", "file"), rows))


def _export(given: argparse.Namespace) -> None:
    source = _newest(given)
    export(source, given.to, given.out)
    print(f"{given.out}: the weights of {source.name}")


def _import(given: argparse.Namespace) -> None:
    import_weights(given.weights, given.out, prefix=given.prefix)
    print(f"{given.out}: {name_of(0)}")
