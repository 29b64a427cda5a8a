"""The studies of reproduce.py: which runs stand behind each table and figure."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of a table: the runs that differ by their seed only."""

    label: str
    script: str
    flags: str
    hours: float
    """expected hours of one run, on a core or a GPU"""
    kind: Literal["train", "inputs", "remedies", "speed"] = "train"
    """train: the script itself. inputs: experiments/inputs.py changes what the encoders see. remedies:
    experiments/remedies.py changes the method. speed: benchmarks/speed.py measures it"""
    inputs: str = ""
    """flags of experiments/inputs.py or experiments/remedies.py"""
    family: str = ""
    """title of the panel that it stands in, in the picture `families`"""

    @property
    def env(self):
        words = self.flags.split()
        name = words[words.index("--env") + 1]
        return f"{name}_off" if "--no-tv" in words else name


@dataclasses.dataclass(frozen=True)
class Study:
    title: str
    methods: tuple[Method, ...]
    """the differences in the table are against the first one"""
    seeds: tuple[int, ...]
    metric: str = "coverage"
    """column of metrics.csv"""
    pictures: tuple[str, ...] = ("curves", "finals")
    """curves: learning curves. finals: bars of the last values. rates: bars of the 22 achievements. correlations: what
    the reward goes with. maps: the first seed's reward maps of the first two methods. families: bars of the last
    values, a panel for each family of methods. visits: the first seed's heat maps. diagnostics: entropy, accuracy,
    reward and others over the run. unlocked: the rate of each achievement over the run"""
    device: Literal["cpu", "gpu"] = "cpu"
    """what the sizes are for; the hours are this device's"""
    area: bool = False
    """the table also has the means over the runs, which are areas under curves"""
    at_steps: tuple[int, ...] = ()
    """the table's rows are the values after these steps, instead of the last ones"""
    also: tuple[str, ...] = ()
    """further columns of metrics.csv whose last values stand in the table; name_last_fifth: the mean of column `name`
    over the last fifth of the run"""
    paper: tuple[tuple[int, float, float], ...] = ()
    """the paper's (steps, mean, standard deviation) of the first method, for the picture of the curves"""
    between_envs: bool = False
    """one more table: each method in the first environment against the second"""
    note: str = ""
    """what a reader of the table should know"""
    on_page: bool = True
    """has a section in docs/results.md, once there are results"""

    @property
    def hours(self):
        return len(self.seeds) * sum(method.hours for method in self.methods)

    @property
    def envs(self):
        return list(dict.fromkeys(method.env for method in self.methods))


def on_maze(env):
    return f"--env {env} --preset laptop"


MAZE = on_maze("point_hardest_maze")
CRAFTAX = "--env craftax_classic --preset laptop"
CRAFTAX_RACE = f"{CRAFTAX} --total-timesteps 1000000 --entropy-coef 0.15"
CRAFTAX_LONG = f"{CRAFTAX} --total-timesteps 20000000"
NOISY_TV = "--env noisy_tv --preset laptop --start fixed"
# the paper's grid and starts with the laptop's networks; one pass over a rollout is 256 gradient steps. Rewards are
# standardised in each rollout alone: C-TeC's fall by a factor of ten after the first one, and a running mean would
# follow too slowly for 39 rollouts
NOISY_TV_256 = """--env noisy_tv --preset laptop --start random --grid-size 256 --episode-length 1024 --num-envs 1024
    --update-epochs 1 --reward-momentum 0 --total-timesteps 5000000"""
RANDOM_CRAFTAX = Method("random", "random_craftax", f"{CRAFTAX} --total-timesteps 409600", 0.03)
ANT_ONE_CORE = "--env ant_hardest_maze --num-envs 64 --batch-size 64 --encoder-width 256 --replay-size 1100"
ANT_RANDOM = "--env ant_hardest_maze --num-envs 256 --total-timesteps 30000000"
FROM_280 = "--remedy value --first-value 280"
DISTANCE = "--remedy distance"
ANT_CTEC = f"{ANT_RANDOM} --batch-size 256 --encoder-width 256 --multiplier 0.25 --replay-size 10000"
HUMANOID = "--env humanoid_u_maze --unroll-length 124 --total-timesteps 30000000"
TINY = """--env point_u_maze --num-envs 8 --unroll-length 16 --episode-length 33 --replay-size 64 --learning-starts 32
    --batch-size 32 --multiplier 0.5 --agent-width 16 --total-timesteps 1536"""
