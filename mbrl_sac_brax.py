"""Model-based curiosity with SAC on the point, ant and humanoid mazes and on the Panda arm.

The prediction error of a forward model (Stadie et al. 2015), as a baseline of C-TeC (Mohamed et al., "Temporal
Representations for Exploration", ICLR 2026). A network learns to predict the next state from the state and the action.
The agent's only reward is its mean squared error: go where the dynamics are not known yet. There is no task reward;
success is the number of places visited.

One iteration:

    62 times, in every environment:                                                   # collect
        act with SAC's policy, store (s, a, done) in the replay, mark the bin of the new position as visited
    999 times, once the replay holds 1,000 steps of each environment:                 # learn
        sample a batch of transitions (s, a, s') from the replay
        reward = mean over the state of (model(s, a) - s')^2
        one Adam step of the model on the mean reward
        one SAC step of critics, actor and alpha on (s, a, reward, s')

    python mbrl_sac_brax.py --env ant_hardest_maze                     # the paper's sizes, for a GPU
    python mbrl_sac_brax.py --env point_hardest_maze --preset laptop   # minutes on two CPU cores
    python mbrl_sac_brax.py --resume runs/<folder>                     # go on from the last checkpoint

Everything but the bonus is the code of ctec_sac_brax.py. Metrics, implementation details and results:
docs/mbrl_sac_brax.md
"""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "jax==0.10.1", "flax==0.12.8", "optax==0.2.8", "brax==0.14.2", "mujoco==3.17.0", "mujoco-mjx==3.17.0",
#   "numpy==2.4.6", "tyro==1.0.16", "tqdm==4.70.1", "matplotlib==3.11.2", "wandb==0.31.0",
# ]
# ///

import contextlib
import dataclasses
import datetime
import functools
import io
import json
import math
import os
import re
import signal
import sys
import time
import warnings
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

with contextlib.redirect_stdout(io.StringIO()):  # no "Failed to import warp": an optional backend that is not used
    import brax.spring.pipeline
    import mujoco
    from brax import actuator, base
    from brax.io import mjcf
    from mujoco import mjx
warnings.filterwarnings("ignore", message="Brax System, piplines and environments are not actively")

ENVS = ("point_u_maze", "point_large_maze", "point_hardest_maze", "ant_u_maze", "ant_large_maze", "ant_hardest_maze",
        "humanoid_u_maze", "humanoid_large_maze", "arm_binpick_hard")  # fmt: skip


# --------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    env: Literal[ENVS] = "ant_hardest_maze"  # environment
    preset: Literal["paper", "laptop"] = "paper"  # published sizes, or sizes for a CPU; explicit flags win over it
    seed: int = 1  # seed of everything random
    total_timesteps: int = 500_000_000  # environment steps, all environments together (paper Table 2)
    resume: str = ""  # folder of an earlier run: go on from its checkpoint, with its arguments
    run_dir: str = "runs"  # where the folder of the run is made
    checkpoint_minutes: float = 10.0  # minutes between checkpoints; always one at the end, at Ctrl-C and at SIGTERM
    track: bool = False  # send metrics and pictures to wandb too (WANDB_MODE=offline works)
    wandb_project_name: str = "ctec"  # project of the run on wandb
    wandb_entity: str | None = None  # user or team of the run on wandb
    distributed: bool = False  # one run over all processes that srun or mpirun started

    num_envs: int = 1024  # parallel environments (paper Table 2; 256 on the humanoid)
    unroll_length: int = 62  # steps in each environment before the gradient steps of an iteration (paper Table 2)
    episode_length: int = 1000  # steps after which an episode is truncated (paper Table 2)
    replay_size: int = 10_000  # steps kept for each environment (paper Table 2)
    learning_starts: int = 1000  # steps in each environment before the first gradient step (paper Table 2)
    batch_size: int = 1024  # transitions in a gradient step (paper Table 2; 256 on the humanoid)
    multiplier: float = 1.0  # an iteration has num_envs * (episode_length - 1) * multiplier / batch_size gradient steps
    learning_rate: float = 3e-4  # Adam learning rate of SAC and of the intrinsic-reward model (paper Tables 2 to 4)
    agent_width: int = 256  # width of the two hidden layers of actor and critics (paper Table 2)
    gamma: float = 0.99  # discount of SAC (paper Table 2)
    target_rate: float = 0.005  # Polyak averaging rate of the target critics (authors' code)
    intrinsic_coef: float = 1.0  # weight of the intrinsic reward; 0: plain SAC, the model is not trained
    task_reward_coef: float = 0.0  # weight of the task reward: 1 within 0.5 m of the goal (the paper has none)
    goal_cell: tuple[int, int] | None = None  # row and column of the goal in the maze; None: the far end, g in MAZES

    # width of the two hidden layers of the forward model (the other encoders' in paper Table 4)
    model_width: int = 1024
    # divide the reward by its standard deviation in the batch: without it, errors soon vanish beside SAC's entropy
    scale_reward: bool = False

    @property
    def steps_per_iteration(self):
        return self.num_envs * self.unroll_length

    @property
    def num_iterations(self):
        return math.ceil(self.total_timesteps / self.steps_per_iteration)

    @property
    def gradient_steps(self):
        return round(self.num_envs * (self.episode_length - 1) * self.multiplier / self.batch_size)

    @property
    def first_update(self):  # the first iteration with gradient steps
        return math.ceil(self.learning_starts / self.unroll_length)


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


# two critics of one shape: their parameters and outputs have a leading axis of 2
TwinMLP = nn.vmap(MLP, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)


