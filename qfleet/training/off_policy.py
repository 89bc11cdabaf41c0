"""Off-policy evaluation: estimates of a policy's return from a dataset, without an environment.

In: a dataset and greedy policies. Out: for each policy two estimates of its discounted return per
episode, with bootstrap intervals over episodes, and how well the data covers its actions. Fitted Q
evaluation (FQE; Le et al. 2019, 1903.08738) learns the policy's Q-function, here from returns that
follow the data as long as it takes the policy's actions; the weighted doubly robust estimate (WDR;
Thomas and Brunskill 2016, 1604.00923) corrects that function by the rewards of the data, weighted
by how likely the policy would have taken the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from qfleet.agent.policy import Policy
from qfleet.agent.updaters.local import LocalUpdater
from qfleet.agent.updaters.optimisers import make_optimiser
from qfleet.agent.weights import FlatWeights
from qfleet.algorithms.losses import action_cross_entropy
from qfleet.algorithms.targets import take, td_target
from qfleet.config.config import Config
from qfleet.core.errors import ConfigError, DataError, require
from qfleet.core.seeding import mix_seeds
from qfleet.core.types import Batch
from qfleet.data.dataset_memory import DatasetMemory
from qfleet.data.manifest import Dataset
from qfleet.data.operations import fit_statistics
from qfleet.data.rows import PartFile
from qfleet.engines.offline import make_dataset_memory
from qfleet.networks.factory import make_network
from qfleet.networks.qnetwork import QNetwork

HOST = torch.device("cpu")
BATCH, CHUNK = 256, 4096
"""Transitions per update, and per pass without a gradient."""
LEARNING_RATE, TAU = 1e-3, 0.2
"""The target approaches a policy's values in about 1 / (τ (1 − γ)) updates. With τ = 0.05 and 5000
updates the values of good policies were 10 % too low, and thereby below those of worse ones."""
NETWORK: dict[str, Any] = {"net_arch": (64, 64), "algo": "dqn"}
MEMBERS = 3
"""Fitted functions of a policy, whose mean is used: one alone has errors of up to 50 % in states
that the data hardly covers, and they differ between random initial values."""
DOUBLINGS = 5
"""A return follows the data for up to 2 to this power steps."""
LARGEST_OUTPUT = 10.0
"""The largest possible return, as an output of the fitted Q-function, for which Adam's step and the
clipped gradient are suited."""
BOOTSTRAP_SAMPLES = 1000
RARE, MOST_RARE = 0.05, 0.1
"""An action with a smaller probability in the data is rare; warn if this share of the actions
is rare."""
FEWEST_EPISODES = 10.0
"""Warn if the weights of the weighted estimate are worth fewer episodes."""


class Recording(NamedTuple):
    """All transitions of a dataset, in the order of its files."""

    memory: DatasetMemory
    episode: Tensor
    """Place of each transition's episode, from 0."""
    step: Tensor
    """Steps of the episode before each transition."""
    following: Tensor
    """The episode's next transition, or −1 if there is none."""
    probability: Tensor
    """Of each action under the policy that acted; NaN or 0: unknown."""
    statistics: dict[str, Any]
    """Of the observations, by which fitted networks normalise them."""

    def batch(self, rows: Tensor) -> Batch:
        return self.memory.in_file_order(rows)

    def map(self, function: Callable[[Batch], Tensor]) -> Tensor:
        """Return what a function without a gradient returns for every transition."""
        with torch.no_grad():
            chunks = torch.split(torch.arange(len(self.step)), CHUNK)
            return torch.cat([function(self.batch(rows)) for rows in chunks])


@dataclass(frozen=True)
class Estimate:
    """What the data says about one policy; returns are discounted, per episode."""

    policy: str
    fqe: float
    fqe_interval: tuple[float, float]
    """95 % of bootstrap samples of the episodes, each with one of the fitted functions."""
    wdr: float
    wdr_interval: tuple[float, float]
    agreement: float
    """Share of transitions where the policy takes the action of the data."""
    rare: float
    """Share of transitions where the policy's action has a probability below ``RARE`` in the data,
    by a model of the data's policy."""
    effective_episodes: float
    """Episodes of equal weight that the weights of ``wdr`` are worth, as a mean over steps."""

    @property
    def warning(self) -> str | None:
        """A sentence if the data does not cover the policy's actions."""
        if self.rare > MOST_RARE:
            return (
                f"{self.policy}: {self.rare:.0%} of its actions are rare in the data (probability "
                f"below {RARE:g}); both estimates are extrapolations"
            )
        if self.effective_episodes < FEWEST_EPISODES:
            return (
                f"{self.policy}: the weights of wdr are worth {self.effective_episodes:.1f} "
                "episodes; rely on fqe, or record more episodes with a similar policy"
            )
        return None


