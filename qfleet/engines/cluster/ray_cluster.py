"""Start or join a Ray cluster. In: a number of workers, perhaps an address; out: a ``Cluster``.

The only module that calls Ray. A cluster of our own listens on loopback only, requires a token that
was made for it, and leaves no process and no file when its block ends, however it ends. Every wait
has a deadline, and every error message is one line.

Ray reads some of its settings from the environment when it is first imported: a process can start
clusters of its own or join others', but not both.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.config.validation import check_address
from qfleet.core.errors import (
    ClusterError,
    GivenUp,
    MemberLost,
    MemberSilent,
    StoreFullError,
    UserError,
    ValueLost,
)
from qfleet.core.signals import blocked_in_children, signals_ignored, sigterm_unwinds

LOOPBACK = "127.0.0.1"
STORE_BYTES = 256 * 2**20
INLINE_BYTES = 100 * 2**10
"""Ray's default: smaller values travel within the call or its answer, others through the store."""
TIMEOUT_S = 120.0
GRACE_S = 30.0
"""Time that killed processes have to end."""
RUN_AGAIN, IF_SLOW = "; run it again", "; if the machine is only slow, raise timeout_s"
"""Advice at the end of a message about a loss; ``MemberPool``, which replaces members, drops it."""
NODE_SHARE = 0.001
"""Share of a node's own resource that a process takes which has to be there: 1000 fit."""
LEAST_BYTES, LEAST_BYTES_WITH_TORCH = 32 * 2**20, 128 * 2**20
"""Lower bounds of a process's own memory (with torch some 200 MiB were measured)."""
PROBE_S = 5.0
"""Deadline for the first answer of a cluster's port."""
_LONGEST_TMP = 20
"""Ray's sockets lie below the temporary folder. Their paths have 103 bytes at most (macOS), some 80
of which are our names and Ray's."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Workers without a GPU keep the environment as it is; unset, Ray warns of a change to come.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's processes print deaths and slow starts among our lines, ``log_to_driver`` or not: all of
    # that is skipped. Our own errors come with the results of calls.
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
}
# Ray's default is 20, a second each: a token that is wrong now is not accepted later.
_JOINING = {"RAY_NUM_REDIS_GET_RETRIES": "2"}
# Ray speaks HTTP/2, where both sides begin with a frame of settings, which may be empty.
_FRAME_BYTES, _SETTINGS = 9, b"\x04"
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5
# Ray replaces a loopback address by one that other hosts can reach, unless clusters are disabled.
_HERE_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# Ray reads the token once per process, so all clusters that this process starts share it.
_TOKEN = secrets.token_hex(32)


@dataclass(frozen=True)
class Cluster:
    """A cluster in use. References and handles are Ray's."""

    ray: Any
    address: str
    folder: Path | None
    """Folder of sockets and logs of a cluster of our own; None for one that was joined."""
    timeout_s: float

    def processors(self) -> int:
        """Return the number of processors of all nodes that are alive."""
        return int(self.ray.cluster_resources().get("CPU", 0))

    def spawn(
        self, kind: type, *args: Any, processors: int = 1, at_once: int = 1, is_here: bool = False
    ) -> Any:
        """Create an instance of ``kind`` in a process of its own; Ray does not restart it.

        It takes ``processors`` of the cluster and answers up to ``at_once`` calls at a time, in
        threads. ``is_here``: on the node of this process.
        """
        options: dict[str, Any] = {
            "num_cpus": processors,
            "max_restarts": 0,
            "max_concurrency": at_once,
        }
        if is_here:
            # Not Ray's affinity, which it ignores for a process that takes no processor.
            options["resources"] = {f"node:{self.node_ip()}": NODE_SHARE}
        with self._storing():
            return self.ray.remote(**options)(kind).remote(*args)

    def stop(self, worker: Any) -> None:
        self.ray.kill(worker)

    def put(self, value: Any) -> Any:
        """Store a value once, for any number of workers to read."""
        with self._storing():
            return self.ray.put(value)

    def store_bytes(self) -> int:
        """Return the size of the object stores of all nodes together."""
        return int(self.ray.cluster_resources().get("object_store_memory", 0))

    def store_bytes_here(self) -> int:
        """Return the size of the object store of this process's node."""
        return int(self._node()["Resources"].get("object_store_memory", 0))

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """Turn Ray's errors about a full object store into ``StoreFullError``."""
        failures = self.ray.exceptions
        try:
            yield
        except (failures.ObjectStoreFullError, failures.OutOfDiskError) as error:
            raise StoreFullError(_store_full(error)) from error

    def first(self, pending: list[Any], name: str) -> Any:
        """Return the first of these references whose value, or failure, arrives."""
        done, _ = self.ray.wait(pending, num_returns=1, timeout=self.timeout_s)
        if not done:
            raise _silence_of(name, self.timeout_s)
        return done[0]

    def ready(self, pending: list[Any], wait_s: float) -> list[Any]:
        """Return the references whose value, or failure, has arrived; none after ``wait_s``."""
        if not pending:
            return []
        done, rest = self.ray.wait(pending, num_returns=1, timeout=wait_s)
        also, _ = self.ray.wait(rest, num_returns=len(rest), timeout=0) if rest else ([], [])
        return [*done, *also]

    def get(self, reference: Any, name: str, wait_s: float | None = None) -> Any:
        """Return the value of a reference, or raise a ClusterError about ``name``.

        The deadline is ``wait_s``, by default the ``timeout_s`` of the cluster.
        """
        failures = self.ray.exceptions
        wait_s = self.timeout_s if wait_s is None else wait_s
        try:
            return self.ray.get(reference, timeout=wait_s)
        except failures.GetTimeoutError:
            raise _silence_of(name, wait_s) from None
        except failures.ActorUnavailableError as error:
            # The process may be alive: the connection broke, and may be restored.
            raise MemberSilent(f"{name} cannot be reached ({_first_line(error)})") from None
        except failures.RayActorError as error:
            raise MemberLost(f"{name} died ({_cause(error)}){RUN_AGAIN}") from None
        except failures.RayTaskError as error:
            if isinstance(error.cause, GivenUp | StoreFullError):
                raise error.cause from None
            if isinstance(error.cause, failures.ObjectStoreFullError | failures.OutOfDiskError):
                raise StoreFullError(_store_full(error.cause)) from error
            if isinstance(error.cause, failures.ObjectLostError):
                raise ValueLost(f"what {name} was sent was lost with its machine") from error
            cause = f"{type(error.cause).__name__}: {_first_line(error.cause)}"
            raise ClusterError(f"{name} failed: {cause}") from error
        except failures.RayError as error:
            raise ClusterError(f"{name} was lost: {_first_line(error)}") from error

    def node_ip(self) -> str:
        """Return the address of the node that this process is on."""
        return str(self._node()["NodeManagerAddress"])

    def _node(self) -> Mapping[str, Any]:
        here = self.ray.get_runtime_context().get_node_id()
        return next(node for node in self.ray.nodes() if node["NodeID"] == here)


