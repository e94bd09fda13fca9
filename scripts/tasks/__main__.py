"""Do the tasks of docs/tasks.md: `python -m scripts.tasks --folder DIR [--only N]`.

Input: a folder, which keeps the results between calls, so that one task can be
repeated. Output: RESULTS.json there, and with --write mjax's columns in docs/tasks.md,
if every task has been done. It needs make env-hf, make env-eval and make dist. On 2 CPU
cores it takes about 15 minutes.
"""

import argparse
import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

from scripts.evidence import commit
from scripts.tasks import first_hour, folders, page, training, tuning, using
from scripts.tasks.place import Place, Task, TaskFailedError

ALL: dict[int, Task] = {
    task.number: task
    for module in (first_hour, training, using, folders, tuning)
    for task in module.TASKS
}
RESULTS = "RESULTS.json"


def in_order(numbers: list[int]) -> list[int]:
    """Return the numbers ordered so that each task follows those it needs."""
    found: list[int] = []
    for number in numbers:
        before = [n for n in ALL[number].needs if n in numbers]
        found += [n for n in [*before, number] if n not in found]
    return found


def do(task: Task, folder: Path) -> dict[str, Any]:
    """Do one task in a new folder; return its row."""
    own, shared = folder / f"task-{task.number}", folder / "shared"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    shared.mkdir(exist_ok=True)
    place = Place(folder=own, shared=shared)
    said = ""
    try:
        task.do(place)
    except TaskFailedError as error:
        said = str(error)
    except Exception:
        said = traceback.format_exc()
    return {
        "commit": commit(),
        "failed": said,
        "commands": place.shown,
        "seconds": round(place.seconds, 1),
        "notes": place.notes,
    }


def main() -> int:
    """Do tasks; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", type=int, nargs="+", choices=sorted(ALL))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.folder.absolute() / RESULTS
    results = json.loads(path.read_text()) if path.exists() else {}
    numbers = asked.only or ([] if asked.write and results else sorted(ALL))
    for number in in_order(numbers):
        row = results[str(number)] = do(ALL[number], path.parent)
        path.write_text(json.dumps(results, indent=1))
        print(f"task {number}: {row['seconds']} s", row["failed"] or "done", flush=True)
        for note in row["notes"]:
            print(f"  {note}", flush=True)
    failed = [n for n in sorted(ALL) if results.get(str(n), {"failed": "x"})["failed"]]
    if asked.write:
        if failed:
            print(f"not written: tasks {failed} are not done", file=sys.stderr)
            return 1
        page.write({int(n): row for n, row in results.items()})
    return int(any(results[str(n)]["failed"] for n in numbers))


if __name__ == "__main__":
    sys.exit(main())
