"""ctec_ablations_sac_brax.py: by default C-TeC bit for bit; each variant against NumPy, by hand and by its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SMALL_SAC, assert_all_changed, assert_none_changed, assert_one_line, refusal, rows
from test_ctec_sac_brax import filled_replay, numpy_encode

import ctec_ablations_sac_brax as ablations
import ctec_sac_brax as ctec
from ctec_ablations_sac_brax import Args, Pairs

# it learns from the first iteration on
SMALL = SMALL_SAC | dict(learning_starts=16, agent_width=8, encoder_width=8, representation_size=4, multiplier=0.25)
ARGS = Args(env="point_u_maze", num_envs=3, batch_size=512, replay_size=40, agent_width=8, encoder_width=8,
            representation_size=4)  # fmt: skip
ENV = ablations.make_env("point_u_maze")
LOGITS = jnp.log(
    jnp.array([[1.0, 3.0, 2.0], [2.0, 6.0, 4.0], [5.0, 1.0, 4.0]])
)  # ratios that one can add in one's head


def variant(**changes):
    return dataclasses.replace(ARGS, **changes)


def named_leaves(state):
    return ablations.named_leaves(state)


def params_of(args, seed=0):
    return ablations.init_state(dataclasses.replace(args, seed=seed), ENV).model.params


def random_pairs(rows=6):
    key_anchor, key_positive = jax.random.split(jax.random.PRNGKey(9))
    mask = jnp.ones(rows).at[-1].set(0.0)
    return Pairs(jax.random.normal(key_anchor, (rows, 6)), jax.random.normal(key_positive, (rows, 4)), mask)


# ---------------------------------------------------------------------------------------- the defaults are C-TeC
def play(script, args, iterations, state=None):
    """The state after so many iterations, and the metrics of each."""
    state = script.init_state(args, ENV) if state is None else state
    metrics = []
    for _ in range(iterations):
        state, collected = script.collect(args, ENV, state)
        state, learned = script.learn(args, ENV, state)
        metrics.append(jax.device_get(collected | learned))
    return state, metrics


def test_the_defaults_are_ctec_bit_for_bit():
    ours, our_metrics = play(ablations, Args(**SMALL), 4)
    theirs, their_metrics = play(ctec, ctec.Args(**SMALL), 4)
    for a, b in zip(our_metrics, their_metrics, strict=True):
        assert a.pop("gamma_cl") == np.float32(0.99)
        assert len(b) > 20 and b.pop("success") == 0
        np.testing.assert_equal(a, b)
    assert_none_changed(named_leaves(ours), named_leaves(theirs))


# ------------------------------------------------------------------------------------------------------- losses
def test_symmetric_infonce_by_hand():
    mask = jnp.array([1.0, 1.0, 0.0])
    over_rows = np.log([6 / 1, 12 / 6])
    over_columns = np.log([8 / 1, 10 / 6])
    ours = ablations.symmetric_infonce(LOGITS, mask, 0.0)
    np.testing.assert_allclose(ours, over_rows.mean() + over_columns.mean(), rtol=1e-5)
    both = ablations.infonce(LOGITS, mask, 0.1) + ablations.infonce(LOGITS.T, mask, 0.1)
    np.testing.assert_allclose(ablations.symmetric_infonce(LOGITS, mask, 0.1), both)


def test_nce_by_hand():
    """sigmoid(log r) is r / (1 + r)."""
    first = -np.log([1 / 2, 1 / 4, 1 / 3]).mean()  # own 1, others 3 and 2
    second = -np.log([1 / 3, 6 / 7, 1 / 5]).mean()
    np.testing.assert_allclose(ablations.nce(LOGITS, jnp.array([1.0, 1.0, 0.0]), 0.0), (first + second) / 2, rtol=1e-5)


def test_flatnce_by_hand_and_its_gradient():
    """The value is 1. The gradient is InfoNCE's without j = i: of log(sum of the others) - log(own)."""
    mask = jnp.array([1.0, 1.0, 0.0])
    value, grad = jax.value_and_grad(ablations.flatnce)(LOGITS, mask, 0.0)
    assert value == 1.0
    np.testing.assert_allclose(grad, np.array([[-1, 3 / 5, 2 / 5], [2 / 6, -1, 4 / 6], [0, 0, 0]]) / 2, atol=1e-6)
    infonce = jax.grad(ablations.infonce)(LOGITS, mask, 0.0)  # pulls the less, the surer it is; the same direction
    share_of_others = np.array([5 / 6, 6 / 12, 0])[:, None]
    np.testing.assert_allclose(infonce, grad * share_of_others, atol=1e-6)


