"""experiments/remedies.py: what each change does to a batch, a loss or a reward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import remedies
from test_ctec_sac_brax import ARGS, ENV, filled_replay, numpy_encode, random_pairs

import ctec_sac_brax as ctec


def test_transitions_are_recent_and_negatives_of_all_times():
    """An observation is (time, env, trajectory); 98 steps are stored, and the latest 20 count."""
    replay = ctec.index_trajectories(filled_replay(98, capacity=98)[0])
    batch = remedies.sample_recent_batch(20, jax.random.PRNGKey(0), ARGS, replay)
    assert set(np.asarray(batch.time)) == set(range(78, 97))
    np.testing.assert_array_equal(batch.obs[:, :2], np.stack([batch.time, batch.env_index], axis=1))
    np.testing.assert_array_equal(batch.next_obs[:, 0], batch.time + 1)
    pairs = remedies.sample_with_negatives(jax.random.PRNGKey(1), ARGS, ENV, replay, batch)
    assert set(np.asarray(pairs.negative[:, 0], int)) == set(range(98))
    np.testing.assert_array_equal(pairs.positive[:, 1], batch.env_index)


@pytest.mark.parametrize("temperature", ["phi", "logits"])
def test_loss_with_negatives_against_numpy(temperature):
    args = dataclasses.replace(ARGS, temperature=temperature)
    pairs = random_pairs([1.0, 1, 1, 1, 1, 0])
    negative = jax.random.normal(jax.random.PRNGKey(5), (6, 4))
    params = ctec.init_state(ARGS, ENV).model.params | {"log_tau": jnp.log(2.0)}
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    phi = unit(numpy_encode(params["phi"], pairs.anchor))
    psi = unit(numpy_encode(params["psi"], pairs.positive))
    other = unit(numpy_encode(params["psi"], negative))
    of_phi, of_logits = (2, 1) if temperature == "phi" else (1, 2)
    own = -np.abs(phi / of_phi - psi).sum(axis=1) / of_logits
    others = -np.abs(phi[:, None] / of_phi - other).sum(axis=-1) / of_logits
    lse = np.log(np.exp(own) + np.exp(others).sum(axis=1))
    expected = (lse - own + args.logsumexp_penalty * lse**2)[:5].mean()
    with_negatives = remedies.PairsWithNegatives(**vars(pairs), negative=negative)
    np.testing.assert_allclose(remedies.loss_with_negatives(params, args, with_negatives)[0], expected, rtol=1e-4)


def test_deviation_of_the_reward():
    pairs = random_pairs([1.0, 1, 1, 1, 1, 0])
    params = ctec.init_state(ARGS, ENV).model.params
    reward = np.asarray(ctec.intrinsic_reward(params, ARGS, pairs))
    expected = (reward - reward[:5].mean()) / reward[:5].std()
    found = remedies.deviation_of_reward(params, ARGS, pairs)
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-4)
    assert found[5] == 0


def test_the_schedule_ends_at_gamma_cl(monkeypatch):
    seen = []
    draw = lambda key, left, gamma: seen.append(gamma) or jnp.minimum(left, 1)
    monkeypatch.setattr(ctec, "truncated_geometric", draw)
    steps = ARGS.num_iterations * ARGS.unroll_length
    replay = ctec.index_trajectories(filled_replay(42)[0])
    batch = ctec.sample_batch(jax.random.PRNGKey(1), ARGS, replay)
    for time in (0, steps // 2, steps):
        remedies.sample_scheduled_futures(jax.random.PRNGKey(2), ARGS, ENV, replay.replace(time=time), batch)
    np.testing.assert_allclose(seen, [0.9, 0.945, 0.99], rtol=1e-5)


def test_a_quarter_of_the_encoder_steps():
    state = ctec.init_state(ARGS, ENV)
    replay = state.replay.replace(obs=jax.random.normal(jax.random.PRNGKey(0), state.replay.obs.shape), time=40)
    replay = ctec.index_trajectories(replay)

    @jax.jit
    def learns(key):
        models, metrics = remedies.update_with_fewer_encoder_steps(ARGS, ENV, replay, state.agent, state.model, key)
        assert set(metrics) == set(jax.eval_shape(functools.partial(ctec.update, ARGS, ENV), replay, *models, key)[1])
        model = models[1]
        first_layer = lambda model: model.params["phi"]["params"]["Dense_0"]["kernel"]
        return jnp.any(first_layer(model) != first_layer(state.model))

    share = np.mean([learns(key) for key in jax.random.split(jax.random.PRNGKey(3), 200)])
    assert 0.15 < share < 0.35


def test_critics_with_a_head_start():
    """Both critics and their targets say 300 more of any state-action, and the actor is the same."""
    key = jax.random.PRNGKey(0)
    plain = ctec.init_agent(ARGS, ENV, key)
    agent = remedies.init_agent_with_value(300.0, ARGS, ENV, key)
    obs = jax.random.normal(key, (5, ENV.state_size))
    action = jax.random.normal(key, (5, ENV.action_size))
    for before, after in ((plain.critic.params, agent.critic.params), (plain.target_critic, agent.target_critic)):
        difference = ctec.q_values(after, ARGS, obs, action) - ctec.q_values(before, ARGS, obs, action)
        np.testing.assert_allclose(difference, 300.0, atol=1e-3)
    jax.tree.map(np.testing.assert_array_equal, plain.actor, agent.actor)


def test_the_distance_from_the_start_is_the_reward(monkeypatch):
    monkeypatch.setattr(ctec, "main", lambda args: ctec.intrinsic_reward)
    monkeypatch.setattr(ctec, "intrinsic_reward", ctec.intrinsic_reward)  # put back afterwards
    reward = remedies.main(remedies.Remedy("distance"), ARGS)
    offsets = jnp.array([[3.0, 4.0], [-5.0, 12.0], [0.0, 0.0], [1.0, 0.0]])
    states = jnp.zeros((4, ENV.state_size)).at[:, :2].set(ENV.start + offsets)
    anchor = jnp.concatenate([states, jnp.ones((4, ENV.action_size))], axis=-1)
    pairs = ctec.Pairs(anchor=anchor, positive=states + 9, mask=jnp.array([1.0, 1, 1, 0]))
    np.testing.assert_allclose(reward(None, ARGS, pairs), [5, 13, 0, 0], atol=1e-5)
