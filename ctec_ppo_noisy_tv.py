"""C-TeC in front of a noisy TV: does noise hold the explorer? Four bonuses in one PPO, on a grid of rooms.

A region of the grid, the TV, shows new random colours at every step. An agent that is rewarded for what its model
cannot predict finds a source of surprise there that never dries up. C-TeC (Mohamed et al., "Temporal Representations
for Exploration", ICLR 2026, Appendix "Exploration in Noisy TV setting") rewards the distance between phi(s, a) / tau
and psi(s_f), representations that are trained by InfoNCE to tell which future belongs to which state-action: colours
that are drawn anew tell nothing about it. `--bonus` has C-TeC and what it is compared with: RND, the error of a forward
model, and nothing. Success is the number of cells visited.

One iteration:

    128 times, in every environment:                                                  # collect
        act with PPO's policy, store (s, a, log-probability, value, done), count the visit of the new cell
    C-TeC:         reward_t = sum over k of gamma_cl^(k-1) * |phi(s_t, a_t) / tau - psi(s_(t+k))|_2         # update
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

import collections
import csv
import dataclasses
import errno
import functools
import io
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm


# --------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    env: Literal["noisy_tv"] = "noisy_tv"  # environment: a grid of rooms, one of which has the TV
    # the intrinsic reward, which is the only one; none leaves the entropy bonus, that is, uniform random actions
    bonus: Literal["ctec", "rnd", "forward_error", "none"] = "ctec"
    # paper: the published sizes. laptop: the same algorithm in minutes on a CPU. Explicit flags win over it
    preset: Literal["paper", "laptop"] = "paper"
    seed: int = 1  # seed of everything random
    total_timesteps: int = 100_000_000  # environment steps, all environments together (the paper does not say)
    resume: str = ""  # folder of an earlier run: go on from its checkpoint, with its arguments
    run_dir: str = "runs"  # where the folder of the run is made
    checkpoint_minutes: float = 10.0  # minutes between checkpoints; always one at the end, at Ctrl-C and at SIGTERM
    track: bool = False  # send the metrics to wandb too, project "ctec" (WANDB_MODE=offline works)
    distributed: bool = False  # all processes that srun or mpirun has started together share this run

    tv: bool = True  # noise on the TV; --no-tv leaves plain floor in its place
    # row of the TV's centre, as a share of the grid's height (0.375: the middle of the second row of rooms)
    tv_row: float = 0.375
    tv_column: float = 0.375  # column of the TV's centre, as a share of the grid's width
    tv_share: float = 1 / 64  # share of the grid's cells that the TV, a square, takes
    grid_size: int = 256  # cells along each side of the grid (paper: 256)
    rooms: int = 4  # rooms along each side of the grid, with walls and doors between them; 1 is open floor
    window: int = 5  # cells along each side of what the agent sees around it; odd
    # where episodes begin. random: in any free cell, those of the TV too, drawn at every reset (as in xland-minigrid).
    # fixed: in the middle of the first room (a harder test)
    start: Literal["random", "fixed"] = "random"

    num_envs: int = 1024  # parallel environments (paper Table 2; 256 on the humanoid)
    # steps in each environment before the update of an iteration; futures end with them, and gamma_cl 0.3 needs few
    num_steps: int = 128
    # steps after which an episode is truncated; the far corner is some 500 steps from the fixed start
    episode_length: int = 1024
    batch_size: int = 1024  # transitions in a gradient step (paper Table 2; 256 on the humanoid)
    update_epochs: int = 4  # passes over a rollout, of PPO and of the encoders (ETD)
    learning_rate: float = 3e-4  # Adam step size of PPO and of the intrinsic-reward model (ETD's of PPO)
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
    # learn the temperature of the logits (paper Section 4.1); --no-learn-tau holds it at 1 (Appendix G.8)
    learn_tau: bool = True
    # phi: divide phi by tau before the distance, in loss and reward (authors' code). logits: C / tau in the loss (text)
    temperature: Literal["phi", "logits"] = "phi"
    logsumexp_penalty: float = 0.0  # weight of mean(logsumexp^2) in the contrastive loss (paper Table 6)
    # all: the weighted sum over the rest of the episode inside the rollout. single: one sampled future
    reward_samples: Literal["all", "single"] = "all"
    # divide the weighted sum by the sum of its weights (the paper found it better without, Appendix E.4)
    normalize_reward: bool = False

    @property
    def steps_per_iteration(self):
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self):
        return math.ceil(self.total_timesteps / self.steps_per_iteration)

    @property
    def first_update(self):
        return 1


PAPER = {}  # there is one environment, and the defaults are its numbers
PRESETS = {
    "paper": {},
    "laptop": dict(total_timesteps=500_000, grid_size=64, episode_length=256, num_envs=64, batch_size=512,
                   agent_width=64, encoder_width=64, learning_rate=1e-3, checkpoint_minutes=2.0),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- networks
class MLP(nn.Module):
    """Hidden relu layers and a linear output layer."""

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
class Pairs:
    """Positive pairs for a contrastive loss. For each row, the other rows' positives are its negatives."""

    anchor: jax.Array  # (B, ...)
    positive: jax.Array  # (B, ...)
    weight: jax.Array  # (B,) 1.0; 0.0: no positive, still a negative for the others


