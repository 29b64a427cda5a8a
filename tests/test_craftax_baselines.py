"""The baselines on Craftax-Classic: each bonus against brute force and hand-computed numbers, and whole runs."""
import csv
import dataclasses
import importlib
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import e3b_ppo_craftax as e3b
import icm_ppo_craftax as icm
import random_craftax
import rnd_ppo_craftax as rnd
from test_craftax_method import GAME  # stands in for Craftax, which takes a minute to compile

SMALL = dict(total_timesteps=4 * 8 * 6, num_envs=4, num_steps=8, num_minibatches=2, model_minibatches=2, model_epochs=2, reset_ratio=16, agent_width=16,
             feature_dim=6, random_iterations=2, episode_window=16, video_steps=0)  # fmt: skip
WIDTH = {"e3b_ppo_craftax": {"feature_width": 16}, "icm_ppo_craftax": {"feature_width": 16}, "rnd_ppo_craftax": {"rnd_width": 16}}
MODEL = {"e3b_ppo_craftax": "icm", "icm_ppo_craftax": "icm", "rnd_ppo_craftax": "rnd.predictor"}


def small(name, **changes):
    return importlib.import_module(name).Args(**SMALL | WIDTH[name] | changes)


def constant(params, value):
    """The parameters of an MLP that says `value` whatever it sees."""
    zero = jax.tree.map(jnp.zeros_like, params)
    zero["params"][max(zero["params"])]["bias"] = jnp.array(value, jnp.float32)
    return zero


def norm(tree):
    return sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(tree))


# ---------------------------------------------------------------------------------------------------------- E3B
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_e3b_agrees_with_a_direct_inverse(size):
    """500 random steps in 3 environments with resets, in two calls: the bonus before the insertion, and the inverse."""
    args, rng = small("e3b_ppo_craftax"), np.random.default_rng(0)
    feature = (size * rng.normal(size=(500, 3, 6)) * [1, 1, 1, 0.1, 0.1, 0.01]).astype(np.float32)
    first, done = rng.normal(size=(3, 6)).astype(np.float32), rng.random((500, 3)) < 0.02
    assert (done.sum(axis=0) > 2).all()
    root = e3b.insert_feature(e3b.new_roots(args, 3), jnp.asarray(first))[1]
    bonus, covariance = [], [0.1 * np.eye(6) + np.outer(f, f) for f in first.astype(float)]
    for part in (slice(0, 200), slice(200, 500)):
        paid, root = e3b.elliptical_bonus(args, root, jnp.asarray(feature[part]), jnp.asarray(done[part]))
        bonus.append(np.asarray(paid))
    bonus = np.concatenate(bonus)
    for t in range(500):
        for n in range(3):
            f = feature[t, n].astype(float)
            if done[t, n]:  # the first state of a new episode
                covariance[n] = 0.1 * np.eye(6)
                assert bonus[t, n] == 0.0
            else:
                np.testing.assert_allclose(bonus[t, n], f @ np.linalg.solve(covariance[n], f), rtol=1e-3)
            covariance[n] = covariance[n] + np.outer(f, f)
    for n in range(3):
        inverse, direct = np.asarray(root[n], float) @ np.asarray(root[n], float).T, np.linalg.inv(covariance[n])
        assert np.linalg.norm(inverse - direct) < 1e-3 * np.linalg.norm(direct)


