"""C-TeC and ETD on worlds so small that everything can be computed: no networks, no estimates.

C-TeC (Mohamed et al., "Temporal Representations for Exploration", ICLR 2026) pays for futures that are likely overall
but unlikely from here; ETD (Jiang et al. 2025) pays for states that are far from all earlier states of the episode.
With p(s_f | s, a), the distribution of a future at a truncated geometric distance in the buffer's episodes,

    C-TeC:  r(s, a) = E_{s_f | s, a}[log p(s_f) - log p(s_f | s, a)] = -KL(p(s_f | s, a) || p(s_f))
    ETD:    r_t = min_{k < t} log p(s_t | s_t) - log p(s_t | s_k)

Three studies: two of the paper's appendix, and one that it does not have, on when agents collapse to one region.

    branches    a root with a fast left and a sticky right branch: which one does each reward choose, and why
    tree        a tree whose moves at depth 1 mostly fail: does the agent stay near the root, or go down
    gathering   policy -> buffer -> reward -> policy on a small grid: when do agents collapse, when do they spread

One iteration:

    occupancies of the policy's episodes, exactly                                     # joint_occupancy
    buffer <- the same, alone (short) or added to all earlier ones (growing)
    reward <- -KL(p(s_f | s, a) || p(s_f)) of the buffer                              # ctec_kl_reward
    policy <- the best one for this reward, with an entropy bonus                     # soft_policy

    python toy_mdps.py                     # all three, under a minute of CPU time
    python toy_mdps.py --study tree        # one of them

Metrics and results: docs/toy_mdps.md
"""
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["jax==0.10.1", "numpy==2.4.6", "tyro==1.0.16", "matplotlib==3.11.2"]
# ///

import collections
import csv
import dataclasses
import functools
import io
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro


# --------------------------------------------------------------------------------------------------- arguments
@dataclasses.dataclass(frozen=True)
class Args:
    # what to compute; the first two are the paper's Appendix, "Didactic toy example" and "Forward-looking ..."
    study: Literal["all", "branches", "tree", "gathering"] = "all"
    seed: int = 1  # seed of everything random
    run_dir: str = "runs"  # where the folder of the run is made

    episodes: int = 20_000  # episodes of tabular Q-learning (paper, tree)
    learners: int = 8  # independent Q-learners of each kind; the paper shows one
    step_size: float = 0.1  # of Q-learning
    epsilon: float = 0.1  # probability that a Q-learner takes a random action

    rounds: int = 60  # gathering: how often policy -> buffer -> reward -> policy is repeated
    world_size: int = 7  # gathering: side of the grid, in cells
    grid_steps: int = 40  # gathering: steps of an episode
    grid_stay: bool = False  # gathering: a fifth action, to stay, beside the four moves
    # gathering: where episodes start, in every cell equally often or in the upper left one
    grid_start: Literal["everywhere", "corner"] = "everywhere"
    slip: float = 0.1  # gathering: probability of a random move instead of the chosen one
    entropy_weight: float = 0.05  # gathering: weight of the policy's entropy against the reward, like SAC's alpha
    short_buffer: int = 1  # gathering: how many of the latest rounds the short buffer holds
    # gathering: how much data, in rounds, a critic that starts from p(s_f | s, a) = p(s_f) counts that guess for
    ignorance: float = 0.01


# ------------------------------------------------------------ the method: occupancies, and two rewards of them
@dataclasses.dataclass(frozen=True, eq=False)
class Mdp:
    """A finite world with episodes of a fixed number of steps: states s_0 ... s_T, actions a_0 ... a_(T-1)."""

    transition: np.ndarray  # (S, A, S) p(s' | s, a)
    start: np.ndarray  # (S,) p(s_0)
    steps: int  # T
    gamma: float  # of the return and of the futures
    parent: np.ndarray | None = None  # (S,) if it is a tree; the root's is -1

    @property
    def num_states(self):
        return self.transition.shape[0]

    @property
    def num_actions(self):
        return self.transition.shape[1]


# A policy is an array (T, S, A): what is best may depend on the steps that remain.


def state_distribution(mdp, policy):
    """(T + 1, S) p(s_t)."""
    found = [mdp.start]
    for now in policy:
        found.append(np.einsum("s,sa,saf->f", found[-1], now, mdp.transition))
    return np.array(found)


def future_distribution(mdp, policy, offset):
    """(T, S, A, S) p(s_f | s_t, a_t), Eq. 1 within an episode: gamma^d p(s_(t+d) = s_f | s_t, a_t) summed over the
    distances d = offset ... T - t, and normalised. offset is 1, or 0 if a state counts as its own future."""
    here = np.eye(mdp.num_states)
    found = np.zeros((mdp.steps, *mdp.transition.shape))
    onwards = here  # (S, S) the same sum from s_(t+1) on, the distance 0 included; after the last step s_T alone
    for t in reversed(range(mdp.steps)):
        ahead = mdp.transition @ onwards  # (S, A, S) from d = 1 on
        found[t] = ahead if offset == 1 else here[:, None] + mdp.gamma * ahead
        onwards = here + mdp.gamma * np.einsum("sa,saf->sf", policy[t], ahead)
    return found / found.sum(axis=-1, keepdims=True)