@flax.struct.dataclass
class Steps:  # of a rollout, as the bonus sees them
    states: jax.Array  # (T+1, N, state_size)
    action: jax.Array  # (T, N, actions) one-hot
    weight: jax.Array | None  # (N, T, T+1) C-TeC: how much each state counts as a future of each step


def steps_left(done):
    """(T, N) number of states that follow each step's state in its episode, inside the rollout of T+1 states. A step
    with done is the last of its episode."""
    t = jnp.arange(len(done))[:, None]
    return jax.lax.cummin(jnp.where(done, t, len(done)), axis=0, reverse=True) - t


def truncated_geometric(key, left, gamma):
    """Offsets k = 1..left with P(k) ~ gamma^(k-1), by the inverse distribution function; 0 where nothing is left."""
    log_gamma = jnp.log(gamma)
    u = jax.random.uniform(key, left.shape)
    k = jnp.ceil(jnp.log1p(u * jnp.expm1(left * log_gamma)) / log_gamma).astype(jnp.int32)
    return jnp.clip(k, jnp.minimum(left, 1), left)


def future_times(key, args, left):
    """(T, N) time of one sampled future of each step (Eq. 1); an episode's last step returns itself and is masked."""
    return jnp.arange(len(left))[:, None] + truncated_geometric(key, left, args.gamma_cl)


def future_weights(key, args, left):
    """(N, T, T+1) weight gamma_cl^(k-1) of the state k steps ahead, 0 beyond the episode (Appendix E.4); with
    `--reward-samples single`, weight 1 of one sampled future."""
    steps = len(left)
    left_of = left.T[..., None]  # (N, T, 1)
    if args.reward_samples == "single":
        return jax.nn.one_hot(future_times(key, args, left).T, steps + 1) * (left_of > 0)
    k = jnp.arange(steps + 1) - jnp.arange(steps)[:, None]  # (T, T+1)
    weight = jnp.where((k >= 1) & (k <= left_of), args.gamma_cl ** (k - 1.0), 0.0)
    if args.normalize_reward:
        weight /= jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-8)
    return weight


def unit_length(x):
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-12)


def bonus_network(args, outputs):
    """The shape of all networks of the bonuses."""
    return MLP(args.encoder_width, outputs, 3)


def encode(params, args, x):
    """phi of [s, a], or psi of s_f: (..., representation_size), of unit length along the features."""
    return unit_length(bonus_network(args, args.representation_size).apply(params, x))


def l2_similarity(phi, psi):
    """C = -|phi_i - psi_j|_2 for all pairs of rows."""
    product = jnp.matmul(phi, psi.T, precision="highest")  # TF32 would be felt near 0
    squared = jnp.sum(phi**2, axis=-1)[:, None] + jnp.sum(psi**2, axis=-1) - 2 * product
    return -jnp.sqrt(jnp.maximum(squared, 0.0) + 1e-8)


def weighted_mean(x, weight):
    return jnp.sum(x * weight) / jnp.maximum(jnp.sum(weight), 1.0)


def infonce(logits, weight, logsumexp_penalty):
    """InfoNCE over the rows, positives on the diagonal (Eq. 2), plus the penalty on logsumexp^2."""
    lse = jax.nn.logsumexp(logits, axis=1)  # (B,)
    return weighted_mean(lse - jnp.diag(logits) + logsumexp_penalty * lse**2, weight)


def contrastive_metrics(loss, logits, weight, phi, psi):
    positive = jnp.diag(logits)
    return {
        "contrastive_loss": loss,
        "accuracy": weighted_mean(jnp.argmax(logits, axis=1) == jnp.arange(len(logits)), weight),
        "logits_positive": weighted_mean(positive, weight),
        "logits_negative": (jnp.sum(logits) - jnp.sum(positive)) / (logits.size - len(logits)),
        "phi_variance": jnp.mean(jnp.var(phi, axis=0)),
        "psi_variance": jnp.mean(jnp.var(psi, axis=0)),
    }


def contrastive_loss(params, args, batch):
    """C-TeC: InfoNCE between phi(s, a) and psi(s_f) over the rows of Pairs (Eq. 2)."""
    phi = encode(params["phi"], args, batch.anchor)
    psi = encode(params["psi"], args, batch.positive)
    tau = jnp.exp(params["log_tau"]) if args.learn_tau else 1.0
    if args.temperature == "phi":
        logits = l2_similarity(phi / tau, psi)  # (B, B), row i: state-action i against every future
    else:
        logits = l2_similarity(phi, psi) / tau
    loss = infonce(logits, batch.weight, args.logsumexp_penalty)
    metrics = contrastive_metrics(loss, logits, batch.weight, phi, psi)
    return loss, metrics | {"tau": jnp.exp(params["log_tau"])}  # stays at 1 if it is not learned


def futures_reward(params, args, batch):
    """C-TeC: (T, N) weighted sum of the distances |phi_t / tau - psi_(t+k)|_2 to the futures (Appendix E.4). phi is
    computed once for each of T steps and psi once for each of T+1 states, never for a pair."""
    phi = encode(params["phi"], args, jnp.concatenate([batch.states[:-1], batch.action], axis=-1))
    psi = encode(params["psi"], args, batch.states)
    if args.temperature == "phi" and args.learn_tau:
        phi = phi / jnp.exp(params["log_tau"])
    distance = -jax.vmap(l2_similarity, in_axes=1)(phi, psi)  # (N, T, T+1)
    return jnp.sum(batch.weight * distance, axis=-1).T