def test_e3b_stays_symmetric_and_positive_for_ten_thousand_steps():
    """With long features of very different sizes, where C^-1 - u u^T / (1 + b) itself breaks down in float32."""
    args = small("e3b_ppo_craftax", feature_dim=32)
    spread = jnp.arange(1.0, 33.0) ** -2
    feature = 10 * (2 + jax.random.normal(jax.random.PRNGKey(0), (10_000, 1, 32)) * spread)
    bonus, root = jax.jit(lambda *x: e3b.elliptical_bonus(args, *x))(e3b.new_roots(args, 1), feature, jnp.zeros((10_000, 1), bool))
    plain = lambda inverse, f: (inverse - jnp.outer(inverse @ f, inverse @ f) / (1 + f @ inverse @ f), f @ inverse @ f)
    assert float(jax.lax.scan(plain, jnp.eye(32) / 0.1, feature[:, 0])[1].min()) < 0
    inverse = np.asarray(root[0], float) @ np.asarray(root[0], float).T
    np.testing.assert_array_equal(inverse, inverse.T)
    exact = np.linalg.inv(np.asarray(feature[:, 0], float).T @ np.asarray(feature[:, 0], float) + 0.1 * np.eye(32))
    assert np.linalg.eigvalsh(inverse).min() > 0.9 * np.linalg.eigvalsh(exact).min() > 0
    assert np.linalg.norm(inverse - exact) < 1e-3 * np.linalg.norm(exact) and float(bonus.min()) >= 0