def joint_occupancy(mdp, policy, offset=1):
    """(S, A, S) p((s, a), s_f): one of the T steps of an episode, each equally likely, and a future of it. The buffer
    of several policies is the sum of theirs."""
    steps = state_distribution(mdp, policy)[:-1, :, None] * policy / mdp.steps  # (T, S, A)
    return np.einsum("tsa,tsaf->saf", steps, future_distribution(mdp, policy, offset))


def ctec_kl_reward(joint, ignorance=0.0, xp=np):
    """(S, A) E_{s_f | s, a}[log p(s_f) - log q(s_f | s, a)] with the critic's idea q of the futures. By default it is
    perfect, q = p. With ignorance > 0, q is p(s_f) at first, and gives way to p(s_f | s, a) as data of (s, a) come in:
    q = (n p(s_f | s, a) + ignorance p(s_f)) / (n + ignorance), n the data of (s, a), in the unit of the joint.
    """
    pairs = joint.sum(-1, keepdims=True)  # (S, A, 1)
    marginal = joint.sum((0, 1)) / joint.sum()  # (S,)
    conditional = joint / xp.where(pairs > 0, pairs, 1)
    estimate = (joint + ignorance * marginal) / xp.where(pairs + ignorance > 0, pairs + ignorance, 1)
    seen = conditional > 0
    ratio = xp.log(xp.where(seen, marginal, 1)) - xp.log(xp.where(seen, estimate, 1))
    return (conditional * ratio).sum(-1)


def etd_distance(joint, xp=np):
    """(S, S) log p(s | s) - log p(s | k) in row k and column s. The joint must count a state as its own future (offset
    0): otherwise p(s | s) is 0 wherever one cannot come back to."""
    futures = joint.sum(1)  # (S, S)
    total = futures.sum(-1, keepdims=True)
    # a state that was only ever the last of an episode has only itself to come
    conditional = xp.where(total > 0, futures / xp.where(total > 0, total, 1), xp.eye(len(joint)))
    logs = xp.where(conditional > 0, xp.log(xp.where(conditional > 0, conditional, 1)), -xp.inf)
    return xp.diagonal(logs) - logs


def etd_episode_rewards(distance, states, xp=np):
    """(T,) for the arrival in s_1 ... s_T of an episode s_0 ... s_T."""
    between = distance[states[:, None], states[None]]  # (T + 1, T + 1) from s_k to s_t
    earlier = xp.tril(xp.ones(between.shape, bool), -1).T
    return xp.where(earlier, between, xp.inf).min(0)[1:]


def etd_tree_reward(mdp, distance):
    """(S, A) expected reward. ETD's reward depends on the episode's history, but in a tree without a way up the states
    before a node are its path from the root: whether it has just been reached is all that the last step adds."""
    reward = np.zeros((mdp.num_states, mdp.num_states))  # of the step from row to column
    for node in range(mdp.num_states):
        path = []
        above = mdp.parent[node]
        while above >= 0:
            path.append(above)
            above = mdp.parent[above]
        if path:
            reward[mdp.parent[node], node] = distance[path, node].min()
        reward[node, node] = distance[[*path, node], node].min()
    return np.einsum("saf,sf->sa", mdp.transition, reward)


# --------------------------------------------------------------------------- policies: planning and Q-learning
def even_policy(mdp):
    return np.full((mdp.steps, mdp.num_states, mdp.num_actions), 1 / mdp.num_actions)


def plan(mdp, reward):
    """(T, S, A) values of the best policy for a reward (S, A), by dynamic programming from the last step back."""
    values = np.zeros((mdp.steps, *reward.shape))
    best = np.zeros(mdp.num_states)
    for t in reversed(range(mdp.steps)):
        values[t] = reward + mdp.gamma * mdp.transition @ best
        best = values[t].max(-1)
    return values


def greedy_policy(values):
    """Ties are split evenly."""
    best = values >= values.max(-1, keepdims=True) - 1e-9
    return best / best.sum(-1, keepdims=True)


def soft_policy(mdp, reward, temperature):
    """The policy with the largest discounted sum of reward + temperature * entropy: soft value iteration."""
    policy = even_policy(mdp)
    best = np.zeros(mdp.num_states)
    for t in reversed(range(mdp.steps)):
        scaled = (reward + mdp.gamma * mdp.transition @ best) / temperature
        top = scaled.max(-1, keepdims=True)
        weight = np.exp(scaled - top)
        policy[t] = weight / weight.sum(-1, keepdims=True)
        best = temperature * (top[:, 0] + np.log(weight.sum(-1)))
    return policy


