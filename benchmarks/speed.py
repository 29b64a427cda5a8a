"""Where the time of a script goes, on this machine, for one environment and any of the script's flags.

    taskset -c 0 env XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" \\
        python benchmarks/speed.py ctec_sac_brax --env ant_hardest_maze --num-envs 64 --batch-size 64 \\
        --encoder-width 256 --replay-size 1100
    ... python benchmarks/speed.py ctec_ppo_rnn_craftax --preset laptop
    ... python benchmarks/speed.py etd_ppo --env point_hardest_maze --preset laptop
"""
import functools
import importlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent))


def best(function, repeats=3):
    """(result, seconds of the fastest call); the first call, which compiles, is timed apart: (result, best, first)."""
    times = []
    for _ in range(repeats + 1):
        start = time.time()
        result = jax.block_until_ready(function())
        times.append(time.time() - start)
    return result, min(times[1:]), times[0]


def iteration_seconds(script, args, env, state, warm_up):
    """(state, seconds) of a training iteration, learning, after `warm_up` others."""
    start = time.time()
    iterate = script.train_iteration.lower(args, env, state).compile()
    print(f"train_iteration     compiled in {time.time() - start:.0f} s")
    for _ in range(warm_up):
        state = iterate(state)[0]
    times = []
    for _ in range(3):
        jax.block_until_ready(state)
        start = time.time()
        state = jax.block_until_ready(iterate(state)[0])
        times.append(time.time() - start)
    return state, min(times[1:])


def print_parts(parts):
    total = sum(parts.values())
    for part, seconds in parts.items():
        print(f"  {part:18}{seconds:8.3f} s  {seconds / total:4.0%}")


