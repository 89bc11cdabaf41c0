"""The page as HTML: tables and bars around the charts, in one text without outside references.

In: the dictionary of ``data.page_data``. Out: HTML. Every text of a run goes through ``escape``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from qfleet.core.urls import public_value
from qfleet.report.charts import TIMELINE, chart_columns, colour_of, make_figures
from qfleet.report.data import AXES, read_media
from qfleet.telemetry.formatting import finite, format_duration, format_rate, format_score
from qfleet.telemetry.timeline import COLOURS, KIND_COLOURS, OTHER_COLOUR
from qfleet.telemetry.usage import cost_line

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; media-src data:; connect-src 'self'"
)
"""Content security policy: the browser refuses to load anything from elsewhere."""
_VERDICTS = {"better": "▲ better", "worse": "▼ worse", "cannot tell": "cannot tell", None: "–"}


def render(data: Mapping[str, Any], title: str, events_url: str = "") -> str:
    """Return the page of a report; ``events_url``: of the events that keep it up to date."""
    from bokeh.embed import json_item
    from bokeh.resources import Resources

    parts, charts = fragments(data), ""
    data = {**data, **read_media(data["details"])}
    for name, figure in make_figures(data, chart_columns(data)).items():
        item, (_, is_timeline, label) = _script_json(json_item(figure)), name.partition(TIMELINE)
        wide, caption = (" wide", f"<h3>{escape(label)}</h3>") if is_timeline else ("", "")
        charts += (
            f'<div class="chart{wide}" data-chart="{escape(name)}" '
            f'style="min-height:{figure.height + 18}px">{caption}'
            f'<script type="application/json">{item}</script></div>'
        )
    scripts = str(Resources(mode="inline", components=["bokeh"], log_level="error").render())
    content = [_element("scores", parts), _tools(data["groups"]), f'<div class="charts">{charts}']
    content += ["</div>", _element("fields", parts)]
    for number, detail in enumerate(data["details"]):
        label, is_open = escape(detail["label"]), "" if number else " open"
        inner = _element(f"details-{number}", parts) + _video(data["videos"][number])
        content.append(f"<details{is_open}><summary>{label}</summary>{inner}</details>")
    if data["left_out"]:
        content.append(f"<p>The details of {data['left_out']} more runs are left out.</p>")
    return document(title, "".join(content), events_url, scripts)


def document(title: str, content: str, events_url: str = "", scripts: str = "") -> str:
    """Return a complete page with our style and script."""
    style, code = (
        files("qfleet.report").joinpath(name).read_text("utf-8") for name in ("page.css", "page.js")
    )
    state = '<span id="connection">connecting …</span>' if events_url else ""
    follow = f"<script>qfleet.follow({_script_json(events_url)})</script>" if events_url else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style><script>{code}</script>{scripts}"
        f"</head><body><header><h1>{escape(title)}</h1>{state}</header><main>{content}</main>"
        f"{follow}</body></html>\n"
    )


def fragments(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the page that change while a run trains, by the id of their element."""
    found = {"scores": _scores(data["scores"]), "fields": _fields(data)}
    for number, detail in enumerate(data["details"]):
        found[f"details-{number}"] = _details(detail)
    return found


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; heads are text, cells are HTML."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def number(value: object, form: Any = format_score) -> str:
    """Return a number as text, or a dash."""
    known = finite(value)
    return "–" if known is None else str(form(known))


def _element(name: str, parts: Mapping[str, str]) -> str:
    return f'<div id="{name}">{parts[name]}</div>'


