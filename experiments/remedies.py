"""C-TeC with one of six changes: four that may keep its agents from collapsing to one region, a head start for the
critics, and a reward that tells what SAC can do when it need not be curious.

    python experiments/remedies.py --remedy history --env point_hardest_maze --preset laptop --learning-rate 1e-3
    python experiments/remedies.py --remedy value --first-value 300 --env ant_hardest_maze --num-envs 256

Everything else is ctec_sac_brax.py, whose flags follow. docs/tuning.md has what came out.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Literal

import flax
import jax
import jax.numpy as jnp
import optax
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ctec_sac_brax as ctec  # noqa: E402

sample_futures = ctec.sample_futures
intrinsic_reward = ctec.intrinsic_reward
gradient_update = ctec.gradient_update
init_agent = ctec.init_agent


@dataclasses.dataclass(frozen=True)
class Remedy:
    remedy: Literal["none", "history", "fewer", "deviation", "schedule", "value", "distance"] = "none"
    """history: the negatives come from a replay of the whole run, while the transitions come from its latest
    --replay-size steps. fewer: the encoders take a step in every fourth gradient step, by chance. deviation: the reward
    minus its mean over the batch, divided by its deviation. schedule: gamma_cl grows from 0.9 over the run. value: the
    critics begin at --first-value. distance: the reward is the distance from the start of the maze in metres, and the
    encoders learn for nothing"""
    first_value: float = 300.0
    """what the critics of --remedy value say of every state-action in the beginning: the mean reward / (1 - gamma)"""


# ------------------------------------------------------------------------- negatives from all that was ever seen
@flax.struct.dataclass
class PairsWithNegatives(ctec.Pairs):
    negative: jax.Array  # (B, ...)


def sample_recent_batch(recent, key, args, replay):
    """As sample_batch, from the latest `recent` steps of the replay."""
    key_t, key_env = jax.random.split(key)
    oldest = jnp.maximum(replay.time - recent, 0)
    t = jax.random.randint(key_t, (args.batch_size,), oldest, replay.time - 1)
    n = jax.random.randint(key_env, (args.batch_size,), 0, args.num_envs)
    return ctec.Batch(
        obs=replay.obs[t, n],
        action=replay.action[t, n],
        next_obs=replay.obs[t + 1, n],
        terminated=replay.terminated[t, n].astype(jnp.float32),
        truncated=replay.truncated[t, n].astype(jnp.float32),
        time=t,
        env_index=n,
    )


def future_view(args, env, states):
    """What psi sees of the states (..., state_size)."""
    return states if args.future_state == "full" else states[..., : env.position_size]


def sample_with_negatives(key, args, env, replay, batch):
    key_future, key_t, key_env = jax.random.split(key, 3)
    pairs = sample_futures(key_future, args, env, replay, batch)
    t = jax.random.randint(key_t, (args.batch_size,), 0, replay.time)
    n = jax.random.randint(key_env, (args.batch_size,), 0, args.num_envs)
    return PairsWithNegatives(**vars(pairs), negative=future_view(args, env, replay.obs[t, n]))


def loss_with_negatives(params, args, batch):
    """InfoNCE of the own future against the negatives."""
    phi = ctec.unit_length(ctec.encode(params["phi"], args, batch.anchor))
    psi = ctec.unit_length(ctec.encode(params["psi"], args, batch.positive))
    other = ctec.unit_length(ctec.encode(params["psi"], args, batch.negative))
    tau = jnp.exp(params["log_tau"])
    anchor = phi / tau if args.temperature == "phi" else phi
    positive = -jnp.sum(jnp.abs(anchor - psi), axis=-1)  # (B,)
    negative = ctec.l1_similarity(anchor, other)  # (B, B)
    if args.temperature == "logits":
        positive = positive / tau
        negative = negative / tau
    lse = jax.nn.logsumexp(jnp.concatenate([positive[:, None], negative], axis=1), axis=1)
    loss = ctec.masked_mean(lse - positive + args.logsumexp_penalty * lse**2, batch.mask)
    metrics = {
        "contrastive_loss": loss,
        "accuracy": ctec.masked_mean(positive > jnp.max(negative, axis=1), batch.mask),
        "logits_positive": ctec.masked_mean(positive, batch.mask),
        "logits_negative": jnp.mean(negative),
        "logsumexp": ctec.masked_mean(lse, batch.mask),
        "tau": tau,
        "phi_variance": jnp.mean(jnp.var(phi, axis=0)),
        "psi_variance": jnp.mean(jnp.var(psi, axis=0)),
    }
    return loss, metrics


# -------------------------------------------------------------------------------------------- the other remedies
def update_with_fewer_encoder_steps(args, env, replay, agent, model, key):
    """As update, with a step of the encoders in a quarter of the calls."""
    key_update, key_coin = jax.random.split(key)
    key_batch, key_future, key_sac = jax.random.split(key_update, 3)
    batch = ctec.sample_batch(key_batch, args, replay)
    pairs = ctec.sample_futures(key_future, args, env, replay, batch)
    reward = ctec.intrinsic_reward(model.params, args, pairs)
    learn = lambda model: gradient_update(ctec.contrastive_loss, model, optax.adam(args.learning_rate), args, pairs)
    watch = lambda model: (model, ctec.contrastive_loss(model.params, args, pairs)[1])
    model, metrics = jax.lax.cond(jax.random.uniform(key_coin) < 0.25, learn, watch, model)
    agent, sac_metrics = ctec.update_sac(args, env, agent, batch, reward, key_sac)
    return (agent, model), metrics | sac_metrics


def deviation_of_reward(params, args, batch):
    reward = intrinsic_reward(params, args, batch)
    mean = ctec.masked_mean(reward, batch.mask)
    std = jnp.sqrt(ctec.masked_mean((reward - mean) ** 2, batch.mask))
    return batch.mask * (reward - mean) / (std + 1e-8)


def sample_scheduled_futures(key, args, env, replay, batch):
    """As sample_futures, with gamma_cl from 0.9 in the beginning to --gamma-cl in the end."""
    done = replay.time / (args.num_iterations * args.unroll_length)
    gamma = 0.9 + (args.gamma_cl - 0.9) * done
    remaining = replay.ends[batch.time % len(replay.obs), batch.env_index] - batch.time
    offset = ctec.truncated_geometric(key, remaining, gamma)
    future = replay.obs[(batch.time + offset) % len(replay.obs), batch.env_index]
    pair = jnp.concatenate([batch.obs, batch.action], axis=-1)
    return ctec.Pairs(anchor=pair, positive=future_view(args, env, future), mask=batch.has_next)


def init_agent_with_value(value, args, env, key):
    """As init_agent, with `value` added to what the critics and their targets say."""
    agent = init_agent(args, env, key)
    layers = agent.target_critic["params"]
    last = layers["Dense_2"]
    critic = {"params": layers | {"Dense_2": last | {"bias": last["bias"] + value}}}
    return agent.replace(critic=agent.critic.replace(params=critic), target_critic=critic)


def distance_from_start(start, params, args, batch):
    """No curiosity: the metres between s and the maze's start, 0 where intrinsic_reward is."""
    return batch.mask * jnp.linalg.norm(batch.anchor[:, :2] - start, axis=-1)