def from_inside(timeout_s: float = TIMEOUT_S) -> Cluster:
    """Return the cluster that spawned this process."""
    import ray

    return Cluster(ray, ray.get_runtime_context().gcs_address, None, timeout_s)


def open_cluster(
    workers: int,
    address: str | None = None,
    *,
    store_bytes: int = STORE_BYTES,
    inline_bytes: int = INLINE_BYTES,
    timeout_s: float = TIMEOUT_S,
) -> contextlib.AbstractContextManager[Cluster]:
    """Start a cluster with a processor per worker, or join the one at ``address``.

    In a new one, arguments and answers below ``inline_bytes`` do not go through the object store.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError("a cluster needs Ray, which is not installed: pip install 'qfleet[ray]'")
    if address is None:
        check_memory(workers)
        return _start(workers, store_bytes, inline_bytes, timeout_s)
    return _join(workers, address, timeout_s)


def check_store(
    cluster: Cluster, there_bytes: int, needed_bytes: int, contents: str, lower: str
) -> None:
    """Refuse an object store that is too small: Ray would write to the disk, many times slower."""
    if there_bytes < needed_bytes:
        raise ClusterError(
            f"the object store of cluster {cluster.address} has {there_bytes / 2**20:.0f} MiB, too "
            f"few for {needed_bytes / 2**20:.0f} MiB of {contents}; give it more "
            f"(ray start --object-store-memory) or lower {lower}"
        )


def check_memory(processes: int, each_bytes: int = LEAST_BYTES) -> None:
    """Refuse more processes than fit into this machine's memory: Ray would start them all."""
    from qfleet.memory.sizing import available_bytes  # torch, which --help need not wait for

    most = available_bytes() // each_bytes
    if processes > most:
        raise UserError(
            f"{processes} processes do not fit into the memory of this machine, which has room for "
            f"at most {most}; lower --workers or --servers, or join a cluster with --address"
        )


@contextlib.contextmanager
def _start(
    workers: int, store_bytes: int, inline_bytes: int, timeout_s: float
) -> Iterator[Cluster]:
    # Always set: otherwise the value of an earlier cluster of this process would stay in force.
    system = {"max_direct_call_object_size": inline_bytes}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    with _folder() as folder, _environment(_QUIET | _HERE_ONLY | token):
        import ray

        # Ray installs psutil, so it cannot be imported before. It tells a process from a later one
        # with the same pid.
        psutil = importlib.import_module("psutil")

        _check_unused(ray)
        this = psutil.Process()
        others = set(this.children())
        theirs = signal.getsignal(signal.SIGTERM)
        try:
            with sigterm_unwinds(theirs):
                with blocked_in_children():
                    cluster = _connect(
                        ray,
                        timeout_s,
                        folder=folder,
                        address="local",
                        num_cpus=workers,
                        num_gpus=0,
                        object_store_memory=store_bytes,
                        _system_config=system,
                        include_dashboard=False,
                        _node_ip_address=LOOPBACK,
                        # Below ours: Ray makes its own folder readable for all users.
                        _temp_dir=str(folder / "ray"),
                    )
                _check_settings(ray, cluster)
                # Again: while connecting, Ray installed a handler of its own.
                with sigterm_unwinds(theirs):
                    yield cluster
        finally:
            with signals_ignored():
                started = [child for child in this.children() if child not in others]
                for child in list(started):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        started += child.children(recursive=True)
                _end_ungently(ray)
                ray.shutdown()
                _kill(psutil, started)


