"""The mathematics of the Craftax script: reward, futures, losses, recurrent PPO, achievements, resets."""
import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ctec_ppo_rnn_craftax as ctec

ARGS = ctec.Args(num_envs=3, num_steps=7, num_minibatches=3, encoder_minibatches=3, contrastive_batch=7, rows_per_env=7, agent_width=8, encoder_width=8,
                 representation_size=4, episode_window=5, reset_ratio=3, random_iterations=0)  # fmt: skip
KEY = jax.random.PRNGKey(0)


@flax.struct.dataclass
class World:
    left: jax.Array  # steps until the episode ends
    number: jax.Array  # which world it is
    achievements: jax.Array


class Game:
    """Stands in for Craftax: an episode of 2 to 5 steps, after which one achievement is unlocked."""

    state_size, num_actions = 6, 17

    def reset(self, key):
        world = World(jax.random.randint(key, (), 2, 6), jax.random.randint(key, (), 0, 10**6), jnp.zeros(22, bool))
        return world, self.observe(world)

    def observe(self, world):
        return jnp.stack([world.left, world.number / 1e6, *[world.left == k for k in range(1, 5)]]).astype(jnp.float32)

    def step(self, key, world, action):
        left = world.left - 1
        world = World(left, world.number, world.achievements.at[3].set(left == 0))
        return world, self.observe(world), jnp.where(left == 0, 1.0, 0.25), left == 0


GAME = Game()


@pytest.fixture(scope="module")
def state():
    return ctec.init_state(ARGS, GAME)


@pytest.fixture(scope="module")
def short():
    """A rollout of 7 steps in 3 environments with two episode ends in the first, one at the last step of the second."""
    done = np.zeros((7, 3), bool)
    done[[1, 4], 0] = done[6, 1] = True
    key_states, key_action = jax.random.split(KEY)
    return jax.random.normal(key_states, (8, 3, 6)), jax.random.randint(key_action, (7, 3), 0, 17), done


def test_steps_left_by_hand(short):
    assert np.array_equal(ctec.steps_left(short[2]).T, [[1, 0, 2, 1, 0, 2, 1], [6, 5, 4, 3, 2, 1, 0], [7, 6, 5, 4, 3, 2, 1]])


def brute_force(params, args, states, action, done):
    """The reward, network call by network call, pair by pair: (T, N), and the number of encoder rows."""
    reward, rows = np.zeros(done.shape), 0
    for n in range(done.shape[1]):
        for t in range(len(done)):
            total = weights = 0.0
            for k in range(1, len(done) - t + 1):
                if done[t : t + k, n].any():
                    break
                phi = ctec.encode_pair(params, args, states[t, n], action[t, n])
                psi = ctec.encode_future(params, args, states[t + k, n])
                weight = args.gamma_cl ** (k - 1)
                total, weights, rows = total + weight * np.linalg.norm(phi - psi), weights + weight, rows + 2
            reward[t, n] = total / weights if args.normalize_reward and weights else total
    return reward, rows


@pytest.mark.parametrize("normalize", [False, True])
def test_reward_against_brute_force(state, short, normalize):
    states, action, done = short
    args = dataclasses.replace(ARGS, normalize_reward=normalize, gamma_cl=0.6)
    expected, rows = brute_force(state.encoders.params, args, states, action, done)
    reward = ctec.intrinsic_reward(args, state.encoders.params, KEY, states, action, ctec.steps_left(done))
    assert np.abs(reward - expected).max() < 1e-5 and reward.min() == 0.0 < np.median(reward)
    assert (np.asarray(reward)[done] == 0).all()  # no state follows the last one of an episode
    assert rows == 2 * (7 + 21 + 28)


