"""The ring against hand-computed numbers, and against itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qfleet.core.errors import CheckpointError, ConfigError, MemoryRefusedError, RunBusyError
from qfleet.core.types import FIRST, SKIP, TERMINATED, Batch, Block, EnvSpec, Memory
from qfleet.memory.ring import Ring
from qfleet.storage.segments import Segments
from support.episode_model import FAULT, LIFE_LOST, PLAIN, Plan, lay_out
from support.messages import says
from support.ring_cases import CPU, Case, assert_equal, prioritized, uniform

VECTOR = EnvSpec("vector", (1,), "float32", 9)


def block_of(
    reward: list[float], flags: list[int], obs: list[float] | None = None, num_envs: int = 1
) -> Block:
    """Rows of one env (repeated for others) whose observation and action are the row's number."""
    count = len(reward)
    rows = torch.tensor(obs if obs is not None else list(range(count)), dtype=torch.float32)
    return Block(
        obs=rows.view(count, 1, 1).expand(count, num_envs, 1),
        action=torch.arange(count).view(count, 1).expand(count, num_envs),
        reward=torch.tensor(reward).view(count, 1).expand(count, num_envs),
        flags=torch.tensor(flags, dtype=torch.uint8).view(count, 1).expand(count, num_envs),
    )


def column(ring: Ring, rows: list[int]) -> Batch:
    return ring.gather(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64))


def test_three_steps_into_a_truncation_bootstrap_from_the_final_observation() -> None:
    ring = Ring(VECTOR, 1, 20, 3, 0.9, uniform(), CPU)
    # Rows 0..3 act, row 4 holds the true final observation, row 5 opens the next episode.
    flags = [FIRST, 0, 0, 0, SKIP, FIRST, 0, 0, 0]
    ring.extend(block_of([1.0, 2.0, 4.0, 8.0, 99.0, 1.0, 1.0, 1.0, 1.0], flags))
    batch = column(ring, [0, 1, 2, 3, 5])
    # 1 + .9·2 + .81·4; 2 + .9·4 + .81·8; 4 + .9·8; 8; 1 + .9 + .81
    torch.testing.assert_close(batch.reward, torch.tensor([6.04, 12.08, 11.2, 8.0, 2.71]))
    torch.testing.assert_close(batch.discount, torch.tensor([0.729, 0.729, 0.81, 0.9, 0.729]))
    assert batch.next_obs.view(-1).tolist() == [3, 4, 4, 4, 8]


def test_three_steps_into_a_termination_do_not_bootstrap() -> None:
    ring = Ring(VECTOR, 1, 20, 3, 0.9, uniform(), CPU)
    flags = [FIRST, 0, 0, TERMINATED, SKIP, FIRST, 0, 0]
    ring.extend(block_of([1.0, 2.0, 4.0, 8.0, 99.0, 1.0, 1.0, 1.0], flags))
    batch = column(ring, [0, 1, 2, 3])
    torch.testing.assert_close(batch.reward, torch.tensor([6.04, 12.08, 11.2, 8.0]))
    torch.testing.assert_close(batch.discount, torch.tensor([0.729, 0.0, 0.0, 0.0]))
    assert batch.next_obs.view(-1).tolist() == [3, 4, 4, 4]


def test_a_lost_life_cuts_the_return_but_the_game_goes_on() -> None:
    ring = Ring(VECTOR, 1, 20, 3, 0.9, uniform(), CPU)
    ring.extend(block_of([1.0, 2.0, 4.0, 8.0, 16.0, 0.0], [FIRST, TERMINATED, 0, 0, 0, 0]))
    batch = column(ring, [0, 1, 2])
    torch.testing.assert_close(batch.reward, torch.tensor([2.8, 2.0, 24.16]))
    torch.testing.assert_close(batch.discount, torch.tensor([0.0, 0.0, 0.729]))
    assert batch.next_obs.view(-1).tolist() == [2, 2, 5]


