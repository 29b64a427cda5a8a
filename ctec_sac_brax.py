"""C-TeC with SAC on the point, ant and humanoid mazes and on the Panda arm.

Curiosity from temporal contrastive representations (Mohamed et al., "Temporal Representations for Exploration", ICLR
2026). Encoders phi(s, a) and psi(s_f) are trained by InfoNCE so that a state-action lies close to the states that
follow it in its trajectory. The agent's only reward is the distance |phi(s, a) - psi(s_f)| to a sampled future: go
where your future is hard to predict. There is no task reward; success is the number of places visited.

    python ctec_sac_brax.py --env ant_hardest_maze                     # the paper's sizes, for a GPU
    python ctec_sac_brax.py --env point_hardest_maze --preset laptop   # minutes on two CPU cores
    python ctec_sac_brax.py --resume runs/<folder>                     # go on from the last checkpoint
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "jax==0.10.2", "flax==0.12.8", "optax==0.2.8", "brax==0.14.2", "mujoco==3.17.0", "mujoco-mjx==3.17.0",
#   "numpy==2.4.6", "tyro==1.0.16", "matplotlib==3.11.2", "wandb==0.31.0",
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
    env: Literal[ENVS] = "ant_hardest_maze"
    """environment"""
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

    num_envs: int = 1024
    """parallel environments (paper Table 2; 256 on the humanoid)"""
    unroll_length: int = 62
    """steps in each environment before the gradient steps of an iteration (paper Table 2)"""
    episode_length: int = 1000
    """steps after which an episode is cut off (paper Table 2)"""
    replay_size: int = 10_000
    """steps kept for each environment (paper Table 2)"""
    learning_starts: int = 1000
    """steps in each environment before the first gradient step (paper Table 2)"""
    batch_size: int = 1024
    """transitions in a gradient step (paper Table 2; 256 on the humanoid)"""
    multiplier: float = 1.0
    """gradient steps an iteration: num_envs * (episode_length - 1) * multiplier / batch_size (paper Table 2)"""
    learning_rate: float = 3e-4
    """Adam, for actor, critics, alpha and the model of the bonus (paper Tables 2 to 4)"""
    agent_width: int = 256
    """width of the two hidden layers of actor and critics (paper Table 2)"""
    gamma: float = 0.99
    """discount of SAC (paper Table 2)"""
    target_rate: float = 0.005
    """how fast the target critics follow (authors' code)"""

    encoder_width: int = 1024
    """width of the hidden layers of the bonus's networks (paper Tables 3 and 4)"""
    representation_size: int = 64
    """size of a representation (paper Tables 3 and 4)"""
    gamma_cl: float = 0.99
    """discount of the future-state distribution, Eq. 1 (authors' code; 0.3 in Craftax)"""
    logsumexp_penalty: float = 0.1
    """weight of mean(logsumexp^2) in the contrastive loss (paper Table 3)"""
    future_state: Literal["full", "goal"] = "full"
    """what psi sees of a future: the full state, or its position only (prior knowledge, paper Appendix D)"""

    @property
    def gradient_steps(self):
        return round(self.num_envs * (self.episode_length - 1) * self.multiplier / self.batch_size)

    @property
    def num_iterations(self):
        return -(-self.total_timesteps // (self.num_envs * self.unroll_length))


PAPER = {"humanoid": dict(num_envs=256, batch_size=256)}  # what the paper's tables change for one robot
PRESETS = {
    "paper": {},
    "laptop": dict(total_timesteps=2_000_000, num_envs=128, episode_length=1001, replay_size=2000, learning_starts=500,
                   batch_size=256, multiplier=0.032, encoder_width=256, checkpoint_minutes=2.0),
}  # fmt: skip


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


# two critics of one shape: their parameters and outputs have a leading axis of 2
TwinMLP = nn.vmap(MLP, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)


@flax.struct.dataclass
class Model:
    params: Any
    opt_state: Any


def init_model(args, params):
    return Model(params, optax.adam(args.learning_rate).init(params))


def gradient_update(loss_fn, model, args, *inputs):
    """One Adam step on loss_fn(params, args, *inputs) -> (loss, aux)."""
    grads, aux = jax.grad(loss_fn, has_aux=True)(model.params, args, *inputs)
    updates, opt_state = optax.adam(args.learning_rate).update(grads, model.opt_state)
    return Model(optax.apply_updates(model.params, updates), opt_state), aux


def weighted_mean(x, weight):
    return jnp.sum(x * weight) / jnp.maximum(jnp.sum(weight), 1.0)


# ------------------------------------------------------------------------------------------------------- replay
@flax.struct.dataclass
class Replay:
    """A ring: step t of every environment is in row t % T. The next observation is the next row; a terminal step needs
    none, a truncated one is masked."""

    obs: jax.Array  # (T, N, state_size)
    action: jax.Array  # (T, N, action_size)
    terminated: jax.Array  # (T, N) bool
    truncated: jax.Array  # (T, N) bool
    time: jax.Array  # () steps written so far, in each environment


@flax.struct.dataclass
class Batch:
    obs: jax.Array  # (B, state_size)
    action: jax.Array  # (B, action_size)
    next_obs: jax.Array  # (B, state_size), of no meaning where the step is terminated or truncated
    terminated: jax.Array  # (B,) 0.0 or 1.0
    truncated: jax.Array  # (B,) 0.0 or 1.0
    time: jax.Array  # (B,) when, and in which environment, the step was made
    env: jax.Array

    @property
    def has_next(self):
        """(B,) 0.0 where the episode ended with the step: next_obs is another one's, and there is no future."""
        return (1.0 - self.terminated) * (1.0 - self.truncated)


def init_replay(args, env):
    rows = lambda *size, dtype=jnp.float32: jnp.zeros((args.replay_size, args.num_envs, *size), dtype)
    return Replay(rows(env.state_size), rows(env.action_size), rows(dtype=bool), rows(dtype=bool), jnp.int32(0))


def replay_insert(replay, *rows):
    """Writes (unroll, N, ...) rows of obs, action, terminated, truncated."""
    at = (replay.time + jnp.arange(len(rows[0]))) % len(replay.obs)
    rings = replay.obs, replay.action, replay.terminated, replay.truncated
    return Replay(*[ring.at[at].set(row) for ring, row in zip(rings, rows)], replay.time + len(rows[0]))


def sample_batch(key, args, replay):
    """Uniform transitions. The newest step, which has no next one yet, is left out."""
    key_t, key_env = jax.random.split(key)
    oldest = jnp.maximum(replay.time - len(replay.obs), 0)
    t = jax.random.randint(key_t, (args.batch_size,), oldest, replay.time - 1)
    n = jax.random.randint(key_env, (args.batch_size,), 0, args.num_envs)
    row = lambda field, t: field[t % len(replay.obs), n]
    terminated, truncated = (row(flag, t).astype(jnp.float32) for flag in (replay.terminated, replay.truncated))
    return Batch(row(replay.obs, t), row(replay.action, t), row(replay.obs, t + 1), terminated, truncated, t, n)


# ------------------------------------------------------------------------------------------- the method: C-TeC
def trajectory_ends(replay):
    """(T, N) time of the last stored step of each step's trajectory, oldest step first: a reverse cumulative minimum
    over the times at which a trajectory ends. Once an iteration, and only flags are moved."""
    t = replay.time - len(replay.obs) + jnp.arange(len(replay.obs), dtype=jnp.int32)[:, None]
    done = jnp.roll(replay.terminated | replay.truncated, -replay.time, axis=0) | (t == replay.time - 1)
    return jax.lax.cummin(jnp.where(done, t, replay.time), axis=0, reverse=True)


def truncated_geometric(key, left, gamma):
    """Offsets 1..left with P(k) ~ gamma^(k-1), by the inverse of the distribution function; 0 where nothing is left."""
    log_gamma = jnp.log(gamma)
    u = jax.random.uniform(key, left.shape)
    k = jnp.ceil(jnp.log1p(u * jnp.expm1(left * log_gamma)) / log_gamma).astype(jnp.int32)
    return jnp.clip(k, jnp.minimum(left, 1), left)


def replay_futures(key, args, replay, ends, batch):
    """(B, state_size) a future of each step's own trajectory (Eq. 1); the step itself where it is the last."""
    left = ends[batch.time - (replay.time - len(replay.obs)), batch.env] - batch.time
    offset = truncated_geometric(key, left, args.gamma_cl)
    return replay.obs[(batch.time + offset) % len(replay.obs), batch.env]


def encode(params, args, position_size, obs, action, future):
    """phi(s, a) and psi(s_f), both (B, representation_size), of unit length along the features."""
    encoder = MLP(args.encoder_width, args.representation_size)
    future = future if args.future_state == "full" else future[:, :position_size]
    phi = encoder.apply(params["phi"], jnp.concatenate([obs, action], axis=-1))
    return unit(phi), unit(encoder.apply(params["psi"], future))


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-12)


def l1_similarity(phi, psi):
    """C = -|phi_i - psi_j|_1 for all pairs, (B, B), one feature at a time, and again in the backward pass: the
    (B, B, features) array of differences would be most of the time and memory of a gradient step."""
    subtract = jax.checkpoint(lambda c, x: (c - jnp.abs(x[0][:, None] - x[1]), None))
    return jax.lax.scan(subtract, jnp.zeros((len(phi), len(psi))), (phi.T, psi.T))[0]


def infonce(logits, weight, logsumexp_penalty):
    """InfoNCE over the rows, positives on the diagonal (Eq. 2), and the penalty on logsumexp^2."""
    lse = jax.nn.logsumexp(logits, axis=1)  # (B,)
    return weighted_mean(lse - jnp.diag(logits) + logsumexp_penalty * lse**2, weight)


def contrastive_loss(params, args, position_size, batch, future):
    """The loss, and the intrinsic reward -C((s, a), s_f) of Eq. 3 from the same forward pass."""
    has_future, (phi, psi) = batch.has_next, encode(params, args, position_size, batch.obs, batch.action, future)
    similarity = l1_similarity(phi, psi)  # (B, B), row i: state-action i against every future
    logits, rows = similarity / jnp.exp(params["log_tau"]), len(phi)
    loss, positive = infonce(logits, has_future, args.logsumexp_penalty), jnp.diag(logits)
    reward = -jnp.diag(similarity) * has_future  # (B,) without tau; 0 where there is no future
    return loss, (reward, dict(
        contrastive_loss=loss,
        accuracy=weighted_mean(jnp.argmax(logits, axis=1) == jnp.arange(rows), has_future),
        logits_positive=weighted_mean(positive, has_future),
        logits_negative=(jnp.sum(logits) - jnp.sum(positive)) / (rows * (rows - 1)),
        logsumexp=weighted_mean(jax.nn.logsumexp(logits, axis=1), has_future), tau=jnp.exp(params["log_tau"]),
        phi_variance=jnp.mean(jnp.var(phi, axis=0)), psi_variance=jnp.mean(jnp.var(psi, axis=0)),
    ))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- SAC
@flax.struct.dataclass
class Agent:
    actor: Model
    critic: Model
    target_critic: Any
    log_alpha: Model


def init_agent(args, env, key):
    key_actor, key_critic = jax.random.split(key)
    obs, pair = jnp.zeros(env.state_size), jnp.zeros(env.state_size + env.action_size)
    actor = MLP(args.agent_width, 2 * env.action_size).init(key_actor, obs)
    critic = TwinMLP(args.agent_width, 1).init(key_critic, pair)
    return Agent(init_model(args, actor), init_model(args, critic), critic, init_model(args, jnp.zeros(())))


def sample_action(params, args, key, obs, action_size):
    """A tanh-Gaussian action and its log-probability."""
    mean, std = jnp.split(MLP(args.agent_width, 2 * action_size).apply(params, obs), 2, axis=-1)
    std = jax.nn.softplus(std) + 1e-3
    noise = jax.random.normal(key, mean.shape)
    u = mean + noise * std
    log_prob = -0.5 * noise**2 - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi)
    log_prob -= 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))  # the tanh's Jacobian, without cancellation
    return jnp.tanh(u), jnp.sum(log_prob, axis=-1)


