"""Whole runs on Craftax-Classic: what they leave, how they stop, resume and fail."""
import csv
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import ctec_ppo_rnn_craftax as ctec

SCRIPT = Path(ctec.__file__)
SMALL = dict(total_timesteps=4 * 8 * 10, num_envs=4, num_steps=8, num_minibatches=2, encoder_minibatches=2, contrastive_batch=8, reset_ratio=16, agent_width=16,
             encoder_width=16, representation_size=8, random_iterations=2, episode_window=16, video_steps=0)  # fmt: skip
CLOCKS = ("seconds", "steps_per_second")


def flags(**changes):
    return [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | changes).items()]


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
    assert {path.name for path in folder.iterdir()} == {"args.json", "metrics.csv", "checkpoint.msgpack", "achievements.png"}
    assert folder.name.startswith("craftax_classic__ctec_ppo_rnn_craftax__1__")
    assert json.loads((folder / "args.json").read_text())["num_envs"] == 4
    table = rows(folder)
    assert [int(row["iteration"]) for row in table] == list(range(1, 11)) and int(table[-1]["steps"]) == finished["steps"] == 320
    assert table[1]["policy_loss"] == "" and all(np.isfinite(float(value)) for value in table[-1].values())
    with open(folder / "metrics.csv") as file:
        assert next(csv.reader(file)) == ctec.METRICS
    assert (folder / "achievements.png").stat().st_size > 5000


def test_one_compilation_and_every_parameter_changes(finished):
    args, env = ctec.Args(**SMALL), ctec.make_craftax()
    start, state = ctec.init_state(args, env), ctec.init_state(args, env)
    assert start.players.obs.shape == (4, env.state_size)
    before = ctec.train_iteration._cache_size()
    for _ in range(4):
        state, _ = ctec.train_iteration(args, env, state)
    assert ctec.train_iteration._cache_size() == before + 1
    for name in ("encoders", "agent"):
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), getattr(start, name).params, getattr(state, name).params)
        assert all(jax.tree.leaves(changed)), (name, changed)


def test_killed_and_resumed_is_the_same_run(finished, tmp_path):
    """kill -9 at a random moment after the first checkpoint, then --resume."""
    process = subprocess.Popen([sys.executable, SCRIPT, *flags(run_dir=tmp_path, checkpoint_minutes=0)], stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("*/checkpoint.msgpack")):
        assert process.poll() is None
        time.sleep(0.005)
    time.sleep(random.Random(0).uniform(0, 0.03))
    process.kill()
    process.wait()
    folder = next(tmp_path.iterdir())
    assert len(rows(folder)) < 10, "it was over before the kill"
    done = subprocess.run([sys.executable, SCRIPT, "--resume", folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert rows(folder) == rows(finished["folder"])
    assert checkpoint(folder) == checkpoint(finished["folder"])  # parameters, optimisers, worlds, episodes, keys: bit for bit


def test_nan_stops_the_run_and_keeps_the_checkpoint(finished, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished["folder"], folder)
    before, real = checkpoint(folder), ctec.infonce
    monkeypatch.setattr(ctec, "infonce", lambda *inputs: real(*inputs) * np.nan)
    args = ctec.Args(resume=str(folder), **SMALL | {"total_timesteps": 10**3, "checkpoint_minutes": 0.0})
    with pytest.raises(SystemExit) as stop:
        ctec.main(args)
    assert stop.value.code == 1 and "iteration 11: contrastive_loss is nan" in capsys.readouterr().err
    assert checkpoint(folder) == before


BAD = {
    "unknown env": (["--env", "craftax"], "craftax_classic"),
    "zero envs": (["--num-envs", "0"], "--num-envs"),
    "gamma of one": (["--gamma-cl", "1.0"], "--gamma-cl"),
    "minibatches that do not divide": (["--num-minibatches", "5"], "--num-minibatches"),
    "rows that do not divide": (["--contrastive-batch", "1000"], "--contrastive-batch"),
    "no reward": (["--intrinsic-coef", "0"], "--task-reward-coef"),
    "unknown choice": (["--reward-samples", "two"], "single"),
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


def test_presets_can_run():
    for preset in ctec.PRESETS:
        args = ctec.parse_args(["--preset", preset])
        ctec.check_ppo_args(args)
        ctec.check_encoder_args(args)
    assert ctec.parse_args([]).num_envs == 1024 and ctec.parse_args(["--preset=laptop", "--num-envs=8"]).num_envs == 8


def test_gif_shows_an_episode(finished, tmp_path, capsys):
    args, env = ctec.Args(**SMALL | {"video_steps": 12}), ctec.make_craftax()
    state = ctec.load_checkpoint(Path(finished["folder"]) / "checkpoint.msgpack", jax.eval_shape(lambda: ctec.init_state(args, env)))
    ctec.save_gif(tmp_path, *ctec.watch(args, env, state.agent.params, state.key))
    with Image.open(tmp_path / "rollout.gif") as gif:
        assert gif.n_frames == 12 and gif.size == (2 * 144 + 190, 288)
        gif.seek(5)
        picture = np.asarray(gif.convert("RGB"))
        assert len(np.unique(picture[:224, :288].reshape(-1, 3), axis=0)) > 10 and picture[:, 290:].any()
    assert capsys.readouterr().out == ""