def prediction_error(params, args, anchor, next_obs):
    """(...) mean squared error at the next state. RND: of a predictor of a fixed random network's features of s'.
    Forward model: of the prediction of s' itself, place and colours, from the anchor [s, a]."""
    if args.bonus == "rnd":
        network = bonus_network(args, args.representation_size)
        predicted = network.apply(params["predictor"], next_obs)
        target = jax.lax.stop_gradient(network.apply(params["target"], next_obs))
    else:
        predicted = bonus_network(args, next_obs.shape[-1]).apply(params["forward"], anchor)
        target = next_obs
    return jnp.mean((predicted - target) ** 2, axis=-1)


def model_loss(params, args, batch):
    """The loss of the model, for Pairs: state-actions and their futures, or (RND, forward model) next states.
    No gradient reaches RND's target, and Adam leaves parameters without gradient as they are."""
    if args.bonus == "ctec":
        return contrastive_loss(params, args, batch)
    loss = weighted_mean(prediction_error(params, args, batch.anchor, batch.positive), batch.weight)
    return loss, {"model_loss": loss}


def intrinsic_reward(params, args, batch):
    """(T, N) the reward of the Steps before it is standardised. Where no state follows, it means nothing."""
    if args.bonus == "none":
        return jnp.zeros(batch.action.shape[:2])
    if args.bonus == "ctec":
        return futures_reward(params, args, batch)
    anchor = jnp.concatenate([batch.states[:-1], batch.action], axis=-1)
    return prediction_error(params, args, anchor, batch.states[1:])


# --------------------------------------------------------------------------------------------------------- PPO
@flax.struct.dataclass
class Model:
    params: Any
    opt_state: Any


def init_model(optimizer, params):
    return Model(params, optimizer.init(params))


def gradient_update(loss_fn, model, optimizer, args, *inputs):
    """One optimiser step on loss_fn(params, args, *inputs) -> (loss, aux)."""
    grads, aux = jax.grad(loss_fn, has_aux=True)(model.params, args, *inputs)
    updates, opt_state = optimizer.update(grads, model.opt_state)
    return Model(optax.apply_updates(model.params, updates), opt_state), aux


def clipped_adam(args, learning_rate):
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(learning_rate, eps=args.adam_eps))


class ActorCritic(nn.Module):
    """What an action distribution needs, (..., outputs), and the value (...,)."""

    width: int
    outputs: int

    @nn.compact
    def __call__(self, obs):
        dense = lambda size, scale=2**0.5: nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))
        head = lambda size: dense(size, 0.0)(nn.relu(dense(self.width)(nn.relu(dense(self.width)(obs)))))
        return head(self.outputs), head(1)[..., 0]  # scale 0: the first policy is the same everywhere


class Categorical:
    """One of a number of actions."""

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
    obs: jax.Array  # (T, N, state_size)
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


def collect(args, env, state, key):
    """`num_steps` steps in every environment. What the TV shows has a random stream of its own, which neither the
    policy nor its actions touch."""
    actions = action_distribution(env)
    policy = lambda obs: ActorCritic(args.agent_width, actions.outputs).apply(state.agent.params, obs)
    key_actions, key_starts = jax.random.split(key)
    key_tv = jax.random.fold_in(state.key_tv, state.iteration)
    colours = env.draw_colours(key_tv, (args.num_steps, args.num_envs))
    starts = env.draw_starts(key_starts, (args.num_steps, args.num_envs))  # one for each episode that may end

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
    return state.replace(walkers=walkers, visits=count_visits(state.visits, rollout.cell)), rollout


# ---------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class RunState:
    key: jax.Array
    key_tv: jax.Array  # of what the TV shows
    iteration: jax.Array
    walkers: Walkers
    visits: jax.Array  # (cells,) how often each cell was visited
    reward_moments: jax.Array  # (2,) running mean and variance
    agent: Model
    model: Model  # C-TeC's {"phi", "psi", "log_tau"}, RND's {"predictor", "target"}, {"forward"}, or {}


def standardize_known(args, moments, iteration, reward, known):
    """The reward over its running mean and deviation, which begin with the first rollout's; 0, the mean, for the steps
    whose reward is not known."""
    mean = weighted_mean(reward, known)
    now = jnp.stack([mean, weighted_mean((reward - mean) ** 2, known)])
    moments = jnp.where(iteration == 1, now, args.reward_momentum * moments + (1 - args.reward_momentum) * now)
    return moments, now, known * (reward - moments[0]) / (jnp.sqrt(moments[1]) + 1e-8)


