"""Learning, on the point maze with a fixed seed: SAC follows a known reward, and C-TeC explores."""

import jax.numpy as jnp
import numpy as np

import ctec_sac_brax as ctec
import mbrl_sac_brax as mbrl
import random_brax


def train(script, *flags):
    """The state and the metrics at the end of a run with the laptop preset."""
    args = script.parse_args(["--preset", "laptop", *flags])
    env = script.make_env(args.env)
    state = script.init_state(args, env)
    for _ in range(args.num_iterations):
        state, metrics, _ = script.train_iteration(args, env, state)
    return state, {name: float(value) for name, value in metrics.items()}


def rewarded(monkeypatch, reward):
    """A script with SAC whose agents get reward(batch) instead of the bonus."""
    monkeypatch.setattr(mbrl, "intrinsic_reward", lambda params, args, batch: batch.has_next * reward(batch))
    mbrl.train_iteration.clear_cache()
    return mbrl


def test_sac_learns_a_known_reward(monkeypatch):
    """The reward is x + y, whose maximum lies around a bend, in the corner that is opposite to the start."""
    script = rewarded(monkeypatch, lambda batch: (batch.next_obs[:, 0] + batch.next_obs[:, 1]) / 4.0)
    sizes = "--num-envs 64 --batch-size 128 --agent-width 64 --model-width 16 --multiplier 0.25"
    flags = f"--env point_u_maze --total-timesteps 320000 --learning-rate 1e-3 --gamma 0.95 {sizes}"
    replay = train(script, *flags.split())[0].replay
    ends = np.asarray(replay.obs)[np.asarray(replay.truncated)][-64:, :2]
    assert len(ends) == 64
    assert np.mean(np.all(ends > 12, axis=1)) > 0.9  # the corner's walls stop a point at 13.6


def test_explores_more_than_no_bonus_and_than_random_actions(monkeypatch):
    flags = ("--env", "point_hardest_maze", "--total-timesteps", "600000")
    metrics = train(ctec, *flags)[1]
    without = train(rewarded(monkeypatch, lambda batch: jnp.zeros(len(batch.obs))), *flags)[1]
    random = train(random_brax, *flags)[1]
    assert metrics["coverage"] > 1.2 * without["coverage"]
    assert metrics["coverage"] > 1.5 * random["coverage"]
    # the encoders have learned: the own future is found far more often than by chance, and they have not collapsed
    assert metrics["accuracy"] > 4 / ctec.PRESETS["laptop"]["batch_size"]
    assert metrics["logits_positive"] > metrics["logits_negative"] + 0.5
    assert min(metrics["phi_variance"], metrics["psi_variance"]) > 1e-3
