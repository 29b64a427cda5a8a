"""Tables, statistics and pictures from results/*.csv alone; reproduce.py writes those files and calls this one.

A study is reproduce.py's Study; rows are the rows of its csv, as dictionaries of strings.
"""

import csv
import dataclasses
import math

import matplotlib
import numpy as np
from matplotlib.figure import Figure

COLUMNS = ("study", "env", "method", "seed", "metric", "step", "value", "version", "machine")  # of results/<study>.csv
METRICS = {  # metric: what the tables and axes call it, and how its numbers are written
    "coverage": ("bins covered", "{:,.0f}"),
    "achievements": ("achievements unlocked in an episode", "{:,.2f}"),
    "steps_per_second": ("steps/s", "{:,.0f}"),
    "coverage_share": ("share of the free cells covered", "{:.1%}"),
    "at_tv_run": ("steps at the TV, whole run", "{:.1%}"),
    "at_tv": ("steps at the TV, last rollout", "{:.1%}"),
    "at_tv_last_fifth": ("steps at the TV, last fifth of the run", "{:.1%}"),
}
ACHIEVEMENTS = """collect_wood place_table eat_cow collect_sapling collect_drink make_wood_pickaxe make_wood_sword
    place_plant defeat_zombie collect_stone place_stone eat_plant defeat_skeleton make_stone_pickaxe make_stone_sword
    wake_up place_furnace collect_coal collect_iron collect_diamond make_iron_pickaxe make_iron_sword""".split()
CORRELATIONS = {  # what the reward is compared with: titles of the panels
    "correlation_origin": "distance from the origin",
    "correlation_start": "distance from the start",
    "correlation_visits": "visits to the bin of s",
    "correlation_visits_of_future": "visits to the bin of s_f",
}
DIAGNOSTICS = {  # columns of metrics.csv that tell how a run does: titles of the panels
    "replay_entropy": "entropy of the replay's bins (nats)",
    "accuracy": "contrastive accuracy",
    "tau": "tau",
    "reward_mean": "mean reward",
    "reward_std": "deviation of the reward",
    "q_target": "target of the critics",
    "alpha": "alpha",
    "entropy": "entropy of the policy",
    "episode_length": "length of the episodes that end",
    "displacement": "metres from s to s_f",
}
COLOURS = {  # one for each method, in every figure: Okabe and Ito's for colour-blind readers, and two that go with them
    "C-TeC": "#0072B2",
    "C-TeC goal": "#56B4E9",
    "C-TeC unit": "#332288",
    "C-TeC batch": "#88CCEE",
    "APT": "#D55E00",
    "ICM": "#009E73",
    "RND": "#E69F00",
    "forward model": "#CC79A7",
    "origin in the middle": "#44AA99",
    "origin far from the start": "#117733",
    "standardised inputs": "#AA4499",
    "gamma_cl 0.9": "#999933",
    "critics from 280": "#661100",
    "distance as reward": "#DDCC77",
    "E3B": "#882255",
    "ETD": "#994F00",
    "no bonus": "#000000",
    "random": "#999999",
}


# ------------------------------------------------------------------------------------------------------ results
def run_key(row):
    return row["env"], row["method"], str(row["seed"])


def read_csv(path):
    if not path.exists():
        return []
    with open(path) as file:
        return list(csv.DictReader(file))


def curves(rows, env, method, metric):
    """{seed: (steps, values)} of one method in one environment, from the rows of a csv."""
    points = {}
    for row in rows:
        if (row["env"], row["method"], row["metric"]) == (env, method, metric):
            points.setdefault(int(row["seed"]), []).append((int(row["step"]), float(row["value"])))
    return {seed: tuple(np.array(sorted(points[seed])).T) for seed in sorted(points)}


def values_at(curves_of_seeds, at=None):
    """{seed: the last value, or the first one at or after `at` steps}"""
    values = {}
    for seed, (steps, value) in curves_of_seeds.items():
        if at is None or steps[-1] >= at:
            values[seed] = value[-1] if at is None else value[np.searchsorted(steps, at)]
    return values


def means_over_run(curves_of_seeds):
    """{seed: the area under the curve, from 0 at step 0, divided by the steps}"""
    means = {}
    for seed, (steps, value) in curves_of_seeds.items():
        means[seed] = np.trapezoid(np.append(0.0, value), np.append(0.0, steps)) / steps[-1]
    return means


