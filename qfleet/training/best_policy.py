"""The best policies of a run, on disk. In: a run's parts and standings; out: folders of policies.

``RUN/agents/<k>/`` of a population's agent holds a configuration and ``best/``, which is all that
``load`` needs of a run's folder. The run's own ``best/`` holds the policy of its best agent.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qfleet.agent.weights import SavedWeights
from qfleet.core.errors import CheckpointError
from qfleet.core.files import atomic_write_text
from qfleet.core.types import StateDict
from qfleet.engines.device import PopulationHook
from qfleet.engines.parts import Parts
from qfleet.storage.checkpoint import save_policy
from qfleet.storage.rundir import agent_folder
from qfleet.storage.spec_json import spec_to_json
from qfleet.telemetry.faults import FaultLog
from qfleet.training.standings import Standings


def save_best(
    run: Path,
    parts: Parts,
    standings: Standings,
    better: Iterable[int],
    faults: FaultLog,
    weights: SavedWeights,
    env_steps: int,
) -> None:
    """Save the policies of the agents in ``better``; count a failure to write as a fault.

    ``weights``, of all agents, are those that were evaluated, after ``env_steps``.
    """
    population = parts.find(PopulationHook)
    for agent in better:
        row = parts.members.index(agent)
        own: StateDict = {"weights": weights.row(row), "buffers": weights.row_buffers(row)}
        folders = [run / "best"] if agent == standings.leader else []
        if population is not None:
            folders.append(agent_folder(run, agent) / "best")
        meta = {
            "env_steps": env_steps,
            "spec": spec_to_json(parts.spec),
            "layout": weights.describe(),
            "return": standings.agents[agent].evaluated,
            "agent": agent,
        }
        try:
            if population is not None:
                agent_folder(run, agent).mkdir(parents=True, exist_ok=True)
                text = population.agents.config_of(row).to_json()
                atomic_write_text(agent_folder(run, agent) / "config.json", text)
            for folder in folders:
                save_policy(folder, {"policy": own}, meta)
        except (CheckpointError, OSError) as error:
            faults("checkpoint", str(error))
