"""The baselines on Craftax-Classic: each bonus against brute force and hand-computed numbers, and whole runs."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    SMALL_PPO,
    Game,
    assert_all_changed,
    assert_none_changed,
    assert_one_line,
    checkpoint,
    constant,
    norm,
    refusal,
    rows,
)

import ctec_ppo_rnn_craftax as ctec
import e3b_ppo_craftax as e3b
import icm_ppo_craftax as icm
import random_craftax
import rnd_ppo_craftax as rnd
from e3b_ppo_craftax import Visits

GAME = Game()
SIZES = {  # of the intrinsic-reward model's networks
    e3b: dict(feature_width=16, feature_dim=6),
    icm: dict(feature_width=16, feature_dim=6),
    rnd: dict(rnd_width=16, feature_dim=6),
}
SMALL_MODEL = dict(total_timesteps=4 * 8 * 6, model_minibatches=2, model_epochs=2)
by_name = dict(ids=lambda x: getattr(x, "__name__", str(x)))


def small(script, **changes):
    config = SMALL_PPO | SMALL_MODEL | SIZES.get(script, {})
    fields = {field.name for field in dataclasses.fields(script.Args)}  # random_craftax.py has few of them
    return script.Args(**{name: x for name, x in config.items() if name in fields} | changes)


def start(script):
    """The state that a small run starts from."""
    return script.init_state(small(script), GAME)


def transitions_of(script, next_obs, **changes):
    """Steps from states of 6 ones, with action 0, and nothing that ends."""
    rows = len(next_obs)
    batch = script.Transitions(
        obs=jnp.ones((rows, 6)),
        action=jnp.zeros(rows, jnp.int32),
        next_obs=jnp.asarray(next_obs, jnp.float32),
        mask=jnp.ones(rows),
    )
    return batch.replace(**{name: jnp.asarray(x) for name, x in changes.items()})


# ---------------------------------------------------------------------------------------------------------- E3B
def elliptical_bonus(args, feature, done, root):
    """e3b.intrinsic_reward for these features: the encoder leaves the states as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e3b, "encode", lambda params, args, x: x)
        reward = jax.jit(lambda visits: e3b.intrinsic_reward({"encoder": None}, args, visits))
        return reward(Visits(jnp.asarray(feature), jnp.asarray(done), root))


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_e3b_agrees_with_a_direct_inverse(size):
    """500 random steps in 3 environments with resets, in two calls: each bonus before its insertion, and the inverse
    at the end."""
    args = small(e3b)
    rng = np.random.default_rng(0)
    scale = size * np.array([1, 1, 1, 0.1, 0.1, 0.01])
    feature = (scale * rng.normal(size=(500, 3, 6))).astype(np.float32)
    first = rng.normal(size=(3, 6)).astype(np.float32)
    done = rng.random((500, 3)) < 0.02
    assert (done.sum(axis=0) > 2).all()
    _, root = e3b.insert_feature(e3b.init_roots(args, 3), jnp.asarray(first))
    bonus = []
    for part in (slice(0, 200), slice(200, 500)):
        paid, root = elliptical_bonus(args, feature[part], done[part], root)
        bonus.append(np.asarray(paid))
    bonus = np.concatenate(bonus)

    covariance = [0.1 * np.eye(6) + np.outer(f, f) for f in first.astype(float)]
    for t, n in np.ndindex(done.shape):
        f = feature[t, n].astype(float)
        if done[t, n]:  # the first state of a new episode
            covariance[n] = 0.1 * np.eye(6)
            assert bonus[t, n] == 0.0
        else:
            np.testing.assert_allclose(bonus[t, n], f @ np.linalg.solve(covariance[n], f), rtol=1e-3)
        covariance[n] = covariance[n] + np.outer(f, f)
    for n in range(3):
        inverse = np.asarray(root[n], float) @ np.asarray(root[n], float).T
        direct = np.linalg.inv(covariance[n])
        assert np.linalg.norm(inverse - direct) < 1e-3 * np.linalg.norm(direct)


