"""The notebooks run, and what is stored in them is what they print."""

import itertools
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
CHECKS = {
    # Seen: 8.5 to 2.4 bits per byte, 2.6 on held-out text; byte frequencies reach 4.8.
    "quickstart.ipynb": (
        "assert len(losses) == 400 and losses[-1] < 0.5 * losses[0]\n"
        "assert evaluated[-1]['eval_bits_per_byte'] < 0.7 * unigram"
    ),
    # Seen: 37% and 87%: embedding and head are a large part of four layers.
    "planning.ipynb": "assert overlapped['in chunks'] > overlapped['at once'] + 0.3",
    # (P - 1) / (v M) with M = 4, and what was counted agrees; the slots have arrows.
    "observe.ipynb": (
        "assert known.schedule.bubble == 0.5 and found.problems == ()\n"
        "assert page.count('marker-end') == 8 and page.count('url(#idle)') == 4\n"
        "assert abs(sum(parts.values()) / account.wall_s - 1) < 0.01\n"
        "assert '--batch.microbatches' in diff.questions(both)[1][1]\n"
        "assert {row['role'] for row in rows} >= {'compute', 'pp'}\n"
        "assert set(causes) == {'slow host', 'late host', 'slow loader', 'pauses'}"
    ),
    # Seen: 5e-7 nats between the two runs (float32, losses of 5), 0.6 nats learned.
    # GPipe keeps 12 microbatches more, the other schedule 3 chunks of half their size.
    "pipeline.ipynb": (
        "assert difference < 1e-5\n"
        "assert losses['plain'][-1] < losses['plain'][0] - 0.3\n"
        "assert kib['gpipe'][-1] > 1.3 * kib['gpipe'][0]\n"
        "assert kib['interleaved-1f1b'][-1] < 1.1 * kib['interleaved-1f1b'][0]"
    ),
}
"""By notebook: what must hold after its last cell."""
PRINTED = {
    "quickstart.ipynb": (
        "first: done",
        "checkpoints/400: 2 layers",
        "4 devices on 1 host",
        "resuming after step 400",
        "450/450",
    )
}
"""By notebook: what its shell commands print. IPython ignores their exit codes."""
MARKS = {
    "pipeline": pytest.mark.slow,
    # It compiles for GPUs, what tests/scripts/test_tp_schedule.py does too.
    "planning": [pytest.mark.plan, pytest.mark.slow],
}


def kinds_of_output(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """List for each cell what it puts out: text, a value, a figure.

    Text of one cell may come in any number of pieces: it depends on the machine's load.
    """
    return [
        [kind for kind, _ in itertools.groupby(o.output_type for o in cell.outputs)]
        if cell.cell_type == "code"
        else []
        for cell in notebook.cells
    ]


def test_every_notebook_has_a_check() -> None:
    assert [path.name for path in NOTEBOOKS] == sorted(CHECKS)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=MARKS.get(path.stem, ())) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning is an error: it would be a cell's output on stderr."""
    # The interpreter of the tests, whatever kernels the user has installed.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", root)
    notebook = nbformat.read(path, as_version=4)
    stored = kinds_of_output(notebook)
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[path.name]))
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources=folder
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [o.text for o in outputs if o.get("name") == "stderr"] == []
    printed = "".join(o.text for o in outputs if "text" in o)
    assert not re.search(r"error:|Traceback", printed), printed
    assert [text for text in PRINTED.get(path.name, ()) if text not in printed] == []
    assert kinds_of_output(notebook)[:-1] == stored
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_output_is_small_and_names_no_place(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 100_000
    assert re.findall(r"/(?:home|root|tmp|usr|Users)/\S*", text) == []
