"""The mathematics of ctec_sac_brax.py against brute force and hand-computed numbers."""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ctec_sac_brax as ctec
from ctec_sac_brax import Args, Batch, Replay

ARGS = Args(env="point_u_maze", num_envs=3, batch_size=512, replay_size=40, agent_width=8, encoder_width=8, representation_size=4)


def filled_replay(steps, capacity=40, envs=3, unroll=7, seed=0):
    """A ring after `steps` steps: obs is (time, env, trajectory), so that every gathered row says where it comes from."""
    rng = np.random.default_rng(seed)
    done = rng.random((steps, envs)) < 0.15
    terminated = done & (rng.random((steps, envs)) < 0.5)
    trajectory = np.cumsum(np.vstack([np.zeros((1, envs)), done[:-1]]), axis=0)
    time = np.broadcast_to(np.arange(steps)[:, None], (steps, envs))
    obs = np.stack([time, np.broadcast_to(np.arange(envs), (steps, envs)), trajectory], -1).astype(np.float32)
    zeros = lambda *shape, dtype=np.float32: jnp.zeros((capacity, envs, *shape), dtype)
    replay = Replay(zeros(3), zeros(1), zeros(dtype=bool), zeros(dtype=bool), jnp.int32(0))
    for i in range(0, steps, unroll):
        rows = obs[i : i + unroll], obs[i : i + unroll, :, :1], terminated[i : i + unroll], (done & ~terminated)[i : i + unroll]
        replay = ctec.replay_insert(replay, *map(jnp.asarray, rows))
    return replay, obs, terminated, done & ~terminated


@pytest.mark.parametrize("steps", [21, 40, 42, 98, 126])  # not full, just full, and wrapped at several places
def test_batches_agree_with_a_search_through_the_whole_history(steps):
    replay, obs, terminated, truncated = filled_replay(steps)
    ends = ctec.trajectory_ends(replay)
    batch = ctec.sample_batch(jax.random.PRNGKey(1), ARGS, replay)
    future, has_future = ctec.replay_futures(jax.random.PRNGKey(2), ARGS, replay, ends, batch), np.asarray(batch.has_next)
    batch, ends = jax.tree.map(np.asarray, batch), np.asarray(ends)
    t, n, trajectory = np.asarray(batch.obs, int).T
    oldest = max(0, steps - 40)
    assert t.min() >= oldest and t.max() == steps - 2  # all that is stored but the newest, nothing that was overwritten
    assert set(range(oldest, steps - 1)) == set(t) and set(n) == {0, 1, 2}
    assert (batch.time == t).all() and (batch.env == n).all()
    future_t, future_n, future_trajectory = np.asarray(future, int).T
    for i in range(len(t)):
        done = terminated[t[i], n[i]] or truncated[t[i], n[i]]
        last = t[i]
        while last < steps - 1 and not (terminated[last, n[i]] or truncated[last, n[i]]):
            last += 1
        assert ends[t[i] - (steps - 40), n[i]] == last
        assert has_future[i] == (last > t[i]) == (not done)
        assert future_n[i] == n[i] and future_trajectory[i] == trajectory[i]
        assert t[i] < future_t[i] <= last if not done else future_t[i] == t[i]
        assert batch.terminated[i] == terminated[t[i], n[i]] and batch.truncated[i] == truncated[t[i], n[i]]
        assert batch.action[i, 0] == t[i]
        if not done:
            assert tuple(np.asarray(batch.next_obs[i], int)) == (t[i] + 1, n[i], trajectory[i])


@pytest.mark.parametrize("gamma,left", [(0.99, 1), (0.99, 500), (0.9, 7), (0.3, 20), (0.1, 3)])
def test_offsets_are_truncated_geometric(gamma, left):
    draws = np.asarray(ctec.truncated_geometric(jax.random.PRNGKey(0), jnp.full(200_000, left), gamma))
    assert draws.min() >= 1 and draws.max() <= left
    expected = gamma ** np.arange(left) * (1 - gamma) / (1 - gamma**left)
    assert np.abs(np.bincount(draws, minlength=left + 1)[1:] / len(draws) - expected).max() < 0.004
    assert np.abs(np.cumsum(np.bincount(draws, minlength=left + 1)[1:]) / len(draws) - np.cumsum(expected)).max() < 0.005


