"""One command for every table and figure: runs what is missing, resumes what was stopped, then draws.

    python benchmarks/reproduce.py --list                      # every study: runs, expected hours, what it writes
    python benchmarks/reproduce.py race --jobs 2               # the runs, then csv, pictures and docs/results.md
    python benchmarks/reproduce.py race --dry-run              # the exact commands
    python benchmarks/reproduce.py race --plot                 # tables and pictures from results/race.csv alone
    python benchmarks/reproduce.py race --film                 # the maze filling up, from three finished runs
    python benchmarks/reproduce.py race --methods C-TeC RND --seeds 11 12
    python benchmarks/reproduce.py paper_ant --launcher slurm  # the same runs as a job array, by submitit

A study is an entry of STUDIES in studies.py. A run is a child process of a script, in runs/<script>__<env>__<flags'
hash>__seed<k>/, so that two studies share a run that both need. That folder has the script's own folder, its output
(log.txt), and its version and machine (run.json). Ctrl-C and SIGTERM let the children save their checkpoints; the same
command goes on from there. To run something again, delete its folder.
"""

import contextlib
import csv
import dataclasses
import fcntl
import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from matplotlib.animation import PillowWriter
from matplotlib.figure import Figure
from report import ACHIEVEMENTS, COLUMNS, DIAGNOSTICS, draw, expected, read_csv, run_key, section, updated_page
from studies import STUDIES, Method
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent  # where the scripts are
CHECKPOINT = "checkpoint.npz"
POINTS = 100  # of each learning curve that are kept in results/
FILMED = ("C-TeC", "RND", "random")
KINDS = ("rates", "correlations", "maps", "visits", "diagnostics", "unlocked")  # of docs/images/<study>_<kind>.png


# ---------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    studies: tyro.conf.Positional[tuple[Literal[tuple(STUDIES)], ...]] = ()
    """what to reproduce"""
    list: bool = False
    """print every study: number of runs, expected hours, what it writes"""
    dry_run: bool = False
    """print the exact commands, or the batch script, and do nothing"""
    plot: bool = False
    """run nothing: tables and pictures from results/*.csv alone (without a study: all of them)"""
    film: bool = False
    """run nothing: docs/images/<study>.gif, C-TeC, RND and random actions over time, from the first seed's runs"""
    methods: tuple[str, ...] = ()
    """only these methods of the study (default: all)"""
    seeds: tuple[int, ...] = ()
    """these seeds instead of the study's"""
    jobs: int | None = None
    """runs at the same time (default: one for each core, or --runs-per-gpu for each GPU)"""
    runs_per_gpu: int = 1
    """runs that share a GPU, and its memory in equal parts"""
    launcher: Literal["local", "slurm"] = "local"
    """slurm: submit the runs as a job array by submitit, requeued at the time limit until they are finished"""
    slurm_minutes: int = 720
    """time limit of a job before it is requeued"""
    sbatch: tuple[str, ...] = ()
    """further options of sbatch, as name=value: --sbatch partition=long account=me"""
    run_dir: Path = ROOT / "runs"
    """where the folders of the runs are"""
    results_dir: Path = ROOT / "results"
    """where the csv files are"""
    docs_dir: Path = ROOT / "docs"
    """where the pictures and results.md are"""


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


# --------------------------------------------------------------------------------------------------------- runs
def relative(path):
    """The path as it is written in a command that is called in ROOT."""
    path = Path(path).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


