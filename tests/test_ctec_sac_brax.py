"""The mathematics of ctec_sac_brax.py against brute force and hand-computed numbers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_all_changed

import ctec_sac_brax as ctec
from ctec_sac_brax import Args, Batch, EnvState, Pairs, Replay

ARGS = Args(env="point_u_maze", num_envs=3, batch_size=512, replay_size=40, agent_width=8, encoder_width=8,
            representation_size=4, logsumexp_penalty=0.1)  # fmt: skip
ENV = ctec.make_env("point_u_maze")
collect = jax.jit(ctec.collect, static_argnums=(0, 1))
update = jax.jit(ctec.update, static_argnums=(0, 1))
update_sac = jax.jit(ctec.update_sac, static_argnums=(0, 1))
contrastive_loss = jax.jit(ctec.contrastive_loss, static_argnums=1)


@pytest.fixture(scope="module")
def start():
    """The state that a run of ARGS starts from."""
    return ctec.init_state(ARGS, ENV)


# ------------------------------------------------------------------------------------------ replay and futures
def filled_replay(steps, capacity=40, envs=3, unroll=7, seed=0):
    """A ring after `steps` steps, and the whole history of its two flags. An observation is (time, env, trajectory) and
    an action the time, so that every gathered row says where it comes from."""
    rng = np.random.default_rng(seed)
    done = rng.random((steps, envs)) < 0.15
    terminated = done & (rng.random((steps, envs)) < 0.5)
    truncated = done & ~terminated
    trajectory = np.cumsum(np.vstack([np.zeros((1, envs)), done[:-1]]), axis=0)
    time, env = np.indices((steps, envs))
    obs = np.stack([time, env, trajectory], axis=-1).astype(np.float32)
    history = (obs, obs[..., :1], terminated, truncated)
    replay = Replay(*(jnp.zeros((capacity, *x.shape[1:]), x.dtype) for x in history), jnp.int32(0))
    for i in range(0, steps, unroll):
        names = ("obs", "action", "terminated", "truncated")
        replay = ctec.replay_insert(replay, {name: jnp.asarray(x[i : i + unroll]) for name, x in zip(names, history)})
    return replay, terminated, truncated


@pytest.mark.parametrize("steps", [21, 40, 42, 98, 126])  # not full, just full, and wrapped at several places
def test_batches_and_futures_agree_with_a_search_through_the_whole_history(steps):
    replay, terminated, truncated = filled_replay(steps)
    replay = ctec.index_trajectories(replay)
    batch = ctec.sample_batch(jax.random.PRNGKey(1), ARGS, replay)
    pairs = ctec.sample_futures(jax.random.PRNGKey(2), ARGS, ENV, replay, batch)
    np.testing.assert_array_equal(pairs.anchor, np.hstack([batch.obs, batch.action]))
    np.testing.assert_array_equal(pairs.mask, batch.has_next)

    t, n, trajectory = np.asarray(batch.obs, int).T
    oldest = max(0, steps - 40)
    assert set(t) == set(range(oldest, steps - 1))  # all that is stored but the newest, nothing that was overwritten
    assert set(n) == {0, 1, 2}
    np.testing.assert_array_equal(batch.time, t)
    np.testing.assert_array_equal(batch.env_index, n)
    np.testing.assert_array_equal(batch.action[:, 0], t)
    np.testing.assert_array_equal(batch.terminated, terminated[t, n])
    np.testing.assert_array_equal(batch.truncated, truncated[t, n])

    done = terminated | truncated
    future_t, future_n, future_trajectory = np.asarray(pairs.positive, int).T
    np.testing.assert_array_equal(future_n, n)
    np.testing.assert_array_equal(future_trajectory, trajectory)
    for i in range(len(t)):
        last = t[i]
        while last < steps - 1 and not done[last, n[i]]:
            last += 1
        assert replay.ends[t[i] % 40, n[i]] == last
        assert pairs.mask[i] == (last > t[i])
        if last > t[i]:
            assert t[i] < future_t[i] <= last
            assert tuple(np.asarray(batch.next_obs[i], int)) == (t[i] + 1, n[i], trajectory[i])
        else:
            assert future_t[i] == t[i]


def test_futures_reach_the_last_stored_step():
    """One environment, one unfinished trajectory: the newest step is a future too, and each offset is drawn."""
    args = dataclasses.replace(ARGS, num_envs=1, batch_size=4096, gamma_cl=0.9)
    replay, _, _ = filled_replay(14, envs=1, seed=3)
    replay = ctec.index_trajectories(
        replay.replace(terminated=replay.terminated & False, truncated=replay.truncated & False)
    )
    batch = ctec.sample_batch(jax.random.PRNGKey(0), args, replay)
    future = ctec.sample_futures(jax.random.PRNGKey(1), args, ENV, replay, batch).positive[:, 0]
    pairs = set(zip(np.asarray(batch.time).tolist(), np.asarray(future, int).tolist()))
    assert pairs == {(t, later) for t in range(13) for later in range(t + 1, 14)}


def test_futures_from_offset_zero_on():
    """P(k) ~ gamma_cl^k for k = 0 to the end of the trajectory, whose last step has itself."""
    args = dataclasses.replace(ARGS, num_envs=1, batch_size=2**15, gamma_cl=0.5, first_offset=0)
    replay, _, _ = filled_replay(14, envs=1, seed=3)
    replay = ctec.index_trajectories(
        replay.replace(terminated=replay.terminated & False, truncated=(jnp.arange(40) == 6)[:, None])
    )
    batch = ctec.sample_batch(jax.random.PRNGKey(0), args, replay)
    pairs = ctec.sample_futures(jax.random.PRNGKey(1), args, ENV, replay, batch)
    assert np.all(pairs.mask == 1)
    offset = np.asarray(pairs.positive[:, 0]) - np.asarray(batch.time)
    for t, last in ((3, 6), (6, 6), (8, 13)):
        frequency = np.bincount(offset[np.asarray(batch.time) == t].astype(int)) / np.sum(np.asarray(batch.time) == t)
        expected = 0.5 ** np.arange(last - t + 1)
        np.testing.assert_allclose(frequency, expected / expected.sum(), atol=0.04)


def test_goal_futures_show_psi_the_position_only():
    args = dataclasses.replace(ARGS, future_state="goal")
    replay = ctec.index_trajectories(filled_replay(42)[0])
    batch = ctec.sample_batch(jax.random.PRNGKey(1), args, replay)
    full = ctec.sample_futures(jax.random.PRNGKey(2), ARGS, ENV, replay, batch)
    goal = ctec.sample_futures(jax.random.PRNGKey(2), args, ENV, replay, batch)
    np.testing.assert_array_equal(goal.positive, full.positive[:, :2])
    np.testing.assert_array_equal(goal.anchor, full.anchor)
    params = jax.eval_shape(lambda: ctec.init_state(args, ENV)).model.params
    assert params["psi"]["params"]["Dense_0"]["kernel"].shape == (2, 8)
    assert params["phi"]["params"]["Dense_0"]["kernel"].shape == (4 + 2, 8)


@pytest.mark.parametrize("gamma,remaining", [(0.99, 1), (0.99, 500), (0.9, 7), (0.3, 20), (0.1, 3)])
def test_offsets_are_truncated_geometric(gamma, remaining):
    draws = np.asarray(ctec.truncated_geometric(jax.random.PRNGKey(0), jnp.full(200_000, remaining), gamma))
    assert draws.min() >= 1 and draws.max() <= remaining
    expected = gamma ** np.arange(remaining) * (1 - gamma) / (1 - gamma**remaining)
    frequency = np.bincount(draws, minlength=remaining + 1)[1:] / len(draws)
    np.testing.assert_allclose(frequency, expected, atol=0.004)
    np.testing.assert_allclose(np.cumsum(frequency), np.cumsum(expected), atol=0.005)


def test_nothing_remaining_gives_offset_zero_and_gamma_may_be_traced():
    draw = jax.jit(lambda gamma: ctec.truncated_geometric(jax.random.PRNGKey(0), jnp.array([0, 0, 5]), gamma))
    offsets = draw(0.9)
    assert list(offsets[:2]) == [0, 0] and 1 <= offsets[2] <= 5
    assert draw(0.01)[2] == 1


# ------------------------------------------------------------------------------------------- the encoders' loss
def test_l1_similarity_and_its_gradient():
    key_phi, key_psi, key_weight = jax.random.split(jax.random.PRNGKey(0), 3)
    phi = jax.random.normal(key_phi, (5, 4))
    psi = jax.random.normal(key_psi, (7, 4))
    weight = jax.random.normal(key_weight, (5, 7))
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


def random_pairs(mask):
    key_anchor, key_positive = jax.random.split(jax.random.PRNGKey(9))
    rows = len(mask)
    return Pairs(jax.random.normal(key_anchor, (rows, 6)), jax.random.normal(key_positive, (rows, 4)), jnp.array(mask))


def numpy_encode(params, x):
    """The encoder again: two hidden relu layers and a linear one."""
    x = np.asarray(x)
    for i in range(3):
        layer = params["params"][f"Dense_{i}"]
        x = x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
        x = np.maximum(x, 0) if i < 2 else x
    return x


def test_loss_and_reward_against_numpy(start):
    """Five rows with a future and one without, and a temperature of 2: phi / 2 in loss and reward, or C / 2 in the loss
    alone."""
    pairs = random_pairs([1.0, 1, 1, 1, 1, 0])
    params = start.model.params | {"log_tau": jnp.log(2.0)}
    phi = numpy_encode(params["phi"], pairs.anchor)
    psi = numpy_encode(params["psi"], pairs.positive)
    np.testing.assert_allclose(ctec.encode(params["phi"], ARGS, pairs.anchor), phi, atol=1e-5)
    np.testing.assert_allclose(ctec.encode(params["psi"], ARGS, pairs.positive), psi, atol=1e-5)

    assert ARGS.reward_features == "batch"
    over_batch = lambda x: x / np.linalg.norm(x[:5], axis=0)
    reward = ctec.intrinsic_reward(params, ARGS, pairs)
    np.testing.assert_allclose(reward[:5], np.abs(over_batch(phi) / 2 - over_batch(psi))[:5].sum(axis=1), rtol=1e-4)
    assert reward[5] == 0.0
    in_logits = dataclasses.replace(ARGS, temperature="logits")
    reward = ctec.intrinsic_reward(params, in_logits, pairs)
    np.testing.assert_allclose(reward[:5], np.abs(over_batch(phi) - over_batch(psi))[:5].sum(axis=1), rtol=1e-4)

    phi = phi / np.linalg.norm(phi, axis=-1, keepdims=True)
    psi = psi / np.linalg.norm(psi, axis=-1, keepdims=True)
    logits = -np.abs(phi[:, None] / 2 - psi[None]).sum(axis=-1)
    reward = ctec.intrinsic_reward(params, dataclasses.replace(ARGS, reward_features="unit"), pairs)
    np.testing.assert_allclose(reward[:5], -np.diag(logits)[:5], rtol=1e-4)
    assert reward[5] == 0.0
    check_loss(params, ARGS, pairs, phi, psi, logits)
    check_loss(params, in_logits, pairs, phi, psi, -np.abs(phi[:, None] - psi[None]).sum(axis=-1) / 2)


def check_loss(params, args, pairs, phi, psi, logits):
    loss, metrics = contrastive_loss(params, args, pairs)
    lse = np.log(np.exp(logits).sum(axis=1))
    expected = {
        "contrastive_loss": (lse - np.diag(logits) + 0.1 * lse**2)[:5].mean(),
        "accuracy": (logits.argmax(axis=1) == np.arange(6))[:5].mean(),
        "logits_positive": np.diag(logits)[:5].mean(),
        "logits_negative": logits[~np.eye(6, dtype=bool)].mean(),
        "logsumexp": lse[:5].mean(),
        "tau": 2.0,
        "phi_variance": phi.var(axis=0).mean(),
        "psi_variance": psi.var(axis=0).mean(),
    }
    assert loss == metrics["contrastive_loss"] and set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


def test_reward_features_by_hand():
    """Two rows that count and one that does not: the features' lengths over the batch are 5 and 13."""
    x = jnp.array([[3.0, 5.0], [-4.0, 12.0], [100.0, 100.0]])
    batch = ctec.reward_features(ARGS, x, jnp.array([1.0, 1.0, 0.0]))
    np.testing.assert_allclose(batch[:2], [[3 / 5, 5 / 13], [-4 / 5, 12 / 13]], rtol=1e-6)
    in_time = ctec.reward_features(ARGS, x[:2, None], jnp.ones((2, 1)))  # (T, N, features): over both axes
    np.testing.assert_allclose(in_time[:, 0], batch[:2], rtol=1e-6)
    unit = ctec.reward_features(dataclasses.replace(ARGS, reward_features="unit"), x, jnp.ones(3))
    np.testing.assert_allclose(unit[1], [-4 / 160**0.5, 12 / 160**0.5], rtol=1e-6)


