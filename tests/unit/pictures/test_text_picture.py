"""The text picture, read back from its characters."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipedream2bw as pd2
from pipedream2bw import Event
from tests.samples.schedule_sizes import V_SHAPED

SHAPES = [
    ("2bw", 4, 1),
    ("2bw_eager", 7, 1),
    ("2bw_split", 4, 1),
    ("interleaved_2bw", 4, 2),
    ("pipedream", 1, 1),
    ("1f1b", 3, 1),
    ("gpipe", 11, 1),
    ("interleaved", 4, 2),
    ("looped_bfs", 3, 2),
    ("zero_bubble", 5, 1),
    ("zero_bubble_2p", 5, 1),
    ("interleaved_zero_bubble", 4, 2),
    ("2bw_v_half", 4, 2),
    ("v_min", 4, 2),
]
FILL = {"F": "-", "B": "=", "I": "~", "W": "+", "R": "^"}


def rows_of(picture: str) -> dict[str, str]:
    """Name and columns of each row."""
    lines = [line.split("|") for line in picture.splitlines() if "|" in line]
    return {name.strip(): columns for name, columns in lines}


def words_of(row: str) -> list[str]:
    """The actions that a row shows, in order."""
    return re.findall(r"[FBIWfbiw]\d*|U+|u+", row)


def word(event: Event, number: int) -> str:
    kind = event.kind if event.batch % 2 == 0 else event.kind.lower()
    return kind if event.kind == "U" else f"{kind}{number}"


@pytest.mark.parametrize(("schedule", "num_microbatches", "stages_per_rank"), SHAPES)
@pytest.mark.parametrize("update", [0.0, 0.3])
def test_every_action_is_shown_in_order_on_its_row_when_the_width_is_enough(
    schedule: str, num_microbatches: int, stages_per_rank: int, update: float
) -> None:
    events = pd2.simulate(
        schedule,
        num_stages=4,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        update=update,
        num_batches=3,
    ).events
    picture = pd2.draw_text(events, width=2000)
    rows = rows_of(picture)
    ranks = 4 // stages_per_rank
    in_v = [rank if rank < ranks else 2 * ranks - 1 - rank for rank in range(4)]
    placement = in_v if schedule in V_SHAPED else [stage % ranks for stage in range(4)]
    names = [
        f"stage {stage}" if stages_per_rank == 1 else f"rank {rank} stage {stage}"
        for rank in range(ranks)
        for stage in range(4)
        if placement[stage] == rank
    ]
    assert list(rows) == names
    for stage, row in enumerate(sorted(rows, key=lambda name: int(name.split()[-1]))):
        actions = [event for event in events if event.stage == stage]
        expected = [
            word(event, event.batch if num_microbatches == 1 else event.microbatch)
            for event in actions
        ]
        assert [w[0] if w[0] in "uU" else w for w in words_of(rows[row])] == expected
    assert "too short" not in picture


def test_the_picture_of_a_small_run() -> None:
    events = pd2.simulate("2bw", num_stages=2, num_microbatches=2, num_batches=2).events
    assert pd2.draw_text(events, width=45).splitlines() == [
        "stage 0 |F0F1....B0==f0B1=Uf1b0==..b1==u",
        "stage 1 |..F0B0==F1B1=Uf0b0==f1b1==u....",
        "F forward, B backward, U update, number:",
        "microbatch, small letters: every second",
        "batch, . idle, a column: 500 ms",
    ]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("FBIWR"), st.integers(1, 5)), min_size=1),
    st.floats(1e-5, 1e3),
    st.floats(-1e4, 1e4),
)
def test_lengths_are_multiples_of_the_durations(
    steps: list[tuple[int, str, int]], second: float, origin: float
) -> None:
    steps = [(0, "F", 1), *steps]
    events, runs, at = [], [], 0
    for number, (gap, kind, length) in enumerate(steps):
        runs.append((gap, kind, length, number))
        times = (origin + (at + gap) * second, origin + (at + gap + length) * second)
        events.append(Event(0, 0, kind, 0, number, 0, *times))
        at += gap + length
    row = rows_of(pd2.draw_text(events, width=9 + 1 + at * 5))["stage 0"]
    assert len(row) == 1 + at * 5
    expected = ""
    for gap, kind, length, number in runs:
        expected += "." * (5 * gap) + f"{kind}{number}".ljust(5 * length, FILL[kind])
    assert row == expected + "."


@given(st.integers(20, 150), st.lists(st.floats(0, 1), min_size=1, max_size=80))
def test_no_line_is_longer_than_the_width(width: int, durations: list[float]) -> None:
    events, at = [], 3.0
    for i, duration in enumerate(durations):
        events.append(Event(i % 2, 0, "FBU"[i % 3], i // 6, i % 6, 0, at, at + duration))
        at += duration / 2
    picture = pd2.draw_text(events, width=width)
    assert max(map(len, picture.splitlines())) <= width
    assert set(words_of("".join(rows_of(picture).values())))  # something is to be seen


def test_actions_shorter_than_a_column_are_shown_where_they_hide_nothing_and_counted() -> None:
    long = Event(0, 0, "F", 0, 0, 0, 0.0, 50.0)
    alone = Event(0, 0, "B", 0, 0, 0, 70.0, 70.001)
    crowd = [Event(0, 0, "F", 1, i, 0, 90 + i * 1e-3, 90 + (i + 1) * 1e-3) for i in range(20)]
    end = Event(0, 0, "F", 2, 3, 0, 95.0, 100.0)
    picture = " ".join(pd2.draw_text([long, alone, *crowd, end], width=9 + 101).split())
    row = "F0".ljust(50, "-") + "." * 20 + "B" + "." * 19 + "f" + "." * 4 + "F3---."
    assert f"stage 0 |{row} " in picture
    assert "actions too short to be seen: 19" in picture


def test_an_update_is_shown_even_if_it_hides_a_number() -> None:
    steps = [("F", 0, 1.0), ("B", 0, 1.0), ("U", 0, 0.0), ("F", 1, 1.0), ("B", 1, 2.0)]
    events, at = [], 0.0
    for kind, batch, duration in steps:
        events.append(Event(0, 0, kind, batch, 7 * (kind == "B"), 0, at, at + duration))
        at += duration
    assert rows_of(pd2.draw_text(events, width=9 + 5 * 2 + 1)) == {"stage 0": "F0BUf0b7==."}


def test_a_number_is_whole_or_left_out() -> None:
    events = [Event(0, 0, "F", 0, 90 + i, 0, float(i), i + 1.0) for i in range(20)]
    row = rows_of(pd2.draw_text(events, width=9 + 41))["stage 0"]
    assert row == "F-" * 20 + "."


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_2bw", "looped_bfs"])
def test_a_stage_is_blank_where_its_rank_does_anothers_work_and_dotted_where_it_idles(
    schedule: str,
) -> None:
    run = pd2.simulate(
        schedule, num_stages=6, num_microbatches=8, stages_per_rank=3, update=1, num_batches=2
    )
    per_second = 3
    picture = pd2.draw_text(run.events, width=16 + 2 + int(run.makespan * per_second) + 1)
    assert "blank: the rank's other stages" in " ".join(picture.split())
    rows = rows_of(picture)
    columns = len(next(iter(rows.values())))
    for stage in range(6):
        row = rows[f"rank {stage % 2} stage {stage}"]
        for column in range(columns):
            middle = (column + 0.5) / per_second
            busy = {
                event.stage
                for event in run.events
                if event.rank == stage % 2 and event.start <= middle < event.end
            }
            if row[column] in " .":
                assert (row[column] == " ") == bool(busy - {stage})


def test_a_column_is_told_in_the_unit_of_the_times() -> None:
    events = pd2.simulate("2bw", num_stages=2, num_microbatches=2, num_batches=2).events
    picture = pd2.draw_text(events, width=45, unit="forwards")
    assert "a column: 0.5 forwards" in " ".join(picture.split())


def test_replicas_have_rows_of_their_own() -> None:
    events = pd2.simulate("1f1b", num_stages=2, num_microbatches=2, num_batches=1).events
    both = events + [dataclasses.replace(event, replica=1) for event in events]
    rows = rows_of(pd2.draw_text(both, width=100))
    assert list(rows) == [f"replica {r} stage {s}" for r in range(2) for s in range(2)]
    assert rows["replica 0 stage 1"] == rows["replica 1 stage 1"]


def test_the_width_is_the_terminals_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    events = pd2.simulate("2bw", num_stages=4, num_microbatches=8).events
    for columns in (60, 90):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert pd2.draw_text(events) == pd2.draw_text(events, width=columns)


def test_instants_alone_are_drawn() -> None:
    rows = rows_of(pd2.draw_text([Event(0, 0, "U", 0, 0, 1, 5.0, 5.0)], width=60))
    assert rows == {"stage 0": "U"}


def test_no_events_and_too_little_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"events: 0, .* at least 1"):
        pd2.draw_text([])
    with pytest.raises(ValueError, match=r"width: 12, .*: 9 characters: .* at least 19"):
        pd2.draw_text([Event(0, 0, "F", 0, 0, 0, 0.0, 1.0)], width=12)
