"""What every test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qfleet.torch_settings import TorchSettings


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """Parts built without a run change torch's settings; no test may depend on the one before."""
    settings = TorchSettings()
    yield
    settings.restore()