def test_stacks_are_blank_before_the_episode_and_whole_after_the_ring_wrapped() -> None:
    spec = EnvSpec("stack", (3, 1), "uint8", 9, frame_stack=3)
    ring = Ring(spec, 1, 8, 1, 0.9, uniform(), CPU)

    def rows(first: int, flags: list[int]) -> Block:
        block = block_of([0.0] * len(flags), flags, [float(first + i) for i in range(len(flags))])
        block.obs = block.obs.to(torch.uint8)
        return block

    ring.extend(rows(10, [FIRST, 0, 0, SKIP, FIRST, 0]))
    batch = column(ring, [0, 1, 2, 4])
    assert batch.obs.dtype == torch.uint8
    assert batch.obs.squeeze(2).tolist() == [[0, 0, 10], [0, 10, 11], [10, 11, 12], [0, 0, 14]]
    assert batch.next_obs[2:].squeeze(2).tolist() == [[11, 12, 13], [0, 14, 15]]
    ring.extend(rows(16, [0, 0, 0, 0]))
    # Ten rows came, 10 and 11 are gone. 12 and 13 lack frames behind them, 19 has no row after it.
    batch = ring.sample(300, 1.0)
    stacks = {tuple(stack) for stack in batch.obs.squeeze(2).tolist()}
    assert stacks == {(0, 0, 14), (0, 14, 15), (14, 15, 16), (15, 16, 17), (16, 17, 18)}


