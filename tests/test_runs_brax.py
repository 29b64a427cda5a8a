"""Whole runs on the point maze: what they leave, how they stop, resume and fail."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    SMALL_SAC,
    assert_all_changed,
    assert_one_line,
    checkpoint,
    failure,
    flags,
    refusal,
    rows,
    run,
    run_and_kill,
)
from matplotlib.figure import Figure

import ctec_sac_brax as ctec

SMALL = SMALL_SAC | dict(total_timesteps=8 * 16 * 12, encoder_width=16, representation_size=8)
TEMPLATE = jax.eval_shape(lambda: ctec.init_state(ctec.Args(**SMALL), ctec.make_env("point_u_maze")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that nobody disturbs."""
    programs = [stage._cache_size() for stage in (ctec.collect, ctec.learn)]
    end = ctec.main(ctec.Args(run_dir=str(tmp_path_factory.mktemp("runs")), **SMALL))
    assert [stage._cache_size() for stage in (ctec.collect, ctec.learn)] == [number + 1 for number in programs]
    return end


def last_line(capsys):
    """Of stderr, after the progress bar."""
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of it, to resume or to spoil."""
    return Path(shutil.copytree(finished["folder"], tmp_path / "run"))


# ------------------------------------------------------------------------------------------- what a run leaves
def test_what_a_run_leaves(finished):
    folder = Path(finished["folder"])
    data = {"args.json", "metrics.csv", "checkpoint.npz", "coverage.npz"}
    assert {path.name for path in folder.iterdir()} == {"coverage.png"} | data
    assert folder.name.startswith("point_u_maze__ctec_sac_brax__1__")
    assert json.loads((folder / "args.json").read_text())["num_envs"] == 8
    with np.load(folder / "coverage.npz") as coverage:
        assert len(coverage["first_visit"]) == len(coverage["place"]) == finished["coverage"] > 0
        for row in rows(folder):  # the curve is in the steps of the first visits
            assert np.sum(coverage["first_visit"] <= int(row["steps"])) == float(row["coverage"])
    assert (folder / "coverage.png").stat().st_size > 5000


def test_metrics_have_a_row_an_iteration_and_values_from_the_first_update_on(finished):
    table = rows(finished["folder"])
    assert [int(row["iteration"]) for row in table] == list(range(1, 13))
    assert int(table[-1]["steps"]) == finished["steps"] == 1536
    assert float(table[-1]["coverage"]) == finished["coverage"]
    without = {"iteration", "steps", "coverage", "replay_entropy", "success"}  # of the stage that collects
    assert {"contrastive_loss", "critic_loss", "parameter_norm"} < set(table[-1]) - without
    ended = "episode_length"  # episodes have 33 steps: one ends in every second or third iteration
    assert [float(row[ended]) for row in table if row[ended]] == [33] * 5 and table[2][ended] and not table[3][ended]
    for i, row in enumerate(table, 1):
        filled = {name for name, value in row.items() if value != ""} - {ended}
        assert filled == (set(row) - {ended} if i >= 3 else without)  # 40 steps are there after the third 16
        assert all(np.isfinite(float(row[name])) for name in filled)


def test_every_parameter_changes_and_no_type_does(finished):
    """The state after an iteration has the types of the one before, weak types too, so that nothing compiles twice."""
    args = ctec.Args(**SMALL)
    env = ctec.make_env(args.env)
    start = ctec.init_state(args, env)
    end = ctec.load_checkpoint(Path(finished["folder"]) / "checkpoint.npz", TEMPLATE)
    assert end.iteration == 12 and np.any(end.key != start.key)
    assert_all_changed(start.model.params, end.model.params)
    assert_all_changed(start.agent.target_critic, end.agent.target_critic)
    for name in ("actor", "critic", "log_alpha"):
        assert_all_changed(getattr(start.agent, name).params, getattr(end.agent, name).params)

    types = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)
    for stage in (ctec.collect, ctec.learn):
        assert types(stage.eval_shape(args, env, TEMPLATE)[0]) == types(TEMPLATE) == types(end)
    step_bytes = sum(x.nbytes for x in jax.tree.leaves(start.replay)) / (args.replay_size * args.num_envs)
    assert step_bytes <= 4 * (env.state_size + env.action_size + 3)


def test_the_picture_shows_bins_outside_the_maze(tmp_path):
    args = ctec.Args(env="humanoid_u_maze")
    env = ctec.make_env("humanoid_u_maze")
    places = jnp.array([[[2.0, 2, 1], [2, 2, 2], [30, -20, 1], [9e8, 0, 1]]])
    coverage = ctec.mark_visited(args, ctec.init_coverage(env), 1, places)
    ctec.save_coverage(args, env, tmp_path, coverage, 8)
    with np.load(tmp_path / "coverage.npz") as saved:  # kilometres away is somewhere in the grid, which repeats
        assert {tuple(place) for place in saved["place"]} >= {(4, 4, 2), (4, 4, 4), (60, -40, 2)}
        assert len(saved["place"]) == 4 and np.all(np.abs(saved["place"] + 0.5) < np.array(ctec.GRID) / 2)
    assert {path.name for path in tmp_path.iterdir()} == {"coverage.png", "coverage.npz"}


def test_bins_are_drawn_over_the_walls_and_the_start_over_both():
    """A humanoid leans over walls and stands on them."""
    env = ctec.make_env("point_u_maze")
    axes = Figure().add_subplot()
    image = ctec.draw_places(axes, env, "", [[0, 0], [4, 4]], [1.0, 2.0])
    assert max(wall.get_zorder() for wall in axes.patches) < image.get_zorder() < axes.lines[0].get_zorder()
    pixels = image.get_array().T
    low = np.array(image.get_extent())[[0, 2]] / 0.5
    assert pixels.count() == 2 and pixels[tuple((np.array([4, 4]) - low).astype(int))] == 2.0


def test_the_arm_from_end_to_end_with_the_position_as_future(tmp_path):
    """psi sees the cube's three coordinates."""
    sizes = dict(num_envs=4, unroll_length=4, total_timesteps=4 * 4 * 5, replay_size=20, learning_starts=8)
    args = ctec.Args(**SMALL | sizes | dict(env="arm_binpick_hard", future_state="goal", run_dir=str(tmp_path)))
    end = ctec.main(args)
    env = ctec.make_env(args.env)
    state = ctec.load_checkpoint(
        Path(end["folder"]) / "checkpoint.npz", jax.eval_shape(lambda: ctec.init_state(args, env))
    )
    first_layer = lambda encoder: state.model.params[encoder]["params"]["Dense_0"]["kernel"].shape[0]
    assert (first_layer("phi"), first_layer("psi")) == (env.state_size + env.action_size, 3)
    assert np.isfinite(end["contrastive_loss"]) and end["coverage"] > 0


