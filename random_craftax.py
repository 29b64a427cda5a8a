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
#   "matplotlib==3.11.2", "pillow==13.0.0", "wandb==0.31.0",
# ]
# ///

import collections
import csv
import dataclasses
import errno
import functools
import io
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import flax
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm


# --------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    env: Literal["craftax_classic"] = "craftax_classic"  # environment: Craftax-Classic-Symbolic-v1
    # paper: the published sizes. laptop: the same algorithm in minutes on a CPU. Explicit flags win over it
    preset: Literal["paper", "laptop"] = "paper"
    seed: int = 1  # seed of everything random
    total_timesteps: int = 1_000_000_000  # environment steps, all environments together (paper Table 5)
    resume: str = ""  # folder of an earlier run: go on from its checkpoint, with its arguments
    run_dir: str = "runs"  # where the folder of the run is made
    checkpoint_minutes: float = 10.0  # minutes between checkpoints; always one at the end, at Ctrl-C and at SIGTERM
    track: bool = False  # send the metrics to wandb too, project "ctec" (WANDB_MODE=offline works)
    distributed: bool = False  # all processes that srun or mpirun has started together share this run
    video_steps: int = 500  # longest rollout.gif, in steps of an episode of the final policy; 0: none
    episode_window: int = 1024  # number of latest finished episodes over which the achievement rates are taken

    num_envs: int = 1024  # parallel environments (Craftax baselines)
    num_steps: int = 64  # steps in each environment before the update of an iteration (paper Table 5)
    # optimistic resets: one new world is made for this many environment steps (Craftax baselines)
    reset_ratio: int = 16

    @property
    def steps_per_iteration(self):
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self):
        return math.ceil(self.total_timesteps / self.steps_per_iteration)

    @property
    def first_update(self):
        return 1  # nothing is ever learned: every metric has a value from the start


PAPER = {}  # there is one environment, and the defaults are its numbers
PRESETS = {
    "paper": {},
    "laptop": dict(total_timesteps=2_500_000, num_envs=64, reset_ratio=128, checkpoint_minutes=2.0),
}


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


def collect(args, env, state, key):
    """`num_steps` uniform steps in every environment. An episode that ends goes on in a new world. These are made
    beforehand, one for `reset_ratio` environment steps, and taken in turn (again from the first, should they run out).
    """
    next_key, key_worlds, key_steps = jax.random.split(key, 3)
    starts = shard(init_worlds(env, key_worlds, math.ceil(args.steps_per_iteration / args.reset_ratio)))

    def step(carry, key):
        now, used = carry
        after, done = act_at_random(env, now, key)
        ended = (done, after.world.achievements, after.length, after.reward)  # before the reset
        fresh = (used + jnp.cumsum(done) - 1) % len(starts.length)

        def restart(start, x):
            return jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), start[fresh], x)

        return (jax.tree.map(restart, starts, after), used + jnp.sum(done)), ended

    (worlds, _), ended = jax.lax.scan(step, (state.worlds, 0), jax.random.split(key_steps, args.num_steps))
    return state.replace(key=next_key, worlds=worlds, episodes=insert_episodes(state.episodes, *ended))


# ---------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class RunState:
    key: jax.Array
    iteration: jax.Array
    worlds: Worlds
    episodes: "Episodes"


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_iteration(args, env, state):
    """Collect; nothing is trained."""
    state = collect(args, env, state.replace(iteration=state.iteration + 1), state.key)
    return shard_state(state), episode_metrics(state.episodes)


# ----------------------------------------------------------------------------------------------- initial state
def make_worlds(env, key, number):
    """env.reset for so many new episodes, all together and each device its share: Craftax takes 0.4 MB a world, so that
    the 4,096 worlds of a rollout at the paper's sizes take 1.6 GB of working memory."""
    return jax.vmap(env.reset)(shard(jax.random.split(key, number), "envs"))


def init_worlds(env, key, number):
    world, _ = make_worlds(env, key, number)
    return Worlds(world, jnp.zeros(number, jnp.int32), jnp.zeros(number))


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env = jax.random.split(jax.random.PRNGKey(args.seed))
    return RunState(key, jnp.int32(0), init_worlds(env, key_env, args.num_envs), init_episodes(args))