@pytest.mark.parametrize("mode", ["batch", "unit"])
def test_what_has_no_future_does_not_touch_the_reward(start, mode):
    args = dataclasses.replace(ARGS, reward_features=mode)
    pairs = random_pairs([1.0, 1, 1, 1, 1, 0])
    other = pairs.replace(anchor=pairs.anchor.at[5].set(9.0), positive=pairs.positive.at[5].set(-9.0))
    np.testing.assert_array_equal(*(ctec.intrinsic_reward(start.model.params, args, x) for x in (pairs, other)))


def test_the_row_without_a_future_is_still_a_negative(start):
    pairs = random_pairs([1.0, 1, 1, 1, 1, 0])
    loss = lambda pairs: contrastive_loss(start.model.params, ARGS, pairs)[0]
    grad = jax.grad(loss)(pairs)
    assert np.abs(grad.positive[5]).max() > 0
    assert np.abs(grad.anchor[5]).max() == 0
    assert np.abs(grad.anchor[4]).max() > 0


def test_gradient_update_by_hand():
    """Plain gradient descent on |w x - 1|^2 at w = 2, x = 3: w - 0.1 * 2 * 3 * (6 - 1)."""
    loss_fn = lambda w, args, x: ((w * x - 1.0) ** 2, {"seen": args})
    optimizer = optax.sgd(0.1, momentum=0.9)
    model, aux = ctec.gradient_update(
        loss_fn, ctec.Model(jnp.array(2.0), optimizer.init(jnp.array(2.0))), optimizer, "args", 3.0
    )
    np.testing.assert_allclose(model.params, -1.0, rtol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(model.opt_state), [30.0], rtol=1e-6)
    assert aux == {"seen": "args"}


