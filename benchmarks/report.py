"""Reports in a headless browser: size and start of a large one, and how a live page follows runs.

    python benchmarks/report.py size [--runs 100] [--points 10000]
    python benchmarks/report.py live [--engines serial actors …] [--seconds 25]

``size`` writes synthetic runs, makes their report and opens it from disk: bytes, seconds until the
first chart is drawn and the page answers (median of several loads, beside that of a page with one
short run), requests and console errors. ``live`` trains on CartPole-v1 with
one engine after the other while ``qfleet watch`` serves the run: how many times the page changed,
and how long at most a row of the run's file was not on the page. A Chromium must be on the path
(Debian: chromium-headless-shell). Every result is one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

CHART = "rollout/ep_rew_mean"
ENGINES = ["serial", "pipeline", "device", "actors", "parameter-server", "all-reduce"]
PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
LOADS = 7
QFLEET = [sys.executable, "-m", "qfleet.cli.main"]


@contextmanager
def open_tab(errors: list[str], requests: list[str]) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: line.type == "error" and errors.append(line.text))
        page.on("request", lambda request: requests.append(request.url))
        yield page
        browser.close()


def write_run(folder: Path, points: int, random: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    config = {"env": "CartPole-v1", "algo": "dqn", "engine": "serial", "seed": 0, "steps": points}
    (folder / "config.json").write_text(json.dumps(config | {"learning_rate": random.random()}))
    values = random.normal(size=(points, 4)).cumsum(0).round(4).tolist()
    with (folder / "metrics.jsonl").open("w") as file:
        for k, (value, loss, mean, rate) in enumerate(values):
            row = {
                "env_steps": 100 * (k + 1), "time/time_elapsed": 0.1 * k, "train/n_updates": 50 * k,
                "eval/mean_reward": value, CHART: mean, "train/loss": abs(loss), "time/fps": rate,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")


def measure_size(folder: Path, runs: int, points: int) -> None:
    random = np.random.default_rng(0)
    for k in range(runs):
        write_run(folder / "runs" / f"run-{k:03}", points, random)
    page_file, began_s = folder / "report.html", time.monotonic()
    command = [*QFLEET, "report", str(folder / "runs"), "-o", str(page_file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    made_s = time.monotonic() - began_s
    errors, requests, seconds = list[str](), list[str](), list[float]()
    with open_tab(errors, requests) as page:
        for _ in range(LOADS):
            began_s = time.monotonic()
            page.goto(page_file.as_uri(), wait_until="commit")
            page.locator("[data-chart][data-drawn]").first.wait_for()
            page.evaluate("1")  # answered when the page is not busy
            seconds.append(time.monotonic() - began_s)
            page.wait_for_timeout(1000)
    asked = [url for url in requests if not url.startswith(("data:", "blob:"))]
    print(json.dumps({
        "runs": runs, "points": points, "bytes": page_file.stat().st_size, "made_s": made_s,
        "interactive_s": float(np.median(seconds)), "requests": len(asked) / LOADS,
        "console_errors": errors,
    }), flush=True)  # fmt: skip


def rows_with_chart(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return sum(1 for line in lines if f'"{CHART}": ' in line and f'"{CHART}": null' not in line)


def measure_live(folder: Path, engine: str, seconds: float) -> None:
    run = folder / engine
    command = (
        f"train CartPole-v1 --engine {engine} --steps 10000000 --log-interval 500 --eval-freq 0 "
        f"--no-tensorboard --max-wall {seconds:g}s --run-dir {run}"
    )
    training = subprocess.Popen(
        [*QFLEET, *command.split()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while rows_with_chart(run / "metrics.jsonl") < 1 and training.poll() is None:
        time.sleep(0.2)
    watch = subprocess.Popen(
        [*QFLEET, "watch", str(run)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert watch.stdout is not None
    address = next(found[0] for line in watch.stdout if (found := re.search(r"http://\S+", line)))
    from playwright.sync_api import Error

    errors, changes, worst_s, shown = list[str](), 0, 0.0, 0
    missing = dict[int, float]()  # number of rows in the file → when it was first seen there
    source = f'qfleet.charts.get("{CHART}")?.get_model_by_name("source").data.value[0].length ?? 0'
    with open_tab(errors, []) as page:
        page.goto(address)
        page.locator(f'[data-chart="{CHART}"]').first.scroll_into_view_if_needed()
        page.locator(f'[data-chart="{CHART}"][data-drawn]').wait_for()
        while training.poll() is None:
            now_s, before = time.monotonic(), shown
            missing.setdefault(rows_with_chart(run / "metrics.jsonl"), now_s)
            with contextlib.suppress(Error):  # the page is loaded again when it gets a new chart
                shown = page.evaluate(source)
            changes += shown != before
            for rows in [rows for rows in missing if rows <= shown]:
                worst_s = max(worst_s, now_s - missing.pop(rows))
            page.wait_for_timeout(100)
    watch.terminate()
    watch.wait(10)
    print(json.dumps({
        "engine": engine, "rows": rows_with_chart(run / "metrics.jsonl"), "page_changes": changes,
        "longest_delay_s": worst_s, "console_errors": errors, "exit": training.returncode,
    }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["size", "live"])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--seconds", type=float, default=25.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "size":
            measure_size(Path(folder) / "one", 1, 100)  # what the browser needs for Bokeh alone
            measure_size(Path(folder) / "all", options.runs, options.points)
        else:
            for engine in options.engines:
                measure_live(Path(folder), engine, options.seconds)


if __name__ == "__main__":
    main()
