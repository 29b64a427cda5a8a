"""RND with recurrent PPO on Craftax-Classic.

Random network distillation (Burda et al. 2018), as a baseline of C-TeC (Mohamed et al., "Temporal Representations for
Exploration", ICLR 2026). A predictor learns the output of a fixed random network on the next state. The agent's only
reward is the predictor's error, divided by its running standard deviation: go where the predictor has seldom been.
There is no task reward; success is the number of achievements that an episode unlocks.

One iteration:

    64 times, in every environment:                                                   # collect
        act with the recurrent policy, store (s, a, log-probability, value, done), count achievements at a done
    error = mean over the features of (predictor(s') - target(s'))^2, 0 at the end of an episode          # learn_bonus
    reward = error / running standard deviation of all errors so far
    4 times, in 8 minibatches of shuffled transitions:
        one Adam step of the predictor on the mean error
    4 times, in 8 minibatches of environments:                                        # learn_policy
        one Adam step of PPO on the rewards' advantages

    python rnd_ppo_craftax.py                          # the paper's sizes, for a GPU
    python rnd_ppo_craftax.py --preset laptop          # under half an hour on two CPU cores
    python rnd_ppo_craftax.py --resume runs/<folder>   # go on from the last checkpoint

Everything but the bonus is the code of ctec_ppo_rnn_craftax.py. Metrics, implementation details and results:
docs/rnd_ppo_craftax.md
"""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "jax==0.10.1", "flax==0.12.8", "optax==0.2.8", "craftax==1.6.1", "numpy==2.4.6", "tyro==1.0.16", "tqdm==4.70.1",
#   "matplotlib==3.11.2", "wandb==0.31.0",
# ]
# ///

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import re
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # no line for each program that XLA loads from its cache

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import multihost_utils
from tqdm import tqdm


# --------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    env: Literal["craftax_classic"] = "craftax_classic"  # environment: Craftax-Classic-Symbolic-v1
    preset: Literal["paper", "laptop"] = "paper"  # published sizes, or sizes for a CPU; explicit flags win over it
    seed: int = 1  # seed of everything random
    total_timesteps: int = 1_000_000_000  # environment steps, all environments together (paper Table 5)
    resume: str = ""  # folder of an earlier run: go on from its checkpoint, with its arguments
    run_dir: str = "runs"  # where the folder of the run is made
    checkpoint_minutes: float = 10.0  # minutes between checkpoints; always one at the end, at Ctrl-C and at SIGTERM
    track: bool = False  # send metrics and pictures to wandb too (WANDB_MODE=offline works)
    wandb_project_name: str = "ctec"  # project of the run on wandb
    wandb_entity: str | None = None  # user or team of the run on wandb
    distributed: bool = False  # one run over all processes that srun or mpirun started
    episode_window: int = 1024  # number of latest finished episodes over which the achievement rates are taken
    random_iterations: int = 16  # first iterations, in which the policy stays nearly uniform and the model learns

    num_envs: int = 1024  # parallel environments (Craftax baselines)
    num_steps: int = 64  # steps in each environment before the update of an iteration (paper Table 5)
    reset_ratio: int = 16  # optimistic resets: one new world for this many environment steps (Craftax baselines)
    num_minibatches: int = 8  # minibatches of a pass of PPO: whole sequences of some environments (Craftax baselines)
    update_epochs: int = 4  # passes of PPO over a rollout (paper Table 5)
    learning_rate: float = 2e-4  # Adam learning rate of PPO, annealed linearly to 0 (paper Table 5)
    adam_eps: float = 1e-5  # epsilon of Adam, PPO and the intrinsic-reward model (Craftax baselines)
    max_grad_norm: float = 1.0  # global-norm gradient clipping, PPO and the intrinsic-reward model (paper Table 5)
    agent_width: int = 512  # width of the embedding, the GRU and the two hidden layers of each head (paper Table 5)
    gamma: float = 0.99  # discount of PPO (paper Table 5)
    gae_lambda: float = 0.8  # lambda of generalised advantage estimation (paper Table 5)
    clip: float = 0.2  # PPO's clipping of the probability ratio (paper Table 5)
    entropy_coef: float = 0.01  # weight of the entropy bonus (paper Table 5)
    value_coef: float = 0.5  # weight of the value loss (Craftax baselines)
    task_reward_coef: float = 0.0  # weight of the game's own reward (the paper has none)
    intrinsic_coef: float = 1.0  # weight of the intrinsic reward; 0: plain PPO, the model is not trained

    rnd_width: int = 256  # width of the two hidden layers of predictor and target (paper Tables 4 and 7)
    feature_dim: int = 512  # number of features (paper Tables 4 and 7)
    model_learning_rate: float = 3e-4  # Adam learning rate of the intrinsic-reward model (paper Table 7)
    model_epochs: int = 4  # passes of the intrinsic-reward model over the transitions of a rollout (as PPO's)
    model_minibatches: int = 8  # minibatches of such a pass (as PPO's)

    @property
    def steps_per_iteration(self):
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self):
        return math.ceil(self.total_timesteps / self.steps_per_iteration)

    @property
    def first_update(self):  # the first iteration with PPO's gradient steps
        return self.random_iterations + 1


