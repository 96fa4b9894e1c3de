"""How seldom sites may talk, by the accuracy that models lose on other sites' data.

K. Hsieh, A. Phanishayee, O. Mutlu and P. Gibbons, The Non-IID Data Quagmire of Decentralized
Machine Learning, ICML 2020, arXiv 1910.00189, section 7: SkewScout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..checks import check_number, check_whole_number
from ..rules import instance

Costs = dict[int, tuple[float, int]]
"""By interval: what it cost when it was last measured, and how many measurements ago."""


@dataclasses.dataclass(frozen=True)
class SkewScout:
    """Chooses ``every`` of a :class:`ReplicaSync` by what :meth:`ReplicaSync.measure` finds.

    It looks for the interval H of the least cost

        loss_weight * max(0, AL(H) - threshold) + communication_weight / H,

    AL is the accuracy loss: the sites' mean accuracy on their own data less the mean of the same
    models on the next site's. 1 / H is what is sent in a batch, in models. It climbs hills from the
    shortest interval on. Each measurement moves it to a neighbour that is not known or costs less.
    That is a shorter one where AL is above the threshold, else a longer one. What an interval has
    cost is remembered for ``memory`` measurements.

    AL measures how far the sites' models have come apart *and* how much their data differ, at one
    moment of a round; it does not say how accurate a model trained in another way would be. It is
    as noisy as the rows it is measured on are few: ``threshold`` has to be above that noise.

    Args:
        intervals: to choose from, in batches, ascending.
        threshold: sigma_AL, an accuracy loss that is taken for noise.
        loss_weight, communication_weight: lambda_AL and lambda_C.
        memory: in measurements.

    Raises:
        ValueError, TypeError: naming the value.
    """

    intervals: Sequence[int]
    threshold: float = 0.05
    loss_weight: float = 50.0
    communication_weight: float = 1.0
    memory: int = 10

    def __post_init__(self) -> None:
        instance("a list of ints", Sequence).check("SkewScout: intervals", self.intervals)
        for interval in self.intervals:
            check_whole_number("SkewScout: intervals", interval)
        if not self.intervals or list(self.intervals) != sorted(set(self.intervals)):
            raise ValueError(
                f"SkewScout: intervals: {list(self.intervals)}, they must ascend, and be at least 1"
            )
        check_number("SkewScout: threshold", self.threshold, at_least=0.0, below=math.inf)
        check_number("SkewScout: loss_weight", self.loss_weight, below=math.inf)
        check_number("SkewScout: communication_weight", self.communication_weight, below=math.inf)
        check_whole_number("SkewScout: memory", self.memory)

    def choose(self, interval: int, accuracy_loss: float, known: Costs) -> tuple[int, Costs]:
        """The next interval, and what is known of all then.

        Args:
            interval: with which the loss was measured.
        """
        excess = max(0.0, accuracy_loss - self.threshold)
        cost = self.loss_weight * excess + self.communication_weight / interval
        now = {
            each: (before, age + 1)
            for each, (before, age) in known.items()
            if age + 1 < self.memory and each != interval
        }
        place = self.intervals.index(interval) + (-1 if excess > 0 else 1)
        chosen = interval
        if 0 <= place < len(self.intervals):
            neighbour = self.intervals[place]
            if neighbour not in now or now[neighbour][0] < cost:
                chosen = neighbour
        return chosen, {**now, interval: (cost, 0)}
