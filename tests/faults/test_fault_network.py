"""Row 22 of the fault list: two hosts, as network namespaces, and the link between them goes down.

A worker on the other host is given up; when the link is up again, or the host back, another one is
there. Nobody is heard twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import qfleet

DEADLINE_S = 90.0
TOLD = 2000
HEAD_IP, FAR_IP = "10.213.7.1", "10.213.7.2"
PORT = 6399
ADDRESS = f"{HEAD_IP}:{PORT}"
SMALL: dict[str, Any] = {
    "engine": "parameter-server", "workers": 2, "address": ADDRESS, "worker_timeout_s": 1.0,
    "snapshot_s": 1.0, "learning_starts": 64, "train_freq": 8, "batch_size": 16, "net_arch": (16,),
    "threads": 1, "device": "cpu", "buffer_size": 4000, "learning_rate": 1e-3, "eval_freq": 0,
    "n_eval_episodes": 1, "log_interval": 50, "checkpoint_freq": 10**9, "tensorboard": False,
}  # fmt: skip


def wait_for(what: str, condition: Callable[[], object], log: Path) -> None:
    """Until it holds; the deadline only ends a test that has failed anyway."""
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, f"no {what}:\n{log.read_text()[-TOLD:]}"
        time.sleep(0.05)


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    """A namespace with an address, a name and a folder of its own; files are shared."""

    name: str
    address: str
    folder: Path
    environment: dict[str, str]

    def command(self, *words: str) -> list[str]:
        # Nobody answers questions about names in here, and to wait for that takes long.
        etc = "".join(
            f"mount --bind {self.folder.parent / file} /etc/{file}; "
            for file in ("hosts", "resolv.conf")
        )
        script = f'hostname {self.name}; {etc}exec "$@"'
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount"]
        return [*inside, "sh", "-ec", script, "sh", *words]

    def ray_start(self, *options: str) -> None:
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        words += [f"--node-ip-address={self.address}", "--num-cpus=1", "--disable-usage-stats"]
        words += [f"--object-store-memory={100 * 2**20}", f"--temp-dir={self.folder}"]
        done = subprocess.run(
            self.command(*words), env=self.environment, timeout=DEADLINE_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout

    def qfleet(self, log: Path, *words: str) -> subprocess.Popen[bytes]:
        command = self.command(sys.executable, "-m", "qfleet.cli.main", *words)
        with log.open("wb") as out:
            return subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def worker(self) -> int | None:
        """The process of the worker that is at work here."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RemoteWorker.work"):
                    return pid
        return None

    def kill_everything(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Network:
    """Two hosts. The first one's address is on a bridge: without the link it is still itself."""

    def __init__(self, folder: Path) -> None:
        unique = f"qf{os.getpid()}"
        environment = dict(os.environ)
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment |= {"PYTHONPATH": str(Path(qfleet.__file__).parents[1])}
        self.head = Host(f"{unique}a", HEAD_IP, folder / "a", environment)
        self.far = Host(f"{unique}b", FAR_IP, folder / "b", environment)
        names = [f"{host.address} {host.name}\n" for host in (self.head, self.far)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        (folder / "resolv.conf").touch()

    def build(self) -> None:
        head, far = self.head.name, self.far.name
        for name in (head, far):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", head, "link", "add", "switch", "type", "bridge")
        ip("-n", head, "link", "add", "cable", "type", "veth", "peer", "name", "eth", "netns", far)
        ip("-n", head, "link", "set", "cable", "master", "switch")
        for host, device in ((self.head, "switch"), (self.far, "eth")):
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", device)
            ip("-n", host.name, "link", "set", device, "up")
            ip("-n", host.name, "route", "add", "default", "dev", device)
        self.link("up")

    def link(self, state: str) -> None:
        ip("-n", self.head.name, "link", "set", "cable", state)

    def remove(self) -> None:
        for host in (self.head, self.far):
            with contextlib.suppress(OSError):
                host.kill_everything()
                ip("netns", "del", host.name)


@pytest.fixture
def network() -> Iterator[Network]:
    if find_spec("ray") is None:
        pytest.skip("needs the extra [ray]")
    if os.environ.get("QFLEET_NETWORK_TESTS") != "1":
        pytest.skip("makes network namespaces, as root: set QFLEET_NETWORK_TESTS=1")
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    # Short, because of the sockets in it.
    folder = Path(tempfile.mkdtemp(prefix="qf-", dir="/tmp"))
    made = Network(folder)
    try:
        try:
            made.build()
        except OSError as error:
            pytest.skip(f"may not make network namespaces: {error}")
        yield made
    finally:
        made.remove()
        shutil.rmtree(folder, ignore_errors=True)


def log_lines(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_a_run_outlives_its_link_and_its_other_host(network: Network, tmp_path: Path) -> None:
    head, far = network.head, network.far
    head.ray_start("--head", f"--port={PORT}", "--include-dashboard=false")
    far.ray_start(f"--address={ADDRESS}")
    settings, folder, log = tmp_path / "config.json", tmp_path / "run", tmp_path / "log"
    settings.write_text(json.dumps(SMALL))
    words = ["train", "CartPole-v1", "--preset", "none", "--config", str(settings)]
    run = head.qfleet(log, *words, "--steps", str(10**8), "--run-dir", str(folder))

    def wait(what: str, condition: Callable[[], object]) -> None:
        wait_for(what, condition, log)

    def more_lines(count: int = 5) -> None:
        assert run.poll() is None, log.read_text()
        before = log_lines(folder)
        wait("more log lines", lambda: log_lines(folder) >= before + count)

    def another_worker(than: int | None) -> int:
        seen: list[int | None] = [None]

        def is_there() -> bool:
            seen.append(far.worker())
            return seen[-1] not in (None, than)

        wait("worker on the other host", is_there)
        more_lines()
        assert seen[-1] is not None
        return seen[-1]

    first = another_worker(than=None)
    wait("worker on this host", head.worker)
    network.link("down")
    wait("loss", lambda: "was not heard of" in log.read_text())
    more_lines()  # the other worker does not wait
    network.link("up")
    second = another_worker(than=first)
    assert second != first

    # Everything on the other host dies, Ray too: there is no room for the second worker now.
    far.kill_everything()
    more_lines()
    far.ray_start(f"--address={ADDRESS}")
    another_worker(than=second)
    run.send_signal(signal.SIGINT)
    assert run.wait(DEADLINE_S) == 130, log.read_text()
    result = json.loads((folder / "result.json").read_text())
    assert result["faults"] == {"worker": 2}
    workers, (server,) = result["fleet"]["workers"], result["fleet"]["servers"]
    hosts = {f"{host.name} ({host.address})" for host in (head, far)}
    assert {worker["host"] for worker in workers} == hosts
    assert sorted(worker["restarts"] for worker in workers) == [0, 2]
    # Never two truths: one server all the time, and no gradient in it twice.
    assert server["restores"] == 0
    dropped = sum(server["dropped"].values())
    assert server["applied"] <= server["received"] - server["repeated"] - dropped

    steps = result["env_steps"] + 1000
    again = head.qfleet(log, "resume", str(folder), "--steps", str(steps), "--address", ADDRESS)
    assert again.wait(DEADLINE_S) == 0, log.read_text()
    result = json.loads((folder / "result.json").read_text())
    assert result["stopped_by"] == "steps"
    assert result["env_steps"] >= steps
