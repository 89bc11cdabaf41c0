"""The maze is learnt exactly: shortest path, closed-form values, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qfleet.cli import lab
from qfleet.core.errors import ConfigError, UnknownNameError, UserError
from qfleet.envs.grid import ACTIONS, MAZE, Maze
from qfleet.lab.maze import draw_maze, learn_maze, path_art
from support.messages import says

UP, DOWN, LEFT, RIGHT = range(4)

OPEN = """\
S....
.....
....G
"""
CORRIDOR = "S....G\n"
TWO_WAYS = """\
S#....
...##.
.#.#..
.....G
"""


def exact_value(steps: int, gamma: float) -> float:
    """−1 for every step but the last, which earns 10."""
    return sum(-(gamma**k) for k in range(steps - 1)) + gamma ** (steps - 1) * 10


@pytest.mark.parametrize("text", [MAZE, OPEN, CORRIDOR, TWO_WAYS])
def test_greedy_path_is_shortest_and_its_values_are_exact(text: str) -> None:
    maze = Maze.from_text(text)
    result = learn_maze(maze, episodes=1500, alpha=0.1, gamma=0.9, epsilon=0.1, seed=0)
    shortest = maze.shortest_path()
    assert shortest is not None
    assert (result.path[0], result.path[-1]) == (maze.start, maze.goal)
    assert len(result.path) == len(shortest)
    steps = result.num_steps
    for i, state in enumerate(result.path[:-1]):
        assert result.q[state].max() == pytest.approx(exact_value(steps - i, 0.9), abs=1e-6)
    assert result.path_value == pytest.approx(exact_value(steps, 0.9))


def test_the_built_in_maze_takes_twelve_steps() -> None:
    maze = Maze.from_text(MAZE)
    assert (maze.height, maze.width) == (6, 8)
    assert len(maze.shortest_path() or []) == 13
    assert len(Maze.from_text(CORRIDOR).shortest_path() or []) == 6


def test_steps_walls_borders_and_the_goal() -> None:
    maze = Maze.from_text("S#.\n..G")
    assert maze.reset() == 0
    assert maze.step(UP) == (0, -1.0, False)  # border
    assert maze.step(LEFT) == (0, -1.0, False)  # not the end of the row above
    assert maze.step(RIGHT) == (0, -1.0, False)  # wall
    assert maze.step(DOWN) == (3, -1.0, False)
    assert maze.step(RIGHT) == (4, -1.0, False)
    assert maze.step(UP) == (4, -1.0, False)
    assert maze.step(RIGHT) == (5, 10.0, True)
    assert maze.reset() == 0
    assert len(ACTIONS) == 4


def test_one_walk_updates_by_hand() -> None:
    # A corridor with γ 1, α .5 and no exploration: ties go to the first action, so up, down and
    # left are each tried once (−.5) before right.
    result = learn_maze(Maze.from_text("SG"), 1, alpha=0.5, gamma=1.0, epsilon=0.0, seed=0)
    assert result.q[0].tolist() == [-0.5, -0.5, -0.5, 5.0]
    assert result.returns == [7.0]


def test_same_seed_same_result_other_seed_another() -> None:
    maze = Maze.from_text(MAZE)
    first, again, other = (learn_maze(maze, 60, 0.1, 0.9, 0.2, seed) for seed in (3, 3, 4))
    assert np.array_equal(first.q, again.q)
    assert first.returns == again.returns
    assert not np.array_equal(first.q, other.q)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "0 'S'"),
        ("..G", "0 'S'"),
        ("S..", "0 'G'"),
        ("S.S.G", "2 'S'"),
        ("SGG", "2 'G'"),
        ("S#G", "S G"),
        ("S..\n..G.", "2 4 1 3"),
        ("S.\n.x\n.G", "2 'x'"),
    ],
)
def test_bad_mazes_are_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=says(*named.split())):
        Maze.from_text(text)


def test_windows_line_ends_and_spaces_are_read() -> None:
    assert Maze.from_text("\r\nS #\r\n# G\r\n").rows == ["S #", "# G"]


@pytest.mark.parametrize(
    "change",
    [
        {"episodes": 0},
        {"alpha": 0.0},
        {"alpha": 1.5},
        {"gamma": -0.1},
        {"epsilon": 2},
        {"seed": -1},
    ],
)
def test_bad_numbers_are_refused(change: dict[str, float]) -> None:
    given = {"episodes": 5, "alpha": 0.1, "gamma": 0.9, "epsilon": 0.1, "seed": 0} | change
    with pytest.raises(ConfigError, match=next(iter(change))):
        learn_maze(Maze.from_text(CORRIDOR), **given)  # type: ignore[arg-type]


def test_too_few_episodes_end_in_a_walk_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = learn_maze(Maze.from_text(MAZE), 1, 0.1, 0.9, 0.1, 0)
    assert not result.reached_goal
    assert len(set(result.path)) == len(result.path)
    assert lab.run(["maze", "--episodes", "1", "--out", str(tmp_path / "m.png")]) == 0
    assert "misses the goal" in capsys.readouterr().out


def test_art_draws_the_path() -> None:
    result = learn_maze(Maze.from_text("S.\n#G"), 50, 0.5, 0.9, 0.1, 0)
    assert path_art(result) == "S v\n# G"


def test_picture_has_both_panels(tmp_path: Path) -> None:
    from PIL import Image

    result = learn_maze(Maze.from_text(OPEN), 30, 0.1, 0.9, 0.1, 0)
    path = draw_maze(result, tmp_path / "deep" / "maze.png")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(np.uint32) @ [65536, 256, 1]
    assert pixels.shape[1] > pixels.shape[0] > 500
    for half in np.array_split(pixels, 2, axis=1):
        assert len(np.unique(half)) > 50
    with pytest.raises(ConfigError, match=r"maze\.txt.*\.png"):
        draw_maze(result, tmp_path / "maze.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=says("write")):
        draw_maze(result, tmp_path / "file" / "maze.png")


def test_cli_prints_path_length_value_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maze = tmp_path / "maze.txt"
    maze.write_text(CORRIDOR)
    out = tmp_path / "picture.png"
    words = ["maze", "--maze", str(maze), "--episodes", "400", "--out", str(out)]
    assert lab.run(words) == 0
    text = capsys.readouterr().out
    assert "S > > > > G" in text
    assert "5 steps" in text
    assert f"{exact_value(5, 0.9):.3f}" in text
    assert str(out) in text
    assert out.stat().st_size > 1000
    assert lab.run([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 5
    assert report["path"] == [[0, i] for i in range(6)]
    assert report["value"] == pytest.approx(exact_value(5, 0.9))
    assert len(report["returns"]) == 400


def test_cli_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownNameError, match=says("mase", "maze")):
        lab.run(["mase"])
    with pytest.raises(ConfigError, match=says("maze", "gone")):
        lab.run(["maze", "--maze", str(tmp_path / "gone")])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text"):
        lab.run(["maze", "--maze", str(binary)])
    with pytest.raises(UserError, match="qfleet lab maze --help"):
        lab.run(["maze", "--episodes", "many"])
    assert lab.run([]) == 0
    assert "maze" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        lab.run(["maze", "--help"])
    assert caught.value.code == 0
    assert "qfleet lab maze --episodes 2000" in capsys.readouterr().out
