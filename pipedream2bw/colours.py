"""Colours of pictures: what is green in one is green in all, on light pages and on dark ones."""

from __future__ import annotations

TIME_COLOURS = {
    "forward": "#9ecae1",
    "forward again": "#9ecae1",
    "backward: input gradient": "#4292c6",
    "backward: weight gradient": "#08519c",
    "messages to and from later stages": "#fd8d3c",
}
"""By what a stage's time goes into, in the order in which bars show it."""

MEMORY_COLOURS = {
    "weights": "#31a354",
    "gradients": "#a1d99b",
    "optimizer state": "#8c6d31",
    "activations": "#dcc6e8",
    "messages": "#fd8d3c",
    "float32 masters": "#2b8cbe",
    "other": "#969696",
}
"""By what memory holds, in the order in which bars show it."""

TRAFFIC_COLOURS = {
    "weights": "#31a354",
    "activations": "#dcc6e8",
    "gradients": "#a1d99b",
    "optimizer": "#8c6d31",
    "messages": "#2b8cbe",
}
"""By what actions move."""

BLACK = "#111111"
LIMIT = "#c51b1b"

# A light and a dark one for each weight version, of which the kinds' colours are mixed.
VERSION_COLOURS = (
    ("#9ecae1", "#3182bd"),
    ("#fdd0a2", "#e6750c"),
    ("#a1d99b", "#31a354"),
    ("#dcc6e8", "#8856a7"),
    ("#fbb4c4", "#c51b5a"),
    ("#d9c7a7", "#8c6d31"),
)


def version_colours(version: int) -> tuple[str, str]:
    """A light and a dark colour of a weight version; after six versions they come again."""
    return VERSION_COLOURS[version % len(VERSION_COLOURS)]


def kind_colour(kind: str, colours: tuple[str, str]) -> str:
    """The colour of an action of this kind, between a light and a dark one."""
    light, dark = colours
    shades = {
        "F": light,
        "R": light,
        "B": dark,
        "I": _mixed(light, dark, 0.6),
        "W": _mixed(dark, BLACK, 0.5),
    }
    return shades[kind]


def _mixed(a: str, b: str, share: float) -> str:
    """A mixture of two colours of the form "#rrggbb": ``share`` of b, the rest of a."""
    parts = [
        round((1 - share) * int(a[i : i + 2], 16) + share * int(b[i : i + 2], 16))
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)
