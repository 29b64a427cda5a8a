"""ETD and C-TeC with the same PPO, on the point, ant and humanoid mazes, on the Panda arm and on Craftax-Classic.

ETD (Jiang et al., "Episodic Novelty Through Temporal Distance", ICLR 2025) learns by InfoNCE how many steps lie between
two states, as a quasimetric d(x, y), and pays for the distance of the new state from the nearest one of its episode so
far: go where you have not been in this episode. C-TeC (Mohamed et al., "Temporal Representations for Exploration", ICLR
2026) pays for |phi(s, a) - psi(s_f)| to a sampled future: go where your future is hard to predict. Here both have the
same PPO, encoders of the same shape and a standardised reward: the like-for-like comparison of the C-TeC paper.
There is no task reward; success is the number of places visited, or of achievements that an episode unlocks.

    python etd_ppo.py --env ant_hardest_maze                                   # for a GPU
    python etd_ppo.py --env point_hardest_maze --preset laptop                 # minutes on two CPU cores
    python etd_ppo.py --env craftax_classic --preset laptop --bonus ctec
    python etd_ppo.py --resume runs/<folder>                                   # go on from the last checkpoint
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "brax==0.14.2", "mujoco==3.17.0", "mujoco-mjx==3.17.0",
#   "craftax==1.6.1", "numpy==2.4.6", "tyro==1.0.16", "matplotlib==3.11.2", "wandb==0.31.0",
# ]
# ///
import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

with contextlib.redirect_stdout(io.StringIO()):  # no "Failed to import warp": an optional backend that is not used
    import brax.spring.pipeline
    import mujoco
    from brax import actuator, base
    from brax.io import html, mjcf
    from mujoco import mjx
warnings.filterwarnings("ignore", message="Brax System, piplines and environments are not actively")

ENVS = ("point_u_maze", "point_large_maze", "point_hardest_maze", "ant_u_maze", "ant_large_maze", "ant_hardest_maze",
        "humanoid_u_maze", "humanoid_large_maze", "arm_binpick_hard")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    env: Literal[(*ENVS, "craftax_classic")] = "ant_hardest_maze"
    """environment"""
    bonus: Literal["etd", "ctec"] = "etd"
    """the intrinsic reward, which is the only one"""
    preset: Literal["paper", "laptop"] = "paper"
    """paper: the published sizes. laptop: the same algorithm in minutes on a CPU. Explicit flags win over it"""
    seed: int = 1
    """seed of everything random"""
    total_timesteps: int = 500_000_000
    """environment steps, all environments together (paper Table 2)"""
    resume: str = ""
    """folder of an earlier run: go on from its checkpoint, with its arguments"""
    run_dir: str = "runs"
    """where the folder of the run is made"""
    checkpoint_minutes: float = 10.0
    """time between checkpoints; there is one at the end, at Ctrl-C and at SIGTERM anyway"""
    track: bool = False
    """send the metrics to wandb too, project "ctec" (WANDB_MODE=offline works)"""
    episode_window: int = 1024
    """finished episodes, the latest ones, over which the achievement rates are taken"""

    num_envs: int = 1024
    """parallel environments (paper Table 2; 256 on the humanoid)"""
    num_steps: int = 128
    """steps in each environment before the update of an iteration; futures end with them (ETD: 512, 16 environments)"""
    episode_length: int = 1000
    """steps after which an episode is cut off (paper Table 2; 10,000 in Craftax, as the game does)"""
    batch_size: int = 1024
    """transitions in a gradient step (paper Table 2; 256 on the humanoid)"""
    update_epochs: int = 4
    """passes over a rollout, of PPO and of the encoders (ETD)"""
    learning_rate: float = 3e-4
    """Adam, of PPO and of the encoders (ETD)"""
    adam_eps: float = 1e-5
    """epsilon of both Adams (Craftax baselines)"""
    max_grad_norm: float = 0.5
    """longest gradient, of PPO and of the encoders (ETD)"""
    agent_width: int = 256
    """width of the two hidden layers of actor and critic (paper Table 2)"""
    gamma: float = 0.99
    """discount of PPO (ETD)"""
    gae_lambda: float = 0.95
    """lambda of the advantage estimate (ETD)"""
    clip: float = 0.2
    """PPO's clipping of the probability ratio (paper Table 5)"""
    entropy_coef: float = 0.01
    """weight of the entropy (paper Table 5)"""
    value_coef: float = 0.5
    """weight of the value loss (Craftax baselines)"""
    reward_momentum: float = 0.9
    """how slowly the mean and deviation that standardise the reward follow (ETD)"""

    encoder_width: int = 1024
    """width of the hidden layers of the bonus's networks (paper Tables 3 and 4)"""
    representation_size: int = 64
    """size of a representation (paper Tables 3 and 4)"""
    gamma_cl: float = 0.99
    """discount of the future-state distribution, of C-TeC too, in Craftax too (ETD)"""
    memory: Literal["embeddings", "observations"] = "embeddings"
    """what ETD keeps of an episode's states: embeddings by the weights of their time, or observations, which are
    encoded anew for each rollout (exact, slower, more memory)"""
    memory_size: int = 1000
    """states of an episode that ETD keeps; of a longer one the latest"""
    similarity: Literal["l1", "l2"] = "l1"
    """C-TeC's: minus this distance (paper: L1 on the robots, L2 in Craftax)"""
    logsumexp_penalty: float = 0.1
    """weight of mean(logsumexp^2) in the contrastive loss of C-TeC (paper Table 3)"""

    @property
    def num_iterations(self):
        return -(-self.total_timesteps // (self.num_envs * self.num_steps))


PAPER = {  # what the paper's tables change for one environment
    "humanoid": dict(num_envs=256, batch_size=256),
    "craftax": dict(episode_length=10_000, similarity="l2", logsumexp_penalty=0.0),
}
PRESETS = {
    "paper": {},
    "laptop": dict(total_timesteps=1_000_000, num_envs=128, batch_size=256, encoder_width=256, checkpoint_minutes=2.0),
}


# ------------------------------------------------------------------------------------------------- environments
MAZES = {  # 1 wall, r start, 0 free; row i and column j stand at x = i * cell, y = j * cell
    "u": "11111 1r001 11101 10001 11111",
    "large": "11111111 1r011001 10010001 11000111 10010001 10100101 10001001 11111111",
    "hardest": "111111111111 1r0001000001 101101010101 100000010001 101111011101 100101000001 110101010111 "
               "100100010001 111111111111",
}  # fmt: skip

BIN = 0.5  # metres; coverage is the number of bins of this size that were visited


@flax.struct.dataclass
class EnvState:
    physics: Any  # the point's (x, y, vx, vy), or a Brax pipeline state
    obs: jax.Array  # (state_size,): what the policy and the encoders see; the first position_size are the place
    terminated: jax.Array  # () bool: unhealthy


class Maze:
    """What all mazes share: cells, the bounds of the coverage grid, outlines for the pictures."""

    def __init__(self, maze):
        grid, cell = np.array([list(row) for row in MAZES[maze].split()]), self.cell
        self.is_wall, self.start = grid == "1", np.argwhere(grid == "r")[0] * cell
        self.walls, self.free = np.argwhere(grid == "1") * cell, np.argwhere(grid == "0") * cell  # (n, 2) centres
        self.low = np.array([-cell / 2, -cell / 2, 0.0])[: self.position_size]
        self.high = np.array([*(np.array(grid.shape) - 0.5) * cell, 2.5])[: self.position_size]
        self.grid = tuple(np.round((self.high - self.low) / BIN).astype(int))  # bins along each axis
        self.outlines = [(x - cell / 2, y - cell / 2, cell, cell) for x, y in self.walls]
        self.bins = (len(self.free) + 1) * round(cell / BIN) ** 2 if self.position_size == 2 else None


class PointMaze(Maze):
    """A disc that is pushed around, in closed form: over a million steps a second on one core."""

    state_size, action_size, position_size, cell, radius = 4, 2, 2, 4.0, 0.4

    def reset(self, key):
        place = self.start + jax.random.uniform(key, (2,), minval=-0.1, maxval=0.1)
        physics = jnp.concatenate([place, jnp.zeros(2)])
        return EnvState(physics, physics, jnp.zeros((), bool))

    def blocked(self, p):
        """Does the disc at p overlap a wall? It reaches no further than the cells under its square's corners."""
        corners = p + self.radius * np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)], np.float32)
        cells = jnp.round(corners / self.cell).astype(jnp.int32)  # (4, 2)
        nearest = jnp.clip(p, (cells - 0.5) * self.cell, (cells + 0.5) * self.cell)
        touches = jnp.sum((p - nearest) ** 2, axis=-1) < self.radius**2
        return jnp.any(touches & jnp.asarray(self.is_wall)[cells[:, 0], cells[:, 1]])

    def step(self, state, action):
        p, v = state.physics[:2], 0.9 * state.physics[2:] + 0.05 * jnp.clip(action, -1.0, 1.0)
        for axis in np.eye(2, dtype=np.float32):  # a wall stops the component of v that meets it
            v = jnp.where(self.blocked(p + v * axis), v * (1 - axis), v)
            p = p + v * axis
        physics = jnp.concatenate([p, v])
        return EnvState(physics, physics, jnp.zeros((), bool))

    def frame(self, physics):
        return physics[:16, :2]  # what the rollout picture needs


