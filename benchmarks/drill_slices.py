"""Slices under faults at random: what is left over, what is asked for twice, what is never done.

    python benchmarks/drill_slices.py [--seeds 50] [--first 0] [--faults 8]

    supervisor --Google's client--> the service of tests/cloud/fake_tpu.py, which fails at times
         '------ bucket ------'     the storage server of the tests, which fails at times
                    '-- hosts of the job, played: install, compile, step, save

For each seed a job runs to its end while tests/cloud/enemy.py preempts its slices, gives it bad
ones, lets calls fail and kills its supervisor. Ends with 1 if a slice is left over, a request was
made twice, two were there at once, or the job is not done with its last save.
"""

import argparse
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path


def main() -> int:
    """Plays all seeds and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--faults", type=int, default=8, help="of each seed")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.cloud.enemy import drill
    from tests.storage.fake_gcs import served

    faults: Counter[tuple[str, str]] = Counter()
    problems, slices, supervisors, began = [], 0, 0, time.monotonic()
    with served() as proxy:
        for seed in range(args.first, args.first + args.seeds):
            world = drill(seed, proxy, args.faults)
            faults += world.faults
            slices += len(world.tpu.asked)
            supervisors += world.supervisors
            problems += [f"seed {seed}: {problem}" for problem in world.problems]
            print(f"seed {seed}: {world.faults.total()} faults, {len(world.tpu.asked)} slices "
                  f"{' '.join(world.problems)}", flush=True)  # fmt: skip
    tell(faults)
    print(f"\n{args.seeds} jobs, {faults.total()} faults, {slices} requests, {supervisors} "
          f"supervisors, {time.monotonic() - began:.0f} s; problems: {len(problems)}")  # fmt: skip
    print("\n".join(problems))
    return int(bool(problems))


def tell(faults: "Counter[tuple[str, str]]") -> None:
    """Prints how often each fault came, by what the job did then."""
    phases: dict[str, Counter[str]] = defaultdict(Counter)
    for (kind, phase), count in faults.items():
        phases[kind][phase] += count
    print("\n| fault | times | while |\n|---|---|---|")
    for kind, during in sorted(phases.items()):
        when = ", ".join(f"{phase} {count}" for phase, count in during.most_common())
        print(f"| {kind} | {during.total()} | {when} |")


if __name__ == "__main__":
    sys.exit(main())