# --------------------------------------------------------------------------------------------------------- SAC
def random_batch(rows):
    key_obs, key_action, key_next = jax.random.split(jax.random.PRNGKey(0), 3)
    return Batch(
        obs=jax.random.normal(key_obs, (rows, 4)),
        action=jax.random.normal(key_action, (rows, 2)),
        next_obs=jax.random.normal(key_next, (rows, 4)),
        terminated=jnp.zeros(rows),
        truncated=jnp.zeros(rows),
        time=jnp.zeros(rows, int),
        env_index=jnp.zeros(rows, int),
    )


def test_tanh_gaussian_log_probability(start):
    obs = jnp.full((1, 4), 0.3)
    sample = jax.vmap(lambda key: ctec.sample_action(start.agent.actor.params, ARGS, key, obs, 2))
    action, log_prob = sample(jax.random.split(jax.random.PRNGKey(0), 50_000))
    assert np.abs(action).max() <= 1.0
    # the mean of 1 / density over the draws is the volume of the action square
    assert abs(float(jnp.mean(jnp.exp(-log_prob))) - 4.0) < 0.15


def test_critic_target_by_hand(start):
    batch = random_batch(3).replace(terminated=jnp.array([0.0, 1, 0]), truncated=jnp.array([0.0, 0, 1]))
    np.testing.assert_array_equal(batch.has_next, [1, 0, 0])
    critic = start.agent.critic.params
    loss, metrics = ctec.critic_loss(critic, ARGS, batch, jnp.array([1.0, 2, 3]), jnp.array([10.0, 20, 30]))
    q = np.asarray(ctec.q_values(critic, ARGS, batch.obs, batch.action))
    assert q.shape == (2, 3) and not np.allclose(q[0], q[1])  # two critics, with different weights
    target = np.array([1 + 0.99 * 10, 2.0])  # the terminal step does not bootstrap, the truncated one is masked
    np.testing.assert_allclose(loss, ((q[:, :2] - target) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["q_target"], target.mean(), rtol=1e-6)


def test_actor_and_alpha_losses_by_hand(start):
    batch = random_batch(4)
    key = jax.random.PRNGKey(3)
    agent = start.agent
    loss, (log_prob, _) = ctec.actor_loss(agent.actor.params, ARGS, batch, agent.critic.params, 0.5, key)
    action, expected_log_prob = ctec.sample_action(agent.actor.params, ARGS, key, batch.obs, 2)
    q = np.asarray(ctec.q_values(agent.critic.params, ARGS, batch.obs, action)).min(axis=0)
    np.testing.assert_allclose(log_prob, expected_log_prob, rtol=1e-6)
    np.testing.assert_allclose(loss, np.mean(0.5 * np.asarray(log_prob) - q), rtol=1e-5)
    alpha = lambda log_alpha: ctec.alpha_loss(log_alpha, ARGS, jnp.array([1.0, 3.0]), -1.0)[0]
    np.testing.assert_allclose(alpha(jnp.log(2.0)), 2 * (-2 + 1), rtol=1e-6)
    assert jax.grad(alpha)(0.0) < 0  # less entropy than the target: alpha must grow


def test_sac_target_takes_the_smaller_target_critic_and_the_entropy(start):
    """update_sac's critic step equals one that is put together by hand."""
    key = jax.random.PRNGKey(3)
    agent = start.agent.replace(
        target_critic=jax.tree.map(lambda x: x + 0.1, start.agent.critic.params),
        log_alpha=start.agent.log_alpha.replace(params=jnp.log(0.3)),
    )
    batch = random_batch(8)
    reward = jnp.arange(8.0)
    after, metrics = update_sac(ARGS, ENV, agent, batch, reward, key)
    action, log_prob = ctec.sample_action(agent.actor.params, ARGS, jax.random.split(key)[0], batch.next_obs, 2)
    q = ctec.q_values(agent.target_critic, ARGS, batch.next_obs, action)
    assert (q[0] < q[1]).any() and (q[0] > q[1]).any()
    target = reward + 0.99 * (jnp.minimum(q[0], q[1]) - 0.3 * log_prob)
    error = ctec.q_values(agent.critic.params, ARGS, batch.obs, batch.action) - target
    np.testing.assert_allclose(metrics["q_target"], target.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic_loss"], jnp.mean(error**2), rtol=1e-5)
    # 8 samples with an entropy above -0.5 * 2: alpha must fall
    assert metrics["entropy"] > -1.0 and after.log_alpha.params < agent.log_alpha.params


# -------------------------------------------------------------------------------------------------- one update
def test_update_uses_the_reward_from_before_the_encoders_step(start):
    args = dataclasses.replace(ARGS, batch_size=16)
    obs = jax.random.normal(jax.random.PRNGKey(5), start.replay.obs.shape)
    done = jax.random.uniform(jax.random.PRNGKey(6), start.replay.terminated.shape)
    replay = start.replay.replace(obs=obs, terminated=done < 0.1, truncated=done > 0.9, time=jnp.int32(30))
    replay = ctec.index_trajectories(replay)
    key = jax.random.PRNGKey(7)
    (agent, model), metrics = update(args, ENV, replay, start.agent, start.model, key)

    key_batch, key_future, key_sac = jax.random.split(key, 3)
    batch = ctec.sample_batch(key_batch, args, replay)
    alive = np.asarray(batch.has_next) > 0
    assert 0 < alive.sum() < 16
    pairs = ctec.sample_futures(key_future, args, ENV, replay, batch)
    reward = ctec.intrinsic_reward(start.model.params, args, pairs)
    later = ctec.intrinsic_reward(model.params, args, pairs)
    assert abs(later.mean() / reward.mean() - 1) > 1e-4  # the step did change it
    expected = update_sac(args, ENV, start.agent, batch, reward, key_sac)[1]
    expected |= contrastive_loss(start.model.params, args, pairs)[1]
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics["reward_mean"], reward[alive].mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["reward_std"], reward[alive].std(), rtol=1e-4)

    # the encoders learn from the contrastive loss alone: no gradient of the reward reaches them
    alone, _ = ctec.gradient_update(ctec.contrastive_loss, start.model, optax.adam(args.learning_rate), args, pairs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), model.params, alone.params)
    assert_all_changed(start.model.params, model.params)
    for name in ("actor", "critic", "log_alpha"):
        assert_all_changed(getattr(start.agent, name).params, getattr(agent, name).params)
    follow = lambda target, critic: 0.995 * target + 0.005 * critic
    target_critic = jax.tree.map(follow, start.agent.target_critic, agent.critic.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), agent.target_critic, target_critic)


