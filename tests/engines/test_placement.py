"""Which device learns, keeps the replay and chooses the actions; accelerators are made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qfleet.agent.devices import resolve_device
from qfleet.agent.weights import FlatWeights, Mailbox
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError
from qfleet.core.types import EnvSpec
from qfleet.engines import placement
from qfleet.engines.placement import RESERVED_BYTES, Acting, Placement, place_inference
from qfleet.engines.tuning import Choice
from qfleet.memory.sizing import USABLE_PERCENT, replay_bytes
from qfleet.networks.factory import make_network
from qfleet.networks.qnetwork import QNetwork
from support.messages import holds, says

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IMAGES = EnvSpec("toy", (4, 84, 84), "uint8", 3, frame_stack=4)
VECTORS = EnvSpec("toy", (3,), "float32", 2)
PIPELINE = Config(engine="pipeline", envs=8, buffer_size=10_000)
NEEDED_BYTES = replay_bytes(IMAGES, 8, 10_000, prioritized=False)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up CUDA device with room for everything."""
    monkeypatch.setattr(
        placement, "resolve_device", lambda name, _: CUDA if name == "auto" else torch.device(name)
    )
    free(monkeypatch, 2**40)


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(placement, "free_device_bytes", lambda _: free_bytes)


def place(config: Config, in_background: bool = True) -> Placement:
    return Placement.of(config, IMAGES, in_background)


# --- devices by name --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "spec", "expected"),
    [(None, IMAGES, CPU), (CUDA, IMAGES, CUDA), (CUDA, VECTORS, CPU)],
)
def test_auto_is_the_accelerator_for_images_only(
    accelerator: torch.device | None,
    spec: EnvSpec,
    expected: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    assert resolve_device("auto", spec) == expected


@pytest.mark.parametrize("name", ["nosuch", "xpu", "cpu:x"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=says("device", name, "cpu")):
        resolve_device(name, VECTORS)
    assert resolve_device("cpu", IMAGES) == CPU


# --- replay -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("cuda")
def test_replay_that_fits_lies_beside_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, NEEDED_BYTES + RESERVED_BYTES)
    assert place(PIPELINE) == Placement(CUDA, CUDA, ahead=True, capturable=True)


@pytest.mark.usefixtures("cuda")
def test_replay_that_does_not_fit_stays_on_the_host_and_updates_are_still_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, NEEDED_BYTES + RESERVED_BYTES - 1)
    placed = place(PIPELINE)
    assert (placed.device, placed.replay, placed.capturable) == (CUDA, CPU, True)
    (note,) = placed.notes
    assert holds(note, "0.1 GiB", "cuda")
    free(monkeypatch, 0)
    assert holds(place(PIPELINE).notes[0], "0.0 GiB", "cuda")


