"""ICM with recurrent PPO on Craftax-Classic.

The intrinsic curiosity module (Pathak et al. 2017), as a baseline of C-TeC (Mohamed et al., "Temporal Representations
for Exploration", ICLR 2026). An encoder learns features from which the action can be told (inverse model); a forward
model predicts the features of the next state from those of the state and the action. The agent's only reward is the
forward error: go where you cannot foresee what you can control. There is no task reward; success is the number of
achievements that an episode unlocks.

    python icm_ppo_craftax.py                          # the paper's sizes, for a GPU
    python icm_ppo_craftax.py --preset laptop          # under half an hour on two CPU cores
    python icm_ppo_craftax.py --resume runs/<folder>   # go on from the last checkpoint

Everything but the bonus is the code of ctec_ppo_rnn_craftax.py; the bonus's numbers are those of the paper's Table 7.
The forward error is a mean over the features, and sends no gradient into its target. The step that ends an episode has
no next state: it neither trains the models nor pays.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "craftax==1.6.1", "numpy==2.4.6", "tyro==1.0.16",
#   "matplotlib==3.11.2", "pillow==13.0.0", "wandb==0.31.0",
# ]
# ///
import contextlib
import dataclasses
import functools
import io
import json
import os
import re
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


# ---------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    env: Literal["craftax_classic"] = "craftax_classic"
    """environment: Craftax-Classic-Symbolic-v1"""
    preset: Literal["paper", "laptop"] = "paper"
    """paper: the published sizes. laptop: the same algorithm in minutes on a CPU. Explicit flags win over it"""
    seed: int = 1
    """seed of everything random"""
    total_timesteps: int = 1_000_000_000
    """environment steps, all environments together (paper Table 5)"""
    resume: str = ""
    """folder of an earlier run: go on from its checkpoint, with its arguments"""
    run_dir: str = "runs"
    """where the folder of the run is made"""
    checkpoint_minutes: float = 10.0
    """time between checkpoints; there is one at the end, at Ctrl-C and at SIGTERM anyway"""
    track: bool = False
    """send the metrics to wandb too, project "ctec" (WANDB_MODE=offline works)"""
    video_steps: int = 500
    """longest rollout.gif, in steps of an episode of the final policy; 0: none"""
    episode_window: int = 1024
    """finished episodes, the latest ones, over which the achievement rates are taken"""
    random_iterations: int = 16
    """first iterations, of uniform random play: the encoders learn, the policy waits, and the achievements are the
    random policy's bars in achievements.png"""

    num_envs: int = 1024
    """parallel environments (Craftax baselines)"""
    num_steps: int = 64
    """steps in each environment before the update of an iteration (paper Table 5)"""
    reset_ratio: int = 16
    """optimistic resets: one new world is made for this many environment steps (Craftax baselines)"""
    num_minibatches: int = 8
    """minibatches of an epoch of PPO, each of some environments' whole sequences (Craftax baselines)"""
    update_epochs: int = 4
    """passes of PPO over a rollout (paper Table 5)"""
    learning_rate: float = 2e-4
    """Adam of PPO, annealed linearly to 0 (paper Table 5)"""
    adam_eps: float = 1e-5
    """epsilon of both Adams (Craftax baselines)"""
    max_grad_norm: float = 1.0
    """longest gradient, of PPO and of the encoders (paper Table 5)"""
    agent_width: int = 512
    """width of the embedding, the GRU and the two hidden layers of each head (paper Table 5)"""
    gamma: float = 0.99
    """discount of PPO (paper Table 5)"""
    gae_lambda: float = 0.8
    """lambda of the advantage estimate (paper Table 5)"""
    clip: float = 0.2
    """PPO's clipping of the probability ratio (paper Table 5)"""
    entropy_coef: float = 0.01
    """weight of the entropy (paper Table 5)"""
    value_coef: float = 0.5
    """weight of the value loss (Craftax baselines)"""
    task_reward_coef: float = 0.0
    """weight of the game's own reward (the paper has none)"""
    intrinsic_coef: float = 1.0
    """weight of the intrinsic reward; 0 leaves plain PPO, without encoders"""

    feature_width: int = 256
    """width of the hidden layers: two in the encoder, one in each head (paper Table 7)"""
    feature_dim: int = 512
    """number of features (paper Tables 4 and 7)"""
    model_learning_rate: float = 3e-4
    """Adam of the bonus's model (paper Table 7)"""
    model_epochs: int = 4
    """passes of the bonus's model over the transitions of a rollout (as PPO's)"""
    model_minibatches: int = 8
    """minibatches of such a pass (as PPO's)"""
    forward_coef: float = 1.0
    """weight of the forward loss beside the inverse one's 1 (paper Table 7)"""

    @property
    def num_iterations(self):
        return -(-self.total_timesteps // (self.num_envs * self.num_steps))


PAPER = {}  # there is one environment, and the defaults are its numbers
PRESETS = {
    "paper": {},
    "laptop": dict(total_timesteps=2_500_000, num_envs=64, reset_ratio=128, agent_width=128, learning_rate=5e-4,
                   entropy_coef=0.05, intrinsic_coef=0.1, model_learning_rate=1e-3,
                   model_epochs=2, model_minibatches=32, checkpoint_minutes=2.0),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- environments
ACHIEVEMENTS = """collect_wood place_table eat_cow collect_sapling collect_drink make_wood_pickaxe make_wood_sword
    place_plant defeat_zombie collect_stone place_stone eat_plant defeat_skeleton make_stone_pickaxe make_stone_sword
    wake_up place_furnace collect_coal collect_iron collect_diamond make_iron_pickaxe make_iron_sword""".split()


class CraftaxClassic:
    """Craftax-Classic-Symbolic-v1, without its auto-reset."""

    state_size, num_actions = 1345, 17

    def __init__(self):
        from craftax.craftax_env import make_craftax_env_from_name  # here, because it starts the device

        self.game = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False)

    def reset(self, key):
        obs, world = self.game.reset_env(key, self.game.default_params)
        # Craftax starts from Python numbers: without their types, train_iteration would be compiled twice
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), (world, obs))

    def step(self, key, world, action):
        obs, world, reward, done, _ = self.game.step_env(key, world, action, self.game.default_params)
        return world, obs, reward, done