def geometric_weights(mdp, offset):
    """(T, T + 1) probability that the future of step t is s_j: as future_distribution, but of one episode."""
    distance = np.arange(mdp.steps + 1) - np.arange(mdp.steps)[:, None]
    weight = np.where(distance >= offset, mdp.gamma ** np.maximum(distance, 0.0), 0)
    return weight / weight.sum(-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Learner:
    """A kind of Q-learner."""

    method: Literal["C-TeC", "ETD"]
    own_buffer: bool  # reward of all its own episodes so far; if not: of the even policy's occupancies, exactly
    random_ties: bool  # between equal values: by chance; if not: the first action

    def __str__(self):
        buffer = "own buffer" if self.own_buffer else "even buffer"
        return f"{buffer}, ties {'random' if self.random_ties else 'first'}"


LEARNERS = [
    Learner(method, own_buffer, random_ties)
    for method in ("C-TeC", "ETD")
    for own_buffer, random_ties in ((False, True), (True, True), (True, False))
]
BLOCKS = 100  # into which the episodes of Q-learning are divided


def q_learner(args, mdp, etd, own_buffer, random_ties, key):
    """Tabular, epsilon-greedy Q-learning of values that do not depend on the time, from 0, in a
    world with one start state. Returns the values (S, A) and the share of steps that ended in each state, (BLOCKS, S).
    The three switches are arrays: all kinds of learners run in one call. States and actions are one-hot vectors."""
    shape = mdp.transition.shape
    even = jnp.where(etd, *(joint_occupancy(mdp, even_policy(mdp), offset) for offset in (0, 1)))
    weights = jnp.where(etd, *(geometric_weights(mdp, offset) for offset in (0, 1)))
    cumulative = jnp.cumsum(jnp.array(mdp.transition), axis=-1)[..., :-1]
    discount = jnp.where(jnp.arange(mdp.steps) < mdp.steps - 1, mdp.gamma, 0.0)  # nothing comes after the last step

    def episode(carry, chance):
        values, joint = carry

        def act(state, chance):
            explore, any_action, next_state, *tie = chance
            preference = state @ values + jnp.where(random_ties, 1e-5, 0.0) * jnp.array(tie)
            best = jnp.argmax(preference)
            random = jnp.floor(any_action * mdp.num_actions).astype(int)
            action = jax.nn.one_hot(jnp.where(explore < args.epsilon, random, best), mdp.num_actions)
            steps_up = jnp.einsum("s,a,saf->f", state, action, cumulative) <= next_state
            after = jax.nn.one_hot(jnp.sum(steps_up), mdp.num_states)
            return after, (after, action)

        def learn(values, step):
            state, action, reward, after, discount = step
            target = reward + discount * jnp.max(after @ values)
            return values + args.step_size * state[:, None] * action * (target - values), None

        first = jnp.array(mdp.start, jnp.float32)
        _, (afters, actions) = jax.lax.scan(act, first, chance)
        states = jnp.concatenate([first[None], afters])  # (T + 1, S)
        joint += jnp.einsum("ts,ta,tf->saf", states[:-1], actions, weights @ states)
        buffer = jnp.where(own_buffer, joint, even)
        ctec = jnp.einsum("ts,ta,sa->t", states[:-1], actions, ctec_kl_reward(buffer, xp=jnp))
        backward = etd_episode_rewards(etd_distance(buffer, xp=jnp), jnp.argmax(states, axis=-1), xp=jnp)
        rewards = jnp.where(etd, backward, ctec)
        values, _ = jax.lax.scan(learn, values, (states[:-1], actions, rewards, afters, discount))
        return (values, joint), afters.mean(0)

    def block(carry, key):
        number = math.ceil(args.episodes / BLOCKS)
        chance = jax.random.uniform(key, (number, mdp.steps, 3 + mdp.num_actions))
        carry, visits = jax.lax.scan(episode, carry, chance)
        return carry, visits.mean(0)

    carry = (jnp.zeros(shape[:2]), jnp.zeros(shape))
    (values, _), visits = jax.lax.scan(block, carry, jax.random.split(key, BLOCKS))
    return values, visits


def q_learning(args, mdp):
    """{learner: (values (L, S, A), visits (L, S))} for each of LEARNERS, L of each kind. visits: the share of the steps
    that ended in each state, in the last twentieth of the episodes (the paper's last 1,000 of 20,000)."""
    switches = jnp.array([[learner.method == "ETD", learner.own_buffer, learner.random_ties] for learner in LEARNERS])
    keys = jax.random.split(jax.random.PRNGKey(args.seed), args.learners)
    several = jax.vmap(functools.partial(q_learner, args, mdp), (None, None, None, 0))
    values, visits = jax.device_get(jax.jit(jax.vmap(several, (0, 0, 0, None)))(*switches.T, keys))
    last = visits[:, :, -BLOCKS // 20 :].mean(2)
    return {learner: (values[i], last[i]) for i, learner in enumerate(LEARNERS)}


# ------------------------------------------------------------------------------------------------- the studies
def branch_values(mdp, left_share):
    """{method: values (2,) of going left and right} if so much of the buffer went left at the root."""
    policy = even_policy(mdp)
    policy[:, 0] = (left_share, 1 - left_share)
    found = {}
    for offset in (1, 0):
        reward = ctec_kl_reward(joint_occupancy(mdp, policy, offset))
        found[f"C-TeC, offset {offset}"] = plan(mdp, reward)[0, 0]
    distance = etd_distance(joint_occupancy(mdp, policy, offset=0))
    found["ETD"] = plan(mdp, etd_tree_reward(mdp, distance))[0, 0]
    return found


def tipping_share(mdp, method):
    """The share of the buffer that went left at which both branches are worth the same, by bisection. Above it C-TeC
    goes left, and ETD goes right."""
    low = 0.0
    high = 1.0
    while high - low > 1e-5:
        share = (low + high) / 2
        left, right = branch_values(mdp, share)[method]
        above = left > right if method.startswith("C-TeC") else right > left
        low = low if above else share
        high = share if above else high
    return (low + high) / 2


def study_branches(args, folder, rows):
    """Prints its tables, appends to the rows of metrics.csv and draws; so do the other two."""
    print("\nbranches: what each branch is worth if half of the buffer went left; the share that must have gone left")
    print("for C-TeC to go left, for ETD to go right\n")
    print(f"{'nodes a branch':16}{'method':20}{'left':>9}{'right':>9}  {'chooses':10}{'tips at':>8}")
    for depth in (1, 2, 3, 4, 6, 10):
        mdp = make_branches(depth)
        for method, (left, right) in branch_values(mdp, 0.5).items():
            tip = tipping_share(mdp, method)
            tied = abs(left - right) < 1e-6
            choice = "tie" if tied else "left" if left > right else "right"
            print(f"{depth:<16}{method:20}{left:9.2f}{right:9.2f}  {choice:10}{tip:8.1%}")
            for metric, value in (("value_left", left), ("value_right", right), ("tipping_share", tip)):
                record(rows, "branches", f"{depth} nodes a branch", method, metric, value)

    mdp = make_branches(2)
    learned = q_learning(args, mdp)
    print(f"\nQ-learning, 2 nodes a branch, {args.episodes:,} episodes: steps on the left branch at the end\n")
    for learner, (_, visits) in learned.items():
        left = visits[:, 1:3].sum(-1)
        each = " ".join(f"{x:.0%}" for x in sorted(left))
        print(f"{learner.method:8}{str(learner):28}{left.mean():6.1%}   each learner: {each}")
        record(rows, "branches", str(learner), learner.method, "q_left", left.mean())
    save_branches(folder, mdp, learned)


TREES = {"tree of depth 2": (2, False), "tree of depth 3": (3, False), "lopsided tree": (2, True)}
# probabilities of left, right, stay: at the root, and below it
BUFFERS = {
    "even": ((1 / 3, 1 / 3, 1 / 3), (1 / 3, 1 / 3, 1 / 3)),
    "mostly down": ((0.45, 0.45, 0.1), (0.45, 0.45, 0.1)),
    "mostly stay": ((0.2, 0.2, 0.6), (0.2, 0.2, 0.6)),
    "mostly left": ((0.8, 0.1, 0.1), (1 / 3, 1 / 3, 1 / 3)),
}


def tree_levels(mdp, visits):
    """(3,) share of the steps that ended at the root, at depth 1 and deeper."""
    depth_1 = mdp.parent == 0
    return np.array([visits[0], visits[depth_1].sum(), visits[1:][~depth_1[1:]].sum()])


def tree_plan(mdp, buffer, method, offset):
    """Dynamic programming's values (T, S, A), and the share of its steps that end in each node."""
    policy = even_policy(mdp)
    root, below = BUFFERS[buffer]
    policy[:, 0] = root
    policy[:, 1:] = below
    joint = joint_occupancy(mdp, policy, offset)
    reward = etd_tree_reward(mdp, etd_distance(joint)) if method == "ETD" else ctec_kl_reward(joint)
    values = plan(mdp, reward)
    return values, state_distribution(mdp, greedy_policy(values))[1:].mean(0)


def deepest_share(mdp):
    """The largest share of steps below depth 1 that any policy can have."""
    below = (mdp.parent > 0).astype(float)
    undiscounted = dataclasses.replace(mdp, gamma=1.0)
    return plan(undiscounted, mdp.transition @ below)[0, 0].max() / mdp.steps


def study_tree(args, folder, rows):
    print("\ntree: share of the steps at the root, at depth 1 and deeper, of the best policy by dynamic programming")
    for name, shape in TREES.items():
        mdp = make_tree(*shape)
        print(f"\n{name} (no policy can have more than {deepest_share(mdp):.1%} of its steps deeper)")
        record(rows, "tree", name, "", "deepest_possible", deepest_share(mdp))
        for method, offset in (("C-TeC", 1), ("C-TeC", 0), ("ETD", 0)):
            for buffer in BUFFERS:
                _, visits = tree_plan(mdp, buffer, method, offset)
                levels = tree_levels(mdp, visits)
                label = f"{method}, offset {offset}" if method == "C-TeC" else method
                words = "  ".join(f"{x:6.1%}" for x in levels)
                print(f"  {label:18}buffer {buffer:14}{words}   node {visits.argmax()} most")
                for metric, value in zip(("root", "depth_1", "deeper"), levels):
                    record(rows, "tree", f"{name}, buffer {buffer}", label, metric, value)

    mdp = make_tree(2)
    learned = q_learning(args, mdp)
    print(f"\nQ-learning on the tree of depth 2, {args.episodes:,} episodes, {args.learners} learners of each kind\n")
    for learner, (_, visits) in learned.items():
        levels = tree_levels(mdp, visits.mean(0))
        words = "  ".join(f"{x:6.1%}" for x in levels)
        most = " ".join(str(node) for node in sorted(visits.argmax(-1)))
        print(f"  {learner.method:8}{str(learner):28}{words}   nodes most visited: {most}")
        for metric, value in zip(("q_root", "q_depth_1", "q_deeper"), levels):
            record(rows, "tree", str(learner), learner.method, metric, value)
    save_tree(folder, mdp, learned)


@dataclasses.dataclass(frozen=True)
class Gathering:
    """A setting of the third study."""

    world: Literal["room", "torus"]
    buffer: Literal["short", "growing"]
    critic: Literal["exact", "ignorant"] = "exact"
    first: Literal["even", "to the corner"] = "even"  # the policy of round 0

    def __str__(self):
        return f"{self.world}, {self.buffer} buffer, {self.critic} critic, first policy {self.first}"


CASES = [(world, buffer) for world in ("room", "torus") for buffer in ("short", "growing")]
SETTINGS = [
    *(Gathering(world, buffer) for world, buffer in CASES),
    *(Gathering(world, buffer, critic="ignorant") for world, buffer in CASES),
    *(Gathering(world, buffer, first="to the corner") for world, buffer in CASES),
]


def first_policy(args, mdp, first):
    """Even, or leaning up and to the left; perturbed by 1%, so that no symmetry holds the agents."""
    weight = np.ones(mdp.num_actions)
    if first == "to the corner":
        weight[:4] = (9, 1, 9, 1)
    random = np.random.default_rng(args.seed).uniform(0.99, 1.01, (mdp.num_states, mdp.num_actions))
    policy = weight * random
    return np.broadcast_to(policy / policy.sum(-1, keepdims=True), even_policy(mdp).shape)


def gather(args, setting):
    """(rounds, S) share of the steps in each cell, round after round."""
    mdp = make_world(args, setting.world)
    ignorance = args.ignorance if setting.critic == "ignorant" else 0.0
    policy = first_policy(args, mdp, setting.first)
    kept = collections.deque(maxlen=args.short_buffer if setting.buffer == "short" else None)
    found = []
    for _ in range(args.rounds):
        found.append(state_distribution(mdp, policy)[:-1].mean(0))
        kept.append(joint_occupancy(mdp, policy))
        policy = soft_policy(mdp, ctec_kl_reward(sum(kept), ignorance), args.entropy_weight)
    return np.array(found)


def effective_cells(visits):
    """exp(entropy): n for visits that are spread evenly over n cells."""
    return np.exp(-np.sum(visits * np.log(np.maximum(visits, 1e-300)), axis=-1))


def critical_temperature(args):
    """The temperature below which even play is unstable on the torus, where it is a fixed point because all cells are
    alike, and so are the four moves. A small deviation from it grows by a factor a round if the buffer holds one round
    (the largest factor, here by power iteration), and like n^(factor - 1) with a growing buffer of n rounds. The factor
    is inverse to the temperature."""
    mdp = make_world(dataclasses.replace(args, grid_start="everywhere", grid_stay=False), "torus")
    even = even_policy(mdp)
    deviation = first_policy(args, mdp, "even") - even
    for _ in range(12):
        deviation = 1e-6 * deviation / np.abs(deviation).max()
        reward = ctec_kl_reward(joint_occupancy(mdp, even + deviation))
        after = soft_policy(mdp, reward, args.entropy_weight) - even
        factor = np.linalg.norm(after) / np.linalg.norm(deviation)
        deviation = after
    return factor * args.entropy_weight


SLIPS = (0.1, 0.3, 0.5, 0.7, 0.9)


def study_gathering(args, folder, rows):
    print(f"\ngathering: {args.world_size} x {args.world_size} cells, start: {args.grid_start}, {args.rounds} rounds\n")
    head = f"{'world':8}{'buffer':9}{'critic':10}{'first policy':15}"
    print(f"{head}{'cells':>7}{'fullest':>9}  {'where':17}{'moved':>6}{'cells of 20 rounds':>20}")
    found = {}
    for setting in SETTINGS:
        visits = gather(args, setting)
        found[setting] = visits
        moved = np.abs(np.diff(visits[-20:], axis=0)).sum(-1) / 2
        results = {
            "cells": effective_cells(visits[-1]),
            "fullest": visits[-1].max(),
            "moved": moved.sum() / max(len(moved), 1),
            "cells_of_20_rounds": effective_cells(visits[-20:].mean(0)),
        }
        for i, cells in enumerate(effective_cells(visits[:-1])):
            record(rows, "gathering", str(setting), "C-TeC", "cells", cells, i)
        for metric, value in results.items():
            record(rows, "gathering", str(setting), "C-TeC", metric, value, args.rounds - 1)
        words = f"{setting.world:8}{setting.buffer:9}{setting.critic:10}{setting.first:15}"
        row, column = divmod(int(visits[-1].argmax()), args.world_size)
        numbers = f"{results['moved']:6.1%}{results['cells_of_20_rounds']:20.1f}"
        place = f"row {row}, column {column}"
        print(f"{words}{results['cells']:7.1f}{results['fullest']:9.1%}  {place:17}{numbers}", flush=True)

    print("\nthe temperature below which even play is unstable on the torus (four moves, start everywhere)\n")
    critical = {slip: critical_temperature(dataclasses.replace(args, slip=slip)) for slip in SLIPS}
    for slip, temperature in critical.items():
        print(f"slip {slip:<6}{temperature:6.3f}")
        record(rows, "gathering", f"torus, slip {slip}", "C-TeC", "critical_temperature", temperature)
    save_maps(args, folder, found)
    save_curves(args, folder, found, critical)


# ==================================================================================================== appendix
# What a reader of the method does not need: the worlds, the run's folder, pictures, and main.


# ------------------------------------------------------------------------------------------------ environments
def make_branches(nodes):
    """State 0 is the root; action 0 leads to the left branch 1 ... n, action 1 to the right one n + 1 ... 2n. On the
    left one node further a step, on the right with probability 0.1, whatever the action; the last nodes hold."""
    size = 1 + 2 * nodes
    parent = np.arange(-1, size - 1)
    parent[nodes + 1] = 0
    transition = np.zeros((size, 2, size))
    transition[0, 0, 1] = 1
    transition[0, 1, nodes + 1] = 1
    for node in range(1, size):
        last = node in (nodes, 2 * nodes)
        moves = 0.0 if last else 1.0 if node < nodes else 0.1
        transition[node, :, node] = 1 - moves
        if not last:
            transition[node, :, node + 1] = moves
    return Mdp(transition, np.eye(size)[0], steps=30, gamma=0.99, parent=parent)


def make_tree(depth, lopsided=False):
    """A binary tree, numbered level by level from the root 0; actions left, right, stay. In 10% of the steps the action
    is a random one; at depth 1 a move fails with probability 0.9. Leaves hold. lopsided: node 2 is a leaf."""
    size = 5 if lopsided else 2 ** (depth + 1) - 1
    parent = (np.arange(size) - 1) // 2
    chosen = np.zeros((size, 3, size))
    for node in range(size):
        fails = 0.9 if parent[node] == 0 else 0.0
        chosen[node, :, node] = fails
        for action in range(3):
            child = 2 * node + 1 + action
            after = child if action < 2 and child < size else node
            chosen[node, action, after] += 1 - fails
    transition = 0.9 * chosen + 0.1 * chosen.mean(1, keepdims=True)
    return Mdp(transition, np.eye(size)[0], steps=10, gamma=0.9, parent=parent)


MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1), (0, 0))  # rows and columns: up, down, left, right, stay


