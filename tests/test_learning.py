"""C-TeC explores: on the point maze, with a fixed seed, it covers far more than uniform random actions do."""
import sys
from pathlib import Path

import jax

import ctec_sac_brax as ctec

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from random_coverage import random_coverage


def test_explores_more_than_random_actions():
    args = ctec.parse_args(["--env", "point_hardest_maze", "--preset", "laptop", "--total-timesteps", "600000"])
    env = ctec.make_env(args.env)
    state = ctec.init_state(args, env)
    for _ in range(args.num_iterations):
        state, metrics, _ = ctec.train_iteration(args, env, state)
    random = int(random_coverage(args)(jax.random.PRNGKey(1)))
    assert float(metrics["coverage"]) > 1.3 * random
    # the encoders have learned: the own future is found far more often than by chance, and they have not collapsed
    assert float(metrics["accuracy"]) > 4 / args.batch_size
    assert float(metrics["logits_positive"]) > float(metrics["logits_negative"]) + 0.5
    assert min(float(metrics["phi_variance"]), float(metrics["psi_variance"])) > 1e-3