def test_e3b_features_learn_from_whole_transitions_only():
    args = small("e3b_ppo_craftax")
    params = e3b.init_state(args, GAME).icm.params
    rng = np.random.default_rng(0)
    obs, next_obs = (jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(2))
    action, weight = jnp.array([0, 3, 16, 5]), jnp.array([1.0, 1, 0, 1])
    grad = lambda next_obs: jax.grad(lambda p: e3b.e3b_loss(p, args, obs, action, next_obs, weight)[0])(params)
    one, other = grad(next_obs), grad(next_obs.at[2].set(5.0))
    assert norm(one["encoder"]) > 0 and norm(jax.tree.map(lambda a, b: a - b, one, other)) == 0
    bias = jnp.zeros(17).at[3].set(jnp.log(4.0))  # action 3 has 4 / 20, the others 1 / 20
    loss = e3b.e3b_loss(params | {"inverse": constant(params["inverse"], bias)}, args, obs, action, next_obs, weight)[0]
    np.testing.assert_allclose(loss, (2 * np.log(20) + np.log(5)) / 3, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------- ICM
def test_icm_by_hand():
    args = small("icm_ppo_craftax", feature_dim=2)
    params = icm.init_state(args, GAME).icm.params
    by_hand = {"encoder": constant(params["encoder"], [1.0, -1.0]), "forward": constant(params["forward"], [2.0, 1.0]), "inverse": constant(params["inverse"], np.zeros(17))}
    obs, action, weight = jnp.ones((3, 6)), jnp.array([0, 1, 2]), jnp.array([1.0, 0, 1])
    feature = icm.features(by_hand, args, obs)
    np.testing.assert_allclose(icm.forward_error(by_hand, args, feature, feature, action), 2.5)  # ((2 - 1)^2 + (1 + 1)^2) / 2
    loss, metrics = icm.curiosity_loss(by_hand, args, obs, action, obs, weight)
    np.testing.assert_allclose([loss, metrics["forward_loss"], metrics["inverse_loss"]], [2.5 + np.log(17), 2.5, np.log(17)], rtol=1e-6)
    # the target sends no gradient: with a forward model that is blind, nothing of the forward loss reaches the encoder
    only = lambda p: icm.forward_error(p, args, icm.features(p, args, obs), icm.features(p, args, 2 * obs), action).sum()
    blind = jax.grad(only)(params | {"forward": by_hand["forward"]})
    assert norm(blind["encoder"]) == 0 and norm(blind["forward"]) > 0
    assert norm(jax.grad(only)(params)["encoder"]) > 0


# ---------------------------------------------------------------------------------------- rewards of an update
def a_rollout(script, args):
    """A state, the rollout of its first iteration, with two ended episodes put into it, and the GRU's first state."""
    state, key, rng = script.init_state(args, GAME), jax.random.PRNGKey(3), np.random.default_rng(0)
    shape = (args.num_steps, args.num_envs)
    obs = jnp.asarray(rng.normal(size=(*shape, 6)), jnp.float32)
    done = jnp.zeros(shape, bool).at[2, 1].set(True).at[7, 3].set(True)
    zeros = jnp.zeros(shape)
    rollout = script.Rollout(obs, done, jnp.asarray(rng.integers(0, 17, shape)), zeros, zeros, zeros, done)
    return state, rollout, key, np.concatenate([obs, state.players.obs[None]])


def intrinsic_of(script, args, state, rollout, key, monkeypatch):
    """The reward that update gives to PPO, and the state after it."""
    seen = []
    monkeypatch.setattr(script, "update_agent", lambda args, state, key, hidden, rollout, reward: (seen.append(np.asarray(reward)), (state.agent, {}))[1])
    after, metrics = script.update(args, state, key, None, rollout)
    assert not seen[0][np.asarray(rollout.done)].any()  # nothing where an episode ended
    return seen[0], after, metrics


def test_e3b_reward(monkeypatch):
    args = small("e3b_ppo_craftax", intrinsic_coef=0.5)
    state, rollout, key, states = a_rollout(e3b, args)
    reward, after, _ = intrinsic_of(e3b, args, state, rollout, key, monkeypatch)
    feature = e3b.features(state.icm.params, args, states[1:])  # those before the step
    expected, root = e3b.elliptical_bonus(args, state.root, feature, rollout.done)
    np.testing.assert_allclose(reward, 0.5 * np.asarray(expected), rtol=1e-5)
    np.testing.assert_allclose(after.root, root, rtol=1e-5, atol=1e-6)
    assert norm(jax.tree.map(lambda a, b: a - b, state.icm.params, after.icm.params)) > 0


def test_icm_reward(monkeypatch):
    args = small("icm_ppo_craftax", intrinsic_coef=0.5)
    state, rollout, key, states = a_rollout(icm, args)
    reward, after, _ = intrinsic_of(icm, args, state, rollout, key, monkeypatch)
    feature = [icm.features(state.icm.params, args, x) for x in (states[:-1], states[1:])]
    error = np.asarray(icm.forward_error(state.icm.params, args, *feature, rollout.action))
    np.testing.assert_allclose(reward, 0.5 * np.where(rollout.done, 0, error), rtol=1e-5)


def test_rnd_reward(monkeypatch):
    args = small("rnd_ppo_craftax", intrinsic_coef=0.5)
    state, rollout, key, states = a_rollout(rnd, args)
    reward, after, metrics = intrinsic_of(rnd, args, state, rollout, key, monkeypatch)
    network = rnd.MLP(args.rnd_width, args.feature_dim)
    error = ((np.asarray(network.apply(state.rnd.predictor.params, states[1:])) - np.asarray(network.apply(state.rnd.target, states[1:]))) ** 2).mean(-1)
    alive = ~np.asarray(rollout.done)
    np.testing.assert_allclose(reward[alive], 0.5 * error[alive] / error[alive].std(), rtol=1e-4)
    np.testing.assert_allclose([after.rnd.errors.count, metrics["error_std"]], [30, error[alive].std()], rtol=1e-4)
    assert norm(jax.tree.map(lambda a, b: a - b, after.rnd.target, state.rnd.target)) == 0
    assert norm(jax.tree.map(lambda a, b: a - b, after.rnd.predictor.params, state.rnd.predictor.params)) > 0


def test_the_model_is_trained_on_steps_and_their_own_next_states():
    """States count up in each environment; a new episode starts from 100. Every living pair must differ by 1."""
    args = small("e3b_ppo_craftax", model_epochs=3)
    done = np.zeros((8, 4), bool)
    done[3, 1] = done[7, 2] = True
    states = np.arange(9.0)[:, None] + 10 * np.arange(4)
    states[4:, 1], states[8:, 2] = 100 + np.arange(5), 100

    def loss(params, args, obs, action, next_obs, weight):
        wrong = jnp.sum(weight * jnp.abs(next_obs[:, 0] - obs[:, 0] - 1)) + jnp.sum(weight * jnp.abs(action - obs[:, 0]))
        return params * 0.0, {"wrong": wrong, "pairs": jnp.sum(weight), "rows": jnp.float32(len(weight))}

    model = e3b.new_model(args, jnp.float32(1.0))
    inputs = jnp.asarray(states[..., None], jnp.float32), jnp.asarray(states[:-1], jnp.float32), jnp.asarray(done)
    _, metrics = e3b.update_model(args, loss, model, jax.random.PRNGKey(0), *inputs)
    assert metrics["wrong"] == 0 and metrics["pairs"] * 2 == 30 and metrics["rows"] == 16  # two minibatches an epoch


# --------------------------------------------------------------------------------------------------- whole runs
def rows(folder):
    with open(Path(folder) / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "steps_per_second")} for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", [*WIDTH, "random_craftax"])
