"""Chats become tokens of which those of answers, and no others, are targets."""

import json
import pathlib
import re
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers as library
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.chat_samples import ANSWER, END, ChatSamples, chat_starts, group_chats
from mjax.data.chat_template import ChatTemplate
from mjax.data.chats import ChatRules, encode_chat, encode_prompt, read_chat
from mjax.data.config import DataConfig
from mjax.data.corpora import documents, find_sources
from mjax.data.dataset import Dataset, open_dataset
from mjax.data.prepare import SIDES
from mjax.data.samples import NO_TARGET
from mjax.data.tokenizers import HuggingFaceTokenizer, train_bpe

PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '' }}{% endif %}"
)


def chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]


def answers(template: str, messages, **record) -> list[str]:
    found = read_chat(
        record or {"messages": messages},
        ChatTemplate(text=template, eos_token="</s>"),
        "f:1",
    )
    return [found.text[a:b] for a, b in found.answers]


def refused(template: str, **record) -> str:
    with pytest.raises(ValueError, match=r"^f:1") as caught:
        read_chat(record, ChatTemplate(text=template, eos_token="</s>"), "f:1")
    return str(caught.value)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_are_found_with_the_token_that_ends_the_turn(template):
    turns = chat("a?", "yes", "b?", " no ")
    assert answers(template, turns) == ["yes</s>", " no </s>"]


def test_the_line_break_behind_the_end_of_a_turn_is_not_part_of_an_answer():
    assert answers(CHATML, chat("a?", "yes\n", "b?", "no")) == [
        "yes\n<|im_end|>",
        "no<|im_end|>",
    ]


@pytest.mark.parametrize("answer", [">", "|>", "d|>", "a -> b>", "<|im_end|>", "\n>\n"])
def test_it_is_not_part_of_an_answer_that_ends_like_the_mark(answer):
    record = {"messages": chat("a?", answer)}
    found = read_chat(record, ChatTemplate(text=CHATML), "f:1")
    assert found.text.endswith(f"{answer}<|im_end|>\n")
    [(start, end)] = found.answers
    assert found.text[start:end] == f"{answer}<|im_end|>"
    before = read_chat(record, ChatTemplate(text=CHATML), "f:1", version=1)
    assert before.text == found.text
    is_old = "<|im_end|>".endswith(answer.rstrip())
    assert before.answers == ((start, end + is_old),)


@pytest.mark.parametrize("template", [TOOLS, TOOLS.replace("{{ eos_token }}", "")])
def test_a_system_turn_and_a_call_of_a_tool_are_no_answers_of_their_own(template):
    system = {"role": "system", "content": "Be short."}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    turns = [system, *chat("a?", "yes", "b?"), call, *chat("c?", "no")]
    found = [text.strip().replace("</s>", "") for text in answers(template, turns)]
    assert found == ["yes", '[{"name": "f"}]', "no"]


def test_a_line_break_that_is_the_end_of_a_turn_is_part_of_the_answer():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert answers(template, chat("a?", "yes", "b?", "no")) == ["yes\n", "no\n"]


def test_other_forms_of_chats_mean_the_same():
    want = answers(PLAIN, chat("a?", "yes"))
    turns = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "yes"}]
    assert answers(PLAIN, None, conversations=turns) == want
    assert answers(PLAIN, None, prompt="a?", completion="yes") == want


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"text": "x"}, r'no field "messages", only \[\'text\'\]'),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "message 1 must be an object"),
        ({"messages": ["x"]}, "message 1 must be an object"),
        ({"messages": chat("only a question")}, "no assistant turn, only user"),
        ({"conversations": [{"value": "x"}]}, "message 1 must be an object"),
        (
            {"messages": chat("a", "b", "c", " \n")},
            "message 4, an assistant turn, is e",
        ),
        ({"prompt": "a", "completion": ""}, "message 2, .*write the answer, or leave"),
    ],
)
def test_what_is_no_chat_is_refused_with_its_place(record, named):
    assert re.search(named, refused(PLAIN, **record))


def test_a_template_that_changes_earlier_turns_is_refused_with_the_reason():
    only_last = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}"
        "{% else %}{{ m.content[-3:] }}{% endif %}|{% endfor %}"
    )
    assert "generation blocks" in refused(
        only_last, messages=chat("a", "think yes", "b", "no")
    )
    strict = "{{ raise_exception('no role ' + messages[0].role) }}"
    found = refused(strict, messages=chat("a", "b"))
    assert "line 1: no role user; fix the chat, or give another template" in found


