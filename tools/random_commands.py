"""Run random command lines; report those that end in a traceback, a hang or a long error.

    python tools/random_commands.py --count 200 --seed 0
    python tools/random_commands.py --count 20 --seed 7 --show      (print them, run nothing)

Lines are drawn for every verb from its options, whose names and types are read from the package:
valid values, and values of a wrong type, out of range, missing, misspelt, huge, empty, not ASCII;
files that are missing, empty, binary or folders. Each line runs as a process in its own copy of a
folder with two small runs. It must end within the time limit, in success (exit code 0) or with an
error whose last line on standard error begins with "qfleet". A line that runs out of time is run
once more at the end, alone: other processes may have slowed it down. Exit code 1 if a line fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import inspect
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from qfleet.cli.doctor import DoctorOptions
from qfleet.cli.evaluate import EvaluateOptions
from qfleet.cli.lab import MazeOptions
from qfleet.cli.lab_mapreduce import MapReduceOptions
from qfleet.cli.lab_speedup import SpeedupOptions
from qfleet.cli.main import VERBS
from qfleet.cli.plot import plot
from qfleet.cli.profile import ProfileOptions
from qfleet.cli.resume import ResumeOptions
from qfleet.cli.run_options import RunArguments
from qfleet.cli.runs import runs
from qfleet.cli.scale import ScaleOptions
from qfleet.cli.train import TrainOptions
from qfleet.cli.video import VideoOptions
from qfleet.config.algorithms import ALGORITHMS
from qfleet.config.config import FIELDS, OPTIONS
from qfleet.config.recipes import PRESETS
from qfleet.config.words import ALIASES

TIMEOUT_S = 60.0
TIMED_OUT = "did not end within the time limit"
TINY = {
    "--steps": "120", "--learning-starts": "20", "--n-eval-episodes": "1", "--engine": "serial",
    "--max-episode-steps": "30", "--device": "cpu", "--max-wall": "20s", "--compile": "off",
}  # fmt: skip
"""Options of most lines that train; a line may override or lose some of them."""

ENVS = (
    "CartPole-v1", "CartPole-v1", "CartPole-v1", "Acrobot-v1", "MountainCar-v0", "FrozenLake-v1",
    "MinAtar/Breakout-v1", "gymnasium.envs.classic_control:CartPoleEnv", "CartPole", "frozen_lake",
)  # fmt: skip
BAD_ENVS = (
    "CartPol-v1", "cartpol", "ALE/Pnog-v5", "Pendulum-v1", "", "no.such.module:Env", "os:path",
    "gymnasium:CartPole-v1", "json:NoEnv-v0", "päckchen:Ümgebung", ":", "a:b:c", "-v1", "../../x",
    "MinAtar/Nothing-v1", "files/garbage.json", "\udcff",
)  # fmt: skip
FILES = (
    "files/missing.json", "files/empty.json", "files/garbage.json", "files/binary.json",
    "files/list.json", "files/types.json", "files/unknown.json", "files/ünï.json", "files",
    "files/empty.json/below", "/proc/version", "/", "", "x" * 300, "files/garbage.yaml",
    "files/aliases.yaml", "files/tag.yaml", "files/garbage.toml", "files/missing.toml",
)  # fmt: skip
RUNS = (
    "done", "stopped", "runs/done", "runs/stopped", "runs", ".", "dnoe", "files", "broken", "",
    "runs/done/config.json", "../done", "[bold]", "ünï", "files/binary.json",
)  # fmt: skip
TEXTS = (
    "", " ", "abc", "ünïcödé", "日本", "\udcff", "-1", "-", "--", "1e400", "nan", "inf", "-inf",
    "0", "10" * 20, "-" + "9" * 30, "1.5", "1,2", "[1]", "{}", '{"a": NaN}', "None", "True", "a\nb",
    "%s", "$HOME", "'", "*", "0x10", "1_000", "٣", "1e3", "2k", "1.5k", "1e99", "9M", "64,64", ",",
    "1e-3", "a=b", "=",
)  # fmt: skip
LARGE = ("1_000", "1e3", "2k", "1.5k", "1e99", "9M")
"""Texts that are large whole numbers."""

KNOWN = {
    "--algo": tuple(ALGORITHMS), "--preset": (*PRESETS, "none", "list"),
    "--device": ("cpu", "auto"), "--network": ("auto", "mlp"), "--replay-device": ("auto", "cpu"),
    "--replay-dir": ("", "ring"), "--inference-device": ("auto", "cpu"), "--env": ENVS,
    "--env-kwargs": ("{}",), "--vary": ("{}",), "--address": ("",), "--imports": ("json", "math"),
    "--max-wall": ("5s", "1m"),
    "--name": ("some-name", "ünï"), "--run-dir": ("made", "runs/made"), "--root": ("runs", "files"),
    "--config": (
        "runs/done/config.json", "files/good.json", "done", "runs/stopped", "files/good.yaml",
        "files/good.toml",
    ),
    "--sort": ("return", "env", "steps/s"), "--filter": ("env=Cart*", "state=finished", "seed=0"),
    "--maze": ("files/maze.txt",),
    "--out": ("out.png", "out/x.svg", "out.pdf"), "--metric": ("eval/mean_reward", "train/loss"),
    "--workers": ("1", "2"), "--updates": ("sync",), "--fields": ("{}",), "--straggler": ("1",),
}  # fmt: skip
"""Valid values of options whose type does not say them."""

SLOW = {
    "--total-timesteps", "--n-timesteps", "--timesteps",
    "--seconds", "--steps", "--episodes", "--max-wall", "--stop-after", "--steps-per-worker",
    "--gradient-steps",
}  # fmt: skip
"""Options for which a large number is a valid request for a long time."""


class Kind(NamedTuple):
    """The type of an option's value, and its bounds."""

    type: Any
    bounds: dict[str, float]


