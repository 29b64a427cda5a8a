"""The mathematics of ctec_ppo_rnn_craftax.py: futures, reward, losses, recurrent PPO, achievements, resets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Game, assert_all_changed, assert_none_changed

import ctec_ppo_rnn_craftax as ctec
from ctec_ppo_rnn_craftax import Futures, Pairs, Rollout

ARGS = ctec.Args(num_envs=3, num_steps=7, num_minibatches=3, encoder_minibatches=3, contrastive_batch=7, rows_per_env=7,
                 agent_width=8, encoder_width=8, representation_size=4, episode_window=5, reset_ratio=3,
                 random_iterations=1)  # fmt: skip
GAME = Game()
KEY = jax.random.PRNGKey(0)


@pytest.fixture(scope="module")
def start():
    """The state that a run of ARGS starts from."""
    return ctec.init_state(ARGS, GAME)


@pytest.fixture(scope="module")
def short():
    """States, actions and dones of a rollout of 7 steps in 3 environments. Two episodes end in the first one, and one
    ends with the last step of the second."""
    done = np.zeros((7, 3), bool)
    done[[1, 4], 0] = True
    done[6, 1] = True
    key_states, key_action = jax.random.split(KEY)
    states = jax.random.normal(key_states, (8, 3, 6))
    action = jax.random.randint(key_action, (7, 3), 0, 17)
    return states, action, done


def with_action(obs, action):
    return np.concatenate([obs, np.eye(17, dtype=np.float32)[np.asarray(action)]], axis=-1)


# --------------------------------------------------------------------------------------------- futures and reward
def test_steps_remaining_by_hand(short):
    _, _, done = short
    expected = [[1, 0, 2, 1, 0, 2, 1], [6, 5, 4, 3, 2, 1, 0], [7, 6, 5, 4, 3, 2, 1]]
    np.testing.assert_array_equal(ctec.steps_remaining(done).T, expected)


def reward_of(params, args, states, action, done):
    weight = ctec.future_weights(args, ctec.steps_remaining(done))
    return ctec.intrinsic_reward(params, args, Futures(states, action, weight))


def tau_of_phi(params, args):
    """What phi is divided by before the distance."""
    return np.exp(params["log_tau"]) if args.temperature == "phi" and args.learn_tau else 1.0


def brute_force(params, args, states, action, done):
    """The reward (T, N), pair by pair, network call by network call; and the number of those calls."""
    reward = np.zeros(done.shape)
    calls = 0
    for t, n in np.ndindex(done.shape):
        total = 0.0
        weights = 0.0
        for k in range(1, len(done) - t + 1):
            if done[t : t + k, n].any():
                break
            phi = ctec.encode(params["phi"], args, with_action(states[t, n], action[t, n]))
            psi = ctec.encode(params["psi"], args, states[t + k, n])
            weight = args.gamma_cl ** (k - 1)
            total += weight * np.linalg.norm(phi / tau_of_phi(params, args) - psi)
            weights += weight
            calls += 2
        reward[t, n] = total / weights if args.normalize_reward and weights else total
    return reward, calls


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("temperature", "learn_tau"), [("phi", True), ("phi", False), ("logits", True)])
def test_reward_against_brute_force(start, short, normalize, temperature, learn_tau):
    _, _, done = short
    form = dict(temperature=temperature, learn_tau=learn_tau)
    args = dataclasses.replace(ARGS, normalize_reward=normalize, gamma_cl=0.6, **form)
    params = start.model.params | {"log_tau": jnp.log(0.5)}
    expected, calls = brute_force(params, args, *short)
    reward = np.asarray(reward_of(params, args, *short))
    np.testing.assert_allclose(reward, expected, atol=1e-5)
    assert reward.min() == 0.0 < np.median(reward)
    assert (reward[done] == 0).all()  # no state follows the last one of an episode
    assert calls == 2 * (7 + 21 + 28)


def test_reward_encodes_every_state_once():
    """Encoder rows for an environment and 64 steps: T + (T + 1) against two for each of T (T + 1) / 2 pairs."""
    rows = []
    forward = ctec.MLP.__call__

    def counted(self, x):
        rows.append(np.prod(x.shape[:-1]))
        return forward(self, x)

    params = jax.eval_shape(lambda: ctec.init_state(ARGS, GAME)).model.params
    futures = Futures(
        states=jax.ShapeDtypeStruct((65, 1, 6), jnp.float32),
        action=jax.ShapeDtypeStruct((64, 1), jnp.int32),
        weight=jax.ShapeDtypeStruct((1, 64, 65), jnp.float32),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctec.MLP, "__call__", counted)
        jax.eval_shape(lambda params, batch: ctec.intrinsic_reward(params, ARGS, batch), params, futures)
    assert sorted(rows) == [64, 65]
    assert 64 * 65 / sum(rows) > 20


@pytest.mark.parametrize("first_offset", [0, 1])
def test_positives_stay_in_the_episode_and_follow_the_distribution(short, first_offset):
    """Every offset's frequency, at every number of steps that may remain: 0 to 7."""
    _, _, done = short
    gamma = 0.6
    draws = 20_000
    args = dataclasses.replace(ARGS, gamma_cl=gamma, first_offset=first_offset)
    remaining = ctec.steps_remaining(done)
    assert set(np.asarray(remaining).ravel()) == set(range(8))
    futures = np.asarray(jax.vmap(lambda key: ctec.positive_times(key, args, remaining))(jax.random.split(KEY, draws)))
    assert futures.shape == (draws, 7, 3)
    for t, n in np.ndindex(done.shape):
        allowed = [k for k in range(first_offset, 8 - t) if not done[t : t + k, n].any()]
        found = futures[:, t, n] - t
        assert set(found) == set(allowed or [0])
        if len(allowed) > 1:  # chi-square: its mean is len - 1, its standard deviation sqrt(2 (len - 1))
            expected = np.array([gamma**k for k in allowed])
            expected *= draws / expected.sum()
            chi2 = sum((np.sum(found == k) - e) ** 2 / e for k, e in zip(allowed, expected))
            assert chi2 < len(allowed) - 1 + 5 * np.sqrt(2 * (len(allowed) - 1))
    # every step of every environment has its own draw
    assert abs(np.corrcoef(futures[:, 0, 1], futures[:, 0, 2])[0, 1]) < 0.03
    assert abs(np.corrcoef(futures[:, 0, 2], futures[:, 1, 2])[0, 1]) < 0.03