# ==================================================================================================== appendix
# What a reader of the method does not need: devices, achievements, the game, the run's folder, pictures, and main.


# ----------------------------------------------------------------------------------------------------- devices
# the axes by which fields of RunState are split over the devices
SPLIT = {name: ("envs",) for name in ("env", "episode_step", "players", "worlds", "walkers", "memory", "root")} | {
    "replay": (None, "envs")
}


def join_processes():
    """Processes that srun or mpirun has started together, on one machine or several, share a run. Only the first one
    prints and writes."""
    jax.distributed.initialize()
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")


def all_gather(tree):
    """All-gather a sharded pytree: whole arrays in every process, or a row of each process's own arrays."""
    if jax.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def device_mesh():
    return jax.make_mesh((jax.device_count(),), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))


def shard(tree, *axes):
    """Split the first axes of the arrays over the devices where they are named "envs"; copy all else to each device."""
    if jax.device_count() == 1:
        return tree
    mesh = device_mesh()
    place = lambda x: jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*axes[: x.ndim])))
    return jax.tree.map(place, tree)


def shard_state(state):
    """Environments and replay are split over the devices; everything else is copied to all of them."""
    return state.replace(**{name: shard(field, *SPLIT.get(name, ())) for name, field in vars(state).items()})


# ------------------------------------------------------------------------------------------------ achievements
ACHIEVEMENTS = """collect_wood place_table eat_cow collect_sapling collect_drink make_wood_pickaxe make_wood_sword
    place_plant defeat_zombie collect_stone place_stone eat_plant defeat_skeleton make_stone_pickaxe make_stone_sword
    wake_up place_furnace collect_coal collect_iron collect_diamond make_iron_pickaxe make_iron_sword""".split()


@flax.struct.dataclass
class Episodes:
    """The latest finished episodes, in a ring buffer: number k is in row k % W."""

    achievements: jax.Array  # (W, 22) bool
    length: jax.Array  # (W,)
    reward: jax.Array  # (W,) the game's
    count: jax.Array  # () finished so far


def init_episodes(args):
    return Episodes(
        achievements=jnp.zeros((args.episode_window, len(ACHIEVEMENTS)), bool),
        length=jnp.zeros(args.episode_window, jnp.int32),
        reward=jnp.zeros(args.episode_window),
        count=jnp.int32(0),
    )


def insert_episodes(episodes, done, achievements, length, reward):
    """Add those of T x N steps that end an episode; if there are more than W of them, the last W."""
    window = len(episodes.length)
    rank = jnp.cumsum(done.ravel())  # 1, 2, ... at the steps that end an episode
    keep = done.ravel() & (rank > rank[-1] - window)
    row = jnp.where(keep, (episodes.count + rank - 1) % window, window)  # row W is dropped
    put = lambda ring, x: ring.at[row].set(x.reshape(-1, *x.shape[2:]), mode="drop")
    return Episodes(
        achievements=put(episodes.achievements, achievements),
        length=put(episodes.length, length),
        reward=put(episodes.reward, reward),
        count=episodes.count + rank[-1],
    )


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
        # Craftax starts from Python numbers: without their types, train_iteration would be compiled twice
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), (world, obs))

    def step(self, key, world, action):
        obs, world, reward, done, _ = self.game.step_env(key, world, action, self.game.default_params)
        return world, obs, reward, done


@functools.cache
def make_craftax():
    return CraftaxClassic()


# ----------------------------------------------------------------------------------- run folder and checkpoint
METRICS = """iteration steps seconds steps_per_second achievements crafter_score episodes episode_length
    episode_return""".split()  # the columns of metrics.csv
METRICS += ACHIEVEMENTS


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def clock(seconds):
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def write_atomically(path, write):
    """write(file) into a temporary file, which then takes the place of path: a kill or a full disk loses nothing. The
    first process writes for all."""
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