def read_options(*sources: Callable[..., Any]) -> dict[str, Kind]:
    """Return the options of dataclasses or functions, without positional arguments."""
    found: dict[str, Kind] = {}
    for source in sources:
        hints = typing.get_type_hints(source)
        for name in inspect.signature(source).parameters:
            if name not in ("run", "runs", "run_arguments"):
                found["--" + name.strip("_").replace("_", "-")] = Kind(hints[name], {})
    return found


def read_fields() -> dict[str, Kind]:
    named = ((name, Kind(FIELDS[name], OPTIONS[name].bounds)) for name in FIELDS)
    kinds = {"--" + name.replace("_", "-"): kind for name, kind in named}
    aliases = {"--" + alias.replace("_", "-"): name for alias, name in ALIASES.items()}
    return {
        **kinds,
        **{alias: kinds["--" + name.replace("_", "-")] for alias, name in aliases.items()},
    }


class Drawer:
    """Draws command lines from one random generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._train = {**read_fields(), **read_options(TrainOptions, RunArguments)}
        self._profile = {**read_fields(), **read_options(ProfileOptions)}
        self._verbs: list[tuple[int, Callable[[], list[str]]]] = [
            (48, self.train),
            (3, self.profile),
            (10, lambda: self.of_run("evaluate", EvaluateOptions)),
            (8, lambda: self.of_run("resume", ResumeOptions, RunArguments)),
            (7, lambda: self.of_run("plot", plot)),
            (5, lambda: self.of_run("video", VideoOptions)),
            (4, lambda: self.of_run("scale", ScaleOptions)),
            (4, lambda: ["runs", *self.options(read_options(runs))]),
            (2, lambda: ["completion", self._random.choice(("bash", "zsh", "fish", *TEXTS))]),
            (3, self.doctor),
            (
                5,
                lambda: [
                    "lab",
                    "maze",
                    *self.options(read_options(MazeOptions), {"--episodes": "50"}),
                ],
            ),
            (2, self.cluster),
            (3, self.odd),
        ]

    def line(self) -> list[str]:
        weights = [weight for weight, _ in self._verbs]
        (draw,) = self._random.choices([draw for _, draw in self._verbs], weights)
        return draw()

    # --- verbs ----------------------------------------------------------------------------------

    def train(self) -> list[str]:
        base = dict(TINY)
        base["--engine"] = self._random.choices(
            ("serial", "pipeline", "device", "auto", "actors", "parameter-server"),
            (82, 8, 7, 1, 1, 1),
        )[0]
        if base["--engine"] == "device":
            base["--envs"] = "4"
        return ["train", *self._task(), *self.options(self._train, base)]

    def profile(self) -> list[str]:
        base = {name: TINY[name] for name in ("--engine", "--device", "--compile")}
        return [
            "profile",
            *self._task(),
            *self.options(self._profile, {**base, "--seconds": "0.5"}),
        ]

    def of_run(self, verb: str, *sources: Callable[..., Any]) -> list[str]:
        """Return a line of a verb that reads a run."""
        good = self._random.random() < 0.6
        run = self._random.choice(("done", "stopped", "runs/stopped") if good else RUNS)
        base = {"evaluate": {"--episodes": "2"}, "scale": {"--workers": "2"}}.get(verb, {})
        if verb == "resume":
            base = {"--max-wall": "20s", "--device": "cpu"}
        words = [] if self._random.random() < 0.03 else [run]
        return [verb, *words, *self.options(read_options(*sources), base)]

    def doctor(self) -> list[str]:
        base = {"--seconds": "0.02", "--envs": "2"}
        return ["doctor", *self.options(read_options(DoctorOptions), base)]

    def cluster(self) -> list[str]:
        """Return a line of an experiment that starts Ray; most are refused before that."""
        name, source, base = self._random.choice(
            [
                ("mapreduce", MapReduceOptions, {"--samples": "200", "--workers": "1"}),
                ("speedup", SpeedupOptions, {"--steps-per-worker": "50", "--workers": "1"}),
            ]
        )
        wrong = self._random.choice([*read_options(source)])
        options = {**base, wrong: self.wrong()}
        return ["lab", name, *(word for pair in options.items() for word in pair)]

    def odd(self) -> list[str]:
        return self._random.choice(
            [
                [],
                ["--help"],
                ["--version"],
                ["help"],
                ["-V"],
                ["trian", "CartPole-v1"],
                [""],
                ["ünï"],
                ["--debug"],
                ["\udcff"],
                ["lab"],
                ["lab", "mazze"],
                ["--steps", "3"],
                [self._random.choice(VERBS), "--help"],
                ["train", "CartPole-v1", "--help-all"],
                [self._random.choice(VERBS), *self._random.choices(TEXTS, k=2)],
            ]
        )

    def _task(self) -> list[str]:
        draw = self._random.random()
        if draw < 0.03:
            return []
        return [self._random.choice(ENVS if draw < 0.85 else BAD_ENVS)]

    # --- options --------------------------------------------------------------------------------

    def options(self, kinds: dict[str, Kind], base: dict[str, str] | None = None) -> list[str]:
        """Return the options of ``base`` and 0 to 4 of ``kinds``, most with a valid value."""
        given: dict[str, list[str]] = {name: [value] for name, value in (base or {}).items()}
        mangled = self._random.random() < 0.6
        count = min(len(kinds), self._random.choice((0, 1, 1, 2, 2, 3, 4)))
        for name in self._random.sample([*kinds], count):
            wrong = mangled and self._random.random() < 0.5
            if name in SLOW and name in given and not wrong:
                continue
            if kinds[name].type is bool and not wrong:
                given[self._random.choice((name, "--no-" + name[2:]))] = []
            elif not wrong:
                given[name] = self.valid(name, kinds[name])
            elif not (name in SLOW and name in given and self._random.random() < 0.5):
                given[name] = [self.wrong(name in SLOW)]
        words = [word for name, values in given.items() for word in (name, *values)]
        return self._mangle(words) if mangled and self._random.random() < 0.25 else words

    def valid(self, name: str, kind: Kind) -> list[str]:
        """Return a value that the option's type and bounds allow; several for a tuple."""
        if name in KNOWN:
            return [self._random.choice(KNOWN[name])]
        origin, arguments = typing.get_origin(kind.type), typing.get_args(kind.type)
        if origin is typing.Literal:
            choices = [c for c in arguments if name != "--engine" or c in ("serial", "pipeline")]
            return [self._random.choice(choices)]
        if origin in (typing.Union, types.UnionType):
            return self.valid(name, Kind(arguments[0], kind.bounds))
        if origin is tuple:
            of = Kind(arguments[0], kind.bounds)
            words = [w for _ in range(self._random.randint(1, 3)) for w in self.valid("", of)]
            return words if self._random.random() < 0.5 else [",".join(words)]
        low = max(kind.bounds.get("≥", 0), kind.bounds.get(">", -1))
        if kind.type is int:
            number = int(low) + self._random.choice((0, 1, 2, 8, 33))
            return [self._random.choice((f"{number}", f"{number}", f"{number}e0", f"{number}.0"))]
        if kind.type is float:
            high = min(kind.bounds.get("≤", low + 2), kind.bounds.get("<", low + 2))
            return [f"{self._random.uniform(low, high):.3g}"]
        return [self._random.choice(FILES if kind.type is Path else TEXTS)]

    def wrong(self, is_slow: bool = False) -> str:
        if is_slow:
            return self._random.choice(
                [text for text in TEXTS if len(text) < 20 and text not in LARGE]
            )
        return self._random.choice((*TEXTS, *FILES))

    def _mangle(self, words: list[str]) -> list[str]:
        """Return the words with one slip of the pen."""
        at = self._random.randrange(len(words) or 1)
        word = words[at] if words else "--"
        letter = self._random.randrange(1, max(2, len(word)))
        slips: list[list[str]] = [
            words[:-1],
            words[:at] + words[at + 1 :],
            [*words[:at], word[:letter] + word[letter + 1 :], *words[at + 1 :]],
            [*words[:at], word[:letter] + "ü" + word[letter:], *words[at + 1 :]],
            [*words[:at], self._random.choice(TEXTS), *words[at:]],
            [*words, *words[at : at + 2]],
            [word.replace("--", "–", 1) if i == at else word for i, word in enumerate(words)],
            [*words, f"--{self._random.choice(TEXTS)}"],
        ]
        return self._random.choice(slips)