# ------------------------------------------------------------------------------------------- the encoders' loss
def test_l2_similarity_by_hand():
    phi = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    psi = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]])
    expected = [[-1e-4, -2, -np.sqrt(0.8)], [-np.sqrt(2), -np.sqrt(2), -np.sqrt(0.4)]]
    np.testing.assert_allclose(ctec.l2_similarity(phi, psi), expected, atol=1e-6)
    slope = jax.grad(lambda phi: ctec.l2_similarity(phi, phi).sum())(phi)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("temperature", ["phi", "logits"])
def test_contrastive_loss_in_parts(start, temperature):
    """Two parts of 4 rows: each is an InfoNCE of its own, and rows without a future count as negatives only."""
    args = dataclasses.replace(ARGS, contrastive_batch=4, logsumexp_penalty=0.1, temperature=temperature)
    obs, future = jax.random.normal(KEY, (2, 8, 6))
    pairs = Pairs(
        anchor=jnp.asarray(with_action(obs, np.arange(8))),
        positive=future,
        mask=jnp.array([1, 1, 0, 1, 1, 0, 0, 1.0]),
    )
    params = start.model.params | {"log_tau": jnp.log(0.5)}
    loss, metrics = ctec.contrastive_loss(params, args, pairs)

    phi = np.asarray(ctec.encode(params["phi"], args, pairs.anchor))
    psi = np.asarray(ctec.encode(params["psi"], args, pairs.positive))
    np.testing.assert_allclose(np.linalg.norm(phi, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(psi, axis=1), 1.0, atol=1e-5)
    losses = []
    right = []
    positive = []
    negative = []
    for rows in (range(0, 4), range(4, 8)):
        part = []
        for i in rows:
            if temperature == "phi":
                logits = {j: -np.linalg.norm(phi[i] / 0.5 - psi[j]) for j in rows}
            else:
                logits = {j: -np.linalg.norm(phi[i] - psi[j]) / 0.5 for j in rows}
            negative += [logit for j, logit in logits.items() if j != i]
            if pairs.mask[i]:
                lse = np.log(np.exp(list(logits.values())).sum())
                part.append(lse - logits[i] + 0.1 * lse**2)
                right.append(max(logits, key=logits.get) == i)
                positive.append(logits[i])
        losses.append(np.mean(part))
    np.testing.assert_allclose(loss, np.mean(losses), atol=1e-5)
    np.testing.assert_allclose(metrics["contrastive_loss"], loss)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(right))
    np.testing.assert_allclose(metrics["logits_positive"], np.mean(positive), atol=1e-5)
    np.testing.assert_allclose(metrics["logits_negative"], np.mean(negative), atol=1e-5)
    np.testing.assert_allclose(metrics["phi_variance"], phi.var(axis=0).mean(), atol=1e-6)
    np.testing.assert_allclose(metrics["psi_variance"], psi.var(axis=0).mean(), atol=1e-6)
    np.testing.assert_allclose(metrics["tau"], 0.5, rtol=1e-6)

    # the temperature of 1 that --no-learn-tau holds: other logits, and no gradient into log_tau
    fixed_args = dataclasses.replace(args, learn_tau=False)
    fixed = lambda params: ctec.contrastive_loss(params, fixed_args, pairs)[0]
    at_one, _ = ctec.contrastive_loss(params | {"log_tau": jnp.zeros(())}, args, pairs)
    np.testing.assert_allclose(fixed(params), at_one, atol=1e-6)
    assert ctec.contrastive_loss(params, fixed_args, pairs)[1]["tau"] == 1.0
    assert abs(loss - at_one) > 1e-3
    assert jax.grad(fixed)(params)["log_tau"] == 0.0