def compare(
    policies: Mapping[str, Policy],
    dataset: Dataset,
    *,
    gamma: float = 0.99,
    updates: int = 3000,
    seed: int = 0,
    on_policy: Callable[[str], None] = lambda _: None,
) -> list[Estimate]:
    """Return estimates of the policies, the best by fitted Q evaluation first.

    ``updates``: gradient steps of each fitted function; ``on_policy`` is called with each name.
    """
    if not policies:
        raise ConfigError("compare needs at least one run; name its folder or URL")
    require(0 <= gamma < 1, "gamma", gamma, "≥ 0 and < 1")
    require(updates > 0, "updates", updates, "> 0")
    require(seed >= 0, "seed", seed, "≥ 0")
    for policy in policies.values():
        policy.check_spec(dataset.spec)
    recording = _read(dataset, gamma, seed)
    try:
        behaviour = _fit_behaviour(recording, dataset, updates, seed)
        found = list[Estimate]()
        for name, policy in policies.items():
            on_policy(name)
            found.append(
                _estimate(name, policy, recording, dataset, behaviour, gamma, updates, seed)
            )
    finally:
        recording.memory.close()
    return sorted(found, key=lambda one: -one.fqe)


def _read(dataset: Dataset, gamma: float, seed: int) -> Recording:
    whole = Config(gamma=gamma, data_memory_mb=2**42)
    memory = make_dataset_memory(whole, dataset, seed, HOST)
    columns = list[list[NDArray[Any]]]()
    for part in dataset.manifest.parts:
        file = PartFile(part, dataset.local(part), dataset.spec)
        for group in range(len(part.groups)):
            names = ("episode", "step", "terminated", "probability", "skip")
            *kept, skip = file.read_columns(group, names)
            columns.append([np.asarray(column)[~skip] for column in kept])
    episode, step, ends, probability = map(np.concatenate, zip(*columns, strict=True))
    if not (step == 0).any():
        raise DataError(f"dataset '{dataset.url}' has no beginning of an episode; record more")
    order = np.lexsort((step, episode))
    # A lost life may end an episode, in the middle of a game: what follows has no beginning.
    begins = (np.diff(episode[order]) != 0) | ends[order[:-1]]
    place = np.zeros(len(step), np.int64)
    place[order[1:]] = np.cumsum(begins)
    adjacent = ~begins & (np.diff(step[order]) == 1)
    following = np.full(len(step), -1)
    following[order[:-1][adjacent]] = order[1:][adjacent]
    return Recording(
        memory,
        torch.from_numpy(place),
        torch.from_numpy(step.astype(np.int64)),
        torch.from_numpy(following),
        torch.from_numpy(probability.astype(np.float64)),
        fit_statistics(dataset),
    )


def _fit(
    recording: Recording,
    dataset: Dataset,
    updates: int,
    seed: int,
    loss: Callable[[QNetwork, QNetwork, Tensor, Batch], Tensor],
) -> QNetwork:
    """Return a network fitted with ``loss(online, target, rows, batch)``; the target follows."""
    statistics = recording.statistics
    config = Config(**NETWORK, normalize_observations="obs_mean" in statistics)
    online, target = (make_network(config, dataset.spec, HOST, seed) for _ in range(2))
    for network in (online, target):
        network.set_statistics(statistics)
    weights, old_weights = FlatWeights(online), FlatWeights(target)
    adam = make_optimiser("adam", weights.data, 1e-8, 0.0, None)
    updater = LocalUpdater(weights, adam, max_grad_norm=10.0)
    generator = torch.Generator().manual_seed(seed)
    for update in range(updates):
        rows = torch.randint(len(recording.step), (BATCH,), generator=generator)
        error = loss(online, target, rows, recording.batch(rows))
        weights.set_grad(torch.autograd.grad(error, weights.parameters))
        updater.apply(LEARNING_RATE * (1 - update / updates))
        old_weights.data.lerp_(weights.data, TAU)
    return online


def _fit_behaviour(recording: Recording, dataset: Dataset, updates: int, seed: int) -> Tensor:
    """Return log-probabilities ``[transitions, actions]`` of a model of the data's policy."""

    def loss(online: QNetwork, _: QNetwork, rows: Tensor, batch: Batch) -> Tensor:
        del rows
        return action_cross_entropy(online.q_values(batch.obs), batch.action).mean()

    model = _fit(recording, dataset, updates, mix_seeds(seed, 1), loss)
    return recording.map(lambda batch: model.q_values(batch.obs).log_softmax(1))