def test_e3b_stays_symmetric_and_positive_for_ten_thousand_steps():
    """With long features of very different sizes, where C^-1 - u u^T / (1 + b) itself breaks down in float32."""
    args = small(e3b, feature_dim=32)
    spread = jnp.arange(1.0, 33.0) ** -2
    feature = 10 * (2 + jax.random.normal(jax.random.PRNGKey(0), (10_000, 1, 32)) * spread)

    def rank_one_update(inverse, f):
        u = inverse @ f
        return inverse - jnp.outer(u, u) / (1 + f @ u), f @ u

    _, plain_bonus = jax.lax.scan(rank_one_update, jnp.eye(32) / 0.1, feature[:, 0])
    assert float(plain_bonus.min()) < 0

    bonus, root = elliptical_bonus(args, feature, np.zeros((10_000, 1), bool), e3b.init_roots(args, 1))
    assert float(bonus.min()) >= 0
    inverse = np.asarray(root[0], float) @ np.asarray(root[0], float).T
    np.testing.assert_array_equal(inverse, inverse.T)
    f = np.asarray(feature[:, 0], float)
    exact = np.linalg.inv(f.T @ f + 0.1 * np.eye(32))
    assert np.linalg.eigvalsh(inverse).min() > 0.9 * np.linalg.eigvalsh(exact).min() > 0
    assert np.linalg.norm(inverse - exact) < 1e-3 * np.linalg.norm(exact)


def test_e3b_starts_with_the_first_states():
    state = start(e3b)
    feature = np.asarray(e3b.encode(state.model.params["encoder"], small(e3b), state.players.obs), float)
    for f, root in zip(feature, np.asarray(state.root, float)):
        np.testing.assert_allclose(root @ root.T, np.linalg.inv(0.1 * np.eye(6) + np.outer(f, f)), atol=1e-3)