def test_nothing_left_gives_offset_zero_and_gamma_may_be_traced():
    draw = jax.jit(lambda gamma: ctec.truncated_geometric(jax.random.PRNGKey(0), jnp.array([0, 0, 5]), gamma))
    assert list(draw(0.9)[:2]) == [0, 0] and 1 <= draw(0.9)[2] <= 5
    assert float(jnp.mean(jax.vmap(draw)(jnp.full(1, 0.01))[:, 2])) == 1.0


def test_l1_similarity_and_its_gradient():
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    phi, psi, weight = jax.random.normal(keys[0], (5, 4)), jax.random.normal(keys[1], (7, 4)), jax.random.normal(keys[2], (5, 7))
    plain = lambda phi, psi: -jnp.sum(jnp.abs(phi[:, None] - psi[None]), axis=-1)
    np.testing.assert_allclose(ctec.l1_similarity(phi, psi), plain(phi, psi), atol=1e-6)
    ours = jax.grad(lambda *x: jnp.sum(weight * ctec.l1_similarity(*x)), (0, 1))(phi, psi)
    theirs = jax.grad(lambda *x: jnp.sum(weight * plain(*x)), (0, 1))(phi, psi)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_l1_similarity_never_holds_all_differences():
    shape = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    grad = jax.jit(jax.grad(lambda phi, psi: jnp.sum(ctec.l1_similarity(phi, psi) ** 2), (0, 1)))
    assert grad.lower(shape, shape).compile().memory_analysis().temp_size_in_bytes < 4 * 512 * 512 * 64 / 8


def test_infonce_by_hand():
    logits = jnp.log(jnp.array([[1.0, 3.0], [2.0, 6.0]]))
    lse = np.log([4.0, 8.0])  # rows: -log(1/4), -log(6/8)
    losses = np.array([np.log(4.0), np.log(8.0 / 6.0)]) + 0.1 * lse**2
    assert math.isclose(ctec.infonce(logits, jnp.ones(2), 0.1), losses.mean(), rel_tol=1e-5)
    assert math.isclose(ctec.infonce(logits, jnp.array([0.0, 1.0]), 0.1), losses[1], rel_tol=1e-5)
    assert ctec.infonce(logits, jnp.zeros(2), 0.1) == 0.0


def random_batch(rows=6):
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    obs, action, next_obs = (jax.random.normal(key, (rows, size)) for key, size in zip(keys, (4, 2, 4)))
    return Batch(obs, action, next_obs, jnp.zeros(rows), jnp.zeros(rows), jnp.zeros(rows, int), jnp.zeros(rows, int))


FUTURE = jax.random.normal(jax.random.PRNGKey(9), (6, 4))


def test_reward_is_the_distance_to_the_own_future_and_zero_without_one():
    state = ctec.init_state(ARGS, ctec.make_env("point_u_maze"))
    params = state.encoders.params | {"log_tau": jnp.log(2.0)}
    batch = random_batch().replace(truncated=jnp.array([0.0, 0, 0, 0, 0, 1]))
    phi, psi = ctec.encode(params, ARGS, 2, batch.obs, batch.action, FUTURE)
    np.testing.assert_allclose(jnp.linalg.norm(phi, axis=-1), 1.0, atol=1e-5)  # unit length along the features
    np.testing.assert_allclose(jnp.linalg.norm(psi, axis=-1), 1.0, atol=1e-5)
    loss, (reward, metrics) = ctec.contrastive_loss(params, ARGS, 2, batch, FUTURE)
    distance = np.abs(np.asarray(phi)[:, None] - np.asarray(psi)[None]).sum(-1)
    np.testing.assert_allclose(reward[:5], np.diag(distance)[:5], rtol=1e-5)  # no temperature in the reward
    assert reward[5] == 0.0
    logits = -distance / 2.0
    lse = np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(loss, (lse - np.diag(logits) + 0.1 * lse**2)[:5].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["tau"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], (logits.argmax(1) == np.arange(6))[:5].mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["logits_negative"], logits[~np.eye(6, dtype=bool)].mean(), rtol=1e-5)


def test_the_row_without_a_future_is_still_a_negative():
    state = ctec.init_state(ARGS, ctec.make_env("point_u_maze"))
    batch = random_batch().replace(terminated=jnp.array([0.0, 0, 0, 0, 0, 1]))
    loss = lambda batch, future: ctec.contrastive_loss(state.encoders.params, ARGS, 2, batch, future)[0]
    grad = jax.grad(lambda future: loss(batch, future))(FUTURE)
    assert np.abs(grad[5]).max() > 0
    grad = jax.grad(lambda obs: loss(batch.replace(obs=obs), FUTURE))(batch.obs)
    assert np.abs(grad[5]).max() == 0 and np.abs(grad[4]).max() > 0


