"""Train the grid of a study and write its page: what differs, with bands.

Commands, from the root of the repository:

    python -m scripts.compare convergence               # block, window, LAMB, precision
    python -m scripts.compare convergence --size night  # larger; 16 hours of a core
    python -m scripts.compare fp8                       # bfloat16 and FP8

Finished runs are kept in docs/benchmarks/<study>.json with the commit they were made
at. A grid that was killed, or stopped by --for-s, goes on with the same command. Each
run has one thread. --anew forgets runs of other commits; --page-only trains nothing.
Exit code: 1 if a null comparison is separated, 3 if runs are missing.
"""

import argparse
import sys
from collections.abc import Sequence

from scripts.compare import page
from scripts.compare.grid import RUNS_DIR, Results, locked, run_grid, train, unfinished
from scripts.compare.studies import STUDIES, Size, Study
from scripts.evidence import BENCHMARKS_DIR, commit


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--size", help="of models and runs; the first one by default")
    parser.add_argument("--for-s", type=float, help="start no run that would end later")
    parser.add_argument("--anew", action="store_true", help="no runs of other commits")
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    asked = parser.parse_args(argv)
    study = STUDIES[asked.study]
    sizes = {size.name: size for size in study.sizes}
    if asked.size is not None and asked.size not in sizes:
        parser.error(f"--size must be one of {', '.join(sizes)}, got {asked.size}")
    size = study.sizes[0] if asked.size is None else sizes[asked.size]
    with locked(RUNS_DIR / f"{study.name}.lock"):
        return _compare(study, size, asked)


def _compare(study: Study, size: Size, asked: argparse.Namespace) -> int:
    results = Results(BENCHMARKS_DIR / f"{study.name}.json")
    if asked.anew:
        results.drop_other_commits(commit())
    if not asked.page_only:
        run_grid(study, size, results, trainer=train, for_s=asked.for_s, say=_say)
    if not page.differences(study, size, results):
        print("no comparison has both its arms finished: no page is written")
        return 3
    wrong = page.write(study, size, results)
    print("\n".join(wrong) or BENCHMARKS_DIR / f"{study.name}.md")
    is_complete = not any(unfinished(arm, size, results) for arm in study.arms)
    return 1 if wrong else 0 if is_complete else 3


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