# ----------------------------------------------------------------------------- the method: forward-model error
def masked_mean(x, mask):
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def intrinsic_reward(params, args, batch):
    """Squared error of the predicted next state, a mean over the state: (B,), 0 without a next state."""
    pair = jnp.concatenate([batch.obs, batch.action], axis=-1)
    predicted = MLP(args.model_width, batch.obs.shape[-1]).apply(params, pair)
    return batch.has_next * jnp.mean((predicted - batch.next_obs) ** 2, axis=-1)


def unit_deviation(x, mask):
    """x divided by its standard deviation over the rows with mask 1."""
    deviation = jnp.sqrt(masked_mean((x - masked_mean(x, mask)) ** 2, mask))
    return x / (deviation + 1e-8)


def model_loss(params, args, batch):
    """The mean error."""
    loss = masked_mean(intrinsic_reward(params, args, batch), batch.has_next)
    return loss, {"model_loss": loss}


# --------------------------------------------------------------------------------------------------------- SAC
@flax.struct.dataclass
class Model:  # parameters and their optimiser's state
    params: Any
    opt_state: Any


def gradient_update(loss_fn, model, optimizer, args, *inputs):
    """One optimiser step on loss_fn(params, args, *inputs) -> (loss, aux)."""
    grads, aux = jax.grad(loss_fn, has_aux=True)(model.params, args, *inputs)
    updates, opt_state = optimizer.update(grads, model.opt_state)
    return Model(optax.apply_updates(model.params, updates), opt_state), aux


@flax.struct.dataclass
class Agent:
    actor: Model
    critic: Model
    target_critic: Any
    log_alpha: Model


def sample_action(params, args, key, obs, action_size):
    """A tanh-Gaussian action and its log-probability."""
    mean, std = jnp.split(MLP(args.agent_width, 2 * action_size).apply(params, obs), 2, axis=-1)
    std = jax.nn.softplus(std) + 1e-3
    noise = jax.random.normal(key, mean.shape)
    u = mean + noise * std
    log_prob = -0.5 * noise**2 - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi)
    log_prob -= 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))  # log-Jacobian of tanh, without cancellation
    return jnp.tanh(u), jnp.sum(log_prob, axis=-1)


def q_values(params, args, obs, action):
    return TwinMLP(args.agent_width, 1).apply(params, jnp.concatenate([obs, action], axis=-1))[..., 0]  # (2, B)


def critic_loss(params, args, batch, reward, next_value):
    target = reward + args.gamma * (1.0 - batch.terminated) * next_value
    error = q_values(params, args, batch.obs, batch.action) - target
    valid = 1.0 - batch.truncated  # the state after a truncation is not in the replay
    loss = masked_mean(jnp.mean(error**2, axis=0), valid)
    return loss, {"critic_loss": loss, "q_target": masked_mean(target, valid)}


def actor_loss(params, args, batch, critic_params, alpha, key):
    action, log_prob = sample_action(params, args, key, batch.obs, batch.action.shape[-1])
    q = jnp.min(q_values(critic_params, args, batch.obs, action), axis=0)
    loss = jnp.mean(alpha * log_prob - q)
    return loss, (log_prob, {"actor_loss": loss, "entropy": -jnp.mean(log_prob)})


def alpha_loss(log_alpha, args, log_prob, target_entropy):
    loss = jnp.exp(log_alpha) * jnp.mean(-log_prob - target_entropy)
    return loss, {"alpha_loss": loss, "alpha": jnp.exp(log_alpha)}


def update_sac(args, env, agent, batch, reward, key):
    """One step of critics, actor and alpha, in this order; then Polyak averaging of the target critics."""
    key_next, key_actor = jax.random.split(key)
    adam = optax.adam(args.learning_rate)
    alpha = jnp.exp(agent.log_alpha.params)

    # critics: soft Bellman backup with the target critics
    next_action, next_log_prob = sample_action(agent.actor.params, args, key_next, batch.next_obs, env.action_size)
    next_q = jnp.min(q_values(agent.target_critic, args, batch.next_obs, next_action), axis=0)
    next_value = next_q - alpha * next_log_prob
    critic, critic_metrics = gradient_update(critic_loss, agent.critic, adam, args, batch, reward, next_value)

    # actor, and alpha towards the target entropy
    actor_inputs = (batch, critic.params, alpha, key_actor)
    actor, (log_prob, actor_metrics) = gradient_update(actor_loss, agent.actor, adam, args, *actor_inputs)
    target_entropy = -0.5 * env.action_size
    log_alpha, alpha_metrics = gradient_update(alpha_loss, agent.log_alpha, adam, args, log_prob, target_entropy)

    target_critic = optax.incremental_update(critic.params, agent.target_critic, args.target_rate)
    reward_mean = masked_mean(reward, batch.has_next)
    reward_std = jnp.sqrt(masked_mean((reward - reward_mean) ** 2, batch.has_next))
    metrics = {"reward_mean": reward_mean, "reward_std": reward_std} | critic_metrics | actor_metrics | alpha_metrics
    return Agent(actor, critic, target_critic, log_alpha), metrics


# ------------------------------------------------------------------------------------------ replay and rollout
@flax.struct.dataclass
class Replay:  # a ring buffer: step t of every environment is in row t % T, its next observation in the next row
    obs: jax.Array  # (T, N, state_size)
    action: jax.Array  # (T, N, action_size)
    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    time: jax.Array  # () steps written so far, in each environment
    ends: Any = None  # (T, N) time of the last stored step of the row's trajectory, from index_trajectories