def test_goal_futures_show_psi_the_position_only():
    args = dataclasses.replace(ARGS, future_state="goal")
    params = ctec.init_state(args, ctec.make_env("point_u_maze")).encoders.params
    batch = random_batch()
    psi = ctec.encode(params, args, 2, batch.obs, batch.action, FUTURE)[1]
    moved = ctec.encode(params, args, 2, batch.obs, batch.action, FUTURE.at[:, 2:].add(5.0))[1]
    np.testing.assert_array_equal(psi, moved)


def test_tanh_gaussian_log_probability():
    state = ctec.init_state(ARGS, ctec.make_env("point_u_maze"))
    obs = jnp.full((1, 4), 0.3)
    draws = 50_000
    action, log_prob = jax.vmap(lambda key: ctec.sample_action(state.agent.actor.params, ARGS, key, obs, 2))(jax.random.split(jax.random.PRNGKey(0), draws))
    assert np.abs(action).max() <= 1.0
    # the mean of 1 / density over the draws is the volume of the action square, here by a histogram-free identity
    assert abs(float(jnp.mean(jnp.exp(-log_prob))) - 4.0) < 0.15


def test_critic_target_by_hand():
    state = ctec.init_state(ARGS, ctec.make_env("point_u_maze"))
    batch = random_batch(3).replace(terminated=jnp.array([0.0, 1, 0]), truncated=jnp.array([0.0, 0, 1]))
    reward, next_value = jnp.array([1.0, 2, 3]), jnp.array([10.0, 20, 30])
    loss, metrics = ctec.critic_loss(state.agent.critic.params, ARGS, batch, reward, next_value)
    q = np.asarray(ctec.q_values(state.agent.critic.params, ARGS, batch.obs, batch.action))
    assert q.shape == (2, 3) and not np.allclose(q[0], q[1])  # two critics, with different weights
    target = np.array([1 + 0.99 * 10, 2.0, 0.0])
    expected = ((q - target)[:, :2] ** 2).mean()  # the terminal step does not bootstrap, the truncated one is masked
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_actor_and_alpha_losses_by_hand():
    state = ctec.init_state(ARGS, ctec.make_env("point_u_maze"))
    batch, key = random_batch(4), jax.random.PRNGKey(3)
    loss, (log_prob, _) = ctec.actor_loss(state.agent.actor.params, ARGS, batch, state.agent.critic.params, 0.5, key)
    action, expected_log_prob = ctec.sample_action(state.agent.actor.params, ARGS, key, batch.obs, 2)
    q = np.asarray(ctec.q_values(state.agent.critic.params, ARGS, batch.obs, action)).min(0)
    np.testing.assert_allclose(loss, np.mean(0.5 * np.asarray(expected_log_prob) - q), rtol=1e-5)
    alpha = lambda log_alpha: ctec.alpha_loss(log_alpha, ARGS, jnp.array([1.0, 3.0]), -1.0)[0]
    np.testing.assert_allclose(alpha(jnp.log(2.0)), 2 * (-2 + 1), rtol=1e-6)
    assert jax.grad(alpha)(0.0) < 0  # less entropy than the target: alpha must grow