# -------------------------------------------------------------------------------------- coverage and collecting
class Space:
    position_size = 3


mark_visited = jax.jit(ctec.mark_visited, static_argnums=0)


def visited_bins(coverage):
    """{bin: step of its first visit}"""
    shape = ctec.GRID[: 2 if coverage.size == 256**2 else 3]
    wrapped = lambda i, n: int(i) if i < n // 2 else int(i) - n
    return {tuple(map(wrapped, np.unravel_index(slot, shape), shape)): int(coverage[slot])
            for slot in np.flatnonzero(np.asarray(coverage) < ctec.NEVER)}  # fmt: skip


@pytest.mark.parametrize("env", [ctec.make_env("point_hardest_maze"), Space()], ids=["2-D", "3-D"])
def test_bins_and_first_visits_against_a_plain_loop(env):
    """Positions on edges and corners, not finite, negative and outside every maze."""
    rng = np.random.default_rng(0)
    steps = 62
    positions = rng.uniform(-2, 30, (3, steps, ARGS.num_envs, env.position_size)).astype(np.float32)
    positions[:, ::5] = np.round(positions[:, ::5] * 2) / 2  # on edges
    positions[0, 7, 0, 0] = np.nan
    positions[0, 8, 1, 1] = -np.inf
    positions[1] = rng.uniform(-1, 1, positions[1].shape) * (64, 64, 32)[: env.position_size]
    positions[2, 4] = -0.0
    coverage = ctec.init_coverage(env)
    expected = {}
    for iteration, some in enumerate(positions, 1):
        coverage = mark_visited(ARGS, coverage, jnp.int32(iteration), some)
        for t, n in np.ndindex(some.shape[:2]):
            if np.isfinite(some[t, n]).all():
                step = ((iteration - 1) * steps + t + 1) * ARGS.num_envs
                expected.setdefault(tuple(np.floor(some[t, n] / 0.5).astype(int).tolist()), step)
    assert visited_bins(coverage) == expected
    assert np.sum(coverage < ctec.NEVER) == len(expected) > 300


