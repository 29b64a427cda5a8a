"""Whole runs on Craftax-Classic: what they leave, how they stop, resume and fail."""

import csv
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import (
    SMALL_PPO,
    assert_all_changed,
    assert_one_line,
    checkpoint,
    failure,
    flags,
    rows,
    run,
    run_and_kill,
)
from PIL import Image

import ctec_ppo_rnn_craftax as ctec

SMALL = SMALL_PPO | dict(total_timesteps=4 * 8 * 10, encoder_minibatches=2, contrastive_batch=8, encoder_width=16,
                         representation_size=8)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that nobody disturbs. Its film is not drawn; film_keys are the keys that it would be drawn from."""
    keys = []

    def watch(args, env, params, key):
        keys.append(key)
        return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctec, "watch", watch)
        patch.setattr(ctec, "save_gif", lambda folder: None)
        args = ctec.Args(run_dir=str(tmp_path_factory.mktemp("runs")), **SMALL | {"video_steps": 1})
        return ctec.main(args) | {"film_keys": keys}


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of it, to resume."""
    return Path(shutil.copytree(finished["folder"], tmp_path / "run"))


# ------------------------------------------------------------------------------------------- what a run leaves
def test_what_a_run_leaves(finished):
    folder = Path(finished["folder"])
    files = {"args.json", "metrics.csv", "checkpoint.npz", "achievements.png"}
    assert {path.name for path in folder.iterdir()} == files
    assert folder.name.startswith("craftax_classic__ctec_ppo_rnn_craftax__1__")
    assert json.loads((folder / "args.json").read_text())["num_envs"] == 4
    assert (folder / "achievements.png").stat().st_size > 5000


def test_metrics_have_a_row_an_iteration_and_values_from_the_first_update_on(finished):
    table = rows(finished["folder"])
    assert [int(row["iteration"]) for row in table] == list(range(1, 11))
    assert int(table[-1]["steps"]) == finished["steps"] == 320
    with open(Path(finished["folder"]) / "metrics.csv", newline="") as file:
        assert next(csv.reader(file)) == ctec.METRICS
    for i, row in enumerate(table, 1):
        ppo = {"policy_loss", "value_loss", "value_mean", "entropy", "kl", "clipped"}
        assert {name for name, value in row.items() if value == ""} == (ppo if i <= 2 else set())
        assert all(np.isfinite(float(value)) for value in row.values() if value)


def test_one_compilation_and_every_parameter_changes(finished):
    args = ctec.Args(**SMALL)
    env = ctec.make_craftax()
    start = ctec.init_state(args, env)
    state = ctec.init_state(args, env)
    assert start.players.obs.shape == (4, env.state_size)
    before = ctec.train_iteration._cache_size()
    for _ in range(4):
        state, _ = ctec.train_iteration(args, env, state)
    assert ctec.train_iteration._cache_size() == before + 1
    assert_all_changed(start.model.params, state.model.params)
    assert_all_changed(start.agent.params, state.agent.params)


def test_the_film_has_a_key_of_its_own(finished):
    """Not the one that a run with more steps would split next."""
    with np.load(Path(finished["folder"]) / "checkpoint.npz") as file:
        key = file["key"]
    np.testing.assert_array_equal(finished["film_keys"], [jax.random.fold_in(key, 1)])


def test_gif_shows_an_episode(finished, tmp_path, capsys):
    args = ctec.Args(**SMALL | {"video_steps": 12})
    env = ctec.make_craftax()
    template = jax.eval_shape(lambda: ctec.init_state(args, env))
    state = ctec.load_checkpoint(Path(finished["folder"]) / "checkpoint.npz", template)
    ctec.save_gif(tmp_path, *ctec.watch(args, env, state.agent.params, state.key))
    with Image.open(tmp_path / "rollout.gif") as gif:
        assert gif.n_frames == 12
        assert gif.size == (2 * 144 + 190, 288)
        gif.seek(5)
        picture = np.asarray(gif.convert("RGB"))
    assert len(np.unique(picture[:224, :288].reshape(-1, 3), axis=0)) > 10  # the map
    assert picture[:, 290:].any()  # the achievements beside it
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------- stopped and resumed
def test_killed_and_resumed_is_the_same_run(finished, tmp_path):
    """kill -9, then --resume: parameters, optimisers, worlds, episodes and keys end bit for bit as if nothing had
    been."""
    folder = run_and_kill(ctec, flags(SMALL, run_dir=tmp_path, checkpoint_minutes=0), tmp_path)
    assert len(rows(folder)) < 10, "it was over before the kill"
    done = run(ctec, "--resume", folder)
    assert done.returncode == 0, done.stderr
    assert rows(folder) == rows(finished["folder"])
    assert checkpoint(folder) == checkpoint(finished["folder"])


