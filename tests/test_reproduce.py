"""benchmarks/reproduce.py: studies end to end, stopped and resumed, failing runs, statistics, the page, the cluster."""

import csv
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import report
import reproduce
import studies
from helpers import ROOT
from reproduce import Args, Run
from studies import Method, Study

TINY_CTEC = f"{studies.TINY} --encoder-width 16 --representation-size 8"
TINY_MODEL = f"{studies.TINY} --model-width 16"
FAKE = '''
"""What reproduce.py sees of a script: its folder, its files, --resume, SIGTERM, exit codes."""
import argparse, json, signal, sys, time
from pathlib import Path
import numpy as np

parser = argparse.ArgumentParser()
for name, default in dict(env="", seed=0, run_dir="", resume="", rows=20, pause=0.0, crash=0, save=0).items():
    parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
args = parser.parse_args()
resumed = bool(args.resume)
if resumed:
    folder = Path(args.resume)
    args = argparse.Namespace(**json.loads((folder / "args.json").read_text()))
    done = int(np.load(folder / "checkpoint.npz")["iteration"])
    rows = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(rows[: done + 1]))
else:
    folder = Path(args.run_dir) / f"{args.env}__fake__{args.seed}__{time.time()}"
    folder.mkdir(parents=True)
    done = 0
    (folder / "args.json").write_text(json.dumps(vars(args) | {"total_timesteps": 10 * args.rows}))
    (folder / "metrics.csv").write_text("iteration,steps,seconds,steps_per_second,coverage\\n")
stop = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
for row in range(done + 1, args.rows + 1):
    time.sleep(args.pause)
    with open(folder / "metrics.csv", "a") as file:
        file.write(f"{row},{10 * row},{row},{100 + args.seed},{row * args.seed}\\n")
    if row == args.crash and not resumed:
        raise ValueError("the fake crashes here")
    if stop or row in (args.save, args.rows):
        np.savez(folder / "checkpoint.npz", iteration=row)
    if stop:
        sys.exit(143)
'''


def folders(tmp_path):
    return dict(run_dir=tmp_path / "runs", results_dir=tmp_path / "results", docs_dir=tmp_path / "docs")