# ---------------------------------------------------------------------------------------------------- networks
class MLP(nn.Module):  # hidden relu layers and a linear output layer
    width: int
    out: int
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.lecun_uniform())
        for _ in range(self.layers):
            x = nn.relu(dense(self.width)(x))
        return dense(self.out)(x)


# --------------------------------------------------------------------------------------------- the method: RND
@flax.struct.dataclass
class Transitions:
    obs: jax.Array  # (..., state_size)
    action: jax.Array  # (...)
    next_obs: jax.Array  # (..., state_size)
    mask: jax.Array  # (...) 1.0; 0.0: the episode ended with the step, and next_obs is of another one


@flax.struct.dataclass
class Moments:
    """Count, mean and variance of all numbers so far."""

    count: jax.Array
    mean: jax.Array
    variance: jax.Array


@flax.struct.dataclass
class RND:
    networks: "Model"  # {"predictor", "target"}
    errors: Moments


def masked_mean(x, mask):
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def update_moments(moments, x, mask):
    """Add the numbers x with mask 1 (Chan et al.'s parallel formula)."""
    count = jnp.sum(mask)
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    total = moments.count + count
    delta = mean - moments.mean
    share = count / jnp.maximum(total, 1.0)
    spread = (1 - share) * moments.variance + share * variance + share * (1 - share) * delta**2
    return Moments(total, moments.mean + share * delta, spread)


def encode(params, args, x):
    """Features (..., feature_dim) of the predictor or of the target."""
    return MLP(args.rnd_width, args.feature_dim).apply(params, x)


def intrinsic_reward(params, args, batch):
    """(...) error of the predictor on the next state, a mean over the features, 0 without a next state. It is divided
    by its running standard deviation in learn_bonus."""
    predicted = encode(params["predictor"], args, batch.next_obs)
    target = jax.lax.stop_gradient(encode(params["target"], args, batch.next_obs))
    return batch.mask * jnp.mean((predicted - target) ** 2, axis=-1)


def model_loss(params, args, batch):
    """The mean error. No gradient reaches the target, and Adam leaves parameters without gradient as they are."""
    loss = masked_mean(intrinsic_reward(params, args, batch), batch.mask)
    return loss, {}


# --------------------------------------------------------------------------------------------------------- PPO
@flax.struct.dataclass
class Model:  # parameters and their optimiser's state
    params: Any
    opt_state: Any


def gradient_update(loss_fn, model, optimizer, args, *inputs):
    """One optimiser step on loss_fn(params, args, *inputs) -> (loss, aux)."""
    grads, aux = jax.grad(loss_fn, has_aux=True)(model.params, args, *inputs)
    updates, opt_state = optimizer.update(grads, model.opt_state)
    return Model(optax.apply_updates(model.params, updates), opt_state), aux


def clipped_adam(args, learning_rate):
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(learning_rate, eps=args.adam_eps))


class RecurrentActorCritic(nn.Module):
    """Embedding, GRU, and a head each for policy and value, as in the Craftax baselines, for a sequence of steps. All
    but the product with the hidden state is done for the whole sequence at once."""

    width: int
    num_actions: int

    @nn.compact
    def __call__(self, hidden, obs, first):
        """Returns the last hidden state (B, width), log-probabilities (T, B, actions) and values (T, B)."""
        dense = lambda size, scale: nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))
        gates = nn.Dense(3 * self.width)(nn.relu(dense(self.width, 2**0.5)(obs)))  # lecun_normal, as flax's GRUCell
        orthogonal = jax.vmap(lambda key: nn.initializers.orthogonal()(key, (self.width, self.width)))
        recurrent = self.param("recurrent", lambda key: orthogonal(jax.random.split(key, 3)))  # reset, update, new
        bias = self.param("bias", nn.initializers.zeros, (self.width,))

        def step(hidden, inputs):
            gates, first = inputs
            reset, update, new = jnp.split(gates, 3, axis=-1)
            hidden = jnp.where(first[:, None], 0.0, hidden)  # a new episode remembers nothing
            reset = nn.sigmoid(reset + hidden @ recurrent[0])
            update = nn.sigmoid(update + hidden @ recurrent[1])
            new = nn.tanh(new + reset * (hidden @ recurrent[2] + bias))
            hidden = (1 - update) * new + update * hidden
            return hidden, hidden

        hidden, x = jax.lax.scan(step, hidden, (gates, first))
        add_layer = lambda x: nn.relu(dense(self.width, 2.0)(x))  # a new layer at each call
        logits = dense(self.num_actions, 0.01)(add_layer(add_layer(x)))  # the first policy is nearly uniform
        value = dense(1, 1.0)(add_layer(add_layer(x)))
        return hidden, jax.nn.log_softmax(logits), value[..., 0]


