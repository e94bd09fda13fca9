"""Records of chats in the formats of other trainers: read, or refused with the place.

The records follow the documentation of the named programs.
"""

import json
import re
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mjax.data.chat_template import REASONING, ChatTemplate, render
from mjax.data.chats import ChatRules, read_chat
from mjax.data.config import DataConfig
from mjax.data.corpora import documents, find_sources

# It reads all that these records have, and prints it in order.
TEMPLATE = ChatTemplate(
    text=(
        "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}"
        "{% if documents %}<docs>{{ documents | tojson }}\n{% endif %}"
        "{% if style is defined %}<style>{{ style }}\n{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}"
        "{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<call>{{ call.function | tojson }}{% endfor %}</>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOOLS = '<tools>[{"type": "function", "function": {"name": "f", "parameters": {}}}]\n'
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ASK = [user("a?"), answer("yes")]
TEXT = "<user>a?</>\n<assistant>yes</>\n"
RECORDS = {
    "TRL, with tools": ({"messages": ASK, "tools": [TOOL]}, TOOLS + TEXT, ["yes"]),
    "TRL, tools as JSON": (
        {"messages": ASK, "tools": json.dumps([TOOL])},
        TOOLS + TEXT,
        ["yes"],
    ),
    "TRL, no tools": ({"messages": ASK, "tools": "[]", "x": None}, TEXT, ["yes"]),
    "transformers, documents": (
        {"messages": ASK, "documents": [{"text": "d"}]},
        f'<docs>[{{"text": "d"}}]\n{TEXT}',
        ["yes"],
    ),
    "TRL, variables": (
        {"messages": ASK, "chat_template_kwargs": {"style": "short"}},
        f"<style>short\n{TEXT}",
        ["yes"],
    ),
    "TRL, the completion alone is learned": (
        {"prompt": [user("a?"), answer("no"), user("b?")], "completion": [answer("c")]},
        "<user>a?</>\n<assistant>no</>\n<user>b?</>\n<assistant>c</>\n",
        ["c"],
    ),
    "TRL, roles in conversations": ({"conversations": ASK}, TEXT, ["yes"]),
    "OpenAI, weights": (
        {
            "messages": [
                *(user("a?"), answer("no", weight=0)),
                *(user("b?"), answer("yes", weight=1), user("c?"), answer("too")),
            ]
        },
        "<user>a?</>\n<assistant>no</>\n<user>b?</>\n<assistant>yes</>\n"
        "<user>c?</>\n<assistant>too</>\n",
        ["yes", "too"],
    ),
    "OpenAI, a call and its result": (
        {
            "messages": [
                user("a?"),
                {"role": "assistant", "tool_calls": [CALL], "content": None},
                {"role": "tool", "content": [{"type": "text", "text": "12"}]},
                answer("yes"),
            ],
            "tools": [TOOL],
        },
        f"{TOOLS}<user>a?</>\n<assistant><call>"
        '{"name": "f", "arguments": "{}"}</>\n<tool>12</>\n<assistant>yes</>\n',
        ['<call>{"name": "f", "arguments": "{}"}', "yes"],
    ),
    "OpenAI, parts of text": (
        {
            "messages": [
                user([{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]),
                answer([{"type": "text", "text": "yes", "image_url": None}]),
            ]
        },
        TEXT,
        ["yes"],
    ),
    "axolotl, trained turns": (
        {
            "conversations": [
                {"from": "system", "value": "s", "train": False},
                {"from": "human", "value": "a?", "train": False},
                {"from": "gpt", "value": "no", "train": False},
                {"from": "human", "value": "b?"},
                {"from": "assistant", "value": "yes", "train": True},
            ]
        },
        "<system>s</>\n<user>a?</>\n<assistant>no</>\n<user>b?</>\n<assistant>yes</>\n",
        ["yes"],
    ),
    "SlimOrca": (
        {
            "conversations": [
                {"from": "system", "value": "s", "weight": None},
                {"from": "human", "value": "a?", "weight": 0.0},
                {"from": "gpt", "value": "yes", "weight": 1.0},
            ]
        },
        f"<system>s</>\n{TEXT}",
        ["yes"],
    ),
    "LLaMA-Factory": (
        {
            "conversations": [
                {"from": "human", "value": "a?"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": "12"},
                {"from": "gpt", "value": "yes"},
            ],
            "system": "s",
            "tools": json.dumps([TOOL]),
        },
        f"{TOOLS}<system>s</>\n<user>a?</>\n<assistant><call>"
        '{"name": "f", "arguments": {}}</>\n<tool>12</>\n<assistant>yes</>\n',
        ['<call>{"name": "f", "arguments": {}}', "yes"],
    ),
    "a system beside a prompt": (
        {"system": "s", "prompt": "a?", "completion": "yes"},
        f"<system>s</>\n{TEXT}",
        ["yes"],
    ),
    "reasoning": (
        {"messages": [user("a?"), answer("yes", reasoning_content="hm ")]},
        "<user>a?</>\n<assistant>hm yes</>\n",
        ["hm yes"],
    ),
}


@pytest.mark.parametrize(("record", "text", "learned"), RECORDS.values(), ids=RECORDS)
def test_all_of_a_record_reaches_the_text_or_the_choice_of_answers(
    record, text, learned
):
    chat = read_chat(record, TEMPLATE, "f:1")
    assert chat.text == text
    assert [chat.text[a:b] for a, b in chat.answers] == [f"{x}</>" for x in learned]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": ASK, "sytem": "x"}, r"part of a chat: sytem \(did you mean 'sys"),
        ({"messages": ASK, "id": 0, "source": "x"}, "--data.ignored-fields id source$"),
        ({"messages": ASK, "conversations": ASK}, "in 'messages' and another in 'conv"),
        ({"messages": ASK, "prompt": "a", "completion": "b"}, "another in 'prompt'"),
        ({"messages": ASK, "tools": "{"}, "tools: not JSON"),
        ({"messages": ASK, "tools": {"name": "f"}}, "tools must be a list, got"),
        ({"messages": ASK, "tools": ["f"]}, r"tools\[0\] must be an object"),
        ({"messages": ASK, "documents": "text"}, "documents: not JSON"),
        (
            {"messages": ASK, "chat_template_kwargs": {"colour": 1}},
            "template does not read colour; remove the field",
        ),
        (
            {"messages": ASK, "chat_template_kwargs": {"messages": []}},
            "sets messages, which the chat itself sets",
        ),
        ({"messages": ASK, "system": ["s"]}, "system must be a text"),
        (
            {"messages": [{"role": "system", "content": "s"}, *ASK], "system": "t"},
            "the field system and a system message; remove one",
        ),
        (
            {"messages": [user("a?", name="Jo"), answer("b")]},
            "does not read 'name' of message 1, of the role 'user'; .*-fields name",
        ),
        (
            {"messages": [user("a?"), answer("b", weight=0.5)]},
            "message 2: weight must be 0 or 1, .* got 0.5",
        ),
        (
            {"messages": [user("a?"), answer("b", weight=1, train=False)]},
            "message 2: weight and train contradict each other",
        ),
        (
            {"messages": [user("a?", train=True), answer("b")]},
            "message 1 is of the role 'user' and marked for training by 'train'",
        ),
        (
            {"messages": [user("a?"), answer("b", weight=0)]},
            "no answer with a weight other than 0, so it has no loss; leave it out",
        ),
        (
            {"messages": [user([{"type": "image"}]), answer("b")]},
            r"message 1: content\[0\] must be .*, got {'type': 'image'}; only text",
        ),
        (
            {"messages": [user("a?"), answer([{"type": "text", "text": "b", "x": 0}])]},
            r"message 2: content\[0\] must be",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "f(x)"}]},
            "message 1: a function_call must be JSON with name and arguments: not JSON",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "f"}'}]},
            "message 1: a function_call must have name and arguments",
        ),
        (
            {"messages": [user("a\ud83d?"), answer("b")]},
            r"half a surrogate pair, \\ud83d, after '<user>a'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_reach_the_text_is_refused_with_its_place(record, says):
    with pytest.raises(ValueError, match=rf"^f:1\b.*{says}"):
        read_chat(record, TEMPLATE, "f:1")


@pytest.mark.parametrize(
    ("template", "message", "says"),
    [
        ("{{ m.content }}", {"role": "tool", "content": "12"}, None),
        (
            "{% if m.role != 'tool' %}{{ m.content }}{% endif %}",
            {"role": "tool", "content": "12"},
            "leaves out the content of message 2, of the role 'tool'",
        ),
        (
            "{{ m.content }}",
            {"role": "tool", "content": "12", "tool_call_id": "1"},
            "does not read 'tool_call_id' of message 2",
        ),
        ("{{ m | tojson }}", {"role": "tool", "content": "12", "id": "1"}, None),
        (
            "{% for key, value in m.items() %}{{ value }}{% endfor %}",
            {"role": "tool", "content": "12", "id": "1"},
            None,
        ),
    ],
)
def test_training_and_generation_refuse_what_a_template_leaves_out(
    template, message, says
):
    text = f"{{% for m in messages %}}{template}{{% endfor %}}"
    messages = [user("a?"), message, answer("b")]
    made = ChatTemplate(text=text)
    if says is None:
        assert read_chat({"messages": messages}, made, "f:1").text == render(
            made, messages, add_generation_prompt=False
        )
        return
    with pytest.raises(ValueError, match=f"f:1: the chat template {says}"):
        read_chat({"messages": messages}, made, "f:1")
    with pytest.raises(ValueError, match=f"^the chat template {says}"):
        render(made, messages[:-1], add_generation_prompt=True)


def reads(name: str) -> ChatTemplate:
    """A template that reads the reasoning under one name, as those of models do."""
    return ChatTemplate(
        text=(
            "{% for m in messages %}<{{ m.role }}>{% if m.NAME is defined %}"
            "({{ m.NAME }}){% endif %}{{ m.content }}</>\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        ).replace("NAME", name)
    )


@pytest.mark.parametrize("read", REASONING)
@pytest.mark.parametrize("given", REASONING)
def test_reasoning_reaches_the_text_under_the_names_that_transformers_gives_it(
    given, read
):
    record = {"messages": [user("a?"), answer("yes", **{given: "hm"})]}
    if read == "reasoning" and given != read:  # no template of a model reads this name
        says = f"f:1: the chat template does not read '{given}' of message 2"
        with pytest.raises(ValueError, match=says):
            read_chat(record, reads(read), "f:1")
        return
    text = "<user>a?</>\n<assistant>(hm)yes</>\n"
    chat = read_chat(record, reads(read), "f:1")
    assert chat.text == text
    assert [chat.text[a:b] for a, b in chat.answers] == ["(hm)yes</>"]
    assert render(reads(read), record["messages"], add_generation_prompt=False) == text


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_that_a_template_does_not_read_is_refused_by_the_name_it_has(name):
    record = {"messages": [user("a?"), answer("yes", **{name: "hm"})]}
    says = f"f:1: the chat template does not read '{name}' of message 2"
    with pytest.raises(ValueError, match=says):
        read_chat(record, reads("other"), "f:1")


def test_two_reasonings_of_a_message_are_not_taken_for_one():
    first, second = {"reasoning_content": "hm"}, {"thinking": "ho"}
    record = {"messages": [user("a?"), answer("yes", **first, **second)]}
    for name in ("reasoning_content", "thinking"):
        with pytest.raises(ValueError, match=r"f:1: .* does not read '.*' of message"):
            read_chat(record, reads(name), "f:1")


def test_version_1_gives_reasoning_no_other_name():
    record = {"messages": [user("a?"), answer("yes", reasoning="hm")]}
    chat = read_chat(record, reads("reasoning_content"), "f:1", version=1)
    assert chat.text == "<user>a?</>\n<assistant>yes</>\n"


def test_fields_that_the_user_names_are_left_out_of_records_and_messages(tmp_path):
    path = tmp_path / "a.jsonl"
    turns = [user("a?", id=1, weight=7), answer("yes", id=2)]
    path.write_text(json.dumps({"messages": turns, "id": 3, "conversations": "x"}))
    names = ("id", "weight", "conversations")
    rules = ChatRules(template=TEMPLATE, ignored_fields=names)
    [document] = documents(find_sources((str(path),)), "text", rules)
    assert "".join(map(str, document.pieces)) == TEXT
    with pytest.raises(
        ValueError, match=r"--data.ignored-fields id needs --data\.format"
    ):
        DataConfig(ignored_fields=("id",))


def test_nulls_that_the_schema_of_parquet_adds_are_no_fields(tmp_path):
    """A column has the fields of all its rows, so other rows have them as nulls."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": 2}}}
    rows = [
        {
            "messages": [user("a?"), {"role": "assistant", "tool_calls": [call]}],
            "system": None,
        },
        {"messages": [user("b?", weight=0), answer("yes")], "system": "s"},
        {"messages": [user("c?"), {"role": "assistant", "tool_calls": [other]}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    rules = ChatRules(template=TEMPLATE)
    found = documents(find_sources((str(tmp_path / "a.parquet"),)), "text", rules)
    assert ["".join(map(str, document.pieces)) for document in found] == [
        '<user>a?</>\n<assistant><call>{"name": "f", "arguments": {"x": 1}}</>\n',
        "<system>s</>\n<user>b?</>\n<assistant>yes</>\n",
        '<user>c?</>\n<assistant><call>{"name": "g", "arguments": {"y": 2}}</>\n',
    ]


PRINTS = ChatTemplate(
    text="{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("record", "text", "learned"),
    [
        ({"messages": ASK, "tools": "x", "id": 1}, "<user>a?</><assistant>yes</>", 1),
        (
            {"messages": [user([{"type": "text"}]), answer("b", weight=0)]},
            "<user>[{'type': 'text'}]</><assistant>b</>",
            1,
        ),
        (
            {
                "system": "s",
                "conversations": [
                    {"from": "human", "value": "a", "weight": 0.5},
                    {"from": "function_call", "value": "f"},
                    {"from": "observation", "value": "1"},
                    {"from": "bot", "value": "b"},
                ],
            },
            "<user>a</><function_call>f</><observation>1</><assistant>b</>",
            1,
        ),
        (
            {"prompt": [user("a"), answer("b"), user("c")], "completion": "d"},
            "<user>a</><assistant>b</><user>c</><assistant>d</>",
            2,
        ),
    ],
)  # fmt: skip
def test_version_1_reads_what_it_always_did(record, text, learned):
    chat = read_chat(record, PRINTS, "f:1", version=1)
    assert (chat.text, len(chat.answers), chat.starts) == (text, learned, ())


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"conversations": [{"value": "x"}]}, '"conversations" must be a list of obj'),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "message 1 must be an object"),
        ({"text": "x"}, r'no field "messages", only \[\'text\'\]'),
        ({"prompt": "a"}, r'no field "messages", only \[\'prompt\'\]'),
    ],
)
def test_version_1_refuses_what_it_always_did(record, says):
    with pytest.raises(ValueError, match=re.compile(rf"^f:1\b.*{says}")):
        read_chat(record, PRINTS, "f:1", version=1)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.jsonl",
            '{"prompt": "a", "completion": "b"}\n'
            '{"prompt": "a", "prompt": "c", "completion": "b"}',
            r"a\.jsonl:2 has the field 'prompt' twice; remove one",
        ),
        ("b.csv", "prompt,completion,prompt\na,b,c\n", "several columns 'prompt'"),
    ],
)
def test_a_field_that_is_given_twice_is_refused(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    sources = find_sources((str(tmp_path / name),))
    with pytest.raises(ValueError, match=says):
        list(documents(sources, "text", ChatRules(template=PRINTS)))
    old = ChatRules(template=PRINTS, version=1)
    assert [*documents(sources, "text", old)]
