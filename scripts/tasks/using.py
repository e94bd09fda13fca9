"""Tasks 11 to 16: generate, evaluate, serve, chat."""

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import termios
import time
from pathlib import Path
from typing import Any

from scripts.tasks.place import EVAL_PYTHON, HF_PYTHON, REPOSITORY, Place, Task

PROMPTS = ("def main(", "import os")
SAMPLED = (
    *("--temperature", "0.9", "--top-k", "20", "--top-p", "0.95", "--tokens", "24"),
    "--json",
)
# Greedy tokens after a prompt, by transformers, which computes without a cache.
GREEDY = """import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer(sys.argv[2], return_tensors="pt", add_special_tokens=False)
made = model.generate(**inputs, max_new_tokens=24, do_sample=False, use_cache=False)
print(json.dumps(made[0, inputs["input_ids"].shape[1]:].tolist()))
"""
LOSS = """import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer(open(sys.argv[2]).read(), return_tensors="pt")["input_ids"]
length, total, count = int(sys.argv[3]), 0.0, 0
with torch.no_grad():
    for i in range(0, ids.shape[1] - 1, length):
        logits = model(input_ids=ids[:, i:i + length]).logits.double()
        targets = ids[:, i + 1:i + length + 1]
        part = logits[0, :targets.shape[1]]
        total += torch.nn.functional.cross_entropy(part, targets[0], reduction="sum")
        count += targets.shape[1]
print(json.dumps(float(total) / count))
"""
LM_CONSTRAINTS = "constraints-eval.txt"
ROWS = [
    {"question": "def main", "choices": ["(", " is", "42"]},
    {"question": "import ", "choices": ["os", "def", "9"]},
]
LM_TASKS = {
    "choose": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "answer": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "x"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}
# lm-eval with its class for transformers: of a folder beside the packages of .venv-hf.
LM_EVAL = """import sys
sys.path.append(sys.argv.pop(1))
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""
CLIENT = """import concurrent.futures, json, sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
turns = [{"role": "user", "content": "hello"}]
def whole(i):
    made = client.completions.create(model=model, prompt="def ", max_tokens=8, seed=i)
    return made.choices[0].text
def pieces(i):
    made = client.completions.create(
        model=model, prompt="def ", max_tokens=8, seed=i, stream=True)
    return "".join(piece.choices[0].text for piece in made if piece.choices)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    equal = list(pool.map(whole, range(8))) == list(pool.map(pieces, range(8)))
chat = client.chat.completions.create(model=model, messages=turns, max_tokens=8, seed=1)
stream = client.chat.completions.create(
    model=model, messages=turns, max_tokens=8, seed=1, stream=True)
text = "".join(p.choices[0].delta.content or "" for p in stream if p.choices)
refused = []
for bad in ({"max_tokens": 10**6}, {"temperature": -1}, {"prompt": "x" * 10**5}):
    try:
        client.completions.create(**{"model": model, "prompt": "def ", **bad})
    except openai.APIStatusError as error:
        refused.append(error.status_code)
print(json.dumps({"equal": equal, "chat": chat.choices[0].message.content == text,
                  "refused": refused}))