def entries(study, rows, env):
    """What the table and the bars of an environment show: (text, method, {seed: value}) of each line."""
    for method in study.methods:
        if method.env == env:
            found = curves(rows, env, method.label, study.metric)
            for at in study.at_steps or (None,):
                text = method.label if at is None else f"{method.label}, {at // 10**6}M steps"
                values = values_at(found, at)
                if values:
                    yield text, method, values


# --------------------------------------------------------------------------------------------------- statistics
def standard_error(values):
    return np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan


def interquartile_mean(values):
    """Mean of the middle half along the last axis; as in rliable, a quarter of n is rounded down."""
    cut = values.shape[-1] // 4
    return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)


def bootstrap(strata, resamples=10_000, seed=0):
    """Interquartile means of resampled runs, (..., resamples). `strata` are arrays (..., runs), one a task: runs are
    drawn with replacement inside each of them (Agarwal et al. 2021, stratified bootstrap)."""
    random = np.random.default_rng(seed)
    drawn = [runs[..., random.integers(0, runs.shape[-1], (resamples, runs.shape[-1]))] for runs in strata]
    return interquartile_mean(np.concatenate(drawn, axis=-1))


def interval(samples):
    """95% percentile interval over the last axis."""
    return np.percentile(samples, [2.5, 97.5], axis=-1)


def probability_of_improvement(ours, theirs):
    """How often a run of ours is above one of theirs, over all pairs; a tie counts half (Agarwal et al. 2021)."""
    gap = ours[:, None] - theirs
    return np.mean((gap > 0) + 0.5 * (gap == 0))


def summary(values):
    """(centre, low, high) of values (..., runs): interquartile mean and 95% interval with five runs or more, else mean
    and standard error."""
    if values.shape[-1] >= 5:
        return interquartile_mean(values), *interval(bootstrap([values], 2000))
    mean = values.mean(axis=-1)
    error = values.std(axis=-1, ddof=1) / np.sqrt(values.shape[-1]) if values.shape[-1] > 1 else 0 * mean
    return mean, mean - error, mean + error


# ------------------------------------------------------------------------------------------------------- tables
def difference(write, ours, first):
    """Ours minus the first method's, with its interval, or with its standard error when there are too few runs."""
    if min(len(ours), len(first)) >= 5:
        samples = bootstrap([ours], seed=1) - bootstrap([first], seed=2)
        low, high = interval(samples)
        return f"{write(interquartile_mean(ours) - interquartile_mean(first))} [{write(low)}, {write(high)}]"
    if min(len(ours), len(first)) < 2:
        return ""
    error = np.hypot(standard_error(ours), standard_error(first))
    return f"{write(np.mean(ours) - np.mean(first))} ± {write(error)}"


def mean_and_error(write, values):
    error = f" ± {write(standard_error(values))}" if len(values) > 1 else ""
    return f"{write(np.mean(values))}{error}" if len(values) else ""


def table_at_steps(study, rows, env):
    """Markdown lines: a row for each method, a column for each of the study's at_steps."""
    words, form = METRICS[study.metric]
    header = [f"{words}, `{env}`", *(f"{at / 1e6:g}M steps" for at in study.at_steps)]
    text = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for method in study.methods:
        found = curves(rows, env, method.label, study.metric)
        cells = [list(values_at(found, at).values()) for at in study.at_steps]
        if method.env == env and any(cells):
            text.append(f"| {method.label} | " + " | ".join(mean_and_error(form.format, x) for x in cells) + " |")
    return text if len(text) > 2 else []


