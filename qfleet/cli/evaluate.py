"""``qfleet evaluate``: play episodes with a run's policy."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import PolicyOptions

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
    epsilon: float = 0.0
    """Probability of a random action."""


def run(argv: list[str]) -> int:
    options = parse(EvaluateOptions, argv, "evaluate", DESCRIPTION)
    from qfleet.training import api

    policy = api.load(options.run, options.which, options.trust, options.device)
    evaluation = policy.evaluate(options.episodes, options.seed, options.epsilon)
    if options.json:
        report = {
            "episodes": len(evaluation.returns),
            "return_mean": evaluation.mean,
            "return_std": evaluation.std,
            "length_mean": evaluation.mean_length,
            "returns": evaluation.returns,
        }
        print(json_module.dumps(report))
    else:
        print(
            f"return {evaluation.mean:.1f} ± {evaluation.std:.1f} over {len(evaluation.returns)} "
            f"episodes (lowest {min(evaluation.returns):.1f}, "
            f"highest {max(evaluation.returns):.1f}, mean length {evaluation.mean_length:.0f})"
        )
    return 0
