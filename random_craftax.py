"""Uniform random actions on Craftax-Classic.

What exploration without learning unlocks, as a baseline of C-TeC (Mohamed et al., "Temporal Representations for
Exploration", ICLR 2026): the game, the achievements and the pictures of ctec_ppo_rnn_craftax.py, and nothing else.

One iteration:

    64 times, in every environment:                                                   # collect
        act uniformly, count achievements at a done

    python random_craftax.py                          # the paper's number of steps
    python random_craftax.py --preset laptop          # as many as the other scripts' preset
    python random_craftax.py --resume runs/<folder>   # go on from the last checkpoint

Metrics and results: docs/random_craftax.md
"""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "jax==0.10.1", "flax==0.12.8", "craftax==1.6.1", "numpy==2.4.6", "tyro==1.0.16", "tqdm==4.70.1",
#   "matplotlib==3.11.2", "wandb==0.31.0",
# ]
# ///

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import re
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # no line for each program that XLA loads from its cache

import flax
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import multihost_utils
from tqdm import tqdm


# --------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    env: Literal["craftax_classic"] = "craftax_classic"  # environment: Craftax-Classic-Symbolic-v1
    preset: Literal["paper", "laptop"] = "paper"  # published sizes, or sizes for a CPU; explicit flags win over it
    seed: int = 1  # seed of everything random
    total_timesteps: int = 1_000_000_000  # environment steps, all environments together (paper Table 5)
    resume: str = ""  # folder of an earlier run: go on from its checkpoint, with its arguments
    run_dir: str = "runs"  # where the folder of the run is made
    checkpoint_minutes: float = 10.0  # minutes between checkpoints; always one at the end, at Ctrl-C and at SIGTERM
    track: bool = False  # send metrics and pictures to wandb too (WANDB_MODE=offline works)
    wandb_project_name: str = "ctec"  # project of the run on wandb
    wandb_entity: str | None = None  # user or team of the run on wandb
    distributed: bool = False  # one run over all processes that srun or mpirun started
    episode_window: int = 1024  # number of latest finished episodes over which the achievement rates are taken

    num_envs: int = 1024  # parallel environments (Craftax baselines)
    num_steps: int = 64  # steps in each environment before the update of an iteration (paper Table 5)
    reset_ratio: int = 16  # optimistic resets: one new world for this many environment steps (Craftax baselines)

    @property
    def steps_per_iteration(self):
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self):
        return math.ceil(self.total_timesteps / self.steps_per_iteration)


# -------------------------------------------------------------------------- the method: uniform random actions
@flax.struct.dataclass
class Worlds:  # the scan carry of a rollout, (N, ...)
    world: Any  # Craftax's state
    length: jax.Array  # steps of the episode so far
    reward: jax.Array  # of the episode so far


def act_at_random(env, now, key):
    """One uniform step in every environment, without resets. Returns the worlds after it and where an episode ended."""
    key_action, key_env = jax.random.split(key)
    action = jax.random.randint(key_action, now.length.shape, 0, env.num_actions)
    keys = jax.random.split(key_env, len(action))
    world, _, reward, done = jax.vmap(env.step)(keys, now.world, action)
    return Worlds(world, now.length + 1, now.reward + reward), done


# ---------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class RunState:
    key: jax.Array
    iteration: jax.Array
    worlds: Worlds
    episodes: "Episodes"


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def collect(args, env, state):
    """`num_steps` steps in every environment. An ended episode restarts in a new world. Worlds are made beforehand,
    one for `reset_ratio` environment steps, and taken in turn (again from the first one, should they run out)."""
    key, key_worlds, key_steps = jax.random.split(state.key, 3)
    starts = shard(init_worlds(env, key_worlds, math.ceil(args.steps_per_iteration / args.reset_ratio)))

    def step(carry, key):
        now, used = carry
        after, done = act_at_random(env, now, key)
        ended = (done, after.world.achievements, after.length, after.reward)  # before the reset
        fresh = (used + jnp.cumsum(done) - 1) % len(starts.length)
        restart = lambda start, x: jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), start[fresh], x)
        return (jax.tree.map(restart, starts, after), used + jnp.sum(done)), ended

    (worlds, _), ended = jax.lax.scan(step, (state.worlds, 0), jax.random.split(key_steps, args.num_steps))
    episodes = insert_episodes(state.episodes, *ended)
    state = state.replace(key=key, iteration=state.iteration + 1, worlds=worlds, episodes=episodes)
    return shard_state(state), episode_metrics(episodes)


