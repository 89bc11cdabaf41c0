"""Fault 37: models are replaced while they serve; no reply mixes versions and none is lost."""

from __future__ import annotations

import functools
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import qfleet
from qfleet.deploy.batching import Batcher
from qfleet.deploy.models import open_model
from qfleet.deploy.reloading import Watcher, choose_runtime, stamp
from qfleet.deploy.serving import ServeOptions, Source
from qfleet.storage.checkpoint import save_policy
from support.configs import tiny_fields
from support.policy_servers import FakeModel, post, saved_policy, served
from support.waiting import PHASE_S, deadline, wait_until

RELOADS = 100
OBSERVATIONS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BODY = json.dumps({"observations": OBSERVATIONS.tolist()}).encode()


def options(path: Path) -> ServeOptions:
    return ServeOptions({"default": Source(path, "torch")}, reload_s=0.01, max_batch=3)


def version(port: int) -> str:
    return post(port, "/q-values", BODY)[1]["x-model-version"]


def has_version(port: int, wanted: str) -> bool:
    return version(port) == wanted


class Clients:
    """Threads that ask for Q-values without a pause, and keep every reply."""

    def __init__(self, port: int, count: int = 3) -> None:
        self.replies: list[tuple[str, bytes]] = []
        self.failures: list[object] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(port,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, port: int) -> None:
        client = qfleet.PolicyClient(
            f"http://127.0.0.1:{port}", timeout_s=deadline(PHASE_S), retries=0
        )
        while not self._stop.is_set():
            try:
                values = client.q_values(OBSERVATIONS)
                assert client.version is not None
                self.replies.append((client.version, values.tobytes()))
            except qfleet.QfleetError as error:
                self.failures.append(error)
        client.close()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(deadline(PHASE_S))


@pytest.mark.slow
def test_a_hundred_reloads_under_load(tmp_path: Path) -> None:
    path = saved_policy(tmp_path / "served", seed=0)
    expected: dict[str, np.ndarray] = {}
    with served(options(path)) as port:
        clients = Clients(port)
        try:
            for seed in range(1, RELOADS + 1):
                model = open_model(saved_policy(tmp_path / f"next-{seed}", seed=seed), "torch")
                expected[model.version] = model(OBSERVATIONS).q_values
                (tmp_path / f"next-{seed}.safetensors").replace(path)
                wait_until(functools.partial(has_version, port, model.version), f"reload {seed}")
        finally:
            clients.stop()
    first = open_model(saved_policy(tmp_path / "first", seed=0), "torch")
    expected[first.version] = first(OBSERVATIONS).q_values
    assert len(expected) == RELOADS + 1
    assert clients.failures == []
    assert len(clients.replies) > RELOADS
    for name, values in clients.replies:
        given = np.frombuffer(values, np.float32).reshape(8, -1)
        np.testing.assert_allclose(given, expected[name], rtol=1e-4, atol=1e-6)
    # The weights of two seeds differ by far more than that.
    assert not np.allclose(*list(expected.values())[:2], rtol=1e-2)


