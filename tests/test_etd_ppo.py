"""ETD and C-TeC in one PPO: distance, memory and rewards against plain loops, the distributions, and whole runs."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_all_changed, assert_none_changed, assert_one_line, checkpoint, failure, rows

import etd_ppo as etd
from etd_ppo import EnvState, Pairs, Rollout

SMALL = dict(env="point_u_maze", total_timesteps=8 * 16 * 6, num_envs=8, num_steps=16, episode_length=25, batch_size=32,
             memory_size=20, agent_width=16, encoder_width=16, representation_size=8)  # fmt: skip
ENV = etd.make_any_env("point_u_maze")
# without donation: a test looks at the state before the stage
collect = jax.jit(etd.collect.__wrapped__, static_argnums=(0, 1))
learn = jax.jit(etd.learn.__wrapped__, static_argnums=(0, 1))


def small(**changes):
    return etd.Args(**SMALL | changes)


def encoder(args):
    return etd.MLP(args.encoder_width, args.representation_size + 1).init(jax.random.PRNGKey(7), jnp.zeros(4))


def embed(params, args, states):
    return np.asarray(etd.encode_state(params, args, jnp.asarray(states))[0])


def shaken(state, by):
    """The state with an agent whose last layers are not 0, so that its values differ."""
    params = jax.tree.map(lambda x: x + by, state.agent.params)
    return state.replace(agent=state.agent.replace(params=params))


@functools.cache
def played(bonus):
    """A rollout of 16 steps with episodes of 5, and one gradient step on all of it: the state before, the state after
    the rollout, the rollout, the state after the gradient step, and the metrics of both stages. The pairs are each step
    and its next state (gamma_cl near 0)."""
    args = small(bonus=bonus, episode_length=5, update_epochs=1, batch_size=8 * 16, gamma_cl=1e-9, learning_rate=3e-3)
    state = shaken(etd.init_state(args, ENV), 0.1)
    rolled, rollout, collect_metrics = collect(args, ENV, state)
    after, metrics = learn(args, ENV, rolled, rollout)
    return args, state, rolled, rollout, after, collect_metrics, metrics


def plain_distance(x, y):
    """(...) of representations (..., features), by the array of all differences."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    y1, y2 = jnp.split(y, 2, axis=-1)
    return jnp.max(jax.nn.relu(x1 - y1), axis=-1) + jnp.sqrt(jnp.sum((x2 - y2) ** 2, axis=-1) + 1e-8)


def numpy_distance(x, y):
    difference = np.asarray(x, float) - np.asarray(y, float)
    first, second = np.split(difference, 2)
    return max(0.0, *first) + np.sqrt(np.sum(second**2))


# ------------------------------------------------------------------------------------------------- the distance
def test_distance_by_hand():
    x = jnp.array([1.0, 2.0, 0.0, 3.0])
    y = jnp.array([0.0, 4.0, 0.0, -1.0])
    both = jnp.stack([x, y])
    np.testing.assert_allclose(etd.mrn_distance(both, both), [[1e-4, 1 + 4], [2 + 4, 1e-4]])


def test_distance_is_a_quasimetric():
    x, y, z = jax.random.normal(jax.random.PRNGKey(0), (3, 100, 64))
    there = etd.mrn_distance(x, y)
    back = etd.mrn_distance(y, x).T
    assert (there[:, :, None] + etd.mrn_distance(y, z) >= etd.mrn_distance(x, z)[:, None] - 1e-4).all()
    assert (there > 0).all()
    assert jnp.mean(jnp.abs(there - back)) > 0.1
    assert (jnp.diag(etd.mrn_distance(x, x)) <= 1.01e-4).all()  # the root of eps


