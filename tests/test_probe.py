"""experiments/probe.py: what it says of a reward that is known, and that it reads a run's folder."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import probe
from test_ctec_sac_brax import ARGS, ENV

import ctec_sac_brax as ctec


def test_a_reward_of_three_and_a_tenth_a_metre(monkeypatch, tmp_path, capsys):
    """Each environment stands 2.5 m further from the start than the one before, and goes 0.01 m in a step."""
    state = ctec.init_state(ARGS, ENV)
    rows = len(state.replay.obs)
    away = 2.5 * jnp.arange(ARGS.num_envs) + 0.01 * jnp.arange(rows)[:, None]
    obs = state.replay.obs.at[..., :2].set(ENV.start).at[..., 0].add(away)
    state = state.replace(replay=state.replay.replace(obs=obs, time=jnp.int32(rows)), iteration=jnp.int32(7))

    def known_reward(params, args, pairs):
        return pairs.mask * (3 + 0.1 * jnp.linalg.norm(pairs.anchor[:, :2] - ENV.start, axis=-1))

    monkeypatch.setattr(ctec, "intrinsic_reward", known_reward)
    _, distance, way, offset, weight = (np.asarray(x) for x in probe.sample_rewards(ARGS, ENV, state))
    np.testing.assert_allclose(way, 0.01 * offset, atol=1e-4)
    assert len(weight) >= 2**14 and offset.min() == 1 and offset.max() <= rows - 1
    lines = probe.report(ARGS, ENV, state)
    shares = [float(line.split("|")[2].strip(" %")) for line in lines if line.startswith("| ") and "%" in line]
    places = [line.split("|")[1].strip() for line in lines if line.startswith("| ") and "%" in line]
    assert places == ["0 to 1", "2 to 3", "4 to 6"]  # a third of the transitions each
    assert np.allclose(shares, 100 / 3, atol=2)
    assert "| 3.02 ± 0.01 |" in lines[2] and any("+0.100 for each metre" in line for line in lines)
    assert any("explains 100.0%" in line for line in lines) and "metres from the start 1.00" in lines[-1]

    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(ARGS)))
    ctec.save_checkpoint(tmp_path / "checkpoint.npz", state)
    probe.main(tmp_path)
    assert capsys.readouterr().out.endswith("\n".join(lines) + "\n")
