"""ETD and C-TeC with the same PPO, on the point, ant and humanoid mazes, on the Panda arm and on Craftax-Classic.

ETD (Jiang et al., "Episodic Novelty Through Temporal Distance", ICLR 2025) learns by InfoNCE how many steps lie between
two states, as a quasimetric d(x, y), and rewards the distance of the new state from the nearest one of its episode: go
where you have not been in this episode. C-TeC (Mohamed et al., "Temporal Representations for Exploration", ICLR 2026)
rewards |phi(s, a) / tau - psi(s_f)| to a sampled future: go where your future is hard to predict. Both have one PPO and
no task reward; success is the number of places visited, or of achievements unlocked.

One iteration:

    512 times, in every environment:                                                  # collect
        act with PPO's policy, store (s, a, log-probability, value, done), mark the bin of the new position as visited
    ETD:   reward = min over the episode's states s_k before s' of d(s_k, s')         # learn
    C-TeC: reward = |phi(s, a) / tau - psi(s_f)| with a sampled future s_f
    standardise the reward by its running mean and deviation, without the steps with which episodes ended
    advantages of the reward, normalised over the rollout
    4 times, in minibatches of 1024 shuffled steps:
        one Adam step of the encoders on InfoNCE between states (C-TeC: state-actions) and sampled futures
        one Adam step of PPO on the advantages

    python etd_ppo.py --env ant_hardest_maze                                   # for a GPU
    python etd_ppo.py --env point_hardest_maze --preset laptop                 # minutes on two CPU cores
    python etd_ppo.py --env craftax_classic --preset laptop --bonus ctec
    python etd_ppo.py --resume runs/<folder>                                   # go on from the last checkpoint

Metrics, implementation details and results: docs/etd_ppo.md
"""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "jax==0.10.1", "flax==0.12.8", "optax==0.2.8", "brax==0.14.2", "mujoco==3.17.0", "mujoco-mjx==3.17.0",
#   "craftax==1.6.1", "numpy==2.4.6", "tyro==1.0.16", "tqdm==4.70.1", "matplotlib==3.11.2", "wandb==0.31.0",
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
    env: Literal[(*ENVS, "craftax_classic")] = "ant_hardest_maze"  # environment
    bonus: Literal["etd", "ctec"] = "etd"  # the intrinsic reward, which is the only one
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
    episode_window: int = 1024  # number of latest finished episodes over which the achievement rates are taken

    num_envs: int = 256  # parallel environments (the paper's on the humanoid; ETD: 16)
    num_steps: int = 512  # steps in each environment before the update of an iteration; futures end with them (ETD)
    episode_length: int = 1000  # steps after which an episode is truncated (paper Table 2; 10,000 in Craftax)
    batch_size: int = 1024  # transitions in a gradient step (paper Table 2; 256 on the humanoid)
    update_epochs: int = 4  # passes over a rollout, of PPO and of the encoders (ETD)
    learning_rate: float = 3e-4  # Adam learning rate of PPO (ETD)
    encoder_learning_rate: float = 1e-4  # Adam learning rate of the encoders (ETD's launch script)
    adam_eps: float = 1e-5  # epsilon of Adam, PPO and the intrinsic-reward model (Craftax baselines)
    max_grad_norm: float = 0.5  # global-norm gradient clipping, PPO and the intrinsic-reward model (ETD)
    agent_width: int = 256  # width of the two hidden layers of actor and critic (paper Table 2)
    gamma: float = 0.99  # discount of PPO (ETD)
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation (ETD)
    clip: float = 0.2  # PPO's clipping of the probability ratio (paper Table 5)
    entropy_coef: float = 0.01  # weight of the entropy bonus (paper Table 5)
    value_coef: float = 0.5  # weight of the value loss (Craftax baselines)
    reward_momentum: float = 0.9  # momentum of the running mean and deviation that standardise the reward (ETD)

    encoder_width: int = 1024  # width of the hidden layers of the intrinsic-reward model (paper Tables 3 and 4)
    representation_size: int = 64  # size of a representation (paper Tables 3 and 4)
    gamma_cl: float = 0.99  # discount of the future-state distribution, of C-TeC too, in Craftax too (ETD)
    memory: Literal["embeddings", "observations"] = "embeddings"  # of ETD: as first encoded (stale); exact, slower
    memory_size: int = 1000  # states of an episode that ETD keeps; of a longer one the latest
    similarity: Literal["l1", "l2"] = "l1"  # C-TeC's: minus this distance (paper: L1 on the robots, L2 in Craftax)
    reward_features: Literal["batch", "unit"] = "batch"  # reward: normalise features (code) or rows (text)
    temperature: Literal["phi", "logits"] = "phi"  # tau divides phi in loss and reward (code), or the logits (text)
    logsumexp_penalty: float = 0.0  # weight of mean(logsumexp^2) in C-TeC's loss (authors' launch script; Table 3: 0.1)

    @property
    def steps_per_iteration(self):
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self):
        return math.ceil(self.total_timesteps / self.steps_per_iteration)


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


