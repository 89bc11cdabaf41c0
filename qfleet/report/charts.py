"""Charts of a page, drawn with Bokeh.

In: the dictionary of ``data.page_data``. Out: figures, and the columns of their sources by name. A
live page receives the same columns again and puts them into the sources of the same names.

All curves of a chart are one glyph with one source, because a page of hundreds of runs would be
slow with a glyph each. Row k of every source is group k, so that one list hides groups in all
charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfleet.report.data import AXES, CHARTS
from qfleet.report.histories import FloatArray
from qfleet.telemetry.figures import MUTED_COLOUR, PALETTE, TEXT_COLOUR
from qfleet.telemetry.timeline import COLOURS, KIND_COLOURS, OTHER_COLOUR

HEIGHT = 290
LANE_PIXELS = 34
MORE_COLOURS = ("#7A5195", "#8A8A5C", "#B22222", "#3B3B98", "#2F4F4F", "#B8860B")
GROUP_COLOURS = PALETTE + MORE_COLOURS
DASHES = ("solid", "6 3", "2 2", "8 3 2 3")
"""Dashes tell groups apart whose colours are equal."""
DISTRIBUTION, STALENESS = "distribution", "staleness"
TIMELINE = "timeline of "
"""Begin of the names of timelines. No run is named in a title, where $$…$$ would be TeX."""

Columns = dict[str, list[Any]]
NO_POINTS = np.empty(0)


def colour_of(group: int) -> str:
    return GROUP_COLOURS[group % len(GROUP_COLOURS)]


def chart_columns(data: Mapping[str, Any]) -> dict[str, Columns]:
    """Return the columns of every source of curves, by its name."""
    found = {
        kind.metric: _columns(data["groups"], data["curves"][kind.metric], AXES)
        for kind in CHARTS
        if kind.metric in data["curves"]
    }
    for name, curves in ((DISTRIBUTION, data["distributions"]), (STALENESS, data["staleness"])):
        if any(curves):
            found[name] = _columns(data["groups"], curves, ("x",))
    return found


def _columns(
    labels: Sequence[str], curves: Sequence[Mapping[str, FloatArray] | None], axes: Any
) -> Columns:
    """Return a row per group: its curve, the outline of its band, and its newest point."""
    columns: Columns = {
        "label": list(labels),
        "colour": [colour_of(k) for k in range(len(labels))],
        "dash": [DASHES[k // len(GROUP_COLOURS) % len(DASHES)] for k in range(len(labels))],
    }
    for name in (*axes, "value"):
        curve = [_compact(NO_POINTS if own is None else own[name], name) for own in curves]
        ends = [own[-1] if own.size else np.nan for own in curve]
        columns |= {name: curve, f"end_{name}": [None if np.isnan(x) else float(x) for x in ends]}
        if any(own is not None and "low" in own for own in curves):
            columns[f"band_{name}"] = [_outline(own, name) for own in curves]
    return columns


def _compact(column: FloatArray, name: str) -> NDArray[Any]:
    """Return a column in single precision: half the bytes, and more than a screen shows.

    Env steps stay doubles, because hovering shows them exactly.
    """
    limit = np.finfo(np.float32).max
    return column if name == "env_steps" else np.clip(column, -limit, limit).astype(np.float32)


def _outline(curve: Mapping[str, FloatArray] | None, name: str) -> NDArray[Any]:
    """Return one coordinate of the outline of a curve's band: along the bottom, back on the top."""
    if curve is None or "low" not in curve:
        return _compact(NO_POINTS, name)
    there, back = ("low", "high") if name == "value" else (name, name)
    return _compact(np.concatenate([curve[there], curve[back][::-1]]), name)


def make_figures(data: Mapping[str, Any], columns: Mapping[str, Columns]) -> dict[str, Any]:
    """Return Bokeh's figures, by name; they share no model, so that a page draws them one by one.

    Models that the page's script changes have a name: source, lines, band, ends, axis, hover, view.
    """
    figures: dict[str, Any] = {}
    for kind in CHARTS:
        if kind.metric in columns:
            texts = (kind.title, AXES["env_steps"], kind.unit)
            figures[kind.metric] = _curves(columns[kind.metric], *texts)
    if DISTRIBUTION in columns:
        texts = ("Final evaluations", "return", "% of episodes with at least this return")
        figures[DISTRIBUTION] = _curves(columns[DISTRIBUTION], *texts)
    if STALENESS in columns:
        texts = ("Staleness", "age of the weights in updates", "% of gradients or blocks")
        figures[STALENESS] = _curves(columns[STALENESS], *texts)
    for label, spans in data["timelines"].items():
        figures[f"{TIMELINE}{label}"] = _timeline(spans)
    return figures