def test_fb_by_hand():
    first = -1 + (9 + 4) / (2 * 2)
    second = -6 + (4 + 16) / (2 * 2)
    np.testing.assert_allclose(ablations.fb(LOGITS, jnp.array([1.0, 1.0, 0.0]), 0.0), (first + second) / 2, rtol=1e-5)


@pytest.mark.parametrize("loss", ablations.LOSSES)
def test_every_loss_pulls_positives_together_and_leaves_masked_rows_alone(loss):
    grad = np.asarray(jax.grad(ablations.LOSSES[loss])(LOGITS - 3.0, jnp.array([1.0, 1.0, 0.0]), 0.0))
    assert np.all(np.diag(grad)[:2] < 0)
    others = grad[:2] - np.diag(np.diag(grad))[:2]
    assert np.all(others >= 0) and np.all(others.sum(axis=1) > 0)
    if loss != "symmetric_infonce":  # there a masked row is a negative of the columns
        assert np.all(grad[2] == 0)


@pytest.mark.parametrize("loss", ablations.LOSSES)
def test_every_loss_learns_a_toy_problem(loss):
    """Four anchors and their futures: after some steps each one finds its own."""
    args = variant(loss=loss, learning_rate=3e-3)
    pairs = Pairs(jnp.eye(4, 6), jnp.eye(4), jnp.ones(4))
    optimizer = ablations.optax.adam(args.learning_rate)

    @jax.jit
    def learn(model):
        step = lambda model, _: ablations.gradient_update(ablations.contrastive_loss, model, optimizer, args, pairs)
        return jax.lax.scan(step, model, length=300)

    params = params_of(args)
    first = ablations.Model(params, optimizer.init(params))
    model, metrics = learn(first)
    gap = metrics["logits_positive"] - metrics["logits_negative"]
    assert metrics["accuracy"][-1] == 1.0 and gap[-1] > gap[0] + 1.0
    assert_all_changed(first.params["phi"]["params"]["Dense_2"], model.params["phi"]["params"]["Dense_2"])
    assert ("bias" in model.params) == (loss == "nce")
    if loss == "nce":  # without it all probabilities of a distance would be below 1/2
        assert metrics["logits_positive"][-1] > 0 > metrics["logits_negative"][-1]


# ------------------------------------------------------------------------------------------------- similarities
@pytest.mark.parametrize(
    "name,plain",
    {
        "l1": lambda a, b: -np.abs(a - b).sum(),
        "l2": lambda a, b: -np.linalg.norm(a - b),
        "l2_squared": lambda a, b: -((a - b) ** 2).sum(),
        "dot": lambda a, b: a @ b,
    }.items(),
)
def test_similarities_against_a_loop(name, plain):
    rng = np.random.default_rng(0)
    phi = rng.normal(size=(5, 4)).astype(np.float32)
    psi = rng.normal(size=(5, 4)).astype(np.float32)
    expected = [[plain(a, b) for b in psi] for a in phi]
    np.testing.assert_allclose(ablations.SIMILARITIES[name](phi, psi), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ablations.ROW_SIMILARITIES[name](phi, psi), np.diag(expected), rtol=1e-4, atol=1e-5)
    grads = jax.grad(lambda x: jnp.sum(ablations.SIMILARITIES[name](x, x)))(jnp.asarray(phi))  # distances of 0
    assert np.all(np.isfinite(grads))