def add_study(monkeypatch, name, *methods, seeds=(1, 2), **more):
    monkeypatch.setitem(reproduce.STUDIES, name, Study(f"test: {name}", methods, seeds=seeds, **more))
    return reproduce.STUDIES[name]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """The scripts' folder is one with a fake script: fractions of a second a run."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "fake.py").write_text(FAKE)
    monkeypatch.setattr(reproduce, "ROOT", root)
    return root


def fake_method(label, flags=""):
    return Method(label, "fake", f"--env point_u_maze {flags}", 0.001)


# ------------------------------------------------------------------------------------------------------ real runs
def test_a_study_from_nothing_to_table_csv_and_picture(monkeypatch, tmp_path, capsys):
    methods = (
        Method("C-TeC", "ctec_sac_brax", TINY_CTEC, 0.005),
        Method("no bonus", "mbrl_sac_brax", f"{TINY_MODEL} --intrinsic-coef 0", 0.005),
    )
    study = add_study(monkeypatch, "tiny", *methods, seeds=(3,))
    args = Args(studies=("tiny",), jobs=1, **folders(tmp_path))
    assert reproduce.main(args) == 0
    printed = capsys.readouterr().out
    rows = report.read_csv(tmp_path / "results" / "tiny.csv")
    assert tuple(rows[0]) == report.COLUMNS
    for method in methods:
        run = Run(method, 3, args.run_dir)
        with open(run.script_folder("metrics.csv") / "metrics.csv") as file:
            last = list(csv.DictReader(file))[-1]
        steps, values = report.curves(rows, "point_u_maze", method.label, "coverage")[3]
        assert len(steps) == 12 and steps[-1] == 1536 and values[-1] == float(last["coverage"]) > 0
        assert f"| {method.label} | {values[-1]:.0f} |" in printed
        assert {row["version"] for row in rows if row["method"] == method.label} == {run.version}
    blob = subprocess.run(["git", "hash-object", "ctec_sac_brax.py"], cwd=ROOT, capture_output=True, text=True).stdout
    assert not blob or blob.startswith(Run(methods[0], 3, args.run_dir).version)
    assert (tmp_path / "docs" / "images" / "tiny.png").stat().st_size > 10_000
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "<!-- reproduce:tiny -->" in page and "![tiny](images/tiny.png)" in page

    # a second call runs nothing; without the runs, everything is drawn again from the csv
    monkeypatch.setattr(reproduce, "start", None)
    assert reproduce.main(args) == 0
    shutil.rmtree(args.run_dir)
    (tmp_path / "docs" / "images" / "tiny.png").unlink()
    assert reproduce.main(Args(studies=("tiny",), plot=True, **folders(tmp_path))) == 0
    assert (tmp_path / "docs" / "images" / "tiny.png").exists()
    assert (tmp_path / "docs" / "results.md").read_text() == page
    assert report.section("tiny", study, rows) in page


def study_process(tmp_path, flags):
    """reproduce.py with one more study, in a process of its own."""
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import reproduce, studies
method = studies.Method("C-TeC", "ctec_sac_brax", {flags!r}, 0.005)
reproduce.STUDIES["long"] = studies.Study("long", (method,), seeds=(1,))
folders = {{name + "_dir": Path({str(tmp_path)!r}) / name for name in ("run", "results", "docs")}}
sys.exit(reproduce.main(reproduce.Args(studies=("long",), jobs=1, **folders)))
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_stopped_study_goes_on_from_its_checkpoint(tmp_path):
    flags = f"{TINY_CTEC} --total-timesteps 40960"
    run = Run(Method("C-TeC", "ctec_sac_brax", flags, 0.005), 1, tmp_path / "run")
    process = study_process(tmp_path, flags)
    while not any(len(path.read_text().splitlines()) > 3 for path in run.folder.rglob("metrics.csv")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "goes on" in errors and "Traceback" not in errors
    assert run.script_folder(reproduce.CHECKPOINT) and 0 < run.fraction < 1, "it was over before the signal"
    assert "--resume" in run.command() and not (tmp_path / "results" / "long.csv").exists()

    process = study_process(tmp_path, flags)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors
    assert run.finished and len(list(run.folder.glob("point*"))) == 1
    with open(run.script_folder("metrics.csv") / "metrics.csv") as file:
        assert [int(row["iteration"]) for row in csv.DictReader(file)] == list(range(1, 321))
    assert (tmp_path / "results" / "long.csv").exists()


# ------------------------------------------------------------------------------------- children, by a fake script
def test_a_run_that_crashes_is_reported_and_the_others_finish(fake, monkeypatch, tmp_path, capsys):
    add_study(monkeypatch, "crash", fake_method("RND", "--crash 3"), fake_method("ICM"), fake_method("APT"))
    assert reproduce.main(Args(studies=("crash",), jobs=2, **folders(tmp_path))) == 1
    errors = capsys.readouterr().err
    assert errors.count("ValueError: the fake crashes here") == 2 and "failed with exit code 1" in errors
    rows = report.read_csv(tmp_path / "results" / "crash.csv")
    assert {report.run_key(row)[1:] for row in rows} == {(m, s) for m in ("ICM", "APT") for s in "12"}
    assert report.values_at(report.curves(rows, "point_u_maze", "APT", "coverage")) == {1: 20.0, 2: 40.0}


def test_a_run_killed_between_its_last_row_and_its_last_checkpoint_goes_on(fake, monkeypatch, tmp_path):
    study = add_study(monkeypatch, "killed", fake_method("RND", "--rows 20 --save 10 --crash 20"), seeds=(1,))
    args = Args(studies=("killed",), jobs=1, **folders(tmp_path))
    (run,) = reproduce.select_runs(args, study)
    assert reproduce.main(args) == 1
    assert run.fraction == 1.0 and not run.finished and "--resume" in run.command()
    assert not (args.results_dir / "killed.csv").exists()
    assert reproduce.main(args) == 0 and run.finished
    assert reproduce.saved_iteration(run.script_folder(reproduce.CHECKPOINT) / reproduce.CHECKPOINT) == 20


def test_one_process_a_run(fake, monkeypatch, tmp_path, capsys):
    study = add_study(monkeypatch, "locked", fake_method("RND", "--pause 0.05"), seeds=(1,))
    args = Args(studies=("locked",), jobs=1, **folders(tmp_path))
    (run,) = reproduce.select_runs(args, study)
    process = reproduce.start(run, reproduce.cpu_slot())
    assert reproduce.start(run, reproduce.cpu_slot()) is None
    assert reproduce.main(args) == 1 and "another process is running it" in capsys.readouterr().err
    process.wait()
    assert reproduce.main(args) == 0


def test_newer_runs_replace_their_rows_and_keep_the_others(fake, monkeypatch, tmp_path):
    study = add_study(monkeypatch, "merge", fake_method("RND"), fake_method("ICM"))
    args = Args(studies=("merge",), **folders(tmp_path))
    old = dict(study="merge", env="point_u_maze", metric="coverage", step=7, value=5, version="old", machine="old")
    rows = [old | dict(method=method, seed=seed) for method in ("RND", "gone") for seed in (1, 9)]
    args.results_dir.mkdir()
    with open(args.results_dir / "merge.csv", "w") as file:
        writer = csv.DictWriter(file, report.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    assert reproduce.main(args) == 0
    rows = report.read_csv(args.results_dir / "merge.csv")
    assert {row["method"] for row in rows} == {"RND", "ICM"}
    assert report.values_at(report.curves(rows, "point_u_maze", "RND", "coverage")) == {1: 20.0, 2: 40.0, 9: 5.0}
    assert "more than one version of the script: RND" in report.section("merge", study, rows)


def test_what_another_process_finished_meanwhile_is_not_run_again(fake, monkeypatch, tmp_path):
    method = fake_method("RND", "--rows 3")
    runs = [Run(method, seed, tmp_path / "runs") for seed in (1, 2)]
    real = reproduce.start
    started = []

    def start(run, slot):
        started.append(run)
        if run is runs[0]:
            real(runs[1], slot).wait()  # the other process
        return real(run, slot)

    monkeypatch.setattr(reproduce, "start", start)
    assert reproduce.run_all(runs, [reproduce.cpu_slot()], "x") == []
    assert started == runs[:1] and all(run.finished for run in runs)


def test_cores_and_gpus(monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    slots = reproduce.local_slots(Args(jobs=len(cores) + 1), "cpu")
    assert len(slots) == len(cores) + 1 and slots[0] == slots[-1] and dict(slots[0].env)["JAX_PLATFORMS"] == "cpu"
    if shutil.which("taskset"):
        assert [slot.prefix for slot in slots[:-1]] == [("taskset", "-c", str(core)) for core in cores]
    point, robot = (Run(Method("", "", f"--env {env}", 1), 1, ROOT) for env in ("point_u_maze", "ant_u_maze"))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert slots[0].variables(point) == {"JAX_PLATFORMS": "cpu"}
    assert slots[0].variables(robot) == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
    monkeypatch.setenv("XLA_FLAGS", "--mine")  # is inherited
    assert slots[0].variables(robot) == {"JAX_PLATFORMS": "cpu"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    alone = [dict(slot.env) for slot in reproduce.local_slots(Args(), "gpu")]
    assert alone == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    shared = [dict(slot.env) for slot in reproduce.local_slots(Args(runs_per_gpu=2), "gpu")]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in shared] == ["4", "5", "4", "5"]
    assert {env["XLA_PYTHON_CLIENT_MEM_FRACTION"] for env in shared} == {"0.45"}


def test_the_film_shows_each_bin_from_its_first_visit_on(monkeypatch, tmp_path, capsys):
    """Three runs side by side; without them one line."""
    methods = [Method(label, "random_brax", f"--env point_u_maze --num-envs {k}", 0.001)
               for k, label in enumerate(reproduce.FILMED, 1)]  # fmt: skip
    study = add_study(monkeypatch, "tiny", *methods, seeds=(3, 4))
    args = Args(studies=("tiny",), film=True, **folders(tmp_path))
    with pytest.raises(SystemExit):
        reproduce.main(args)
    assert "run tiny first" in capsys.readouterr().err
    visits = ([100, 500], [500, 1000], [1000])  # steps of the first visits, of 1,000
    for run, first_visit in zip(reproduce.select_runs(args, study), visits):
        run.folder.mkdir(parents=True)
        (run.folder / "metrics.csv").write_text("iteration,steps\n1,1000\n")
        (run.folder / "args.json").write_text('{"total_timesteps": 1000}')
        np.savez(run.folder / "checkpoint.npz", iteration=1)
        np.savez(
            run.folder / "coverage.npz", first_visit=first_visit, place=np.array([[4, 4], [5, 4]])[: len(first_visit)]
        )
    shown = []

    def grab_frame(writer):
        bins = [np.isfinite(axes.images[0].get_array().filled(np.nan)).sum() for axes in writer.fig.axes]
        shown.append(tuple(bins))
        real(writer)

    real = reproduce.PillowWriter.grab_frame
    monkeypatch.setattr(reproduce.PillowWriter, "grab_frame", grab_frame)
    assert reproduce.main(args) == 0
    assert list(dict.fromkeys(shown)) == [(0, 0, 0), (1, 0, 0), (2, 1, 0), (2, 2, 1)]
    assert shown[3:5] == [(0, 0, 0), (1, 0, 0)]  # the fifth of 48 frames is at 104 steps
    assert (tmp_path / "docs" / "images" / "tiny.gif").stat().st_size > 1000


# ------------------------------------------------------------------------------------------------------ clusters
def cluster_args(tmp_path, **changes):
    pytest.importorskip("submitit", reason="submitit is not installed: pip install -r requirements-cluster.txt")
    return Args(**folders(tmp_path), **changes)


def test_submitit_runs_a_real_run(tmp_path):
    args = cluster_args(tmp_path)
    submitit = reproduce.import_submitit()
    flags = "--env point_u_maze --num-envs 8 --unroll-length 16 --total-timesteps 1536"
    run = Run(Method("random", "random_brax", flags, 0.005), 1, args.run_dir)
    executor = submitit.LocalExecutor(folder=tmp_path / "jobs")
    (job,) = reproduce.submit(executor, reproduce.cluster_jobs(args, [run], "cpu"))
    assert job.result() == [run.name] and run.finished
    assert (run.folder / "job.txt").read_text() == job.job_id


def test_submitit_resumes_at_the_time_limit(fake, tmp_path):
    """The signal of the time limit: the run saves its checkpoint, the job is requeued and goes on."""
    args = cluster_args(tmp_path, runs_per_gpu=2)
    submitit = reproduce.import_submitit()
    method = fake_method("RND", "--rows 40 --pause 0.3")
    runs = [Run(method, seed, args.run_dir) for seed in (1, 2)]
    executor = submitit.LocalExecutor(folder=tmp_path / "jobs", max_num_timeout=3)
    executor.update_parameters(timeout_min=16 / 60, signal_delay_s=8)  # the signal comes after eight seconds
    (job,) = reproduce.submit(executor, reproduce.cluster_jobs(args, runs, "gpu"))
    assert set(job.result()) == {run.name for run in runs}
    for run in runs:
        with open(run.script_folder("metrics.csv") / "metrics.csv") as file:
            assert [int(row["iteration"]) for row in csv.DictReader(file)] == list(range(1, 41))
    assert "Requeued" in job.stdout() + job.stderr()


def test_the_batch_script(tmp_path, capsys):
    args = cluster_args(tmp_path, studies=("paper_ant",), launcher="slurm", dry_run=True, sbatch=("partition=long",))
    assert reproduce.main(args) == 0
    printed = capsys.readouterr().out
    for line in ("--array=0-29%30", "--time=720", "--gpus-per-node=1", "--partition=long", "--signal=USR2@300"):
        assert f"#SBATCH {line}\n" in printed
    assert "submitit.core._submit" in printed and "ctec_sac_brax.py --env ant_hardest_maze --seed 5" in printed
    assert not args.run_dir.exists()


def test_slurm_submits_what_is_neither_finished_nor_queued(fake, monkeypatch, tmp_path, capsys):
    """With stand-ins for SLURM's programs: sbatch says a job's number, sacct that the job is running."""
    study = add_study(monkeypatch, "queue", fake_method("RND"), seeds=(1, 2, 3))
    args = cluster_args(tmp_path, studies=("queue",), launcher="slurm")
    programs = tmp_path / "programs"
    programs.mkdir()
    state = "JobID|State|NodeList\\n77_1|RUNNING|a\\n77_0|FAILED|a\\n"
    for name, output in dict(srun="", sbatch="Submitted batch job 77\\n", sacct=state).items():
        (programs / name).write_text(f"#!/bin/sh\nprintf '{output}'\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    runs = reproduce.select_runs(args, study)
    reproduce.start(runs[2], reproduce.cpu_slot()).wait()
    assert reproduce.main(args) == 0
    assert "submitted 2 runs as job 77" in capsys.readouterr().out
    assert [(run.folder / "job.txt").exists() for run in runs] == [True, True, False]
    assert reproduce.main(args) == 0  # 77_0 failed, 77_1 is still there
    assert "submitted 1 runs" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- statistics, tables, pictures
def test_interquartile_mean_and_bootstrap_by_hand():
    assert report.interquartile_mean(np.array([8.0, 1, 7, 2, 6, 3, 5, 4])) == 4.5  # of 3, 4, 5, 6
    assert report.interquartile_mean(np.array([100.0, 1, 2, 3, -50])) == 2  # of 1, 2, 3
    two = report.bootstrap([np.array([0.0, 1.0])])  # means of two draws: 0, 1/2 and 1 with 1/4, 1/2, 1/4
    values, counts = np.unique(two, return_counts=True)
    assert list(values) == [0, 0.5, 1] and np.allclose(counts / len(two), [0.25, 0.5, 0.25], atol=0.02)
    # of 0, 1, 2, 3, 4 the middle three of five draws: their mean is 0 with 0.007 (four zeros or five), 1/3 with 0.022
    assert np.allclose(report.interval(report.bootstrap([np.arange(5.0)])), [1 / 3, 4 - 1 / 3])
    # each task keeps its number of runs: drawn from all eight at once, the mean would vary
    assert set(report.bootstrap([np.zeros(4), np.ones(4)])) == {0.5}
    values = np.random.default_rng(0).normal(size=(3, 400))
    low, high = report.interval(report.bootstrap([values], 500))  # for each row by itself
    assert low.shape == (3,) and np.all(low < report.interquartile_mean(values))
    assert np.all(high > report.interquartile_mean(values)) and np.all(high - low < 0.4)


def test_interquartile_means_and_intervals_are_rliables():
    from rliable import library, metrics

    scores = np.random.default_rng(0).normal(size=(10, 3)) + np.arange(3)  # (runs, tasks)
    iqm = lambda scores: np.array([metrics.aggregate_iqm(scores)])
    points, intervals = library.get_interval_estimates({"C-TeC": scores}, iqm, reps=2000)
    np.testing.assert_allclose(report.interquartile_mean(scores.ravel()), points["C-TeC"][0])
    ours = report.interval(report.bootstrap(list(scores.T)))  # 0.59 wide; unstratified 0.82
    np.testing.assert_allclose(ours, intervals["C-TeC"].ravel(), atol=0.05)


def test_the_statistics_of_the_stored_race_are_rliables():
    """Interquartile mean and probability of improvement, which rliable computes with SciPy's Mann-Whitney U."""
    from rliable import metrics

    rows = report.read_csv(ROOT / "results" / "race.csv")
    values = {}
    for _, method, by_seed in report.entries(reproduce.STUDIES["race"], rows, "point_hardest_maze"):
        values[method.label] = np.array(list(by_seed.values()))
    ctec = values.pop("C-TeC")
    assert len(values) >= 5 and len(ctec) >= 5
    for label, other in values.items():
        np.testing.assert_allclose(
            report.interquartile_mean(other), metrics.aggregate_iqm(other[:, None]), err_msg=label
        )
        theirs = metrics.probability_of_improvement(ctec[:, None], other[:, None])
        np.testing.assert_allclose(report.probability_of_improvement(ctec, other), theirs, err_msg=label)
    assert report.probability_of_improvement(np.array([1.0, 2.0]), np.array([1.0, 1.0])) == 0.75