@dataclasses.dataclass(frozen=True)
class Run:
    method: Method
    seed: int
    run_dir: Path

    @property
    def name(self):
        suffix = "" if self.method.kind == "train" else f"_{self.method.kind}"
        words = " ".join([*self.method.inputs.split(), *self.method.flags.split()])
        flags = hashlib.sha256(words.encode()).hexdigest()[:8]
        return f"{self.method.script}{suffix}__{self.method.env}__{flags}__seed{self.seed}"

    @property
    def folder(self):
        return self.run_dir / self.name

    def script_folder(self, file):
        """The newest of the script's own folders (their names end in the time) that has this file, or None."""
        return max((path.parent for path in self.folder.rglob(file)), default=None)

    @property
    def fraction(self):
        """How much of the run is done, from 0 to 1."""
        if self.method.kind == "speed":
            return float(measured_speed(self.folder / "log.txt") is not None)
        folder = self.script_folder("metrics.csv")
        if folder is None or not (folder / "args.json").exists():
            return 0.0
        total = json.loads((folder / "args.json").read_text())["total_timesteps"]
        return min(last_row(folder / "metrics.csv")["steps"] / total, 1.0)

    @property
    def finished(self):
        if self.method.kind == "speed":
            return self.fraction == 1.0
        folder = self.script_folder(CHECKPOINT)
        if folder is None or self.fraction < 1.0:
            return False
        # a kill between the last row and the last checkpoint leaves an older one
        return saved_iteration(folder / CHECKPOINT) == last_row(folder / "metrics.csv")["iteration"]

    def command(self):
        """The words of the command, which goes on from a checkpoint if there is one."""
        flags = [*self.method.flags.split(), "--seed", str(self.seed)]
        if self.method.kind == "speed":
            return ["benchmarks/speed.py", self.method.script, *flags]
        checkpoint = self.script_folder(CHECKPOINT)
        if checkpoint and not self.finished:
            flags = ["--resume", relative(checkpoint)]
        else:
            flags += ["--run-dir", relative(self.folder)]
        if self.method.kind in ("inputs", "remedies"):
            return [f"experiments/{self.method.kind}.py", *self.method.inputs.split(), *flags]
        return [f"{self.method.script}.py", *flags]

    @property
    def version(self):
        """Git's name for the script's content: `git show <version>` prints it, once it is committed."""
        source = (ROOT / f"{self.method.script}.py").read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(source) + source).hexdigest()[:10]

    def record(self):
        """What run.json says: the versions that the run was started and resumed with, and the machine."""
        file = self.folder / "run.json"
        return json.loads(file.read_text()) if file.exists() else {"version": self.version, "machine": "unknown"}


def last_row(metrics):
    """Iteration and steps of the last complete row; reads the end of the file only, since a run may have 10,000
    rows."""
    with open(metrics, "rb") as file:
        header = file.readline().decode().strip().split(",")
        file.seek(max(file.tell(), os.path.getsize(metrics) - 8192))
        lines = file.read().decode().splitlines(keepends=True)
    rows = [line.split(",") for line in lines if line.endswith("\n") and line.count(",") == len(header) - 1]
    return {name: int(rows[-1][header.index(name)]) if rows else 0 for name in ("iteration", "steps")}


def saved_iteration(checkpoint):
    """The iteration that a checkpoint was written after; of the file, np.load reads this array only."""
    with np.load(checkpoint, allow_pickle=False) as file:
        return int(file["iteration"])


def measured_speed(log):
    """Steps a second that benchmarks/speed.py printed, or None if it did not come to its end."""
    text = log.read_text() if log.exists() else ""
    found = re.search(r"^training +([\d,]+) steps/s", text, re.MULTILINE)
    return float(found.group(1).replace(",", "")) if found and "Traceback" not in text else None


def select_runs(args, study):
    unknown = set(args.methods) - {method.label for method in study.methods}
    if unknown:
        fail(f"--methods {' '.join(unknown)}: the study has {', '.join({m.label: 0 for m in study.methods})}")
    methods = [method for method in study.methods if not args.methods or method.label in args.methods]
    seeds = args.seeds or study.seeds
    return [Run(method, seed, args.run_dir.resolve()) for seed in seeds for method in methods]


# ----------------------------------------------------------------------------------- running them on this machine
@dataclasses.dataclass(frozen=True)
class Slot:
    """A place for one run at a time: a core or a share of a GPU."""

    prefix: tuple[str, ...] = ()
    """words before the command"""
    env: tuple[tuple[str, str], ...] = ()
    """environment variables of the child"""

    def command(self, run):
        return [*self.prefix, sys.executable, *run.command()]

    def variables(self, run):
        """Environment variables of the child. XLA's new emitters are slow for robots on a CPU, fast for the rest."""
        is_robot = run.method.env.startswith(("ant", "humanoid", "arm"))
        if ("JAX_PLATFORMS", "cpu") not in self.env or "XLA_FLAGS" in os.environ or not is_robot:
            return dict(self.env)
        return dict(self.env) | {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}