def test_the_paper_s_number_of_bins_fits_and_the_grid_repeats_beyond_it():
    places = np.unique(np.random.default_rng(0).integers((-128, -128, -4), (128, 128, 60), (135_000, 3)), axis=0)
    positions = jnp.asarray(places * 0.5 + 0.25, jnp.float32)[None]
    coverage = mark_visited(ARGS, ctec.init_coverage(Space()), jnp.int32(1), positions)
    assert np.sum(coverage < ctec.NEVER) == len(places)
    shifted = positions + jnp.array([128.0, -384.0, 64.0])
    np.testing.assert_array_equal(mark_visited(ARGS, coverage, jnp.int32(2), shifted), coverage)
    half = positions + jnp.array([64.0, 0.0, 0.0])
    assert np.sum(mark_visited(ARGS, coverage, jnp.int32(2), half) < ctec.NEVER) > 1.9 * len(places)


def test_a_humanoid_outside_the_wall_counts():
    env = ctec.make_env("humanoid_u_maze")
    inside_and_outside = jnp.array([[[2.0, 2.0, 1.3], [-3.0, 25.0, 1.3]]])
    coverage = ctec.mark_visited(ARGS, ctec.init_coverage(env), 1, inside_and_outside)
    assert set(visited_bins(coverage)) == {(4, 4, 2), (-6, 50, 2)}