class BraxMaze(Maze):
    """A robot that comes with Brax, among wall boxes of half a cell's height."""

    def __init__(self, maze):
        super().__init__(maze)
        spec = mujoco.MjSpec.from_file(str(Path(brax.__file__).parent / "envs/assets" / self.xml))
        spec.option.timestep, half = self.timestep, self.cell / 2
        self.edit(spec)
        for x, y in self.walls:
            spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, pos=(x, y, half / 2), size=(half, half, half / 2),
                                    contype=1, conaffinity=1)  # fmt: skip
        spec.compile()
        # mjx's broad phase: only the nearest pairs of each kind (by bounding spheres) are collided, only the deepest
        # points are kept. The two numbers must come first: mjx 3.17 looks for the i-th one at numeric_data[i].
        broad_phase = "".join(f'<numeric name="max_{k}" data="{v}"/>' for k, v in self.broad_phase.items())
        self.sys = mjcf.loads(spec.to_xml().replace("<custom>", "<custom>" + broad_phase, 1))  # fuses jointless bodies
        self.action_size = self.sys.act_size()

    def from_q(self, q, qd):
        return self.state(brax.spring.pipeline.init(self.sys, q, qd), jnp.zeros(self.action_size))

    def step(self, state, action):
        control = action * self.action_scale
        substep = lambda _, physics: brax.spring.pipeline.step(self.sys, physics, control)
        return self.state(jax.lax.fori_loop(0, 10, substep, state.physics), control)

    def state(self, physics, control):
        z, (low, high) = physics.x.pos[0, 2], self.healthy
        return EnvState(physics, self.observe(physics, control), (z < low) | (z > high))

    def frame(self, physics):
        return jax.tree.map(lambda x: x[0], physics.x)  # the links of the first environment, for the viewer


class AntMaze(BraxMaze):
    state_size, position_size, cell, xml, timestep, healthy = 29, 2, 4.0, "ant.xml", 0.005, (0.2, 1.0)
    broad_phase, action_scale = {"geom_pairs": 8, "contact_points": 12}, 1.0

    def edit(self, spec):
        for geom in spec.geoms:  # these meet the walls
            if geom.name.startswith(("torso", "aux")) or "foot" in geom.name:
                geom.conaffinity = 1

    def reset(self, key):
        key_q, key_qd = jax.random.split(key)
        q = self.sys.init_q + jax.random.uniform(key_q, (15,), minval=-0.1, maxval=0.1)
        return self.from_q(q.at[:2].set(self.start), 0.1 * jax.random.normal(key_qd, (14,)))

    def observe(self, physics, control):
        return jnp.concatenate([physics.q, physics.qd])


class HumanoidMaze(BraxMaze):
    state_size, position_size, cell, xml, timestep, healthy = 268, 3, 2.0, "humanoid.xml", 0.0015, (1.0, 2.0)
    broad_phase, action_scale = {"geom_pairs": 20, "contact_points": 12}, 0.4

    def edit(self, spec):
        for geom in spec.geoms:  # every geom meets floor and walls, none another of the robot
            geom.contype = int(geom.name != "floor")
        for motor, gear in zip(spec.actuators, [350] * 11 + [100] * 6):
            motor.gear[0] = gear
        # the goal of the maze task, which nobody is told to reach: its place and motion are part of the state
        target = spec.worldbody.add_body(name="target", pos=(0, 0, 1.25))
        for axis in ((1, 0, 0), (0, 1, 0)):
            target.add_joint(type=mujoco.mjtJoint.mjJNT_SLIDE, axis=axis, limited=0)
        target.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=(0.5, 0, 0), mass=1, contype=0, conaffinity=0)

    def reset(self, key):
        target = jax.random.choice(key, jnp.asarray(self.free, jnp.float32))
        return self.from_q(self.sys.init_q.at[:2].set(self.start).at[-2:].set(target), jnp.zeros(self.sys.qd_size()))

    def observe(self, physics, control):
        inertia, x = self.sys.link.inertia, physics.x
        # the spring backend works with unit inertias (spring_inertia_scale 1 in humanoid.xml)
        inertia = inertia.replace(i=jnp.broadcast_to(jnp.eye(3), inertia.i.shape))
        x_i, mass = x.vmap().do(inertia.transform), inertia.mass[:, None]  # centres of mass of the links
        com = jnp.sum(mass * x_i.pos, axis=0) / jnp.sum(mass)
        about_com = x_i.replace(pos=x_i.pos - com).vmap().do(inertia).i.reshape(-1, 9)
        velocity = base.Transform.create(pos=x_i.pos - x.pos).vmap().do(physics.xd)
        velocities = jnp.hstack([velocity.vel * mass / jnp.sum(mass), velocity.ang])
        torque = actuator.to_tau(self.sys, control, physics.q, physics.qd)
        inertias = jnp.hstack([about_com, mass])
        return jnp.concatenate([physics.q, physics.qd, inertias.ravel(), velocities.ravel(), torque])


PANDA = np.array("""
    0      0    .333  0 4.970684 .003875 .002081 -.04762 .70337 .70661 .009117 -.000139 .006772 .019169 -2.8973 2.8973
    0      0    0    -1 .646926 -.003141 -.02872 .003495 .007962 .02811 .025995 -.003925 .010254 .000704 -1.7628 1.7628
    0     -.316 0  1 3.228604 .027518 .039252 -.066502 .037242 .036155 .01083 -.004761 -.011396 -.012805 -2.8973 2.8973
    .0825  0    0  1 3.587895 -.05317 .104419 .027454 .025853 .019552 .028323 .007796 -.001332 .008641 -3.0718 -.0698
   -.0825  .384 0 -1 1.225946 -.011953 .041065 -.038437 .035549 .029474 .008627 -.002117 -.004037 .000229 -2.8973 2.8973
    0      0    0  1 1.666555 .060149 -.014117 -.010517 .001964 .004354 .005433 .000109 -.001158 .000341 -.0175 3.7525
    .088   0    0  1 .735522 .010517 -.004252 .061597 .012516 .010027 .004815 -.000428 -.001196 -.000741 -2.8973 2.8973
""".split(), float).reshape(7, 16)  # links 1-7: place in the parent (3), quarter turns about x, mass, its centre (3),
# inertia xx, yy, zz, xy, xz, yz, and the joint's range