def command_line(slot, run):
    """The command as one would type it in ROOT."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in slot.variables(run).items()]
    return " ".join([*variables, shlex.join(slot.command(run))])


def visible_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split()


def cpu_slot(core=None):
    prefix = ("taskset", "-c", str(core)) if core is not None and shutil.which("taskset") else ()
    return Slot(prefix, (("JAX_PLATFORMS", "cpu"),))


def gpu_slot(runs_per_gpu, gpu=None):
    env = [] if gpu is None else [("CUDA_VISIBLE_DEVICES", gpu)]
    if runs_per_gpu > 1:
        env.append(("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / runs_per_gpu:.2f}"))
    return Slot(env=tuple(env))


def local_slots(args, device):
    gpus = visible_gpus() if device == "gpu" else []
    if gpus:
        slots = [gpu_slot(args.runs_per_gpu, gpu) for _ in range(args.runs_per_gpu) for gpu in gpus]
        return slots[: args.jobs]
    if device == "gpu":
        print("no GPU was found: these sizes will take very long on a CPU", file=sys.stderr)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
    return [cpu_slot(cores[i % len(cores)]) for i in range(args.jobs or len(cores))]


def machine_name(slot):
    """The GPU or the processor that a run is on."""
    if ("JAX_PLATFORMS", "cpu") not in slot.env and visible_gpus():
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True).stdout.strip().split("\n")[0]
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{found.group(1) if found else platform.processor() or platform.machine()}, one core"


def start(run, slot):
    """The child process of a run, or None if another process is at it. The child keeps the lock until it ends."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        lock = files.enter_context(open(run.folder / "lock", "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        resumed = run.script_folder(CHECKPOINT) is not None
        log = files.enter_context(open(run.folder / "log.txt", "ab" if resumed else "wb"))
        versions = [run.record()["version"], run.version] if resumed else [run.version]
        record = {"version": "+".join(dict.fromkeys(versions)), "machine": machine_name(slot)}
        (run.folder / "run.json").write_text(json.dumps(record, indent=1))
        return subprocess.Popen(
            slot.command(run),
            cwd=ROOT,
            env=os.environ | slot.variables(run),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches the children through us only
            pass_fds=(lock.fileno(),),
        )


def last_lines(run, count=12):
    lines = re.split("[\r\n]+", (run.folder / "log.txt").read_text(errors="replace"))
    return "\n".join(f"    {line}" for line in [line for line in lines if line.strip()][-count:])


@contextlib.contextmanager
def caught_signals():
    """A list that Ctrl-C and SIGTERM append to, instead of what they do otherwise."""
    caught = []
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, lambda number, _: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_all(runs, slots, name):
    """Run what is not finished. Returns the names of the runs that failed; exits if a signal stopped it."""
    runs = list({run.name: run for run in runs}.values())  # two rows of a table may share a run
    waiting = [run for run in runs if not run.finished]
    done = {run: 0.0 if run in waiting else run.method.hours for run in runs}  # expected hours of what is done
    children = {}  # {number of a slot: (run, process)}
    failed = []
    bar = tqdm(
        total=sum(run.method.hours for run in runs),
        initial=sum(done.values()),
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left",
        smoothing=0,
        miniters=0,
        mininterval=0.5 if sys.stderr.isatty() else 60,
    )
    with caught_signals() as caught, bar:
        while (waiting or children) and not caught:
            for number, slot in enumerate(slots):
                if waiting and number not in children:
                    run = waiting.pop(0)
                    if run.finished:  # by another process, meanwhile
                        done[run] = run.method.hours
                        continue
                    process = start(run, slot)
                    if process is not None:
                        children[number] = (run, process)
                    else:
                        failed.append(run.name)
                        bar.write(f"{run.name}: another process is running it", file=sys.stderr)
            time.sleep(0.2)
            for number, (run, process) in list(children.items()):
                code = process.poll()
                done[run] = run.fraction * run.method.hours
                if code is not None:
                    del children[number]
                    if code != 0 or not run.finished:
                        failed.append(run.name)
                        log = relative(run.folder / "log.txt")
                        words = f"{run.name} failed with exit code {code}. The last lines of {log}:"
                        bar.write(f"{words}\n{last_lines(run)}", file=sys.stderr)
            finished = len(runs) - len(waiting) - len(children) - len(failed)
            words = f"{name}: {finished} of {len(runs)} runs finished, {len(children)} running, {len(failed)} failed"
            bar.set_description_str(words, refresh=False)
            bar.update(sum(done.values()) - bar.n)
    if caught:  # from here on a second Ctrl-C ends this process, and the children end by themselves
        stop_children([process for _, process in children.values()])
        fail("stopped; the same command goes on from the checkpoints", code=128 + caught[0])
    return failed