# ----------------------------------------------------------------------------------------------- initial state
def init_worlds(env, key, number):
    world, _ = jax.vmap(env.reset)(shard(jax.random.split(key, number), "envs"))
    return Worlds(world, jnp.zeros(number, jnp.int32), jnp.zeros(number))


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env = jax.random.split(jax.random.PRNGKey(args.seed))
    worlds = init_worlds(env, key_env, args.num_envs)
    return shard_state(RunState(key, jnp.int32(0), worlds, init_episodes(args)))


# ==================================================================================================== appendix
# What a reader of the method does not need: devices, achievements, the game, the run's folder, pictures, and main.


# ----------------------------------------------------------------------------------------------------- devices
SPLIT = {"worlds": ("envs",)}  # of RunState; others are replicated


def shard(tree, *axes):
    """Shard the axes named "envs" over the devices, and replicate the others. XLA does the rest: it all-reduces SAC's
    batches, never all-gathers SAC's replay, and all-gathers PPO's rollout once an iteration."""
    if jax.device_count() == 1:
        return tree
    mesh = jax.make_mesh((jax.device_count(),), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*axes[: x.ndim])))
    return jax.tree.map(place, tree)


def shard_state(state):
    return state.replace(**{name: shard(field, *SPLIT.get(name, ())) for name, field in vars(state).items()})


def all_gather(tree):
    """All-gather a sharded pytree; arrays local to a process are concatenated."""
    return multihost_utils.process_allgather(tree, tiled=True) if jax.process_count() > 1 else tree


# ------------------------------------------------------------------------------------------------ achievements
ACHIEVEMENTS = """collect_wood place_table eat_cow collect_sapling collect_drink make_wood_pickaxe make_wood_sword
    place_plant defeat_zombie collect_stone place_stone eat_plant defeat_skeleton make_stone_pickaxe make_stone_sword
    wake_up place_furnace collect_coal collect_iron collect_diamond make_iron_pickaxe make_iron_sword""".split()


@flax.struct.dataclass
class Episodes:  # the latest finished ones, in a ring buffer: number k is in row k % W
    achievements: jax.Array  # (W, 22) bool
    length: jax.Array  # (W,)
    reward: jax.Array  # (W,) the game's
    count: jax.Array  # () finished so far


def init_episodes(args):
    window = args.episode_window
    return Episodes(jnp.zeros((window, 22), bool), jnp.zeros(window, jnp.int32), jnp.zeros(window), jnp.int32(0))


def insert_episodes(episodes, done, achievements, length, reward):
    """Add those of T x N steps that end an episode; if there are more than W of them, the last W."""
    window = len(episodes.length)
    rank = jnp.cumsum(done.ravel())  # 1, 2, ... at the steps that end an episode
    keep = done.ravel() & (rank > rank[-1] - window)
    row = jnp.where(keep, (episodes.count + rank - 1) % window, window)  # row W is dropped
    put = lambda ring, x: ring.at[row].set(x.reshape(-1, *x.shape[2:]), mode="drop")
    rings = (put(episodes.achievements, achievements), put(episodes.length, length), put(episodes.reward, reward))
    return Episodes(*rings, count=episodes.count + rank[-1])


def achievement_rates(episodes):
    """(22,) fraction of the latest episodes that unlocked each achievement; 0 before the first episode ended."""
    return jnp.sum(episodes.achievements, axis=0) / jnp.clip(episodes.count, 1, len(episodes.length))


def crafter_score(rates):
    return jnp.exp(jnp.mean(jnp.log(1 + 100 * rates))) - 1


def episode_metrics(episodes):
    rates = achievement_rates(episodes)
    stored = jnp.clip(episodes.count, 1, len(episodes.length))
    return dict(zip(ACHIEVEMENTS, rates)) | {
        "achievements": jnp.sum(rates),
        "crafter_score": crafter_score(rates),
        "episodes": episodes.count,
        "episode_length": jnp.sum(episodes.length) / stored,
        "episode_return": jnp.sum(episodes.reward) / stored,
    }