def policy(params, args, hidden, obs, first):
    return RecurrentActorCritic(args.agent_width, CraftaxClassic.num_actions).apply(params, hidden, obs, first)


def gae(args, reward, value, done, last_value):
    """(T, N) generalised advantage estimates, backwards over the steps."""

    def step(carry, inputs):
        advantage, next_value = carry
        reward, value, done = inputs
        error = reward + args.gamma * next_value * (1.0 - done) - value
        advantage = error + args.gamma * args.gae_lambda * (1.0 - done) * advantage
        return (advantage, value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return jax.lax.scan(step, start, (reward, value, done.astype(jnp.float32)), reverse=True)[1]


def ppo_loss(params, args, hidden, rollout, advantage):
    """Clipped objective, squared error of the values, and entropy, for whole sequences of some environments."""
    _, log_probs, value = policy(params, args, hidden, rollout.obs, rollout.first)
    log_prob = jnp.take_along_axis(log_probs, rollout.action[..., None], axis=-1)[..., 0]
    target = advantage + rollout.value
    advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
    log_ratio = log_prob - rollout.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - args.clip, 1 + args.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
    value_loss = 0.5 * jnp.mean((value - target) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = policy_loss + args.value_coef * value_loss - args.entropy_coef * entropy
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "value_mean": jnp.mean(value),
        "entropy": entropy,
        "kl": jnp.mean(ratio - 1 - log_ratio),
        "clipped": jnp.mean(ratio != clipped),
    }
    return loss, metrics


def update_ppo(args, model, learning_rate, key, hidden, rollout, advantage):
    """`update_epochs` passes over a rollout, in `num_minibatches` steps of some environments' whole sequences."""
    optimizer = clipped_adam(args, learning_rate)

    def epoch(model, key):
        order = shard(jax.random.permutation(key, args.num_envs).reshape(args.num_minibatches, -1), None, "envs")

        def step(model, envs):
            minibatch = jax.tree.map(lambda x: x[:, envs], (rollout, advantage))
            return gradient_update(ppo_loss, model, optimizer, args, hidden[envs], *minibatch)

        return jax.lax.scan(step, model, order)

    model, metrics = jax.lax.scan(epoch, model, jax.random.split(key, args.update_epochs))
    return model, jax.tree.map(jnp.mean, metrics)


# ----------------------------------------------------------------------------------------------------- rollout
@flax.struct.dataclass
class Rollout:
    obs: jax.Array  # (T, N, state_size)
    first: jax.Array  # (T, N) bool: the observation is the first of its episode
    action: jax.Array  # (T, N)
    log_prob: jax.Array  # (T, N)
    value: jax.Array  # (T, N)
    reward: jax.Array  # (T, N) the game's
    done: jax.Array  # (T, N) bool: the episode ended with this step


@flax.struct.dataclass
class Players:  # the scan carry of a rollout, (N, ...)
    world: Any  # Craftax's state
    obs: jax.Array
    first: jax.Array  # bool: obs is the first of its episode
    hidden: jax.Array  # of the GRU
    length: jax.Array  # steps of the episode so far
    reward: jax.Array  # of the episode so far


def act(args, env, params, now, key):
    """One step of the policy in every environment, without resets. Returns the players after it and the transition."""
    key_action, key_env = jax.random.split(key)
    hidden, log_probs, value = policy(params, args, now.hidden, now.obs[None], now.first[None])
    action = jax.random.categorical(key_action, log_probs[0])
    log_prob = jnp.take_along_axis(log_probs[0], action[:, None], axis=-1)[:, 0]
    world, obs, reward, done = jax.vmap(env.step)(jax.random.split(key_env, len(action)), now.world, action)
    after = Players(world, obs, jnp.zeros_like(done), hidden, now.length + 1, now.reward + reward)
    return after, Rollout(now.obs, now.first, action, log_prob, value[0], reward, done)


# ---------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class RunState:
    key: jax.Array  # of the next iteration
    key_learn: jax.Array  # of this iteration's updates
    iteration: jax.Array
    players: Players
    episodes: "Episodes"
    random_rates: jax.Array  # (22,) achievement rates of the untrained policy
    agent: Model
    model: RND


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def collect(args, env, state):
    """`num_steps` steps in every environment. An ended episode restarts in a new world. Worlds are made beforehand,
    one for `reset_ratio` environment steps, and taken in turn (again from the first one, should they run out)."""
    key, key_collect, key_learn = jax.random.split(state.key, 3)
    key_worlds, key_steps = jax.random.split(key_collect)
    starts = shard(init_players(args, env, key_worlds, math.ceil(args.steps_per_iteration / args.reset_ratio)))

    def step(carry, key):
        now, used = carry
        after, transition = act(args, env, state.agent.params, now, key)
        done = transition.done
        ended = (done, after.world.achievements, after.length, after.reward)  # before the reset
        fresh = (used + jnp.cumsum(done) - 1) % len(starts.obs)
        restart = lambda start, x: jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), start[fresh], x)
        return (jax.tree.map(restart, starts, after), used + jnp.sum(done)), (transition, ended)

    hidden = state.players.hidden  # of the GRU, before the first step
    (players, _), (rollout, ended) = jax.lax.scan(step, (state.players, 0), jax.random.split(key_steps, args.num_steps))
    episodes = insert_episodes(state.episodes, *ended)
    state = state.replace(key=key, key_learn=key_learn, iteration=state.iteration + 1, players=players)
    rates = jnp.where(state.iteration < args.first_update, achievement_rates(episodes), state.random_rates)
    state = state.replace(episodes=episodes, random_rates=rates)
    return shard_state(state), (hidden, rollout), episode_metrics(episodes)