def update(args, env, state, rollout, key):
    """Rewards from the model as it is, then `update_epochs` passes of model and agent over the rollout, in
    gradient steps of `batch_size` shuffled transitions (a last smaller batch is left out)."""
    key_reward, key_epochs = jax.random.split(key)
    actions = action_distribution(env)
    states = jnp.concatenate([rollout.obs, state.walkers.obs[None]])  # (T+1, N, state_size)
    action = actions.vector(rollout.action)
    left = steps_left(rollout.done)
    known = (left > 0).astype(jnp.float32)  # an episode's last step has no future and no next state

    # intrinsic rewards and their advantages
    weight = future_weights(key_reward, args, left) if args.bonus == "ctec" else None
    reward = intrinsic_reward(state.model.params, args, Steps(states, action, weight))
    moments, now, scaled = standardize_known(args, state.reward_moments, state.iteration, reward, known)
    scaled = scaled + args.gamma * rollout.final_value  # a truncated episode would have gone on
    last_value = ActorCritic(args.agent_width, actions.outputs).apply(state.agent.params, states[-1])[1]
    advantage = gae(args, scaled, rollout.value, rollout.done, last_value)
    target = advantage + rollout.value
    advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)  # over the whole rollout

    # gradient steps of model and agent; a batch may be of any environments
    states, action, left, known = shard((states, action, left, known))
    rollout, advantage, target = shard((rollout, advantage, target))
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # (T * N, ...)
    steps = jax.tree.map(flat, (rollout.replace(obs=None), advantage, target))  # obs: the first rows of flat(states)
    optimizer = clipped_adam(args, args.learning_rate)

    def epoch(models, key):
        key_future, key_order = jax.random.split(key)
        following = jnp.arange(args.num_steps)[:, None] + jnp.minimum(left, 1)
        time_of = future_times(key_future, args, left) if args.bonus == "ctec" else following
        positive = flat(time_of * args.num_envs + jnp.arange(args.num_envs))  # rows of flat(states)
        order = jax.random.permutation(key_order, left.size)[: left.size // args.batch_size * args.batch_size]

        def step(models, rows):
            agent, model = models
            obs = flat(states)[rows]
            metrics = {}
            if args.bonus != "none":
                anchor = jnp.concatenate([obs, flat(action)[rows]], axis=-1)
                pairs = Pairs(anchor, flat(states)[positive[rows]], flat(known)[rows])
                model, metrics = gradient_update(model_loss, model, optimizer, args, pairs)
            batch, *of_batch = jax.tree.map(lambda x: x[rows], steps)
            batch = batch.replace(obs=obs)
            agent, ppo_metrics = gradient_update(ppo_rows_loss, agent, optimizer, args, env, batch, *of_batch)
            return (agent, model), metrics | ppo_metrics

        return jax.lax.scan(step, models, shard(order.reshape(-1, args.batch_size), None, "envs"))

    keys = jax.random.split(key_epochs, args.update_epochs)
    (agent, model), metrics = jax.lax.scan(epoch, (state.agent, state.model), keys)
    metrics = jax.tree.map(jnp.mean, metrics) | {"reward_mean": now[0], "reward_std": jnp.sqrt(now[1])}
    return state.replace(reward_moments=moments, agent=agent, model=model), metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_iteration(args, env, state):
    """Collect, then learn: all on the device, compiled once in a run."""
    key, key_collect, key_update = jax.random.split(state.key, 3)
    state = state.replace(key=key, iteration=state.iteration + 1)

    # play `num_steps` steps in every environment
    state, rollout = collect(args, env, state, key_collect)

    # learn from the rollout
    state, metrics = update(args, env, state, rollout, key_update)
    metrics["parameter_norm"] = optax.global_norm((state.model.params, state.agent.params))
    return shard_state(state), metrics | visit_metrics(env, state.visits, rollout.cell)


# ----------------------------------------------------------------------------------------------- initial state
def init_bonus(args, env, key):
    """The parameters of the intrinsic-reward model."""
    key_one, key_two = jax.random.split(key)
    obs = jnp.zeros(env.state_size)
    anchor = jnp.zeros(env.state_size + env.num_actions)
    features = bonus_network(args, args.representation_size)
    if args.bonus == "ctec":
        return {"phi": features.init(key_one, anchor), "psi": features.init(key_two, obs), "log_tau": jnp.zeros(())}
    if args.bonus == "rnd":
        return {"predictor": features.init(key_one, obs), "target": features.init(key_two, obs)}
    if args.bonus == "forward_error":
        return {"forward": bonus_network(args, env.state_size).init(key_one, anchor)}
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
    return RunState(
        key=key,
        key_tv=key_tv,
        iteration=jnp.int32(0),
        walkers=Walkers(cell, obs, episode_step),
        visits=jnp.zeros(env.size**2, jnp.int32),
        reward_moments=jnp.zeros(2),
        agent=init_model(optimizer, agent),
        model=init_model(optimizer, init_bonus(args, env, key_model)),
    )


# ==================================================================================================== appendix
# What a reader of the method does not need: devices, coverage, the grid, the run's folder, pictures, and main.


# ----------------------------------------------------------------------------------------------------- devices
# the axes by which fields of RunState are split over the devices
SPLIT = {name: ("envs",) for name in ("env", "episode_step", "players", "worlds", "walkers", "memory", "root")} | {
    "replay": (None, "envs")
}


def join_processes():
    """Processes that srun or mpirun has started together, on one machine or several, share a run. Only the first one
    prints and writes."""
    jax.distributed.initialize()
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")


def all_gather(tree):
    """All-gather a sharded pytree: whole arrays in every process, or a row of each process's own arrays."""
    if jax.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def device_mesh():
    return jax.make_mesh((jax.device_count(),), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))