# ------------------------------------------------------------------------------------------------ environments
class CraftaxClassic:
    """Craftax-Classic-Symbolic-v1, without its auto-reset."""

    state_size = 1345
    num_actions = 17

    def __init__(self):
        from craftax.craftax_env import make_craftax_env_from_name  # here, because it starts the device

        self.game = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False)

    def reset(self, key):
        obs, world = self.game.reset_env(key, self.game.default_params)
        # Craftax starts from Python numbers: without their types, a stage would be compiled twice
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), (world, obs))

    def step(self, key, world, action):
        obs, world, reward, done, _ = self.game.step_env(key, world, action, self.game.default_params)
        return world, obs, reward, done


make_craftax = functools.cache(CraftaxClassic)


# ----------------------------------------------------------------------------------- run folder and checkpoint
def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def start_jax(args):
    """Join the launcher's processes, and cache compiled programs by CPU features: code compiled for one CPU can crash
    on another that shares the home folder."""
    if args.distributed:
        jax.distributed.initialize()
        if jax.process_index() > 0:
            sys.stdout = open(os.devnull, "w")  # the first process speaks for all
    if not jax.config.jax_compilation_cache_dir:
        cpuinfo = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
        features = re.search(r"^(flags|Features).*|\Z", cpuinfo, re.M).group()
        cache = Path.home() / ".cache" / "ctec_jax" / f"{zlib.crc32(features.encode()):08x}"
        jax.config.update("jax_compilation_cache_dir", str(cache))


def write_atomically(path, write):
    """write(file) into a temporary file, which then takes the place of path. The first process writes for all."""
    if jax.process_index() > 0:
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def named_leaves(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def save_checkpoint(path, state):
    """Every array of the state under its name. np.savez fetches and writes them one after the other."""
    leaves = named_leaves(all_gather(state))
    write_atomically(path, lambda file: np.savez(file, **leaves))


def load_checkpoint(path, template):
    """The state in path, whose arrays must have the names, shapes and dtypes of template."""
    kind = lambda x: f"{x.dtype}{list(x.shape)}"
    leaves = []
    try:
        with np.load(path, allow_pickle=False) as file:
            for name, expected in named_leaves(template).items():
                array = file[name]
                if kind(array) != kind(expected):
                    raise ValueError(f"{name} is {kind(array)}, not {kind(expected)}")
                leaves.append(jnp.array(array))
    except Exception as error:  # missing, truncated and mismatched files raise different exceptions
        fail(f"{path} is no checkpoint of this run ({error}): drop flags that change sizes, or start a new run")
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def start_run(args, init, buffers):
    """The run's folder, and its state: init(), or the checkpoint's. buffers says in words what takes the memory."""
    name = f"{args.env}__{Path(__file__).stem}__{args.seed}__{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = Path(args.resume or Path(args.run_dir) / name)
    print(f"{Path(__file__).stem} on {args.env}, seed {args.seed}, into {folder}")
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, {buffers}; the first iterations compile", flush=True)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and args.preset == "paper":
        print("no accelerator was found: --preset laptop has sizes that suit a CPU", flush=True)
    if on_cpu and args.env.startswith(("ant", "humanoid", "arm")) and "emitters" not in os.getenv("XLA_FLAGS", ""):
        print("robots are faster on a CPU, the arm 100 times, with XLA_FLAGS=--xla_cpu_use_fusion_emitters=false")
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(init)))
    if on_cpu and needed > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):  # XLA would wait for ever
        fail(f"--num-envs {args.num_envs} is too much for the memory: the state needs {needed / 1e9:,.0f} GB")
    if not args.resume:
        if jax.process_index() == 0:
            folder.mkdir(parents=True)
        return folder, init()
    state = load_checkpoint(folder / "checkpoint.npz", jax.eval_shape(init))
    if state.iteration >= args.num_iterations:
        fail(f"{folder} is complete: give --total-timesteps above {int(state.iteration) * args.steps_per_iteration:,}")
    return folder, shard_state(state)