@flax.struct.dataclass
class Batch:
    obs: jax.Array  # (B, state_size)
    action: jax.Array  # (B, action_size)
    next_obs: jax.Array  # (B, state_size), meaningless where the step is terminated or truncated
    terminated: jax.Array  # (B,) 0.0 or 1.0
    truncated: jax.Array  # (B,) 0.0 or 1.0
    time: jax.Array  # (B,) the step's time ...
    env_index: jax.Array  # (B,) ... and its environment

    @property
    def has_next(self):  # (B,) 0.0 where the episode ended with the step: no next state, no future
        return (1.0 - self.terminated) * (1.0 - self.truncated)


def replay_insert(replay, steps):
    """Write the steps of a rollout: {field: (unroll_length, N, ...)}."""
    length = len(steps["obs"])
    rows = (replay.time + jnp.arange(length)) % len(replay.obs)
    written = {name: getattr(replay, name).at[rows].set(x) for name, x in steps.items()}
    return replay.replace(**written, time=replay.time + length)


def sample_batch(key, args, replay):
    """Uniform transitions. The newest step is left out: it has no next one yet."""
    key_t, key_env = jax.random.split(key)
    oldest = jnp.maximum(replay.time - len(replay.obs), 0)
    t = jax.random.randint(key_t, (args.batch_size,), oldest, replay.time - 1)
    n = jax.random.randint(key_env, (args.batch_size,), 0, args.num_envs)
    row = (t % len(replay.obs), n)
    next_row = ((t + 1) % len(replay.obs), n)
    terminated, truncated = (flag[row].astype(jnp.float32) for flag in (replay.terminated, replay.truncated))
    return Batch(replay.obs[row], replay.action[row], replay.obs[next_row], terminated, truncated, time=t, env_index=n)


# ---------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class RunState:
    key: jax.Array  # of the next iteration
    key_learn: jax.Array  # of this iteration's gradient steps
    iteration: jax.Array
    env: "EnvState"  # (N, ...)
    episode_step: jax.Array  # (N,)
    coverage: jax.Array  # (bins of the grid,) environment step of the first visit; NEVER if there was none
    replay: Replay
    agent: Agent
    model: Model


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def collect(args, env, state):
    """`unroll_length` steps in every environment, into the replay and the coverage. Each environment's start state is
    drawn once an iteration."""
    key, key_collect, key_learn = jax.random.split(state.key, 3)
    key_start, key_actions = jax.random.split(key_collect)
    starts = jax.vmap(env.reset)(jax.random.split(key_start, args.num_envs))

    def step(carry, key):
        now, episode_step = carry
        action, _ = sample_action(state.agent.actor.params, args, key, now.obs, env.action_size)
        carry, (terminated, truncated, position, length) = step_envs(args, env, starts, now, episode_step, action)
        return carry, (dict(obs=now.obs, action=action, terminated=terminated, truncated=truncated), position, length)

    keys = jax.random.split(key_actions, args.unroll_length)
    (env_state, episode_step), (steps, position, length) = jax.lax.scan(step, (state.env, state.episode_step), keys)
    replay = replay_insert(state.replay, steps)
    coverage = mark_visited(args, state.coverage, state.iteration + 1, position)
    state = state.replace(key=key, key_learn=key_learn, iteration=state.iteration + 1, env=env_state)
    state = state.replace(episode_step=episode_step, replay=replay, coverage=coverage)
    metrics = coverage_metrics(coverage, length) | {"replay_entropy": replay_entropy(env, replay)}
    metrics["success"] = jnp.mean(at_goal(args, env, position))
    return shard_state(state), metrics


def update(args, env, replay, agent, model, key):
    """One gradient step of everything. The reward comes from the model as it is before its step."""
    key_batch, key_sac = jax.random.split(key)
    batch = shard(sample_batch(key_batch, args, replay), "envs")
    reward = args.task_reward_coef * at_goal(args, env, batch.obs)
    metrics = {}
    if args.intrinsic_coef:
        bonus = intrinsic_reward(model.params, args, batch)
        if args.scale_reward:
            bonus = unit_deviation(bonus, batch.has_next)
        reward += args.intrinsic_coef * bonus
        model, metrics = gradient_update(model_loss, model, optax.adam(args.learning_rate), args, batch)
    agent, sac_metrics = update_sac(args, env, agent, batch, reward, key_sac)
    return (agent, model), metrics | sac_metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def learn(args, env, state):
    """`gradient_steps` gradient steps."""
    step = lambda models, key: update(args, env, state.replay, *models, key)
    keys = jax.random.split(state.key_learn, args.gradient_steps)
    (agent, model), metrics = jax.lax.scan(step, (state.agent, state.model), keys)
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics["parameter_norm"] = optax.global_norm((model.params, agent.actor.params, agent.critic.params))
    return shard_state(state.replace(agent=agent, model=model)), metrics


# ----------------------------------------------------------------------------------------------- initial state
def init_agent(args, env, key):
    key_actor, key_critic = jax.random.split(key)
    actor = MLP(args.agent_width, 2 * env.action_size).init(key_actor, jnp.zeros(env.state_size))
    critic = TwinMLP(args.agent_width, 1).init(key_critic, jnp.zeros(env.state_size + env.action_size))
    with_adam = lambda params: Model(params, optax.adam(args.learning_rate).init(params))
    return Agent(with_adam(actor), with_adam(critic), critic, with_adam(jnp.zeros(())))


def init_replay(args, env):
    zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((args.replay_size, args.num_envs, *shape), dtype)
    flags = dict(terminated=zeros(dtype=bool), truncated=zeros(dtype=bool))
    return Replay(obs=zeros(env.state_size), action=zeros(env.action_size), **flags, time=jnp.int32(0))


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env, key_agent, key_model = jax.random.split(jax.random.PRNGKey(args.seed), 4)
    params = MLP(args.model_width, env.state_size).init(key_model, jnp.zeros(env.state_size + env.action_size))
    return shard_state(RunState(
        key=key, key_learn=key, iteration=jnp.int32(0),
        env=jax.vmap(env.reset)(jax.random.split(key_env, args.num_envs)),
        episode_step=jnp.zeros(args.num_envs, jnp.int32),
        coverage=init_coverage(env),
        replay=init_replay(args, env),
        agent=init_agent(args, env, key_agent),
        model=Model(params, optax.adam(args.learning_rate).init(params)),
    ))  # fmt: skip


