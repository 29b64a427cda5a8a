"""evaluate.py: known policies reach known places, for every family of scripts; what it writes, and what it refuses."""

import base64
import dataclasses
import functools
import json
import math
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from helpers import SMALL_PPO, SMALL_SAC, Game, assert_one_line, constant
from PIL import Image

import ctec_ppo_noisy_tv as tv
import ctec_ppo_rnn_craftax as ctec_craftax
import ctec_sac_brax as ctec
import etd_ppo as etd
import evaluate
import random_brax
import random_craftax
import rnd_ppo_craftax as rnd_craftax
import rnd_sac_brax as rnd

POINT = dict(env="point_u_maze", num_envs=2, episode_length=250)
SAC = SMALL_SAC | POINT
ETD = POINT | dict(agent_width=16, encoder_width=16, num_steps=8, batch_size=16)
CRAFTAX = SMALL_PPO | dict(seed=3)
GRID = dict(num_envs=2, grid_size=12, rooms=1, window=3, start="fixed", episode_length=9, agent_width=16,
            encoder_width=16, num_steps=8, batch_size=16)  # fmt: skip


def make_run(folder, script, config, change=lambda state: state):
    """A folder as a run leaves it, without the training: change(state) is what it would have learned."""
    args = script.Args(**{name: x for name, x in config.items() if name in script.Args.__dataclass_fields__})
    make = getattr(script, "make_any_env", getattr(script, "make_env", None))
    tv_or_craftax = getattr(script, "make_noisy_tv", lambda _: script.make_craftax())
    state = script.init_state(args, make(args.env) if make else tv_or_craftax(args))
    folder = folder / f"{args.env}__{script.__name__}__{args.seed}__20260101-000000"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    script.save_checkpoint(folder / "checkpoint.npz", change(state))
    return folder


def call(*words):
    return evaluate.main(tyro.cli(evaluate.Args, args=[str(word) for word in words]))


def report(folder):
    return json.loads((folder / "evaluation" / "evaluation.json").read_text())


def sac_action(mean):
    """A change of the state: the actor's mean, whatever it sees."""

    def change(state):
        actor = state.agent.actor
        params = constant(actor.params, [*mean, 0.0, 0.0])
        return state.replace(agent=state.agent.replace(actor=actor.replace(params=params)))

    return change


def ppo_output(output):
    """The same for what the distribution of a PPO script gets; the policy's last layer comes first."""

    def change(state):
        params = jax.tree.map(jnp.zeros_like, state.agent.params)
        params["params"]["Dense_0"]["bias"] = jnp.array(output)
        return state.replace(agent=state.agent.replace(params=params))

    return change


# ------------------------------------------------------------------------------------------------ known policies
def push(env, start, action, steps):
    """The paths (1 + steps, N, 2) of discs that are pushed with one action, by the rules of docs and in NumPy."""
    p = np.array(start)
    v = np.zeros_like(p)
    paths = [p.copy()]

    def blocked(p):
        nearest = np.clip(p[:, None], env.walls - env.cell / 2, env.walls + env.cell / 2)
        return np.any(np.sum((p[:, None] - nearest) ** 2, axis=-1) < env.radius**2, axis=1)

    for _ in range(steps):
        v = 0.9 * v + 0.01 * np.array(action, np.float32)
        for axis in np.eye(2):
            v = np.where(blocked(p + v * axis)[:, None], v * (1 - axis), v)
            p = p + v * axis
        paths.append(p.copy())
    return np.array(paths)


