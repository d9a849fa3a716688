#!/usr/bin/env python3
"""Registers, spills, stack and static shared memory of every kernel within the committed budget, and no wgmma that ptxas
had to serialise: cuda_budgets_test.py BUDGETS OBJECT... (the logs beside the objects are cmake/keep_ptxas_log.sh's)."""
import os
import re
import subprocess
import sys

FIELDS = ("registers", "spill", "stack", "shared")


def read_budgets(path):
    """[(pattern, {field: limit})]"""
    budgets = []
    for number, line in enumerate(open(path), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        parts = line.split(None, len(FIELDS))
        if len(parts) != len(FIELDS) + 1 or not all(part.isdigit() for part in parts[:-1]):
            sys.exit(f"{path}:{number}: need {len(FIELDS)} numbers and a pattern, got '{line}'")
        budgets.append((parts[-1], dict(zip(FIELDS, map(int, parts)))))
    return budgets


def short_name(mangled):
    """'decode<Tile<16, 576, (Half)1, true> >'"""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.sub(r"\b(sparsemla|detail|latency|balanced|wide|device)::", "", name)
    return re.sub(r"\([^()]*\)$", "", name)


def read_log(path):
    """({(kernel, architecture): {field: value}}, [warning])"""
    kernels, warnings, entry = {}, [], None
    for line in open(path):
        if found := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            entry = kernels.setdefault((short_name(found[1]), found[2]), dict.fromkeys(FIELDS, 0))
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            entry["stack"] = int(found[1])
            entry["spill"] = max(int(found[2]), int(found[3]))
        elif found := re.search(r"Used (\d+) registers", line):
            entry["registers"] = int(found[1])
            if smem := re.search(r"(\d+) bytes smem", line):
                entry["shared"] = int(smem[1])
        elif re.search(r"\(C75\d\d\)|wgmma.*serialized", line):
            warnings.append(line.strip())
    return kernels, warnings


def main():
    budgets_path, objects = sys.argv[1], [path for path in sys.argv[2:] if path.endswith(".cu.o")]
    budgets = read_budgets(budgets_path)
    kernels, failures = {}, []
    for path in objects:
        log = path + ".ptxas.log"
        if not os.path.exists(log):
            failures.append(f"no {log}: was the object built by cmake/keep_ptxas_log.sh?")
            continue
        of_log, warnings = read_log(log)
        kernels.update(of_log)
        failures += warnings
    largest = {pattern: None for pattern, _ in budgets}
    for (name, architecture), used in sorted(kernels.items()):
        matching = [(pattern, limits) for pattern, limits in budgets if re.fullmatch(pattern, name)]
        if len(matching) != 1:
            failures.append(f"{name}: {len(matching)} lines of {budgets_path} fit, one must")
            continue
        pattern, limits = matching[0]
        before = largest[pattern] or dict.fromkeys(FIELDS, 0)
        largest[pattern] = {field: max(before[field], used[field]) for field in FIELDS}
        for field in FIELDS:
            if used[field] > limits[field]:
                failures.append(f"{name} for {architecture}: {field} {used[field]}, the budget is {limits[field]}")
    print(f"{len(kernels)} kernels in {len(objects)} objects")
    for pattern, limits in budgets:
        if largest[pattern] is None:
            failures.append(f"no kernel is called '{pattern}': remove the line")
            continue
        print("  ".join(f"{field} {largest[pattern][field]} of {limits[field]}" for field in FIELDS), pattern, sep="  ")
    for failure in failures:
        print("over budget:", failure)
    sys.exit(1 if failures or not kernels else 0)


if __name__ == "__main__":
    main()
