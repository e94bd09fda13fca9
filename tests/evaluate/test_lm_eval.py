"""lm-eval's own command with `--model mjax`, on local tasks, without a network.

lm-eval runs in its own environment, `.venv-eval` or `$MJAX_EVAL_PYTHON`; transformers,
whose log-likelihoods are the measure, in `.venv-hf`.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from mjax.ckpt.__main__ import main as ckpt
from mjax.data.chat_template import read_beside
from mjax.data.chats import encode_chat, read_chat
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import END_OF_TEXT, load_tokenizer, train_bpe
from mjax.hugging_face.export import write
from tests.hugging_face.saved_runs import make_run, small_config
from tests.hugging_face.small import Arrays, random_params

pytestmark = pytest.mark.eval

ROOT = Path(__file__).parents[2]
EVAL = os.environ.get("MJAX_EVAL_PYTHON", str(ROOT / ".venv-eval" / "bin" / "python"))
PEER = os.environ.get("MJAX_HF_PYTHON", str(ROOT / ".venv-hf" / "bin" / "python"))

QUESTIONS = ["the quick brown", "then", "a fox, the", "fox"]
CHOICES = [" fox", " them thesis", " x"]
TEXTS = ["the quick brown fox\n", "then " * 40, "x"]
STOP, NEW_TOKENS, COPIES = "e", 12, 8
MEASURED = ("choose", "whole", "continue")
"""Tasks whose results are compared with those of transformers."""
TASKS = {
    "choose": """
task: choose
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "whole": """
task: whole
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "continue": f"""
task: continue
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["{STOP}"], max_gen_toks: {NEW_TOKENS}, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""",
    "vote": f"""
task: vote
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
repeats: {COPIES}
generation_kwargs: {{until: [], max_gen_toks: {NEW_TOKENS}, do_sample: true}}
filter_list:
  - name: majority
    filter: [{{function: majority_vote}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
""",
}
ROWS = {
    "choose": [{"question": q, "choices": CHOICES} for q in QUESTIONS],
    "whole": [{"text": text} for text in TEXTS],
    "continue": [{"question": q} for q in QUESTIONS],
    "vote": [{"question": q} for q in QUESTIONS[:2]],
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
        files = f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(
            text.lstrip() + "dataset_path: json\ntest_split: test\n" + files
        )
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, `plain` exported from it, and `bos` with a token before each text."""
    folder = tmp_path_factory.mktemp("models")
    make_run(folder / "run", small_config(), read_files("bytes"))
    assert ckpt(["export", str(folder / "run"), str(folder / "plain")]) == 0
    spec = Tokenizer.from_str(train_bpe(["the then them thesis, quick\n" * 3], 262))
    spec.add_special_tokens(["<s>"])
    spec.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 262)]
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": END_OF_TEXT,
    }
    model = small_config("train:263", 263).model
    params = random_params(model)
    # Only ASCII is generated, so that each token is text.
    ids = {spec.token_to_id(chr(code)) for code in range(33, 127)} - {None}
    others = [i for i in range(263) if i not in ids]
    params["params.head.table"][others] = 0
    eos = spec.token_to_id(END_OF_TEXT)
    assert eos is not None
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    write(
        Arrays(params),
        model,
        folder / "bos",
        seq_len=64,
        end_ids=[eos],
        files={
            "tokenizer.json": spec.to_str().encode(),
            "tokenizer_config.json": json.dumps(settings).encode(),
            "chat_template.jinja": template.encode(),
        },
    )
    return folder


def lm_eval(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "mjax.evaluate.tasks", "--model", "mjax", *words)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    assert Path(EVAL).exists(), f"{EVAL} is missing: make env-eval"
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
        [EVAL, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )


def results(
    tmp_path: Path,
    tasks: Path,
    model_args: str,
    *words: str,
    names: Sequence[str] = MEASURED,
) -> dict[str, Any]:
    """Run the tasks; return the answers of the model to each, in their order."""
    done = lm_eval(
        tmp_path,
        *("--model_args", model_args, "--tasks", ",".join(names)),
        *("--include_path", str(tasks), "--output_path", "out", "--log_samples"),
        *words,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for name in names:
        (path,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows.sort(key=lambda row: row["doc_id"])
        found[name] = [resp[0] for row in rows for resp in row["resps"]]
        found[f"{name} copies"] = [copies for row in rows for copies in row["resps"]]
        found[f"{name} arguments"] = [row["arguments"] for row in rows]
    (path,) = (tmp_path / "out").rglob("results_*.json")
    found["log"] = done.stderr
    found["config"] = json.loads(path.read_text())["config"]
    return found


@pytest.fixture(scope="module")
def theirs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of transformers for both folders."""
    scratch = tmp_path_factory.mktemp("peer")
    job = {
        "folders": [str(models / "plain"), str(models / "bos")],
        "pairs": [(q, c) for q in QUESTIONS for c in CHOICES],
        "texts": [text for text in TEXTS if len(text) < 60],
        "prompts": QUESTIONS,
        "max_new_tokens": NEW_TOKENS,
        "stop": STOP,
    }
    (scratch / "job.json").write_text(json.dumps(job))
    peer = str(Path(__file__).with_name("transformers_peer.py"))
    done = subprocess.run(
        [PEER, peer, str(scratch / "job.json")],
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(scratch)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {n: json.loads((models / f"{n}.json").read_text()) for n in ("plain", "bos")}


def check_scores(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare with transformers: 1e-5 of float32 sums over up to 60 tokens."""
    pairs = [(float(score), str(greedy)) for score, greedy in found["choose"]]
    want = [(score, str(greedy)) for score, greedy in wanted["pairs"]]
    assert [greedy for _, greedy in pairs] == [greedy for _, greedy in want]
    got = np.array([score for score, _ in pairs])
    ref = np.array([score for score, _ in want])
    short = [i for i, text in enumerate(TEXTS) if len(text) < 60]
    got = np.concatenate([got, [float(found["whole"][i]) for i in short]])
    ref = np.concatenate([ref, wanted["texts"]])
    print(f"\nlargest relative difference {np.abs(got / ref - 1).max():.2g}")
    np.testing.assert_allclose(got, ref, rtol=1e-5)


@pytest.fixture(scope="module")
def plain(models, tasks, tmp_path_factory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("plain")
    return results(scratch, tasks, f"model={models / 'plain'}")


@pytest.fixture(scope="module")
def bos(models, tasks, tmp_path_factory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("bos")
    return results(scratch, tasks, f"model={models / 'bos'}", "--batch_size", "auto")


def test_scores_of_an_exported_folder_are_those_of_transformers(plain, theirs) -> None:
    check_scores(plain, theirs["plain"])


def test_scores_are_those_of_transformers_if_the_tokenizer_begins_texts(
    bos, theirs
) -> None:
    check_scores(bos, theirs["bos"])
    assert bos["config"]["start_ids"] == [262]


def test_greedy_answers_are_those_of_transformers_up_to_the_stop_text(
    bos, theirs
) -> None:
    assert bos["continue"] == theirs["bos"]["made"]
    assert len({len(text) for text in bos["continue"]}) > 1  # some are stopped


def test_a_run_on_two_devices_has_the_scores_of_its_export(
    models, tasks, tmp_path, plain, theirs
) -> None:
    """Whole texts follow one start token; lm-eval scores a second one of a folder."""
    args = f"model={models / 'run'},tp=2,simulate_devices=2,dtype=float32"
    names = ("choose", "whole")
    found = results(tmp_path, tasks, args, "--batch_size", "3", names=names)
    bare = {"pairs": theirs["plain"]["pairs"], "texts": theirs["plain"]["bare"]}
    check_scores(found, bare)
    assert found["config"]["start_ids"] == plain["config"]["start_ids"] == [256]
    assert found["config"]["tokenizer_digest"] == "bytes"
    assert found["config"]["max_length"] == 64
    assert found["config"]["model_num_parameters"] > 0


def test_a_text_longer_than_the_model_is_scored_in_windows(plain) -> None:
    """200 bytes with a model that takes 64: all are scored, about as well as others."""
    long, short = float(plain["whole"][1]), float(plain["whole"][0])
    assert 0.5 < (long / len(TEXTS[1])) / (short / len(TEXTS[0])) < 2


def test_each_copy_of_a_request_is_another_sample(models, tasks, tmp_path) -> None:
    args = f"model={models / 'bos'}"
    folders = [tmp_path / name for name in ("first", "again")]
    for folder in folders:
        folder.mkdir()
    first, again = (results(f, tasks, args, names=["vote"]) for f in folders)
    copies = first["vote copies"]
    assert [len({*answers}) for answers in copies] == [COPIES, COPIES]
    assert again["vote copies"] == copies
    said = "do_sample without a temperature samples at temperature 1"
    assert first["log"].count(said) == 1


def test_a_chat_template_makes_the_texts(models, tasks, tmp_path) -> None:
    args = f"model={models / 'bos'}"
    found = results(tmp_path, tasks, args, "--apply_chat_template", names=["continue"])
    first = found["continue arguments"][0]["gen_args_0"]["arg_0"]
    assert first == f"<s>[{QUESTIONS[0]}]"


BRIDGE = """
import json, sys
from mjax.evaluate.lm_eval_model import MjaxLM
model, chat, answer = json.loads(sys.argv[1])
lm = MjaxLM(model=model)
prompt = lm.apply_chat_template(chat)
opened = lm.apply_chat_template(chat[:2], add_generation_prompt=False)
print(json.dumps([
    lm.tok_encode(prompt, False), lm._encode_pair(prompt, answer), lm.tok_encode(opened)
]))
"""


def test_a_chat_has_the_tokens_of_training(models, tmp_path) -> None:
    folder = shutil.copytree(models / "bos", tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    template, tokenizer = read_beside(folder), load_tokenizer(str(folder))
    assert template is not None
    turns = [
        ("user", "fox"),
        ("assistant", "then"),
        ("user", "a"),
        ("assistant", "the"),
    ]
    chat = [{"role": role, "content": text} for role, text in turns]
    trained = encode_chat(read_chat({"messages": chat}, template, "f:1"), tokenizer)[0]
    whole = tokenizer.encode_special(
        "<s>[user] fox[assistant] then[user] a[assistant] "
    )
    done = run(tmp_path, "-c", BRIDGE, json.dumps([str(folder), chat[:3], "the"]))
    assert done.returncode == 0, done.stderr[-2000:]
    prompt, (before, after), opened = json.loads(done.stdout.splitlines()[-1])
    assert prompt == before == trained[: len(prompt)].tolist()
    assert prompt != whole.tolist()
    assert [*before, *after] == trained.tolist()
    assert opened == trained[: len(opened)].tolist()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model_args", "model=absent"], "error: absent does not exist; give a work"),
        (
            ["--model_args", "model=plain", "--gen_kwargs", "max_gen_toks=64"],
            "answers of 64 tokens, but the model takes 64 including the prompt",
        ),
    ],
    ids=["path", "answer"],
)
def test_bad_input_ends_with_code_2(models, tasks, tmp_path, words, says) -> None:
    words = [w.replace("model=plain", f"model={models / 'plain'}") for w in words]
    tail = ("--tasks", "continue", "--include_path", str(tasks))
    done = lm_eval(tmp_path, *words, *tail)
    assert done.returncode == 2, done.stderr[-2000:]
    assert says in done.stderr
    assert "Traceback" not in done.stderr