def test_bins_of_the_mazes():
    bins = {name: ctec.make_env(f"point_{name}_maze").free_bins for name in ctec.MAZES}
    assert bins == {"u": 448, "large": 1664, "hardest": 2944}


def test_collect_counts_every_step_before_the_reset_and_resets_nothing_else(start):
    """Short episodes: what is stored must be a path of the true dynamics, and coverage must have each place on it."""
    args = dataclasses.replace(ARGS, unroll_length=30, episode_length=12)
    state, metrics = collect(args, ENV, start)
    assert state.iteration == 1 and len({tuple(key.tolist()) for key in (start.key, state.key, state.key_learn)}) == 3
    obs = np.asarray(state.replay.obs[:30])
    action = np.asarray(state.replay.action[:30])
    truncated = np.asarray(state.replay.truncated[:30])
    assert truncated.sum() == 6 and truncated[11].all() and truncated[23].all()
    assert not state.replay.terminated.any()
    assert state.episode_step.tolist() == [6] * 3

    step = jax.jit(jax.vmap(jax.vmap(lambda obs, action: ENV.step(EnvState(obs, obs, False), action).obs)))
    after = np.asarray(step(obs, action))
    goes_on = ~truncated[:-1]
    np.testing.assert_allclose(obs[1:][goes_on], after[:-1][goes_on], atol=1e-6)
    assert np.abs(obs[12, :, :2] - ENV.start).max() <= 0.1
    assert np.abs(obs[12] - obs[0]).max(axis=-1).min() > 1e-4  # new starts

    bins = np.floor(after[..., :2] / 0.5).astype(int)
    first = {}
    for t, n in np.ndindex(30, 3):
        first.setdefault(tuple(bins[t, n].tolist()), 3 * (t + 1))
    assert visited_bins(state.coverage) == first
    assert (metrics["coverage"], metrics["episode_length"], metrics["success"]) == (len(first), 12, 0)

    counts = np.unique(np.floor(obs[..., :2].reshape(-1, 2) / 0.5), axis=0, return_counts=True)[1]
    p = counts / counts.sum()
    np.testing.assert_allclose(metrics["replay_entropy"], -(p * np.log(p)).sum(), rtol=1e-4)