# ==================================================================================================== appendix
# What a reader of the method does not need: devices, coverage, environments, the run's folder, pictures, and main.


# ----------------------------------------------------------------------------------------------------- devices
SPLIT = {"env": ("envs",), "episode_step": ("envs",), "replay": (None, "envs")}  # of RunState; others are replicated


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


# ---------------------------------------------------------------------------------------------------- coverage
BIN = 0.5  # metres; coverage is the number of bins of this size that were visited
GRID = (256, 256, 128)  # bins along x, y and z; then the grid repeats: places 128 m apart (64 m in z) share a bin
NEVER = np.int32(2**31 - 1)


def init_coverage(env):
    return jnp.full(math.prod(GRID[: env.position_size]), NEVER)


def bin_slot(position):
    """(...) index in the grid of the bin floor(position / BIN); one past the end if a position is not finite."""
    size = GRID[: position.shape[-1]]
    place = jnp.clip(jnp.floor(position / BIN), -(2**30), 2**30).astype(jnp.int32)
    slot = jnp.ravel_multi_index(tuple(jnp.moveaxis(place, -1, 0)), size, mode="wrap")
    return jnp.where(jnp.all(jnp.isfinite(position), axis=-1), slot, math.prod(size))


def mark_visited(args, coverage, iteration, position):
    """Add the positions (T, N, position_size) of an iteration's steps; those that are not finite are dropped."""
    steps = ((iteration - 1) * len(position) + 1 + jnp.arange(len(position))) * args.num_envs
    return coverage.at[bin_slot(position)].min(steps[:, None])


def at_goal(args, env, obs):
    """(...) 1.0 where a position is within 0.5 m of the centre of the goal's cell; the arm has no goal."""
    if not env.free_cells:
        return jnp.zeros(obs.shape[:-1])
    goal = np.array(args.goal_cell or env.far_cell) * env.cell
    return (jnp.sum((obs[..., :2] - goal) ** 2, axis=-1) < 0.5**2).astype(jnp.float32)


def coverage_metrics(coverage, length):
    """Bins so far, and the mean length of the episodes that ended (length > 0); nan if none did."""
    mean = jnp.sum(length) / jnp.sum(length > 0)
    return {"coverage": jnp.sum(coverage < NEVER), "episode_length": mean}


def replay_entropy(env, replay):
    """Entropy (nats) of the visited bins in the replay: when it falls, the agents collapse to one region."""
    written = jnp.arange(len(replay.obs))[:, None] < replay.time
    slot = bin_slot(replay.obs[..., : env.position_size])
    counts = jnp.zeros_like(init_coverage(env)).at[slot].add(written)
    p = counts / jnp.sum(counts)
    return -jnp.sum(p * jnp.log(jnp.maximum(p, 1e-20)))


# ------------------------------------------------------------------------------------------------ environments
MAZES = {  # 1 wall, r start, g far end, 0 free; cell (i, j) is centred at x = i * cell, y = j * cell
    "u": "11111 1r001 11101 1g001 11111",
    "large": "11111111 1r011001 10010001 11000111 10010001 10100101 10001g01 11111111",
    "hardest": "111111111111 1r0001000001 101101010101 1000000100g1 101111011101 100101000001 110101010111 "
               "100100010001 111111111111",
}  # fmt: skip


@flax.struct.dataclass
class EnvState:
    physics: Any  # the point's (x, y, vx, vy), or a Brax pipeline state
    obs: jax.Array  # (state_size,) what the policy and the encoders see; the first position_size are the position
    terminated: jax.Array  # () bool: unhealthy


class Maze:  # what all mazes share
    def __init__(self, maze):
        cells = np.array([list(row) for row in MAZES[maze].split()])
        self.is_wall = cells == "1"
        self.start = np.argwhere(cells == "r")[0] * self.cell
        self.walls = np.argwhere(cells == "1") * self.cell  # (walls, 2) centres
        self.targets = np.argwhere((cells == "0") | (cells == "g")) * self.cell  # where a humanoid's target can be
        self.free_cells = np.argwhere(cells != "1").tolist()
        self.far_cell = tuple(np.argwhere(cells == "g")[0])
        self.outlines = [(*(centre - self.cell / 2), self.cell, self.cell) for centre in self.walls]
        flat = self.position_size == 2
        self.free_bins = len(self.free_cells) * round(self.cell / BIN) ** 2 if flat else None  # unknown in 3-D


class PointMaze(Maze):
    """A disc that is pushed around, in closed form: over a million steps a second on one core."""

    state_size = 4
    action_size = 2
    position_size = 2
    cell = 4.0
    radius = 0.4

    def reset(self, key):
        position = self.start + jax.random.uniform(key, (2,), minval=-0.1, maxval=0.1)
        physics = jnp.concatenate([position, jnp.zeros(2)])
        return EnvState(physics, physics, jnp.zeros((), bool))

    def blocked(self, p):
        """Does the disc at p overlap a wall? It reaches no further than the cells under its square's corners."""
        corners = p + self.radius * np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)], np.float32)
        cells = jnp.round(corners / self.cell).astype(jnp.int32)  # (4, 2)
        nearest = jnp.clip(p, (cells - 0.5) * self.cell, (cells + 0.5) * self.cell)
        touches = jnp.sum((p - nearest) ** 2, axis=-1) < self.radius**2
        return jnp.any(touches & jnp.asarray(self.is_wall)[cells[:, 0], cells[:, 1]])

    def step(self, state, action):
        p = state.physics[:2]
        v = 0.9 * state.physics[2:] + 0.01 * jnp.clip(action, -1.0, 1.0)
        for axis in np.eye(2, dtype=np.float32):  # a wall stops the component of v that meets it
            v = jnp.where(self.blocked(p + v * axis), v * (1 - axis), v)
            p = p + v * axis
        physics = jnp.concatenate([p, v])
        return EnvState(physics, physics, jnp.zeros((), bool))


