#!/usr/bin/env python3
"""Time against rows, a panel for each number of heads, beside the baseline's curve and the floor:
plot_rows.py RECORDS.json OUT.svg (what `sparsemla bench --suite records --json` wrote; needs matplotlib)."""
import json
import re
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"
matplotlib.rcParams["svg.hashsalt"] = "sparsemla"  # the same file from the same figures
import matplotlib.pyplot as plt

HEADS = (16, 64, 96, 128)
COLUMNS = 2048
RECORDS = {"fp8_576": "fp8, 576 bytes", "fp8_ds_mla_656": "fp8_ds_mla, 656 bytes"}


def read_lines(report):
    """{(record, heads): [(rows, us, floor us, baseline us or None)]} of one source of COLUMNS columns."""
    lines = {}
    for timing in report["timings"]:
        step = re.fullmatch(r"(?:same|heads)/(\w+)/h(\d+)/r(\d+)/(\d+)", timing["step"])
        if not step or int(step[4]) != COLUMNS or timing["refused"]:
            continue
        line = lines.setdefault((step[1], int(step[2])), {})
        line[int(step[3])] = (timing["cold"]["median_us"], timing["floor_us"], timing["baseline_cold_us"])
    return {key: [(rows, *line[rows]) for rows in sorted(line)] for key, line in lines.items()}


def draw(axes, lines, heads):
    for record, colour in zip(RECORDS, ("tab:blue", "tab:orange")):
        points = lines.get((record, heads), [])
        rows = [point[0] for point in points]
        axes.plot(rows, [point[1] for point in points], "o-", color=colour, label=RECORDS[record])
        axes.plot(rows, [point[2] for point in points], ":", color=colour, label="floor of it")
    baseline = [(point[0], point[3]) for point in lines.get(("fp8_ds_mla_656", heads), []) if point[3]]
    if baseline:
        axes.plot(*zip(*baseline), "s--", color="tab:gray", label="FlashMLA, 656 bytes")
    axes.set(xscale="log", yscale="log", title=f"{heads} heads", xlabel="rows", ylabel="microseconds, cold")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64, 128], [1, 2, 4, 8, 16, 32, 64, 128])
    axes.minorticks_off()
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100, 200], [1, 2, 5, 10, 20, 50, 100, 200])
    axes.set_ylim(0.4, 300)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        report = json.load(file)
    lines = read_lines(report)
    figure, panels = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for axes, heads in zip(panels.flat, HEADS):
        draw(axes, lines, heads)
    figure.suptitle(f"{report['name']}: a step of {COLUMNS} columns a row, BF16 queries")
    figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