def update_model(args, loss_fn, model, key, states, action, done):
    """`model_epochs` passes over the transitions of a rollout, in `model_minibatches` steps each, on
    loss_fn(params, args, Transitions)."""
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # (T * N, ...); a step's next state stands N rows further
    optimizer = clipped_adam(args, args.model_learning_rate)
    envs = done.shape[1]

    def epoch(model, key):
        order = shard(jax.random.permutation(key, done.size).reshape(args.model_minibatches, -1), None, "envs")

        def step(model, rows):
            next_obs = flat(states)[rows + envs]
            batch = Transitions(flat(states)[rows], flat(action)[rows], next_obs, 1.0 - flat(done)[rows])
            return gradient_update(loss_fn, model, optimizer, args, batch)

        return jax.lax.scan(step, model, order)

    model, metrics = jax.lax.scan(epoch, model, jax.random.split(key, args.model_epochs))
    return model, jax.tree.map(jnp.mean, metrics)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def learn_bonus(args, env, state, hidden, rollout):
    """Rewards (T, N) from the predictor as it is, then the update of the predictor."""
    key_model, key_policy = jax.random.split(state.key_learn)
    reward = args.task_reward_coef * rollout.reward
    metrics = {}
    if args.intrinsic_coef:
        states = jnp.concatenate([rollout.obs, state.players.obs[None]])  # (T+1, N, state_size)
        transitions = Transitions(states[:-1], rollout.action, states[1:], 1.0 - rollout.done)
        networks = state.model.networks
        error = intrinsic_reward(networks.params, args, transitions)
        errors = update_moments(state.model.errors, error, transitions.mask)
        intrinsic = error / jnp.sqrt(errors.variance + 1e-12)
        reward += args.intrinsic_coef * intrinsic
        steps = shard((states, rollout.action, rollout.done))
        networks, _ = update_model(args, model_loss, networks, key_model, *steps)
        metrics = {"rnd_loss": masked_mean(error, transitions.mask), "error_std": jnp.sqrt(errors.variance)}
        metrics |= {"reward_mean": jnp.mean(intrinsic), "reward_std": jnp.std(intrinsic)}
        state = state.replace(model=RND(networks, errors))
    return shard_state(state.replace(key_learn=key_policy)), reward, metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def learn_policy(args, env, state, hidden, rollout, reward):
    """PPO on these rewards, from the GRU's hidden state before the rollout."""
    learning_rate = args.learning_rate * (1 - (state.iteration - 1) / args.num_iterations)
    players = state.players
    _, _, last_value = policy(state.agent.params, args, players.hidden, players.obs[None], players.first[None])
    advantage = gae(args, reward, rollout.value, rollout.done, last_value[0])
    sequences = shard((hidden, rollout, advantage))
    agent, metrics = update_ppo(args, state.agent, learning_rate, state.key_learn, *sequences)
    metrics["learning_rate"] = learning_rate
    trained = (state.model.networks.params["predictor"], agent.params)
    metrics["parameter_norm"] = optax.global_norm(trained)
    return shard_state(state.replace(agent=agent)), metrics


# ----------------------------------------------------------------------------------------------- initial state
def init_players(args, env, key, number):
    """Players in new worlds; Craftax takes 0.4 MB of working memory for each."""
    world, obs = jax.vmap(env.reset)(shard(jax.random.split(key, number), "envs"))
    hidden = jnp.zeros((number, args.agent_width))
    return Players(world, obs, jnp.ones(number, bool), hidden, jnp.zeros(number, jnp.int32), jnp.zeros(number))