def table(study, rows, env):
    """Markdown lines: each method's final values in one environment."""
    if study.at_steps:
        return table_at_steps(study, rows, env)
    words, form = METRICS[study.metric]
    write = form.format
    lines = list(entries(study, rows, env))
    if not lines:
        return []
    seeds = sorted({seed for _, _, values in lines for seed in values})
    compare = study.metric != "steps_per_second" and len(lines) > 1
    first = np.array(list(lines[0][2].values()))
    intervals = max(len(values) for _, _, values in lines) >= 5
    header = [f"{words}, `{env}`", f"seeds {' '.join(map(str, seeds))}", "mean ± standard error"]
    header += ["IQM [95% interval]"] if intervals else []
    if compare:
        header += [f"minus {lines[0][0]}" + (" [95% interval]" if intervals else " ± standard error")]
        header += [f"P({lines[0][0]} above)"] if intervals else []
    with_area = study.area and has_curves(study, rows)
    header += ["mean over the run"] if with_area else []
    header += [METRICS[metric][0] for metric in study.also]
    text = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for label, method, by_seed in lines:
        values = np.array(list(by_seed.values()))
        cells = [label, " ".join(write(by_seed[seed]) if seed in by_seed else "–" for seed in seeds)]
        cells += [mean_and_error(write, values)]
        if intervals:
            low, high = interval(bootstrap([values]))
            enough = len(values) >= 5
            cells += [f"{write(interquartile_mean(values))} [{write(low)}, {write(high)}]" if enough else ""]
        if compare:
            is_first = label == lines[0][0]
            cells += ["" if is_first else difference(write, values, first)]
            cells += ["" if is_first else f"{probability_of_improvement(first, values):.2f}"] if intervals else []
        if with_area:
            found = means_over_run(curves(rows, env, method.label, study.metric))
            cells += [mean_and_error(write, list(found.values()))]
        for metric in study.also:
            found = values_at(curves(rows, env, method.label, metric))
            cells += [mean_and_error(METRICS[metric][1].format, list(found.values()))]
        text.append("| " + " | ".join(cells) + " |")
    return text


def table_of_all(study, rows):
    """Markdown lines for studies of several environments: scores relative to the first method's mean in each one."""
    labels = list(dict.fromkeys(method.label for method in study.methods))
    scores = {label: [] for label in labels}  # label: an array of scores for each environment
    for env in study.envs:
        of_env = {label: np.array(list(values.values())) for label, _, values in entries(study, rows, env)}
        for label in labels:
            if label in of_env and labels[0] in of_env:
                scores[label].append(of_env[label] / of_env[labels[0]].mean())
    complete = [label for label in labels if len(scores[label]) == len(study.envs)]
    few = any(len(runs) < 5 for label in complete for runs in scores[label])
    if len(study.envs) < 2 or len(complete) < 2 or few or study.metric == "steps_per_second":
        return []
    text = [f"| all environments, {labels[0]}'s mean is 1 | IQM [95% interval] | minus {labels[0]} |", "|---|---|---|"]
    for label in complete:
        samples = bootstrap(scores[label], seed=1)
        low, high = interval(samples)
        centre = interquartile_mean(np.concatenate(scores[label]))
        gap = ""
        if label != labels[0]:
            gap_low, gap_high = interval(samples - bootstrap(scores[labels[0]], seed=2))
            gap_centre = centre - interquartile_mean(np.concatenate(scores[labels[0]]))
            gap = f"{gap_centre:.2f} [{gap_low:.2f}, {gap_high:.2f}]"
        text.append(f"| {label} | {centre:.2f} [{low:.2f}, {high:.2f}] | {gap} |")
    return text


def table_between_envs(study, rows):
    """Markdown lines: each method's values in the first environment minus those in the second."""
    words, form = METRICS[study.metric]
    first, second = [{label: np.array(list(values.values())) for label, _, values in entries(study, rows, env)}
                     for env in study.envs[:2]]  # fmt: skip
    text = [f"| {words} | `{study.envs[0]}` | `{study.envs[1]}` | difference |", "|---|---|---|---|"]
    for label in first:
        if label in second:
            means = [mean_and_error(form.format, values[label]) for values in (first, second)]
            text.append(f"| {label} | {' | '.join(means)} | {difference(form.format, first[label], second[label])} |")
    return text if len(text) > 2 else []


def expected(study):
    unit = "core" if study.device == "cpu" else "GPU"
    return f"{study.hours:,.0f} {unit} hours" if study.hours >= 10 else f"{study.hours:.2g} {unit} hours"


