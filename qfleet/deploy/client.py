"""A client of ``qfleet serve``: observations in, actions or Q-values out. Needs no PyTorch."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from qfleet.core.errors import ConfigError, QfleetError, one_line
from qfleet.deploy.bodies import NPY, SAFETENSORS, from_npy, npy_head

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class ServerError(QfleetError):
    """A policy server that cannot be reached, stays overloaded or refuses a request."""


class PolicyClient:
    """A connection to a policy server; every thread that uses it has one of its own.

    Requests are sent again, after pauses that grow, if the server is overloaded (503) or the
    connection is lost. That is safe, because a request changes nothing.

        client = PolicyClient("http://127.0.0.1:8000")
        action = client.act(observation)
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        model: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 5,
    ) -> None:
        """``model``: the name of one of several models; None: the server's default."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url must be like http://127.0.0.1:8000, got {url!r}")
        self._https, self._address = parts.scheme == "https", (parts.hostname, parts.port)
        self._prefix = parts.path.rstrip("/") + (f"/models/{model}" if model else "")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s, self._retries = timeout_s, retries
        self._local = threading.local()
        self.version: str | None = None
        """The version of the model that gave the last answer."""

    def act(self, obs: Any, action_masks: Any = None) -> int | NDArray[Any]:
        """Return the greedy action of one observation, or the actions of a batch."""
        actions = self._ask("act", "actions", obs, action_masks)
        return int(actions) if actions.ndim == 0 else actions

    def q_values(self, obs: Any, action_masks: Any = None) -> NDArray[np.float32]:
        """Return the Q-values of all actions: ``[actions]``, or ``[B, actions]``."""
        return self._ask("q-values", "q_values", obs, action_masks)

    def close(self) -> None:
        """Close the connection of this thread."""
        connection = self._local.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()

    def _ask(self, route: str, field: str, obs: Any, action_masks: Any) -> NDArray[Any]:
        array, media_type = np.asarray(obs, order="C"), NPY
        if action_masks is None:
            body = npy_head(array.shape, array.dtype.str) + array.tobytes()
        else:
            masks, media_type = np.asarray(action_masks, order="C"), SAFETENSORS
            body = safetensors.numpy.save({"observations": array, "action_masks": masks})
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._retries + 1):
            try:
                status, reply, version = self._post(f"{self._prefix}/{route}", media_type, body)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                problem = f"cannot be reached: {one_line(error)}"
            else:
                if status == 200:
                    self.version = version
                    return _read(media_type, reply, field)
                problem = f"answered {status}: {_error(reply)}"
                if status != 503:
                    break
            if attempt < self._retries:
                # Random, so that clients that were refused together do not return together.
                time.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise ServerError(f"the policy server at {self._address[0]}:{self._address[1]} {problem}")

    def _post(self, path: str, media_type: str, body: bytes) -> tuple[int, bytes, str | None]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
            connection = self._local.connection = kind(*self._address, timeout=self._timeout_s)
        connection.request("POST", path, body, {**self._headers, "Content-Type": media_type})
        response = connection.getresponse()
        return response.status, response.read(), response.headers.get("X-Model-Version")


def _read(media_type: str, reply: bytes, field: str) -> NDArray[Any]:
    try:
        return from_npy(reply) if media_type == NPY else safetensors.numpy.load(reply)[field]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ServerError(f"the server's reply is malformed: {one_line(error)}") from None


def _error(reply: bytes) -> str:
    try:
        return str(json.loads(reply)["error"])
    except (ValueError, TypeError, KeyError):
        return repr(reply[:200])
