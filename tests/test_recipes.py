"""docs/recipes.md: every block of Python runs as it is printed, and does what the page says."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reproduce
import studies
from helpers import ROOT, SMALL_SAC

import ctec_sac_brax as ctec

PAGE = (ROOT / "docs" / "recipes.md").read_text()
SECTIONS = {part.splitlines()[0]: part for part in re.split(r"^## ", PAGE, flags=re.M)[1:]}
BLOCKS = {title: re.findall(r"^```python\n(.*?)^```", part, re.M | re.S) for title, part in SECTIONS.items()}
POLICY, SEVERAL, ENVIRONMENT, BONUS, SWEEP, TASK = BLOCKS


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """A folder for the runs, a make_env that a block may replace, and programs that XLA compiles in a quarter of the
    time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ctec, "make_env", ctec.make_env)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def execute(block, **changes):
    """The names that a block defines. changes: {name: value} of assignments that stand in the block."""
    for name, value in changes.items():
        block, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", block, flags=re.M)
        assert count == 1
    scope = {"__name__": "__main__"}
    exec(compile(block, "docs/recipes.md", "exec"), scope)
    return scope


def test_every_block_is_run_here():
    assert {title: len(blocks) for title, blocks in BLOCKS.items()} == {
        POLICY: 1, SEVERAL: 1, ENVIRONMENT: 1, BONUS: 1, SWEEP: 2, TASK: 1
    }  # fmt: skip
    assert PAGE.count("```python") == sum(map(len, BLOCKS.values()))


def test_blocks_are_formatted(tmp_path):
    for title, blocks in BLOCKS.items():
        for number, block in enumerate(blocks):
            (tmp_path / f"{title.replace(' ', '_')}_{number}.py").write_text(block)
    config = ["--no-cache", "--config", ROOT / "ruff.toml", "--config", f"src = ['{ROOT}']"]
    for command in (["format", "--check"], ["check", "--ignore=E402"]):
        ruff = [sys.executable, "-m", "ruff", *command, *config, tmp_path]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_policy_is_the_scripts():
    args = ctec.Args(**SMALL_SAC)
    env = ctec.make_env(args.env)
    state = ctec.init_state(args, env)
    folder = Path("runs/point_u_maze__ctec_sac_brax__1__time")
    folder.mkdir(parents=True)
    ctec.save_checkpoint(folder / "checkpoint.npz", state)
    recipe = execute(BLOCKS[POLICY][0])
    assert not re.search(r"ctec_sac_brax as|from ctec", BLOCKS[POLICY][0])
    obs = jax.random.normal(jax.random.PRNGKey(0), (100, env.state_size))
    action = recipe["Policy"]().apply(recipe["params"], obs)
    with pytest.MonkeyPatch.context() as patch:  # without noise, the script's action is the mode
        patch.setattr(jax.random, "normal", lambda key, shape: jnp.zeros(shape))
        expected, _ = ctec.sample_action(state.agent.actor.params, args, None, obs, env.action_size)
    assert action.shape == (100, 2) and np.std(action) > 0.1
    np.testing.assert_array_equal(action, expected)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
def test_each_seed_is_its_own_run(monkeypatch):
    """In double precision: rounding to float32 can move an encoder's output across a kink of relu or of the L1
    distance, and the gradient jumps there."""
    monkeypatch.setattr(ctec, "make_env", ctec.make_env.__wrapped__)  # jax has the cached one's arrays in float32
    with jax.enable_x64(True):
        recipe = execute(BLOCKS[SEVERAL][0], SEEDS=(1, 2, 3))
        args, env = recipe["args"], recipe["env"]
        assert args.first_update < args.num_iterations
        for number, seed in enumerate(recipe["SEEDS"]):
            state = ctec.init_state(dataclasses.replace(args, seed=seed), env)
            for iteration in range(1, args.num_iterations + 1):
                state, metrics = ctec.collect(args, env, state)
                if iteration >= args.first_update:
                    state, learn_metrics = ctec.learn(args, env, state)
            expected = (state, metrics["coverage"], learn_metrics)
            together = (recipe["states"], recipe["metrics"]["coverage"], recipe["learn_metrics"])
            found = jax.tree.map(lambda x, number=number: x[number], together)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-9), found, expected)
    assert len(set(recipe["learn_metrics"]["contrastive_loss"].tolist())) == 3


