"""C-TeC in front of a noisy TV: does noise hold the explorer? Four bonuses in one PPO, on a grid of rooms.

A region of the grid, the TV, shows new random colours at every step: for an agent that is rewarded for what its model
cannot predict, a surprise that never ends. C-TeC (Mohamed et al., "Temporal Representations for Exploration", ICLR
2026, "Exploration in Noisy TV setting") rewards the distance between phi(s, a) / tau and psi(s_f), which are trained by
InfoNCE to tell which future belongs to which state-action: colours that are drawn anew tell nothing about it. `--bonus`
has C-TeC and what it is compared with: RND, a forward model, nothing. Success is the number of cells visited.

One iteration:

    128 times, in every environment:                                                  # collect
        act with PPO's policy, store (s, a, log-probability, value, done), count the visit of the new cell
    C-TeC:         reward_t = sum over k of gamma_cl^(k-1) * |phi(s_t, a_t) / tau - psi(s_(t+k))|_2        # learn
    RND:           reward_t = error of a predictor of a fixed random network at s_(t+1)
    forward_error: reward_t = error of a model of s_(t+1), given s_t and a_t
    standardise the reward by its running mean and deviation; its advantages are normalised over the rollout
    4 times, in minibatches of 1024 shuffled steps:
        one Adam step of the intrinsic-reward model (C-TeC: InfoNCE between state-actions and sampled futures)
        one Adam step of PPO on the advantages

    python ctec_ppo_noisy_tv.py                                                # 256 x 256 cells, for a GPU
    python ctec_ppo_noisy_tv.py --preset laptop                                # 64 x 64 cells, minutes on a CPU core
    python ctec_ppo_noisy_tv.py --preset laptop --bonus forward_error --no-tv
    python ctec_ppo_noisy_tv.py --resume runs/<folder>                         # go on from the last checkpoint

Metrics, implementation details and results: docs/ctec_ppo_noisy_tv.md
"""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "jax==0.10.1", "flax==0.12.8", "optax==0.2.8", "numpy==2.4.6", "tyro==1.0.16", "tqdm==4.70.1",
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
    env: Literal["noisy_tv"] = "noisy_tv"  # environment: a grid of rooms, one of which has the TV
    bonus: Literal["ctec", "rnd", "forward_error", "none"] = "ctec"  # the reward; none: uniform random actions
    preset: Literal["paper", "laptop"] = "paper"  # published sizes, or sizes for a CPU; explicit flags win over it
    seed: int = 1  # seed of everything random
    total_timesteps: int = 100_000_000  # environment steps, all environments together (the paper does not say)
    resume: str = ""  # folder of an earlier run: go on from its checkpoint, with its arguments
    run_dir: str = "runs"  # where the folder of the run is made
    checkpoint_minutes: float = 10.0  # minutes between checkpoints; always one at the end, at Ctrl-C and at SIGTERM
    track: bool = False  # send metrics and pictures to wandb too (WANDB_MODE=offline works)
    wandb_project_name: str = "ctec"  # project of the run on wandb
    wandb_entity: str | None = None  # user or team of the run on wandb
    distributed: bool = False  # one run over all processes that srun or mpirun started

    tv: bool = True  # noise on the TV; --no-tv leaves plain floor in its place
    tv_centre: tuple[float, float] = (0.375, 0.375)  # row and column of the TV's centre, as shares of the grid's side
    tv_share: float = 1 / 64  # share of the grid's cells that the TV, a square, takes
    grid_size: int = 256  # cells along each side of the grid (paper: 256)
    rooms: int = 4  # rooms along each side of the grid, with walls and doors between them; 1 is open floor
    window: int = 5  # cells along each side of what the agent sees around it; odd
    start: Literal["random", "fixed"] = "random"  # of episodes: any free cell (xland-minigrid), or in the first room

    num_envs: int = 1024  # parallel environments (paper Table 2; 256 on the humanoid)
    num_steps: int = 128  # steps in each environment before an update; futures end with them, gamma_cl 0.3 needs few
    episode_length: int = 1024  # steps after which an episode is truncated; the far corner is some 500 steps away
    batch_size: int = 1024  # transitions in a gradient step (paper Table 2; 256 on the humanoid)
    update_epochs: int = 4  # passes over a rollout, of PPO and of the encoders (ETD)
    learning_rate: float = 3e-4  # Adam learning rate of PPO and of the intrinsic-reward model (ETD's of PPO)
    adam_eps: float = 1e-5  # epsilon of Adam, PPO and the intrinsic-reward model (Craftax baselines)
    max_grad_norm: float = 0.5  # global-norm gradient clipping, PPO and the intrinsic-reward model (ETD)
    agent_width: int = 256  # width of the two hidden layers of actor and critic (paper Table 2)
    gamma: float = 0.99  # discount of PPO (ETD)
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation (ETD)
    clip: float = 0.2  # PPO's clipping of the probability ratio (paper Table 5)
    entropy_coef: float = 0.01  # weight of the entropy bonus (paper Table 5)
    value_coef: float = 0.5  # weight of the value loss (Craftax baselines)
    reward_momentum: float = 0.9  # momentum of the running mean and deviation that standardise the reward (ETD)

    encoder_width: int = 1024  # width of the three hidden layers of phi and psi (paper Table 6)
    representation_size: int = 64  # size of phi and psi (paper Table 6)
    gamma_cl: float = 0.3  # discount of the future-state distribution, Eq. 1 (paper Table 6)
    logsumexp_penalty: float = 0.0  # weight of mean(logsumexp^2) in the contrastive loss (paper Table 6)
    normalize_reward: bool = False  # divide the weighted sum by the sum of its weights (worse, Appendix E.4)

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