def made_up_rows(study, name, seeds, means, steps=(10, 20, 30)):
    rows = []
    for method in study.methods:
        for seed in seeds:
            for step in steps:
                value = means[method.label] * step / steps[-1] + seed % 5
                rows.append(dict(study=name, env=method.env, method=method.label, seed=str(seed), metric=study.metric,
                                 step=str(step), value=str(value), version="v", machine="m"))  # fmt: skip
    return rows


def test_a_table_says_how_sure_it_is():
    study = reproduce.STUDIES["etd"]
    means = {"C-TeC": 100, "C-TeC unit": 150, "ETD": 200, "random": 100}
    many = "\n".join(report.table(study, made_up_rows(study, "etd", range(10, 15), means), "point_hardest_maze"))
    assert "| C-TeC | 100 101 102 103 104 | 102 ± 1 | 102 [100, 104] |  |" in many
    assert "| 100 [98, 102] | 0.00 |" in many and "| 0 [-2, 2] | 0.50 |" in many  # ETD and random minus C-TeC
    few = "\n".join(report.table(study, made_up_rows(study, "etd", (10, 11), means), "point_hardest_maze"))
    assert "IQM" not in few and "| ETD | 200 201 | 200 ± 0 | 100 ± 1 |" in few


def test_a_table_with_areas_under_the_curves():
    """100 at the end and half of it halfway: the triangle's area over its length is 50."""
    study = reproduce.STUDIES["race_u"]
    means = {method.label: 100 for method in study.methods}
    rows = made_up_rows(study, "race_u", (0,), means, (500_000, 1_000_000, 2_000_000))
    table = report.table(study, rows, "point_u_maze")
    assert table[0].endswith("| mean over the run |")
    assert table[2].endswith("| 50 |"), table[2]
    last = [row for row in rows if row["step"] == "2000000"]
    assert "mean over" not in report.table(study, last, "point_u_maze")[0]


