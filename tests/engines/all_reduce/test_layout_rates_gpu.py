"""``qfleet doctor --parallel`` on a GPU, which two ranks share if there is only one."""

from __future__ import annotations

import pytest
import torch

from qfleet.training.parallel_advice import Sizes, measure_layouts, measured_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def test_layouts_are_measured_on_a_gpu() -> None:
    settings = measured_settings("ALE/Pong-v5", {"network": "nature", "device": "cuda"})
    assert (settings.device, settings.config.engine) == ("cuda", "pipeline")
    rows = measure_layouts(settings.config, 2, 0.5)
    assert [row.refused for row in rows] == [""] * 4
    one, tensor = (next(r for r in rows if r.sizes == s) for s in (Sizes(), Sizes(tensor=2)))
    assert one.bytes_per_rank is not None
    assert tensor.bytes_per_rank is not None
    assert tensor.bytes_per_rank < 0.6 * one.bytes_per_rank