class Walker:
    """Walks 0.4 m to the right each step, and dies beyond x = 1."""

    state_size = 2
    action_size = 1
    position_size = 2
    free_cells = [[0, 2]]
    far_cell = (0, 2)
    cell = 0.6

    def reset(self, key):
        place = jnp.stack([0.1 + 0.01 * jax.random.uniform(key), 0.25])
        return EnvState(place, place, jnp.zeros((), bool))

    def step(self, state, action):
        place = state.physics + jnp.array([0.4, 0.0])
        return EnvState(place, place, place[0] > 1.0)


def test_collect_keeps_the_last_place_and_never_the_reset():
    """Two walkers; the physics of the second blows up in its first step."""
    env = Walker()
    args = dataclasses.replace(ARGS, num_envs=2, unroll_length=5, episode_length=100)
    state = ctec.init_state(args, env)
    broken = state.env.replace(physics=state.env.physics.at[1, 1].set(jnp.nan))
    state, metrics = collect(args, env, state.replace(env=broken))
    terminated = np.asarray(state.replay.terminated[:5])
    assert terminated[:, 0].tolist() == [False, False, True, False, False]  # 0.5, 0.9, 1.3: dead
    assert terminated[:, 1].tolist() == [True, False, False, True, False]
    assert not state.replay.truncated.any()
    assert set(visited_bins(state.coverage)) == {(1, 0), (2, 0)}  # 1.3, before the reset; never the start
    assert metrics["coverage"] == 2
    assert metrics["episode_length"] == (3 + 1 + 3) / 3  # the broken one ends after its first step
    assert np.isfinite(state.replay.obs).all()
    ends = np.asarray(ctec.index_trajectories(state.replay).ends)[:5]
    assert ends[:, 0].tolist() == [2, 2, 2, 4, 4]
    assert ends[:, 1].tolist() == [0, 3, 3, 3, 4]


