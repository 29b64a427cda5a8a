"""What the installed jax computes on this machine's CPU; and that GPUs and TPUs, which nobody needs to have for it, can
have the training iteration of every script."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import SCRIPTS, Game
from stages import whole_iteration

# ------------------------------------------------------------------------------------------- right sums on a CPU
FORMS = {"squares": lambda y: y**2, "absolute values": abs, "values": lambda y: y}
WRONG = pytest.mark.xfail(strict=True, reason="wrong with jaxlib 0.9.1 to 0.10.2, right with 0.9.0")


def sums_of_products(form, rows):
    """Each of many rows is multiplied by one matrix, changed and summed: by jax, and by NumPy in 64 bits."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(3, 3)).astype(np.float32)
    x = random.normal(size=(rows, 3)).astype(np.float32)
    found = jax.jit(jax.vmap(lambda row: jnp.sum(FORMS[form](matrix @ row))))(x)
    return found, np.sum(FORMS[form](x.astype(np.float64) @ matrix.T), axis=1)


@pytest.mark.parametrize("form", ["squares", "absolute values", pytest.param("values", marks=WRONG)])
def test_sums_of_many_products_against_numpy(form):
    """jaxlib 0.10.2 gives the rows from number 32,768 on the sums of other rows (jax-ml/jax#39103)."""
    for rows in (1000, 32_768, 65_536, 100_000, 32_769, 40_000):
        found, expected = sums_of_products(form, rows)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=f"{rows} rows")


# ------------------------------------------------------------------------------ programs for machines that are not here
def configurations():
    """(script, environment): every script that trains."""
    for path in SCRIPTS:
        name = path.stem
        if name.endswith("_sac_brax") or name in ("random_brax", "etd_ppo"):
            yield name, "point_u_maze"
        elif name.endswith("craftax"):
            yield name, "craftax_classic"
        elif name == "ctec_ppo_noisy_tv":
            yield name, "noisy_tv"
    yield from (("ctec_sac_brax", env) for env in ("ant_u_maze", "arm_binpick_hard"))


def make_env(script, args):
    """The environment of a run. Of the Craftax scripts one has the real game, whose tracing takes ten seconds."""
    if args.env == "noisy_tv":
        return script.make_noisy_tv(args)
    if args.env == "craftax_classic":
        return script.make_craftax() if script.__name__ == "random_craftax" else Game()
    return script.make_env(args.env)


@pytest.fixture(scope="module", params=["cuda", "tpu"])
def platform(request):
    """What asks for the machine while it is traced, as MJX does, hears of this one."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: {"cuda": "gpu", "tpu": "tpu"}[request.param])
        yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("name, env_name", configurations())
def test_an_iteration_can_be_lowered_for(platform, name, env_name):
    """At the paper's sizes, from the shapes of a state alone."""
    script = importlib.import_module(name)
    args = script.parse_args([f"--env={env_name}"])
    env = make_env(script, args)
    state = jax.eval_shape(functools.partial(script.init_state, args, env))
    iteration = whole_iteration(script, args, env)
    assert "stablehlo.while" in iteration.trace(state).lower(lowering_platforms=(platform,)).as_text()