def stop_children(processes):
    """SIGTERM: each one saves its checkpoint after the iteration."""
    for process in processes:
        process.terminate()
    if processes:
        print(f"waiting for the checkpoints of {len(processes)} runs", file=sys.stderr)
    for process in processes:
        process.wait()


# ------------------------------------------------------------------------------------------ running them on a cluster
class ClusterJob:
    """What submitit calls on a node: a few runs at once. At the time limit submitit asks for checkpoint(), and
    calls what that returns in the requeued job, where the runs go on from their checkpoints."""

    def __init__(self, runs, slot):
        self.runs = runs
        self.slot = slot
        self.processes = []

    def __call__(self):
        waiting = [run for run in self.runs if not run.finished]
        self.processes = [start(run, self.slot) for run in waiting]
        for process in self.processes:
            if process is not None:
                process.wait()
        failed = [run for run in self.runs if not run.finished]
        if failed:
            raise RuntimeError("\n".join(f"{run.name} failed:\n{last_lines(run)}" for run in failed))
        return [run.name for run in self.runs]

    def checkpoint(self):
        from submitit.helpers import DelayedSubmission

        running = [process for process in self.processes if process is not None and process.returncode is None]
        for process in running:
            process.terminate()
        for process in running:
            # The interrupted wait() of __call__ holds the process's lock: wait without it, and leave the rest to it.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(ClusterJob(self.runs, self.slot))


def import_submitit():
    try:
        import cloudpickle
        import submitit
    except ImportError:
        fail("--launcher slurm needs submitit: pip install -r requirements-cluster.txt")
    for name in {__name__, "studies", "report"} - {"__main__"}:  # a node need not find these modules
        cloudpickle.register_pickle_by_value(sys.modules[name])
    return submitit


def cluster_jobs(args, runs, device):
    size = args.runs_per_gpu if device == "gpu" else 1
    slot = gpu_slot(args.runs_per_gpu) if device == "gpu" else cpu_slot()
    return [ClusterJob(runs[i : i + size], slot) for i in range(0, len(runs), size)]


def submit(executor, jobs):
    """Submit the jobs as one array, and note each run's job in its folder."""
    with executor.batch():
        submitted = [executor.submit(job) for job in jobs]
    for job, handle in zip(jobs, submitted):
        for run in job.runs:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "job.txt").write_text(handle.job_id)
    return submitted


def slurm_executor(args, folder, device, name):
    submitit = import_submitit()
    executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=100)
    gpu = {"gpus_per_node": 1, "cpus_per_task": 2, "mem": "16GB"}
    executor.update_parameters(
        job_name=name,
        time=args.slurm_minutes,
        signal_delay_s=300,  # an iteration and its checkpoint must fit in
        array_parallelism=args.jobs or 256,
        additional_parameters=dict(option.split("=", 1) for option in args.sbatch),
        **(gpu if device == "gpu" else {"cpus_per_task": 1, "mem": "8GB"}),
    )
    return executor


def batch_script(args, jobs, device, name):
    """The script that submitit hands to sbatch. A stand-in for sbatch lets submitit write it on any machine."""
    with tempfile.TemporaryDirectory() as folder:
        for program in ("srun", "sbatch"):
            stand_in = Path(folder) / program
            stand_in.write_text("#!/bin/sh\necho Submitted batch job 1\n")
            stand_in.chmod(0o755)
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{folder}:{path}"
        try:
            executor = slurm_executor(args, f"{folder}/jobs", device, name)
            with executor.batch():
                for job in jobs:
                    executor.submit(job)
        finally:
            os.environ["PATH"] = path
        text = next(Path(folder, "jobs").glob("*submission.sh")).read_text()
        return text.replace(f"{folder}/jobs", relative(args.run_dir / "slurm"))


