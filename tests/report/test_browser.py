"""Pages in a real browser: charts, hover, axes, hiding, no errors, no requests, live updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qfleet.cli.main import main
from support.browsers import Tab, needs_browser, open_browser
from support.live_pages import serve_folder
from support.synthetic_runs import EVAL, curve, write_run

pytestmark = needs_browser
HOSTILE = "<img src=x onerror=alert(1)><script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


def clocked(*values: float) -> list[dict[str, Any]]:
    return [
        row | {"time/time_elapsed": row["env_steps"] / 50, "train/n_updates": row["env_steps"] // 2}
        for row in curve(*values)
    ]


def test_a_report_opens_from_disk_without_requests(tmp_path: Path, browser: Any) -> None:
    for seed in range(3):
        write_run(tmp_path / "ours" / f"seed-{seed}", clocked(1, 5 + seed, 9), seed=seed)
    write_run(tmp_path / HOSTILE, clocked(4, 2, 8, 6), gamma=0.5)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    tab = Tab(browser)
    tab.page.goto(page.as_uri())
    for name in (EVAL, "rollout/ep_rew_mean", "train/loss", "replay_ratio"):
        assert tab.chart(name).locator("canvas").count() > 0
    groups = tab.page.locator(".legend label").all_inner_texts()
    assert groups == [HOSTILE, "ours"]
    tooltip = tab.hover(EVAL, 0)
    assert HOSTILE in tooltip
    assert "env steps" in tooltip
    tab.page.click("[data-axis=wall_s]")
    assert "wall time (s)" in tab.hover(EVAL, 1)
    tab.page.click('[data-group="1"]')
    visible = f'qfleet.charts.get("{EVAL}").get_model_by_name("visible").booleans'
    assert tab.page.evaluate(visible) == [True, False]
    tab.page.click('[data-all="yes"]')
    assert tab.page.evaluate(visible) == [True, True]
    assert tab.errors == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len([url for url in tab.requests if url.startswith("file:")]) == 1


def test_an_error_of_a_page_is_seen(tmp_path: Path, browser: Any) -> None:
    """The control of the test above."""
    page = tmp_path / "bad.html"
    page.write_text('<script>throw new Error("seen")</script><img src="http://127.0.0.1:9/x.png">')
    tab = Tab(browser)
    tab.page.goto(page.as_uri())
    assert any("seen" in error for error in tab.errors)
    assert any(url.startswith("http:") for url in tab.requests)


def test_the_live_page_follows_a_run(tmp_path: Path, browser: Any) -> None:
    path = write_run(tmp_path / "run", clocked(1, 2, 3))
    with serve_folder(tmp_path) as url:
        tab = Tab(browser)
        tab.page.goto(url)
        assert tab.page.locator("svg.spark").count() == 1
        tab.page.click("#runs a")
        tab.chart(EVAL)
        length = f'qfleet.charts.get("{EVAL}").get_model_by_name("source").data.value[0].length'
        tab.wait_for(f"{length} === 3")
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"env_steps": 400, EVAL: 77.0}) + "\n")
        tab.wait_for(f"{length} === 4")
        tab.wait_for('document.getElementById("scores").innerText.includes("77.0")')
        # A chart that the page does not have: it is loaded again.
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"env_steps": 400, "train/q_mean": 1.0}) + "\n")
        tab.page.locator('[data-chart="train/q_mean"]').wait_for()
        assert tab.errors == []


@pytest.mark.slow
def test_a_page_of_a_hundred_runs_is_small_and_works(tmp_path: Path, browser: Any) -> None:
    values = np.random.default_rng(0).normal(size=150).tolist()
    rows = [
        row | dict.fromkeys(("time/fps", "train/q_mean", "rollout/exploration_rate"), row[EVAL])
        for row in clocked(*values)
    ]
    for k in range(100):
        write_run(tmp_path / f"run-{k:03}", rows, learning_rate=1.0 + k, batch_size=32)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    # More points per run do not make it larger: 150 are already more than are drawn of each.
    assert page.stat().st_size < 5e6
    tab = Tab(browser)
    tab.page.goto(page.as_uri())
    assert "run-0" in tab.hover(EVAL, 99)
    assert tab.errors == []
