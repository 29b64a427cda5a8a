"""Coverage of uniform random actions: the same environment, number of steps, episodes and bins as a script's preset.

    python benchmarks/random_coverage.py --env point_hardest_maze --preset laptop --seeds 11 12 13 14 15
"""
import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import ctec_sac_brax as script


def random_coverage(args):
    env = script.make_env(args.env)

    def step(carry, key):
        now, episode_step, visited = carry
        key_action, key_start = jax.random.split(key)
        action = jax.random.uniform(key_action, (args.num_envs, env.action_size), minval=-1.0, maxval=1.0)
        after = jax.vmap(env.step)(now, action)
        done = after.terminated | (episode_step + 1 >= args.episode_length)
        starts = jax.vmap(env.reset)(jax.random.split(key_start, args.num_envs))
        now = jax.tree.map(lambda a, b: jnp.where(done.reshape(-1, *[1] * (b.ndim - 1)), a, b), starts, after)
        return (now, jnp.where(done, 0, episode_step + 1), visited.at[script.bin_index(env, after.obs)].set(True)), None

    @jax.jit
    def run(key):
        key_start, key_steps = jax.random.split(key)
        now = jax.vmap(env.reset)(jax.random.split(key_start, args.num_envs))
        carry = now, jnp.zeros(args.num_envs, jnp.int32), jnp.zeros(np.prod(env.grid), bool)
        steps = args.num_iterations * args.unroll_length
        return jnp.sum(jax.lax.scan(step, carry, jax.random.split(key_steps, steps))[0][2])

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14, 15])
    seeds, rest = parser.parse_known_args()
    args = script.parse_args(rest)
    run = random_coverage(args)
    counts = np.array([int(run(jax.random.PRNGKey(seed))) for seed in seeds.seeds])
    error = counts.std(ddof=1) / np.sqrt(len(counts)) if len(counts) > 1 else 0.0
    steps = args.num_iterations * args.unroll_length * args.num_envs
    print(f"{args.env}, {steps:,} uniform random steps: {' '.join(map(str, counts))}  mean {counts.mean():.0f} +- {error:.0f} (standard error)")