# ----------------------------------------------------------------------------------- the method: ETD and C-TeC
@flax.struct.dataclass
class Pairs:  # a batch for InfoNCE: the negatives of a row are the other rows' positives
    anchor: jax.Array  # (B, ...)
    positive: jax.Array  # (B, ...)
    mask: jax.Array  # (B,) 0.0: no positive, still a negative for the others; else 1.0


def steps_remaining(done):
    """(T, N) how many stored states follow each step's state in its episode; 0 where it ended with the step."""
    t = jnp.arange(len(done))[:, None]
    return jax.lax.cummin(jnp.where(done, t, len(done)), axis=0, reverse=True) - t


def truncated_geometric(key, remaining, gamma):
    """Offsets k = 1..remaining with P(k) ∝ gamma^k, by the inverse distribution function; 0 if none remains."""
    log_gamma = jnp.log(gamma)
    u = jax.random.uniform(key, remaining.shape)
    k = jnp.ceil(jnp.log1p(u * jnp.expm1(remaining * log_gamma)) / log_gamma).astype(jnp.int32)
    return jnp.clip(k, jnp.minimum(remaining, 1), remaining)


def future_times(key, args, remaining):
    """(T, N) time of one sampled future of each step (Eq. 1); an episode's last step returns itself and is masked."""
    return jnp.arange(len(remaining))[:, None] + truncated_geometric(key, remaining, args.gamma_cl)


def masked_mean(x, mask):
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def infonce(logits, mask, logsumexp_penalty):
    """InfoNCE over the rows, positives on the diagonal (Eq. 2), plus the penalty on logsumexp^2."""
    lse = jax.nn.logsumexp(logits, axis=1)  # (B,)
    return masked_mean(lse - jnp.diag(logits) + logsumexp_penalty * lse**2, mask)


def contrastive_metrics(loss, logits, mask, phi, psi):
    positive = jnp.diag(logits)
    return {
        "contrastive_loss": loss,
        "accuracy": masked_mean(jnp.argmax(logits, axis=1) == jnp.arange(len(logits)), mask),
        "logits_positive": masked_mean(positive, mask),
        "logits_negative": (jnp.sum(logits) - jnp.sum(positive)) / (logits.size - len(logits)),
        "phi_variance": jnp.mean(jnp.var(phi, axis=0)),
        "psi_variance": jnp.mean(jnp.var(psi, axis=0)),
    }