def is_queued(submitit, run, folder):
    file = run.folder / "job.txt"
    return file.exists() and not submitit.SlurmJob(folder=folder, job_id=file.read_text()).done()


def run_on_slurm(args, runs, device, name):
    """Submit what is neither finished nor queued; returns the names of the runs that are not finished."""
    submitit = import_submitit()
    if shutil.which("sbatch") is None:
        fail("there is no sbatch here; --launcher slurm --dry-run prints the batch script")
    folder = args.run_dir / "slurm"
    left = [run for run in runs if not run.finished]
    new = [run for run in left if not is_queued(submitit, run, folder)]
    if new:
        handles = submit(slurm_executor(args, folder, device, name), cluster_jobs(args, new, device))
        print(f"submitted {len(new)} runs as job {handles[0].job_id.split('_')[0]}, logs in {relative(folder)}")
    print(f"{len(runs) - len(left)} runs are finished, {len(left)} queued (job gone? delete the run's job.txt)")
    print("when they are done, the same command writes the results")
    return [run.name for run in left]


# ------------------------------------------------------------------------------------------------------ results
def result_rows(name, study, run):
    """The rows of results/<study>.csv of a finished run."""
    known = {"study": name, "env": run.method.env, "method": run.method.label, "seed": run.seed} | run.record()
    if study.metric == "steps_per_second":
        return [known | {"metric": study.metric, "step": 0, "value": measured_speed(run.folder / "log.txt")}]
    folder = run.script_folder(CHECKPOINT)
    total = json.loads((folder / "args.json").read_text())["total_timesteps"]
    with open(folder / "metrics.csv") as file:
        table = [row for row in csv.DictReader(file) if row[study.metric]]
    if not table:  # no Craftax episode has ended
        return []
    steps = np.array([int(row["steps"]) for row in table])
    wanted = np.append(np.arange(1, POINTS + 1) * total / POINTS, study.at_steps)
    chosen = np.unique(np.minimum(np.searchsorted(steps, wanted), len(steps) - 1))  # the first row at or after each
    rows = [known | {"metric": study.metric, "step": steps[i], "value": table[i][study.metric]} for i in chosen]
    last = {"steps_per_second": np.median([float(row["steps_per_second"]) for row in table])}
    last |= {metric: last_value(table, metric) for metric in study.also}
    if "correlations" in study.pictures:
        with open(run.folder / "correlations.csv") as file:
            moments = {row.pop("steps"): row for row in csv.DictReader(file)}  # a resumed run may repeat one
        for at, row in moments.items():
            rows += [known | {"metric": f"correlation_{key}", "step": at, "value": x} for key, x in row.items()]
    for kind, metrics in (("diagnostics", DIAGNOSTICS), ("unlocked", ACHIEVEMENTS)):
        found = [(metric, i) for metric in metrics for i in chosen if kind in study.pictures and table[i].get(metric)]
        rows += [known | {"metric": metric, "step": steps[i], "value": table[i][metric]} for metric, i in found]
    if "rates" in study.pictures:
        last |= {achievement: table[-1][achievement] for achievement in ACHIEVEMENTS}
    return rows + [known | {"metric": metric, "step": steps[-1], "value": last[metric]} for metric in last]


def last_value(table, metric):
    """The last value of a column of metrics.csv, or the mean over the last fifth of the run."""
    column = metric.removesuffix("_last_fifth")
    if column == metric:
        return table[-1][metric]
    last_step = int(table[-1]["steps"])
    return np.mean([float(row[column]) for row in table if int(row["steps"]) > 0.8 * last_step])


def write_results(path, name, study, runs):
    """Put the finished runs into the csv, in the place of older rows of the same runs."""
    new = [row for run in runs if run.finished for row in result_rows(name, study, run)]
    replaced = {run_key(row) for row in new}
    order = {(method.env, method.label): i for i, method in enumerate(study.methods)}
    rows = [row for row in read_csv(path) if run_key(row) not in replaced] + new
    rows = [row for row in rows if (row["env"], row["method"]) in order]
    rows.sort(key=lambda row: (order[row["env"], row["method"]], int(row["seed"])))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"value": f"{float(row['value']):.7g}"} for row in rows)
    temporary.replace(path)


