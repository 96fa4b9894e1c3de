"""Any options together train as the definition says."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.runs.combinations import assert_alike, batches_of, by_definition, by_pipeline, draw


@pytest.mark.slow
@hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.generate],  # a failure is reported as found: shrinking takes minutes
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
@hypothesis.given(data=st.data())
def test_any_options_together(data: st.DataObject) -> None:
    def choose(options: Any) -> Any:
        return data.draw(st.sampled_from(options))

    of = draw(choose)
    hypothesis.note(str(of))
    batches = batches_of(of)
    (want,) = by_definition(of, [batches])
    assert_alike(of, by_pipeline(of, batches), want)