# ------------------------------------------------------------------------ the stream


CHATS = [chat(f"é{i}?", "y" * (i % 5 + 1), "more", f"z{i}") for i in range(40)]


def opened(tmp_path: pathlib.Path, chats=CHATS, template=PLAIN, **changes) -> Dataset:
    path, jinja = tmp_path / "chats.jsonl", tmp_path / "t.jinja"
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    jinja.write_text(template)
    given: dict[str, Any] = {"seq_len": 256, "held_out_fraction": 0.2}
    given |= {"chat_template": str(jinja)} | changes
    config = DataConfig(
        path=(str(path),),
        format="chat",
        cache_dir=str(tmp_path / "cache"),
        **given,
    )
    return open_dataset(config, seed=0)


def learned(dataset: Dataset, row: dict[str, np.ndarray]) -> list[str]:
    """The texts of targets in a row, one for each run of them."""
    is_target = row["targets"] != NO_TARGET
    cuts = np.flatnonzero(np.diff(is_target)) + 1
    return [
        dataset.tokenizer.decode(part)
        for part in np.split(row["targets"], cuts)
        if part[0] != NO_TARGET
    ]


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("isolate", [True, False])
def test_each_answer_is_learned_once_after_its_own_question(tmp_path, packing, isolate):
    dataset = opened(tmp_path, packing=packing, isolate_documents=isolate)
    end = dataset.tokenizer.decode(np.array([dataset.tokenizer.eos_id]))
    wanted = [m["content"] + end for c in CHATS for m in c if m["role"] == "assistant"]
    found = []
    for side in (dataset.train.corpora[0], dataset.held_out.corpora[0]):
        for index in range(len(side)):
            row = side[index]
            found += learned(dataset, row)
            at = np.flatnonzero(row["targets"] != NO_TARGET)
            np.testing.assert_array_equal(
                row["tokens"][at[:-1] + 1], row["targets"][at[:-1]]
            )
            before = dataset.tokenizer.decode(row["tokens"][: at[0] + 1])
            assert re.search(r"é\d+\?.*\n\[assistant\] $", before), before
            if isolate:
                starts = np.flatnonzero(row["positions"] == 0)
                assert (np.diff(row["segments"])[starts[1:] - 1] == 1).all()
    assert sorted(found) == sorted(wanted)
    samples = [s for s in dataset.train.corpora if isinstance(s, ChatSamples)]
    assert sum(s.num_targets for s in samples) == int(
        dataset.corpora[0].counts["train"].num_targets
    )


def test_the_stream_of_training_has_the_same_mask_whatever_the_rows(tmp_path):
    """Rows of a batch read in parts, and again from a later step, are the same."""
    stream = opened(tmp_path).train
    for step in range(3):
        whole = stream.rows(step, 8)
        parts = [stream.rows(step, 8, slice(i, i + 2)) for i in range(0, 8, 2)]
        for name, array in whole.items():
            np.testing.assert_array_equal(
                np.concatenate([p[name] for p in parts]), array
            )


def test_the_mask_is_a_part_of_the_fingerprint(tmp_path):
    """The same text, and the same tokens, with other answers are other data."""
    less = MARKED.replace(
        "{{ eos_token }}{% endgeneration %}", "{% endgeneration %}</s>"
    )
    whole = MARKED.replace(
        "{{ eos_token }}{% endgeneration %}", "</s>{% endgeneration %}"
    )
    first = opened(tmp_path, template=less)
    second = opened(tmp_path, template=whole)
    assert first.corpus_hash != second.corpus_hash
    assert first.fingerprint != second.fingerprint
    text = opened(tmp_path, template=less)
    assert text.fingerprint == first.fingerprint


def test_no_chat_is_cut_and_a_longer_one_is_refused_or_skipped_with_a_count(
    tmp_path, caplog
):
    chats = [*CHATS, chat("x" * 400, "long"), *CHATS]
    with pytest.raises(ValueError, match=r"chats.jsonl:41 has \d+, .*--data.seq-len"):
        opened(tmp_path, chats)
    dataset = opened(tmp_path, chats, long_chats="skip")
    assert re.search(r"leaves out 1 of \d+ (train|held-out) chats", caplog.text)
    sides = (dataset.train.corpora[0], dataset.held_out.corpora[0])
    found = [t for s in sides for i in range(len(s)) for t in learned(dataset, s[i])]
    assert len(found) == 4 * len(CHATS)


