"""docs/notebook.ipynb runs from top to bottom in a kernel of its own, and shows what it says."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from support.waiting import PHASE_S, deadline

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def shown(cell: Any) -> dict[str, Any]:
    """Return the representations of a cell's value, by type."""
    (output,) = [one for one in cell.outputs if one.output_type == "execute_result"]
    return dict(output.data)


@pytest.mark.slow
def test_the_notebook_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), str(tmp_path)]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    phase_s = math.ceil(deadline(PHASE_S))
    client.NotebookClient(
        notebook, timeout=math.ceil(deadline(300)), iopub_timeout=phase_s, startup_timeout=phase_s,
        resources=resources,
    ).execute()  # fmt: skip
    learn, history, plot, play, load = [c for c in notebook.cells if c.cell_type == "code"]
    assert "DQN(" in shown(learn)["text/plain"]
    assert any("10,000/10,000 steps" in str(output) for output in learn.outputs)  # progress
    assert "10000" in shown(history)["text/plain"]
    assert "image/png" in shown(plot)
    assert float(shown(play)["text/plain"]) > 0
    assert "5,000 steps" in shown(load)["text/plain"]
    assert (tmp_path / "cartpole.safetensors").is_file()


def test_the_notebook_of_the_docs_is_stored_with_its_outputs() -> None:
    """A reader on GitHub sees them; ``jupyter nbconvert --execute --inplace`` renews them."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    stored = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    assert 5 <= len(stored) <= 8
    assert all(stored)
    assert '"output_type": "error"' not in json.dumps(stored)
    assert "image/png" in json.dumps(stored[2])