class ArmBinpick:
    """A Franka Panda, and a cube in the blue one of two bins. Primitive geoms, which meet in listed pairs only."""

    state_size, action_size, position_size, bins = 18, 5, 3, None
    default_q = np.array([1.571, 0.742, 0, -1.571, 0, 3.054, 1.449, 0.04, 0.04])
    low, high, start = np.array([-8.0, -8.0, -1.0]), np.array([8.0, 8.0, 4.0]), np.array([-0.3, 0.6])
    grid = (32, 32, 10)
    sides = np.array([(-195, -195, 390, 10), (-195, 185, 390, 10), (185, -185, 10, 370), (-195, -185, 10, 370)]) / 1000
    outlines = [*(sides + (-0.3, 0.6, 0, 0)), *(sides + (0.3, 0.6, 0, 0))]  # of the blue and the red bin

    def __init__(self):
        text, fixed = lambda numbers: " ".join(map(str, numbers)), ["table", *(f"bin{i}" for i in range(8))]
        bins = "".join(f"""<geom name="bin{i}" type="box" pos="{x + width / 2} {y + depth / 2} .033"
            size="{width / 2} {depth / 2} .033"/>""" for i, (x, y, width, depth) in enumerate(self.outlines))
        links = "".join(f"""<body pos="{text(row[:3])}" quat="1 {row[3]} 0 0">
            <inertial mass="{row[4]}" pos="{text(row[5:8])}" fullinertia="{text(row[8:14])}"/>
            <joint name="joint{i}" axis="0 0 1" range="{text(row[14:])}"/>""" for i, row in enumerate(PANDA))
        # the hand is rigid on link 7, turned by 45 degrees; the link's inertia is for both
        c, s = np.cos(np.pi / 8), np.sin(np.pi / 8)
        fingers = "".join(f"""<body pos="0 0 .1654" quat="{quat}">
            <inertial mass=".015" pos="0 0 0" diaginertia="2.375e-6 2.375e-6 7.5e-7"/>
            <joint name="joint{i}" type="slide" axis="0 1 0" range="0 .05" damping="5" armature=".1"/>
            <geom name="finger{i}" type="box" size=".015 .005 .04" pos="0 .0055 .035"/>
            </body>""" for i, quat in ((7, f"{c} 0 0 {-s}"), (8, f"{s} 0 0 {c}")))
        motors = [(4500, 4500, 87)] * 2 + [(2000, 3500, 87)] * 2 + [(1000, 2000, 12)] * 3 + [(0.09804, 500, 500)] * 2
        motors = "".join(f"""<general joint="joint{i}" gainprm="{gain}" biastype="affine" forcerange="{-limit} {limit}"
            biasprm="0 {-stiffness} {-stiffness / 10}" ctrlrange="{text([*PANDA[:, 14:], (0, 255), (0, 255)][i])}"/>"""
            for i, (gain, stiffness, limit) in enumerate(motors))  # fmt: skip
        pairs = [(name, other) for name in ("hand", "finger7", "finger8", "cube") for other in fixed]
        pairs += [("hand", "cube"), ("finger7", "finger8"), ("finger7", "cube"), ("finger8", "cube")]
        self.sys = mjcf.load_model(mujoco.MjModel.from_xml_string(f"""<mujoco><compiler angle="radian"/>
            <option timestep=".002" iterations="6" ls_iterations="12" integrator="implicitfast" impratio="10"/>
            <custom><numeric name="max_geom_pairs" data="10"/><numeric name="max_contact_points" data="24"/></custom>
            <default><geom contype="0" conaffinity="0"/></default>
            <worldbody>
                <body pos="-.3 .6 .07"><freejoint/><geom name="cube" type="box" size=".03 .03 .03"/></body>
                <geom name="table" type="plane" pos="0 .2 0" size="2.8 2.4 .1"/> {bins} {links}
                <geom name="hand" type="capsule" size=".04 .06" pos="0 0 .142" quat="{c} {c} {-s} {-s}"/>
                {fingers} {"</body>" * len(PANDA)}
            </worldbody>
            <contact>{"".join(f'<pair geom1="{a}" geom2="{b}"/>' for a, b in pairs)}</contact>
            <equality><joint joint1="joint7" joint2="joint8" solref=".005 1" solimp=".95 .99 .001 .5 2"/></equality>
            <actuator>{motors}</actuator></mujoco>"""))  # fmt: skip

    def forward(self, data):
        """mjx.forward, but for the kinematics: XLA on a CPU would compute each link's pose anew for everything that
        hangs on it, which takes 30 times longer than all the rest. The barriers forbid that."""
        model, rotate, multiply, matrix = self.sys, brax.math.rotate, brax.math.quat_mul, brax.math.quat_to_3x3
        cube = data.qpos[3:7] / jnp.linalg.norm(data.qpos[3:7])
        pos, quat = [jnp.zeros(3), data.qpos[:3]], [jnp.array([1.0, 0.0, 0.0, 0.0]), cube]  # world, cube
        for i, parent in enumerate(model.body_parentid[2:], 2):  # seven hinges about z, two slides along y
            x, turn = pos[parent] + rotate(model.body_pos[i], quat[parent]), multiply(quat[parent], model.body_quat[i])
            q = data.qpos[i + 5]
            if i < 9:
                turn = multiply(turn, jnp.stack([jnp.cos(q / 2), 0.0, 0.0, jnp.sin(q / 2)]))
            else:
                x = x + q * rotate(jnp.array([0.0, 1.0, 0.0]), turn)
            x, turn = jax.lax.optimization_barrier((x, turn))
            pos, quat = [*pos, x], [*quat, turn]
        xpos, xquat, geom = jnp.stack(pos), jnp.stack(quat), model.geom_bodyid
        place = jax.vmap(lambda x, turn, local_x, local: (x + rotate(local_x, turn), matrix(multiply(turn, local))))
        xipos, ximat = place(xpos, xquat, model.body_ipos, model.body_iquat)
        geom_xpos, geom_xmat = place(xpos[geom], xquat[geom], model.geom_pos, model.geom_quat)
        xmat = jax.vmap(matrix)(xquat)
        xaxis = jnp.concatenate([jnp.array([[0.0, 0.0, 1.0]]), xmat[2:9, :, 2], xmat[9:, :, 1]])
        data = data.replace(qpos=data.qpos.at[3:7].set(cube), xpos=xpos, xquat=xquat, xmat=xmat, xanchor=xpos[1:])
        data = data.replace(xaxis=xaxis, xipos=xipos, ximat=ximat, geom_xpos=geom_xpos, geom_xmat=geom_xmat)
        for stage in (mjx.com_pos, mjx.crb, mjx.factor_m, mjx.collision, mjx.make_constraint, mjx.transmission,
                      mjx.fwd_velocity, mjx.fwd_actuation, mjx.fwd_acceleration, mjx.solve):  # fmt: skip
            data = stage(model, data)
        return data

    def from_q(self, q, qd):
        return self.state(self.forward(mjx.make_data(self.sys).replace(qpos=q, qvel=qd)))

    def reset(self, key):
        cube = self.start + jax.random.uniform(key, (2,), minval=-0.15, maxval=0.15)
        return self.from_q(jnp.concatenate([cube, jnp.array([0.07, 1, 0, 0, 0, *self.default_q])]), jnp.zeros(15))

    def step(self, state, action):
        """Targets of joints 1, 2, 4, 6, from [-1, 1] to their ranges; a positive last action closes the gripper."""
        low, high = np.array([0.3491, 0, -3.0718, 2.3562]), np.array([2.7925, 1.48353, -0.0698, 3.7525])
        j1, j2, j4, j6 = low + (action[:4] + 1) / 2 * (high - low)
        grip = jnp.where(action[4] > 0, 0.0, 255.0)
        data = state.physics.replace(ctrl=jnp.stack([j1, j2, 0.0, j4, 0.0, j6, 1.4487, grip, grip]))
        return self.state(jax.lax.fori_loop(0, 25, lambda _, data: mjx.implicit(self.sys, self.forward(data)), data))

    def state(self, data):
        hand, left, right, q = 8, 9, 10, data.qpos  # bodies
        offset, turning = data.xpos[hand] - data.subtree_com[2], data.cvel[hand, :3]
        velocity = data.cvel[hand, 3:] + jnp.cross(turning, offset)
        fingers = jnp.linalg.norm(data.xpos[left] - data.xpos[right]), 0.1 * jnp.sum(data.qfrc_actuator[6:13]) / 19
        obs = jnp.concatenate([q[:3], q[7:14], data.xpos[hand], velocity, jnp.stack(fingers)])
        return EnvState(data, obs, jnp.zeros((), bool))

    def frame(self, data):
        return base.Transform(pos=data.xpos[0, 1:], rot=data.xquat[0, 1:])  # the bodies of the first environment


@functools.cache
def make_env(name):
    robot, maze = name.split("_")[:2]
    mazes = {"point": PointMaze, "ant": AntMaze, "humanoid": HumanoidMaze}
    return ArmBinpick() if robot == "arm" else mazes[robot](maze)


ACHIEVEMENTS = """collect_wood place_table eat_cow collect_sapling collect_drink make_wood_pickaxe make_wood_sword
    place_plant defeat_zombie collect_stone place_stone eat_plant defeat_skeleton make_stone_pickaxe make_stone_sword
    wake_up place_furnace collect_coal collect_iron collect_diamond make_iron_pickaxe make_iron_sword""".split()


