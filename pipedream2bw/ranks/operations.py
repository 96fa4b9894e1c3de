"""The operations that all ranks begin together, and what a rank tells of each."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Operation(enum.IntEnum):
    """The operations that all ranks begin together."""

    train_step = 1
    flush = 2
    evaluation = 3
    close = 4
    state_dict = 5
    full_state_dict = 6
    load_state_dict = 7
    optimizer_state_dict = 8
    optimizer_load_state_dict = 9
    end_of_timeline = 10
    gather_events = 11
    new_optimizer = 12
    save = 13
    load = 14
    end_of_drain = 15
    new_mesh = 16
    read_loss = 17
    register_comm_hook = 18
    measure_skew = 19
    use_folder = 20
    wait_for_saves = 21
    evaluation_of_loss = 22


class Announcement(NamedTuple):
    """What a rank tells of a train_step or an evaluation; -1: it does not know.

    Other operations have rows of their own; one that tells nothing has this one as it is.
    """

    argument_rows: int = -1
    target_rows: int = -1
    shapes: int = -1  # their hash
    training: int = -1  # the module's mode, 0 or 1
    ends_batch: int = -1  # whether an optimizer step follows, 0 or 1
    normalizer: int = -1  # of the replica's losses, in the batch
    is_list: int = -1  # whether the microbatches are ready-made, 0 or 1
    saves: int = 0  # whether the run is to be saved after the batch, 0 or 1
    stop_signal: int = 0  # the signal for which the run is to be saved and ended; 0: none
    model: int = 0  # what tells changes of the model from others; 0: none
    target: int = -1  # a number that tells its values from others


class Answer(NamedTuple):
    """What a rank tells by yes or no, 1 or 0."""

    is_yes: int


ROW_LENGTH = 4 + len(Announcement._fields)
"""Numbers in a row: what every row begins with (``ControlPlane.agree``), and the longest tuple."""
