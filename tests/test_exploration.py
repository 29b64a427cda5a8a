"""Learning, on the point maze with a fixed seed: SAC follows a known reward, and C-TeC explores."""

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
        state, metrics = script.collect(args, env, state)
        if hasattr(script, "learn") and state.iteration >= args.first_update:
            state, learn_metrics = script.learn(args, env, state)
            metrics |= learn_metrics
    return state, {name: float(value) for name, value in metrics.items()}


def test_sac_learns_a_known_reward(monkeypatch):
    """The reward is x + y, whose maximum lies around a bend, in the corner that is opposite to the start."""
    reward = lambda params, args, batch: batch.has_next * (batch.next_obs[:, 0] + batch.next_obs[:, 1]) / 4.0
    monkeypatch.setattr(mbrl, "intrinsic_reward", reward)
    mbrl.learn.clear_cache()
    sizes = "--num-envs 64 --batch-size 128 --agent-width 64 --model-width 16 --multiplier 0.25"
    flags = f"--env point_u_maze --total-timesteps 320000 --learning-rate 1e-3 --gamma 0.95 {sizes}"
    replay = train(mbrl, *flags.split())[0].replay
    ends = np.asarray(replay.obs)[np.asarray(replay.truncated)][-64:, :2]
    assert len(ends) == 64
    assert np.mean(np.all(ends > 12, axis=1)) > 0.9  # the corner's walls stop a point at 13.6


def test_explores_more_than_no_bonus_and_than_random_actions():
    flags = ("--env", "point_hardest_maze", "--total-timesteps", "600000")
    metrics = train(ctec, *flags, "--multiplier", "0.032")[1]
    without = train(ctec, *flags, "--multiplier", "0.032", "--intrinsic-coef", "0")[1]
    random = train(random_brax, *flags)[1]
    assert metrics["coverage"] > 1.2 * without["coverage"]
    assert metrics["coverage"] > 1.5 * random["coverage"]
    # the encoders have learned: the own future is found far more often than by chance, and they have not collapsed
    assert metrics["accuracy"] > 4 / ctec.PRESETS["laptop"]["default"]["batch_size"]
    assert metrics["logits_positive"] > metrics["logits_negative"] + 0.5
    assert min(metrics["phi_variance"], metrics["psi_variance"]) > 1e-3
