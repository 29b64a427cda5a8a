"""ETD and C-TeC in one PPO: distance, memory and rewards against plain loops, the distributions, and whole runs."""
import csv
import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import etd_ppo as etd

SMALL = dict(env="point_u_maze", total_timesteps=8 * 16 * 6, num_envs=8, num_steps=16, episode_length=25, batch_size=32, memory_size=20, agent_width=16,
             encoder_width=16, representation_size=8)  # fmt: skip


def small(**changes):
    return etd.Args(**SMALL | changes)


def encoder(args):
    return etd.MLP(args.encoder_width, args.representation_size + 1).init(jax.random.PRNGKey(7), jnp.zeros(4))


def numpy_distance(x, y):
    x, y, half = np.asarray(x, float), np.asarray(y, float), len(x) // 2
    return max(0.0, *(x - y)[:half]) + np.sqrt(np.sum((x - y)[half:] ** 2))


# ------------------------------------------------------------------------------------------------- the distance
def test_distance_by_hand():
    x, y = jnp.array([1.0, 2.0, 0.0, 3.0]), jnp.array([0.0, 4.0, 0.0, -1.0])
    assert np.allclose(etd.mrn_distance(x, y), 1 + 4) and np.allclose(etd.mrn_distance(y, x), 2 + 4)


def test_distance_is_a_quasimetric():
    x, y, z = jax.random.normal(jax.random.PRNGKey(0), (3, 2000, 64))
    there, back = etd.mrn_distance(x, y), etd.mrn_distance(y, x)
    assert (there + etd.mrn_distance(y, z) >= etd.mrn_distance(x, z) - 1e-4).all()
    assert (there > 0).all() and jnp.mean(jnp.abs(there - back)) > 0.1
    assert (etd.mrn_distance(x, x) <= 1.01e-4).all()  # the root of eps


def test_all_pairs_and_their_gradient():
    x, y, g = (jax.random.normal(jax.random.PRNGKey(i), shape) for i, shape in enumerate([(7, 16), (9, 16), (7, 9)]))
    plain = lambda x, y: etd.mrn_distance(x[:, None], y)
    x, y = x + 30, y + 30  # far from 0, where |x|^2 + |y|^2 - 2 x y would lose the small distances
    y = y.at[3].set(x[3] + 0.01)
    assert np.allclose(etd.mrn_pairs(x, y), plain(x, y), atol=1e-5) and np.allclose(jnp.diag(etd.mrn_pairs(x, x)), 1e-4, atol=1e-6)
    for i in (0, 1):
        ours, theirs = (jax.jit(jax.grad(lambda *z: jnp.sum(g * f(*z)), i))(x, y) for f in (etd.mrn_pairs, plain))
        assert np.allclose(ours, theirs, atol=1e-4)


