"""The OpenAPI description of a policy server."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from qfleet.deploy.signature import Signature

BINARY = ("application/x-npy", "application/safetensors")
ERRORS = {
    "400": "The body is malformed", "401": "The token is wrong or missing",
    "404": "Unknown model or route", "408": "The body did not arrive in time",
    "413": "The body is too large", "415": "Unknown content type",
    "422": "Observations or masks of a wrong shape, type or range",
    "503": "Overloaded; send the request again after the seconds of Retry-After",
}  # fmt: skip


def describe(models: Mapping[str, Signature], default: str) -> dict[str, Any]:
    """Return the OpenAPI document of the routes of some models."""
    named = {f"/models/{name}": signature for name, signature in models.items()}
    paths = {
        f"{prefix}/{route}": {"post": _operation(route, signature)}
        for prefix, signature in {"": models[default], **named}.items()
        for route in ("act", "q-values")
    }
    plain: dict[str, Any] = {"get": {"responses": {"200": {"description": "OK"}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "qfleet policy server", "version": version("qfleet")},
        "paths": {**paths, "/healthz": plain, "/readyz": plain, "/metrics": plain},
    }


def _operation(route: str, signature: Signature) -> dict[str, Any]:
    one: dict[str, Any] = {"description": f"An observation of {signature.env}"}
    if not signature.raw_obs:
        one |= _array(signature.obs_shape, signature.obs_dtype)
    many = {"type": "array", "items": one, "minItems": 1}
    masks = {"description": "1 for legal actions, for all or for each of the observations"}
    properties = {"observation": one, "observations": many}
    if signature.takes_masks:
        properties["action_masks"] = masks
    body = {"type": "object", "properties": properties, "minProperties": 1}
    values: dict[str, Any] = {"action": {}, "actions": {}} if route == "act" else {"q_values": {}}
    answer = {"type": "object", "properties": {**values, "version": _TEXT}}
    reply = {
        "description": "Greedy actions" if route == "act" else "Q-values of all actions",
        "headers": {"X-Model-Version": {"schema": _TEXT}},
        "content": _content(answer),
    }
    errors = {status: {"description": text} for status, text in ERRORS.items()}
    return {"requestBody": {"content": _content(body)}, "responses": {"200": reply, **errors}}


_TEXT = {"type": "string"}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}} | {kind: {} for kind in BINARY}


def _array(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number" if dtype == "float32" else "integer"}
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