@functools.cache
def make_craftax():
    return CraftaxClassic()


# ----------------------------------------------------------------------------------------------------- networks
class MLP(nn.Module):
    """Hidden relu layers and a linear one."""

    width: int
    out: int
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.lecun_uniform())
        for _ in range(self.layers):
            x = nn.relu(dense(self.width)(x))
        return dense(self.out)(x)


class RecurrentActorCritic(nn.Module):
    """Embedding, GRU, and a head each for policy and value, for a sequence of steps. All but the product with the
    hidden state is done for the whole sequence at once."""

    width: int
    num_actions: int

    @nn.compact
    def __call__(self, hidden, obs, first):
        """(B, width), (T, B, state_size), (T, B) bool -> last hidden state, logits (T, B, actions), values (T, B)."""
        dense = lambda size, scale=np.sqrt(2): nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))
        gates = dense(3 * self.width, 1.0)(nn.tanh(dense(self.width)(obs)))
        orthogonal = jax.vmap(lambda key: nn.initializers.orthogonal()(key, (self.width, self.width)))
        recurrent = self.param("recurrent", lambda key: orthogonal(jax.random.split(key, 3)))  # reset, update, new
        bias = self.param("bias", nn.initializers.zeros, (self.width,))

        def step(hidden, x):
            (reset, update, new), first = jnp.split(x[0], 3, axis=-1), x[1]
            hidden = jnp.where(first[:, None], 0.0, hidden)  # a new episode remembers nothing
            reset = nn.sigmoid(reset + hidden @ recurrent[0])
            update = nn.sigmoid(update + hidden @ recurrent[1])
            new = nn.tanh(new + reset * (hidden @ recurrent[2] + bias))
            hidden = (1 - update) * new + update * hidden
            return hidden, hidden

        hidden, x = jax.lax.scan(step, hidden, (gates, first))
        head = lambda size, scale: dense(size, scale)(nn.tanh(dense(self.width)(nn.tanh(dense(self.width)(x)))))
        return hidden, head(self.num_actions, 0.0), head(1, 1.0)[..., 0]  # scale 0: the first policy is uniform


@flax.struct.dataclass
class Model:
    params: Any
    opt_state: Any


def clipped_update(loss_fn, model, args, learning_rate, *inputs):
    """One Adam step on loss_fn(params, args, *inputs) -> (loss, aux), with the gradient clipped to its norm."""
    grads, aux = jax.grad(loss_fn, has_aux=True)(model.params, args, *inputs)
    updates, opt_state = optimizer(args).update(grads, model.opt_state)
    params = jax.tree.map(lambda x, u: x - learning_rate * u, model.params, updates)
    return Model(params, opt_state), aux


def optimizer(args):
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


def new_model(args, params):
    return Model(params, optimizer(args).init(params))


def weighted_mean(x, weight):
    return jnp.sum(x * weight) / jnp.maximum(jnp.sum(weight), 1.0)


# ---------------------------------------------------------------------------------------------- the method: ICM
def features(params, args, obs):
    return MLP(args.feature_width, args.feature_dim).apply(params["encoder"], obs)  # (..., feature_dim)


def inverse_loss(params, args, feature, next_feature, action, weight):
    """Cross-entropy of the action, told from the features before and after it."""
    logits = MLP(args.feature_width, CraftaxClassic.num_actions, 1)
    logits = logits.apply(params["inverse"], jnp.concatenate([feature, next_feature], axis=-1))
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]
    accuracy = weighted_mean(jnp.argmax(logits, axis=-1) == action, weight)
    return weighted_mean(loss, weight), {"inverse_accuracy": accuracy}


