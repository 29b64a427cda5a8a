"""Curves and a table from the metrics.csv of finished runs: for each label the mean over its runs, and a band of one
standard deviation.

    python benchmarks/curves.py docs/race.png coverage "C-TeC=runs/point_hardest_maze__ctec_sac_brax__*"
    python benchmarks/curves.py docs/craftax.png achievements "C-TeC=runs/..." "entropy 0.01=runs/..." "random=2.3"
"""
import csv
import glob
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(folder, column):
    """(steps, values, steps/s, seed) of one run."""
    with open(Path(folder) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row[column]]
    steps, values, rate = (np.array([float(row[name] or 0) for row in rows]) for name in ("steps", column, "steps_per_second"))
    return steps, values, np.median(rate), json.loads((Path(folder) / "args.json").read_text())["seed"]


def main(out, column, *groups):
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    print(f"| | {column} of each seed | mean | standard deviation | standard error | steps/s |\n|---|---|---|---|---|---|")
    for group in groups:
        label, pattern = group.split("=", 1)
        try:
            axes.axhline(float(pattern), color="0.5", linestyle="--", label=label)
            continue
        except ValueError:
            pass
        runs = sorted((read(folder, column) for folder in glob.glob(pattern)), key=lambda run: run[3])
        if not runs or not all(len(run[0]) for run in runs):
            sys.exit(f"{pattern}: no run there, or one without a row of {column}")
        length = min(len(run[0]) for run in runs)
        values = np.stack([run[1][:length] for run in runs])
        final, mean, std = values[:, -1], values.mean(axis=0), values.std(axis=0, ddof=1) if len(runs) > 1 else 0 * values[0]
        (line,) = axes.plot(runs[0][0][:length], mean, label=f"{label} ({len(runs)})")
        axes.fill_between(runs[0][0][:length], mean - std, mean + std, alpha=0.2, color=line.get_color())
        each = " ".join(f"{run[3]}: {value:,.4g}" for run, value in zip(runs, final))
        error = std[-1] / np.sqrt(len(runs))
        print(f"| {label} | {each} | {final.mean():,.4g} | {std[-1]:,.3g} | {error:,.3g} | {np.median([run[2] for run in runs]):,.0f} |")
    axes.set(xlabel="environment steps", ylabel=column)
    axes.legend()
    figure.savefig(out, dpi=100)
    print(f"\n{out}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit('usage: python benchmarks/curves.py OUT.png COLUMN "LABEL=RUN FOLDERS" ... ["LABEL=NUMBER"]')
    main(*sys.argv[1:])
