"""What a client sends is checked: good observations become batches, others are one-line errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qfleet.core.errors import ConfigError
from qfleet.deploy.models import signature_of
from qfleet.deploy.signature import Signature, check_action_masks, check_observations
from support.messages import says
from support.policies import untrained
from support.space_envs import SPACES

VECTOR = Signature("x", "dqn", (3,), "float32", 2, True, [0, 1])
PIXELS = Signature("x", "dqn", (2, 2), "uint8", 2, False, [0, 1])
NUMBER = Signature("x", "dqn", (), "int64", 2, False, [0, 1], first_obs_value=3, num_obs_values=4)


@pytest.mark.parametrize(
    ("signature", "value", "batch"),
    [
        (VECTOR, [1, 2.5, 3], [[1, 2.5, 3]]),
        (VECTOR, [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]),
        (VECTOR, np.ones((1, 3), np.float64), [[1, 1, 1]]),
        (PIXELS, [[0, 255], [1, 2]], [[[0, 255], [1, 2]]]),
        (PIXELS, np.full((1, 2, 2), 200, np.int32), [[[200, 200], [200, 200]]]),
        (NUMBER, 3, [3]),
        (NUMBER, [6, 5], [6, 5]),
    ],
)
def test_observations_become_a_batch(signature: Signature, value: Any, batch: Any) -> None:
    found, _ = check_observations(signature, value)
    assert found.dtype == signature.obs_dtype
    assert found.flags.c_contiguous
    assert found.tolist() == batch


@pytest.mark.parametrize(
    ("signature", "value"),
    [
        (VECTOR, None), (VECTOR, "x"), (VECTOR, {}), (VECTOR, []), (VECTOR, [[]]), (VECTOR, 1.0),
        (VECTOR, [1, 2]), (VECTOR, [[1, 2, 3], [4]]), (VECTOR, [1, 2, "x"]), (VECTOR, [1, 2, None]),
        (VECTOR, [1, 2, float("nan")]), (VECTOR, [1, 2, 1e300]), (VECTOR, [1, 2, 10**400]),
        (VECTOR, [True, False, True]), (VECTOR, np.ones((0, 3))), (VECTOR, [1j, 2, 3]),
        (VECTOR, np.ones((1, 1, 3))), (PIXELS, [[0, 256], [0, 0]]), (PIXELS, [[-1, 0], [0, 0]]),
        (PIXELS, [[0.5, 0], [0, 0]]), (PIXELS, [[True, False], [True, False]]),
        (PIXELS, np.full((2, 2), 2**63, np.uint64)), (NUMBER, 2), (NUMBER, 7), (NUMBER, 3.0),
        (NUMBER, []), (NUMBER, 2**70), (NUMBER, [[3]]), (NUMBER, np.uint64(2**64 - 1)),
    ],
)  # fmt: skip
def test_what_is_no_observation_is_refused(signature: Signature, value: Any) -> None:
    with pytest.raises(ConfigError, match=says("observation")) as caught:
        check_observations(signature, value)
    assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


@given(json_values, st.sampled_from([VECTOR, PIXELS, NUMBER]))
def test_any_json_is_a_batch_or_a_one_line_error(value: Any, signature: Signature) -> None:
    for check in (check_observations, lambda s, v: check_action_masks(s, v, 2)):
        said = ""
        try:
            check(signature, value)
        except ConfigError as error:
            said = str(error)
        assert "\n" not in said


def test_text_in_lists_is_refused_before_numpy_makes_an_array_of_it() -> None:
    """An array of texts would have 20 GB: every entry has the size of the longest one."""
    value = [[["x" * 100_000], *[[1]] * 50_000]]
    with pytest.raises(ConfigError, match=says("observation", "text")):
        check_observations(VECTOR, value)
    with pytest.raises(ConfigError, match=says("action_masks")):
        check_action_masks(VECTOR, value, 1)
    policy = untrained("support.space_envs:Sampled", env_kwargs='{"space": "tuple"}')
    with pytest.raises(ConfigError, match=says("observation", "text")):
        check_observations(signature_of(policy), value * 3)


def test_masks_are_checked() -> None:
    assert check_action_masks(VECTOR, None, 2) is None
    for value in ([0, 1], [False, True], [[0, 1], [0, 1.0]]):
        masks = check_action_masks(VECTOR, value, 2)
        assert masks is not None
        assert masks.tolist() == [[False, True]] * 2
    for bad in ([0, 0], [[0, 1], [0, 0]], [1], [[1, 1]] * 3, "x", {}, [[1, 1], [1]], 1, [None, 1]):
        with pytest.raises(ConfigError, match=says("action_masks")):
            check_action_masks(VECTOR, bad, 2)
    with pytest.raises(ConfigError, match=says("without action masks")):
        check_action_masks(PIXELS, [1, 1], 1)


@pytest.mark.parametrize("space", ["dict", "image", "tuple", "bits", "digits"])
def test_structures_of_json_become_what_the_policy_sees(space: str) -> None:
    policy = untrained("support.space_envs:Sampled", env_kwargs=f'{{"space": "{space}"}}')
    signature = signature_of(policy)

    def as_json(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: as_json(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return [as_json(part) for part in value]
        return value if isinstance(value, str) else np.asarray(value).tolist()

    SPACES[space].seed(0)
    for _ in range(5):
        obs = SPACES[space].sample()
        batch, _ = policy._batch(obs)
        found, is_single = check_observations(signature, as_json(obs))
        assert np.array_equal(found, batch)
        assert is_single
    for bad in (None, 3, {}, [], {"speed": "x"}, {"eye": [[1]], "gear": 0, "arm": [0]}):
        with pytest.raises(ConfigError, match=says("observation")):
            check_observations(signature, bad)
