"""What several test files need: small configurations, whole runs, and what a run leaves."""

import csv
import random
import subprocess
import sys
import time
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("*_*.py"))  # evaluate.py is none of them
CLOCKS = ("seconds", "steps_per_second")  # the columns of metrics.csv that differ between two equal runs

# a run of a SAC script that learns, in seconds; the first gradient steps are in iteration ceil(40 / 16) = 3
SMALL_SAC = dict(env="point_u_maze", total_timesteps=8 * 16 * 8, num_envs=8, unroll_length=16, episode_length=33,
                 replay_size=64, learning_starts=40, batch_size=32, multiplier=0.5, agent_width=16)  # fmt: skip
# the same for a recurrent PPO script; the policy waits for the first two iterations
SMALL_PPO = dict(num_envs=4, num_steps=8, num_minibatches=2, reset_ratio=16, agent_width=16, random_iterations=2,
                 episode_window=16)  # fmt: skip


def flags(config, **changes):
    """The command line for a dictionary of arguments."""
    words = []
    for name, value in (config | changes).items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag, *map(str, value)] if isinstance(value, tuple) else [f"{flag}={value}"]
    return words


def run(script, *arguments, **options):
    """A script in a process of its own, to its end."""
    command = [sys.executable, script.__file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


def run_and_kill(script, arguments, run_dir, after=0):
    """Start a script, kill -9 it at a random moment after so many iterations and a checkpoint, and return the run's
    folder."""
    process = subprocess.Popen([sys.executable, script.__file__, *arguments], stdout=subprocess.DEVNULL)
    while not any(len(rows(path.parent)) > after for path in run_dir.glob("*/checkpoint.npz")):
        assert process.poll() is None
        time.sleep(0.005)
    time.sleep(random.Random(0).uniform(0, 0.03))
    process.kill()
    process.wait()
    return next(run_dir.iterdir())


def rows(folder):
    """metrics.csv as dictionaries of strings, without the clocks."""
    with open(Path(folder) / "metrics.csv", newline="") as file:
        return [{name: x for name, x in row.items() if name not in CLOCKS} for row in csv.DictReader(file)]


def checkpoint(folder):
    return (Path(folder) / "checkpoint.npz").read_bytes()


def failure(capsys, script, arguments):
    """Exit code and standard error of main(parse_args(arguments)), which must end the program."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script.main(script.parse_args([str(x) for x in arguments]))
    return stop.value.code, capsys.readouterr().err


def refusal(capsys, script, arguments):
    """The same, before anything is written: a bad argument that slips through must not start a long run."""

    def write_atomically(*_):
        raise AssertionError(f"{script.__name__} took {arguments} and began")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "write_atomically", write_atomically)
        return failure(capsys, script, arguments)


def assert_one_line(message, *words):
    assert message.startswith("error: ") and message.count("\n") == 1, message
    for word in words:
        assert word in message


def assert_all_changed(before, after):
    """Every array of one tree differs from its twin in the other."""
    for (name, a), b in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        assert np.any(a != b), jax.tree_util.keystr(name)


def assert_none_changed(before, after):
    jax.tree.map(np.testing.assert_array_equal, before, after)


def constant(params, value):
    """The parameters of an MLP that says `value` whatever it sees."""
    zero = jax.tree.map(jnp.zeros_like, params)
    last = max(zero["params"])
    zero["params"][last]["bias"] = jnp.array(value, jnp.float32)
    return zero


def norm(tree):
    return sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(tree))


@flax.struct.dataclass
class World:
    left: jax.Array  # steps until the episode ends
    number: jax.Array  # which world it is
    achievements: jax.Array


class Game:
    """Stands in for Craftax, which takes a minute to compile: an episode of 2 to 5 steps, whose last one unlocks
    achievement 3."""

    state_size = 6
    num_actions = 17

    def reset(self, key):
        left = jax.random.randint(key, (), 2, 6)
        number = jax.random.randint(key, (), 0, 10**6)
        world = World(left, number, jnp.zeros(22, bool))
        return world, self.observe(world)

    def observe(self, world):
        left_is = [world.left == k for k in range(1, 5)]
        return jnp.stack([world.left, world.number / 1e6, *left_is]).astype(jnp.float32)

    def step(self, key, world, action):
        left = world.left - 1
        done = left == 0
        world = World(left, world.number, world.achievements.at[3].set(done))
        return world, self.observe(world), jnp.where(done, 1.0, 0.25), done