@pytest.mark.parametrize("script, config, change, flags, action", [
    (ctec, SAC, sac_action([20.0, 20.0]), [], (1, 1)),  # saturated: the noise does not count
    (ctec, SAC, sac_action([0.0, 0.5]), ["--deterministic"], (0, math.tanh(0.5))),
    (etd, ETD, ppo_output([20.0, 20.0, 0.0, 0.0]), [], (1, 1)),
    (etd, ETD, ppo_output([0.0, 0.5, 0.0, 0.0]), ["--deterministic"], (0, math.tanh(0.5))),
], ids=["sac", "sac-mode", "ppo", "ppo-mode"])  # fmt: skip
def test_a_point_that_is_pushed(tmp_path, monkeypatch, script, config, change, flags, action):
    starts = []
    summarize = evaluate.summarize
    monkeypatch.setattr(evaluate, "summarize", lambda *played: starts.append(played[2][0]) or summarize(*played))
    folder = make_run(tmp_path, script, config, change)
    (row,) = call(folder, "--episodes", 3, *flags)
    env = script.make_env("point_u_maze")
    paths = push(env, starts[0], action, 250)
    assert len(np.unique(starts[0])) == 6 and np.all(np.abs(starts[0] - env.start) <= 0.1)
    bins = [{tuple(place) for place in np.floor(path[1:] / 0.5)} for path in np.moveaxis(paths, 1, 0)]
    furthest = np.linalg.norm(paths - paths[0], axis=-1).max(axis=0)
    found = report(folder)
    assert found["episodes"]["bins"] == [len(one) for one in bins]
    assert found["episodes"]["length"] == [250, 250, 250]
    np.testing.assert_allclose(found["episodes"]["furthest_m"], furthest, atol=1e-3)
    assert (row["best"], row["together"]) == (max(map(len, bins)), len(set.union(*bins)))
    np.testing.assert_allclose(row["mean"], np.mean([len(one) for one in bins]), atol=1e-3)
    np.testing.assert_allclose(row["deviation"], np.std([len(one) for one in bins]), atol=1e-3)
    assert len(bins[0]) > 15


def test_a_walker_that_always_goes_right(tmp_path):
    """In the middle of an open grid of 12 x 12, 6 columns from its right border."""
    folder = make_run(tmp_path, tv, GRID, ppo_output([0.0, 0.0, 0.0, 9.0, 0.0]))
    (row,) = call(folder, "--episodes", 2, "--deterministic")
    env = tv.make_noisy_tv(tv.Args(**GRID))
    row_of_start, column = divmod(int(env.starts[0]), 12)
    cells = row_of_start * 12 + np.minimum(column + np.arange(1, 10), 11)
    assert report(folder)["episodes"] == {"cells": [11 - column] * 2, "length": [9, 9]}
    assert (row["of"], row["together"], row["length"]) == ("cells", 11 - column, 9)
    np.testing.assert_allclose(row["at_tv"], env.sees_tv[cells].mean(), atol=1e-3)
    assert {path.name for path in (folder / "evaluation").iterdir()} == {"evaluation.json", "paths.png", "rollout.gif"}


class Recorder(Game):
    """A game that keeps its observations and actions: achievement i is unlocked by action i, beside number 3."""

    def step(self, key, world, action):
        after, obs, reward, done = super().step(key, world, action)
        achievements = world.achievements.at[action].set(True) | after.achievements
        return after.replace(achievements=achievements), obs, reward, done


class EtdGame(etd.Craftax):
    """The same with the interface of etd_ppo.py."""

    state_size = 6

    def __init__(self):
        self.game = Recorder()

    def reset(self, key):
        world, obs = self.game.reset(key)
        return etd.EnvState((world, key), obs, jnp.zeros((), bool))

    def step(self, state, action):
        world, key = state.physics
        world, obs, _, done = self.game.step(key, world, jnp.argmax(action))
        return etd.EnvState((world, key), obs, done)


@pytest.fixture
def films(monkeypatch):
    """Craftax is replaced by a game that compiles in a second; instead of its film, what it would show."""
    game = Recorder()
    etd_game = EtdGame()
    for script in (ctec_craftax, rnd_craftax, random_craftax):
        monkeypatch.setattr(script, "make_craftax", lambda: game)
    monkeypatch.setattr(etd, "make_any_env", lambda name: etd_game)
    shown = []
    monkeypatch.setattr(evaluate, "save_gif", lambda run, folder, path, worlds: shown.append(worlds))
    return shown


CRAFTAX_ETD = ETD | dict(env="craftax_classic", num_envs=4)


@pytest.mark.parametrize("script, config", [
    (ctec_craftax, CRAFTAX), (rnd_craftax, CRAFTAX), (random_craftax, CRAFTAX), (etd, CRAFTAX_ETD)
], ids=["ctec", "rnd", "random", "etd"])  # fmt: skip
def test_games_end_by_themselves(tmp_path, films, script, config):
    folder = make_run(tmp_path, script, config)
    (row,) = call(folder, "--episodes", 40)
    episodes = report(folder)["episodes"]
    assert set(episodes["length"]) == {2, 3, 4, 5}
    assert all(1 <= number <= length + 1 for number, length in zip(episodes["achievements"], episodes["length"]))
    assert row["best"] == max(episodes["achievements"]) and row["together"] == 17  # the actions, 3 among them
    np.testing.assert_allclose(row["mean"], np.mean(episodes["achievements"]), atol=1e-3)
    best = int(np.argmax(episodes["achievements"]))
    (worlds,) = films
    assert len(worlds.left) == episodes["length"][best] and worlds.left[-1] == 0  # the best episode, to its end
    assert worlds.achievements[-1].sum() == row["best"]
    assert (folder / "evaluation" / "achievements.png").stat().st_size > 5000


