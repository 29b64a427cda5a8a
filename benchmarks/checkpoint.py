"""Host memory while a checkpoint is written and read, as a multiple of the state's size.

python benchmarks/checkpoint.py                 # a replay buffer of 1.5 GB
python benchmarks/checkpoint.py --gigabytes 5
"""

import dataclasses
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import ctec_sac_brax as ctec  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Args:
    gigabytes: float = 1.5
    """size of the replay buffer"""
    part: Literal["both", "save", "load"] = "both"
    """both: a process for each part, because the peak of a process never falls"""
    path: str = ""
    """where the parts find the checkpoint"""


def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes


def state_template(args):
    """Shapes of a run on the point maze with such a replay."""
    run_args = ctec.Args(env="point_u_maze", num_envs=1024)
    env = ctec.make_env(run_args.env)
    step_bytes = 4 * (env.state_size + env.action_size) + 2
    run_args = dataclasses.replace(run_args, replay_size=round(args.gigabytes * 1e9 / (1024 * step_bytes)))
    return jax.eval_shape(lambda: ctec.init_state(run_args, env))


def measure(args):
    template = state_template(args)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(template))
    imports = peak()
    if args.part == "save":
        state = jax.jit(lambda: jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), template))()
        jax.block_until_ready(state)
        print(f"state {size / 1e9:.2f} GB; the process holds {(peak() - imports) / size:.2f} times that before saving")
    start = time.time()
    if args.part == "save":
        ctec.save_checkpoint(Path(args.path), state)
    else:
        jax.block_until_ready(ctec.load_checkpoint(Path(args.path), template))
    seconds = time.time() - start
    print(f"{args.part}: {seconds:.1f} s, peak {(peak() - imports) / size:.2f} times the state", flush=True)


def main(args):
    if args.part != "both":
        return measure(args)
    with tempfile.TemporaryDirectory() as folder:
        for part in ("save", "load"):
            flags = [f"--gigabytes={args.gigabytes}", f"--part={part}", f"--path={folder}/checkpoint.npz"]
            subprocess.run([sys.executable, __file__, *flags], check=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
