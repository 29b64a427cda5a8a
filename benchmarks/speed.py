"""Where the time of a script goes, on this machine, for one environment and any of the script's flags.

    taskset -c 0 env XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" \\
        python benchmarks/speed.py ctec_sac_brax --env ant_hardest_maze --num-envs 64 --batch-size 64 \\
        --encoder-width 256 --replay-size 1100
    ... python benchmarks/speed.py e3b_ppo_craftax --preset laptop
    ... python benchmarks/speed.py etd_ppo --env point_hardest_maze --preset laptop
"""

import importlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from stages import iterate

sys.path.insert(0, str(Path(__file__).parent.parent))


def fastest(function, *inputs, repeats=3):
    """Seconds of the fastest of some calls. The first call, which compiles, does not count."""
    jax.block_until_ready(function(*inputs))
    times = []
    for _ in range(repeats):
        start = time.time()
        jax.block_until_ready(function(*inputs))
        times.append(time.time() - start)
    return min(times)


def time_iterations(script, args, env):
    """The state, and the seconds of a training iteration that learns."""
    state = script.init_state(args, env)
    for _ in range(getattr(args, "first_update", 1)):  # fills the replay
        state = script.collect(args, env, state)[0]
    times = []
    for _ in range(4):
        jax.block_until_ready(state)
        start = time.time()
        state = jax.block_until_ready(iterate(script, args, env, state)[0])
        times.append(time.time() - start)
    print(f"the first iteration took {times[0]:.0f} s, compiling included")
    seconds = min(times[1:])
    print(f"training            {args.steps_per_iteration / seconds:12,.0f} steps/s   ({seconds:.3f} s an iteration)")
    return state, seconds


def time_collect(script, args, env, state):
    """Seconds of the stage that collects; the state stays."""
    return fastest(jax.jit(lambda state: script.collect(args, env, state)), state)


def time_environment(script, args, env, steps):
    """The environment alone: random actions, no resets."""
    key = jax.random.PRNGKey(0)

    @jax.jit
    def unroll(state, key):
        actions = jax.random.uniform(key, (steps, args.num_envs, env.action_size), minval=-1.0, maxval=1.0)
        return jax.lax.scan(lambda state, action: (jax.vmap(env.step)(state, action), None), state, actions)[0]

    start = jax.jit(jax.vmap(env.reset))(jax.random.split(key, args.num_envs))
    seconds = fastest(unroll, start, key)
    print(f"env only            {steps * args.num_envs / seconds:12,.0f} steps/s")


def print_parts(parts):
    total = sum(parts.values())
    for part, seconds in parts.items():
        print(f"  {part:18}{seconds:8.3f} s  {seconds / total:4.0%}")


def sac(script, args, env):
    """Environment and policy, sampling, the bonus's model, SAC."""
    key = jax.random.PRNGKey(0)
    print(f"{args.gradient_steps} gradient steps of batch {args.batch_size} for {args.steps_per_iteration:,} env steps")
    time_environment(script, args, env, args.unroll_length)
    state, iteration = time_iterations(script, args, env)
    stored = sum(x.nbytes for x in jax.tree.leaves(state.replay)) / (args.replay_size * args.num_envs)
    limit = 4 * (env.state_size + env.action_size + 3)
    print(f"replay              {stored:12.1f} bytes for each stored step (4 * (state + action + 3) = {limit})")
    keys = jax.random.split(key, args.gradient_steps)
    has_futures = hasattr(script, "sample_futures")  # C-TeC
    index = script.index_trajectories if has_futures else lambda replay: replay

    def sample(replay, key):
        batch = script.sample_batch(key, args, replay)
        return (batch, script.sample_futures(key, args, env, replay, batch)) if has_futures else batch

    @jax.jit
    def sample_all(replay):
        replay = index(replay)
        add = lambda total, key: (total + sum(jnp.sum(x) for x in jax.tree.leaves(sample(replay, key))), None)
        return jax.lax.scan(add, 0.0, keys)[0]

    @jax.jit
    def sac_all(agent, batch):
        reward = jnp.zeros(args.batch_size)
        step = lambda agent, key: (script.update_sac(args, env, agent, batch, reward, key)[0], None)
        return jax.lax.scan(step, agent, keys)[0]

    parts = {"env and policy": time_collect(script, args, env, state), "sampling": fastest(sample_all, state.replay)}
    parts["SAC"] = fastest(sac_all, state.agent, script.sample_batch(key, args, state.replay))
    parts["bonus"] = max(iteration - sum(parts.values()), 0.0)
    print_parts(parts)
    gradients = parts["SAC"] + parts["bonus"]
    print(f"  one gradient step {1e3 * gradients / args.gradient_steps:8.2f} ms")
    if has_futures:
        replay = index(state.replay)
        pairs = script.sample_futures(key, args, env, replay, script.sample_batch(key, args, replay))
        optimizer = script.optax.adam(args.learning_rate)
        contrast = lambda model, pairs: script.gradient_update(script.contrastive_loss, model, optimizer, args, pairs)
        print(f"  contrastive update{1e3 * fastest(jax.jit(contrast), state.model, pairs):9.2f} ms")
        logits = jax.jit(jax.grad(lambda phi, psi: jnp.sum(script.l1_similarity(phi, psi) ** 2), (0, 1)))
        phi, psi = jax.random.normal(key, (2, args.batch_size, args.representation_size))
        print(f"  of it, L1 logits  {1e3 * fastest(logits, phi, psi):8.2f} ms")


