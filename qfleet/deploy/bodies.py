"""Bodies of requests and replies: JSON, npy and safetensors. Nothing here unpickles.

In: bytes of a client, which may be malformed. Out: arrays, and bytes of replies in the same format.
"""

from __future__ import annotations

import functools
import io
import json
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from qfleet.core.errors import ConfigError, one_line

JSON = "application/json"
NPY = "application/x-npy"
SAFETENSORS = "application/safetensors"
TYPES = (JSON, NPY, SAFETENSORS)


class DecodedBody(NamedTuple):
    """What a request holds, as it came."""

    observations: Any
    action_masks: Any = None
    is_single: bool | None = None
    """Whether it is one observation; None: its shape tells."""


def decode(media_type: str, body: bytes) -> DecodedBody:
    """Return the contents of a body in one of TYPES, or raise ConfigError."""
    try:
        if media_type == JSON:
            return _body_of(json.loads(body.decode()))
        if media_type == NPY:
            return DecodedBody(from_npy(body))
        return _body_of(safetensors.numpy.load(body))._replace(is_single=None)
    except RecursionError:
        raise ConfigError("the body is nested too deeply") from None
    # TypeError, KeyError: safetensors of types that numpy lacks.
    except (ValueError, SafetensorError, TypeError, KeyError) as error:
        raise ConfigError(f"the body is not {media_type}: {one_line(error)[:200]}") from None


def _body_of(fields: Any) -> DecodedBody:
    names = set(fields) if isinstance(fields, dict) else set[str]()
    extra = names - {"observation", "observations", "action_masks"}
    if len(names & {"observation", "observations"}) != 1 or extra:
        raise ConfigError(
            'the body must hold "observation" or "observations", and may hold "action_masks"'
            + (f", got {sorted(extra)[:3]}" if extra else "")
        )
    is_single = "observation" in names
    values = fields["observation" if is_single else "observations"]
    return DecodedBody(values, fields.get("action_masks"), is_single)


def from_npy(body: bytes) -> NDArray[Any]:
    """Return the array in an npy file, without a copy and without trusting its header.

    numpy.load would allocate what the header claims, and parse the header by ``ast`` each time,
    which takes longer (60 µs) than a small network.
    """
    # Version 1 of the format has 2 bytes for the length of the rest of the header, version 2 has 4.
    digits = 2 if body[6:7] == b"\1" else 4
    end = 8 + digits + int.from_bytes(body[8 : 8 + digits], "little")
    shape, order, dtype = _npy_header(body[:end])
    return np.frombuffer(body, dtype, offset=end).reshape(shape, order=order)


@functools.lru_cache(maxsize=256)
def _npy_header(head: bytes) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran, dtype = read(file)
    except Exception as error:  # also TokenError, IndexError and SyntaxError of its parser
        raise ValueError(f"the npy header is malformed: {one_line(error)[:200]}") from None
    if dtype.kind not in "biuf" or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} with shape {shape} is not accepted")
    return shape, "F" if is_fortran else "C", dtype


@functools.lru_cache(maxsize=256)
def npy_head(shape: tuple[int, ...], dtype: str) -> bytes:
    file = io.BytesIO()
    fields = {"shape": shape, "fortran_order": False, "descr": dtype}
    np.lib.format.write_array_header_1_0(file, fields)
    return file.getvalue()


def encode(
    media_type: str, name: str, values: NDArray[Any], is_single: bool, model: str, version: str
) -> bytes:
    """Return a reply. ``name`` is ``actions`` or ``q_values``, ``values`` has a row for each."""
    shown = values[0] if is_single else values
    if media_type == NPY:
        return npy_head(shown.shape, shown.dtype.str) + shown.tobytes()
    if media_type == SAFETENSORS:
        tensors = {name: np.asarray(shown, order="C")}
        return safetensors.numpy.save(tensors, {"model": model, "version": version})
    # repr of numbers and lists of them is JSON, and json.dumps of the whole takes 10 µs more.
    text = repr(shown.tolist())
    if "n" in text:  # nan or inf, which JSON lacks: a huge observation can give one
        text = json.dumps(np.where(np.isfinite(shown), shown, np.array(None)).tolist())
    key = "action" if is_single and name == "actions" else name
    return f'{{"{key}": {text}, "model": "{model}", "version": "{version}"}}'.encode()