# ----------------------------------------------------------------------- the method: C-TeC, RND, forward model
@flax.struct.dataclass
class Pairs:  # a batch for InfoNCE: the negatives of a row are the other rows' positives
    anchor: jax.Array  # (B, ...)
    positive: jax.Array  # (B, ...)
    mask: jax.Array  # (B,) 0.0: no positive, still a negative for the others; else 1.0


@flax.struct.dataclass
class Steps:  # of a rollout, as the bonus sees them
    states: jax.Array  # (T+1, N, state_size)
    action: jax.Array  # (T, N, actions) one-hot
    weight: jax.Array | None  # (N, T, T+1) C-TeC: how much each state counts as a future of each step


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


def future_weights(args, remaining):
    """(N, T, T+1) weight gamma_cl^(k-1) of the state k steps ahead, 0 beyond the episode (Appendix E.4)."""
    k = jnp.arange(len(remaining) + 1) - jnp.arange(len(remaining))[:, None]  # (T, T+1)
    weight = jnp.where((k >= 1) & (k <= remaining.T[..., None]), args.gamma_cl ** (k - 1.0), 0.0)
    if args.normalize_reward:
        weight /= jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-8)
    return weight


def unit_length(x):
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-12)


def encode(params, args, x):
    """phi of [s, a], or psi of s_f: (..., representation_size), of unit length along the features."""
    return unit_length(MLP(args.encoder_width, args.representation_size, 3).apply(params, x))


def l2_similarity(phi, psi):
    """C = -|phi_i - psi_j|_2 for all pairs of rows."""
    product = jnp.matmul(phi, psi.T, precision="highest")  # TF32 would be felt near 0
    squared = jnp.sum(phi**2, axis=-1)[:, None] + jnp.sum(psi**2, axis=-1) - 2 * product
    return -jnp.sqrt(jnp.maximum(squared, 0.0) + 1e-8)