def test_the_goal_is_the_free_cell_with_the_longest_way():
    for name in ctec.MAZES:
        env = ctec.make_env(f"point_{name}_maze")
        ways = [tuple((env.start / env.cell).astype(int))]  # breadth first
        steps = {ways[0]: 0}
        for x, y in ways:
            for cell in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if not env.is_wall[cell] and cell not in steps:
                    steps[cell] = steps[x, y] + 1
                    ways.append(cell)
        assert len(steps) == len(env.free_cells) and steps[tuple(env.far_cell)] == max(steps.values())
    assert tuple(ENV.far_cell) == (3, 1)
    around = jnp.array(
        [[12.0, 4.0], [12.3, 4.3], [12.4, 4.4], [12.0, 4.6], [4.0, 12.0]]
    )  # the cell's centre is (12, 4)
    assert ctec.at_goal(ARGS, ENV, around).tolist() == [1, 1, 0, 0, 0]
    assert ctec.at_goal(dataclasses.replace(ARGS, goal_cell=(1, 3)), ENV, around).tolist() == [0, 0, 0, 0, 1]
    arm = ctec.make_env("arm_binpick_hard")
    assert ctec.at_goal(ARGS, arm, jnp.zeros((2, 18))).tolist() == [0, 0]


def test_task_and_intrinsic_reward_add_up(start, monkeypatch):
    """All states are at the goal, where every step earns 1. Without an intrinsic reward its model does not learn."""
    rewarded = []
    monkeypatch.setattr(
        ctec, "update_sac", lambda args, env, agent, batch, reward, key: (agent, rewarded.append(reward) or {})
    )
    replay = ctec.index_trajectories(
        start.replay.replace(obs=start.replay.obs.at[..., :2].set(jnp.array([12.0, 4.0])), time=30)
    )
    for task, intrinsic in ((0.0, 1.0), (2.0, 0.5), (2.0, 0.0)):
        args = dataclasses.replace(ARGS, batch_size=64, task_reward_coef=task, intrinsic_coef=intrinsic)
        (_, model), _ = ctec.update(args, ENV, replay, start.agent, start.model, jax.random.PRNGKey(0))
        changed = not np.array_equal(
            model.params["phi"]["params"]["Dense_0"]["kernel"], start.model.params["phi"]["params"]["Dense_0"]["kernel"]
        )
        assert changed == (intrinsic > 0)
    bonus, both, task_only = rewarded
    assert np.all(bonus > 0) and np.all(task_only == 2)
    np.testing.assert_allclose(both, 2 + 0.5 * bonus, rtol=1e-6)


def test_point_maze_physics():
    at = lambda *x: EnvState(jnp.array(x, jnp.float32), jnp.array(x, jnp.float32), False)
    free = ENV.step(at(4.0, 4.0, 0.1, -0.2), jnp.array([1.0, 0.5])).physics
    np.testing.assert_allclose(free, [4.1, 3.825, 0.1, -0.175], atol=1e-6)
    wall = ENV.step(at(4.0, 2.5, 0.1, -0.3), jnp.zeros(2)).physics  # the wall's face is at y = 2, the disc has 0.4
    np.testing.assert_allclose(wall, [4.09, 2.5, 0.09, 0.0], atol=1e-6)
    corner = ENV.step(at(5.595, 4.5, 0.0, 0.0), jnp.ones(2)).physics  # the wall to the right starts at x = 6
    np.testing.assert_allclose(corner, [5.595, 4.51, 0.0, 0.01], atol=1e-6)
    clipped = ENV.step(at(4, 4, 0, 0), jnp.array([9.0, 0])).physics
    np.testing.assert_allclose(clipped[2], 0.01, atol=1e-7)


def test_the_point_is_never_inside_a_wall():
    def walk(key):
        def step(state, action):
            state = ENV.step(state, action)
            return state, state.obs[:2]

        actions = jax.random.uniform(key, (2000, 2), minval=-3, maxval=3)
        return jax.lax.scan(step, ENV.reset(key), actions)[1]

    places = np.asarray(jax.jit(jax.vmap(walk))(jax.random.split(jax.random.PRNGKey(0), 8))).reshape(-1, 2)
    gap = np.abs(places[:, None] - ENV.walls[None]) - ENV.cell / 2
    assert np.linalg.norm(np.maximum(gap, 0), axis=-1).min() > 0.4 - 1e-4
