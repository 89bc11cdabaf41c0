"""Exported files act like the policy, without qfleet; a file that does not is not left behind."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfleet.agent.policy import Policy
from qfleet.cli.main import main
from qfleet.core.errors import CheckpointError, ConfigError, ExportError
from qfleet.deploy import export
from qfleet.deploy.export import BATCHES, export_policy, random_rows, record_rows, verify
from qfleet.deploy.models import Answers, TorchModel, open_model
from qfleet.deploy.signature import Signature
from support.messages import holds, says
from support.policies import untrained
from support.waiting import CLUSTER_S, PHASE_S, deadline

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).parents[2]
LOCKS, SAMPLED = "support.masked_envs:Locks", "support.space_envs:Sampled"
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("CartPole-v1", {}),
    "dueling": ("CartPole-v1", {"dueling": True}),
    "normalised": ("CartPole-v1", {"normalize_observations": True}),
    "layer-norm": ("CartPole-v1", {"layer_norm": True, "activation": "silu"}),
    "fp64": ("CartPole-v1", {"precision": "fp64"}),
    "rainbow": ("CartPole-v1", {"algo": "rainbow"}),
    "qr": ("CartPole-v1", {"algo": "qr-dqn"}),
    "iqn": ("CartPole-v1", {"algo": "iqn"}),
    "a3c": ("CartPole-v1", {"algo": "a3c", "envs": 4, "train_freq": 64, "batch_size": 64}),
    "discrete": ("support.odd_envs:Offset", {}),
    "minatar": ("MinAtar/Breakout-v1", {}),
    "minatar-pqn": ("MinAtar/Breakout-v1", {"algo": "pqn"}),
    "atari": ("ALE/Pong-v5", {}),
    "atari-centred": ("ALE/Pong-v5", {"normalize_observations": True}),
    "impala": ("ALE/Pong-v5", {"network": "impala"}),
    "masked": (LOCKS, {}),
    "masked-stack": (LOCKS, {"frame_stack": 2}),
    "masked-discrete": (LOCKS, {"env_kwargs": '{"kind": "discrete"}'}),
    "masked-c51-image": (LOCKS, {"env_kwargs": '{"kind": "image"}', "algo": "c51"}),
    "dict": (SAMPLED, {"env_kwargs": '{"space": "image", "actions": "digits"}'}),
    "box-actions": (SAMPLED, {"env_kwargs": '{"actions": "box"}', "discretize_actions": 3}),
    "own": ("CartPole-v1", {"network": "support.exported_networks:Plain"}),
}
SUFFIX = export.SUFFIXES


def made(name: str) -> Policy:
    env, fields = POLICIES[name]
    return untrained(env, **fields)


# --- proof ------------------------------------------------------------------------------------


def cases(names: Iterable[str], *more: str, quick: Iterable[str]) -> list[Any]:
    """Parameters of a test: all are slow except for the quick ones."""
    marks = {name: () if name in quick else (pytest.mark.slow,) for name in names}
    return [pytest.param(name, *more, marks=mark) for name, mark in marks.items()]


CASES = cases(POLICIES, "onnx", quick=("mlp",))
CASES += cases(("mlp", "iqn", "atari", "masked-stack", "dict", "own"), "torch", quick=("mlp",))


@pytest.mark.parametrize(("name", "to"), CASES)
def test_a_policy_is_exported_and_compared(name: str, to: Any, tmp_path: Path) -> None:
    policy, path = made(name), tmp_path / "deep" / f"policy{SUFFIX[to]}"
    done = export_policy(policy, path, to)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert done.size_bytes == path.stat().st_size
    assert done.largest_difference < 1e-5
    assert done.observations == dict.fromkeys(("random", "recorded"), 3 * sum(BATCHES))
    assert done.not_recorded is None
    model = open_model(path, trust=True)
    assert model.version == done.version == TorchModel.of(policy).version
    assert model.signature == TorchModel.of(policy).signature
    # Negative control: the comparison finds another policy's file.
    policy.weights.data.mul_(1.01)
    with pytest.raises(ExportError):
        verify(policy, model, random_rows(policy.spec), 1e-4, "random")


@pytest.mark.slow
def test_the_file_gives_what_the_policy_gives_for_the_environments_own_numbers(
    tmp_path: Path,
) -> None:
    policy = made("discrete")
    export_policy(policy, tmp_path / "it.onnx", "onnx")
    answers = open_model(tmp_path / "it.onnx")(np.arange(3, 8))
    assert answers.actions.tolist() == [policy.act(number) for number in range(3, 8)]
    assert set(answers.actions) <= {7, 8}
    masked = made("masked")
    export_policy(masked, tmp_path / "masked.onnx", "onnx")
    model, obs = open_model(tmp_path / "masked.onnx"), np.ones((5, 3), np.float32)
    assert model(obs, np.eye(5) > 0).actions.tolist() == [2, 3, 4, 5, 6]
    assert model(obs).actions.tolist() == [masked.act(obs[0])] * 5  # without masks, all are legal


def test_noise_is_not_exported(tmp_path: Path) -> None:
    policy = untrained(algo="noisy-dqn")
    assert policy.network.draw_noise(torch.Generator()).numel() > 0
    export_policy(policy, tmp_path / "it.onnx", "onnx")
    model, obs = open_model(tmp_path / "it.onnx"), np.ones((2, 4), np.float32)
    assert np.array_equal(model(obs).q_values, model(obs).q_values)


class Wrong:
    """A model that answers as the policy does, except for what a test changes."""

    def __init__(self, policy: Policy, values: Any = 0.0, actions: int = 0) -> None:
        self._right, self._values, self._actions = TorchModel.of(policy), values, actions
        self.signature, self.version, self.runtime = self._right.signature, "x", "torch"

    def __call__(self, observations: Any, action_masks: Any = None) -> Answers:
        right = self._right(observations, action_masks)
        return Answers(right.q_values + self._values, (right.actions + self._actions) % 2)


@pytest.mark.parametrize(
    ("values", "actions", "word"),
    [(2e-4, 0, "Q-values"), (np.nan, 0, "Q-values"), (np.inf, 0, "Q-values"), (0.0, 1, "actions")],
)
def test_a_difference_is_found(values: float, actions: int, word: str) -> None:
    policy = made("mlp")
    rows = random_rows(policy.spec)
    assert verify(policy, Wrong(policy), rows, 1e-4, "random") < 1e-6  # negative control
    with pytest.raises(ExportError, match=says(word, "random")):
        verify(policy, Wrong(policy, values, actions), rows, 1e-4, "random")


def test_the_tolerance_is_absolute() -> None:
    policy = made("mlp")
    policy.weights.data.mul_(100)  # large Q-values
    with pytest.raises(ExportError, match=says("Q-values", "0.001")):
        verify(policy, Wrong(policy, 2e-3), random_rows(policy.spec), 1e-3, "random")


def test_actions_of_equally_good_value_may_differ() -> None:
    policy = made("mlp")
    policy.weights.data.zero_()
    verify(policy, Wrong(policy, actions=1), random_rows(policy.spec), 1e-4, "random")


@pytest.mark.parametrize(
    "to", [pytest.param("onnx", marks=pytest.mark.slow), "torch", "safetensors"]
)
def test_a_file_that_differs_is_not_left(
    to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, path = made("mlp"), tmp_path / f"policy{SUFFIX[to]}"
    export_policy(policy, path, to)
    before = path.read_bytes()
    write = export._WRITERS[to]

    def write_another(_: Policy, tmp: Path) -> None:
        assert tmp.parent.parent == tmp_path  # where it will be renamed
        other = made("mlp")
        other.weights.data.add_(1e-3)
        write(other, tmp)
        assert tmp.exists()

    monkeypatch.setitem(export._WRITERS, to, write_another)
    with pytest.raises(ExportError, match=says("no file was written", "0.0001")):
        export_policy(policy, path, to)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before  # an earlier export stays
    path.unlink()
    with pytest.raises(ExportError):
        export_policy(policy, path, to)
    assert list(tmp_path.iterdir()) == []
    export_policy(policy, path, to, tolerance=0.5)  # the user's choice


def test_a_file_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    export_policy(made("own"), tmp_path / "it.onnx", "onnx")
    assert str(ROOT).encode() not in (tmp_path / "it.onnx").read_bytes()
    export_policy(made("own"), tmp_path / "it.pt2", "torch")
    with zipfile.ZipFile(tmp_path / "it.pt2") as archive:
        assert all(str(ROOT).encode() not in archive.read(name) for name in archive.namelist())


@pytest.mark.slow
def test_a_compiled_policy_acts_alike(tmp_path: Path) -> None:
    done = export_policy(made("masked-stack"), tmp_path / "it.pt2", "torch", compiled=True)
    assert done.largest_difference < 1e-5
    model = open_model(tmp_path / "it.pt2", trust=True)
    assert model.signature.takes_masks
    assert len(model(np.zeros((7, 2, 3), np.float32)).actions) == 7


# --- without qfleet ---------------------------------------------------------------------------

ALONE = """
import sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession("policy.onnx")
given = numpy.load("given.npz")
inputs = {one.name: given[one.name] for one in session.get_inputs()}
q_values, actions = session.run(None, inputs)
assert numpy.array_equal(actions, given["actions"]), (actions, given["actions"])
assert abs(q_values - given["q_values"]).max() < 1e-4
for size in (1, 3):
    _, some = session.run(["q_values", "actions"], {k: v[:size] for k, v in inputs.items()})
    assert numpy.array_equal(some, given["actions"][:size])