def test_minibatches_hold_every_pair_once_in_groups_of_an_environment():
    args = dataclasses.replace(ARGS, encoder_minibatches=2, rows_per_env=4)
    orders = [np.asarray(ctec.shuffled_groups(key, args, 8, 6)) for key in jax.random.split(KEY, 2)]
    for order in orders:
        assert order.shape == (2, 24)
        assert sorted(order.ravel()) == list(range(48))
        envs = order.reshape(-1, 4) % 6
        assert (envs == envs[:, :1]).all()
    assert (orders[0] != orders[1]).any()


@pytest.mark.parametrize("first_offset", [0, 1])
def test_encoders_are_trained_on_futures_of_the_same_episode(start, short, monkeypatch, first_offset):
    """A state says its time, environment and episode, and the action is the time too. A loss that looks at its pairs
    must find each step once an epoch, with a state of its episode from the first offset on; or with itself, masked, if
    there is none."""
    args = dataclasses.replace(ARGS, first_offset=first_offset)
    _, _, done = short
    time, env = np.indices((8, 3))
    episode = np.concatenate([np.zeros((1, 3)), np.cumsum(done, axis=0)])
    states = jnp.asarray(np.stack([time, env, episode, time, env, episode], axis=-1), jnp.float32)
    action = jnp.asarray(time[:-1])

    def look(params, args, pairs):
        time, env, episode = pairs.anchor[:, :3].T
        future_time, future_env, future_episode = pairs.positive[:, :3].T
        later = jnp.where(pairs.mask > 0, future_time >= time + first_offset, future_time == time)
        same = (future_env == env) & (future_episode == episode)
        own_action = jnp.argmax(pairs.anchor[:, 6:], axis=-1) == time
        metrics = {
            "good": jnp.sum(later & same & own_action),
            "pairs": jnp.sum(pairs.mask),
            "times": jnp.sum(2**time * pairs.mask),
            "own": jnp.mean(future_time == time),
        }
        return 0.0 * params["log_tau"], metrics

    monkeypatch.setattr(ctec, "contrastive_loss", look)
    _, metrics = ctec.update_encoders(args, start.model, KEY, states, action, ctec.steps_remaining(done))
    has_future = np.asarray(ctec.steps_remaining(done)) >= first_offset
    assert metrics["good"] == 7  # rows of a minibatch
    assert 3 * metrics["pairs"] == has_future.sum() == (18 if first_offset else 21)
    if first_offset:
        np.testing.assert_allclose(metrics["own"], 3 / 21, rtol=1e-6)  # the masked ones only
    else:
        assert 0.6 < metrics["own"] < 0.9  # 1 - gamma_cl, or a little more near an end
    np.testing.assert_allclose(3 * metrics["times"], (2.0 ** time[:-1])[has_future].sum())