class BraxMaze(Maze):
    """A robot that comes with Brax, among wall boxes. Each of its spheres and capsules can touch only the 2 x 2 cells
    around its centre, so it has four boxes of its own, which follow it: a larger maze costs no more."""

    def __init__(self, maze):
        super().__init__(maze)
        self.box = np.array([self.cell / 2, self.cell / 2, self.cell / 4])  # half the size of a wall
        self.sys = self.build(following=True)
        affinity = self.sys.geom_conaffinity
        solid = np.flatnonzero((affinity > 0) & (self.sys.geom_bodyid > 0))
        self.solid = solid[np.argsort(affinity[solid])]  # the geoms that meet walls, in the order of their boxes
        self.action_size = self.sys.act_size()

    def build(self, following):
        """The robot with boxes that follow it, or among all walls of the maze."""
        spec = mujoco.MjSpec.from_file(str(Path(brax.__file__).parent / "envs/assets" / self.xml))
        spec.option.timestep = self.timestep
        self.edit(spec)
        if not following:
            boxes = [{"pos": (x, y, self.box[2]), "contype": 1, "conaffinity": 1} for x, y in self.walls]
        else:
            boxes = []
            solid = [geom for geom in spec.geoms if (geom.contype or geom.conaffinity) and geom.name != "floor"]
            for i, geom in enumerate(solid):
                geom.conaffinity |= 2 << i  # its own bit: its boxes collide with nothing else
                boxes += 4 * [{"contype": 2 << i, "conaffinity": 0}]
        for box in boxes:
            spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=self.box, **box)
        spec.compile()
        # MJX's broad phase: only the nearest pairs of each kind (by bounding spheres) are collided, only the deepest
        # points are kept. The two numbers must come first: MJX 3.17 looks for the i-th one at numeric_data[i].
        broad_phase = "".join(f'<numeric name="max_{k}" data="{v}"/>' for k, v in self.broad_phase.items())
        return mjcf.loads(spec.to_xml().replace("<custom>", "<custom>" + broad_phase, 1))  # fuses jointless bodies

    def with_walls(self, x):
        """The system, with each box on a wall that its geom may touch now, given the links' places x; or, if there is
        none, far below the floor."""
        geom = base.Transform(pos=self.sys.geom_pos[self.solid], rot=self.sys.geom_quat[self.solid])
        geom = x.take(self.sys.geom_bodyid[self.solid] - 1).vmap().do(geom)
        radius, half_length, _ = self.sys.geom_size[self.solid].T
        tip = geom.vmap().do(base.Transform.create(pos=half_length[:, None] * np.array([0.0, 0.0, 1.0])))
        reach = radius[:, None] + jnp.abs(tip.pos - geom.pos)  # (geoms, 3) half the sizes of their bounding boxes
        corner = jnp.floor(geom.pos[:, None, :2] / self.cell).astype(jnp.int32)
        cells = corner + np.array([(0, 0), (0, 1), (1, 0), (1, 1)])  # (geoms, 4, 2)
        inside = jnp.all((cells >= 0) & (cells < np.array(self.is_wall.shape)), axis=-1)  # a humanoid can climb out
        wall = inside & jnp.asarray(self.is_wall)[cells[..., 0], cells[..., 1]]
        boxes = jnp.pad(cells * self.cell, ((0, 0), (0, 0), (0, 1)), constant_values=self.box[2])
        near = jnp.all(jnp.abs(boxes - geom.pos[:, None]) < self.box + reach[:, None], axis=-1)
        boxes = jnp.where((wall & near)[..., None], boxes, -100.0).reshape(-1, 3)
        geom_pos = self.sys.geom_pos.at[1 : 1 + len(boxes)].set(boxes)  # the floor is the first geom
        return self.sys.replace(geom_pos=geom_pos)

    def from_q(self, q, qd):
        return self.state(brax.spring.pipeline.init(self.sys, q, qd), jnp.zeros(self.action_size))

    def step(self, state, action):
        control = action * self.action_scale
        substep = lambda _, physics: brax.spring.pipeline.step(self.with_walls(physics.x), physics, control)
        return self.state(jax.lax.fori_loop(0, 10, substep, state.physics), control)

    def state(self, physics, control):
        z = physics.x.pos[0, 2]
        low, high = self.healthy
        return EnvState(physics, self.observe(physics, control), (z < low) | (z > high))


class AntMaze(BraxMaze):
    xml = "ant.xml"
    state_size = 29
    position_size = 2
    cell = 4.0
    timestep = 0.005
    healthy = (0.2, 1.0)
    action_scale = 1.0
    broad_phase = {"geom_pairs": 5, "contact_points": 12}

    def edit(self, spec):
        for geom in spec.geoms:  # these collide with the walls
            if geom.name.startswith(("torso", "aux")) or "foot" in geom.name:
                geom.conaffinity = 1

    def reset(self, key):
        key_q, key_qd = jax.random.split(key)
        q = self.sys.init_q + jax.random.uniform(key_q, (15,), minval=-0.1, maxval=0.1)
        return self.from_q(q.at[:2].set(self.start), 0.1 * jax.random.normal(key_qd, (14,)))

    def observe(self, physics, control):
        return jnp.concatenate([physics.q, physics.qd])