ROBOTS = ("ant_hardest_maze", "humanoid_u_maze", "arm_binpick_hard")
ROBOT_HOURS = 24  # of a run at the paper's sizes on an RTX 8000 or V100, as the paper reports them
CRAFTAX_HOURS = 30
PAPER = dict(seeds=(1, 2, 3, 4, 5), device="gpu")
ON_CRAFTAX = dict(metric="achievements", pictures=("curves", "finals", "rates"))


def race(env, seeds):
    """All methods with SAC on a point maze."""
    flags = on_maze(env)
    faster = f"{flags} --learning-rate 1e-3"
    methods = (
        Method("C-TeC", "ctec_sac_brax", flags, 0.02),
        Method("C-TeC unit", "ctec_sac_brax", f"{flags} --reward-features unit", 0.02),
        Method("APT", "apt_sac_brax", f"{faster} --temperature logits", 0.025),
        Method("ICM", "icm_sac_brax", faster, 0.03),
        Method("RND", "rnd_sac_brax", faster, 0.015),
        Method("forward model", "mbrl_sac_brax", faster, 0.012),
        Method("no bonus", "mbrl_sac_brax", f"{faster} --intrinsic-coef 0", 0.012),
        Method("random", "random_brax", flags, 0.003),
    )
    note = "SAC, replay, environment and bins are the same; the bonus differs. `unit`: L2-normalised rows in the "
    note += "reward, as in the paper's text; else each feature is divided by its norm over the batch, as released. "
    note += "Each baseline has the best of its settings at these sizes on other seeds ([tuning](tuning.md)): a step "
    note += "size of 1e-3 for all, and C / tau for APT. C-TeC has the paper's 3e-4."
    return Study(f"The race on {env}, laptop scale", methods, seeds, area=True, note=note)


def paper_coverage(env):
    """The learning curves of one robot at the paper's sizes."""
    methods = (
        Method("C-TeC", "ctec_sac_brax", f"--env {env}", ROBOT_HOURS),
        Method("C-TeC goal", "ctec_sac_brax", f"--env {env} --future-state goal", ROBOT_HOURS),
        Method("RND", "rnd_sac_brax", f"--env {env}", ROBOT_HOURS),
        Method("ICM", "icm_sac_brax", f"--env {env}", ROBOT_HOURS),
        Method("APT", "apt_sac_brax", f"--env {env}", ROBOT_HOURS),
        Method("random", "random_brax", f"--env {env}", 8),
    )
    return Study(f"The paper's coverage curves: {env}", methods, **PAPER)


def noisy_tv(title, flags, hours, also):
    """Every bonus in front of a TV that is on, and off; hours of a run with each bonus."""
    bonuses = (("C-TeC", "ctec"), ("RND", "rnd"), ("forward model", "forward_error"), ("no bonus", "none"))
    note = '`noisy_tv_off` is the same grid without the noise; "at the TV" is then the place where it would be. PPO, '
    note += "networks and standardisation are the same; the bonus differs. See [the script's page]"
    return Study(
        title,
        tuple(
            Method(label, "ctec_ppo_noisy_tv", f"{flags} --bonus {bonus}{off}", hours[bonus])
            for off in ("", " --no-tv")
            for label, bonus in bonuses
        ),
        seeds=(11, 12, 13, 14, 15),
        metric="coverage_share",
        pictures=("curves", "finals", "visits"),
        also=also,
        between_envs=True,
        note=f"{note}(ctec_ppo_noisy_tv.md).",
    )