def test_nan_stops_the_run_and_keeps_the_checkpoint(copied, capsys):
    """From a checkpoint of iteration 8 with a temperature that is nan: the same program, compiled already."""
    path = copied / "checkpoint.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["iteration"] = np.int32(8)
    arrays["model/params/log_tau"] = np.float32(np.nan)
    np.savez(path, **arrays)
    before = checkpoint(copied)
    code, message = failure(capsys, ctec, ["--resume", copied, "--checkpoint-minutes", 0])
    assert code == 1
    assert_one_line(message, "iteration 9: reward_mean is nan", str(copied))
    assert checkpoint(copied) == before
    assert len(rows(copied)) == 8  # the bad one is not among them


def test_a_checkpoint_of_other_sizes_is_refused(copied, capsys):
    code, message = failure(capsys, ctec, ["--resume", copied, "--total-timesteps", 1000, "--agent-width", 8])
    assert code == 2
    assert_one_line(message, "players/hidden is float32[4, 16], not float32[4, 8]")


# -------------------------------------------------------------------------------------------------- bad arguments
BAD = {
    "zero envs": (["--num-envs", "0"], "--num-envs 0: it must be above 0"),
    "inf": (["--encoder-learning-rate", "inf"], "--encoder-learning-rate inf: it must be a finite number"),
    "gamma of one": (["--gamma-cl", "1.0"], "--gamma-cl 1.0: it must be below 1"),
    "lambda above one": (["--gae-lambda", "1.5"], "--gae-lambda 1.5: it must be at most 1"),
    "negative coefficient": (["--intrinsic-coef", "-1"], "--intrinsic-coef -1.0: it must be at least 0"),
    "seed of 33 bits": (["--seed", "4294967296"], "--seed 4294967296: it must be below 2^32"),
    "minibatches that do not divide": (["--num-minibatches", "5"], "--num-minibatches 5: it must divide"),
    "rows that do not divide": (["--contrastive-batch", "1000"], "--contrastive-batch 1000"),
    "a row without negatives": (["--contrastive-batch", "1"], "--contrastive-batch 1"),
    "groups that do not divide": (["--rows-per-env", "7"], "--rows-per-env 7: it must divide"),
    "no reward": (["--intrinsic-coef", "0"], "--task-reward-coef"),
    "missing folder": (["--resume", "runs/nothing"], "runs/nothing"),
    "no run dir": (["--run-dir", ""], "--run-dir: it must not be empty"),
    "run dir that cannot be made": (["--run-dir", "/proc/runs"], "--run-dir /proc/runs"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_number_that_makes_no_sense_is_one_line(case, tmp_path, capsys, monkeypatch):
    arguments, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    code, message = failure(capsys, ctec, arguments)
    assert code == 2
    assert_one_line(message, words)
    assert not list(tmp_path.iterdir())


def test_what_may_be_zero_and_what_may_be_one():
    ctec.check_ppo_args(ctec.Args(gae_lambda=0.0, gamma=1.0, entropy_coef=0.0, first_offset=0))


def test_a_state_that_does_not_fit_is_refused_before_it_is_allocated(tmp_path, capsys):
    before = sum(x.nbytes for x in jax.live_arrays())
    code, message = failure(capsys, ctec, ["--num-envs", "100000000000", "--run-dir", tmp_path])
    assert code == 2
    assert_one_line(message, "--num-envs (now 100000000000)", "the device (cpu) has")
    needed = float(re.search(r"needs ([\d,.]+) GB", message).group(1).replace(",", ""))
    assert needed > 1e11 * 4 * (1345 + 512) / 1e9  # at least observation and hidden state of each environment
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--env", "craftax"], ["--env", "craftax_classic"]),
        (["--reward-samples", "two"], ["--reward-samples", "all", "single"]),
        (["--num-env", "3"], ["--num-env", "--num-envs"]),
        (["--num-envs", "many"], ["many", "--num-envs"]),
    ],
    ids=["unknown env", "unknown choice", "unknown flag", "not a number"],
)
def test_wrong_flags_get_tyros_message(arguments, words, capsys):
    code, message = failure(capsys, ctec, arguments)
    assert code == 2
    assert message.count("\n") > 3  # framed
    for word in [*words, "--help"]:
        assert word in message


def test_presets_can_run():
    for preset in ctec.PRESETS:
        args = ctec.parse_args(["--preset", preset])
        ctec.check_ppo_args(args)
        ctec.check_encoder_args(args)
    assert ctec.parse_args([]).num_envs == 1024
    assert ctec.parse_args(["--preset=laptop", "--num-envs=8"]).num_envs == 8


def test_a_nan_of_the_encoders_stops_the_run_also_while_the_policy_waits(capsys):
    """In the random iterations PPO's metrics have no value yet, but the encoders learn."""
    args = ctec.Args(**SMALL)
    waiting = {"contrastive_loss": 1.0, "policy_loss": np.nan, "parameter_norm": 1.0}
    assert ctec.finite_metrics(args, "runs", 1, waiting) == {"contrastive_loss": 1.0, "parameter_norm": 1.0}
    with pytest.raises(SystemExit) as stop:
        ctec.finite_metrics(args, "runs", 1, waiting | {"contrastive_loss": np.nan, "parameter_norm": np.nan})
    assert stop.value.code == 1 and "iteration 1: contrastive_loss is nan" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ctec.finite_metrics(args, "runs", args.first_update, waiting)