"""


def text_file(place: Place) -> Path:
    """Write a text that the demo has not been asked about."""
    source = Path(sysconfig.get_path("stdlib")) / "colorsys.py"
    return place.write("text.txt", source.read_text()[:4000])


def exported(place: Place, run: Path, name: str) -> str:
    """Export a run for transformers, as part of a check; return the folder."""
    out = place.folder / name
    words = ["ckpt", "export", str(run), str(out)]
    place.run([sys.executable, "-m", "mjax", *words], shown=None)
    return str(out)


def tokens_of(place: Place, *words: str, shown: bool = True) -> Any:
    """Generate with --json; return the output."""
    if shown:
        return json.loads(place.mjax("generate", *words).out)
    return json.loads(
        place.run([sys.executable, "-m", "mjax", "generate", *words], shown=None).out
    )


def generate(place: Place) -> None:
    """Task 11: continue a prompt."""
    run = place.shared / "demo"
    words = ("--prompt", PROMPTS[0], "--temperature", "0", "--tokens", "24")
    text = place.mjax("generate", str(run), *words).out
    place.need(text.startswith(PROMPTS[0]), "the text is continued", repr(text))
    ours = tokens_of(place, str(run), *words, "--json", shown=False)
    folder = exported(place, run, "exported")
    theirs = place.ask(HF_PYTHON, GREEDY, folder, PROMPTS[0])
    place.need(
        ours["answers"][0]["tokens"] == theirs,
        "its 24 tokens equal those of transformers without a cache",
    )


def several(place: Place) -> None:
    """Task 12: several prompts and sampling options."""
    run = str(place.shared / "demo")
    words = (run, "--prompt", *PROMPTS, *SAMPLED)
    first = tokens_of(place, *words, "--seed", "3")["answers"]
    again = tokens_of(place, *words, "--seed", "3", shown=False)["answers"]
    place.need(first == again, "the same seed gives the same text")
    other = tokens_of(place, *words, "--seed", "8", shown=False)["answers"]
    place.need(first != other, "another seed gives another text")
    alone = [
        tokens_of(place, run, "--prompt", prompt, *SAMPLED, "--seed", str(3 + i),
                  "--slots", "2", shown=False)["answers"][0]
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    place.need(first == alone, "an answer does not depend on the other prompts")
    greedy = (run, "--prompt", PROMPTS[0], "--tokens", "24", "--json")
    best = tokens_of(place, *greedy, "--temperature", "0", shown=False)["answers"]
    one = tokens_of(place, *greedy, "--top-k", "1", "--seed", "5", shown=False)[
        "answers"
    ]
    small = tokens_of(place, *greedy, "--top-p", "1e-6", shown=False)["answers"]
    same = best[0]["tokens"] == one[0]["tokens"] == small[0]["tokens"]
    place.need(same, "top-k 1 and a top-p near 0 give the most likely tokens")
    stop = best[0]["text"][3:5]
    ended = tokens_of(
        place, *greedy, "--temperature", "0", "--stop", stop, shown=False
    )["answers"][0]["text"]
    place.need(
        ended == best[0]["text"].partition(stop)[0], "a stop text ends the answer"
    )


def evaluate(place: Place) -> None:
    """Task 13: loss and bits per byte."""
    run = place.shared / "demo"
    path = text_file(place)
    words = ("evaluate", str(run), "--data.path", str(path), "--json")
    found = json.loads(place.mjax(*words).out)
    place.need(
        found["bits_per_byte"] > 0, "bits per byte", f"{found['bits_per_byte']:.3f}"
    )
    held = ("evaluate", str(run), "--held-out", "--json")
    ours = json.loads(place.mjax(*held).out)["loss"]
    summary = json.loads((run / "summary.json").read_text())
    difference = abs(ours - summary["eval_loss"]) / summary["eval_loss"]
    place.need(difference < 1e-6, "relative difference from the run's own loss",
               f"{difference:.1e}")  # fmt: skip


def lm_eval(place: Place) -> None:
    """Task 14: a custom task with choices and one with answers."""
    for name, text in LM_TASKS.items():
        data = place.write(
            f"tasks/{name}.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n"
        )
        files = f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        place.write(f"tasks/{name}.yaml", head + files + text)
    words = ("--tasks", ",".join(LM_TASKS), "--include_path", "tasks")
    run = place.shared / "demo"
    ours = ["--model", "mjax", "--model_args", f"model={run}"]
    theirs = ["--model", "hf", "--device", "cpu", "--model_args"]
    theirs.append(f"pretrained={exported(place, run, 'exported')},dtype=float32")
    logged = ("--log_samples", "--output_path")
    command = ["-m", "mjax.evaluate.tasks", *ours, *words]
    place.run(
        [str(EVAL_PYTHON), *command, *logged, "ours"],
        shown=shlex.join([".venv-eval/bin/python", *command]),
    )
    target, constraints = str(place.folder / "lm"), str(REPOSITORY / LM_CONSTRAINTS)
    install = ["-m", "pip", "install", "--quiet", "--target", target, "-c", constraints]
    place.run([str(HF_PYTHON), *install, "lm-eval"], shown=None)
    peer = [str(HF_PYTHON), "-c", LM_EVAL, target]
    place.run([*peer, *theirs, *words, *logged, "theirs"], shown=None)
    found = [samples(place.folder / name) for name in ("ours", "theirs")]
    pairs = list(zip(found[0]["choose"], found[1]["choose"], strict=True))
    worst = max(
        abs(float(a[0][0]) - float(b[0][0])) / abs(float(b[0][0]))
        for one, other in pairs
        for a, b in zip(one["resps"], other["resps"], strict=True)
    )
    place.need(
        worst < 1e-5,
        "log-likelihoods, relative difference from lm-eval's own class",
        f"{worst:.1e}",
    )
    answers = [[s["filtered_resps"] for s in one["answer"]] for one in found]
    place.need(answers[0] == answers[1], "the answers are equal", answers[0])


def samples(folder: Path) -> dict[str, list[Any]]:
    """Return lm-eval's log of each task."""
    found = {}
    for name in LM_TASKS:
        (path,) = folder.rglob(f"samples_{name}_*.jsonl")
        lines = path.read_text().splitlines()
        found[name] = sorted(
            map(json.loads, lines), key=lambda sample: sample["doc_id"]
        )
    return found