def test_a_broken_file_leaves_the_old_model_serving(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved_policy(tmp_path / "served")
    good = path.read_bytes()

    def metric(port: int, name: str) -> float:
        from http.client import HTTPConnection

        connection = HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return float(next(line for line in lines if line.startswith(name)).split()[1])

    with served(options(path)) as port:
        before = version(port)
        (tmp_path / "new").write_bytes(good[: len(good) // 2])
        (tmp_path / "new").replace(path)
        wait_until(lambda: metric(port, "qfleet_reload_failures_total") == 1, "it was refused")
        assert version(port) == before
        seen = list[str]()

        def is_shown() -> bool:  # the line follows the count
            seen.append(capfd.readouterr().err)
            return "stays at" in "".join(seen)

        wait_until(is_shown, "the line of the refusal")
        shown = [line for line in "".join(seen).splitlines() if "stays at" in line]
        assert len(shown) == 1
        assert before in shown[0]
        other = saved_policy(tmp_path / "other", seed=1, net_arch=(4,))
        other.replace(path)
        wait_until(lambda: version(port) != before, "the next good file was taken over")
        wait_until(lambda: metric(port, "qfleet_reloads_total"), "the reload was counted")
        assert metric(port, "qfleet_reloads_total") == 1
        path.unlink()  # a file that is gone is no new model
        assert version(port) != before


def test_a_model_with_other_observations_is_not_taken_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved_policy(tmp_path / "served")
    acrobot = qfleet.train(
        "Acrobot-v1", **tiny_fields(steps=40, learning_starts=20), run_dir=tmp_path / "run"
    )
    with served(options(path)) as port:
        before = version(port)
        acrobot.policy().save(tmp_path / "other").replace(path)
        seen = list[str]()

        def is_refused() -> bool:
            seen.append(capfd.readouterr().err)
            return "other observations" in "".join(seen)

        wait_until(is_refused, "it was refused")
        assert version(port) == before


@pytest.fixture
def run(tmp_path: Path) -> Path:
    fields = tiny_fields(steps=60, learning_starts=20, eval_freq=30)
    return qfleet.train("CartPole-v1", **fields, run_dir=tmp_path / "run").folder


def test_a_new_best_policy_of_a_run_is_taken_over(run: Path) -> None:
    from qfleet.storage.checkpoint import load_policy

    with served(options(run)) as port:
        before = version(port)
        best = load_policy(run / "best")
        best.parts["policy"]["weights"] *= 2
        save_policy(run / "best", best.parts, best.meta)
        wait_until(lambda: version(port) != before, "the new policy was taken over")


def test_models_are_opened_one_at_a_time() -> None:
    """torch.export is not thread-safe."""
    opening, most, opened = list[int](), list[int](), threading.Barrier(3)

    def open_slowly() -> FakeModel:
        opening.append(1)
        most.append(len(opening))
        time.sleep(0.05)
        opening.pop()
        threading.Thread(target=opened.wait, args=(deadline(PHASE_S),), daemon=True).start()
        return FakeModel()

    batchers = [Batcher(FakeModel()) for _ in range(2)]
    path = Path(__file__)
    watchers = [Watcher("x", path, (1,), open_slowly, batcher, 0.01) for batcher in batchers]
    opened.wait(deadline(PHASE_S))
    for watcher in watchers:
        watcher.stop()
    assert most == [1, 1]


def test_a_stamp_changes_with_the_file_and_is_empty_without(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    assert stamp(path) == ()
    path.write_bytes(b"a")
    first = stamp(path)
    (tmp_path / "new").write_bytes(b"b")
    (tmp_path / "new").replace(path)
    assert first != stamp(path) != ()


@pytest.mark.slow
def test_the_faster_runtime_is_chosen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    path = saved_policy(tmp_path / "policy")
    assert choose_runtime(path, None, False) in ("torch", "onnxruntime")
    shown = capfd.readouterr().err
    assert "torch" in shown
    assert "onnxruntime" in shown
    assert shown.count("\n") == 1


def test_both_runtimes_give_the_same_answers_over_http(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path = saved_policy(tmp_path / "policy")
    values = []
    for runtime in ("torch", "onnxruntime"):
        with served(ServeOptions({"default": Source(path, runtime)})) as port:  # type: ignore[arg-type]
            client = qfleet.PolicyClient(f"http://127.0.0.1:{port}")
            values.append(client.q_values(OBSERVATIONS))
            client.close()
    np.testing.assert_allclose(values[0], values[1], atol=1e-5)


@pytest.mark.parametrize("name", ["best/manifest.json", "checkpoints/5/x", "policy.safetensors"])
def test_the_stamp_of_a_folder_changes_with_its_policy(name: str, tmp_path: Path) -> None:
    assert stamp(tmp_path) == ()
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"a")
    first = stamp(tmp_path)
    if name.startswith("checkpoints"):
        (tmp_path / "checkpoints" / "6").mkdir()
    else:
        (tmp_path / "new").write_bytes(b"b")
        (tmp_path / "new").replace(path)
    assert first != stamp(tmp_path) != ()