def test_the_array_of_differences_is_never_made():
    x = jnp.zeros((512, 64))
    compiled = jax.jit(jax.grad(lambda x, y: jnp.sum(etd.mrn_pairs(x, y)))).lower(x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 512 * 512 * 10


def test_loss_by_hand():
    args, key = small(), jax.random.PRNGKey(0)
    params = encoder(args)
    obs, future, weight = jax.random.normal(key, (5, 4)), jax.random.normal(jax.random.PRNGKey(1), (5, 4)), jnp.array([1.0, 1, 0, 1, 1])
    out = lambda s: np.asarray(etd.MLP(16, 9).apply(params, s))
    x, y = out(obs)[:, :-1], out(future)
    logits = np.array([[y[j, -1] - numpy_distance(x[i], y[j, :-1]) for j in range(5)] for i in range(5)])
    rows = np.log(np.exp(logits).sum(axis=1)) - np.diag(logits)
    columns = np.log(np.exp(logits).sum(axis=0)) - np.diag(logits)
    expected = ((rows + columns) / 2)[np.asarray(weight) > 0].mean()
    loss, metrics = etd.etd_loss(params, args, obs, None, future, weight)
    assert np.allclose(loss, expected, atol=1e-4)
    own = logits.argmax(axis=1) == np.arange(5)
    assert np.allclose(metrics["accuracy"], own[np.asarray(weight) > 0].mean())


# ---------------------------------------------------------------------------------------------- memory and reward
@pytest.mark.parametrize("memory", ["embeddings", "observations"])
@pytest.mark.parametrize("size", [16, 40])
def test_reward_against_a_plain_loop(memory, size):
    """Four rollouts of 12 steps in three environments: episodes that end inside a rollout, with its last step, twice in one,
    and not at all; with a ring of 16 the one of 48 steps forgets its oldest. The weights change after each rollout."""
    args = small(memory=memory, memory_size=size, num_envs=3, num_steps=12)
    ring, params, rng = etd.new_memory(args, etd.make_any_env(args.env)), encoder(args), np.random.default_rng(0)
    encode = lambda params, s: np.asarray(etd.encode_state(params, args, jnp.asarray(s))[0])
    done = np.zeros((48, 3), bool)
    done[[5, 23, 28, 33], 0] = True
    done[[20, 47], 1] = True
    history = [[], [], []]  # (observation, embedding of its time) of each environment's episode
    states = rng.normal(size=(49, 3, 4)).astype(np.float32)
    for start in range(0, 48, 12):
        part, ends = states[start : start + 13], done[start : start + 12]
        reward, ring = etd.etd_reward(args, params, ring, jnp.asarray(part), jnp.asarray(ends))
        z = encode(params, part)
        history = [past[-size:] for past in history]  # what the memory still has when the rollout begins
        for n, past in enumerate(history):
            again = encode(params, np.array([s for s, _ in past] or [part[0, 0]]))  # by the newest weights
            history[n] = [(s, old if memory == "embeddings" else new) for (s, old), new in zip(past, again)]
        for t in range(12):
            for n in range(3):
                history[n].append((part[t, n], z[t, n]))
                expected = 0.0 if ends[t, n] else min(numpy_distance(old, z[t + 1, n]) for _, old in history[n])
                assert np.allclose(reward[t, n], expected, atol=2e-4), (start, t, n)
                history[n] = [] if ends[t, n] else history[n]
        params = jax.tree.map(lambda x: 1.1 * x + 0.05, params)
    assert ring.count.tolist() == [14, 0, 48] and int(ring.overflow) == 48 - size  # those of the third environment


def test_memory_starts_with_the_first_state_and_nothing_of_the_last_episode():
    """After a reset onto a state of the episode before, the reward is measured from the new episode only."""
    args = small(num_envs=1, num_steps=4)
    params, memory = encoder(args), etd.new_memory(args, etd.make_any_env(args.env))
    states = jnp.array([[0.0, 0, 0, 0], [1, 1, 0, 0], [5, 5, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])[:, None]
    done = jnp.array([False, True, False, False])[:, None]
    reward, memory = etd.etd_reward(args, params, memory, states, done)
    z = np.asarray(etd.encode_state(params, args, states[:, 0])[0])
    expected = [numpy_distance(z[0], z[1]), 0, numpy_distance(z[2], z[3]), min(numpy_distance(z[2], z[4]), numpy_distance(z[3], z[4]))]
    assert np.allclose(reward[:, 0], expected, atol=2e-4) and int(memory.count[0]) == 2
    assert np.allclose(memory.states[0, :2], z[2:4], atol=1e-6)


def test_standardisation_by_hand():
    args, first, second = small(reward_momentum=0.9), jnp.array([[1.0, 0.0], [3.0, 8.0]]), jnp.array([[2.0, 0.0], [2.0, 4.0]])
    moments, scaled = etd.standardize(args, jnp.zeros(2), 1, first)
    assert np.allclose(moments, [3, 9.5]) and np.allclose(scaled, (np.array([[1, 0], [3, 8]]) - 3) / np.sqrt(9.5), atol=1e-5)
    moments, scaled = etd.standardize(args, moments, 2, second)
    mean, variance = 0.9 * 3 + 0.1 * 2, 0.9 * 9.5 + 0.1 * 2
    assert np.allclose(moments, [mean, variance]) and np.allclose(scaled, (np.array([[2, 0], [2, 4]]) - mean) / np.sqrt(variance), atol=1e-5)


def fewest_steps(env):
    """f(i, j): the length of the shortest way between two bins, by a search through the bins that are no wall."""
    free = ~np.kron(env.is_wall, np.ones((8, 8), bool))

    @functools.cache
    def ways(start):
        length, queue = {start: 0}, [start]
        for x, y in queue:
            for bin in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if free[bin] and bin not in length:
                    length[bin] = length[x, y] + 1
                    queue.append(bin)
        return length

    return lambda i, j: ways(tuple(i))[tuple(j)]


def test_distance_grows_with_the_number_of_steps():
    """Trained on 48 paths through the U and tested on pairs of states of 16 others, against the shortest way between them.
    From one arm of the U to the other it must have learned to go around the wall, where the crow's distance is no help."""
    args = etd.Args(env="point_u_maze", encoder_width=128)
    env, model = etd.make_any_env(args.env), etd.new_model(args, encoder(args))
    key_cell, key_action, key_learn = jax.random.split(jax.random.PRNGKey(0), 3)
    place = jax.random.choice(key_cell, jnp.asarray([*env.free, env.start], jnp.float32), (64,))
    start = jnp.concatenate([place, jnp.zeros((64, 2))], axis=1)
    action = jnp.repeat(jax.random.uniform(key_action, (32, 64, 2), minval=-1.0), 16, axis=0)  # each held for 16 steps
    step = lambda now, action: (jax.vmap(env.step)(now, action), now.obs)
    _, obs = jax.lax.scan(step, etd.EnvState(start, start, jnp.zeros(64, bool)), action)  # (512, 64, 4)

    @jax.jit
    def learn(model, key):
        key_t, key_n, key_future = jax.random.split(key, 3)
        t, n = jax.random.randint(key_t, (256,), 0, 511), jax.random.randint(key_n, (256,), 0, 48)
        future = t + etd.truncated_geometric(key_future, 511 - t, args.gamma_cl)
        return etd.clipped_update(etd.etd_loss, model, args, 1e-3, obs[t, n], None, obs[future, n], jnp.ones(256))

    rng, shortest = np.random.default_rng(0), fewest_steps(env)
    one, other = ((rng.integers(512, size=3000), rng.integers(48, 64, size=3000)) for _ in range(2))
    bins = np.floor((np.asarray(obs)[..., :2] - env.low) / etd.BIN).astype(int)
    steps = np.array([shortest(i, j) for i, j in zip(bins[one], bins[other])])
    (x, y), (x_other, y_other) = np.asarray(obs)[one][:, :2].T, np.asarray(obs)[other][:, :2].T
    around, crow = np.abs(x - x_other) > 6, np.hypot(x - x_other, y - y_other)
    rank = lambda x: np.argsort(np.argsort(x))

    correlation = lambda distance, which: np.corrcoef(rank(steps[which]), rank(distance[which]))[0, 1]
    learned = lambda z: np.asarray(etd.mrn_distance(z[one], z[other]))
    before = learned(etd.encode_state(model.params, args, obs)[0])
    for key in jax.random.split(key_learn, 500):
        model, _ = learn(model, key)
    after = learned(etd.encode_state(model.params, args, obs)[0])
    assert correlation(after, slice(None)) > 0.8
    assert correlation(after, around) > 0.7 > 0.6 > max(correlation(crow, around), correlation(before, around))


# -------------------------------------------------------------------------------------------------------- C-TeC
@pytest.mark.parametrize("similarity", ["l1", "l2"])
def test_ctec_loss_and_reward_by_hand(similarity):
    args = small(bonus="ctec", similarity=similarity, gamma_cl=1e-9)  # the future is the next state
    keys, network = jax.random.split(jax.random.PRNGKey(0), 2), etd.MLP(16, 8)
    params = {"phi": network.init(keys[0], jnp.zeros(6)), "psi": network.init(keys[1], jnp.zeros(4)), "log_tau": jnp.log(0.5)}
    states, action, done = jax.random.normal(keys[0], (4, 2, 4)), jax.random.normal(keys[1], (3, 2, 2)), jnp.array([[False, False], [True, False], [False, True]])
    unit = lambda x: np.asarray(x) / np.linalg.norm(x, axis=-1, keepdims=True)
    phi = unit(etd.MLP(16, 8).apply(params["phi"], jnp.concatenate([states[:-1], action], axis=-1)))
    psi = unit(etd.MLP(16, 8).apply(params["psi"], states))
    order = int(similarity[1])
    reward = etd.ctec_reward(args, params, keys[0], states, action, done)
    assert np.allclose(reward, np.where(done, 0, np.linalg.norm(phi - psi[1:], ord=order, axis=-1)), atol=1e-5)
    weight = jnp.array([1.0, 0, 1])
    logits = -np.linalg.norm(phi[:, 0][:, None] - psi[1:, 0], ord=order, axis=-1) / 0.5
    lse = np.log(np.exp(logits).sum(axis=1))
    expected = (lse - np.diag(logits) + 0.1 * lse**2)[[0, 2]].mean()
    assert np.allclose(etd.ctec_loss(params, args, states[:3, 0], action[:, 0], states[1:, 0], weight)[0], expected, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- PPO
def test_tanh_gaussian():
    actions = etd.TanhGaussian(etd.make_any_env("point_u_maze"))
    output = jnp.array([0.3, -1.2, 0.5, -0.4])
    mean, std = np.array([0.3, -1.2]), np.log1p(np.exp([0.5, -0.4])) + 1e-3
    u = actions.sample(jax.random.PRNGKey(0), jnp.broadcast_to(output, (200_000, 4)))
    assert np.allclose(u.mean(axis=0), mean, atol=0.01) and np.allclose(u.std(axis=0), std, atol=0.01)
    log_normal = -0.5 * ((np.asarray(u) - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))
    assert np.allclose(actions.log_prob(output, u), log_normal.sum(axis=1), atol=1e-3)
    log_tanh = log_normal - np.log1p(-np.tanh(np.asarray(u, float)) ** 2)  # of the action itself
    assert np.allclose(actions.entropy(output), -log_tanh.sum(axis=1).mean(), atol=0.01)
    wide = actions.entropy(jnp.array([0.0, 0.0, 30.0, 30.0]))  # nearly a coin
    assert wide < actions.entropy(jnp.zeros(4)) < 2 * np.log(2)
    assert np.allclose(actions.vector(u), np.tanh(u), atol=1e-6)


def test_categorical():
    class Game:
        num_actions = 3

    actions, logits = etd.Categorical(Game), jnp.log(jnp.array([0.5, 0.3, 0.2])) + 7
    drawn = actions.sample(jax.random.PRNGKey(0), jnp.broadcast_to(logits, (50_000, 3)))
    assert np.allclose(np.bincount(drawn) / 50_000, [0.5, 0.3, 0.2], atol=0.01)
    assert np.allclose([actions.log_prob(logits, jnp.int32(a)) for a in (0, 2)], np.log([0.5, 0.2]), atol=1e-5)
    assert np.allclose(actions.entropy(logits), -sum(p * np.log(p) for p in (0.5, 0.3, 0.2)), atol=1e-5)
    assert actions.vector(jnp.int32(1)).tolist() == [0, 1, 0]


def test_ppo_loss_by_hand():
    args, env = small(clip=0.2, value_coef=0.5, entropy_coef=0.01), etd.make_any_env("point_u_maze")
    key = jax.random.PRNGKey(0)
    params = jax.tree.map(lambda x: x + 0.1, etd.ActorCritic(16, 4).init(key, jnp.zeros(4)))
    actions, obs = etd.action_distribution(env), jax.random.normal(key, (3, 4))
    output, value = etd.ActorCritic(16, 4).apply(params, obs)
    u = actions.sample(key, output)
    ratio, advantage, old_value = np.array([1.5, 0.5, 1.1]), np.array([2.0, -1.0, 0.5]), np.array([1.0, 2.0, 3.0])
    steps = etd.Steps(obs, u, actions.log_prob(output, u) - jnp.log(ratio), jnp.asarray(old_value), None, None)
    loss, metrics = etd.ppo_rows_loss(params, args, env, steps, jnp.asarray(advantage))
    a = (advantage - advantage.mean()) / advantage.std()
    policy = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a).mean()
    squares = 0.5 * ((np.asarray(value) - advantage - old_value) ** 2).mean()
    assert np.allclose(loss, policy + 0.5 * squares - 0.01 * actions.entropy(output).mean(), atol=1e-4)
    assert np.allclose(metrics["clipped"], 2 / 3) and np.allclose(metrics["kl"], (ratio - 1 - np.log(ratio)).mean(), atol=1e-5)


def test_play_counts_places_and_values_what_was_cut_off():
    """Episodes of 5 steps in a rollout of 16: the state after a cut is valued before the reset, and every place is counted."""
    args, key = small(episode_length=5), jax.random.PRNGKey(3)
    env = etd.make_any_env(args.env)
    state = etd.init_state(args, env)
    kick = jax.tree.map(lambda x: x + 0.3, state.agent.params)  # values other than 0
    state = state.replace(agent=state.agent.replace(params=kick))
    after, steps, frames = etd.play_steps(args, env, state, key)
    age = np.asarray(state.episode_step) + np.arange(1, 17)[:, None]
    assert len(set(age[0])) > 2 and (np.asarray(steps.done) == (age % 5 == 0)).all() and (after.episode_step == age[-1] % 5).all()
    now = etd.EnvState(steps.obs, steps.obs, jnp.zeros((16, 8), bool))
    there = jax.vmap(jax.vmap(env.step))(now, jnp.tanh(steps.action)).obs  # (16, 8, 4)
    value = etd.ActorCritic(16, 4).apply(kick, there)[1]
    assert np.allclose(steps.final_value, np.where(steps.done, value, 0.0), rtol=1e-4) and (value != 0).all()
    assert np.allclose(jnp.where(steps.done[:-1, :, None], 0, there[:-1]), jnp.where(steps.done[:-1, :, None], 0, steps.obs[1:]), atol=1e-5)
    assert set(np.flatnonzero(after.success.visited)) == set(np.asarray(etd.bin_index(env, there)).ravel()) and int(after.success.outside) == 0


def test_a_step_that_ends_badly():
    """A state that is not finite, or unhealthy, ends the episode: it is worth nothing, and nothing of it goes on."""

    class Fragile(etd.PointMaze):
        def step(self, state, action):
            after = super().step(state, action)
            broken = jnp.where(action[0] > 0.9, jnp.nan, after.obs)
            return etd.EnvState(broken, broken, action[1] > 0.9)

    args, env = small(), Fragile("u")
    state = etd.init_state(args, env)
    kick = jax.tree.map(lambda x: x + 0.5, state.agent.params)
    after, steps, _ = etd.play_steps(args, env, state.replace(agent=state.agent.replace(params=kick)), jax.random.PRNGKey(0))
    bad = np.asarray((jnp.tanh(steps.action) > 0.9).any(axis=-1))
    assert bad.sum() > 3 and (np.asarray(steps.done) >= bad).all() and (np.asarray(steps.final_value)[bad] == 0).all()
    _, metrics = etd.update(args, env, after.replace(iteration=jnp.int32(1)), jax.random.PRNGKey(1), steps)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after.env.obs, steps, metrics)))