def make_world(args, world):
    """room: a move against a wall stays, so that pushing into a corner brings many states into one. torus: whoever
    leaves on one side comes back on the other, so that every move only permutes the states."""
    size = args.world_size
    row, column = np.divmod(np.arange(size**2), size)
    moves = MOVES if args.grid_stay else MOVES[:4]
    chosen = np.zeros((size**2, len(moves), size**2))
    for action, (down, right) in enumerate(moves):
        if world == "room":
            after = np.clip(row + down, 0, size - 1) * size + np.clip(column + right, 0, size - 1)
        else:
            after = (row + down) % size * size + (column + right) % size
        chosen[np.arange(size**2), action, after] = 1
    transition = (1 - args.slip) * chosen + args.slip * chosen[:, :4].mean(1, keepdims=True)
    start = np.eye(size**2)[0] if args.grid_start == "corner" else np.full(size**2, 1 / size**2)
    return Mdp(transition, start, steps=args.grid_steps, gamma=0.9)


# -------------------------------------------------------------------------------------------------- run folder
def record(rows, study, case, method, metric, value, round=""):
    rows.append(dict(study=study, case=case, method=method, round=round, metric=metric, value=f"{value:.6g}"))


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def write_atomically(path, write):
    """write(file) into a temporary file, which then takes the place of path. The first process writes for all."""
    if jax.process_index() > 0:
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_metrics(path, rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def make_folder(args):
    name = f"{args.study}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(args.run_dir) / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        fail(f"--run-dir {args.run_dir}: {folder} cannot be made ({error.strerror})")
    config = json.dumps(dataclasses.asdict(args), indent=1)
    write_atomically(folder / "args.json", lambda file: file.write(config.encode()))
    return folder


# ---------------------------------------------------------------------------------------------------- pictures
def save_branches(folder, mdp, learned):
    """branches.png: futures of both branches; what each is worth for any buffer; where the Q-learners ended."""
    from matplotlib.figure import Figure

    figure = Figure((12, 3.6), layout="constrained")
    futures, worth, learners = figure.subplots(1, 3)
    joint = joint_occupancy(mdp, even_policy(mdp))
    bars = {
        "p(s_f), even buffer": (joint.sum((0, 1)), "0.6"),
        "p(s_f | root, left)": (joint[0, 0] / joint[0, 0].sum(), "tab:blue"),
        "p(s_f | root, right)": (joint[0, 1] / joint[0, 1].sum(), "tab:orange"),
    }
    place = np.arange(mdp.num_states)
    for i, (label, (height, color)) in enumerate(bars.items()):
        futures.bar(place + 0.27 * (i - 1), height, 0.27, label=label, color=color)
    names = ["root", "left 1", "left 2", "right 1", "right 2"]
    futures.set(xticks=place, xticklabels=names, ylabel="probability", title="futures at the root")
    futures.legend(fontsize=8, loc="upper left")

    shares = np.linspace(0.02, 0.98, 49)
    values = [branch_values(mdp, share) for share in shares]
    for method, color in (("C-TeC, offset 1", "tab:blue"), ("ETD", "tab:red")):
        left, right = np.array([value[method] for value in values]).T
        worth.plot(100 * shares, (left - right) / np.abs(left - right).max(), color=color, label=method)
    worth.axhline(0, color="0.3", linewidth=0.8)
    worth.axvline(50, color="0.7", linestyle=":")
    worth.text(51, -0.95, "even", color="0.5")
    worth.set(xlabel="episodes of the buffer that went left (%)", title="value of left minus right (largest = 1)")
    worth.legend(fontsize=8)

    labels = []
    for i, (learner, (_, visits)) in enumerate(learned.items()):
        left = 100 * visits[:, 1:3].sum(-1)
        jitter = np.linspace(-0.2, 0.2, len(left))
        learners.plot(left, i + jitter, "o", color="tab:red" if learner.method == "ETD" else "tab:blue", alpha=0.6)
        labels.append(f"{learner.method}, {learner}")
    learners.set(yticks=range(len(labels)), yticklabels=labels, xlim=(-4, 104), title="Q-learners at the end")
    learners.set_xlabel("steps on the left branch (%)")
    learners.invert_yaxis()
    figure.savefig(folder / "branches.png", dpi=90)


def draw_tree(axes, mdp, visits, policy, title):
    """Nodes coloured and labelled by the share of steps that end there; arrows for the policy (S, 3)."""
    depth = [0]
    for node in range(1, mdp.num_states):
        depth.append(depth[mdp.parent[node]] + 1)
    x = [(node + 2 - 2**level) / 2**level - 0.5 / 2**level for node, level in enumerate(depth)]
    for node, level in enumerate(depth):
        if node:
            above = mdp.parent[node]
            axes.plot([x[above], x[node]], [-depth[above], -level], color="0.85", zorder=0)
        children = [child for child in range(mdp.num_states) if mdp.parent[child] == node]
        for action, child in enumerate(children):
            if policy[node, action] > 0.01:
                way = np.array([x[child] - x[node], -1.0])
                begin = np.array([x[node], -level]) + 0.28 * way
                arrow = dict(arrowstyle="->", color="black", alpha=policy[node, action], linewidth=1.8)
                axes.annotate("", begin + 0.4 * way, begin, arrowprops=arrow)
        stays = children and policy[node, 2] > 0.5
        share = visits[node]
        axes.scatter(x[node], -level, 950, c=[share], cmap="Blues", vmin=0, vmax=0.8, edgecolors="0.3",
                     linewidths=2.5 if stays else 0.6)  # fmt: skip
        color = "white" if share > 0.45 else "black"
        axes.text(x[node], -level, f"{node}\n{share:.0%}", ha="center", va="center", fontsize=8, color=color)
    axes.set_title(title, fontsize=9)
    axes.set(xlim=(0, 1), ylim=(-max(depth) - 0.4, 0.4))
    axes.axis("off")


def save_tree(folder, mdp, learned):
    """tree.png: visits and policies by dynamic programming and by Q-learning; a thick rim means stay."""
    from matplotlib.figure import Figure

    figure = Figure((13, 5.6), layout="constrained")
    panels = figure.subplots(2, 4)
    for row, method in enumerate(("C-TeC", "ETD")):
        values, visits = tree_plan(mdp, "even", method, 0 if method == "ETD" else 1)
        title = f"{method}: even buffer, dynamic programming"
        draw_tree(panels[row, 0], mdp, visits, greedy_policy(values)[0], title)
        found = [(learner, result) for learner, result in learned.items() if learner.method == method]
        for column, (learner, (values, visits)) in enumerate(found, 1):
            policy = greedy_policy(values).mean(0)  # the share of learners that prefer each action
            draw_tree(panels[row, column], mdp, visits.mean(0), policy, f"{method}: Q-learning, {learner}")
    figure.suptitle("share of steps that end in each node; arrows and thick rims (stay): what is chosen", fontsize=10)
    figure.savefig(folder / "tree.png", dpi=80)


def save_maps(args, folder, found):
    """gathering.png: share of the steps in each cell, a row for each setting, a column for each of some rounds."""
    from matplotlib.figure import Figure

    last = args.rounds - 1
    moments = sorted({moment for moment in (0, 1, 2, 5, 10, 20, last - 1, last) if 0 <= moment <= last})
    figure = Figure((1.1 * len(moments) + 2.4, 1.1 * len(found) + 0.6), layout="constrained")
    panels = figure.subplots(len(found), len(moments), squeeze=False)
    for row, (setting, visits) in enumerate(found.items()):
        for column, moment in enumerate(moments):
            axes = panels[row, column]
            grid = visits[moment].reshape(args.world_size, args.world_size)
            drawn = axes.imshow(grid, cmap="magma_r", vmin=0, vmax=0.4)
            axes.set(xticks=[], yticks=[])
            cells = f"{effective_cells(visits[moment]):.1f}"
            axes.text(0.97, 0.05, cells, transform=axes.transAxes, ha="right", fontsize=7, color="tab:blue")
            if row == 0:
                axes.set_title(f"round {moment}", fontsize=9)
        words = f"{setting.world}, {setting.buffer} buffer\n{setting.critic} critic"
        if setting.first != "even":
            words += f"\nfirst {setting.first}"
        panels[row, 0].set_ylabel(words, rotation=0, ha="right", va="center", fontsize=8)
    label = "share of the steps (0.4 and more: black); blue: effective number of cells"
    figure.colorbar(drawn, ax=panels, label=label, shrink=0.4, pad=0.01)
    figure.savefig(folder / "gathering.png", dpi=80)


def save_curves(args, folder, found, critical):
    """gathering_curves.png: over how many cells the agents are spread, round after round; and where even play is a
    stable fixed point of the torus."""
    from matplotlib.figure import Figure

    figure = Figure((13, 3.8), layout="constrained")
    exact, ignorant, stability = figure.subplots(1, 3)
    for axes, critic in ((exact, "exact"), (ignorant, "ignorant")):
        for setting, visits in found.items():
            if setting.critic == critic and setting.first == "even":
                color = "tab:blue" if setting.world == "room" else "tab:orange"
                style = "-" if setting.buffer == "short" else "--"
                label = f"{setting.world}, {setting.buffer} buffer"
                axes.plot(effective_cells(visits), style, color=color, label=label)
        axes.set(xlabel="round", ylabel="effective number of cells", title=f"{critic} critic")
        axes.set_ylim(0, args.world_size**2 + 1)
        axes.legend(fontsize=8)
    slips = list(critical)
    temperatures = list(critical.values())
    top = 1.1 * max(temperatures)
    stability.fill_between(slips, temperatures, top, color="tab:green", alpha=0.25)
    stability.fill_between(slips, 0, temperatures, color="tab:red", alpha=0.25)
    stability.plot(slips, temperatures, "o-", color="0.3")
    stability.text(0.95, 0.9, "even play is stable", transform=stability.transAxes, ha="right")
    stability.text(0.05, 0.1, "agents gather", transform=stability.transAxes)
    stability.set(xlabel="slip", ylabel="temperature", xlim=(slips[0], slips[-1]), ylim=(0, top))
    stability.set_title("torus, exact critic: the even fixed point")
    figure.savefig(folder / "gathering_curves.png", dpi=85)


# -------------------------------------------------------------------------------------------------------- main
def parse_args(argv=None):
    return tyro.cli(Args, args=argv, description=__doc__)


def check_numbers(args, may_be_zero, rules):
    """Fail at the first broken rule {"field must ...": whether it does}; rules() can rely on the rules for numbers."""
    numbers = {"seed must be below 2^32": args.seed < 2**32}
    for name, value in vars(args).items():
        if type(value) in (int, float):
            bound = "at least" if name in may_be_zero.split() else "above"
            numbers[f"{name} must be {bound} 0 and finite"] = 0 < value < math.inf or (value == 0 and bound != "above")
        if name in ("num_envs", "batch_size"):
            numbers[f"{name} must be a multiple of the {jax.device_count()} devices"] = value % jax.device_count() == 0
    broken = lambda rules: [rule for rule, holds in rules.items() if not holds]
    if failed := broken(numbers) or broken(rules()):
        name, words = failed[0].split(" ", 1)
        fail(f"--{name.replace('_', '-')} {getattr(args, name)} {words}")


def check_args(args):
    check_numbers(args, "seed epsilon slip", lambda: {
        "epsilon must be at most 1": args.epsilon <= 1,
        "step_size must be at most 1": args.step_size <= 1,
        "slip must be at most 1": args.slip <= 1,
        "world_size must be at least 2": args.world_size >= 2,
    })  # fmt: skip


STUDIES = {"branches": study_branches, "tree": study_tree, "gathering": study_gathering}


def main(args):
    """Returns the rows of metrics.csv and the run's folder."""
    check_args(args)
    began = time.time()
    folder = make_folder(args)
    print(f"{Path(__file__).stem}, {args.study}, seed {args.seed}, into {folder}", flush=True)
    rows = []
    for name, study in STUDIES.items():
        if args.study in ("all", name):
            study(args, folder, rows)
            write_metrics(folder / "metrics.csv", rows)
    print(f"\ndone in {time.time() - began:.0f} s")
    print(f"pictures {', '.join(sorted(path.name for path in folder.glob('*.png')))}")
    print(f"folder   {folder}")
    return {"rows": rows, "folder": str(folder)}


if __name__ == "__main__":
    try:
        main(parse_args())
    except OSError as error:  # a full disk, a folder that cannot be made
        fail(f"{error}", code=1)