def test_bad_input_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"t.jinja: .*line 1: Expected an"):
        opened(tmp_path, template="{% for x in %}")
    with pytest.raises(
        ValueError, match=r"--data.tokenizer bytes has no chat template"
    ):
        opened(tmp_path, chat_template=None)
    with pytest.raises(ValueError, match="has 0 held-out chats"):
        opened(tmp_path, CHATS[:1])
    with pytest.raises(ValueError, match=r"needs --data.format chat"):
        DataConfig(chat_template="x")
    with pytest.raises(ValueError, match="reads JSONL or parquet files"):
        DataConfig(format="chat")


def test_samples_hold_as_many_whole_chats_as_fit():
    sizes = [3, 4, 2, 9, 5, 5, 1]
    ends = np.cumsum(sizes)
    flags = np.zeros(ends[-1], np.uint8)
    flags[ends - 1] = END
    flags[ends - 2] |= ANSWER
    starts = chat_starts(flags)
    assert starts.tolist() == [0, *ends.tolist()]
    groups = group_chats(starts, 8, packed=True, skip_longer=True)
    assert groups.tolist() == [[0, 2], [2, 3], [4, 5], [5, 7]]
    alone = group_chats(starts, 8, packed=False, skip_longer=True)
    assert alone.tolist() == [[i, i + 1] for i in (0, 1, 2, 4, 5, 6)]
    stream = np.arange(ends[-1], dtype=np.uint16)
    samples = ChatSamples(stream, flags, starts, groups, 8, 99, True)
    row = samples[0]
    assert row["tokens"].tolist() == [0, 1, 2, 3, 4, 5, 6, 99]
    assert row["targets"].tolist() == [1, -1, -1, -1, 5, -1, -1, -1]
    assert row["segments"].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


def test_chats_are_read_from_parquet_and_csv_too(tmp_path):
    rows = [{"prompt": f"ask {i}", "completion": f"answer {i}"} for i in range(3)]
    messages = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in rows
    ]
    table = pyarrow.Table.from_pylist(messages)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    lines = ["prompt,completion", *(",".join(row.values()) for row in rows)]
    (tmp_path / "b.csv").write_text("\n".join(lines))
    rules = ChatRules(template=ChatTemplate(text=PLAIN, eos_token="</s>"))
    for name in ("a.parquet", "b.csv"):
        found = documents(find_sources((str(tmp_path / name),)), "text", rules)
        read = ["".join(map(str, document.pieces)) for document in found]
        assert len(read) == 3
        assert all(f"answer {i}" in text for i, text in enumerate(read))


# ------------------------------------------------------------------- tokens of prompts

WORDS = [f"{a} plus {b} is {a + b}.\n\nThe end" for a in range(30) for b in range(30)]


@pytest.fixture(scope="module")
def gpt2() -> HuggingFaceTokenizer:
    """A byte-level BPE with GPT-2's pattern: it joins a space and the next word."""
    return HuggingFaceTokenizer(train_bpe(WORDS, 330), origin="gpt2")


def sentencepiece(scheme: str) -> HuggingFaceTokenizer:
    """Make a BPE in which every word begins with a mark for the space before it."""
    made = library.Tokenizer(library.models.BPE(byte_fallback=True))
    made.pre_tokenizer = library.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = library.decoders.Metaspace(prepend_scheme=scheme)
    names = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = library.trainers.BpeTrainer(vocab_size=600, special_tokens=names)
    made.train_from_iterator(WORDS, trainer)
    return HuggingFaceTokenizer(made.to_str(), origin="sentencepiece")


HEADERS = (
    "[assistant] ",
    "[assistant]\n\n",
    "[assistant]\n",
    "[assistant]",
    "</s>",
    "",
)


def with_header(header: str, end: str = "{{ eos_token }}") -> ChatTemplate:
    user, written = header.replace("assistant", "user"), json.dumps(header)
    return ChatTemplate(
        text=(
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            f"{{{{ {written} }}}}{{% else %}}{{{{ {json.dumps(user)} }}}}{{% endif %}}"
            f"{{{{ m.content }}}}{end}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {written} }}}}{{% endif %}}"
        ),
        eos_token="<|endoftext|>",
    )