@pytest.mark.usefixtures("cuda")
def test_of_a_large_device_a_share_is_left_free_not_only_the_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = PIPELINE.replace(buffer_size=10_000_000, steps=10_000_000)
    needed = replay_bytes(IMAGES, 8, 10_000_000, prioritized=False)
    free(monkeypatch, needed + RESERVED_BYTES)
    assert place(config).replay == CPU
    free(monkeypatch, needed * 100 // USABLE_PERCENT + 1)
    assert place(config).replay == CUDA


@pytest.mark.usefixtures("cuda")
def test_priorities_need_room_too_and_on_the_host_forbid_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = PIPELINE.replace(prioritized_replay=True)
    assert place(config).capturable is True
    free(monkeypatch, NEEDED_BYTES + RESERVED_BYTES)
    placed = place(config)
    assert (placed.replay, placed.capturable) == (CPU, False)
    assert any(holds(note, "recorded", "priorities") for note in placed.notes)


@pytest.mark.parametrize("fields", [{"replay_dir": "frames"}, {"replay_compression": "lz4"}])
@pytest.mark.usefixtures("cuda")
def test_files_and_compressed_frames_are_the_hosts(fields: dict[str, Any]) -> None:
    placed = place(PIPELINE.replace(**fields))
    assert placed.replay == CPU
    (note,) = placed.notes
    assert holds(note, "replay", "host")


@pytest.mark.parametrize(("name", "expected"), [("cpu", CPU), ("cuda", CUDA)])
@pytest.mark.usefixtures("cuda")
def test_what_was_asked_for_is_done_without_a_word(
    name: str, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 0)
    placed = place(PIPELINE.replace(replay_device=name))
    assert (placed.replay, placed.notes) == (expected, ())


@pytest.mark.parametrize(
    "fields",
    [
        {"replay_device": "mps"},
        {"replay_device": "cuda", "device": "cpu"},
        {"replay_device": "cuda", "engine": "serial"},
    ],
)
@pytest.mark.usefixtures("cuda")
def test_a_third_device_is_refused(fields: dict[str, Any]) -> None:
    name = fields["replay_device"]
    with pytest.raises(ConfigError, match=says("replay_device", name)):
        place(PIPELINE.replace(**fields))


@pytest.mark.usefixtures("cuda")
def test_serial_keeps_replay_on_the_host_whatever_learns() -> None:
    placed = place(PIPELINE.replace(engine="serial"))
    assert placed == Placement(CUDA, CPU, ahead=False, capturable=False)


# --- who works ahead --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "in_background", "ahead", "notes"),
    [
        ({"device": "cpu"}, True, True, 0),
        ({"device": "cpu"}, False, False, 1),
        ({"device": "cpu", "lockstep": True}, True, False, 0),
        ({"device": "cpu", "lockstep": True}, False, False, 0),
        ({"device": "cpu", "engine": "serial"}, True, False, 0),
        ({}, False, True, 0),
        ({"lockstep": True}, True, False, 0),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_collecting_goes_on_alone_where_it_can(
    fields: dict[str, Any], in_background: bool, ahead: bool, notes: int
) -> None:
    placed = place(PIPELINE.replace(**fields), in_background)
    assert placed.ahead is ahead
    assert len(placed.notes) == notes
    assert all("collecting in turn with learning" in note for note in placed.notes)


@pytest.mark.usefixtures("cuda")
def test_a_device_without_streams_learns_and_keeps_nothing_else() -> None:
    placed = place(PIPELINE.replace(device="mps", prioritized_replay=True))
    assert (placed.device.type, placed.replay) == ("mps", CPU)
    assert (placed.ahead, placed.capturable) == (True, False)
    (note,) = placed.notes
    assert holds(note, "recorded", "mps")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("fields", "in_background", "words"),
    [
        ({"engine": "serial", "inference_device": "cpu"}, True, "inference_device cpu"),
        ({"device": "cpu", "inference_device": "cpu"}, False, "inference_device cpu"),
        ({"device": "cpu", "precision": "tf32"}, True, "precision tf32"),
    ],
)
def test_what_would_do_nothing_is_refused(
    fields: dict[str, Any], in_background: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=says(*words.split())):
        place(PIPELINE.replace(**fields), in_background)


# --- inference --------------------------------------------------------------------------------

ON_CPU = Placement(CPU, CPU, ahead=True, capturable=False)


def network_on(device: torch.device) -> QNetwork:
    return make_network(Config(net_arch=(8,)), VECTORS, device, seed=0)


def choose(config: Config, place: Placement, source: FlatWeights) -> Acting:
    config = config.replace(net_arch=(8,))
    return place_inference(config, VECTORS, [2, 2], place, source, Choice("fp32", compiled=False))


@pytest.mark.parametrize(("asked", "how"), [("auto", "no accelerator"), ("cpu", "asked for")])
def test_on_the_host_a_network_of_the_actors_own_follows_the_learners(
    asked: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MEASURE_S", 0.005)
    source = FlatWeights(network_on(CPU))
    acting = choose(PIPELINE.replace(inference_device=asked), ON_CPU, source)
    assert acting.env_steps_per_s > 0
    assert holds(acting.note, "inference", "cpu", how, f"{acting.env_steps_per_s:,.0f}/s")
    assert acting.traffic is None
    acting.block_ready()  # nothing to wait for
    assert isinstance(acting.channel, Mailbox)
    reader = acting.channel._reader.data
    acting.channel.refresh()
    source.data.add_(1.0)
    assert not torch.equal(reader, source.data)
    acting.channel.publish(7)
    assert acting.channel.refresh() == 7
    assert torch.equal(reader, source.data)


def test_inference_elsewhere_than_the_learner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "resolve_device", lambda name, _: torch.device(name))
    with pytest.raises(ConfigError, match=says("inference_device", "cuda", "cpu")):
        choose(PIPELINE.replace(inference_device="cuda"), ON_CPU, FlatWeights(network_on(CPU)))


@pytest.mark.parametrize(
    ("rates", "best"),
    [({"cpu": 50.0, "cuda": 170.0}, "cuda"), ({"cpu": 180.0, "cuda": 70.0}, "cpu")],
)
def test_with_an_accelerator_the_quicker_one_chooses(
    rates: dict[str, float], best: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = []

    def acting_on(device: torch.device, *_: object) -> Acting:
        host: Any = None
        built.append(device.type)
        return Acting(host, host, lambda: None, None, rates[device.type], "")

    monkeypatch.setattr(placement, "_acting_on", acting_on)
    given: Any = (
        *(PIPELINE, VECTORS, [2, 2], Placement(CUDA, CUDA, ahead=True, capturable=True)),
        *(FlatWeights(network_on(CPU)), Choice("fp32", compiled=False)),
    )
    acting = place_inference(*given)
    assert acting.env_steps_per_s == max(rates.values())
    told = f"cpu {rates['cpu']:.0f}/s, cuda {rates['cuda']:.0f}/s"
    assert acting.note == f"inference on {best} (measured: {told})"
    again = place_inference(*given)
    assert built == ["cpu", "cuda", best]  # what is known is not measured again
    assert again.note == f"inference on {best} (known: {best} {rates[best]:.0f}/s)"
    assert place_inference(*given, thorough=True).note == acting.note


def test_a_device_that_is_hardly_faster_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = {"cpu": 50.0, "cuda": 70.0}
    host: Any = None
    monkeypatch.setattr(
        placement,
        "_acting_on",
        lambda device, *_: Acting(host, host, lambda: None, None, rates[device.type], ""),
    )
    for _ in range(2):
        acting = place_inference(
            *(PIPELINE, VECTORS, [2, 2], Placement(CUDA, CUDA, ahead=True, capturable=True)),
            *(FlatWeights(network_on(CPU)), Choice("fp32", compiled=False)),
        )
        assert acting.note == "inference on cuda (measured: cpu 50/s, cuda 70/s)"


# --- the device engine ------------------------------------------------------------------------

DEVICE = Config(engine="device", envs=8, buffer_size=10_000)


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [(None, CPU), (CUDA, CUDA), (torch.device("mps"), CPU)],
)
def test_the_device_engine_takes_an_accelerator_for_vectors_too(
    accelerator: torch.device | None, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    on_cuda = expected.type == "cuda"
    assert Placement.of(DEVICE, VECTORS, in_background=False) == Placement(
        expected, expected, ahead=False, capturable=on_cuda
    )


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"replay_device": "cpu"}, "replay_device cpu engine device cuda"),
        ({"replay_dir": "files"}, "replay_dir replay_compression"),
        ({"replay_compression": "lz4"}, "replay_dir replay_compression"),
        ({"device": "mps"}, "mps --device cpu"),
        ({"device": "cpu", "precision": "fp16"}, "precision fp16 CPU"),
    ],
)
def test_the_device_engine_keeps_everything_together(fields: dict[str, Any], words: str) -> None:
    asked = {"device": "cuda", **fields}
    with pytest.raises(ConfigError, match=says(*words.split())):
        Placement.of(DEVICE.replace(**asked), VECTORS, in_background=False)


def test_on_a_cpu_the_device_engine_may_keep_replay_in_files() -> None:
    config = DEVICE.replace(device="cpu", replay_dir="files", replay_device="cpu")
    assert Placement.of(config, VECTORS, in_background=False).replay == CPU
