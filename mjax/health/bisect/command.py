"""The command: `python -m mjax.health bisect`.

Plan: `bisect --hosts a b c d -- ./test {hosts}` prints the first tests. Write their
outcomes into a file; `--outcomes FILE` then prints the next tests, or the answer.
Run: `bisect --run --hosts a b c d -- ./test {hosts}` runs the tests too.

Exit codes: 0 nothing bad was found, 1 something bad was found or the search ended
undecided, 2 bad input, 3 tests of the plan must run first.
"""

import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from mjax.cli import flags
from mjax.health.bisect import outcomes as outcome_files
from mjax.health.bisect import report
from mjax.health.bisect.links import advance_links
from mjax.health.bisect.outcomes import LEAST_COMPARED, Criteria, Record, judge
from mjax.health.bisect.problem import Outcome, Problem, SearchConfig
from mjax.health.bisect.runner import check_template, run_round
from mjax.health.bisect.search import Progress, Round, advance

_PROG = "python -m mjax.health bisect"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BisectFlags(SearchConfig):
    """Find bad hosts by tests of groups; the test command follows --."""

    hosts: tuple[str, ...] = ()
    """Hosts to search; list neighbours next to each other."""
    hosts_file: Path | None = None
    """File with one host per line, instead of --hosts."""
    good: tuple[str, ...] = ()
    """Hosts known to be good; they only fill up groups."""
    run: bool = False
    """Run the tests here; absent: print the tests to run."""
    plan: bool = False
    """Print the next tests and run nothing, as without --run."""
    outcomes: Path | None = None
    """File of completed tests (.json, .toml); --run extends it (.json)."""
    slow: float | None = None
    """A test also fails if it takes longer than this multiple of the median time."""
    same_output: bool = False
    """A test also fails if its last line of output differs from that of most tests."""
    links: bool = False
    """Test pairs of hosts, to find bad links between good hosts too."""
    time_limit_s: float = 600.0
    """Time limit of a test in seconds; a test that exceeds it fails (--run)."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run and self.plan:
            raise ValueError(
                "--run runs the tests and --plan does not; give one of them"
            )
        if self.slow is not None and not 1 < self.slow < float("inf"):
            raise ValueError(f"--slow must be above 1, got {self.slow:g}")
        if not 0 < self.time_limit_s < float("inf"):
            raise ValueError(
                f"--time-limit-s must be positive, got {self.time_limit_s:g}"
            )
        if self.hosts and self.hosts_file is not None:
            raise ValueError("--hosts and --hosts-file both name the hosts; give one")
        if self.same_output and not self.links and self.min_hosts != self.max_hosts:
            raise ValueError(
                "--same-output compares tests of the same number of hosts; give "
                f"--min-hosts and --max-hosts the same value, got {self.min_hosts} and "
                f"{self.max_hosts}"
            )
        if self.run and self.outcomes is not None and self.outcomes.suffix != ".json":
            raise ValueError(
                "--run writes --outcomes as JSON; name a .json file, got "
                f"{self.outcomes}"
            )
        if self.run and self.outcomes is not None:
            folder = self.outcomes.absolute().parent
            if not folder.is_dir():
                raise ValueError(
                    f"--outcomes {self.outcomes}: its folder does not exist; make it "
                    "first"
                )

    @property
    def criteria(self) -> Criteria:
        """Rules by which a test fails even if its command succeeds."""
        return Criteria(slow=self.slow, same_output=self.same_output)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Args:
      argv: words after `bisect`.
    """
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    own, template = words[:cut], words[cut + 1 :]
    try:
        config: BisectFlags = flags.read(
            BisectFlags, own, prog=_PROG, guide=flags.Guide(description=__doc__ or "")
        )
        problem = _problem(config)
        if template or config.run:
            check_template(template)
        records = _read_records(config)
        if config.run:
            # A signal that ends the search also ends its tests.
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                return _run(config, problem, template, records)
            finally:
                signal.signal(signal.SIGTERM, before)
        return _show(config, problem, template, records)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; --outcomes contains the completed tests", file=sys.stderr)
        return 1