def q_values(params, args, obs, action):
    return TwinMLP(args.agent_width, 1).apply(params, jnp.concatenate([obs, action], axis=-1))[..., 0]  # (2, B)


def critic_loss(params, args, batch, reward, next_value):
    target = reward + args.gamma * (1.0 - batch.terminated) * next_value
    error = q_values(params, args, batch.obs, batch.action) - target
    loss = weighted_mean(jnp.mean(error**2, axis=0), 1.0 - batch.truncated)  # what follows a truncation is not known
    return loss, {"critic_loss": loss, "q_target": weighted_mean(target, 1.0 - batch.truncated)}


def actor_loss(params, args, batch, critic_params, alpha, key):
    action, log_prob = sample_action(params, args, key, batch.obs, batch.action.shape[-1])
    q = jnp.min(q_values(critic_params, args, batch.obs, action), axis=0)
    loss = jnp.mean(alpha * log_prob - q)
    return loss, (log_prob, {"actor_loss": loss, "entropy": -jnp.mean(log_prob)})


def alpha_loss(log_alpha, args, log_prob, target_entropy):
    loss = jnp.exp(log_alpha) * jnp.mean(-log_prob - target_entropy)
    return loss, {"alpha_loss": loss, "alpha": jnp.exp(log_alpha)}