class Craftax:
    """Craftax-Classic-Symbolic-v1 with the interface of the others: its state has the key of its next step, and an
    action is a vector, of which the largest number counts."""

    state_size, num_actions, grid = 1345, 17, None

    def __init__(self):
        from craftax.craftax_env import make_craftax_env_from_name  # here, because it starts the device

        self.game = make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False)
        self.params = self.game.default_params.replace(max_timesteps=10**9)  # `episode_length` cuts, as everywhere

    def reset(self, key):
        key, key_reset = jax.random.split(key)
        obs, world = self.game.reset_env(key_reset, self.params)
        # Craftax starts from Python numbers: without their types, train_iteration would be compiled twice
        world, obs = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), (world, obs))
        return EnvState((world, key), obs, jnp.zeros((), bool))

    def step(self, state, action):
        key, key_step = jax.random.split(state.physics[1])
        obs, world, _, done, _ = self.game.step_env(key_step, state.physics[0], jnp.argmax(action), self.params)
        return EnvState((world, key), obs, done)

    def frame(self, physics):
        return physics[0].achievements


@functools.cache
def make_any_env(name):
    return Craftax() if name == "craftax_classic" else make_env(name)


# ----------------------------------------------------------------------------------------------------- networks
class MLP(nn.Module):
    """Hidden relu layers and a linear one."""

    width: int
    out: int
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.lecun_uniform())
        for _ in range(self.layers):
            x = nn.relu(dense(self.width)(x))
        return dense(self.out)(x)


class ActorCritic(nn.Module):
    """What an action distribution needs, (..., outputs), and the value (...,)."""

    width: int
    outputs: int

    @nn.compact
    def __call__(self, obs):
        dense = lambda size, scale=np.sqrt(2): nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))
        head = lambda size: dense(size, 0.0)(nn.relu(dense(self.width)(nn.relu(dense(self.width)(obs)))))
        return head(self.outputs), head(1)[..., 0]  # scale 0: the first policy is the same everywhere


class TanhGaussian:
    """Actions tanh(u) with normal u. A rollout keeps u: the tanh's Jacobian cancels in the ratio of probabilities."""

    def __init__(self, env):
        self.size, self.outputs = env.action_size, 2 * env.action_size
        self.nodes, weights = np.polynomial.hermite_e.hermegauss(8)
        self.weights = weights / weights.sum()

    def mean_std(self, output):
        mean, std = jnp.split(output, 2, axis=-1)
        return mean, jax.nn.softplus(std) + 1e-3

    def sample(self, key, output):
        mean, std = self.mean_std(output)
        return mean + std * jax.random.normal(key, mean.shape)

    def log_prob(self, output, u):
        mean, std = self.mean_std(output)
        return jnp.sum(-0.5 * ((u - mean) / std) ** 2 - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi), axis=-1)

    def entropy(self, output):
        """Of tanh(u): that of u, and the mean of the log-Jacobian by Gauss-Hermite quadrature."""
        mean, std = self.mean_std(output)
        u = mean[..., None] + std[..., None] * self.nodes
        jacobian = jnp.sum(self.weights * 2 * (jnp.log(2.0) - u - jax.nn.softplus(-2 * u)), axis=-1)
        return jnp.sum(jnp.log(std) + 0.5 * jnp.log(2 * jnp.pi * jnp.e) + jacobian, axis=-1)

    def vector(self, u):
        return jnp.tanh(u)  # what the environment and phi get


class Categorical:
    """One of a number of actions."""

    def __init__(self, env):
        self.size = self.outputs = env.num_actions

    def sample(self, key, output):
        return jax.random.categorical(key, output)

    def log_prob(self, output, action):
        return jnp.take_along_axis(jax.nn.log_softmax(output), action[..., None], axis=-1)[..., 0]

    def entropy(self, output):
        return -jnp.sum(jax.nn.softmax(output) * jax.nn.log_softmax(output), axis=-1)

    def vector(self, action):
        return jax.nn.one_hot(action, self.size)


def action_distribution(env):
    return Categorical(env) if isinstance(env, Craftax) else TanhGaussian(env)


@flax.struct.dataclass
class Model:
    params: Any
    opt_state: Any


def clipped_update(loss_fn, model, args, learning_rate, *inputs):
    """One Adam step on loss_fn(params, args, *inputs) -> (loss, aux), with the gradient clipped to its norm."""
    grads, aux = jax.grad(loss_fn, has_aux=True)(model.params, args, *inputs)
    updates, opt_state = optimizer(args).update(grads, model.opt_state)
    params = jax.tree.map(lambda x, u: x - learning_rate * u, model.params, updates)
    return Model(params, opt_state), aux


def optimizer(args):
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


def new_model(args, params):
    return Model(params, optimizer(args).init(params))


# ----------------------------------------------------------------------------------- futures, and their InfoNCE
def steps_left(done):
    """(T, N) how many states follow the one of each step in its episode, inside the rollout. done is the one after a
    step: the state of such a step is the last of its episode. The state after the rollout's last step is the (T+1)-th.
    """
    t = jnp.arange(len(done))[:, None]
    return jax.lax.cummin(jnp.where(done, t, len(done)), axis=0, reverse=True) - t


def truncated_geometric(key, left, gamma):
    """Offsets 1..left with P(k) ~ gamma^(k-1), by the inverse of the distribution function; 0 where nothing is left."""
    log_gamma = jnp.log(gamma)
    u = jax.random.uniform(key, left.shape)
    k = jnp.ceil(jnp.log1p(u * jnp.expm1(left * log_gamma)) / log_gamma).astype(jnp.int32)
    return jnp.clip(k, jnp.minimum(left, 1), left)


def sample_futures(key, args, left):
    """(T, N) time of one future of each step, by a draw of its own (Eq. 1); the step itself where nothing is left."""
    return jnp.arange(len(left))[:, None] + truncated_geometric(key, left, args.gamma_cl)


def weighted_mean(x, weight):
    return jnp.sum(x * weight) / jnp.maximum(jnp.sum(weight), 1.0)


def infonce(logits, weight, logsumexp_penalty):
    """InfoNCE over the rows, positives on the diagonal (Eq. 2), and the penalty on logsumexp^2."""
    lse = jax.nn.logsumexp(logits, axis=1)  # (B,)
    return weighted_mean(lse - jnp.diag(logits) + logsumexp_penalty * lse**2, weight)


