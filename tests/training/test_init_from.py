"""``init_from``: a run starts with the weights of another, on every engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qfleet
from qfleet.cli.main import main
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, UnknownNameError
from qfleet.engines.parameter_server import engine as parameter_server
from qfleet.engines.parts import LoopParts, Setup
from qfleet.storage.checkpoint import load_checkpoint
from qfleet.telemetry.faults import FaultLog
from qfleet.training.run import Run
from support import populations
from support.clusters import needs_ray
from support.configs import tiny_config, tiny_fields
from support.messages import holds, says

TINY = tiny_fields(learning_starts=20, buffer_size=200, batch_size=4, net_arch=(8,), steps=80)
TINY |= {"device": "cpu", "max_episode_steps": 30}
SERIAL = TINY | {"engine": "serial"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> qfleet.Trained:
    folder = tmp_path_factory.mktemp("init") / "source"
    return qfleet.train("CartPole-v1", **SERIAL, seed=5, run_dir=folder)


def weights_of(trained: qfleet.Trained) -> Tensor:
    return trained.policy().weights.data


def newest(folder: Path) -> dict[str, Any]:
    return load_checkpoint(folder / "checkpoints", None, on_alert=print).parts["learner"]


def begin(config: Config, folder: Path, policy: qfleet.Policy | None) -> dict[str, Any]:
    """Return a learner's state before the first step of a run."""
    run = Run(config, folder, qfleet.RunOptions(), (), None, policy)
    try:
        assert isinstance(run.parts, LoopParts)
        state = run.parts.model.state_dict()
        return {name: state[name].clone() for name in ("weights", "target_weights")}
    finally:
        run.close()


@pytest.mark.parametrize("engine", ["serial", "pipeline", "device"])
def test_both_networks_start_with_the_weights(
    engine: str, source: qfleet.Trained, tmp_path: Path
) -> None:
    fields = {name: value for name, value in TINY.items() if name != "preset"}
    config = tiny_config("CartPole-v1", "double-dqn", **fields, engine=engine)
    began = begin(config, tmp_path / "warm", source.policy())
    assert torch.equal(began["weights"], weights_of(source))
    assert torch.equal(began["target_weights"], weights_of(source))
    assert not torch.equal(
        begin(config, tmp_path / "cold", None)["weights"], weights_of(source)
    )  # negative control


@pytest.mark.parametrize("engine", ["serial", "pipeline", "device"])
def test_acting_starts_with_the_weights(
    engine: str, source: qfleet.Trained, tmp_path: Path
) -> None:
    """With a learning rate of almost 0, all that a run evaluates is the other run's policy."""
    fields = TINY | {"engine": engine, "learning_rate": 1e-30, "init_from": str(source.folder)}
    warm = qfleet.train("CartPole-v1", **fields, run_dir=tmp_path / "warm")
    torch.testing.assert_close(newest(warm.folder)["weights"], weights_of(source))
    assert warm.result.updates > 0
    assert newest(warm.folder)["optimiser"]["steps"] == warm.result.updates  # it started anew