def test_values_after_a_number_of_steps_and_all_environments_together():
    study = reproduce.STUDIES["paper_sample_efficiency"]
    steps = (5_000_000, 30_010_000, 50_000_000, 500_000_000)
    rows = made_up_rows(study, "x", (5,), {"C-TeC": 1000}, steps)
    found = [values for _, _, values in report.entries(study, rows, "ant_hardest_maze")]
    assert [round(values[5]) for values in found] == [60, 100, 1000]
    study = reproduce.STUDIES["paper_etd"]
    rows = made_up_rows(study, "x", range(5), {"C-TeC": 100, "ETD": 50})
    assert "| ETD | 0.51 [" in "\n".join(report.table_of_all(study, rows))


PICTURED = ["race", "race_craftax", "ablations", "ant", "paper_model_based", "paper_sample_efficiency"]


@pytest.mark.parametrize("name", PICTURED)
def test_pictures_of_whole_and_of_final_values(name, tmp_path):
    from PIL import Image

    study = reproduce.STUDIES[name]
    means = {method.label: 100 + 10 * i for i, method in enumerate(study.methods)}
    rows = made_up_rows(study, name, study.seeds, means, (30_000_000, 50_000_000, 500_000_000))
    last = [row for row in rows if row["step"] == "500000000"]
    if "rates" in study.pictures:
        rates = [row | {"metric": name, "value": "0.5"} for row in last for name in report.ACHIEVEMENTS]
        rows = rows + rates
    if "diagnostics" in study.pictures:
        rows = rows + [row | {"metric": name} for row in rows for name in report.DIAGNOSTICS]
    for kind, some in (("whole", rows), ("finals", last)):
        report.draw(name, study, some, tmp_path / kind)
        assert {path.name for path in (tmp_path / kind).iterdir()} == set(report.pictures(name, study, some))
        if kind == "whole" or name != "ant":  # which has curves only
            assert Image.open(tmp_path / kind / f"{name}.png").width == 1600
    assert report.has_curves(study, rows) == ("curves" in study.pictures) and not report.has_curves(study, last)


