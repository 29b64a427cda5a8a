"""Whole runs on the point maze: what they leave, how they stop, resume and fail."""
import base64
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from operator import attrgetter
from pathlib import Path

import jax
import numpy as np
import pytest

import ctec_sac_brax as ctec

SCRIPT = Path(ctec.__file__)
SMALL = dict(env="point_u_maze", total_timesteps=8 * 16 * 12, num_envs=8, unroll_length=16, episode_length=33, replay_size=64,
             learning_starts=32, batch_size=32, multiplier=0.5, agent_width=16, encoder_width=16, representation_size=8)  # fmt: skip
CLOCKS = ("seconds", "steps_per_second")


def flags(**changes):
    return [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | changes).items()]


def run(*arguments, **kwargs):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=600, **kwargs)


def rows(folder):
    with open(Path(folder) / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k not in CLOCKS} for row in csv.DictReader(file)]


def checkpoint(folder):
    return (Path(folder) / "checkpoint.msgpack").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that nobody disturbs."""
    return ctec.main(ctec.Args(run_dir=str(tmp_path_factory.mktemp("runs")), **SMALL))


def test_what_a_run_leaves(finished):
    folder = Path(finished["folder"])
    names = {"args.json", "metrics.csv", "checkpoint.msgpack", "coverage.png", "coverage.npz", "reward_map.png", "reward_map.npz", "rollout.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert folder.name.startswith("point_u_maze__ctec_sac_brax__1__")
    assert json.loads((folder / "args.json").read_text())["num_envs"] == 8
    table = rows(folder)
    assert [int(row["iteration"]) for row in table] == list(range(1, 13)) and int(table[-1]["steps"]) == finished["steps"] == 1536
    assert table[0]["actor_loss"] == "" and all(np.isfinite(float(value)) for value in table[-1].values())
    with open(folder / "metrics.csv") as file:
        assert next(csv.reader(file)) == ctec.METRICS
    with np.load(folder / "coverage.npz") as coverage:
        assert coverage["visited"].sum() == finished["coverage"] == float(table[-1]["coverage"]) > 0
    with np.load(folder / "reward_map.npz") as maps:
        assert len(maps.files) == 5 and all(np.isfinite(maps[at]).any() for at in maps.files)
    for picture in ("coverage.png", "reward_map.png", "rollout.png"):
        assert (folder / picture).stat().st_size > 5000


def test_one_compilation_and_every_parameter_changes(finished):
    args = ctec.Args(**SMALL)
    env = ctec.make_env(args.env)
    start, state = ctec.init_state(args, env), ctec.init_state(args, env)
    before = ctec.train_iteration._cache_size()
    for _ in range(3):
        state, metrics, _ = ctec.train_iteration(args, env, state)
    assert ctec.train_iteration._cache_size() == before + 1
    for part in ("encoders.params", "agent.actor.params", "agent.critic.params", "agent.target_critic", "agent.log_alpha.params"):
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), attrgetter(part)(start), attrgetter(part)(state))
        assert all(jax.tree.leaves(changed)), part
    step_bytes = sum(x.nbytes for x in jax.tree.leaves(state.replay)) / (args.replay_size * args.num_envs)
    assert step_bytes <= 4 * (env.state_size + env.action_size + 3)


def test_killed_and_resumed_is_the_same_run(finished, tmp_path):
    """kill -9 at a random moment after the first checkpoint, then --resume."""
    moment = random.Random(0)
    process = subprocess.Popen([sys.executable, SCRIPT, *flags(run_dir=tmp_path, checkpoint_minutes=0)], stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("*/checkpoint.msgpack")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(moment.uniform(0, 0.05))
    process.kill()
    process.wait()
    folder = next(tmp_path.iterdir())
    survived = len(rows(folder))
    done = run("--resume", folder)
    assert done.returncode == 0, done.stderr
    assert survived < 12, "it was over before the kill"
    assert rows(folder) == rows(finished["folder"])
    assert checkpoint(folder) == checkpoint(finished["folder"])  # parameters, optimisers, replay, grid, keys: bit for bit
    for name in ("coverage.npz", "reward_map.npz"):
        with np.load(folder / name) as ours, np.load(Path(finished["folder"]) / name) as theirs:
            assert ours.files == theirs.files
            assert all(np.array_equal(ours[key], theirs[key], equal_nan=True) for key in ours.files)


def test_sigterm_saves_and_tells_how_to_go_on(finished, tmp_path):
    process = subprocess.Popen([sys.executable, SCRIPT, *flags(run_dir=tmp_path, total_timesteps=10**7)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    while not any(len(path.read_text().splitlines()) > 5 for path in tmp_path.glob("*/metrics.csv")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + 15 and "--resume" in errors and "Traceback" not in errors
    folder = next(tmp_path.iterdir())
    state = ctec.load_checkpoint(folder / "checkpoint.msgpack", jax.eval_shape(lambda: ctec.init_state(ctec.Args(**SMALL), ctec.make_env("point_u_maze"))))
    assert int(state.iteration) == len(rows(folder))


def test_nan_stops_the_run_and_keeps_the_checkpoint(finished, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished["folder"], folder)
    before = checkpoint(folder)
    real = ctec.infonce
    monkeypatch.setattr(ctec, "infonce", lambda *inputs: real(*inputs) * np.nan)
    args = ctec.Args(resume=str(folder), **SMALL | {"total_timesteps": 10**4, "checkpoint_minutes": 0.0, "learning_rate": 2e-4})
    with pytest.raises(SystemExit) as stop:
        ctec.main(args)
    assert stop.value.code == 1 and "iteration 13: contrastive_loss is nan" in capsys.readouterr().err
    assert checkpoint(folder) == before


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.msgpack"
    path.write_bytes(b"good")

    def write(file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        ctec.write_atomically(path, write)
    assert path.read_bytes() == b"good" and list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_that_fails_once_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    real, calls = ctec.save_checkpoint, []

    def save(path, state):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(path, state)

    monkeypatch.setattr(ctec, "save_checkpoint", save)
    end = ctec.main(ctec.Args(run_dir=str(tmp_path), checkpoint_minutes=0.0, **SMALL))
    assert end["iteration"] == len(calls) == 12 and "the last good one stays" in capsys.readouterr().err


def test_another_header_is_not_overwritten(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished["folder"], folder)
    text = (folder / "metrics.csv").read_text().replace("accuracy", "precision")
    (folder / "metrics.csv").write_text(text)
    with pytest.raises(SystemExit):
        ctec.main(ctec.Args(resume=str(folder), **SMALL | {"total_timesteps": 10**4}))
    assert "another version" in capsys.readouterr().err and (folder / "metrics.csv").read_text() == text


BAD = {
    "unknown env": (["--env", "ant_maze"], "ant_hardest_maze"),
    "unknown flag": (["--num-env", "3"], "--num-env"),
    "not a number": (["--num-envs", "many"], "--num-envs"),
    "negative size": (["--num-envs", "-4"], "--num-envs"),
    "zero batch": (["--batch-size", "0"], "--batch-size"),
    "nan": (["--learning-rate", "nan"], "--learning-rate"),
    "gamma of one": (["--gamma-cl", "1.0"], "--gamma-cl"),
    "no gradient step": (["--multiplier", "0.0001"], "--multiplier"),
    "small replay": (["--replay-size", "500"], "--replay-size"),
    "missing folder": (["--resume", "runs/nothing"], "runs/nothing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, tmp_path, capsys, monkeypatch):
    arguments, named = BAD[case]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        ctec.main(ctec.parse_args(arguments))
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.count("\n") == 1 and message.startswith("error: ") and named in message
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_is_one_line():
    done = run(*flags(run_dir="/proc/runs"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ") and "/proc/runs" in done.stderr


def test_bad_checkpoints_are_named(finished, tmp_path, capsys):
    def message(arguments):
        with pytest.raises(SystemExit) as stop:
            ctec.main(ctec.parse_args([str(x) for x in arguments]))
        assert stop.value.code == 2
        return capsys.readouterr().err

    folder = tmp_path / "run"
    shutil.copytree(finished["folder"], folder)
    path, good = folder / "checkpoint.msgpack", checkpoint(folder)
    more = ["--resume", folder, "--total-timesteps", 10**4]
    assert "reshape" in message([*more, "--num-envs", "16"]) and "is complete" in message(more[:2])
    for bad, words in ((good[:-100], "no checkpoint of this run"), (b"", "no checkpoint of this run"), (b"\x81\xa1a\x01", "KeyError")):
        path.write_bytes(bad)
        text = message(more)
        assert str(path) in text and words in text and text.count("\n") == 1
        assert path.read_bytes() == bad
    path.write_bytes(good)
    args = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(args | {"encoder_width": 32}))
    assert "reshape" in message(more) and str(path) in message(more)
    path.unlink()
    assert "No such file" in message(more)


def test_flags_win_over_the_preset_and_the_preset_over_the_paper():
    assert ctec.parse_args([]).num_envs == 1024 and ctec.parse_args(["--env=humanoid_u_maze"]).batch_size == 256
    laptop = ctec.parse_args(["--preset", "laptop", "--env", "humanoid_u_maze", "--seed", "4"])
    assert laptop.num_envs == ctec.PRESETS["laptop"]["num_envs"] and laptop.seed == 4
    assert ctec.parse_args(["--preset", "laptop", "--num-envs", "1024"]).num_envs == 1024
    paper = ctec.Args()
    assert paper.gradient_steps == 999 and paper.num_iterations == 7876
    for preset in ctec.PRESETS:
        ctec.check_args(ctec.parse_args(["--preset", preset]))


def test_track_writes_an_offline_wandb_run(tmp_path):
    done = run(*flags(run_dir=tmp_path, total_timesteps=8 * 16 * 4), "--track", env=os.environ | {"WANDB_MODE": "offline"})
    assert done.returncode == 0, done.stderr
    assert list(next(tmp_path.iterdir()).glob("wandb/offline-run-*/*.wandb"))


def test_a_robot_leaves_a_page_for_the_viewer(tmp_path):
    """rollout.html holds the poses of the last steps, and coverage.png the projection of a 3-D grid."""
    args, env = ctec.Args(env="humanoid_u_maze", episode_length=3), ctec.make_env("humanoid_u_maze")
    first = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), 2))
    frames = [jax.tree.map(lambda x: np.asarray(x)[None] + i, env.frame(first.physics)) for i in range(4)]
    ctec.save_coverage(args, env, tmp_path, np.arange(np.prod(env.grid)) % 3 == 0, 8, frames)
    page = (tmp_path / "rollout.html").read_text()
    system = json.loads(zlib.decompress(base64.b64decode(re.search(r"[A-Za-z0-9+/=]{1000,}", page).group())))
    poses = np.array([x["pos"] for x in system["states"]["x"]])
    assert poses.shape == (3, 12, 3) and np.allclose(poses[:, 0, 0], env.start[0] + np.arange(1, 4))
    assert len(system["geoms"]["world"]) == 19  # the floor and 18 walls
    assert {path.name for path in tmp_path.iterdir()} == {"coverage.png", "coverage.npz", "rollout.html"}
