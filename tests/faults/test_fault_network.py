"""Fault 22 of docs/faults.md: two hosts as network namespaces; the link between them goes down.

Whoever is on the other host is given up, or is heard again; when the link is up, or the host back,
somebody is there. The run takes all its steps, and nobody is heard twice.
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
from pathlib import Path
from typing import Any

import pytest

import qfleet
from support.clusters import RAY_MARKS, check_end
from support.configs import TINY
from support.processes import count_lines, python, start
from support.waiting import CLUSTER_S, deadline, wait_until

LONG_S = 20.0
"""Longer than a worker may be silent, and than an impatient Ray waits for a host."""
MOMENT_S = 3.0
ENDED_S = 30.0
"""The end of a run whose cluster is gone, as docs/faults.md promises."""
TOLD = 2000
STARTS = 2
"""``ray start`` gives itself 30 s, which a busy machine may exceed; that is no fault of a run."""
pytestmark = [*RAY_MARKS, pytest.mark.slow]
thorough = pytest.mark.skipif(
    not os.environ.get("QFLEET_NETWORK_TESTS"),
    reason="takes minutes; the others show the same: QFLEET_NETWORK_TESTS=1",
)
HEAD_IP, FAR_IP = "10.213.7.1", "10.213.7.2"
PORT = 6399
ADDRESS = f"{HEAD_IP}:{PORT}"
COMMON: dict[str, Any] = TINY | {
    "workers": 2, "address": ADDRESS, "worker_timeout_s": 5.0, "learning_starts": 64,
    "train_freq": 8, "threads": 1, "device": "cpu", "buffer_size": 4000, "learning_rate": 1e-3,
    "log_interval": 50, "checkpoint_freq": 10**9,
}  # fmt: skip
SMALL = {**COMMON, "engine": "parameter-server", "snapshot_s": 1.0}
ACTORS = {**COMMON, "engine": "actors", "block_rows": 8}
STEPS = 24_000
SLOW = """
import os, pathlib, time
from gymnasium.envs.classic_control import CartPoleEnv
class Slow(CartPoleEnv):
    is_new = True
    def step(self, action):
        if self.is_new:
            self.is_new = False
            pathlib.Path(HOLD).with_name(f"at-work-{os.getpid()}").touch()
        if os.path.exists(HOLD):
            time.sleep(0.01)
        return super().step(action)
"""
"""Steps of 10 ms until the file is removed: a run that cannot be over before a test says so.

Another file says which process takes steps. A title of Ray's would not: Ray does not always set it,
and the answer to a ping, in another thread, sets it back while the worker works.
"""
IMPATIENT = {
    "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000", "RAY_health_check_failure_threshold": "3",
}  # fmt: skip
"""Of Ray: a host that does not answer for some five seconds is dead, and ends when it hears so."""


RAY = """
from qfleet.engines.cluster.ray_cluster import without_helpers
from ray.scripts.scripts import main
with without_helpers():
    main()