def test_the_papers_points_and_the_diagnostics_are_drawn():
    from matplotlib.figure import Figure

    study = reproduce.STUDIES["ant"]
    means = {method.label: 400 for method in study.methods}
    rows = made_up_rows(study, "ant", (11,), means, (5_000_000, 10_000_000, 15_000_000))
    axes = Figure().add_subplot()
    report.draw_curves(axes, study, rows, "ant_hardest_maze")
    assert axes.get_xlabel() == "million steps"
    points = next(c for c in axes.containers if "paper" in c.get_label())
    assert points.lines[0].get_xydata().tolist() == [[30, 1119], [50, 1916]]
    bars = points.lines[2][0].get_segments()
    assert [bar[:, 1].tolist() for bar in bars] == [[815, 1423], [1486, 2346]]  # a standard deviation to each side
    close_up = Figure().add_subplot()
    report.draw_close_up(close_up, study, rows, "ant_hardest_maze")
    own = lambda axes: [line.get_xydata().tolist() for line in axes.lines if line.get_label() in means]
    assert own(close_up) == own(axes) and len(own(axes)) == len(means) and not close_up.containers
    low, high = close_up.get_ylim()
    assert 401 < high < 500 and low == high / 2

    ctec = [row for row in rows if row["method"] == "C-TeC"]
    rows += [row | {"metric": "alpha", "value": str(i)} for i, row in enumerate(ctec)]
    figure = Figure()
    report.draw_metrics(figure, study, rows, report.DIAGNOSTICS)
    lines = {axes.get_title(): axes.lines for axes in figure.axes}
    assert [line.get_ydata().tolist() for line in lines["alpha"]] == [[0, 1, 2]] and not lines["tau"]


