"""Scripts on eight devices, which XLA simulates in a child process: what is computed, what is sent, and resuming on
another number of them."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, SMALL_PPO, SMALL_SAC, rows

import ctec_sac_brax as ctec

SMALL = SMALL_SAC | dict(num_envs=16, total_timesteps=16 * 16 * 4, replay_size=1024, encoder_width=16,
                         representation_size=8)  # fmt: skip

# What is asked of eight devices. One process, so that they are simulated and the script is compiled once.
QUESTIONS = """
import dataclasses, json, re, sys
import jax, jax.numpy as jnp, numpy as np
import ctec_sac_brax as ctec

ctec.GRID = (40, 40, 1)  # as small as the maze, since everything is small here
args = ctec.Args(**json.loads(sys.argv[1]))
env = ctec.make_env(args.env)
answers = {"devices": jax.device_count()}
single = ctec.init_state(args, env)
state = ctec.shard_state(single)
places = lambda state: [str(x.sharding.spec) for x in (state.replay.obs, state.env.obs, state.agent.log_alpha.params)]
answers["split"] = places(state)

# the loss and its gradients of one batch, on one device and with its rows on eight
pairs = ctec.Pairs(*(jax.random.normal(jax.random.PRNGKey(i), (32, n)) for i, n in ((1, 6), (2, 4))), jnp.ones(32))
grad = jax.jit(jax.value_and_grad(lambda params, pairs: ctec.contrastive_loss(params, args, pairs)[0]))
one, eight = grad(single.model.params, pairs), grad(state.model.params, ctec.shard(pairs, "envs"))
answers["gradient_error"] = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (one, eight))))

# training: what is sent, what is stored, what is counted
stages = [stage.lower(args, env, state).compile() for stage in (ctec.collect, ctec.learn)]
text = "".join(stage.as_text() for stage in stages)
answers["sent"] = re.findall(r"= (.*?) (?:all-gather|all-to-all|collective-permute|all-reduce)", text)
for i in range(4):
    state, metrics = stages[0](state)
    if i >= 2:
        state, more = stages[1](state)
metrics |= more
answers["split_after"] = places(state)
answers["loss"] = float(metrics["contrastive_loss"])
stored = np.asarray(state.replay.obs)[: int(state.replay.time)]
answers["written"] = bool(np.all(stored[..., 0] > 0))  # the maze's coordinates are above 0
walked = jnp.concatenate([state.replay.obs[1:64], state.env.obs[None]])[..., :2].reshape(-1, 2)
answers["bins"] = len(np.unique(np.floor(walked / 0.5), axis=0))  # without the first positions: episodes do not end
answers["coverage"] = int(metrics["coverage"])
print(json.dumps(answers))
"""

# A few iterations of a PPO script: its metrics, what is split, and the products that a device computes.
ITERATE = """
import importlib, json, re, sys
import jax, numpy as np
from helpers import Game
from stages import whole_iteration

script = importlib.import_module(sys.argv[1])
script.GRID = (40, 40, 1)  # bins of a maze; as small as the networks
args = script.Args(**json.loads(sys.argv[2]))
if args.env == "craftax_classic":
    env = Game()
    script.CraftaxClassic = Game
else:
    env = getattr(script, "make_any_env", script.make_env)(args.env)
state = script.shard_state(script.init_state(args, env))
iterate = whole_iteration(script, args, env).lower(state).compile()
table = []
for _ in range(4):
    state, metrics = iterate(state)
    table.append({name: float(x) for name, x in metrics.items()})
fields = {name: {len(x.sharding.device_set) > 1 and not x.sharding.is_fully_replicated for x in jax.tree.leaves(field)}
          for name, field in vars(state).items()}
answers = {"metrics": table, "split": [name for name, split in fields.items() if True in split]}
answers["flops"] = iterate.cost_analysis()["flops"]
answers["reduced"] = re.findall(r"= (.*?) all-reduce", iterate.as_text())
print(json.dumps(answers))
"""
SMALL_ETD = dict(env="point_u_maze", num_envs=16, num_steps=16, episode_length=25, batch_size=64, agent_width=16,
                 encoder_width=16, representation_size=8, total_timesteps=16 * 16 * 4)  # fmt: skip
SMALL_CRAFTAX = SMALL_PPO | dict(env="craftax_classic", num_envs=16, num_minibatches=1)
LIKE_ONE = {  # script: (arguments, what is split); the others have their code from these, to the letter
    "ctec_sac_brax": (SMALL | dict(learning_starts=2, multiplier=0.125), ["env", "episode_step", "replay"]),
    "etd_ppo": (SMALL_ETD | dict(memory_size=32), ["env", "episode_step", "memory"]),
    "ctec_ppo_rnn_craftax": (SMALL_CRAFTAX | dict(encoder_width=16, encoder_minibatches=2, contrastive_batch=32),
                             ["players"]),
    "e3b_ppo_craftax": (SMALL_CRAFTAX | dict(model_minibatches=2, feature_dim=8, feature_width=16),
                        ["players", "root"]),
}  # fmt: skip


def with_devices(count, **variables):
    """The environment of a process that sees so many devices."""
    flags = f"--xla_force_host_platform_device_count={count} --xla_cpu_use_fusion_emitters=false"
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'benchmarks'}"} | variables


def on_devices(count, *command, **variables):
    env = with_devices(count, **variables)
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, env=env)


def small_flags(**changes):
    return [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | changes).items()]


def asked(count, questions, *arguments, **variables):
    done = on_devices(count, "-c", questions, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answers():
    return asked(8, QUESTIONS, json.dumps(SMALL | dict(episode_length=1001, multiplier=0.01)))


def test_environments_and_replay_are_split_and_stay_so(answers):
    assert answers["devices"] == 8
    replay, envs, copied = answers["split"]
    assert "'envs'" in replay and "None" in replay and "'envs'" in envs and "envs" not in copied
    assert answers["split_after"] == answers["split"]


def test_loss_and_gradients_are_those_of_one_device(answers):
    assert answers["gradient_error"] < 1e-5


def sizes(arrays):
    """Numbers in each of the arrays that HLO's text names."""
    shapes = [shape for text in arrays for shape in re.findall(r"\[([\d,]*)\]", text)]
    return [math.prod(int(length) for length in shape.split(",") if length) for shape in shapes]