def update_sac(args, agent, batch, reward, key):
    """One step of critics, actor and alpha, in this order; then the target critics follow."""
    key_next, key_actor = jax.random.split(key)
    alpha, action_size = jnp.exp(agent.log_alpha.params), batch.action.shape[-1]
    next_action, next_log_prob = sample_action(agent.actor.params, args, key_next, batch.next_obs, action_size)
    next_q = jnp.min(q_values(agent.target_critic, args, batch.next_obs, next_action), axis=0)
    next_value = next_q - alpha * next_log_prob
    critic, critic_metrics = gradient_update(critic_loss, agent.critic, args, batch, reward, next_value)
    actor_inputs = batch, critic.params, alpha, key_actor
    actor, (log_prob, actor_metrics) = gradient_update(actor_loss, agent.actor, args, *actor_inputs)
    log_alpha, alpha_metrics = gradient_update(alpha_loss, agent.log_alpha, args, log_prob, -0.5 * action_size)
    target_critic = optax.incremental_update(critic.params, agent.target_critic, args.target_rate)
    mean = weighted_mean(reward, batch.has_next)
    metrics = {"reward_mean": mean, "reward_std": jnp.sqrt(weighted_mean((reward - mean) ** 2, batch.has_next))}
    return Agent(actor, critic, target_critic, log_alpha), metrics | critic_metrics | actor_metrics | alpha_metrics


