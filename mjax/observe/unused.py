"""`python -m mjax.observe unused`: find parameters that never had a gradient.

    python -m mjax.observe unused --work-dir runs/a [--step N] [--json] [--out FILE]

Input: a checkpoint. Output: the parameters and single layers of stacked parameters
whose gradient was zero in every step; then slices of other parameters, such as heads or
rows of an embedding. Only the moments of the optimizer are read (see
`gradient_traces`): nothing is trained and no device is used. Exit codes: 0 done, 2 bad
input.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.ckpt import places
from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.saved_step import SavedStep
from mjax.cli.flags.standard import ArgumentParser
from mjax.observe import gradient_traces, output
from mjax.observe.gradient_traces import MU, NU, Found, Part, Piece, Unused

_PARAMS = "params."
_COUNT = "opt_state.adam.count"
_SHOWN = 8
"""Maximum number of index ranges to print. That many ranges fit into a line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Result of the command."""

    path: str
    step: int
    updates: int
    """Number of updates that the moments include; skipped steps are not counted."""
    found: Found
    forgotten_after: int | None
    """Number of updates after which a gradient of 1e-6 leaves no trace; None:
    unknown."""
    problems: tuple[str, ...]


class _Moments:
    """A saved step, read in the pieces in which it was stored."""

    def __init__(self, saved: SavedStep) -> None:
        self._saved = saved

    def names(self) -> Iterable[str]:
        return self._saved.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._saved.shape(name)

    def pieces(self, name: str) -> Iterable[Piece]:
        """Yield the pieces; the checksum of each is verified."""
        for piece in self._saved.pieces[name]:
            yield piece.box, self._saved.read_piece(name, piece)


def read(path: Path, step: int | None) -> Report:
    """Check the gradients of a checkpoint.

    Args:
      path: work dir of a run, a folder of checkpoints, or one checkpoint.
      step: step of the checkpoint; None takes the newest.
    Raises:
      ValueError: there is no checkpoint, it cannot be read, or it has no moments.
    """
    folder = places.choose(places.find(str(path)), step)
    try:
        saved = SavedStep(folder)
        names = {*saved.names()}
        if _COUNT not in names or not any(name.startswith(NU) for name in names):
            raise ValueError(
                f"{folder} has no moments of an optimizer ({NU}...), so its gradients "
                "are unknown; give a checkpoint that mjax.train saved"
            )
        updates = int(saved.read(_COUNT))
        if updates == 0:
            raise ValueError(
                f"{folder} has had no update, so all moments are zero; give a later "
                "--step"
            )
        found = gradient_traces.find_unused(_Moments(saved))
    except (DamagedError, RuntimeError) as error:
        raise ValueError(f"{folder}: {error}; give another --step") from error
    beta2 = _beta2(saved.manifest.run)
    limit = None if beta2 is None else gradient_traces.forgotten_after(beta2)
    return Report(
        path=str(folder),
        step=saved.manifest.step,
        updates=updates,
        found=found,
        forgotten_after=limit,
        problems=_problems(names),
    )


def _beta2(run: Mapping[str, Any]) -> float | None:
    """Return the decay of nu from the config that was saved with the state."""
    optim = (run.get("config") or {}).get("optim") or {}
    beta2: Any = optim.get("beta2")
    is_number = isinstance(beta2, int | float) and not isinstance(beta2, bool)
    return float(beta2) if is_number and 0 <= beta2 < 1 else None


def _problems(names: set[str]) -> tuple[str, ...]:
    """Return a problem if parameters have no moments."""
    params = sorted(n.removeprefix(_PARAMS) for n in names if n.startswith(_PARAMS))
    without = [n for n in params if not {f"{NU}{n}", f"{MU}{n}"} <= names]
    if not without:
        return ()
    return (f"{', '.join(without)}: no moments, so it is not trained and not checked",)


# ------------------------------------------------------------------------------ output


def summary(report: Report) -> str:
    """Return the result in one line."""
    found = report.found
    if not found.unused:
        return f"each of {found.num_parameters} parameters had a gradient"
    when = f"in any of {report.updates:,} updates"
    if _forgets(report):
        when = f"in the last {report.forgotten_after:,} updates or more"
    tiny = sum(one.reason == "tiny gradient" for one in found.unused)
    num = len(found.unused) - tiny
    said = f"{num} of {found.num_parameters} parameters had no gradient {when}"
    if tiny:
        said += f"; the gradients of {tiny} are so small that their squares are zero"
    return said


def _forgets(report: Report) -> bool:
    limit = report.forgotten_after
    return limit is not None and report.updates > limit


def as_json(report: Report) -> dict[str, Any]:
    """Return the object that --json prints."""
    fields = dataclasses.asdict(report)
    return {
        "format": "mjax-unused",
        "version": 1,
        "summary": summary(report),
        **{name: value for name, value in fields.items() if name != "found"},
        **fields["found"],
    }


def page(report: Report) -> str:
    """Return the result for people."""
    found = report.found
    lines = [f"{report.path}: {summary(report)}", ""]
    rows = [
        ["all parameters of the layer", str(layer), "", "no gradient"]
        for layer in found.dead_layers
    ]
    rows += [
        [*_place(one), "x".join(map(str, one.shape)) or "scalar", one.reason]
        for one in found.unused
        if one.layer not in found.dead_layers
    ]
    if rows:
        head = ["parameter", "layer", "shape", ""]
        lines += [*output.aligned([head, *rows], left=4), ""]
    if found.parts:
        lines.append(
            "Slices without a gradient. This is usual for tokens that do not occur and "
            "for the padding of the vocabulary:"
        )
        head = ["parameter", "layer", "dim", "slices", "indexes"]
        rows = [
            [
                *_place(part),
                str(part.dim),
                f"{len(part.indexes)} of {part.size}",
                _ranges(part.indexes),
            ]
            for part in found.parts
        ]
        lines += [*output.aligned([head, *rows], left=5), ""]
    if _forgets(report):
        lines.append(
            f"The moments forget: a gradient of {gradient_traces.SMALL_GRADIENT:g} "
            f"leaves no trace after {report.forgotten_after:,} updates with zero "
            "gradients. An earlier --step shows earlier gradients."
        )
    return "\n".join(lines).rstrip() + "\n"


def _place(one: Unused | Part) -> tuple[str, str]:
    return one.name, "-" if one.layer is None else str(one.layer)


def _ranges(indexes: Sequence[int]) -> str:
    """Format the first indexes as ranges."""
    found: list[list[int]] = []
    for index in indexes:
        if found and found[-1][1] == index - 1:
            found[-1][1] = index
        else:
            found.append([index, index])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in found[:_SHOWN]]
    return ", ".join(shown) + (", ..." if len(found) > _SHOWN else "")


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.observe unused",
        description="Find parameters that had no gradient in any step of a run.",
    )
    add = parser.add_argument
    add(
        "--work-dir",
        type=Path,
        required=True,
        help="work dir of the run, its folder of checkpoints, or one checkpoint",
    )
    add("--step", type=int, help="step of the checkpoint; default: the newest")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args(argv)
    try:
        report = read(args.work_dir, args.step)
        text = json.dumps(as_json(report), indent=1) + "\n"
        if args.out is not None:
            output.write(args.out, text)
    except ValueError as error:
        return output.refuse(error)
    output.warn(report.problems)
    print(text if args.json else page(report), end="")
    return 0