@pytest.mark.parametrize("header", HEADERS)
@given(
    turns=st.lists(
        st.text("ab \n12é日", min_size=1).filter(str.strip), min_size=2, max_size=6
    ).filter(lambda turns: len(turns) % 2 == 0)
)
def test_the_tokens_of_each_prompt_begin_those_of_the_chat(gpt2, header, turns):
    template, messages = with_header(header), chat(*turns)
    made = read_chat({"messages": messages}, template, "f:1")
    ids, is_answer, _ = encode_chat(made, gpt2)
    assert gpt2.decode(ids) == made.text
    starts = np.flatnonzero(np.diff(is_answer, prepend=False) & is_answer)
    assert len(starts) == len(turns) // 2
    for place, start in zip(range(1, len(turns), 2), starts, strict=True):
        prompt = encode_prompt(messages[:place], template, gpt2)
        np.testing.assert_array_equal(prompt, ids[:start])


def test_tokens_are_those_of_the_whole_text_where_the_prompts_are_too(gpt2):
    made = read_chat({"messages": chat("1", "2", "3", "4")}, with_header("<a>\n"), "f")
    ids, _, unlike = encode_chat(made, gpt2)
    np.testing.assert_array_equal(ids, gpt2.encode_special(made.text))
    assert unlike == ""
    made = read_chat({"messages": chat("1", "2")}, with_header("<a> "), "f", version=1)
    ids, _, unlike = encode_chat(made, gpt2)
    np.testing.assert_array_equal(ids, gpt2.encode_special(made.text))
    assert unlike == ""


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_tokenizer_that_adds_a_space_to_each_part_gets_the_whole_text(scheme):
    tokenizer = sentencepiece(scheme)
    for header, says in (
        ("end. ", r".*'\.', ' '\], .*'\.', ' is'\]"),
        ("end.", ""),
    ):
        messages = chat("1 plus 2", "is 3", "and", "4")
        made = read_chat({"messages": messages}, with_header(header, "</s>"), "f")
        ids, _, unlike = encode_chat(made, tokenizer)
        np.testing.assert_array_equal(ids, tokenizer.encode_special(made.text))
        assert re.fullmatch(says, unlike), unlike


def test_prompts_that_differ_from_the_text_are_reported_once_with_an_example(
    tmp_path, gpt2, caplog
):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(WORDS, 330))
    chats = [chat(f"{i} plus 1", f"{i + 1}") for i in range(30)]
    given = {"tokenizer": str(path), "chats": chats}
    for _ in range(2):  # tokenized, and from the cache
        caplog.clear()
        dataset = opened(tmp_path, template=PLAIN, **given)
        num_train, num_held = (
            dataset.corpora[0].counts[side].num_documents for side in SIDES
        )
        for count, side in ((num_train, "train"), (num_held, "held-out")):
            found = re.findall(
                rf"(\d+) of {count} {side} chats do not cont", caplog.text
            )
            assert found == [str(count)]
        assert re.search(
            r"chats\.jsonl:\d+: the prompt has the tokens \['t', '\]', ' '\], the "
            r"whole text \['t', '\]', ' \d+'\]",
            caplog.text,
        ), caplog.text
        assert "ends with a special token or a line break" in caplog.text
    caplog.clear()
    opened(tmp_path, template=PLAIN.replace("] ", "]\n"), **given)
    assert "do not continue" not in caplog.text


def test_a_template_whose_prompt_is_not_in_its_text_is_reported():
    turns = chat("a?", "yes", "b?", "no")
    thinks = MARKED + "{% if add_generation_prompt %}[assistant] <think>{% endif %}"
    made = read_chat({"messages": turns}, ChatTemplate(text=thinks), "f")
    assert made.unlike == "the chat has not the prompt ..'[user] a?[assistant] <think>'"
    made = read_chat({"messages": turns}, ChatTemplate(text=MARKED), "f")
    says = "after a prompt, '[assistant] yes[user] b?[assis'.. is not learned"
    assert made.unlike == says
    same = MARKED + "{% if add_generation_prompt %}[assistant] {% endif %}"
    made = read_chat({"messages": turns}, ChatTemplate(text=same), "f")
    assert (made.unlike, len(made.starts)) == ("", 2)


def test_weights_choose_among_the_marked_answers_of_a_turn():
    """Templates may mark the end of the text too, and the parts of one turn apart."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}-{% generation %}."
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% else %}{% generation %}"
        "{{ eos_token }}{% endgeneration %}{% endif %}"
    )
    turns = chat("a?", "yes", "b?", "no")
    assert answers(template, turns) == ["yes", ".", "no", ".", "</s>"]
    for place, found in ((1, ["no", ".", "</s>"]), (3, ["yes", "."])):
        weighed = [
            m | {"weight": int(i != place)} for i, m in enumerate(turns) if i % 2
        ]
        record = [turns[0], weighed[0], turns[2], weighed[1]]
        assert answers(template, record) == found
