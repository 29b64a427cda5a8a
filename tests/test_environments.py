"""The environments follow the recorded trajectories in tests/data, and their cheap walls are those of the maze."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from brax import contact, kinematics

from ctec_sac_brax import ENVS, make_env


def recorded(name):
    return np.load(Path(__file__).parent / "data" / f"{name}.npz")


def rollout(env, q, qd, actions, fusion_emitters=False):
    """obs, q, places of the links and terminated after each action, (episodes, steps, ...), and obs0 before the
    first."""

    def step(state, action):
        state = env.step(state, action)
        physics = state.physics
        is_mjx = hasattr(physics, "qpos")
        q = physics.qpos if is_mjx else physics.q
        x_pos = physics.xpos if is_mjx else physics.x.pos
        return state, {"obs": state.obs, "q": q, "x_pos": x_pos, "done": state.terminated}

    @jax.jit
    @jax.vmap
    def run(q, qd, actions):
        first = env.from_q(q, qd)
        return {"obs0": first.obs} | jax.lax.scan(step, first, actions)[1]

    inputs = [jnp.asarray(x, jnp.float32) for x in (q, qd, actions)]
    compiled = run.lower(*inputs).compile({"xla_cpu_use_fusion_emitters": fusion_emitters})
    return {name: np.asarray(x) for name, x in compiled(*inputs).items()}


def assert_follows(name, tolerances, steps=(40,) * 6):
    """Every episode stays within the tolerances of {(array, slice of its last axis): tolerance}. A contact that is met
    or just missed can hang on the last bit, so an episode may be followed with either of two roundings (compilers)."""
    data = recorded(name)
    left = dict(enumerate(steps))
    for fusion_emitters in (False, True):
        ours = rollout(make_env(name), data["q0"], data["qd0"], data["actions"], fusion_emitters)
        np.testing.assert_allclose(ours["obs0"], data["obs0"], atol=1e-4)
        for episode, length in list(left.items()):
            part = np.s_[episode, :length]
            errors = {}
            for array, where in tolerances:
                difference = ours[array][part] - data[array][part]
                errors[array, where] = np.abs(difference[..., slice(*where)]).max()
            if all(errors[key] < tolerance for key, tolerance in tolerances.items()):
                np.testing.assert_array_equal(ours["done"][part], data["done"][part] > 0)
                del left[episode]
        if not left:
            return ours
    raise AssertionError(f"{name}: episodes {list(left)} are not followed; the last has errors {errors}")


@pytest.mark.parametrize("name", ["ant_u_maze", "ant_large_maze", "ant_hardest_maze"])
def test_ant_follows_the_recordings(name):
    assert (recorded(name)["contact_min_wall"][3:] < 0).any(axis=1).all()  # walls are met
    assert_follows(name, {("q", (0, 15)): 1e-3, ("obs", (0, 15)): 1e-3, ("obs", (15, 29)): 1e-2})


def test_humanoid_follows_the_recordings():
    assert (recorded("humanoid_u_maze")["contact_min_wall"][3:] < 0).any(axis=1).all()
    tolerances = {
        ("x_pos", (0, 3)): 2e-3,
        ("obs", (0, 26)): 2e-3,  # q
        ("obs", (26, 51)): 5e-2,  # qd
        ("obs", (51, 171)): 2e-3,  # inertias
        ("obs", (171, 243)): 5e-2,  # velocities
        ("obs", (243, 268)): 1e-3,  # torques
    }
    assert_follows("humanoid_u_maze", tolerances)


def test_arm_follows_the_recordings():
    """To the last digits until the fingers touch the cube. Then rounding grows, by how much depends on the processor
    (2.6 and 3.1 cm were seen); but in episodes 3 and 5 the hand carries the cube 16 and 7 cm away, and ours stays
    beside it: a cube that is left behind misses by all of that."""
    tolerances = {("q", (0, 16)): 1e-3, ("obs", (0, 18)): 1e-3}
    ours = assert_follows("arm_binpick_hard", tolerances, steps=(40, 40, 40, 22, 13, 29))["obs"][[3, 5], :, :3]
    cube = recorded("arm_binpick_hard")["obs"][[3, 5], :, :3]
    assert (np.linalg.norm(cube[:, -1] - cube[:, 10], axis=-1) > 0.07).all()
    assert np.linalg.norm(ours - cube, axis=-1).max() < 0.05


BRAX_MAZES = [name for name in ENVS if name.startswith(("ant", "humanoid"))]


def with_every_wall(env, name):
    """The same robot among all walls of the maze, which stand still, and without culling."""
    scene = functools.cached_property(lambda self: self.build(following=False))
    whole = {"broad_phase": {}, "scene": scene, "with_walls": lambda self, x: self.scene}
    kind = type("Full", (type(env),), whole)
    return kind(name.split("_")[1])


def places_beside_walls(env, count, rng):
    """(count, 2) positions up to a quarter of a cell from a wall: along it, in corners, around its ends, and outside
    of the maze."""
    places = []
    while len(places) < count:
        offset = rng.uniform(-0.75, 0.75, 2)
        if len(places) % 2:  # every other one near a corner of the wall
            offset = np.sign(offset) * rng.uniform(0.25, 0.75, 2)
        place = rng.choice(env.walls) + offset * env.cell
        if np.abs(place - env.walls).max(axis=1).min() > env.cell / 2:  # in no wall
            places.append(place)
    return np.array(places)


def random_poses(env, places, rng):
    """(n, q size) with any heading, a slight tilt, and joints anywhere in the inner 70% of their ranges."""
    q = np.tile(np.asarray(env.sys.init_q), (len(places), 1))
    q[:, :2] = places
    q[:, 2] = rng.uniform(np.mean(env.healthy), env.healthy[1], len(q))
    heading = rng.uniform(0, 2 * np.pi, len(q))
    q[:, 3] = np.cos(heading / 2)
    q[:, 6] = np.sin(heading / 2)
    q[:, 3:7] += rng.normal(0, 0.05, (len(q), 4))
    q[:, 3:7] /= np.linalg.norm(q[:, 3:7], axis=1, keepdims=True)
    low, high = (np.asarray(limit)[6:][: env.action_size] for limit in env.sys.dof.limit)
    joints = (low + high) / 2 + 0.35 * rng.uniform(-1, 1, (len(q), env.action_size)) * (high - low)
    q[:, 7 : 7 + env.action_size] = joints
    return q


def contacts(env, q):
    """For each pose, the sorted depths of its contacts, and with how many walls."""

    def find(q):
        x, _ = kinematics.forward(env.sys, q, jnp.zeros(env.sys.qd_size()))
        system = env.with_walls(x)
        found = contact.get(system, x)
        wall = (system.geom_bodyid == 0) & (system.geom_type == mujoco.mjtGeom.mjGEOM_BOX)
        place = jnp.sum(system.geom_pos[found.geom2] * np.array([1.0, 1000.0, 0.0]), axis=-1)  # another for each wall
        return found.dist, jnp.where((found.dist < 0) & jnp.asarray(wall)[found.geom2], place, jnp.nan)

    dist, walls = jax.jit(lambda q: jax.lax.map(find, q, batch_size=50))(jnp.asarray(q, jnp.float32))
    depths = [np.sort(d[d < 0]) for d in np.asarray(dist)]
    return depths, np.array([len(np.unique(w[~np.isnan(w)])) for w in np.asarray(walls)])


@pytest.mark.parametrize("name", BRAX_MAZES)
def test_contacts_are_those_of_the_whole_maze(name):
    """Robots put beside walls, in corners and at wall ends. Poses deeper in a wall or the floor than the physics lets
    them get are left out."""
    rng = np.random.default_rng(0)
    env = make_env(name)
    q = random_poses(env, places_beside_walls(env, 1000, rng), rng)
    expected, walls = contacts(with_every_wall(env, name), q)
    ours, our_walls = contacts(env, q)
    possible = np.array([len(depths) == 0 or depths[0] > -0.1 for depths in expected])
    assert (walls[possible] == 1).sum() >= 50 and (walls[possible] >= 2).sum() >= 5
    np.testing.assert_array_equal(our_walls[possible], walls[possible])
    for i in np.flatnonzero(possible):
        deepest = expected[i][: env.broad_phase["contact_points"]]
        np.testing.assert_allclose(ours[i], deepest, atol=1e-4)


@pytest.mark.parametrize("name", ["ant_hardest_maze", "humanoid_large_maze"])
def test_thrown_robots_move_as_in_the_whole_maze(name):
    """Each step of their flight again, from the same state, among all walls of the maze."""
    rng = np.random.default_rng(0)
    env = make_env(name)
    throws, steps, speed = 32, 25, 4.0
    angle = rng.uniform(0, 2 * np.pi, throws)
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    q = np.tile(np.asarray(env.sys.init_q), (throws, 1))
    q[:, :2] = rng.choice(env.targets, throws) + 0.2 * env.cell * direction
    qd = np.zeros((throws, env.sys.qd_size()))
    qd[:, :2] = speed * direction
    actions = np.repeat(rng.uniform(-1, 1, (steps // 5, throws, env.action_size)), 5, axis=0)

    def step(state, action):
        after = jax.vmap(env.step)(state, action)
        return after, (state, after)

    @jax.jit
    def fly(q, qd, actions):
        return jax.lax.scan(step, jax.vmap(env.from_q)(q, qd), actions)[1]

    inputs = [jnp.asarray(x, jnp.float32) for x in (q, qd, actions)]
    before, after = fly(*inputs)
    travelled = np.sum((np.asarray(after.physics.x.pos)[-1, :, 0, :2] - q[:, :2]) * direction, axis=1)
    free = speed * steps * 10 * env.timestep
    assert (travelled < 0.8 * free).sum() >= throws / 2  # walls did stop them
    full = with_every_wall(env, name)
    again = jax.jit(lambda inputs: jax.lax.map(lambda x: jax.vmap(full.step)(*x), inputs))((before, inputs[2]))
    np.testing.assert_allclose(after.physics.x.pos, again.physics.x.pos, atol=1e-4)
    np.testing.assert_allclose(after.physics.xd.vel, again.physics.xd.vel, atol=1e-2)


@pytest.mark.parametrize("robot", ["ant", "humanoid"])
def test_a_larger_maze_has_no_more_geoms(robot):
    envs = [make_env(name) for name in BRAX_MAZES if name.startswith(robot)]
    assert len({len(env.sys.geom_type) for env in envs}) == 1
    for env in envs:  # the viewer shows them all
        assert (env.build(following=False).geom_type == mujoco.mjtGeom.mjGEOM_BOX).sum() == len(env.walls)


@pytest.mark.parametrize("name", ENVS)
def test_reset_and_step_agree(name):
    """Shapes, dtypes and weak types, so that a jitted loop compiles once; and the attributes fit the observation."""
    env = make_env(name)
    types = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)
    first = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    assert types(first) == types(jax.eval_shape(env.step, first, jnp.zeros(env.action_size)))
    sizes = {"point": (4, 2, 2), "ant": (29, 8, 2), "humanoid": (268, 17, 3), "arm": (18, 5, 3)}
    assert (first.obs.shape[0], env.action_size, env.position_size) == sizes[name.split("_")[0]]
    assert env.state_size == first.obs.shape[0]
    assert (env.free_bins is None) == (env.position_size == 3)


@pytest.mark.parametrize("name,spread", [("ant_u_maze", 0.0), ("humanoid_u_maze", 0.0), ("arm_binpick_hard", 0.15)])
def test_resets_are_random_and_on_the_start_cell(name, spread):
    env = make_env(name)
    obs = np.asarray(jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), 64)).obs)
    assert np.abs(obs[:, :2] - env.start).max() <= spread
    assert len(np.unique(obs, axis=0)) > 1
    if name == "humanoid_u_maze":
        assert len(np.unique(obs[:, 24:26], axis=0)) == 6  # the goal, on any free cell
