"""The OpenAPI description of a policy server."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from qfleet.deploy.bodies import JSON, NPY, SAFETENSORS
from qfleet.deploy.signature import Signature

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
    one: dict[str, Any] = {}
    if not signature.raw_obs:
        one = {"type": "number" if signature.obs_dtype == "float32" else "integer"}
        for size in reversed(signature.obs_shape):
            one = {"type": "array", "items": one, "minItems": size, "maxItems": size}
    one["description"] = f"An observation of {signature.env}"
    given = {"observation": one, "observations": {"type": "array", "items": one, "minItems": 1}}
    if signature.takes_masks:
        given["action_masks"] = {"description": "1 for legal actions, for all observations or each"}
    fields: tuple[str, ...] = ("action", "actions") if route == "act" else ("q_values",)
    text = {"type": "string"}
    reply = {
        "description": "Greedy actions" if route == "act" else "Q-values of all actions",
        "headers": {"X-Model-Version": {"schema": text}},
        "content": _content({**{field: {} for field in fields}, "version": text}),
    }
    errors = {status: {"description": meaning} for status, meaning in ERRORS.items()}
    return {"requestBody": {"content": _content(given)}, "responses": {"200": reply, **errors}}


def _content(properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "minProperties": 1}
    return {JSON: {"schema": schema}, NPY: {}, SAFETENSORS: {}}
