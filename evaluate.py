"""Play the policy of a run's checkpoint: whole episodes, what they reached, pictures, and a film of the best one.

    python evaluate.py runs/<folder>                         # 64 episodes of the final policy
    python evaluate.py runs/<folder> --episodes 256 --deterministic --seed 7
    python evaluate.py runs/<a> runs/<b> runs/<c>            # side by side: one table, one picture

It plays the runs of every script that stands beside it, trains nothing, and writes into <folder>/evaluation only.
Columns of the table and files: docs/runs.md#playing-a-policy
"""

import dataclasses
import functools
import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # no line for each program that XLA loads from its cache

import flax
import jax
import jax.numpy as jnp
import numpy as np
import tyro

PART = 100  # steps between two looks at whether all episodes have ended
FRAMES = 200  # at most so many in a film: of a longer episode every second step, or every third, ...


# --------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    # folders of runs: runs/<env>__<script>__<seed>__<time>
    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER ...")]
    episodes: int = 64  # episodes of each run, all at once
    # play the policy's mode: tanh of the Gaussian's mean, or the most probable action. A random script stays random
    deterministic: bool = False
    seed: int = 1  # seed of start states, actions and worlds


@dataclasses.dataclass(frozen=True)
class Run:
    folder: Path
    script: Any  # module
    args: Any  # of the script
    env: Any
    unit: str  # what an episode is to reach: "bins", "achievements" or "cells" (noisy TV)


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def load_run(folder):
    """The run, the parameters of its policy (None: uniform actions), and the environment steps behind it. Nothing else
    of the checkpoint is read, which may be larger than the memory."""
    path = Path(folder).resolve()
    name = "".join(path.name.split("__")[1:2])
    if not path.is_dir():
        fail(f"{folder}: there is no such folder")
    script = importlib.import_module(name) if Path(__file__).with_name(f"{name}.py").exists() else None
    if not hasattr(script, "RunState"):
        fail(f"{folder}: its name is not <env>__<script>__<seed>__<time> with a script that learns or acts at random")
    try:
        given = json.loads((path / "args.json").read_text())
        args = script.Args(**{name: tuple(x) if isinstance(x, list) else x for name, x in given.items()})
        script.start_jax(args)
        make = getattr(script, "make_any_env", getattr(script, "make_env", None))  # None: noisy TV, recurrent PPO
        tv_or_craftax = getattr(script, "make_noisy_tv", lambda _: script.make_craftax())
        env = make(args.env) if make else tv_or_craftax(args)
        state = jax.eval_shape(functools.partial(script.init_state, args, env))
    except Exception as error:  # missing, damaged and foreign arguments raise different exceptions
        fail(f"{folder}: args.json does not fit this version of {name}.py ({' '.join(str(error).split())[:200]})")
    agent = getattr(state, "agent", None)
    actor = getattr(agent, "actor", agent)
    policy = "agent/params" if actor is agent else "agent/actor/params"  # the beginning of the arrays' names
    template = {"iteration": state.iteration, policy: getattr(actor, "params", None)}
    loaded = script.load_checkpoint(path / "checkpoint.npz", template)
    unit = "bins" if getattr(env, "position_size", 0) else "cells" if hasattr(env, "move") else "achievements"
    return Run(path, script, args, env, unit), loaded[policy], int(loaded["iteration"]) * args.steps_per_iteration


# ----------------------------------------------------------------------------------------------------- playing
@flax.struct.dataclass
class Players:  # the scan carry of a rollout, (N, ...)
    world: Any  # the state of maze or arm, or of Craftax, or the number of a cell
    obs: jax.Array
    hidden: jax.Array  # of the GRU
    length: jax.Array  # steps of the episode so far
    done: jax.Array  # bool: the episode has ended, and nothing changes any more


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_players(run, number, key):
    if run.unit == "cells":
        world = run.env.draw_starts(key, (number,))
        obs = run.env.observe(world, run.env.draw_colours(key, (number,)))
    else:
        world = jax.vmap(run.env.reset)(jax.random.split(key, number))
        world, obs = world if isinstance(world, tuple) else (world, world.obs)
    hidden = jnp.zeros((number, run.args.agent_width if hasattr(run.script, "policy") else 0))
    return Players(world, obs, hidden, jnp.zeros(number, jnp.int32), jnp.zeros(number, bool))