def brax(name, argv):
    script = importlib.import_module(name)
    args = script.parse_args(argv)
    script.check_args(args)
    env, key, steps = script.make_env(args.env), jax.random.PRNGKey(0), args.num_envs * args.unroll_length
    print(f"{name} {args.env} on {jax.devices()[0].platform}: {args.num_envs} envs, batch {args.batch_size}, {args.gradient_steps} gradient steps for {steps:,} env steps")

    # the environment alone: random actions, no resets
    def unroll(state, key):
        actions = jax.random.uniform(key, (args.unroll_length, args.num_envs, env.action_size), minval=-1.0, maxval=1.0)
        return jax.lax.scan(lambda state, action: (jax.vmap(env.step)(state, action), None), state, actions)[0]

    env_state = jax.jit(jax.vmap(env.reset))(jax.random.split(key, args.num_envs))
    unroll = jax.jit(unroll)
    _, seconds, first = best(lambda: unroll(env_state, key))
    print(f"env only            {steps / seconds:12,.0f} steps/s   (compiled in {first - seconds:.0f} s)")

    # whole iterations, learning: the replay is filled first
    state = script.init_state(args, env)
    stored = sum(x.nbytes for x in jax.tree.leaves(state.replay)) / (args.replay_size * args.num_envs)
    state, iteration = iteration_seconds(script, args, env, state, -(-args.learning_starts // args.unroll_length) - 1)
    print(f"training            {steps / iteration:12,.0f} steps/s   ({iteration:.2f} s an iteration)")
    print(f"replay              {stored:12.1f} bytes for each stored step (at most 4 * (state + action + 3) = {4 * (env.state_size + env.action_size + 3)})")

    # the parts of an iteration
    collect = jax.jit(script.collect, static_argnums=(0, 1))
    _, collect_seconds, _ = best(lambda: collect(args, env, state, key)[0].visited)

    @jax.jit
    def sample(replay):  # all batches of an iteration, with their futures where the method has some
        ends = script.trajectory_ends(replay) if hasattr(script, "trajectory_ends") else None

        def step(total, key):
            batch = script.sample_batch(key, args, replay)
            more = None if ends is None else script.replay_futures(key, args, replay, ends, batch)
            return total + sum(jnp.sum(x) for x in jax.tree.leaves((batch, more))), None

        return jax.lax.scan(step, 0.0, jax.random.split(key, args.gradient_steps))[0]

    _, sampling, _ = best(lambda: sample(state.replay))
    gradients = iteration - collect_seconds - sampling
    print_parts({"env and policy": collect_seconds, "sampling": sampling, "gradient steps": gradients})
    print(f"  one gradient step {1e3 * gradients / args.gradient_steps:8.2f} ms")
    if hasattr(script, "contrastive_loss"):
        batch = script.sample_batch(key, args, state.replay)
        future = script.replay_futures(key, args, state.replay, script.trajectory_ends(state.replay), batch)
        contrast = jax.jit(lambda model, *batch: script.gradient_update(script.contrastive_loss, model, args, env.position_size, *batch))
        print(f"  contrastive update{1e3 * best(lambda: contrast(state.encoders, batch, future))[1]:9.2f} ms")
        logits = jax.jit(jax.grad(lambda phi, psi: jnp.sum(script.l1_similarity(phi, psi) ** 2), (0, 1)))
        phi, psi = jax.random.normal(key, (2, args.batch_size, args.representation_size))
        print(f"  of it, L1 logits  {1e3 * best(lambda: logits(phi, psi))[1]:8.2f} ms")


def craftax(name, argv):
    script = importlib.import_module(name)
    args = script.parse_args(argv)
    script.check_ppo_args(args)
    env, key, steps = script.make_craftax(), jax.random.PRNGKey(0), args.num_envs * args.num_steps
    print(f"{name} on {jax.devices()[0].platform}: {args.num_envs} envs x {args.num_steps} steps, {args.num_minibatches} minibatches, {args.update_epochs} epochs")
    state, iteration = iteration_seconds(script, args, env, script.init_state(args, env), args.random_iterations)
    print(f"training            {steps / iteration:12,.0f} steps/s   ({iteration:.2f} s an iteration)")

    play = jax.jit(script.play, static_argnums=(0, 1))
    (players, rollout, _), play_seconds, _ = best(lambda: play(args, env, state, key))
    hidden, obs = state.players.hidden, jnp.concatenate([rollout.obs, players.obs[None]])

    def plain(state, rollout):  # what is left with --intrinsic-coef 0
        last_value = script.policy(state.agent.params, args, players.hidden, players.obs[None], players.first[None])[2][0]
        advantage = script.gae(args, rollout.reward, rollout.value, rollout.done, last_value)
        return script.update_ppo(args, state.agent, args.learning_rate, key, hidden, rollout, advantage)

    plain = jax.jit(plain)
    parts = {"game and policy": play_seconds, "PPO update": best(lambda: plain(state, rollout))[1]}
    left = script.steps_left(rollout.done)
    reward = jax.jit(lambda params, *x: script.intrinsic_reward(args, params, key, *x))
    parts["intrinsic reward"] = best(lambda: reward(state.encoders.params, obs, rollout.action, left))[1]
    encoders = jax.jit(lambda model, *x: script.update_encoders(args, model, key, *x))
    parts["encoder update"] = best(lambda: encoders(state.encoders, obs, rollout.action, left))[1]
    print_parts(parts)
    intrinsic = parts["intrinsic reward"] + parts["encoder update"]
    print(f"intrinsic / plain   {intrinsic / (play_seconds + parts['PPO update']):12.2f}   (reward and encoders against game, policy and PPO)")
    rows, pairs = 2 * args.num_steps + 1, args.num_steps * (args.num_steps + 1) // 2
    print(f"reward              {rows:12,} encoder rows for an environment's {pairs:,} pairs ({2 * pairs / rows:.0f} times fewer than one call a pair)")


def etd(name, argv):
    script = importlib.import_module(name)
    args = script.parse_args(argv)
    env, key, steps = script.make_any_env(args.env), jax.random.PRNGKey(0), args.num_envs * args.num_steps
    gradient_steps = args.update_epochs * (steps // args.batch_size)
    print(f"{name} {args.env} {args.bonus} on {jax.devices()[0].platform}: {args.num_envs} envs x {args.num_steps} steps, {gradient_steps} gradient steps of batch {args.batch_size}")
    state, iteration = iteration_seconds(script, args, env, script.init_state(args, env), 1)
    print(f"training            {steps / iteration:12,.0f} steps/s   ({iteration:.2f} s an iteration)")
    play = jax.jit(script.play_steps, static_argnums=(0, 1))
    (played, rollout, _), play_seconds, _ = best(lambda: play(args, env, state, key))
    states, action = jnp.concatenate([rollout.obs, played.env.obs[None]]), script.action_distribution(env).vector(rollout.action)
    if args.bonus == "etd":
        reward = jax.jit(lambda state: script.etd_reward(args, state.encoders.params, state.memory, states, rollout.done)[0])
    else:
        reward = jax.jit(lambda state: script.ctec_reward(args, state.encoders.params, key, states, action, rollout.done))
    parts = {"env and policy": play_seconds, "reward": best(lambda: reward(state))[1]}
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: args.batch_size], (rollout, action))
    loss, ones = script.etd_loss if args.bonus == "etd" else script.ctec_loss, jnp.ones(args.batch_size)
    updates = {
        "encoders": lambda state, rows: script.clipped_update(loss, state.encoders, args, 1e-4, rows[0].obs, rows[1], rows[0].obs, ones),
        "PPO": lambda state, rows: script.clipped_update(script.ppo_rows_loss, state.agent, args, 1e-4, env, rows[0], ones),
    }
    for part, update in updates.items():
        parts[part] = gradient_steps * best(functools.partial(jax.jit(update), state, rows), 10)[1]
    print_parts(parts)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python benchmarks/speed.py SCRIPT [flags of the script]")
    name = Path(sys.argv[1]).stem
    (craftax if "craftax" in name else etd if "etd" in name else brax)(name, sys.argv[2:])
