"""The baselines on Brax: each bonus against hand-computed numbers, and whole runs."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    SMALL_SAC,
    assert_all_changed,
    assert_none_changed,
    assert_one_line,
    checkpoint,
    constant,
    norm,
    refusal,
    rows,
)

import apt_sac_brax as apt
import ctec_ablations_sac_brax as ablations
import ctec_sac_brax as ctec
import icm_sac_brax as icm
import mbrl_sac_brax as mbrl
import random_brax
import rnd_sac_brax as rnd

SIZES = {  # of the intrinsic-reward model
    rnd: dict(rnd_width=16, feature_dim=8),
    icm: dict(encoder_width=16, feature_dim=8),
    apt: dict(encoder_width=16, representation_size=8),
    mbrl: dict(model_width=16),
    ablations: dict(encoder_width=8, representation_size=4),
}
BASELINES = [rnd, icm, apt, mbrl]
SMALL_RANDOM = {name: SMALL_SAC[name] for name in dataclasses.asdict(random_brax.Args()) if name in SMALL_SAC}
by_name = dict(ids=lambda x: getattr(x, "__name__", str(x)))


def small(script, **changes):
    config = SMALL_RANDOM if script is random_brax else SMALL_SAC | SIZES[script]
    return script.Args(**config | changes)


@functools.cache
def start(script):
    """The state that a small run starts from."""
    args = small(script)
    return script.init_state(args, script.make_env(args.env))


def batch_of(script, next_obs, **changes):
    """States and next states of 4 numbers, actions (0.5, -0.5), and nothing that ends."""
    rows = len(next_obs)
    batch = script.Batch(
        obs=jnp.ones((rows, 4)),
        action=jnp.tile(jnp.array([0.5, -0.5]), (rows, 1)),
        next_obs=jnp.asarray(next_obs, jnp.float32),
        terminated=jnp.zeros(rows),
        truncated=jnp.zeros(rows),
        time=jnp.zeros(rows, jnp.int32),
        env_index=jnp.zeros(rows, jnp.int32),
    )
    return batch.replace(**{name: jnp.asarray(x, jnp.float32) for name, x in changes.items()})


# ---------------------------------------------------------------------------------------------------------- RND
def test_rnd_error_by_hand():
    args = small(rnd, feature_dim=2)
    network = rnd.MLP(args.rnd_width, 2).init(jax.random.PRNGKey(0), jnp.zeros(4))
    params = {"predictor": constant(network, [1.0, 3.0]), "target": constant(network, [0.0, 1.0])}
    batch = batch_of(rnd, np.arange(16).reshape(4, 4), terminated=[0, 1, 0, 0], truncated=[0, 0, 1, 0])
    error = rnd.intrinsic_reward(params, args, batch)
    np.testing.assert_allclose(error, [2.5, 0, 0, 2.5])  # ((1 - 0)^2 + (3 - 1)^2) / 2, nothing where the episode ended
    loss, metrics = rnd.model_loss(params, args, batch)
    np.testing.assert_allclose(loss, 2.5)
    assert metrics == {"rnd_loss": loss}


def test_rnd_trains_the_predictor_on_next_states_only():
    args = small(rnd)
    network = rnd.MLP(args.rnd_width, args.feature_dim)
    key_predictor, key_target = jax.random.split(jax.random.PRNGKey(0))
    params = {"predictor": network.init(key_predictor, jnp.zeros(4)), "target": network.init(key_target, jnp.zeros(4))}
    next_obs = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    batch = batch_of(rnd, next_obs, terminated=[0, 1, 0, 0], truncated=[0, 0, 1, 0])
    grad = jax.jit(jax.grad(lambda params, batch: rnd.model_loss(params, args, batch)[0]))
    assert norm(grad(params, batch)["predictor"]) > 0
    assert norm(grad(params, batch)["target"]) == 0
    # the next states of ended episodes belong to others: they have no say in the gradient; nor has the state itself
    other = batch.replace(next_obs=batch.next_obs.at[1:3].set(77.0), obs=batch.obs + 1.0)
    assert_none_changed(grad(params, batch), grad(params, other))


def test_rnd_running_moments():
    rng = np.random.default_rng(0)
    moments = rnd.Moments(*jnp.zeros(3))
    seen = []
    for size in (5, 1, 40, 200):
        x = rng.gamma(2.0, 3.0, size)
        mask = (rng.random(size) < 0.7).astype(float)
        seen += list(x[mask > 0])
        moments = rnd.update_moments(moments, jnp.asarray(x), jnp.asarray(mask))
        expected = [len(seen), np.mean(seen), np.var(seen)]
        np.testing.assert_allclose([moments.count, moments.mean, moments.variance], expected, rtol=1e-4)
    same = rnd.update_moments(moments, jnp.ones(3), jnp.zeros(3))  # nothing is added
    np.testing.assert_allclose(jax.tree.leaves(same), jax.tree.leaves(moments), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------- ICM
def icm_params(**constants):
    """Fresh networks; those that are named say a constant."""
    params = start(icm).model.params
    return params | {name: constant(params[name], value) for name, value in constants.items()}


def test_icm_losses_and_reward_by_hand():
    args = small(icm)  # 8 features, half of them wrong by 1 and half by 2
    params = icm_params(encoder=[1.0, -1.0] * 4, forward=[2.0, 1.0] * 4, inverse=[0.0, np.arctanh(0.5)])
    batch = batch_of(icm, np.zeros((3, 4)), terminated=[0, 0, 1], truncated=[0, 1, 0])
    np.testing.assert_allclose(icm.intrinsic_reward(params, args, batch), [2.5, 0, 0], rtol=1e-6)  # (1^2 + 2^2) / 2
    loss, metrics = icm.model_loss(params, args, batch)
    np.testing.assert_allclose(metrics["forward_loss"], 2.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["inverse_loss"], 0.625, rtol=1e-6)  # (0, 0.5) for (0.5, -0.5)
    np.testing.assert_allclose(loss, 0.2 * 2.5 + 0.8 * 0.625, rtol=1e-6)
    assert metrics["feature_variance"] == 0


def test_icm_forward_target_sends_no_gradient():
    batch = batch_of(icm, np.random.default_rng(0).normal(size=(5, 4)))
    forward_only = small(icm, forward_weight=1.0)
    inverse_only = small(icm, forward_weight=0.0)
    grad = lambda params, args: jax.jit(jax.grad(lambda p: icm.model_loss(p, args, batch)[0]))(params)
    params = icm_params()
    # a forward model that does not look at its input leaves the target as the encoder's only way into the forward loss
    blind = grad(params | {"forward": constant(params["forward"], [0.3] * 8)}, forward_only)
    assert norm(blind["forward"]) > 0
    assert norm(blind["encoder"]) == norm(blind["inverse"]) == 0
    assert norm(grad(params, forward_only)["encoder"]) > 0  # through the state's own feature
    inverse = grad(params, inverse_only)
    assert norm(inverse["encoder"]) > 0 and norm(inverse["inverse"]) > 0
    assert norm(inverse["forward"]) == 0


# ---------------------------------------------------------------------------------------------------------- APT
def test_apt_distances_by_hand():
    z = jnp.array([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0], [1.0, 6.0]])  # on a path: 0, 1, 3, 7
    usable = jnp.array([1.0, 0, 1, 1])
    distance = apt.neighbour_distance
    np.testing.assert_allclose(distance(z, jnp.ones(4), 2), [2.0, 1.5, 2.5, 5.0])  # never 0 from itself
    np.testing.assert_allclose(distance(z, usable, 2), [5.0, 0.0, 3.5, 5.5])
    np.testing.assert_allclose(distance(z, usable, 3), [5.0, 0.0, 3.5, 5.5])  # two are all there are
    np.testing.assert_allclose(distance(z, jnp.zeros(4), 2), 0.0)


def test_apt_loss_and_reward_against_numpy():
    args = small(apt, neighbours=3)
    params = start(apt).model.params | {"log_tau": jnp.log(2.0)}
    rng = np.random.default_rng(0)
    key = jax.random.PRNGKey(4)
    batch = batch_of(apt, rng.normal(size=(6, 4)), obs=rng.normal(size=(6, 4)), terminated=[0, 0, 1, 0, 0, 0])

    def encode(x):
        x = np.asarray(x)
        for i in range(3):
            layer = params["encoder"]["params"][f"Dense_{i}"]
            x = x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
            x = np.maximum(x, 0) if i < 2 else x
        return x

    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)

    distance = lambda a, b: np.abs(a[:, None] - b[None]).sum(axis=-1)
    pairs = apt.add_noise(key, args, batch)
    noisy = np.asarray(batch.obs) + 0.5 * np.asarray(jax.random.normal(key, (6, 4)))
    np.testing.assert_array_equal(pairs.anchor, batch.obs)
    np.testing.assert_allclose(pairs.positive, noisy, rtol=1e-6)
    np.testing.assert_array_equal(pairs.mask, np.ones(6))  # an ended episode's last state has a noisy copy too

    in_logits = apt.contrastive_loss(params, dataclasses.replace(args, temperature="logits"), pairs)[0]
    logits = -distance(unit(encode(batch.obs)), unit(encode(noisy))) / 2.0
    np.testing.assert_allclose(in_logits, np.mean(np.log(np.exp(logits).sum(axis=1)) - np.diag(logits)), rtol=1e-5)
    logits = -distance(unit(encode(batch.obs)) / 2.0, unit(encode(noisy)))
    loss, metrics = apt.contrastive_loss(params, args, pairs)
    np.testing.assert_allclose(loss, np.mean(np.log(np.exp(logits).sum(axis=1)) - np.diag(logits)), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(logits.argmax(axis=1) == np.arange(6)), rtol=1e-6)
    np.testing.assert_allclose(metrics["tau"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(metrics["feature_variance"], unit(encode(batch.obs)).var(axis=0).mean(), rtol=1e-4)

    others = np.array([0, 1, 3, 4, 5])
    z = encode(batch.next_obs)[others]
    for mode, features in {"batch": z / np.linalg.norm(z, axis=0), "unit": unit(z)}.items():
        reward = apt.intrinsic_reward(params, dataclasses.replace(args, reward_features=mode), batch)
        nearest = np.sort(distance(features, features), axis=1)[:, 1:4]  # without itself
        np.testing.assert_allclose(np.asarray(reward)[others], nearest.mean(axis=1), rtol=1e-4)
        assert reward[2] == 0.0


# --------------------------------------------------------------------------------------------------------- MBRL
def test_mbrl_error_by_hand():
    args = small(mbrl)
    network = mbrl.MLP(args.model_width, 4).init(jax.random.PRNGKey(0), jnp.zeros(6))
    params = constant(network, [1.0, 2.0, 3.0, 4.0])
    next_obs = [[1, 2, 3, 4], [0, 0, 0, 0], [9, 9, 9, 9], [9, 9, 9, 9]]
    batch = batch_of(mbrl, next_obs, terminated=[0, 0, 1, 0], truncated=[0, 0, 0, 1])
    np.testing.assert_allclose(mbrl.intrinsic_reward(params, args, batch), [0.0, 7.5, 0, 0])  # (1 + 4 + 9 + 16) / 4
    loss, metrics = mbrl.model_loss(params, args, batch)
    np.testing.assert_allclose(loss, 3.75)
    assert metrics == {"model_loss": loss}


# ------------------------------------------------------------------------------------------------------- random
class Dial:
    """Its place is the latest action."""

    action_size = 2
    position_size = 2
    free_cells = []

    def reset(self, key):
        return random_brax.EnvState(jnp.zeros(2), jnp.zeros(2), jnp.zeros((), bool))

    def step(self, state, action):
        return random_brax.EnvState(action, action, jnp.zeros((), bool))


def test_random_actions_fill_the_square_and_add_to_the_coverage():
    """One step an iteration, so that the state shows every action."""
    env = Dial()
    args = small(random_brax, unroll_length=1, episode_length=1000)
    state = random_brax.init_state(args, env)
    known = []
    for i in range(1, 101):
        state, metrics = random_brax.collect(args, env, state)
        known += list(np.floor((np.asarray(state.env.obs) + 1) / 0.5).astype(int) @ (4, 1))
        x, y = np.unravel_index(np.flatnonzero(state.coverage < random_brax.NEVER), (256, 256))
        assert set((x + 2) % 256 * 4 + (y + 2) % 256) == set(known)
        assert metrics["coverage"] == len(set(known)) and state.iteration == i
    frequency = np.bincount(known, minlength=16) / len(known)
    assert 0.03 < frequency.min() and frequency.max() < 0.1  # 1 / 16, uniform in the square


# ------------------------------------------------------------------------------------------------------ updates
def random_replay(script):
    """Random states, a third of them at the goal, and ends of episodes."""
    replay = start(script).replay
    env = script.make_env("point_u_maze")
    rng = np.random.default_rng(1)
    ended = rng.random(replay.terminated.shape)
    obs = rng.normal(size=replay.obs.shape)
    obs[::3, :, :2] = np.array(env.far_cell) * env.cell
    return replay.replace(
        obs=jnp.asarray(obs, jnp.float32),
        terminated=jnp.asarray(ended < 0.2),
        truncated=jnp.asarray(ended > 0.9),
        time=jnp.int32(60),
    )


def one_update(script, args, model=None):
    """A gradient step from the random replay: the model after it, the metrics, the batch, and the key of SAC."""
    env = script.make_env(args.env)
    replay = random_replay(script)
    key = jax.random.PRNGKey(7)
    update = jax.jit(script.update, static_argnums=(0, 1))
    (_, model), metrics = update(args, env, replay, start(script).agent, model or start(script).model, key)
    key_batch, *_, key_sac = jax.random.split(key, 3 if script is apt else 2)
    return model, metrics, script.sample_batch(key_batch, args, replay), key_sac


def params_of(script, model):
    return model.networks.params if script is rnd else model.params


@pytest.mark.parametrize("script", BASELINES, **by_name)
def test_sac_gets_the_reward_of_the_model_before_its_step(script):
    """From a replay with ended episodes: the critics' first target and loss are linear and quadratic in the reward."""
    args = small(script, intrinsic_coef=3.0, task_reward_coef=0.5)
    env = script.make_env(args.env)
    before = start(script)
    model, metrics, batch, key_sac = one_update(script, args)
    alive = np.asarray(batch.has_next) > 0
    assert 0 < alive.sum() < len(alive)
    old = params_of(script, before.model)
    new = params_of(script, model)
    bonus = script.intrinsic_reward(old, args, batch)
    later = script.intrinsic_reward(new, args, batch)
    assert abs(float(later.sum() / bonus.sum()) - 1) > 1e-4  # the step did change it
    if script is rnd:
        deviation = np.std(np.asarray(bonus)[alive])
        np.testing.assert_allclose(metrics["error_std"], deviation, rtol=1e-4)
        np.testing.assert_allclose(model.errors.count, alive.sum())
        bonus = bonus / deviation
        assert_none_changed(old["target"], new["target"])
        assert_all_changed(old["predictor"], new["predictor"])
    else:
        assert_all_changed(old, new)

    goal = np.array(env.far_cell) * env.cell
    at_goal = np.linalg.norm(np.asarray(batch.obs)[:, :2] - goal, axis=1) < 0.5
    assert 0 < at_goal.sum() < len(at_goal)
    reward = 3.0 * bonus + 0.5 * at_goal
    update_sac = jax.jit(script.update_sac, static_argnums=(0, 1))
    expected = update_sac(args, env, before.agent, batch, reward, key_sac)[1]
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(metrics["reward_mean"], np.mean(reward[alive]), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward_std"], np.std(reward[alive]), rtol=1e-4)


@pytest.mark.parametrize("script", BASELINES, **by_name)
def test_without_the_intrinsic_reward_its_model_is_neither_trained_nor_evaluated(script, monkeypatch):
    """Plain SAC, with the task reward alone."""
    for name in {"encode", "intrinsic_reward", "model_loss", "contrastive_loss"} & vars(script).keys():
        monkeypatch.delattr(script, name)
    args = small(script, intrinsic_coef=0.0, task_reward_coef=0.5)
    env = script.make_env(args.env)
    before = start(script)
    shape = lambda key: script.update(args, env, script.init_replay(args, env), before.agent, before.model, key)
    metrics = jax.eval_shape(shape, jax.random.PRNGKey(0))[1]
    assert "reward_mean" in metrics and not {"rnd_loss", "icm_loss", "model_loss", "contrastive_loss"} & metrics.keys()
    if script is mbrl:  # one of them with numbers
        model, metrics, batch, _ = one_update(script, args)
        assert_none_changed(before.model, model)
        alive = np.asarray(batch.has_next) > 0
        at_goal = np.abs(np.asarray(batch.obs)[:, 0] - 12.0) < 1e-3
        np.testing.assert_allclose(metrics["reward_mean"], 0.5 * at_goal[alive].mean(), rtol=1e-5)


@pytest.mark.parametrize("script", [rnd, icm, mbrl], **by_name)
def test_a_scaled_reward_has_deviation_one_in_the_batch(script):
    """Of the rows that have a reward; RND's running deviation, here of earlier and larger errors, takes no part."""
    args = small(script, scale_reward=True)
    model = start(script).model
    if script is rnd:
        model = model.replace(errors=rnd.Moments(jnp.float32(5000.0), jnp.float32(9.0), jnp.float32(400.0)))
    _, metrics, batch, _ = one_update(script, args, model)
    reward = script.intrinsic_reward(params_of(script, model), args, batch)[np.asarray(batch.has_next) > 0]
    np.testing.assert_allclose(metrics["reward_std"], 1.0, rtol=1e-4)
    np.testing.assert_allclose(metrics["reward_mean"], reward.mean() / reward.std(), rtol=1e-4)


# --------------------------------------------------------------------------------------------------- whole runs
@pytest.mark.parametrize("script", [*BASELINES, random_brax], **by_name)
def test_a_run_and_the_same_run_resumed(script, tmp_path):
    """What it leaves, every parameter has changed, and a run in two parts ends bit for bit as one that was not
    stopped."""
    args = small(script, run_dir=str(tmp_path / "whole"))
    whole = script.main(args)
    folder = Path(whole["folder"])
    files = {"args.json", "metrics.csv", "checkpoint.npz", "coverage.png", "coverage.npz"}
    assert {path.name for path in folder.iterdir()} == files
    assert folder.name.startswith(f"point_u_maze__{script.__name__}__1__")
    assert json.loads((folder / "args.json").read_text())["num_envs"] == 8
    table = rows(folder)
    assert len(table) == 8
    for i, row in enumerate(table, 1):  # every metric has its column, and its value from the first update on
        empty = {name for name, value in row.items() if value == ""} - {"episode_length"}  # no episode may have ended
        assert bool(empty) == (i < getattr(args, "first_update", 1)), (i, empty)
    counts = [float(row["coverage"]) for row in table]
    assert counts == sorted(counts) and counts[0] < counts[-1]  # a place that was visited stays visited
    with np.load(folder / "coverage.npz") as coverage:
        assert len(coverage["first_visit"]) == len(coverage["place"]) == whole["coverage"] > 0

    half = dataclasses.replace(args, run_dir=str(tmp_path / "parts"), total_timesteps=args.total_timesteps // 2)
    parts = script.main(half)["folder"]
    assert len(rows(parts)) == 4
    script.main(dataclasses.replace(args, resume=parts))
    assert rows(parts) == table
    assert checkpoint(parts) == checkpoint(folder)

    start = script.init_state(args, script.make_env(args.env))
    end = script.load_checkpoint(folder / "checkpoint.npz", start)
    assert end.iteration == 8 and np.any(end.key != start.key)
    if script is random_brax:
        return
    for name in ("actor", "critic", "log_alpha"):
        assert_all_changed(getattr(start.agent, name).params, getattr(end.agent, name).params)
    assert_all_changed(start.agent.target_critic, end.agent.target_critic)
    if script is rnd:  # the running statistics are in the checkpoint
        assert end.model.errors.count > 0 and end.model.errors.variance > 0
    else:
        assert_all_changed(start.model.params, end.model.params)


@pytest.mark.parametrize("script,robot", [(rnd, "ant_u_maze"), (icm, "humanoid_u_maze")], **by_name)
def test_a_robot_from_end_to_end(script, robot, tmp_path):
    sizes = dict(num_envs=4, unroll_length=4, total_timesteps=4 * 4 * 4, replay_size=20, learning_starts=8)
    end = script.main(small(script, env=robot, run_dir=str(tmp_path), episode_length=9, multiplier=2.0, **sizes))
    assert end["coverage"] > 0 and np.isfinite(end["critic_loss"])
    assert (Path(end["folder"]) / "coverage.png").exists()


@pytest.mark.parametrize("script", [*BASELINES, random_brax], **by_name)
def test_the_race_is_fair(script):
    """The laptop presets differ in what is the bonus's own only."""
    laptop = lambda script, env: vars(script.parse_args(["--preset", "laptop", "--env", env]))
    own = {"rnd_width", "feature_dim", "encoder_width", "forward_weight", "representation_size", "noise", "neighbours",
           "model_width", "scale_reward"}  # fmt: skip
    for env in ("point_hardest_maze", "humanoid_u_maze"):
        expected = laptop(ctec, env)
        for name, value in laptop(script, env).items():
            assert name in own or value == expected[name], name


@pytest.mark.parametrize(
    "script,arguments",
    [
        (apt, ["--neighbours", "1024"]),
        (apt, ["--noise", "-1"]),
        (icm, ["--forward-weight", "1.5"]),
        (mbrl, ["--model-width", "0"]),
        (rnd, ["--batch-size", "0"]),
        (random_brax, ["--num-envs", "0"]),
        (random_brax, ["--goal-cell", "0", "0"]),
    ],
    **by_name,
)
def test_bonus_arguments_are_checked(script, arguments, capsys):
    code, message = refusal(capsys, script, ["--env=point_u_maze", "--preset=laptop", *arguments])
    assert code == 2
    assert_one_line(message, arguments[0])


def test_extreme_arguments_are_taken():
    env = apt.make_env("point_u_maze")
    apt.check_args(small(apt, noise=0.0, neighbours=31, goal_cell=(1, 1), gamma=1.0), env)
    icm.check_args(small(icm, forward_weight=0.0), env)
    icm.check_args(small(icm, forward_weight=1.0), env)
    random_brax.check_args(small(random_brax, goal_cell=(3, 1)), env)
