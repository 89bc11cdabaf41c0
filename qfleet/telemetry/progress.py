"""Progress display of a run: env steps, scalars and time shares as a live panel or plain lines.

The display must never stop a run: values may be missing, and updates may come at any rate.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from time import monotonic
from typing import Literal, TextIO, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from qfleet.telemetry.formatting import finite, format_duration, format_rate, format_score
from qfleet.telemetry.runs import EVAL_RETURN, ROLLOUT_RETURN

Mode: TypeAlias = Literal["live", "plain", "silent"]

EPSILON = "rollout/exploration_rate"
LOSS = "train/loss"
SHOWN = (ROLLOUT_RETURN, EVAL_RETURN, EPSILON, LOSS)
STAGE_COLOURS = {
    "env": "cyan",
    "act": "green",
    "copy": "yellow",
    "learn": "magenta",
    "evaluate": "bright_cyan",
    "save": "bright_yellow",
    "communicate": "blue",
}
LINE_INTERVAL_S = 2.0
EVALUATION_LINE_INTERVAL_S = 10.0
POINT_INTERVAL_S = 0.5
WINDOW_POINTS = 40
"""The rate shown is that of the last ~20 s, so that it follows the phases of a run."""
SHARE_BAR_CELLS = 32


def choose_mode(quiet: bool, stream: TextIO) -> Mode:
    """Return "silent" if ``quiet``, "live" where the display can be redrawn, "plain" elsewhere.

    Terminals can redraw, and so can notebooks if ipywidgets is installed.
    """
    if quiet:
        return "silent"
    if Console().is_jupyter:
        return "live" if find_spec("ipywidgets") else "plain"
    return "live" if stream.isatty() and os.environ.get("TERM") != "dumb" else "plain"


class _ErrorConsole(Console):
    """Standard error, which becomes quiet when its reader ends (``2>&1 | head``)."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Progress:
    """Display of a run's progress; a context manager, or ``start`` … ``stop``."""

    def __init__(
        self,
        total_env_steps: int,
        console: Console | None = None,
        mode: Mode = "plain",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._total = max(1, total_env_steps)
        # Standard error by default: standard output is for results.
        self._console = console or _ErrorConsole()
        self._mode = mode
        self._clock = clock
        self._env_steps = 0
        self._shown: dict[str, float] = {}
        self._best_eval: float | None = None
        self._shares: dict[str, float] = {}
        self._points: deque[tuple[float, int]] = deque(maxlen=WINDOW_POINTS)
        self._rate: float | None = None
        self._line_s: float | None = None
        self._line_due = False
        self._live: Live | None = None
        self._activity = ""
        """What the run does instead of training."""
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def preparing(self, text: str) -> None:
        """Show what is done before the training begins."""
        if self._mode == "live":
            self._status = self._status or self._console.status("")
            self._status.update(Text(text))  # as text, because it may contain rich's markup
            self._status.start()
        elif self._mode == "plain":
            self.message(f"{text} …")

    def start(self, env_steps: int) -> None:
        self._end_preparing()
        self._env_steps = env_steps
        self._points.clear()
        self._points.append((self._clock(), env_steps))
        if self._mode == "live" and self._live is None:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=2,
                transient=True,
            )
            self._live.start()

    def update(
        self,
        env_steps: int,
        scalars: Mapping[str, float | None],
        shares: Mapping[str, float | None],
    ) -> None:
        if self._mode == "silent":
            return
        now_s = self._clock()
        self._env_steps = env_steps
        for name in SHOWN:
            value = finite(scalars.get(name))
            if value is not None:
                self._shown[name] = value
                if name == EVAL_RETURN and (self._best_eval is None or value > self._best_eval):
                    self._best_eval = value
        present = ((stage, finite(shares.get(stage))) for stage in STAGE_COLOURS)
        self._shares = {stage: share for stage, share in present if share is not None}
        self._measure(now_s, env_steps)
        if self._mode == "plain":
            self._line_due = True
            if self._line_s is None or now_s - self._line_s >= LINE_INTERVAL_S:
                self._print_line(now_s)

    @contextmanager
    def evaluating(self, episodes: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that shows the number of finished episodes of an evaluation.

        A plain display shows it only if the evaluation takes long.
        """
        shown_s = self._clock()

        def show(finished: int) -> None:
            nonlocal shown_s
            self._activity = f"evaluating {finished}/{episodes}"
            now_s = self._clock()
            if self._mode == "plain" and now_s - shown_s >= EVALUATION_LINE_INTERVAL_S:
                shown_s = now_s
                self.message(self._activity)

        try:
            yield show
        finally:
            self._activity = ""

    def message(self, text: str) -> None:
        """Print a message, for example about a fault; a silent display prints it too."""
        encoding = self._console.encoding
        if not encoding.lower().startswith("utf"):  # e.g. a Windows code page, which has no ε
            text = text.replace("ε", "eps").replace("×", "x")
            text = text.encode(encoding, "replace").decode(encoding)
        try:
            self._console.out(text, highlight=False)
        except OSError:  # the lines go to a file, and its disk is full
            self._console.quiet = True

    def acknowledge(self, text: str) -> None:
        """Print a line in a signal handler, where a stream may be in use and cannot be entered."""
        if self._mode != "silent":
            with suppress(OSError):
                os.write(2, f"\n{text}\n".encode())

    def _end_preparing(self) -> None:
        if self._status is not None:
            self._status.stop()

    def stop(self) -> None:
        self._end_preparing()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
        if self._line_due:
            self._print_line(self._clock())

    def _measure(self, now_s: float, env_steps: int) -> None:
        if self._points:
            past_s, past_steps = self._points[0]
            if now_s > past_s and env_steps >= past_steps:
                self._rate = (env_steps - past_steps) / (now_s - past_s)
        # A minimum interval between points, so that frequent updates do not shorten the window.
        if not self._points or now_s - self._points[-1][0] >= POINT_INTERVAL_S:
            self._points.append((now_s, env_steps))

    @property
    def _done(self) -> float:
        return min(1.0, self._env_steps / self._total)

    def _left_s(self) -> float | None:
        if not self._rate or self._env_steps >= self._total:
            return None
        return (self._total - self._env_steps) / self._rate

    # --- plain ------------------------------------------------------------------------------

    def _print_line(self, now_s: float) -> None:
        self._line_s = now_s
        self._line_due = False
        parts = [f"{self._env_steps:,}/{self._total:,} steps", f"{self._done:.0%}"]
        if self._rate is not None:
            parts.append(f"{format_rate(self._rate)}/s")
        parts += [
            f"{label} {text}" for label, text in self._values("eval", self._shown.get(EVAL_RETURN))
        ]
        if self._shares:
            parts.append(" ".join(f"{stage} {part:.0%}" for stage, part in self._shares.items()))
        left_s = self._left_s()
        if left_s is not None:
            parts.append(f"left {format_duration(left_s)}")
        self.message("  ".join(parts))

    def _values(self, eval_label: str, evaluation: float | None) -> list[tuple[str, str]]:
        rows = (
            ("return", self._shown.get(ROLLOUT_RETURN), format_score),
            (eval_label, evaluation, format_score),
            ("ε", self._shown.get(EPSILON), "{:.2f}".format),
            ("loss", self._shown.get(LOSS), "{:.3g}".format),
        )
        return [(label, form(value)) for label, value, form in rows if value is not None]

    # --- live -------------------------------------------------------------------------------

    def _render(self) -> RenderableType:
        """Return the live panel.

        rich calls this from its refresh thread, so it only reads attributes replaced as a whole.
        """
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._total, completed=min(self._env_steps, self._total), width=30)
        cells: list[RenderableType] = [
            bar,
            Text(f"{self._done:.0%}", style="bold"),
            Text(f"{self._env_steps:,}/{self._total:,} steps"),
        ]
        if self._rate is not None:
            cells.append(Text(f"{format_rate(self._rate)}/s", style="cyan"))
        left_s = self._left_s()
        if left_s is not None:
            cells.append(Text(f"{format_duration(left_s)} left", style="dim"))
        if self._activity:
            cells.append(Text(self._activity, style="yellow"))
        head.add_row(*cells)
        values = Text("   ").join(
            Text.assemble((f"{label} ", "dim"), (text, "bold"))
            for label, text in self._values("best eval", self._best_eval)
        )
        body: list[RenderableType] = [values if values.plain else Text("collecting …", "dim")]
        if self._shares:
            body.append(_share_bar(self._shares))
        return Group(head, Panel(Group(*body), expand=False, border_style="dim"))


def _share_bar(shares: Mapping[str, float]) -> Text:
    """Return a stacked bar of time shares of the wall time, with their percentages."""
    bar, legend = Text.assemble(("time ", "dim")), Text()
    left = SHARE_BAR_CELLS
    for stage, share in shares.items():
        cells = min(left, round(share * SHARE_BAR_CELLS))
        left -= cells
        bar.append("█" * cells, style=STAGE_COLOURS[stage])
        legend.append(f"  {stage} {share:.0%}", style=STAGE_COLOURS[stage])
    bar.append("░" * left, style="dim")
    return bar.append_text(legend)