def test_update_uses_the_reward_from_before_the_encoders_step():
    env = ctec.make_env("point_u_maze")
    args = dataclasses.replace(ARGS, batch_size=16)
    state = ctec.init_state(args, env)
    agent, encoders = state.agent, state.encoders
    replay = state.replay.replace(obs=jax.random.normal(jax.random.PRNGKey(5), state.replay.obs.shape), time=jnp.int32(30))
    ends, key = ctec.trajectory_ends(replay), jax.random.PRNGKey(7)
    (agent_after, encoders_after), metrics = ctec.update(args, env, replay, ends, agent, encoders, key)
    key_batch, key_future, key_sac = jax.random.split(key, 3)
    batch = ctec.sample_batch(key_batch, args, replay)
    future = ctec.replay_futures(key_future, args, replay, ends, batch)
    reward = ctec.contrastive_loss(encoders.params, args, 2, batch, future)[1][0]
    later = ctec.contrastive_loss(encoders_after.params, args, 2, batch, future)[1][0]
    assert abs(later.mean() / reward.mean() - 1) > 1e-4  # the step did change it
    expected = ctec.update_sac(args, agent, batch, reward, key_sac)[1]
    for name in ("reward_mean", "reward_std", "q_target", "critic_loss"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    np.testing.assert_allclose([metrics["reward_mean"], metrics["reward_std"]], [reward.mean(), reward.std()], rtol=1e-4)
    pairs = {name: (getattr(agent, name), getattr(agent_after, name)) for name in ("actor", "critic", "log_alpha")}
    for name, (before, after) in (pairs | {"encoders": (encoders, encoders_after)}).items():
        changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before.params, after.params)
        assert all(jax.tree.leaves(changed)), name
    followed = jax.tree.map(lambda old, new, target: np.allclose(target, 0.995 * old + 0.005 * new, atol=1e-6),
                            agent.target_critic, agent_after.critic.params, agent_after.target_critic)  # fmt: skip
    assert all(jax.tree.leaves(followed))


def test_coverage_bins():
    env = ctec.make_env("point_hardest_maze")
    assert env.grid == (72, 96) and env.bins == 2944 and (ctec.make_env("point_u_maze").bins, ctec.make_env("point_large_maze").bins) == (448, 1664)
    places = jnp.array([[-2.0, -2.0], [-1.51, -2.0], [-1.5, -2.0], [-2.0, -1.5], [33.99, 45.99], [34.0, 0.0], [-2.01, 0.0], [jnp.nan, 0.0]])
    assert list(ctec.bin_index(env, places)) == [0, 0, 96, 1, 72 * 96 - 1, 72 * 96, 72 * 96, 72 * 96]


def test_collect_counts_every_step_before_the_reset_and_resets_nothing_else():
    """Short episodes: what is stored must be a path of the true dynamics, and coverage must have each place on it."""
    env, args = ctec.make_env("point_u_maze"), dataclasses.replace(ARGS, num_envs=4, unroll_length=30, episode_length=12)
    before = ctec.init_state(args, env)
    state, frames = jax.jit(ctec.collect, static_argnums=(0, 1))(args, env, before, jax.random.PRNGKey(0))
    obs, action = np.asarray(state.replay.obs[:30]), np.asarray(state.replay.action[:30])
    truncated = np.asarray(state.replay.truncated[:30])
    assert truncated.sum() == 8 and truncated[11].all() and truncated[23].all() and not state.replay.terminated.any()
    step = jax.jit(jax.vmap(jax.vmap(lambda obs, action: env.step(ctec.EnvState(obs, obs, False), action).obs)))
    after = np.asarray(step(obs, action))
    np.testing.assert_allclose(obs[1:][~truncated[:-1]], after[:-1][~truncated[:-1]], atol=1e-6)
    assert np.abs(obs[12, :, :2] - env.start).max() <= 0.1 and np.abs(obs[12] - obs[0]).max(axis=-1).min() > 1e-4  # new starts
    bins = np.floor((after[..., :2] - env.low) / 0.5).astype(int)
    expected = np.zeros(env.grid, bool)
    expected[bins[..., 0], bins[..., 1]] = True
    np.testing.assert_array_equal(np.asarray(state.visited).reshape(env.grid), expected)
    assert state.outside == 0 and frames.shape == (30, 4, 2)
    counts = np.unique(np.floor((obs[..., :2].reshape(-1, 2) - env.low) / 0.5), axis=0, return_counts=True)[1]
    p = counts / counts.sum()
    np.testing.assert_allclose(ctec.replay_entropy(env, state.replay), -(p * np.log(p)).sum(), rtol=1e-4)


