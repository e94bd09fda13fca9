"""The commands that users read are ones that bash and our programs take.

Commands come from pages, notebooks, deploy scripts, failures, evidence, docstrings and
messages. Bash expands them. Then each program reads its words as it does for a user:
its parser, the checks of the config, and, if a command has a cluster, those of its
devices. What starts in a second is run. Pages whose commands are run as they stand:
docs/fine_tuning.md (tests/tune), docs/start.md here (slow: it trains three times), and
the notebooks (tests/test_notebooks.py). tests/launch/test_manifests.py reads the words
of the manifests for Kubernetes.
"""

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from mjax.cli import flags
from mjax.launch.config import RunConfig
from tests.shell_commands import (
    OURS,
    ROOT,
    check_fits,
    configured,
    expanded,
    planned,
    programs,
    refusal,
    unknown,
)

MAKEFILE = ROOT / "Makefile"
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Show what the trainer answers to flags that do not exist.
WRONG_ON_PURPOSE = ("configuration.md", "bad_inputs.md")
TEXTS = [
    *PAGES,
    ROOT / "docs" / "failures.toml",
    *(ROOT / "notebooks").glob("*.ipynb"),
    *(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
]
EVIDENCE = tomllib.loads((ROOT / "docs" / "benchmarks" / "pages.toml").read_text())
BATCH_SCRIPTS = sorted((ROOT / "deploy" / "slurm").glob("*.sbatch"))
_COMMAND = re.compile(rf"^(?:\$ )?((?:(?:\w+=|kubectl |srun ).*)?(?:{OURS}|make ).*)$")
_GPUS_PER_NODE = 8


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Where `refusal` records the runs of a test."""
    monkeypatch.chdir(tmp_path)


def code_lines(text: str) -> list[str]:
    """The lines of a page's code blocks, joined where one goes on in the next."""
    lines, is_fenced = [], False
    for line in text.splitlines():
        if line.strip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            lines.append(line.strip())
    return re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()


def commands(page: Path) -> list[str]:
    """The commands in the code blocks of a page; a block of bash is one command."""
    text = page.read_text()
    blocks = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    lines = code_lines(blocks.sub("", text))
    return blocks.findall(text) + [m[1] for m in map(_COMMAND.match, lines) if m]


def texts() -> Iterator[tuple[str, str]]:
    """Yield (place, command) for the commands in sentences, docstrings and messages."""
    for path in TEXTS:
        if path.name in WRONG_ON_PURPOSE:
            continue
        text = path.read_text()
        for match in re.finditer(rf"`((?:make train|{OURS})[^`]*)`", text):
            yield path.name, match[1]
        for match in re.finditer(rf"^# +((?:{OURS}).*)$", text, re.MULTILINE):
            yield path.name, match[1]
    for path in (*(ROOT / "mjax").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")):
        for text in strings(path):
            for match in re.finditer(
                rf"(?<![\w.`/])(?<!=\()(?:{OURS})[^\n`,;()'\"]*", text
            ):
                yield str(path.relative_to(ROOT)), match[0]


def strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module, with X for the values of an f-string."""
    parts = set[int]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            yield node.value if isinstance(node.value, str) else ""


def refused(
    command: str,
    check: Callable[[str, list[str]], object] = refusal,
    **variables: str,
) -> list[str]:
    """What bash and our programs refuse of a command."""
    try:
        started = programs(command, **variables)
    except ValueError as error:
        return [f"{command}: {error}"]
    answers = [check(module, words) for module, words in started]
    return [f"{command}: {answer}" for answer in answers if answer]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("mjax train --mesh.tq 2", "unknown flag --mesh.tq"),
        ("mjax train --model.remat some", "unknown --model.remat some"),
        ("make train ARGS='--steps 0'", "--steps must be at least 1, got 0"),
        ("srun python -m mjax.launch slurm -- --spares 1", "unknown flag --spares"),
        ("python -m mjax.launch --hosts 2 -- --recipe gpt-175b", "unknown recipe"),
        ("mjax health history order --history a --hosts n{1..2}", "arguments: n2"),
        ("mjax health history order --history a --hosts n[1-2]", "no match: n[1-2]"),
        ('mjax generate runs/a --prompt "stop!now"', "!now: event not found"),
        ("mjax generate runs/a --prompt it's", "unexpected EOF"),
        ("mjax train --recipe debug --work-dir $RUNS/a", "RUNS: unbound variable"),
        ('mjax launch --check-command "python -m mjax.doctr" -- --zero 1', "doctr"),
        ("python -m scripts.tune.chats", "--work-dir"),
        ("python -m mjax.plan --recipe debug --gpu h300", "--gpu h300"),
    ],
)
def test_a_command_that_a_user_cannot_run_is_noticed(command, message):
    assert message in "".join(refused(command))


def test_a_command_with_a_wrong_flag_is_noticed_without_its_other_flags():
    assert unknown("mjax.train", ["--mesh.tq", "2"]) == ["train has no flag --mesh.tq"]
    assert unknown("mjax.launch", ["--", "--spares", "1"]) != []
    assert unknown("mjax.health", ["cluster", "look"]) == [
        "health cluster has no command look"
    ]
    assert refused("mjax health cluster look", unknown) != []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in WRONG_ON_PURPOSE and commands(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_bash_and_the_programs_take_the_commands_of_a_page(page):
    """In the order of the page: a later command resumes the run of an earlier one."""
    assert [answer for line in commands(page) for answer in refused(line)] == []


def test_commands_in_texts_have_the_flags_of_their_programs():
    places = {command: place for place, command in texts()}
    assert {
        *("failures.toml", "environment.sh", "cluster.example.toml"),
        *("mjax/recipes/small.py", "scripts/gpu/report.py"),
    } <= {*places.values()}
    assert [
        f"{place}: {answer}"
        for command, place in places.items()
        if re.search(r" --\w", command)
        and not re.search(r"\w\.\.\.|completion --words", command)  # cut off; fish's
        for answer in refused(command, unknown)
    ] == []


def test_the_commands_that_make_the_evidence_are_taken():
    lines = {line for page in EVIDENCE.values() for line in page["commands"]}
    assert len(lines) > 50
    assert [a for line in lines for a in refused(line, TMP="/tmp/folder")] == []


def test_the_commands_in_the_docstrings_of_scripts_are_taken():
    lines = [
        (path, line.strip())
        for path in sorted((ROOT / "scripts").rglob("*.py"))
        for line in code_lines(ast.get_docstring(ast.parse(path.read_text())) or "")
        if _COMMAND.match(line)
    ]
    assert len(lines) > 50
    assert [f"{path}: {a}" for path, line in lines for a in refused(line)] == []


@pytest.mark.parametrize(
    "words",
    [
        ("train", "ARGS=--steps 50 --optim.warmup-steps 10"),
        ("try-slurm", "SCRIPT=a b.sbatch", "NODES=5", "GPUS=8", "ARGS=--time=10"),
        ("evidence", "ARGS=--changed"),
        ("evidence-quick",),
        ("evidence-long",),
        ("docs", "REPO_URL=https://github.com/a/b"),
    ],
    ids=lambda words: words[0],
)
def test_the_programs_take_the_words_that_make_gives_them(words):
    printed = subprocess.check_output(["make", "-n", *words], cwd=ROOT, text=True)
    lines = re.sub(r"\\\n\s*", " ", printed).splitlines()
    (line, *_) = (line for line in lines if re.search(OURS, line))
    assert programs(line)
    assert refused(line) == []


@pytest.mark.parametrize("path", BATCH_SCRIPTS, ids=lambda path: path.stem)
def test_a_batch_script_starts_a_run_that_fits_the_gpus_of_its_nodes(path):
    script = path.read_text()
    given = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)", script, re.MULTILINE))
    nodes = given["nodes"]
    assert {"exclusive", "gpus-per-node"} <= given.keys()
    assert refused(script, SLURM_JOB_NUM_NODES=nodes) == []
    ((module, words),) = programs(script, SLURM_JOB_NUM_NODES=nodes)
    # docs/launch_slurm.md uses this folder.
    assert flags.given(words, "--work-dir") == "runs/slurm"
    if module == "mjax.doctor":
        assert flags.given(words, "--hosts") == nodes
        return
    assert {"no-kill", "signal"} <= given.keys()
    cut = words.index("--")
    launch = flags.read(RunConfig, words[1:cut], prog="launch")
    assert launch.hosts + launch.spares == int(nodes)
    config = configured(words[cut + 1 :])
    check_fits(config, launch.hosts, int(given["gpus-per-node"]))


def test_the_runs_of_the_pages_fit_their_clusters():
    checked = 0
    for page in PAGES:
        for line in commands(page) if page.name not in WRONG_ON_PURPOSE else []:
            for module, words in programs(line):
                if module == "mjax.plan":
                    config, options = planned(words)
                    check_fits(config, options.nodes, options.gpus_per_node)
                elif module == "mjax.launch" and "# cluster" in line:
                    hosts = flags.given(words, "--hosts")
                    if hosts is None or "--" not in words:
                        continue
                    config = configured(words[words.index("--") + 1 :])
                    check_fits(config, int(hosts), _GPUS_PER_NODE)
                else:
                    continue
                checked += 1
    assert checked >= 10


@pytest.mark.parametrize("name", ["Makefile", "README.md", "docs/start.md"])
def test_a_short_demo_is_shown(name: str):
    shown = re.findall(r"make train ARGS='[^']*'", (ROOT / name).read_text())
    started = [words for line in shown for _, words in programs(line)]
    assert [words for words in started if configured(words).steps <= 50]


def test_no_pipeline_of_the_start_page_has_fewer_microbatches_than_stages():
    stages = []
    for line in commands(ROOT / "docs" / "start.md"):
        for module, words in programs(line):
            if module == "mjax.train" and "--work-dir" in words:
                config = configured(words)
                assert refusal(module, words) is None  # the next one resumes it
                stages.append(config.mesh.pp)
                assert config.batch.microbatches >= config.mesh.pp, words
    assert max(stages) > 1


def test_targets_of_make_on_the_pages_exist():
    makefile = MAKEFILE.read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = {
        words[1]
        for page in PAGES
        for line in commands(page)
        if line.startswith("make ")
        for words in expanded(line)
    }
    assert used
    assert used - targets == set()


def written(words: list[str]) -> list[str]:
    """The files and folders of the current folder that a command writes."""
    paths = [
        path
        for flag, path in itertools.pairwise(words)
        if flag in ("--html", "--out", "--state", "--history")
    ]
    if words[:1] in (["export"], ["fetch"]):
        paths.append(words[2])
    # OUT and FILE are placeholders.
    return [path for path in paths if "/" not in path and not path.isupper()]


def test_git_ignores_what_the_commands_of_the_pages_write_in_the_clone():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    paths = {
        path
        for page in PAGES
        if page.name not in WRONG_ON_PURPOSE
        for line in commands(page)
        for module, words in programs(line)
        if module.startswith("mjax.")
        for path in written(words)
    }
    assert {"plan.html", "out"} <= paths
    assert {
        path
        for path in paths
        if not any(fnmatch(f"/{path}", line.rstrip("/")) for line in ignored)
    } == set()


@pytest.mark.parametrize("name", ["README.md", "docs/start.md", "docs/planning.md"])
def test_a_page_installs_before_its_first_command(name: str):
    lines = code_lines((ROOT / name).read_text())
    make = next(i for i, line in enumerate(lines) if line.startswith("make env"))
    first = next(i for i, line in enumerate(lines) if re.match(OURS, line))
    assert lines[make + 1] == "source .venv/bin/activate"
    assert make + 1 < first


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_commands_of_the_start_page_run_one_after_the_other(tmp_path):
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    lines = [
        line
        for line in commands(ROOT / "docs" / "start.md")
        if line.startswith("python -m")
    ]
    assert len(lines) == 6
    for line in lines:
        done = run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "warning:" not in done.stdout + done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