class HumanoidMaze(BraxMaze):
    xml = "humanoid.xml"
    state_size = 268
    position_size = 3
    cell = 2.0
    timestep = 0.0015
    healthy = (1.0, 2.0)
    action_scale = 0.4
    broad_phase = {"geom_pairs": 10, "contact_points": 12}

    def edit(self, spec):
        for geom in spec.geoms:  # every geom collides with floor and walls, none with another of the robot
            geom.contype = int(geom.name != "floor")
        for motor, gear in zip(spec.actuators, [350] * 11 + [100] * 6):
            motor.gear[0] = gear
        # the target of the authors' maze task, at a random free cell: observed, but not the goal of task_reward_coef
        target = spec.worldbody.add_body(name="target", pos=(0, 0, 1.25))
        for axis in ((1, 0, 0), (0, 1, 0)):
            target.add_joint(type=mujoco.mjtJoint.mjJNT_SLIDE, axis=axis, limited=0)
        target.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=(0.5, 0, 0), mass=1, contype=0, conaffinity=0)

    def reset(self, key):
        target = jax.random.choice(key, jnp.asarray(self.targets, jnp.float32))
        return self.from_q(self.sys.init_q.at[:2].set(self.start).at[-2:].set(target), jnp.zeros(self.sys.qd_size()))

    def observe(self, physics, control):
        x = physics.x
        # the spring backend works with unit inertias (spring_inertia_scale 1 in humanoid.xml)
        inertia = self.sys.link.inertia
        inertia = inertia.replace(i=jnp.broadcast_to(jnp.eye(3), inertia.i.shape))
        mass = inertia.mass[:, None]
        x_i = x.vmap().do(inertia.transform)  # centres of mass of the links
        com = jnp.sum(mass * x_i.pos, axis=0) / jnp.sum(mass)
        about_com = x_i.replace(pos=x_i.pos - com).vmap().do(inertia).i.reshape(-1, 9)
        velocity = base.Transform.create(pos=x_i.pos - x.pos).vmap().do(physics.xd)
        velocities = jnp.hstack([velocity.vel * mass / jnp.sum(mass), velocity.ang])
        torque = actuator.to_tau(self.sys, control, physics.q, physics.qd)
        inertias = jnp.hstack([about_com, mass])
        return jnp.concatenate([physics.q, physics.qd, inertias.ravel(), velocities.ravel(), torque])


# rows are links 1-7: position in the parent (3), quarter turns about x, mass, centre of mass (3), inertia xx, yy, zz,
# xy, xz, yz, and the joint's range
PANDA = np.array("""
    0      0    .333  0 4.970684 .003875 .002081 -.04762 .70337 .70661 .009117 -.000139 .006772 .019169 -2.8973 2.8973
    0      0    0    -1 .646926 -.003141 -.02872 .003495 .007962 .02811 .025995 -.003925 .010254 .000704 -1.7628 1.7628
    0     -.316 0  1 3.228604 .027518 .039252 -.066502 .037242 .036155 .01083 -.004761 -.011396 -.012805 -2.8973 2.8973
    .0825  0    0  1 3.587895 -.05317 .104419 .027454 .025853 .019552 .028323 .007796 -.001332 .008641 -3.0718 -.0698
   -.0825  .384 0 -1 1.225946 -.011953 .041065 -.038437 .035549 .029474 .008627 -.002117 -.004037 .000229 -2.8973 2.8973
    0      0    0  1 1.666555 .060149 -.014117 -.010517 .001964 .004354 .005433 .000109 -.001158 .000341 -.0175 3.7525
    .088   0    0  1 .735522 .010517 -.004252 .061597 .012516 .010027 .004815 -.000428 -.001196 -.000741 -2.8973 2.8973
""".split(), float).reshape(7, 16)  # fmt: skip


