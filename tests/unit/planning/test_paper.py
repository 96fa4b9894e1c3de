"""The paper's figures: shapes against torch, bytes against the paper's table, what comes out."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pipedream2bw as pd2
from benchmarks.paper import figures, reproduce, systems, zero_bubble
from benchmarks.paper.devices import P3_16XLARGE, Constants
from benchmarks.paper.shapes import GPT_2_2B, GPT_3_8B, GPT_6_2B, GPT_28_3B, Gpt
from benchmarks.paper.systems import SYSTEMS, Network, Setting

TINY = Gpt("tiny", layers=2, hidden=32, heads=4, sequence=16, vocabulary=64)


class Block(nn.Module):
    """Attention and MLP, as in the paper's models."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.heads = model.heads
        self.norms = nn.ModuleList([nn.LayerNorm(model.hidden) for _ in range(2)])
        self.qkv = nn.Linear(model.hidden, 3 * model.hidden)
        self.out = nn.Linear(model.hidden, model.hidden)
        self.up = nn.Linear(model.hidden, 4 * model.hidden)
        self.down = nn.Linear(4 * model.hidden, model.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(h, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, s, h))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def counted(run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Operations of a forward and of its backward."""
    with FlopCounterMode(display=False) as forward:
        result = run()
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_a_blocks_operations_and_parameters_are_torchs() -> None:
    block = Block(TINY)
    x = torch.randn(3, TINY.sequence, TINY.hidden, requires_grad=True)
    forward, backward = counted(lambda: block(x))
    assert forward == TINY.block_flops(3)
    assert backward == 2 * forward
    assert sum(p.numel() for p in block.parameters()) == TINY.block_parameters


def test_the_heads_operations_are_torchs() -> None:
    head = nn.Linear(TINY.hidden, TINY.vocabulary, bias=False)
    x = torch.randn(3, TINY.sequence, TINY.hidden, requires_grad=True)
    forward, backward = counted(lambda: head(x))
    assert forward == TINY.head_flops(3)
    assert backward == 2 * forward


def test_models_have_as_many_parameters_as_their_names_say() -> None:
    for model in (GPT_2_2B, GPT_3_8B, GPT_6_2B, GPT_28_3B):
        billions = float(model.name.removeprefix("GPT ").removesuffix("B"))
        assert model.parameters == pytest.approx(billions * 1e9, rel=0.03)


def test_the_stages_do_all_of_the_models_operations() -> None:
    setting = Setting(GPT_3_8B, 64, 16, 8, 512)
    ideal = Constants(efficiency=1.0, launch=0.0)
    seconds = itertools.chain(*systems.stage_seconds(setting, P3_16XLARGE, ideal))
    flops = GPT_3_8B.train_flops(setting.rows, recompute=True)
    assert sum(seconds) * P3_16XLARGE.flops == pytest.approx(flops)
    # Shared by 16 devices instead, with sums that take no time.
    network = dataclasses.replace(P3_16XLARGE, between=1e30, inside=1e30, latency=0.0)
    shared = systems.tensor_seconds(setting, Network(network, setting), ideal)
    update = 72 * GPT_3_8B.parameters / 16 / P3_16XLARGE.memory_bandwidth
    microbatch = (shared - update) / setting.microbatches
    assert microbatch * 16 * P3_16XLARGE.flops == pytest.approx(flops)


def table(schedule: str, w: float, a_tot: float, a_in: float, d: int, m: int, again: bool) -> float:
    """PAPER.md's bytes of stage 0: weights and activations."""
    kept = {"2bw": d, "gpipe": m, "1f1b": min(d, m), "pipedream": d}[schedule]
    versions = {"2bw": 2, "gpipe": 1, "1f1b": 1, "pipedream": d}[schedule]
    if again:
        return versions * w / d + a_tot / d + kept * a_in
    return versions * w / d + kept * (a_tot / d + a_in)


@settings(deadline=None, max_examples=60)
@given(
    schedule=st.sampled_from(["2bw", "gpipe", "1f1b", "pipedream"]),
    d=st.integers(1, 6),
    more=st.integers(0, 6),
    w=st.integers(1, 10**6),
    a_tot=st.integers(1, 10**6),
    a_in=st.integers(1, 10**6),
    again=st.booleans(),
)
def test_simulated_bytes_are_the_papers_table(
    schedule: str, d: int, more: int, w: int, a_tot: int, a_in: int, again: bool
) -> None:
    m = 1 if schedule == "pipedream" else d + more if schedule == "2bw" else 1 + more
    simulation = pd2.simulate(
        schedule,
        num_stages=d,
        num_microbatches=m,
        recompute=1.0 if again else 0.0,
        weight_bytes=w / d,
        activation_bytes=a_tot / d + (0 if again else a_in),
        input_bytes=a_in if again else 0,
        num_batches=2 * d + 2,
    )
    expected = table(schedule, w, a_tot, a_in, d, m, again)
    assert simulation.peak_bytes[0] == pytest.approx(expected)


@settings(deadline=None, max_examples=40)
@given(
    system=st.sampled_from(["2bw", "gpipe", "1f1b"]),
    depth=st.integers(2, 6),
    more=st.integers(0, 5),
    rows=st.integers(1, 4),
)
def test_stage_bytes_are_what_the_simulator_counts(
    system: str, depth: int, more: int, rows: int
) -> None:
    model = dataclasses.replace(TINY, layers=2 * depth + 1)
    setting = Setting(model, depth, depth, rows, rows * (depth + more))
    in_flight = [
        pd2.make_schedule(system, depth, depth + more).max_in_flight(i) for i in range(depth)
    ]
    logits = rows * model.sequence * model.vocabulary
    blocks = [model.layers // depth + (i < model.layers % depth) for i in range(depth)]
    inputs = [count * 2 * rows * model.sequence * model.hidden for count in blocks]
    passing = [model.kept_bytes(rows)] * depth
    inputs[-1] += 4 * logits
    passing[-1] = max(passing[-1], 6 * logits)
    parameters = [count * model.block_parameters for count in blocks]
    parameters[0] += model.embedding_parameters
    parameters[-1] += model.vocabulary * model.hidden
    # Weights and gradients in half precision; master (2bw: twice), its gradient, two moments.
    each = 24 if system == "2bw" else 20
    simulation = pd2.simulate(
        system,
        num_stages=depth,
        num_microbatches=depth + more,
        recompute=1.0,
        input_bytes=inputs,
        activation_bytes=passing,
        gradient_bytes=[each * count for count in parameters],
    )
    assert systems.stage_bytes(setting, system, in_flight) == pytest.approx(simulation.peak_bytes)


def test_a_ring_moves_what_the_closed_form_says() -> None:
    network = Network(P3_16XLARGE, Setting(GPT_2_2B, 64, 8, 8, 512))
    latency = 14 * P3_16XLARGE.latency
    inside = network.sum_seconds(8, 1e9, rings=1, crosses=False)
    assert inside == pytest.approx(2 * 7 / 8 * 1e9 / 150e9 + latency)
    between = network.sum_seconds(8, 1e9, rings=8, crosses=True)
    assert between == pytest.approx(2 * 7 / 8 * 8e9 / P3_16XLARGE.between + latency)
    assert network.sum_seconds(1, 1e9, rings=1, crosses=True) == 0


def test_gpipe_flushes_when_the_memory_is_full() -> None:
    setting = Setting(GPT_2_2B, 8, 8, 8, 64)
    assert systems.peak_bytes(setting, "gpipe") > P3_16XLARGE.memory
    most = systems.gpipe_microbatches(setting, P3_16XLARGE.memory)
    assert most == 4
    kept = [most] * 8
    assert max(systems.stage_bytes(setting, "gpipe", kept)) <= P3_16XLARGE.memory
    assert systems.gpipe_microbatches(setting, 1e9) == 0


def test_what_does_not_fit_has_no_throughput() -> None:
    setting = Setting(GPT_3_8B, 8, 8, 8, 64)
    cluster = dataclasses.replace(P3_16XLARGE, memory=8e9)
    for system in SYSTEMS:
        assert systems.sequences_per_second(setting, system, cluster, Constants(0.5, 0)) is None


def test_a_fit_finds_the_constants_that_made_a_row() -> None:
    made_with = Constants(0.43, 0.9e-3)
    bars = figures.THROUGHPUT[0]
    setting = bars.setting(figures.ROWS)
    made = tuple(
        systems.sequences_per_second(setting, system, P3_16XLARGE, made_with) for system in SYSTEMS
    )
    found = reproduce.fit(dataclasses.replace(bars, values=made), P3_16XLARGE)
    assert found.efficiency == pytest.approx(made_with.efficiency, rel=2e-3)
    assert found.launch == pytest.approx(made_with.launch, rel=2e-2)


@pytest.fixture(scope="module")
def constants() -> Constants:
    return reproduce.fit(figures.THROUGHPUT[0], P3_16XLARGE)


def test_every_two_systems_are_in_the_papers_order(constants: Constants) -> None:
    rows = reproduce.throughput_rows(P3_16XLARGE, constants) + reproduce.memory_rows()
    rows += reproduce.zero_bubble_rows(constants)
    assert len(rows) == 6 * 5 + 4 + 2 * 4 + 2
    assert reproduce.wrong_orders(rows) == []


def test_a_wrong_order_is_found() -> None:
    rows = [
        reproduce.Row("t", f"here: {i}", paper, ours)
        for i, paper, ours in ((0, 1.0, 2.0), (1, 2.0, 1.0), (2, 3.0, 3.0))
    ]
    assert reproduce.wrong_orders(rows) == ["t: here: 0 and here: 1"]


def test_the_rows_that_were_not_fitted_are_met(constants: Constants) -> None:
    throughput = reproduce.throughput_rows(P3_16XLARGE, constants)
    assert [row.is_fitted for row in throughput] == [True] * 5 + [False] * 25
    others = (
        reproduce.memory_rows(),
        reproduce.choice_rows(P3_16XLARGE, constants),
        reproduce.largest_rows(P3_16XLARGE),
        reproduce.zero_bubble_rows(constants),
    )
    tested = [row for row in itertools.chain(throughput, *others) if not row.is_fitted]
    assert statistics.median(abs(row.error) for row in tested) <= 0.10
    assert statistics.median(abs(row.error) for row in throughput[5:]) <= 0.10


def test_the_largest_model_fits_and_one_block_more_does_not() -> None:
    depth = 8
    parameters = reproduce.largest_model(depth, P3_16XLARGE)
    layers = (parameters - GPT_28_3B.embedding_parameters) // GPT_28_3B.block_parameters
    for more, fits in ((0, True), (depth, False)):
        model = dataclasses.replace(GPT_28_3B, layers=layers + more)
        assert model.parameters >= parameters
        peak = systems.peak_bytes(Setting(model, 64, depth, 1, 64), "2bw")
        assert (peak <= P3_16XLARGE.memory) is fits


def test_zero_bubbles_stages_have_all_blocks() -> None:
    for stages_per_rank in (1, 4):
        blocks = zero_bubble.blocks_of_stages(stages_per_rank)
        assert sum(blocks) == GPT_6_2B.layers
        assert len(blocks) == 8 * stages_per_rank
