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
from qfleet.deploy.bodies import JSON, NPY, SAFETENSORS, from_npy, npy_head

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
        try:
            address = parts.hostname or "", parts.port
        except ValueError:  # of the port
            address = "", None
        if parts.scheme not in ("http", "https") or not address[0]:
            raise ConfigError(f"url must be like http://127.0.0.1:8000, got {url!r}")
        self._https, self._address = parts.scheme == "https", address
        self._prefix = parts.path.rstrip("/") + (f"/models/{model}" if model else "")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s, self._retries = timeout_s, retries
        self._local = threading.local()

    @property
    def version(self) -> str | None:
        """The version of the model that gave the last answer to this thread."""
        return getattr(self._local, "version", None)

    def act(self, obs: Any, action_masks: Any = None) -> int | NDArray[Any]:
        """Return the greedy action of one observation, or the actions of a batch."""
        actions = self._ask("act", "actions", obs, action_masks)
        return actions.item() if actions.ndim == 0 else actions

    def q_values(self, obs: Any, action_masks: Any = None) -> NDArray[np.float32]:
        """Return the Q-values of all actions: ``[actions]``, or ``[B, actions]``."""
        return self._ask("q-values", "q_values", obs, action_masks)

    def close(self) -> None:
        """Close the connection of this thread."""
        connection = self._local.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()

    def _ask(self, route: str, field: str, obs: Any, action_masks: Any) -> NDArray[Any]:
        media_type, body = _encode(obs, action_masks)
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._retries + 1):
            try:
                status, reply, version = self._post(f"{self._prefix}/{route}", media_type, body)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                problem = f"cannot be reached: {one_line(error)}"
            else:
                if status == 200:
                    self._local.version = version
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


def _encode(obs: Any, action_masks: Any) -> tuple[str, bytes]:
    """Return the media type and the body: JSON for structures (Dict, Tuple …), else binary."""
    array = _numbers(obs)
    masks = None if action_masks is None else _numbers(action_masks)
    if masks is None and action_masks is not None:
        raise ConfigError(f"action_masks must be an array of numbers, got {action_masks!r:.100}")
    if array is not None:
        if masks is None:
            return NPY, npy_head(array.shape, array.dtype.str) + array.tobytes()
        return SAFETENSORS, safetensors.numpy.save({"observations": array, "action_masks": masks})
    if not isinstance(obs, (dict, tuple, list)):
        raise ConfigError(f"observation must be numbers or a structure of them, got {obs!r:.100}")
    fields: dict[str, Any] = {"observations" if isinstance(obs, list) else "observation": obs}
    if masks is not None:
        fields["action_masks"] = masks
    try:
        return JSON, json.dumps(fields, default=lambda value: value.tolist()).encode()
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"observation cannot be sent: {one_line(error)}") from None


def _numbers(value: Any) -> NDArray[Any] | None:
    """Return an array of numbers; None if the value is another structure."""
    try:
        array = np.asarray(value, order="C")
    except ValueError:  # parts of different shapes
        return None
    return array if array.dtype.kind in "biuf" else None


def _read(media_type: str, reply: bytes, field: str) -> NDArray[Any]:
    """Return a writable array."""
    try:
        if media_type == JSON:
            found = json.loads(reply)
            if field == "actions":
                return np.array(found["action" if "action" in found else "actions"])
            return np.array(found[field], np.float32)
        array = from_npy(reply) if media_type == NPY else safetensors.numpy.load(reply)[field]
        return array.copy()
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ServerError(f"the server's reply is malformed: {one_line(error)}") from None


def _error(reply: bytes) -> str:
    try:
        return str(json.loads(reply)["error"])
    except (ValueError, TypeError, KeyError):
        return repr(reply[:200])