def mrn_distance(x, y):
    """d(x_i, y_j) = max(relu(x_i1 - y_j1)) + |x_i2 - y_j2|_2 on the halves of the representations (metric residual
    network), for all pairs of rows: it obeys the triangle inequality, and need not be symmetric. One feature at a time,
    rematerialised in the backward pass, as in l1_similarity. The gradient of the maximum goes to its argmax."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    y1, y2 = jnp.split(y, 2, axis=-1)
    unroll = 1 if jax.default_backend() == "cpu" else 8

    def over_features(add, x, y):
        step = jax.checkpoint(lambda total, feature: (add(total, feature[0][:, None] - feature[1]), None))
        return jax.lax.scan(step, jnp.zeros((len(x), len(y))), (x.T, y.T), unroll=unroll)[0]

    largest = over_features(jnp.maximum, *jax.lax.stop_gradient((x1, y1)))
    add_largest = lambda total, difference: total + jnp.where(difference == largest, difference, 0.0)
    add_square = lambda total, difference: total + difference**2
    return over_features(add_largest, x1, y1) + jnp.sqrt(over_features(add_square, x2, y2) + 1e-8)


def encode_state(params, args, obs):
    """ETD: the representation of a state, (..., representation_size), and its potential c, (...,)."""
    out = MLP(args.encoder_width, args.representation_size + 1).apply(params, obs)
    return out[..., :-1], out[..., -1]


def etd_loss(params, args, batch):
    """Symmetric InfoNCE with logits c(y_j) - d(x_i, y_j)."""
    x, _ = encode_state(params, args, batch.anchor)
    y, potential = encode_state(params, args, batch.positive)
    logits = potential - mrn_distance(x, y)  # (B, B)
    loss = 0.5 * (infonce(logits, batch.mask, 0.0) + infonce(logits.T, batch.mask, 0.0))
    return loss, contrastive_metrics(loss, logits, batch.mask, x, y)


@flax.struct.dataclass
class Memory:  # the states of each environment's episode before the rollout, in a ring: number k is in row k % M
    states: jax.Array  # (N, M, representation_size) embeddings, or (N, M, state_size) observations
    count: jax.Array  # (N,) states of the episode so far
    overflow: jax.Array  # () states that were forgotten before their episode ended


def episode_numbers(done):
    """(T+1, N) how many episodes ended in the rollout before each of its T+1 states."""
    return jnp.concatenate([jnp.zeros((1, done.shape[1]), jnp.int32), jnp.cumsum(done, axis=0)])


def insert_states(memory, states, done):
    """Add those of (T, N, ...) states, T <= M, that belong to the episode that goes on after them."""
    size = memory.states.shape[1]
    episode = episode_numbers(done)
    goes_on = episode[:-1] == episode[-1]
    before = jnp.where(episode[-1] == 0, memory.count, 0)
    row = jnp.where(goes_on, (before + jnp.cumsum(goes_on, axis=0) - 1) % size, size)
    count = before + jnp.sum(goes_on, axis=0)
    forgotten = jnp.sum(jnp.maximum(count - jnp.maximum(before, size), 0))
    rows = memory.states.at[jnp.arange(row.shape[1]), row].set(states, mode="drop")
    return Memory(rows, count, memory.overflow + forgotten)


def etd_reward(params, args, states, done, memory):
    """(T, N) min over the episode's earlier states s_k of d(s_k, s'), 0 where the episode ended, for the T+1 states of
    a rollout; and the memory after it. All are encoded once, and one mask says who is earlier in whose episode."""
    z, _ = encode_state(params, args, states)  # (T+1, N, features)
    old = memory.states
    if args.memory == "observations":
        old = jax.lax.map(lambda obs: encode_state(params, args, obs)[0], old, batch_size=32)

    def nearest(inputs):
        z, old, count, episode = inputs  # of one environment
        t = jnp.arange(len(episode))
        in_memory = (jnp.arange(len(old)) < count)[:, None] & (episode == 0)  # (M, T)
        in_rollout = (episode[:, None] == episode) & (t[:, None] <= t)  # (T, T)
        distance = mrn_distance(jnp.concatenate([old, z[:-1]]), z[1:])  # (M+T, T)
        return jnp.min(jnp.where(jnp.concatenate([in_memory, in_rollout]), distance, jnp.inf), axis=0)

    inputs = (z.swapaxes(0, 1), old, memory.count, episode_numbers(done)[:-1].T)
    reward = jnp.where(done, 0.0, jax.lax.map(nearest, inputs, batch_size=16).T)
    kept = z if args.memory == "embeddings" else states
    return reward, insert_states(memory, kept[:-1], done)


def encode(params, args, x):
    """phi of [s, a], or psi of s_f: (..., representation_size), not normalised."""
    return MLP(args.encoder_width, args.representation_size).apply(params, x)


def unit_length(x):
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-12)


def reward_features(args, x, mask):
    """Normalise representations (..., d) for the reward. `unit`: L2-normalise rows (paper's text). `batch`: divide each
    feature by its norm over the rows with mask 1 (authors' code)."""
    if args.reward_features == "unit":
        return unit_length(x)
    return x * jax.lax.rsqrt(jnp.sum(mask[..., None] * x**2, axis=tuple(range(x.ndim - 1))) + 1e-12)


def l1_similarity(phi, psi):
    """C = -|phi_i - psi_j|_1 for all pairs, (B, B). One feature at a time, rematerialised in the backward pass: the
    (B, B, features) array of differences would take most of the time and memory of a gradient step."""

    @jax.checkpoint
    def subtract(similarity, feature):
        phi, psi = feature  # (B,), (B,)
        return similarity - jnp.abs(phi[:, None] - psi), None

    unroll = 1 if jax.default_backend() == "cpu" else 8  # fewer GPU kernels; slower on a CPU
    return jax.lax.scan(subtract, jnp.zeros((len(phi), len(psi))), (phi.T, psi.T), unroll=unroll)[0]


def l2_similarity(phi, psi):
    """C = -|phi_i - psi_j|_2 for all pairs of rows."""
    product = jnp.matmul(phi, psi.T, precision="highest")  # TF32 would be felt near 0
    squared = jnp.sum(phi**2, axis=-1)[:, None] + jnp.sum(psi**2, axis=-1) - 2 * product
    return -jnp.sqrt(jnp.maximum(squared, 0.0) + 1e-8)


def ctec_loss(params, args, batch):
    """InfoNCE between phi(s, a) and psi(s_f) over the rows (Eq. 2)."""
    phi = unit_length(encode(params["phi"], args, batch.anchor))
    psi = unit_length(encode(params["psi"], args, batch.positive))
    similarity = l1_similarity if args.similarity == "l1" else l2_similarity
    tau = jnp.exp(params["log_tau"])
    if args.temperature == "phi":
        logits = similarity(phi / tau, psi)  # (B, B), row i: state-action i against every future
    else:
        logits = similarity(phi, psi) / tau
    loss = infonce(logits, batch.mask, args.logsumexp_penalty)
    return loss, contrastive_metrics(loss, logits, batch.mask, phi, psi) | {"tau": tau}


def ctec_reward(params, args, key, states, action, done):
    """(T, N) the distance |phi(s, a) - psi(s_f)| to a sampled future of the rollout (Eq. 3), 0 where there is none."""
    remaining = steps_remaining(done)
    anchor = jnp.concatenate([states[:-1], action], axis=-1)
    future = jnp.take_along_axis(states, future_times(key, args, remaining)[..., None], axis=0)
    phi = reward_features(args, encode(params["phi"], args, anchor), remaining > 0)
    psi = reward_features(args, encode(params["psi"], args, future), remaining > 0)
    if args.temperature == "phi":
        phi = phi / jnp.exp(params["log_tau"])
    return jnp.where(remaining > 0, jnp.linalg.norm(phi - psi, ord=int(args.similarity[1]), axis=-1), 0.0)


def contrastive_loss(params, args, batch):
    """The loss of the encoders, for Pairs: states or state-actions, and their futures."""
    return etd_loss(params, args, batch) if args.bonus == "etd" else ctec_loss(params, args, batch)


def intrinsic_reward(params, args, key, rollout, action, memory):
    """(T, N) the reward before it is standardised, and ETD's memory after the rollout."""
    if args.bonus == "etd":
        return etd_reward(params, args, rollout.obs, rollout.done, memory)
    return ctec_reward(params, args, key, rollout.obs, action, rollout.done), None


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


class ActorCritic(nn.Module):  # what an action distribution needs, (..., outputs), and the value (...,)
    width: int
    outputs: int

    @nn.compact
    def __call__(self, obs):
        dense = lambda size, scale=2**0.5: nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))
        head = lambda size: dense(size, 0.0)(nn.relu(dense(self.width)(nn.relu(dense(self.width)(obs)))))
        return head(self.outputs), head(1)[..., 0]  # scale 0: the first policy is the same everywhere