def serve(place: Place) -> None:
    """Task 15: the official client."""
    model = place.shared / "tuned"
    server = place.start("generate", str(model), "--serve", "0")
    try:
        assert server.stdout is not None
        begun_s = time.perf_counter()
        address = next(
            found[0]
            for line in server.stdout
            if (found := re.search(r"http://127\.0\.0\.1:\d+/v1", line))
        )
        said = place.ask(HF_PYTHON, CLIENT, address)
        place.seconds += time.perf_counter() - begun_s
        place.need(said["equal"], "8 completions at once: streamed = whole")
        place.need(said["chat"], "chat: streamed = whole")
        place.need(
            len(said["refused"]) == 3 and all(400 <= c < 500 for c in said["refused"]),
            "bad requests return", said["refused"],
        )  # fmt: skip
        server.send_signal(signal.SIGTERM)
        place.need(server.wait(30) == 0, "SIGTERM ends the server with exit code 0")
    finally:
        server.kill()
        server.communicate()


def chat(place: Place) -> None:
    """Task 16: a conversation in a terminal, ended by Ctrl-C."""
    words = ["generate", str(place.shared / "tuned"), "--chat"]
    words += ["--tokens", "12", "--temperature", "0"]
    place.show(["mjax", *words])
    begun_s = time.perf_counter()
    end, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mjax", *words],
        cwd=place.folder,
        env=place.environment(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(terminal)
    _until_it_asks(end)
    said = []
    for turn in ("hello", "hello", "/reset", "hello"):
        os.write(end, f"{turn}\n".encode())
        said.append(_until_it_asks(end))
    os.write(end, b"\x03")
    code = process.wait(30)
    place.seconds = time.perf_counter() - begun_s
    is_quiet = "Traceback" not in _rest(end)
    place.need(
        code in (0, 130) and is_quiet,
        "Ctrl-C ends it without a traceback, exit code",
        code,
    )
    first, second, _, again = said
    place.need(first != second, "the answer depends on earlier turns")
    place.need(first == again, "after /reset the first answer is repeated")


def _take_terminal() -> None:
    """Make this the process that Ctrl-C reaches, even below a shell that ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _until_it_asks(end: int) -> str:
    """Read the terminal's output until it waits for a line."""
    said = ""
    while not said.rstrip("\r ").endswith(">"):
        said += os.read(end, 4096).decode(errors="replace")
    return said


def _rest(end: int) -> str:
    said = ""
    while True:
        try:
            piece = os.read(end, 4096)
        except OSError:  # the other end is closed
            return said
        if not piece:
            return said
        said += piece.decode(errors="replace")


TASKS = (
    Task(number=11, do=generate, needs=(7,)),
    Task(number=12, do=several, needs=(7,)),
    Task(number=13, do=evaluate, needs=(7,)),
    Task(number=14, do=lm_eval, needs=(7,)),
    Task(number=15, do=serve, needs=(21,)),
    Task(number=16, do=chat, needs=(21,)),
)