def shard(tree, *axes):
    """Split the first axes of the arrays over the devices where they are named "envs"; copy all else to each device."""
    if jax.device_count() == 1:
        return tree
    mesh = device_mesh()
    place = lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*axes[: x.ndim])))
    return jax.tree.map(place, tree)


def shard_state(state):
    """Environments and replay are split over the devices; everything else is copied to all of them."""
    return state.replace(**{name: shard(field, *SPLIT.get(name, ())) for name, field in vars(state).items()})


# ---------------------------------------------------------------------------------------------------- coverage
def count_visits(visits, cell):
    return visits.at[cell.ravel()].add(1)


def visit_metrics(env, visits, cell):
    """Coverage so far, and how much of the time was spent at the TV. Without noise: at the place where it would be."""
    coverage = jnp.sum(visits > 0)
    return {
        "coverage": coverage,
        "coverage_share": coverage / env.free_cells,
        "at_tv": jnp.mean(jnp.asarray(env.sees_tv)[cell]),
        "on_tv": jnp.mean(jnp.asarray(env.is_tv).ravel()[cell]),
        "at_tv_run": jnp.sum(jnp.where(env.sees_tv, visits, 0)) / jnp.sum(visits),
    }


# ------------------------------------------------------------------------------------------------ environments
FLOOR = 0
WALL = 1
TV = 2


