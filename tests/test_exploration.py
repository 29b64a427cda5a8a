"""C-TeC explores: on the point maze, with a fixed seed, it covers far more than uniform random actions do."""

import ctec_sac_brax as ctec
import random_brax


def metrics_after(script, steps):
    args = script.parse_args(["--env", "point_hardest_maze", "--preset", "laptop", "--total-timesteps", str(steps)])
    env = script.make_env(args.env)
    state = script.init_state(args, env)
    for _ in range(args.num_iterations):
        state, metrics, _ = script.train_iteration(args, env, state)
    return {name: float(value) for name, value in metrics.items()}


def test_explores_more_than_random_actions():
    metrics = metrics_after(ctec, 600_000)
    assert metrics["coverage"] > 1.3 * metrics_after(random_brax, 600_000)["coverage"]
    # the encoders have learned: the own future is found far more often than by chance, and they have not collapsed
    assert metrics["accuracy"] > 4 / ctec.PRESETS["laptop"]["batch_size"]
    assert metrics["logits_positive"] > metrics["logits_negative"] + 0.5
    assert min(metrics["phi_variance"], metrics["psi_variance"]) > 1e-3
