"""Which rank this process is: by the launcher's environment variables, or 0 of ranks it starts.

torchrun sets RANK and WORLD_SIZE, Open MPI OMPI_COMM_WORLD_…, MPICH and Intel MPI PMI_…. Without a
launcher, rank 0 starts the others on this machine and gives them torchrun's variables.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

from qfleet.config.config import Config
from qfleet.core.errors import ConfigError

# Rank, size, rank on this machine, size on this machine.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TORCH_PORT = 29500  # torchrun's default


class World(NamedTuple):
    """The place of this process among all ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """Ranks on this machine."""
    host: str
    port: int
    """Where the store is, through which ranks find each other."""
    is_stored_elsewhere: bool = False
    """Whether the launcher has started the store; otherwise rank 0 does."""

    @property
    def is_one_machine(self) -> bool:
        return self.local_size == self.size


def launched_world(environ: Mapping[str, str] = os.environ) -> World | None:
    """Return this process's place among the ranks that a launcher started; None without one."""
    for names in _VARIABLES:
        if names[0] in environ and names[1] in environ:
            break
    else:
        return None
    try:
        rank, size = int(environ[names[0]]), int(environ[names[1]])
        local_rank = int(environ.get(names[2], rank))
        host = environ.get("MASTER_ADDR", "")
        # Launchers that do not say how many ranks are here may have started one per machine.
        local_size = int(environ.get(names[3], 1 if host and host not in LOOPBACK else size))
        port = int(environ.get("MASTER_PORT", _TORCH_PORT))
    except ValueError:
        found = ", ".join(f"{n}={environ[n]}" for n in (*names, "MASTER_PORT") if n in environ)
        raise ConfigError(f"the launcher's variables are not numbers: {found}") from None
    host = host or ("127.0.0.1" if local_size == size else "")
    if not host:
        raise ConfigError(
            f"{size} ranks on several machines need MASTER_ADDR, the address of rank 0's; with Open"
            " MPI: mpirun -x MASTER_ADDR=… -x MASTER_PORT=…"
        )
    elsewhere = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return World(rank, size, local_rank, local_size, host, port, elsewhere)


def with_launched_workers(config: Config) -> Config:
    """Return the configuration with as many workers as a launcher has started ranks."""
    world = launched_world() if config.engine == "all-reduce" else None
    return config if world is None else config.replace(workers=world.size)


def see_own_gpu(world: World) -> None:
    """Leave this process one of its machine's GPUs, in turn by rank; call it before any use."""
    count = torch.cuda.device_count()  # asks the driver, not CUDA
    if count > 1:
        name = "CUDA_VISIBLE_DEVICES"
        visible = os.environ.get(name) or ",".join(map(str, range(count)))
        os.environ[name] = visible.split(",")[world.local_rank % count]


def count_restarts() -> int:
    """Return how often torchrun has started this command again because a rank was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def listen_locally(port: int = 0) -> socket.socket:
    """Return a socket that only this machine can reach; port 0: a free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


_FOLLOW = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from qfleet.engines.all_reduce.follower import follow; follow()"
)


def start_rank(world: World) -> subprocess.Popen[bytes]:
    """Start another rank on this machine; it imports what this process can import."""
    variables = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "MASTER_ADDR": world.host,
        "MASTER_PORT": world.port,
    }
    # torch would print a page of addresses when rank 0 is gone; one line of ours says it.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    environ = quiet | os.environ | {name: str(value) for name, value in variables.items()}
    return subprocess.Popen(
        [sys.executable, "-c", _FOLLOW, *(path or os.getcwd() for path in sys.path)],
        env=environ,
        stdin=subprocess.DEVNULL,
        # Ctrl-C in the terminal is for rank 0, which then stops all ranks.
        start_new_session=True,
    )
