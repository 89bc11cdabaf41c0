"""``qfleet evaluate``: play episodes with a run's policy."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import dataclass

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import PolicyOptions
from qfleet.config.validation import validate

HELP = "play episodes with a run's policy and report its returns"

DESCRIPTION = """Play episodes with the greedy policy of a run, in new environments.

Examples:
  qfleet evaluate runs/NAME
  qfleet evaluate NAME --episodes 100 --seed 7 --which last
"""


@dataclass(frozen=True)
class EvaluateOptions(PolicyOptions):
    episodes: int = 10
    """Number of episodes to play."""
    epsilon: float | None = None
    """Probability of a random action; default: the run's own eval_eps."""
    eval_max_steps: int | None = None
    """Env steps after which the evaluation ends; default: the run's own."""


def run(argv: list[str]) -> int:
    options = parse(EvaluateOptions, argv, "evaluate", DESCRIPTION)
    from rich.console import Console

    from qfleet.training import api

    policy = api.load(options.run, options.which, options.trust, options.device)
    if options.eval_max_steps is not None:
        policy.config = validate(policy.config.replace(eval_max_steps=options.eval_max_steps))
    # The status is shown on a terminal only.
    with Console(stderr=True, quiet=options.json).status("evaluating") as status:
        evaluation = policy.evaluate(
            options.episodes,
            options.seed,
            options.epsilon,
            on_step=lambda done: status.update(f"evaluating {done}/{options.episodes}"),
        )
    line = evaluation.why_ended(options.episodes, policy.config.eval_max_steps)
    if line and not options.json:
        print(f"qfleet: {line}", file=sys.stderr)
    if options.json:
        report = {
            "episodes": len(evaluation.returns),
            "return_mean": evaluation.mean,
            "return_std": evaluation.std,
            "length_mean": evaluation.mean_length,
            "returns": evaluation.returns,
            **({"unfinished": evaluation.unfinished} if evaluation.unfinished else {}),
        }
        print(json_module.dumps(report))
    else:
        print(
            f"return {evaluation.mean:.1f} ± {evaluation.std:.1f} over {len(evaluation.returns)} "
            f"episodes (lowest {min(evaluation.returns):.1f}, "
            f"highest {max(evaluation.returns):.1f}, mean length {evaluation.mean_length:.0f})"
        )
    return 0