assert not {"torch", "qfleet", "gymnasium", "onnx"} & set(sys.modules), sys.modules.keys()
print(len(actions), "equal actions")
"""


def given_and_expected(policy: Policy, folder: Path) -> None:
    """Write the file, and recorded observations with what the policy itself makes of them."""
    export_policy(policy, folder / "policy.onnx", "onnx")
    rows = record_rows(policy)
    obs, masks = export._client_inputs(policy.spec, rows)
    legal = {} if masks is None else {"action_masks": masks}
    with torch.inference_mode():
        values = policy.network.q_values(torch.from_numpy(rows)).numpy()
    actions = policy.act(obs, **legal)
    np.savez(folder / "given.npz", observations=obs, actions=actions, q_values=values, **legal)


def run_alone(python: str, folder: Path) -> None:
    ended = subprocess.run(
        [python, "-I", "-c", ALONE],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=deadline(PHASE_S),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "192 equal actions" in ended.stdout


ALONE_CASES = ("mlp", "minatar", "atari", "iqn", "masked-discrete")


@pytest.mark.parametrize("name", cases(ALONE_CASES, quick=("masked-discrete",)))
def test_an_exported_policy_acts_alike_in_a_process_without_qfleet(
    name: str, tmp_path: Path
) -> None:
    given_and_expected(made(name), tmp_path)
    run_alone(sys.executable, tmp_path)


@pytest.mark.slow
def test_exported_policies_act_alike_in_an_environment_with_only_onnxruntime(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "onnxruntime", "numpy"]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=deadline(CLUSTER_S))
    except subprocess.TimeoutExpired:  # pip retries an index that it cannot reach
        pytest.skip("pip has not reached an index in time")
    if done.returncode != 0:
        pytest.skip(f"pip has no index to install from: {done.stderr[-200:]}")
    lacks = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'qfleet')])"
    found = subprocess.run([python, "-I", "-c", lacks], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[None, None]"
    for name in ("mlp", "minatar", "atari", "iqn"):
        folder = tmp_path / name
        folder.mkdir()
        given_and_expected(made(name), folder)
        run_alone(str(python), folder)


WITHOUT_ENV = """
import sys
for name in ("ale_py", "minatar", "support"):
    sys.modules[name] = None
