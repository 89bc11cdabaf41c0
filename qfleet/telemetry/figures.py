"""Figures: the style of every plot, and the one place that creates and saves an image.

matplotlib is imported when a figure is created, because commands that draw nothing must start fast.
"""

from __future__ import annotations

import functools
import importlib
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qfleet.core.errors import ConfigError

# Okabe and Ito's palette, without its yellow (too pale on white) and black (kept for text).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
TEXT_COLOUR = "#333333"
MUTED_COLOUR = "#888888"
FORMATS = (".png", ".svg", ".pdf")
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor"), TEXT_COLOUR),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), TEXT_COLOUR),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), MUTED_COLOUR),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 3),
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.xmargin": 0.02,
    "axes.ymargin": 0.06,
    "font.size": 10.5,
    "grid.color": "#E6E6E6",
    "svg.hashsalt": "qfleet",
}
BESIDE = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
"""Arguments of a legend at the right of its axes."""


def load_early() -> None:
    """Import what plots need in a thread: while an accelerator trains, the host has the time."""

    def load() -> None:
        for name in ("figure", "backends.backend_agg"):
            importlib.import_module(f"matplotlib.{name}")

    threading.Thread(target=load, daemon=True).start()


@contextmanager
def saved_figure(path: Path | None, width: float, height: float) -> Iterator[Any]:
    """Yield a figure of ``width`` × ``height`` inches; save it after the block if there is a path.

    The image is written under another name and renamed: a reader never finds half of it.
    """
    if path is not None and path.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot file '{path}' must end in {', '.join(FORMATS)}")

    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure: Any = Figure(figsize=(width, height), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        figure._repr_png_ = functools.partial(_png, figure)  # IPython shows it without pyplot
        yield figure
        if path is None:
            return
        partial = path.with_name(f".tmp-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(partial)
            partial.replace(path)
        except OSError as error:
            raise ConfigError(f"cannot write plot '{path}': {error.strerror}") from None


def _png(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def label_rows(axes: Any, labels: Sequence[str]) -> None:
    """Divide the y axis into a row of height 1 per label, the first on top."""
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)


def colour_legend(axes: Any, colours: Mapping[str, str]) -> None:
    """Add a legend at the right that names each colour."""
    from matplotlib.patches import Patch

    axes.legend(handles=[Patch(color=c, label=name) for name, c in colours.items()], **BESIDE)