def test_track_writes_an_offline_wandb_run(tmp_path):
    done = run(ctec, *flags(SMALL, run_dir=tmp_path, total_timesteps=8 * 16 * 4), "--track")
    assert done.returncode == 0, done.stderr
    assert list(next(tmp_path.iterdir()).glob("wandb/offline-run-*/*.wandb"))


# ------------------------------------------------------------------------------------------- stopped and resumed
def test_killed_and_resumed_is_the_same_run(finished, tmp_path):
    """kill -9, then --resume: parameters, optimisers, replay, grid and keys end bit for bit as if nothing had been."""
    arguments = flags(SMALL, run_dir=tmp_path, checkpoint_minutes=0)
    folder = run_and_kill(ctec, arguments, tmp_path, after=3)
    assert len(rows(folder)) < 12, "it was over before the kill"
    done = run(ctec, "--resume", folder)
    assert done.returncode == 0, done.stderr
    assert rows(folder) == rows(finished["folder"])
    assert checkpoint(folder) == checkpoint(finished["folder"])
    with np.load(folder / "coverage.npz") as ours, np.load(Path(finished["folder"]) / "coverage.npz") as theirs:
        assert ours.files == theirs.files
        for key in ours.files:
            np.testing.assert_array_equal(ours[key], theirs[key])