def test_encoders_learn_on_the_pairs_of_a_rollout(start):
    """States that tell their environment: the own future is found, and each update lowers the loss."""
    args = dataclasses.replace(ARGS, encoder_epochs=20, encoder_learning_rate=1e-2, rows_per_env=1)
    states = jnp.broadcast_to(jnp.eye(6)[:3], (8, 3, 6))  # (T+1, N, 6): environment n stays in its own state
    action = jnp.zeros((7, 3), jnp.int32)
    remaining = ctec.steps_remaining(jnp.zeros((7, 3), bool))
    model = start.model
    losses = []
    for key in jax.random.split(KEY, 3):
        model, metrics = ctec.update_encoders(args, model, key, states, action, remaining)
        losses.append(float(metrics["contrastive_loss"]))
    assert losses[0] > losses[1] > losses[2]
    phi = ctec.encode(model.params["phi"], args, with_action(states[0], action[0]))
    psi = ctec.encode(model.params["psi"], args, states[0])
    np.testing.assert_array_equal(np.argmax(ctec.l2_similarity(phi, psi), axis=1), [0, 1, 2])


# ------------------------------------------------------------------------------------------------ recurrent PPO
# numbers of the network's layers in its parameters: flax counts them in the order in which they are constructed
GATES = 0
EMBEDDING = 1
POLICY_HEAD = (2, 4, 3)  # output, second and first hidden layer
VALUE_HEAD = (5, 7, 6)


def test_recurrent_network_over_a_sequence_is_the_one_step_by_step(start):
    hidden = jax.random.normal(KEY, (3, 8))
    obs = jax.random.normal(KEY, (5, 3, 6))
    first = jnp.zeros((5, 3), bool).at[2, 1].set(True)
    shake = lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape)  # the policy's last layer starts near 0
    params = jax.tree.map(shake, start.agent.params)
    last, log_probs, value = ctec.policy(params, ARGS, hidden, obs, first)
    now = hidden
    for t in range(5):
        if t == 2:
            now = now.at[1].set(0.0)  # the reset, by hand
        now, one_log_probs, one_value = ctec.policy(params, ARGS, now, obs[t : t + 1], jnp.zeros((1, 3), bool))
        np.testing.assert_allclose(one_log_probs[0], log_probs[t], atol=1e-6)
        np.testing.assert_allclose(one_value[0], value[t], atol=1e-6)
    np.testing.assert_allclose(now, last, atol=1e-6)
    assert not np.allclose(log_probs[4, 0], log_probs[4, 1])

    # the first step, by hand
    p = jax.tree.map(np.asarray, params["params"])
    dense = lambda number, x: x @ p[f"Dense_{number}"]["kernel"] + p[f"Dense_{number}"]["bias"]
    relu = lambda x: np.maximum(x, 0)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    h = np.asarray(hidden)
    reset, update, new = np.split(dense(GATES, relu(dense(EMBEDDING, np.asarray(obs[0])))), 3, axis=1)
    reset = sigmoid(reset + h @ p["recurrent"][0])
    update = sigmoid(update + h @ p["recurrent"][1])
    new = np.tanh(new + reset * (h @ p["recurrent"][2] + p["bias"]))
    h = (1 - update) * new + update * h
    one_step, one_log_probs, one_value = ctec.policy(params, ARGS, hidden, obs[:1], first[:1])
    np.testing.assert_allclose(one_step, h, atol=1e-5)
    logits, value_by_hand = (
        dense(output, relu(dense(second, relu(dense(one, h))))) for output, second, one in (POLICY_HEAD, VALUE_HEAD)
    )
    by_hand = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(one_log_probs[0], by_hand, atol=1e-4)
    np.testing.assert_allclose(one_value[0], value_by_hand[:, 0], atol=1e-4)


