"""The noisy TV: grid and noise against plain loops, rewards and losses by hand, what PPO learns, and whole runs."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_all_changed, assert_none_changed, assert_one_line, checkpoint, failure, flags, refusal, rows

import ctec_ppo_noisy_tv as tv
from ctec_ppo_noisy_tv import Pairs, Steps

SMALL = dict(grid_size=16, rooms=2, tv_centre=(0.25, 0.75), tv_share=0.07, window=3, total_timesteps=8 * 16 * 6,
             num_envs=8, num_steps=16, episode_length=25, batch_size=32, agent_width=16, encoder_width=16,
             representation_size=8)  # fmt: skip
# without donation: a test looks at the state before the stage
collect = jax.jit(tv.collect.__wrapped__, static_argnums=(0, 1))
learn = jax.jit(tv.learn.__wrapped__, static_argnums=(0, 1))


def small(**changes):
    return tv.Args(**SMALL | changes)


def grid(size, rooms, window=3, on=True, row=0.375, column=0.375, share=1 / 64, start="fixed"):
    args = dict(grid_size=size, rooms=rooms, window=window, tv=on, tv_centre=(row, column), tv_share=share)
    return tv.make_noisy_tv(tv.Args(**args, start=start))


def shaken(state, by):
    """The state with an agent whose last layers are not 0, so that its values and probabilities differ."""
    noise = lambda x: by * jax.random.normal(jax.random.PRNGKey(x.size), x.shape)
    params = jax.tree.map(lambda x: x + noise(x), state.agent.params)
    return state.replace(agent=state.agent.replace(params=params))


@functools.cache
def cut_off(bonus="ctec"):
    """Episodes of 5 steps that begin in front of the TV; one compiled collect for several tests."""
    args = small(bonus=bonus, start="fixed", tv_centre=(0.25, 0.25), episode_length=5, update_epochs=1,
                 batch_size=8 * 16, gamma_cl=1e-9)  # fmt: skip
    env = tv.make_noisy_tv(args)
    return args, env, shaken(tv.init_state(args, env), 0.1)


def colours_of(env, obs):
    """(..., window^2, 3) of observations: red, green and blue of each place of the window."""
    colours = np.asarray(obs)[..., -3 * env.window**2 :]
    return np.moveaxis(colours.reshape(*colours.shape[:-1], 3, env.window**2), -2, -1)


# ------------------------------------------------------------------------------------------------------- the grid
MAP = """
....#...
....#...
........
....#...
##.###.#
....#...
........
....#...
""".split()


def test_moves_at_borders_walls_and_doors():
    env = grid(8, 2, row=0.25, column=0.75, share=0.05)
    np.testing.assert_array_equal(env.is_wall, [[x == "#" for x in row] for row in MAP])
    assert env.free_cells == sum(row.count(".") for row in MAP)
    assert env.starts.tolist() == [2 * 8 + 2]
    for row, column in itertools.product(range(8), range(8)):
        for action, (down, right) in enumerate([(-1, 0), (1, 0), (0, -1), (0, 1), (0, 0)]):
            to = (row + down, column + right)
            free = 0 <= to[0] < 8 and 0 <= to[1] < 8 and MAP[to[0]][to[1]] == "."
            after = env.move(jnp.array([row * 8 + column]), jnp.array([action]))
            assert divmod(int(after[0]), 8) == (to if free else (row, column))


@pytest.mark.parametrize("size,rooms", [(256, 4), (64, 4), (16, 2), (30, 4), (8, 1)])
def test_every_free_cell_can_be_reached(size, rooms):
    env = grid(size, rooms)
    reached = set(env.starts)
    border = reached
    while border:
        border = {int(x) for cell in border for x in env.target[cell]} - reached
        reached |= border
    assert len(reached) == env.free_cells == size**2 - env.is_wall.sum()
    assert (rooms == 1) == (not env.is_wall.any())
    lines = np.sum(env.is_wall.mean(axis=0) > 0.5)
    assert lines == rooms - 1  # walls across the grid


@pytest.mark.parametrize("on", [True, False])
def test_the_view_against_a_plain_loop(on):
    env = grid(16, 2, 5, on, 0.25, 0.75, 0.07, "random")
    side = 4
    top, left = 2, 10
    cells = jnp.arange(256)
    drawn = env.draw_colours(jax.random.PRNGKey(0), (256,))
    obs = np.asarray(env.observe(cells, drawn))
    seen = colours_of(env, obs)
    drawn = np.asarray(drawn)
    inside = lambda r, c: top <= r < top + side and left <= c < left + side
    for cell in range(256):
        row, column = divmod(cell, 16)
        around = list(itertools.product(range(row - 2, row + 3), range(column - 2, column + 3)))
        for k, (r, c) in enumerate(around):
            if not (0 <= r < 16 and 0 <= c < 16) or env.is_wall[r, c]:
                expected = (0.5, 0.5, 0.5)
            elif on and inside(r, c):
                expected = (drawn[cell, k] % 2, drawn[cell, k] // 2 % 2, drawn[cell, k] // 4)
            else:
                expected = (0, 0, 0)
            np.testing.assert_array_equal(seen[cell, k], expected)
        assert env.sees_tv[cell] == any(inside(r, c) for r, c in around)
        assert env.is_tv[row, column] == inside(row, column)
    assert obs.shape == (256, env.state_size)
    assert len(np.unique(obs[:, : -3 * 25], axis=0)) == 256  # the place alone tells every cell


# ------------------------------------------------------------------------------------------------------ the noise
@functools.cache
def in_front_of_a_large_tv():
    """64 agents inside a TV that takes nearly all of an open floor; the first policy is uniform."""
    args = small(start="fixed", rooms=1, tv_centre=(0.5, 0.5), tv_share=0.95, episode_length=10**6, num_envs=64)
    env = tv.make_noisy_tv(args)
    return args, env, tv.init_state(args, env)


def played(key_actions=0, key_tv=None, iteration=1):
    """A rollout of uniformly random actions there; one compiled collect for all tests."""
    args, env, state = in_front_of_a_large_tv()
    state = state.replace(key=jax.random.PRNGKey(key_actions), iteration=jnp.int32(iteration - 1))
    if key_tv is not None:
        state = state.replace(key_tv=jax.random.PRNGKey(key_tv))
    after, rollout, _ = collect(args, env, state)
    return env, after, rollout


def test_colours_are_new_at_every_step():
    env, _, rollout = played()
    now = (colours_of(env, rollout.obs) @ [1, 2, 4]).astype(int)[1:]  # (16, 64, 9) one of eight colours
    shown = env.view[np.asarray(rollout.cell)] == tv.TV  # the cell after step t is where observation t+1 is made
    assert shown.mean() > 0.9
    count = np.bincount(now[shown], minlength=8)
    assert np.sum((count - shown.sum() / 8) ** 2) / (shown.sum() / 8) < 24.3  # chi-square with 7 degrees, 0.1%

    def share_equal(a, b, both):
        assert both.sum() > 2000
        return abs(np.mean(a[both] == b[both]) - 1 / 8) < 4 * np.sqrt(7 / 64 / both.sum())

    assert share_equal(now[1:], now[:-1], shown[1:] & shown[:-1])  # the step before
    assert share_equal(now[:, 1:], now[:, :-1], shown[:, 1:] & shown[:, :-1])  # another environment
    assert share_equal(now[..., 1:], now[..., :-1], shown[..., 1:] & shown[..., :-1])  # another place of the window
    _, _, later = played(iteration=2)
    then = (colours_of(env, later.obs) @ [1, 2, 4]).astype(int)[1:]
    assert share_equal(then, now, shown & (env.view[np.asarray(later.cell)] == tv.TV))  # another rollout


def test_the_noise_and_the_actions_do_not_touch_each_other():
    env, _, first = played(key_actions=1)
    _, _, second = played(key_actions=2)
    assert np.mean(np.asarray(first.cell != second.cell)) > 0.5
    both = (env.view[np.asarray(first.cell)] == tv.TV) & (env.view[np.asarray(second.cell)] == tv.TV)
    assert both.mean() > 0.8
    one = colours_of(env, first.obs)[1:]
    np.testing.assert_array_equal(one[both], colours_of(env, second.obs)[1:][both])

    _, _, third = played(key_actions=1, key_tv=7)
    np.testing.assert_array_equal(first.cell, third.cell)
    assert np.mean(one[both] != colours_of(env, third.obs)[1:][both]) > 0.4


# ------------------------------------------------------------------------------------------- coverage and rollout
def test_coverage_and_time_at_the_tv_against_a_plain_loop():
    args, env, state = cut_off()
    visits = {}
    for _ in range(3):
        state, rollout, metrics = collect(args, env, state)
        at = 0
        for cell in np.asarray(rollout.cell).ravel():
            visits[int(cell)] = visits.get(int(cell), 0) + 1
            at += env.sees_tv[cell]
        np.testing.assert_allclose(metrics["at_tv"], at / 128, rtol=1e-6)
    assert {int(cell): int(state.visits[cell]) for cell in np.flatnonzero(state.visits)} == visits
    assert metrics["coverage"] == len(visits)
    np.testing.assert_allclose(metrics["coverage_share"], len(visits) / env.free_cells, rtol=1e-6)
    spent = sum(count for cell, count in visits.items() if env.sees_tv[cell]) / sum(visits.values())
    np.testing.assert_allclose(metrics["at_tv_run"], spent, rtol=1e-6)


def test_collect_values_what_was_cut_off_and_starts_again():
    args, env, state = cut_off()
    after, rollout, _ = collect(args, env, state)
    done = np.asarray(rollout.done)
    age = np.asarray(state.walkers.episode_step) + np.arange(1, 17)[:, None]
    assert len(set(age[0])) > 2  # the first episodes are staggered
    np.testing.assert_array_equal(done, age % 5 == 0)
    np.testing.assert_array_equal(after.walkers.episode_step, age[-1] % 5)

    before = np.concatenate([state.walkers.cell[None], np.where(done, env.starts[0], rollout.cell)])
    np.testing.assert_array_equal(rollout.cell, env.target[before[:-1], np.asarray(rollout.action)])
    np.testing.assert_array_equal(after.walkers.cell, before[-1])
    drawn = env.draw_colours(jax.random.fold_in(state.key_tv, 1), (16, 8))
    observe = jax.vmap(env.observe)
    obs = np.concatenate([state.walkers.obs[None], observe(before[1:], drawn)])
    np.testing.assert_array_equal(rollout.obs, obs)
    np.testing.assert_array_equal(after.walkers.obs, obs[-1])
    value = np.asarray(tv.ActorCritic(16, 5).apply(state.agent.params, observe(rollout.cell, drawn))[1])
    assert (value != 0).all()
    np.testing.assert_allclose(rollout.final_value, np.where(done, value, 0.0), rtol=1e-4)


def drawn_starts(start):
    """The cells in which episodes of one step begin: (1024,) of the first state, (17, 1024) of the rest."""
    args = small(start=start, num_envs=1024, num_steps=18, episode_length=1)
    env = tv.make_noisy_tv(args)
    state = tv.init_state(args, env)
    _, rollout, _ = collect(args, env, state)
    size = 2 * env.place_code.shape[1]
    code = np.asarray(env.observe(jnp.arange(256), jnp.zeros((256, 9), jnp.uint8)))[:, :size]
    starts = np.argmax(np.asarray(rollout.obs)[:-1, :, :size] @ code.T, axis=-1)  # all codes are of one length
    np.testing.assert_array_equal(starts[0], state.walkers.cell)
    np.testing.assert_array_equal(np.asarray(rollout.cell), env.target[starts, np.asarray(rollout.action)])
    return env, starts[0], starts[1:]


def test_random_starts_are_uniform_over_the_free_cells():
    env, first, others = drawn_starts("random")
    free = ~env.is_wall.ravel()
    for starts in (first, others):
        count = np.bincount(starts.ravel(), minlength=256)
        assert (count[~free] == 0).all()
        expected = starts.size / env.free_cells
        chi_square = np.sum((count[free] - expected) ** 2 / expected)
        freedom = env.free_cells - 1
        assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)  # its mean and four of its deviations
    assert (count[free] > 0).all() and not env.is_wall[env.is_tv].any()  # the TV's cells are free cells
    again = np.mean(others[1:] == others[:-1])  # an episode begins where the one before it began as often as anywhere
    assert abs(again * env.free_cells - 1) < 4 * np.sqrt(env.free_cells / others[1:].size)


def test_a_fixed_start_is_always_the_same_cell():
    env, first, others = drawn_starts("fixed")
    assert {*first, *others.ravel()} == {4 * 16 + 4}
    assert not env.is_wall[4, 4]


# ------------------------------------------------------------------------------------------------ losses, rewards
def numpy_mlp(params, x):
    layers = [params["params"][name] for name in sorted(params["params"])]
    assert len(layers) == 4
    for i, layer in enumerate(layers):
        x = x @ np.asarray(layer["kernel"], float) + np.asarray(layer["bias"], float)
        x = np.maximum(x, 0) if i < 3 else x
    return x


def numpy_encoder(params, x):
    x = numpy_mlp(params, np.asarray(x, float))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def made_up(args, env):
    """Parameters of the bonus, and steps: 7 of them in 3 environments, with an end in two of them."""
    key_params, key_states, key_action = jax.random.split(jax.random.PRNGKey(4), 3)
    params = tv.init_bonus(args, env, key_params)
    states = jax.random.normal(key_states, (8, 3, env.state_size))
    action = jax.nn.one_hot(jax.random.randint(key_action, (7, 3), 0, 5), 5)
    done = np.zeros((7, 3), bool)
    done[2, 0] = done[6, 0] = done[5, 1] = True
    return params, states, action, done


@pytest.mark.parametrize("normalize", [False, True])
def test_reward_of_ctec_against_a_plain_loop(normalize):
    """tau is 1/2: phi is doubled before the distance."""
    args = small(normalize_reward=normalize, gamma_cl=0.8)
    env = tv.make_noisy_tv(args)
    params, states, action, done = made_up(args, env)
    params |= {"log_tau": jnp.log(0.5)}
    weight = tv.future_weights(args, tv.steps_remaining(jnp.asarray(done)))
    reward = tv.intrinsic_reward(params, args, Steps(states, action, weight))
    phi = numpy_encoder(params["phi"], np.concatenate([states[:-1], action], axis=-1))
    psi = numpy_encoder(params["psi"], states)
    for t, n in itertools.product(range(7), range(3)):
        total = weights = 0.0
        for k in range(1, 8 - t):
            if done[t : t + k, n].any():  # the state after an episode's last step belongs to the next one
                break
            total += 0.8 ** (k - 1) * np.linalg.norm(2 * phi[t, n] - psi[t + k, n])
            weights += 0.8 ** (k - 1)
        expected = total / weights if normalize and weights else total
        np.testing.assert_allclose(reward[t, n], expected, atol=2e-4)


@pytest.mark.parametrize("bonus", ["rnd", "forward_error", "none"])
def test_reward_of_the_others_by_hand(bonus):
    args = small(bonus=bonus)
    env = tv.make_noisy_tv(args)
    params, states, action, _ = made_up(args, env)
    reward = tv.intrinsic_reward(params, args, Steps(states, action, None))
    following = np.asarray(states[1:], float)
    if bonus == "rnd":
        difference = numpy_mlp(params["predictor"], following) - numpy_mlp(params["target"], following)
    elif bonus == "forward_error":
        difference = numpy_mlp(params["forward"], np.concatenate([states[:-1], action], axis=-1)) - following
    else:
        difference = np.zeros((7, 3, 1))
    np.testing.assert_allclose(reward, np.mean(difference**2, axis=-1), rtol=1e-4)


def test_contrastive_loss_by_hand():
    args = small(logsumexp_penalty=0.1)
    env = tv.make_noisy_tv(args)
    params, states, action, _ = made_up(args, env)
    params |= {"log_tau": jnp.log(0.5)}
    anchor = jnp.concatenate([states[0], action[0]], axis=-1)
    pairs = Pairs(anchor, states[3], mask=jnp.array([1.0, 0, 1]))
    loss, metrics = tv.model_loss(params, args, pairs)
    phi = numpy_encoder(params["phi"], anchor)
    psi = numpy_encoder(params["psi"], states[3])
    logits = -np.linalg.norm(phi[:, None] / 0.5 - psi, axis=-1)
    lse = np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(loss, np.mean((lse - np.diag(logits) + 0.1 * lse**2)[[0, 2]]), rtol=1e-4)
    np.testing.assert_allclose(metrics["tau"], 0.5)
    gradient = jax.grad(lambda p: tv.model_loss(p, args, pairs)[0])(params)
    assert gradient["log_tau"] != 0


def test_rnd_learns_the_predictor_only():
    args = small(bonus="rnd")
    env = tv.make_noisy_tv(args)
    params, states, action, _ = made_up(args, env)
    pairs = Pairs(jnp.concatenate([states[0], action[0]], axis=-1), states[1], jnp.array([1.0, 0, 1]))
    optimizer = tv.clipped_adam(args, 1e-2)
    model = tv.Model(params, optimizer.init(params))
    after, metrics = tv.gradient_update(tv.model_loss, model, optimizer, args, pairs)
    errors = tv.prediction_error(params, args, pairs.anchor, pairs.positive)
    np.testing.assert_allclose(metrics["model_loss"], (errors[0] + errors[2]) / 2, rtol=1e-5)
    assert_none_changed(params["target"], after.params["target"])
    assert_all_changed(params["predictor"], after.params["predictor"])


def test_standardisation_by_hand():
    """The first rollout's mean and deviation, then a tenth of the new ones; 0 where the reward is not valid."""
    args = small()
    valid = jnp.array([[1.0, 1.0, 0.0]])
    moments, now, scaled = tv.standardize_valid(args, jnp.array([9.0, 9.0]), 1, jnp.array([[1.0, 3.0, 50.0]]), valid)
    np.testing.assert_allclose(moments, [2, 1])
    np.testing.assert_allclose(scaled, [[-1, 1, 0]], rtol=1e-6)
    moments, now, scaled = tv.standardize_valid(args, moments, 2, jnp.array([[0.0, 6.0, 50.0]]), valid)
    np.testing.assert_allclose(now, [3, 9])
    np.testing.assert_allclose(moments, [2.1, 1.8], rtol=1e-6)
    np.testing.assert_allclose(scaled, [[-2.1 / 1.8**0.5, 3.9 / 1.8**0.5, 0]], rtol=1e-5)


