"""benchmarks/paper_scale.py: products and loop steps by hand, and a configuration from end to end."""

import jax
import jax.numpy as jnp
import paper_scale


def test_products_and_steps_by_hand():
    x = jnp.ones((3, 4))
    w = jnp.ones((4, 4))

    def inner(x, _):
        return x @ w, None  # 2 * 3 * 4 * 4 = 96

    def outer(x, _):
        x, _ = jax.lax.scan(inner, x, length=6, unroll=4)  # two steps of the loop, six products
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)  # the larger branch: two
        return jax.jit(jnp.tanh)(x), None

    def program(x):
        x, _ = jax.lax.scan(outer, x, length=5)
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jax.checkpoint(lambda x: x @ w)(x), x)

    work = paper_scale.count(jax.make_jaxpr(program)(x).jaxpr)
    assert work == paper_scale.Work(flops=96.0 * (5 * (6 + 2) + 1), steps=5 * (1 + 2), calls=1)


def test_of_branches_for_platforms_the_gpus_counts():
    x = jnp.ones((4, 4))
    once = lambda x: x @ x  # 2 * 4 * 4 * 4 = 128
    thrice = lambda x: x @ x @ x @ x
    work = lambda **branches: paper_scale.count(
        jax.make_jaxpr(lambda x: jax.lax.platform_dependent(x, **branches))(x).jaxpr
    )
    assert work(cpu=thrice, default=once).flops == 128
    assert work(cuda=once, default=thrice).flops == 128
    assert work(tpu=once, default=thrice).flops == 3 * 128


def test_a_configuration_from_end_to_end(capsys):
    sizes = """--env point_u_maze --num-envs 8 --unroll-length 16 --episode-length 33 --replay-size 64 --batch-size 32
        --learning-starts 32 --multiplier 0.5 --agent-width 16 --encoder-width 16 --representation-size 8"""
    configuration = f"ctec_sac_brax {' '.join(sizes.split())}"
    paper_scale.main(paper_scale.Args(configurations=(configuration,), run=True))
    header, _, row, *run = capsys.readouterr().out.splitlines()
    row = dict(zip(header.split("|"), row.split("|")))
    assert int(row[" steps of loops "]) == 16 + 4 * (1 + 1 + 1)  # 4 gradient steps, with 8 features in one step
    assert row[" not donated, GB "] == " 0.00 "  # the metrics, but not the state
    assert "an iteration of 128 steps" in run[0] and "GB with it" in run[1]