def test_reward_of_a_single_future_is_the_normalised_one_in_the_mean(state, short):
    states, action, done = short
    args = dataclasses.replace(ARGS, reward_samples="single", gamma_cl=0.6)
    left, params = ctec.steps_left(done), state.encoders.params
    single = jax.vmap(lambda key: ctec.intrinsic_reward(args, params, key, states, action, left))(jax.random.split(KEY, 4000))
    expected, _ = brute_force(params, dataclasses.replace(args, normalize_reward=True), states, action, done)
    assert np.abs(single.mean(axis=0) - expected).max() < 0.03
    assert single.std(axis=0)[~done & (left > 1)].min() > 0 and (np.asarray(single)[:, done] == 0).all()


def test_reward_rows_at_64_steps():
    """Encoder rows for an environment: T + (T + 1) against two for each of T (T + 1) / 2 pairs."""
    rows, encode = [], ctec.MLP.__call__
    counted = lambda self, x: rows.append(np.prod(x.shape[:-1])) or encode(self, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctec.MLP, "__call__", counted)
        states = jax.ShapeDtypeStruct((65, 1, 6), jnp.float32)
        params = jax.eval_shape(lambda: ctec.init_state(ARGS, GAME)).encoders.params
        left = jax.ShapeDtypeStruct((64, 1), jnp.int32)
        rows.clear()
        jax.eval_shape(lambda *x: ctec.intrinsic_reward(ARGS, *x), params, KEY, states, left, left)
    assert sorted(rows) == [64, 65] and 64 * 65 / sum(rows) > 20


def test_futures_stay_in_the_episode_and_follow_the_distribution(short):
    done, gamma, draws = short[2], 0.6, 20_000
    args = dataclasses.replace(ARGS, gamma_cl=gamma)
    futures = np.asarray(jax.vmap(lambda key: ctec.sample_futures(key, args, ctec.steps_left(done)))(jax.random.split(KEY, draws)))
    assert futures.shape == (draws, 7, 3)
    for n in range(3):
        for t in range(7):
            allowed = [k for k in range(1, 8 - t) if not done[t : t + k, n].any()]
            found = futures[:, t, n] - t
            assert set(found) <= set(allowed or [0])
            expected = np.array([gamma ** (k - 1) for k in allowed])
            if len(allowed) > 1:  # chi-square: its mean is len - 1, its standard deviation sqrt(2 (len - 1))
                expected *= draws / expected.sum()
                chi2 = sum((np.sum(found == k) - e) ** 2 / e for k, e in zip(allowed, expected))
                assert chi2 < len(allowed) - 1 + 5 * np.sqrt(2 * (len(allowed) - 1))
    # every (env, t) has its own draw
    together = np.corrcoef(futures[:, 0, 1], futures[:, 0, 2])[0, 1], np.corrcoef(futures[:, 0, 2], futures[:, 1, 2])[0, 1]
    assert np.abs(together).max() < 0.03


def test_l2_similarity_by_hand():
    phi, psi = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]])
    assert np.allclose(ctec.l2_similarity(phi, psi), [[-1e-4, -2, -np.sqrt(0.8)], [-np.sqrt(2), -np.sqrt(2), -np.sqrt(0.4)]], atol=1e-6)
    slope = jax.grad(lambda phi: ctec.l2_similarity(phi, phi).sum())(phi)
    assert np.isfinite(slope).all()