def _estimate(
    name: str,
    policy: Policy,
    recording: Recording,
    dataset: Dataset,
    behaviour: Tensor,
    gamma: float,
    updates: int,
    seed: int,
) -> Estimate:
    def chosen(obs: Tensor) -> Tensor:
        return torch.from_numpy(policy.greedy(obs.numpy()))

    action = recording.map(lambda batch: batch.action)
    here = recording.map(lambda batch: chosen(batch.obs))
    ahead = recording.map(lambda batch: chosen(batch.next_obs))
    reward = recording.map(lambda batch: batch.reward)
    discount = recording.map(lambda batch: batch.discount)
    returns = Returns.of(recording.following, reward, discount, here == action)
    low, high = range_of_returns(reward, gamma)
    unit = max(-low, high) / LARGEST_OUTPUT or 1.0

    def loss(online: QNetwork, target: QNetwork, rows: Tensor, batch: Batch) -> Tensor:
        last = returns.last[rows]
        with torch.no_grad():
            # Without bounds, values of actions that the data lacks may grow forever.
            value = unit * take(target(recording.batch(last).next_obs), ahead[last])
            value = value.clamp(low, high)
            wanted = td_target(returns.reward[rows], returns.discount[rows], value) / unit
        return F.mse_loss(take(online(batch.obs), batch.action), wanted)

    seeds = [mix_seeds(seed, 2 + member) for member in range(MEMBERS)]
    members = [_fit(recording, dataset, updates, each, loss) for each in seeds]

    def values(obs: Tensor) -> Tensor:
        """Return ``[transitions, members, actions]``."""
        return (unit * torch.stack([member(obs) for member in members], 1)).clamp(low, high)

    found = recording.map(lambda batch: values(batch.obs))
    behind = recording.map(lambda batch: values(batch.next_obs).mean(1))
    own = found.take_along_dim(here.view(-1, 1, 1), 2).squeeze(2)
    steps = Steps.of(
        recording,
        reward=reward,
        q=take(found.mean(1), action),
        v=own.mean(1),
        v_next=take(behind, ahead),
        goes_on=discount > 0,
        log_ratio=_log_ratio(recording.probability, take(behaviour, action), here == action),
    )
    samples = _resample(len(steps.reward), seed)
    fqe = _mean_of_starts(recording, own, samples, seed)
    wdr = weighted_doubly_robust(steps, gamma, samples)
    rare = take(behaviour, here).exp() < RARE
    return Estimate(
        name,
        *_mean_and_interval(fqe),
        *_mean_and_interval(wdr),
        agreement=float((here == action).double().mean()),
        rare=float(rare.double().mean()),
        effective_episodes=steps.effective_episodes(),
    )


def range_of_returns(reward: Tensor, gamma: float) -> tuple[float, float]:
    """Return the smallest and the largest return of an episode with rewards like the data's."""
    least, most = float(reward.min()), float(reward.max())
    return min(least, 0.0) / (1 - gamma), max(most, 0.0) / (1 - gamma)


class Returns(NamedTuple):
    """Returns of transitions as long as the data takes a policy's actions.

    This is tree backup (Precup et al. 2000) for a policy that is greedy: the rest of an episode is
    a sample of the policy's until its action differs. In CartPole's recordings few transitions end
    an episode, and their news reached others by the target network only, a step per update.
    """

    reward: Tensor
    """Discounted sum of the rewards."""
    discount: Tensor
    """Of the value of the last transition's next observation; 0 if the episode terminated there."""
    last: Tensor
    """The last transition, which is the first one before an action that is not the policy's."""

    @classmethod
    def of(cls, following: Tensor, reward: Tensor, discount: Tensor, agrees: Tensor) -> Returns:
        """Return them for all transitions; ``agrees``: the policy would take the data's action."""
        last = torch.arange(len(reward))
        ahead = torch.where((following >= 0) & agrees[following], following, -1)
        for _ in range(DOUBLINGS):
            goes_on = ahead >= 0
            reward = torch.where(goes_on, reward + discount * reward[ahead], reward)
            discount = torch.where(goes_on, discount * discount[ahead], discount)
            last = torch.where(goes_on, last[ahead], last)
            ahead = torch.where(goes_on, ahead[ahead], ahead)
        return cls(reward, discount, last)