class TanhGaussian:  # tanh(u), normal u. A rollout keeps u: the tanh's Jacobian cancels in the ratio of probabilities
    def __init__(self, env):
        self.size = env.action_size
        self.outputs = 2 * env.action_size
        self.nodes, weights = np.polynomial.hermite_e.hermegauss(8)
        self.weights = weights / weights.sum()

    def mean_std(self, output):
        mean, std = jnp.split(output, 2, axis=-1)
        return mean, jax.nn.softplus(std) + 1e-3

    def sample(self, key, output):
        mean, std = self.mean_std(output)
        return mean + std * jax.random.normal(key, mean.shape)

    def log_prob(self, output, u):
        mean, std = self.mean_std(output)
        return jnp.sum(-0.5 * ((u - mean) / std) ** 2 - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi), axis=-1)

    def entropy(self, output):
        """Entropy of tanh(u): that of u, and the mean log-Jacobian by Gauss-Hermite quadrature."""
        mean, std = self.mean_std(output)
        u = mean[..., None] + std[..., None] * self.nodes
        jacobian = jnp.sum(self.weights * 2 * (jnp.log(2.0) - u - jax.nn.softplus(-2 * u)), axis=-1)
        return jnp.sum(jnp.log(std) + 0.5 * jnp.log(2 * jnp.pi * jnp.e) + jacobian, axis=-1)

    def vector(self, u):
        return jnp.tanh(u)  # what the environment and phi get