def test_the_network_starts_with_the_scales_of_the_craftax_baselines():
    """An orthogonal matrix times a scale has no other singular value. The gates' inputs are drawn as in flax's GRU:
    normal, of variance 1 / 64."""
    network = ctec.RecurrentActorCritic(64, 17)
    inputs = (jnp.zeros((1, 64)), jnp.zeros((1, 1, 6)), jnp.zeros((1, 1), bool))
    params = network.init(KEY, *inputs)["params"]
    expected = {EMBEDDING: 2**0.5}
    expected |= dict(zip(POLICY_HEAD, (0.01, 2.0, 2.0))) | dict(zip(VALUE_HEAD, (1.0, 2.0, 2.0)))
    for number, scale in expected.items():
        kernel = params[f"Dense_{number}"]["kernel"]
        np.testing.assert_allclose(np.linalg.svd(kernel, compute_uv=False), scale, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.svd(params["recurrent"], compute_uv=False), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.std(params[f"Dense_{GATES}"]["kernel"]), 1 / 8, rtol=0.05)
    biases = [params["bias"], *(params[f"Dense_{number}"]["bias"] for number in range(8))]
    assert not any(np.any(bias) for bias in biases)


def test_first_policy_is_nearly_uniform(start):
    first = jnp.zeros((1, 3), bool)
    _, log_probs, _ = ctec.policy(start.agent.params, ARGS, jnp.ones((3, 8)), jnp.ones((1, 3, 6)), first)
    np.testing.assert_allclose(log_probs, -np.log(17), atol=0.05)


def test_advantages_by_hand():
    args = dataclasses.replace(ARGS, gamma=0.5, gae_lambda=0.5)
    reward = jnp.array([[1.0], [2.0], [3.0]])
    value = jnp.array([[4.0], [5.0], [6.0]])
    done = jnp.array([[False], [True], [False]])
    advantage = ctec.gae(args, reward, value, done, jnp.array([8.0]))
    # step 2: 3 + 0.5 * 8 - 6 = 1; step 1 ends the episode: 2 - 5 = -3; step 0: 1 + 0.5 * 5 - 4 + 0.25 * (-3) = -1.25
    np.testing.assert_allclose(advantage[:, 0], [-1.25, -3.0, 1.0])


