"""A graph of the checked device is replayed at the same addresses; to record it has no effect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.device import checked

DEVICE = torch.device("checked:0")


@pytest.fixture(autouse=True)
def _on_a_stream() -> Iterator[None]:
    stream = torch.Stream(DEVICE)
    with stream:
        yield


def recorded(work: Callable[[], torch.Tensor]) -> tuple[checked.Graph, torch.Tensor]:
    graph = checked.Graph()
    graph.begin()
    result = work()
    graph.end()
    return graph, result


def test_a_replay_does_what_was_recorded_with_what_is_there_now() -> None:
    x, weight = torch.zeros(3, 4, device=DEVICE), torch.randn(4, 2).to(DEVICE)
    graph, y = recorded(lambda: (x.relu() @ weight).softmax(-1))
    for seed in range(3):
        torch.manual_seed(seed)
        new = torch.randn(3, 4)
        x.copy_(new.to(DEVICE))
        graph.replay()
        assert torch.equal(y.cpu(), (new.relu() @ weight.cpu()).softmax(-1))


def test_recording_changes_nothing() -> None:
    x = torch.ones(4, device=DEVICE)
    graph, y = recorded(lambda: x.add_(1) * 3)
    assert x.cpu().tolist() == [1.0] * 4
    assert y.cpu().isnan().all()  # nothing has been computed
    graph.replay()
    assert x.cpu().tolist() == [2.0] * 4
    assert y.cpu().tolist() == [6.0] * 4


def test_an_abandoned_recording_changes_nothing() -> None:
    x = torch.ones(4, device=DEVICE)
    graph = checked.Graph()
    graph.begin()
    x.add_(1)
    graph.abandon()
    graph.replay()
    assert x.cpu().tolist() == [1.0] * 4


def test_a_replay_is_one_launch() -> None:
    x = torch.ones(4, device=DEVICE)
    before = checked.num_launches()
    graph, _ = recorded(lambda: x.exp().sin().cos())
    assert checked.num_launches() == before
    graph.replay()
    assert checked.num_launches() == before + 1


def test_memory_of_a_graph_serves_nobody_else() -> None:
    x = torch.ones(4, device=DEVICE)
    graph, y = recorded(lambda: x.exp().sin())
    others = [torch.zeros(4, device=DEVICE) for _ in range(20)]
    graph.replay()
    assert all(other.cpu().tolist() == [0.0] * 4 for other in others)
    assert torch.equal(y.cpu(), torch.ones(4).exp().sin())
    assert graph.bytes == 2 * 512


def test_a_graph_beside_another_uses_its_results_and_its_free_memory() -> None:
    x = torch.ones(4, device=DEVICE)
    first, y = recorded(lambda: x.exp().sin())
    second = checked.Graph(first)
    second.begin()
    z = y + 1
    second.end()
    assert second.bytes == 0
    first.replay()
    second.replay()
    assert torch.equal(z.cpu(), torch.ones(4).exp().sin() + 1)


def test_a_backward_by_autograds_thread_is_recorded() -> None:
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    seed = torch.ones(4, device=DEVICE)
    y = x.exp()
    graph, gradient = recorded(lambda: torch.autograd.grad(y, x, seed)[0])
    seed.copy_(torch.full((4,), 2.0).to(DEVICE))
    graph.replay()
    assert torch.equal(gradient.cpu(), torch.ones(4).exp() * 2)


def test_a_replay_draws_from_the_seed_that_is_there_now() -> None:
    seeds = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    x = torch.ones(64, device=DEVICE)
    graph = checked.Graph()
    graph.begin()
    first, second = graph.generator(seeds[0]), graph.generator(seeds[1])
    drawn = torch.stack(
        [
            torch.empty_like(x).uniform_(generator=first),
            torch.empty_like(x).normal_(generator=second),
            torch.empty_like(x).uniform_(generator=first),  # goes on
        ]
    )
    graph.end()
    for seed in (5, 6, 5):
        seeds.copy_(torch.tensor([[seed, 0], [7 * seed, 0]]).to(DEVICE))
        graph.replay()
        one, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7 * seed)
        new = torch.ones(64)
        want = [new.uniform_(generator=one).clone(), new.normal_(generator=other).clone()]
        assert torch.equal(drawn.cpu(), torch.stack([*want, new.uniform_(generator=one)]))


def test_a_seed_that_comes_while_a_replay_may_read_it_is_a_race() -> None:
    seed = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    graph = checked.Graph()
    graph.begin()
    torch.empty(4, device=DEVICE).uniform_(generator=graph.generator(seed))
    graph.end()
    graph.replay()
    with torch.Stream(DEVICE), pytest.raises(RuntimeError, match="race"):
        seed.zero_()
    checked.clear_errors()


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda x: x.sum().item(), id="a number for the host"),
        pytest.param(lambda x: x.nonzero(), id="a shape that depends on numbers"),
        pytest.param(lambda x: x.cpu(), id="a copy to the host"),
        pytest.param(lambda x: x.add_(torch.ones(4).to(x.device)), id="a copy from the host"),
        pytest.param(lambda x: torch.rand_like(x), id="random numbers"),
        pytest.param(lambda x: torch.accelerator.synchronize(x.device), id="the host waits"),
        pytest.param(lambda x: x.to("checked:1"), id="a copy to another device"),
    ],
)
def test_what_a_device_cannot_record_is_refused(work: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(4, device=DEVICE)
    graph = checked.Graph()
    graph.begin()
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        work(x)
    graph.abandon()
    assert x.cpu().tolist() == [1.0] * 4


def test_to_wait_for_work_outside_of_the_recording_is_refused() -> None:
    x = torch.ones(4, device=DEVICE)
    other = torch.Stream(DEVICE)
    with other:
        torch.ones(4, device=DEVICE)
        event = other.record_event()
    graph = checked.Graph()
    graph.begin()
    with pytest.raises(RuntimeError, match="to wait for another stream cannot be recorded"):
        torch.accelerator.current_stream(0).wait_event(event)
    graph.abandon()
    assert x.cpu().tolist() == [1.0] * 4


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda event: torch.Stream(DEVICE).wait_event(event), id="another stream"),
        pytest.param(lambda event: event.synchronize(), id="the host waits"),
        pytest.param(lambda event: event.query(), id="the host asks"),
    ],
)
def test_an_event_of_a_recording_is_its_streams_alone(
    use: Callable[[torch.Event], object], ends: bool
) -> None:
    stream = torch.accelerator.current_stream(0)
    graph = checked.Graph()
    graph.begin()
    event = stream.record_event()
    stream.wait_event(event)
    if ends:
        graph.end()
    with pytest.raises(RuntimeError, match="an event of a recorded stream cannot be recorded"):
        use(event)
    if not ends:
        graph.end()
    event.record(stream)
    use(event)


def test_an_event_of_a_recording_by_another_thread_is_an_error() -> None:
    stream = torch.accelerator.current_stream(0)
    raised: list[str] = []

    def elsewhere() -> None:
        try:
            stream.record_event()
        except RuntimeError as error:
            raised.append(str(error))

    graph = checked.Graph()
    graph.begin()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    graph.end()
    assert "whose work another thread records" in raised[0]
    assert raised[0].startswith(checked.errors()[-1])
    checked.clear_errors()
    elsewhere()
    assert len(raised) == 1


def test_other_threads_work_as_usual_meanwhile() -> None:
    graph = checked.Graph()
    graph.begin()
    found: list[float] = []

    def elsewhere() -> None:
        with torch.Stream(DEVICE):
            found.append(torch.ones(4, device=DEVICE).sum().item())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    graph.end()
    assert found == [4.0]