class Categorical:  # one of a number of actions
    def __init__(self, env):
        self.size = env.num_actions
        self.outputs = env.num_actions

    def sample(self, key, output):
        return jax.random.categorical(key, output)

    def log_prob(self, output, action):
        return jnp.take_along_axis(jax.nn.log_softmax(output), action[..., None], axis=-1)[..., 0]

    def entropy(self, output):
        return -jnp.sum(jax.nn.softmax(output) * jax.nn.log_softmax(output), axis=-1)

    def vector(self, action):
        return jax.nn.one_hot(action, self.size)


def action_distribution(env):
    return Categorical(env) if isinstance(env, Craftax) else TanhGaussian(env)


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


def ppo_rows_loss(params, args, env, rollout, advantage, target):
    """Clipped objective, squared error of the values to their target, and entropy, for rows of a rollout."""
    actions = action_distribution(env)
    output, value = ActorCritic(args.agent_width, actions.outputs).apply(params, rollout.obs)
    log_ratio = actions.log_prob(output, rollout.action) - rollout.log_prob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - args.clip, 1 + args.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
    value_loss = 0.5 * jnp.mean((value - target) ** 2)
    entropy = jnp.mean(actions.entropy(output))
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


# ----------------------------------------------------------------------------------------------------- rollout
@flax.struct.dataclass
class Rollout:
    obs: jax.Array  # (T+1, N, state_size) the last is of the state after the rollout
    action: jax.Array  # (T, N, ...), as the distribution samples it
    log_prob: jax.Array  # (T, N)
    value: jax.Array  # (T, N)
    done: jax.Array  # (T, N) bool: the episode ended with this step
    final_value: jax.Array  # (T, N) of the state after a step with which the episode was truncated, else 0


# ---------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class RunState:
    key: jax.Array  # of the next iteration
    key_learn: jax.Array  # of this iteration's reward and gradient steps
    iteration: jax.Array
    env: "EnvState"  # (N, ...)
    episode_step: jax.Array  # (N,)
    success: Any  # coverage: (bins of the grid,) step of the first visit, NEVER if there was none; or Episodes
    memory: Any  # ETD's Memory
    reward_moments: jax.Array  # (2,) running mean and variance
    agent: Model
    model: Model  # ETD's encoder, or C-TeC's {"phi", "psi", "log_tau"}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def collect(args, env, state):
    """`num_steps` steps in every environment. The start states of new episodes are drawn once an iteration."""
    key, key_collect, key_learn = jax.random.split(state.key, 3)
    key_start, key_actions = jax.random.split(key_collect)
    starts = make_worlds(env, key_start, args.num_envs)
    actions = action_distribution(env)
    policy = lambda obs: ActorCritic(args.agent_width, actions.outputs).apply(state.agent.params, obs)

    def step(carry, key):
        now, _ = carry
        output, value = policy(now.obs)
        action = actions.sample(key, output)
        carry, (obs, done, truncated), success = step_and_reset(args, env, starts, *carry, actions.vector(action))
        value_of_cut = lambda: jnp.where(truncated, policy(obs)[1], 0.0)
        final_value = jax.lax.cond(jnp.any(truncated), value_of_cut, lambda: jnp.zeros_like(value))
        transition = Rollout(now.obs, action, actions.log_prob(output, action), value, done, final_value)
        return carry, (transition, success)

    keys = jax.random.split(key_actions, args.num_steps)
    (now, episode_step), (rollout, success) = jax.lax.scan(step, (state.env, state.episode_step), keys)
    rollout = rollout.replace(obs=jnp.concatenate([rollout.obs, now.obs[None]]))
    state = state.replace(key=key, key_learn=key_learn, iteration=state.iteration + 1, env=now)
    success, metrics = count_success(args, env, state, *success)
    return shard_state(state.replace(episode_step=episode_step, success=success)), shard(rollout, None, "envs"), metrics


