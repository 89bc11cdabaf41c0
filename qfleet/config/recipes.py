"""The table of presets: published recipes, as differences from another preset or the defaults.

A field that is not listed has the value of the base preset, of the algorithm's row, or the default
of Config. Sources for plain DQN have no settings for distributional heads: their range of atoms is
then qfleet's own, from the largest discounted return, and the number of quantiles is one for small
tasks.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    source: str
    """Where the values come from, shown by ``--preset list``."""
    base: str | None
    fields: dict[str, Any]


def _preset(source: str, *, base: str | None = None, **fields: Any) -> Preset:
    return Preset(source, base, fields)


# fmt: off
PRESETS = {
    "cartpole": _preset(
        "qfleet's own: a random search, validated on 10 seeds (docs/performance.md).",
        env="CartPole-v1", algo="n-step-dqn", n_steps=5, steps=50_000, envs=8, net_arch=(128, 128),
        learning_rate=2.3e-3, lr_schedule="linear", batch_size=256, buffer_size=50_000,
        learning_starts=1000, target_update_interval=250, exploration_fraction=0.16,
        exploration_final_eps=0.02, eval_freq=5000,
        v_min=0.0, v_max=100.0, n_quantiles=25, iqn_samples=16,
    ),
    "cartpole-pqn": _preset(
        "qfleet's own: a short search (docs/algorithms/pqn.md).",
        env="CartPole-v1", algo="pqn", steps=80_000, train_freq=2048, gradient_steps=128,
        batch_size=64, td_lambda=0.95, learning_rate=4e-3, exploration_fraction=0.2, eval_freq=5000,
    ),
    "cartpole-apex": _preset(
        "qfleet's own: `cartpole` for two actors, with twice as many updates per step, which 16 "
        "envs need (docs/actors.md).",
        base="cartpole", engine="actors", workers=2, train_freq=2,
    ),
    "cartpole-parameter-server": _preset(
        "qfleet's own: `cartpole` for four workers, with four times as many gradients, each of a "
        "quarter of the samples (docs/parameter-server.md).",
        base="cartpole", engine="parameter-server", workers=4, steps=120_000, train_freq=1,
        batch_size=64, learning_rate=1e-3,
    ),
    "cartpole-easgd": _preset(
        "qfleet's own: `cartpole-parameter-server` with twice the learning rate, because only a "
        "part of the workers' updates reaches the centre (docs/performance.md).",
        base="cartpole-parameter-server", update="easgd", learning_rate=2e-3,
    ),
    "cartpole-textbook-double-q": _preset(
        "qfleet's own, for a textbook's asynchronous double Q-learning: pull, move the target "
        "network, gradient of 16 samples, push; Adam instead of SGD (docs/parameter-server.md).",
        env="CartPole-v1", algo="double-dqn", engine="parameter-server", workers=4, steps=80_000,
        loss="mse", net_arch=(128, 128), learning_rate=1e-3, lr_schedule="linear", batch_size=16,
        buffer_size=50_000, learning_starts=1000, train_freq=1, max_grad_norm=0.0,
        target_update_interval=0, tau=0.1, exploration_fraction=0.1, exploration_final_eps=0.02,
        eval_freq=5000,
    ),
    "cartpole-textbook-a3c": _preset(
        "qfleet's own, for a textbook's A3C: separate networks with two learning rates, a target "
        "network of the value, segments of 32 steps, summed gradients; Adam instead of SGD "
        "(docs/parameter-server.md).",
        env="CartPole-v1", algo="a3c", engine="parameter-server", workers=4, envs=1, steps=200_000,
        net_arch=(128, 128), learning_rate=1e-3, value_learning_rate=2e-3, separate_networks=True,
        sum_gradients=True, train_freq=32, batch_size=32, max_grad_norm=0.0, target_network=True,
        target_update_interval=0, tau=0.1, eval_freq=5000,
    ),
    "cartpole-n-step-q": _preset(
        "qfleet's own: a short search (docs/algorithms/n-step-q.md).",
        env="CartPole-v1", algo="n-step-q", envs=4, train_freq=32, batch_size=32,
        learning_rate=3e-3, target_update_interval=500, exploration_fraction=0.2, layer_norm=True,
        net_arch=(128, 128), eval_freq=5000,
    ),
    "cartpole-a3c": _preset(
        "qfleet's own: a short search (docs/algorithms/a3c.md).",
        env="CartPole-v1", algo="a3c", steps=150_000, train_freq=128, batch_size=128,
        learning_rate=2e-3, value_weight=0.05, layer_norm=True, net_arch=(128, 128), eval_freq=5000,
    ),
    "cartpole-sb3-zoo": _preset(
        "rl-baselines3-zoo, hyperparams/dqn.yml, CartPole-v1.",
        env="CartPole-v1", steps=50_000, learning_rate=2.3e-3, batch_size=64, buffer_size=100_000,
        learning_starts=1000, target_update_interval=10, train_freq=256, gradient_steps=128,
        exploration_fraction=0.16, exploration_final_eps=0.04, net_arch=(256, 256),
    ),
    "cartpole-cleanrl": _preset(
        "CleanRL, defaults of dqn.py (CartPole-v1).",
        env="CartPole-v1", steps=500_000, learning_rate=2.5e-4, batch_size=128, buffer_size=10_000,
        learning_starts=10_000, target_update_interval=500, train_freq=10, loss="mse",
        max_grad_norm=0.0, exploration_fraction=0.5, net_arch=(120, 84),
    ),
    "acrobot": _preset(
        "rl-baselines3-zoo, hyperparams/dqn.yml, Acrobot-v1.",
        env="Acrobot-v1", learning_rate=6.3e-4, batch_size=128, buffer_size=50_000,
        learning_starts=0, target_update_interval=250, gradient_steps=4, exploration_fraction=0.12,
        exploration_final_eps=0.1, net_arch=(256, 256),
        v_min=-100.0, v_max=0.0, n_quantiles=25, iqn_samples=16,
    ),
    "mountaincar": _preset(
        "rl-baselines3-zoo, hyperparams/dqn.yml, MountainCar-v0.",
        base="acrobot", env="MountainCar-v0", steps=120_000, learning_rate=4e-3, gamma=0.98,
        buffer_size=10_000, learning_starts=1000, target_update_interval=600, train_freq=16,
        gradient_steps=8, exploration_fraction=0.2, exploration_final_eps=0.07, v_min=-50.0,
    ),
    "lunarlander": _preset(
        "rl-baselines3-zoo, hyperparams/dqn.yml, LunarLander (needs `pip install qfleet[box2d]`).",
        base="acrobot", env="LunarLander-v3", v_min=-300.0, v_max=300.0,
    ),
    "general": _preset(
        "qfleet's own, for environments without a preset (docs/first-steps.md).",
        algo="double-dqn", envs=0, net_arch=(128, 128), learning_rate=5e-4, batch_size=64,
        learning_starts=1000, train_freq=2, target_update_interval=500,
    ),
    "toy-text": _preset(
        "qfleet's own, for Gymnasium's small tables of states; the network is also "
        "a table of Q-values (docs/first-steps.md).",
        base="general", env="FrozenLake-v1", net_arch=(), learning_rate=0.03,
        lr_schedule="linear", target_update_interval=200, exploration_fraction=0.3,
        n_eval_episodes=50,
    ),
    "minigrid": _preset(
        "qfleet's own, for the packages minigrid and BabyAI; 3-step returns (docs/first-steps.md).",
        base="general", env="MiniGrid-Empty-5x5-v0", steps=30_000, image_max=10,
        network="mlp", n_steps=3,
        lr_schedule="linear", exploration_fraction=0.2, eval_freq=3000,
    ),
    "highway": _preset(
        "highway-env, scripts/sb3_highway_dqn.py; four envs in processes, because a step is slow.",
        env="highway-fast-v0", steps=20_000, envs=4, vectorize="async", net_arch=(256, 256),
        learning_rate=5e-4, buffer_size=15_000, learning_starts=200, gamma=0.8, train_freq=1,
        target_update_interval=50, eval_freq=5000,
    ),
    # The zoo evaluates Atari agents with their final exploration rate. A greedy policy may never
    # press FIRE after a lost life, and then plays to the limit of steps.
    "atari-dqn": _preset(
        "rl-baselines3-zoo, hyperparams/dqn.yml, atari; envs chosen by machine, same replay ratio.",
        env="ALE/Pong-v5", steps=10_000_000, envs=0, clip_rewards=True, buffer_size=100_000,
        learning_starts=100_000, target_update_interval=1000, exploration_final_eps=0.01,
        eval_freq=250_000, eval_eps=0.01, checkpoint_freq=500_000, log_interval=10_000,
    ),
    # With a larger learning rate than the zoo's 1e-4, nearly all convolutions may die in the first
    # 500 updates; with a larger epsilon of Adam, the values of states begin to differ later. With
    # batches of 32 a run had 12.1 after 1.2M steps (docs/performance.md).
    "pong": _preset(
        "qfleet's own, for a GPU: 3-step returns, early learning and little exploration.",
        base="atari-dqn", algo="n-step-dqn", steps=3_000_000, buffer_size=200_000,
        batch_size=128, learning_starts=20_000, exploration_fraction=0.03, eval_freq=150_000,
        target_return=18.0,
    ),
    # The paper uses one env; here the number suits the engine, at the same replay ratio.
    "minatar-dqn": _preset(
        "Young and Tian 2019 (1903.03176), with Adam instead of their centred RMSProp.",
        env="MinAtar/Breakout-v1", steps=5_000_000, envs=0, network="minatar",
        learning_rate=2.5e-4, buffer_size=100_000, learning_starts=5000,
        target_update_interval=1000, train_freq=1, exploration_fraction=0.02,
        exploration_final_eps=0.1, eval_freq=100_000, checkpoint_freq=500_000, log_interval=10_000,
    ),
    "minatar-pqn": _preset(
        "Gallici et al. 2024 (2407.04811), PureJaxQL's pqn_minatar.yaml; episodes end as in "
        "gymnax.",
        env="MinAtar/Breakout-v1", algo="pqn", steps=10_000_000, envs=128, max_episode_steps=1000,
        network="minatar", learning_rate=5e-4, train_freq=4096, gradient_steps=64,
        eval_freq=500_000, checkpoint_freq=1_000_000, log_interval=50_000,
    ),
    "atari-dqn-nature": _preset(
        "Mnih et al. 2015, Nature 518, extended data table 1 (frames there are env steps × 4).",
        base="atari-dqn", steps=50_000_000, learning_rate=2.5e-4, optimizer="rmsprop",
        optimizer_eps=0.01, max_grad_norm=0.0, buffer_size=1_000_000, learning_starts=50_000,
        target_update_interval=40_000, exploration_fraction=0.02, exploration_final_eps=0.1,
        episodic_life=True, eval_eps=0.05,
    ),
    "atari-c51": _preset(
        "CleanRL, defaults of c51_atari.py.",
        base="atari-dqn", algo="c51", learning_rate=2.5e-4, optimizer_eps=0.01 / 32,
        max_grad_norm=0.0, buffer_size=1_000_000, learning_starts=80_000,
        target_update_interval=10_000,
    ),
    "atari-rainbow": _preset(
        "Hessel et al. 2018 (1710.02298), table 1; frames there are env steps × 4.",
        base="atari-dqn", algo="rainbow", steps=50_000_000, learning_rate=6.25e-5,
        optimizer_eps=1.5e-4, max_grad_norm=0.0, buffer_size=1_000_000, learning_starts=20_000,
        target_update_interval=8000, episodic_life=True,
    ),
    "atari-pqn": _preset(
        "Gallici et al. 2024 (2407.04811), PureJaxQL's pqn_atari.yaml.",
        base="minatar-pqn", env="ALE/Pong-v5", max_episode_steps=0, clip_rewards=True,
        episodic_life=True, network="nature", learning_rate=2.5e-4, lr_schedule="constant",
        exploration_final_eps=0.001, eval_eps=0.01, log_interval=10_000,
    ),
    # The paper's learner processed 19 batches per second from the 12,500 transitions per second of
    # 360 actors. Its target network is updated every 2,500 updates.
    "atari-apex": _preset(
        "Horgan et al. 2018 (1803.00933), with fewer actors; one update per 640 env steps, as "
        "there.",
        base="atari-dqn", engine="actors", envs=8, double=True, dueling=True,
        prioritized_replay=True, n_steps=3, exploration_ladder=True, exploration_final_eps=0.4,
        learning_rate=6.25e-5, optimizer="rmsprop", optimizer_eps=1.5e-7, max_grad_norm=40.0,
        batch_size=512, buffer_size=2_000_000, learning_starts=50_000, train_freq=640,
        target_update_interval=1_600_000, replay_compression="lz4",
    ),
}
# fmt: on