def contrastive_metrics(loss, logits, weight, phi, psi):
    rows, positive = len(logits), jnp.diag(logits)
    return dict(
        contrastive_loss=loss, accuracy=weighted_mean(jnp.argmax(logits, axis=1) == jnp.arange(rows), weight),
        logits_positive=weighted_mean(positive, weight),
        logits_negative=(jnp.sum(logits) - jnp.sum(positive)) / (rows * (rows - 1)),
        phi_variance=jnp.mean(jnp.var(phi, axis=0)), psi_variance=jnp.mean(jnp.var(psi, axis=0)),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- the method: ETD
def mrn_distance(x, y):
    """d(x, y), (...,), of representations (..., features): max(relu(x_1 - y_1)) + |x_2 - y_2|_2 on their halves (metric
    residual network). It obeys the triangle inequality, and the way back may be longer than the way there."""
    (x1, x2), (y1, y2) = jnp.split(x, 2, axis=-1), jnp.split(y, 2, axis=-1)
    return jnp.max(nn.relu(x1 - y1), axis=-1) + jnp.sqrt(jnp.sum((x2 - y2) ** 2, axis=-1) + 1e-8)


def mrn_pairs(x, y):
    """d(x_i, y_j) for all pairs of rows, (B, B), one feature at a time, and again in the backward pass, as in C-TeC's
    l1_similarity. The gradient of the maximum goes to the feature that is the largest."""
    (x1, x2), (y1, y2) = jnp.split(x, 2, axis=-1), jnp.split(y, 2, axis=-1)
    largest = jax.lax.stop_gradient(jnp.max(nn.relu(x1[:, None] - y1), axis=-1))
    add_largest = lambda c, difference: c + jnp.where(difference == largest, difference, 0.0)
    add_square = lambda c, difference: c + difference**2

    def over_features(add, x, y):
        step = jax.checkpoint(lambda c, columns: (add(c, columns[0][:, None] - columns[1]), None))
        return jax.lax.scan(step, jnp.zeros_like(largest), (x.T, y.T))[0]

    return over_features(add_largest, x1, y1) + jnp.sqrt(over_features(add_square, x2, y2) + 1e-8)


def encode_state(params, args, obs):
    """The representation of a state, (..., representation_size), and its potential c, (...,)."""
    out = MLP(args.encoder_width, args.representation_size + 1).apply(params, obs)
    return out[..., :-1], out[..., -1]


def etd_loss(params, args, obs, action, future, has_future):
    """Symmetric InfoNCE with logits c(y_j) - d(x_i, y_j)."""
    x, (y, potential) = encode_state(params, args, obs)[0], encode_state(params, args, future)
    logits = potential - mrn_pairs(x, y)  # (B, B)
    loss = 0.5 * (infonce(logits, has_future, 0.0) + infonce(logits.T, has_future, 0.0))
    return loss, contrastive_metrics(loss, logits, has_future, x, y)


@flax.struct.dataclass
class Memory:
    """The states of each environment's episode before the rollout, in a ring: number k is in row k % M."""

    states: jax.Array  # (N, M, representation_size) embeddings, or (N, M, state_size) observations
    count: jax.Array  # (N,) states of the episode so far
    overflow: jax.Array  # () states that were forgotten before their episode ended


def new_memory(args, env):
    size = args.representation_size if args.memory == "embeddings" else env.state_size
    states = jnp.zeros((args.num_envs, args.memory_size, size))
    return Memory(states, jnp.zeros(args.num_envs, jnp.int32), jnp.int32(0))


def episode_numbers(done):
    """(T+1, N) how many episodes ended in the rollout before each of its T+1 states."""
    return jnp.concatenate([jnp.zeros((1, done.shape[1]), jnp.int32), jnp.cumsum(done, axis=0)])


def insert_states(memory, states, done):
    """Adds those of (T, N, ...) states, T <= M, that belong to the episode that goes on after them."""
    size, episode = memory.states.shape[1], episode_numbers(done)
    goes_on, before = episode[:-1] == episode[-1], jnp.where(episode[-1] == 0, memory.count, 0)
    row = jnp.where(goes_on, (before + jnp.cumsum(goes_on, axis=0) - 1) % size, size)
    count = before + jnp.sum(goes_on, axis=0)
    forgotten = jnp.sum(jnp.maximum(count - jnp.maximum(before, size), 0))
    rows = memory.states.at[jnp.arange(row.shape[1]), row].set(states, mode="drop")
    return Memory(rows, count, memory.overflow + forgotten)


def etd_reward(args, params, memory, states, done):
    """(T, N) min over the episode's earlier states s_k of d(s_k, s'), 0 where the episode ended, for the T+1 states of
    a rollout; and the memory after it. All are encoded once, and one mask says who is earlier in whose episode."""
    z, old = encode_state(params, args, states)[0], memory.states  # (T+1, N, features)
    if args.memory == "observations":
        old = jax.lax.map(lambda obs: encode_state(params, args, obs)[0], old, batch_size=32)

    def nearest(inputs):
        z, old, count, episode = inputs  # of one environment
        t, episode = jnp.arange(len(z) - 1), episode[:-1]
        in_memory = (jnp.arange(len(old)) < count) & (episode[:, None] == 0)  # (T, M)
        in_rollout = (episode == episode[:, None]) & (t <= t[:, None])  # (T, T)
        distance = mrn_distance(jnp.concatenate([old, z[:-1]]), z[1:, None])  # (T, M+T)
        return jnp.min(jnp.where(jnp.concatenate([in_memory, in_rollout], axis=1), distance, jnp.inf), axis=1)

    inputs = z.swapaxes(0, 1), old, memory.count, episode_numbers(done).T
    reward = jnp.where(done, 0.0, jax.lax.map(nearest, inputs, batch_size=16).T)
    return reward, insert_states(memory, (z if args.memory == "embeddings" else states)[:-1], done)


# ------------------------------------------------------------------------------------------- the method: C-TeC
def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-12)


def l1_similarity(phi, psi):
    """C = -|phi_i - psi_j|_1 for all pairs, (B, B), one feature at a time, and again in the backward pass: the
    (B, B, features) array of differences would be most of the time and memory of a gradient step."""
    subtract = jax.checkpoint(lambda c, x: (c - jnp.abs(x[0][:, None] - x[1]), None))
    return jax.lax.scan(subtract, jnp.zeros((len(phi), len(psi))), (phi.T, psi.T))[0]


def l2_similarity(phi, psi):
    """C = -|phi_i - psi_j|_2 for all pairs of rows."""
    product = jnp.matmul(phi, psi.T, precision="highest")  # TF32 would be felt near 0
    squared = jnp.sum(phi**2, axis=-1)[:, None] + jnp.sum(psi**2, axis=-1) - 2 * product
    return -jnp.sqrt(jnp.maximum(squared, 0.0) + 1e-8)


def ctec_encode(params, args, obs, action, future):
    """phi(s, a) and psi(s_f), (..., representation_size), of unit length."""
    encoder, pair = MLP(args.encoder_width, args.representation_size), jnp.concatenate([obs, action], axis=-1)
    return unit(encoder.apply(params["phi"], pair)), unit(encoder.apply(params["psi"], future))


def ctec_loss(params, args, obs, action, future, has_future):
    """InfoNCE over the rows (Eq. 2)."""
    phi, psi = ctec_encode(params, args, obs, action, future)
    similarity = l1_similarity if args.similarity == "l1" else l2_similarity
    logits = similarity(phi, psi) / jnp.exp(params["log_tau"])
    loss = infonce(logits, has_future, args.logsumexp_penalty)
    return loss, contrastive_metrics(loss, logits, has_future, phi, psi) | {"tau": jnp.exp(params["log_tau"])}


def ctec_reward(args, params, key, states, action, done):
    """(T, N) the distance |phi(s, a) - psi(s_f)| to a sampled future of the rollout (Eq. 3), 0 where there is none."""
    left = steps_left(done)
    future = jnp.take_along_axis(states, sample_futures(key, args, left)[..., None], axis=0)
    phi, psi = ctec_encode(params, args, states[:-1], action, future)
    return jnp.where(left > 0, jnp.linalg.norm(phi - psi, ord=int(args.similarity[1]), axis=-1), 0.0)


# ---------------------------------------------------------------------------------------------------------- PPO
@flax.struct.dataclass
class Steps:
    obs: jax.Array  # (T, N, state_size)
    action: jax.Array  # (T, N, ...), as the distribution samples it
    log_prob: jax.Array  # (T, N)
    value: jax.Array  # (T, N)
    done: jax.Array  # (T, N) bool: the episode ended with this step
    final_value: jax.Array  # (T, N) of the state after a step with which the episode was cut off, else 0


def gae(args, reward, value, done, last_value):
    """(T, N) generalised advantage estimates, backwards over the steps."""

    def step(carry, x):
        advantage, next_value = carry
        reward, value, done = x
        error = reward + args.gamma * next_value * (1.0 - done) - value
        advantage = error + args.gamma * args.gae_lambda * (1.0 - done) * advantage
        return (advantage, value), advantage

    start = jnp.zeros_like(last_value), last_value
    return jax.lax.scan(step, start, (reward, value, done.astype(jnp.float32)), reverse=True)[1]