@pytest.mark.parametrize("kind, metric", [("diagnostics", "alpha"), ("unlocked", "eat_cow")])
def test_the_curves_of_diagnostics_and_achievements_are_kept(fake, monkeypatch, tmp_path, kind, metric):
    with_metric = FAKE.replace("coverage", f"coverage,{metric}").replace("{row * args.seed}", "{row},{row / 2}")
    (fake / "fake.py").write_text(with_metric)
    more = dict(pictures=("curves", kind), at_steps=(1230,))  # between two of the points that are kept
    study = add_study(monkeypatch, "diagnosed", fake_method("C-TeC", "--rows 1000"), seeds=(1,), **more)
    args = Args(studies=("diagnosed",), jobs=1, **folders(tmp_path))
    assert reproduce.main(args) == 0
    rows = report.read_csv(args.results_dir / "diagnosed.csv")
    steps, values = report.curves(rows, "point_u_maze", "C-TeC", metric)[1]
    assert steps.tolist() == sorted([*range(100, 10_001, 100), 1230]) and np.allclose(values, steps / 20)
    assert report.pictures("diagnosed", study, rows) == ["diagnosed.png", f"diagnosed_{kind}.png"]
    assert (tmp_path / "docs" / "images" / f"diagnosed_{kind}.png").exists()


