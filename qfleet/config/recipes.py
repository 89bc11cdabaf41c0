"""Published recipes, one function each; the docstring names the source.

Sources for plain DQN have no settings for distributional heads. Their range of atoms is then
qfleet's own, from the largest discounted return, and the number of quantiles is one for small
tasks.
"""

from __future__ import annotations

from qfleet.config.algorithms import ALGORITHMS
from qfleet.config.config import Config


def cartpole() -> Config:
    """qfleet's own: a random search, validated on 10 seeds (docs/performance.md)."""
    return Config(
        env="CartPole-v1",
        algo="n-step-dqn",
        steps=50_000,
        envs=8,
        learning_rate=2.3e-3,
        lr_schedule="linear",
        batch_size=256,
        buffer_size=50_000,
        learning_starts=1000,
        gamma=0.99,
        n_steps=5,
        target_update_interval=250,
        train_freq=4,
        gradient_steps=1,
        exploration_fraction=0.16,
        exploration_final_eps=0.02,
        net_arch=(128, 128),
        eval_freq=5000,
        v_min=0.0,
        v_max=100.0,
        n_quantiles=25,
        iqn_samples=16,
    )


def cartpole_pqn() -> Config:
    """qfleet's own: a short search (docs/algorithms/pqn.md)."""
    return _pqn().replace(
        env="CartPole-v1",
        steps=80_000,
        envs=32,
        train_freq=2048,
        gradient_steps=128,
        batch_size=64,
        td_lambda=0.95,
        learning_rate=4e-3,
        exploration_fraction=0.2,
        net_arch=(64, 64),
        eval_freq=5000,
    )


def cartpole_apex() -> Config:
    """qfleet's own: `cartpole` with two actors, uniform replay and falling ε (docs/actors.md)."""
    return cartpole().replace(engine="actors", workers=2)


def cartpole_parameter_server() -> Config:
    """qfleet's own: `cartpole` for four workers, with four times as many gradients, each of a
    quarter of the samples (docs/parameter-server.md)."""
    return cartpole().replace(
        engine="parameter-server",
        workers=4,
        steps=120_000,
        train_freq=1,
        batch_size=64,
        learning_rate=1e-3,
    )


def cartpole_easgd() -> Config:
    """qfleet's own: `cartpole-parameter-server` with twice the learning rate, because only a part
    of the workers' updates reaches the centre (docs/performance.md)."""
    return cartpole_parameter_server().replace(update="easgd", learning_rate=2e-3)


def cartpole_n_step_q() -> Config:
    """qfleet's own: a short search (docs/algorithms/n-step-q.md)."""
    row = ALGORITHMS["n-step-q"]
    return Config(algo="n-step-q", **row).replace(
        env="CartPole-v1",
        steps=100_000,
        envs=4,
        train_freq=32,
        batch_size=32,
        learning_rate=3e-3,
        target_update_interval=500,
        exploration_fraction=0.2,
        exploration_final_eps=0.05,
        layer_norm=True,
        net_arch=(128, 128),
        eval_freq=5000,
    )


def cartpole_a3c() -> Config:
    """qfleet's own: a short search (docs/algorithms/a3c.md)."""
    row = ALGORITHMS["a3c"]
    return Config(algo="a3c", **row).replace(
        env="CartPole-v1",
        steps=150_000,
        envs=16,
        train_freq=128,
        batch_size=128,
        learning_rate=2e-3,
        value_weight=0.05,
        layer_norm=True,
        net_arch=(128, 128),
        eval_freq=5000,
    )


def cartpole_sb3_zoo() -> Config:
    """rl-baselines3-zoo, hyperparams/dqn.yml, CartPole-v1."""
    return Config(
        env="CartPole-v1",
        steps=50_000,
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        net_arch=(256, 256),
    )


