"""Line charts as SVG text, with intervals where they are known. No more than the experiments need."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 60, 40, 150, 50

Number = int | float
Point = tuple[Number, Number] | tuple[Number, Number, Number, Number]  # x, y, and an interval of y


def line_chart(title: str, x_name: str, y_name: str, series: Mapping[str, Sequence[Point]], *, whole: bool) -> str:
    """An SVG image of one line a series. x are integers; `whole` draws y from 0 to 1."""
    points = [point for line in series.values() for point in line]
    xs = [point[0] for point in points] or [0.0]
    ys = [y for point in points for y in point[1:]] or [0.0]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    y_low, y_high, step = (0.0, 1.0, 0.2) if whole else _nice(min(0.0, *ys), max(ys))
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    at_x = lambda x: LEFT + inner_w * (0.03 + 0.94 * (x - x_low) / (x_high - x_low))  # noqa: E731
    at_y = lambda y: TOP + inner_h * (1 - (y - y_low) / (y_high - y_low))  # noqa: E731
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT + inner_w / 2, TOP - 16, title, "middle", 14),
        _text(LEFT + inner_w / 2, HEIGHT - 10, x_name, "middle"),
        f'<g transform="translate(16 {TOP + inner_h / 2:.1f}) rotate(-90)">{_text(0, 0, y_name, "middle")}</g>',
    ]
    for i in range(round((y_high - y_low) / step) + 1):
        y = y_low + i * step
        out.append(_line(LEFT, at_y(y), LEFT + inner_w, at_y(y), "#dddddd"))
        out.append(_text(LEFT - 6, at_y(y) + 4, f"{y:.10g}", "end"))
    skip = math.ceil((x_high - x_low + 1) / 20)
    for x in range(round(x_low), round(x_high) + 1, skip):
        out.append(_text(at_x(x), TOP + inner_h + 18, str(x), "middle"))
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        nudge = 4 * (i - (len(series) - 1) / 2) if any(len(point) == 4 for point in line) else 0.0
        path = " ".join(f"{at_x(point[0]) + nudge:.1f},{at_y(point[1]):.1f}" for point in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for point in line:
            x = at_x(point[0]) + nudge
            out.append(f'<circle cx="{x:.1f}" cy="{at_y(point[1]):.1f}" r="2.5" fill="{colour}"/>')
            if len(point) == 4:
                out.append(_line(x, at_y(point[2]), x, at_y(point[3]), colour))
        out.append(_line(WIDTH - RIGHT + 12, TOP + 10 + 18 * i, WIDTH - RIGHT + 32, TOP + 10 + 18 * i, colour))
        out.append(_text(WIDTH - RIGHT + 38, TOP + 14 + 18 * i, name, "start"))
    return "\n".join([*out, "</svg>"]) + "\n"


def _nice(low: Number, high: Number) -> tuple[float, float, float]:
    """Round ends of an axis, and the distance of its ticks."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= span / 6)
    return math.floor(low / step) * step, math.ceil(high / step or 1) * step, step


def _text(x: Number, y: Number, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'


def _line(x1: Number, y1: Number, x2: Number, y2: Number, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