def test_a_file_a_folder_and_a_name_are_the_same(
    source: qfleet.Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/named").symlink_to(source.folder.absolute())
    places = [str(source.folder), "named", source.policy().save("saved")]
    runs = [qfleet.train("CartPole-v1", **SERIAL, init_from=place) for place in places]
    for run in runs[1:]:
        assert torch.equal(newest(run.folder)["weights"], newest(runs[0].folder)["weights"])
    words = (
        "train CartPole-v1 --preset none --init-from named --quiet --run-dir cli --engine serial"
    )
    fields = {name: value for name, value in SERIAL.items() if name != "preset"}
    Path("fields.json").write_text(json.dumps(fields))
    assert main([*words.split(), "--config", "fields.json"]) == 0
    assert torch.equal(newest(Path("cli"))["weights"], newest(runs[0].folder)["weights"])


def test_every_seed_starts_with_the_weights(source: qfleet.Trained, tmp_path: Path) -> None:
    fields = SERIAL | {"learning_rate": 1e-30, "init_from": str(source.folder)}
    seeds = qfleet.train_seeds(2, "CartPole-v1", **fields, run_dir=tmp_path / "seeds")
    for run in seeds.runs:
        torch.testing.assert_close(newest(run.folder)["weights"], weights_of(source))


def test_a_resumed_run_does_not_start_from_the_weights_again(
    source: qfleet.Trained, tmp_path: Path
) -> None:
    path = source.policy().save(tmp_path / "saved")
    whole = qfleet.train("CartPole-v1", **SERIAL, init_from=str(path), run_dir=tmp_path / "whole")
    options = qfleet.RunOptions(stop_after=40)
    half = qfleet.train(
        "CartPole-v1", **SERIAL, init_from=str(path), run_dir=tmp_path / "half", options=options
    )
    path.unlink()
    half = qfleet.resume(half.folder)
    assert torch.equal(newest(half.folder)["weights"], newest(whole.folder)["weights"])
    assert half.policy().act([0.0, 0.0, 0.0, 0.0]) in (0, 1)


@pytest.mark.parametrize(
    ("env", "fields", "words"),
    [
        ("CartPole-v1", {"net_arch": (16,)}, ("(4, 8)", "(4, 16)")),
        ("CartPole-v1", {"net_arch": (8, 8)}, ("(8, 2)", "(8, 8)")),
        ("MountainCar-v0", {}, ("(4, 8)", "(2, 8)")),
        ("CartPole-v1", {"dueling": True}, ("weight_0",)),
        ("CartPole-v1", {"net_arch": ()}, ("(4, 8)", "(4, 2)")),
        ("CartPole-v1", {"normalize_observations": True}, ("normalize_observations",)),
    ],
    ids=str,
)
def test_other_shapes_are_refused_and_both_are_named(
    env: str, fields: dict[str, Any], words: tuple[str, ...], source: qfleet.Trained, tmp_path: Path
) -> None:
    fields = SERIAL | fields | {"init_from": str(source.folder)}
    with pytest.raises(ConfigError, match=says("init_from", *words)):
        qfleet.train(env, **fields, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_unknown_run_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="absent"):
        qfleet.train("CartPole-v1", **SERIAL, init_from="absent", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_network_of_the_other_run_is_imported_only_with_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_torso.py").write_text(
        "from torch import nn\n"
        "class Torso(nn.Sequential):\n"
        "    def __init__(self, shape):\n"
        "        super().__init__(nn.Linear(*shape, 8), nn.BatchNorm1d(8))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fields = SERIAL | {"network": "own_torso:Torso", "envs": 2}
    qfleet.train("CartPole-v1", **fields, name="own")
    del sys.modules["own_torso"]
    with pytest.raises(ConfigError, match=says("own_torso:Torso", "--trust")):
        qfleet.train("CartPole-v1", **fields, init_from="own")
    words = (
        "train CartPole-v1 --preset none --steps 80 --learning-starts 20 --init-from own --quiet"
    )
    words += " --network own_torso:Torso --envs 2 --engine serial --device cpu --run-dir cli"
    assert main(words.split()) == 2
    assert holds(capsys.readouterr().err, "own_torso:Torso", "--trust")
    assert "own_torso" not in sys.modules
    assert main([*words.split(), "--trust"]) == 0
    # Batch statistics are part of the weights, of both networks.
    config = tiny_config(**{name: value for name, value in fields.items() if name != "preset"})
    policy = qfleet.load("own", trust=True)
    run = Run(config, tmp_path / "run", qfleet.RunOptions(), (), None, policy)
    assert isinstance(run.parts, LoopParts)
    means = [network.torso[1].running_mean for network in run.parts.learner.networks]  # type: ignore[index]
    run.close()
    assert policy.network.torso[1].running_mean.abs().sum() > 0  # type: ignore[index]
    for mean in means:
        assert torch.equal(mean, policy.network.torso[1].running_mean)  # type: ignore[index]


def test_constants_of_a_head_stay_those_of_the_run(tmp_path: Path) -> None:
    fields = SERIAL | {"algo": "c51"}
    first = qfleet.train("CartPole-v1", **fields, v_max=10.0, run_dir=tmp_path / "first")
    second = qfleet.train(
        "CartPole-v1",
        **fields,
        v_max=20.0,
        init_from=str(first.folder),
        run_dir=tmp_path / "second",
    )
    assert float(second.policy().network.support[-1]) == 20.0


def test_every_agent_of_a_population_starts_with_the_weights(tmp_path: Path) -> None:
    alone = populations.configure(population=1)
    Run(alone, tmp_path / "alone", qfleet.RunOptions()).go()
    policy = qfleet.load(tmp_path / "alone")
    run = Run(populations.configure(), tmp_path / "many", qfleet.RunOptions(), (), None, policy)
    try:
        for row in range(3):
            assert torch.equal(run.parts.model.weights.row(row), policy.weights.data)
    finally:
        run.close()


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["parameter-server", "actors"])
def test_servers_and_actors_start_with_the_weights(
    engine: str, source: qfleet.Trained, tmp_path: Path
) -> None:
    fields = TINY | {"engine": engine, "workers": 1, "steps": 800, "init_from": str(source.folder)}
    fields |= {"learning_rate": 1e-30, "weight_decay": 1e-30}
    warm = qfleet.train("CartPole-v1", **fields, run_dir=tmp_path / "warm")
    assert warm.result.updates > 0
    torch.testing.assert_close(newest(warm.folder)["weights"], weights_of(source))


def test_workers_do_not_send_the_statistics_of_batch_normalisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers hold weights only: evaluations would use statistics that nobody has trained."""
    (tmp_path / "batched_torso.py").write_text(
        "from torch import nn\n"
        "class Torso(nn.Sequential):\n"
        "    def __init__(self, shape):\n"
        "        super().__init__(nn.Linear(*shape, 8), nn.BatchNorm1d(8))\n"
        "class Constant(nn.Linear):\n"
        "    def __init__(self, shape):\n"
        "        super().__init__(*shape, 8)\n"
        "        self.register_buffer('scale', self.weight.new_ones(8))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny_config(network="batched_torso:Torso", envs=2, engine="parameter-server")
    with pytest.raises(ConfigError, match=says("batched_torso:Torso", "batch", "layer")):
        parameter_server.build(Setup(config, FaultLog()))
    # A constant is the same everywhere.
    config = config.replace(network="batched_torso:Constant")
    parameter_server.build(Setup(config, FaultLog())).close()
