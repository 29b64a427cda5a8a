"""C-TeC whose encoders see the positions from another origin, or standardised; and what its reward correlates with.

    python experiments/inputs.py --origin middle --env point_hardest_maze --preset laptop --seed 1
    python experiments/inputs.py --standardize --env point_hardest_maze --preset laptop --seed 1

Everything else is ctec_sac_brax.py, whose flags follow. Twenty times in a run, correlations.csv beside the run's folder
gets the rank correlation of the reward of 2^14 transitions in the replay with the distance of s from the encoders'
origin, with its distance from the start, and with the number of visits in the replay to its bin and to the future's.
Five times, reward_map.npz gets {steps: (bins, 3)}: the place x, y of a bin and the mean reward from there.
"""

import csv
import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ctec_sac_brax as ctec  # noqa: E402
import evaluate  # noqa: E402

MOMENTS = 20
COLUMNS = ("steps", "origin", "start", "visits", "visits_of_future")  # of correlations.csv
sample_futures = ctec.sample_futures
learn = ctec.learn


@dataclasses.dataclass(frozen=True)
class Inputs:
    origin: Literal["corner", "middle", "far_corner"] = "corner"
    """where the encoders' coordinates begin: at the corner beside the start (as in the environment), in the middle of
    the maze, or at the corner that is opposite to the start"""
    standardize: bool = False
    """divide what the encoders see of the states by the batch's deviation, after its mean is subtracted: then the
    origin does not matter"""


def origin_of(inputs, env):
    """(position_size,) a place of the maze, in the environment's coordinates."""
    low = np.full(2, -env.cell / 2)
    high = low + env.cell * np.array(env.is_wall.shape)
    return {"corner": np.zeros(2), "middle": (low + high) / 2, "far_corner": low + high}[inputs.origin]


def bin_of(env, states):
    """(...) the slot of the bin that the states (..., state_size) are in."""
    return ctec.bin_slot(states[..., : env.position_size])


def changed(inputs, env, states):
    """What the encoders see of the states (B, state_size)."""
    states = states.at[:, :2].add(-origin_of(inputs, env))
    if inputs.standardize:
        states = (states - jnp.mean(states, axis=0)) / (jnp.std(states, axis=0) + 1e-6)
    return states


def sample_changed_futures(inputs, key, args, env, replay, batch):
    pairs = sample_futures(key, args, env, replay, batch)
    state, action = jnp.split(pairs.anchor, [env.state_size], axis=1)
    anchor = jnp.concatenate([changed(inputs, env, state), action], axis=1)
    return pairs.replace(anchor=anchor, positive=changed(inputs, env, pairs.positive))


@functools.partial(jax.jit, static_argnums=(0, 1))
def sample_rewards(args, env, state):
    """Of 2^14 or more transitions: s, reward, mask, and the visits in the replay to the bins of s and of s_f."""
    replay = ctec.index_trajectories(state.replay)
    stored = jnp.arange(len(replay.obs))[:, None] < replay.time
    visits = jnp.zeros_like(ctec.init_coverage(env)).at[bin_of(env, replay.obs)].add(stored)

    def sample(key):
        key_batch, key_future = jax.random.split(key)
        batch = ctec.sample_batch(key_batch, args, replay)
        pairs = ctec.sample_futures(key_future, args, env, replay, batch)
        future = sample_futures(key_future, args, env, replay, batch).positive
        reward = ctec.intrinsic_reward(state.model.params, args, pairs)
        counts = [visits[bin_of(env, x)] for x in (batch.obs, future)]
        return batch.obs, reward, pairs.mask, *counts

    keys = jax.random.split(state.key, math.ceil(2**14 / args.batch_size))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(sample, keys))


def correlations(inputs, args, env, state):
    """{column: rank correlation with the reward}"""
    obs, reward, mask, visits, visits_of_future = (np.asarray(x) for x in sample_rewards(args, env, state))
    distance = lambda place: np.linalg.norm(obs[:, :2] - place, axis=1)
    others = (distance(origin_of(inputs, env)), distance(env.start), visits, visits_of_future)
    valid = mask > 0
    return {name: spearmanr(reward[valid], other[valid])[0] for name, other in zip(COLUMNS[1:], others)}


def write_correlations(inputs, args, env, state):
    path = Path(args.run_dir) / "correlations.csv"
    row = {"steps": int(state.iteration) * args.steps_per_iteration} | correlations(inputs, args, env, state)
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def write_reward_map(args, env, state):
    """Add the map of now to those of before, in the place of what a run that was killed has left."""
    path = Path(args.run_dir) / "reward_map.npz"
    steps = int(state.iteration) * args.steps_per_iteration
    stored = dict(np.load(path)) if path.exists() else {}
    maps = {at: values for at, values in stored.items() if int(at) < steps}
    maps[str(steps)] = evaluate.reward_map(ctec, args, env, state)
    ctec.write_atomically(path, lambda file: np.savez(file, **maps))


def learn_and_log(inputs, args, env, state):
    """As learn; writes correlations and reward maps too."""
    state, metrics = learn(args, env, state)
    iteration = int(state.iteration)
    if iteration % math.ceil(args.num_iterations / MOMENTS) == 0 or iteration == args.num_iterations:
        write_correlations(inputs, args, env, state)
    if iteration in {round(k * args.num_iterations / 5) for k in range(1, 6)}:
        write_reward_map(args, env, state)
    return state, metrics


def parse_args(argv):
    inputs, flags = tyro.cli(Inputs, args=argv, return_unknown_args=True, description=__doc__)
    return inputs, ctec.parse_args(flags)


def main(inputs, args):
    if not args.env.startswith("point") or args.future_state != "full":
        ctec.fail("experiments/inputs.py: for point mazes and --future-state full")
    ctec.sample_futures = functools.partial(sample_changed_futures, inputs)
    ctec.learn = functools.partial(learn_and_log, inputs)
    ctec.learn.eval_shape = learn.eval_shape
    return ctec.main(args)


if __name__ == "__main__":
    main(*parse_args(sys.argv[1:]))