def test_the_mode_of_a_recurrent_policy(tmp_path, films):
    """Step by step it is what the policy says of the whole sequence of observations."""
    folder = make_run(tmp_path, ctec_craftax, CRAFTAX)
    run, params, steps = evaluate.load_run(folder)
    assert steps == 0
    args = evaluate.Args((str(folder),), episodes=12, deterministic=True)
    players, _, worlds = evaluate.play(args, run, params)
    number, length = int(worlds.number[0]), int(players.length[0])
    first = evaluate.init_players(run, 12, jax.random.split(jax.random.PRNGKey(args.seed))[0])
    before = [
        jax.tree.map(lambda x: x[0], first.world),
        *[jax.tree.map(lambda x, t=t: x[t], worlds) for t in range(length)],
    ]
    assert before[0].number == number and before[0].left == length
    obs = jnp.stack([run.env.observe(world) for world in before[:-1]])[:, None]
    hidden = jnp.zeros((1, run.args.agent_width))
    _, log_probs, _ = ctec_craftax.policy(params, run.args, hidden, obs, jnp.zeros((length, 1), bool))
    actions = set(np.argmax(log_probs[:, 0], axis=-1).tolist())
    assert set(np.flatnonzero(players.world.achievements[0])) == actions | {3}


# --------------------------------------------------------------------------------------------- what it leaves
@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two SAC runs and uniform actions."""
    folder = tmp_path_factory.mktemp("runs")
    config = SAC | dict(episode_length=120)
    return [make_run(folder, script, config) for script in (ctec, rnd, random_brax)]


def test_comparison(runs, capsys):
    files = [path for folder in runs for path in folder.iterdir() if path.is_file()]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    rows = call(*runs, "--episodes", 4)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == before
    for folder, row in zip(runs, rows):
        assert {path.name for path in folder.iterdir()} == {"args.json", "checkpoint.npz", "evaluation"}
        left = {path.name for path in (folder / "evaluation").iterdir()} - {"comparison.png"}
        of_ctec = {"reward_map.png"} if folder is runs[0] else set()
        assert left == {"evaluation.json", "paths.png", "rollout.gif"} | of_ctec
        assert row["run"] == folder.name and row["length"] == 120
    assert (runs[0] / "evaluation" / "comparison.png").stat().st_size > 20_000
    film = Image.open(runs[0] / "evaluation" / "rollout.gif")
    assert film.n_frames > 60  # frames that look the same are one
    assert (runs[0] / "evaluation" / "rollout.gif").stat().st_size < 1e6
    table = [line.split() for line in capsys.readouterr().out.splitlines()[3:7]]
    assert table[0] == ["run", "of", "mean", "deviation", "best", "together", "length", "furthest_m"]
    assert [line[0] for line in table[1:]] == [folder.name for folder in runs]
    assert [float(line[2]) for line in table[1:]] == [row["mean"] for row in rows]


def test_seeds(runs, monkeypatch):
    monkeypatch.setattr(evaluate, "save_gif", lambda *_: None)
    monkeypatch.setattr(evaluate, "save_picture", lambda *_: None)
    furthest = {}
    for flags in ("--seed 1", "--seed 2", "--seed 1 --deterministic", "--seed 2 --deterministic"):
        for again in range(2):
            call(runs[1], "--episodes", 4, *flags.split())
            furthest[flags, again] = tuple(report(runs[1])["episodes"]["furthest_m"])
        assert furthest[flags, 0] == furthest[flags, 1]
    assert len(set(furthest.values())) == 4


@pytest.mark.parametrize("name", ["ant_u_maze", "arm_binpick_hard"])
def test_viewer_of_a_robot(tmp_path, name):
    """Traced, not compiled; the poses are those of a new episode."""
    folder = make_run(tmp_path, random_brax, dict(env=name, num_envs=2, episode_length=600))
    run, params, _ = evaluate.load_run(folder)
    players = evaluate.init_players(run, 2, jax.random.PRNGKey(1))
    keys = jax.random.split(jax.random.PRNGKey(2), 5)
    part = functools.partial(evaluate.play_part, run, False)
    _, (place, (pos, rot)) = jax.eval_shape(part, params, players, keys, 1)
    assert place.shape == (5, 2, run.env.position_size)
    poses = evaluate.observe(run, players, 1)[1]
    assert [x.shape for x in (pos, rot)] == [(5, *pose.shape) for pose in poses]
    evaluate.save_viewer(run, tmp_path, [np.repeat(x[None], 600, axis=0) for x in poses])
    (text,) = re.findall(r'"([A-Za-z0-9+/=]{1000,})"', (tmp_path / "rollout.html").read_text())
    scene = json.loads(zlib.decompress(base64.b64decode(text)))
    assert len(scene["states"]["x"]) == 200  # of 600 steps of 0.05 s, every third
    np.testing.assert_allclose(scene["opt"]["timestep"], 0.15, rtol=1e-5)
    np.testing.assert_allclose(scene["states"]["x"][0]["pos"], poses[0], atol=1e-4)
    boxes = sum(geom["name"] == "Box" for geom in scene["geoms"]["world"])
    assert boxes == len(run.env.outlines)


# ------------------------------------------------------------------------------------------------- refusals
def damage_args(folder, **changes):
    path = folder / "args.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "no such folder": lambda folder: folder.rename(folder.with_name("gone")),
    "No such file": lambda folder: (folder / "args.json").unlink(),
    "Expecting": lambda folder: (folder / "args.json").write_text("{"),
    "horizon": lambda folder: damage_args(folder, horizon=3),
    "moon": lambda folder: damage_args(folder, env="point_moon_maze"),
    "agent/actor/params": lambda folder: damage_args(folder, agent_width=17),
    "checkpoint.npz": lambda folder: (folder / "checkpoint.npz").unlink(),
    "no checkpoint": lambda folder: (folder / "checkpoint.npz").write_bytes(
        (folder / "checkpoint.npz").read_bytes()[:-900]
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_refusals_of_folders(tmp_path, capsys, words):
    good = make_run(tmp_path / "good", ctec, SAC)
    folder = make_run(tmp_path / "bad", ctec, SAC)
    DAMAGES[words](folder)
    with pytest.raises(SystemExit) as stop:
        call(good, folder)
    assert stop.value.code == 2
    assert_one_line(capsys.readouterr().err, words)
    assert not (good / "evaluation").exists() and not (folder / "evaluation").exists()


@pytest.mark.parametrize("name", ["somewhere", "point_u_maze__best_sac_brax__1__x", "toy__toy_mdps__1__x"])
def test_refusals_of_foreign_folders(tmp_path, capsys, name):
    folder = tmp_path / name
    folder.mkdir()
    with pytest.raises(SystemExit) as stop:
        call(folder)
    assert stop.value.code == 2
    assert_one_line(capsys.readouterr().err, "its name is not", str(folder))


@pytest.mark.parametrize("words", ["", ". --episodes 0", ". --seed -1", f". --seed {2**32}"])
def test_refusals_of_arguments(capsys, words):
    with pytest.raises(SystemExit) as stop:
        call(*words.split())
    assert stop.value.code == 2
    assert_one_line(capsys.readouterr().err, "--episodes")


def test_scripts_do_not_import_it():
    for path in Path(evaluate.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(import|from) evaluate", path.read_text(), re.M)


def test_reward_map_is_the_mean_reward_of_the_replay_by_place():
    """A replay of episodes of two steps, from one place to another: only the first place has a reward, that of its
    single future. The second ends its episode, is never rewarded, and is no place of the map."""
    sizes = dict(num_envs=3, replay_size=40, batch_size=32, agent_width=16, encoder_width=16, representation_size=8)
    args = ctec.Args(env="point_u_maze", reward_features="unit", **sizes)
    env = ctec.make_env(args.env)
    start = ctec.init_state(args, env)
    places = jnp.array([[4.0, 4.0, 0.1, 0.0], [8.0, 4.0, 0.0, -0.1]])
    last = jnp.arange(40) % 2
    replay = start.replay.replace(
        obs=jnp.broadcast_to(places[last][:, None], (40, 3, 4)),
        truncated=jnp.broadcast_to(last[:, None] == 1, (40, 3)),
        time=jnp.int32(40),
    )
    values = evaluate.reward_map(ctec, args, env, start.replace(replay=replay))
    pair = ctec.Pairs(jnp.append(places[0], jnp.zeros(2))[None], places[1:], jnp.ones(1))
    reward = ctec.intrinsic_reward(start.model.params, args, pair)[0]
    np.testing.assert_allclose(values, [[8, 8, reward]], rtol=1e-3)  # a float32 sum of 2^15 rewards
