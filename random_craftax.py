"""Uniform random actions on Craftax-Classic.

What exploration without learning unlocks, as a baseline of C-TeC (Mohamed et al., "Temporal Representations for
Exploration", ICLR 2026): the game, the achievements and the pictures of ctec_ppo_rnn_craftax.py, and nothing else.

    python random_craftax.py                          # the paper's number of steps
    python random_craftax.py --preset laptop          # as many as the other scripts' preset
    python random_craftax.py --resume runs/<folder>   # go on from the last checkpoint
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "craftax==1.6.1", "numpy==2.4.6", "tyro==1.0.16",
#   "matplotlib==3.11.2", "pillow==13.0.0", "wandb==0.31.0",
# ]
# ///
import contextlib
import dataclasses
import functools
import io
import json
import os
import re
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


# ---------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    env: Literal["craftax_classic"] = "craftax_classic"
    """environment: Craftax-Classic-Symbolic-v1"""
    preset: Literal["paper", "laptop"] = "paper"
    """paper: the published sizes. laptop: the same algorithm in minutes on a CPU. Explicit flags win over it"""
    seed: int = 1
    """seed of everything random"""
    total_timesteps: int = 1_000_000_000
    """environment steps, all environments together (paper Table 5)"""
    resume: str = ""
    """folder of an earlier run: go on from its checkpoint, with its arguments"""
    run_dir: str = "runs"
    """where the folder of the run is made"""
    checkpoint_minutes: float = 10.0
    """time between checkpoints; there is one at the end, at Ctrl-C and at SIGTERM anyway"""
    track: bool = False
    """send the metrics to wandb too, project "ctec" (WANDB_MODE=offline works)"""
    video_steps: int = 500
    """longest rollout.gif, in steps of an episode of the final policy; 0: none"""
    episode_window: int = 1024
    """finished episodes, the latest ones, over which the achievement rates are taken"""

    num_envs: int = 1024
    """parallel environments (Craftax baselines)"""
    num_steps: int = 64
    """steps in each environment before the update of an iteration (paper Table 5)"""
    reset_ratio: int = 16
    """optimistic resets: one new world is made for this many environment steps (Craftax baselines)"""

    @property
    def num_iterations(self):
        return -(-self.total_timesteps // (self.num_envs * self.num_steps))


PAPER = {}  # there is one environment, and the defaults are its numbers
PRESETS = {
    "paper": {},
    "laptop": dict(total_timesteps=2_500_000, num_envs=64, reset_ratio=128, checkpoint_minutes=2.0),
}


# ------------------------------------------------------------------------------------------------- environments
ACHIEVEMENTS = """collect_wood place_table eat_cow collect_sapling collect_drink make_wood_pickaxe make_wood_sword
    place_plant defeat_zombie collect_stone place_stone eat_plant defeat_skeleton make_stone_pickaxe make_stone_sword
    wake_up place_furnace collect_coal collect_iron collect_diamond make_iron_pickaxe make_iron_sword""".split()


class CraftaxClassic:
    """Craftax-Classic-Symbolic-v1, without its auto-reset."""

    state_size, num_actions = 1345, 17

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


# ------------------------------------------------------------------------------------------------- achievements
@flax.struct.dataclass
class Episodes:
    """The latest finished episodes, in a ring: number k is in row k % W."""

    achievements: jax.Array  # (W, 22) bool
    length: jax.Array  # (W,)
    reward: jax.Array  # (W,) the game's
    count: jax.Array  # () finished so far


def no_episodes(args):
    zero = lambda *size, dtype=jnp.int32: jnp.zeros((args.episode_window, *size), dtype)
    return Episodes(zero(len(ACHIEVEMENTS), dtype=bool), zero(), zero(dtype=jnp.float32), jnp.int32(0))


def insert_episodes(episodes, done, achievements, length, reward):
    """Adds those of T x N steps that end an episode; if there are more than W of them, the last W."""
    rank = jnp.cumsum(done.ravel())
    keep = done.ravel() & (rank > rank[-1] - len(episodes.length))
    row = jnp.where(keep, (episodes.count + rank - 1) % len(episodes.length), len(episodes.length))
    put = lambda ring, x: ring.at[row].set(x.reshape(-1, *x.shape[2:]), mode="drop")
    rings = episodes.achievements, episodes.length, episodes.reward
    return Episodes(*map(put, rings, (achievements, length, reward)), episodes.count + rank[-1])


def achievement_rates(episodes):
    """(22,) fraction of the latest episodes that unlocked each; 0 before the first one ended."""
    return jnp.sum(episodes.achievements, axis=0) / jnp.clip(episodes.count, 1, len(episodes.length))


def crafter_score(rates):
    return jnp.exp(jnp.mean(jnp.log(1 + 100 * rates))) - 1


def episode_metrics(episodes):
    rates, stored = achievement_rates(episodes), jnp.clip(episodes.count, 1, len(episodes.length))
    return dict(zip(ACHIEVEMENTS, rates)) | dict(
        achievements=jnp.sum(rates), crafter_score=crafter_score(rates), episodes=episodes.count,
        episode_length=jnp.sum(episodes.length) / stored, episode_return=jnp.sum(episodes.reward) / stored,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class Worlds:
    """What goes from step to step, (N, ...)."""

    world: Any  # Craftax's state
    length: jax.Array  # steps and reward of the episode so far
    reward: jax.Array


@flax.struct.dataclass
class TrainState:
    key: jax.Array
    iteration: jax.Array
    worlds: Worlds
    episodes: Episodes


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env = jax.random.split(jax.random.PRNGKey(args.seed))
    return TrainState(key, jnp.int32(0), new_worlds(env, key_env, args.num_envs), no_episodes(args))


def new_worlds(env, key, number):
    """They are made 32 at a time: more need much memory, and a CPU is slower with more."""
    world, _ = jax.lax.map(env.reset, jax.random.split(key, number), batch_size=32)
    return Worlds(world, jnp.zeros(number, jnp.int32), jnp.zeros(number))


def act_at_random(env, now, key):
    """One uniform step in every environment, without resets: the worlds after it, and where an episode ended."""
    key_action, key_env = jax.random.split(key)
    action = jax.random.randint(key_action, now.length.shape, 0, env.num_actions)
    keys = jax.random.split(key_env, len(action))
    world, _, reward, done = jax.vmap(env.step)(keys, now.world, action)
    return Worlds(world, now.length + 1, now.reward + reward), done


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_iteration(args, env, state):
    """`num_steps` uniform steps in every environment. Nothing is trained. An episode that ends goes on in a new world;
    these are made beforehand, one for `reset_ratio` environment steps, and taken in turn."""
    key, key_worlds, key_steps = jax.random.split(state.key, 3)
    starts = new_worlds(env, key_worlds, -(-args.num_envs * args.num_steps // args.reset_ratio))

    def step(carry, key):
        now, used = carry
        after, done = act_at_random(env, now, key)
        ended = done, after.world.achievements, after.length, after.reward  # before the reset
        fresh = (used + jnp.cumsum(done) - 1) % len(starts.length)
        restart = lambda start, x: jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), start[fresh], x)
        return (jax.tree.map(restart, starts, after), used + jnp.sum(done)), ended

    (worlds, _), ended = jax.lax.scan(step, (state.worlds, 0), jax.random.split(key_steps, args.num_steps))
    episodes = insert_episodes(state.episodes, *ended)
    return TrainState(key, state.iteration + 1, worlds, episodes), episode_metrics(episodes)


# ------------------------------------------------------------------------------- logging, pictures, checkpoint
METRICS = """iteration steps seconds steps_per_second achievements crafter_score episodes episode_length
    episode_return""".split() + ACHIEVEMENTS


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def clock(seconds):
    unit, name = (1, "s") if seconds < 90 else (60, "min") if seconds < 5400 else (3600, "h")
    return f"{seconds / unit:,.{int(unit > 1)}f} {name}"


def write_atomically(path, write):
    """write(file) into a temporary file, which then takes the place of path: a kill or a full disk loses nothing."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path, state):
    leaves = {jax.tree_util.keystr(name): np.asarray(x) for name, x in jax.tree_util.tree_leaves_with_path(state)}
    write_atomically(path, lambda file: file.write(flax.serialization.msgpack_serialize(leaves)))