def masked_mean(x, mask):
    return jnp.sum(x * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def infonce(logits, mask, logsumexp_penalty):
    """InfoNCE over the rows, positives on the diagonal (Eq. 2), plus the penalty on logsumexp^2."""
    lse = jax.nn.logsumexp(logits, axis=1)  # (B,)
    return masked_mean(lse - jnp.diag(logits) + logsumexp_penalty * lse**2, mask)


def contrastive_loss(params, args, batch):
    """C-TeC: InfoNCE between phi(s, a) / tau and psi(s_f) over the rows of Pairs (Eq. 2)."""
    phi = encode(params["phi"], args, batch.anchor)
    psi = encode(params["psi"], args, batch.positive)
    tau = jnp.exp(params["log_tau"])
    logits = l2_similarity(phi / tau, psi)  # (B, B), row i: state-action i against every future
    loss = infonce(logits, batch.mask, args.logsumexp_penalty)
    positive = jnp.diag(logits)
    metrics = {
        "contrastive_loss": loss,
        "accuracy": masked_mean(jnp.argmax(logits, axis=1) == jnp.arange(len(logits)), batch.mask),
        "logits_positive": masked_mean(positive, batch.mask),
        "logits_negative": (jnp.sum(logits) - jnp.sum(positive)) / (logits.size - len(logits)),
        "tau": tau,
        "phi_variance": jnp.mean(jnp.var(phi, axis=0)),
        "psi_variance": jnp.mean(jnp.var(psi, axis=0)),
    }
    return loss, metrics


def prediction_error(params, args, anchor, next_obs):
    """(...) mean squared error at s': of RND's predictor of a fixed random network, or of the forward model."""
    if args.bonus == "rnd":
        network = MLP(args.encoder_width, args.representation_size, 3)
        predicted = network.apply(params["predictor"], next_obs)
        target = jax.lax.stop_gradient(network.apply(params["target"], next_obs))
    else:
        predicted = MLP(args.encoder_width, next_obs.shape[-1], 3).apply(params["forward"], anchor)
        target = next_obs
    return jnp.mean((predicted - target) ** 2, axis=-1)


def model_loss(params, args, batch):
    """The loss of the model, for Pairs: state-actions and their futures, or (RND, forward model) next states."""
    if args.bonus == "ctec":
        return contrastive_loss(params, args, batch)
    loss = masked_mean(prediction_error(params, args, batch.anchor, batch.positive), batch.mask)
    return loss, {"model_loss": loss}


def intrinsic_reward(params, args, batch):
    """(T, N) the reward of the Steps before it is standardised. Where no state follows, it means nothing. C-TeC: the
    weighted sum of the distances |phi_t / tau - psi_(t+k)|_2 to the futures (Appendix E.4)."""
    if args.bonus == "none":
        return jnp.zeros(batch.action.shape[:2])
    anchor = jnp.concatenate([batch.states[:-1], batch.action], axis=-1)
    if args.bonus != "ctec":
        return prediction_error(params, args, anchor, batch.states[1:])
    phi = encode(params["phi"], args, anchor) / jnp.exp(params["log_tau"])  # of each of T steps
    psi = encode(params["psi"], args, batch.states)  # of each of T+1 states
    distance = -jax.vmap(l2_similarity, in_axes=1)(phi, psi)  # (N, T, T+1)
    return jnp.sum(batch.weight * distance, axis=-1).T


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
    return Categorical(env)


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
    action: jax.Array  # (T, N)
    log_prob: jax.Array  # (T, N)
    value: jax.Array  # (T, N)
    done: jax.Array  # (T, N) bool: the episode was truncated with this step
    final_value: jax.Array  # (T, N) of the state after such a step, before the reset, else 0
    cell: jax.Array  # (T, N) the cell after the step, before the reset


@flax.struct.dataclass
class Walkers:  # the scan carry of a rollout, (N, ...)
    cell: jax.Array  # number of the cell
    obs: jax.Array
    episode_step: jax.Array  # steps of the episode so far


# ---------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class RunState:
    key: jax.Array  # of the next iteration
    key_learn: jax.Array  # of this iteration's reward and gradient steps
    key_tv: jax.Array  # of what the TV shows
    iteration: jax.Array
    walkers: Walkers
    visits: jax.Array  # (cells,) how often each cell was visited
    reward_moments: jax.Array  # (2,) running mean and variance
    agent: Model
    model: Model  # C-TeC's {"phi", "psi", "log_tau"}, RND's {"predictor", "target"}, {"forward"}, or {}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def collect(args, env, state):
    """`num_steps` steps in every environment. What the TV shows has a random stream of its own."""
    key, key_collect, key_learn = jax.random.split(state.key, 3)
    state = state.replace(key=key, key_learn=key_learn, iteration=state.iteration + 1)
    key_actions, key_starts = jax.random.split(key_collect)
    key_tv = jax.random.fold_in(state.key_tv, state.iteration)
    colours = env.draw_colours(key_tv, (args.num_steps, args.num_envs))
    starts = env.draw_starts(key_starts, (args.num_steps, args.num_envs))  # one for each episode that may end
    actions = action_distribution(env)
    policy = lambda obs: ActorCritic(args.agent_width, actions.outputs).apply(state.agent.params, obs)

    def step(now, inputs):
        key, colours, start = inputs
        output, value = policy(now.obs)
        action = actions.sample(key, output)
        cell = env.move(now.cell, action)
        done = now.episode_step + 1 >= args.episode_length
        value_of_cut = lambda: jnp.where(done, policy(env.observe(cell, colours))[1], 0.0)
        final_value = jax.lax.cond(jnp.any(done), value_of_cut, lambda: jnp.zeros_like(value))
        log_prob = actions.log_prob(output, action)
        transition = Rollout(now.obs, action, log_prob, value, done, final_value, cell)

        next_cell = jnp.where(done, start, cell)
        after = Walkers(next_cell, env.observe(next_cell, colours), jnp.where(done, 0, now.episode_step + 1))
        return after, transition

    keys = jax.random.split(key_actions, args.num_steps)
    walkers, rollout = jax.lax.scan(step, state.walkers, (keys, colours, starts))
    rollout = rollout.replace(obs=jnp.concatenate([rollout.obs, walkers.obs[None]]))
    state = state.replace(walkers=walkers, visits=state.visits.at[rollout.cell.ravel()].add(1))
    return shard_state(state), shard(rollout, None, "envs"), visit_metrics(env, state.visits, rollout.cell)


def standardize_valid(args, moments, iteration, reward, valid):
    """The reward over its running mean and deviation, which begin with the first rollout's; 0 where it is not valid."""
    mean = masked_mean(reward, valid)
    now = jnp.stack([mean, masked_mean((reward - mean) ** 2, valid)])
    moments = jnp.where(iteration == 1, now, args.reward_momentum * moments + (1 - args.reward_momentum) * now)
    return moments, now, valid * (reward - moments[0]) / (jnp.sqrt(moments[1]) + 1e-8)


def update(args, env, agent, model, pairs, *rows):
    """One gradient step of the model on Pairs, and one of PPO on rows of (rollout, advantage, target)."""
    adam = clipped_adam(args, args.learning_rate)
    metrics = {}
    if args.bonus != "none":
        model, metrics = gradient_update(model_loss, model, adam, args, pairs)
    agent, ppo_metrics = gradient_update(ppo_rows_loss, agent, adam, args, env, *rows)
    return (agent, model), metrics | ppo_metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def learn(args, env, state, rollout):
    """Rewards from the model as it is, then `update_epochs` passes of model and agent over the rollout, in batches."""
    _, key_epochs = jax.random.split(state.key_learn)
    actions = action_distribution(env)
    action = actions.vector(rollout.action)
    remaining = steps_remaining(rollout.done)
    valid = (remaining > 0).astype(jnp.float32)  # an episode's last step has no future and no next state

    # intrinsic rewards and their advantages; a truncated episode would have gone on, so its final value is added
    weight = future_weights(args, remaining) if args.bonus == "ctec" else None
    reward = intrinsic_reward(state.model.params, args, Steps(rollout.obs, action, weight))
    moments, now, scaled = standardize_valid(args, state.reward_moments, state.iteration, reward, valid)
    last_value = ActorCritic(args.agent_width, actions.outputs).apply(state.agent.params, rollout.obs[-1])[1]
    advantage = gae(args, scaled + args.gamma * rollout.final_value, rollout.value, rollout.done, last_value)
    target = advantage + rollout.value
    advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)  # over the whole rollout

    # gradient steps of model and agent; a batch may be of any environments
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # (T * N, ...), and N more states
    states, action, valid, *steps = jax.tree.map(flat, shard((rollout.obs, action, valid, rollout, advantage, target)))

    def epoch(models, key):
        key_future, key_order = jax.random.split(key)
        following = jnp.arange(args.num_steps)[:, None] + jnp.minimum(remaining, 1)
        time_of = future_times(key_future, args, remaining) if args.bonus == "ctec" else following
        positive = flat(shard(time_of) * args.num_envs + jnp.arange(args.num_envs))  # rows of states
        order = jax.random.permutation(key_order, valid.size)[: valid.size // args.batch_size * args.batch_size]

        def step(models, rows):
            anchor = jnp.concatenate([states[rows], action[rows]], axis=-1)
            pairs = Pairs(anchor, states[positive[rows]], valid[rows])
            return update(args, env, *models, pairs, *jax.tree.map(lambda x: x[rows], steps))

        return jax.lax.scan(step, models, shard(order.reshape(-1, args.batch_size), None, "envs"))

    models = (state.agent, state.model)
    (agent, model), metrics = jax.lax.scan(epoch, models, jax.random.split(key_epochs, args.update_epochs))
    metrics = jax.tree.map(jnp.mean, metrics) | {"reward_mean": now[0], "reward_std": jnp.sqrt(now[1])}
    metrics["parameter_norm"] = optax.global_norm((model.params, agent.params))
    return shard_state(state.replace(reward_moments=moments, agent=agent, model=model)), metrics


# ----------------------------------------------------------------------------------------------- initial state
def init_bonus(args, env, key):
    """The parameters of the intrinsic-reward model."""
    key_one, key_two = jax.random.split(key)
    obs = jnp.zeros(env.state_size)
    anchor = jnp.zeros(env.state_size + env.num_actions)
    features = MLP(args.encoder_width, args.representation_size, 3)
    if args.bonus == "ctec":
        return {"phi": features.init(key_one, anchor), "psi": features.init(key_two, obs), "log_tau": jnp.zeros(())}
    if args.bonus == "rnd":
        return {"predictor": features.init(key_one, obs), "target": features.init(key_two, obs)}
    if args.bonus == "forward_error":
        return {"forward": MLP(args.encoder_width, env.state_size, 3).init(key_one, anchor)}
    return {}


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_tv, key_agent, key_model, key_step, key_start = jax.random.split(jax.random.PRNGKey(args.seed), 6)
    cell = env.draw_starts(key_start, (args.num_envs,))
    obs = env.observe(cell, env.draw_colours(jax.random.fold_in(key_tv, 0), (args.num_envs,)))
    agent = ActorCritic(args.agent_width, env.num_actions).init(key_agent, obs)
    # stagger the first episodes: only the clock ends them, and a rollout should have steps of every age
    episode_step = jax.random.randint(key_step, (args.num_envs,), 0, args.episode_length)
    optimizer = clipped_adam(args, args.learning_rate)
    bonus = init_bonus(args, env, key_model)
    return shard_state(RunState(
        key=key, key_learn=key,
        key_tv=key_tv,
        iteration=jnp.int32(0),
        walkers=Walkers(cell, obs, episode_step),
        visits=jnp.zeros(env.size**2, jnp.int32),
        reward_moments=jnp.zeros(2),
        agent=Model(agent, optimizer.init(agent)),
        model=Model(bonus, optimizer.init(bonus)),
    ))  # fmt: skip


# ==================================================================================================== appendix
# What a reader of the method does not need: devices, coverage, the grid, the run's folder, pictures, and main.


# ----------------------------------------------------------------------------------------------------- devices
SPLIT = {"walkers": ("envs",)}  # of RunState; others are replicated


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
def visit_metrics(env, visits, cell):
    """Coverage so far, and how much of the time was spent at the TV. Without noise: at the place where it would be."""
    coverage = jnp.sum(visits > 0)
    return {
        "coverage": coverage,
        "coverage_share": coverage / env.free_cells,
        "at_tv": jnp.mean(jnp.asarray(env.sees_tv)[cell]),
        "at_tv_run": jnp.sum(jnp.where(env.sees_tv, visits, 0)) / jnp.sum(visits),
    }


# ------------------------------------------------------------------------------------------------ environments
FLOOR, WALL, TV = range(3)


class NoisyGrid:
    """Rooms with doors, and a TV in one of them, in tables: a move is one look-up, and so is a view. A cell has a
    number, row * size + column; actions are up, down, left, right, stay. A wall, or the grid's border, stops a move."""

    num_actions = 5
    moves = np.array([(-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)])

    def __init__(self, args):
        self.size = size = args.grid_size
        self.window = args.window
        self.is_wall = self.walls(size, args.rooms)
        self.free_cells = int(np.sum(~self.is_wall))
        middle = size // args.rooms // 2 * (size + 1)  # of the first room
        self.starts = np.int32(np.flatnonzero(~self.is_wall) if args.start == "random" else [middle])  # of episodes
        self.tv_side = max(round(args.tv_share**0.5 * size), 1)
        self.tv_corner = np.round(np.array(args.tv_centre) * size - self.tv_side / 2).astype(int)
        place = np.stack(np.divmod(np.arange(size**2), size), axis=-1)  # (cells, 2) row and column
        in_square = np.all((place >= self.tv_corner) & (place < self.tv_corner + self.tv_side), axis=-1)
        self.is_tv = in_square.reshape(size, size) & ~self.is_wall
        # where each action leads from each cell, (cells, actions)
        target = np.clip(place[:, None] + self.moves, 0, size - 1)
        blocked = self.is_wall[target[..., 0], target[..., 1]]
        self.target = np.where(blocked, np.arange(size**2)[:, None], target @ [size, 1]).astype(np.int32)
        # what is at each place of the window around each cell, (cells, window^2)
        content = np.where(self.is_tv & args.tv, TV, np.where(self.is_wall, WALL, FLOOR))
        self.view = self.around(content, WALL).astype(np.uint8)
        self.sees_tv = self.around(self.is_tv, False).any(axis=-1)
        # a place along one axis: sines and cosines of periods 2 * size, size, ... down to 8 cells or less
        octaves = 2.0 ** np.arange(max(math.ceil(math.log2(size / 8)), 0) + 2)
        angle = np.pi * np.arange(size)[:, None] * octaves / size
        self.place_code = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)
        self.state_size = 2 * self.place_code.shape[1] + 3 * self.window**2

    @staticmethod
    def walls(size, rooms):
        """(size, size) bool: a wall of one cell between two rooms, with a door of about a quarter of its length."""
        room = size // rooms
        at = np.arange(size)
        on_line = (at % room == 0) & (at > 0) & (at < rooms * room)
        in_door = np.abs(at % room - room // 2) <= room // 8
        return (on_line[:, None] & ~in_door) | (on_line & ~in_door[:, None])

    def around(self, x, outside):
        """(cells, window^2) the values of x (size, size) in the window around each cell."""
        padded = np.pad(x, self.window // 2, constant_values=outside)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (self.window, self.window))
        return windows.reshape(self.size**2, self.window**2)

    def draw_colours(self, key, shape):
        """(*shape, window^2) one of eight colours for each place of the window: nobody sees more of the TV."""
        return jax.random.bits(key, (*shape, self.window**2), jnp.uint8) & 7

    def draw_starts(self, key, shape):
        return jax.random.choice(key, jnp.asarray(self.starts), shape)

    def move(self, cell, action):
        return jnp.asarray(self.target)[cell, action]

    def observe(self, cell, colours):
        """(N, state_size) the place, and the colours around it: floor black, walls and outside grey, the TV random."""
        view = jnp.asarray(self.view)[cell]  # (N, window^2)
        code = jnp.asarray(self.place_code)
        dark = jnp.where(view == WALL, 0.5, 0.0)
        channels = [jnp.where(view == TV, (colours >> bit & 1).astype(jnp.float32), dark) for bit in range(3)]
        return jnp.concatenate([code[cell // self.size], code[cell % self.size], *channels], axis=-1)


make_noisy_tv = functools.cache(NoisyGrid)


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
def draw_visits(axes, env, title, visits):
    """Heat map of the (cells,) visits on a logarithmic scale, walls grey, the TV outlined, a fixed start marked."""
    side = env.tv_side
    top, left = env.tv_corner - 0.5
    visits = np.asarray(visits, float).reshape(env.size, env.size)
    axes.imshow(np.where(env.is_wall, 0.5, np.nan), cmap="gray", vmin=0, vmax=1)
    shown = np.where(visits > 0, visits, np.nan)
    image = axes.imshow(shown, cmap="viridis", norm="log", vmin=1, vmax=max(visits.max(), 10))
    axes.plot([left, left + side, left + side, left, left], [top, top, top + side, top + side, top], color="red")
    if len(env.starts) == 1:
        axes.plot(*divmod(env.starts[0], env.size)[::-1], "o", color="red", markersize=3)
    axes.set(title=title, xticks=[], yticks=[])
    return image


def save_visits(args, env, folder, visits, steps):
    """visits.png and visits.npz"""
    from matplotlib.figure import Figure

    visits = np.asarray(visits)
    write_atomically(folder / "visits.npz", lambda file: np.savez(file, visits=visits.reshape(env.size, env.size)))
    figure = Figure((7, 6), layout="constrained")
    axes = figure.add_subplot()
    share = f"{np.mean(visits > 0) * visits.size / env.free_cells:.1%} of {env.free_cells:,} cells"
    title = f"{args.bonus}, TV {'on' if args.tv else 'off'}: {share} in {steps:,} steps"
    figure.colorbar(draw_visits(axes, env, title, visits), ax=axes, label="visits")
    write_atomically(folder / "visits.png", lambda file: figure.savefig(file, dpi=100))


# -------------------------------------------------------------------------------------------------------- main
PRESETS = {  # what a preset changes
    "paper": {"default": {}},
    "laptop": {"default": dict(total_timesteps=500_000, grid_size=64, episode_length=256, num_envs=64, batch_size=512,
                               agent_width=64, encoder_width=64, learning_rate=1e-3, checkpoint_minutes=2.0)},
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
    may_be_zero = "seed checkpoint_minutes entropy_coef value_coef gae_lambda reward_momentum logsumexp_penalty"
    check_numbers(args, may_be_zero, lambda: {
        "gamma must be at most 1": args.gamma <= 1,
        "gae_lambda must be at most 1": args.gae_lambda <= 1,
        "gamma_cl must be below 1": args.gamma_cl < 1,
        "reward_momentum must be below 1": args.reward_momentum < 1,
        "batch_size must be at least 2": args.batch_size >= 2,
        "batch_size must be at most num_envs * num_steps": args.batch_size <= args.steps_per_iteration,
        "window must be odd, and at most grid_size": args.window % 2 == 1 and args.window <= args.grid_size,
        "rooms must be at least 4 cells wide": args.rooms * 4 <= args.grid_size,
        "total_timesteps must be below 2^31": args.num_iterations * args.steps_per_iteration < 2**31,
    })  # fmt: skip
    env = make_noisy_tv(args)
    inside = np.all((env.tv_corner >= 0) & (env.tv_corner + env.tv_side <= env.size))
    check_numbers(args, may_be_zero, lambda: {"tv_centre must leave the TV inside the grid": inside})


def main(args):
    """Collect and learn in turn. Returns the last row of metrics, with the run's folder."""
    start_jax(args)
    check_args(args)
    env = make_noisy_tv(args)
    init = functools.partial(init_state, args, env)
    folder, state = start_run(args, init, f"rollout buffer {4e-6 * args.steps_per_iteration * env.state_size:,.1f} MB")
    _, rollout, metrics = collect.eval_shape(args, env, state)
    with Run(args, folder, state, metrics, learn.eval_shape(args, env, state, rollout)[-1]) as run:
        for iteration in range(run.iteration + 1, args.num_iterations + 1):
            state, rollout, metrics = collect(args, env, state)
            state, learn_metrics = learn(args, env, state, rollout)
            row = run.log(metrics | learn_metrics)
            if iteration in run.picture_iterations:
                save_visits(args, env, folder, state.visits, row["steps"])
            run.save(state)
    result = (
        f"coverage {row['coverage']:,.0f} of {env.free_cells:,} cells, {row['at_tv_run']:.1%} of the steps at the TV"
    )
    print(f"{result}, after {row['steps']:,} steps in {tqdm.format_interval(row['seconds'])}")
    print(f"picture  {folder / 'visits.png'}\nplay     python evaluate.py {folder}")
    return row | {"folder": str(folder)}


if __name__ == "__main__":
    try:
        main(parse_args())
    except (OSError, OverflowError, MemoryError, jax.errors.JaxRuntimeError) as error:  # disk, folder or memory
        fail(f"{type(error).__name__}: {error}; the last good checkpoint, if there was one, is untouched", code=1)