def _figure(height: int, tooltips: list[tuple[str, str]], **options: Any) -> Any:
    from bokeh.models import HoverTool
    from bokeh.plotting import figure

    hover = HoverTool(tooltips=tooltips, line_policy="nearest")
    plot: Any = figure(
        height=height, sizing_mode="stretch_width", toolbar_location="above",
        tools=["xpan", "xbox_zoom", "box_zoom", "xwheel_zoom", "reset", hover],
        active_drag="box_zoom", active_scroll=None, background_fill_color=None,
        border_fill_color=None, outline_line_color=None, min_border_right=12, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.title.text_color = TEXT_COLOUR
    plot.title.text_font_size = "14px"
    plot.xgrid.grid_line_color = None
    plot.ygrid.grid_line_color = "#E6E6E6"
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = MUTED_COLOUR
    plot.axis.minor_tick_line_color = None
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.axis_label_text_color = plot.axis.major_label_text_color = TEXT_COLOUR
    return plot


def _curves(columns: Columns, title: str, x_label: str, unit: str) -> Any:
    from bokeh.models import BooleanFilter, CDSView, ColumnDataSource, NumeralTickFormatter

    x = "env_steps" if "env_steps" in columns else "x"
    shown = [("", "@label"), (x_label, "$snap_x{0,0.[00]}"), (unit, "$snap_y{0,0.[000]}")]
    plot = _figure(HEIGHT, shown, title=title, x_axis_label=x_label, y_axis_label=unit)
    width = 1.8 if len(columns["label"]) <= len(GROUP_COLOURS) else 1.0
    plot.hover[0].name, plot.xaxis[0].name = "hover", "axis"
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[000]a")
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[0000]")
    visible = BooleanFilter(booleans=[True] * len(columns["label"]), name="visible")
    common = {
        "source": ColumnDataSource(columns, name="source"), "view": CDSView(filter=visible),
        "color": "colour",
    }  # fmt: skip
    if "band_value" in columns:
        plot.patches(f"band_{x}", "band_value", alpha=0.15, line_color=None, name="band", **common)
    lines = plot.multi_line(
        x, "value", line_dash="dash", line_width=width, hover_line_width=3.2, name="lines", **common
    )
    plot.scatter(f"end_{x}", "end_value", size=6, name="ends", **common)
    plot.hover[0].renderers = [lines]
    for renderer in plot.renderers:  # glyphs that are never shown, but would be computed
        renderer.nonselection_glyph = renderer.muted_glyph = None
    return plot


def _timeline(spans: Sequence[tuple[str, str, float, float]]) -> Any:
    """Draw a row per lane and a bar per span."""
    from bokeh.models import ColumnDataSource, FixedTicker

    lanes = list(dict.fromkeys(lane for lane, _, _, _ in spans))
    colours = {**COLOURS, **KIND_COLOURS}
    columns = {
        "lane": [lane for lane, _, _, _ in spans],
        "stage": [stage for _, stage, _, _ in spans],
        "left": [start for _, _, start, _ in spans],
        "right": [end for _, _, _, end in spans],
        "row": [-lanes.index(lane) for lane, _, _, _ in spans],
        "colour": [colours.get(stage, OTHER_COLOUR) for _, stage, _, _ in spans],
    }
    tooltips = [("", "@lane"), ("", "@stage"), ("ms", "@left{0.00} to @right{0.00}")]
    plot = _figure(
        130 + LANE_PIXELS * len(lanes), tooltips, title="Timeline", x_axis_label="ms",
        y_range=(-len(lanes) + 0.5, 0.5),
    )  # fmt: skip
    plot.hbar(
        y="row", left="left", right="right", height=0.72, color="colour", line_color="white",
        line_width=0.3, legend_group="stage", source=ColumnDataSource(columns),
    )  # fmt: skip
    plot.yaxis.ticker = FixedTicker(ticks=[-row for row in range(len(lanes))])
    plot.yaxis.major_label_overrides = {-row: lane for row, lane in enumerate(lanes)}
    plot.ygrid.grid_line_color = None
    plot.add_layout(plot.legend[0], "below")
    plot.legend.orientation = "horizontal"
    plot.legend.border_line_color = plot.legend.background_fill_color = None
    return plot