def _problem(config: BisectFlags) -> Problem:
    hosts = config.hosts
    if config.hosts_file is not None:
        try:
            lines = config.hosts_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"--hosts-file {config.hosts_file} cannot be read: {error}"
            ) from error
        stripped = (line.partition("#")[0].strip() for line in lines)
        hosts = tuple(line for line in stripped if line)
        if not hosts:
            raise ValueError(f"--hosts-file {config.hosts_file} names no host")
    names = {field.name for field in dataclasses.fields(SearchConfig)}
    return Problem(
        hosts=hosts,
        good=config.good,
        config=SearchConfig(**{name: getattr(config, name) for name in names}),
        least_groups=LEAST_COMPARED if config.criteria.is_compared else 1,
    )


def _read_records(config: BisectFlags) -> list[Record]:
    if config.outcomes is None or (config.run and not config.outcomes.exists()):
        return []
    return outcome_files.read(config.outcomes)


def _look(
    config: BisectFlags, problem: Problem, records: Sequence[Record]
) -> tuple[Progress, list[Outcome]]:
    judged = judge(records, config.criteria)
    search = advance_links if config.links else advance
    return search(problem, judged), judged


def _show(
    config: BisectFlags,
    problem: Problem,
    template: Sequence[str],
    records: Sequence[Record],
) -> int:
    """Print the next tests, or the answer; return the exit code."""
    progress, judged = _look(config, problem, records)
    if progress.rounds and not config.json:
        rounds = _numbered(progress, records)
        print(report.assumptions(problem))
        print(report.plan(rounds, template))
        print("\nWrite the outcomes into a .toml file, and give it with --outcomes:\n")
        print(report.form(rounds, config.criteria))
        return 3
    return _end(config, problem, template, records, progress, judged)


def _run(
    config: BisectFlags,
    problem: Problem,
    template: Sequence[str],
    records: list[Record],
) -> int:
    """Run rounds of tests until there is an answer; return the exit code."""
    told = sys.stderr if config.json else sys.stdout
    print(report.assumptions(problem), file=told, flush=True)

    def done(record: Record) -> None:
        records.append(record)
        if config.outcomes is not None:
            outcome_files.write(config.outcomes, records)
        why = f" ({record.reason})" if record.reason else ""
        took = f"{record.seconds or 0:.2f} s"
        names = ",".join(record.hosts)
        print(f"  {record.outcome} {names} {took}{why}", file=told, flush=True)

    num_told = len(records)
    while True:
        progress, judged = _look(config, problem, records)
        for record, outcome in list(zip(records, judged, strict=False))[num_told:]:
            if outcome.failed and record.outcome == "pass":
                print(f"  fail {_compared(record)}", file=told, flush=True)
        num_told = len(judged)
        if not progress.rounds:
            return _end(config, problem, template, records, progress, judged)
        number, round_ = _numbered(progress, records)[0]
        print(report.plan([(number, round_)], template), file=told, flush=True)
        run_round(
            round_.groups,
            template,
            number=number,
            parallel=config.parallel,
            limit_s=config.time_limit_s,
            done=done,
        )


def _compared(record: Record) -> str:
    took, last = f"{record.seconds or 0:.2f} s", record.output or ""
    return f"{','.join(record.hosts)} compared with others: {took}, last line {last!r}"


def _end(
    config: BisectFlags,
    problem: Problem,
    template: Sequence[str],
    records: Sequence[Record],
    progress: Progress,
    judged: Sequence[Outcome],
) -> int:
    """Print the answer and return the exit code."""
    num_rounds = _num_rounds(records)
    notes = [] if progress.rounds else report.warnings(problem, judged, progress)
    found = report.as_json(
        progress,
        rounds=_numbered(progress, records),
        num_tests=len(records),
        num_rounds=num_rounds,
        warnings=notes,
        template=template,
    )
    if config.json:
        print(json.dumps(found))
    else:
        print(report.answer(progress, len(records), num_rounds))
        for note in notes:
            print(f"warning: {note}")
    if progress.rounds:
        return 3
    return 0 if found["ok"] else 1


def _numbered(progress: Progress, records: Sequence[Record]) -> list[tuple[int, Round]]:
    """Return (number, round) for each next round.

    A fixed round keeps its number if it is resumed.
    """
    first = _num_rounds(records) + 1
    return [(one.number or first, one) for one in progress.rounds]


def _num_rounds(records: Sequence[Record]) -> int:
    return max((record.round for record in records), default=0)
