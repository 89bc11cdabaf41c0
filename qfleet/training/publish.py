"""The last report of a run: hyper-parameters to TensorBoard, policy and configuration to a tracker.

In: a run that has stopped. Out: TensorBoard's HPARAMS tab, an artefact of W&B or MLflow.
"""

from __future__ import annotations

from dataclasses import asdict

from qfleet.core.errors import CheckpointError
from qfleet.storage.checkpoint import save_policy_file
from qfleet.storage.spec_json import spec_to_json
from qfleet.training.callbacks import Hook
from qfleet.training.run_state import RunState


class Publish(Hook):
    """Publishes the best policy, or the newest if none was evaluated, when a run has stopped."""

    def on_finish(self, run: RunState) -> None:
        if run.interrupted_by is not None:
            return  # the process has to end soon, and a resumed run publishes
        policy = run.folder / "best"
        if run.writers.is_tracking and not policy.exists():
            policy = run.folder / "last.safetensors"
            weights = run.parts.model.weights
            state = {"weights": weights.row(0), "buffers": weights.row_buffers(0)}
            meta = {"config": asdict(run.config), "spec": spec_to_json(run.parts.spec)}
            try:
                save_policy_file(policy, state, meta)
            except CheckpointError as error:
                run.faults("tracker", str(error))
        metrics = {
            "best_eval_return": run.best_return,
            "eval_return_mean": run.evaluation.mean if run.evaluation is not None else None,
            "wall_s": run.wall_s(),
        }
        artefacts = [policy, run.folder / "config.json"]
        run.writers.finish(run.parts.clock.env_steps, metrics, artefacts)
