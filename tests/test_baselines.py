"""The baselines on Brax: each bonus against hand-computed numbers, and whole runs."""
import csv
import dataclasses
import importlib
import json
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import apt_sac_brax as apt
import icm_sac_brax as icm
import mbrl_sac_brax as mbrl
import random_brax
import rnd_sac_brax as rnd

SMALL = dict(env="point_u_maze", total_timesteps=8 * 16 * 8, num_envs=8, unroll_length=16, episode_length=33, replay_size=64,
             learning_starts=32, batch_size=32, multiplier=0.5, agent_width=16)  # fmt: skip
SIZES = {"rnd_sac_brax": dict(rnd_width=16, feature_dim=8), "icm_sac_brax": dict(encoder_width=16, feature_dim=8),
         "apt_sac_brax": dict(encoder_width=16, representation_size=8), "mbrl_sac_brax": dict(model_width=16)}  # fmt: skip
MODEL = {"rnd_sac_brax": "rnd.predictor", "icm_sac_brax": "icm", "apt_sac_brax": "encoder", "mbrl_sac_brax": "model"}
RANDOM = {name: SMALL[name] for name in ("env", "total_timesteps", "num_envs", "unroll_length", "episode_length")}


def small(name, **changes):
    script = importlib.import_module(name)
    return script, script.Args(**(RANDOM if name == "random_brax" else SMALL | SIZES[name]) | changes)


def batch_of(script, next_obs, terminated=None, truncated=None, obs=None, action=None):
    """Rows of 4 numbers; the first of two action numbers is 0.5 everywhere."""
    rows = len(next_obs)
    zeros, index = jnp.zeros(rows), jnp.zeros(rows, jnp.int32)
    obs = jnp.ones((rows, 4)) if obs is None else obs
    action = jnp.tile(jnp.array([0.5, -0.5]), (rows, 1)) if action is None else action
    flags = [zeros if flag is None else jnp.array(flag, jnp.float32) for flag in (terminated, truncated)]
    return script.Batch(obs, action, jnp.asarray(next_obs, jnp.float32), *flags, index, index)


def constant(params, value):
    """The parameters of an MLP that says `value` whatever it sees."""
    zero = jax.tree.map(jnp.zeros_like, params)
    last = max(zero["params"])
    zero["params"][last]["bias"] = jnp.array(value, jnp.float32)
    return zero


def norm(tree):
    return sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(tree))


# ---------------------------------------------------------------------------------------------------------- RND
def test_rnd_error_by_hand():
    _, args = small("rnd_sac_brax", feature_dim=2)
    params = rnd.MLP(args.rnd_width, 2).init(jax.random.PRNGKey(0), jnp.zeros(4))
    predictor, target = constant(params, [1.0, 3.0]), constant(params, [0.0, 1.0])
    batch = batch_of(rnd, np.arange(16).reshape(4, 4), terminated=[0, 1, 0, 0], truncated=[0, 0, 1, 0])
    weight = batch.has_next
    loss, error = rnd.rnd_loss(predictor, args, target, batch.next_obs, weight)
    np.testing.assert_allclose(error, [2.5, 0, 0, 2.5])  # ((1 - 0)^2 + (3 - 1)^2) / 2, nothing where the episode ended
    np.testing.assert_allclose(loss, 2.5)
    # the masked next states (they belong to other episodes) have no say in the gradient
    grad = lambda next_obs: jax.grad(lambda p: rnd.rnd_loss(p, args, params, next_obs, weight)[0])(predictor)
    for a, b in zip(jax.tree.leaves(grad(batch.next_obs)), jax.tree.leaves(grad(batch.next_obs.at[1:3].set(77.0)))):
        np.testing.assert_array_equal(a, b)


def test_rnd_running_deviation():
    rng, moments, seen = np.random.default_rng(0), rnd.Moments(*jnp.zeros(3)), []
    for size in (5, 1, 40, 200):
        x, weight = rng.gamma(2.0, 3.0, size), (rng.random(size) < 0.7).astype(float)
        moments, seen = rnd.add_numbers(moments, jnp.asarray(x), jnp.asarray(weight)), [*seen, *x[weight > 0]]
        np.testing.assert_allclose([moments.count, moments.mean, moments.variance], [len(seen), np.mean(seen), np.var(seen)], rtol=1e-4)
    same = rnd.add_numbers(moments, jnp.ones(3), jnp.zeros(3))
    np.testing.assert_allclose(jax.tree.leaves(same), jax.tree.leaves(moments), rtol=1e-6)  # nothing was added