class Run(contextlib.ExitStack):
    """What surrounds the iterations: metrics.csv, checkpoints, progress, wandb. Inside `with`, Ctrl-C and SIGTERM end
    the run after an iteration, with a checkpoint. Only the first process writes."""

    def __init__(self, args, folder, state, *metrics):
        super().__init__()
        self.args = args
        self.folder = folder
        self.iteration = int(state.iteration)
        self.columns = ["iteration", "steps", "seconds", "steps_per_second", *(name for one in metrics for name in one)]
        self.picture_iterations = {round(k * args.num_iterations / 5) for k in range(1, 6)}  # the end among them
        path = folder / "metrics.csv"
        lines = path.read_text().splitlines()[: 1 + self.iteration] if path.exists() else [",".join(self.columns)]
        last = f"{self.iteration},{self.iteration * args.steps_per_iteration},"
        if lines[0] != ",".join(self.columns) or (self.iteration and not lines[-1].startswith(last)):
            fail(f"{path} lacks the columns or steps of this run: another version of this script, or other flags?")
        self.seconds = float(lines[-1].split(",")[2]) if self.iteration else 0.0
        config = dataclasses.asdict(args) | {"resume": "", "distributed": False}
        write_atomically(folder / "args.json", lambda file: file.write(json.dumps(config, indent=1).encode()))
        write_atomically(path, lambda file: file.writelines(f"{line}\n".encode() for line in lines))
        first = jax.process_index() == 0
        self.file = self.enter_context(open(path if first else os.devnull, "a"))
        interval = 0.1 if sys.stderr.isatty() else 30  # seconds
        bar = tqdm(total=args.num_iterations, initial=self.iteration, mininterval=interval, disable=not first)
        self.bar = self.enter_context(bar)
        self.wandb = None
        if args.track and first:
            import wandb

            names = dict(project=args.wandb_project_name, entity=args.wandb_entity, id=folder.name)
            self.wandb = self.enter_context(wandb.init(**names, resume="allow", config=config, dir=folder))
            pictures = lambda: {path.stem: wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))}
            self.callback(lambda: self.wandb.log(pictures()))
        self.signals = []
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.signal(number, lambda number, _: self.signals.append(signal.Signals(number)))
            self.callback(signal.signal, number, handler)
        self.saved = self.began = time.time()

    def log(self, metrics):
        """Add a row to metrics.csv and return it. Only a maze's episode_length may be nan: then no episode ended."""
        values = {name: float(x) for name, x in jax.device_get(metrics).items()}
        spent = time.time() - self.began
        rate = self.args.steps_per_iteration / spent
        self.seconds += spent
        self.iteration += 1
        row = {"iteration": self.iteration, "steps": self.iteration * self.args.steps_per_iteration}
        row |= {"seconds": round(self.seconds, 1), "steps_per_second": round(rate, 1)}
        row |= {name: x for name, x in values.items() if math.isfinite(x)}
        broken = [f"{name} is {x}" for name, x in values.items() if name not in row and name != "episode_length"]
        if broken:
            self.bar.close()
            fail(f"iteration {self.iteration}: {', '.join(broken)}; a checkpoint, if any, is in {self.folder}", code=1)
        print(*(row.get(name, "") for name in self.columns), sep=",", file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(row, step=row["steps"])
        name = "coverage" if "coverage" in row else "achievements"
        self.bar.set_postfix_str(f"{name} {round(row[name], 2):,.10g}, {rate:,.0f} steps/s", refresh=False)
        self.bar.update()
        return row

    def save(self, state):
        """Write a checkpoint if one is due, at the end of the run, and after a signal, which then ends the run."""
        last = self.iteration == self.args.num_iterations
        due = last or time.time() - self.saved >= 60 * self.args.checkpoint_minutes
        stopped, due = np.any(all_gather(np.array([[bool(self.signals), due]])), axis=0)  # in any process
        if stopped or due:
            save_checkpoint(self.folder / "checkpoint.npz", state)
            self.saved = time.time()
        if stopped and not last:
            self.bar.close()
            by = self.signals[0] if self.signals else signal.SIGTERM  # which another process received
            fail(f"stopped by {by.name}; go on: python {Path(__file__).name} --resume {self.folder}", code=128 + by)
        self.began = time.time()


# ---------------------------------------------------------------------------------------------------- pictures
def save_bars(folder, title, bars):
    """achievements.png: the share of episodes that unlocked each achievement, for each {label: (22,) rates}."""
    from matplotlib.figure import Figure

    figure = Figure((8, 7), layout="constrained")
    axes = figure.add_subplot()
    for i, (label, rates) in enumerate(bars.items()):
        place = np.arange(len(ACHIEVEMENTS)) + 0.8 * (i + 0.5) / len(bars) - 0.4
        label = f"{label}: sum {np.sum(rates):.2f}"
        drawn = axes.barh(place, 100 * np.asarray(rates), 0.8 / len(bars), color=("tab:blue", "0.7")[i], label=label)
        axes.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=6)
    names = [name.replace("_", " ") for name in ACHIEVEMENTS]
    axes.set(yticks=range(22), yticklabels=names, xlim=(0, 108), title=title, xlabel="episodes that unlocked it (%)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    write_atomically(folder / "achievements.png", lambda file: figure.savefig(file, dpi=100))


# -------------------------------------------------------------------------------------------------------- main
PRESETS = {  # what a preset changes
    "paper": {"default": {}},
    "laptop": {"default": dict(total_timesteps=2_500_000, num_envs=64, reset_ratio=128, checkpoint_minutes=2.0)},
}


def parse_args(argv=None):
    """Explicit flags win over the preset, and with --resume over the arguments of the earlier run."""
    parse = functools.partial(tyro.cli, Args, args=argv, description=__doc__)
    args = parse()
    if not args.resume:
        sizes = PRESETS[args.preset]
        return parse(default=Args(**sizes.get(args.env.split("_")[0], sizes["default"])))
    try:
        earlier = json.loads((Path(args.resume) / "args.json").read_text()) | {"resume": args.resume}
        default = Args(**{name: tuple(x) if isinstance(x, list) else x for name, x in earlier.items()})
    except (OSError, ValueError, TypeError) as error:
        fail(f"--resume {args.resume}: it is not the folder of a run of this script ({error})")
    return parse(default=default)


def check_numbers(args, may_be_zero, rules):
    """Fail at the first broken rule {"field must ...": whether it does}; rules() can rely on the rules for numbers."""
    numbers = {"seed must be below 2^32": args.seed < 2**32}
    for name, value in vars(args).items():
        if type(value) in (int, float):
            bound = "at least" if name in may_be_zero.split() else "above"
            numbers[f"{name} must be {bound} 0 and finite"] = 0 < value < math.inf or (value == 0 and bound != "above")
        if name in ("num_envs", "batch_size"):
            numbers[f"{name} must be a multiple of the {jax.device_count()} devices"] = value % jax.device_count() == 0
    broken = lambda rules: [rule for rule, holds in rules.items() if not holds]
    if failed := broken(numbers) or broken(rules()):
        name, words = failed[0].split(" ", 1)
        fail(f"--{name.replace('_', '-')} {getattr(args, name)} {words}")


def main(args):
    """Collect, again and again. Returns the last row of metrics, with the run's folder."""
    start_jax(args)
    check_numbers(args, "seed checkpoint_minutes", lambda: {})
    env = make_craftax()
    folder, state = start_run(args, functools.partial(init_state, args, env), "no rollout buffer")
    with Run(args, folder, state, collect.eval_shape(args, env, state)[-1]) as run:
        for iteration in range(run.iteration + 1, args.num_iterations + 1):
            state, metrics = collect(args, env, state)
            row = run.log(metrics)
            if iteration in run.picture_iterations:
                title = f"{Path(__file__).stem}, seed {args.seed}, {row['steps']:,} steps"
                save_bars(folder, title, {"uniform random actions": achievement_rates(state.episodes)})
            run.save(state)
    result = f"achievements {row['achievements']:.2f} an episode"
    print(f"{result} after {row['steps']:,} steps in {tqdm.format_interval(row['seconds'])}")
    print(f"picture  {folder / 'achievements.png'}\nplay     python evaluate.py {folder}")
    return row | {"folder": str(folder)}


if __name__ == "__main__":
    try:
        main(parse_args())
    except (OSError, OverflowError, MemoryError, jax.errors.JaxRuntimeError) as error:  # disk, folder or memory
        fail(f"{type(error).__name__}: {error}; the last good checkpoint, if there was one, is untouched", code=1)
