"""The folders ``checkpoint-N`` of a Trainer, with the pipeline's state in each."""

from __future__ import annotations

import os
import shutil

_CHECKPOINT, _STEP = "checkpoint-", "step-"
_WRITTEN_LAST = "trainer_state.json"
_MANIFEST = "checkpoint.json"  # the pipeline's state is whole with it


def newest_whole(folder: str) -> str | None:
    """The newest ``checkpoint-N`` that was saved to its end; None: there is none."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [name.removeprefix(_CHECKPOINT) for name in names if name.startswith(_CHECKPOINT)]
    paths = {
        int(step): os.path.join(folder, _CHECKPOINT + step) for step in steps if step.isdigit()
    }
    whole = [step for step, path in paths.items() if _WRITTEN_LAST in os.listdir(path)]
    return paths[max(whole)] if whole else None


def state_in(checkpoint: str) -> str:
    """The folder of the pipeline's state in a ``checkpoint-N``.

    Raises:
        ValueError: there is none.
    """
    names = sorted(os.listdir(checkpoint)) if os.path.isdir(checkpoint) else []
    states = [os.path.join(checkpoint, name) for name in names if name.startswith(_STEP)]
    found = [state for state in states if os.path.exists(os.path.join(state, _MANIFEST))]
    if not found:
        raise ValueError(
            f"checkpoint: {checkpoint}, it has no folder step-... with a {_MANIFEST}: a run goes "
            "on from what a PipelineTrainer saved without save_only_model; load the weights of "
            "others by from_pretrained()"
        )
    return found[-1]


def remove_other_runs(state: str) -> None:
    """Removes the states that an earlier run has left in a ``checkpoint-N``.

    Args:
        state: the folder of the one that stays.
    """
    checkpoint, mine = os.path.split(state)
    for name in os.listdir(checkpoint):
        if name.startswith(_STEP) and name != mine:
            shutil.rmtree(os.path.join(checkpoint, name))
