"""Plots as SVG: well-formed, escaped, in the right places."""

import xml.etree.ElementTree as ElementTree

import pytest

from muster.core.formats import line_plot

POLYLINE = "{http://www.w3.org/2000/svg}polyline"
AXIS = line_plot.PlotAxis(0.0, 10.0, [(0.0, "0"), (10.0, "10")])


def lines_of(text: str) -> list[list[tuple[float, ...]]]:
    drawn = ElementTree.fromstring(text).iter(POLYLINE)
    return [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in drawn]


def test_points_are_placed_by_their_axes():
    (line,) = lines_of(line_plot.svg({"a": [(0.0, 0.0), (10.0, 10.0)]}, AXIS, AXIS, label="x"))
    (x0, y0), (x1, y1) = line
    assert (x0, y1) == (line_plot.LEFT, line_plot.TOP + line_plot.LEGEND_LINE)
    assert x1 > x0
    assert y0 > y1
    powers = line_plot.PlotAxis(1.0, 100.0, [], logarithmic=True)
    assert [powers.share(value) for value in (1.0, 10.0, 100.0)] == [0.0, 0.5, 1.0]


def test_gaps_are_not_joined_and_texts_are_escaped():
    points = [(0.0, 1.0), (1.0, 1.0), (8.0, 1.0)]
    text = line_plot.svg({"<b>": points}, AXIS, AXIS, label='"&', gap=2.0)
    assert [len(line) for line in lines_of(text)] == [2, 2]  # a single point is a dot
    widths = [line.attrib["stroke-width"] for line in ElementTree.fromstring(text).iter(POLYLINE)]
    assert widths == ["1.5", "5"], "which can be seen"
    assert "<b>" not in text
    assert [line_plot.figure(value) for value in (2.0, 0.12345, 12_345.6)] == ["2", "0.1235", "12,346"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 43.7, [0, 10, 20, 30, 40, 50]),
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 0.0, [0, 0.2]),
        (-3.0, 90.0, [-20, 0, 20, 40, 60, 80, 100]),
        (0.0, 1_234_567.0, [0, 500_000, 1_000_000, 1_500_000]),
    ],
)
def test_an_axis_has_a_few_round_ticks_and_contains_the_values(low, high, ticks):
    axis = line_plot.round_axis(low, high)
    assert [tick for tick, _ in axis.ticks] == ticks
    assert axis.low <= low <= high <= axis.high


def test_a_long_legend_has_several_rows_above_the_plot():
    lines = {f"a line with a long name, {number}": [(0.0, 10.0)] for number in range(5)}
    text = line_plot.svg(lines, AXIS, AXIS, label="x")
    texts = list(ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text"))
    bottom = max(float(entry.attrib["y"]) for entry in texts if entry.text in lines)
    assert all(y > bottom for line in lines_of(text) for _, y in line)