def load_checkpoint(path, template):
    """The state in path, which must have the structure and the shapes of template."""
    try:
        leaves = flax.serialization.msgpack_restore(path.read_bytes())
        restore = lambda name, x: jnp.asarray(leaves[jax.tree_util.keystr(name)], x.dtype).reshape(x.shape)
        return jax.tree_util.tree_map_with_path(restore, template)
    except Exception as error:  # no file, half a file, a file that does not fit: each has its own
        fail(f"{path} is no checkpoint of this run ({error!r}): put a copy in its place, or start without --resume")


def start_run(args, init, buffer, flops):
    """The run's folder, its state (from init() or the checkpoint), and the seconds it took so far. The flops are those
    of an iteration; buffer says what takes the memory."""
    name = f"{args.env}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    folder, state, iteration, rows = Path(args.resume or f"{args.run_dir}/{name}"), None, 0, []
    if args.resume:
        state = load_checkpoint(folder / "checkpoint.msgpack", jax.eval_shape(init))
        header, *rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
        if header != METRICS:
            fail(f"{folder}/metrics.csv is of another version of this script")
        iteration = int(state.iteration)
        rows = [row for row in rows if len(row) == len(METRICS) and int(row[0]) <= iteration]
    if iteration >= args.num_iterations:
        fail(f"{folder} is complete; to go on, give more --total-timesteps than {args.total_timesteps:,}")
    folder.mkdir(parents=True, exist_ok=bool(args.resume))
    config = json.dumps(dataclasses.asdict(args) | {"resume": ""}, indent=1)
    table = "".join(",".join(row) + "\n" for row in [METRICS, *rows])
    write_atomically(folder / "args.json", lambda file: file.write(config.encode()))
    write_atomically(folder / "metrics.csv", lambda file: file.write(table.encode()))

    device, x = jax.devices()[0], jnp.ones((1024, 1024))
    multiply = jax.jit(jnp.matmul).lower(x, x).compile()
    began = time.time()
    jax.block_until_ready(multiply(x, x))
    seconds = 2 * flops * (args.num_iterations - iteration) * (time.time() - began) / 2**31  # half a product's rate
    expected = f"expected time about {clock(seconds)} for learning, plus the environments'" if flops else "no learning"
    print(f"{Path(__file__).stem} on {args.env}, seed {args.seed}, into {folder}")
    print(f"device {device.platform} ({device.device_kind}), {buffer}, {expected}", flush=True)
    if device.platform == "cpu" and args.preset == "paper":
        print("no accelerator was found: --preset laptop has sizes that suit a CPU", flush=True)
    return folder, state or init(), float(rows[-1][METRICS.index("seconds")]) if rows else 0.0