def standardize_valid(args, moments, iteration, reward, valid):
    """The reward over its running mean and deviation, which begin with the first rollout's; 0 where it is not valid."""
    mean = masked_mean(reward, valid)
    now = jnp.stack([mean, masked_mean((reward - mean) ** 2, valid)])
    moments = jnp.where(iteration == 1, now, args.reward_momentum * moments + (1 - args.reward_momentum) * now)
    return moments, now, valid * (reward - moments[0]) / (jnp.sqrt(moments[1]) + 1e-8)


def update(args, env, agent, model, pairs, *rows):
    """One gradient step of the encoders on Pairs, and one of PPO on rows of (rollout, advantage, target)."""
    encoder_adam = clipped_adam(args, args.encoder_learning_rate)
    model, metrics = gradient_update(contrastive_loss, model, encoder_adam, args, pairs)
    agent, ppo_metrics = gradient_update(ppo_rows_loss, agent, clipped_adam(args, args.learning_rate), args, env, *rows)
    return (agent, model), metrics | ppo_metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def learn(args, env, state, rollout):
    """Rewards from the current encoders, then `update_epochs` passes of encoders and agent over the rollout, in
    gradient steps of `batch_size` shuffled transitions (a last smaller batch is left out)."""
    key_reward, key_epochs = jax.random.split(state.key_learn)
    actions = action_distribution(env)
    action = actions.vector(rollout.action)
    remaining = steps_remaining(rollout.done)
    valid = (remaining > 0).astype(jnp.float32)  # an episode's last step has no future and no next state

    # intrinsic rewards and their advantages; a truncated episode would have gone on, so its final value is added
    reward, memory = intrinsic_reward(state.model.params, args, key_reward, rollout, action, state.memory)
    moments, now, scaled = standardize_valid(args, state.reward_moments, state.iteration, reward, valid)
    last_value = ActorCritic(args.agent_width, actions.outputs).apply(state.agent.params, rollout.obs[-1])[1]
    advantage = gae(args, scaled + args.gamma * rollout.final_value, rollout.value, rollout.done, last_value)
    target = advantage + rollout.value
    advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)  # over the whole rollout

    # gradient steps of encoders and agent; a batch may be of any environments
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # (T * N, ...), and N more states
    states, action, valid, *steps = jax.tree.map(flat, shard((rollout.obs, action, valid, rollout, advantage, target)))

    def epoch(models, key):
        key_future, key_order = jax.random.split(key)
        future = flat(future_times(key_future, args, shard(remaining)) * args.num_envs + jnp.arange(args.num_envs))
        order = jax.random.permutation(key_order, valid.size)[: valid.size // args.batch_size * args.batch_size]

        def step(models, rows):
            anchor = states[rows]
            if args.bonus == "ctec":
                anchor = jnp.concatenate([anchor, action[rows]], axis=-1)
            pairs = Pairs(anchor, states[future[rows]], valid[rows])
            return update(args, env, *models, pairs, *jax.tree.map(lambda x: x[rows], steps))

        return jax.lax.scan(step, models, shard(order.reshape(-1, args.batch_size), None, "envs"))

    models = (state.agent, state.model)
    (agent, model), metrics = jax.lax.scan(epoch, models, jax.random.split(key_epochs, args.update_epochs))
    metrics = jax.tree.map(jnp.mean, metrics) | {"reward_mean": now[0], "reward_std": jnp.sqrt(now[1])}
    metrics["parameter_norm"] = optax.global_norm((model.params, agent.params))
    metrics |= {"memory_overflow": memory.overflow} if memory else {}
    return shard_state(state.replace(memory=memory, reward_moments=moments, agent=agent, model=model)), metrics


# ----------------------------------------------------------------------------------------------- initial state
def make_worlds(env, key, number):  # Craftax takes 0.4 MB of working memory for each
    return jax.vmap(env.reset)(shard(jax.random.split(key, number), "envs"))


def init_memory(args, env):
    size = args.representation_size if args.memory == "embeddings" else env.state_size
    states = jnp.zeros((args.num_envs, args.memory_size, size))
    return Memory(states, jnp.zeros(args.num_envs, jnp.int32), jnp.int32(0))


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env, key_agent, key_phi, key_psi, key_step = jax.random.split(jax.random.PRNGKey(args.seed), 6)
    actions = action_distribution(env)
    obs = jnp.zeros(env.state_size)
    agent = ActorCritic(args.agent_width, actions.outputs).init(key_agent, obs)
    if args.bonus == "etd":
        params = MLP(args.encoder_width, args.representation_size + 1).init(key_phi, obs)
    else:
        encoder = MLP(args.encoder_width, args.representation_size)
        phi = encoder.init(key_phi, jnp.zeros(env.state_size + actions.size))
        params = {"phi": phi, "psi": encoder.init(key_psi, obs), "log_tau": jnp.zeros(())}
    # stagger the first episodes: where only the clock ends them, a rollout then has steps of every age
    episode_step = jax.random.randint(key_step, (args.num_envs,), 0, args.episode_length if env.position_size else 1)
    return shard_state(RunState(
        key=key, key_learn=key, iteration=jnp.int32(0),
        env=make_worlds(env, key_env, args.num_envs),
        episode_step=episode_step,
        success=init_coverage(env) if env.position_size else init_episodes(args),
        memory=init_memory(args, env) if args.bonus == "etd" else None,
        reward_moments=jnp.zeros(2),
        agent=Model(agent, clipped_adam(args, args.learning_rate).init(agent)),
        model=Model(params, clipped_adam(args, args.encoder_learning_rate).init(params)),
    ))  # fmt: skip


# ==================================================================================================== appendix
# What a reader of the method does not need: devices, success, environments, the run's folder, pictures, and main.


# ----------------------------------------------------------------------------------------------------- devices
SPLIT = {name: ("envs",) for name in ("env", "episode_step", "memory")}  # of RunState; others are replicated


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


# ----------------------------------------------------------------------------------- coverage and achievements
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


def count_success(args, env, state, position, length, achievements):
    """Add the steps of an iteration to the coverage, or the episodes that ended to the latest ones; and the metrics."""
    if env.position_size:
        coverage = mark_visited(args, state.success, state.iteration, position)
        mean = jnp.sum(length) / jnp.sum(length > 0)  # nan if no episode ended
        return coverage, {"coverage": jnp.sum(coverage < NEVER), "episode_length": mean}
    episodes = insert_episodes(state.success, length > 0, achievements, length, jnp.zeros(length.shape))
    return episodes, episode_metrics(episodes)


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


class Craftax:
    """Craftax-Classic-Symbolic-v1 with the interface of the others: its state has the key of its next step, and an
    action is a vector whose largest number counts."""

    state_size = 1345
    num_actions = 17
    position_size = 0  # no coverage

    def __init__(self):
        from craftax.craftax_env import make_craftax_env_from_name  # here, because it starts the device

        self.game = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False)
        self.params = self.game.default_params.replace(max_timesteps=10**9)  # `episode_length` truncates, as everywhere

    def reset(self, key):
        key, key_reset = jax.random.split(key)
        obs, world = self.game.reset_env(key_reset, self.params)
        # Craftax starts from Python numbers: without their types, collect would be compiled twice
        world, obs = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), (world, obs))
        return EnvState((world, key), obs, jnp.zeros((), bool))

    def step(self, state, action):
        world, key = state.physics
        key, key_step = jax.random.split(key)
        obs, world, _, done, _ = self.game.step_env(key_step, world, jnp.argmax(action), self.params)
        return EnvState((world, key), obs, done)