def init_policy(args, env, key, players):
    network = RecurrentActorCritic(args.agent_width, env.num_actions)
    params = network.init(key, players.hidden, players.obs[None], players.first[None])
    return Model(params, clipped_adam(args, args.learning_rate).init(params))


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env, key_agent, key_predictor, key_target = jax.random.split(jax.random.PRNGKey(args.seed), 5)
    players = init_players(args, env, key_env, args.num_envs)
    network = MLP(args.rnd_width, args.feature_dim)
    obs = jnp.zeros(env.state_size)
    params = {"predictor": network.init(key_predictor, obs), "target": network.init(key_target, obs)}
    networks = Model(params, clipped_adam(args, args.model_learning_rate).init(params))
    return shard_state(RunState(
        key=key, key_learn=key, iteration=jnp.int32(0),
        players=players,
        episodes=init_episodes(args),
        random_rates=jnp.full(22, jnp.nan, jnp.float32),
        agent=init_policy(args, env, key_agent, players),
        model=RND(networks, Moments(*jnp.zeros(3))),
    ))  # fmt: skip


# ==================================================================================================== appendix
# What a reader of the method does not need: devices, achievements, the game, the run's folder, pictures, and main.


# ----------------------------------------------------------------------------------------------------- devices
SPLIT = {"players": ("envs",)}  # of RunState; others are replicated


def shard(tree, *axes):
    """Shard the axes named "envs" over the devices, and replicate the others. XLA does the rest: it all-reduces SAC's
    batches, never all-gathers SAC's replay, and all-gathers PPO's rollout once an iteration."""
    if jax.device_count() == 1:
        return tree
    mesh = jax.make_mesh((jax.device_count(),), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*axes[: x.ndim])))
    return jax.tree.map(place, tree)


def shard_state(state):
    return state.replace(**{name: shard(field, *SPLIT.get(name, ())) for name, field in vars(state).items()})


def all_gather(tree):
    """All-gather a sharded pytree; arrays local to a process are concatenated."""
    return multihost_utils.process_allgather(tree, tiled=True) if jax.process_count() > 1 else tree


# ------------------------------------------------------------------------------------------------ achievements
ACHIEVEMENTS = """collect_wood place_table eat_cow collect_sapling collect_drink make_wood_pickaxe make_wood_sword
    place_plant defeat_zombie collect_stone place_stone eat_plant defeat_skeleton make_stone_pickaxe make_stone_sword
    wake_up place_furnace collect_coal collect_iron collect_diamond make_iron_pickaxe make_iron_sword""".split()


@flax.struct.dataclass
class Episodes:  # the latest finished ones, in a ring buffer: number k is in row k % W
    achievements: jax.Array  # (W, 22) bool
    length: jax.Array  # (W,)
    reward: jax.Array  # (W,) the game's
    count: jax.Array  # () finished so far


def init_episodes(args):
    window = args.episode_window
    return Episodes(jnp.zeros((window, 22), bool), jnp.zeros(window, jnp.int32), jnp.zeros(window), jnp.int32(0))


def insert_episodes(episodes, done, achievements, length, reward):
    """Add those of T x N steps that end an episode; if there are more than W of them, the last W."""
    window = len(episodes.length)
    rank = jnp.cumsum(done.ravel())  # 1, 2, ... at the steps that end an episode
    keep = done.ravel() & (rank > rank[-1] - window)
    row = jnp.where(keep, (episodes.count + rank - 1) % window, window)  # row W is dropped
    put = lambda ring, x: ring.at[row].set(x.reshape(-1, *x.shape[2:]), mode="drop")
    rings = (put(episodes.achievements, achievements), put(episodes.length, length), put(episodes.reward, reward))
    return Episodes(*rings, count=episodes.count + rank[-1])


def achievement_rates(episodes):
    """(22,) fraction of the latest episodes that unlocked each achievement; 0 before the first episode ended."""
    return jnp.sum(episodes.achievements, axis=0) / jnp.clip(episodes.count, 1, len(episodes.length))


def crafter_score(rates):
    return jnp.exp(jnp.mean(jnp.log(1 + 100 * rates))) - 1


def episode_metrics(episodes):
    rates = achievement_rates(episodes)
    stored = jnp.clip(episodes.count, 1, len(episodes.length))
    return dict(zip(ACHIEVEMENTS, rates)) | {
        "achievements": jnp.sum(rates),
        "crafter_score": crafter_score(rates),
        "episodes": episodes.count,
        "episode_length": jnp.sum(episodes.length) / stored,
        "episode_return": jnp.sum(episodes.reward) / stored,
    }