def choose_action(run, deterministic, params, now, key):
    """An action of each player, and the GRU's next state."""
    script, args, env = run.script, run.args, run.env
    if params is None and run.unit == "achievements":  # uniform
        return jax.random.randint(key, now.done.shape, 0, env.num_actions), now.hidden
    if params is None:
        return jax.random.uniform(key, (len(now.done), env.action_size), minval=-1.0, maxval=1.0), now.hidden
    if hasattr(script, "policy"):  # recurrent PPO
        hidden, log_probs, _ = script.policy(params, args, now.hidden, now.obs[None], (now.length == 0)[None])
        sample = jax.random.categorical(key, log_probs[0])
        return jnp.argmax(log_probs[0], axis=-1) if deterministic else sample, hidden
    if hasattr(script, "sample_action"):  # SAC
        sample, _ = script.sample_action(params, args, key, now.obs, env.action_size)
        mean, _ = jnp.split(script.MLP(args.agent_width, 2 * env.action_size).apply(params, now.obs), 2, axis=-1)
        return jnp.tanh(mean) if deterministic else sample, now.hidden
    actions = script.action_distribution(env)  # PPO
    output, _ = script.ActorCritic(args.agent_width, actions.outputs).apply(params, now.obs)
    mode = actions.mean_std(output)[0] if hasattr(actions, "mean_std") else jnp.argmax(output, axis=-1)
    return actions.vector(mode if deterministic else actions.sample(key, output)), now.hidden


def step_worlds(run, world, action, key):
    """One step in every world, without resets: the worlds, the observations, and which episodes have terminated."""
    if run.unit == "cells":
        cell = run.env.move(world, jnp.argmax(action, axis=-1))
        return cell, run.env.observe(cell, run.env.draw_colours(key, cell.shape)), jnp.zeros(cell.shape, bool)
    if hasattr(run.script, "make_craftax"):
        world, obs, _, done = jax.vmap(run.env.step)(jax.random.split(key, len(action)), world, action)
        return world, obs, done
    with jax.default_matmul_precision("highest"):  # no TF32 in the physics
        after = jax.vmap(run.env.step)(world, action)
    return after, after.obs, after.terminated | ~jnp.all(jnp.isfinite(after.obs), axis=-1)  # or the physics blew up


def game(world):
    return getattr(world, "physics", [world])[0]  # Craftax's own state


def observe(run, now, watched=0):
    """(N, ...) where the players are (metres, or the number of a cell), and what a film needs of the watched one: the
    state of Craftax, or the poses of a robot's links."""
    place = now.world[:, None] if run.unit == "cells" else now.obs[:, : getattr(run.env, "position_size", 0)]
    shown = game(now.world) if run.unit == "achievements" else ()
    if hasattr(run.env, "sys"):
        physics = now.world.physics  # of Brax, or of MuJoCo, where the first body is the ground
        shown = (physics.x.pos, physics.x.rot) if hasattr(physics, "x") else (physics.xpos[:, 1:], physics.xquat[:, 1:])
    return place, jax.tree.map(lambda x: x[watched], shown)


@functools.partial(jax.jit, static_argnums=(0, 1))
def play_part(run, deterministic, params, players, keys, watched):
    """A step for each key. Returns the players, and (places (T, N, ...), frames (T, ...) of the watched one)."""

    def step(now, key):
        key_action, key_world = jax.random.split(key)
        action, hidden = choose_action(run, deterministic, params, now, key_action)
        world, obs, ended = step_worlds(run, now.world, action, key_world)
        length = now.length + 1
        done = ended | (length >= getattr(run.args, "episode_length", 10**9))  # Craftax itself ends an episode too
        stay = lambda old, new: jnp.where(now.done.reshape(-1, *[1] * (new.ndim - 1)), old, new)
        after = jax.tree.map(stay, now, Players(world, obs, hidden, length, done))
        return after, observe(run, after, watched)

    return jax.lax.scan(step, players, keys)