def test_point_maze_physics():
    env = ctec.make_env("point_u_maze")
    at = lambda *x: ctec.EnvState(jnp.array(x, jnp.float32), jnp.array(x, jnp.float32), False)
    free = env.step(at(4.0, 4.0, 0.1, -0.2), jnp.array([1.0, 0.5])).physics
    np.testing.assert_allclose(free, [4.14, 3.845, 0.14, -0.155], atol=1e-6)
    wall = env.step(at(4.0, 2.5, 0.1, -0.3), jnp.zeros(2)).physics  # the wall's face is at y = 2, the disc has 0.4
    np.testing.assert_allclose(wall, [4.09, 2.5, 0.09, 0.0], atol=1e-6)
    corner = env.step(at(5.58, 4.5, 0.0, 0.0), jnp.ones(2)).physics  # the wall to the right starts at x = 6
    np.testing.assert_allclose(corner, [5.58, 4.55, 0.0, 0.05], atol=1e-6)
    np.testing.assert_allclose(env.step(at(4, 4, 0, 0), jnp.array([9.0, 0])).physics[2], 0.05, atol=1e-7)  # actions are clipped
    walk = jax.jit(jax.vmap(lambda key: jax.lax.scan(lambda s, a: (env.step(s, a),) * 2, env.reset(key), jax.random.uniform(key, (2000, 2), minval=-1, maxval=1) * 3)[1].obs))
    places = np.asarray(walk(jax.random.split(jax.random.PRNGKey(0), 8)))[..., :2].reshape(-1, 2)
    gap = np.abs(places[:, None] - env.walls[None]) - env.cell / 2
    assert np.linalg.norm(np.maximum(gap, 0), axis=-1).min() > 0.4 - 1e-4  # never inside a wall


def test_sac_target_takes_the_smaller_target_critic_and_the_entropy():
    """update_sac's critic step equals one that is put together by hand."""
    env, key = ctec.make_env("point_u_maze"), jax.random.PRNGKey(3)
    agent = ctec.init_state(ARGS, env).agent
    agent = agent.replace(target_critic=jax.tree.map(lambda x: x + 0.1, agent.critic.params), log_alpha=agent.log_alpha.replace(params=jnp.log(0.3)))
    batch, reward = random_batch(8), jnp.arange(8.0)
    after, metrics = ctec.update_sac(ARGS, agent, batch, reward, key)
    action, log_prob = ctec.sample_action(agent.actor.params, ARGS, jax.random.split(key)[0], batch.next_obs, 2)
    q = ctec.q_values(agent.target_critic, ARGS, batch.next_obs, action)
    assert (q[0] < q[1]).any() and (q[0] > q[1]).any()
    target = reward + 0.99 * (jnp.minimum(q[0], q[1]) - 0.3 * log_prob)
    np.testing.assert_allclose(metrics["q_target"], target.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic_loss"], jnp.mean((ctec.q_values(agent.critic.params, ARGS, batch.obs, batch.action) - target) ** 2), rtol=1e-5)
    # 8 samples with an entropy above -0.5 * 2: alpha must fall
    assert metrics["entropy"] > -1.0 and after.log_alpha.params < agent.log_alpha.params


class Walker:
    """Walks 0.4 m to the right each step, dies beyond x = 1, and its physics blows up in one of four environments."""

    state_size, action_size, position_size, grid = 2, 1, 2, (3, 2)
    low, high = np.array([0.0, 0.0]), np.array([1.5, 1.0])

    def reset(self, key):
        place = jnp.stack([0.1 + 0.01 * jax.random.uniform(key), 0.25])
        return ctec.EnvState(place, place, jnp.zeros((), bool))

    def step(self, state, action):
        place = state.physics + jnp.array([0.4, 0.0])
        return ctec.EnvState(place, place, place[0] > 1.0)

    def frame(self, physics):
        return physics[:1]


def test_collect_keeps_the_last_place_and_never_the_reset():
    env, args = Walker(), dataclasses.replace(ARGS, num_envs=2, unroll_length=5, episode_length=100)
    state = ctec.init_state(args, env)
    broken = state.env.replace(physics=state.env.physics.at[1, 1].set(jnp.nan))  # not finite after its first step
    state, _ = ctec.collect(args, env, state.replace(env=broken), jax.random.PRNGKey(0))
    terminated = np.asarray(state.replay.terminated[:5])
    assert terminated[:, 0].tolist() == [False, False, True, False, False]  # 0.5, 0.9, 1.3: dead
    assert terminated[:, 1].tolist() == [True, False, False, True, False] and not state.replay.truncated.any()
    visited = np.asarray(state.visited).reshape(env.grid)
    assert visited[:, 0].tolist() == [False, True, True] and not visited[:, 1].any()  # 1.3, before the reset; never the start
    assert state.outside == 1  # the broken one
    assert np.isfinite(np.asarray(state.replay.obs)).all()
    ends = np.asarray(ctec.trajectory_ends(state.replay))[-5:]
    assert ends[:, 0].tolist() == [2, 2, 2, 4, 4] and ends[:, 1].tolist() == [0, 3, 3, 3, 4]