def test_rnd_reward_is_the_error_before_the_step_over_the_deviation():
    script, args = small("rnd_sac_brax")
    env, state, replay, batch, (_, key_sac), key = one_update(script, args)
    (agent, after), metrics = rnd.update(args, replay, state.agent, state.rnd, key)
    error = rnd.rnd_loss(state.rnd.predictor.params, args, state.rnd.target, batch.next_obs, batch.has_next)[1]
    alive = np.asarray(batch.has_next) > 0
    assert 0 < alive.sum() < len(alive)
    deviation = np.std(np.asarray(error)[alive])
    np.testing.assert_allclose(metrics["error_std"], deviation, rtol=1e-4)
    assert_rewarded(script, args, state, batch, error / deviation, key_sac, metrics)
    assert norm(jax.tree.map(lambda a, b: a - b, after.target, state.rnd.target)) == 0  # the target never changes


# ---------------------------------------------------------------------------------------------------------- ICM
def icm_params(args, encoder=None, forward=None, inverse=None):
    params = icm.init_state(args, icm.make_env(args.env)).icm.params
    given = {"encoder": encoder, "forward": forward, "inverse": inverse}
    return params | {name: constant(params[name], value) for name, value in given.items() if value is not None}


def test_icm_losses_and_reward_by_hand():
    _, args = small("icm_sac_brax", feature_dim=2)
    params = icm_params(args, encoder=[1.0, -1.0], forward=[2.0, 1.0], inverse=[0.0, np.arctanh(0.5)])
    batch = batch_of(icm, np.zeros((3, 4)), terminated=[0, 0, 1], truncated=[0, 1, 0])
    loss, (reward, metrics) = icm.icm_loss(params, args, batch)
    np.testing.assert_allclose(reward, [2.5, 0, 0], rtol=1e-6)  # ((2 - 1)^2 + (1 + 1)^2) / 2
    np.testing.assert_allclose(metrics["inverse_loss"], (0.5**2 + 1.0**2) / 2, rtol=1e-6)  # tanh gives (0, 0.5) for (0.5, -0.5)
    np.testing.assert_allclose(loss, 0.2 * 2.5 + 0.8 * 0.625, rtol=1e-6)


def test_icm_forward_target_sends_no_gradient():
    _, args = small("icm_sac_brax", forward_weight=1.0)
    batch = batch_of(icm, np.random.default_rng(0).normal(size=(5, 4)))
    grad = lambda params, args: jax.grad(lambda p: icm.icm_loss(p, args, batch)[0])(params)
    # a forward model that does not look at its input leaves the target as the encoder's only way into the forward loss
    blind = grad(icm_params(args, forward=[0.3] * 8), args)
    assert norm(blind["forward"]) > 0 and norm(blind["encoder"]) == 0 and norm(blind["inverse"]) == 0
    assert norm(grad(icm_params(args), args)["encoder"]) > 0  # through the state's own feature
    inverse = grad(icm_params(args), dataclasses.replace(args, forward_weight=0.0))
    assert norm(inverse["encoder"]) > 0 and norm(inverse["inverse"]) > 0 and norm(inverse["forward"]) == 0


# ---------------------------------------------------------------------------------------------------------- APT
def test_apt_distances_by_hand():
    z = jnp.array([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0], [1.0, 6.0]])  # on a path: 0, 1, 3, 7
    np.testing.assert_allclose(apt.neighbour_distance(z, jnp.ones(4), 2), [2.0, 1.5, 2.5, 5.0])  # never 0 from itself
    usable = jnp.array([1.0, 0, 1, 1])
    np.testing.assert_allclose(apt.neighbour_distance(z, usable, 2), [5.0, 0.0, 3.5, 5.5])
    np.testing.assert_allclose(apt.neighbour_distance(z, usable, 3), [5.0, 0.0, 3.5, 5.5])  # two are all there are
    np.testing.assert_allclose(apt.neighbour_distance(z, jnp.zeros(4), 2), 0.0)