def craftax(script, args, env):
    """Game and policy, PPO (an update without the bonus), and the bonus: its reward and its model."""
    state, iteration = time_iterations(script, args, env)
    after, (hidden, rollout), _ = jax.jit(lambda state: script.collect(args, env, state))(state)
    learn_policy = jax.jit(lambda *inputs: script.learn_policy(args, env, *inputs))
    parts = {"game and policy": time_collect(script, args, env, state)}
    parts["PPO"] = fastest(learn_policy, after, hidden, rollout, rollout.reward)
    parts["bonus"] = max(iteration - sum(parts.values()), 0.0)
    print_parts(parts)
    ratio = parts["bonus"] / (parts["game and policy"] + parts["PPO"])
    print(f"bonus / the rest    {ratio:12.2f}   (reward and model against game, policy and PPO)")


def etd(script, args, env):
    """Environment and policy, the reward, the gradient steps."""
    gradient_steps = args.update_epochs * (args.steps_per_iteration // args.batch_size)
    print(f"{gradient_steps} gradient steps of batch {args.batch_size} for {args.steps_per_iteration:,} env steps")
    state, iteration = time_iterations(script, args, env)
    key = jax.random.PRNGKey(0)
    after, rollout, _ = jax.jit(lambda state: script.collect(args, env, state))(state)
    action = script.action_distribution(env).vector(rollout.action)
    bonus = script.intrinsic_reward
    reward = jax.jit(lambda state: bonus(state.model.params, args, key, rollout, action, state.memory))
    parts = {"env and policy": time_collect(script, args, env, state), "reward": fastest(reward, after)}
    parts["gradient steps"] = max(iteration - sum(parts.values()), 0.0)
    print_parts(parts)


def noisy_tv(script, args, env):
    """The environment alone (random actions, visits counted, no resets), and training."""
    shape = (args.num_steps, args.num_envs)

    @jax.jit
    def unroll(state, key):
        key_actions, key_tv = jax.random.split(key)
        actions = jax.random.randint(key_actions, shape, 0, env.num_actions)

        def step(now, inputs):
            action, colours = inputs
            cell = env.move(now.cell, action)
            obs = env.observe(cell, colours)
            return script.Walkers(cell, obs, now.episode_step), (cell, jnp.sum(obs))  # so that every view is computed

        walkers, (cells, sums) = jax.lax.scan(step, state.walkers, (actions, env.draw_colours(key_tv, shape)))
        return walkers, sums, state.visits.at[cells.ravel()].add(1)

    seconds = fastest(unroll, script.init_state(args, env), jax.random.PRNGKey(0), repeats=20)
    print(f"environment only    {args.steps_per_iteration / seconds:12,.0f} steps/s")
    time_iterations(script, args, env)


def random_play(script, args, env):
    time_iterations(script, args, env)


def main(name, argv):
    script = importlib.import_module(name)
    args = script.parse_args(argv)
    makers = {"make_any_env": (args.env,), "make_env": (args.env,), "make_craftax": (), "make_noisy_tv": (args,)}
    env = next(getattr(script, make)(*inputs) for make, inputs in makers.items() if hasattr(script, make))
    device = jax.devices()[0]
    print(f"{name} {args.env} on {device.platform} ({device.device_kind}), {args.num_envs} envs")
    families = {"random": random_play, "etd": etd, "ctec_ppo_noisy_tv": noisy_tv}
    measure = families.get(name) or families.get(name.split("_")[0]) or (craftax if name.endswith("craftax") else sac)
    measure(script, args, env)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python benchmarks/speed.py SCRIPT [flags of the script]")
    main(Path(sys.argv[1]).stem, sys.argv[2:])