def test_e3b_features_learn_from_whole_transitions_only():
    args = small(e3b)
    params = start(e3b).model.params
    rng = np.random.default_rng(0)
    obs = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    batch = transitions_of(e3b, rng.normal(size=(4, 6)), obs=obs, action=[0, 3, 16, 5], mask=[1.0, 1, 0, 1])
    grad = jax.jit(jax.grad(lambda params, batch: e3b.model_loss(params, args, batch)[0]))
    assert norm(grad(params, batch)["encoder"]) > 0
    assert_none_changed(grad(params, batch), grad(params, batch.replace(next_obs=batch.next_obs.at[2].set(5.0))))
    bias = jnp.zeros(17).at[3].set(jnp.log(4.0))  # action 3 has 4 / 20, the others 1 / 20
    loss, metrics = e3b.model_loss(params | {"inverse": constant(params["inverse"], bias)}, args, batch)
    np.testing.assert_allclose(loss, (2 * np.log(20) + np.log(5)) / 3, rtol=1e-5)
    np.testing.assert_allclose(metrics["inverse_loss"], loss)
    np.testing.assert_allclose(metrics["inverse_accuracy"], 1 / 3, rtol=1e-6)
    feature = e3b.encode(params["encoder"], args, batch.obs)
    np.testing.assert_allclose(metrics["feature_variance"], np.var(feature, axis=0).mean(), rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------- ICM
def test_icm_by_hand():
    args = small(icm, forward_coef=0.5)
    params = start(icm).model.params
    says = {"encoder": [1, -1, 0, 0, 0, 0], "forward": [2, 1, 0, 0, 0, 3], "inverse": np.zeros(17)}
    by_hand = {name: constant(params[name], value) for name, value in says.items()}
    error = (1**2 + 2**2 + 3**2) / 6
    batch = transitions_of(icm, np.ones((3, 6)), action=[0, 1, 2], mask=[1.0, 0, 1])
    reward = icm.intrinsic_reward(by_hand, args, batch)
    np.testing.assert_allclose(reward, [error, 0, error], rtol=1e-6)  # nothing where the episode ended
    loss, metrics = icm.model_loss(by_hand, args, batch)
    np.testing.assert_allclose(metrics["forward_loss"], error, rtol=1e-6)
    np.testing.assert_allclose(metrics["inverse_loss"], np.log(17), rtol=1e-6)
    np.testing.assert_allclose(metrics["inverse_accuracy"], 0.5)  # of 17 equal logits the first one counts
    np.testing.assert_allclose(loss, 0.5 * error + np.log(17), rtol=1e-6)


def test_icm_encoder_learns_from_the_inverse_loss_alone():
    args = small(icm)
    params = start(icm).model.params
    batch = transitions_of(icm, np.random.default_rng(0).normal(size=(5, 6)), action=[0, 1, 2, 3, 4])
    by_loss = jax.jit(jax.jacrev(lambda params: icm.model_loss(params, args, batch)[1]))(params)
    assert norm(by_loss["forward_loss"]["encoder"]) == 0
    assert norm(by_loss["forward_loss"]["forward"]) > 0
    assert norm(by_loss["inverse_loss"]["encoder"]) > 0
    assert norm(by_loss["inverse_loss"]["forward"]) == 0


# ---------------------------------------------------------------------------------------------------------- RND
def test_rnd_by_hand():
    args = small(rnd, feature_dim=2)
    network = rnd.MLP(args.rnd_width, 2).init(jax.random.PRNGKey(0), jnp.zeros(6))
    params = {"predictor": constant(network, [1.0, 3.0]), "target": constant(network, [0.0, 1.0])}
    batch = transitions_of(rnd, np.arange(18).reshape(3, 6), mask=[1.0, 0, 1])
    np.testing.assert_allclose(rnd.intrinsic_reward(params, args, batch), [2.5, 0, 2.5])  # (1^2 + 2^2) / 2
    np.testing.assert_allclose(rnd.model_loss(params, args, batch)[0], 2.5)
    grad = jax.jit(jax.grad(lambda params: rnd.model_loss(params, small(rnd), batch)[0]))
    slope = grad(start(rnd).model.networks.params)
    assert norm(slope["predictor"]) > 0
    assert norm(slope["target"]) == 0


# ------------------------------------------------------------------------------------------ rewards of a rollout
def random_rollout(script, args):
    """A rollout of random states with two ended episodes, and its T+1 states; the last ones are those of start."""
    rng = np.random.default_rng(0)
    shape = (args.num_steps, args.num_envs)
    zeros = jnp.zeros(shape)
    rollout = script.Rollout(
        obs=jnp.asarray(rng.normal(size=(*shape, 6)), jnp.float32),
        first=jnp.zeros(shape, bool),
        action=jnp.asarray(rng.integers(0, 17, shape)),
        log_prob=zeros,
        value=zeros,
        reward=jnp.asarray(rng.random(shape), jnp.float32),
        done=jnp.zeros(shape, bool).at[2, 1].set(True).at[7, 3].set(True),
    )
    return rollout, np.concatenate([rollout.obs, start(script).players.obs[None]])


def learned(script, args, state, rollout):
    """The intrinsic reward of learn_bonus, which may overwrite its state; the state after it, and the metrics."""
    copy = jax.tree.map(jnp.copy, state)
    after, reward, metrics = script.learn_bonus(args, GAME, copy, state.players.hidden, rollout)
    reward = np.asarray(reward - args.task_reward_coef * rollout.reward) / args.intrinsic_coef
    np.testing.assert_allclose(reward[rollout.done], 0.0, atol=1e-6)  # nothing where an episode ended
    np.testing.assert_allclose(metrics["reward_mean"], reward.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward_std"], reward.std(), rtol=1e-4)
    assert_none_changed((state.agent, state.players), (after.agent, after.players))
    return reward, after, metrics


def test_e3b_reward():
    args = small(e3b, intrinsic_coef=0.5, task_reward_coef=0.1)
    state = start(e3b)
    rollout, states = random_rollout(e3b, args)
    reward, after, _ = learned(e3b, args, state, rollout)
    feature = e3b.encode(state.model.params["encoder"], args, states[1:])  # by the encoder before its step
    expected, root = elliptical_bonus(args, feature, rollout.done, state.root)
    np.testing.assert_allclose(reward, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after.root, root, rtol=1e-5, atol=1e-6)
    assert_all_changed(state.model.params, after.model.params)


def test_icm_reward():
    args = small(icm, intrinsic_coef=0.5, task_reward_coef=0.1)
    state = start(icm)
    rollout, states = random_rollout(icm, args)
    reward, after, _ = learned(icm, args, state, rollout)
    params = state.model.params
    feature = icm.encode(params["encoder"], args, states)
    pair = np.concatenate([feature[:-1], np.eye(17)[np.asarray(rollout.action)]], axis=-1)
    predicted = icm.MLP(args.feature_width, args.feature_dim, 1).apply(params["forward"], pair)
    error = np.mean(np.asarray(predicted - feature[1:]) ** 2, axis=-1)
    np.testing.assert_allclose(reward, np.where(rollout.done, 0, error), rtol=1e-4, atol=1e-6)
    assert_all_changed(params, after.model.params)


def test_rnd_reward():
    """Over two updates: the deviation is that of all errors so far, those of this rollout among them."""
    args = small(rnd, intrinsic_coef=0.5, task_reward_coef=0.1)
    state = start(rnd)
    rollout, states = random_rollout(rnd, args)
    network = rnd.MLP(args.rnd_width, args.feature_dim)
    alive = ~np.asarray(rollout.done)
    seen = []
    for _ in range(2):
        params = state.model.networks.params
        reward, after, metrics = learned(rnd, args, state, rollout)
        difference = network.apply(params["predictor"], states[1:]) - network.apply(params["target"], states[1:])
        error = np.mean(np.asarray(difference) ** 2, axis=-1)
        seen += list(error[alive])
        np.testing.assert_allclose(reward[alive], error[alive] / np.std(seen), rtol=1e-4)
        np.testing.assert_allclose(metrics["error_std"], np.std(seen), rtol=1e-4)
        np.testing.assert_allclose(metrics["rnd_loss"], error[alive].mean(), rtol=1e-4)
        np.testing.assert_allclose(after.model.errors.count, len(seen))
        assert_none_changed(params["target"], after.model.networks.params["target"])
        assert_all_changed(params["predictor"], after.model.networks.params["predictor"])
        state = after
    assert len(seen) == 2 * 30


def test_the_model_is_trained_on_steps_and_their_own_next_states():
    """States count up in each environment; a new episode starts from 100. Every living pair must differ by 1."""
    args = small(e3b, model_epochs=3)
    done = np.zeros((8, 4), bool)
    done[3, 1] = True
    done[7, 2] = True
    states = np.arange(9.0)[:, None] + 10 * np.arange(4)
    states[4:, 1] = 100 + np.arange(5)
    states[8:, 2] = 100

    def look(params, args, batch):
        far = jnp.abs(batch.next_obs[:, 0] - batch.obs[:, 0] - 1)
        other_action = jnp.abs(batch.action - batch.obs[:, 0])
        metrics = {
            "wrong": jnp.sum(batch.mask * (far + other_action)),
            "pairs": jnp.sum(batch.mask),
            "rows": jnp.float32(len(batch.mask)),
        }
        return params * 0.0, metrics

    adam = e3b.clipped_adam(args, args.model_learning_rate)
    model = e3b.Model(jnp.float32(1.0), adam.init(jnp.float32(1.0)))
    states = jnp.asarray(states, jnp.float32)
    steps = (states[..., None], states[:-1], jnp.asarray(done))  # an action is the number of its state
    _, metrics = e3b.update_model(args, look, model, jax.random.PRNGKey(0), *steps)
    assert metrics["wrong"] == 0
    assert 2 * metrics["pairs"] == 30  # two minibatches an epoch
    assert metrics["rows"] == 16


# --------------------------------------------------------------------------------------------------- whole runs
def test_e3b_stages_fit_the_real_game():
    """Shapes and types only, nothing is compiled. Each stage returns a state of the types that it was given: others
    would be compiled a second time."""
    args = small(e3b)
    env = e3b.make_craftax()
    types = lambda state: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
    state = jax.eval_shape(lambda: e3b.init_state(args, env))
    assert state.players.obs.shape == (4, env.state_size)
    after, rollout, metrics = e3b.collect.eval_shape(args, env, state)
    assert types(after) == types(state)
    after, reward, bonus_metrics = e3b.learn_bonus.eval_shape(args, env, state, *rollout)
    assert types(after) == types(state)
    after, policy_metrics = e3b.learn_policy.eval_shape(args, env, state, *rollout, reward)
    assert types(after) == types(state)
    assert len(metrics | bonus_metrics | policy_metrics) == len(metrics) + len(bonus_metrics) + len(policy_metrics)


@pytest.mark.parametrize("script", [*SIZES, random_craftax], **by_name)
def test_a_run_and_the_same_run_stopped_and_resumed(script, tmp_path, monkeypatch, capsys):
    """In the stand-in for the game. Stopped in iteration 4 of 6, by its picture, the third one, before its checkpoint:
    what was in the folder then is copied, and resumed."""
    monkeypatch.setattr(script, "make_craftax", lambda: GAME)
    parts = tmp_path / "parts"
    save_bars = script.save_bars
    calls = []

    def copy_at_the_third(folder, *inputs):
        calls.append(inputs)
        if len(calls) == 3:
            shutil.copytree(folder, parts)
        save_bars(folder, *inputs)

    monkeypatch.setattr(script, "save_bars", copy_at_the_third)
    args = small(script, run_dir=str(tmp_path / "whole"), checkpoint_minutes=0.0)
    whole = script.main(args)
    assert ("covariances 0 MB" in capsys.readouterr().out) == (script is e3b)
    folder = Path(whole["folder"])
    files = {"args.json", "metrics.csv", "checkpoint.npz", "achievements.png"}
    assert {path.name for path in folder.iterdir()} == files
    assert folder.name.startswith(f"craftax_classic__{script.__name__}__1__")
    assert len(calls) == 5

    # every metric has its value; PPO's from its first update on, the others from the start
    table = rows(folder)
    assert len(table) == 6
    for i, row in enumerate(table, 1):
        ppo = {"policy_loss", "value_loss", "value_mean", "entropy", "kl", "clipped", "learning_rate", "parameter_norm"}
        assert {name for name, value in row.items() if value == ""} == (
            ppo if i < getattr(args, "first_update", 1) else set()
        )
        assert all(np.isfinite(float(value)) for value in row.values() if value)

    assert len(rows(parts)) == 4
    script.main(dataclasses.replace(args, resume=str(parts)))
    assert rows(parts) == table
    assert checkpoint(parts) == checkpoint(folder)

    first = script.init_state(args, GAME)
    last = script.load_checkpoint(folder / "checkpoint.npz", first)
    assert last.iteration == 6
    if script is random_craftax:
        return
    assert_all_changed(first.agent.params, last.agent.params)
    if script is rnd:
        assert_all_changed(first.model.networks.params["predictor"], last.model.networks.params["predictor"])
        assert_none_changed(first.model.networks.params["target"], last.model.networks.params["target"])
        assert last.model.errors.count > 0
    else:
        assert_all_changed(first.model.params, last.model.params)
    if script is e3b:
        assert_all_changed(first.root, last.root)


def test_the_memory_of_the_covariances_is_said_before_they_are_made(tmp_path, monkeypatch, capsys):
    args = e3b.Args(run_dir=str(tmp_path))
    template = jax.eval_shape(lambda: e3b.init_state(args, GAME))
    monkeypatch.setattr(e3b, "make_craftax", lambda: GAME)
    monkeypatch.setattr(e3b.jax, "eval_shape", lambda _: template)

    def no_memory(args, env):
        raise MemoryError

    monkeypatch.setattr(e3b, "init_state", no_memory)
    with pytest.raises(MemoryError):
        e3b.main(args)
    assert "covariances 1,074 MB" in capsys.readouterr().out


@pytest.mark.parametrize("script", [*SIZES, random_craftax], **by_name)
def test_the_race_is_fair(script):
    """The laptop presets differ in the sizes of the intrinsic-reward model only."""
    laptop = lambda script: dataclasses.asdict(script.parse_args(["--preset", "laptop"]))
    own = {"feature_width", "feature_dim", "rnd_width", "model_learning_rate", "model_epochs", "model_minibatches",
           "ridge", "forward_coef"}  # fmt: skip
    expected = laptop(ctec)
    for name, value in laptop(script).items():
        assert name in own or value == expected[name], name


@pytest.mark.parametrize("script", SIZES, **by_name)
def test_presets_can_run_and_bad_arguments_are_one_line(script, capsys):
    for preset in script.PRESETS:
        script.check_args(script.parse_args(["--preset", preset]))
    script.check_args(small(script, gae_lambda=0.0, gamma=1.0, entropy_coef=0.0, random_iterations=0))
    for flags, words in {
        ("--model-minibatches", 7): "--model-minibatches 7 must divide num_envs * num_steps",
        ("--model-minibatches", 0): "--model-minibatches 0 must be above 0",
        ("--feature-dim", -1): "--feature-dim -1 must be above 0",
    }.items():
        code, message = refusal(capsys, script, flags)
        assert code == 2
        assert_one_line(message, words)