def test_apt_loss_and_reward():
    _, args = small("apt_sac_brax", neighbours=3)
    params = apt.init_state(args, apt.make_env(args.env)).encoder.params | {"log_tau": jnp.log(2.0)}
    rng, key = np.random.default_rng(0), jax.random.PRNGKey(4)
    batch = batch_of(apt, rng.normal(size=(6, 4)), terminated=[0, 0, 1, 0, 0, 0], obs=jnp.asarray(rng.normal(size=(6, 4)), jnp.float32))
    loss, (reward, _) = apt.apt_loss(params, args, batch, key)

    def encode(x):
        layers = [params["encoder"]["params"][f"Dense_{i}"] for i in range(3)]
        for i, layer in enumerate(layers):
            x = np.asarray(x) @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
            x = np.maximum(x, 0) if i < 2 else x
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    distance = lambda a, b: np.abs(a[:, None] - b[None]).sum(-1)
    noisy = np.asarray(batch.obs) + 0.5 * np.asarray(jax.random.normal(key, (6, 4)))
    logits = -distance(encode(batch.obs), encode(noisy)) / 2.0
    np.testing.assert_allclose(loss, np.mean(np.log(np.exp(logits).sum(1)) - np.diag(logits)), rtol=1e-5)
    others = np.array([0, 1, 3, 4, 5])
    between = np.sort(distance(encode(batch.next_obs), encode(batch.next_obs)[others]), axis=1)[:, 1:4]  # without itself
    np.testing.assert_allclose(np.asarray(reward)[others], between[others].mean(1), rtol=1e-4)
    assert reward[2] == 0.0
    # the reward's states do not train the encoder
    grad = lambda next_obs: jax.grad(lambda p: apt.apt_loss(p, args, batch.replace(next_obs=next_obs), key)[0])(params)
    assert norm(jax.tree.map(lambda a, b: a - b, grad(batch.next_obs), grad(batch.next_obs + 1.0))) == 0


# --------------------------------------------------------------------------------------------------------- MBRL
def test_mbrl_error_by_hand():
    _, args = small("mbrl_sac_brax")
    params = constant(mbrl.MLP(args.model_width, 4).init(jax.random.PRNGKey(0), jnp.zeros(6)), [1.0, 2.0, 3.0, 4.0])
    batch = batch_of(mbrl, [[1, 2, 3, 4], [0, 0, 0, 0], [9, 9, 9, 9], [9, 9, 9, 9]], terminated=[0, 0, 1, 0], truncated=[0, 0, 0, 1])
    loss, (reward, _) = mbrl.model_loss(params, args, batch)
    np.testing.assert_allclose(reward, [0.0, 7.5, 0.0, 0.0])  # (1 + 4 + 9 + 16) / 4
    np.testing.assert_allclose(loss, 3.75)


# ------------------------------------------------------------------------------------------------------ updates
def one_update(script, args):
    """A replay with ended episodes, the batch that an update draws from it, and the keys."""
    env = script.make_env(args.env)
    state, rng = script.init_state(args, env), np.random.default_rng(1)
    ended = rng.random(state.replay.terminated.shape)
    obs = jnp.asarray(rng.normal(size=state.replay.obs.shape), jnp.float32)
    flags = dict(terminated=jnp.asarray(ended < 0.2), truncated=jnp.asarray(ended > 0.9))
    replay, key = state.replay.replace(obs=obs, time=jnp.int32(60), **flags), jax.random.PRNGKey(7)
    keys = jax.random.split(key, 3 if script is apt else 2)
    return env, state, replay, script.sample_batch(keys[0], args, replay), keys, key


def assert_rewarded(script, args, state, batch, reward, key_sac, metrics):
    """SAC was given this reward: the critics' first target and loss are linear and quadratic in it."""
    expected = script.update_sac(args, state.agent, batch, reward, key_sac)[1]
    for name in ("reward_mean", "reward_std", "q_target", "critic_loss"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    alive = np.asarray(batch.has_next) > 0
    np.testing.assert_allclose([metrics["reward_mean"], metrics["reward_std"]], [np.mean(reward[alive]), np.std(reward[alive])], rtol=1e-4)


@pytest.mark.parametrize("name,loss,field", [("icm_sac_brax", "icm_loss", "icm"), ("apt_sac_brax", "apt_loss", "encoder"), ("mbrl_sac_brax", "model_loss", "model")])
def test_the_reward_is_that_of_the_model_before_its_step(name, loss, field):
    script, args = small(name)
    env, state, replay, batch, keys, key = one_update(script, args)
    (agent, after), metrics = script.update(args, replay, state.agent, getattr(state, field), key)
    reward_of = lambda model: getattr(script, loss)(model.params, args, batch, *keys[1:-1])[1][0]
    reward = reward_of(getattr(state, field))
    assert abs(float(jnp.sum(reward_of(after)) / jnp.sum(reward)) - 1) > 1e-4  # the step did change it
    assert_rewarded(script, args, state, batch, reward, keys[-1], metrics)


# --------------------------------------------------------------------------------------------------- whole runs
def rows(folder):
    with open(Path(folder) / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "steps_per_second")} for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", [*SIZES, "random_brax"])