@pytest.mark.parametrize("bonus", ["etd", "ctec"])
def test_update_against_its_parts(bonus):
    """One gradient step with the whole rollout, so that the losses are those before any change. The pairs are each step and its
    next state (gamma_cl near 0); the advantages are of the standardised reward plus the discounted value after a cut."""
    args = small(bonus=bonus, episode_length=5, update_epochs=1, batch_size=8 * 16, gamma_cl=1e-9)
    env = etd.make_any_env(args.env)
    state = etd.init_state(args, env)
    state = state.replace(agent=state.agent.replace(params=jax.tree.map(lambda x: x + 0.1, state.agent.params)), iteration=jnp.int32(1))
    played, steps, _ = etd.play_steps(args, env, state, jax.random.PRNGKey(0))
    new, metrics = etd.update(args, env, played, jax.random.PRNGKey(1), steps)
    states, action, done = jnp.concatenate([steps.obs, played.env.obs[None]]), jnp.tanh(steps.action), np.asarray(steps.done)
    if bonus == "etd":
        raw = np.asarray(etd.etd_reward(args, state.encoders.params, state.memory, states, steps.done)[0])
    else:
        raw = np.asarray(etd.ctec_reward(args, state.encoders.params, jax.random.PRNGKey(2), states, action, steps.done))
    reward = (raw - raw.mean()) / raw.std() + args.gamma * np.asarray(steps.final_value)
    last = etd.ActorCritic(16, 4).apply(state.agent.params, states[-1])[1]
    advantage = etd.gae(args, jnp.asarray(reward), steps.value, steps.done, last)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    _, expected = etd.ppo_rows_loss(state.agent.params, args, env, jax.tree.map(flat, steps), flat(advantage))
    future = jnp.where(done[..., None], states[:-1], states[1:])
    loss = etd.etd_loss if bonus == "etd" else etd.ctec_loss
    inputs = flat(steps.obs), flat(action), flat(future), 1.0 - flat(done)
    expected |= loss(state.encoders.params, args, *inputs)[1] | {"reward_mean": raw.mean(), "reward_std": raw.std()}
    for name in ("policy_loss", "value_loss", "entropy", "contrastive_loss", "accuracy", "reward_mean", "reward_std"):
        assert np.allclose(metrics[name], expected[name], rtol=1e-3, atol=1e-4), name
    for old, changed in ((state.agent, new.agent), (state.encoders, new.encoders)):
        assert all((a != b).any() for a, b in zip(jax.tree.leaves(old.params), jax.tree.leaves(changed.params)))