# ----------------------------------------------------------------------------------------------------- coverage
def bin_index(env, obs):
    """Flat index of the bin that each state (..., state_size) is in; one past the last bin if outside the grid."""
    index = jnp.floor((obs[..., : env.position_size] - env.low) / BIN)
    inside = jnp.all((index >= 0) & (index < np.array(env.grid)), axis=-1)
    strides = np.cumprod((1, *env.grid[:0:-1]))[::-1]
    return jnp.where(inside, jnp.sum(index.astype(jnp.int32) * strides, axis=-1), np.prod(env.grid))


def replay_entropy(env, replay):
    """Entropy (nats) of the visited bins in the replay: when it falls, the agents gather in one place."""
    written = jnp.arange(len(replay.obs))[:, None] < replay.time
    counts = jnp.zeros(np.prod(env.grid) + 1, jnp.int32).at[bin_index(env, replay.obs)].add(written)
    p = counts / jnp.sum(counts)
    return -jnp.sum(p * jnp.log(jnp.maximum(p, 1e-20)))


# ----------------------------------------------------------------------------------------------------- training
@flax.struct.dataclass
class TrainState:
    key: jax.Array
    iteration: jax.Array
    env: EnvState  # (N, ...)
    episode_step: jax.Array  # (N,)
    visited: jax.Array  # (bins,) bool
    outside: jax.Array  # () visits outside the grid
    replay: Replay
    agent: Agent
    encoders: Model  # {"phi", "psi", "log_tau"}


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_state(args, env):
    """The whole state of a run: everything that a checkpoint holds."""
    key, key_env, key_agent, key_phi, key_psi = jax.random.split(jax.random.PRNGKey(args.seed), 5)
    env_state = jax.vmap(env.reset)(jax.random.split(key_env, args.num_envs))
    encoder, pair = MLP(args.encoder_width, args.representation_size), jnp.zeros(env.state_size + env.action_size)
    future = jnp.zeros(env.state_size if args.future_state == "full" else env.position_size)
    encoders = {"phi": encoder.init(key_phi, pair), "psi": encoder.init(key_psi, future), "log_tau": jnp.zeros(())}
    return TrainState(
        key=key, iteration=jnp.int32(0), env=env_state, episode_step=jnp.zeros(args.num_envs, jnp.int32),
        visited=jnp.zeros(np.prod(env.grid), bool), outside=jnp.int32(0), replay=init_replay(args, env),
        agent=init_agent(args, env, key_agent), encoders=init_model(args, encoders),
    )  # fmt: skip


