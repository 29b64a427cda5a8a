"""Is it the bonus or SAC's entropy that explores? A SAC script without its bonus, or with another first alpha.

    python benchmarks/what_explores.py mbrl_sac_brax --no-bonus --env point_hardest_maze --preset laptop --seed 11
    python benchmarks/what_explores.py ctec_sac_brax --first-alpha 0.01 --env point_hardest_maze --preset laptop --seed 11
"""
import argparse
import importlib
import sys
from pathlib import Path

import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("script")
    parser.add_argument("--no-bonus", action="store_true", help="the reward is 0: nothing but the entropy is left")
    parser.add_argument("--first-alpha", type=float, default=1.0, help="alpha, the weight of the entropy, before the first step")
    ours, flags = parser.parse_known_args()
    script = importlib.import_module(Path(ours.script).stem)
    update_sac, init_agent = script.update_sac, script.init_agent

    def agent_with_alpha(*inputs):
        agent = init_agent(*inputs)
        return agent.replace(log_alpha=agent.log_alpha.replace(params=jnp.log(jnp.float32(ours.first_alpha))))

    script.init_agent = agent_with_alpha
    script.update_sac = lambda args, agent, batch, reward, key: update_sac(args, agent, batch, reward * (not ours.no_bonus), key)
    script.main(script.parse_args(flags))