@functools.cache
def make_env(name):
    robot, maze = name.split("_")[:2]
    mazes = {"point": PointMaze, "ant": AntMaze, "humanoid": HumanoidMaze}
    return ArmBinpick() if robot == "arm" else mazes[robot](maze)


@functools.cache
def make_any_env(name):
    return Craftax() if name == "craftax_classic" else make_env(name)


def step_and_reset(args, env, starts, now, episode_step, action):
    """One step in every environment; where an episode ends, it restarts from its row of starts. Returns the scan carry,
    (observation before the reset, done, truncated), and (its position, length of an ended episode, achievements)."""
    with jax.default_matmul_precision("highest"):  # no TF32 in the physics
        after = jax.vmap(env.step)(now, action)
    terminated = after.terminated | ~jnp.all(jnp.isfinite(after.obs), axis=-1)  # physics that blew up ends too
    truncated = (episode_step + 1 >= args.episode_length) & ~terminated
    done = terminated | truncated
    restart = lambda start, x: jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), start, x)
    carry = (jax.tree.map(restart, starts, after), jnp.where(done, 0, episode_step + 1))
    length = jnp.where(done, episode_step + 1, 0)
    achievements = None if env.position_size else after.physics[0].achievements
    return carry, (after.obs, done, truncated), (after.obs[..., : env.position_size], length, achievements)


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
CRAFTAX = dict(episode_length=10_000, similarity="l2", reward_features="unit")
LAPTOP = dict(total_timesteps=1_000_000, num_envs=32, batch_size=256, encoder_width=256, checkpoint_minutes=2.0)
PRESETS = {  # what a preset changes: for one robot or game, or for all others
    "paper": {"humanoid": dict(batch_size=256), "craftax": CRAFTAX, "default": {}},
    "laptop": {"craftax": LAPTOP | CRAFTAX, "default": LAPTOP},
}


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
    may_be_zero = "seed checkpoint_minutes entropy_coef value_coef gae_lambda reward_momentum logsumexp_penalty"
    etd = args.bonus == "etd"
    check_numbers(args, may_be_zero, lambda: {
        "gamma must be at most 1": args.gamma <= 1, "gae_lambda must be at most 1": args.gae_lambda <= 1,
        "total_timesteps must be below 2^31": args.num_iterations * args.steps_per_iteration < 2**31,
        "gamma_cl must be below 1": args.gamma_cl < 1,
        "reward_momentum must be below 1": args.reward_momentum < 1,
        "batch_size must be at least 2": args.batch_size >= 2,
        "batch_size must be at most num_envs * num_steps": args.batch_size <= args.steps_per_iteration,
        "memory_size must be at least num_steps": not etd or args.memory_size >= args.num_steps,
        "representation_size must be even": not etd or args.representation_size % 2 == 0,
    })  # fmt: skip


