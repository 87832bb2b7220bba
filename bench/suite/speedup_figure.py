"""Draws speed-ups as an SVG for a light or a dark page: sorted bars on a logarithmic axis.

The SVG is written as text, so that it is small, equal for equal results, and does not need
matplotlib.
"""

import math
from dataclasses import dataclass
from html import escape

ROW, BAR = 27, 16
# Labels are left of the axis, and the last values right of it.
LEAST_LEFT, AXIS_WIDTH, VALUE_WIDTH = 330, 340, 190
CHARACTER_WIDTH = 8  # of a wide font at 14 px
TOP, BOTTOM = 66, 84
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS = {
    "light": {
        "text": "#1f2328",
        "muted": "#59636e",
        "grid": "#e6eaef",
        "operator": "#0969da",
        "training": "#8250df",
    },
    "dark": {
        "text": "#f0f6fc",
        "muted": "#9198a1",
        "grid": "#262c36",
        "operator": "#4493f8",
        "training": "#ab7df8",
    },
}


@dataclass(frozen=True)
class Speedup:
    """One bar.

    kind: "operator" or "training", which chooses the colour
    against: what it is compared with    unthrottled: the same with MKL unthrottled, or None
    """

    label: str
    value: float
    against: str
    kind: str = "operator"
    unthrottled: float | None = None


def draw(title, speedups, caption, theme):
    """Returns the SVG; caption: lines below the axis."""
    colours = COLOURS[theme]
    speedups = sorted(speedups, key=lambda s: -s.value)
    values = [v for s in speedups for v in (s.value, s.unthrottled) if v]
    longest = max(len(s.label) for s in speedups)
    left = max(LEAST_LEFT, CHARACTER_WIDTH * longest + 24)
    width = left + AXIS_WIDTH + VALUE_WIDTH
    axis = Axis(left, min(values), max(values))
    bottom = TOP + ROW * len(speedups)
    height = bottom + BOTTOM + 18 * (len(caption) - 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="{FONT}" font-size="14">',
        f"<title>{escape(title, quote=False)}</title>",
        text(left, 22, title, colours["text"], size=16, weight=600),
        *legend(speedups, left, colours),
    ]
    for tick in axis.ticks:
        x = axis.place(tick)
        colour = colours["muted" if tick == 1 else "grid"]
        parts.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="{colour}" stroke-width="1"/>')
        parts.append(text(x, bottom + 18, f"{tick:g}×", colours["muted"], anchor="middle", size=12))
    for i, s in enumerate(speedups):
        parts += row(s, TOP + ROW * i, axis, colours)
    for i, line in enumerate(caption):
        parts.append(text(16, bottom + 46 + 18 * i, line, colours["muted"], size=12))
    return "\n".join([*parts, "</svg>"]) + "\n"


class Axis:
    """A logarithmic axis from a power of two, at most 1, to a power of two."""

    def __init__(self, left, least, most):
        self.left = left
        low, high = min(0, math.floor(math.log2(least))), max(1, math.ceil(math.log2(most)))
        self.low, self.high = low, high
        self.ticks = [2.0**k for k in range(low, high + 1)]

    def place(self, value):
        return self.left + AXIS_WIDTH * (math.log2(value) - self.low) / (self.high - self.low)


def row(s, y, axis, colours):
    """Yields label, bar and value of one speed-up."""
    start, end = sorted((axis.place(1.0), axis.place(s.value)))
    top, baseline = y + (ROW - BAR) / 2, y + ROW / 2 + 5
    yield text(axis.left - 12, baseline, s.label, colours["text"], anchor="end")
    yield (
        f'<rect x="{start:.1f}" y="{top:.1f}" width="{max(1.0, end - start):.1f}" height="{BAR}" '
        f'rx="2" fill="{colours[s.kind]}"/>'
    )
    right = end
    if s.unthrottled:
        x = axis.place(s.unthrottled)
        right = max(right, x + 5)
        yield diamond(x, y + ROW / 2, colours)
    value = f'<tspan font-weight="600">{s.value:.{1 if s.value >= 2 else 2}f}×</tspan>'
    style = f'fill="{colours["muted"]}" font-size="12" dx="6"'
    against = f"<tspan {style}>{escape(s.against, quote=False)}</tspan>"
    place = f'x="{right + 8:.1f}" y="{baseline:.1f}"'
    yield f'<text {place} fill="{colours["text"]}">{value}{against}</text>'


def diamond(x, y, colours):
    return (
        f'<path d="M{x - 6:.1f} {y:.1f}l6 -6l6 6l-6 6z" fill="none" stroke="{colours["text"]}" '
        'stroke-width="1.5"/>'
    )


def legend(speedups, x, colours):
    """Yields the meaning of the colours and of the diamond that occur; x: the left end."""
    names = {"operator": "operator", "training": "whole training step"}
    kinds = [kind for kind in names if any(s.kind == kind for s in speedups)]
    if len(kinds) > 1:
        for kind in kinds:
            yield f'<rect x="{x}" y="36" width="12" height="12" rx="2" fill="{colours[kind]}"/>'
            yield text(x + 18, 46, names[kind], colours["muted"], size=12)
            x += 40 + 7 * len(names[kind])
    if any(s.unthrottled for s in speedups):
        yield diamond(x + 6, 42, colours)
        yield text(x + 18, 46, "with MKL's AVX2 limit lifted", colours["muted"], size=12)


def text(x, y, content, colour, *, anchor="start", size=14, weight=400):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(content, quote=False)}</text>'
    )