def _mean_of_starts(
    recording: Recording, values: Tensor, samples: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """Return the mean value of the episodes' first observations in every bootstrap sample.

    ``values`` are ``[transitions, members]``. The first sample has the mean of the members, and
    each other one that of a random member.
    """
    first = torch.nonzero(recording.step == 0).squeeze(1)
    first = first[recording.episode[first].argsort()]
    means = samples @ values[first].double().numpy() / samples.sum(1, keepdims=True)
    member = np.random.default_rng([seed, 3]).integers(means.shape[1], size=len(means))
    drawn: NDArray[np.float64] = means[np.arange(len(means)), member]
    drawn[0] = means[0].mean()
    return drawn


def _log_ratio(probability: Tensor, log_model: Tensor, agrees: Tensor) -> NDArray[np.float64]:
    """Return log π(a|s)/b(a|s) of a greedy policy π; b is the model's where it was not recorded."""
    # A comparison with NaN is False: the model's also replaces that, and 0, which no action has.
    known = torch.where(probability > 0, probability, log_model.double().exp())
    ratio = -known.clamp(min=1e-6).log()
    return torch.where(agrees, ratio, -torch.inf).numpy()


def _resample(episodes: int, seed: int) -> NDArray[np.float64]:
    """Return how often each sample holds each episode; the first one holds every episode once."""
    random = np.random.default_rng([seed, 2])
    drawn = random.multinomial(episodes, np.full(episodes, 1 / episodes), BOOTSTRAP_SAMPLES)
    return np.concatenate((np.ones((1, episodes)), drawn))


def _mean_and_interval(estimates: NDArray[np.float64]) -> tuple[float, tuple[float, float]]:
    low, high = np.quantile(estimates[1:], [0.025, 0.975])
    return float(estimates[0]), (float(low), float(high))


@dataclass(frozen=True)
class Steps:
    """Episodes that were recorded from their beginning, as matrices ``[episodes, steps]``.

    After its end, an episode's rewards and values are 0, and its ratio stays as it is. Where it was
    truncated, the step behind its last one holds the value of its last observation.
    """

    reward: NDArray[np.float64]
    q: NDArray[np.float64]
    v: NDArray[np.float64]
    ratio: NDArray[np.float64]
    """Π π/b over the steps up to and including this one, divided by the largest of this step."""

    @classmethod
    def of(
        cls,
        recording: Recording,
        *,
        reward: Tensor,
        q: Tensor,
        v: Tensor,
        v_next: Tensor,
        goes_on: Tensor,
        log_ratio: NDArray[np.float64],
    ) -> Steps:
        step, episode = recording.step.numpy(), recording.episode.numpy()
        complete = np.unique(episode[step == 0])
        place = np.full(episode.max() + 1, -1)
        place[complete] = np.arange(len(complete))
        kept = place[episode] >= 0
        at = (place[episode[kept]], step[kept])
        shape = (len(complete), int(step[kept].max()) + 2)
        columns = {}
        for name, values in {"reward": reward, "q": q, "v": v}.items():
            columns[name] = np.zeros(shape)
            columns[name][at] = values.double().numpy()[kept]
        logs = np.zeros(shape)
        logs[at] = log_ratio[kept]
        cumulated = np.cumsum(logs, axis=1)
        longest = np.zeros(len(complete), np.int64)
        np.maximum.at(longest, *at)
        last = kept & (step == longest[np.maximum(place[episode], 0)]) & goes_on.numpy()
        columns["v"][place[episode[last]], step[last] + 1] = v_next.double().numpy()[last]
        largest = cumulated.max(axis=0, keepdims=True)
        ratio = np.exp(cumulated - np.where(np.isfinite(largest), largest, 0.0))
        return cls(**columns, ratio=ratio)

    def effective_episodes(self) -> float:
        """Return (Σ w)² / Σ w² of the ratios of each step, as a mean over steps."""
        squares = (self.ratio**2).sum(0)
        return float(np.mean(self.ratio.sum(0) ** 2 / np.where(squares > 0, squares, 1.0)))


def weighted_doubly_robust(
    steps: Steps, gamma: float, samples: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return Σ_t γᵗ Σ_i [w_t (r − Q) + w_{t−1} V] for every bootstrap sample (1604.00923, eq. 9).

    w are the ratios of each step divided by their sum over the episodes; where no episode has any
    weight left, the value of the step before stands for the rest.
    """
    episodes, length = steps.ratio.shape
    before = np.concatenate((np.ones((episodes, 1)), steps.ratio[:, :-1]), axis=1)
    discounts = gamma ** np.arange(length)

    def weighted(ratio: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
        total = samples @ ratio
        return (samples @ (ratio * values)) / np.where(total > 0, total, 1.0)

    return (weighted(steps.ratio, steps.reward - steps.q) + weighted(before, steps.v)) @ discounts