def forward_error(params, args, feature, next_feature, action):
    """(...) squared error of the predicted next features, a mean over them. No gradient goes into the target."""
    pair = jnp.concatenate([feature, jax.nn.one_hot(action, CraftaxClassic.num_actions)], axis=-1)
    predicted = MLP(args.feature_width, args.feature_dim, 1).apply(params["forward"], pair)
    return jnp.mean((predicted - jax.lax.stop_gradient(next_feature)) ** 2, axis=-1)


def curiosity_loss(params, args, obs, action, next_obs, weight):
    """The loss of encoder, forward and inverse model."""
    feature, next_feature = features(params, args, obs), features(params, args, next_obs)
    forward = weighted_mean(forward_error(params, args, feature, next_feature, action), weight)
    inverse, metrics = inverse_loss(params, args, feature, next_feature, action, weight)
    variance = jnp.mean(jnp.var(feature, axis=0))
    metrics |= {"inverse_loss": inverse, "forward_loss": forward, "feature_variance": variance}
    return args.forward_coef * forward + inverse, metrics


def update_model(args, loss_fn, model, key, states, action, done):
    """`model_epochs` passes over the transitions of a rollout, in `model_minibatches` steps each, on
    loss_fn(params, args, obs, action, next_obs, weight): weight 0 where the episode ended and next_obs is another's."""
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # (T * N, ...); a step's next state stands N rows further
    weight = 1.0 - flat(done)

    def epoch(model, key):
        def step(model, rows):
            batch = flat(states)[rows], flat(action)[rows], flat(states)[rows + done.shape[1]], weight[rows]
            return clipped_update(loss_fn, model, args, args.model_learning_rate, *batch)

        return jax.lax.scan(step, model, jax.random.permutation(key, done.size).reshape(args.model_minibatches, -1))

    model, metrics = jax.lax.scan(epoch, model, jax.random.split(key, args.model_epochs))
    return model, jax.tree.map(jnp.mean, metrics)


# ---------------------------------------------------------------------------------------------------------- PPO
@flax.struct.dataclass
class Rollout:
    obs: jax.Array  # (T, N, state_size)
    first: jax.Array  # (T, N) bool: the observation is the first of its episode
    action: jax.Array  # (T, N)
    log_prob: jax.Array  # (T, N)
    value: jax.Array  # (T, N)
    reward: jax.Array  # (T, N) the game's
    done: jax.Array  # (T, N) bool: the episode ended with this step


def policy(params, args, hidden, obs, first):
    """Log-probabilities (T, B, actions) and values (T, B) of a sequence of steps, and the last hidden state."""
    network = RecurrentActorCritic(args.agent_width, CraftaxClassic.num_actions)
    hidden, logits, value = network.apply(params, hidden, obs, first)
    return hidden, jax.nn.log_softmax(logits), value


def gae(args, reward, value, done, last_value):
    """(T, N) generalised advantage estimates, backwards over the steps."""

    def step(carry, x):
        advantage, next_value = carry
        reward, value, done = x
        error = reward + args.gamma * next_value * (1.0 - done) - value
        advantage = error + args.gamma * args.gae_lambda * (1.0 - done) * advantage
        return (advantage, value), advantage

    start = jnp.zeros_like(last_value), last_value
    return jax.lax.scan(step, start, (reward, value, done.astype(jnp.float32)), reverse=True)[1]


