"""experiments/inputs.py: what the encoders see instead, what is logged, and a study of it from end to end."""

import csv

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import reproduce
import studies
from inputs import Inputs

import ctec_sac_brax as ctec

ENV = ctec.make_env("point_u_maze")  # from -2 to 18 in x and y, start at (4, 4)
ARGS = ctec.Args(env="point_u_maze", num_envs=2, replay_size=300, batch_size=1024, encoder_width=8, agent_width=8,
                 representation_size=4, reward_features="unit")  # fmt: skip


def test_what_the_encoders_see():
    states = jnp.array([[4.0, 4.0, 0.1, 0.0], [12.0, 8.0, 0.0, -0.1]])
    np.testing.assert_array_equal(inputs.changed(Inputs(), ENV, states), states)
    middle = inputs.changed(Inputs("middle"), ENV, states)
    np.testing.assert_allclose(middle, [[-4, -4, 0.1, 0], [4, 0, 0, -0.1]])
    far = inputs.changed(Inputs("far_corner"), ENV, states)
    np.testing.assert_allclose(far, [[-12, -12, 0.1, 0], [-4, -8, 0, -0.1]])
    standard = [inputs.changed(Inputs(origin, True), ENV, states) for origin in ("corner", "middle")]
    np.testing.assert_allclose(*standard, atol=1e-5)  # the origin does not matter any more
    np.testing.assert_allclose(standard[0], [[-1, -1, 1, 1], [1, 1, -1, -1]], atol=1e-4)


def test_correlations_find_what_the_reward_is_made_of(monkeypatch):
    """A replay of one long walk to the right, with a stop at its end, and rewards that are known."""
    x = jnp.minimum(jnp.linspace(4.0, 16.0, 300), 12.0)
    obs = jnp.zeros((300, 2, 4)).at[..., 0].set(x[:, None]).at[..., 1].set(4.0)
    state = ctec.init_state(ARGS, ENV)
    state = state.replace(replay=state.replay.replace(obs=obs, time=jnp.int32(300)))

    def found(reward):
        monkeypatch.setattr(ctec, "intrinsic_reward", lambda params, args, pairs: reward(pairs))
        inputs.sample_rewards.clear_cache()
        return inputs.correlations(Inputs("far_corner"), ARGS, ENV, state)

    outwards = found(lambda pairs: pairs.anchor[:, 0])
    assert outwards["start"] > 0.99 and outwards["origin"] < -0.99  # the far corner is ahead
    assert outwards["visits"] > 0.5  # they stop in the last bin
    np.testing.assert_allclose(
        list(found(lambda pairs: -pairs.anchor[:, 0]).values()), -np.array(list(outwards.values()))
    )
    by_chance = found(lambda pairs: jax.random.uniform(jax.random.PRNGKey(0), (len(pairs.anchor),)))
    assert max(map(abs, by_chance.values())) < 0.1


def test_a_study_from_end_to_end(monkeypatch, tmp_path):
    flags = f"{studies.TINY} --encoder-width 16 --representation-size 8"
    methods = [
        studies.Method(label, "ctec_sac_brax", flags, 0.01, kind="inputs", inputs=words)
        for label, words in (("C-TeC", ""), ("origin in the middle", "--origin middle"))
    ]
    kinds = ("curves", "correlations", "maps")
    monkeypatch.setitem(reproduce.STUDIES, "tiny", studies.Study("tiny", methods, seeds=(1,), pictures=kinds))
    places = dict(run_dir=tmp_path / "runs", results_dir=tmp_path / "results", docs_dir=tmp_path / "docs")
    assert reproduce.main(reproduce.Args(studies=("tiny",), jobs=1, **places)) == 0
    files = {"results.md", "images/tiny.png", "images/tiny_correlations.png", "images/tiny_maps.png"}
    docs = tmp_path / "docs"
    assert {str(path.relative_to(docs)) for path in docs.rglob("*") if path.is_file()} == files
    with open(tmp_path / "results" / "tiny.csv") as file:
        rows = list(csv.DictReader(file))
    values = {}
    for row in rows:
        values.setdefault((row["metric"], row["method"]), []).append(float(row["value"]))
    for name in inputs.COLUMNS[1:]:
        ours, theirs = (values[f"correlation_{name}", method.label] for method in methods)
        assert len(ours) == len(theirs) == 11  # of 12 iterations, the first of them before the first update
        assert np.abs(ours + theirs).max() <= 1 and ours != theirs