def test_a_first_row_that_does_not_say_so_still_has_nothing_behind_it() -> None:
    spec = EnvSpec("stack", (3, 1), "float32", 9, frame_stack=3)
    ring = Ring(spec, 1, 5, 1, 0.9, uniform(), CPU)
    ring.extend(block_of([0.0] * 5, [0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert column(ring, [0]).obs.view(-1).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("dtype", "value"), [("int64", 2**40 + 1), ("uint8", 255), ("float32", 0.25)]
)
def test_discrete_observations_of_every_dtype_come_back_as_stored(dtype: str, value: float) -> None:
    spec = EnvSpec("scalar", (), dtype, 2, num_obs_values=5)
    ring = Ring(spec, 1, 4, 1, 0.9, uniform(), CPU)
    block = block_of([0.0] * 3, [FIRST, 0, 0])
    block.obs = torch.tensor([[value], [0], [0]], dtype=spec.torch_dtype)
    ring.extend(block)
    batch = column(ring, [0])
    assert batch.obs.dtype == spec.torch_dtype
    assert batch.obs.tolist() == [value]


# --- the rest ------------------------------------------------------------------------------------


def test_uniform_draws_are_uniform_over_what_is_not_skipped() -> None:
    ring = Ring(VECTOR, 1, 20, 1, 0.9, uniform(3), CPU)
    ring.extend(block_of([0.0] * 12, [FIRST, 0, SKIP, FIRST, SKIP, SKIP, FIRST, 0, 0, 0, 0, 0]))
    counts = torch.bincount(ring.sample(8000, 1.0).index, minlength=20)
    assert counts[[2, 4, 5, 11, 12]].tolist() == [0] * 5
    # Eight starts, a thousand draws each; the deviation of a count is √(1000·7/8) ≈ 30.
    assert all(abs(counts[row] - 1000) < 120 for row in [0, 1, 3, 6, 7, 8, 9, 10])


def test_equal_seeds_draw_equal_batches_and_others_do_not() -> None:
    batches = []
    for seed in (5, 5, 6):
        ring = Ring(VECTOR, 1, 100, 1, 0.9, uniform(seed), CPU)
        ring.extend(block_of([0.0] * 100, [FIRST] + [0] * 99))
        batches.append(ring.sample(32, 1.0))
    assert_equal(batches[0], batches[1])
    assert not torch.equal(batches[0].index, batches[2].index)


@pytest.mark.parametrize("by_priority", [False, True])
def test_an_ended_episode_bootstraps_from_its_newest_row_which_is_never_a_start(
    by_priority: bool,
) -> None:
    sampler = prioritized(20, 2) if by_priority else uniform()
    ring = Ring(VECTOR, 2, 40, 3, 0.5, sampler, CPU)
    ring.end_open_episodes()  # nothing to end yet
    ring.extend(block_of([1.0] * 6, [FIRST, 0, 0, 0, 0, 0], num_envs=2))
    ring.sample(4, 1.0)
    ring.end_open_episodes()
    ring.extend(block_of([64.0] * 4, [FIRST, 0, 0, 0], num_envs=2))
    batch = column(ring, [3, 4, 6])
    assert batch.reward.tolist() == [1.5, 1.0, 112.0]
    assert batch.discount.tolist() == [0.25, 0.5, 0.125]
    assert batch.next_obs.view(-1).tolist() == [5, 5, 3]
    drawn = set((ring.sample(600, 1.0).index // 2).tolist())
    assert drawn == {0, 1, 2, 3, 4, 6}


def test_rows_that_are_all_skipped_cannot_be_sampled() -> None:
    ring = Ring(VECTOR, 1, 4, 1, 0.9, uniform(), CPU)
    assert not ring.can_sample()
    ring.extend(block_of([0.0] * 2, [FIRST, 0]))
    assert ring.can_sample()
    ring.extend(block_of([0.0] * 4, [SKIP] * 4))
    assert not ring.can_sample()
    ring.extend(block_of([0.0] * 2, [0, SKIP]))
    assert ring.sample(3, 1.0).index.tolist() == [2, 2, 2]


def test_a_ring_in_files_equals_a_ring_in_memory(tmp_path: Path) -> None:
    script = [Plan((PLAIN, FAULT, PLAIN, LIFE_LOST, PLAIN), True), Plan((PLAIN,) * 4, False)]
    envs = [lay_out(script, 37, env) for env in range(2)]
    case = Case(2, 3, 4, 11, [5, 11, 1, 9, 11], envs)
    folder = tmp_path / "deep" / "replay"
    in_memory, in_files = case.ring(uniform()), case.ring(uniform(), folder)
    for ring in (in_memory, in_files):
        case.feed(ring)
    for _ in range(3):
        assert_equal(in_memory.sample(50, 1.0), in_files.sample(50, 1.0))
    frames = np.fromfile(folder / "replay-frames.bin", dtype=np.float32)
    assert frames.size == (11 * 2 + 1) * 2
    assert np.array_equal(frames[:2], in_files.state_dict()["frames"].tensors[0][0, 0].numpy())
    # An old ring's files are no trouble: a new ring starts empty over them.
    with pytest.raises(RunBusyError, match="in use"):
        case.ring(uniform(), folder)
    in_files.close()
    again = case.ring(uniform(), folder)
    assert len(again) == 0
    assert not again.can_sample()
    case.feed(again)
    in_memory.load_state_dict(again.state_dict())
    assert_equal(in_memory.sample(50, 1.0), again.sample(50, 1.0))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MemoryRefusedError, match="--replay-dir"):
        Ring(VECTOR, 1, 4, 1, 0.9, uniform(), CPU, tmp_path / "file")


def test_files_are_refused_for_a_ring_on_a_device(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replay_dir"):
        Ring(VECTOR, 1, 4, 1, 0.9, uniform(), torch.device("meta"), tmp_path)


def test_impossible_measures_and_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=says("7", "8")):
        Ring(VECTOR, 2, 7, 3, 0.9, uniform(), CPU)
    with pytest.raises(ValueError, match="no stack"):
        Ring(EnvSpec("e", (3, 8), "uint8", 2, frame_stack=4), 1, 50, 1, 0.9, uniform(), CPU)
    ring = Ring(VECTOR, 2, 8, 3, 0.9, uniform(), CPU)
    ring.extend(block_of([0.0] * 4, [FIRST, 0, 0, 0], num_envs=2))
    with pytest.raises(ValueError, match=says("5 rows", "ring", "4")):
        ring.extend(block_of([0.0] * 5, [FIRST, 0, 0, 0, 0], num_envs=2))
    with pytest.raises(ValueError, match=r"block\.obs"):
        ring.extend(block_of([0.0], [FIRST], num_envs=1))
    block = block_of([0.0], [FIRST], num_envs=2)
    block.reward = block.reward[:, :1]
    with pytest.raises(ValueError, match=r"block\.reward"):
        ring.extend(block)


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    state = Ring(VECTOR, 2, 8, 1, 0.9, uniform(), CPU).state_dict()
    with pytest.raises(CheckpointError, match=says("n_steps", "1", "2")):
        Ring(VECTOR, 2, 10, 2, 0.9, uniform(), CPU).load_state_dict(state)


@pytest.mark.parametrize("by_priority", [False, True])
def test_a_ring_that_never_wrapped_fits_into_another_size_and_one_that_did_does_not(
    by_priority: bool,
) -> None:
    def make(rows: int) -> Ring:
        sampler = prioritized(rows, 1) if by_priority else uniform()
        return Ring(VECTOR, 1, rows, 1, 0.9, sampler, CPU)

    full = make(300)
    full.extend(block_of([float(reward) for reward in range(250)], [FIRST] + [0] * 249))
    full.update_priorities(torch.arange(249), torch.arange(249.0))
    for rows in (260, 700):
        other = make(rows)
        other.load_state_dict(full.state_dict())
        one, two = full.sample(64, 0.5), other.sample(64, 0.5)
        assert_equal(one, two)
        full.load_state_dict(other.state_dict())
    full.extend(block_of([0.0] * 60, [0] * 60))
    for rows in (260, 700):
        with pytest.raises(CheckpointError, match=says("rows", "300", str(rows))):
            make(rows).load_state_dict(full.state_dict())


def test_a_full_ring_that_takes_over_an_empty_one_cannot_be_sampled() -> None:
    ring = Ring(VECTOR, 1, 8, 1, 0.9, uniform(), CPU)
    empty = ring.state_dict()
    ring.extend(block_of([0.0] * 3, [FIRST, 0, 0]))
    assert ring.can_sample()
    ring.load_state_dict(empty)
    assert len(ring) == 0
    assert not ring.can_sample()


def test_a_state_holds_only_what_was_filled_and_only_tensors_and_plain_values() -> None:
    ring = Ring(VECTOR, 2, 2000, 1, 0.9, prioritized(1000, 2), CPU)
    ring.extend(block_of([0.0] * 3, [FIRST, 0, 0], num_envs=2))
    state = ring.state_dict()
    assert {state[name].shape[0] for name in ("action", "reward", "flags")} == {6}
    assert [piece.shape[:2] for piece in state["frames"].tensors] == [(3, 2)]
    assert state["sampler"]["leaves"].shape[0] == 4
    assert state["sampler"]["generator"].dtype == torch.uint8

    def check(value: object) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                check(inner)
        elif isinstance(value, list):
            assert all(isinstance(inner, int) for inner in value)
        else:
            assert isinstance(value, (torch.Tensor, Segments, int))

    check(state)


def test_a_ring_is_a_memory() -> None:
    memory: Memory = Ring(VECTOR, 1, 8, 1, 0.9, uniform(), CPU)
    memory.extend(block_of([1.0, 2.0], [FIRST, 0]))
    memory.update_priorities(torch.tensor([0]), torch.tensor([1.0]))
    assert memory.sample(1, 1.0).reward.tolist() == [1.0]


@pytest.mark.parametrize("rows_written", [3, 10, 11, 25, 40])
def test_a_piece_of_the_frames_has_a_new_version_exactly_when_it_was_written(
    rows_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 10 rows of 2 envs × 4 bytes, in pieces of 3 rows: 0-2, 3-5, 6-8, 9
    monkeypatch.setattr("qfleet.memory.ring.SEGMENT_BYTES", 24)
    spec = EnvSpec("toy", (1,), "float32", 2)
    ring = Ring(spec, 2, 20, 1, 0.9, uniform(), torch.device("cpu"))
    before: list[int] = []
    for row in range(rows_written):
        ring.extend(
            Block(
                obs=torch.full((1, 2, 1), float(row)),
                action=torch.zeros((1, 2), dtype=torch.int64),
                reward=torch.zeros((1, 2)),
                flags=torch.zeros((1, 2), dtype=torch.uint8),
            )
        )
        pieces = ring.state_dict()["frames"]
        # The frame's value is the number of its row, so a piece's newest row is its largest value.
        assert pieces.versions == [int(piece.max()) for piece in pieces.tensors]
        changed = [i for i, v in enumerate(pieces.versions) if before[i : i + 1] != [v]]
        assert changed == [row % 10 // 3]
        before = pieces.versions