@pytest.mark.parametrize("rows_of_a_batch", [6, 70])  # less than a piece of 32, and two pieces and a rest
def test_monolithic_critic_against_a_loop(rows_of_a_batch):
    args = variant(critic="monolithic", tau=0.5)
    params = params_of(args)
    pairs = random_pairs(rows_of_a_batch)
    f = lambda i, j: numpy_encode(params["f"], np.concatenate([pairs.anchor[i], pairs.positive[j]]))[0]
    expected = np.array([[f(i, j) for j in range(rows_of_a_batch)] for i in range(rows_of_a_batch)])
    np.testing.assert_allclose(ablations.monolithic_similarity(params, args, pairs), expected, atol=1e-5)
    loss, metrics = ablations.contrastive_loss(params, args, pairs)
    logits = expected / 0.5
    rows_loss = np.log(np.exp(logits).sum(axis=1)) - np.diag(logits)
    np.testing.assert_allclose(loss, rows_loss[:-1].mean(), rtol=1e-4)
    assert metrics["tau"] == 0.5 and "phi_variance" not in metrics
    reward = ablations.intrinsic_reward(params, args, pairs)
    np.testing.assert_allclose(reward, np.append(-np.diag(expected)[:-1], 0.0), atol=1e-5)


def test_monolithic_critic_is_cut_into_pieces():
    """All activations at once would take 512 x 512 x 64 floats a layer, 67 MB."""
    args = variant(critic="monolithic", encoder_width=64)
    params = jax.eval_shape(lambda: params_of(args))
    rows_of = lambda size: jax.ShapeDtypeStruct((512, size), jnp.float32)
    pairs = Pairs(rows_of(6), rows_of(4), jax.ShapeDtypeStruct((512,), jnp.float32))
    grad = jax.jit(jax.grad(lambda *x: ablations.contrastive_loss(x[0], args, x[1])[0]))
    assert grad.lower(params, pairs).compile().memory_analysis().temp_size_in_bytes < 4 * 512 * 512 * 64 / 2


# ------------------------------------------------------------------------------------------------------ rewards
@pytest.mark.parametrize("features", ["batch", "unit", "none"])
def test_rewards_of_both_directions_against_numpy(features):
    """Six rows, the last without a future, and phi / 2. The marginal's future is that of the row three further on."""
    args = variant(reward_features=features)
    params = params_of(args) | {"log_tau": jnp.log(2.0)}
    pairs = random_pairs()
    phi = numpy_encode(params["phi"], pairs.anchor)
    psi = numpy_encode(params["psi"], pairs.positive)
    normal = {
        "batch": lambda x: x / np.linalg.norm(x[:5], axis=0),
        "unit": lambda x: x / np.linalg.norm(x, axis=1, keepdims=True),
        "none": lambda x: x,
    }[features]
    distance = np.abs(normal(phi)[:, None] / 2 - normal(psi)).sum(axis=-1)
    reverse = ablations.intrinsic_reward(params, args, pairs)
    forward = ablations.intrinsic_reward(params, dataclasses.replace(args, reward_kl="forward"), pairs)
    np.testing.assert_allclose(reverse, np.append(np.diag(distance)[:5], 0), rtol=1e-4)
    np.testing.assert_allclose(forward, [*(-distance[i, (i + 3) % 6] for i in range(5)), 0], rtol=1e-4)


def test_without_normalisation_the_loss_has_none_either():
    args = variant(reward_features="none", tau=1.0)
    params = params_of(args)
    pairs = random_pairs()
    phi = numpy_encode(params["phi"], pairs.anchor)
    psi = numpy_encode(params["psi"], pairs.positive)
    logits = -np.abs(phi[:, None] - psi).sum(axis=-1)
    rows_loss = np.log(np.exp(logits).sum(axis=1)) - np.diag(logits)
    np.testing.assert_allclose(ablations.contrastive_loss(params, args, pairs)[0], rows_loss[:5].mean(), rtol=1e-4)


def test_a_fixed_tau_is_used_and_not_learned():
    pairs = random_pairs()
    params = params_of(ARGS) | {"log_tau": jnp.log(3.0)}  # is not read
    grad = jax.grad(lambda params: ablations.contrastive_loss(params, variant(tau=0.25), pairs)[0])(params)
    assert grad["log_tau"] == 0
    divided = [variant(tau=tau, temperature="logits") for tau in (0.25, 1.0)]
    logits = [ablations.contrastive_loss(params, args, pairs)[1]["logits_negative"] for args in divided]
    np.testing.assert_allclose(logits[0], 4 * logits[1], rtol=1e-5)