def section(name, study, rows):
    """What docs/results.md says about a study: markdown from the rows of its csv alone."""
    command = f"python benchmarks/reproduce.py {name}"
    count = len(study.methods) * len(study.seeds)
    if not rows:
        return f"To be run: `{command}`, {count} runs, expected {expected(study)}.\n"
    recorded = len({run_key(row) for row in rows})
    machines = "; ".join(dict.fromkeys(row["machine"] for row in rows))
    blocks = [f"`{command}` ({count} runs, expected {expected(study)}). {study.note}".strip()]
    blocks += ["\n".join(lines) for env in study.envs if (lines := table(study, rows, env))]
    summary_of_envs = table_between_envs if study.between_envs else table_of_all
    blocks += ["\n".join(lines) for lines in [summary_of_envs(study, rows)] if lines]
    blocks += [f"![{name}](images/{picture})" for picture in pictures(name, study, rows)]
    blocks += [f"Data: [`results/{name}.csv`](../results/{name}.csv), {recorded} of {count} runs; {machines}."]
    versions = {}
    for row in rows:
        versions.setdefault((row["env"], row["method"]), set()).add(row["version"])
    mixed = [f"{method} on {env}" for (env, method), found in versions.items() if len(found) > 1]
    which = "all rows" if len(mixed) == len(versions) else ", ".join(mixed)
    blocks += [f"Runs of more than one version of the script: {which}."] if mixed else []
    return "\n\n".join(blocks) + "\n"


INTRODUCTION = """# Results

The tables are written by `python benchmarks/reproduce.py STUDY`, from `results/*.csv`; with `--plot` they are written
again without a run. What stands between the markers is overwritten, the rest is not.

± is the standard error of the mean. IQM is the interquartile mean with its stratified bootstrap 95% interval (Agarwal
et al. 2021), given with five seeds or more. A difference whose interval contains 0 is not shown to be one. With fewer
than five seeds there is no interval: such a difference is an observation and no claim.
"""


def updated_page(text, sections):
    """The page with {study: (title, section)} between their markers. Studies that have none yet are appended."""
    text = text or INTRODUCTION
    for name, (title, content) in sections.items():
        opening = f"<!-- reproduce:{name} -->\n"
        closing = f"<!-- /reproduce:{name} -->"
        if opening not in text:
            text = f"{text.rstrip()}\n\n## {title}\n\n{opening}{closing}\n"
        before, rest = text.split(opening, 1)
        after = rest.split(closing, 1)[1]
        text = before + opening + content + closing + after
    return text


# ----------------------------------------------------------------------------------------------------- pictures
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.dpi": 200,  # 8 inches wide: 1,600 pixels, shown at 800
}


def has_curves(study, rows):
    return "curves" in study.pictures and len({row["step"] for row in rows if row["metric"] == study.metric}) > 2


def pictures(name, study, rows):
    """The files that draw() makes of these rows."""
    has_bars = rows and not {"finals", "families"}.isdisjoint(study.pictures)
    names = [f"{name}.png"] if has_bars or has_curves(study, rows) else []
    has_rates = "rates" in study.pictures and any(row["metric"] in ACHIEVEMENTS for row in rows)
    names += [f"{name}_rates.png"] if has_rates else []
    for kind, metrics in (("diagnostics", DIAGNOSTICS), ("unlocked", ACHIEVEMENTS)):
        if kind in study.pictures and any(row["metric"] in metrics for row in rows):
            names.append(f"{name}_{kind}.png")
    return names + ([f"{name}_correlations.png"] if any(row["metric"] in CORRELATIONS for row in rows) else [])


def draw_curves(axes, study, rows, env):
    longest = max(int(row["step"]) for row in rows if row["env"] == env)
    unit, words = (1e6, "million steps") if longest >= 1e5 else (1, "environment steps")
    for method in study.methods:
        found = curves(rows, env, method.label, study.metric) if method.env == env else {}
        steps = sorted(set.intersection(*(set(steps) for steps, _ in found.values()))) if found else []
        if len(steps) > 1:
            values = np.array([value[np.searchsorted(at, steps)] for at, value in found.values()]).T  # (points, seeds)
            centre, low, high = summary(values)
            x = np.array(steps) / unit
            axes.plot(x, centre, color=COLOURS.get(method.label, "0.3"), label=method.label, linewidth=1.6)
            axes.fill_between(x, low, high, color=COLOURS.get(method.label, "0.3"), alpha=0.2, linewidth=0)
    for at in study.at_steps:
        axes.axvline(at / unit, color="0.5", linewidth=0.8, linestyle=":")
    if study.paper:
        steps, means, deviations = np.array(study.paper).T
        label = "the paper's C-TeC, mean and deviation"
        axes.errorbar(steps / unit, means, deviations, fmt="s", color="0.15", capsize=3, markersize=4, label=label)
    axes.set(xlabel=words, ylabel=METRICS[study.metric][0])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,g}")


