"""A load test of ``qfleet serve``: its rates beside its no-op rate and the network's own ceiling.

    python benchmarks/serve.py                      both networks (4 minutes on 2 cores)
    python benchmarks/serve.py --networks mlp --rounds 9 --format json
    python benchmarks/serve.py --networks cnn --runtime torch

One run starts two servers per network, one of which computes every request alone, and measures
them in turn, round by round, from one other process: requests that do nothing (``/healthz`` with
the same body), one observation per request unbatched and batched, 64 observations per request, and
requests at 70 % of these rates, evenly spaced. Ratios are medians over the rounds. The ceiling
is the network alone, in one process, at its best batch. If others use the machine, only the ratios
mean something.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import io
import json
import multiprocessing
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 1.0
"""Length of one measurement."""
NAP_S = 0.0001
END_S = 30.0
"""Seconds that a server has to end."""
SHAPES = {"mlp": ((4,), np.float32), "cnn": ((4, 84, 84), np.uint8)}
CONNECTIONS = {"mlp": 64, "cnn": 128}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MANY = 64
AT_LOAD = {"70 % load": "batched", "70 % no-op": "no-op"}
"""Requests at a fixed rate → whose rate it is 70 % of. The no-op's tail is the machine's."""


def save_policy(network: str, folder: Path) -> Path:
    """Save a policy with initial weights: 4→256→256→2, or the Nature CNN with 6 actions."""
    import torch

    from qfleet.agent.policy import Policy
    from qfleet.agent.weights import FlatWeights
    from qfleet.config.config import Config
    from qfleet.core.seeding import Seeds
    from qfleet.core.types import EnvSpec
    from qfleet.networks.factory import make_network

    if network == "mlp":
        config = Config(env="CartPole-v1", net_arch=(256, 256), compile="off", device="cpu")
        spec = EnvSpec("CartPole-v1", (4,), "float32", 2)
    else:
        config = Config(env="ALE/Pong-v5", compile="off", device="cpu")
        spec = EnvSpec("ALE/Pong-v5", (4, 84, 84), "uint8", 6, frame_stack=4, frame_skip=4)
    weights = FlatWeights(make_network(config, spec, torch.device("cpu"), Seeds.of(0).network))
    state = {"weights": weights.data, "buffers": weights.buffers()}
    return Policy(config, spec, state, "cpu").save(folder / network)


def observations(network: str, count: int | None) -> np.ndarray:
    shape, dtype = SHAPES[network]
    draw = np.random.default_rng(0)
    size = shape if count is None else (count, *shape)
    return (
        draw.normal(size=size).astype(dtype)
        if dtype == np.float32
        else draw.integers(0, 256, size, dtype)
    )


def make_request(path: str, array: np.ndarray, form: str) -> bytes:
    if form == "json":
        name = "observation" if array.shape in dict(SHAPES.values()) else "observations"
        kind, body = "application/json", json.dumps({name: array.tolist()}).encode()
    else:
        file = io.BytesIO()
        np.save(file, array)
        kind, body = "application/x-npy", file.getvalue()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Server:
    """A ``qfleet serve`` in a process of its own."""

    def __init__(self, path: Path, *options: str) -> None:
        words = ["-m", "qfleet.cli.main", "serve", str(path), "--port", "0", *options]
        self._process = subprocess.Popen(
            [sys.executable, *words], stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        assert self._process.stderr is not None
        while not (self.lines and "serving at" in self.lines[-1]):
            line = self._process.stderr.readline()
            if not line:
                raise SystemExit("".join(self.lines))
            self.lines.append(line)
        found = re.search(r":(\d+)\s*$", self.lines[-1])
        assert found is not None
        self.port = int(found[1])

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Generator:
    """Keep-alive connections with one request each at a time; raw sockets and one epoll."""

    def __init__(self, port: int, request: bytes, count: int) -> None:
        self._request = request
        self._sockets = {}
        self._epoll = select.epoll()
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port))
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[one.fileno()] = one
            self._epoll.register(one.fileno(), select.EPOLLIN)
        self._reply_bytes = self._probe()

    def _probe(self) -> int:
        """Return the size of a reply; all replies to one request have the same."""
        one = next(iter(self._sockets.values()))
        one.sendall(self._request)
        data = b""
        while chunk := one.recv(65536):
            data += chunk
            head, found, body = data.partition(b"\r\n\r\n")
            if found and len(body) == int(head.lower().split(b"content-length: ")[1].split()[0]):
                assert data.startswith(b"HTTP/1.1 200"), data
                return len(data)
        raise SystemExit(f"the server has closed a connection: {data[:300]!r}")

    def run(self, seconds: float, rate: float | None) -> dict[str, float]:
        """Return the rate and the latencies.

        ``rate`` None: every connection sends again as soon as its reply is there. Otherwise
        requests are due at even intervals, and latencies count from then, whenever they are sent.
        """
        latencies: list[float] = []
        free = collections.deque(self._sockets)
        left = dict.fromkeys(self._sockets, 0)
        begun: dict[int, float] = {}
        began_s = now_s = time.perf_counter()
        number = 0
        while now_s < began_s + seconds or begun:
            is_over = now_s >= began_s + seconds
            while free and not is_over:
                due_s = now_s if rate is None else began_s + number / rate
                if due_s > now_s:
                    break
                number += 1
                handle = free.popleft()
                begun[handle], left[handle] = due_s, self._reply_bytes
                self._sockets[handle].send(self._request)
            ready = self._epoll.poll(0.0 if rate is not None else 0.05)
            if rate is not None and not ready:
                time.sleep(NAP_S)  # epoll's own timeout is in whole milliseconds
            for handle, _ in ready:
                data = self._sockets[handle].recv(65536)
                is_first = left[handle] == self._reply_bytes
                if not data or (is_first and not data.startswith(b"HTTP/1.1 200")):
                    raise SystemExit(f"refused: {data[:300]!r}")
                left[handle] -= len(data)
                if left[handle] == 0:
                    latencies.append(time.perf_counter() - begun.pop(handle))
                    free.append(handle)
            now_s = time.perf_counter()
        latencies.sort()
        return {
            "rate": len(latencies) / (now_s - began_s),
            "p50_ms": latencies[len(latencies) // 2] * 1e3,
            "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
        }

    def close(self) -> None:
        for one in self._sockets.values():
            one.close()


def generate(pipe: Any, jobs: dict[str, tuple[int, bytes, int]]) -> None:
    """The process that sends: for every name that comes, send and return what was measured."""
    gc.disable()
    generators = {name: Generator(*job) for name, job in jobs.items()}
    for generator in generators.values():
        generator.run(0.3, None)
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        name, rate = order
        pipe.send(generators[name].run(SECONDS, rate))


def ceiling(path: Path, network: str, runtime: str) -> tuple[float, int]:
    """Return observations per second of the network alone at its best batch, and that batch."""
    from qfleet.deploy.models import open_model

    model, best = open_model(path, runtime), (0.0, 0)  # type: ignore[arg-type]
    for batch in BATCHES:
        given, times = observations(network, batch), list[float]()
        model(given)
        until_s = time.perf_counter() + 0.5
        while len(times) < 3 or time.perf_counter() < until_s:
            began_s = time.perf_counter()
            model(given)
            times.append(time.perf_counter() - began_s)
        best = max(best, (batch / statistics.median(times), batch))
    return best


def median_us(function: Callable[[], object], count: int = 300) -> float:
    times = []
    for _ in range(count):
        began_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times) * 1e6


def chosen_runtime(server: Server) -> str:
    line = next((line for line in server.lines if " runs on " in line), "")
    return line.split(" runs on ")[1].split(";")[0] if line else "torch"


def measure(network: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path, runtime = save_policy(network, folder), arguments.runtime
    with contextlib.ExitStack() as stopping:
        batched = Server(path, "--runtime", runtime)
        stopping.callback(batched.stop)
        runtime = chosen_runtime(batched) if runtime == "auto" else runtime
        alone = Server(path, "--runtime", runtime, "--max-batch", "1")
        stopping.callback(alone.stop)
        rounds, result = load(network, path, batched, alone, arguments)
    return result | {"runtime": runtime} | compare(rounds, *ceiling(path, network, runtime))


Round = dict[str, dict[str, float]]
"""What was measured in one round, by the kind of request."""


def load(
    network: str, path: Path, batched: Server, alone: Server, arguments: argparse.Namespace
) -> tuple[list[Round], dict[str, Any]]:
    """Return what all rounds measured, and the times of single calls."""
    import qfleet

    count = CONNECTIONS[network]
    one, many = observations(network, None), observations(network, MANY)
    form = arguments.format
    jobs = {
        "no-op": (batched.port, make_request("/healthz", one, form), count),
        "unbatched": (alone.port, make_request("/act", one, form), count),
        "batched": (batched.port, make_request("/act", one, form), count),
        "64 a request": (batched.port, make_request("/act", many, form), 4),
    }
    context = multiprocessing.get_context("spawn")
    pipe, child_end = context.Pipe()
    sender = context.Process(target=generate, args=(child_end, jobs), daemon=True)
    sender.start()
    child_end.close()  # so that ``recv`` ends with the sender
    pipe.recv()
    rounds: list[Round] = []
    for _ in range(arguments.rounds):
        found = {}
        for name in jobs:
            pipe.send((name, None))
            found[name] = pipe.recv()
        for name, of in AT_LOAD.items():
            pipe.send((of, 0.7 * found[of]["rate"]))
            found[name] = pipe.recv()
        rounds.append(found)
    pipe.send(None)
    policy = qfleet.load(path)
    client = qfleet.PolicyClient(f"http://127.0.0.1:{batched.port}")
    result: dict[str, Any] = {
        "network": network,
        "format": form,
        "act_us": median_us(lambda: policy.act(one)),
        "round_trip_us": median_us(lambda: client.act(one)),
    }
    client.close()
    return rounds, result


def compare(rounds: list[Round], best: float, batch: int) -> dict[str, Any]:
    """Return medians over the rounds; ``best``: of the network alone, with this batch."""

    def median(value: Callable[[Round], float]) -> float:
        return statistics.median(value(found) for found in rounds)

    result: dict[str, Any] = {
        name: {
            key: median(lambda found, name=name, key=key: found[name][key])  # type: ignore[misc]
            for key in ("rate", "p50_ms", "p99_ms")
        }
        for name in rounds[0]
    }
    return result | {
        "batched / no-op": median(lambda f: f["batched"]["rate"] / f["no-op"]["rate"]),
        "p99 batched / unbatched": median(
            lambda f: f["batched"]["p99_ms"] / f["unbatched"]["p99_ms"]
        ),
        "64 a request / unbatched": median(
            lambda f: MANY * f["64 a request"]["rate"] / f["unbatched"]["rate"]
        ),
        **{
            f"p99 / p50 of {name}": median(
                lambda f, name=name: f[name]["p99_ms"] / f[name]["p50_ms"]  # type: ignore[misc]
            )
            for name in AT_LOAD
        },
        "ceiling": best,
        "ceiling_batch": batch,
        "batched / ceiling": median(lambda f: f["batched"]["rate"] / best),
        "64 a request / ceiling": median(lambda f: MANY * f["64 a request"]["rate"] / best),
    }


def report(result: dict[str, Any]) -> None:
    print(f"{result['network']} on {result['runtime']}, {result['format']}")
    for name in ("no-op", "unbatched", "batched", "64 a request", *AT_LOAD):
        row = result[name]
        observations_s = row["rate"] * (MANY if name.startswith("64") else 1)
        print(
            f"  {name:<13} {row['rate']:8,.0f} requests/s {observations_s:10,.0f} observations/s"
            f"  p50 {row['p50_ms']:6.2f} ms  p99 {row['p99_ms']:6.2f} ms"
        )
    print(
        f"  network alone {result['ceiling']:,.0f} observations/s, batch {result['ceiling_batch']}"
    )
    print(
        f"  act in process {result['act_us']:.0f} µs, round trip {result['round_trip_us']:.0f} µs"
    )
    for name, value in result.items():
        if " / " in name:
            print(f"  {name}: {value:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--networks", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--format", choices=["npy", "json"], default="npy")
    parser.add_argument("--runtime", choices=["auto", "torch", "onnxruntime"], default="auto")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for network in arguments.networks:
            results.append(measure(network, arguments, Path(folder)))
            report(results[-1])
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