ABLATIONS = {  # family: {row: flags of ctec_ablations_sac_brax.py}
    "loss": {name: f"--loss {name}" for name in ("symmetric_infonce", "nce", "flatnce", "fb")},
    "similarity": {name: f"--similarity {name}" for name in ("l2", "l2_squared", "dot")},
    "critic, 64 wide": {
        "separable": "--encoder-width 64",
        "monolithic": "--encoder-width 64 --critic monolithic",
    },
    "unit length in the reward": {
        "of rows": "--reward-features unit",
        "none, nor in the loss": "--reward-features none",
    },
    "direction of the KL": {"forward": "--reward-kl forward"},
    "sampling of futures": {
        "uniform": "--future-sampling uniform",
        "gamma_cl from 0.9": "--gamma-cl-start 0.9",
        "gamma_cl from 0.1": "--gamma-cl-start 0.1",
    },
    "discount of futures": {f"gamma_cl {gamma}": f"--gamma-cl {gamma}" for gamma in (0.3, 0.5, 0.9)},
    "temperature": {f"tau {tau}": f"--tau {tau}" for tau in (0.1, 1, 10)},
    "in-episode negatives": {f"repetition {factor}": f"--repetition-factor {factor}" for factor in (2, 8, 32)},
    "what psi sees": {"position only": "--future-state goal"},
}


def ablations():
    """A row for each value of each flag, the other flags at their defaults."""
    methods = [Method("C-TeC", "ctec_ablations_sac_brax", MAZE, 0.025)]
    for family, variants in ABLATIONS.items():
        for label, flags in variants.items():
            hours = 0.1 if "monolithic" in flags else 0.025
            methods += [Method(label, "ctec_ablations_sac_brax", f"{MAZE} {flags}", hours, family=family)]
    return Study(
        "Every ablation of C-TeC on point_hardest_maze, laptop scale",
        tuple(methods),
        seeds=(11, 12, 13, 14, 15),
        pictures=("families",),
        note="Beside the paper's findings: [ablations](ctec_ablations_sac_brax.md#results).",
    )


