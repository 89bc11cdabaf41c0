"""Does a run survive? Trains for some minutes while faults strike at random; checks what is left.

    python benchmarks/soak.py --engine pipeline --minutes 10
    python benchmarks/soak.py --engine actors --faults kill,stop --seed 3
    python benchmarks/soak.py --engine serial --faults none --png soak.png     (memory only)

The run is a process of its own, in a network and a file system of its own where the system allows
it (``unshare``). Faults, by name:

    kill        SIGKILL to an env process, or to an actor, shard, worker or server
    stop        SIGSTOP for some seconds, to one of these or to the run itself
    fill        the disk is full for some seconds
    disconnect  the network (loopback) is down for some seconds
    crash       SIGKILL to the run, then ``qfleet resume``
    term        SIGTERM to the run, then ``qfleet resume``
    cluster     SIGKILL to Ray's raylet or GCS, then ``qfleet resume``

After each fault the run must make progress again. At the end: every loss was reported, nothing was
applied twice, the run can be resumed, no process and no file is left, and memory did not grow.
Prints one line per fault and the checks; exits with 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from qfleet.telemetry.figures import saved_figure

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MARK = "QFLEET_SOAK"
INSIDE = "QFLEET_SOAK_INSIDE"
PROGRESS_S = 180.0
"""Deadline of progress after a fault, on a slow and busy machine."""
END_S = 120.0
CALM_S = 15.0
"""A fault that strikes less than this before the end of a process may not be reported by it."""
MOST_GROWTH = 1.15
DISK_MIB = 96
ON_RAY = ("actors", "parameter-server")
FAULTS = ("kill", "stop", "fill", "disconnect", "crash", "term", "cluster")
ENDING = ("crash", "term", "cluster")
"""Faults that end the process of the run; rarer, so that it lives long enough to see it grow."""
KINDS = {"env_process", "env_timeout", "actor", "replay_shard", "worker", "server"}
"""Kinds of faults that report the loss of a process."""
FIELDS: dict[str, Any] = {
    "env": "CartPole-v1", "preset": "none", "steps": 10**9, "buffer_size": 5000,
    "learning_starts": 500, "train_freq": 4, "batch_size": 32, "net_arch": (32, 32),
    "log_interval": 500, "eval_freq": 20_000, "n_eval_episodes": 2, "checkpoint_freq": 10_000,
    "max_fault_rate": 1.0, "max_env_restarts": 100, "threads": 1, "exploration_fraction": 0.1,
}  # fmt: skip
OF_ENGINE: dict[str, dict[str, Any]] = {
    "serial": {"envs": 4, "vectorize": "async", "train_freq": 4},
    "pipeline": {"envs": 4, "vectorize": "async", "env_timeout_s": 20.0},
    "device": {"envs": 32, "train_freq": 8, "buffer_size": 20_000},
    "actors": {"workers": 2, "servers": 2, "worker_timeout_s": 10.0},
    "parameter-server": {"workers": 2, "servers": 2, "worker_timeout_s": 10.0, "snapshot_s": 2.0},
}


def set_loopback(up: bool) -> None:
    """Set the flags of ``lo`` in this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", int(up)))  # SIOCSIFFLAGS