def test_encoder_loss_in_parts(state, short):
    """Two parts of 4 rows: each is an InfoNCE of its own, and rows without a future do not count."""
    args = dataclasses.replace(ARGS, contrastive_batch=4)
    obs, future = jax.random.normal(KEY, (2, 8, 6))
    action, has_future = jnp.arange(8), jnp.array([1, 1, 0, 1, 1, 0, 0, 1.0])
    params = state.encoders.params | {"log_tau": jnp.log(0.5)}
    loss, metrics = ctec.encoder_loss(params, args, obs, action, future, has_future)
    phi, psi = np.asarray(ctec.encode_pair(params, args, obs, action)), np.asarray(ctec.encode_future(params, args, future))
    parts, right = [], []
    for rows in (range(0, 4), range(4, 8)):
        losses = []
        for i in rows:
            if has_future[i]:
                logits = np.array([-np.linalg.norm(phi[i] - psi[j]) / 0.5 for j in rows])
                losses.append(np.log(np.exp(logits).sum()) - logits[i - rows[0]])
                right.append(np.argmax(logits) == i - rows[0])
        parts.append(np.mean(losses))
    assert np.isclose(loss, np.mean(parts), atol=1e-5) and np.isclose(metrics["accuracy"], np.mean(right))
    lengths = np.linalg.norm(phi, axis=1), np.linalg.norm(psi, axis=1)
    assert np.allclose(lengths, 1.0, atol=1e-5)
    # the temperature of 1 that --no-learn-tau holds: other logits, and no gradient into log_tau
    fixed = lambda params: ctec.encoder_loss(params, dataclasses.replace(args, learn_tau=False), obs, action, future, has_future)[0]
    at_one = ctec.encoder_loss(params | {"log_tau": jnp.zeros(())}, args, obs, action, future, has_future)[0]
    assert np.isclose(fixed(params), at_one, atol=1e-6) and not np.isclose(loss, at_one, atol=1e-3)
    assert jax.grad(fixed)(params)["log_tau"] == 0.0


def test_minibatches_hold_every_pair_once_in_groups_of_an_environment():
    args = dataclasses.replace(ARGS, encoder_minibatches=2, rows_per_env=4)
    orders = [np.asarray(ctec.shuffled_groups(key, args, 8, 6)) for key in jax.random.split(KEY, 2)]
    for order in orders:
        assert order.shape == (2, 24) and sorted(order.ravel()) == list(range(48))
        envs = order.reshape(-1, 4) % 6
        assert (envs == envs[:, :1]).all()
    assert (orders[0] != orders[1]).any()


def test_encoders_learn_on_the_pairs_of_a_rollout(state):
    """States that tell their environment: the own future is found, and each update lowers the loss."""
    states = jnp.broadcast_to(jnp.eye(6)[:3], (8, 3, 6))  # (T+1, N, 6): environment n stays in its own state
    left, action = ctec.steps_left(jnp.zeros((7, 3), bool)), jnp.zeros((7, 3), jnp.int32)
    args, model, losses = dataclasses.replace(ARGS, encoder_epochs=20, encoder_learning_rate=1e-2, rows_per_env=1), state.encoders, []
    for key in jax.random.split(KEY, 3):
        model, metrics = ctec.update_encoders(args, model, key, states, action, left)
        losses.append(float(metrics["contrastive_loss"]))
    assert losses[0] > losses[1] > losses[2]
    phi, psi = ctec.encode_pair(model.params, args, states[0], action[0]), ctec.encode_future(model.params, args, states[0])
    assert np.array_equal(np.argmax(ctec.l2_similarity(phi, psi), axis=1), [0, 1, 2])


def test_recurrent_network_over_a_sequence_is_the_one_step_by_step(state):
    hidden, obs = jax.random.normal(KEY, (3, 8)), jax.random.normal(KEY, (5, 3, 6))
    first = jnp.zeros((5, 3), bool).at[2, 1].set(True)
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), state.agent.params)  # the policy's last layer starts at 0
    last, log_probs, value = ctec.policy(params, ARGS, hidden, obs, first)
    now = hidden
    for t in range(5):
        now = now.at[1].set(0.0) if t == 2 else now  # reset by hand
        now, one_log_probs, one_value = ctec.policy(params, ARGS, now, obs[t : t + 1], jnp.zeros((1, 3), bool))
        assert np.allclose(one_log_probs[0], log_probs[t], atol=1e-6) and np.allclose(one_value[0], value[t], atol=1e-6)
    assert np.allclose(now, last, atol=1e-6) and not np.allclose(log_probs[4, 0], log_probs[4, 1])
    # the gates, by hand: the module's first two layers are the embedding and the gates' input
    p = jax.tree.map(np.asarray, params["params"])
    sigmoid, h = lambda x: 1 / (1 + np.exp(-x)), np.asarray(hidden)
    (gates, embedding) = sorted((p["Dense_0"], p["Dense_1"]), key=lambda layer: len(layer["kernel"]), reverse=True)
    x = np.tanh(np.asarray(obs[0]) @ embedding["kernel"] + embedding["bias"]) @ gates["kernel"] + gates["bias"]
    reset, update, new = np.split(x, 3, axis=1)
    reset, update = sigmoid(reset + h @ p["recurrent"][0]), sigmoid(update + h @ p["recurrent"][1])
    new = np.tanh(new + reset * (h @ p["recurrent"][2] + p["bias"]))
    assert np.allclose(ctec.policy(params, ARGS, hidden, obs[:1], first[:1])[0], (1 - update) * new + update * h, atol=1e-5)