def _script_json(value: Any) -> str:
    """Return a value as JSON that cannot end the script element that it is in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _tools(labels: Sequence[str]) -> str:
    axes = "".join(
        f'<button data-axis="{name}" data-label="{label}">{label}</button>'
        for name, label in AXES.items()
    )
    legend = "".join(
        f'<label><input type="checkbox" checked data-group="{k}">'
        f'<i style="background:{colour_of(k)}"></i>{escape(label)}</label>'
        for k, label in enumerate(labels)
    )
    choices = '<button data-all="yes">show all</button><button data-all="">hide all</button>'
    choices = choices if len(labels) > 1 else ""
    return (
        f'<div class="tools"><b>x axis</b>{axes}{choices}<div class="legend">{legend}</div></div>'
    )


def _scores(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ["run", "env", "algorithm", "engine", "seeds", "final return", "95 % interval"]
    heads += ["against the first", "best", "env steps", "steps/s", "wall time", "state"]
    cells = []
    for k, row in enumerate(rows):
        interval = row["interval"] and " to ".join(format_score(bound) for bound in row["interval"])
        verdict = str(row["verdict"]).split()[0]
        cells.append(
            [
                f'<i style="background:{colour_of(k)}"></i>{escape(row["label"])}',
                *(escape(str(row[name])) for name in ("env", "algo", "engine")),
                str(row["runs"]),
                f"<b>{number(row['score'])}</b>",
                interval or "–",
                f'<span class="{verdict}">{_VERDICTS[row["verdict"]]}</span>',
                number(row["best"]),
                number(row["env_steps"], "{:,.0f}".format),
                number(row["env_steps_per_s"], format_rate),
                number(row["wall_s"], format_duration),
                escape(row["state"]),
            ]
        )
    return f'<div class="nowrap">{table(heads, cells)}</div>'


def _fields(data: Mapping[str, Any]) -> str:
    """Return a table of the fields that differ, whose longer side is vertical."""
    fields, labels = data["fields"], data["experiments"]
    if not fields:
        return ""
    rows = [[name, *map(_value, values)] for name, values in fields.items()]
    rows = [["field", *labels], *rows]
    if len(labels) > len(fields):
        rows = [list(column) for column in zip(*rows, strict=True)]
    body = ([escape(cell) for cell in row] for row in rows[1:])
    return "<h2>Configuration fields that differ</h2>" + table(rows[0], body)


def _details(detail: Mapping[str, Any]) -> str:
    result, fleet, of_first = detail["result"], detail["result"]["fleet"], detail["of_first"]
    staleness, straggler = fleet["staleness"], fleet["straggler"]
    sums = {
        "folder": ", ".join(detail["paths"]),
        "processor time": number(result["processor_s"], format_duration),
        "energy": number(result["joules"], "{:,.0f} J".format),
        "cost": cost_line(result),
        "faults": _joined(result["faults"]) or ("none" if detail["has_ended"] else ""),
    }
    facts = {
        "stopped by": result.get("stopped_by"),
        "updates": number(result.get("updates"), "{:,}".format),
        "replay ratio": number(result.get("replay_ratio"), "{:.4g}".format),
        "updates/s": number(result.get("updates_per_s"), format_rate),
        "hardware": _joined(result["hardware"]),
        "peak memory": _mebibytes(result, "peak_rss_bytes"),
        "peak device memory": _mebibytes(result, "peak_device_bytes"),
        "traffic": _joined(result["communication"]),
        "update": fleet.get("update"),
        "speed-up": number(fleet.get("speed_up"), "{:.2f}×".format),
        "efficiency": number(fleet.get("efficiency"), "{:.0%}".format),
        "staleness": _joined({name: staleness.get(name) for name in ("mean", "p95", "max")}),
        "straggler": number(straggler.get("ratio"), "{:.2f} × the median's time per step".format),
    }
    tables = ["<h3>All seeds</h3>", _facts(sums), "<h3>First seed</h3>", _facts(facts)]
    tables = tables if of_first else [_facts(sums | facts)]
    parts = ['<div class="columns"><div>', *tables, "</div><div>"]
    parts += [_bars(f"Time per thread{of_first}", detail["resources"], COLOURS)]
    parts += [_bars(f"Workers{of_first}", detail["workers"], KIND_COLOURS), "</div></div>"]
    return "".join(parts) + _recipe(detail)


def _facts(facts: Mapping[str, object]) -> str:
    shown = {name: text for name, text in facts.items() if text not in ("–", "", None)}
    return table(["", ""], ([name, escape(str(text))] for name, text in shown.items()))


def _recipe(detail: Mapping[str, Any]) -> str:
    recipe, title = detail["recipe"], f"<h3>Reproduce{detail['of_first']}</h3>"
    if recipe is None:
        text = f"qfleet train --config {detail['config_path']}"
        return f"{title}<pre>{escape(text)}</pre>"
    rows = [
        [name, escape(_value(own)), escape(_value(preset))]
        for name, (own, preset) in recipe.differences.items()
    ]
    differences = table(["field", "this run", f"preset {recipe.preset}"], rows) if rows else ""
    return (
        f"{title}<pre>{escape(recipe.command)}</pre>"
        f"<h3>Differences from preset {escape(recipe.preset)}</h3>{differences or '<p>none</p>'}"
    )


def _bars(title: str, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> str:
    """Return a bar of 100 % per row, with a part per share, and a legend."""
    rows = {name: shares for name, shares in rows.items() if shares}
    if not rows:
        return ""
    used = [name for name in colours if any(name in shares for shares in rows.values())]
    legend = "".join(f'<i style="background:{colours[name]}"></i>{name} ' for name in used)
    lines = []
    for name, shares in rows.items():
        whole = max(1.0, sum(shares.values()))
        parts = "".join(
            f'<span style="width:{100 * share / whole:.2f}%;background:'
            f'{colours.get(part, OTHER_COLOUR)}" title="{part} {share:.1%}"></span>'
            for part, share in shares.items()
        )
        lines.append(f'<div class="bar"><b>{escape(name)}</b><div>{parts}</div></div>')
    return f'<h3>{title}</h3>{"".join(lines)}<p class="key">{legend}</p>'


def _video(url: str | None) -> str:
    if url is None:
        return ""
    tag = f'<img src="{url}" alt="An episode">'
    if url.startswith("data:video"):
        tag = f'<video src="{url}" controls muted loop></video>'
    return f"<h3>An episode</h3>{tag}"


def _joined(values: Mapping[str, Any]) -> str:
    found = {name: value for name, value in values.items() if value not in (None, 0, "")}
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in found.items())


def _mebibytes(result: Mapping[str, Any], name: str) -> str:
    return number(result.get(name), lambda size_bytes: f"{size_bytes / 2**20:,.0f} MiB")


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_value, value)) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(public_value(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