class ArmBinpick:
    """A Franka Panda, and a cube in the blue one of two bins. Primitive geoms, which collide in listed pairs only."""

    state_size = 18
    action_size = 5
    position_size = 3
    free_bins = None  # unknown in 3-D
    start = np.array([-0.3, 0.6])
    free_cells = []  # it has no maze
    default_q = np.array([1.571, 0.742, 0, -1.571, 0, 3.054, 1.449, 0.04, 0.04])
    sides = np.array([(-195, -195, 390, 10), (-195, 185, 390, 10), (185, -185, 10, 370), (-195, -185, 10, 370)]) / 1000
    outlines = [*(sides + (-0.3, 0.6, 0, 0)), *(sides + (0.3, 0.6, 0, 0))]  # of the blue and the red bin

    def __init__(self):
        text = lambda numbers: " ".join(map(str, numbers))
        bins = "".join(f"""<geom name="bin{i}" type="box" pos="{x + width / 2} {y + depth / 2} .033"
            size="{width / 2} {depth / 2} .033"/>"""
            for i, (x, y, width, depth) in enumerate(self.outlines))  # fmt: skip
        links = "".join(f"""<body pos="{text(row[:3])}" quat="1 {row[3]} 0 0">
            <inertial mass="{row[4]}" pos="{text(row[5:8])}" fullinertia="{text(row[8:14])}"/>
            <joint name="joint{i}" axis="0 0 1" range="{text(row[14:])}"/>"""
            for i, row in enumerate(PANDA))  # fmt: skip
        # the hand is rigid on link 7, turned by 45 degrees, and without mass, as the authors' code loads it
        c = np.cos(np.pi / 8)
        s = np.sin(np.pi / 8)
        fingers = "".join(f"""<body pos="0 0 .1654" quat="{quat}">
            <inertial mass=".015" pos="0 0 0" diaginertia="2.375e-6 2.375e-6 7.5e-7"/>
            <joint name="joint{i}" type="slide" axis="0 1 0" range="0 .05" damping="5" armature=".1"/>
            <geom name="finger{i}" type="box" size=".015 .005 .04" pos="0 .0055 .035"/>
            </body>"""
            for i, quat in ((7, f"{c} 0 0 {-s}"), (8, f"{s} 0 0 {c}")))  # fmt: skip
        gains = [(4500, 4500, 87)] * 2 + [(2000, 3500, 87)] * 2 + [(1000, 2000, 12)] * 3 + [(0.09804, 500, 500)] * 2
        motors = "".join(f"""<general joint="joint{i}" gainprm="{gain}" biastype="affine" forcerange="{-limit} {limit}"
            biasprm="0 {-stiffness} {-stiffness / 10}" ctrlrange="{text([*PANDA[:, 14:], (0, 255), (0, 255)][i])}"/>"""
            for i, (gain, stiffness, limit) in enumerate(gains))  # fmt: skip
        fixed = ["table", *(f"bin{i}" for i in range(8))]
        pairs = [(name, other) for name in ("hand", "finger7", "finger8", "cube") for other in fixed]
        pairs += [("hand", "cube"), ("finger7", "finger8"), ("finger7", "cube"), ("finger8", "cube")]
        self.sys = mjcf.load_model(mujoco.MjModel.from_xml_string(f"""<mujoco><compiler angle="radian"/>
            <option timestep=".002" iterations="6" ls_iterations="12" integrator="implicitfast" impratio="10"/>
            <custom><numeric name="max_geom_pairs" data="10"/><numeric name="max_contact_points" data="24"/></custom>
            <default><geom contype="0" conaffinity="0"/></default>
            <worldbody>
                <body pos="-.3 .6 .07"><freejoint/><geom name="cube" type="box" size=".03 .03 .03"/></body>
                <geom name="table" type="plane" pos="0 .2 0" size="2.8 2.4 .1"/> {bins} {links}
                <geom name="hand" type="capsule" size=".04 .06" pos="0 0 .142" quat="{c} {c} {-s} {-s}"/>
                {fingers} {"</body>" * len(PANDA)}
            </worldbody>
            <contact>{"".join(f'<pair geom1="{a}" geom2="{b}"/>' for a, b in pairs)}</contact>
            <equality><joint joint1="joint7" joint2="joint8" solref=".005 1" solimp=".95 .99 .001 .5 2"/></equality>
            <actuator>{motors}</actuator></mujoco>"""))  # fmt: skip

    def from_q(self, q, qd):
        return self.state(mjx.forward(self.sys, mjx.make_data(self.sys).replace(qpos=q, qvel=qd)))

    def reset(self, key):
        cube = self.start + jax.random.uniform(key, (2,), minval=-0.15, maxval=0.15)
        return self.from_q(jnp.concatenate([cube, jnp.array([0.07, 1, 0, 0, 0, *self.default_q])]), jnp.zeros(15))

    def step(self, state, action):
        """Controls of joints 1, 2, 4, 6 (4, 6 settle at 4/7, 1/2 of them); a last action > 0 closes the gripper."""
        low = np.array([0.3491, 0, -3.0718, 2.3562])
        high = np.array([2.7925, 1.48353, -0.0698, 3.7525])
        j1, j2, j4, j6 = low + (action[:4] + 1) / 2 * (high - low)
        grip = jnp.where(action[4] > 0, 0.0, 255.0)
        data = state.physics.replace(ctrl=jnp.stack([j1, j2, 0.0, j4, 0.0, j6, 1.4487, grip, grip]))
        return self.state(jax.lax.fori_loop(0, 25, lambda _, data: mjx.step(self.sys, data), data))

    def state(self, data):
        hand = 8  # body of link 7, which carries the hand; 9 and 10 are the fingers
        offset = data.xpos[hand] - data.subtree_com[2]
        velocity = data.cvel[hand, 3:] + jnp.cross(data.cvel[hand, :3], offset)
        force = 0.1 * jnp.sum(data.qfrc_actuator[6:13]) / 19  # of the arm's joints, as in the authors' code
        gripper = jnp.stack([jnp.linalg.norm(data.xpos[9] - data.xpos[10]), force])
        obs = jnp.concatenate([data.qpos[:3], data.qpos[7:14], data.xpos[hand], velocity, gripper])  # the cube first
        return EnvState(data, obs, jnp.zeros((), bool))


@functools.cache
def make_env(name):
    robot, maze = name.split("_")[:2]
    mazes = {"point": PointMaze, "ant": AntMaze, "humanoid": HumanoidMaze}
    return ArmBinpick() if robot == "arm" else mazes[robot](maze)


