"""How many forwards of a batch are late on each stage of 2bw's order, by the formula."""

from __future__ import annotations

import math
from collections.abc import Collection


def late_of_2bw(
    num_stages: int,
    slots: int = 1,
    *,
    waits_for_all: bool = False,
    tied: Collection[int] = (),
    backward: float = 2.0,
) -> list[int]:
    """s_i = d - 1 - i + q [+ ceil(i B / (F + B))], alike where stages have a parameter in common.

    Args:
        waits_for_all: whether updates wait for each other on all stages.
        tied: stages that wait for each other anyway.
        backward: in forwards.
    """
    late = []
    for stage in range(num_stages):
        first = 0 if waits_for_all else min(tied) if stage in tied else stage
        waits = math.ceil((stage - first) * backward / (1 + backward))
        late.append(num_stages - 1 - stage + slots + waits)
    most = max((late[stage] for stage in tied), default=0)
    return [most if stage in tied else number for stage, number in enumerate(late)]