def enter_namespaces() -> str:
    """Start this program again in namespaces of its own; return why that is not possible."""
    if os.environ.get(INSIDE):
        return ""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "there is no unshare(1)"
    command = ["unshare", *(() if os.getuid() == 0 else ("-r",)), "--net", "--mount"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return tried.stderr.strip()
    os.environ[INSIDE] = "1"
    os.execvp("unshare", [*command, sys.executable, *sys.argv])
    raise AssertionError("execvp does not return")


def processes(mark: str) -> dict[int, tuple[int, str]]:
    """Return pid → parent and command line of all live processes that inherited the mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state != "Z":
                found[int(entry.name)] = (int(parent), text)
    return found


def members(mark: str) -> list[int]:
    """Return env processes (children of a fork server) and processes of qfleet's Ray actors."""
    found = processes(mark)
    servers = {
        pid for pid, (parent, text) in found.items()
        if "forkserver" in text and "forkserver" not in found.get(parent, (0, ""))[1]
    }  # fmt: skip
    others = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return sorted(
        pid for pid, (parent, text) in found.items()
        if parent in servers or (text.startswith("ray::") and not text.startswith(others))
    )  # fmt: skip


def private_bytes(pid: int) -> int:
    try:
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES


@dataclasses.dataclass
class Life:
    """One process of the run, from its start or resume to its end."""

    process: subprocess.Popen[str]
    began_s: float
    """By the clock of files."""
    lines: list[str] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """Seconds since the soak began, and private bytes of all processes."""
    starting: int = 0
    """Samples of memory that were taken before the process had trained."""
    kills_s: list[float] = dataclasses.field(default_factory=list)

    def reported(self) -> int:
        found = re.findall(r"(\w+) ×(\d+):", " ".join(self.lines))  # not the final report
        return sum(int(count) for kind, count in found if kind in KINDS)


class Soak:
    def __init__(self, options: argparse.Namespace, folder: Path, is_inside: bool) -> None:
        self.options, self.mark = options, uuid.uuid4().hex
        self.random = random.Random(options.seed)
        self.began_s = time.monotonic()
        self.disk, self.scratch = folder / "disk", folder / "tmp"
        self.run = self.disk / "run"
        for path in (self.disk, self.scratch):
            path.mkdir()
        if is_inside:
            set_loopback(True)
            for path, size in ((self.disk, DISK_MIB), (Path("/dev/shm"), 4096)):
                words = ["mount", "-t", "tmpfs", "-o", f"size={size}m", "none", str(path)]
                subprocess.run(words, check=True)
        self.environment = {
            **os.environ, MARK: self.mark, "TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.failures: list[str] = []
        self.lives: list[Life] = []
        self.strikes: dict[str, int] = {}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began_s:6.0f} s  {text}", flush=True)

    def fail(self, text: str) -> None:
        self.say(f"FAILED: {text}")
        self.failures.append(text)

    # --- the run ------------------------------------------------------------------------------

    def start(self) -> Life:
        """Start the run, or resume it if there is a checkpoint."""
        words = [sys.executable, "-X", "faulthandler", "-m", "qfleet.cli.main"]
        if self.checkpoints():
            words += ["resume", str(self.run), "--trust"]
        else:
            config = self.scratch / "config.json"
            fields = FIELDS | OF_ENGINE[self.options.engine] | json.loads(self.options.fields)
            preset = fields.pop("preset")
            config.write_text(json.dumps({**fields, "engine": self.options.engine}))
            words += ["train", "--config", str(config), "--preset", preset]
            words += ["--run-dir", str(self.run), "--overwrite"]
        process = subprocess.Popen(
            words, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        life = Life(process, time.time())
        self.lives.append(life)
        threading.Thread(target=self._read, args=(life,), daemon=True).start()
        threading.Thread(target=self._sample, args=(life,), daemon=True).start()
        return life

    @staticmethod
    def _read(life: Life) -> None:
        assert life.process.stdout is not None
        life.lines.extend(life.process.stdout)

    def _sample(self, life: Life) -> None:
        while life.process.poll() is None:
            total = sum(private_bytes(pid) for pid in processes(self.mark))
            life.memory.append((time.monotonic() - self.began_s, total))
            time.sleep(2.0)

    def checkpoints(self) -> list[int]:
        folder = self.run / "checkpoints"
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal())

    def steps(self, since_s: float = 0.0) -> int:
        """Return the env steps of the newest line of metrics.jsonl; 0 if it is older than that."""
        path = self.run / "metrics.jsonl"
        with contextlib.suppress(OSError):
            lines = path.read_text().splitlines() if path.stat().st_mtime > since_s else []
            for line in reversed(lines):
                with contextlib.suppress(ValueError, KeyError):
                    return int(json.loads(line)["env_steps"])
        return 0

    def await_progress(self, life: Life, after: int) -> bool:
        """Wait until this process has logged more steps, and there is a checkpoint."""
        deadline_s = time.monotonic() + PROGRESS_S
        while time.monotonic() < deadline_s:
            if life.process.poll() is not None:
                self.fail(f"the run ended by itself with {life.process.returncode}: {tail(life)}")
                return False
            if self.checkpoints() and self.steps(life.began_s) > after:
                life.starting = life.starting or len(life.memory)
                return True
            time.sleep(0.2)
        self.fail(f"no progress for {PROGRESS_S:.0f} s after env step {after}: {tail(life)}")
        return False

    def await_end(self, life: Life, allowed: tuple[int, ...]) -> None:
        try:
            code = life.process.wait(END_S)
        except subprocess.TimeoutExpired:
            life.process.send_signal(signal.SIGABRT)  # prints all stacks
            time.sleep(2.0)
            life.process.kill()
            self.fail(f"the run did not end within {END_S:.0f} s: {tail(life)}")
            return
        time.sleep(0.5)  # the last lines
        if code not in allowed:
            self.fail(f"exit code {code} instead of {allowed}: {tail(life)}")
        if any("Traceback" in line for line in life.lines):
            self.fail(f"a traceback was printed: {tail(life)}")
        if code == -signal.SIGKILL:
            return
        counted = [s for s in life.kills_s if s < time.monotonic() - CALM_S]
        if life.reported() < len(counted):
            self.fail(f"{len(counted)} processes were killed, {life.reported()} losses reported")

    # --- faults -------------------------------------------------------------------------------

    def strike(self, fault: str, life: Life) -> Life:
        """Let a fault happen; return the process that trains afterwards."""
        before = self.steps()
        run, found = life.process.pid, members(self.mark)
        if fault == "kill" and found:
            self._signal(self.random.choice(found), signal.SIGKILL)
            life.kills_s.append(time.monotonic())
        elif fault == "stop":
            chosen, seconds = self.random.choice([run, *found]), self.random.uniform(1.0, 8.0)
            self._signal(chosen, signal.SIGSTOP)
            time.sleep(seconds)
            self._signal(chosen, signal.SIGCONT)
        elif fault == "fill":
            with (self.disk / "other").open("wb", 0) as file, contextlib.suppress(OSError):
                while file.write(bytes(2**16)):
                    pass
            time.sleep(self.random.uniform(2.0, 8.0))
            (self.disk / "other").unlink()
        elif fault == "disconnect":
            set_loopback(False)
            time.sleep(self.random.uniform(1.0, 6.0))
            set_loopback(True)
        elif fault == "crash":
            newest = self.checkpoints()[-1]
            life.process.kill()
            self.await_end(life, (-signal.SIGKILL,))
            life, before = self.start(), newest
        elif fault == "term":
            life.process.terminate()
            self.await_end(life, (128 + signal.SIGTERM,))
            life, before = self.start(), self.checkpoints()[-1]
        elif fault == "cluster":
            wanted = self.random.choice(("raylet", "gcs_server"))
            for pid, (_, text) in processes(self.mark).items():
                if Path(text.split(" ")[0]).name == wanted:
                    self._signal(pid, signal.SIGKILL)
            self.await_end(life, (1,))
            life, before = self.start(), self.checkpoints()[-1]
        else:
            return life
        self.strikes[fault] = self.strikes.get(fault, 0) + 1
        self.say(f"{fault}, at env step {before:,}")
        self.await_progress(life, before)
        return life

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    # --- the whole ----------------------------------------------------------------------------

    def go(self, faults: list[str]) -> None:
        life = self.start()
        self.await_progress(life, 0)
        end_s = self.began_s + 60 * self.options.minutes
        while time.monotonic() < end_s and not self.failures:
            time.sleep(min(self.random.uniform(2.0, 10.0), max(0, end_s - time.monotonic())))
            if faults and time.monotonic() < end_s:
                weights = [1 if fault in ENDING else 6 for fault in faults]
                life = self.strike(self.random.choices(faults, weights)[0], life)
        life.process.terminate()
        self.await_end(life, (128 + signal.SIGTERM,))
        if not self.failures:
            self.check_result()
        self.check_rest()

    def check_result(self) -> None:
        """Resume once more, and compare what was learnt with what was collected."""
        for line in (self.run / "metrics.jsonl").read_text().splitlines():
            json.loads(line)
        before = self.checkpoints()[-1]
        words = [sys.executable, "-m", "qfleet.cli.main", "resume", str(self.run), "--trust"]
        again = subprocess.run(
            [*words, "--max-wall", "30s", "--json"], env=self.environment, text=True,
            capture_output=True, timeout=PROGRESS_S, check=False,
        )  # fmt: skip
        if again.returncode:
            self.fail(f"the last resume failed: {again.stderr[-500:]}")
            return
        result = json.loads(again.stdout)
        config = json.loads((self.run / "config.json").read_text())
        steps, updates = result["env_steps"], result["updates"]
        if steps <= before:
            self.fail(f"a resumed run had {steps} env steps, its checkpoint {before}")
        if self.options.engine != "parameter-server":
            due = (steps - config["learning_starts"]) / config["train_freq"]
            self.say(f"{updates:,} updates for {steps:,} env steps; due are {due:,.0f}")
            if not 0.99 * due - 1000 <= updates <= 1.01 * due + 1000:
                self.fail("updates were lost or made twice")
        for server in (result["fleet"] or {}).get("servers", []):
            if "received" in server:
                known = server["applied"] + server["repeated"] + sum(server["dropped"].values())
                self.say(f"server {server['number']}: {server['received']:,} messages, {known:,}"
                         " applied, repeated or dropped")  # fmt: skip
                if known > server["received"]:
                    self.fail(f"server {server['number']} applied messages twice")
        self.say(f"faults in result.json: {result['faults']}")

    def check_rest(self) -> None:
        """Check that nothing is left, and that memory did not grow."""
        deadline_s = time.monotonic() + 30.0
        while (left := processes(self.mark)) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        if left:
            self.fail(f"processes are left: {left}")
        files = [path.name for path in self.scratch.iterdir() if path.name.startswith("qfleet-")]
        if files:
            self.fail(f"files are left: {files}")
        if shared := set(os.listdir("/dev/shm")) - self.shared_memory:
            self.fail(f"shared memory is left: {sorted(shared)}")
        growths = []
        for life in self.lives:
            sizes = [size for _, size in life.memory[life.starting + 5 :]]
            if len(sizes) >= 24:  # some 50 s
                quarter = len(sizes) // 4
                second, last = sizes[quarter : 2 * quarter], sizes[-quarter:]
                growths.append(statistics.median(last) / statistics.median(second))
                shown = [round(statistics.median(sizes[i * quarter : (i + 1) * quarter]) / 2**20)
                         for i in range(4)]  # fmt: skip
                self.say(f"memory in quarters of {2 * len(sizes)} s: {shown} MiB")
        largest = max(growths, default=None)
        self.say(f"growth of memory, last to second quarter: {largest and round(largest, 3)}"
                 f" at most, in {len(growths)} processes of a minute or more")  # fmt: skip
        if largest is not None and largest > MOST_GROWTH:
            self.fail(f"memory grew by a factor of {largest:.2f}")

    def draw(self, png: Path) -> None:
        with saved_figure(png, 7.2, 3.2) as figure:
            axes = figure.add_subplot()
            for life in self.lives:
                points = [(s / 60, size / 2**20) for s, size in life.memory]
                axes.plot(*zip(*points, strict=True), color="C0")
            axes.set_ylim(bottom=0)
            axes.set_xlabel("minutes")
            axes.set_ylabel("memory of all processes, MiB")
            axes.set_title(f"{self.options.engine}: {sum(self.strikes.values())} faults")


def tail(life: Life) -> str:
    return " | ".join(line.strip() for line in life.lines[-12:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=sorted(OF_ENGINE), default="pipeline")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--faults", default="all", help=f"all, none, or some of {','.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fields", default="{}", help="fields of the configuration, as JSON")
    parser.add_argument("--png", type=Path, help="draw memory over time there")
    options = parser.parse_args()
    asked = {"all": list(FAULTS), "none": []}.get(options.faults, options.faults.split(","))
    if unknown := set(asked) - set(FAULTS):
        parser.error(f"unknown faults {sorted(unknown)}; known are {', '.join(FAULTS)}")
    refusal = enter_namespaces()
    if refusal:
        print(f"no namespaces, so no 'fill' and 'disconnect': {refusal}", flush=True)
    left_out = {"disconnect", "cluster"} if options.engine not in ON_RAY else set()
    left_out |= {"kill"} if options.engine == "device" else set()
    left_out |= {"fill", "disconnect"} if refusal else set()
    faults = [fault for fault in asked if fault not in left_out]
    # A short path: Ray's sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="soak", dir="/tmp") as folder:
        soak = Soak(options, Path(folder), is_inside=not refusal)
        try:
            soak.go(faults)
            if options.png:
                soak.draw(options.png)
        finally:
            for pid in processes(soak.mark):
                soak._signal(pid, signal.SIGKILL)
            if not refusal:
                subprocess.run(["umount", "-l", str(soak.disk)], check=False)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(soak.strikes.items()))
    verdict = f"FAILED: {soak.failures}" if soak.failures else "passed"
    print(f"{options.engine}, seed {options.seed}: {counts or 'no faults'}: {verdict}")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