def step_envs(args, env, starts, now, episode_step, action):
    """One step in every environment; where an episode ends, it restarts from its row of starts. Returns the scan carry,
    and whether a step terminated or truncated, the position before any reset, and the length of an ended episode."""
    with jax.default_matmul_precision("highest"):  # no TF32 in the physics
        after = jax.vmap(env.step)(now, action)
    terminated = after.terminated | ~jnp.all(jnp.isfinite(after.obs), axis=-1)  # physics that blew up ends too
    truncated = (episode_step + 1 >= args.episode_length) & ~terminated
    done = terminated | truncated
    restart = lambda start, x: jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), start, x)
    carry = (jax.tree.map(restart, starts, after), jnp.where(done, 0, episode_step + 1))
    length = jnp.where(done, episode_step + 1, 0)
    return carry, (terminated, truncated, after.obs[..., : env.position_size], length)


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
def draw_places(axes, env, title, place=(), values=(), **style):
    """Walls, start, and the values (n,) of the bins at place (n, 2)."""
    for x, y, width, height in env.outlines:
        axes.fill([x, x + width, x + width, x], [y, y, y + height, y + height], color="0.4")
    axes.plot(*env.start, "o", color="red", zorder=3)
    axes.set(title=title, xlabel="x (m)", ylabel="y (m)", aspect="equal")
    walls = axes.dataLim.get_points() / BIN
    place = np.reshape(place, (-1, 2)).astype(int)
    low = np.floor(np.vstack([place, walls]).min(axis=0)).astype(int)
    high = np.ceil(np.vstack([place + 1, walls]).max(axis=0)).astype(int)
    image = np.full(high - low, np.nan)
    image[tuple((place - low).T)] = values
    extent = BIN * np.array([low[0], high[0], low[1], high[1]])
    # over the walls (a humanoid can stand on them), and translucent: the walls stay visible
    return axes.imshow(image.T, origin="lower", extent=extent, zorder=2, alpha=0.8, **style)


def save_coverage(args, env, folder, coverage, steps):
    """coverage.npz: the bins by the step of their first visit; coverage.png: the same from above."""
    from matplotlib.figure import Figure

    coverage = jax.device_get(coverage)
    visited = np.argsort(coverage, kind="stable")[: np.sum(coverage < NEVER)]
    first_visit = coverage[visited]
    size = np.array(GRID[: env.position_size])
    place = (np.column_stack(np.unravel_index(visited, size)) + size // 2) % size - size // 2  # the copy nearest to 0
    write_atomically(folder / "coverage.npz", lambda file: np.savez(file, first_visit=first_visit, place=place))
    figure = Figure((7, 6), layout="constrained")
    axes = figure.add_subplot()
    title = f"{args.env}: {len(visited):,} bins in {steps:,} steps"
    # from late to early: from above one sees the bin that was reached first
    image = draw_places(axes, env, title, place[::-1, :2], first_visit[::-1], cmap="viridis_r", vmin=0, vmax=steps)
    figure.colorbar(image, ax=axes, shrink=0.7, label="environment step of the first visit")
    write_atomically(folder / "coverage.png", lambda file: figure.savefig(file, dpi=100))


# -------------------------------------------------------------------------------------------------------- main
PRESETS = {  # what a preset changes: for one robot, or for all others
    "paper": {"humanoid": dict(num_envs=256, batch_size=256), "default": {}},
    "laptop": {"humanoid": dict(total_timesteps=4_000_000, num_envs=256, unroll_length=124, batch_size=256,
                                model_width=256),
               "default": dict(total_timesteps=8_000_000, num_envs=128, episode_length=1001, replay_size=2000,
                               learning_starts=500, batch_size=256, multiplier=0.016, model_width=256,
                               scale_reward=True, checkpoint_minutes=2.0)},
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


def check_args(args, env):
    may_be_zero = "seed checkpoint_minutes intrinsic_coef task_reward_coef"
    rows = max(args.unroll_length, args.learning_starts)
    check_numbers(args, may_be_zero, lambda: {
        "gamma must be at most 1": args.gamma <= 1,
        "total_timesteps must be below 2^31": args.num_iterations * args.steps_per_iteration < 2**31,
        "target_rate must be at most 1": args.target_rate <= 1, "batch_size must be at least 2": args.batch_size >= 2,
        "learning_starts must leave an iteration to learn in": args.first_update <= args.num_iterations,
        "multiplier must leave a gradient step for an iteration": args.gradient_steps >= 1,
        "learning_starts must be at least 2 if unroll_length is 1": rows >= 2,
        "replay_size must be above unroll_length and learning_starts": rows < args.replay_size,
        "goal_cell must be a free cell of the maze": args.goal_cell is None or list(args.goal_cell) in env.free_cells,
        "task_reward_coef must be 0 where there is no maze": args.task_reward_coef == 0 or env.free_cells,
    })  # fmt: skip


def main(args):
    """Collect and learn in turn. Returns the last row of metrics, with the run's folder."""
    start_jax(args)
    env = make_env(args.env)
    check_args(args, env)
    init = functools.partial(init_state, args, env)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(init).replay)]
    folder, state = start_run(args, init, f"replay buffer {sum(sizes) / 1e6:,.0f} MB")
    metric_names = [stage.eval_shape(args, env, state)[-1] for stage in (collect, learn)]
    with Run(args, folder, state, *metric_names) as run:
        for iteration in range(run.iteration + 1, args.num_iterations + 1):
            state, metrics = collect(args, env, state)
            if iteration >= args.first_update:
                state, learn_metrics = learn(args, env, state)
                metrics |= learn_metrics
            row = run.log(metrics)
            if iteration in run.picture_iterations:
                save_coverage(args, env, folder, state.coverage, row["steps"])
            run.save(state)
    bins = f"{row['coverage']:,.0f} of {env.free_bins:,} bins" if env.free_bins else f"{row['coverage']:,.0f} bins"
    print(f"coverage {bins} after {row['steps']:,} steps in {tqdm.format_interval(row['seconds'])}")
    print(f"picture  {folder / 'coverage.png'}\nplay     python evaluate.py {folder}")
    return row | {"folder": str(folder)}


if __name__ == "__main__":
    try:
        main(parse_args())
    except (OSError, OverflowError, MemoryError, jax.errors.JaxRuntimeError) as error:  # disk, folder or memory
        fail(f"{type(error).__name__}: {error}; the last good checkpoint, if there was one, is untouched", code=1)
