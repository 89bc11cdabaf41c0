"""``qfleet video``: record a video of a run's greedy policy."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import PolicyOptions, quiet_stdout

HELP = "record a video of the greedy policy of a run (GIF or MP4)"

DESCRIPTION = """Record a video of one episode with a run's greedy policy.

Examples:
  qfleet video runs/NAME
  qfleet video NAME --out pong.mp4 --seed 3
"""


@dataclass(frozen=True)
class VideoOptions(PolicyOptions):
    out: Path | None = None
    """File to write, .gif or .mp4; default: in videos/ of the run, beside the file, or for
    a URL in this folder."""
    max_frames: int = 1000
    """Maximum length of the video, in frames."""
    fps: int = 30
    """Frames per second."""


def run(argv: list[str]) -> int:
    options = parse(VideoOptions, argv, "video", DESCRIPTION)
    from qfleet.agent.policy import best_or_last
    from qfleet.core.errors import ConfigError
    from qfleet.core.urls import is_url
    from qfleet.training import api
    from qfleet.training.run_folders import find_run
    from qfleet.training.video import record_video

    if options.max_frames < 1 or options.fps < 1 or options.seed < 0:
        raise ConfigError("--max-frames and --fps must be at least 1, --seed at least 0")
    which = options.which
    if api.is_policy_file(options.run):
        source = Path(options.run)
        default = source.with_name(f"{source.stem}-seed{options.seed}.gif")
    else:
        source = find_run(options.run, api.RUNS, options.which or "best")
        which = which or best_or_last(source)
        videos = Path() if is_url(options.run) else source / "videos"
        default = videos / f"{which}-seed{options.seed}.gif"
    policy = api.load(source, which, options.trust, options.device)
    out = options.out or default
    with quiet_stdout(options.json):
        frames, total = record_video(policy, out, options.seed, options.max_frames, options.fps)
    if options.json:
        print(json_module.dumps({"path": str(out), "frames": frames, "return": total}))
    else:
        print(f"{out}  ({frames} frames, return {total:g})")
    return 0
