"""Which precision, and compiled or not: the quickest that works, asked for once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qfleet.accelerator.compiling import PLAINER, Compilable, switch
from qfleet.config.config import Config
from qfleet.core.types import EnvSpec
from qfleet.engines.cluster.state_arrays import copy_state
from qfleet.engines.torch_settings import TorchSettings
from qfleet.engines.tuning import (
    COMPILING_S,
    Choice,
    apply_choice,
    apply_precision,
    candidates,
    may_compile,
    tune,
    tuning_key,
)
from qfleet.networks.factory import make_network

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, TF32, BF16 = (Choice(p, compiled=False) for p in ("fp32", "tf32", "bf16"))
OPTIONS = [FP32, TF32, BF16]
KEY = {"device": "cuda", "batch_size": 32}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Stopwatch:
    """Times choices as a table says; an error in it is raised. Remembers what it was asked."""

    def __init__(self, table: dict[str, float | Exception]) -> None:
        self._table = table
        self.asked: list[str] = []

    def __call__(self, choice: Choice) -> float:
        self.asked.append(str(choice))
        found = self._table[str(choice)]
        if isinstance(found, Exception):
            raise found
        return found


# --- tune -------------------------------------------------------------------------------------


def test_the_quickest_is_chosen_and_compiling_tried_for_it_alone() -> None:
    watch = Stopwatch({"fp32": 3.0, "tf32": 1.0, "bf16": 2.0, "tf32, compiled": 0.5})
    tuning = tune(OPTIONS, True, watch, KEY, thorough=True)
    assert tuning.choice == Choice("tf32", compiled=True)
    assert watch.asked == ["fp32", "tf32", "bf16", "tf32, compiled"]
    assert tuning.update_s == {"fp32": 3.0, "tf32": 1.0, "bf16": 2.0, "tf32, compiled": 0.5}
    assert (tuning.failed, tuning.from_cache) == ({}, False)


def test_compiling_that_does_not_pay_is_not_chosen() -> None:
    watch = Stopwatch({"fp32": 2.0, "fp32, compiled": 2.5})
    assert tune([FP32], True, watch, KEY, thorough=True).choice == FP32


def test_nothing_is_compiled_unasked() -> None:
    watch = Stopwatch({"fp32": 2.0, "tf32": 3.0, "bf16": 4.0})
    assert tune(OPTIONS, False, watch, KEY, thorough=True).choice == FP32
    assert watch.asked == ["fp32", "tf32", "bf16"]


def test_what_fails_is_passed_over_and_reported() -> None:
    table: dict[str, float | Exception] = {
        "fp32": 3.0,
        "tf32": RuntimeError("no such unit\nand a long trace"),
        "bf16": 2.0,
        "bf16, compiled": OSError(),
    }
    tuning = tune(OPTIONS, True, Stopwatch(table), KEY, thorough=True)
    assert tuning.choice == BF16
    assert tuning.update_s == {"fp32": 3.0, "bf16": 2.0}
    assert tuning.failed == {"tf32": "RuntimeError: no such unit", "bf16, compiled": "OSError: -"}


def test_the_first_option_must_work() -> None:
    watch = Stopwatch({"fp32": RuntimeError("out of memory"), "tf32": 1.0, "bf16": 1.0})
    with pytest.raises(RuntimeError, match="out of memory"):
        tune(OPTIONS, False, watch, KEY, thorough=True)
    again = Stopwatch({"fp32": 1.0})
    assert (
        tune([FP32], False, again, KEY, thorough=True).from_cache is False
    )  # a failure is not remembered


def test_what_was_found_is_remembered_by_its_key() -> None:
    table: dict[str, float | Exception] = {
        "fp32": 3.0,
        "tf32": ValueError("odd"),
        "bf16": 1.0,
        "bf16, compiled": 0.5,
    }
    first = tune(OPTIONS, True, Stopwatch(table), KEY, thorough=True)
    idle = Stopwatch({})
    second = tune(OPTIONS, True, idle, KEY, thorough=True)
    assert second.from_cache is True
    assert idle.asked == []
    assert second.choice == first.choice
    assert (second.update_s, second.failed) == (first.update_s, first.failed)
    other = Stopwatch(table)
    assert tune(OPTIONS, True, other, {**KEY, "batch_size": 64}, thorough=True).from_cache is False
    assert len(other.asked) == 4


@pytest.mark.parametrize("compiles", [True, False])
def test_a_run_takes_the_usual_choice_without_measuring_others(compiles: bool) -> None:
    usual = Choice("bf16", compiled=compiles)
    watch = Stopwatch({str(usual): 9.0})
    tuning = tune(OPTIONS, compiles, watch, KEY)
    assert tuning.choice == usual
    assert watch.asked == [str(usual)]
    assert tune(OPTIONS, compiles, Stopwatch({}), KEY).from_cache is True
    # What was not measured is no answer to a user who wants it measured.
    all_of_them = {str(option): 1.0 for option in OPTIONS} | {"fp32, compiled": 2.0}
    measured = tune(OPTIONS, compiles, Stopwatch(dict(all_of_them)), KEY, thorough=True)
    assert (measured.choice, measured.from_cache) == (FP32, False)
    assert tune(OPTIONS, compiles, Stopwatch({}), KEY).choice == FP32


def test_what_was_measured_serves_runs_that_compile_and_runs_that_do_not() -> None:
    table: dict[str, float | Exception] = {
        "fp32": 3.0, "tf32": 2.0, "bf16": 2.5, "tf32, compiled": 1.0,
    }  # fmt: skip
    assert str(tune(OPTIONS, True, Stopwatch(table), KEY, thorough=True).choice) == "tf32, compiled"
    for compiles, choice in ((True, Choice("tf32", compiled=True)), (False, TF32)):
        known = tune(OPTIONS, compiles, Stopwatch({}), KEY)
        assert (known.choice, known.from_cache) == (choice, True)


def test_a_usual_choice_that_fails_is_replaced_by_the_next() -> None:
    refused = RuntimeError("refused")
    table: dict[str, float | Exception] = dict.fromkeys(
        ("bf16, compiled", "bf16", "tf32, compiled"), refused
    ) | {"tf32": 1.0}
    tuning = tune(OPTIONS, True, Stopwatch(table), KEY)
    assert tuning.choice == TF32
    assert list(tuning.failed) == ["bf16, compiled", "bf16", "tf32, compiled"]


# --- what may be tried ------------------------------------------------------------------------


def test_the_plainest_comes_first_and_what_was_asked_for_alone() -> None:
    assert candidates(Config(), CUDA) == [FP32, TF32]
    assert candidates(Config(), torch.device("mps")) == [FP32]
    assert candidates(Config(precision="bf16"), CUDA) == [BF16]
    assert candidates(Config(precision="tf32"), torch.device("mps")) == [TF32]


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [("auto", CUDA, True), ("auto", CPU, False), ("on", CPU, True), ("off", CUDA, False)],
)
def test_when_to_compile(asked: str, device: torch.device, expected: bool) -> None:
    config = Config().replace(compile=asked)
    assert may_compile(config, device, saved_s=COMPILING_S + 1) is expected
    assert may_compile(config, device, saved_s=COMPILING_S - 1) is (asked == "on")
    assert may_compile(config, device, saved_s=0, thorough=True) is expected


def test_the_key_changes_with_whatever_may_change_the_choice() -> None:
    layout: list[list[object]] = [["torso.0.weight", [4, 16]]]
    base = tuning_key(Config(), CUDA, layout, 8)
    assert base == tuning_key(Config(seed=3, steps=500, learning_rate=1.0), CUDA, layout, 8)
    others = [
        tuning_key(Config(batch_size=64), CUDA, layout, 8),
        tuning_key(Config(double=True), CUDA, layout, 8),
        tuning_key(Config(prioritized_replay=True), CUDA, layout, 8),
        tuning_key(Config(replay=False), CUDA, layout, 8),
        tuning_key(Config(precision="bf16"), CUDA, layout, 8),
        tuning_key(Config(graphs=False), CUDA, layout, 8),
        tuning_key(Config(), CUDA, [["torso.0.weight", [4, 32]]], 8),
        tuning_key(Config(), CUDA, layout, 4),
        tuning_key(Config(), torch.device("cuda:1"), layout, 8),
    ]
    everything = [base, *others]
    assert all(everything.count(key) == 1 for key in everything)


# --- putting a choice in force ----------------------------------------------------------------


def torch_state() -> tuple[object, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.parametrize(
    ("choice", "precision", "allow_tf32", "autocast"),
    [
        (FP32, "highest", False, None),
        (TF32, "high", True, None),
        (Choice("bf16", compiled=True), "high", True, torch.bfloat16),
    ],
    ids=str,
)
def test_a_choice_is_put_in_force_and_torchs_settings_given_back(
    choice: Choice, precision: str, allow_tf32: bool, autocast: torch.dtype | None
) -> None:
    network = make_network(Config(), EnvSpec("toy", (3,), "float32", 2), CPU, seed=0)
    function = Compilable(torch.neg)
    function.on = not choice.compiled
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = not allow_tf32
    torch.backends.cudnn.benchmark = False
    mkldnn = False
    torch.backends.mkldnn.set_flags(mkldnn)  # type: ignore[no-untyped-call]
    before, settings = torch_state(), TorchSettings()
    apply_choice(choice, [network], [function])
    assert torch_state() == (precision, allow_tf32, True)
    assert network.autocast_dtype == autocast
    assert function.on is choice.compiled
    assert torch.backends.mkldnn.enabled == (autocast is not None or mkldnn)
    settings.restore()
    assert torch_state() == before


@pytest.mark.parametrize(("asked", "choice"), [("tf32", TF32), ("bf16", BF16), ("fp32", FP32)])
def test_what_was_asked_for_is_in_force_where_nothing_is_tried(asked: Any, choice: Choice) -> None:
    settings = TorchSettings()
    apply_choice(choice, [], [])
    expected = torch_state()
    settings.restore()
    network = make_network(Config(), EnvSpec("toy", (3,), "float32", 2), CPU, seed=0)
    assert apply_precision(Config(precision=asked), [network]) == choice
    assert torch_state() == expected
    assert network.autocast_dtype == (torch.bfloat16 if asked == "bf16" else None)


def test_where_nothing_was_asked_for_torch_is_left_alone() -> None:
    network = make_network(Config(), EnvSpec("toy", (3,), "float32", 2), CPU, seed=0)
    torch.set_float32_matmul_precision("medium")
    before = torch_state()
    assert apply_precision(Config(), [network]) == FP32
    assert torch_state() == before
    assert network.autocast_dtype is None


def test_settings_of_threads_are_given_back_too() -> None:
    before = (torch.get_num_threads(), torch.backends.mkldnn.enabled)
    settings = TorchSettings()
    torch.set_num_threads(before[0] + 1)
    torch.backends.mkldnn.set_flags(not before[1])  # type: ignore[no-untyped-call]
    settings.restore()
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == before


def test_a_copied_state_is_out_of_reach() -> None:
    state = {"weights": torch.ones(2), "deep": {"noise": torch.ones(2), "count": 3}}
    kept = copy_state(state)
    state["weights"].zero_()  # type: ignore[attr-defined]
    state["deep"]["noise"].zero_()  # type: ignore[index]
    assert kept["weights"].tolist() == kept["deep"]["noise"].tolist() == [1.0, 1.0]
    assert kept["deep"]["count"] == 3


# --- compilables ------------------------------------------------------------------------------


def double(x: Tensor) -> Tensor:
    return x * 2


class Compiler:
    """Stands in for torch.compile; what it makes behaves as ``then`` says."""

    def __init__(self, then: Callable[..., Any]) -> None:
        self._then = then
        self.compiled: list[Callable[..., Any]] = []
        self.options: list[dict[str, Any] | None] = []

    def __call__(
        self, function: Callable[..., Any], dynamic: bool, options: dict[str, Any] | None
    ) -> Callable[..., Any]:
        assert dynamic is False
        assert options is None or set(options) <= set(torch._inductor.list_options())
        self.compiled.append(function)
        self.options.append(options)
        return self._then


def refuse(*_: object) -> Tensor:
    raise RuntimeError("\n  Unsupported: call of a generator\n  from user code")


def test_a_compilable_is_plain_until_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(lambda x: x * 3)
    monkeypatch.setattr(torch, "compile", compiler)
    function = Compilable(double)
    assert function(torch.ones(1)).item() == 2
    assert compiler.compiled == []
    switch([function], True)
    assert [function(torch.ones(1)).item() for _ in range(2)] == [3, 3]
    assert compiler.compiled == [double]  # once
    switch([function], False)
    assert function(torch.ones(1)).item() == 2
    assert function.failure is None


def test_what_cannot_be_compiled_stays_plain_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(refuse)
    monkeypatch.setattr(torch, "compile", compiler)
    function = Compilable(double)
    function.on = True
    assert [function(torch.ones(1)).item() for _ in range(3)] == [2, 2, 2]
    assert function.failure == "RuntimeError: Unsupported: call of a generator"
    assert function.name == "double"
    assert compiler.options == [None, PLAINER]  # then it is not tried again


def test_what_is_too_much_for_the_compiler_is_tried_again_in_smaller_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Compiler(refuse)

    def second_try(*arguments: Any, **options: Any) -> Callable[..., Any]:
        compiler._then = refuse if options["options"] is None else lambda x: x * 3
        return compiler(*arguments, **options)

    monkeypatch.setattr(torch, "compile", second_try)
    function = Compilable(double)
    function.on = True
    assert [function(torch.ones(1)).item() for _ in range(2)] == [3, 3]
    assert function.failure is None
    assert compiler.options == [None, PLAINER]


def test_a_torch_without_a_compiler_is_a_failure_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("torch.compile is not supported here")

    monkeypatch.setattr(torch, "compile", no_compiler)
    function = Compilable(double)
    function.on = True
    assert function(torch.ones(1)).item() == 2
    assert function.failure == "RuntimeError: torch.compile is not supported here"