def cartpole_cleanrl() -> Config:
    """CleanRL, defaults of dqn.py (CartPole-v1)."""
    return Config(
        env="CartPole-v1",
        steps=500_000,
        learning_rate=2.5e-4,
        batch_size=128,
        buffer_size=10_000,
        learning_starts=10_000,
        gamma=0.99,
        target_update_interval=500,
        train_freq=10,
        gradient_steps=1,
        exploration_fraction=0.5,
        exploration_final_eps=0.05,
        net_arch=(120, 84),
        loss="mse",
        max_grad_norm=0.0,
    )


def acrobot() -> Config:
    """rl-baselines3-zoo, hyperparams/dqn.yml, Acrobot-v1."""
    return Config(
        env="Acrobot-v1",
        steps=100_000,
        learning_rate=6.3e-4,
        batch_size=128,
        buffer_size=50_000,
        learning_starts=0,
        gamma=0.99,
        target_update_interval=250,
        train_freq=4,
        gradient_steps=4,
        exploration_fraction=0.12,
        exploration_final_eps=0.1,
        net_arch=(256, 256),
        v_min=-100.0,
        v_max=0.0,
        n_quantiles=25,
        iqn_samples=16,
    )


def mountaincar() -> Config:
    """rl-baselines3-zoo, hyperparams/dqn.yml, MountainCar-v0."""
    return Config(
        env="MountainCar-v0",
        steps=120_000,
        learning_rate=4e-3,
        batch_size=128,
        buffer_size=10_000,
        learning_starts=1000,
        gamma=0.98,
        target_update_interval=600,
        train_freq=16,
        gradient_steps=8,
        exploration_fraction=0.2,
        exploration_final_eps=0.07,
        net_arch=(256, 256),
        v_min=-50.0,
        v_max=0.0,
        n_quantiles=25,
        iqn_samples=16,
    )


def lunarlander() -> Config:
    """rl-baselines3-zoo, hyperparams/dqn.yml, LunarLander (needs `pip install qfleet[box2d]`)."""
    return acrobot().replace(env="LunarLander-v3", v_min=-300.0, v_max=300.0)


def atari_dqn() -> Config:
    """rl-baselines3-zoo, hyperparams/dqn.yml, atari; envs chosen by machine, same replay ratio."""
    return Config(
        env="ALE/Pong-v5",
        steps=10_000_000,
        envs=0,
        clip_rewards=True,
        learning_rate=1e-4,
        batch_size=32,
        buffer_size=100_000,
        learning_starts=100_000,
        gamma=0.99,
        target_update_interval=1000,
        train_freq=4,
        gradient_steps=1,
        exploration_fraction=0.1,
        exploration_final_eps=0.01,
        eval_freq=250_000,
        checkpoint_freq=500_000,
        log_interval=10_000,
    )


def pong() -> Config:
    """qfleet's own, for a GPU: 3-step returns, early learning and little exploration.

    With a larger learning rate than the zoo's 1e-4, nearly all convolutions may die in the first
    500 updates; with a larger epsilon of Adam, the values of states begin to differ later
    (docs/performance.md).
    """
    return atari_dqn().replace(
        algo="n-step-dqn",
        n_steps=3,
        steps=3_000_000,
        buffer_size=200_000,
        learning_starts=20_000,
        exploration_fraction=0.03,
        eval_freq=200_000,
        target_return=18.0,
    )


def minatar_dqn() -> Config:
    """Young and Tian 2019 (1903.03176), with Adam instead of their centred RMSProp.

    They use one env; here the number suits the engine, at the same replay ratio.
    """
    return Config(
        env="MinAtar/Breakout-v1",
        steps=5_000_000,
        envs=0,
        network="minatar",
        learning_rate=2.5e-4,
        batch_size=32,
        buffer_size=100_000,
        learning_starts=5000,
        gamma=0.99,
        target_update_interval=1000,
        train_freq=1,
        gradient_steps=1,
        exploration_fraction=0.02,
        exploration_final_eps=0.1,
        eval_freq=100_000,
        checkpoint_freq=500_000,
        log_interval=10_000,
    )


