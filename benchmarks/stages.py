"""One iteration of any script, by the stages that it has."""

import jax


def iterate(script, args, env, state):
    """Collect and learn once. Returns the state and the metrics."""
    state, *rollout, metrics = script.collect(args, env, state)
    if hasattr(script, "learn_bonus"):  # recurrent PPO
        state, reward, bonus_metrics = script.learn_bonus(args, env, state, *rollout[0])
        state, policy_metrics = script.learn_policy(args, env, state, *rollout[0], reward)
        metrics |= bonus_metrics | policy_metrics
    elif hasattr(script, "learn"):  # random actions learn nothing
        state, learn_metrics = script.learn(args, env, state, *rollout)
        metrics |= learn_metrics
    return state, metrics


def whole_iteration(script, args, env):
    """iterate as one program of the state, which is donated."""
    return jax.jit(lambda state: iterate(script, args, env, state), donate_argnums=0)
