"""Start or join a Ray cluster. In: a number of workers, perhaps an address; out: a ``Cluster``.

The only module that calls Ray. A cluster of our own listens on loopback only, requires a token that
was made for it, and leaves no process and no file when its block ends, however it ends. Every wait
has a deadline, and every error message is one line.

Ray reads some of its settings from the environment when it is first imported: a process can start
clusters of its own or join others', but not both.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import ipaddress
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qfleet.config.validation import check_address
from qfleet.core import exits
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
from qfleet.engines.cluster.liveness import LOOK_S, RUN_AGAIN, Liveness, greet, is_silent
from qfleet.engines.cluster.scratch import kill, locked_folder, sweep

LOOPBACK = "127.0.0.1"
STORE_BYTES = 256 * 2**20
INLINE_BYTES = 100 * 2**10
"""Ray's default: smaller values travel within the call or its answer, others through the store."""
TIMEOUT_S = 120.0
IF_SLOW = "; if the machine is only slow, raise timeout_s"
"""Advice at the end of a message about a loss; ``MemberPool``, which replaces members, drops it."""
NODE_SHARE = 0.001
"""Share of a node's own resource that a process takes which has to be there: 1000 fit."""
LEAST_BYTES, LEAST_BYTES_WITH_TORCH = 32 * 2**20, 128 * 2**20
"""Lower bounds of a process's own memory (with torch some 200 MiB were measured)."""
LONGEST_SLICE_S = 8.0
"""Longest wait without a look at the cluster."""
LEAVE_S, LEAVE_SILENT_S = 12.0, 5.0
"""Deadlines for leaving a lost cluster, which takes Ray 5 s, and one that answers nothing."""
PROBE_S = 5.0
"""Deadline for the first answer of a cluster's port."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Workers without a GPU keep the environment as it is; unset, Ray warns of a change to come.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's processes print deaths and slow starts among our lines, ``log_to_driver`` or not: all of
    # that is skipped. Our own errors come with the results of calls.
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
    # Ray ends a process that has not reached the GCS for this long; its default is 60.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
}
# Ray's default is 20, a second each: a token that is wrong now is not accepted later.
_JOINING = {"RAY_NUM_REDIS_GET_RETRIES": "2"}
_AUTH_MODE = "RAY_AUTH_MODE"
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
    liveness: Liveness | None = None
    """None in a process of the cluster, which Ray ends with its raylet."""

    @property
    def is_lost(self) -> bool:
        """Whether a check has found that the cluster is gone."""
        return self.liveness is not None and bool(self.liveness.loss)

    def processors(self) -> int:
        """Return the number of processors of all nodes that are alive."""
        self._await_gcs()
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
        self._await_gcs()
        with self._storing():
            return self.ray.remote(**options)(kind).remote(*args)

    def stop(self, worker: Any) -> None:
        self._await_gcs()
        self.ray.kill(worker)

    def put(self, value: Any) -> Any:
        """Store a value once, for any number of workers to read."""
        if self.liveness is not None:
            self.liveness.check_raylet()  # without it, Ray would end this process
        with self._storing():
            return self.ray.put(value)

    def store_bytes(self) -> int:
        """Return the size of the object stores of all nodes together."""
        self._await_gcs()
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
        for wait_s in self._waits(self.timeout_s):
            if done := self.ray.wait(pending, num_returns=1, timeout=wait_s)[0]:
                return done[0]
        raise _silence_of(name, self.timeout_s)

    def ready(self, pending: list[Any], wait_s: float) -> list[Any]:
        """Return the references whose value, or failure, has arrived; none after ``wait_s``."""
        if not pending:
            return []
        self._check()
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
            return self._get(reference, wait_s)
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
        except (failures.RayError, OSError) as error:
            raise ClusterError(f"{name} was lost: {_first_line(error)}") from error

    def _get(self, reference: Any, wait_s: float) -> Any:
        failures = self.ray.exceptions
        try:
            for slice_s in self._waits(wait_s):
                with contextlib.suppress(failures.GetTimeoutError):
                    return self.ray.get(reference, timeout=slice_s)
        except (failures.RayError, OSError):
            self._check(now=True)  # a lost cluster is the cause of all other losses
            raise
        raise failures.GetTimeoutError

    def _waits(self, wait_s: float) -> Iterator[float]:
        """Cut a wait into slices, with a look at the cluster before each.

        Every slice is twice as long as the last one, up to some seconds: after each, Ray may start
        the transfer of a large value again. While the GCS is missing, slices are short.
        """
        until_s, slice_s, left_s = time.monotonic() + wait_s, LOOK_S, wait_s
        while True:
            self._check()
            yield min(slice_s, left_s)
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                return
            is_short = self.liveness is not None and self.liveness.is_gcs_missing
            slice_s = LOOK_S if is_short else min(2 * slice_s, LONGEST_SLICE_S)

    def _check(self, now: bool = False) -> None:
        if self.liveness is not None:
            self.liveness.check(now)

    def _await_gcs(self) -> None:
        if self.liveness is not None:
            self.liveness.await_gcs()

    def node_ip(self) -> str:
        """Return the address of the node that this process is on."""
        return str(self._node()["NodeManagerAddress"])

    def _node(self) -> Mapping[str, Any]:
        self._await_gcs()
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
    token = {_AUTH_MODE: "token", "RAY_AUTH_TOKEN": _TOKEN}
    with locked_folder() as folder, _environment(_QUIET | _HERE_ONLY | token):
        import ray

        # Ray installs psutil, so it cannot be imported before. It tells a process from a later one
        # with the same pid.
        psutil = importlib.import_module("psutil")

        _check_unused(ray)
        this = psutil.Process()
        others = set(this.children())
        theirs, cluster = signal.getsignal(signal.SIGTERM), None
        try:
            with sigterm_unwinds(theirs):
                with blocked_in_children(), without_helpers():
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
                is_lost = _is_lost(cluster)
                started = [child for child in this.children() if child not in others]
                for child in list(started):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        started += child.children(recursive=True)
                if is_lost:
                    kill(psutil, started)  # a GCS that hangs is not waited for once it is dead
                _end_ungently(ray)
                _leave(ray, cluster, is_lost)
                kill(psutil, started)


@contextlib.contextmanager
def without_helpers() -> Iterator[None]:
    """Keep Ray from starting three processes that only serve its dashboard, logs and autoscaler.

    Each of them imports Ray again: on two cores they were half of a start's seven seconds.
    """
    # Private parts of Ray, which may change; without them the start only takes longer.
    node = importlib.import_module("ray._private.node").Node
    names = ("start_monitor", "start_log_monitor", "start_api_server")
    theirs = {name: vars(node)[name] for name in names if name in vars(node)}
    for name in theirs:
        setattr(node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in theirs.items():
            setattr(node, name, method)


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
    with _restored(_AUTH_MODE), _environment(settings):
        import ray

        _check_unused(ray)
        theirs, cluster = signal.getsignal(signal.SIGTERM), None
        try:
            with sigterm_unwinds(theirs):
                with _silence():
                    cluster = _connect_with_token(ray, timeout_s, address)
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
                _leave(ray, cluster, _is_lost(cluster))


def _connect_with_token(ray: Any, timeout_s: float, address: str) -> Cluster:
    """Join a cluster, with the user's token if it is refused without one.

    Since Ray 2.60, ``ray start`` requires a token wherever it finds one, but joining an address
    sends it only if RAY_AUTH_MODE says so. Not always with it: a process that requires a token
    cannot be called back by a cluster without one.
    """
    try:
        return _connect(ray, timeout_s, folder=None, address=address)
    except ClusterError as error:
        # Ray 2.55 reports a missing token as a failed connection; the address was probed before.
        refusals = (ConnectionError, ray.exceptions.AuthenticationError)
        if not isinstance(error.__cause__, refusals):
            raise
        # Ray's own way to look for a token: in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray.
        token = ray._raylet.AuthenticationTokenLoader.instance()
        if os.environ.get(_AUTH_MODE) is not None or not token.has_token(ignore_auth_mode=True):
            raise
        os.environ[_AUTH_MODE] = "token"
        ray._raylet.Config.initialize("")  # reads the environment again
        return _connect(ray, timeout_s, folder=None, address=address)


def _is_lost(cluster: Cluster | None) -> bool:
    """Return whether the cluster is lost, after having waited for its GCS."""
    if cluster is None:
        return False
    with contextlib.suppress(ClusterError):
        cluster._await_gcs()
    return cluster.is_lost


def _leave(ray: Any, cluster: Cluster | None, is_lost: bool) -> None:
    """Disconnect; Ray would wait for a GCS that answers nothing without end."""
    limit_s, errors = TIMEOUT_S, list[BaseException]()
    if cluster is not None and is_lost:
        limit_s = LEAVE_SILENT_S if is_silent(cluster.address) else LEAVE_S

    def shut_down() -> None:
        try:
            ray.shutdown()
        except BaseException as error:
            errors.append(error)

    leaving = threading.Thread(target=shut_down, daemon=True)
    leaving.start()
    leaving.join(limit_s)
    if errors and not is_lost:
        raise errors[0]
    if leaving.is_alive():
        # When this process ends, Ray would wait again, and its threads would crash the interpreter.
        atexit.register(exits.end_now)


def _probe(address: str) -> str:
    """Return the host of ``host:port`` if a Ray server answers there; Ray itself would hang."""
    try:
        return greet(address, PROBE_S)
    except OSError as error:
        raise ClusterError(
            f"no cluster answers at {address} ({error}); start one with: ray start --head"
        ) from None


def _connect(ray: Any, timeout_s: float, folder: Path | None, **options: Any) -> Cluster:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    psutil = importlib.import_module("psutil")
    sweep(psutil)
    try:
        context = ray.init(**options, **quiet)
    except SystemExit:
        # From a handler that Ray installs for a moment, and that exits with the bare signal number.
        raise SystemExit(128 + signal.SIGTERM) from None
    except Exception as error:  # Ray raises Exception itself if a node does not start in time
        if folder is not None:
            raise ClusterError(f"cannot start a cluster: {_first_line(error)}") from error
        raise ClusterError(
            f"cannot join the cluster at {options['address']}: {_first_line(error)}; "
            "is it of this Ray version, and RAY_AUTH_TOKEN its token?"
        ) from error
    gcs_address = context.address_info["gcs_address"]
    # Private parts of Ray, which may change; without them the raylet is not watched.
    raylet = getattr(ray._private.worker._global_node, "raylet_socket_name", "")
    return Cluster(ray, gcs_address, folder, timeout_s, Liveness(psutil, gcs_address, raylet))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    with _restored(*settings):
        os.environ.update(settings)
        yield


@contextlib.contextmanager
def _restored(*names: str) -> Iterator[None]:
    """Restore these variables of the environment at the end."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name in names:
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
