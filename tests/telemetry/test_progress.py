from __future__ import annotations

import errno
import io
import os

import pytest
from rich.console import Console

from qfleet.telemetry.progress import Progress, choose_mode

SCALARS = {
    "rollout/ep_rew_mean": 87.2,
    "eval/mean_reward": 120.1,
    "rollout/exploration_rate": 0.43,
    "train/loss": 0.012,
}
SHARES = {"env": 0.21, "act": 0.1, "copy": None, "learn": 0.63, "idle": 0.06}


def plain(total: int, clock) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(total, Console(file=stream, width=40), "plain", clock), stream


def test_a_plain_line_says_everything_on_one_line(clock) -> None:
    progress, stream = plain(50_000, clock)
    progress.start(0)
    clock.now_s += 8.38
    progress.update(12_000, SCALARS, SHARES)
    assert stream.getvalue() == (
        "12,000/50,000 steps  24%  1,432/s  return 87.2  eval 120.1  ε 0.43  loss 0.012  "
        "env 21% act 10% learn 63%  left 27 s\n"
    )


def test_missing_values_leave_their_part_out_and_old_ones_stay(clock) -> None:
    progress, stream = plain(1000, clock)
    progress.update(0, {}, {})
    progress.start(0)
    clock.now_s += 10
    progress.update(100, {"train/loss": float("nan"), "eval/mean_reward": 5.0}, {"env": None})
    clock.now_s += 10
    progress.update(200, {"train/loss": None, "other": 1.0}, {})
    assert stream.getvalue().splitlines() == [
        "0/1,000 steps  0%",
        "100/1,000 steps  10%  10/s  eval 5.00  left 1 m 30 s",
        "200/1,000 steps  20%  10/s  eval 5.00  left 1 m 20 s",
    ]


def test_plain_lines_are_two_seconds_apart_besides_first_and_last(clock) -> None:
    progress, stream = plain(1000, clock)
    with progress:
        progress.start(0)
        for step in range(1, 1001):
            clock.now_s += 0.005
            progress.update(step, {}, {})
    steps = [line.split("/")[0] for line in stream.getvalue().splitlines()]
    assert steps[0] == "1"
    assert steps[-1] == "1,000"
    assert len(steps) == 4  # 0 s, 2 s, 4 s and the last, in 5 s
    progress.stop()
    assert len(stream.getvalue().splitlines()) == 4
    assert "left" not in stream.getvalue().splitlines()[-1]


def test_the_speed_is_that_of_the_recent_past_and_of_this_process(clock) -> None:
    progress, stream = plain(10_000, clock)
    progress.start(5000)  # resumed
    clock.now_s += 3
    progress.update(5300, {}, {})
    for second in range(100):
        clock.now_s += 1
        progress.update(5300 + (second + 1) * 10, {}, {})
    lines = stream.getvalue().splitlines()
    assert "53%  100/s" in lines[0]
    assert "  10/s" in lines[-1]


def test_more_steps_than_planned_and_a_standstill_do_no_harm(clock) -> None:
    progress, stream = plain(100, clock)
    progress.start(100)
    clock.now_s += 5
    progress.update(100, {}, {})
    clock.now_s += 5
    progress.update(110, {}, {})
    assert "110/100 steps  100%" in stream.getvalue()
    stalled, stream = plain(100, clock)
    stalled.start(50)
    clock.now_s += 5
    stalled.update(50, {}, {})
    assert stream.getvalue() == "50/100 steps  50%  0.0/s\n"


def test_messages_are_printed_as_they_are(clock) -> None:
    progress, stream = plain(100, clock)
    progress.message("env_reward ×37: env [3] step 120")
    assert stream.getvalue() == "env_reward ×37: env [3] step 120\n"


def test_a_narrow_encoding_gets_letters_it_knows(clock) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    progress = Progress(100, Console(file=stream), "plain", clock)
    progress.update(10, {"rollout/exploration_rate": 0.5}, {})
    progress.message("a ×2: ü")
    stream.flush()
    assert raw.getvalue().split(b"\n")[:2] == [b"10/100 steps  10%  eps 0.50", b"a x2: ?"]


def test_progress_leaves_standard_output_alone(capsys) -> None:
    Progress(100, mode="plain").update(10, {}, {})
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "10/100 steps  10%\n")


def test_silent_prints_messages_only(clock) -> None:
    stream = io.StringIO()
    with Progress(100, Console(file=stream), "silent", clock) as progress:
        progress.start(0)
        progress.update(50, SCALARS, SHARES)
        assert stream.getvalue() == ""
        progress.message("a checkpoint is damaged")
    assert stream.getvalue() == "a checkpoint is damaged\n"


def test_live_shows_the_best_evaluation_and_the_stages(clock) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with Progress(50_000, console, "live", clock) as progress:
        progress.start(0)
        clock.now_s += 10
        progress.update(12_000, SCALARS, SHARES)
        progress.update(12_000, {"eval/mean_reward": 3.0}, SHARES)
        progress.message("env_reward ×1: NaN")
    text = stream.getvalue()
    for part in ("24%", "1,200/s", "32 s left", "return 87.2", "best eval 120.1", "ε 0.43"):
        assert part in text
    assert "█" * 30 in text  # 7 + 3 + 20 of 32 cells
    assert "env 21%  act 10%  learn 63%" in text
    assert "env_reward ×1: NaN\n" in text


def test_plain_shows_only_long_evaluations(clock) -> None:
    progress, stream = plain(100, clock)
    with progress.evaluating(10) as show:
        for finished in range(10):
            clock.now_s += 0.9
            show(finished)
    assert stream.getvalue() == ""
    with progress.evaluating(10) as show:
        for finished in range(10):
            clock.now_s += 3.0
            show(finished)
    assert stream.getvalue() == "evaluating 3/10\nevaluating 7/10\n"


def test_live_shows_an_evaluation_until_it_ends(clock) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, color_system=None)
    with Progress(100, console, "live", clock) as progress:
        progress.start(0)
        with progress.evaluating(10) as show:
            show(3)
            console.print(progress._render())
        assert "evaluating 3/10" in stream.getvalue()
        stream.truncate(0)
        console.print(progress._render())
        assert "evaluating" not in stream.getvalue()


def test_live_survives_having_nothing_to_show(clock) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with Progress(0, console, "live", clock) as progress:
        progress.start(0)
        progress.update(0, {}, {})
    assert "collecting" in stream.getvalue()


def test_choose_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert choose_mode(False, Terminal()) == "live"
    assert choose_mode(False, io.StringIO()) == "plain"
    assert choose_mode(True, Terminal()) == "silent"
    monkeypatch.setenv("TERM", "dumb")
    assert choose_mode(False, Terminal()) == "plain"


@pytest.mark.parametrize(("installed", "mode"), [(True, "live"), (False, "plain")])
def test_a_notebook_redraws_only_with_ipywidgets(
    installed: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    found = object() if installed else None
    monkeypatch.setattr("qfleet.telemetry.progress.find_spec", lambda _: found)
    assert choose_mode(False, io.StringIO()) == mode
    assert choose_mode(True, io.StringIO()) == "silent"


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ENOSPC])
def test_training_goes_on_when_the_progress_cannot_be_written(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``2>&1 | head``, where rich would end the program, or a log on a full disk."""

    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr("sys.stderr", Closed())
    progress = Progress(100)
    for _ in range(2):
        progress.message("a fault")