def test_the_mean_over_the_last_fifth_of_a_run():
    table = [{"steps": str(step), "at_tv": str(step / 100)} for step in (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)]
    assert reproduce.last_value(table, "at_tv") == "1.0"
    np.testing.assert_allclose(reproduce.last_value(table, "at_tv_last_fifth"), (0.9 + 1.0) / 2)


def test_every_method_has_its_own_colour_and_achievements_are_the_scripts():
    import random_craftax

    assert report.ACHIEVEMENTS == random_craftax.ACHIEVEMENTS
    methods = [method for study in reproduce.STUDIES.values() for method in study.methods]
    labels = {method.label for method in methods if not method.family}  # the bars of a family are grey
    assert labels <= set(report.COLOURS) and len(set(report.COLOURS.values())) == len(report.COLOURS)


def test_the_page_says_what_the_csv_files_say():
    text = (ROOT / "docs" / "results.md").read_text()
    for name, study in reproduce.STUDIES.items():
        rows = report.read_csv(ROOT / "results" / f"{name}.csv")
        if study.on_page and rows:
            assert f"<!-- reproduce:{name} -->\n{report.section(name, study, rows)}<!-- /reproduce:{name} -->" in text
            assert all((ROOT / "docs" / "images" / picture).exists() for picture in report.pictures(name, study, rows))
    assert {path.stem for path in (ROOT / "results").glob("*.csv")} <= set(reproduce.STUDIES)