def test_no_device_sends_its_replay(answers):
    """Whatever is sent is far smaller than one number of each stored step; the largest is the histogram of the bins."""
    assert 40 * 40 == max(sizes(answers["sent"])) < 1024 * 16 / 8


def test_replay_and_coverage_add_up(answers):
    assert answers["written"] and answers["loss"] > 0
    assert answers["coverage"] == answers["bins"] > 1


@pytest.mark.parametrize("name", LIKE_ONE)
def test_eight_devices_compute_what_one_computes(name):
    """The random numbers are the same, so all metrics are, up to rounding. The environments are split, and each device
    computes its share."""
    config, split = LIKE_ONE[name]
    # Adam's first steps have the size of the step size however small a gradient is, so SAC is compared in 64 bits
    bits = dict(JAX_ENABLE_X64="true") if name == "ctec_sac_brax" else {}
    one, eight = (asked(count, ITERATE, name, json.dumps(config), **bits) for count in (1, 8))
    assert eight["split"] == split and not one["split"]
    for row, expected in zip(eight["metrics"], one["metrics"]):
        assert row.keys() == expected.keys()
        for metric, value in expected.items():
            error = dict(rtol=1e-5, atol=1e-6) if bits else dict(rtol=2e-3, atol=2e-4)
            np.testing.assert_allclose(row[metric], value, **error, err_msg=metric)
    assert one["metrics"][-1]["parameter_norm"] != one["metrics"][0]["parameter_norm"] > 0
    assert eight["flops"] < one["flops"] / 4
    assert max(sizes(eight["reduced"])) >= 16 * 16  # gradients are summed


def test_a_run_goes_on_on_another_number_of_devices(tmp_path):
    """From eight devices on four, and from there on one."""
    script = ctec.__file__
    first = on_devices(8, script, *small_flags(run_dir=tmp_path))
    assert first.returncode == 0, first.stderr
    assert "8 x cpu" in first.stdout
    folder = next(tmp_path.iterdir())
    steps = SMALL["total_timesteps"]
    for devices, more in ((4, 1.25), (1, 1.5)):
        done = on_devices(devices, script, "--resume", str(folder), "--total-timesteps", str(int(steps * more)))
        assert done.returncode == 0, done.stderr
    table = rows(folder)
    assert [int(row["iteration"]) for row in table] == [1, 2, 3, 4, 5, 6]
    assert all(float(row["contrastive_loss"]) > 0 for row in table[2:])
    assert float(table[-1]["coverage"]) >= float(table[3]["coverage"])
    assert (Path(folder) / "coverage.png").exists()


def test_a_number_that_the_devices_do_not_divide():
    done = on_devices(8, ctec.__file__, "--env", "point_u_maze", "--preset", "laptop", "--num-envs", "100")
    assert done.returncode == 2
    assert done.stderr == "error: --num-envs 100 must be a multiple of the 8 devices\n"


def test_processes_that_a_launcher_started_share_a_run(tmp_path):
    """Two processes with one device each do what one process does with two. A SIGTERM that reaches the second one only
    stops both, after a checkpoint, from which one process goes on with one device."""
    one = tmp_path / "one"
    done = on_devices(2, ctec.__file__, *small_flags(run_dir=one))
    assert done.returncode == 0, done.stderr

    two = tmp_path / "two"
    command = [
        sys.executable,
        ctec.__file__,
        *small_flags(run_dir=two, total_timesteps=10**8),
        "--distributed",
        "--track",
    ]
    tasks = []
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    for number in ("0", "1"):  # what srun says to each of its tasks
        told = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": number, "SLURM_LOCALID": number}  # fmt: skip
        output = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        tasks.append(subprocess.Popen(command, env=with_devices(1, TMPDIR=str(scratch), **told), **output))
    waited = time.time()
    while not any(len(rows(path.parent)) >= 4 for path in two.glob("*/metrics.csv")):
        assert time.time() - waited < 300 and all(task.poll() is None for task in tasks)
        time.sleep(0.1)
    tasks[1].terminate()
    outputs = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [143, 143]
    assert "2 x cpu" in outputs[0][0] and "x cpu" not in outputs[1][0]
    assert "stopped by SIGTERM; go on:" in outputs[0][1]

    (folder,) = two.iterdir()  # the second process has written nothing, here or elsewhere, and tracked nothing
    assert not list(scratch.iterdir())
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1
    for row, expected in zip(rows(folder)[:4], rows(next(one.iterdir())), strict=True):
        for name, value in expected.items():
            assert row[name] == value or np.isclose(float(row[name]), float(value), rtol=1e-3, atol=1e-5), name
    iteration = int(rows(folder)[-1]["iteration"])
    more = str((iteration + 1) * 16 * 16)
    done = on_devices(1, ctec.__file__, "--resume", str(folder), "--total-timesteps", more)
    assert done.returncode == 0, done.stderr
    assert int(rows(folder)[-1]["iteration"]) == iteration + 1
