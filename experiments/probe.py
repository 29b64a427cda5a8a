"""What C-TeC's reward correlates with, in the replay of a run that is over or stopped.

    python experiments/probe.py runs/<folder>

The folder is one of ctec_sac_brax.py, or of experiments/remedies.py: then it shows what C-TeC's own reward would be.
Prints, for 2^14 transitions: the mean reward by the distance of s from the start, how much it grows with each metre,
and its rank correlations with that distance, with the way from s to s_f, and with the number of steps between them.
"""

import functools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ctec_sac_brax as ctec  # noqa: E402

EDGES = (0, 1, 2, 3, 4, 6, 8, 12, math.inf)  # metres from the start


@functools.partial(jax.jit, static_argnums=(0, 1))
def sample_rewards(args, env, state):
    """Of 2^14 or more transitions: reward, metres from the start to s and from s to s_f, steps to s_f, mask."""
    replay = ctec.index_trajectories(state.replay)

    def sample(key):
        key_batch, key_future = jax.random.split(key)
        batch = ctec.sample_batch(key_batch, args, replay)
        pairs = ctec.sample_futures(key_future, args, env, replay, batch)
        remaining = replay.ends[batch.time % len(replay.obs), batch.env_index] - batch.time
        offset = ctec.truncated_geometric(key_future, remaining, args.gamma_cl)  # as in sample_futures
        reward = ctec.intrinsic_reward(state.model.params, args, pairs)
        metres = lambda a, b: jnp.linalg.norm(a[..., :2] - b[..., :2], axis=-1)
        return reward, metres(batch.obs, env.start), metres(pairs.positive, batch.obs), offset, pairs.mask

    keys = jax.random.split(state.key, math.ceil(2**14 / args.batch_size))
    return tuple(x.ravel() for x in jax.lax.map(sample, keys))


def report(args, env, state):
    """The lines that are printed."""
    *columns, mask = (np.asarray(x) for x in sample_rewards(args, env, state))
    reward, distance, way, offset = (x[mask > 0] for x in columns)
    lines = ["| metres from the start | share of the replay | reward |", "|---|---|---|"]
    for low, high in zip(EDGES, EDGES[1:]):
        here = reward[(low <= distance) & (distance < high)]
        if len(here):
            place = f"{low} to {high}" if high < math.inf else f"{low} or more"
            lines.append(f"| {place} | {len(here) / len(reward):.1%} | {here.mean():.2f} ± {here.std():.2f} |")
    slope = np.polyfit(distance, reward, 1)[0]
    explained = np.corrcoef(distance, reward)[0, 1] ** 2
    lines.append(f"\nreward {reward.mean():.2f} ± {reward.std():.2f}, {slope:+.3f} for each metre from the start")
    lines.append(f"the distance from the start explains {explained:.1%} of its variance")
    correlations = {"metres from the start": distance, "metres to s_f": way, "steps to s_f": offset}
    words = ", ".join(f"{name} {spearmanr(reward, x)[0]:.2f}" for name, x in correlations.items())
    return [*lines, f"rank correlations: {words}"]


def main(folder: tyro.conf.Positional[Path]):
    args = ctec.parse_args(["--resume", str(folder)])
    env = ctec.make_env(args.env)
    template = jax.eval_shape(functools.partial(ctec.init_state, args, env))
    state = ctec.load_checkpoint(folder / "checkpoint.npz", template)
    print(f"{folder.name}, {int(state.iteration) * args.steps_per_iteration:,} steps\n")
    print("\n".join(report(args, env, state)))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