@pytest.mark.parametrize("bonus", ["ctec", "forward_error"])
def test_learning_against_its_parts(bonus):
    """One gradient step with the whole rollout, so that the losses are those before any change. The pairs are each
    step and its next state (C-TeC: gamma_cl near 0)."""
    args, env, state = cut_off(bonus)
    rolled, rollout, _ = collect(args, env, state)
    after, metrics = learn(args, env, rolled, rollout)

    states = rollout.obs
    action = jax.nn.one_hot(rollout.action, 5)
    done = np.asarray(rollout.done)
    params = state.model.params
    weight = tv.future_weights(args, tv.steps_remaining(rollout.done))
    reward = np.asarray(tv.intrinsic_reward(params, args, Steps(states, action, weight)))
    mean = reward[~done].mean()
    deviation = reward[~done].std()
    np.testing.assert_allclose(after.reward_moments, [mean, deviation**2], rtol=1e-3, atol=1e-8)
    scaled = np.where(done, 0.0, (reward - mean) / (deviation + 1e-8)) + 0.99 * np.asarray(rollout.final_value)
    last_value = tv.ActorCritic(16, 5).apply(state.agent.params, states[-1])[1]
    advantage = tv.gae(args, jnp.asarray(scaled), rollout.value, rollout.done, last_value)

    flat = lambda x: jnp.reshape(x, (-1, *x.shape[2:]))
    target = advantage + rollout.value
    advantage = (advantage - advantage.mean()) / advantage.std()
    inputs = jax.tree.map(flat, (rollout.replace(obs=states[:-1]), advantage, target))
    _, expected = tv.ppo_rows_loss(state.agent.params, args, env, *inputs)
    expected |= {"reward_mean": mean, "reward_std": deviation}
    anchor = jnp.concatenate([flat(states[:-1]), flat(action)], axis=-1)
    following = jnp.where(done[..., None], states[:-1], states[1:])  # at an end the state itself, masked
    expected |= tv.model_loss(params, args, Pairs(anchor, flat(following), 1.0 - flat(done)))[1]
    for name, x in expected.items():
        atol = 0.03 if name == "accuracy" else 1e-4  # a few of the rows have two logits that rounding exchanges
        np.testing.assert_allclose(metrics[name], x, rtol=2e-3, atol=atol, err_msg=name)
    assert set(metrics) - set(expected) == {"parameter_norm"}
    assert_all_changed(state.agent.params, after.agent.params)
    assert_all_changed(params, after.model.params)