def show_progress(args, row, learning):
    """One line that is rewritten on a terminal; elsewhere a line for each twentieth of the run."""
    done, live, rate = row["iteration"] / args.num_iterations, sys.stdout.isatty(), row["steps_per_second"]
    left = f"{clock(row['steps'] * (1 / done - 1) / rate)} left   " if learning else "not learning yet"
    if live or done == 1 or row["iteration"] % -(-args.num_iterations // 20) == 0:
        name = next(name for name in METRICS[4:] if name in row)  # coverage, or achievements
        result = f"{name} {round(row[name], 2):,.10g}"
        bar = f"[{'#' * int(30 * done):30}] {done:4.0%}  {result}  {rate:,.0f} steps/s  {left}"
        print(bar, end="\r" if live and done < 1 else "\n", flush=True)


def iterations(args, folder, state, seconds, steps, iterate):
    """The state, a row of metrics, and whatever else iterate returns, after each iteration. Writes metrics.csv and,
    when the caller is done with the iteration, the checkpoint; shows the progress; stops at Ctrl-C, at SIGTERM, and
    when a metric is not finite (-inf means: no value yet)."""
    if args.track:
        import wandb

        wandb.init(project="ctec", id=folder.name, resume="allow", config=dataclasses.asdict(args), dir=folder)
    log, stop, recent, saved, learning = open(folder / "metrics.csv", "a"), [], [], time.time(), False
    handlers = {number: signal.signal(number, lambda number, _: stop.append(number)) for number in (2, 15)}
    try:
        for iteration in range(int(state.iteration) + 1, args.num_iterations + 1):
            began, last = time.time(), iteration == args.num_iterations
            state, metrics, *more = iterate(state)
            metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
            spent, values = time.time() - began, {name: metrics[name] for name in METRICS if name in metrics}
            bad = [name for name, x in values.items() if not np.isfinite(x) and (learning or x != -np.inf)]
            if bad:
                words = f"iteration {iteration}: {bad[0]} is {values[bad[0]]}"
                fail(f"{words}; the last good checkpoint, if there was one, is untouched in {folder}", code=1)
            learning, seconds = -np.inf not in values.values(), seconds + spent
            recent = [*recent[-19:], spent] if learning else []
            row = {"iteration": iteration, "steps": iteration * steps, "seconds": round(seconds, 1)}
            row |= {"steps_per_second": round(steps * max(len(recent), 1) / sum(recent or [spent]), 1)}
            row |= {name: x for name, x in values.items() if np.isfinite(x)}
            log.write(",".join(str(row.get(name, "")) for name in METRICS) + "\n")
            log.flush()
            show_progress(args, row, learning)
            if args.track:
                wandb.log(row, step=row["steps"])
            yield state, row, *more
            if stop or last or time.time() - saved >= 60 * args.checkpoint_minutes:
                try:
                    save_checkpoint(folder / "checkpoint.msgpack", state)
                except OSError as error:  # a full disk may have room again before the next one
                    if stop or last:
                        raise
                    print(f"\nwarning: checkpoint not written, the last good one stays: {error}", file=sys.stderr)
                saved = time.time()
            if stop and not last:
                go_on = f"go on with: python {Path(__file__).name} --resume {folder}"
                fail(f"stopped by signal {stop[0]}; {go_on}", code=128 + stop[0])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        log.close()
        if args.track:
            wandb.finish()


def save_bars(folder, title, bars):
    """achievements.png: the share of episodes that unlocked each achievement, for each {label: (22,) rates}."""
    from matplotlib.figure import Figure

    figure, place, height = Figure((8, 7), layout="constrained"), np.arange(len(ACHIEVEMENTS)), 0.8 / len(bars)
    axes = figure.add_subplot()
    for i, (label, rates) in enumerate(bars.items()):
        shift, color, rates = (i + 0.5) * height - 0.4, ("tab:blue", "0.7")[i], np.asarray(rates)
        drawn = axes.barh(place + shift, 100 * rates, height, color=color, label=f"{label}: sum {rates.sum():.2f}")
        axes.bar_label(drawn, [f"{100 * x:.1f}" if x else "0" for x in rates], padding=2, fontsize=6)
    axes.set(yticks=place, yticklabels=[name.replace("_", " ") for name in ACHIEVEMENTS], xlim=(0, 108), title=title)
    axes.set_xlabel("episodes that unlocked it (%)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.savefig(folder / "achievements.png", dpi=100)


@functools.partial(jax.jit, static_argnums=(0, 1))
def watch_at_random(args, env, key):
    """The worlds of one environment for `video_steps` steps, and whether its episode ended with each."""

    def step(now, key):
        after, done = act_at_random(env, now, key)
        return after, (now.world, done)

    key_start, key_steps = jax.random.split(key)
    keys = jax.random.split(key_steps, args.video_steps)
    return jax.lax.scan(step, new_worlds(env, key_start, 1), keys)[1]  # (video_steps, 1, ...)


def save_gif(folder, worlds, done):
    """rollout.gif: the first episode of the worlds (T, 1, ...), drawn by Craftax, with the achievements it unlocks."""
    from craftax.craftax_classic import renderer
    from PIL import Image, ImageDraw, ImageFont

    size, font = 16, ImageFont.load_default(13)
    # the textures of this size only, without Craftax's cache, a file among its sources
    renderer.load_all_textures = lambda: {size: renderer.load_all_textures_given_size(size)}
    length = int(np.argmax(done)) + 1 if np.any(done) else len(done)
    worlds = jax.tree.map(lambda x: x[:length, 0], worlds)
    frames = np.asarray(jax.lax.map(renderer.make_craftax_pixel_renderer(size), worlds)).astype(np.uint8)
    unlocked, pictures = np.asarray(worlds.achievements), []  # (length, 22)
    since = np.where(unlocked[-1], np.argmax(unlocked, axis=0), length)
    for t, frame in enumerate(frames):
        picture = Image.new("RGB", (2 * frame.shape[1] + 190, 2 * frame.shape[0]), "black")
        picture.paste(Image.fromarray(frame).resize((2 * frame.shape[1], 2 * frame.shape[0]), Image.NEAREST))
        lines = [(f"step {t} of {length}", "white")]
        for i in np.argsort(since, kind="stable")[: unlocked[t].sum()]:
            color = "yellow" if t - since[i] < 10 else "gray"
            lines.append((f"{since[i]:4d}  {ACHIEVEMENTS[i].replace('_', ' ')}", color))
        for row, (text, color) in enumerate(lines):
            ImageDraw.Draw(picture).text((2 * frame.shape[1] + 10, 6 + 15 * row), text, color, font)
        pictures.append(picture.quantize(64))
    options = dict(format="GIF", save_all=True, append_images=pictures[1:], duration=100, loop=0)
    write_atomically(folder / "rollout.gif", lambda file: pictures[0].save(file, **options))


# --------------------------------------------------------------------------------------------------------- main
def parse_args(argv=None):
    """The paper's numbers, then the preset's, or those of the run that is resumed; explicit flags win."""

    def parse(default):
        try:
            with contextlib.redirect_stderr(io.StringIO()) as box:
                return tyro.cli(Args, args=argv, default=default, description=__doc__)
        except SystemExit as stop:
            if not stop.code:
                raise
            message = re.split("[─-]{4,}", box.getvalue())[1]  # the first part of tyro's framed one
            fail(" ".join(re.sub("[│╮]", " ", message).split()).rstrip(".") + "; see --help")

    args = parse(Args())
    if not args.resume:
        return parse(Args(**PAPER.get(args.env.split("_")[0], {}) | PRESETS[args.preset]))
    try:
        return parse(Args(**json.loads((Path(args.resume) / "args.json").read_text()) | {"resume": args.resume}))
    except (OSError, ValueError, TypeError) as error:
        fail(f"--resume {args.resume}: it is not the folder of a run of this script ({error})")


def check_numbers(args):
    """One line and exit code 2 for a number that makes no sense."""
    for name, value in dataclasses.asdict(args).items():
        zero, number = re.search("seed|minutes|coef|penalty|random|video", name), type(value) in (int, float)
        if number and not (value > 0 or (zero and value == 0)):
            fail(f"--{name.replace('_', '-')} {value}: it must be {'at least' if zero else 'above'} 0")
        if name.startswith("gamma") and value >= 1:
            fail(f"--{name.replace('_', '-')} {value}: it must be below 1")


def finish_craftax(folder, row, random_rates):
    """The last lines of a run, and what main returns."""
    pictures = ", ".join(sorted(path.name for path in folder.iterdir() if path.suffix in (".png", ".gif")))
    print(f"achievements {row['achievements']:.2f} an episode after {row['steps']:,} steps in {clock(row['seconds'])} "
          f"(uniform random actions: {float(np.sum(random_rates)):.2f})")  # fmt: skip
    print(f"pictures {pictures}\nfolder   {folder}")
    return row | {"folder": str(folder)}


def main(args):
    """A loop around train_iteration. Returns the last row of metrics, with the run's folder."""
    check_numbers(args)
    env, steps = make_craftax(), args.num_envs * args.num_steps
    folder, state, seconds = start_run(args, lambda: init_state(args, env), "no rollout buffer", 0)
    moments, began = {round(k * args.num_iterations / 5) for k in range(1, 6)}, time.time()
    iterate = train_iteration.lower(args, env, state).compile()
    print(f"compiled in {clock(time.time() - began)}", flush=True)
    for state, row in iterations(args, folder, state, seconds, steps, iterate):
        if row["iteration"] in moments:
            title = f"{Path(__file__).stem}, seed {args.seed}, {row['steps']:,} steps"
            save_bars(folder, title, {"uniform random actions": achievement_rates(state.episodes)})
    if args.video_steps:
        print("drawing rollout.gif", flush=True)
        save_gif(folder, *watch_at_random(args, env, state.key))
    return finish_craftax(folder, row, achievement_rates(state.episodes))


if __name__ == "__main__":
    try:
        main(parse_args())
    except OSError as error:  # a full disk, as a rule
        fail(f"{error}; the last good checkpoint, if there was one, is untouched", code=1)
    except KeyboardInterrupt:
        fail("stopped before the first iteration", code=130)