def test_first_policy_is_uniform(state):
    log_probs = ctec.policy(state.agent.params, ARGS, jnp.ones((3, 8)), jnp.ones((1, 3, 6)), jnp.zeros((1, 3), bool))[1]
    assert np.allclose(log_probs, -np.log(17), atol=1e-6)


def test_advantages_by_hand():
    args = dataclasses.replace(ARGS, gamma=0.5, gae_lambda=0.5)
    reward, value = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[4.0], [5.0], [6.0]])
    advantage = ctec.gae(args, reward, value, jnp.array([[False], [True], [False]]), jnp.array([8.0]))
    # step 2: 3 + 0.5 * 8 - 6 = 1; step 1 ends the episode: 2 - 5 = -3; step 0: 1 + 0.5 * 5 - 4 + 0.25 * (-3) = -1.25
    assert np.allclose(advantage[:, 0], [-1.25, -3.0, 1.0])


def test_ppo_loss_by_hand(state):
    args = dataclasses.replace(ARGS, clip=0.2, value_coef=0.5, entropy_coef=0.1)
    obs, action = jnp.ones((2, 1, 6)), jnp.array([[0], [1]])
    old, advantage = jnp.log(jnp.array([[1 / 34], [1 / 17]])), jnp.array([[3.0], [1.0]])  # ratios 2 and 1
    value = ctec.policy(state.agent.params, args, jnp.zeros((1, 8)), obs, jnp.zeros((2, 1), bool))[2]
    rollout = ctec.Rollout(obs, jnp.zeros((2, 1), bool), action, old, value + 0.5, None, None)
    loss, metrics = ctec.ppo_loss(state.agent.params, args, jnp.zeros((1, 8)), rollout, advantage)
    # normalised advantages 1 and -1: min(2 * 1, 1.2 * 1) and min(1 * -1, 1 * -1); targets lie 3.5 and 1.5 above the values
    assert np.isclose(metrics["policy_loss"], -(1.2 - 1.0) / 2, atol=1e-5)
    assert np.isclose(metrics["value_loss"], 0.5 * (3.5**2 + 1.5**2) / 2, atol=1e-5)
    assert np.isclose(metrics["entropy"], np.log(17), atol=1e-5) and np.isclose(metrics["clipped"], 0.5)
    assert np.isclose(loss, -0.1 + 0.5 * metrics["value_loss"] - 0.1 * np.log(17), atol=1e-4)


