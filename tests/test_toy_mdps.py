"""toy_mdps.py: occupancies and rewards by hand and by rollouts, planning by brute force, and what the studies found."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from helpers import ROOT, assert_one_line, refusal

import toy_mdps as toy
from toy_mdps import Args, Gathering, Mdp

# 0 -> 1 -> 2, and 2 holds
CHAIN = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 1.0]])[:, None]


def chance_mdp(steps, gamma=0.8, states=4, actions=2):
    random = np.random.default_rng(0)
    transition = random.dirichlet(np.ones(states), (states, actions))
    mdp = Mdp(transition, random.dirichlet(np.ones(states)), steps, gamma)
    return mdp, random.dirichlet(np.ones(actions), (steps, states))


# ----------------------------------------------------------------------------------------------------- occupancies
def test_occupancies_without_an_end_are_the_inverse():
    """(1 - gamma) (I - gamma P)^-1, by hand on a chain and by linear algebra elsewhere: 300 steps are endless."""
    chain = Mdp(CHAIN, np.eye(3)[0], 300, 0.5)
    by_hand = [[0.5, 0.25, 0.25], [0, 0.5, 0.5], [0, 0, 1]]
    np.testing.assert_allclose(toy.future_distribution(chain, toy.even_policy(chain), 0)[0, :, 0], by_hand, atol=1e-12)
    np.testing.assert_allclose(0.5 * np.linalg.inv(np.eye(3) - 0.5 * CHAIN[:, 0]), by_hand)

    mdp, policy = chance_mdp(300)
    policy[:] = policy[0]
    under_policy = np.einsum("sa,saf->sf", policy[0], mdp.transition)
    inverse = 0.2 * np.linalg.inv(np.eye(4) - 0.8 * under_policy)
    np.testing.assert_allclose(toy.future_distribution(mdp, policy, 1)[0], mdp.transition @ inverse, atol=1e-12)
    counts_itself = 0.2 * np.eye(4)[:, None] + 0.8 * mdp.transition @ inverse
    np.testing.assert_allclose(toy.future_distribution(mdp, policy, 0)[0], counts_itself, atol=1e-12)


def test_no_future_lies_behind_the_last_step():
    """Two steps on the chain, gamma 0.5: distances 1 and 2 with weights 1 and 1/2 from step 0, only 1 from step 1."""
    chain = Mdp(CHAIN, np.eye(3)[0], 2, 0.5)
    futures = toy.future_distribution(chain, toy.even_policy(chain), 1)
    np.testing.assert_allclose(futures[0, 0, 0], [0, 2 / 3, 1 / 3])
    np.testing.assert_allclose(futures[1, 1, 0], [0, 0, 1])
    joint = toy.joint_occupancy(chain, toy.even_policy(chain))[:, 0]
    np.testing.assert_allclose(joint, [[0, 1 / 3, 1 / 6], [0, 0, 1 / 2], [0, 0, 0]])
    itself = toy.joint_occupancy(chain, toy.even_policy(chain), offset=0)[:, 0]
    np.testing.assert_allclose(itself, [[2 / 7, 1 / 7, 1 / 14], [0, 1 / 3, 1 / 6], [0, 0, 0]])
    np.testing.assert_allclose(toy.geometric_weights(chain, 1), [[0, 2 / 3, 1 / 3], [0, 0, 1]])
    np.testing.assert_allclose(toy.geometric_weights(chain, 0), [[4 / 7, 2 / 7, 1 / 7], [0, 2 / 3, 1 / 3]])


@pytest.mark.parametrize("offset", [0, 1])
def test_occupancies_are_those_of_rollouts(offset):
    """One step and one future of it from each of 60,000 episodes: chi-square over all (s, a, s_f). The policy differs
    from step to step."""
    mdp, policy = chance_mdp(steps=5)
    random = np.random.default_rng(1)
    number = 60_000

    def draw(probabilities):
        return (random.random((number, 1)) > probabilities.cumsum(-1)[:, :-1]).sum(-1)

    states = [draw(np.tile(mdp.start, (number, 1)))]
    actions = []
    for t in range(mdp.steps):
        actions.append(draw(policy[t, states[-1]]))
        states.append(draw(mdp.transition[states[-1], actions[-1]]))
    episode = np.arange(number)
    t = random.integers(0, mdp.steps, number)
    distance = np.arange(mdp.steps + 1)
    allowed = (distance >= offset) & (distance <= mdp.steps - t[:, None])
    weight = allowed * mdp.gamma**distance
    future = t + draw(weight / weight.sum(-1, keepdims=True))
    found = np.zeros(mdp.transition.shape)
    place = np.array(states).T
    np.add.at(found, (place[episode, t], np.array(actions).T[episode, t], place[episode, future]), 1)
    expected = number * toy.joint_occupancy(mdp, policy, offset)
    freedom = expected.size - 1
    assert ((found - expected) ** 2 / expected).sum() < freedom + 4 * np.sqrt(2 * freedom)


# --------------------------------------------------------------------------------------------------------- rewards
def test_rewards_with_two_states_by_hand():
    joint = np.array([[[0.4, 0.1]], [[0.1, 0.4]]])  # p(s_f | s) is 0.8 or 0.2, p(s_f) is 1/2
    divergence = 0.8 * np.log(0.8 / 0.5) + 0.2 * np.log(0.2 / 0.5)
    np.testing.assert_allclose(toy.ctec_kl_reward(joint), -divergence * np.ones((2, 1)))
    np.testing.assert_allclose(toy.ctec_kl_reward(7 * joint), -divergence * np.ones((2, 1)))  # a buffer is a sum
    # the guess 1/2 counts as much as the data: (0.4 + 0.5 / 2) / (0.5 + 0.5) = 0.65
    halfway = 0.8 * np.log(0.5 / 0.65) + 0.2 * np.log(0.5 / 0.35)
    np.testing.assert_allclose(toy.ctec_kl_reward(joint, ignorance=0.5), halfway * np.ones((2, 1)))
    np.testing.assert_allclose(toy.ctec_kl_reward(joint, ignorance=1e9), 0, atol=1e-8)

    np.testing.assert_allclose(toy.etd_distance(joint), [[0, np.log(4)], [np.log(4), 0]])
    rewards = toy.etd_episode_rewards(toy.etd_distance(joint), np.array([0, 1, 1, 0]))
    np.testing.assert_allclose(rewards, [np.log(4), 0, 0])


def test_rewards_where_the_buffer_has_nothing():
    joint = np.zeros((3, 2, 3))
    joint[0, 0] = (0.5, 0, 0.5)  # state 1 never, state 2 only as a last one
    np.testing.assert_allclose(toy.ctec_kl_reward(joint), np.zeros((3, 2)))
    distance = toy.etd_distance(joint)
    np.testing.assert_allclose(distance[[0, 0, 2], [0, 2, 2]], [0, np.log(2), 0])


def test_an_episode_is_compared_with_all_that_came_before():
    random = np.random.default_rng(2)
    distance = random.normal(size=(5, 5))
    states = random.integers(0, 5, 9)
    by_loop = [min(distance[states[k], states[t]] for k in range(t)) for t in range(1, 9)]
    np.testing.assert_array_equal(toy.etd_episode_rewards(distance, states), by_loop)


# -------------------------------------------------------------------------------------------------------- policies
def test_planning_for_etd_in_a_tree_is_planning_over_histories():
    """The best return when the reward sees the whole history, by enumeration, for distances of any kind."""
    mdp = dataclasses.replace(toy.make_tree(2), steps=4)
    distance = np.random.default_rng(3).normal(size=(7, 7))

    def best(history):
        if len(history) > mdp.steps:
            return 0.0
        worth = []
        for action in range(mdp.num_actions):
            total = 0.0
            for after in np.flatnonzero(mdp.transition[history[-1], action]):
                reward = min(distance[k, after] for k in history)
                total += mdp.transition[history[-1], action, after] * (reward + mdp.gamma * best((*history, after)))
            worth.append(total)
        return max(worth)

    values = toy.plan(mdp, toy.etd_tree_reward(mdp, distance))
    np.testing.assert_allclose(values[0, 0].max(), best((0,)))


def test_soft_policy():
    """The last step by hand; and no other policy has more reward and entropy."""
    mdp, _ = chance_mdp(steps=3)
    random = np.random.default_rng(4)
    reward = random.normal(size=(4, 2))
    policy = toy.soft_policy(mdp, reward, 0.5)
    weight = np.exp(reward / 0.5)
    np.testing.assert_allclose(policy[-1], weight / weight.sum(-1, keepdims=True))

    def objective(policy):
        states = toy.state_distribution(mdp, policy)[:-1]
        gain = (policy * (reward - 0.5 * np.log(policy))).sum(-1)
        return (mdp.gamma ** np.arange(mdp.steps) * (states * gain).sum(-1)).sum()

    for _ in range(20):
        other = policy * random.uniform(0.999, 1.001, policy.shape)
        assert objective(other / other.sum(-1, keepdims=True)) < objective(policy)
    np.testing.assert_allclose(toy.soft_policy(mdp, reward, 1e-4), toy.greedy_policy(toy.plan(mdp, reward)), atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- worlds
def test_worlds_by_hand():
    branches = toy.make_branches(2).transition
    np.testing.assert_allclose(branches[0], np.eye(5)[[1, 3]])
    np.testing.assert_allclose(branches[1:3, 0], np.eye(5)[[2, 2]])
    np.testing.assert_allclose(branches[3:, 0, 3:], [[0.9, 0.1], [0, 1]])
    tree = toy.make_tree(2).transition
    third = 0.1 / 3
    np.testing.assert_allclose(tree[0, 0, :3], [third, 0.9 + third, third])
    np.testing.assert_allclose(tree[1, 2, [1, 3, 4]], [1 - 0.2 * third, 0.1 * third, 0.1 * third])
    np.testing.assert_allclose(tree[2, 1, [2, 5, 6]], [0.9 + 0.1 * third, 0.1 * third, 0.09 + 0.1 * third])
    np.testing.assert_allclose(tree[3:, :, 3:], np.eye(4)[:, None].repeat(3, 1))
    np.testing.assert_allclose(toy.make_tree(2, lopsided=True).transition[2, :, 2], 1)

    args = Args(world_size=3, slip=0.2, grid_stay=True)
    room = toy.make_world(args, "room").transition
    np.testing.assert_allclose(room[0, 0, [0, 1, 3]], [0.9, 0.05, 0.05])  # up, against the wall
    np.testing.assert_allclose(room[4, 3, [1, 3, 4, 5, 7]], [0.05, 0.05, 0, 0.85, 0.05])
    np.testing.assert_allclose(room[4, 4, 4], 0.8)
    torus = toy.make_world(args, "torus").transition
    np.testing.assert_allclose(torus[0, 0, [6, 3, 2, 1]], [0.85, 0.05, 0.05, 0.05])
    np.testing.assert_allclose(torus.sum(0), 1)  # permutes the states: nothing contracts
    assert room.sum(0).max() > 1.5


# ------------------------------------------------------------------------------------------ what the studies found
def test_branches_as_found():
    """C-TeC left and ETD right from an even buffer, if a branch has two nodes or more; with one they are the same.
    C-TeC goes where the buffer went, ETD where it did not."""
    for offset in (0, 1):
        assert np.ptp(toy.branch_values(toy.make_branches(1), 0.5)[f"C-TeC, offset {offset}"]) < 1e-9
    for nodes in (2, 3, 4, 6, 10):
        mdp = toy.make_branches(nodes)
        for method, (left, right) in toy.branch_values(mdp, 0.5).items():
            assert left < right if method == "ETD" else left > right
        for method, (left, right) in toy.branch_values(mdp, 0.05).items():
            assert left > right if method == "ETD" else left < right
    two = toy.make_branches(2)
    assert toy.tipping_share(two, "C-TeC, offset 1") == pytest.approx(0.458, abs=0.001)
    assert toy.tipping_share(two, "ETD") == pytest.approx(0.325, abs=0.001)


@pytest.mark.parametrize("tree", toy.TREES)
def test_tree_as_found(tree):
    """C-TeC stays at the root, not at node 1, unless the buffer went left; ETD goes down as fast as can be."""
    mdp = toy.make_tree(*toy.TREES[tree])
    for offset in (0, 1):
        for buffer in ("even", "mostly down", "mostly stay"):
            root, _, deeper = toy.tree_levels(mdp, toy.tree_plan(mdp, buffer, "C-TeC", offset)[1])
            assert root > 0.6 and deeper < 0.02
        assert toy.tree_plan(mdp, "mostly left", "C-TeC", offset)[1][1] > 0.9
    deepest = toy.deepest_share(mdp)
    assert 0.32 < deepest < 0.34
    for buffer in ("even", "mostly down", "mostly stay"):
        found = toy.tree_levels(mdp, toy.tree_plan(mdp, buffer, "ETD", 0)[1])[2]
        assert found == pytest.approx(deepest)


def test_q_learning():
    """On the branches: with the even buffer as by dynamic programming; with its own, C-TeC goes left all the same and
    ETD goes both ways. Also the visits, exactly: how much of the time the random actions spend on the other branch."""
    learned = toy.q_learning(Args(episodes=4000, learners=4), toy.make_branches(2))
    left = {learner: visits[:, 1:3].sum(-1).mean() for learner, (_, visits) in learned.items()}
    for learner, share in left.items():
        if learner.method == "C-TeC":
            assert share == pytest.approx(0.95, abs=0.03)  # epsilon / 2 goes right
        elif not learner.own_buffer:
            assert share == pytest.approx(0.05, abs=0.03)
        else:
            assert 0.1 < share < 0.8
    for _, visits in learned.values():
        np.testing.assert_allclose(visits.sum(-1), 1, atol=1e-5)


@pytest.fixture(scope="module")
def gathered():
    args = Args(rounds=40)
    return {setting: toy.gather(args, setting) for setting in toy.SETTINGS}


def test_agents_gather_if_the_critic_is_exact(gathered):
    """In both worlds and with both buffers: in the middle of the room, in its corner if they went there first."""
    for world in ("room", "torus"):
        for buffer in ("short", "growing"):
            visits = gathered[Gathering(world, buffer)]
            assert toy.effective_cells(visits[0]) > 48.9
            assert toy.effective_cells(visits[-1]) < 8
            assert np.abs(visits[-1] - visits[-2]).sum() / 2 < 0.01
    for buffer in ("short", "growing"):
        assert gathered[Gathering("room", buffer)][-1].argmax() == 24
        corner = gathered[Gathering("room", buffer, first="to the corner")][-1]
        assert corner.argmax() == 0 and corner[0] > 0.75
        # the same first policy only turns the torus, and no cell of it can be held
        turned = gathered[Gathering("torus", buffer, first="to the corner")]
        assert toy.effective_cells(turned[0]) > 48.9 and turned[-1].max() < 0.5


def test_agents_keep_moving_if_the_critic_forgets(gathered):
    for world in ("room", "torus"):
        for buffer, moves in (("short", True), ("growing", False)):
            visits = gathered[Gathering(world, buffer, critic="ignorant")]
            moved = np.abs(np.diff(visits[-10:], axis=0)).sum(-1).mean() / 2
            cells = toy.effective_cells(visits[-10:].mean(0))
            assert (moved > 0.3 and cells > 40) if moves else (moved < 0.01 and cells < 10)


def test_even_play_is_a_fixed_point_of_the_torus_and_not_of_the_room():
    for world, fixed in (("torus", True), ("room", False)):
        mdp = toy.make_world(Args(), world)
        reward = toy.ctec_kl_reward(toy.joint_occupancy(mdp, toy.even_policy(mdp)))
        assert (np.ptp(reward) < 1e-12) == fixed


def test_even_play_is_unstable_below_the_critical_temperature():
    args = Args(slip=0.5, rounds=30)
    critical = toy.critical_temperature(args)
    assert critical == pytest.approx(0.449, abs=0.001)
    for factor, gathers in ((0.9, True), (1.1, False)):
        deviation = []
        for visits in toy.gather(
            dataclasses.replace(args, entropy_weight=factor * critical), Gathering("torus", "short")
        ):
            deviation.append(np.abs(visits - 1 / 49).max())
        # late enough for the fastest deviation to lead, early enough for it to be small
        assert deviation[20] / deviation[19] == pytest.approx(1 / factor, rel=0.03)
        assert (deviation[-1] > deviation[10]) == gathers


# ------------------------------------------------------------------------------------------------------------- run
def test_a_run_from_end_to_end(tmp_path, capsys):
    args = toy.parse_args(
        [f"--run-dir={tmp_path}", "--episodes=100", "--learners=2", "--rounds=2", "--world-size=3", "--grid-steps=5"]
    )
    result = toy.main(args)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("all__toy_mdps__1__") and str(folder) == result["folder"]
    assert {path.name for path in folder.iterdir()} == {
        "args.json", "metrics.csv", "branches.png", "tree.png", "gathering.png", "gathering_curves.png"
    }  # fmt: skip
    assert json.loads((folder / "args.json").read_text())["episodes"] == 100
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == "study case method round metric value".split()
    assert {row["study"] for row in rows} == set(toy.STUDIES)
    assert all(np.isfinite(float(row["value"])) for row in rows)
    page = (ROOT / "docs" / "toy_mdps.md").read_text()
    assert not [row["metric"] for row in rows if f"`{row['metric']}`" not in page]
    printed = capsys.readouterr()
    assert "tips at" in printed.out and printed.err == ""


@pytest.mark.parametrize(
    "flag, word",
    [("--epsilon=2", "at most 1"), ("--slip=1.5", "at most 1"), ("--step-size=0", "above 0"), ("--rounds=0", "above 0"),
     ("--episodes=-1", "above 0"), ("--entropy-weight=nan", "above 0"), ("--entropy-weight=inf", "finite"),
     ("--world-size=1", "at least 2"), ("--seed=-1", "at least 0")],
)  # fmt: skip
def test_an_out_of_range_argument_is_one_line(capsys, flag, word):
    code, message = refusal(capsys, toy, [flag])
    assert code == 2
    assert_one_line(message, flag.split("=")[0], word)


def test_no_slip_and_no_random_actions_are_fine():
    toy.check_args(Args(slip=0.0, epsilon=0.0, seed=0))
    toy.check_args(Args(slip=1.0, epsilon=1.0, step_size=1.0, world_size=2))
