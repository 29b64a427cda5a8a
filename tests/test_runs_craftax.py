"""Whole runs on Craftax-Classic: what they leave, how they stop, resume and fail."""

import json
import shutil
from pathlib import Path

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

import ctec_ppo_rnn_craftax as ctec

SMALL = SMALL_PPO | dict(total_timesteps=4 * 8 * 10, encoder_minibatches=2, contrastive_batch=8, encoder_width=16,
                         representation_size=8)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that nobody disturbs. A stage is compiled once, before the iterations: a state of other types ends it."""
    return ctec.main(ctec.Args(run_dir=str(tmp_path_factory.mktemp("runs")), **SMALL))


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


def test_metrics_have_a_row_an_iteration_and_ppos_from_its_first_update_on(finished):
    table = rows(finished["folder"])
    assert [int(row["iteration"]) for row in table] == list(range(1, 11))
    assert int(table[-1]["steps"]) == finished["steps"] == 320
    for i, row in enumerate(table, 1):
        ppo = {"policy_loss", "value_loss", "value_mean", "entropy", "kl", "clipped", "learning_rate", "parameter_norm"}
        assert {name for name, value in row.items() if value == ""} == (ppo if i <= 2 else set())
        assert all(np.isfinite(float(value)) for value in row.values() if value)
    assert {"achievements", "collect_diamond", "contrastive_loss", *ppo} <= table[0].keys()


def test_every_parameter_changes(finished):
    start = ctec.init_state(ctec.Args(**SMALL), ctec.make_craftax())
    last = ctec.load_checkpoint(Path(finished["folder"]) / "checkpoint.npz", start)
    assert start.players.obs.shape == (4, 1345)
    assert_all_changed(start.model.params, last.model.params)
    assert_all_changed(start.agent.params, last.agent.params)


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
    """From a checkpoint of iteration 1 with a temperature that is nan: the encoders learn while the policy waits."""
    path = copied / "checkpoint.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["iteration"] = np.int32(1)
    arrays["model/params/log_tau"] = np.float32(np.nan)
    np.savez(path, **arrays)
    before = checkpoint(copied)
    code, message = failure(capsys, ctec, ["--resume", copied, "--checkpoint-minutes", 0])
    assert code == 1
    line = message.splitlines()[-1]  # the progress bar's are before it
    assert line.startswith("error: iteration 2: contrastive_loss is nan") and str(copied) in line
    assert checkpoint(copied) == before
    assert len(rows(copied)) == 1  # the bad one is not among them


def test_a_checkpoint_of_other_sizes_is_refused(copied, capsys):
    code, message = failure(capsys, ctec, ["--resume", copied, "--total-timesteps", 1000, "--agent-width", 8])
    assert code == 2
    assert_one_line(message, "players/hidden is float32[4, 16], not float32[4, 8]")


# -------------------------------------------------------------------------------------------------- bad arguments
BAD = {
    "zero envs": (["--num-envs", "0"], "--num-envs 0 must be above 0"),
    "zero minibatches": (["--num-minibatches", "0"], "--num-minibatches 0 must be above 0"),
    "zero groups": (["--rows-per-env", "0"], "--rows-per-env 0 must be above 0"),
    "inf": (["--encoder-learning-rate", "inf"], "--encoder-learning-rate inf must be above 0 and finite"),
    "gamma of one": (["--gamma-cl", "1.0"], "--gamma-cl 1.0 must be below 1"),
    "lambda above one": (["--gae-lambda", "1.5"], "--gae-lambda 1.5 must be at most 1"),
    "negative coefficient": (["--intrinsic-coef", "-1"], "--intrinsic-coef -1.0 must be at least 0"),
    "seed of 33 bits": (["--seed", "4294967296"], "--seed 4294967296 must be below 2^32"),
    "minibatches that do not divide": (["--num-minibatches", "5"], "--num-minibatches 5 must divide num_envs"),
    "rows that do not divide": (["--contrastive-batch", "1000"], "--contrastive-batch 1000 must divide"),
    "a row without negatives": (["--contrastive-batch", "1"], "--contrastive-batch 1 must be at least 2"),
    "groups that do not divide": (["--rows-per-env", "7"], "--rows-per-env 7 must divide num_steps"),
    "no reward": (["--intrinsic-coef", "0"], "task-reward-coef must not both be 0"),
    "missing folder": (["--resume", "runs/nothing"], "runs/nothing"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_argument_out_of_range_is_one_line(case, tmp_path, capsys, monkeypatch):
    arguments, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    code, message = failure(capsys, ctec, arguments)
    assert code == 2
    assert_one_line(message, words)
    assert not list(tmp_path.iterdir())


def test_what_may_be_zero_and_what_may_be_one():
    ctec.check_args(ctec.Args(gae_lambda=0.0, gamma=1.0, entropy_coef=0.0, first_offset=0, random_iterations=0))
    ctec.check_args(ctec.Args(first_offset=1, logsumexp_penalty=0.1, intrinsic_coef=0.0, task_reward_coef=1.0))


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--env", "craftax"], ["--env", "craftax_classic"]),
        (["--temperature", "psi"], ["--temperature", "phi", "logits"]),
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
        ctec.check_args(ctec.parse_args(["--preset", preset]))
    assert ctec.parse_args([]).num_envs == 1024
    assert ctec.parse_args(["--preset=laptop", "--num-envs=8"]).num_envs == 8