# ---------------------------------------------------------------------------------------------------------- main
def main(remedy, args):
    if remedy.remedy == "history":
        if args.resume:  # the arguments of the earlier run have the large replay
            ctec.fail("--remedy history cannot be resumed")
        ctec.sample_batch = functools.partial(sample_recent_batch, args.replay_size)
        ctec.sample_futures = sample_with_negatives
        ctec.contrastive_loss = loss_with_negatives
        args = dataclasses.replace(args, replay_size=args.num_iterations * args.unroll_length)
    elif remedy.remedy == "fewer":
        ctec.update = update_with_fewer_encoder_steps
    elif remedy.remedy == "deviation":
        ctec.intrinsic_reward = deviation_of_reward
    elif remedy.remedy == "schedule":
        ctec.sample_futures = sample_scheduled_futures
    elif remedy.remedy == "value":
        ctec.init_agent = functools.partial(init_agent_with_value, remedy.first_value)
    elif remedy.remedy == "distance":
        ctec.intrinsic_reward = functools.partial(distance_from_start, ctec.make_env(args.env).start)
    return ctec.main(args)


if __name__ == "__main__":
    remedy, flags = tyro.cli(Remedy, args=sys.argv[1:], return_unknown_args=True, description=__doc__)
    main(remedy, ctec.parse_args(flags))