def test_episodes_against_a_list():
    episodes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), ctec.init_state(ARGS, GAME).episodes)
    metrics = ctec.episode_metrics(episodes)
    assert all(float(value) == 0.0 for value in metrics.values())  # no episode has ended: no 0 / 0
    random, known = np.random.default_rng(0), []
    for p in (0.0, 0.3, 0.9, 0.1, 0.5):  # 0.9: more at once than the ring of 5 holds
        done, unlocked = random.random((4, 3)) < p, random.random((4, 3, 22)) < 0.4
        length, reward = random.integers(1, 9, (4, 3)), random.random((4, 3)).astype(np.float32)
        known += [(unlocked[t, n], length[t, n], reward[t, n]) for t in range(4) for n in range(3) if done[t, n]]
        episodes = ctec.insert_episodes(episodes, *map(jnp.asarray, (done, unlocked, length, reward)))
        metrics = ctec.episode_metrics(episodes)
        if known:
            latest = known[-5:]
            rates = np.mean([x[0] for x in latest], axis=0)
            assert int(metrics["episodes"]) == len(known) and np.isclose(metrics["achievements"], rates.sum())
            assert np.isclose(metrics["episode_length"], np.mean([x[1] for x in latest]))
            assert np.isclose(metrics["episode_return"], np.mean([x[2] for x in latest]))
            assert np.isclose(metrics["crafter_score"], np.exp(np.mean(np.log(1 + 100 * rates))) - 1)
            assert np.isclose(metrics["place_plant"], rates[7])
    assert len(known) > 10


def test_crafter_score_by_hand():
    assert np.isclose(ctec.crafter_score(jnp.ones(22)), 100.0, rtol=1e-5)
    assert np.isclose(ctec.crafter_score(jnp.zeros(22).at[0].set(1.0)), 101 ** (1 / 22) - 1, rtol=1e-5)


def test_play_restarts_ended_episodes_in_new_worlds(state):
    players, rollout, episodes = jax.jit(ctec.play, static_argnums=(0, 1))(ARGS, GAME, state, KEY)
    obs, done = np.asarray(rollout.obs), np.asarray(rollout.done)
    ended = 0
    for n in range(3):
        for t in range(7):
            after = obs[t + 1, n] if t < 6 else np.asarray(players.obs)[n]
            first = rollout.first[t + 1, n] if t < 6 else players.first[n]
            assert done[t, n] == (obs[t, n, 0] == 1) == first  # the game ends when one step was left
            assert (after[1] != obs[t, n, 1]) == done[t, n]  # another world, or the same one a step later
            assert after[0] == obs[t, n, 0] - 1 or done[t, n]
            ended += done[t, n]
    numbers = [obs[t + 1, n, 1] for n in range(3) for t in range(6) if done[t, n]]
    assert len(set(numbers)) == len(numbers) > 2 and int(episodes.count) == ended  # 7 worlds were made: none is used twice
    assert float(ctec.achievement_rates(episodes)[3]) == 1.0  # unlocked by the last step, before the reset
    assert (np.asarray(players.length)[done[6]] == 0).all() and (np.asarray(players.hidden)[done[6]] == 0).all()


def test_task_reward_alone_trains_no_encoder_and_learns(state):
    """One compilation, encoders untouched, and the policy prefers what pays: action 0 in a game that pays for it."""

    class Paid(Game):
        def step(self, key, world, action):
            world, obs, _, done = super().step(key, world, action)
            return world, obs, (action == 0).astype(jnp.float32), done

    args = dataclasses.replace(ARGS, task_reward_coef=1.0, intrinsic_coef=0.0, num_envs=24, learning_rate=3e-3, total_timesteps=24 * 7 * 60)
    game = Paid()
    start, now = ctec.init_state(args, game), ctec.init_state(args, game)
    before = ctec.train_iteration._cache_size()
    for _ in range(60):
        now, metrics = ctec.train_iteration(args, game, now)
    assert ctec.train_iteration._cache_size() == before + 1
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), start.encoders, now.encoders)))
    assert "contrastive_loss" not in metrics and float(metrics["entropy"]) < 1.0
    assert float(metrics["episode_return"]) > 0.7 * float(metrics["episode_length"])


def test_achievement_names_are_those_of_craftax():
    from craftax.craftax_classic.constants import Achievement

    assert ctec.ACHIEVEMENTS == [x.name.lower() for x in sorted(Achievement, key=lambda x: x.value)]