def test_ppo_loss_by_hand(start):
    args = dataclasses.replace(ARGS, clip=0.2, value_coef=0.5, entropy_coef=0.1)
    obs = jnp.ones((2, 1, 6))
    first = jnp.zeros((2, 1), bool)
    hidden = jnp.zeros((1, 8))
    _, log_probs, value = ctec.policy(start.agent.params, args, hidden, obs, first)
    rollout = Rollout(
        obs=obs,
        first=first,
        action=jnp.array([[0], [1]]),
        log_prob=jnp.array([[log_probs[0, 0, 0] - jnp.log(2.0)], [log_probs[1, 0, 1]]]),  # ratios 2 and 1
        value=value + 0.5,
        reward=None,
        done=None,
    )
    advantage = jnp.array([[3.0], [1.0]])  # normalised 1 and -1; the targets lie 3.5 and 1.5 above the values
    loss, metrics = ctec.ppo_loss(start.agent.params, args, hidden, rollout, advantage)
    policy_loss = -(1.2 - 1.0) / 2  # min(2 * 1, 1.2 * 1) and min(1 * -1, 1 * -1)
    value_loss = 0.5 * (3.5**2 + 1.5**2) / 2
    np.testing.assert_allclose(metrics["policy_loss"], policy_loss, atol=1e-5)
    np.testing.assert_allclose(metrics["value_loss"], value_loss, atol=1e-5)
    np.testing.assert_allclose(metrics["value_mean"], value.mean(), atol=1e-5)
    entropy = -np.mean(np.sum(np.exp(log_probs) * log_probs, axis=-1))
    np.testing.assert_allclose(metrics["entropy"], entropy, atol=1e-5)
    np.testing.assert_allclose(metrics["clipped"], 0.5)
    np.testing.assert_allclose(metrics["kl"], (2 - 1 - np.log(2)) / 2, atol=1e-5)
    np.testing.assert_allclose(loss, policy_loss + 0.5 * value_loss - 0.1 * entropy, atol=1e-4)


# -------------------------------------------------------------------------------------------------- achievements
def test_episodes_against_a_list():
    episodes = ctec.init_episodes(ARGS)
    assert all(float(value) == 0.0 for value in ctec.episode_metrics(episodes).values())  # none has ended: no 0 / 0
    rng = np.random.default_rng(0)
    known = []
    for p in (0.0, 0.3, 0.9, 0.1, 0.5):  # 0.9: more at once than the ring of 5 holds
        done = rng.random((4, 3)) < p
        unlocked = rng.random((4, 3, 22)) < 0.4
        length = rng.integers(1, 9, (4, 3))
        reward = rng.random((4, 3)).astype(np.float32)
        known += [(unlocked[t, n], length[t, n], reward[t, n]) for t, n in np.ndindex(4, 3) if done[t, n]]
        episodes = ctec.insert_episodes(episodes, *map(jnp.asarray, (done, unlocked, length, reward)))
        metrics = ctec.episode_metrics(episodes)
        assert int(metrics["episodes"]) == len(known)
        if known:
            latest_unlocked, latest_length, latest_reward = zip(*known[-5:])
            rates = np.mean(latest_unlocked, axis=0)
            np.testing.assert_allclose(metrics["achievements"], rates.sum(), rtol=1e-5)
            np.testing.assert_allclose(metrics["episode_length"], np.mean(latest_length), rtol=1e-5)
            np.testing.assert_allclose(metrics["episode_return"], np.mean(latest_reward), rtol=1e-5)
            score = np.exp(np.mean(np.log(1 + 100 * rates))) - 1
            np.testing.assert_allclose(metrics["crafter_score"], score, rtol=1e-5)
            np.testing.assert_allclose(metrics["place_plant"], rates[7], rtol=1e-5)
    assert len(known) > 10


def test_crafter_score_by_hand():
    np.testing.assert_allclose(ctec.crafter_score(jnp.ones(22)), 100.0, rtol=1e-5)
    np.testing.assert_allclose(ctec.crafter_score(jnp.zeros(22).at[0].set(1.0)), 101 ** (1 / 22) - 1, rtol=1e-5)


def test_achievement_names_are_those_of_craftax():
    from craftax.craftax_classic.constants import Achievement

    assert ctec.ACHIEVEMENTS == [x.name.lower() for x in sorted(Achievement, key=lambda x: x.value)]


# ------------------------------------------------------------------------------------------------------ the stages
def run_stage(stage, args, game, state, *inputs):
    """A stage, which may overwrite the state that it is given, on a copy of it."""
    return stage(args, game, jax.tree.map(jnp.copy, state), *inputs)