STUDIES = {
    "race": race("point_hardest_maze", (11, 12, 13, 14, 15, 16, 17, 18, 19, 20)),
    "race_large": race("point_large_maze", (11, 12, 13, 14, 15)),
    "race_u": race("point_u_maze", (11, 12, 13, 14, 15)),
    "why": Study(
        "Why it explores: what the encoders see, and what the reward goes with",
        tuple(
            Method(label, "ctec_sac_brax", f"{MAZE}{more}", 0.02, kind="inputs", inputs=inputs)
            for label, more, inputs in (
                ("C-TeC", "", ""),
                ("C-TeC unit", " --reward-features unit", ""),
                ("origin in the middle", "", "--origin middle"),
                ("origin far from the start", "", "--origin far_corner"),
                ("standardised inputs", "", "--standardize"),
            )
        ),
        seeds=(1, 2, 3, 4, 5),
        area=True,
        pictures=("curves", "finals", "correlations", "maps"),
        note="See [why it explores](why_it_explores.md).",
    ),
    "ablations": ablations(),
    "ant": Study(
        "The long run: ant_hardest_maze on one core",
        (
            Method("C-TeC", "ctec_sac_brax", ANT_CTEC, 4),
            Method("gamma_cl 0.9", "ctec_sac_brax", f"{ANT_CTEC} --gamma-cl 0.9", 4),
            Method("C-TeC goal", "ctec_sac_brax", f"{ANT_CTEC} --future-state goal", 4),
            Method("critics from 280", "ctec_sac_brax", ANT_CTEC, 4, kind="remedies", inputs=FROM_280),
            Method("distance as reward", "ctec_sac_brax", ANT_CTEC, 4, kind="remedies", inputs=DISTANCE),
            Method("random", "random_brax", ANT_RANDOM, 1.2),
        ),
        seeds=(11,),
        pictures=("curves", "diagnostics"),
        at_steps=tuple(m * 1_000_000 for m in (1, 3, 5, 10, 15, 20, 30)),
        paper=((30_000_000, 1119, 304), (50_000_000, 1916, 430)),
        note="The part of 30M steps that is done; one seed is one seed.",
    ),
    "humanoid": Study(
        "The long run: humanoid_u_maze at the authors' sizes, on one core",
        (
            Method("C-TeC", "ctec_sac_brax", f"{HUMANOID} --encoder-width 256", 4),
            Method("random", "random_brax", HUMANOID, 1.2),
        ),
        seeds=(11,),
        pictures=("curves", "diagnostics"),
        at_steps=tuple(m * 1_000_000 for m in (1, 2, 4, 8, 12, 16, 20, 24, 30)),
        paper=((30_000_000, 102, 11),),
        note="The part of 30M steps that is done; one seed is one seed.",
    ),
    "race_craftax": Study(
        "The race on Craftax-Classic, laptop scale",
        (
            Method("C-TeC", "ctec_ppo_rnn_craftax", f"{CRAFTAX_RACE} --learn-tau --first-offset 1", 0.05),
            Method("E3B", "e3b_ppo_craftax", CRAFTAX_RACE, 0.045),
            Method("ICM", "icm_ppo_craftax", CRAFTAX_RACE, 0.065),
            Method("RND", "rnd_ppo_craftax", CRAFTAX_RACE, 0.045),
            RANDOM_CRAFTAX,
        ),
        seeds=(11, 12, 13, 14, 15),
        note="The recurrent PPO and the game are the same, and there is no task reward; the bonus differs. Each method "
        "has its best setting on seed 1 ([tuning](tuning.md#craftax-classic)).",
        **ON_CRAFTAX,
    ),
    "craftax_long": Study(
        "20M steps of Craftax-Classic, laptop sizes",
        (
            Method("C-TeC", "ctec_ppo_rnn_craftax", CRAFTAX_LONG, 1),
            Method("E3B", "e3b_ppo_craftax", CRAFTAX_LONG, 0.9),
        ),
        seeds=(11,),
        metric="achievements",
        pictures=("curves", "unlocked"),
        at_steps=tuple(m * 1_000_000 for m in (1, 2, 5, 10, 15, 20)),
        note="No task reward; the preset but for its length. Uniform random play unlocks 2.36.",
    ),
    "etd": Study(
        "ETD against C-TeC in one PPO, laptop scale",
        (
            Method("C-TeC", "etd_ppo", f"{MAZE} --bonus ctec", 0.06),
            Method("C-TeC unit", "etd_ppo", f"{MAZE} --bonus ctec --reward-features unit", 0.06),
            Method("ETD", "etd_ppo", f"{MAZE} --bonus etd", 0.07),
            Method("random", "random_brax", f"{MAZE} --episode-length 1000 --total-timesteps 1015808", 0.005),
        ),
        seeds=(11, 12, 13, 14, 15),
        note="PPO, the shapes of the encoders, futures and standardisation are the same; the bonus differs.",
    ),
    "etd_craftax": Study(
        "ETD against C-TeC on Craftax-Classic, laptop scale",
        (
            Method("C-TeC", "etd_ppo", f"{CRAFTAX} --total-timesteps 500000 --bonus ctec", 0.1),
            Method("ETD", "etd_ppo", f"{CRAFTAX} --total-timesteps 500000 --bonus etd", 0.1),
            RANDOM_CRAFTAX,
        ),
        seeds=(11, 12, 13, 14, 15),
        note="C-TeC's reward has rows of unit length here, as released.",
        **ON_CRAFTAX,
    ),
    "noisy_tv": noisy_tv(
        "C-TeC and others in front of a noisy TV, laptop scale",
        NOISY_TV,
        hours=dict(ctec=0.03, rnd=0.02, forward_error=0.02, none=0.005),
        also=("at_tv_run", "at_tv"),
    ),
    "noisy_tv_256": noisy_tv(
        "C-TeC and others in front of a noisy TV, 256 x 256 cells and random starts",
        NOISY_TV_256,
        hours=dict(ctec=0.1, rnd=0.07, forward_error=0.07, none=0.03),
        also=("at_tv_run", "at_tv_last_fifth"),
    ),
    "speed": Study(
        "Speed of training on one core",
        (
            Method("C-TeC", "ctec_sac_brax", ANT_ONE_CORE, 0.1, kind="speed"),
            Method("C-TeC", "ctec_sac_brax", MAZE, 0.02, kind="speed"),
            Method("APT", "apt_sac_brax", MAZE, 0.02, kind="speed"),
            Method("ICM", "icm_sac_brax", MAZE, 0.02, kind="speed"),
            Method("RND", "rnd_sac_brax", MAZE, 0.02, kind="speed"),
            Method("forward model", "mbrl_sac_brax", MAZE, 0.02, kind="speed"),
            Method("ETD", "etd_ppo", MAZE, 0.03, kind="speed"),
            Method("C-TeC", "ctec_ppo_rnn_craftax", CRAFTAX, 0.05, kind="speed"),
            Method("E3B", "e3b_ppo_craftax", CRAFTAX, 0.05, kind="speed"),
            Method("ICM", "icm_ppo_craftax", CRAFTAX, 0.05, kind="speed"),
            Method("RND", "rnd_ppo_craftax", CRAFTAX, 0.05, kind="speed"),
        ),
        seeds=(1, 2, 3),
        metric="steps_per_second",
        pictures=(),
        note="Seeds are repetitions of `benchmarks/speed.py`; a run's log.txt says where the time goes.",
    ),
    "paper_ant_large": paper_coverage("ant_large_maze"),
    "paper_ant": paper_coverage("ant_hardest_maze"),
    "paper_humanoid": paper_coverage("humanoid_u_maze"),
    "paper_arm": paper_coverage("arm_binpick_hard"),
    "paper_sample_efficiency": Study(
        "The paper's sample efficiency: C-TeC after 30M, 50M and 500M steps",
        tuple(Method("C-TeC", "ctec_sac_brax", f"--env {env}", ROBOT_HOURS) for env in ROBOTS),
        at_steps=(30_000_000, 50_000_000, 500_000_000),
        note="Read off the runs of 500M steps: their first part is what a shorter run does. The paper's means and "
        "standard deviations: 1,119 ± 304, 1,916 ± 430, 2,500 ± 300 on ant_hardest_maze; 102 ± 11, 143 ± 34, "
        "230 ± 40 on humanoid_u_maze. Its bins of the arm are not ours.",
        **PAPER,
    ),
    "paper_model_based": Study(
        "The paper's model-based baseline",
        tuple(
            Method(label, script, f"--env {env}", ROBOT_HOURS)
            for env in ROBOTS
            for label, script in (("C-TeC", "ctec_sac_brax"), ("forward model", "mbrl_sac_brax"))
        ),
        note="The paper's means and standard deviations: 2,500 ± 300 and 849 ± 63 on ant_hardest_maze, 230 ± 40 and "
        "31 ± 8 on humanoid_u_maze. Its bins of the arm are not ours.",
        **PAPER,
    ),
    "paper_craftax": Study(
        "The paper's Craftax-Classic, 1B steps",
        (
            Method("C-TeC", "ctec_ppo_rnn_craftax", "--env craftax_classic", CRAFTAX_HOURS),
            Method("E3B", "e3b_ppo_craftax", "--env craftax_classic", CRAFTAX_HOURS),
            Method("ICM", "icm_ppo_craftax", "--env craftax_classic", CRAFTAX_HOURS),
            Method("RND", "rnd_ppo_craftax", "--env craftax_classic", CRAFTAX_HOURS),
            Method("random", "random_craftax", "--env craftax_classic --total-timesteps 10000000", 0.2),
        ),
        **PAPER,
        **ON_CRAFTAX,
    ),
    "paper_etd": Study(
        "The paper's comparison with ETD: robots",
        tuple(
            Method(label, "etd_ppo", f"--env {env} --bonus {bonus}", ROBOT_HOURS)
            for env in ROBOTS
            for label, bonus in (("C-TeC", "ctec"), ("ETD", "etd"))
        ),
        **PAPER,
    ),
    "paper_etd_craftax": Study(
        "The paper's comparison with ETD: Craftax-Classic in the place of its Crafter",
        (
            Method("C-TeC", "etd_ppo", "--env craftax_classic --bonus ctec", CRAFTAX_HOURS),
            Method("ETD", "etd_ppo", "--env craftax_classic --bonus etd", CRAFTAX_HOURS),
        ),
        **PAPER,
        **ON_CRAFTAX,
    ),
    "smoke": Study(
        "Two methods, two seeds, two minutes: does this command work here?",
        (
            Method("C-TeC", "ctec_sac_brax", f"{TINY} --encoder-width 16 --representation-size 8", 0.005),
            Method("forward model", "mbrl_sac_brax", f"{TINY} --model-width 16", 0.005),
        ),
        seeds=(1, 2),
        on_page=False,
    ),
}
