"""Files that were changed are read or refused; ``make fuzz`` tries more."""

from __future__ import annotations

import pytest

from tests.fuzz.formats import FORMATS, corpus_of
from tests.fuzz.run import Broken, give, input_of, run


@pytest.mark.parametrize("name", FORMATS)
def test_every_changed_file_is_read_or_refused(name: str) -> None:
    result = run(name, range(400), seed=1)
    assert result.num_read > 30
    assert result.num_refused > 100


@pytest.mark.parametrize("name", FORMATS)
def test_every_file_of_the_corpus_is_read(name: str) -> None:
    corpus = corpus_of(name)
    assert corpus
    assert all(give(name, data) for data in corpus)


def test_an_input_can_be_made_again() -> None:
    for name in FORMATS:
        corpus = corpus_of(name)
        made = [input_of(name, 2, number, corpus) for number in range(50)]
        assert made == [input_of(name, 2, number, corpus) for number in range(50)]
        assert len(set(made)) > 25


def test_an_error_of_another_kind_is_told_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes) -> None:
        raise KeyError("name")

    monkeypatch.setitem(FORMATS, "profile", FORMATS["profile"]._replace(read=read))
    with pytest.raises(Broken, match=r"profile, input 3/7: KeyError: 'name': b'"):
        run("profile", range(7, 8), seed=3)