def _kill(psutil: Any, processes: list[Any]) -> None:
    """Kill all of them and wait until they are dead; zombies count as dead.

    The process that inherits orphans may reap them late or, in a container, never.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    until_s = time.monotonic() + GRACE_S
    while processes and time.monotonic() < until_s:
        processes = [process for process in processes if _is_alive(psutil, process)]
        time.sleep(0.01)


def _is_alive(psutil: Any, process: Any) -> bool:
    try:
        if process.ppid() == os.getpid():
            process.wait(0)
            return False
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.TimeoutExpired:
        return True
    except psutil.NoSuchProcess:
        return False


def _end_ungently(ray: Any) -> None:
    """Make Ray kill its processes at once: they ignore SIGTERM, and it waits a second for each."""
    # Private parts of Ray, which may change; without them the end only takes longer.
    node: Any = getattr(ray._private.worker, "_global_node", None)
    if hasattr(node, "kill_all_processes"):
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **_: kill(check_alive=False, allow_graceful=False)


def _check_settings(ray: Any, cluster: Cluster) -> None:
    """Refuse a Ray that was imported before our settings were in the environment."""
    is_here = cluster.address.rpartition(":")[0] == LOOPBACK
    has_token = ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
    if not (is_here and has_token):
        raise ClusterError(
            f"Ray would serve {cluster.address} without loopback or token: it was imported "
            "before qfleet could set it up; start the cluster first, or in a process of its own"
        )


def _check_unused(ray: Any) -> None:
    if ray.is_initialized():
        raise UserError("this process is in a Ray cluster already; leave it with ray.shutdown()")


@contextlib.contextmanager
def _join(workers: int, address: str, timeout_s: float) -> Iterator[Cluster]:
    check_address(address)
    settings = _QUIET | _JOINING
    if address != "auto":
        host = _probe(address)
        if _is_loopback(host):
            settings |= _HERE_ONLY
    with _environment(settings):
        import ray

        _check_unused(ray)
        theirs = signal.getsignal(signal.SIGTERM)
        try:
            with sigterm_unwinds(theirs):
                with _silence():
                    cluster = _connect(ray, timeout_s, folder=None, address=address)
                if (there := cluster.processors()) < workers:  # some would never be placed
                    raise ClusterError(
                        f"cluster {cluster.address} has {there} processors, too few for {workers} "
                        "workers; lower --workers or add nodes"
                    )
                # Again: while connecting, Ray installed a handler of its own.
                with sigterm_unwinds(theirs):
                    yield cluster
        finally:
            with signals_ignored():
                ray.shutdown()


def _probe(address: str) -> str:
    """Return the host of ``host:port`` if a Ray server answers there; Ray itself would hang."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S) as line:
            line.sendall(_GREETING)
            # With TLS there is no answer to a plain greeting: an open port must suffice.
            if os.environ.get("RAY_USE_TLS") != "1" and line.recv(_FRAME_BYTES)[3:4] != _SETTINGS:
                raise OSError("the server there is not Ray")
    except OSError as error:
        raise ClusterError(
            f"no cluster answers at {address} ({error}); start one with: ray start --head"
        ) from None
    return host.strip("[]")


def _connect(ray: Any, timeout_s: float, folder: Path | None, **options: Any) -> Cluster:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        context = ray.init(**options, **quiet)
    except SystemExit:
        # From a handler that Ray installs for a moment, and that exits with the bare signal number.
        raise SystemExit(128 + signal.SIGTERM) from None
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if folder is not None:
            raise ClusterError(f"cannot start a cluster: {_first_line(error)}") from error
        raise ClusterError(
            f"cannot join the cluster at {options['address']}: {_first_line(error)}; "
            "is it of this Ray version, and RAY_AUTH_TOKEN its token?"
        ) from error
    return Cluster(ray, context.address_info["gcs_address"], folder, timeout_s)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Create a folder that only this user can enter, and remove it afterwards."""
    usual = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="qfleet-", dir=usual if len(usual) < _LONGEST_TMP else "/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard standard error: Ray's C++ part prints there what our error message says."""
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _silence_of(name: str, waited_s: float) -> MemberSilent:
    return MemberSilent(f"{name} did not answer within {waited_s:g} s{IF_SLOW}")


def _store_full(error: BaseException) -> str:
    return (
        f"the cluster's object store is full ({_first_line(error)}), and Ray has no room on the "
        "disk to go on; free some, or give the store more (ray start --object-store-memory)"
    )


def _cause(error: BaseException) -> str:
    """Return one line about a death; of a failed start, the last line of its traceback."""
    first = _first_line(error)
    return str(error).strip().splitlines()[-1].strip() if "creation task" in first else first


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason")