import numpy as np
from pathlib import Path
import qfleet
from qfleet.deploy.models import open_model
given = np.load("given.npz")
assert np.array_equal(qfleet.load("policy.safetensors").act(given["obs"]), given["actions"])
for name, runtime in (("policy.safetensors", "torch"), ("policy.onnx", "onnxruntime")):
    model = open_model(Path(name), runtime)
    assert np.array_equal(model(given["obs"]).actions, given["actions"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["atari", "minatar", "discrete"])
def test_policies_act_without_the_package_of_their_environment(name: str, tmp_path: Path) -> None:
    policy = made(name)
    policy.save(tmp_path / "policy")
    export_policy(policy, tmp_path / "policy.onnx", "onnx")
    obs, _ = export._client_inputs(policy.spec, random_rows(policy.spec)[:5])
    np.savez(tmp_path / "given.npz", obs=obs, actions=policy.act(obs))
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_ENV],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=deadline(PHASE_S),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_without_the_environment_only_random_observations_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("discrete").save(tmp_path / "policy")  # its environment is code of the user
    assert main(["export", str(path), "--to", "onnx"]) == 0
    said = capsys.readouterr()
    assert holds(said.err, "random observations only", "support.odd_envs:Offset", "--trust")
    assert "recorded" not in said.out
    assert main(["export", str(path), "--to", "onnx", "--trust", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["observations"]["recorded"] > 0


def test_a_missing_package_of_the_environment_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = made("mlp")

    def make_envs(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'ale_py'")

    monkeypatch.setattr(export, "make_envs", make_envs)
    done = export_policy(policy, tmp_path / "it.safetensors", "safetensors")
    assert done.observations.keys() == {"random"}
    assert done.not_recorded is not None
    assert "ale_py" in done.not_recorded


def test_another_fault_of_the_environment_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_envs(*_: Any, **__: Any) -> None:
        raise ConfigError("env_kwargs has an unknown key")

    monkeypatch.setattr(export, "make_envs", make_envs)
    with pytest.raises(ConfigError, match=says("env_kwargs")):
        export_policy(made("mlp"), tmp_path / "it.safetensors", "safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_does_not_hold_the_configuration(tmp_path: Path) -> None:
    policy = made("mlp")
    policy.config = policy.config.replace(replay_dir="/home/me/replay")
    export_policy(policy, tmp_path / "it.onnx", "onnx")
    assert b"/home/me" not in (tmp_path / "it.onnx").read_bytes()


# --- the command ------------------------------------------------------------------------------


def test_the_verb_writes_beside_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made("mlp").save(tmp_path / "it")
    for to, suffix in (("onnx", ".onnx"), ("torch", ".pt2")):
        assert main(["export", str(path), "--to", to, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["path"] == str(path.with_suffix(suffix))
        assert Path(said["path"]).exists()
    assert main(["export", str(path), "--to", "onnx", "--out", str(tmp_path / "x.onnx")]) == 0
    assert holds(capsys.readouterr().out, "x.onnx", "actions equal")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--to onnx --compile", "--compile --to torch"),
        ("--to safetensors", "--out"),
        ("--to onnx --out x.pt", "--out .onnx x.pt"),
        ("--to onnx --tolerance 0", "tolerance 0"),
        ("--to onnx --tolerance nan", "tolerance nan"),
        ("--to tflite", "tflite"),
        ("", "--to"),
        ("--to onnx --which last", "last"),
        ("--to onnx --out /proc/x/y.onnx", "/proc/x/y.onnx"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(
    words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("mlp").save(tmp_path / "it")
    assert main(["export", str(path), *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert holds(error, *expected.split())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_network_that_is_no_graph_is_refused(to: Any, tmp_path: Path) -> None:
    policy = untrained(network="support.exported_networks:Branching")
    with pytest.raises(ConfigError, match=says("support.exported_networks:Branching")) as caught:
        export_policy(policy, tmp_path / f"it{SUFFIX[to]}", to)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=says("qfleet[export]")):
        export_policy(made("mlp"), tmp_path / "it.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


# --- opening files ----------------------------------------------------------------------------


def test_a_pt2_file_is_opened_only_with_consent(tmp_path: Path) -> None:
    export_policy(made("mlp"), tmp_path / "it.pt2", "torch")
    with pytest.raises(ConfigError, match=says("it.pt2", "--trust")):
        open_model(tmp_path / "it.pt2")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("a/b", "c")
    (tmp_path / "it.pt2").write_bytes(b"no archive")
    for name in ("it.pt2", "other.pt2"):
        with pytest.raises(CheckpointError, match=says(name)):
            open_model(tmp_path / name, trust=True)


def test_what_is_no_exported_policy_is_refused(tmp_path: Path) -> None:
    import onnx

    path = tmp_path / "it.onnx"
    with pytest.raises(CheckpointError, match="no file"):
        open_model(path)
    export_policy(made("mlp"), path, "onnx")
    whole = path.read_bytes()
    for contents in (b"", b"nothing", whole[: len(whole) // 2]):
        path.write_bytes(contents)
        with pytest.raises(CheckpointError, match=says("it.onnx")) as caught:
            open_model(path)
        assert "\n" not in str(caught.value)
    model = onnx.load_from_string(whole)
    del model.metadata_props[:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=says("qfleet export")):
        open_model(path)
    signature = dataclasses.replace(TorchModel.of(made("mlp")).signature, obs_shape=(5,))
    onnx.helper.set_model_props(model, {"signature": signature.to_json(), "version": "0" * 12})
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=says("signature")):
        open_model(path)
    onnx.helper.set_model_props(model, {"signature": signature.to_json(), "version": "../x"})
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=says("version", "../x")):
        open_model(path)
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match=says("onnxruntime", "torch")):
        open_model(path, "torch")


def test_a_signature_is_read_back_and_a_malformed_one_refused() -> None:
    for name in ("mlp", "discrete", "masked-stack", "dict", "box-actions"):
        signature = TorchModel.of(made(name)).signature
        assert Signature.from_json(signature.to_json()) == signature
        values = json.loads(signature.to_json())
        for change in (
            {"obs_shape": "x"}, {"obs_shape": [-1]}, {"obs_dtype": "object"}, {"actions": [1]},
            {"actions": "ab"}, {"action_dtype": "O"}, {"num_actions": "2"}, {"raw_obs": "["},
            {"takes_masks": 3}, {"env": 1}, {"code": "x"}, {"frame_stack": 0},
        ):  # fmt: skip
            with pytest.raises(CheckpointError, match=says("malformed")):
                Signature.from_json(json.dumps(values | change))
    for text in ("", "[]", "3", "[" * 100_000):
        with pytest.raises(CheckpointError, match=says("malformed")):
            Signature.from_json(text)