# ------------------------------------------------------------------------------------------------------- learning
def test_ppo_learns_to_go_right(monkeypatch):
    """The reward is the column of the next state. In 40 iterations the agents go through the doors to the right wall
    and stay there; before, they are where a random walk from the start takes them."""
    args = small(bonus="none", start="fixed", num_envs=32, num_steps=32, batch_size=256, episode_length=64,
                 learning_rate=3e-3, agent_width=32)  # fmt: skip
    env = tv.make_noisy_tv(args)
    octaves = env.place_code.shape[1] // 2
    cosine = 2 * octaves + octaves  # of the column, the slowest one: it falls from 1 at the left to -1 at the right
    monkeypatch.setattr(tv, "intrinsic_reward", lambda params, args, batch: -batch.states[1:, :, cosine])
    state = tv.init_state(args, env)
    columns = []
    for _ in range(40):
        state, rollout, _ = tv.collect(args, env, state)
        state, _ = tv.learn(args, env, state, rollout)
        columns.append(np.mean(np.asarray(rollout.cell) % 16))
    assert columns[0] < 6
    assert np.mean(columns[-5:]) > 11.5, columns


# ----------------------------------------------------------------------------------------------------- whole runs
@pytest.mark.parametrize("bonus", ["ctec", "rnd"])
def test_a_run_and_the_same_run_resumed(bonus, tmp_path, capsys):
    args = small(bonus=bonus, run_dir=str(tmp_path / "whole"), tv=bonus != "rnd")
    whole = tv.main(args)
    out = capsys.readouterr().out
    last = r"coverage \d+ of 237 cells, [\d.]+% of the steps at the TV, after 768 steps in 00:\d\d\n"
    assert re.search(last, out)
    folder = whole["folder"]
    assert out.endswith(f"picture  {folder}/visits.png\nplay     python evaluate.py {folder}\n")
    assert (Path(whole["folder"]) / "visits.png").stat().st_size > 5000
    with np.load(Path(whole["folder"]) / "visits.npz") as file:
        assert file["visits"].sum() == 768 and np.sum(file["visits"] > 0) == whole["coverage"]
    table = rows(whole["folder"])
    assert ("contrastive_loss" in table[0], "model_loss" in table[0]) == (bonus == "ctec", bonus == "rnd")
    assert len(table) == 6 and all(value != "" for row in table for value in row.values())

    half = dataclasses.replace(args, run_dir=str(tmp_path / "part"), total_timesteps=args.total_timesteps // 2)
    part = tv.main(half)["folder"]
    tv.main(dataclasses.replace(args, resume=part))
    assert rows(part) == table
    assert checkpoint(part) == checkpoint(whole["folder"])


def test_without_a_bonus_the_policy_stays_uniform(tmp_path):
    last = tv.main(small(bonus="none", run_dir=str(tmp_path)))
    np.testing.assert_allclose(last["entropy"], np.log(5), rtol=1e-6)
    assert last["reward_std"] == last["value_loss"] == 0


def test_a_reward_that_is_not_finite_ends_the_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tv, "intrinsic_reward", lambda params, args, batch: jnp.full(batch.action.shape[:2], jnp.nan))
    # a learning rate of its own, so that no stage that is compiled already is taken
    code, message = failure(capsys, tv, flags(SMALL, bonus="none", run_dir=tmp_path, learning_rate=2e-3))
    assert code == 1
    assert_one_line(message.splitlines()[-1] + "\n", "iteration 1: ", "reward_mean is nan")  # after the progress