# --------------------------------------------------------------------------------------------------- whole runs
def rows(folder):
    with open(Path(folder) / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "steps_per_second")} for row in csv.DictReader(file)]


@pytest.mark.parametrize("changes", [dict(), dict(memory="observations"), dict(bonus="ctec")], ids=["etd", "observations", "ctec"])
def test_a_run_and_the_same_run_resumed(changes, tmp_path, capsys):
    args = small(run_dir=str(tmp_path / "whole"), **changes)
    whole = etd.main(args)
    out = capsys.readouterr().out
    assert re.search(r"rollout [\d.]+ MB, episodic memory [\d.]+ MB", out) and "coverage.png, rollout.png" in out
    part = etd.main(dataclasses.replace(args, run_dir=str(tmp_path / "part"), total_timesteps=args.total_timesteps // 2))
    resumed = etd.main(dataclasses.replace(args, resume=part["folder"]))
    a, b = (Path(run["folder"]) / "checkpoint.msgpack" for run in (whole, resumed))
    assert a.read_bytes() == b.read_bytes() and rows(whole["folder"]) == rows(resumed["folder"])
    assert whole["coverage"] > float(rows(whole["folder"])[0]["coverage"])
    assert ("memory_overflow" in whole) == (args.bonus == "etd")


def test_craftax_from_end_to_end_and_resumed(tmp_path, capsys):
    args = etd.Args(**SMALL | dict(env="craftax_classic", num_envs=4, total_timesteps=4 * 16 * 4, episode_length=30, episode_window=8, run_dir=str(tmp_path)))
    result = etd.main(args)
    table = rows(result["folder"])
    assert result["episodes"] == 8 and result["episode_length"] == 30  # cut off twice in each of the four
    assert np.isclose(result["achievements"], sum(float(table[-1][name]) for name in etd.ACHIEVEMENTS))
    assert table[-1]["coverage"] == "" and (Path(result["folder"]) / "achievements.png").exists()
    assert "achievements" in capsys.readouterr().out
    part = etd.main(dataclasses.replace(args, run_dir=str(tmp_path / "part"), total_timesteps=args.total_timesteps // 2))
    resumed = etd.main(dataclasses.replace(args, resume=part["folder"]))
    a, b = (Path(run["folder"]) / "checkpoint.msgpack" for run in (result, resumed))
    assert a.read_bytes() == b.read_bytes() and rows(result["folder"]) == rows(resumed["folder"])


@pytest.mark.parametrize("flags, words", [
    (["--env", "maze"], "craftax_classic"), (["--bonus", "rnd"], "ctec"), (["--memory-size", "8", "--num-steps", "16"], "--memory-size"),
    (["--representation-size", "7"], "even"), (["--batch-size", "1"], "--batch-size"), (["--reward-momentum", "1"], "--reward-momentum"),
    (["--resume", "/nowhere"], "/nowhere"),
])  # fmt: skip
def test_bad_input_is_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        etd.main(etd.parse_args(["--env", "point_u_maze", *flags]))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1


def test_presets_can_run():
    for name in (*etd.ENVS, "craftax_classic"):
        for preset in ("paper", "laptop"):
            args = etd.parse_args(["--env", name, "--preset", preset])
            etd.check_numbers(args)
            assert args.batch_size <= args.num_envs * args.num_steps and args.memory_size >= args.num_steps
    assert etd.parse_args(["--env", "craftax_classic"]).similarity == "l2" and etd.parse_args(["--env", "humanoid_u_maze"]).num_envs == 256