# ------------------------------------------------------------------------------------------------ environments
class CraftaxClassic:
    """Craftax-Classic-Symbolic-v1, without its auto-reset."""

    state_size = 1345
    num_actions = 17

    def __init__(self):
        from craftax.craftax_env import make_craftax_env_from_name  # here, because it starts the device

        self.game = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False)

    def reset(self, key):
        obs, world = self.game.reset_env(key, self.game.default_params)
        # Craftax starts from Python numbers: without their types, a stage would be compiled twice
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), (world, obs))

    def step(self, key, world, action):
        obs, world, reward, done, _ = self.game.step_env(key, world, action, self.game.default_params)
        return world, obs, reward, done


make_craftax = functools.cache(CraftaxClassic)


# ----------------------------------------------------------------------------------- run folder and checkpoint
def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def start_jax(args):
    """Join the launcher's processes, and cache compiled programs by CPU features: code compiled for one CPU can crash
    on another that shares the home folder."""
    if args.distributed:
        jax.distributed.initialize()
        if jax.process_index() > 0:
            sys.stdout = open(os.devnull, "w")  # the first process speaks for all
    if not jax.config.jax_compilation_cache_dir:
        cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
        features = re.search(r"^(flags|Features).*|\Z", cpuinfo, re.M).group()
        cache = Path.home() / ".cache" / "ctec_jax" / f"{zlib.crc32(features.encode()):08x}"
        jax.config.update("jax_compilation_cache_dir", str(cache))


def write_atomically(path, write):
    """write(file) into a temporary file, which then takes the place of path. The first process writes for all."""
    if jax.process_index() > 0:
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def named_leaves(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def save_checkpoint(path, state):
    """Every array of the state under its name. np.savez fetches and writes them one after the other."""
    leaves = named_leaves(all_gather(state))
    write_atomically(path, lambda file: np.savez(file, **leaves))


def load_checkpoint(path, template):
    """The state in path, whose arrays must have the names, shapes and dtypes of template."""
    kind = lambda x: f"{x.dtype}{list(x.shape)}"
    leaves = []
    try:
        with np.load(path, allow_pickle=False) as file:
            for name, expected in named_leaves(template).items():
                array = file[name]
                if kind(array) != kind(expected):
                    raise ValueError(f"{name} is {kind(array)}, not {kind(expected)}")
                leaves.append(jnp.array(array))
    except Exception as error:  # missing, truncated and mismatched files raise different exceptions
        fail(f"{path} is no checkpoint of this run ({error}): drop flags that change sizes, or start a new run")
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def start_run(args, init, buffers):
    """The run's folder, and its state: init(), or the checkpoint's. buffers says in words what takes the memory."""
    name = f"{args.env}__{Path(__file__).stem}__{args.seed}__{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = Path(args.resume or Path(args.run_dir) / name)
    print(f"{Path(__file__).stem} on {args.env}, seed {args.seed}, into {folder}")
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, {buffers}; the first iterations compile", flush=True)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and args.preset == "paper":
        print("no accelerator was found: --preset laptop has sizes that suit a CPU", flush=True)
    if on_cpu and args.env.startswith(("ant", "humanoid", "arm")) and "emitters" not in os.getenv("XLA_FLAGS", ""):
        print("robots are faster on a CPU, the arm 100 times, with XLA_FLAGS=--xla_cpu_use_fusion_emitters=false")
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(init)))
    if on_cpu and needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):  # XLA would wait for ever
        fail(f"--num-envs {args.num_envs} is too much for the memory: the state needs {needed / 1e9:,.0f} GB")
    if not args.resume:
        if jax.process_index() == 0:
            folder.mkdir(parents=True)
        return folder, init()
    state = load_checkpoint(folder / "checkpoint.npz", jax.eval_shape(init))
    if state.iteration >= args.num_iterations:
        fail(f"{folder} is complete: give --total-timesteps above {int(state.iteration) * args.steps_per_iteration:,}")
    return folder, shard_state(state)


