"""The 22 achievement rates at the end of finished Craftax runs: for each label the mean over its runs, with its standard
error.

    python benchmarks/bars.py docs/craftax_bars.png "C-TeC=runs/*ctec_ppo*" "E3B=runs/*e3b_ppo*" "random=runs/*random_craftax*"
"""
import csv
import glob
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))
from random_craftax import ACHIEVEMENTS


def last_rates(folder):
    with open(Path(folder) / "metrics.csv") as file:
        row = list(csv.DictReader(file))[-1]
    return np.array([float(row[name]) for name in ACHIEVEMENTS])


def main(out, *groups):
    figure, place, height = Figure((9, 11), layout="constrained"), np.arange(len(ACHIEVEMENTS)), 0.8 / len(groups)
    axes = figure.add_subplot()
    for i, group in enumerate(groups):
        label, pattern = group.split("=", 1)
        rates = 100 * np.array([last_rates(folder) for folder in sorted(glob.glob(pattern))])  # (runs, 22)
        if not len(rates):
            sys.exit(f"{pattern}: no run there")
        error = rates.std(axis=0, ddof=1) / np.sqrt(len(rates)) if len(rates) > 1 else np.zeros(len(ACHIEVEMENTS))
        total = rates.sum(axis=1) / 100
        label = f"{label}: {total.mean():.2f} ({len(rates)} runs)"
        axes.barh(place + (i + 0.5) * height - 0.4, rates.mean(axis=0), height, xerr=error, label=label, error_kw={"linewidth": 0.7})
        print(f"{label}: {' '.join(f'{x:.2f}' for x in total)}")
    axes.set(yticks=place, yticklabels=[name.replace("_", " ") for name in ACHIEVEMENTS], xlabel="episodes that unlocked it (%)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit('usage: python benchmarks/bars.py OUT.png "LABEL=RUN FOLDERS" ...')
    main(*sys.argv[1:])