def test_a_run_and_the_same_run_resumed(name, tmp_path):
    """What it leaves, every parameter has changed, and a run in two parts ends bit for bit as one that was not stopped."""
    script, args = small(name, run_dir=str(tmp_path / "whole"))
    whole = script.main(args)
    folder = Path(whole["folder"])
    assert {path.name for path in folder.iterdir()} == {"args.json", "metrics.csv", "checkpoint.msgpack", "coverage.png", "coverage.npz", "rollout.png"}
    assert folder.name.startswith(f"point_u_maze__{name}__1__") and json.loads((folder / "args.json").read_text())["num_envs"] == 8
    table = rows(folder)
    state = script.init_state(args, script.make_env(args.env))
    assert set(script.train_iteration(args, script.make_env(args.env), state)[1]) == set(script.METRICS[4:])  # every metric has its column
    assert len(table) == 8 and all(np.isfinite(float(value)) for value in table[-1].values())
    with np.load(folder / "coverage.npz") as coverage:
        assert coverage["visited"].sum() == whole["coverage"] > 0
    half = script.main(dataclasses.replace(args, run_dir=str(tmp_path / "parts"), total_timesteps=args.total_timesteps // 2))
    script.main(dataclasses.replace(args, resume=half["folder"]))
    assert rows(half["folder"]) == table
    assert (Path(half["folder"]) / "checkpoint.msgpack").read_bytes() == (folder / "checkpoint.msgpack").read_bytes()
    if name != "random_brax":
        start = script.init_state(args, script.make_env(args.env))
        end = script.load_checkpoint(folder / "checkpoint.msgpack", start)
        for part in (MODEL[name], "agent.actor", "agent.critic", "agent.log_alpha"):
            changed = jax.tree.map(lambda a, b: bool((a != b).any()), attrgetter(part)(start).params, attrgetter(part)(end).params)
            assert all(jax.tree.leaves(changed)), part
    if name == "rnd_sac_brax":  # the running statistics are in the checkpoint, the target is what it was
        assert float(end.rnd.errors.count) > 0 and float(end.rnd.errors.variance) > 0
        assert norm(jax.tree.map(lambda a, b: a - b, end.rnd.target, start.rnd.target)) == 0


@pytest.mark.parametrize("name,robot", [("rnd_sac_brax", "ant_u_maze"), ("icm_sac_brax", "humanoid_u_maze"), ("apt_sac_brax", "arm_binpick_hard")])
def test_a_robot_from_end_to_end(name, robot, tmp_path):
    changes = dict(env=robot, num_envs=4, unroll_length=4, total_timesteps=4 * 4 * 4, replay_size=20, learning_starts=8, episode_length=9, multiplier=2.0)
    script, args = small(name, run_dir=str(tmp_path), **changes)
    end = script.main(args)
    assert end["coverage"] > 0 and np.isfinite(end["critic_loss"])
    assert {"coverage.png", "rollout.html"} <= {path.name for path in Path(end["folder"]).iterdir()}


def test_the_race_is_fair():
    """The laptop presets differ in the sizes of the bonus's own model only."""
    import ctec_sac_brax as ctec

    parse = lambda script: dataclasses.asdict(script.parse_args(["--preset", "laptop"]))
    expected = parse(ctec)
    for script in (rnd, icm, apt, mbrl, random_brax):
        args = parse(script)
        own = {"rnd_width", "feature_dim", "encoder_width", "forward_weight", "representation_size", "noise", "neighbours", "model_width"}
        assert all(expected[name] == value for name, value in args.items() if name not in own)


def test_bonus_arguments_are_checked(capsys):
    for script, arguments in ((apt, ["--neighbours", "1024"]), (icm, ["--forward-weight", "1.5"]), (mbrl, ["--model-width", "0"]), (random_brax, ["--num-envs", "0"])):
        with pytest.raises(SystemExit) as stop:
            script.main(script.parse_args(arguments))
        message = capsys.readouterr().err
        assert stop.value.code == 2 and message.count("\n") == 1 and arguments[0] in message