def test_a_run_and_the_same_run_stopped_and_resumed(name, tmp_path, monkeypatch, capsys):
    """E3B in the real game; the others, whose frame is the same, in its stand-in."""
    script = importlib.import_module(name)
    if name != "e3b_ppo_craftax":
        monkeypatch.setattr(script, "make_craftax", lambda: GAME)
    fields = {field.name for field in dataclasses.fields(script.Args)}
    args = script.Args(**{k: v for k, v in (SMALL | WIDTH.get(name, {})).items() if k in fields}, run_dir=str(tmp_path / "whole"), checkpoint_minutes=0.0)
    whole = script.main(args)
    folder, table = Path(whole["folder"]), rows(whole["folder"])
    state = script.init_state(args, script.make_craftax())
    assert set(script.train_iteration(args, script.make_craftax(), state)[1]) == set(script.METRICS[4:])  # every metric has its column
    assert {path.name for path in folder.iterdir()} == {"args.json", "metrics.csv", "checkpoint.msgpack", "achievements.png"}
    assert len(table) == 6 and all(np.isfinite(float(value)) for value in table[-1].values())
    if name == "e3b_ppo_craftax":
        assert "covariances 0 MB" in capsys.readouterr().out

    class Stopped(Exception):
        pass

    real, calls = script.save_bars, []

    def stop_at_the_third(*inputs):
        calls.append(inputs)
        if len(calls) == 3:
            raise Stopped
        real(*inputs)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(script, "save_bars", stop_at_the_third)  # in iteration 4 of 6, before its checkpoint
        script.main(dataclasses.replace(args, run_dir=str(tmp_path / "parts")))
    parts = next((tmp_path / "parts").iterdir())
    assert len(rows(parts)) == 4
    script.main(dataclasses.replace(args, resume=str(parts)))
    assert rows(parts) == table
    assert (parts / "checkpoint.msgpack").read_bytes() == (folder / "checkpoint.msgpack").read_bytes()
    if name in WIDTH:
        start = script.init_state(args, script.make_craftax())
        end = script.load_checkpoint(folder / "checkpoint.msgpack", start)
        for part in (MODEL[name], "agent"):
            changed = jax.tree.map(lambda a, b: bool((a != b).any()), attrgetter(part)(start).params, attrgetter(part)(end).params)
            assert all(jax.tree.leaves(changed)), part


def test_the_memory_of_the_covariances_is_said_before_they_are_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(e3b, "init_state", lambda args, env: (_ for _ in ()).throw(MemoryError))
    monkeypatch.setattr(e3b.jax, "eval_shape", lambda _: e3b.TrainState(*[e3b.Model(jnp.zeros(1), None)] * 8))
    with pytest.raises(MemoryError):
        e3b.main(e3b.Args(run_dir=str(tmp_path)))
    assert "covariances 1,074 MB" in capsys.readouterr().out