def draw_lines(count: int, seed: int) -> list[list[str]]:
    drawer = Drawer(seed)
    return [drawer.line() for _ in range(count)]


# --- running --------------------------------------------------------------------------------------


def command(line: list[str]) -> list[str]:
    return [sys.executable, "-m", "qfleet.cli.main", *line]


def call(line: list[str], folder: Path) -> None:
    subprocess.run(command(line), cwd=folder, check=True, stdout=subprocess.DEVNULL)


def make_folder(folder: Path, call: Callable[[list[str], Path], object] = call) -> None:
    """Write the files that lines refer to, and train two small runs by calling ``call``."""
    files = folder / "files"
    files.mkdir(parents=True)
    texts = {
        "empty.json": "", "garbage.json": "{steps: }}", "list.json": "[1, 2]", "good.json": "{}",
        "types.json": '{"steps": "many", "net_arch": 3}', "unknown.json": '{"stepz": 3}',
        "ünï.json": '{"env": "Ünï-v0"}', "maze.txt": "S..\n.#.\n..G\n", "good.toml": "lr = 1e-3\n",
        "good.yaml": "lr: 1e-3\ngamma: 0.9\n", "garbage.yaml": "{steps: }}", "garbage.toml": "x =",
        "aliases.yaml": "a: &a 1\nb: *a\n", "tag.yaml": "env: !!python/name:os.system\n",
    }  # fmt: skip
    for name, text in texts.items():
        (files / name).write_text(text, encoding="utf-8")
    (files / "binary.json").write_bytes(bytes(range(256)) * 4)
    (folder / "runs" / "broken").mkdir(parents=True)
    (folder / "runs" / "broken" / "config.json").write_bytes(b"\xff\x00")
    tiny = [word for pair in TINY.items() for word in pair]
    for name, more in (("done", []), ("stopped", ["--stop-after", "60"])):
        line = ["train", "CartPole-v1", *tiny, "--run-dir", str(folder / "runs" / name)]
        call([*line, "--quiet", *more], folder)


