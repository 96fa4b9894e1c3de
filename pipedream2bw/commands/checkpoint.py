"""``pipedream2bw checkpoint``: what is in checkpoints, whether it is whole, and other formats."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from ..checkpoint.commit import checkpoints
from ..checkpoint.folder import MANIFEST, Folder, step_of
from ..checkpoint.other_formats import EXPORT_FORMATS, export, import_weights
from ..checkpoint.source import Source, damage_of, num_parameters
from ..table import table
from ..units import format_bytes
from .output import Report, print_json


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

    def action(
        name: str, run: Callable[..., Any], help: str, step: str | None, *, has_json: bool = True
    ) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=help)
        parser.add_argument("path", metavar="PATH", help="the folder of the checkpoints")
        if step is not None:
            parser.add_argument("--step", type=int, metavar="N", help=step)
        if has_json:
            parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=run)
        return parser

    action("ls", _ls, "a table of the checkpoints", None)
    damage = "read every byte and name what is damaged; then the exit code is 1"
    action("verify", _verify, damage, f"{which}all")
    action("show", _show, "what a checkpoint says, and its tensors", f"{which}the newest")
    others = "write a checkpoint's weights in another format"
    to_others = action("export", _export, others, f"{which}the newest", has_json=False)
    to_others.add_argument(
        "--to",
        required=True,
        choices=EXPORT_FORMATS,
        help="hf: a Hugging Face folder of safetensors; torch: one file of torch.save; dcp: a "
        "folder of torch.distributed.checkpoint, with moments",
    )
    to_others.add_argument("out", metavar="OUT", help="a new folder or file")

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


def _newest(given: argparse.Namespace) -> Source:
    folder = Folder(given.path)
    return Source(folder, checkpoints(folder, given.step)[0])


class Listing(Report):
    """A folder's checkpoints."""

    def __str__(self) -> str:
        found = self["checkpoints"]
        rows = [
            (
                str(each["step"]),
                "damaged" if each["damage"] else "whole",
                each["written"] or "-",
                "-" if each["bytes"] is None else format_bytes(each["bytes"]),
                *(("-",) * 3 if each["damage"] else _named(each)),
                each["folder"],
            )
            for each in found
        ]
        columns = ("step", "files", "written", "size", "schedule", "stages", "width", "folder")
        counted = "1 checkpoint" if len(found) == 1 else f"{len(found)} checkpoints"
        listed = table(f"{self['path']}: {counted}", columns, rows)
        return "\n".join([listed, *(line for each in found for line in each["damage"])])


def listing(path: str) -> Listing:
    """The checkpoints in a folder: sizes are checked, not every byte."""
    folder = Folder(path)
    found = [_listed(folder, name) for name in reversed(checkpoints(folder))]
    return Listing(path=path, checkpoints=found)


def _ls(given: argparse.Namespace) -> None:
    listing(given.path).show(as_json=given.json)


def _named(listed: dict[str, Any]) -> tuple[str, str, str]:
    if listed["schedule"] is None:
        return "imported", "-", "-"
    return listed["schedule"], str(listed["stages"]), str(listed["width"])


def _listed(folder: Folder, name: str) -> dict[str, Any]:
    """What ``ls`` says of a checkpoint."""
    damage = list(damage_of(folder, name, sums=False))
    listed: dict[str, Any] = {
        "step": step_of(name),
        "folder": name,
        **dict.fromkeys(("written", "bytes", "parameters", "schedule", "stages", "width")),
        "damage": damage,
    }
    with contextlib.suppress(NotImplementedError):  # the place does not say
        time = folder.written(name, MANIFEST).astimezone()
        listed["written"] = f"{time:%Y-%m-%d %H:%M:%S}"
    if not damage:
        source = Source(folder, name)
        settings = source.manifest.settings
        listed |= {"bytes": source.manifest.nbytes, "parameters": num_parameters(source)}
        if settings is not None:
            listed |= {
                "schedule": settings.schedule,
                "stages": settings.num_stages,
                "width": settings.width,
            }
    return listed


def _verify(given: argparse.Namespace) -> int:
    folder = Folder(given.path)
    verified = []
    for name in checkpoints(folder, given.step):
        damage = []
        for line in damage_of(folder, name, sums=True):
            damage.append(line)
            if not given.json:  # as it is found: reading every byte may take long
                print(line)
        manifest = None if damage else Source(folder, name).manifest
        files = None if manifest is None else len(manifest.files)
        nbytes = None if manifest is None else manifest.nbytes
        found = {"step": step_of(name), "folder": name, "files": files, "bytes": nbytes}
        verified.append({**found, "damage": damage})
        if manifest is not None and not given.json:
            size = format_bytes(manifest.nbytes)
            print(f"{name}: whole, {files} files of tensors, {size}")
    if given.json:
        print_json({"path": given.path, "checkpoints": verified})
    return int(any(each["damage"] for each in verified))


def _show(given: argparse.Namespace) -> None:
    source = _newest(given)
    manifest = source.manifest
    settings = manifest.settings
    optimizers = (manifest.optimizer or {}).get("optimizers", ())
    tensors = [
        (name, str(entry.dtype).removeprefix("torch."), list(entry.shape), file_name)
        for file_name, saved in manifest.files.items()
        for name in saved.tensors
        for entry in [source.header(file_name)[name]]
    ]
    if given.json:
        print_json(
            {
                "name": source.name,
                "batch": manifest.batch,
                "train_steps": manifest.train_steps,
                "settings": None if settings is None else dataclasses.asdict(settings),
                "random_seed": manifest.random_seed,
                "trainable": list(manifest.trainable),
                "optimizers": [
                    {"kind": each["kind"], "groups": each["groups"]} for each in optimizers
                ],
                "tied": dict(manifest.tied),
                "bytes": manifest.nbytes,
                "tensors": [
                    dict(zip(("name", "dtype", "shape", "file"), each, strict=True))
                    for each in tensors
                ],
            }
        )
        return
    print(f"{source.name}: {manifest.batch} optimizer steps, {manifest.train_steps} train_steps")
    if settings is None:
        print("imported weights, without a run")
    else:
        print(
            f"schedule {settings.schedule}, {settings.num_stages} stages on {settings.num_ranks} "
            f"ranks, width {settings.width}, {settings.num_microbatches} microbatches, "
            f"precision {settings.precision}, torch {settings.torch}"
        )
        print(f"random seed: {manifest.random_seed}, trained parameters: {len(manifest.trainable)}")
    for optimizer in optimizers:
        for group in optimizer["groups"]:
            options = ", ".join(f"{key}={_plain(value)}" for key, value in group.items())
            print(f"{optimizer['kind']}: {options}")
    for name, first in manifest.tied.items():
        print(f"{name} is {first}")
    rows = [(name, dtype, str(shape), file) for name, dtype, shape, file in tensors]
    title = f"{len(rows)} tensors, {format_bytes(manifest.nbytes)}"
    print(table(title, ("name", "dtype", "shape", "file"), rows))


def _plain(value: Any) -> Any:
    """An option without the manifest's word for a tuple."""
    return tuple(value["$tuple"]) if isinstance(value, dict) and "$tuple" in value else value


def _export(given: argparse.Namespace) -> None:
    source = _newest(given)
    export(source, given.to, given.out)
    print(f"{given.out}: the weights of {source.name}")


def _import(given: argparse.Namespace) -> None:
    name = import_weights(given.weights, given.out, prefix=given.prefix)
    print(f"{given.out}: {name}")
