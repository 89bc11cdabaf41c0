"""A headless browser for tests of pages; tests that need one skip without it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.waiting import PHASE_S, deadline

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
"""In order: Debian's packages are the first two."""
PROGRAM = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(
    PROGRAM is None or importlib.util.find_spec("playwright") is None,
    reason="needs playwright and a browser: apt-get install chromium-headless-shell",
)


@contextmanager
def open_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without its sandbox, which containers do not allow; the pages are ours.
        browser = playwright.chromium.launch(
            executable_path=PROGRAM, args=["--no-sandbox"], timeout=1000 * deadline(PHASE_S)
        )
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of the browser that remembers errors and what it has requested."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.set_default_timeout(1000 * deadline(PHASE_S))
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def wait_for(self, script: str) -> Any:
        """Poll until the expression is true; return its value.

        Not by playwright's own function, which uses eval, which the page's policy refuses.
        """
        for _ in range(int(deadline(PHASE_S) / 0.05)):
            if value := self.page.evaluate(script):
                return value
            self.page.wait_for_timeout(50)
        pytest.fail(f"never true: {script}; errors {self.errors}")

    def chart(self, name: str) -> Any:
        """Return the element of a chart, once it is drawn."""
        chart = self.page.locator(f'[data-chart="{name}"]')
        chart.scroll_into_view_if_needed()
        self.page.locator(f'[data-chart="{name}"][data-drawn]').wait_for()
        return chart

    def hover(self, name: str, group: int) -> str:
        """Move the mouse to the middle point of a group's curve; return the tooltip's text."""
        self.chart(name)
        x, y = self.page.evaluate(
            """([name, group]) => {
                const chart = qfleet.charts.get(name), plot = chart.roots()[0];
                const source = chart.get_model_by_name("source").data;
                const xs = source[qfleet.axis.name][group], ys = source.value[group];
                const middle = Math.floor(xs.length / 2);
                const { canvas_view, frame } = Bokeh.index.get_one(plot);
                const box = canvas_view.el.getBoundingClientRect();
                return [box.x + frame.x_scale.compute(xs[middle]),
                        box.y + frame.y_scale.compute(ys[middle])];
            }""",
            [name, group],
        )
        self.page.mouse.move(x - 3, y)
        self.page.mouse.move(x, y)
        tooltip = self.page.locator(".bk-Tooltip:visible")
        tooltip.wait_for()
        # Bokeh puts the text into a shadow root, which inner_text leaves out.
        script = "e => e.shadowRoot.querySelector('.bk-tooltip-content').innerText"
        return str(tooltip.evaluate(script))