def why_bad(code: int, out: str, err: str) -> str | None:
    """Return what is wrong with the end of a command line, or None."""
    if "Traceback (most recent call last)" in out + err:
        return "traceback"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = err.rstrip().splitlines()
    if code != 0 and not (lines and lines[-1].startswith("qfleet")):
        return f"exit code {code}, and the last line of the error does not begin with 'qfleet'"
    return None


class Ended(NamedTuple):
    line: list[str]
    code: int
    wall_s: float
    err: str
    bad: str | None

    @property
    def timed_out(self) -> bool:
        return self.bad == TIMED_OUT


def run_line(line: list[str], template: Path, timeout_s: float) -> Ended:
    """Run a line in a copy of the template; kill its process group at the time limit."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qfleet-random-") as scratch:
        folder = Path(scratch) / "work"
        shutil.copytree(template, folder)
        process = subprocess.Popen(
            command(line),
            cwd=folder,
            env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
            bad = why_bad(process.returncode, out, err)
        except subprocess.TimeoutExpired:
            bad = TIMED_OUT
            _kill_group(process)
            out, err = process.communicate()
        finally:
            _kill_group(process)
    return Ended(line, process.returncode, time.monotonic() - began_s, err, bad)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="lines that run at the same time")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    parser.add_argument("--show", action="store_true", help="print the lines, run nothing")
    parser.add_argument("--verbose", action="store_true", help="print every line as it ends")
    options = parser.parse_args(argv)
    lines = draw_lines(options.count, options.seed)
    if options.show:
        for line in lines:
            print(ascii(shlex.join(["qfleet", *line]))[1:-1])
        return 0
    with tempfile.TemporaryDirectory(prefix="qfleet-random-") as scratch:
        template = Path(scratch) / "template"
        make_folder(template)

        def run(line: list[str]) -> Ended:
            one = run_line(line, template, options.timeout_s)
            _print(one, options.verbose)
            return one

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            ended = list(pool.map(run, lines))
        ended = [run(one.line) if one.timed_out else one for one in ended]
    bad = sum(one.bad is not None for one in ended)
    good = sum(one.code == 0 and one.bad is None for one in ended)
    slowest_s = max((one.wall_s for one in ended), default=0.0)
    print(
        f"{len(ended)} lines: {good} succeeded, {len(ended) - good - bad} ended in one line, "
        f"{bad} failed; slowest {slowest_s:.0f} s"
    )
    return 1 if bad else 0


def _print(one: Ended, verbose: bool) -> None:
    shown = ascii(shlex.join(["qfleet", *one.line]))[1:-1]
    if one.bad is not None:
        print(f"FAILED ({one.bad}, {one.wall_s:.0f} s): {shown}")
        print("".join(f"    {ascii(line)[1:-1]}\n" for line in one.err.splitlines()[-12:]), end="")
    elif verbose:
        last = (one.err.rstrip().splitlines() or [""])[-1]
        print(f"{one.code} {one.wall_s:.0f} s: {shown}\n    {ascii(last)[1:-1]}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