@pytest.mark.parametrize("temperature", ["phi", "logits"])
def test_where_tau_divides(temperature):
    """phi before the distance, in loss and reward; or C, in the loss alone."""
    args = variant(temperature=temperature, tau=0.5, reward_features="unit")
    params = params_of(args)
    pairs = random_pairs()
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    phi = unit(numpy_encode(params["phi"], pairs.anchor))
    psi = unit(numpy_encode(params["psi"], pairs.positive))
    whole = -np.abs(phi[:, None] / 0.5 - psi).sum(axis=-1)
    plain = -np.abs(phi[:, None] - psi).sum(axis=-1)
    logits, reward = (whole, -np.diag(whole)) if temperature == "phi" else (plain / 0.5, -np.diag(plain))
    rows_loss = np.log(np.exp(logits).sum(axis=1)) - np.diag(logits)
    np.testing.assert_allclose(ablations.contrastive_loss(params, args, pairs)[0], rows_loss[:5].mean(), rtol=1e-4)
    np.testing.assert_allclose(ablations.intrinsic_reward(params, args, pairs), np.append(reward[:5], 0), rtol=1e-4)


# ----------------------------------------------------------------------------------------------------- sampling
@pytest.mark.parametrize("remaining", [1, 7])
def test_uniform_offsets(remaining):
    draws = np.asarray(ablations.uniform_offset(jax.random.PRNGKey(0), jnp.full(50_000, remaining), 0.5))
    frequency = np.bincount(draws, minlength=remaining + 1) / len(draws)
    assert frequency[0] == 0 and len(frequency) == remaining + 1
    np.testing.assert_allclose(frequency[1:], 1 / remaining, atol=0.01)
    assert ablations.uniform_offset(jax.random.PRNGKey(0), jnp.array(0), 0.5) == 0


def long_replay(time):
    """One environment, one endless trajectory of 400 stored steps; an observation says when it was."""
    obs = jnp.zeros((400, 1, 4)).at[:, 0, 0].set(jnp.arange(400.0) + time - 400)
    obs = jnp.roll(obs, time % 400, axis=0)
    no = jnp.zeros((400, 1), bool)
    return ctec.Replay(obs, jnp.zeros((400, 1, 2)), no, no, jnp.int32(time))


def test_the_schedule_reaches_the_sampler():
    """1,600 steps in the one environment: gamma_cl goes from 0.5 to 0.95, and the mean offset from 2 to 20."""
    args = Args(env="point_u_maze", num_envs=1, unroll_length=16, total_timesteps=1600, replay_size=400,
                batch_size=2048, gamma_cl=0.95, gamma_cl_start=0.5)  # fmt: skip

    @jax.jit
    def offsets(replay):
        replay = ablations.index_trajectories(replay)
        batch = ablations.sample_transitions(jax.random.PRNGKey(0), args, replay)
        pairs = ablations.sample_future_pairs(jax.random.PRNGKey(1), args, ENV, replay, batch)
        return pairs.positive[:, 0] - batch.time, batch.time - (replay.time - 400), ablations.gamma_cl_now(args, replay)

    means = []
    for time, gamma in ((400, 0.6125), (800, 0.725), (1600, 0.95)):
        offset, age, now = offsets(long_replay(time))
        np.testing.assert_allclose(now, gamma, rtol=1e-6)
        means.append(float(jnp.mean(offset[age < 250])))  # nothing is cut off by the end there
        np.testing.assert_allclose(means[-1], 1 / (1 - gamma), rtol=0.1)
    assert offsets._cache_size() == 1  # one program: gamma_cl is traced
    np.testing.assert_allclose(ablations.gamma_cl_now(args, long_replay(1600).replace(time=0)), 0.5)