def leaf_name(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def save_checkpoint(path, state):
    """Every array of the state under its name. np.savez fetches and writes them one after the other."""
    leaves = {leaf_name(name): x for name, x in jax.tree_util.tree_leaves_with_path(all_gather(state))}
    write_atomically(path, lambda file: np.savez(file, **leaves))


def load_checkpoint(path, template):
    """The state in path, whose arrays must have the names, shapes and dtypes of template."""

    def restore(name, expected):
        array = file[leaf_name(name)]
        if (array.shape, array.dtype) != (expected.shape, expected.dtype):
            found = f"{array.dtype}{list(array.shape)}, not {expected.dtype}{list(expected.shape)}"
            raise ValueError(f"{leaf_name(name)} is {found}")
        return jnp.array(array)

    try:
        with np.load(path, allow_pickle=False) as file:
            return jax.tree_util.tree_map_with_path(restore, template)
    except Exception as error:  # missing, truncated and mismatched files raise different exceptions
        fail(f"{path} is no checkpoint of this run ({error}): put a copy in its place, or start without --resume")


def read_metrics(path, iteration):
    """The rows of metrics.csv up to an iteration, as dictionaries."""
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if None not in row.values()]  # a kill may have cut the last one
    except (OSError, csv.Error) as error:
        fail(f"{path}: {error}; it belongs to the checkpoint beside it")
    if reader.fieldnames != METRICS:
        fail(f"{path} is of another version of this script")
    return [row for row in rows if int(row["iteration"]) <= iteration]