class Run(contextlib.ExitStack):
    """What surrounds the iterations: metrics.csv, checkpoints, progress, wandb. Inside `with`, Ctrl-C and SIGTERM end
    the run after an iteration, with a checkpoint. Only the first process writes."""

    def __init__(self, args, folder, state, *metrics):
        super().__init__()
        self.args = args
        self.folder = folder
        self.iteration = int(state.iteration)
        self.columns = ["iteration", "steps", "seconds", "steps_per_second", *(name for one in metrics for name in one)]
        self.picture_iterations = {round(k * args.num_iterations / 5) for k in range(1, 6)}  # the end among them
        path = folder / "metrics.csv"
        lines = path.read_text().splitlines()[: 1 + self.iteration] if path.exists() else [",".join(self.columns)]
        last = f"{self.iteration},{self.iteration * args.steps_per_iteration},"
        if lines[0] != ",".join(self.columns) or (self.iteration and not lines[-1].startswith(last)):
            fail(f"{path} lacks the columns or steps of this run: another version of this script, or other flags?")
        self.seconds = float(lines[-1].split(",")[2]) if self.iteration else 0.0
        config = dataclasses.asdict(args) | {"resume": "", "distributed": False}
        write_atomically(folder / "args.json", lambda file: file.write(json.dumps(config, indent=1).encode()))
        write_atomically(path, lambda file: file.writelines(f"{line}\n".encode() for line in lines))
        first = jax.process_index() == 0
        self.file = self.enter_context(open(path if first else os.devnull, "a"))
        interval = 0.1 if sys.stderr.isatty() else 30  # seconds
        bar = tqdm(total=args.num_iterations, initial=self.iteration, mininterval=interval, disable=not first)
        self.bar = self.enter_context(bar)
        self.wandb = None
        if args.track and first:
            import wandb

            names = dict(project=args.wandb_project_name, entity=args.wandb_entity, id=folder.name)
            self.wandb = self.enter_context(wandb.init(**names, resume="allow", config=config, dir=folder))
            pictures = lambda: {path.stem: wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))}
            self.callback(lambda: self.wandb.log(pictures()))
        self.signals = []
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.signal(number, lambda number, _: self.signals.append(signal.Signals(number)))
            self.callback(signal.signal, number, handler)
        self.saved = self.began = time.time()

    def log(self, metrics):
        """Add a row to metrics.csv and return it. Only a maze's episode_length may be nan: then no episode ended."""
        values = {name: float(x) for name, x in jax.device_get(metrics).items()}
        spent = time.time() - self.began
        rate = self.args.steps_per_iteration / spent
        self.seconds += spent
        self.iteration += 1
        row = {"iteration": self.iteration, "steps": self.iteration * self.args.steps_per_iteration}
        row |= {"seconds": round(self.seconds, 1), "steps_per_second": round(rate, 1)}
        row |= {name: x for name, x in values.items() if math.isfinite(x)}
        broken = [f"{name} is {x}" for name, x in values.items() if name not in row and name != "episode_length"]
        if broken:
            self.bar.close()
            fail(f"iteration {self.iteration}: {', '.join(broken)}; a checkpoint, if any, is in {self.folder}", code=1)
        print(*(row.get(name, "") for name in self.columns), sep=",", file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(row, step=row["steps"])
        name = "coverage" if "coverage" in row else "achievements"
        self.bar.set_postfix_str(f"{name} {round(row[name], 2):,.10g}, {rate:,.0f} steps/s", refresh=False)
        self.bar.update()
        return row

    def save(self, state):
        """Write a checkpoint if one is due, at the end of the run, and after a signal, which then ends the run."""
        last = self.iteration == self.args.num_iterations
        due = last or time.time() - self.saved >= 60 * self.args.checkpoint_minutes
        stopped, due = np.any(all_gather(np.array([[bool(self.signals), due]])), axis=0)  # in any process
        if stopped or due:
            save_checkpoint(self.folder / "checkpoint.npz", state)
            self.saved = time.time()
        if stopped and not last:
            self.bar.close()
            by = self.signals[0] if self.signals else signal.SIGTERM  # which another process received
            fail(f"stopped by {by.name}; go on: python {Path(__file__).name} --resume {self.folder}", code=128 + by)
        self.began = time.time()


# ---------------------------------------------------------------------------------------------------- pictures
def save_bars(folder, title, bars):
    """achievements.png: the share of episodes that unlocked each achievement, for each {label: (22,) rates}."""
    from matplotlib.figure import Figure

    figure = Figure((8, 7), layout="constrained")
    axes = figure.add_subplot()
    for i, (label, rates) in enumerate(bars.items()):
        place = np.arange(len(ACHIEVEMENTS)) + 0.8 * (i + 0.5) / len(bars) - 0.4
        label = f"{label}: sum {np.sum(rates):.2f}"
        drawn = axes.barh(place, 100 * np.asarray(rates), 0.8 / len(bars), color=("tab:blue", "0.7")[i], label=label)
        axes.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=6)
    names = [name.replace("_", " ") for name in ACHIEVEMENTS]
    axes.set(yticks=range(22), yticklabels=names, xlim=(0, 108), title=title, xlabel="episodes that unlocked it (%)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    write_atomically(folder / "achievements.png", lambda file: figure.savefig(file, dpi=100))


# -------------------------------------------------------------------------------------------------------- main
PRESETS = {  # what a preset changes
    "paper": {"default": {}},
    "laptop": {"default": dict(total_timesteps=2_500_000, num_envs=64, reset_ratio=128, agent_width=128,
                               learning_rate=5e-4, entropy_coef=0.05, intrinsic_coef=0.1, model_learning_rate=1e-3,
                               model_epochs=2, model_minibatches=32, checkpoint_minutes=2.0)},
}  # fmt: skip


def parse_args(argv=None):
    """Explicit flags win over the preset, and with --resume over the arguments of the earlier run."""
    parse = functools.partial(tyro.cli, Args, args=argv, description=__doc__)
    args = parse()
    if not args.resume:
        sizes = PRESETS[args.preset]
        return parse(default=Args(**sizes.get(args.env.split("_")[0], sizes["default"])))
    try:
        earlier = json.loads((Path(args.resume) / "args.json").read_text()) | {"resume": args.resume}
        default = Args(**{name: tuple(x) if isinstance(x, list) else x for name, x in earlier.items()})
    except (OSError, ValueError, TypeError) as error:
        fail(f"--resume {args.resume}: it is not the folder of a run of this script ({error})")
    return parse(default=default)


def check_numbers(args, may_be_zero, rules):
    """Fail at the first broken rule {"field must ...": whether it does}; rules() can rely on the rules for numbers."""
    numbers = {"seed must be below 2^32": args.seed < 2**32}
    for name, value in vars(args).items():
        if type(value) in (int, float):
            bound = "at least" if name in may_be_zero.split() else "above"
            numbers[f"{name} must be {bound} 0 and finite"] = 0 < value < math.inf or (value == 0 and bound != "above")
        if name in ("num_envs", "batch_size"):
            numbers[f"{name} must be a multiple of the {jax.device_count()} devices"] = value % jax.device_count() == 0
    broken = lambda rules: [rule for rule, holds in rules.items() if not holds]
    if failed := broken(numbers) or broken(rules()):
        name, words = failed[0].split(" ", 1)
        fail(f"--{name.replace('_', '-')} {getattr(args, name)} {words}")


def check_args(args):
    may_be_zero = """seed checkpoint_minutes random_iterations gae_lambda entropy_coef value_coef task_reward_coef
        intrinsic_coef"""
    check_numbers(args, may_be_zero, lambda: {
        "gamma must be at most 1": args.gamma <= 1,
        "gae_lambda must be at most 1": args.gae_lambda <= 1,
        "num_minibatches must divide num_envs": args.num_envs % args.num_minibatches == 0,
        "intrinsic_coef and --task-reward-coef must not both be 0": args.intrinsic_coef or args.task_reward_coef,
        "model_minibatches must divide num_envs * num_steps": args.steps_per_iteration % args.model_minibatches == 0,
    })  # fmt: skip


def main(args):
    """Collect, learn the bonus, learn the policy. Returns the last row of metrics, with the run's folder."""
    start_jax(args)
    check_args(args)
    env = make_craftax()
    init = functools.partial(init_state, args, env)
    buffers = f"rollout buffer {4e-6 * args.steps_per_iteration * env.state_size:,.0f} MB"
    folder, state = start_run(args, init, buffers)
    _, (hidden, rollout), metrics = collect.eval_shape(args, env, state)  # shapes, and the names of metrics
    _, reward, bonus_metrics = learn_bonus.eval_shape(args, env, state, hidden, rollout)
    _, policy_metrics = learn_policy.eval_shape(args, env, state, hidden, rollout, reward)
    with Run(args, folder, state, metrics, bonus_metrics, policy_metrics) as run:
        for iteration in range(run.iteration + 1, args.num_iterations + 1):
            state, (hidden, rollout), metrics = collect(args, env, state)
            state, reward, bonus_metrics = learn_bonus(args, env, state, hidden, rollout)
            metrics |= bonus_metrics
            if iteration >= args.first_update:
                state, policy_metrics = learn_policy(args, env, state, hidden, rollout, reward)
                metrics |= policy_metrics
            row = run.log(metrics)
            if iteration in run.picture_iterations:
                bars = {"policy": achievement_rates(state.episodes), "untrained policy": state.random_rates}
                save_bars(folder, f"{Path(__file__).stem}, seed {args.seed}, {row['steps']:,} steps", bars)
            run.save(state)
    print(f"after {row['steps']:,} steps in {tqdm.format_interval(row['seconds'])}", end=": ")
    print(f"achievements {row['achievements']:.2f}, of the untrained policy {np.sum(state.random_rates):.2f}")
    print(f"picture  {folder / 'achievements.png'}\nplay     python evaluate.py {folder}")
    return row | {"folder": str(folder)}


if __name__ == "__main__":
    try:
        main(parse_args())
    except (OSError, OverflowError, MemoryError, jax.errors.JaxRuntimeError) as error:  # disk, folder or memory
        fail(f"{type(error).__name__}: {error}; the last good checkpoint, if there was one, is untouched", code=1)