@pytest.mark.parametrize("steps", [21, 40, 98])  # not full, just full, wrapped
@pytest.mark.parametrize("factor", [2, 8])
def test_a_batch_has_so_many_rows_of_each_trajectory(steps, factor):
    """An observation is (time, env, trajectory)."""
    args = variant(repetition_factor=factor)
    replay = ablations.index_both_ends(filled_replay(steps)[0])
    batch = ablations.sample_transitions(jax.random.PRNGKey(1), args, replay)
    time, env, trajectory = np.asarray(batch.obs, int).T
    np.testing.assert_array_equal(batch.time, time)
    np.testing.assert_array_equal(batch.env_index, env)
    assert len(time) == 512
    for x in (env, trajectory):  # groups of rows of one trajectory
        assert np.all(x.reshape(-1, factor) == x.reshape(-1, factor)[:, :1])
    # all stored steps but the newest ones, each as often as the others
    stored = range(max(0, steps - 40), steps - 1)
    assert set(time) == set(stored)
    more = variant(repetition_factor=factor, batch_size=2**16)
    drawn = ablations.sample_transitions(jax.random.PRNGKey(2), more, replay)
    frequency = np.bincount(np.asarray(drawn.time) * 3 + np.asarray(drawn.env_index))[3 * stored[0] :] / 2**16
    np.testing.assert_allclose(frequency, 1 / (3 * len(stored)), rtol=0.25)


# --------------------------------------------------------------------------------------------------- whole runs
VARIANTS = {
    "losses": dict(loss="nce", similarity="l2", tau=0.5, repetition_factor=4, gamma_cl_start=0.1),
    "critic": dict(critic="monolithic", representation_size=64, future_sampling="uniform", reward_kl="forward"),
    "features": dict(loss="flatnce", similarity="dot", reward_features="none", future_state="goal"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_of_variants_goes_on_bit_for_bit(name, tmp_path):
    args = Args(**SMALL | VARIANTS[name])
    state, _ = play(ablations, args, 2)
    ablations.save_checkpoint(tmp_path / "checkpoint.npz", state)
    loaded = ablations.load_checkpoint(
        tmp_path / "checkpoint.npz", jax.eval_shape(lambda: ablations.init_state(args, ENV))
    )
    whole, whole_metrics = play(ablations, args, 1, state)
    resumed, metrics = play(ablations, args, 1, loaded)
    np.testing.assert_equal(metrics, whole_metrics)
    assert_none_changed(resumed, whole)
    first = ablations.init_state(args, ENV)
    assert_all_changed(
        {name: x for name, x in first.model.params.items() if name != "log_tau" or args.tau is None},
        {name: x for name, x in whole.model.params.items() if name != "log_tau" or args.tau is None},
    )


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--repetition-factor", "3"], "must divide batch_size"),
        (["--repetition-factor", "1024"], "two trajectories"),
        (["--repetition-factor", "0"], "above 0"),
        (["--gamma-cl-start", "1.0"], "below 1"),
        (["--gamma-cl-start", "-0.5"], "above 0"),
        (["--future-sampling", "uniform", "--gamma-cl", "0.9"], "uniform"),
        (["--future-sampling", "uniform", "--gamma-cl-start", "0.9"], "uniform"),
        (["--loss", "fb", "--logsumexp-penalty", "0.1"], "InfoNCE"),
        (["--critic", "monolithic", "--similarity", "l2"], "--similarity l2"),
        (["--critic", "monolithic", "--reward-features", "unit"], "--reward-features unit"),
        (["--critic", "monolithic", "--representation-size", "32"], "--representation-size 32"),
        (["--tau", "0"], "above 0"),
    ],
)
def test_flags_that_make_no_sense(capsys, flags, words):
    code, message = refusal(capsys, ablations, ["--env", "point_u_maze", *flags])
    assert code == 2
    assert_one_line(message, words)


def test_a_run_with_a_schedule(tmp_path):
    """From end to end; the discount of each iteration, and the arguments that a resumed run would have."""
    args = Args(**SMALL | VARIANTS["losses"] | dict(total_timesteps=4 * 8 * 16, run_dir=str(tmp_path)))
    folder = ablations.main(args)["folder"]
    gamma = [float(row["gamma_cl"]) for row in rows(folder)]
    np.testing.assert_allclose(gamma, 0.1 + (0.99 - 0.1) * np.arange(1, 5) / 4, rtol=1e-5)
    again = ablations.parse_args(["--resume", folder])
    assert dataclasses.replace(again, resume="") == args