class NoisyGrid:
    """Rooms with doors, and a TV in one of them, in tables: a move is one look-up, and so is a view. A cell has a
    number, row * size + column; actions are up, down, left, right, stay. A wall, or the grid's border, stops a move."""

    num_actions = 5
    moves = np.array([(-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)])

    def __init__(self, size, rooms, window, tv, tv_row, tv_column, tv_share, start):
        self.size = size
        self.window = window
        self.is_wall = self.walls(size, rooms)
        self.free_cells = int(np.sum(~self.is_wall))
        middle = size // rooms // 2 * (size + 1)  # of the first room
        starts = np.flatnonzero(~self.is_wall) if start == "random" else np.array([middle])
        self.starts = starts.astype(np.int32)  # the cells in which an episode may begin
        self.tv_side = max(round(tv_share**0.5 * size), 1)
        self.tv_corner = np.round(np.array([tv_row, tv_column]) * size - self.tv_side / 2).astype(int)
        row, column = np.divmod(np.arange(size**2), size)
        in_tv = lambda x, corner: (x >= corner) & (x < corner + self.tv_side)
        in_square = in_tv(row, self.tv_corner[0]) & in_tv(column, self.tv_corner[1])
        self.is_tv = in_square.reshape(size, size) & ~self.is_wall

        # where each action leads from each cell, (cells, actions)
        place = np.stack([row, column], axis=-1)
        target = np.clip(place[:, None] + self.moves, 0, size - 1)
        blocked = self.is_wall[target[..., 0], target[..., 1]]
        self.target = np.where(blocked, np.arange(size**2)[:, None], target @ [size, 1]).astype(np.int32)

        # what is at each place of the window around each cell, (cells, window^2)
        content = np.where(self.is_wall, WALL, FLOOR)
        if tv:
            content = np.where(self.is_tv, TV, content)
        self.view = self.around(content, WALL).astype(np.uint8)
        self.sees_tv = self.around(self.is_tv, False).any(axis=-1)

        # a place along one axis: sines and cosines of periods 2 * size, size, ... down to 8 cells or less
        octaves = 2.0 ** np.arange(max(math.ceil(math.log2(size / 8)), 0) + 2)
        angle = np.pi * np.arange(size)[:, None] * octaves / size
        self.place_code = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1).astype(np.float32)
        self.state_size = 2 * self.place_code.shape[1] + 3 * window**2

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
        """(*shape, window^2) one of eight colours for each place of the window, for one step of each environment. All
        of the TV changes at every step and nobody sees more of it than a window: nothing else has to be drawn."""
        return jax.random.bits(key, (*shape, self.window**2), jnp.uint8) & 7

    def draw_starts(self, key, shape):
        return jax.random.choice(key, jnp.asarray(self.starts), shape)

    def move(self, cell, action):
        return jnp.asarray(self.target)[cell, action]

    def observe(self, cell, colours):
        """(N, state_size) the place, and red, green and blue of the cells around it: floor is black, walls and what
        lies outside are grey, the TV has the eight corners of the colour cube."""
        view = jnp.asarray(self.view)[cell]  # (N, window^2)
        channels = []
        for bit in range(3):
            shown = (colours >> bit & 1).astype(jnp.float32)
            channels.append(jnp.where(view == TV, shown, jnp.where(view == WALL, 0.5, 0.0)))
        code = jnp.asarray(self.place_code)
        return jnp.concatenate([code[cell // self.size], code[cell % self.size], *channels], axis=-1)


@functools.cache
def make_grid(*numbers):
    return NoisyGrid(*numbers)


def make_noisy_tv(args):
    place = (args.tv_row, args.tv_column, args.tv_share)
    return make_grid(args.grid_size, args.rooms, args.window, args.tv, *place, args.start)


# ----------------------------------------------------------------------------------- run folder and checkpoint
METRICS = """iteration steps seconds steps_per_second coverage coverage_share at_tv on_tv at_tv_run reward_mean
    reward_std contrastive_loss accuracy logits_positive logits_negative tau phi_variance psi_variance model_loss
    policy_loss value_loss value_mean entropy kl clipped parameter_norm""".split()  # the columns of metrics.csv


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def clock(seconds):
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def write_atomically(path, write):
    """write(file) into a temporary file, which then takes the place of path: a kill or a full disk loses nothing. The
    first process writes for all."""
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


def leaf_name(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def save_checkpoint(path, state):
    """Every array of the state under its name. np.savez fetches and writes them one after the other."""
    leaves = {leaf_name(name): x for name, x in jax.tree_util.tree_leaves_with_path(all_gather(state))}
    write_atomically(path, lambda file: np.savez(file, **leaves))


def load_checkpoint(path, template):
    """The state in path, whose arrays must have the names, shapes and dtypes of template."""

    def restore(name, expected):
        array = file[leaf_name(name)]
        if (array.shape, array.dtype) != (expected.shape, expected.dtype):
            found = f"{array.dtype}{list(array.shape)}, not {expected.dtype}{list(expected.shape)}"
            raise ValueError(f"{leaf_name(name)} is {found}")
        return jnp.array(array)

    try:
        with np.load(path, allow_pickle=False) as file:
            return jax.tree_util.tree_map_with_path(restore, template)
    except Exception as error:  # missing, truncated and mismatched files raise different exceptions
        fail(f"{path} is no checkpoint of this run ({error}): put a copy in its place, or start without --resume")


def read_metrics(path, iteration):
    """The rows of metrics.csv up to an iteration, as dictionaries."""
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row.values()]  # a kill may have cut the last one
    except (OSError, csv.Error) as error:
        fail(f"{path}: {error}; it belongs to the checkpoint beside it")
    if reader.fieldnames != METRICS:
        fail(f"{path} is of another version of this script")
    return [row for row in rows if int(row["iteration"]) <= iteration]


def write_metrics(path, rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, METRICS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check_memory(args, template):
    """One line and exit code 2, before anything is allocated, if a device's share of the state does not fit it."""
    device = jax.local_devices()[0]
    limits = device.memory_stats() or {}  # a CPU has none
    there = limits.get("bytes_limit", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    split = sum(nbytes(getattr(template, name, ())) for name in SPLIT)
    share = nbytes(template) - split + split // jax.device_count()
    if share > there:
        sizes = f"the run's state needs {share / 1e9:,.1f} GB, the device ({device.platform}) has"
        fail(f"{sizes} {there / 1e9:,.1f} GB: give fewer --num-envs (now {args.num_envs}), or smaller buffers")


def start_run(args, init, template, buffers):
    """Make the run's folder, or open the one to resume. Returns it, the state (init(), or the checkpoint's) and the
    seconds spent so far. template has the state's shapes; buffers says in words what takes the memory."""
    check_memory(args, template)
    state = None
    rows = []
    name = f"{args.env}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(args.resume or Path(args.run_dir) / name)
    if args.resume:
        state = load_checkpoint(folder / "checkpoint.npz", template)
        rows = read_metrics(folder / "metrics.csv", int(state.iteration))
        if state.iteration >= args.num_iterations:
            fail(f"{folder} is complete; to go on, give more --total-timesteps than {args.total_timesteps:,}")
    elif jax.process_index() == 0:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            fail(f"--run-dir {args.run_dir}: {folder} cannot be made ({error.strerror})")
    config = json.dumps(dataclasses.asdict(args) | {"resume": "", "distributed": False}, indent=1)
    write_atomically(folder / "args.json", lambda file: file.write(config.encode()))
    write_metrics(folder / "metrics.csv", rows)

    device = jax.devices()[0]
    devices = f"{jax.device_count()} devices, each" if jax.device_count() > 1 else "device"
    print(f"{Path(__file__).stem} on {args.env}, seed {args.seed}, into {folder}")
    print(f"{devices} {device.platform} ({device.device_kind}), {buffers}", flush=True)
    if device.platform == "cpu" and args.preset == "paper":
        print("no accelerator was found: --preset laptop has sizes that suit a CPU", flush=True)
    flag = "--xla_cpu_use_fusion_emitters=false"
    is_robot = args.env.startswith(("ant", "humanoid", "arm"))
    if device.platform == "cpu" and is_robot and flag not in os.environ.get("XLA_FLAGS", ""):
        print(f"robots step faster on a CPU, the arm 100 times as fast, with XLA_FLAGS={flag}", flush=True)
    seconds = float(rows[-1]["seconds"]) if rows else 0.0
    if jax.device_count() == 1:
        return folder, state or init(), seconds
    return folder, jax.jit(lambda state: shard_state(state or init()))(jax.device_get(state)), seconds


def compile_iteration(args, env, state):
    """train_iteration for this state, compiled now, so that the first iteration is timed like the others."""
    began = time.time()
    iterate = train_iteration.lower(args, env, state).compile()
    print(f"compiled in {clock(time.time() - began)}", flush=True)
    return iterate


def finite_metrics(args, folder, iteration, metrics):
    """The metrics as numbers. One that is not finite ends the run; but before the first update, and while the
    parameters are finite, nan means: no value yet. There is no episode length while no episode ends."""
    values = {name: float(metrics[name]) for name in METRICS if name in metrics}
    missing = [name for name, x in values.items() if not math.isfinite(x)]
    waiting = iteration < args.first_update and math.isfinite(values.get("parameter_norm", 0.0))
    for name in missing:
        no_value = waiting or name == "episode_length"
        if not no_value or not math.isnan(values[name]):
            words = f"iteration {iteration}: {name} is {values[name]}"
            fail(f"{words}; the last good checkpoint, if any, is kept in {folder}", code=1)
    return {name: x for name, x in values.items() if name not in missing}


def show_progress(args, bar, row):
    """On a terminal tqdm's bar; elsewhere a line for each twentieth of the run."""
    name = "coverage" if "coverage" in row else "achievements"
    result = f"{name} {round(row[name], 2):,.10g}, {row['steps_per_second']:,.0f} steps/s"
    iterations_left = args.num_iterations - row["iteration"]
    if not bar.disable:
        bar.set_postfix_str(result, refresh=False)
        bar.update()
    elif row["iteration"] % math.ceil(args.num_iterations / 20) == 0 or not iterations_left:
        left = f"{clock(iterations_left * args.steps_per_iteration / row['steps_per_second'])} left"
        when = left if row["iteration"] >= args.first_update else "not learning yet"
        print(f"{row['iteration'] / args.num_iterations:4.0%}  {result}, {when}", flush=True)


def iterations(args, folder, state, seconds, iterate):
    """Yield (state, row of metrics, whatever else iterate returns) after each iteration. Writes metrics.csv, shows the
    progress, and saves checkpoints when the caller is done with the iteration. Stops at Ctrl-C and SIGTERM."""
    track = args.track and jax.process_index() == 0
    if track:
        import wandb

        wandb.init(project="ctec", id=folder.name, resume="allow", config=dataclasses.asdict(args), dir=folder)
    received = []  # signals
    handle = lambda number, _: received.append(signal.Signals(number))
    handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    first = int(state.iteration) + 1
    layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    bar = tqdm(total=args.num_iterations, initial=first - 1, bar_format=layout, disable=None)  # None: if no terminal
    log = open(folder / "metrics.csv" if jax.process_index() == 0 else os.devnull, "a", newline="")
    writer = csv.DictWriter(log, METRICS, lineterminator="\n")
    recent = collections.deque(maxlen=20)  # seconds of the latest iterations, without those before the first update
    saved = time.time()
    try:
        for iteration in range(first, args.num_iterations + 1):
            began = time.time()
            state, metrics, *more = iterate(state)
            metrics = jax.device_get(metrics)
            spent = time.time() - began
            seconds += spent
            if iteration <= args.first_update:
                recent.clear()
            recent.append(spent)

            values = finite_metrics(args, folder, iteration, metrics)
            rate = len(recent) * args.steps_per_iteration / sum(recent)
            row = {"iteration": iteration, "steps": iteration * args.steps_per_iteration}
            row |= {"seconds": round(seconds, 1), "steps_per_second": round(rate, 1)} | values
            writer.writerow(row)
            log.flush()
            if track:
                wandb.log(row, step=row["steps"])
            show_progress(args, bar, row)
            yield state, row, *more

            last = iteration == args.num_iterations
            due = time.time() - saved >= 60 * args.checkpoint_minutes
            stopped, due = np.any(all_gather(np.array([[bool(received), due]])), axis=0)
            if stopped or last or due:
                try:
                    save_checkpoint(folder / "checkpoint.npz", state)
                except (OSError, MemoryError) as error:  # there may be room again before the next one
                    if stopped or last:
                        raise
                    bar.write(f"warning: checkpoint not written, the last good one stays: {error}", file=sys.stderr)
                saved = time.time()
            if stopped and not last:
                bar.close()
                by = received[0] if received else signal.SIGTERM  # which another process received
                fail(f"stopped by {by.name}; go on with: python {Path(__file__).name} --resume {folder}", code=128 + by)
    finally:
        bar.close()
        log.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if track:
            wandb.finish()


# ---------------------------------------------------------------------------------------------------- pictures
def picture_iterations(args):
    """Five moments of a run, the end among them."""
    return {round(k * args.num_iterations / 5) for k in range(1, 6)}


def draw_visits(axes, env, title, visits):
    """Heat map of the (cells,) visits on a logarithmic scale, walls grey, unvisited cells white, the TV
    outlined, a start that is fixed marked."""
    from matplotlib.colors import LogNorm

    side = env.tv_side
    top, left = env.tv_corner - 0.5
    visits = np.asarray(visits, float).reshape(env.size, env.size)
    axes.imshow(np.where(env.is_wall, 0.5, np.nan), cmap="gray", vmin=0, vmax=1)
    norm = LogNorm(1, max(visits.max(), 10))
    image = axes.imshow(np.where(visits > 0, visits, np.nan), cmap="viridis", norm=norm)
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
    noise = "TV on" if args.tv else "TV off"
    share = np.sum(visits > 0) / env.free_cells
    title = f"{args.bonus}, {noise}: {share:.1%} of {env.free_cells:,} cells in {steps:,} steps"
    figure.colorbar(draw_visits(axes, env, title, visits), ax=axes, label="visits")
    write_atomically(folder / "visits.png", lambda file: figure.savefig(file, dpi=100))


# -------------------------------------------------------------------------------------------------------- main
def parse_args(argv=None):
    """Explicit flags win over the preset, the preset over the paper's changes for one robot, those over the defaults.
    With --resume, explicit flags win over the arguments of the earlier run."""
    parse = functools.partial(tyro.cli, Args, args=argv, description=__doc__)
    args = parse()
    if not args.resume:
        robot = args.env.split("_")[0]
        return parse(default=Args(**PAPER.get(robot, {}) | PRESETS[args.preset]))
    try:
        earlier = json.loads((Path(args.resume) / "args.json").read_text())
        default = Args(**earlier | {"resume": args.resume})
    except (OSError, ValueError, TypeError) as error:
        fail(f"--resume {args.resume}: it is not the folder of a run of this script ({error})")
    return parse(default=default)


MAY_BE_ZERO = ("seed", "checkpoint_minutes", "logsumexp_penalty", "noise", "forward_coef", "entropy_coef", "value_coef",
               "task_reward_coef", "intrinsic_coef", "random_iterations", "video_steps", "reward_momentum",
               "gae_lambda", "slip", "epsilon", "first_offset")  # fmt: skip
AT_MOST_ONE = ("gamma", "target_rate", "gae_lambda", "forward_weight")
BELOW_ONE = ("gamma_cl", "reward_momentum")


def check_numbers(args):
    """One line and exit code 2 for out-of-range arguments."""
    if not args.run_dir:
        fail("--run-dir: it must not be empty")
    for name, value in dataclasses.asdict(args).items():
        if type(value) not in (int, float):
            continue
        flag = f"--{name.replace('_', '-')} {value}"
        if not math.isfinite(value):
            fail(f"{flag}: it must be a finite number")
        if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
            fail(f"{flag}: it must be {'at least' if name in MAY_BE_ZERO else 'above'} 0")
        if value > 1 and name in AT_MOST_ONE:
            fail(f"{flag}: it must be at most 1")
        if value >= 1 and name in BELOW_ONE:
            fail(f"{flag}: it must be below 1")
        if value >= 2**32 and name == "seed":
            fail(f"{flag}: it must be below 2^32")
        if name in ("num_envs", "batch_size") and value % jax.device_count():
            fail(f"{flag}: it must be a multiple of the {jax.device_count()} devices")


def check_tv_args(args):
    check_numbers(args)
    steps = args.steps_per_iteration
    if not 2 <= args.batch_size <= steps:
        fail(f"--batch-size {args.batch_size}: it must be at least 2, and at most num_envs * num_steps = {steps}")
    if args.num_steps * args.num_iterations >= 2**31 // args.num_envs:
        fail(f"--total-timesteps {args.total_timesteps}: it must be below 2^31, as far as visits are counted")
    if args.window % 2 == 0 or args.window > args.grid_size:
        fail(f"--window {args.window}: it must be odd, and at most --grid-size {args.grid_size}")
    if args.rooms * 4 > args.grid_size:
        fail(f"--rooms {args.rooms}: a room must be at least 4 cells wide, and --grid-size is {args.grid_size}")
    if args.tv_share >= 1:
        fail(f"--tv-share {args.tv_share}: it must be below 1")
    env = make_noisy_tv(args)
    if np.any(env.tv_corner < 0) or np.any(env.tv_corner + env.tv_side > env.size):
        place = f"--tv-row {args.tv_row} --tv-column {args.tv_column}"
        fail(f"{place}: the TV of {env.tv_side} x {env.tv_side} cells must lie inside the grid")


def finish_tv(env, folder, row):
    """The last lines of a run, and what main returns."""
    pictures = sorted(path.name for path in folder.glob("*") if path.suffix == ".png")
    result = f"coverage {row['coverage']:,.0f} of {env.free_cells:,} cells after {row['steps']:,} steps"
    print(f"{result} in {clock(row['seconds'])}, {row['at_tv_run']:.1%} of them at the TV")
    print(f"pictures {', '.join(pictures)}")
    print(f"folder   {folder}")
    return row | {"folder": str(folder)}


def main(args):
    """A loop around train_iteration. Returns the last row of metrics, with the run's folder."""
    if args.distributed:
        join_processes()
    check_tv_args(args)
    env = make_noisy_tv(args)
    init = functools.partial(init_state, args, env)
    buffers = f"rollout buffer {4e-6 * args.steps_per_iteration * env.state_size:,.1f} MB"
    folder, state, seconds = start_run(args, init, jax.eval_shape(init), buffers)
    iterate = compile_iteration(args, env, state)
    for state, row in iterations(args, folder, state, seconds, iterate):
        if row["iteration"] in picture_iterations(args):
            save_visits(args, env, folder, state.visits, row["steps"])
    return finish_tv(env, folder, row)


if __name__ == "__main__":
    try:
        main(parse_args())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        fail(f"{error}; the last good checkpoint, if there was one, is untouched", code=1)
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C", code=130)