def ppo_loss(params, args, hidden, rollout, advantage):
    """The clipped objective, squared error of the values, and entropy, for whole sequences of some environments."""
    _, log_probs, value = policy(params, args, hidden, rollout.obs, rollout.first)
    log_prob = jnp.take_along_axis(log_probs, rollout.action[..., None], axis=-1)[..., 0]
    log_ratio, target = log_prob - rollout.log_prob, advantage + rollout.value
    advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
    ratio, clipped = jnp.exp(log_ratio), jnp.clip(jnp.exp(log_ratio), 1 - args.clip, 1 + args.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
    value_loss = 0.5 * jnp.mean((value - target) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = policy_loss + args.value_coef * value_loss - args.entropy_coef * entropy
    return loss, dict(
        policy_loss=policy_loss, value_loss=value_loss, entropy=entropy, value_mean=jnp.mean(value),
        kl=jnp.mean(ratio - 1 - log_ratio), clipped=jnp.mean(ratio != clipped),
    )  # fmt: skip


def update_ppo(args, model, learning_rate, key, hidden, rollout, advantage):
    """`update_epochs` passes over a rollout, in `num_minibatches` steps of some environments' whole sequences."""

    def epoch(model, key):
        order = jax.random.permutation(key, args.num_envs).reshape(args.num_minibatches, -1)

        def step(model, envs):
            batch = jax.tree.map(lambda x: x[:, envs], (rollout, advantage))
            return clipped_update(ppo_loss, model, args, learning_rate, hidden[envs], *batch)

        return jax.lax.scan(step, model, order)

    model, metrics = jax.lax.scan(epoch, model, jax.random.split(key, args.update_epochs))
    return model, jax.tree.map(jnp.mean, metrics)


# ------------------------------------------------------------------------------------------------- achievements
@flax.struct.dataclass
class Episodes:
    """The latest finished episodes, in a ring: number k is in row k % W."""

    achievements: jax.Array  # (W, 22) bool
    length: jax.Array  # (W,)
    reward: jax.Array  # (W,) the game's
    count: jax.Array  # () finished so far


def no_episodes(args):
    zero = lambda *size, dtype=jnp.int32: jnp.zeros((args.episode_window, *size), dtype)
    return Episodes(zero(len(ACHIEVEMENTS), dtype=bool), zero(), zero(dtype=jnp.float32), jnp.int32(0))


def insert_episodes(episodes, done, achievements, length, reward):
    """Adds those of T x N steps that end an episode; if there are more than W of them, the last W."""
    rank = jnp.cumsum(done.ravel())
    keep = done.ravel() & (rank > rank[-1] - len(episodes.length))
    row = jnp.where(keep, (episodes.count + rank - 1) % len(episodes.length), len(episodes.length))
    put = lambda ring, x: ring.at[row].set(x.reshape(-1, *x.shape[2:]), mode="drop")
    rings = episodes.achievements, episodes.length, episodes.reward
    return Episodes(*map(put, rings, (achievements, length, reward)), episodes.count + rank[-1])


def achievement_rates(episodes):
    """(22,) fraction of the latest episodes that unlocked each; 0 before the first one ended."""
    return jnp.sum(episodes.achievements, axis=0) / jnp.clip(episodes.count, 1, len(episodes.length))


def crafter_score(rates):
    return jnp.exp(jnp.mean(jnp.log(1 + 100 * rates))) - 1


def episode_metrics(episodes):
    rates, stored = achievement_rates(episodes), jnp.clip(episodes.count, 1, len(episodes.length))
    return dict(zip(ACHIEVEMENTS, rates)) | dict(
        achievements=jnp.sum(rates), crafter_score=crafter_score(rates), episodes=episodes.count,
        episode_length=jnp.sum(episodes.length) / stored, episode_return=jnp.sum(episodes.reward) / stored,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class Players:
    """What goes from step to step, (N, ...)."""

    world: Any  # Craftax's state
    obs: jax.Array
    first: jax.Array  # bool: obs is the first of its episode
    hidden: jax.Array  # of the GRU
    length: jax.Array  # steps and reward of the episode so far
    reward: jax.Array


@flax.struct.dataclass
class TrainState:
    key: jax.Array
    iteration: jax.Array
    players: Players
    episodes: Episodes
    random_rates: jax.Array  # (22,) of the random policy
    agent: Model
    icm: Model  # {"encoder", "forward", "inverse"}


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env, key_agent, key_encoder, key_forward, key_inverse = jax.random.split(jax.random.PRNGKey(args.seed), 6)
    players = new_players(args, env, key_env, args.num_envs)
    network = lambda key, size, layers, inputs: MLP(args.feature_width, size, layers).init(key, jnp.zeros(inputs))
    icm = {"encoder": network(key_encoder, args.feature_dim, 2, env.state_size),
           "forward": network(key_forward, args.feature_dim, 1, args.feature_dim + env.num_actions),
           "inverse": network(key_inverse, env.num_actions, 1, 2 * args.feature_dim)}  # fmt: skip
    return TrainState(
        key=key, iteration=jnp.int32(0), players=players, episodes=no_episodes(args), random_rates=jnp.zeros(22),
        agent=new_agent(args, env, key_agent, players), icm=new_model(args, icm),
    )  # fmt: skip


def new_agent(args, env, key, players):
    network = RecurrentActorCritic(args.agent_width, env.num_actions)
    return new_model(args, network.init(key, players.hidden, players.obs[None], players.first[None]))


def new_players(args, env, key, number):
    """In new worlds, which are made 32 at a time: more need much memory, and a CPU is slower with more."""
    world, obs = jax.lax.map(env.reset, jax.random.split(key, number), batch_size=32)
    zero = lambda *size, dtype=jnp.float32: jnp.zeros((number, *size), dtype)
    return Players(world, obs, zero(dtype=bool) | True, zero(args.agent_width), zero(dtype=jnp.int32), zero())


def act(args, env, params, now, key):
    """One step of the policy in every environment, without resets: the players after it, and the transition."""
    key_action, key_env = jax.random.split(key)
    hidden, log_probs, value = policy(params, args, now.hidden, now.obs[None], now.first[None])
    action = jax.random.categorical(key_action, log_probs[0])
    log_prob = jnp.take_along_axis(log_probs[0], action[:, None], axis=-1)[:, 0]
    keys = jax.random.split(key_env, len(action))
    world, obs, reward, done = jax.vmap(env.step)(keys, now.world, action)
    after = Players(world, obs, jnp.zeros_like(done), hidden, now.length + 1, now.reward + reward)
    return after, Rollout(now.obs, now.first, action, log_prob, value[0], reward, done)


def play(args, env, state, key):
    """`num_steps` steps in every environment. An episode that ends goes on in a new world. These are made beforehand,
    one for `reset_ratio` environment steps, and taken in turn (again from the first one, should they run out)."""
    key_worlds, key_steps = jax.random.split(key)
    starts = new_players(args, env, key_worlds, -(-args.num_envs * args.num_steps // args.reset_ratio))

    def step(carry, key):
        now, used = carry
        after, transition = act(args, env, state.agent.params, now, key)
        done = transition.done
        ended = done, after.world.achievements, after.length, after.reward  # before the reset
        fresh = (used + jnp.cumsum(done) - 1) % len(starts.length)
        restart = lambda start, x: jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), start[fresh], x)
        return (jax.tree.map(restart, starts, after), used + jnp.sum(done)), (transition, ended)

    keys = jax.random.split(key_steps, args.num_steps)
    (players, _), (rollout, ended) = jax.lax.scan(step, (state.players, 0), keys)
    return players, rollout, insert_episodes(state.episodes, *ended)


def update_agent(args, state, key, hidden, rollout, reward):
    """PPO on these rewards, once the random policy has had its turn; hidden is the GRU's at the first step."""
    players, learning_rate = state.players, args.learning_rate * (1 - (state.iteration - 1) / args.num_iterations)
    inputs = players.hidden, players.obs[None], players.first[None]
    last_value = policy(state.agent.params, args, *inputs)[2][0]
    advantage = gae(args, reward, rollout.value, rollout.done, last_value)
    run = lambda agent: update_ppo(args, agent, learning_rate, key, hidden, rollout, advantage)
    wait = lambda agent: (agent, jax.tree.map(lambda _: -jnp.inf, jax.eval_shape(run, agent)[1]))  # no values yet
    agent, metrics = jax.lax.cond(state.iteration > args.random_iterations, run, wait, state.agent)
    return agent, metrics | {"learning_rate": learning_rate}


def update(args, state, key, hidden, rollout):
    """Rewards from the models as they are, then the updates of the models and of the agent."""
    key_model, key_agent = jax.random.split(key)
    reward, metrics = args.task_reward_coef * rollout.reward, {}
    if args.intrinsic_coef:
        states = jnp.concatenate([rollout.obs, state.players.obs[None]])  # (T + 1, N, state_size)
        feature = features(state.icm.params, args, states)
        error = forward_error(state.icm.params, args, feature[:-1], feature[1:], rollout.action)
        intrinsic = jnp.where(rollout.done, 0.0, error)  # where the episode ended, the next state is another's
        reward += args.intrinsic_coef * intrinsic
        icm, metrics = update_model(args, curiosity_loss, state.icm, key_model, states, rollout.action, rollout.done)
        metrics |= dict(reward_mean=jnp.mean(intrinsic), reward_std=jnp.std(intrinsic))
        state = state.replace(icm=icm)
    agent, ppo_metrics = update_agent(args, state, key_agent, hidden, rollout, reward)
    return state.replace(agent=agent), metrics | ppo_metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_iteration(args, env, state):
    """Play, then learn: all on the device, compiled once in a run."""
    key, key_play, key_update = jax.random.split(state.key, 3)
    hidden, iteration = state.players.hidden, state.iteration + 1
    players, rollout, episodes = play(args, env, state, key_play)
    rates = jnp.where(iteration > args.random_iterations, state.random_rates, achievement_rates(episodes))
    state = state.replace(key=key, iteration=iteration, players=players, episodes=episodes, random_rates=rates)
    state, metrics = update(args, state, key_update, hidden, rollout)
    metrics["parameter_norm"] = optax.global_norm((state.icm.params, state.agent.params))
    return state, metrics | episode_metrics(episodes)


# ------------------------------------------------------------------------------- logging, pictures, checkpoint
METRICS = """iteration steps seconds steps_per_second achievements crafter_score episodes episode_length episode_return
    reward_mean reward_std forward_loss inverse_loss inverse_accuracy feature_variance policy_loss value_loss
    value_mean entropy kl clipped learning_rate parameter_norm""".split() + ACHIEVEMENTS


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def clock(seconds):
    unit, name = (1, "s") if seconds < 90 else (60, "min") if seconds < 5400 else (3600, "h")
    return f"{seconds / unit:,.{int(unit > 1)}f} {name}"


def write_atomically(path, write):
    """write(file) into a temporary file, which then takes the place of path: a kill or a full disk loses nothing."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path, state):
    leaves = {jax.tree_util.keystr(name): np.asarray(x) for name, x in jax.tree_util.tree_leaves_with_path(state)}
    write_atomically(path, lambda file: file.write(flax.serialization.msgpack_serialize(leaves)))


def load_checkpoint(path, template):
    """The state in path, which must have the structure and the shapes of template."""
    try:
        leaves = flax.serialization.msgpack_restore(path.read_bytes())
        restore = lambda name, x: jnp.asarray(leaves[jax.tree_util.keystr(name)], x.dtype).reshape(x.shape)
        return jax.tree_util.tree_map_with_path(restore, template)
    except Exception as error:  # no file, half a file, a file that does not fit: each has its own
        fail(f"{path} is no checkpoint of this run ({error!r}): put a copy in its place, or start without --resume")


def start_run(args, init, buffer, flops):
    """The run's folder, its state (from init() or the checkpoint), and the seconds it took so far. The flops are those
    of an iteration; buffer says what takes the memory."""
    name = f"{args.env}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    folder, state, iteration, rows = Path(args.resume or f"{args.run_dir}/{name}"), None, 0, []
    if args.resume:
        state = load_checkpoint(folder / "checkpoint.msgpack", jax.eval_shape(init))
        header, *rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
        if header != METRICS:
            fail(f"{folder}/metrics.csv is of another version of this script")
        iteration = int(state.iteration)
        rows = [row for row in rows if len(row) == len(METRICS) and int(row[0]) <= iteration]
    if iteration >= args.num_iterations:
        fail(f"{folder} is complete; to go on, give more --total-timesteps than {args.total_timesteps:,}")
    folder.mkdir(parents=True, exist_ok=bool(args.resume))
    config = json.dumps(dataclasses.asdict(args) | {"resume": ""}, indent=1)
    table = "".join(",".join(row) + "\n" for row in [METRICS, *rows])
    write_atomically(folder / "args.json", lambda file: file.write(config.encode()))
    write_atomically(folder / "metrics.csv", lambda file: file.write(table.encode()))

    device, x = jax.devices()[0], jnp.ones((1024, 1024))
    multiply = jax.jit(jnp.matmul).lower(x, x).compile()
    began = time.time()
    jax.block_until_ready(multiply(x, x))
    seconds = 2 * flops * (args.num_iterations - iteration) * (time.time() - began) / 2**31  # half a product's rate
    expected = f"expected time about {clock(seconds)} for learning, plus the environments'" if flops else "no learning"
    print(f"{Path(__file__).stem} on {args.env}, seed {args.seed}, into {folder}")
    print(f"device {device.platform} ({device.device_kind}), {buffer}, {expected}", flush=True)
    if device.platform == "cpu" and args.preset == "paper":
        print("no accelerator was found: --preset laptop has sizes that suit a CPU", flush=True)
    return folder, state or init(), float(rows[-1][METRICS.index("seconds")]) if rows else 0.0


def show_progress(args, row, learning):
    """One line that is rewritten on a terminal; elsewhere a line for each twentieth of the run."""
    done, live, rate = row["iteration"] / args.num_iterations, sys.stdout.isatty(), row["steps_per_second"]
    left = f"{clock(row['steps'] * (1 / done - 1) / rate)} left   " if learning else "not learning yet"
    if live or done == 1 or row["iteration"] % -(-args.num_iterations // 20) == 0:
        name = next(name for name in METRICS[4:] if name in row)  # coverage, or achievements
        result = f"{name} {round(row[name], 2):,.10g}"
        bar = f"[{'#' * int(30 * done):30}] {done:4.0%}  {result}  {rate:,.0f} steps/s  {left}"
        print(bar, end="\r" if live and done < 1 else "\n", flush=True)


def iterations(args, folder, state, seconds, steps, iterate):
    """The state, a row of metrics, and whatever else iterate returns, after each iteration. Writes metrics.csv and,
    when the caller is done with the iteration, the checkpoint; shows the progress; stops at Ctrl-C, at SIGTERM, and
    when a metric is not finite (-inf means: no value yet)."""
    if args.track:
        import wandb

        wandb.init(project="ctec", id=folder.name, resume="allow", config=dataclasses.asdict(args), dir=folder)
    log, stop, recent, saved, learning = open(folder / "metrics.csv", "a"), [], [], time.time(), False
    handlers = {number: signal.signal(number, lambda number, _: stop.append(number)) for number in (2, 15)}
    try:
        for iteration in range(int(state.iteration) + 1, args.num_iterations + 1):
            began, last = time.time(), iteration == args.num_iterations
            state, metrics, *more = iterate(state)
            metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
            spent, values = time.time() - began, {name: metrics[name] for name in METRICS if name in metrics}
            bad = [name for name, x in values.items() if not np.isfinite(x) and (learning or x != -np.inf)]
            if bad:
                words = f"iteration {iteration}: {bad[0]} is {values[bad[0]]}"
                fail(f"{words}; the last good checkpoint, if there was one, is untouched in {folder}", code=1)
            learning, seconds = -np.inf not in values.values(), seconds + spent
            recent = [*recent[-19:], spent] if learning else []
            row = {"iteration": iteration, "steps": iteration * steps, "seconds": round(seconds, 1)}
            row |= {"steps_per_second": round(steps * max(len(recent), 1) / sum(recent or [spent]), 1)}
            row |= {name: x for name, x in values.items() if np.isfinite(x)}
            log.write(",".join(str(row.get(name, "")) for name in METRICS) + "\n")
            log.flush()
            show_progress(args, row, learning)
            if args.track:
                wandb.log(row, step=row["steps"])
            yield state, row, *more
            if stop or last or time.time() - saved >= 60 * args.checkpoint_minutes:
                try:
                    save_checkpoint(folder / "checkpoint.msgpack", state)
                except OSError as error:  # a full disk may have room again before the next one
                    if stop or last:
                        raise
                    print(f"\nwarning: checkpoint not written, the last good one stays: {error}", file=sys.stderr)
                saved = time.time()
            if stop and not last:
                go_on = f"go on with: python {Path(__file__).name} --resume {folder}"
                fail(f"stopped by signal {stop[0]}; {go_on}", code=128 + stop[0])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        log.close()
        if args.track:
            wandb.finish()


def save_bars(folder, title, bars):
    """achievements.png: the share of episodes that unlocked each achievement, for each {label: (22,) rates}."""
    from matplotlib.figure import Figure

    figure, place, height = Figure((8, 7), layout="constrained"), np.arange(len(ACHIEVEMENTS)), 0.8 / len(bars)
    axes = figure.add_subplot()
    for i, (label, rates) in enumerate(bars.items()):
        shift, color, rates = (i + 0.5) * height - 0.4, ("tab:blue", "0.7")[i], np.asarray(rates)
        drawn = axes.barh(place + shift, 100 * rates, height, color=color, label=f"{label}: sum {rates.sum():.2f}")
        axes.bar_label(drawn, [f"{100 * x:.1f}" if x else "0" for x in rates], padding=2, fontsize=6)
    axes.set(yticks=place, yticklabels=[name.replace("_", " ") for name in ACHIEVEMENTS], xlim=(0, 108), title=title)
    axes.set_xlabel("episodes that unlocked it (%)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.savefig(folder / "achievements.png", dpi=100)


@functools.partial(jax.jit, static_argnums=(0, 1))
def watch(args, env, params, key):
    """The worlds of one player for `video_steps` steps, and whether its episode ended with each."""

    def step(now, key):
        after, transition = act(args, env, params, now, key)
        return after, (now.world, transition.done)

    key_start, key_steps = jax.random.split(key)
    start = new_players(args, env, key_start, 1)
    return jax.lax.scan(step, start, jax.random.split(key_steps, args.video_steps))[1]  # (video_steps, 1, ...)


def save_gif(folder, worlds, done):
    """rollout.gif: the first episode of the worlds (T, 1, ...), drawn by Craftax, with the achievements it unlocks."""
    from craftax.craftax_classic import renderer
    from PIL import Image, ImageDraw, ImageFont

    size, font = 16, ImageFont.load_default(13)
    # the textures of this size only, without Craftax's cache, a file among its sources
    renderer.load_all_textures = lambda: {size: renderer.load_all_textures_given_size(size)}
    length = int(np.argmax(done)) + 1 if np.any(done) else len(done)
    worlds = jax.tree.map(lambda x: x[:length, 0], worlds)
    frames = np.asarray(jax.lax.map(renderer.make_craftax_pixel_renderer(size), worlds)).astype(np.uint8)
    unlocked, pictures = np.asarray(worlds.achievements), []  # (length, 22)
    since = np.where(unlocked[-1], np.argmax(unlocked, axis=0), length)
    for t, frame in enumerate(frames):
        picture = Image.new("RGB", (2 * frame.shape[1] + 190, 2 * frame.shape[0]), "black")
        picture.paste(Image.fromarray(frame).resize((2 * frame.shape[1], 2 * frame.shape[0]), Image.NEAREST))
        lines = [(f"step {t} of {length}", "white")]
        for i in np.argsort(since, kind="stable")[: unlocked[t].sum()]:
            color = "yellow" if t - since[i] < 10 else "gray"
            lines.append((f"{since[i]:4d}  {ACHIEVEMENTS[i].replace('_', ' ')}", color))
        for row, (text, color) in enumerate(lines):
            ImageDraw.Draw(picture).text((2 * frame.shape[1] + 10, 6 + 15 * row), text, color, font)
        pictures.append(picture.quantize(64))
    options = dict(format="GIF", save_all=True, append_images=pictures[1:], duration=100, loop=0)
    write_atomically(folder / "rollout.gif", lambda file: pictures[0].save(file, **options))


# --------------------------------------------------------------------------------------------------------- main
def parse_args(argv=None):
    """The paper's numbers, then the preset's, or those of the run that is resumed; explicit flags win."""

    def parse(default):
        try:
            with contextlib.redirect_stderr(io.StringIO()) as box:
                return tyro.cli(Args, args=argv, default=default, description=__doc__)
        except SystemExit as stop:
            if not stop.code:
                raise
            message = re.split("[─-]{4,}", box.getvalue())[1]  # the first part of tyro's framed one
            fail(" ".join(re.sub("[│╮]", " ", message).split()).rstrip(".") + "; see --help")

    args = parse(Args())
    if not args.resume:
        return parse(Args(**PAPER.get(args.env.split("_")[0], {}) | PRESETS[args.preset]))
    try:
        return parse(Args(**json.loads((Path(args.resume) / "args.json").read_text()) | {"resume": args.resume}))
    except (OSError, ValueError, TypeError) as error:
        fail(f"--resume {args.resume}: it is not the folder of a run of this script ({error})")


def check_numbers(args):
    """One line and exit code 2 for a number that makes no sense."""
    for name, value in dataclasses.asdict(args).items():
        zero, number = re.search("seed|minutes|coef|penalty|random|video", name), type(value) in (int, float)
        if number and not (value > 0 or (zero and value == 0)):
            fail(f"--{name.replace('_', '-')} {value}: it must be {'at least' if zero else 'above'} 0")
        if name.startswith("gamma") and value >= 1:
            fail(f"--{name.replace('_', '-')} {value}: it must be below 1")


def check_ppo_args(args):
    check_numbers(args)
    if args.gae_lambda > 1:
        fail(f"--gae-lambda {args.gae_lambda}: it must be at most 1")
    if args.num_envs % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches}: it must divide --num-envs {args.num_envs}")
    if not args.task_reward_coef and not args.intrinsic_coef:
        fail("--intrinsic-coef 0: nothing is left to learn from; give --task-reward-coef too")


def finish_craftax(folder, row, random_rates):
    """The last lines of a run, and what main returns."""
    pictures = ", ".join(sorted(path.name for path in folder.iterdir() if path.suffix in (".png", ".gif")))
    print(f"achievements {row['achievements']:.2f} an episode after {row['steps']:,} steps in {clock(row['seconds'])} "
          f"(uniform random actions: {float(np.sum(random_rates)):.2f})")  # fmt: skip
    print(f"pictures {pictures}\nfolder   {folder}")
    return row | {"folder": str(folder)}


def main(args):
    """A loop around train_iteration. Returns the last row of metrics, with the run's folder."""
    check_ppo_args(args)
    if args.num_envs * args.num_steps % args.model_minibatches:
        fail(f"--model-minibatches {args.model_minibatches}: it must divide num_envs * num_steps")
    env, steps = make_craftax(), args.num_envs * args.num_steps
    shapes = jax.eval_shape(lambda: init_state(args, env))
    size = lambda model: sum(x.size for x in jax.tree.leaves(model.params))
    model_epochs = args.model_epochs * bool(args.intrinsic_coef)
    flops = 6 * steps * (args.update_epochs * size(shapes.agent) + model_epochs * size(shapes.icm))
    rollout = f"rollout buffer {4e-6 * steps * env.state_size:,.0f} MB"
    folder, state, seconds = start_run(args, lambda: init_state(args, env), rollout, flops)
    moments, began = {round(k * args.num_iterations / 5) for k in range(1, 6)}, time.time()
    iterate = train_iteration.lower(args, env, state).compile()
    print(f"compiled in {clock(time.time() - began)}", flush=True)
    for state, row in iterations(args, folder, state, seconds, steps, iterate):
        if row["iteration"] in moments:
            title = f"{Path(__file__).stem}, seed {args.seed}, {row['steps']:,} steps"
            bars = {"this policy": achievement_rates(state.episodes), "uniform random actions": state.random_rates}
            save_bars(folder, title, bars)
    if args.video_steps:
        print("drawing rollout.gif", flush=True)
        save_gif(folder, *watch(args, env, state.agent.params, state.key))
    return finish_craftax(folder, row, state.random_rates)


if __name__ == "__main__":
    try:
        main(parse_args())
    except OSError as error:  # a full disk, as a rule
        fail(f"{error}; the last good checkpoint, if there was one, is untouched", code=1)
    except KeyboardInterrupt:
        fail("stopped before the first iteration", code=130)
