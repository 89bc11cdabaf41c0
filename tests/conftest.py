"""Fixtures of all tests."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TESTS = str(Path(__file__).parent)

# Before torch is imported, which reads it then. Waiting OpenMP threads sleep instead of spinning,
# because the processes of pytest-xdist have more of them than there are cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Of pytest-xdist's processes, the first one runs the tests of clusters: the longest chain, which
# mostly waits. The others compute in the time that it leaves; Ray's workers have a niceness of 15.
if process := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.nice(19 if process != "gw0" else 0)

# No test measures time: by default Hypothesis fails an example that takes over 200 ms, and a test
# whose examples are slow to draw, which happens on a busy machine.
settings.register_profile("qfleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("qfleet")


@pytest.fixture(autouse=True, scope="session")
def support_in_children() -> Iterator[None]:
    """Child processes, and Ray's workers, import ``support`` too."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TESTS, before)))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """Parts built without a run change torch's settings; no test may depend on the one before."""
    from qfleet.engines.torch_settings import TorchSettings

    before = TorchSettings()
    yield
    before.restore()


@pytest.fixture
def default_signals() -> Iterator[None]:
    """SIGINT and SIGTERM as in the foreground: a background job has inherited an ignored SIGINT."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of every figure that is saved, in order."""
    from matplotlib.figure import Figure

    axes: list[Any] = []
    save = Figure.savefig

    def spy(figure: Figure, path: Path) -> None:
        axes.extend(figure.axes)
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", spy)
    return axes


def pytest_collection_finish() -> None:
    """Thousands of tests need not be looked through whenever Python collects garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first: at the end, the other processes would wait for one that began late.

    Those that start clusters stay as they are: they share fixtures, and begin first anyway.
    """
    from support.clusters import starts_clusters

    grouped = {path for path in {item.path for item in items} if starts_clusters(path)}
    items.sort(key=lambda item: item.path in grouped or not item.get_closest_marker("slow"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule files that start clusters as the group "ray".

    pytest-xdist 3.8 takes a test's group from its node id, where pytest 9.2 no longer lets it be
    written; without this, ``--dist loadgroup`` ignores the mark ``xdist_group``.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    from support.clusters import starts_clusters

    is_ray = functools.cache(lambda file: starts_clusters(config.rootpath / file))

    class RayTogether(LoadGroupScheduling):
        def schedule(self) -> None:
            # The first process gets the largest group, this one, whichever was ready first.
            ordered = sorted(self.assigned_work.items(), key=lambda item: item[0].gateway.id)
            self.assigned_work = OrderedDict(ordered)
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return "ray" if is_ray(nodeid.split("::")[0]) else super()._split_scope(nodeid)

    return RayTogether(config, log)
