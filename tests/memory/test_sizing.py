"""What a replay memory takes, what there is, and the refusal in between."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qfleet.core.errors import MemoryRefusedError
from qfleet.core.types import EnvSpec
from qfleet.memory.host_sampler import HostPrioritizedSampler
from qfleet.memory.ring import Ring
from qfleet.memory.samplers import UniformSampler
from qfleet.memory.sizing import available_bytes, check_fits, largest_capacity, replay_bytes
from support.messages import says

CPU = torch.device("cpu")
ATARI = EnvSpec("atari", (4, 84, 84), "uint8", 6, frame_stack=4)
CARTPOLE = EnvSpec("cartpole", (4,), "float32", 2)
GIB = 2**30


def test_a_million_atari_transitions_take_one_frame_each() -> None:
    # A frame, an int64 action, a float32 reward and a byte of flags; one blank frame beside them.
    assert replay_bytes(ATARI, 8, 1_000_000, False) == 1_000_000 * (7056 + 13) + 7056


@pytest.mark.parametrize("prioritized", [False, True])
def test_the_prediction_is_what_a_ring_allocates(tmp_path: Path, prioritized: bool) -> None:
    generator = torch.Generator()
    sampler = HostPrioritizedSampler(333, 3, 0.6, 1e-6, CPU, generator)
    ring = Ring(
        CARTPOLE,
        3,
        1001,
        1,
        0.9,
        sampler if prioritized else UniformSampler(generator),
        CPU,
        tmp_path,
    )
    assert ring.rows == 333
    allocated = sum(path.stat().st_size for path in tmp_path.glob("*.bin"))
    if prioritized:
        for tensor in (sampler.leaves, sampler.block_sums, sampler.block_minima):
            allocated += tensor.nbytes
    assert replay_bytes(CARTPOLE, 3, 1001, prioritized) == allocated


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("num_envs", [1, 7])
def test_a_refusal_names_the_largest_capacity_and_that_one_is_accepted(
    num_envs: int, prioritized: bool
) -> None:
    with pytest.raises(MemoryRefusedError) as caught:
        check_fits(ATARI, num_envs, 1_000_000, prioritized, budget_bytes=2 * GIB)
    message = str(caught.value)
    assert "1000000 transitions" in message
    assert re.search(r"needs 6\.58\d GiB but 2 GiB of memory is available", message)
    found = re.search(r"--buffer-size (\d+) or less", message)
    assert found
    largest = int(found[1])
    assert largest % num_envs == 0
    check_fits(ATARI, num_envs, largest, prioritized, budget_bytes=2 * GIB)
    with pytest.raises(MemoryRefusedError, match=says("--buffer-size", str(largest))):
        check_fits(ATARI, num_envs, largest + num_envs, prioritized, budget_bytes=2 * GIB)
    assert 0.89 < replay_bytes(ATARI, num_envs, largest, prioritized) / (2 * GIB) <= 0.9


def test_a_million_compressed_transitions_are_assumed_to_take_half_a_frame_each() -> None:
    # Half a frame and 56 bytes to keep it; action, reward and flags are not compressed.
    assert replay_bytes(ATARI, 8, 1_000_000, False, "lz4") == 1_000_000 * (3584 + 13) + 3584
    leaves = replay_bytes(ATARI, 8, 1_000_000, True) - replay_bytes(ATARI, 8, 1_000_000, False)
    plain, prioritized = (replay_bytes(ATARI, 8, 1_000_000, p, "lz4") for p in (False, True))
    assert prioritized - plain == leaves > 0


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_refused_compressed_ring_names_the_largest_capacity(prioritized: bool) -> None:
    check_fits(ATARI, 3, 500_000, prioritized, budget_bytes=2 * GIB, compression="lz4")
    with pytest.raises(MemoryRefusedError) as caught:
        check_fits(ATARI, 3, 1_000_000, prioritized, budget_bytes=2 * GIB, compression="lz4")
    found = re.search(r"needs 3\.35\d? GiB .*--buffer-size (\d+) or less", str(caught.value))
    assert found
    # Files and compression exclude each other, so the one is no way out for the other.
    assert "--replay-dir" not in str(caught.value)
    largest = int(found[1])
    assert largest == largest_capacity(ATARI, 3, prioritized, 2 * GIB, "lz4")
    assert largest > 1.9 * largest_capacity(ATARI, 3, prioritized, 2 * GIB)
    check_fits(ATARI, 3, largest, prioritized, budget_bytes=2 * GIB, compression="lz4")
    with pytest.raises(MemoryRefusedError):
        check_fits(ATARI, 3, largest + 3, prioritized, budget_bytes=2 * GIB, compression="lz4")


def test_a_refusal_says_so_when_nothing_fits() -> None:
    with pytest.raises(MemoryRefusedError, match=says("--buffer-size")):
        check_fits(ATARI, 8, 1000, False, budget_bytes=10_000)


def test_memory_is_what_counts_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qfleet.memory.sizing.available_bytes", lambda: GIB)
    check_fits(ATARI, 1, 100_000, False)
    with pytest.raises(MemoryRefusedError, match="--replay-dir"):
        check_fits(ATARI, 1, 200_000, False)


def test_on_disk_the_free_space_of_the_folder_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def usage(path: Path) -> object:
        asked.append(path)
        return SimpleNamespace(free=GIB)

    monkeypatch.setattr("qfleet.memory.sizing.shutil.disk_usage", usage)
    folder = tmp_path / "not" / "yet" / "there"
    check_fits(ATARI, 1, 100_000, False, on_disk=folder)
    assert asked == [tmp_path]
    with pytest.raises(MemoryRefusedError, match=says("free")) as caught:
        check_fits(ATARI, 1, 200_000, False, on_disk=folder)
    assert "--replay-dir" not in str(caught.value)


def test_files_of_the_ring_to_be_resumed_do_not_count_as_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ring(CARTPOLE, 1, 1000, 1, 0.9, UniformSampler(torch.Generator()), CPU, tmp_path)
    needed = replay_bytes(CARTPOLE, 1, 1000, False)
    monkeypatch.setattr(
        "qfleet.memory.sizing.shutil.disk_usage",
        lambda _: SimpleNamespace(free=needed // 5),
    )
    check_fits(CARTPOLE, 1, 1000, False, on_disk=tmp_path)
    with pytest.raises(MemoryRefusedError):
        check_fits(CARTPOLE, 1, 2000, False, on_disk=tmp_path)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"


def test_without_a_limit_the_machines_memory_is_available(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert available_bytes(tmp_path) == 8 * GIB


def test_the_tightest_cgroup_v2_above_the_process_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/job"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job/step\n",
            f"{group}/step/memory.max": "max\n",
            f"{group}/step/memory.current": f"{GIB}\n",
            f"{group}/step/memory.stat": "anon 1\n",
            f"{group}/memory.max": f"{4 * GIB}\n",
            f"{group}/memory.current": f"{3 * GIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        },
    )
    assert available_bytes(tmp_path) == 2 * GIB


def test_a_cgroup_v1_limit_counts_even_where_only_the_mounts_root_is_seen(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/docker/on:the:host\n0::/\n",
            f"{group}/memory.limit_in_bytes": f"{3 * GIB}\n",
            f"{group}/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        },
    )
    assert available_bytes(tmp_path) == 3 * GIB // 2


def test_a_limit_above_the_machines_memory_changes_nothing(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/\n",
            f"{group}memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}memory.usage_in_bytes": "1\n",
            f"{group}memory.stat": "cache 0\n",
        },
    )
    assert available_bytes(tmp_path) == 8 * GIB


def test_an_overdrawn_limit_leaves_nothing(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            f"{group}memory.max": "1000\n",
            f"{group}memory.current": "2000\n",
            f"{group}memory.stat": "anon 1\n",
        },
    )
    assert available_bytes(tmp_path) == 0


def test_other_systems_are_asked_through_sysconf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}

    def sysconf(name: str) -> int:
        if name not in answers:
            raise ValueError(name)
        return answers[name]

    monkeypatch.setattr("qfleet.memory.sizing.os.sysconf", sysconf)
    assert available_bytes(tmp_path) == 4_096_000
    answers["SC_AVPHYS_PAGES"] = 10
    assert available_bytes(tmp_path) == 40_960


def test_this_machine_has_some_memory() -> None:
    assert available_bytes() > 2**20