def draw_reward_maps(path, runs):
    """A row of reward maps for each run. They are in the runs' folders and not in results/."""
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(runs[0].method.script)
    folders = {run.method.label: run.script_folder("reward_map.npz") for run in runs if run.finished}
    if len(folders) < len(runs):
        return
    maps = {label: dict(np.load(folder / "reward_map.npz")) for label, folder in folders.items()}
    figure = Figure((12, 2.6 * len(maps)), layout="constrained")
    panels = figure.subplots(len(maps), 5, squeeze=False)
    env = script.make_env(runs[0].method.env)
    for line, (label, of_label) in zip(panels, maps.items()):
        for axes, (steps, values) in zip(line, of_label.items()):
            title = f"{label}, {int(steps) / 1e6:.1f}M steps"
            colours = script.draw_places(axes, env, title, values[:, :2], values[:, 2])
            axes.tick_params(labelbottom=False, labelleft=False)
            axes.title.set_fontsize(9)
            axes.set(xlabel="", ylabel="")
            figure.colorbar(colours, ax=axes, shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_visit_maps(path, runs):
    """A row of heat maps for each environment, a column for each method, from the visits.npz of finished runs."""
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(runs[0].method.script)
    envs = list(dict.fromkeys(run.method.env for run in runs))
    labels = list(dict.fromkeys(run.method.label for run in runs))
    folders = {(run.method.env, run.method.label): run.script_folder("visits.npz") for run in runs if run.finished}
    if len(folders) < len(runs):
        return
    images = []
    figure = Figure((2.6 * len(labels), 2.9 * len(envs)), layout="constrained")
    panels = figure.subplots(len(envs), len(labels), squeeze=False)
    for (name, label), folder in folders.items():
        axes = panels[envs.index(name), labels.index(label)]
        settings = json.loads((folder / "args.json").read_text())
        env = script.make_noisy_tv(script.Args(**settings | {"tv_centre": tuple(settings["tv_centre"])}))
        visits = np.load(folder / "visits.npz")["visits"]
        share = np.sum(visits > 0) / env.free_cells
        title = f"{label}, TV {'on' if settings['tv'] else 'off'}: {share:.0%}"
        images.append(script.draw_visits(axes, env, title, visits))
        axes.title.set_fontsize(9)
    largest = max(image.norm.vmax for image in images)
    for image in images:
        image.set_clim(1, largest)  # one scale for all
    figure.colorbar(images[0], ax=panels, shrink=0.6, label="visits")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def draw_film(path, runs, frames=48):
    """Side by side, the bins that each run has visited so far; coloured by the step of the first visit."""
    sys.path.insert(0, str(ROOT))
    figure = Figure((3.4 * len(runs), 3.1), layout="constrained")
    images = []
    for axes, run in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs):
        script = importlib.import_module(run.method.script)
        folder = run.script_folder("coverage.npz")
        total = last_row(folder / "metrics.csv")["steps"]
        with np.load(folder / "coverage.npz") as file:
            first_visit = file["first_visit"]
            place = file["place"]
        env = script.make_env(run.method.env)
        image = script.draw_places(axes, env, " ", place, first_visit, cmap="viridis_r", vmin=0, vmax=total)
        axes.set(xticks=[], yticks=[], xlabel="", ylabel="")
        images.append((run.method.label, image, image.get_array().filled(np.inf), total))
    writer = PillowWriter(fps=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writer.saving(figure, path, dpi=80):
        for frame in [*range(1, frames + 1), *[frames] * 16]:  # the last one for two seconds
            for label, image, visited, total in images:
                now = visited <= total * frame / frames
                image.set_data(np.where(now, visited, np.nan))
                image.axes.set_title(f"{label}: {np.sum(now):,} bins", fontsize=11)
            figure.suptitle(f"{total * frame / frames / 1e6:.1f}M steps", fontsize=10)
            writer.grab_frame()


# --------------------------------------------------------------------------------------------------------- main
def print_list(args):
    for name, study in STUDIES.items():
        count = len(study.methods) * len(study.seeds)
        recorded = len({run_key(row) for row in read_csv(args.results_dir / f"{name}.csv")})
        files = [f"results/{name}.csv"]
        files += [f"docs/images/{name}.png"] if study.pictures else []
        files += [f"docs/images/{name}_{kind}.png" for kind in KINDS if kind in study.pictures]
        print(f"{name:24}{study.title}")
        print(f"{'':24}{count} runs ({recorded} recorded), {expected(study)}; writes {', '.join(files)}\n")


def print_commands(args, name, study, runs):
    if args.launcher == "slurm":
        jobs = cluster_jobs(args, runs, study.device)
        print(batch_script(args, jobs, study.device, name))
        for number, job in enumerate(jobs):
            for run in job.runs:
                print(f"# {name}, array index {number}: {command_line(job.slot, run)}")
        return
    slots = local_slots(args, study.device)
    for number, run in enumerate(runs):
        print(command_line(slots[number % len(slots)], run) + ("   # finished" if run.finished else ""))


def report_old_versions(runs):
    old = [run for run in runs if run.finished and run.record()["version"] != run.version]
    if old:
        print(f"{len(old)} finished runs are of another version of their script (delete to repeat):", file=sys.stderr)
        print("\n".join(f"    {relative(run.folder)}" for run in old), file=sys.stderr)


def show(args, names):
    """Tables, pictures and the page, from the csv files alone."""
    sections = {}
    for name in names:
        study = STUDIES[name]
        rows = read_csv(args.results_dir / f"{name}.csv")
        draw(name, study, rows, args.docs_dir / "images")
        text = section(name, study, rows)
        print(f"{study.title}\n\n{text}")
        if study.on_page and rows:
            sections[name] = (study.title, text)
    if sections:
        page = args.docs_dir / "results.md"
        args.docs_dir.mkdir(parents=True, exist_ok=True)
        page.write_text(updated_page(page.read_text() if page.exists() else None, sections))


def main(args):
    """Returns the exit code: 0 if all runs are finished."""
    if args.list:
        print_list(args)
        return 0
    if not args.studies and not args.plot:
        fail(f"which study? {', '.join(STUDIES)} (see --list)")
    if args.runs_per_gpu < 1 or (args.jobs is not None and args.jobs < 1):
        fail("--jobs and --runs-per-gpu must be at least 1")
    if not all("=" in option for option in args.sbatch):
        fail("--sbatch takes name=value, as in --sbatch partition=long account=me")
    names = args.studies or tuple(STUDIES)
    runs = {name: select_runs(args, STUDIES[name]) for name in names}
    if args.dry_run:
        for name in names:
            print_commands(args, name, STUDIES[name], runs[name])
        return 0
    if args.film:
        for name in names:
            of_seed = {run.method.label: run for run in runs[name] if run.seed == runs[name][0].seed and run.finished}
            if not set(FILMED) <= of_seed.keys():
                fail(f"--film needs finished runs of {', '.join(FILMED)} in {relative(args.run_dir)}: run {name} first")
            draw_film(args.docs_dir / "images" / f"{name}.gif", [of_seed[label] for label in FILMED])
        return 0
    unfinished = []
    for name in () if args.plot else names:
        study = STUDIES[name]
        report_old_versions(runs[name])
        if args.launcher == "slurm":
            unfinished += run_on_slurm(args, runs[name], study.device, name)
        else:
            alone = any(run.method.kind == "speed" for run in runs[name])
            slots = local_slots(dataclasses.replace(args, jobs=1) if alone else args, study.device)
            unfinished += run_all(runs[name], slots, name)
        if any(run.finished for run in runs[name]):
            write_results(args.results_dir / f"{name}.csv", name, study, runs[name])
        if "maps" in study.pictures:
            draw_reward_maps(args.docs_dir / "images" / f"{name}_maps.png", runs[name][: len(study.methods)][:2])
        if "visits" in study.pictures:
            draw_visit_maps(args.docs_dir / "images" / f"{name}_visits.png", runs[name][: len(study.methods)])
    show(args, names)
    if unfinished and args.launcher == "local":
        print(f"failed: {', '.join(unfinished)}", file=sys.stderr)
    return int(bool(unfinished) and args.launcher == "local")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