def test_sigterm_saves_and_tells_how_to_go_on(finished, tmp_path):
    command = [sys.executable, ctec.__file__, *flags(SMALL, run_dir=tmp_path, total_timesteps=10**7)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(len(path.read_text().splitlines()) > 5 for path in tmp_path.glob("*/metrics.csv")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    folder = next(tmp_path.iterdir())
    assert process.returncode == 128 + 15
    line = f"error: stopped by SIGTERM; go on: python ctec_sac_brax.py --resume {folder}"
    assert errors.splitlines()[-1] == line
    state = ctec.load_checkpoint(folder / "checkpoint.npz", TEMPLATE)
    assert state.iteration == len(rows(folder))


@flax.struct.dataclass
class Counter:
    """Stands for the state of a run where only the loop around it is tested."""

    iteration: jax.Array


def counting(folder, **changes):
    """The loop of a small run around a counter, as main has it."""
    args = ctec.Args(**SMALL | changes)
    state = Counter(jnp.int32(0))
    with ctec.Run(args, folder, state, ["coverage"]) as run:
        while run.iteration < args.num_iterations:
            state = state.replace(iteration=state.iteration + 1)
            run.log({"coverage": state.iteration})
            yield state
            run.save(state)


def saved_count(folder):
    return int(ctec.load_checkpoint(folder / "checkpoint.npz", Counter(jnp.int32(0))).iteration)


def test_ctrl_c_ends_the_iteration_first(tmp_path, capsys):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        for state in counting(tmp_path):
            if state.iteration == 4:
                os.kill(os.getpid(), signal.SIGINT)
    assert stop.value.code == 130
    assert last_line(capsys).startswith("error: stopped by SIGINT; go on:")
    assert saved_count(tmp_path) == len(rows(tmp_path)) == 4
    assert signal.getsignal(signal.SIGINT) is handler


def test_resuming_drops_the_rows_after_the_checkpoint(tmp_path):
    """A kill may come between a row and its checkpoint, or in the middle of a row."""
    for _ in counting(tmp_path):
        pass
    header, *lines = (tmp_path / "metrics.csv").read_text().splitlines()
    (tmp_path / "metrics.csv").write_text("\n".join([header, *lines, "1,17"]))
    args = ctec.Args(**SMALL | dict(resume=str(tmp_path)))
    for kept in (12, 7):
        with ctec.Run(args, tmp_path, Counter(jnp.int32(kept)), ["coverage"]) as run:
            assert (tmp_path / "metrics.csv").read_text().splitlines() == [header, *lines[:kept]]
            assert run.seconds == float(lines[kept - 1].split(",")[2])


def test_metrics_of_another_run_are_not_overwritten(copied, capsys):
    """Other columns, missing rows, none at all, or flags with which the steps of before would count otherwise."""
    path = copied / "metrics.csv"
    text = path.read_text()
    for other in (text.replace("accuracy", "precision"), text[: len(text) // 2], None):
        path.write_text(other) if other else path.unlink()
        code, message = refusal(capsys, ctec, ["--resume", copied, "--total-timesteps", 10**4])
        assert code == 2
        assert_one_line(message, str(path), "another version")
        assert (path.read_text() if path.exists() else None) == other
    path.write_text(text)
    code, message = refusal(capsys, ctec, ["--resume", copied, "--total-timesteps", 10**4, "--unroll-length", 17])
    assert code == 2
    assert_one_line(message, str(path), "other flags")


# -------------------------------------------------------------------------------------- what goes wrong in a run
def test_nan_stops_the_run_and_keeps_the_checkpoint(copied, monkeypatch, capsys):
    before = checkpoint(copied)
    real = ctec.infonce
    monkeypatch.setattr(ctec, "infonce", lambda *inputs: real(*inputs) * np.nan)
    ctec.learn.clear_cache()
    more = ["--resume", copied, "--total-timesteps", 10**4, "--checkpoint-minutes", 0]
    code, message = failure(capsys, ctec, more)
    assert code == 1
    ctec.learn.clear_cache()
    line = message.splitlines()[-1]
    assert line.startswith("error: iteration 13: ") and "contrastive_loss is nan" in line and str(copied) in line
    assert checkpoint(copied) == before


def test_only_the_episode_length_may_have_no_value(tmp_path, capsys):
    with ctec.Run(ctec.Args(**SMALL), tmp_path, Counter(jnp.int32(0)), ["coverage", "episode_length", "tau"]) as run:
        row = run.log({"coverage": np.float32(2.0), "episode_length": np.float32(np.nan)})
        assert row["coverage"] == 2.0 and "episode_length" not in row
        with pytest.raises(SystemExit):
            run.log({"coverage": np.float32(2.0), "tau": np.float32(np.inf)})
    assert "iteration 2: tau is inf" in last_line(capsys)
    assert [(row["coverage"], row["episode_length"], row["tau"]) for row in rows(tmp_path)] == [("2.0", "", "")]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "checkpoint.npz"
    path.write_bytes(b"good")

    def write(file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        ctec.write_atomically(path, write)
    assert path.read_bytes() == b"good" and list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_keeps_the_one_before(tmp_path, monkeypatch):
    real = ctec.save_checkpoint

    def save(path, state):
        if state.iteration == 3:
            raise OSError(28, "No space left on device")
        real(path, state)

    monkeypatch.setattr(ctec, "save_checkpoint", save)
    with pytest.raises(OSError):
        for _ in counting(tmp_path, checkpoint_minutes=0.0):
            pass
    assert saved_count(tmp_path) == 2 and len(rows(tmp_path)) == 3


def end_of_main(script, monkeypatch, error):
    """What the script does, as a program, with an error that main raises."""
    code = Path(script.__file__).read_text().split('if __name__ == "__main__":')[1]

    def main(_):
        raise error

    monkeypatch.setattr(script, "parse_args", lambda: None)
    monkeypatch.setattr(script, "main", main)
    exec(textwrap.dedent(code), vars(script))  # what stands under __main__ can be run in no other way without a process


def test_what_the_machine_lacks_is_told_in_one_line_and_a_fault_is_not_hidden(monkeypatch, capsys):
    lacks = [OSError(28, "No space left on device"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")]
    for error in lacks:
        with pytest.raises(SystemExit) as stop:
            end_of_main(ctec, monkeypatch, error)
        assert stop.value.code == 1
        assert_one_line(capsys.readouterr().err, str(error), "untouched")
    with pytest.raises(ValueError):
        end_of_main(ctec, monkeypatch, ValueError("shows where it came from"))


def test_a_state_that_does_not_fit_is_refused_before_it_is_allocated(tmp_path, capsys):
    before = sum(x.nbytes for x in jax.live_arrays())
    sizes = ["--num-envs", 10**7, "--unroll-length", 1, "--learning-starts", 2]
    arguments = ["--env=point_u_maze", *sizes, "--run-dir", tmp_path]
    code, message = refusal(capsys, ctec, arguments)
    assert code == 2
    assert_one_line(message, "--num-envs 10000000 is too much for the memory")
    per_env = 10_000 * (4 * 4 + 4 * 2 + 2)  # the replay: state, action and two flags
    needed = float(re.search(r"needs ([\d,]+) GB", message).group(1).replace(",", ""))
    assert needed == pytest.approx(1e7 * per_env / 1e9, rel=1e-2)
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["/proc/runs", f"{__file__}/runs"])
def test_a_run_folder_that_cannot_be_made_is_one_line(folder):
    done = run(ctec, *flags(SMALL, run_dir=folder))
    assert done.returncode == 1
    assert_one_line(done.stderr, folder)


def test_a_full_disk_ends_in_one_line_and_keeps_the_checkpoint(copied):
    """The real thing: no file may become larger than nine tenths of a checkpoint. Everything else is smaller."""
    before = checkpoint(copied)
    limit = len(before) * 9 // 10
    sizes = {path.name: path.stat().st_size for path in copied.iterdir()}
    assert max(size for name, size in sizes.items() if name != "checkpoint.npz") < limit, sizes
    limited = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    limited += "os.execv(sys.executable, sys.argv[1:])"
    script = [sys.executable, ctec.__file__, "--resume", copied, "--total-timesteps", str(8 * 16 * 13)]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, "-c", limited, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert "File too large" in line and "the last good checkpoint, if there was one, is untouched" in line
    assert checkpoint(copied) == before
    assert len(rows(copied)) == 13


def spoil(path, **changes):
    """Write the checkpoint again, with some arrays changed, or left out (None)."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


def test_bad_checkpoints_are_named(copied, capsys):
    path = copied / "checkpoint.npz"
    good = path.read_bytes()
    with np.load(path) as file:
        obs = file["replay/obs"]
        alpha = file["agent/log_alpha/params"]

    def assert_refused(words):
        bad = path.read_bytes() if path.exists() else None
        code, message = refusal(capsys, ctec, ["--resume", copied, "--total-timesteps", 10**4])
        assert code == 2
        assert_one_line(message, f"{path} is no checkpoint of this run", words)
        assert bad == (path.read_bytes() if path.exists() else None)

    for content, words in (
        (good[:-100], "zip"),  # truncated
        (good[: len(good) // 2], "zip"),
        (b"", "No data left"),
        (b"\x81\xa1a\x01 garbage", "pickle"),
    ):
        path.write_bytes(content)
        assert_refused(words)
    # the first array that differs is named, whether in its dtype, its shape or its absence
    spoils = (
        ({"replay/obs": obs.astype(np.float64)}, "replay/obs is float64[64, 8, 4], not float32[64, 8, 4]"),
        ({"replay/obs": obs.view(np.int32)}, "replay/obs is int32[64, 8, 4], not float32[64, 8, 4]"),
        ({"replay/obs": obs.reshape(8, 64, 4)}, "replay/obs is float32[8, 64, 4], not float32[64, 8, 4]"),
        ({"agent/log_alpha/params": alpha[None]}, "agent/log_alpha/params is float32[1], not float32[]"),
        ({"replay/obs": None}, "replay/obs"),
        ({"replay/obs": np.array([{}], object)}, "allow_pickle=False"),
    )
    for changes, words in spoils:
        path.write_bytes(good)
        spoil(path, **changes)
        assert_refused(words)
    path.write_bytes(good)
    spoil(path, **{"replay/obs": obs[:1], "agent/log_alpha/params": alpha[None]})
    assert_refused("replay/obs")
    path.unlink()
    assert_refused("No such file")


def test_a_checkpoint_of_other_sizes_is_refused(copied, capsys):
    more = ["--resume", copied, "--total-timesteps", 10**4]
    code, message = refusal(capsys, ctec, [*more, "--num-envs", 16])
    assert code == 2
    assert_one_line(message, "env/physics is float32[8, 4], not float32[16, 4]")
    args = json.loads((copied / "args.json").read_text())
    (copied / "args.json").write_text(json.dumps(args | {"encoder_width": 32}))
    code, message = refusal(capsys, ctec, more)
    assert code == 2
    assert_one_line(message, "model/params/phi/params/Dense_0/bias is float32[16], not float32[32]")


# -------------------------------------------------------------------------------------------------- bad arguments
BAD = {
    "negative size": (["--num-envs", "-4"], "--num-envs -4 must be above 0"),
    "zero batch": (["--batch-size", "0"], "--batch-size 0 must be above 0"),
    "batch of one": (["--batch-size", "1"], "--batch-size"),
    "nan": (["--learning-rate", "nan"], "--learning-rate nan must be above 0 and finite"),
    "inf": (["--learning-rate", "inf"], "--learning-rate inf must be above 0 and finite"),
    "a wall as goal": (["--goal-cell", "0", "0"], "--goal-cell (0, 0) must be a free cell of the maze"),
    "a goal for the arm": (
        ["--env", "arm_binpick_hard", "--task-reward-coef", "1"],
        "--task-reward-coef 1.0 must be 0",
    ),
    "gamma of one": (["--gamma-cl", "1.0"], "--gamma-cl 1.0 must be below 1"),
    "rate above one": (["--target-rate", "2"], "--target-rate 2.0 must be at most 1"),
    "negative penalty": (["--logsumexp-penalty", "-0.1"], "--logsumexp-penalty -0.1 must be at least 0"),
    "negative minutes": (["--checkpoint-minutes", "-1"], "--checkpoint-minutes -1.0 must be at least 0"),
    "negative seed": (["--seed", "-1"], "--seed -1 must be at least 0"),
    "seed of 33 bits": (["--seed", "4294967296"], "--seed 4294967296 must be below 2^32"),
    "no gradient step": (["--multiplier", "0.0001"], "--multiplier"),
    "no iteration to learn in": (["--total-timesteps", "20000"], "--learning-starts 500 must leave an iteration"),
    "small replay": (["--replay-size", "500"], "--replay-size"),
    "steps beyond int32": (["--total-timesteps", "2147483648"], "--total-timesteps 2147483648 must be below 2^31"),
    "missing folder": (["--resume", "runs/nothing"], "runs/nothing"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_out_of_range_argument_is_one_line(case, tmp_path, capsys, monkeypatch):
    arguments, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    code, message = refusal(capsys, ctec, ["--env=point_u_maze", "--preset=laptop", *arguments])
    assert code == 2
    assert_one_line(message, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--env", "ant_maze"], ["ant_maze", "--env", *ctec.ENVS]),
        (["--num-env", "3"], ["--num-env", "--num-envs"]),
        (["--num-envs", "many"], ["many", "--num-envs"]),
    ],
    ids=["unknown env", "unknown flag", "not a number"],
)
def test_wrong_flags_get_tyros_message(arguments, words, capsys):
    code, message = refusal(capsys, ctec, arguments)
    assert code == 2 and message.count("\n") > 3  # framed
    for word in [*words, "--help"]:
        assert word in message


def test_what_may_be_zero_and_what_may_be_one():
    env = ctec.make_env("point_u_maze")
    zero = dict(seed=0, checkpoint_minutes=0.0, logsumexp_penalty=0.0, intrinsic_coef=0.0, task_reward_coef=0.0)
    fine = ctec.Args(**zero, first_offset=0, target_rate=1.0, gamma=1.0, goal_cell=(3, 1))
    ctec.check_args(fine, env)
    ctec.check_args(dataclasses.replace(fine, seed=2**32 - 1), env)


def test_a_robot_on_a_cpu_is_told_the_flag_that_makes_it_fast(tmp_path, capsys, monkeypatch):
    """But not where it is set, and not the point, which does not need it."""
    for flags_set, env, told in (("", "arm_binpick_hard", True), ("", "point_u_maze", False),
                                 ("--xla_cpu_use_fusion_emitters=false", "arm_binpick_hard", False)):  # fmt: skip
        monkeypatch.setenv("XLA_FLAGS", flags_set)
        args = ctec.Args(env=env, run_dir=str(tmp_path / f"{env}{told}"))
        ctec.start_run(args, lambda: Counter(jnp.int32(0)), "no buffer")
        assert ("--xla_cpu_use_fusion_emitters=false" in capsys.readouterr().out) == told


def test_runs_that_begin_together_have_folders_of_their_own(tmp_path, monkeypatch):
    """As in a sweep over a flag. A name that is taken is refused."""
    args = ctec.Args(env="point_u_maze", run_dir=str(tmp_path))
    start = lambda: ctec.start_run(args, lambda: Counter(jnp.int32(0)), "no buffer")[0]
    folders = {start() for _ in range(5)}
    assert len(folders) == 5 and all(folder.is_dir() for folder in folders)
    now = ctec.datetime.datetime(2026, 1, 2, 3, 4, 5, 678)
    monkeypatch.setattr(ctec, "datetime", SimpleNamespace(datetime=SimpleNamespace(now=lambda: now)))
    assert start().name == "point_u_maze__ctec_sac_brax__1__20260102-030405-000678"
    with pytest.raises(FileExistsError):
        start()


def test_flags_win_over_the_preset_and_the_preset_over_the_paper():
    assert ctec.parse_args([]).num_envs == 1024
    assert ctec.parse_args(["--env=humanoid_u_maze"]).batch_size == 256
    laptop = ctec.parse_args(["--preset", "laptop", "--env", "humanoid_u_maze", "--seed", "4"])
    assert (laptop.num_envs, laptop.unroll_length, laptop.seed) == (256, 124, 4)
    assert ctec.parse_args(["--preset", "laptop", "--env", "ant_u_maze"]).num_envs == 128
    assert ctec.parse_args(["--preset", "laptop", "--num-envs", "1024"]).num_envs == 1024
    paper = ctec.Args()
    assert (paper.gradient_steps, paper.num_iterations, paper.first_update) == (999, 7876, 17)
    for preset in ctec.PRESETS:
        for env in ctec.ENVS:
            ctec.check_args(ctec.parse_args(["--preset", preset, "--env", env]), ctec.make_env("point_u_maze"))


def test_resuming_keeps_the_arguments_but_for_explicit_flags(copied):
    again = ctec.parse_args(["--resume", str(copied), "--goal-cell", "3", "2"])
    (copied / "args.json").write_text(json.dumps(dataclasses.asdict(again)))
    assert ctec.parse_args(["--resume", str(copied)]).goal_cell == (3, 2)
    args = ctec.parse_args(["--resume", str(copied), "--total-timesteps", "5000", "--goal-cell", "None"])
    earlier = ctec.Args(**json.loads((copied / "args.json").read_text()))
    assert args == dataclasses.replace(earlier, resume=str(copied), total_timesteps=5000, goal_cell=None)
    assert args.encoder_width == 16


# ------------------------------------------------------------------------------------------------------ progress
def test_the_bar_shows_the_coverage_and_tqdm_s_words_the_rest(tmp_path, capsys):
    for _ in counting(tmp_path):
        pass
    shown = capsys.readouterr().err.split("\r")
    assert len(shown) <= 4 and "100%" in shown[-1]  # without a terminal: the first and the last, in less than 30 s
    assert re.search(r"coverage 12, [\d,]+ steps/s", shown[-1])


def test_the_cache_of_compiled_programs(tmp_path, monkeypatch):
    """In the home folder, unless JAX_COMPILATION_CACHE_DIR says otherwise: a second start loads what the first left."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    config = SMALL | dict(total_timesteps=8 * 16 * 4)
    done = run(ctec, *flags(config, run_dir=tmp_path / "runs"), env=environment)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / ".cache" / "ctec_jax").iterdir()
    assert folder.name != f"{zlib.crc32(b''):08x}"  # it is named after this CPU's features
    programs = {path.name for path in folder.iterdir() if path.name.startswith(("jit_collect", "jit_learn"))}
    assert len(programs) >= 2
    done = run(ctec, *flags(config, run_dir=tmp_path / "again"), env=environment)
    assert "cpu_aot_loader" not in done.stderr
    assert {path.name for path in folder.iterdir() if path.name.startswith(("jit_collect", "jit_learn"))} == programs
    assert rows(next((tmp_path / "runs").iterdir())) == rows(next((tmp_path / "again").iterdir()))
