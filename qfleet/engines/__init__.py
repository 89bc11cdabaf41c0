"""Who advances the loop. An engine takes the parts of a run and a question asked between turns."""

from __future__ import annotations

from qfleet.engines.actors.engine import run_actors
from qfleet.engines.device import run_device
from qfleet.engines.parameter_server.engine import run_parameter_server
from qfleet.engines.pipeline import run_pipeline
from qfleet.engines.serial import run_serial

ENGINES = {
    "serial": run_serial,
    "pipeline": run_pipeline,
    "device": run_device,
    "actors": run_actors,
    "parameter-server": run_parameter_server,
}
