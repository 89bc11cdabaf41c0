"""Acting with a network whose parts are on several ranks: all of them run every forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qfleet.agent.inference import HostInference
from qfleet.engines.all_reduce.mesh import Axis


class SharedInference(HostInference):
    """Chooses the actions of this rank's environments and takes part in those of its peers."""

    def __init__(self, peers: Axis, *given: Any) -> None:
        """``peers``: the ranks that hold the parts of the network."""
        super().__init__(*given)
        self._peers = peers

    def choose(
        self,
        _group: int,
        _block: int,
        _row: int,
        _columns: slice,
        obs: NDArray[Any],
        _opened: NDArray[np.bool_],
        needed: bool,
    ) -> NDArray[np.int64] | None:
        """Return the greedy actions, also if they are not ``needed``: a peer may need its own."""
        del needed
        own = torch.from_numpy(np.ascontiguousarray(obs))
        every = torch.cat(self._peers.gather(own)).numpy()
        first = self._peers.rank * len(obs)
        return self._greedy(every)[first : first + len(obs)]
