"""``qfleet evaluate``: play episodes with a run's policy."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.cli.parsing import parse
from qfleet.cli.run_options import PolicyOptions, quiet_stdout
from qfleet.config.validation import validate

if TYPE_CHECKING:
    from qfleet.agent.policy import Policy

HELP = "play episodes with a run's policy and report its returns"

DESCRIPTION = """Play episodes with the greedy policy of a run, in new environments; of a run with
several seeds, with the policy of each, and aggregate the mean returns.

Examples:
  qfleet evaluate runs/NAME
  qfleet evaluate NAME --episodes 100 --seed 7 --which last
  qfleet evaluate runs/SEVERAL-SEEDS
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
    from qfleet.telemetry.runs import run_name, seed_folders
    from qfleet.training import api
    from qfleet.training.run_folders import find_run

    sources = [Path(options.run)]
    if not api.is_policy_file(options.run):
        sources = seed_folders(find_run(options.run, api.RUNS, options.which or "best"))
    policies = {
        run_name(source): api.load(source, options.which, options.trust, options.device)
        for source in sources
    }
    for policy in policies.values():  # before the first one plays
        policy.check_trust()
    with quiet_stdout(options.json):
        if len(policies) == 1:
            (report,) = (_evaluate(policy, options, "") for policy in policies.values())
        else:
            report = _evaluate_seeds(policies, options)
    if options.json:
        print(json_module.dumps(report))
    return 0


def _evaluate(policy: Policy, options: EvaluateOptions, title: str) -> dict[str, Any]:
    """Play, print the returns unless --json is given, and return the report."""
    from rich.console import Console

    if options.eval_max_steps is not None:
        policy.config = validate(policy.config.replace(eval_max_steps=options.eval_max_steps))
    # The status is shown on a terminal only.
    with Console(stderr=True, quiet=options.json).status("evaluating") as status:
        evaluation = policy.evaluate(
            options.episodes,
            options.seed,
            options.epsilon,
            on_step=lambda done: status.update(f"{title}evaluating {done}/{options.episodes}"),
        )
    line = evaluation.why_ended(options.episodes, policy.config.eval_max_steps)
    if line and not options.json:
        print(f"qfleet: {title}{line}", file=sys.stderr)
    if not options.json:
        print(
            f"{title}return {evaluation.mean:.1f} ± {evaluation.std:.1f} over "
            f"{len(evaluation.returns)} episodes (lowest {min(evaluation.returns):.1f}, "
            f"highest {max(evaluation.returns):.1f}, mean length {evaluation.mean_length:.0f})"
        )
    return {
        "episodes": len(evaluation.returns),
        "return_mean": evaluation.mean,
        "return_std": evaluation.std,
        "length_mean": evaluation.mean_length,
        "returns": evaluation.returns,
        **({"unfinished": evaluation.unfinished} if evaluation.unfinished else {}),
    }


def _evaluate_seeds(policies: dict[str, Policy], options: EvaluateOptions) -> dict[str, Any]:
    """Evaluate every seed; return their reports and the interquartile mean of their means."""
    from qfleet.telemetry.aggregate import bootstrap_ci, iqm

    runs = {name: _evaluate(policy, options, f"{name}: ") for name, policy in policies.items()}
    means = [report["return_mean"] for report in runs.values()]
    score, (low, high) = iqm(means), bootstrap_ci(means)
    if not options.json:
        print(
            f"{len(runs)} seeds: IQM of the mean returns {score:.1f}, "
            f"95 % confidence {low:.1f} to {high:.1f}"
        )
    return {"runs": runs, "return_iqm": score, "return_iqm_ci95": [low, high]}