def minatar_pqn() -> Config:
    """Gallici et al. 2024 (2407.04811), PureJaxQL's pqn_minatar.yaml; episodes end as in gymnax."""
    return _pqn().replace(
        env="MinAtar/Breakout-v1",
        steps=10_000_000,
        envs=128,
        max_episode_steps=1000,
        network="minatar",
        learning_rate=5e-4,
        train_freq=4096,
        gradient_steps=64,
        batch_size=128,
        exploration_fraction=0.1,
        exploration_final_eps=0.05,
        eval_freq=500_000,
        checkpoint_freq=1_000_000,
        log_interval=50_000,
    )


def atari_pqn() -> Config:
    """Gallici et al. 2024 (2407.04811), PureJaxQL's pqn_atari.yaml."""
    return _pqn().replace(
        env="ALE/Pong-v5",
        steps=10_000_000,
        envs=128,
        clip_rewards=True,
        episodic_life=True,
        network="nature",
        learning_rate=2.5e-4,
        lr_schedule="constant",
        train_freq=4096,
        gradient_steps=64,
        batch_size=128,
        exploration_fraction=0.1,
        exploration_final_eps=0.001,
        eval_freq=500_000,
        checkpoint_freq=1_000_000,
        log_interval=10_000,
    )


def atari_apex() -> Config:
    """Horgan et al. 2018 (1803.00933), with fewer actors; one update per 640 env steps, as there.

    Their learner processed 19 batches per second from the 12,500 transitions per second of 360
    actors.
    """
    return atari_dqn().replace(
        engine="actors",
        double=True,
        dueling=True,
        prioritized_replay=True,
        n_steps=3,
        exploration_ladder=True,
        exploration_final_eps=0.4,
        learning_rate=6.25e-5,
        optimizer="rmsprop",
        optimizer_eps=1.5e-7,
        max_grad_norm=40.0,
        batch_size=512,
        buffer_size=2_000_000,
        learning_starts=50_000,
        train_freq=640,
        target_update_interval=1_600_000,  # 2,500 updates
        replay_compression="lz4",
        envs=8,
    )


def _pqn() -> Config:
    """Return the algorithm's fields, with what all published PQN settings share."""
    return Config(algo="pqn", gamma=0.99, max_grad_norm=10.0, **ALGORITHMS["pqn"])


def atari_dqn_nature() -> Config:
    """Mnih et al. 2015, Nature 518, extended data table 1 (frames there are env steps × 4)."""
    return atari_dqn().replace(
        steps=50_000_000,
        learning_rate=2.5e-4,
        optimizer="rmsprop",
        optimizer_eps=0.01,
        buffer_size=1_000_000,
        learning_starts=50_000,
        target_update_interval=40_000,
        exploration_fraction=0.02,
        exploration_final_eps=0.1,
        episodic_life=True,
        max_grad_norm=0.0,
        eval_eps=0.05,
    )


def atari_c51() -> Config:
    """CleanRL, defaults of c51_atari.py."""
    return atari_dqn().replace(
        algo="c51",
        head="c51",
        learning_rate=2.5e-4,
        optimizer_eps=0.01 / 32,
        buffer_size=1_000_000,
        learning_starts=80_000,
        target_update_interval=10_000,
        max_grad_norm=0.0,
    )


def atari_rainbow() -> Config:
    """Hessel et al. 2018 (1710.02298), table 1; frames there are env steps × 4."""
    return atari_dqn().replace(
        algo="rainbow",
        double=True,
        dueling=True,
        prioritized_replay=True,
        prioritized_replay_alpha=0.5,
        n_steps=3,
        noisy=True,
        head="c51",
        steps=50_000_000,
        learning_rate=6.25e-5,
        optimizer_eps=1.5e-4,
        buffer_size=1_000_000,
        learning_starts=20_000,
        target_update_interval=8000,
        episodic_life=True,
        max_grad_norm=0.0,
    )