# -------------------------------------------------------------------------------------------------- bad arguments
BAD = {
    "even window": (["--window", "4"], "--window 4 must be odd"),
    "window above the grid": (["--grid-size", "16", "--window", "17"], "--window 17"),
    "small rooms": (["--rooms", "65"], "--rooms 65 must be at least 4 cells wide"),
    "no room": (["--rooms", "0"], "--rooms 0 must be above 0"),
    "TV everywhere": (["--tv-share", "1"], "must leave the TV inside the grid"),
    "TV below the grid": (["--tv-centre", "0.99", "0.3"], "--tv-centre (0.99, 0.3) must leave the TV inside the grid"),
    "TV left of the grid": (["--tv-centre", "0.3", "0.01"], "--tv-centre (0.3, 0.01) must leave the TV inside the"),
    "no TV at all": (["--tv-share", "0"], "--tv-share 0.0 must be above 0"),
    "no share": (["--tv-share", "nan"], "--tv-share nan must be above 0"),
    "batch of one": (["--batch-size", "1"], "--batch-size 1 must be at least 2"),
    "batch above the rollout": (["--batch-size", "64", "--num-envs", "1", "--num-steps", "32"], "--batch-size 64 must"),
    "no environment": (["--num-envs", "0"], "--num-envs 0 must be above 0"),
    "too long": (["--total-timesteps", "3000000000"], "--total-timesteps 3000000000 must be below 2^31"),
    "discount of one": (["--gamma-cl", "1"], "--gamma-cl 1.0 must be below 1"),
    "inf": (["--learning-rate", "inf"], "--learning-rate inf must be above 0 and finite"),
    "missing folder": (["--resume", "/nowhere"], "/nowhere"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_out_of_range_argument_is_one_line(case, tmp_path, capsys, monkeypatch):
    arguments, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    code, message = refusal(capsys, tv, arguments)
    assert code == 2
    assert_one_line(message, words)
    assert not list(tmp_path.iterdir())


def test_what_is_valid_is_not_refused():
    tv.check_args(small(gamma=1.0, gae_lambda=0.0, reward_momentum=0.0, entropy_coef=0.0, value_coef=0.0, seed=0))
    tv.check_args(small(gae_lambda=1.0, batch_size=8 * 16, window=15, rooms=4, total_timesteps=2**31 - 128))


def test_presets_can_run():
    for preset in tv.PRESETS:
        args = tv.parse_args(["--preset", preset, "--start", "fixed"])
        tv.check_args(args)
        env = tv.make_noisy_tv(args)
        room = args.grid_size // args.rooms
        rooms_of_tv = {(r // room, c // room) for r, c in np.argwhere(env.is_tv)}
        assert rooms_of_tv == {(1, 1)} and not env.sees_tv[env.starts].any()
        assert env.is_tv.sum() == args.grid_size**2 / 64
    assert tv.parse_args(["--preset", "laptop", "--grid-size", "32"]).grid_size == 32
    assert tv.parse_args([]).grid_size == 256
    assert tv.parse_args(["--preset", "laptop"]).start == "random"