def test_collect_restarts_ended_episodes_in_new_worlds(start):
    after, (hidden, rollout), metrics = run_stage(ctec.collect, ARGS, GAME, start)
    players = jax.tree.map(np.asarray, after.players)
    obs = np.concatenate([rollout.obs, players.obs[None]])
    first = np.concatenate([rollout.first, players.first[None]])
    done = np.asarray(rollout.done)
    for t, n in np.ndindex(done.shape):
        left, world = obs[t, n, :2]
        next_left, next_world = obs[t + 1, n, :2]
        assert done[t, n] == (left == 1) == first[t + 1, n]  # the game ends when one step was left
        assert (next_world != world) == done[t, n]  # another world, or the same one a step later
        assert next_left == left - 1 or done[t, n]
    np.testing.assert_array_equal(rollout.reward, np.where(done, 1.0, 0.25))
    new_worlds = obs[1:, :, 1][done]
    assert len(set(new_worlds)) == len(new_worlds) > 2  # 7 worlds were made: none is used twice
    assert int(after.episodes.count) == done.sum() == int(metrics["episodes"])
    assert float(ctec.achievement_rates(after.episodes)[3]) == 1.0  # unlocked by the last step, before the reset
    assert (players.length[done[6]] == 0).all()
    assert (players.hidden[done[6]] == 0).all()
    np.testing.assert_allclose(rollout.log_prob, -np.log(17), atol=0.05)  # of the first, nearly uniform policy

    # the GRU starts from the hidden state that is returned, and the next rollout from where this one ended
    log_probs = ctec.policy(start.agent.params, ARGS, hidden, rollout.obs, rollout.first)[1]
    expected = np.take_along_axis(log_probs, np.asarray(rollout.action)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(rollout.log_prob, expected, atol=1e-5)
    again, (hidden, _), _ = run_stage(ctec.collect, ARGS, GAME, after)
    np.testing.assert_array_equal(hidden, players.hidden)
    assert (start.iteration, after.iteration, again.iteration) == (0, 1, 2)


def test_the_rates_of_the_random_policy_are_kept(start):
    """Those of the random iterations, here the first one: later ones leave them as they are."""
    after, *_ = run_stage(ctec.collect, ARGS, GAME, start)
    np.testing.assert_array_equal(after.random_rates, ctec.achievement_rates(after.episodes))
    assert np.sum(after.random_rates) == 1.0
    after = after.replace(random_rates=0.5 * after.random_rates)
    again, *_ = run_stage(ctec.collect, ARGS, GAME, after)
    assert_none_changed(after.random_rates, again.random_rates)


def rollout_of(short):
    """The steps of `short`, with a task reward."""
    states, action, done = short
    zeros = jnp.zeros(done.shape)
    first = np.concatenate([np.ones((1, 3), bool), done[:-1]])
    reward = jnp.arange(21.0).reshape(7, 3)
    return Rollout(states[:-1], jnp.asarray(first), action, zeros - 2.0, zeros + 0.5, reward, jnp.asarray(done))


def test_the_reward_is_that_of_the_encoders_before_their_step(start, short):
    args = dataclasses.replace(ARGS, intrinsic_coef=0.5, task_reward_coef=0.1)
    states, _, _ = short
    state = start.replace(players=start.players.replace(obs=states[-1]))
    rollout = rollout_of(short)
    after, reward, metrics = run_stage(ctec.learn_bonus, args, GAME, state, state.players.hidden, rollout)
    expected, _ = brute_force(state.model.params, args, *short)
    np.testing.assert_allclose(reward, 0.5 * expected + 0.1 * np.asarray(rollout.reward), atol=1e-5)
    np.testing.assert_allclose(metrics["reward_mean"], expected.mean(), atol=1e-5)
    np.testing.assert_allclose(metrics["reward_std"], expected.std(), atol=1e-5)
    assert_all_changed(state.model.params, after.model.params)
    assert_none_changed((state.agent, state.players), (after.agent, after.players))


def test_the_agent_gets_advantages_and_an_annealed_step_size(start, short, monkeypatch):
    args = dataclasses.replace(ARGS, gamma=0.5, gae_lambda=0.5, learning_rate=1e-3, total_timesteps=21 * 10)
    states, _, done = short
    hidden = jnp.ones((3, 8))
    players = start.players.replace(obs=states[-1], hidden=hidden, first=jnp.asarray(done[-1]))
    state = start.replace(players=players, iteration=jnp.int32(4))
    rollout = rollout_of(short)
    reward = np.asarray(rollout.reward)

    def look(args, agent, learning_rate, key, hidden, rollout, advantage):
        return agent, {"learning_rate_seen": learning_rate, "advantages": advantage}

    monkeypatch.setattr(ctec, "update_ppo", look)
    _, metrics = run_stage(ctec.learn_policy, args, GAME, state, hidden, rollout, rollout.reward)
    np.testing.assert_allclose(metrics["learning_rate_seen"], 7e-4, rtol=1e-5)  # 3 of 10 iterations are over
    np.testing.assert_allclose(metrics["learning_rate"], 7e-4, rtol=1e-5)
    squares = [np.sum(np.square(x)) for x in jax.tree.leaves((state.model.params, state.agent.params))]
    np.testing.assert_allclose(metrics["parameter_norm"], np.sqrt(np.sum(squares)), rtol=1e-5)
    _, _, last_value = ctec.policy(state.agent.params, args, hidden, states[-1:], players.first[None])
    next_value = np.asarray(last_value[0])
    advantage = np.zeros(3)
    for t in reversed(range(7)):
        goes_on = 1.0 - done[t]
        advantage = reward[t] + 0.5 * goes_on * next_value - 0.5 + 0.25 * goes_on * advantage
        next_value = np.full(3, 0.5)
        np.testing.assert_allclose(metrics["advantages"][t], advantage, atol=1e-4)


def test_task_reward_alone_trains_no_encoder_and_learns():
    """One compilation, encoders untouched, and the policy prefers what pays: action 0 in a game that pays for it."""

    class Paid(Game):
        def step(self, key, world, action):
            world, obs, _, done = super().step(key, world, action)
            return world, obs, (action == 0).astype(jnp.float32), done

    steps = dict(num_envs=24, total_timesteps=24 * 7 * 60)
    args = dataclasses.replace(ARGS, task_reward_coef=1.0, intrinsic_coef=0.0, learning_rate=3e-3, **steps)
    game = Paid()
    first = ctec.init_state(args, game)
    state = ctec.init_state(args, game)
    stages = (ctec.collect, ctec.learn_bonus, ctec.learn_policy)
    before = [stage._cache_size() for stage in stages]
    for _ in range(60):
        state, rollout, metrics = ctec.collect(args, game, state)
        state, reward, model_metrics = ctec.learn_bonus(args, game, state, *rollout)
        state, policy_metrics = ctec.learn_policy(args, game, state, *rollout, reward)
    assert [stage._cache_size() for stage in stages] == [size + 1 for size in before]
    assert_none_changed(first.model, state.model)
    assert model_metrics == {}
    assert float(policy_metrics["entropy"]) < 1.0
    assert float(metrics["episode_return"]) > 0.7 * float(metrics["episode_length"])


# -------------------------------------------------------------------------------------------------------- worlds
def test_worlds_that_are_made_together_are_those_that_are_made_alone():
    """The maps of the real game; without the rest of a world they compile in a fraction of the time. More than 8 of
    them, or 32,768 places: where XLA for CPUs has computed wrong sums before (jaxlib 0.10.2)."""
    env = ctec.make_craftax()
    together = np.asarray(jax.jit(lambda key: ctec.init_players(ctec.Args(), env, key, 12).world.map)(KEY))
    alone = jax.jit(lambda key: env.reset(key)[0].map)
    for number, key in enumerate(jax.random.split(KEY, 12)):
        np.testing.assert_array_equal(together[number], alone(key))
    assert len(np.unique(together.reshape(12, -1), axis=0)) == 12