def draw_close_up(axes, study, rows, env):
    """The upper half of the curves, without the paper's points, which may be far above them."""
    draw_curves(axes, dataclasses.replace(study, paper=()), rows, env)
    axes.set_ylim(bottom=axes.get_ylim()[1] / 2)
    axes.set_title("our runs, close up")


def draw_finals(axes, study, rows, env):
    """A bar for each line of the table, and a dot for each seed."""
    lines = list(entries(study, rows, env))
    for i, (_, method, by_seed) in enumerate(lines):
        values = np.array(list(by_seed.values()))
        centre, low, high = summary(values)
        colour = COLOURS.get(method.label, "0.3")
        axes.barh(i, centre, 0.7, color=colour, alpha=0.55)
        if len(values) > 1:
            axes.errorbar(centre, i, xerr=[[centre - low], [high - centre]], color="0.15", capsize=3, linewidth=1.2)
        offsets = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else [0.0]
        axes.scatter(values, i + np.array(offsets), s=14, color=colour, edgecolor="0.15", linewidth=0.6, zorder=3)
    axes.set_yticks(range(len(lines)), [text for text, _, _ in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(METRICS[study.metric][0])
    axes.xaxis.set_major_formatter("{x:,g}")


def draw_families(figure, study, rows, env):
    """A panel of bars for each family of methods, with the study's first method on top of each."""
    families = list(dict.fromkeys(method.family for method in study.methods if method.family))
    panels = figure.subplots(math.ceil(len(families) / 2), 2, sharex=True)
    for axes in panels.flat[len(families) :]:
        axes.remove()
    for axes, family in zip(panels.flat, families):
        first, *others = study.methods
        members = (first, *(method for method in others if method.family == family))
        draw_finals(axes, dataclasses.replace(study, methods=members), rows, env)
        axes.set_title(family)
        axes.set_xlabel("")
    shown = panels.flat[: len(families)]
    shown[0].set_xlim(0, 1.05 * max(axes.dataLim.x1 for axes in shown))  # of all of them: they share it
    figure.supxlabel(METRICS[study.metric][0], fontsize=9)


def draw_rates(figure, study, rows):
    """How many of the last episodes unlocked each achievement: a bar for each method, a dot for each seed."""
    labels = [method.label for method in study.methods]
    axes = figure.add_subplot()
    height = 0.8 / len(labels)
    place = np.arange(len(ACHIEVEMENTS))
    for i, method in enumerate(study.methods):
        rates = [values_at(curves(rows, method.env, method.label, name)) for name in ACHIEVEMENTS]
        if all(rates):
            y = place + (i + 0.5) * height - 0.4
            colour = COLOURS.get(method.label, "0.3")
            means = [100 * np.mean(list(rate.values())) for rate in rates]
            axes.barh(y, means, height, color=colour, alpha=0.7, label=method.label)
            for at, rate in zip(y, rates):
                axes.plot(100 * np.array(list(rate.values())), [at] * len(rate), ".", color="0.15", markersize=2.5)
    axes.set_yticks(place, [name.replace("_", " ") for name in ACHIEVEMENTS])
    axes.set_ylim(len(ACHIEVEMENTS) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("episodes that unlocked it (%); dots: seeds")
    figure.legend(loc="outside upper center", ncols=len(labels))


def draw_correlations(figure, study, rows):
    """Rank correlations of the reward over a run, a panel for each quantity: mean and standard error of the seeds."""
    panels = figure.subplots(1, len(CORRELATIONS), sharey=True)
    for axes, (metric, title) in zip(panels, CORRELATIONS.items()):
        for method in study.methods:
            found = curves(rows, method.env, method.label, metric)
            if found:
                count = min(len(steps) for steps, _ in found.values())
                values = np.array([value[:count] for _, value in found.values()])  # (seeds, moments)
                mean = values.mean(axis=0)
                error = values.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0 * mean
                steps = next(iter(found.values()))[0][:count] / 1e6
                axes.plot(steps, mean, color=COLOURS[method.label], label=method.label, linewidth=1.4)
                axes.fill_between(
                    steps, mean - error, mean + error, color=COLOURS[method.label], alpha=0.2, linewidth=0
                )
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set(title=title, xlabel="million steps", ylim=(-1, 1))
    panels[0].set_ylabel("rank correlation with the reward")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def draw_metrics(figure, study, rows, titles):
    """Curves of the metrics {metric: title}, a panel for each, a line for each seed."""
    panels = figure.subplots(math.ceil(len(titles) / 5), 5, sharex=True, squeeze=False)
    for axes in panels.flat[len(titles) :]:
        axes.remove()
    for axes, (metric, title) in zip(panels.flat, titles.items()):
        for method in study.methods:
            for steps, values in curves(rows, method.env, method.label, metric).values():
                axes.plot(steps / 1e6, values, color=COLOURS[method.label], label=method.label, linewidth=1.2)
        axes.set_title(title)
    figure.supxlabel("million steps", fontsize=9)
    named = dict(zip(*reversed(panels[0, 0].get_legend_handles_labels())))  # one entry for the seeds of a method
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=len(named))


def tick_texts(axes):
    return [text.get_text() for text in axes.get_yticklabels()]


def draw(name, study, rows, folder):
    """The pictures of a study, from the rows of its csv."""
    folder.mkdir(parents=True, exist_ok=True)
    envs = [env for env in study.envs if any(row["env"] == env for row in rows)]
    with matplotlib.rc_context(STYLE):
        for picture in pictures(name, study, rows):
            if picture.endswith("_correlations.png"):
                figure = Figure((9, 3.2), layout="constrained")
                draw_correlations(figure, study, rows)
                figure.savefig(folder / picture)
                continue
            if picture.endswith("_diagnostics.png"):
                figure = Figure((11, 4.2), layout="constrained")
                draw_metrics(figure, study, rows, DIAGNOSTICS)
                figure.savefig(folder / picture)
                continue
            if picture.endswith("_unlocked.png"):
                rates = [row for row in rows if row["metric"] in ACHIEVEMENTS and float(row["value"]) >= 0.005]
                seen = [name for name in ACHIEVEMENTS if any(row["metric"] == name for row in rates)]
                figure = Figure((11, 1.2 + 1.5 * math.ceil(len(seen) / 5)), layout="constrained")
                draw_metrics(figure, study, rows, {name: name.replace("_", " ") for name in seen})
                figure.savefig(folder / picture)
                continue
            if "families" in study.pictures:
                figure = Figure((8, 9), layout="constrained")
                draw_families(figure, study, rows, *envs)
                figure.savefig(folder / picture)
                continue
            if picture.endswith("_rates.png"):
                figure = Figure((8, 9), layout="constrained")
                draw_rates(figure, study, rows)
                figure.savefig(folder / picture)
                continue
            # one environment: curves beside bars. Several: a column each, curves above bars
            drawings = [draw_curves] if has_curves(study, rows) else []
            drawings += [draw_close_up] if drawings and study.paper else []
            drawings += [draw_finals] if "finals" in study.pictures else []
            shape = (1, len(drawings)) if len(envs) == 1 else (len(drawings), len(envs))
            figure = Figure((8, 3.4 if shape[0] == 1 else 5.6), layout="constrained")
            panels = figure.subplots(*shape, squeeze=False)
            for i, drawing in enumerate(drawings):
                for j, env in enumerate(envs):
                    axes = panels[0, i] if len(envs) == 1 else panels[i, j]
                    drawing(axes, study, rows, env)
                    if i == 0:
                        axes.set_title(env)
                    if j > 0:
                        axes.set_ylabel("")
                    if j > 0 and drawing is draw_finals and tick_texts(axes) == tick_texts(panels[i, 0]):
                        axes.tick_params(labelleft=False)  # the names stand at the left
            seeds = [len(values) for env in envs for _, _, values in entries(study, rows, env)]
            words = "interquartile mean and 95% interval" if min(seeds) >= 5 else "mean and standard error"
            words += "; dots: seeds" if "finals" in study.pictures else ""
            figure.suptitle("one seed" if max(seeds) == 1 else words, fontsize=9, color="0.3")
            if has_curves(study, rows):
                handles, labels = panels[0, 0].get_legend_handles_labels()
                columns = 7 if sum(map(len, labels)) < 90 else 4  # what fits into the width
                figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns))
            figure.savefig(folder / picture)