def ppo_rows_loss(params, args, env, steps, advantage):
    """The clipped objective, squared error of the values, and entropy, for rows of a rollout."""
    actions = action_distribution(env)
    output, value = ActorCritic(args.agent_width, actions.outputs).apply(params, steps.obs)
    log_ratio, target = actions.log_prob(output, steps.action) - steps.log_prob, advantage + steps.value
    advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
    ratio, clipped = jnp.exp(log_ratio), jnp.clip(jnp.exp(log_ratio), 1 - args.clip, 1 + args.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
    value_loss, entropy = 0.5 * jnp.mean((value - target) ** 2), jnp.mean(actions.entropy(output))
    loss = policy_loss + args.value_coef * value_loss - args.entropy_coef * entropy
    return loss, dict(
        policy_loss=policy_loss, value_loss=value_loss, entropy=entropy, value_mean=jnp.mean(value),
        kl=jnp.mean(ratio - 1 - log_ratio), clipped=jnp.mean(ratio != clipped),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ coverage and achievements
@flax.struct.dataclass
class Coverage:
    visited: jax.Array  # (bins,) bool
    outside: jax.Array  # () visits outside the grid


def bin_index(env, obs):
    """Flat index of the bin that each state (..., state_size) is in; one past the last bin if outside the grid."""
    index = jnp.floor((obs[..., : env.position_size] - env.low) / BIN)
    inside = jnp.all((index >= 0) & (index < np.array(env.grid)), axis=-1)
    strides = np.cumprod((1, *env.grid[:0:-1]))[::-1]
    return jnp.where(inside, jnp.sum(index.astype(jnp.int32) * strides, axis=-1), np.prod(env.grid))


@flax.struct.dataclass
class Episodes:
    """The latest finished episodes, in a ring: number k is in row k % W."""

    achievements: jax.Array  # (W, 22) bool
    length: jax.Array  # (W,)
    reward: jax.Array  # (W,) the game's
    count: jax.Array  # () finished so far


def no_episodes(args):
    zero = lambda *size, dtype=jnp.int32: jnp.zeros((args.episode_window, *size), dtype)
    return Episodes(zero(len(ACHIEVEMENTS), dtype=bool), zero(), zero(dtype=jnp.float32), jnp.int32(0))


def insert_episodes(episodes, done, achievements, length, reward):
    """Adds those of T x N steps that end an episode; if there are more than W of them, the last W."""
    rank = jnp.cumsum(done.ravel())
    keep = done.ravel() & (rank > rank[-1] - len(episodes.length))
    row = jnp.where(keep, (episodes.count + rank - 1) % len(episodes.length), len(episodes.length))
    put = lambda ring, x: ring.at[row].set(x.reshape(-1, *x.shape[2:]), mode="drop")
    rings = episodes.achievements, episodes.length, episodes.reward
    return Episodes(*map(put, rings, (achievements, length, reward)), episodes.count + rank[-1])


def achievement_rates(episodes):
    """(22,) fraction of the latest episodes that unlocked each; 0 before the first one ended."""
    return jnp.sum(episodes.achievements, axis=0) / jnp.clip(episodes.count, 1, len(episodes.length))


def crafter_score(rates):
    return jnp.exp(jnp.mean(jnp.log(1 + 100 * rates))) - 1


def episode_metrics(episodes):
    rates, stored = achievement_rates(episodes), jnp.clip(episodes.count, 1, len(episodes.length))
    return dict(zip(ACHIEVEMENTS, rates)) | dict(
        achievements=jnp.sum(rates), crafter_score=crafter_score(rates), episodes=episodes.count,
        episode_length=jnp.sum(episodes.length) / stored, episode_return=jnp.sum(episodes.reward) / stored,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class TrainState:
    key: jax.Array
    iteration: jax.Array
    env: EnvState  # (N, ...)
    episode_step: jax.Array  # (N,)
    success: Any  # Coverage or Episodes
    memory: Any  # ETD's Memory
    reward_moments: jax.Array  # (2,) running mean and variance
    agent: Model
    encoders: Model  # ETD's encoder, or C-TeC's {"phi", "psi", "log_tau"}


def new_states(args, env, key):
    """Start states, made 32 at a time: more worlds of Craftax need much memory, and a CPU is slower with more."""
    return jax.lax.map(env.reset, jax.random.split(key, args.num_envs), batch_size=32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env, key_agent, key_phi, key_psi, key_age = jax.random.split(jax.random.PRNGKey(args.seed), 6)
    actions, obs = action_distribution(env), jnp.zeros(env.state_size)
    agent = ActorCritic(args.agent_width, actions.outputs).init(key_agent, obs)
    if args.bonus == "etd":
        encoders = MLP(args.encoder_width, args.representation_size + 1).init(key_phi, obs)
    else:
        phi = MLP(args.encoder_width, args.representation_size).init(key_phi, jnp.zeros(env.state_size + actions.size))
        psi = MLP(args.encoder_width, args.representation_size).init(key_psi, obs)
        encoders = {"phi": phi, "psi": psi, "log_tau": jnp.zeros(())}
    # where nothing else ends an episode, they would all be cut off together: a rollout has steps of every age
    age = jax.random.randint(key_age, (args.num_envs,), 0, args.episode_length if env.grid else 1)
    return TrainState(
        key=key, iteration=jnp.int32(0), env=new_states(args, env, key_env), episode_step=age,
        success=Coverage(jnp.zeros(np.prod(env.grid), bool), jnp.int32(0)) if env.grid else no_episodes(args),
        memory=new_memory(args, env) if args.bonus == "etd" else None, reward_moments=jnp.zeros(2),
        agent=new_model(args, agent), encoders=new_model(args, encoders),
    )  # fmt: skip


def play_steps(args, env, state, key):
    """`num_steps` steps in every environment. The start states of new episodes are drawn once an iteration."""
    key_start, key_actions = jax.random.split(key)
    starts, actions = new_states(args, env, key_start), action_distribution(env)
    policy = lambda obs: ActorCritic(args.agent_width, actions.outputs).apply(state.agent.params, obs)

    def step(carry, key):
        now, age = carry
        output, value = policy(now.obs)
        action = actions.sample(key, output)
        with jax.default_matmul_precision("highest"):  # no TF32 in the physics
            after = jax.vmap(env.step)(now, actions.vector(action))
        terminated = after.terminated | ~jnp.all(jnp.isfinite(after.obs), axis=-1)  # physics that blew up ends too
        truncated = (age + 1 >= args.episode_length) & ~terminated
        final_value = jax.lax.cond(jnp.any(truncated), lambda: policy(after.obs)[1], lambda: jnp.zeros_like(value))
        done, final_value = terminated | truncated, jnp.where(truncated, final_value, 0.0)
        restart = lambda start, go_on: jnp.where(done.reshape(-1, *[1] * (go_on.ndim - 1)), start, go_on)
        steps = Steps(now.obs, action, actions.log_prob(output, action), value, done, final_value)
        seen = (bin_index(env, after.obs) if env.grid else age + 1), env.frame(after.physics)
        return (jax.tree.map(restart, starts, after), jnp.where(done, 0, age + 1)), (steps, seen)

    keys = jax.random.split(key_actions, args.num_steps)
    (env_state, episode_step), (steps, seen) = jax.lax.scan(step, (state.env, state.episode_step), keys)
    if env.grid:
        bins, frames = seen
        visited = state.success.visited.at[bins].set(True)  # a bin past the last one, outside the grid, is dropped ...
        success = Coverage(visited, state.success.outside + jnp.sum(bins == len(visited)))  # ... and counted here
    else:
        (length, achievements), frames = seen, None
        success = insert_episodes(state.success, steps.done, achievements, length, jnp.zeros(length.shape))
    return state.replace(env=env_state, episode_step=episode_step, success=success), steps, frames


def standardize(args, moments, iteration, reward):
    """The reward over its running mean and deviation, which begin with the first rollout's."""
    now = jnp.stack([jnp.mean(reward), jnp.var(reward)])
    moments = jnp.where(iteration == 1, now, args.reward_momentum * moments + (1 - args.reward_momentum) * now)
    return moments, (reward - moments[0]) / (jnp.sqrt(moments[1]) + 1e-8)


def update(args, env, state, key, steps):
    """Rewards from the encoders as they are, then `update_epochs` passes of encoders and agent over the rollout, in
    gradient steps of `batch_size` shuffled transitions (a last smaller batch is left out)."""
    key_reward, key_epochs = jax.random.split(key)
    actions, states = action_distribution(env), jnp.concatenate([steps.obs, state.env.obs[None]])
    action, encoders = actions.vector(steps.action), state.encoders.params
    if args.bonus == "etd":
        reward, memory = etd_reward(args, encoders, state.memory, states, steps.done)
    else:
        reward, memory = ctec_reward(args, encoders, key_reward, states, action, steps.done), None
    moments, scaled = standardize(args, state.reward_moments, state.iteration, reward)
    last_value = ActorCritic(args.agent_width, actions.outputs).apply(state.agent.params, states[-1])[1]
    scaled = scaled + args.gamma * steps.final_value  # an episode that was cut off would have gone on
    advantage = gae(args, scaled, steps.value, steps.done, last_value)
    loss = etd_loss if args.bonus == "etd" else ctec_loss
    left, flat = steps_left(steps.done), lambda x: x.reshape(-1, *x.shape[2:])  # (T * N, ...)
    rows = jax.tree.map(flat, (steps.replace(obs=None), advantage))

    def epoch(models, key):
        key_future, key_order = jax.random.split(key)
        future = flat(sample_futures(key_future, args, left) * left.shape[1] + jnp.arange(left.shape[1]))
        order = jax.random.permutation(key_order, left.size)[: left.size // args.batch_size * args.batch_size]

        def step(models, at):
            agent, encoders = models
            (batch, advantage), obs = jax.tree.map(lambda x: x[at], rows), flat(states)[at]
            pairs = obs, flat(action)[at], flat(states)[future[at]], (flat(left)[at] > 0).astype(jnp.float32)
            encoders, metrics = clipped_update(loss, encoders, args, args.learning_rate, *pairs)
            inputs = args.learning_rate, env, batch.replace(obs=obs), advantage
            agent, ppo_metrics = clipped_update(ppo_rows_loss, agent, args, *inputs)
            return (agent, encoders), metrics | ppo_metrics

        return jax.lax.scan(step, models, order.reshape(-1, args.batch_size))

    keys = jax.random.split(key_epochs, args.update_epochs)
    (agent, encoders), metrics = jax.lax.scan(epoch, (state.agent, state.encoders), keys)
    metrics = jax.tree.map(jnp.mean, metrics) | {"reward_mean": jnp.mean(reward), "reward_std": jnp.std(reward)}
    metrics |= {"memory_overflow": memory.overflow} if memory else {}
    return state.replace(memory=memory, reward_moments=moments, agent=agent, encoders=encoders), metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_iteration(args, env, state):
    """Play, then learn: all on the device, compiled once in a run."""
    key, key_play, key_update = jax.random.split(state.key, 3)
    state, steps, frames = play_steps(args, env, state.replace(key=key, iteration=state.iteration + 1), key_play)
    state, metrics = update(args, env, state, key_update, steps)
    metrics["parameter_norm"] = optax.global_norm((state.encoders.params, state.agent.params))
    if env.grid:
        return state, metrics | {"coverage": jnp.sum(state.success.visited), "outside": state.success.outside}, frames
    return state, metrics | episode_metrics(state.success), frames


# ------------------------------------------------------------------------------- logging, pictures, checkpoint
METRICS = """iteration steps seconds steps_per_second coverage outside achievements crafter_score episodes
    episode_length reward_mean reward_std memory_overflow contrastive_loss accuracy logits_positive logits_negative
    tau phi_variance psi_variance policy_loss value_loss value_mean entropy kl clipped
    parameter_norm""".split() + ACHIEVEMENTS


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def clock(seconds):
    unit, name = (1, "s") if seconds < 90 else (60, "min") if seconds < 5400 else (3600, "h")
    return f"{seconds / unit:,.{int(unit > 1)}f} {name}"


def write_atomically(path, write):
    """write(file) into a temporary file, which then takes the place of path: a kill or a full disk loses nothing."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path, state):
    leaves = {jax.tree_util.keystr(name): np.asarray(x) for name, x in jax.tree_util.tree_leaves_with_path(state)}
    write_atomically(path, lambda file: file.write(flax.serialization.msgpack_serialize(leaves)))


def load_checkpoint(path, template):
    """The state in path, which must have the structure and the shapes of template."""
    try:
        leaves = flax.serialization.msgpack_restore(path.read_bytes())
        restore = lambda name, x: jnp.asarray(leaves[jax.tree_util.keystr(name)], x.dtype).reshape(x.shape)
        return jax.tree_util.tree_map_with_path(restore, template)
    except Exception as error:  # no file, half a file, a file that does not fit: each has its own
        fail(f"{path} is no checkpoint of this run ({error!r}): put a copy in its place, or start without --resume")


def start_run(args, init, buffer, flops):
    """The run's folder, its state (from init() or the checkpoint), and the seconds it took so far. The flops are those
    of an iteration; buffer says what takes the memory."""
    name = f"{args.env}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    folder, state, iteration, rows = Path(args.resume or f"{args.run_dir}/{name}"), None, 0, []
    if args.resume:
        state = load_checkpoint(folder / "checkpoint.msgpack", jax.eval_shape(init))
        header, *rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
        if header != METRICS:
            fail(f"{folder}/metrics.csv is of another version of this script")
        iteration = int(state.iteration)
        rows = [row for row in rows if len(row) == len(METRICS) and int(row[0]) <= iteration]
    if iteration >= args.num_iterations:
        fail(f"{folder} is complete; to go on, give more --total-timesteps than {args.total_timesteps:,}")
    folder.mkdir(parents=True, exist_ok=bool(args.resume))
    config = json.dumps(dataclasses.asdict(args) | {"resume": ""}, indent=1)
    table = "".join(",".join(row) + "\n" for row in [METRICS, *rows])
    write_atomically(folder / "args.json", lambda file: file.write(config.encode()))
    write_atomically(folder / "metrics.csv", lambda file: file.write(table.encode()))

    device, x = jax.devices()[0], jnp.ones((1024, 1024))
    multiply = jax.jit(jnp.matmul).lower(x, x).compile()
    began = time.time()
    jax.block_until_ready(multiply(x, x))
    seconds = 2 * flops * (args.num_iterations - iteration) * (time.time() - began) / 2**31  # half a product's rate
    expected = f"expected time about {clock(seconds)} for learning, plus the environments'" if flops else "no learning"
    print(f"{Path(__file__).stem} on {args.env}, seed {args.seed}, into {folder}")
    print(f"device {device.platform} ({device.device_kind}), {buffer}, {expected}", flush=True)
    if device.platform == "cpu" and args.preset == "paper":
        print("no accelerator was found: --preset laptop has sizes that suit a CPU", flush=True)
    return folder, state or init(), float(rows[-1][METRICS.index("seconds")]) if rows else 0.0


def show_progress(args, row, learning):
    """One line that is rewritten on a terminal; elsewhere a line for each twentieth of the run."""
    done, live, rate = row["iteration"] / args.num_iterations, sys.stdout.isatty(), row["steps_per_second"]
    left = f"{clock(row['steps'] * (1 / done - 1) / rate)} left   " if learning else "not learning yet"
    if live or done == 1 or row["iteration"] % -(-args.num_iterations // 20) == 0:
        name = next(name for name in METRICS[4:] if name in row)  # coverage, or achievements
        result = f"{name} {round(row[name], 2):,.10g}"
        bar = f"[{'#' * int(30 * done):30}] {done:4.0%}  {result}  {rate:,.0f} steps/s  {left}"
        print(bar, end="\r" if live and done < 1 else "\n", flush=True)


def iterations(args, folder, state, seconds, steps, iterate):
    """The state, a row of metrics, and whatever else iterate returns, after each iteration. Writes metrics.csv and,
    when the caller is done with the iteration, the checkpoint; shows the progress; stops at Ctrl-C, at SIGTERM, and
    when a metric is not finite (-inf means: no value yet)."""
    if args.track:
        import wandb

        wandb.init(project="ctec", id=folder.name, resume="allow", config=dataclasses.asdict(args), dir=folder)
    log, stop, recent, saved, learning = open(folder / "metrics.csv", "a"), [], [], time.time(), False
    handlers = {number: signal.signal(number, lambda number, _: stop.append(number)) for number in (2, 15)}
    try:
        for iteration in range(int(state.iteration) + 1, args.num_iterations + 1):
            began, last = time.time(), iteration == args.num_iterations
            state, metrics, *more = iterate(state)
            metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
            spent, values = time.time() - began, {name: metrics[name] for name in METRICS if name in metrics}
            bad = [name for name, x in values.items() if not np.isfinite(x) and (learning or x != -np.inf)]
            if bad:
                words = f"iteration {iteration}: {bad[0]} is {values[bad[0]]}"
                fail(f"{words}; the last good checkpoint, if there was one, is untouched in {folder}", code=1)
            learning, seconds = -np.inf not in values.values(), seconds + spent
            recent = [*recent[-19:], spent] if learning else []
            row = {"iteration": iteration, "steps": iteration * steps, "seconds": round(seconds, 1)}
            row |= {"steps_per_second": round(steps * max(len(recent), 1) / sum(recent or [spent]), 1)}
            row |= {name: x for name, x in values.items() if np.isfinite(x)}
            log.write(",".join(str(row.get(name, "")) for name in METRICS) + "\n")
            log.flush()
            show_progress(args, row, learning)
            if args.track:
                wandb.log(row, step=row["steps"])
            yield state, row, *more
            if stop or last or time.time() - saved >= 60 * args.checkpoint_minutes:
                try:
                    save_checkpoint(folder / "checkpoint.msgpack", state)
                except OSError as error:  # a full disk may have room again before the next one
                    if stop or last:
                        raise
                    print(f"\nwarning: checkpoint not written, the last good one stays: {error}", file=sys.stderr)
                saved = time.time()
            if stop and not last:
                go_on = f"go on with: python {Path(__file__).name} --resume {folder}"
                fail(f"stopped by signal {stop[0]}; {go_on}", code=128 + stop[0])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        log.close()
        if args.track:
            wandb.finish()


def draw_places(axes, env, title, values=None, **style):
    """Walls, start, and the (x, y) values if there are any."""
    for x, y, width, height in env.outlines:
        axes.fill([x, x + width, x + width, x], [y, y, y + height, y + height], color="0.4")
    axes.plot(*env.start, "o", color="red")
    axes.set(title=title, xlabel="x (m)", ylabel="y (m)", aspect="equal")
    if values is not None:
        extent = env.low[0], env.high[0], env.low[1], env.high[1]
        return axes.imshow(values.T, origin="lower", extent=extent, **style)


def save_coverage(args, env, folder, visited, steps, frames):
    """coverage.png and .npz, and the last steps: rollout.html (Brax's viewer) or rollout.png (of 16 points)."""
    from matplotlib.figure import Figure

    visited, of_bins = np.asarray(visited).reshape(env.grid), f" of {env.bins:,}" if env.bins else ""
    write_atomically(folder / "coverage.npz", lambda file: np.savez(file, visited=visited, low=env.low, high=env.high))
    figure, flat = Figure((7, 6), layout="constrained"), visited.reshape(*env.grid[:2], -1).any(axis=-1)
    title = f"{args.env}: {visited.sum():,}{of_bins} bins in {steps:,} steps"
    draw_places(figure.add_subplot(), env, title, np.where(flat, 0.6, np.nan), cmap="Blues", vmin=0, vmax=1)
    figure.savefig(folder / "coverage.png", dpi=100)
    frames = jax.tree.map(lambda *x: np.concatenate(x)[-args.episode_length :], *frames)
    if hasattr(env, "sys"):
        places = [jax.tree.map(lambda x: x[t], frames) for t in range(len(frames.pos))]
        states = [base.State(q=None, qd=None, x=x, xd=None, contact=None) for x in places]
        (folder / "rollout.html").write_text(html.render(env.sys, states))
    else:
        figure = Figure((7, 6), layout="constrained")
        axes = figure.add_subplot()
        draw_places(axes, env, f"{args.env}: the last {len(frames)} steps of {frames.shape[1]} points")
        axes.plot(*frames.transpose(2, 0, 1), ".", markersize=1)
        figure.savefig(folder / "rollout.png", dpi=100)


def save_bars(folder, title, bars):
    """achievements.png: the share of episodes that unlocked each achievement, for each {label: (22,) rates}."""
    from matplotlib.figure import Figure

    figure, place, height = Figure((8, 7), layout="constrained"), np.arange(len(ACHIEVEMENTS)), 0.8 / len(bars)
    axes = figure.add_subplot()
    for i, (label, rates) in enumerate(bars.items()):
        shift, color, rates = (i + 0.5) * height - 0.4, ("tab:blue", "0.7")[i], np.asarray(rates)
        drawn = axes.barh(place + shift, 100 * rates, height, color=color, label=f"{label}: sum {rates.sum():.2f}")
        axes.bar_label(drawn, [f"{100 * x:.1f}" if x else "0" for x in rates], padding=2, fontsize=6)
    axes.set(yticks=place, yticklabels=[name.replace("_", " ") for name in ACHIEVEMENTS], xlim=(0, 108), title=title)
    axes.set_xlabel("episodes that unlocked it (%)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.savefig(folder / "achievements.png", dpi=100)


# --------------------------------------------------------------------------------------------------------- main
def parse_args(argv=None):
    """The paper's numbers, then the preset's, or those of the run that is resumed; explicit flags win."""

    def parse(default):
        try:
            with contextlib.redirect_stderr(io.StringIO()) as box:
                return tyro.cli(Args, args=argv, default=default, description=__doc__)
        except SystemExit as stop:
            if not stop.code:
                raise
            message = re.split("[─-]{4,}", box.getvalue())[1]  # the first part of tyro's framed one
            fail(" ".join(re.sub("[│╮]", " ", message).split()).rstrip(".") + "; see --help")

    args = parse(Args())
    if not args.resume:
        return parse(Args(**PAPER.get(args.env.split("_")[0], {}) | PRESETS[args.preset]))
    try:
        return parse(Args(**json.loads((Path(args.resume) / "args.json").read_text()) | {"resume": args.resume}))
    except (OSError, ValueError, TypeError) as error:
        fail(f"--resume {args.resume}: it is not the folder of a run of this script ({error})")


def check_numbers(args):
    """One line and exit code 2 for a number that makes no sense."""
    for name, value in dataclasses.asdict(args).items():
        zero, number = re.search("seed|minutes|coef|penalty|random|video", name), type(value) in (int, float)
        if number and not (value > 0 or (zero and value == 0)):
            fail(f"--{name.replace('_', '-')} {value}: it must be {'at least' if zero else 'above'} 0")
        if name.startswith("gamma") and value >= 1:
            fail(f"--{name.replace('_', '-')} {value}: it must be below 1")


def main(args):
    """A loop around train_iteration. Returns the last row of metrics, with the run's folder."""
    check_numbers(args)
    env, steps = make_any_env(args.env), args.num_envs * args.num_steps
    if args.gae_lambda > 1 or args.reward_momentum >= 1:
        fail("--gae-lambda must be at most 1, --reward-momentum below 1")
    if not 2 <= args.batch_size <= steps:
        fail(f"--batch-size {args.batch_size}: it must be at least 2, and at most num_envs * num_steps = {steps}")
    if args.bonus == "etd" and (args.memory_size < args.num_steps or args.representation_size % 2):
        fail("--memory-size must be at least --num-steps, --representation-size even")
    shapes = jax.eval_shape(lambda: init_state(args, env))
    size = lambda model: sum(x.size for x in jax.tree.leaves(model.params))
    encodings = 2 if args.bonus == "etd" else 1  # its one encoder sees the state and the future
    flops = 6 * steps * args.update_epochs * (size(shapes.agent) + encodings * size(shapes.encoders))
    megabytes = 4e-6 * (shapes.memory.states.size if shapes.memory else 0)
    buffer = f"rollout {4e-6 * steps * env.state_size:,.1f} MB, episodic memory {megabytes:,.1f} MB"
    folder, state, seconds = start_run(args, lambda: init_state(args, env), buffer, flops)
    moments = {round(k * args.num_iterations / 5) for k in range(1, 6)}
    began, frames = time.time(), []
    iterate = train_iteration.lower(args, env, state).compile()
    print(f"compiled in {clock(time.time() - began)}", flush=True)
    for state, row, frame in iterations(args, folder, state, seconds, steps, iterate):
        frames = [*frames, jax.device_get(frame)][-(-(-args.episode_length // args.num_steps)) :]
        if row["iteration"] in moments and env.grid:
            save_coverage(args, env, folder, state.success.visited, row["steps"], frames)
        elif row["iteration"] in moments:
            title = f"{args.bonus} ({Path(__file__).stem}), seed {args.seed}, {row['steps']:,} steps"
            save_bars(folder, title, {"this policy": achievement_rates(state.success)})
    name = "coverage" if env.grid else "achievements"
    print(f"{name} {round(row[name], 2):,.10g} after {row['steps']:,} steps in {clock(row['seconds'])}")
    pictures = sorted(path.name for path in folder.iterdir() if path.suffix in (".png", ".html"))
    print(f"pictures {', '.join(pictures)}\nfolder   {folder}")
    return row | {"folder": str(folder)}


if __name__ == "__main__":
    try:
        main(parse_args())
    except OSError as error:  # a full disk, as a rule
        fail(f"{error}; the last good checkpoint, if there was one, is untouched", code=1)
    except KeyboardInterrupt:
        fail("stopped before the first iteration", code=130)