def step_envs(args, env, starts, now, episode_step, action):
    """A step in every environment; an episode that ends goes on from its place in starts. Returns what to go on with,
    (state, episode_step), and what happened: (terminated, truncated, bin of the place before a reset, frame)."""
    with jax.default_matmul_precision("highest"):  # no TF32 in the physics
        after = jax.vmap(env.step)(now, action)
    terminated = after.terminated | ~jnp.all(jnp.isfinite(after.obs), axis=-1)  # physics that blew up ends too
    truncated = (episode_step + 1 >= args.episode_length) & ~terminated
    done = terminated | truncated
    restart = lambda start, go_on: jnp.where(done.reshape(-1, *[1] * (go_on.ndim - 1)), start, go_on)
    go_on = jax.tree.map(restart, starts, after), jnp.where(done, 0, episode_step + 1)
    return go_on, (terminated, truncated, bin_index(env, after.obs), env.frame(after.physics))


def collect(args, env, state, key):
    """`unroll_length` steps in every environment, into the replay and the coverage grid. The start states of new
    episodes are drawn once an iteration."""
    key_start, key_actions = jax.random.split(key)
    starts = jax.vmap(env.reset)(jax.random.split(key_start, args.num_envs))

    def step(carry, key):
        obs = carry[0].obs
        action, _ = sample_action(state.agent.actor.params, args, key, obs, env.action_size)
        carry, (terminated, truncated, bins, frame) = step_envs(args, env, starts, *carry, action)
        return carry, ((obs, action, terminated, truncated), bins, frame)

    keys = jax.random.split(key_actions, args.unroll_length)
    (env_state, episode_step), (rows, bins, frames) = jax.lax.scan(step, (state.env, state.episode_step), keys)
    visited = state.visited.at[bins].set(True)  # a bin past the last one, outside the grid, is dropped here ...
    outside = state.outside + jnp.sum(bins == len(visited))  # ... and counted here
    state = state.replace(env=env_state, episode_step=episode_step, visited=visited, outside=outside)
    return state.replace(replay=replay_insert(state.replay, *rows)), frames


def update(args, env, replay, ends, agent, encoders, key):
    """One gradient step of everything: the reward comes from the encoders as they are before the step."""
    key_batch, key_future, key_sac = jax.random.split(key, 3)
    batch = sample_batch(key_batch, args, replay)
    future = replay_futures(key_future, args, replay, ends, batch)
    encoders, (reward, metrics) = gradient_update(contrastive_loss, encoders, args, env.position_size, batch, future)
    agent, sac_metrics = update_sac(args, agent, batch, reward, key_sac)
    return (agent, encoders), metrics | sac_metrics


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_iteration(args, env, state):
    """Collect, then learn once there is enough in the replay: all on the device, compiled once in a run."""
    key, key_collect, key_learn = jax.random.split(state.key, 3)
    state, frames = collect(args, env, state.replace(key=key, iteration=state.iteration + 1), key_collect)
    models, keys = (state.agent, state.encoders), jax.random.split(key_learn, args.gradient_steps)

    def learn(models):
        ends = trajectory_ends(state.replay)
        step = lambda models, key: update(args, env, state.replay, ends, *models, key)
        models, metrics = jax.lax.scan(step, models, keys)
        return models, jax.tree.map(jnp.mean, metrics)

    wait = lambda models: (models, jax.tree.map(lambda _: -jnp.inf, jax.eval_shape(learn, models)[1]))  # no values yet
    (agent, encoders), metrics = jax.lax.cond(state.replay.time >= args.learning_starts, learn, wait, models)
    norm = optax.global_norm((encoders.params, agent.actor.params, agent.critic.params))
    entropy, coverage = replay_entropy(env, state.replay), jnp.sum(state.visited)
    metrics |= {"coverage": coverage, "outside": state.outside, "replay_entropy": entropy, "parameter_norm": norm}
    return state.replace(agent=agent, encoders=encoders), metrics, frames


# ------------------------------------------------------------------------------- logging, pictures, checkpoint
METRICS = """iteration steps seconds steps_per_second coverage outside replay_entropy contrastive_loss accuracy
    logits_positive logits_negative logsumexp tau reward_mean reward_std phi_variance psi_variance critic_loss q_target
    actor_loss entropy alpha_loss alpha parameter_norm""".split()  # the columns of metrics.csv


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