"""
"""The program ``ray``, with fewer processes."""


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

    def ray_start(self, *options: str, processors: int = 1) -> None:
        words = [sys.executable, "-c", RAY, "start", *options]
        words += [f"--node-ip-address={self.address}", f"--num-cpus={processors}"]
        words += ["--disable-usage-stats"]
        words += [f"--object-store-memory={100 * 2**20}", f"--temp-dir={self.folder}"]
        for _ in range(STARTS):
            done = subprocess.run(
                self.command(*words), env=self.environment, check=False,
                timeout=deadline(CLUSTER_S), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if done.returncode == 0:
                return
            self.kill_everything()
        raise AssertionError(done.stdout + self.ray_logs())

    def ray_logs(self) -> str:
        logs = sorted(self.folder.glob("session_2*/logs/[gr][ca][sy]*.out"))
        return "".join(f"\n{log.name}:\n{log.read_text()[-TOLD:]}" for log in logs)

    def qfleet(self, log: Path, *words: str) -> subprocess.Popen[bytes]:
        command = self.command(*python("-m", "qfleet.cli.main", *words))
        with log.open("wb") as out:
            return start(command, env=self.environment, stdout=out, stderr=out)

    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def worker(self) -> int | None:
        """The process of the worker that is at work here, by the file that it has left."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                is_driver = b"qfleet.cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
                if not is_driver and (self.folder.parent / f"at-work-{pid}").exists():
                    return pid
        return None

    def members(self, *titles: bytes) -> set[int]:
        found = set()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(titles):
                    found.add(pid)
        return found

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
        # Ray kills workers when other programs use up the memory of the machine.
        environment |= {"RAY_memory_monitor_refresh_ms": "0"}
        environment |= {"PYTHONPATH": f"{Path(qfleet.__file__).parents[1]}:{folder}"}
        self.head = Host(f"{unique}a", HEAD_IP, folder / "a", environment)
        self.far = Host(f"{unique}b", FAR_IP, folder / "b", environment)
        names = [f"{host.address} {host.name}\n" for host in (self.head, self.far)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        (folder / "resolv.conf").touch()
        self.hold = folder / "hold"
        self.hold.touch()
        (folder / "slow.py").write_text(f"HOLD = {str(self.hold)!r}\n{SLOW}")

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


@contextlib.contextmanager
def open_network() -> Iterator[Network]:
    missing = [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    # Short, because of the sockets in it.
    folder = Path(tempfile.mkdtemp(prefix="qf-", dir="/tmp"))
    made = Network(folder)
    try:
        try:
            made.build()
            subprocess.run(made.head.command("true"), check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs the right to make network namespaces, as root has: {error}")
        yield made
    finally:
        made.remove()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def network() -> Iterator[Network]:
    with open_network() as opened:
        yield opened


@pytest.fixture(scope="module")
def shared_hosts() -> Iterator[Network]:
    """Both hosts with Ray, one processor each: to start it takes long."""
    with open_network() as opened:
        start_both(opened)
        yield opened


@pytest.fixture
def hosts(shared_hosts: Network) -> Network:
    shared_hosts.hold.touch()
    shared_hosts.link("up")
    return shared_hosts


class Training:
    """A run on both hosts, started on the first one."""

    def __init__(
        self, network: Network, folder: Path, config: dict[str, Any], steps: int = STEPS
    ) -> None:
        self.network, self.folder, self.log = network, folder / "run", folder / "log"
        settings = folder / "config.json"
        settings.write_text(json.dumps(config))
        words = ["train", "slow:Slow", "--preset", "none", "--config", str(settings), "--trust"]
        words += ["--steps", str(steps), "--run-dir", str(self.folder)]
        self.process = network.head.qfleet(self.log, *words)

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        try:
            wait_until(condition, what, CLUSTER_S, self.process)
        except pytest.fail.Exception as failure:
            pytest.fail(f"{failure}\n{self.told()[-TOLD:]}")

    def told(self) -> str:
        return self.log.read_text()

    def lines(self) -> int:
        return count_lines(self.folder / "metrics.jsonl")

    def goes_on(self, count: int = 5) -> None:
        before = self.lines()
        self.wait("more log lines", lambda: self.lines() >= before + count)

    def another_worker(self, than: int | None) -> int:
        """On the other host."""
        seen: list[int | None] = [None]

        def is_there() -> bool:
            seen.append(self.network.far.worker())
            return seen[-1] not in (None, than)

        self.wait("worker on the other host", is_there)
        self.goes_on()
        assert seen[-1] is not None
        return seen[-1]

    def both_are_there(self) -> int:
        first = self.another_worker(than=None)
        self.wait("worker on this host", self.network.head.worker)
        return first

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    def finished(self) -> dict[str, Any]:
        """Nothing slows it down any more: it takes all of its steps."""
        self.network.hold.unlink()
        assert self.process.wait(deadline(CLUSTER_S)) == 0, self.told()
        told = self.told()
        assert "Traceback" not in told
        assert "(raylet)" not in told
        result = self.result()
        assert result["stopped_by"] == "steps"
        assert result["env_steps"] >= STEPS
        return result


def test_a_loopback_that_stays_down_ends_the_run(network: Network, tmp_path: Path) -> None:
    """A cluster of the run's own is on loopback only: nothing is left of it but processes."""
    own = {key: value for key, value in SMALL.items() if key != "address"}
    run = Training(network, tmp_path, own, 10**8)
    run.wait("worker", network.head.worker)
    run.goes_on()
    ip("-n", network.head.name, "link", "set", "lo", "down")
    exit_code = run.process.wait(deadline(ENDED_S))
    check_end(run.folder, exit_code, run.told(), "GCS")


def assert_one_truth(result: dict[str, Any]) -> None:
    """One server all the time, no gradient in it twice, and every loss of a worker was told."""
    workers, (server,) = result["fleet"]["workers"], result["fleet"]["servers"]
    assert server["restores"] == 0
    dropped = sum(server["dropped"].values())
    assert server["applied"] <= server["received"] - server["repeated"] - dropped
    assert result["faults"].get("worker", 0) == sum(worker["restarts"] for worker in workers)


def start_both(network: Network, here: int = 1, there: int = 1) -> None:
    """With so many processors."""
    network.head.ray_start("--head", f"--port={PORT}", "--include-dashboard=false", processors=here)
    network.far.ray_start(f"--address={ADDRESS}", processors=there)


def test_a_run_outlives_its_link_and_its_other_host(hosts: Network, tmp_path: Path) -> None:
    head, far = hosts.head, hosts.far
    run = Training(hosts, tmp_path, SMALL, 10**8)
    first = run.both_are_there()
    hosts.link("down")
    run.wait("loss", lambda: "was not heard of" in run.told())
    run.goes_on()  # the other worker does not wait
    hosts.link("up")
    second = run.another_worker(than=first)
    assert second != first

    # Everything on the other host dies, Ray too: there is no room for the second worker now.
    far.kill_everything()
    run.goes_on()
    far.ray_start(f"--address={ADDRESS}")
    run.another_worker(than=second)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(deadline(CLUSTER_S)) == 130, run.told()
    result = run.result()
    assert result["faults"] == {"worker": 2}
    workers = result["fleet"]["workers"]
    hosts = {f"{host.name} ({host.address})" for host in (head, far)}
    assert {worker["host"] for worker in workers} == hosts
    assert sorted(worker["restarts"] for worker in workers) == [0, 2]
    assert_one_truth(result)

    steps = str(result["env_steps"] + 1000)
    words = ["resume", str(run.folder), "--steps", steps, "--address", ADDRESS, "--trust"]
    again = head.qfleet(run.log, *words)
    assert again.wait(deadline(CLUSTER_S)) == 0, run.told()
    result = run.result()
    assert result["stopped_by"] == "steps"
    assert result["env_steps"] >= int(steps)


def test_a_link_that_is_down_for_long_evicts_the_worker(hosts: Network, tmp_path: Path) -> None:
    """Ray does not give the host up: its worker is heard again, when another has its place."""
    run = Training(hosts, tmp_path, SMALL)
    first = run.both_are_there()
    hosts.link("down")
    time.sleep(LONG_S)
    run.goes_on()
    hosts.link("up")
    run.another_worker(than=first)
    run.wait("end of who was given up", lambda: first not in hosts.far.pids())
    result = run.finished()
    assert result["faults"] == {"worker": 1}
    assert_one_truth(result)


@thorough
def test_a_host_that_ray_has_given_up_may_join_again(network: Network, tmp_path: Path) -> None:
    network.head.environment.update(IMPATIENT)  # both have the same
    far = network.far
    start_both(network)
    run = Training(network, tmp_path, SMALL)
    run.both_are_there()
    network.link("down")
    time.sleep(LONG_S)
    run.wait("host's death", lambda: "another takes its place when there is room" in run.told())
    run.goes_on()
    network.link("up")
    run.wait("end of the workers there", lambda: far.worker() is None)
    run.goes_on()
    far.kill_everything()  # as ``ray stop`` does: some of Ray's own is left
    far.ray_start(f"--address={ADDRESS}")
    run.another_worker(than=None)
    result = run.finished()
    assert result["faults"] == {"worker": 1}
    assert_one_truth(result)


@pytest.mark.parametrize("update", ["async", pytest.param("sync", marks=thorough)])
def test_a_link_that_is_down_for_a_moment_costs_nobody(
    hosts: Network, tmp_path: Path, update: str
) -> None:
    """Shorter than a worker may be silent: it goes on, and what it sent again counts once."""
    config = {**SMALL, "update": update, "worker_timeout_s": LONG_S}
    run = Training(hosts, tmp_path, config)
    first = run.both_are_there()
    hosts.link("down")
    time.sleep(MOMENT_S)
    hosts.link("up")
    run.goes_on()
    assert hosts.far.worker() == first
    result = run.finished()
    assert result["faults"] == {}
    assert_one_truth(result)


@thorough
def test_sync_goes_on_without_a_worker_that_is_cut_off(hosts: Network, tmp_path: Path) -> None:
    run = Training(hosts, tmp_path, {**SMALL, "update": "sync"})
    first = run.both_are_there()
    hosts.link("down")
    run.wait("loss", lambda: "was not heard of" in run.told())
    run.goes_on()  # the barrier is the other one's alone
    hosts.link("up")
    run.another_worker(than=first)
    run.wait("end of who was given up", lambda: first not in hosts.far.pids())
    result = run.finished()
    assert result["faults"] == {"worker": 1}
    assert_one_truth(result)


@pytest.mark.parametrize("there", [2, pytest.param(3, marks=thorough)])
def test_actors_and_shards_that_are_cut_off_are_replaced_or_heard_again(
    network: Network, tmp_path: Path, there: int
) -> None:
    """So many of two actors and a shard are there: some of them, or all."""
    start_both(network, 3 - there, there)
    run = Training(network, tmp_path, ACTORS)
    titles = (b"ray::RemoteActor", b"ray::ReplayShard")
    run.wait("full house there", lambda: len(network.far.members(*titles)) == there)
    run.goes_on()
    before = network.far.members(*titles)
    network.link("down")
    time.sleep(LONG_S)
    network.link("up")
    # Who was not asked meanwhile, or had yet to start, is heard again.
    run.wait("another one", lambda: network.far.members(*titles) - before)
    run.wait("full house again", lambda: len(network.far.members(*titles)) == there)
    run.goes_on()
    result = run.finished()
    lost, fleet = result["faults"], result["fleet"]
    assert set(lost) <= {"actor", "replay_shard"}
    assert lost.get("actor", 0) == fleet["actors_replaced"]
    assert lost.get("replay_shard", 0) == fleet["shards_replaced"]
    assert fleet["actors_replaced"] + fleet["shards_replaced"] > 0