def test_what_is_outside_the_markers_stays():
    page = report.updated_page("# Mine\n\ntext\n", {"race": ("The race", "one\n")})
    page = page.replace("## The race\n", "## The race\n\nmy words\n") + "\nthe end\n"
    again = report.updated_page(page, {"race": ("The race", "two\n")})
    assert again == page.replace("one", "two") and "my words" in again and again.endswith("the end\n")


# -------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize("name", reproduce.STUDIES)
def test_the_commands_of_every_study_are_understood_by_the_scripts(name, tmp_path, capsys):
    study = reproduce.STUDIES[name]
    reproduce.main(Args(studies=(name,), dry_run=True, **folders(tmp_path)))
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(commands) == len(study.methods) * len(study.seeds)
    assert not list(tmp_path.iterdir())
    for words in commands:
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        assert (ROOT / words[at]).exists() and words[at - 1] == sys.executable
        flags = words[at + 1 :]
        script = words[at].removesuffix(".py")
        if words[at] == "experiments/inputs.py":
            args = importlib.import_module("inputs").parse_args(flags)[1]
            assert f"--seed {args.seed}" in " ".join(words)
            continue
        if words[at] == "experiments/remedies.py":
            remedies = importlib.import_module("remedies")
            remedy, flags = remedies.tyro.cli(remedies.Remedy, args=flags, return_unknown_args=True)
            args = remedies.ctec.parse_args(flags)
            assert remedy.remedy != "none" and f"--seed {args.seed}" in " ".join(words)
            continue
        if words[at].startswith("benchmarks/"):
            flags = [word for word in flags if word != "no-bonus"]
            script = flags.pop(0)
        args = importlib.import_module(script).parse_args(flags)
        assert args.num_iterations > 0 and f"--seed {args.seed}" in " ".join(words)


def test_studies_share_their_runs(tmp_path):
    args = Args(**folders(tmp_path))
    runs = {name: {run.name for run in reproduce.select_runs(args, study)} for name, study in reproduce.STUDIES.items()}
    assert len(runs["paper_sample_efficiency"] & runs["paper_ant"]) == 5
    assert len(runs["paper_sample_efficiency"] & runs["paper_model_based"]) == 15
    for name, study in reproduce.STUDIES.items():
        assert len(runs[name]) == len(study.methods) * len(study.seeds), f"{name}: two of its runs share a folder"


def test_the_command_line():
    def call(*words):
        command = [sys.executable, ROOT / "benchmarks" / "reproduce.py", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    printed = call("--list").stdout
    for name, study in reproduce.STUDIES.items():
        assert f"\n{name} " in f"\n{printed}" and f"results/{name}.csv" in printed and report.expected(study) in printed
    wrong = call("race", "--methods", "X")
    assert wrong.returncode == 2 and "C-TeC" in wrong.stderr
    for words in ((), ("unknown",), ("race", "--jobs", "0"), ("race", "--sbatch", "long"), ("no-bonus",)):
        assert call(*words).returncode == 2