def play(args, run, params, watched=0):
    """One episode of each player, to its end. Returns the players, their places (1 + T, N, ...) from the start on, and
    frames (T, ...) of the watched one. The episodes do not depend on who is watched."""
    key_start, key_steps = jax.random.split(jax.random.PRNGKey(args.seed))
    players = init_players(run, args.episodes, key_start)
    start, _ = observe(run, players)
    parts = []
    while not jnp.all(players.done):
        keys = jax.random.split(jax.random.fold_in(key_steps, len(parts)), PART)
        players, seen = play_part(run, args.deterministic, params, players, keys, watched)
        parts.append(jax.device_get(seen))
    players = jax.device_get(players)
    places, frames = jax.tree.map(lambda *x: np.concatenate(x)[: players.length.max()], *parts)
    return players, np.concatenate([start[None], places]), jax.tree.map(lambda x: x[: players.length[watched]], frames)


# ----------------------------------------------------------------------------------------------------- results
def summarize(run, players, places):
    """{name: (N,) numbers of the episodes}, and the row of the table. As in training, the start does not count."""
    if run.unit == "achievements":
        reached = [set(np.flatnonzero(unlocked)) for unlocked in game(players.world).achievements]
    else:
        place = np.floor(places / run.script.BIN) if run.unit == "bins" else places
        paths = np.moveaxis(place[1:], 1, 0)
        reached = [set(map(tuple, path[np.isfinite(path).all(axis=-1)].tolist())) for path in paths]
    number = np.array([len(one) for one in reached])
    row = {"mean": number.mean(), "deviation": number.std(), "best": number.max()}
    row |= {"together": len(set.union(*reached)), "length": players.length.mean()}
    episodes = {run.unit: number, "length": players.length}
    if run.unit == "bins":
        distance = np.linalg.norm(places[..., :2] - places[0, :, :2], axis=-1)  # on the floor
        episodes["furthest_m"] = np.where(np.isfinite(distance), distance, 0).max(axis=0)
        row["furthest_m"] = episodes["furthest_m"].mean()
    elif run.unit == "cells":
        row["at_tv"] = run.env.sees_tv[places[1:]].mean()
    else:
        row["crafter_score"] = run.script.crafter_score(game(players.world).achievements.mean(axis=0))
    row = {name: round(float(x), 3) for name, x in row.items()}
    return episodes, {"run": run.folder.name, "of": run.unit, **row}


def print_table(rows):
    """A line for each row {column: value}; a column that only others have is left empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    show = lambda x: f"{x:,.10g}" if isinstance(x, float) else x
    lines = [columns, *([show(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *others in lines:
        print(first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:])), sep="  ")


# ---------------------------------------------------------------------------------------------------- pictures
def draw_scene(axes, run, title, visits=0):
    """The maze, the arm's bins, or the grid of the noisy TV."""
    if run.unit == "bins":
        return run.script.draw_places(axes, run.env, title)
    return run.script.draw_visits(axes, run.env, title, np.broadcast_to(visits, run.env.size**2))


def draw_episodes(axes, run, row, players, places):
    """What all episodes reached: paths coloured by time, visits, or rates of achievements."""
    from matplotlib.collections import LineCollection

    method = getattr(run.args, "bonus", run.script.__name__.split("_")[0])
    title = f"{run.args.env}: {method}, seed {run.args.seed}\n{row['mean']:,.1f} {run.unit} in an episode, "
    title += f"{row['together']:,.0f} in all {len(players.length)} together"
    if run.unit == "bins":
        draw_scene(axes, run, title)
        lines = np.stack([places[:-1, :, :2], places[1:, :, :2]], axis=2)[::-1].reshape(-1, 2, 2)
        time = np.repeat(np.arange(len(places))[:0:-1], len(players.length))  # late to early: one sees the first visits
        near = np.all(np.abs(lines - run.env.start) < 200, axis=(1, 2))
        paths = LineCollection(lines[near], array=time[near], linewidths=0.8, zorder=3, cmap="viridis_r")
        axes.add_collection(paths)
        axes.autoscale_view()
        axes.figure.colorbar(paths, ax=axes, shrink=0.7, label="step of the episode")
    elif run.unit == "cells":
        visits = np.bincount(places[1:].ravel(), minlength=run.env.size**2)
        axes.figure.colorbar(draw_scene(axes, run, title, visits), ax=axes, shrink=0.7, label="visits")
    else:
        rates = 100 * game(players.world).achievements.mean(axis=0)
        bars = axes.barh([name.replace("_", " ") for name in run.script.ACHIEVEMENTS], rates)
        axes.bar_label(bars, [f"{x:.0f}" for x in rates], padding=2, fontsize=7)
        axes.set(title=title, xlim=(0, 108), xlabel="episodes that unlocked it (%)")
        axes.invert_yaxis()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def sample_rewards(script, args, env, state):
    """Position, reward and mask of 2^16 or more transitions of C-TeC's replay."""
    replay = script.index_trajectories(state.replay)

    def sample(key):
        key_batch, key_future = jax.random.split(key)
        batch = script.sample_batch(key_batch, args, replay)
        pairs = script.sample_futures(key_future, args, env, replay, batch)
        return batch.obs[:, :2], script.intrinsic_reward(state.model.params, args, pairs), pairs.mask

    return jax.lax.map(sample, jax.random.split(jax.random.fold_in(state.key, 1), math.ceil(2**16 / args.batch_size)))