@functools.partial(jax.jit, static_argnums=(0, 1))
def reward_map(args, env, state):
    """(x, y) mean reward of reaching the places of 2^16 states of the replay, from one start and action 0."""
    key_t, key_env = jax.random.split(state.key)
    t = jax.random.randint(key_t, (2**16,), 0, jnp.minimum(state.replay.time, args.replay_size))
    states = state.replay.obs[t, jax.random.randint(key_env, (2**16,), 0, args.num_envs)]
    first = env.reset(jax.random.PRNGKey(args.seed)).obs[None], jnp.zeros((1, env.action_size))
    reward = -l1_similarity(*encode(state.encoders.params, args, env.position_size, *first, states))[0]
    sums = jnp.zeros((2, np.prod(env.grid))).at[:, bin_index(env, states)]
    total, count = sums.add(jnp.stack([reward, jnp.ones_like(reward)])).reshape(2, *env.grid[:2], -1).sum(axis=-1)
    return total / count  # nan where nobody was


def save_reward_maps(env, folder, maps):
    """reward_map.png and .npz: {steps: (x, y) reward}."""
    from matplotlib.figure import Figure

    write_atomically(folder / "reward_map.npz", lambda file: np.savez(file, **maps))
    figure = Figure((4.5 * len(maps), 4), layout="constrained")
    for axes, (steps, values) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items()):
        figure.colorbar(draw_places(axes, env, f"{int(steps):,} steps", values), ax=axes, shrink=0.7)
    figure.suptitle("Reward of reaching the places in the replay, from one start and action 0")
    figure.savefig(folder / "reward_map.png", dpi=80)


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


def check_args(args):
    check_numbers(args)
    if args.batch_size < 2:
        fail(f"--batch-size {args.batch_size}: it must be at least 2")
    if args.gradient_steps < 1:
        fail(f"--multiplier {args.multiplier}: it leaves no gradient step for an iteration")
    if not 2 <= max(args.unroll_length, args.learning_starts) < args.replay_size:
        fail(f"--replay-size {args.replay_size}: it must be above --unroll-length and --learning-starts")


def finish(env, folder, row):
    """The last lines of a run, and what main returns."""
    pictures = ", ".join(sorted(path.name for path in folder.iterdir() if path.suffix in (".png", ".html")))
    of_bins = f" of {env.bins:,}" if env.bins else ""
    print(f"coverage {row['coverage']:,.0f}{of_bins} bins after {row['steps']:,} steps in {clock(row['seconds'])}")
    print(f"pictures {pictures}\nfolder   {folder}")
    return row | {"folder": str(folder)}


def main(args):
    """A loop around train_iteration. Returns the last row of metrics, with the run's folder."""
    check_args(args)
    env, steps = make_env(args.env), args.num_envs * args.unroll_length
    shapes = jax.eval_shape(lambda: init_state(args, env))
    models = shapes.encoders.params, shapes.agent.actor.params, shapes.agent.critic.params
    flops = 6 * sum(x.size for x in jax.tree.leaves(models)) * args.batch_size * args.gradient_steps
    replay = f"replay buffer {sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.replay)) / 1e6:,.0f} MB"
    folder, state, seconds = start_run(args, lambda: init_state(args, env), replay, flops)
    maps = dict(np.load(folder / "reward_map.npz")) if (folder / "reward_map.npz").exists() else {}
    maps = {at: values for at, values in maps.items() if int(at) <= int(state.iteration) * steps}
    moments = {round(k * args.num_iterations / 5) for k in range(1, 6)}
    began, frames = time.time(), []
    iterate = train_iteration.lower(args, env, state).compile()
    print(f"compiled in {clock(time.time() - began)}", flush=True)
    for state, row, frame in iterations(args, folder, state, seconds, steps, iterate):
        frames = [*frames, jax.device_get(frame)][-(-(-args.episode_length // args.unroll_length)) :]
        if row["iteration"] in moments:
            maps[str(row["steps"])] = np.asarray(reward_map(args, env, state))
            save_reward_maps(env, folder, maps)
            save_coverage(args, env, folder, state.visited, row["steps"], frames)
    return finish(env, folder, row)


if __name__ == "__main__":
    try:
        main(parse_args())
    except OSError as error:  # a full disk, as a rule
        fail(f"{error}; the last good checkpoint, if there was one, is untouched", code=1)
    except KeyboardInterrupt:
        fail("stopped before the first iteration", code=130)
