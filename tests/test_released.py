"""Losses, gradients and rewards against numbers of the authors' released functions (tests/data/README.md)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ctec_sac_brax as ctec
from ctec_sac_brax import Args, Batch, Pairs

DATA = Path(__file__).parent / "data"
CLOSE = dict(rtol=1e-6, atol=1e-6)
ARGS = Args(agent_width=32, encoder_width=32, representation_size=8)


def tree(arrays, prefix):
    """Arrays named prefix/.../hidden_i/{kernel, bias} as the parameters of our MLP."""
    layers = {}
    for i in range(3):
        layer = f"{prefix}/hidden_{i}"
        layers[f"Dense_{i}"] = {"kernel": arrays[f"{layer}/kernel"], "bias": arrays[f"{layer}/bias"]}
    return {"params": layers}


def encoders(arrays, prefix):
    return {
        "phi": tree(arrays, f"{prefix}/params/obs_action_encoder/CRL_MLP_0"),
        "psi": tree(arrays, f"{prefix}/params/future_obs_encoder/CRL_MLP_0"),
        "log_tau": arrays[f"{prefix}/params/obs_action_encoder/temperature"],
    }


def twins(arrays, name):
    """The two critics, with a leading axis of 2."""
    return jax.tree.map(lambda *x: np.stack(x), *(tree(arrays, f"{name}/params/MLP_{i}") for i in range(2)))


def assert_close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), ours, theirs)


@pytest.fixture(scope="module")
def released():
    return dict(np.load(DATA / "released_ctec.npz"))


@pytest.fixture(scope="module")
def sac():
    return dict(np.load(DATA / "released_sac.npz"))


@pytest.mark.parametrize("tau", ["tau1.0", "tau0.5"])
@pytest.mark.parametrize("view", ["full", "goal"])
def test_ctec_is_the_released_one(released, view, tau):
    params = encoders(released, f"{view}/{tau}/params")
    obs = released[f"{view}/obs"]
    pair = np.concatenate([obs, released[f"{view}/action"]], axis=-1)
    future = released[f"{view}/future"][..., : 2 if view == "goal" else None]
    batches = [Pairs(pair[i], future[i], jnp.ones(len(pair[i]))) for i in range(len(pair))]
    for penalty in (0.0, 0.1):
        theirs = f"{view}/{tau}/penalty{penalty}"
        args = Args(agent_width=32, encoder_width=32, representation_size=8, logsumexp_penalty=penalty)
        grads, metrics = jax.grad(ctec.contrastive_loss, has_aux=True)(params, args, batches[0])
        np.testing.assert_allclose(metrics["contrastive_loss"], released[f"{theirs}/loss"], **CLOSE)
        assert_close(grads, encoders(released, f"{theirs}/grad"))
    for batch, reward in zip(batches, released[f"{view}/{tau}/reward"], strict=True):
        np.testing.assert_allclose(ctec.intrinsic_reward(params, ARGS, batch), reward, **CLOSE)


def test_sac_is_the_released_one(sac):
    """The released critic loss is half of ours: Adam does not see the factor."""
    actor = tree(sac, "actor/params")
    critic = twins(sac, "critic")
    alpha = jnp.exp(sac["log_alpha"])
    zeros = jnp.zeros(len(sac["obs"]))
    batch = Batch(sac["obs"], sac["action"], sac["next_obs"], sac["terminated"], zeros, zeros, zeros)
    size = sac["action"].shape[-1]

    action, log_prob = ctec.sample_action(actor, ARGS, sac["key_actor"], sac["obs"], size)
    np.testing.assert_allclose(action, sac["sampled_action"], **CLOSE)
    np.testing.assert_allclose(log_prob, sac["log_prob"], **CLOSE)

    next_action, next_log_prob = ctec.sample_action(actor, ARGS, sac["key_next"], sac["next_obs"], size)
    next_q = jnp.min(ctec.q_values(twins(sac, "target_critic"), ARGS, sac["next_obs"], next_action), axis=0)
    next_value = next_q - alpha * next_log_prob
    critic_loss = jax.grad(ctec.critic_loss, has_aux=True)
    grads, metrics = critic_loss(critic, ARGS, batch, sac["reward"], next_value)
    np.testing.assert_allclose(metrics["critic_loss"] / 2, sac["critic_loss"], **CLOSE)
    assert_close(jax.tree.map(lambda x: x / 2, grads), twins(sac, "critic_grad"))

    actor_loss = jax.grad(ctec.actor_loss, has_aux=True)
    grads, (_, metrics) = actor_loss(actor, ARGS, batch, critic, alpha, sac["key_actor"])
    np.testing.assert_allclose(metrics["actor_loss"], sac["actor_loss"], **CLOSE)
    assert_close(grads, tree(sac, "actor_grad/params"))

    _, log_prob = ctec.sample_action(actor, ARGS, sac["key_alpha"], sac["obs"], size)
    grad, metrics = jax.grad(ctec.alpha_loss, has_aux=True)(sac["log_alpha"], ARGS, log_prob, -0.5 * size)
    np.testing.assert_allclose(metrics["alpha_loss"], sac["alpha_loss"], **CLOSE)
    np.testing.assert_allclose(grad, sac["alpha_grad"], **CLOSE)