def test_all_pairs_and_their_gradient():
    key_x, key_y, key_weight = jax.random.split(jax.random.PRNGKey(0), 3)
    x = jax.random.normal(key_x, (7, 16)) + 30  # far from 0, where |x|^2 + |y|^2 - 2 x y would lose small distances
    y = jax.random.normal(key_y, (9, 16)) + 30
    y = y.at[3].set(x[3] + 0.01)
    weight = jax.random.normal(key_weight, (7, 9))
    plain = lambda x, y: plain_distance(x[:, None], y)
    np.testing.assert_allclose(etd.mrn_distance(x, y), plain(x, y), atol=1e-5)
    np.testing.assert_allclose(jnp.diag(etd.mrn_distance(x, x)), 1e-4, atol=1e-6)
    ours = jax.jit(jax.grad(lambda x, y: jnp.sum(weight * etd.mrn_distance(x, y)), (0, 1)))(x, y)
    theirs = jax.jit(jax.grad(lambda x, y: jnp.sum(weight * plain(x, y)), (0, 1)))(x, y)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_array_of_differences_is_never_made():
    x = jnp.zeros((512, 64))
    compiled = jax.jit(jax.grad(lambda x, y: jnp.sum(etd.mrn_distance(x, y)))).lower(x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 512 * 512 * 10

    args = small(num_envs=4, num_steps=128, memory_size=300, representation_size=64)
    memory = etd.init_memory(args, ENV)
    states = jnp.zeros((129, 4, 4))
    reward = lambda params, memory: etd.etd_reward(params, args, states, jnp.zeros((128, 4), bool), memory)
    compiled = jax.jit(reward).lower(encoder(args), memory).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * 128 * (300 + 128) * 10


def test_loss_by_hand():
    args = small()
    params = encoder(args)
    key_anchor, key_positive = jax.random.split(jax.random.PRNGKey(0))
    pairs = Pairs(
        anchor=jax.random.normal(key_anchor, (5, 4)),
        positive=jax.random.normal(key_positive, (5, 4)),
        mask=jnp.array([1.0, 1, 0, 1, 1]),
    )
    x = np.asarray(etd.MLP(16, 9).apply(params, pairs.anchor))[:, :-1]
    out = np.asarray(etd.MLP(16, 9).apply(params, pairs.positive))
    y = out[:, :-1]
    potential = out[:, -1]
    logits = np.array([[potential[j] - numpy_distance(x[i], y[j]) for j in range(5)] for i in range(5)])
    over_rows = np.log(np.exp(logits).sum(axis=1)) - np.diag(logits)
    over_columns = np.log(np.exp(logits).sum(axis=0)) - np.diag(logits)
    counts = np.asarray(pairs.mask) > 0
    loss, metrics = etd.etd_loss(params, args, pairs)
    np.testing.assert_allclose(loss, ((over_rows + over_columns) / 2)[counts].mean(), atol=1e-4)
    np.testing.assert_allclose(metrics["contrastive_loss"], loss)
    found = logits.argmax(axis=1) == np.arange(5)
    np.testing.assert_allclose(metrics["accuracy"], found[counts].mean())
    np.testing.assert_allclose(metrics["logits_positive"], np.diag(logits)[counts].mean(), atol=1e-4)
    np.testing.assert_allclose(metrics["logits_negative"], logits[~np.eye(5, dtype=bool)].mean(), atol=1e-4)
    np.testing.assert_allclose(metrics["phi_variance"], x.var(axis=0).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["psi_variance"], y.var(axis=0).mean(), rtol=1e-4)
    assert etd.contrastive_loss(params, args, pairs)[0] == loss


# ---------------------------------------------------------------------------------------------- memory and reward
@pytest.mark.parametrize("memory", ["embeddings", "observations"])
@pytest.mark.parametrize("size", [16, 40])
def test_reward_against_a_plain_loop(memory, size):
    """Four rollouts of 12 steps in three environments: episodes that end inside a rollout, with its last step, twice
    in one, and not at all; with a ring of 16 the one of 48 steps forgets its oldest. The weights change after each
    rollout."""
    args = small(memory=memory, memory_size=size, num_envs=3, num_steps=12)
    ring = etd.init_memory(args, ENV)
    params = encoder(args)
    done = np.zeros((48, 3), bool)
    done[[5, 23, 28, 33], 0] = True
    done[[20, 47], 1] = True
    states = np.random.default_rng(0).normal(size=(49, 3, 4)).astype(np.float32)
    history = [[], [], []]  # (observation, embedding of its time) of each environment's episode
    for start in range(0, 48, 12):
        part = states[start : start + 13]
        ends = done[start : start + 12]
        reward, ring = etd.etd_reward(params, args, jnp.asarray(part), jnp.asarray(ends), ring)
        z = embed(params, args, part)
        history = [past[-size:] for past in history]  # what the memory still has when the rollout begins
        if memory == "observations":  # encoded again by the newest weights
            history = [[(s, embed(params, args, s)) for s, _ in past] for past in history]
        for t, n in np.ndindex(12, 3):
            history[n].append((part[t, n], z[t, n]))
            expected = 0.0 if ends[t, n] else min(numpy_distance(old, z[t + 1, n]) for _, old in history[n])
            np.testing.assert_allclose(reward[t, n], expected, atol=2e-4, err_msg=f"{start} {t} {n}")
            if ends[t, n]:
                history[n] = []
        params = jax.tree.map(lambda x: 1.1 * x + 0.05, params)
    assert ring.count.tolist() == [14, 0, 48]
    assert int(ring.overflow) == 48 - size  # those of the third environment


def test_memory_starts_with_the_first_state_and_nothing_of_the_last_episode():
    """After a reset onto a state of the episode before, the reward is measured from the new episode only."""
    args = small(num_envs=1, num_steps=4)
    params = encoder(args)
    states = jnp.array([[0.0, 0, 0, 0], [1, 1, 0, 0], [5, 5, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])[:, None]
    done = jnp.array([False, True, False, False])[:, None]
    reward, memory = etd.etd_reward(params, args, states, done, etd.init_memory(args, ENV))
    z = embed(params, args, states[:, 0])
    expected = [
        numpy_distance(z[0], z[1]),
        0.0,
        numpy_distance(z[2], z[3]),
        min(numpy_distance(z[2], z[4]), numpy_distance(z[3], z[4])),
    ]
    np.testing.assert_allclose(reward[:, 0], expected, atol=2e-4)
    assert int(memory.count[0]) == 2
    np.testing.assert_allclose(memory.states[0, :2], z[2:4], atol=1e-6)


def test_standardisation_by_hand():
    """The steps that are not valid, whose rewards are 0, stay 0 and do not count: the others are 12 and 16, and then
    10 and 18."""
    args = small(reward_momentum=0.9)
    valid = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    moments, now, scaled = etd.standardize_valid(args, jnp.zeros(2), 1, jnp.array([[12.0, 0.0], [0.0, 16.0]]), valid)
    np.testing.assert_allclose(moments, [14, 4])
    np.testing.assert_allclose(scaled, [[-1, 0], [0, 1]], rtol=1e-6)
    moments, now, scaled = etd.standardize_valid(args, moments, 2, jnp.array([[10.0, 0.0], [0.0, 18.0]]), valid)
    np.testing.assert_allclose(now, [14, 16])
    np.testing.assert_allclose(moments, [14, 5.2], rtol=1e-6)  # 0.9 * 4 + 0.1 * 16
    np.testing.assert_allclose(scaled, [[-4 / 5.2**0.5, 0], [0, 4 / 5.2**0.5]], rtol=1e-6)


def fewest_steps(env):
    """f(i, j): the length of the shortest way between two bins, by a search through the bins that are no wall."""
    free = ~np.kron(env.is_wall, np.ones((8, 8), bool))

    @functools.cache
    def ways(start):
        length = {start: 0}
        queue = [start]
        for x, y in queue:
            for neighbour in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if free[neighbour] and neighbour not in length:
                    length[neighbour] = length[x, y] + 1
                    queue.append(neighbour)
        return length

    return lambda i, j: ways(tuple(i))[tuple(j)]


def test_distance_grows_with_the_number_of_steps():
    """Trained on 48 paths through the U and tested on pairs of states of 16 others, against the shortest way between
    them. From one arm of the U to the other it must have learned to go around the wall, where the crow's distance is
    no help."""
    args = etd.Args(env="point_u_maze", encoder_width=128)
    optimizer = etd.clipped_adam(args, 1e-3)
    params = encoder(args)
    model = etd.Model(params, optimizer.init(params))
    key_cell, key_action, key_learn = jax.random.split(jax.random.PRNGKey(0), 3)
    place = jax.random.choice(key_cell, jnp.asarray([*ENV.targets, ENV.start], jnp.float32), (64,))
    first = jnp.concatenate([place, jnp.zeros((64, 2))], axis=1)
    action = jnp.repeat(jax.random.uniform(key_action, (32, 64, 2), minval=-1.0), 80, axis=0)  # each held for 80 steps
    step = lambda now, action: (jax.vmap(ENV.step)(now, action), now.obs)
    _, obs = jax.lax.scan(step, EnvState(first, first, jnp.zeros(64, bool)), action)
    obs = obs[::5]  # (512, 64, 4)

    @jax.jit
    def learn(model, key):
        key_t, key_n, key_future = jax.random.split(key, 3)
        t = jax.random.randint(key_t, (256,), 0, 511)
        n = jax.random.randint(key_n, (256,), 0, 48)
        future = t + etd.truncated_geometric(key_future, 511 - t, args.gamma_cl)
        pairs = Pairs(obs[t, n], obs[future, n], jnp.ones(256))
        return etd.gradient_update(etd.etd_loss, model, optimizer, args, pairs)[0]

    rng = np.random.default_rng(0)
    draw = lambda: (rng.integers(512, size=3000), rng.integers(48, 64, size=3000))  # times and environments
    here = draw()
    there = draw()
    position = np.asarray(obs)[..., :2]
    bins = np.floor((position + ENV.cell / 2) / etd.BIN).astype(int)  # from the corner of the maze on
    shortest = fewest_steps(ENV)
    steps = np.array([shortest(i, j) for i, j in zip(bins[here], bins[there])])
    crow = np.linalg.norm(position[here] - position[there], axis=-1)
    everywhere = np.full(3000, True)
    around = np.abs(position[here][:, 0] - position[there][:, 0]) > 6
    rank = lambda x: np.argsort(np.argsort(x))
    correlation = lambda distance, which: np.corrcoef(rank(steps[which]), rank(distance[which]))[0, 1]

    def learned():
        z = embed(model.params, args, obs)
        return np.asarray(plain_distance(z[here], z[there]))

    before = learned()
    for key in jax.random.split(key_learn, 1000):
        model = learn(model, key)
    after = learned()
    assert correlation(after, everywhere) > 0.8
    assert correlation(after, around) > 0.7
    assert max(correlation(crow, around), correlation(before, around)) < 0.65


# -------------------------------------------------------------------------------------------------------- C-TeC
@pytest.mark.parametrize("similarity", ["l1", "l2"])
@pytest.mark.parametrize("temperature", ["phi", "logits"])
def test_ctec_loss_and_reward_by_hand(similarity, temperature):
    """tau is 1/2: phi is doubled before the distance, in loss and reward, or the loss's similarity is. With gamma_cl
    near 0 the future is the next state."""
    forms = dict(similarity=similarity, temperature=temperature)
    args = small(bonus="ctec", logsumexp_penalty=0.1, gamma_cl=1e-9, **forms)
    key_phi, key_psi, key_states, key_action = jax.random.split(jax.random.PRNGKey(0), 4)
    network = etd.MLP(16, 8)
    phi_params = network.init(key_phi, jnp.zeros(6))
    psi_params = network.init(key_psi, jnp.zeros(4))
    params = {"phi": phi_params, "psi": psi_params, "log_tau": jnp.log(0.5)}
    states = jax.random.normal(key_states, (4, 2, 4))
    action = jax.random.normal(key_action, (3, 2, 2))
    done = jnp.array([[False, False], [True, False], [False, True]])

    unit = lambda x: np.asarray(x) / np.linalg.norm(x, axis=-1, keepdims=True)
    state_action = jnp.concatenate([states[:-1], action], axis=-1)
    over_rollout = lambda x: x / np.linalg.norm(np.asarray(x)[~np.asarray(done)], axis=0)
    raw_phi = network.apply(phi_params, state_action)
    raw_psi = network.apply(psi_params, states[1:])
    order = {"l1": 1, "l2": 2}[similarity]
    factor = {"phi": 2.0, "logits": 1.0}[temperature]  # of phi
    for mode, features in {"batch": over_rollout, "unit": unit}.items():
        changed = dataclasses.replace(args, reward_features=mode)
        reward = etd.ctec_reward(params, changed, key_states, states, action, done)
        distance = np.linalg.norm(factor * features(raw_phi) - features(raw_psi), ord=order, axis=-1)
        np.testing.assert_allclose(reward, np.where(done, 0, distance), atol=1e-5)
        rollout = Rollout(states, None, None, None, done, None)
        assert_none_changed(etd.intrinsic_reward(params, changed, key_states, rollout, action, None), (reward, None))

    phi = unit(raw_phi)
    psi = unit(raw_psi)

    pairs = Pairs(state_action[:, 0], states[1:, 0], jnp.array([1.0, 0, 1]))
    logits = -np.linalg.norm(factor * phi[:, 0][:, None] - psi[:, 0], ord=order, axis=-1) * 2.0 / factor
    lse = np.log(np.exp(logits).sum(axis=1))
    expected = (lse - np.diag(logits) + 0.1 * lse**2)[[0, 2]].mean()
    loss, metrics = etd.ctec_loss(params, args, pairs)
    np.testing.assert_allclose(loss, expected, atol=1e-4)
    np.testing.assert_allclose(metrics["tau"], 0.5, rtol=1e-6)
    assert etd.contrastive_loss(params, args, pairs)[0] == loss


# ---------------------------------------------------------------------------------------------------------- PPO
def test_tanh_gaussian():
    actions = etd.TanhGaussian(ENV)
    output = jnp.array([0.3, -1.2, 0.5, -0.4])
    mean = np.array([0.3, -1.2])
    std = np.log1p(np.exp([0.5, -0.4])) + 1e-3
    u = actions.sample(jax.random.PRNGKey(0), jnp.broadcast_to(output, (200_000, 4)))
    np.testing.assert_allclose(u.mean(axis=0), mean, atol=0.01)
    np.testing.assert_allclose(u.std(axis=0), std, atol=0.01)
    log_normal = -0.5 * ((np.asarray(u) - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(actions.log_prob(output, u), log_normal.sum(axis=1), atol=1e-3)
    log_tanh = log_normal - np.log1p(-(np.tanh(np.asarray(u, float)) ** 2))  # of the action itself
    np.testing.assert_allclose(actions.entropy(output), -log_tanh.sum(axis=1).mean(), atol=0.01)
    wide = actions.entropy(jnp.array([0.0, 0.0, 30.0, 30.0]))  # nearly a coin
    assert wide < actions.entropy(jnp.zeros(4)) < 2 * np.log(2)
    np.testing.assert_allclose(actions.vector(u), np.tanh(u), atol=1e-6)


def test_categorical():
    class ThreeActions:
        num_actions = 3

    actions = etd.Categorical(ThreeActions)
    p = np.array([0.5, 0.3, 0.2])
    logits = jnp.log(p) + 7
    drawn = actions.sample(jax.random.PRNGKey(0), jnp.broadcast_to(logits, (50_000, 3)))
    np.testing.assert_allclose(np.bincount(drawn) / 50_000, p, atol=0.01)
    for action in range(3):
        np.testing.assert_allclose(actions.log_prob(logits, jnp.int32(action)), np.log(p[action]), atol=1e-5)
    np.testing.assert_allclose(actions.entropy(logits), -np.sum(p * np.log(p)), atol=1e-5)
    assert actions.vector(jnp.int32(1)).tolist() == [0, 1, 0]


def test_ppo_loss_by_hand():
    args = small(clip=0.2, value_coef=0.5, entropy_coef=0.01)
    key_init, key_obs, key_action = jax.random.split(jax.random.PRNGKey(0), 3)
    network = etd.ActorCritic(16, 4)
    params = jax.tree.map(lambda x: x + 0.1, network.init(key_init, jnp.zeros(4)))
    actions = etd.action_distribution(ENV)
    obs = jax.random.normal(key_obs, (3, 4))
    output, value = network.apply(params, obs)
    u = actions.sample(key_action, output)
    ratio = np.array([1.5, 0.5, 1.1])
    advantage = np.array([2.0, -1.0, 0.5])
    rollout = Rollout(
        obs=obs,
        action=u,
        log_prob=actions.log_prob(output, u) - jnp.log(ratio),
        value=None,
        done=None,
        final_value=None,
    )
    target = np.array([3.0, 1.0, 3.5])
    loss, metrics = etd.ppo_rows_loss(params, args, ENV, rollout, jnp.asarray(advantage), jnp.asarray(target))
    policy_loss = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage).mean()
    value_loss = 0.5 * ((np.asarray(value) - target) ** 2).mean()
    expected = policy_loss + 0.5 * value_loss - 0.01 * actions.entropy(output).mean()
    np.testing.assert_allclose(loss, expected, atol=1e-4)
    np.testing.assert_allclose(metrics["clipped"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl"], (ratio - 1 - np.log(ratio)).mean(), atol=1e-5)


# ---------------------------------------------------------------------------------------------- rollout and learn
def test_collect_counts_places_and_values_what_was_cut_off():
    """Episodes of 5 steps in a rollout of 16: the state after a cut is valued before the reset, and every place is
    counted."""
    _, state, after, rollout, _, metrics, _ = played("etd")
    done = np.asarray(rollout.done)
    age = np.asarray(state.episode_step) + np.arange(1, 17)[:, None]
    assert len(set(age[0])) > 2  # the first episodes are staggered
    np.testing.assert_array_equal(done, age % 5 == 0)
    np.testing.assert_array_equal(after.episode_step, age[-1] % 5)
    np.testing.assert_array_equal(rollout.obs[0], state.env.obs)
    np.testing.assert_array_equal(rollout.obs[-1], after.env.obs)

    obs = rollout.obs[:-1]
    now = EnvState(obs, obs, jnp.zeros((16, 8), bool))
    reached = jax.vmap(jax.vmap(ENV.step))(now, jnp.tanh(rollout.action)).obs  # (16, 8, 4), before any reset
    value = np.asarray(etd.ActorCritic(16, 4).apply(state.agent.params, reached)[1])
    assert (value != 0).all()
    np.testing.assert_allclose(rollout.final_value, np.where(done, value, 0.0), rtol=1e-4)
    np.testing.assert_allclose(np.asarray(reached)[~done], np.asarray(rollout.obs)[1:][~done], atol=1e-5)
    places = np.floor(np.asarray(reached)[..., :2] / etd.BIN).reshape(-1, 2)
    visited = np.argwhere(after.success.reshape(etd.GRID[:2]) < etd.NEVER)
    assert set(map(tuple, visited.tolist())) == set(map(tuple, (places % 256).tolist()))
    assert metrics["coverage"] == len(visited)
    assert metrics["episode_length"] == 5
    assert after.iteration == 1


def test_a_step_that_ends_badly():
    """A state that is not finite, or unhealthy, ends the episode: it is worth nothing, and nothing of it goes on."""

    class Fragile(etd.PointMaze):
        def step(self, state, action):
            after = super().step(state, action)
            broken = jnp.where(action[0] > 0.9, jnp.nan, after.obs)
            return EnvState(broken, broken, action[1] > 0.9)

    args = small()
    env = Fragile("u")
    after, rollout, _ = collect(args, env, shaken(etd.init_state(args, env), 0.5))
    bad = np.asarray((jnp.tanh(rollout.action) > 0.9).any(axis=-1))
    assert bad.sum() > 3
    assert np.asarray(rollout.done)[bad].all()
    assert (np.asarray(rollout.final_value)[bad] == 0).all()
    _, metrics = learn(args, env, after, rollout)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after.env.obs, rollout, metrics)))


@pytest.mark.parametrize("bonus", ["etd", "ctec"])
def test_learning_against_its_parts(bonus):
    """One gradient step with the whole rollout, so that the losses are those before any change. The advantages are of
    the standardised reward plus the discounted value after a cut. An episode's last step, of reward 0, is left out of
    the mean and deviation, and stays 0."""
    args, state, _, rollout, after, _, metrics = played(bonus)
    states = rollout.obs
    action = jnp.tanh(rollout.action)
    done = np.asarray(rollout.done)
    params = state.model.params
    if bonus == "etd":
        reward, memory = etd.etd_reward(params, args, states, rollout.done, state.memory)
        np.testing.assert_allclose(after.memory.states, memory.states, atol=1e-5)
        np.testing.assert_array_equal(after.memory.count, memory.count)
        assert metrics["memory_overflow"] == 0
    else:
        reward = etd.ctec_reward(params, args, jax.random.PRNGKey(2), states, action, rollout.done)
        assert after.memory is None and "memory_overflow" not in metrics
    reward = np.asarray(reward)
    assert (reward[done] == 0).all() and done.sum() > 20
    mean = reward[~done].mean()
    deviation = reward[~done].std()
    np.testing.assert_allclose(after.reward_moments, [mean, deviation**2], rtol=1e-3)

    scaled = np.where(done, 0.0, (reward - mean) / deviation) + args.gamma * np.asarray(rollout.final_value)
    value = np.asarray(rollout.value)
    next_value = np.asarray(etd.ActorCritic(16, 4).apply(state.agent.params, states[-1])[1])
    advantage = np.zeros(done.shape, np.float32)
    later = np.zeros(8)
    for t in reversed(range(16)):
        goes_on = 1.0 - done[t]
        error = scaled[t] + args.gamma * goes_on * next_value - value[t]
        later = error + args.gamma * args.gae_lambda * goes_on * later
        advantage[t] = later
        next_value = value[t]

    flat = lambda x: jnp.reshape(x, (-1, *x.shape[2:]))
    target = advantage + value
    advantage = (advantage - advantage.mean()) / advantage.std()
    inputs = jax.tree.map(flat, (rollout.replace(obs=states[:-1]), advantage, target))
    _, expected = etd.ppo_rows_loss(state.agent.params, args, ENV, *inputs)
    obs = flat(states[:-1])
    anchor = obs if bonus == "etd" else jnp.concatenate([obs, flat(action)], axis=-1)
    future = jnp.where(done[..., None], states[:-1], states[1:])
    loss_fn = etd.etd_loss if bonus == "etd" else etd.ctec_loss
    expected |= loss_fn(params, args, Pairs(anchor, flat(future), 1.0 - flat(done)))[1]
    expected |= {"reward_mean": mean, "reward_std": deviation}
    for name, x in expected.items():
        atol = 0.03 if name == "accuracy" else 1e-4  # a few of 103 rows have two logits that rounding exchanges
        np.testing.assert_allclose(metrics[name], x, rtol=1e-3, atol=atol, err_msg=name)
    assert set(metrics) - set(expected) - {"memory_overflow"} == {"parameter_norm"}
    squares = sum(jnp.sum(x**2) for x in jax.tree.leaves((after.agent.params, after.model.params)))
    np.testing.assert_allclose(metrics["parameter_norm"], jnp.sqrt(squares), rtol=1e-5)
    assert_all_changed(state.agent.params, after.agent.params)
    assert_all_changed(params, after.model.params)


def test_encoders_and_agent_have_step_sizes_of_their_own():
    """Adam's first step changes a parameter by its step size, or, where the gradient is as small as eps, by less."""
    _, state, _, _, after, _, _ = played("etd")
    largest = lambda a, b: max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    np.testing.assert_allclose(largest(state.agent.params, after.agent.params), 3e-3, rtol=0.02)
    np.testing.assert_allclose(largest(state.model.params, after.model.params), 1e-4, rtol=0.02)


def test_advantages_are_normalised_over_the_rollout(monkeypatch):
    """What the gradient steps of an epoch get, together: mean 0 and deviation 1. A batch alone has others. The targets
    of the values are not normalised."""
    args, _, rolled, rollout, *_ = played("etd")
    loss = etd.ppo_rows_loss

    def loss_and_inputs(params, args, env, rollout, advantage, target):
        value, metrics = loss(params, args, env, rollout, advantage, target)
        moments = (advantage.mean(), jnp.mean(advantage**2), jnp.var(advantage), jnp.mean(target - rollout.value))
        return value, metrics | dict(zip(("mean", "square", "variance_of_batch", "raw_mean"), moments))

    monkeypatch.setattr(etd, "ppo_rows_loss", loss_and_inputs)
    small_batches = dataclasses.replace(args, batch_size=32)
    _, metrics = etd.learn.__wrapped__(small_batches, ENV, rolled, rollout)
    np.testing.assert_allclose(metrics["mean"], 0, atol=1e-5)
    np.testing.assert_allclose(metrics["square"], 1, rtol=1e-4)
    assert metrics["variance_of_batch"] < 0.999
    assert abs(metrics["raw_mean"]) > 0.1


# --------------------------------------------------------------------------------------------------- whole runs
def assert_resumed_is_the_same_run(args, whole, tmp_path):
    half = dataclasses.replace(args, run_dir=str(tmp_path / "part"), total_timesteps=args.total_timesteps // 2)
    part = etd.main(half)["folder"]
    etd.main(dataclasses.replace(args, resume=part))
    assert rows(part) == rows(whole["folder"])
    assert checkpoint(part) == checkpoint(whole["folder"])


@pytest.mark.parametrize(
    "changes", [dict(), dict(memory="observations"), dict(bonus="ctec")], ids=["etd", "observations", "ctec"]
)
def test_a_run_and_the_same_run_resumed(changes, tmp_path, capsys):
    args = small(run_dir=str(tmp_path / "whole"), **changes)
    whole = etd.main(args)
    out = capsys.readouterr().out
    assert re.search(r"rollout [\d.]+ MB, episodic memory [\d.]+ MB", out)
    assert re.search(r"\ncoverage [\d,]+ bins after 768 steps in 00:\d\d\nfolder   ", out)
    assert (Path(whole["folder"]) / "coverage.png").exists()
    assert out.endswith(f"\nplay     python evaluate.py {whole['folder']}\n")
    table = rows(whole["folder"])
    assert len(table) == 6
    assert whole["coverage"] >= float(table[0]["coverage"]) > 0
    assert not {"achievements", *etd.ACHIEVEMENTS} & table[0].keys()  # the columns are this environment's and bonus's
    assert ("tau" in table[0], "memory_overflow" in table[0]) == (args.bonus == "ctec", args.bonus == "etd")
    assert all(value != "" for row in table for value in row.values())
    assert_resumed_is_the_same_run(args, whole, tmp_path)


def test_craftax_from_end_to_end_and_resumed(tmp_path, capsys):
    game = dict(env="craftax_classic", num_envs=4, episode_length=30, episode_window=8)
    args = small(**game, total_timesteps=4 * 16 * 4, run_dir=str(tmp_path / "whole"))
    whole = etd.main(args)
    assert "achievements" in capsys.readouterr().out
    last = rows(whole["folder"])[-1]
    assert whole["episodes"] == 8  # cut off twice in each of the four
    assert whole["episode_length"] == 30
    np.testing.assert_allclose(whole["achievements"], sum(float(last[name]) for name in etd.ACHIEVEMENTS), rtol=1e-5)
    assert "coverage" not in last
    assert_resumed_is_the_same_run(args, whole, tmp_path)


# -------------------------------------------------------------------------------------------------- bad arguments
BAD = {
    "small memory": (["--memory-size", "8", "--num-steps", "16"], "--memory-size 8 must be at least num_steps"),
    "odd size": (["--representation-size", "7"], "--representation-size 7 must be even"),
    "batch of one": (["--batch-size", "1"], "--batch-size 1 must be at least 2"),
    "batch above the rollout": (["--batch-size", "64", "--num-envs", "1", "--num-steps", "32"], "--batch-size 64 must"),
    "no environment": (["--num-envs", "0"], "--num-envs 0 must be above 0"),
    "momentum of one": (["--reward-momentum", "1"], "--reward-momentum 1.0 must be below 1"),
    "long discount": (["--gae-lambda", "1.5"], "--gae-lambda 1.5 must be at most 1"),
    "inf": (["--learning-rate", "inf"], "--learning-rate inf must be above 0 and finite"),
    "nan": (["--gamma-cl", "nan"], "--gamma-cl nan must be above 0"),
    "missing folder": (["--resume", "/nowhere"], "/nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_out_of_range_argument_is_one_line(case, tmp_path, capsys, monkeypatch):
    arguments, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    code, message = failure(capsys, etd, ["--env", "point_u_maze", *arguments])
    assert code == 2
    assert_one_line(message, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--env", "maze"], ["--env", *etd.ENVS, "craftax_classic"]),
        (["--bonus", "rnd"], ["--bonus", "etd", "ctec"]),
        (["--memry", "observations"], ["--memry", "--memory"]),
    ],
    ids=["unknown env", "unknown bonus", "unknown flag"],
)
def test_wrong_flags_get_tyros_message(arguments, words, capsys):
    code, message = failure(capsys, etd, arguments)
    assert code == 2
    assert message.count("\n") > 3  # framed
    for word in [*words, "--help"]:
        assert word in message


def test_what_is_valid_is_not_refused():
    etd.check_args(small(bonus="ctec", representation_size=7, memory_size=8))
    etd.check_args(small(gamma=1.0, gae_lambda=0.0, reward_momentum=0.0, entropy_coef=0.0, value_coef=0.0, seed=0))
    etd.check_args(small(gae_lambda=1.0, batch_size=8 * 16, checkpoint_minutes=0.0, logsumexp_penalty=0.0))


def test_presets_can_run():
    for name in (*etd.ENVS, "craftax_classic"):
        for preset in etd.PRESETS:
            args = etd.parse_args(["--env", name, "--preset", preset])
            etd.check_args(args)
            assert args.batch_size <= args.num_envs * args.num_steps
            assert args.memory_size >= args.num_steps
            assert (args.num_envs, args.num_steps) == {"paper": (256, 512), "laptop": (32, 512)}[preset]
    for preset in etd.PRESETS:
        args = etd.parse_args(["--env", "craftax_classic", "--preset", preset, "--num-steps", "64"])
        assert (args.similarity, args.reward_features, args.episode_length) == ("l2", "unit", 10_000)
        assert args.num_steps == 64  # explicit flags win
    assert etd.parse_args(["--env", "humanoid_u_maze"]).batch_size == 256
