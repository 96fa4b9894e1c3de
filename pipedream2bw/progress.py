"""A bar for what makes a person wait: captures, profiles, plans, exports."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

SHOWN_AFTER = 2.0  # seconds
_DRAWN_EVERY = 0.5

Begin = Callable[[str], None]
"""Is called with the name of what begins now."""


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Begin]:
    """Shows what has taken more than two seconds: its name, its time, and the step it is at.

    The bar is tqdm's, and it is gone at the end. Nothing is shown where tqdm is not installed,
    where stderr is no terminal, and on ranks but the first.
    """
    begun: list[str] = []
    ended = threading.Event()
    shown = threading.Thread(target=_show, args=(what, total, begun, ended), name="progress bar")
    shown.daemon = True
    is_watched = sys.stderr is not None and sys.stderr.isatty()
    if is_watched and os.environ.get("RANK", "0") == "0":
        shown.start()
    try:
        yield begun.append
    finally:
        ended.set()
        if shown.is_alive():
            shown.join()


def _show(what: str, total: int | None, begun: list[str], ended: threading.Event) -> None:
    if ended.wait(SHOWN_AFTER):
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return
    form = "{desc} [{elapsed}] {postfix}" if total is None else None
    with tqdm(desc=what, total=total, leave=False, bar_format=form, dynamic_ncols=True) as bar:
        bar.start_t -= SHOWN_AFTER
        while True:
            bar.n = max(len(begun) - 1, 0)
            bar.set_postfix_str(begun[-1] if begun else "", refresh=False)
            bar.refresh()
            if ended.wait(_DRAWN_EVERY):
                return