def test_own_environment_is_trained():
    recipe = execute(BLOCKS[ENVIRONMENT][0])
    env, row = recipe["Pendulum"](), recipe["row"]
    folder = Path(row["folder"])
    assert folder.name.startswith("pendulum__") and json.loads((folder / "args.json").read_text())["env"] == "pendulum"
    assert 10 < row["coverage"] < env.free_bins and row["critic_loss"] > 0
    assert {"checkpoint.npz", "coverage.png"} <= {path.name for path in folder.iterdir()}

    # all that it can reach is among its bins, and it has the attributes that the page lists, and no others
    def step(state, action):
        state = env.step(state, action)
        return state, state.obs

    _, obs = jax.lax.scan(step, env.reset(jax.random.PRNGKey(0)), jnp.sign(jnp.sin(jnp.arange(2000) / 8.0))[:, None])
    bins = np.floor(np.asarray(obs[:, :2]) / 0.5)
    assert np.all((bins >= (-7, -16)) & (bins <= (6, 16))) and np.all(np.ptp(bins, axis=0) > 10)
    listed = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^- (.*?):", SECTIONS[ENVIRONMENT], re.M))))
    assert listed == {name for name, x in vars(recipe["Pendulum"]).items() if name[0] != "_" and not callable(x)}


def test_bonus_learns_from_made_up_trajectories():
    recipe = execute(BLOCKS[BONUS][0])
    assert recipe["metrics"]["accuracy"] > 5 / 256
    assert np.all(np.isfinite(recipe["reward"])) and recipe["reward"].mean() > 0
    # futures are later steps of the same episode and environment; without one the row is masked, its reward is 0
    t, n = np.indices((recipe["T"], recipe["N"]))
    recipe["obs"] = jnp.array(np.stack([t, n], axis=-1), jnp.float32)
    pairs = recipe["sample_pairs"](jax.random.PRNGKey(1))
    step, future = np.asarray(pairs.anchor[:, :2]), np.asarray(pairs.positive)
    valid = np.asarray(pairs.mask) == 1
    assert np.array_equal(step[:, 0] // 50, future[:, 0] // 50) and np.array_equal(step[:, 1], future[:, 1])
    assert np.all(future[valid, 0] > step[valid, 0]) and np.all(step[~valid, 0] % 50 == 49) and 0 < sum(~valid) < 30
    reward = ctec.intrinsic_reward(recipe["params"], recipe["args"], pairs)
    assert np.all(reward[~valid] == 0) and np.all(reward[valid] > 0)


def test_functions_to_copy_are_complete(tmp_path):
    """The functions that the page names work in a file of their own."""
    names = re.findall(r"`(\w+)`", SECTIONS[BONUS].split(". They need")[0])
    source = (ROOT / "ctec_sac_brax.py").read_text()
    pieces = ["import functools", "import flax", "import flax.linen as nn", "import jax", "import jax.numpy as jnp"]
    for name in names:
        pieces += re.findall(rf"^(?:@.*\n)?(?:def|class) {name}\(?.*\n(?:(?:    .*)?\n)*", source, re.M)
    assert len(pieces) == 5 + len(names)
    (tmp_path / "copied.py").write_text("\n".join(pieces))
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--isolated", "--select=F821", tmp_path / "copied.py"]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    imported = re.search(r"from ctec_sac_brax import (.*)", BLOCKS[BONUS][0]).group(1).split(", ")
    assert set(imported) <= set(names)


def test_sweep_collects_coverage():
    recipe = execute(BLOCKS[SWEEP][0], SEEDS=(1,))
    assert list(recipe["coverage"]) == [(0.9, 1), (0.99, 1)] and all(x > 0 for x in recipe["coverage"].values())
    for gamma_cl in (0.9, 0.99):
        (args,) = Path(f"runs/gamma_cl_{gamma_cl}").glob("*/args.json")
        assert json.loads(args.read_text())["gamma_cl"] == gamma_cl


def test_sweep_as_a_study(monkeypatch, capsys):
    entries = dict(studies.STUDIES)
    monkeypatch.setattr(studies, "STUDIES", entries)
    monkeypatch.setattr(reproduce, "STUDIES", entries)
    execute(BLOCKS[SWEEP][1])
    assert reproduce.main(reproduce.Args(list=True)) == 0
    assert "discounts" in capsys.readouterr().out
    assert reproduce.main(reproduce.Args(studies=("discounts",), dry_run=True)) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == len(set(commands)) == 15 and "the 15 commands" in SECTIONS[SWEEP]
    for command in commands:
        words = command[command.index("ctec_sac_brax.py") :].split()
        assert ctec.parse_args(words[1:]).gamma_cl in (0.99, 0.9, 0.3)


def test_task_reward_is_measured():
    recipe = execute(BLOCKS[TASK][0], row='ctec.main(ctec.parse_args((flags + " --goal-cell 1 1").split()))')
    assert recipe["row"]["success"] == recipe["metrics"]["success"][-1]
    assert 0.2 < recipe["metrics"]["success"][0] < 1  # the goal is where the agents start
    (command,) = re.findall(r"python ctec_sac_brax.py (.*)", SECTIONS[TASK])
    args = ctec.parse_args(command.split())
    assert args.task_reward_coef == 1 and args.preset == "laptop"
    assert round(args.episode_length / args.unroll_length) == 16
    assert ctec.make_env(args.env).far_cell == (3, 1)