def main(args):
    """Collect and learn in turn. Returns the last row of metrics, with the run's folder."""
    start_jax(args)
    check_args(args)
    env = make_any_env(args.env)
    init = functools.partial(init_state, args, env)
    observations = 4e-6 * args.steps_per_iteration * env.state_size
    memory = 1e-6 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(init).memory))
    folder, state = start_run(args, init, f"rollout {observations:,.1f} MB, episodic memory {memory:,.1f} MB")
    _, rollout, metrics = collect.eval_shape(args, env, state)
    with Run(args, folder, state, metrics, learn.eval_shape(args, env, state, rollout)[-1]) as run:
        for iteration in range(run.iteration + 1, args.num_iterations + 1):
            state, rollout, metrics = collect(args, env, state)
            state, learn_metrics = learn(args, env, state, rollout)
            row = run.log(metrics | learn_metrics)
            if iteration in run.picture_iterations and env.position_size:
                save_coverage(args, env, folder, state.success, row["steps"])
            run.save(state)
    if env.position_size:
        result = f"coverage {row['coverage']:,.0f} bins"
    else:
        result = f"achievements {row['achievements']:.2f} an episode"
    print(f"{result} after {row['steps']:,} steps in {tqdm.format_interval(row['seconds'])}")
    print(f"folder   {folder}\nplay     python evaluate.py {folder}")
    return row | {"folder": str(folder)}


if __name__ == "__main__":
    try:
        main(parse_args())
    except (OSError, OverflowError, MemoryError, jax.errors.JaxRuntimeError) as error:  # disk, folder or memory
        fail(f"{type(error).__name__}: {error}; the last good checkpoint, if there was one, is untouched", code=1)