def write_metrics(path, rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, METRICS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check_memory(args, template):
    """One line and exit code 2, before anything is allocated, if a device's share of the state does not fit it."""
    device = jax.local_devices()[0]
    limits = device.memory_stats() or {}  # a CPU has none
    there = limits.get("bytes_limit", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    split = sum(nbytes(getattr(template, name, ())) for name in SPLIT)
    share = nbytes(template) - split + split // jax.device_count()
    if share > there:
        sizes = f"the run's state needs {share / 1e9:,.1f} GB, the device ({device.platform}) has"
        fail(f"{sizes} {there / 1e9:,.1f} GB: give fewer --num-envs (now {args.num_envs}), or smaller buffers")


def start_run(args, init, template, buffers):
    """Make the run's folder, or open the one to resume. Returns it, the state (init(), or the checkpoint's) and the
    seconds spent so far. template has the state's shapes; buffers says in words what takes the memory."""
    check_memory(args, template)
    state = None
    rows = []
    name = f"{args.env}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(args.resume or Path(args.run_dir) / name)
    if args.resume:
        state = load_checkpoint(folder / "checkpoint.npz", template)
        rows = read_metrics(folder / "metrics.csv", int(state.iteration))
        if state.iteration >= args.num_iterations:
            fail(f"{folder} is complete; to go on, give more --total-timesteps than {args.total_timesteps:,}")
    elif jax.process_index() == 0:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            fail(f"--run-dir {args.run_dir}: {folder} cannot be made ({error.strerror})")
    config = json.dumps(dataclasses.asdict(args) | {"resume": "", "distributed": False}, indent=1)
    write_atomically(folder / "args.json", lambda file: file.write(config.encode()))
    write_metrics(folder / "metrics.csv", rows)

    device = jax.devices()[0]
    devices = f"{jax.device_count()} devices, each" if jax.device_count() > 1 else "device"
    print(f"{Path(__file__).stem} on {args.env}, seed {args.seed}, into {folder}")
    print(f"{devices} {device.platform} ({device.device_kind}), {buffers}", flush=True)
    if device.platform == "cpu" and args.preset == "paper":
        print("no accelerator was found: --preset laptop has sizes that suit a CPU", flush=True)
    flag = "--xla_cpu_use_fusion_emitters=false"
    is_robot = args.env.startswith(("ant", "humanoid", "arm"))
    if device.platform == "cpu" and is_robot and flag not in os.environ.get("XLA_FLAGS", ""):
        print(f"robots step faster on a CPU, the arm 100 times as fast, with XLA_FLAGS={flag}", flush=True)
    seconds = float(rows[-1]["seconds"]) if rows else 0.0
    if jax.device_count() == 1:
        return folder, state or init(), seconds
    return folder, jax.jit(lambda state: shard_state(state or init()))(jax.device_get(state)), seconds


def compile_iteration(args, env, state):
    """train_iteration for this state, compiled now, so that the first iteration is timed like the others."""
    began = time.time()
    iterate = train_iteration.lower(args, env, state).compile()
    print(f"compiled in {clock(time.time() - began)}", flush=True)
    return iterate


def finite_metrics(args, folder, iteration, metrics):
    """The metrics as numbers. One that is not finite ends the run; but before the first update, and while the
    parameters are finite, nan means: no value yet. There is no episode length while no episode ends."""
    values = {name: float(metrics[name]) for name in METRICS if name in metrics}
    missing = [name for name, x in values.items() if not math.isfinite(x)]
    waiting = iteration < args.first_update and math.isfinite(values.get("parameter_norm", 0.0))
    for name in missing:
        no_value = waiting or name == "episode_length"
        if not no_value or not math.isnan(values[name]):
            words = f"iteration {iteration}: {name} is {values[name]}"
            fail(f"{words}; the last good checkpoint, if any, is kept in {folder}", code=1)
    return {name: x for name, x in values.items() if name not in missing}


def show_progress(args, bar, row):
    """On a terminal tqdm's bar; elsewhere a line for each twentieth of the run."""
    name = "coverage" if "coverage" in row else "achievements"
    result = f"{name} {round(row[name], 2):,.10g}, {row['steps_per_second']:,.0f} steps/s"
    iterations_left = args.num_iterations - row["iteration"]
    if not bar.disable:
        bar.set_postfix_str(result, refresh=False)
        bar.update()
    elif row["iteration"] % math.ceil(args.num_iterations / 20) == 0 or not iterations_left:
        left = f"{clock(iterations_left * args.steps_per_iteration / row['steps_per_second'])} left"
        when = left if row["iteration"] >= args.first_update else "not learning yet"
        print(f"{row['iteration'] / args.num_iterations:4.0%}  {result}, {when}", flush=True)


def iterations(args, folder, state, seconds, iterate):
    """Yield (state, row of metrics, whatever else iterate returns) after each iteration. Writes metrics.csv, shows the
    progress, and saves checkpoints when the caller is done with the iteration. Stops at Ctrl-C and SIGTERM."""
    track = args.track and jax.process_index() == 0
    if track:
        import wandb

        wandb.init(project="ctec", id=folder.name, resume="allow", config=dataclasses.asdict(args), dir=folder)
    received = []  # signals
    handle = lambda number, _: received.append(signal.Signals(number))
    handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    first = int(state.iteration) + 1
    layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    bar = tqdm(total=args.num_iterations, initial=first - 1, bar_format=layout, disable=None)  # None: if no terminal
    log = open(folder / "metrics.csv" if jax.process_index() == 0 else os.devnull, "a", newline="")
    writer = csv.DictWriter(log, METRICS, lineterminator="\n")
    recent = collections.deque(maxlen=20)  # seconds of the latest iterations, without those before the first update
    saved = time.time()
    try:
        for iteration in range(first, args.num_iterations + 1):
            began = time.time()
            state, metrics, *more = iterate(state)
            metrics = jax.device_get(metrics)
            spent = time.time() - began
            seconds += spent
            if iteration <= args.first_update:
                recent.clear()
            recent.append(spent)

            values = finite_metrics(args, folder, iteration, metrics)
            rate = len(recent) * args.steps_per_iteration / sum(recent)
            row = {"iteration": iteration, "steps": iteration * args.steps_per_iteration}
            row |= {"seconds": round(seconds, 1), "steps_per_second": round(rate, 1)} | values
            writer.writerow(row)
            log.flush()
            if track:
                wandb.log(row, step=row["steps"])
            show_progress(args, bar, row)
            yield state, row, *more

            last = iteration == args.num_iterations
            due = time.time() - saved >= 60 * args.checkpoint_minutes
            stopped, due = np.any(all_gather(np.array([[bool(received), due]])), axis=0)
            if stopped or last or due:
                try:
                    save_checkpoint(folder / "checkpoint.npz", state)
                except (OSError, MemoryError) as error:  # there may be room again before the next one
                    if stopped or last:
                        raise
                    bar.write(f"warning: checkpoint not written, the last good one stays: {error}", file=sys.stderr)
                saved = time.time()
            if stopped and not last:
                bar.close()
                by = received[0] if received else signal.SIGTERM  # which another process received
                fail(f"stopped by {by.name}; go on with: python {Path(__file__).name} --resume {folder}", code=128 + by)
    finally:
        bar.close()
        log.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if track:
            wandb.finish()


# ---------------------------------------------------------------------------------------------------- pictures
def picture_iterations(args):
    """Five moments of a run, the end among them."""
    return {round(k * args.num_iterations / 5) for k in range(1, 6)}


def save_bars(folder, title, bars):
    """achievements.png: the share of episodes that unlocked each achievement, for each {label: (22,) rates}."""
    from matplotlib.figure import Figure

    figure = Figure((8, 7), layout="constrained")
    axes = figure.add_subplot()
    place = np.arange(len(ACHIEVEMENTS))
    height = 0.8 / len(bars)
    for i, (label, rates) in enumerate(bars.items()):
        rates = np.asarray(rates)
        color = ("tab:blue", "0.7")[i]
        y = place + (i + 0.5) * height - 0.4
        drawn = axes.barh(y, 100 * rates, height, color=color, label=f"{label}: sum {rates.sum():.2f}")
        axes.bar_label(drawn, [f"{100 * x:.1f}" if x else "0" for x in rates], padding=2, fontsize=6)
    axes.set(yticks=place, yticklabels=[name.replace("_", " ") for name in ACHIEVEMENTS], xlim=(0, 108), title=title)
    axes.set_xlabel("episodes that unlocked it (%)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    write_atomically(folder / "achievements.png", lambda file: figure.savefig(file, dpi=100))


@functools.partial(jax.jit, static_argnums=(0, 1))
def watch_at_random(args, env, key):
    """(video_steps, 1, ...) worlds of one environment, and whether its episode ended with each step."""

    def step(now, key):
        after, done = act_at_random(env, now, key)
        return after, (now.world, done)

    key_start, key_steps = jax.random.split(key)
    start = init_worlds(env, key_start, 1)
    return jax.lax.scan(step, start, jax.random.split(key_steps, args.video_steps))[1]


def save_gif(folder, worlds, done):
    """rollout.gif: the first episode of the worlds (T, 1, ...), drawn by Craftax, with the achievements it unlocks."""
    from craftax.craftax_classic import renderer
    from PIL import Image, ImageDraw, ImageFont

    size = 16
    font = ImageFont.load_default(13)
    # the textures of this size only, without Craftax's cache, a file among its sources
    renderer.load_all_textures = lambda: {size: renderer.load_all_textures_given_size(size)}
    length = int(np.argmax(done)) + 1 if np.any(done) else len(done)
    worlds = jax.tree.map(lambda x: x[:length, 0], worlds)
    frames = np.asarray(jax.lax.map(renderer.make_craftax_pixel_renderer(size), worlds)).astype(np.uint8)
    unlocked = np.asarray(worlds.achievements)  # (length, 22)
    since = np.where(unlocked[-1], np.argmax(unlocked, axis=0), length)
    pictures = []
    for t, frame in enumerate(frames):
        height = 2 * frame.shape[0]
        width = 2 * frame.shape[1]
        picture = Image.new("RGB", (width + 190, height), "black")
        picture.paste(Image.fromarray(frame).resize((width, height), Image.NEAREST))
        lines = [(f"step {t} of {length}", "white")]
        for i in np.argsort(since, kind="stable")[: unlocked[t].sum()]:
            color = "yellow" if t - since[i] < 10 else "gray"
            lines.append((f"{since[i]:4d}  {ACHIEVEMENTS[i].replace('_', ' ')}", color))
        for row, (text, color) in enumerate(lines):
            ImageDraw.Draw(picture).text((width + 10, 6 + 15 * row), text, color, font)
        pictures.append(picture.quantize(64))
    options = dict(format="GIF", save_all=True, append_images=pictures[1:], duration=100, loop=0)
    write_atomically(folder / "rollout.gif", lambda file: pictures[0].save(file, **options))


# -------------------------------------------------------------------------------------------------------- main
def parse_args(argv=None):
    """Explicit flags win over the preset, the preset over the paper's changes for one robot, those over the defaults.
    With --resume, explicit flags win over the arguments of the earlier run."""
    parse = functools.partial(tyro.cli, Args, args=argv, description=__doc__)
    args = parse()
    if not args.resume:
        robot = args.env.split("_")[0]
        return parse(default=Args(**PAPER.get(robot, {}) | PRESETS[args.preset]))
    try:
        earlier = json.loads((Path(args.resume) / "args.json").read_text())
        default = Args(**earlier | {"resume": args.resume})
    except (OSError, ValueError, TypeError) as error:
        fail(f"--resume {args.resume}: it is not the folder of a run of this script ({error})")
    return parse(default=default)


MAY_BE_ZERO = ("seed", "checkpoint_minutes", "logsumexp_penalty", "noise", "forward_coef", "entropy_coef", "value_coef",
               "task_reward_coef", "intrinsic_coef", "random_iterations", "video_steps", "reward_momentum",
               "gae_lambda", "slip", "epsilon", "first_offset")  # fmt: skip
AT_MOST_ONE = ("gamma", "target_rate", "gae_lambda", "forward_weight")
BELOW_ONE = ("gamma_cl", "reward_momentum")


def check_numbers(args):
    """One line and exit code 2 for out-of-range arguments."""
    if not args.run_dir:
        fail("--run-dir: it must not be empty")
    for name, value in dataclasses.asdict(args).items():
        if type(value) not in (int, float):
            continue
        flag = f"--{name.replace('_', '-')} {value}"
        if not math.isfinite(value):
            fail(f"{flag}: it must be a finite number")
        if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
            fail(f"{flag}: it must be {'at least' if name in MAY_BE_ZERO else 'above'} 0")
        if value > 1 and name in AT_MOST_ONE:
            fail(f"{flag}: it must be at most 1")
        if value >= 1 and name in BELOW_ONE:
            fail(f"{flag}: it must be below 1")
        if value >= 2**32 and name == "seed":
            fail(f"{flag}: it must be below 2^32")
        if name in ("num_envs", "batch_size") and value % jax.device_count():
            fail(f"{flag}: it must be a multiple of the {jax.device_count()} devices")


def finish_craftax(folder, row, random_rates):
    """The last lines of a run, and what main returns."""
    pictures = sorted(path.name for path in folder.glob("*") if path.suffix in (".png", ".gif"))
    result = f"achievements {row['achievements']:.2f} an episode after {row['steps']:,} steps"
    print(f"{result} in {clock(row['seconds'])} (uniform random actions: {float(np.sum(random_rates)):.2f})")
    print(f"pictures {', '.join(pictures)}")
    print(f"folder   {folder}")
    return row | {"folder": str(folder)}


def main(args):
    """A loop around train_iteration. Returns the last row of metrics, with the run's folder."""
    if args.distributed:
        join_processes()
    check_numbers(args)
    env = make_craftax()
    init = functools.partial(init_state, args, env)
    folder, state, seconds = start_run(args, init, jax.eval_shape(init), "no rollout buffer")
    iterate = compile_iteration(args, env, state)
    for state, row in iterations(args, folder, state, seconds, iterate):
        if row["iteration"] in picture_iterations(args):
            title = f"{Path(__file__).stem}, seed {args.seed}, {row['steps']:,} steps"
            save_bars(folder, title, {"uniform random actions": achievement_rates(state.episodes)})
    if args.video_steps:
        print("drawing rollout.gif", flush=True)
        save_gif(folder, *watch_at_random(args, env, jax.random.fold_in(state.key, 1)))
    return finish_craftax(folder, row, achievement_rates(state.episodes))


if __name__ == "__main__":
    try:
        main(parse_args())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        fail(f"{error}; the last good checkpoint, if there was one, is untouched", code=1)
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C", code=130)
