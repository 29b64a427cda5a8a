"""What a training iteration costs at the paper's sizes: memory by XLA's own analysis, work by counting. Runs nothing.

    python benchmarks/paper_scale.py                          # every script, as a table (a minute each on a CPU)
    python benchmarks/paper_scale.py "ctec_sac_brax --env humanoid_u_maze" "apt_sac_brax --batch-size 2048"
    python benchmarks/paper_scale.py --run "ctec_ppo_rnn_craftax --num-envs 256"   # one real iteration, and its memory

The stages of an iteration are compiled as one program for the script's defaults, for shapes and without data.
Temporaries are those of the backend that compiles: a GPU's differ. Products and loop steps are counted in the program
as it is traced for a GPU, before any compiler; of two branches the larger one counts.
"""

import dataclasses
import importlib
import math
import resource
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import tyro
from jax.extend import core
from stages import whole_iteration

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CONFIGURATIONS = (
    "ctec_sac_brax --env ant_hardest_maze",
    "ctec_sac_brax --env humanoid_u_maze",
    "ctec_sac_brax --env arm_binpick_hard",
    "apt_sac_brax --env ant_hardest_maze",
    "rnd_sac_brax --env ant_hardest_maze",
    "icm_sac_brax --env ant_hardest_maze",
    "mbrl_sac_brax --env ant_hardest_maze",
    "random_brax --env ant_hardest_maze",
    "ctec_ablations_sac_brax --env ant_hardest_maze --critic monolithic",
    "ctec_ppo_rnn_craftax",
    "e3b_ppo_craftax",
    "icm_ppo_craftax",
    "rnd_ppo_craftax",
    "random_craftax",
    "etd_ppo --env ant_hardest_maze",
    "etd_ppo --env craftax_classic",
)


@dataclasses.dataclass(frozen=True)
class Args:
    configurations: tyro.conf.Positional[tuple[str, ...]] = CONFIGURATIONS
    """scripts with their flags, each in quotes (default: every script at the paper's sizes)"""
    run: bool = False
    """also run one iteration, the first that learns, and print the largest memory of this process"""


# ------------------------------------------------------------------------------------------- counting in the program
@dataclasses.dataclass(frozen=True)
class Work:
    flops: float = 0.0  # of matrix products
    steps: int = 0  # sequential steps of loops: each is at least one kernel that waits for the one before
    calls: int = 0  # loops whose number of steps is not known before they run; their bodies count once

    def __add__(self, other):
        return Work(self.flops + other.flops, self.steps + other.steps, self.calls + other.calls)

    def __mul__(self, times):
        return Work(self.flops * times, self.steps * times, self.calls * times)


def product_flops(equation):
    """Two for each multiplication and addition of a dot_general."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def inner_programs(equation):
    """The programs inside an equation: loop bodies, branches, calls."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def branches_for_gpu(equation, branches):
    """All branches of a cond, or the one that jax.lax.platform_dependent has for a GPU."""
    platforms = equation.params.get("branches_platforms")  # plain conditions have none
    if platforms is None:
        return branches
    return [next(branch for branch, of in zip(branches, platforms) if of is None or "cuda" in of)]


def count(program):
    total = Work()
    for equation in program.eqns:
        kind = equation.primitive.name
        inner = [count(part) for part in inner_programs(equation)]
        if kind == "dot_general":
            total += Work(flops=product_flops(equation))
        elif kind == "scan":
            length = equation.params["length"]
            steps = math.ceil(length / int(equation.params["unroll"]))
            body = inner[0]
            total += Work(body.flops * length, steps + body.steps * length, body.calls * length)
        elif kind == "while":
            total += sum(inner, Work(calls=1))
        elif kind == "cond":
            total += max(branches_for_gpu(equation, inner), key=lambda work: work.flops)
        else:
            total += sum(inner, Work())
    return total


# ---------------------------------------------------------------------------------------------------------- measuring
def prepare(configuration):
    """The script, its arguments, its environment, and the shapes of its state."""
    name, *flags = configuration.split()
    script = importlib.import_module(name)
    args = script.parse_args(flags)
    makers = {"make_any_env": (args.env,), "make_env": (args.env,), "make_craftax": ()}
    maker = next(maker for maker in makers if hasattr(script, maker))
    env = getattr(script, maker)(*makers[maker])
    return script, args, env, jax.eval_shape(lambda: script.init_state(args, env))


def count_for_gpu(script, args, env, state):
    """The work of an iteration as it is traced on a GPU, where some loops are unrolled."""
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        jax.clear_caches()  # the stages may have been traced for this machine
        return count(jax.make_jaxpr(whole_iteration(script, args, env))(state).jaxpr)


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(configuration):
    """{column: text} of a configuration."""
    script, args, env, state = prepare(configuration)
    work = count_for_gpu(script, args, env, state)
    began = time.time()
    jax.clear_caches()
    compiled = whole_iteration(script, args, env).lower(state).compile()
    seconds = time.time() - began
    memory = compiled.memory_analysis()
    gigabytes = lambda size: f"{size / 1e9:.2f}"
    copied = memory.output_size_in_bytes - memory.alias_size_in_bytes
    row = {
        "script and flags": f"`{configuration}`",
        "state, GB": gigabytes(nbytes(state)),
        "not donated, GB": gigabytes(copied),
        "temporaries, GB": gigabytes(memory.temp_size_in_bytes),
        "together, GB": gigabytes(memory.argument_size_in_bytes + copied + memory.temp_size_in_bytes),
        "TFLOP of products": f"{work.flops / 1e12:,.2f}",
        "steps of loops": f"{work.steps:,}" + ("+" if work.calls else ""),
        "environment steps": f"{args.steps_per_iteration:,}",
        "compiled in, s": f"{seconds:.0f}",
    }
    return row


def run_one_iteration(configuration):
    """The seconds of the first iteration that learns, and the process's largest memory before it and with it."""
    script, args, env, _ = prepare(configuration)
    # learn at once, whatever the replay holds and however long the policy should wait
    early = {"learning_starts": 2, "random_iterations": 0}
    args = dataclasses.replace(args, **{name: x for name, x in early.items() if hasattr(args, name)})
    state = jax.block_until_ready(script.init_state(args, env))
    iterate = whole_iteration(script, args, env).lower(state).compile()
    largest = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    before = largest()
    began = time.time()
    jax.block_until_ready(iterate(state))
    seconds = time.time() - began
    print(f"{configuration}: an iteration of {args.steps_per_iteration:,} steps in {seconds:,.0f} s; largest memory of")
    print(f"the process {before:.2f} GB before it (compiling included), {largest():.2f} GB with it", flush=True)


def main(args):
    header = None
    for configuration in args.configurations:
        row = measure(configuration)
        if header is None:
            header = list(row)
            print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
        print("| " + " | ".join(row.values()) + " |", flush=True)
        jax.clear_caches()
    if args.run:
        for configuration in args.configurations:
            run_one_iteration(configuration)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