def reward_map(script, args, env, state):
    """(bins, 3) place x, y of a bin, and the mean reward of the replay's transitions from there."""
    position, reward, mask = jax.device_get(sample_rewards(script, args, env, state))
    place, bins = np.unique(np.floor(position[mask > 0] / script.BIN), axis=0, return_inverse=True)
    return np.column_stack([place, np.bincount(bins.ravel(), reward[mask > 0]) / np.bincount(bins.ravel())])


def save_reward_map(run, folder):
    """reward_map.png: what C-TeC pays, by the place of s. The whole checkpoint is read."""
    from matplotlib.figure import Figure

    template = jax.eval_shape(functools.partial(run.script.init_state, run.args, run.env))
    state = run.script.load_checkpoint(run.folder / "checkpoint.npz", template)
    values = reward_map(run.script, run.args, run.env, state)
    figure = Figure((7, 6), layout="constrained")
    axes = figure.add_subplot()
    title = f"{run.args.env}, seed {run.args.seed}: mean reward by place"
    figure.colorbar(run.script.draw_places(axes, run.env, title, values[:, :2], values[:, 2]), ax=axes, shrink=0.7)
    run.script.write_atomically(folder / "reward_map.png", lambda file: figure.savefig(file, dpi=100))


def save_picture(path, panels):
    from matplotlib.figure import Figure

    figure = Figure((7 * len(panels), 6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        draw_episodes(axes, *panel)
    panels[0][0].script.write_atomically(path, lambda file: figure.savefig(file, dpi=100, bbox_inches="tight"))


def save_viewer(run, folder, poses):
    """rollout.html: Brax's viewer, in real time."""
    from brax import base
    from brax.io import html

    is_maze = hasattr(run.env, "build")
    scene = run.env.build(following=False) if is_maze else run.env.sys
    stride = math.ceil(len(poses[0]) / FRAMES)
    seconds = stride * float(scene.opt.timestep) * (10 if is_maze else 25)  # physics steps in a step
    links = [base.Transform(*pose) for pose in zip(*(np.round(x[::stride].astype(float), 4) for x in poses))]
    states = [base.State(q=None, qd=None, x=x, xd=None, contact=None) for x in links]
    viewer = html.render(scene.tree_replace({"opt.timestep": seconds}), states)
    run.script.write_atomically(folder / "rollout.html", lambda file: file.write(viewer.encode()))


def save_gif(run, folder, path, worlds):
    """rollout.gif: the worlds (T, ...) of Craftax, and the steps of the achievements so far; or a disc that moves along
    the path (T, ...), with its trail."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    size = 16  # pixels of a cell of Craftax
    figure = Figure((7, 5), dpi=70)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    stride = math.ceil(len(path) / FRAMES)
    if run.unit == "achievements":
        from craftax.craftax_classic import renderer

        # the textures of this size only, and without Craftax's cache, a file among its sources
        renderer.load_all_textures = lambda: {size: renderer.load_all_textures_given_size(size)}
        shown = jax.tree.map(lambda x: x[::stride], worlds)
        pictures = np.asarray(jax.lax.map(renderer.make_craftax_pixel_renderer(size), shown)).astype(np.uint8)
        axes.set(position=(0.01, 0.02, 0.62, 0.9), xticks=[], yticks=[])
        picture = axes.imshow(pictures[0])
        words = axes.text(1.03, 1, "", va="top", transform=axes.transAxes)
        unlocked_at = np.argmax(worlds.achievements, axis=0) + 1
    else:
        draw_scene(axes, run, "")
        path = path if run.unit == "bins" else np.concatenate([path % run.env.size, path // run.env.size], axis=-1)
        (trail,) = axes.plot([], [], color="tab:blue", zorder=3)
        (disc,) = axes.plot([], [], "o", color="tab:orange", zorder=4)
    images = []
    for t in range(0, len(path), stride):
        axes.set_title(f"step {t + 1} of {len(path)}")
        if run.unit == "achievements":
            picture.set_data(pictures[t // stride])
            known = [i for i in np.argsort(unlocked_at, kind="stable") if worlds.achievements[t, i]]
            lines = [f"{unlocked_at[i]}  {run.script.ACHIEVEMENTS[i].replace('_', ' ')}" for i in known]
            words.set_text("\n".join(lines))
        else:
            trail.set_data(*path[: t + 1].T)
            disc.set_data(*path[t : t + 1].T)
        canvas.draw()
        images.append(np.array(canvas.buffer_rgba())[..., :3])
    # one palette for all: the film is a fifth as large
    palette = Image.fromarray(np.concatenate(images[:: len(images) // 8 + 1])).quantize(64, Image.Quantize.FASTOCTREE)
    first, *others = [Image.fromarray(image).quantize(palette=palette, dither=0) for image in images]
    options = dict(format="GIF", save_all=True, append_images=others, duration=50, loop=0)
    run.script.write_atomically(folder / "rollout.gif", lambda file: first.save(file, **options))


# -------------------------------------------------------------------------------------------------------- main
def evaluate(args, run, params, steps):
    """Play one run and write its files. Returns what a panel of a picture needs."""
    players, places, _ = play(args, run, params)
    episodes, row = summarize(run, players, places)
    panel = (run, row, players, places)
    folder = run.folder / "evaluation"
    folder.mkdir(exist_ok=True)
    report = row | {"steps": steps, "seed": args.seed, "deterministic": args.deterministic}
    report["episodes"] = {name: x.tolist() for name, x in episodes.items()}
    text = json.dumps(report, indent=1)
    run.script.write_atomically(folder / "evaluation.json", lambda file: file.write(text.encode()))
    save_picture(folder / ("achievements.png" if run.unit == "achievements" else "paths.png"), [panel])
    if hasattr(run.script, "sample_futures") and run.args.intrinsic_coef:
        save_reward_map(run, folder)
    best = int(np.argmax(episodes[run.unit]))
    if hasattr(run.env, "sys"):
        save_viewer(run, folder, play(args, run, params, best)[2])
    else:
        worlds = play(args, run, params, best)[2] if run.unit == "achievements" else None
        save_gif(run, folder, places[1 : players.length[best] + 1, best], worlds)
    return panel


def main(args):
    """Play the runs one after the other. Returns the rows of the table."""
    if not args.folders or args.episodes < 1 or not 0 <= args.seed < 2**32:
        fail("give the folder of a run, at least 1 of --episodes, and a --seed from 0 to 2^32 - 1")
    if any(Path(folder).name.startswith(("ant", "humanoid", "arm")) for folder in args.folders):
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")  # robots step faster on a CPU
    panels = []
    for run, params, steps in [load_run(folder) for folder in args.folders]:
        print(f"playing {args.episodes} episodes of {run.folder.name}, after {steps:,} steps", flush=True)
        panels.append(evaluate(args, run, params, steps))
    folder = panels[0][0].folder / "evaluation"
    if len(panels) > 1:
        save_picture(folder / "comparison.png", panels)
    rows = [row for _, row, *_ in panels]
    print_table(rows)
    print(f"{', '.join(sorted(path.name for path in folder.iterdir()))} in {folder}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
