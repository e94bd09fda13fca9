import json
import re
import signal
import threading

import pytest

from mjax.data import chat_template
from mjax.data.chat_template import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    ChatTemplate,
    check,
    read_beside,
    render,
    render_several,
)
from mjax.data.chats import read_chat

CHATML = (
    "{% for message in messages %}\n"
    "    {% set text = message['content'] %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>\\n' }}"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "hé?"},
    {"role": "assistant", "content": "yes"},
]


def made(template: str, messages: list, prompt: bool = False) -> str:
    """The text of a template that need not read the messages."""
    return render_several(ChatTemplate(text=template), [(messages, prompt)])[0].text


def refused(template: str, messages=CHAT) -> str:
    with pytest.raises(ValueError, match="the chat template refuses") as caught:
        made(template, messages)
    return str(caught.value)


def test_lines_of_blocks_leave_no_blanks_and_a_prompt_is_added_when_asked():
    text = made(CHATML, CHAT[:1], prompt=True)
    assert text == "<|im_start|>user\nhé?<|im_end|>\n<|im_start|>assistant\n"
    whole = made(CHATML, CHAT)
    assert whole == text + "yes<|im_end|>\n"


def test_generation_blocks_are_found_where_they_are_and_leave_nothing_behind():
    template = ChatTemplate(text=MARKED, eos_token="</s>")
    once, twice = render_several(template, [(CHAT, False), (CHAT * 2, False)])
    assert once.text == "[user]hé?[assistant]yes</s>"
    assert [once.text[a:b] for a, b in once.answers] == ["yes</s>"]
    assert [twice.text[a:b] for a, b in twice.answers] == ["yes</s>"] * 2
    assert once.marks_answers
    [plain] = render_several(ChatTemplate(text=CHATML), [(CHAT, False)])
    assert not plain.marks_answers


def test_what_is_set_in_a_generation_block_is_not_seen_outside():
    template = (
        "{% set x = 1 %}"
        "{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    )
    assert made(template, CHAT) == "21"


def test_templates_have_the_functions_that_transformers_gives_them():
    template = (
        "{{ {'b': 'é', 'a': ['<']} | tojson }} {{ strftime_now('%Y') }}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{{ m.role }}{% break %}{% endfor %}"
    )
    assert made(template, CHAT) == '{"b": "é", "a": ["<"]} 2024assistant'


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("a\n{% for x in messages %}", "line 2: Unexpected end of template"),
        (
            "{% if 1 %}\n\n{{ raise_exception('no system role') }}{% endif %}",
            "line 3: no",
        ),
        ("\n{{ 1 / 0 }}", "line 2: ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "line 1: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "line 1: .*append"),
        ("{{ [1, 2] | random }}", "line 1: No filter named 'random'"),
        ("{{ lipsum() }}", "line 1: 'lipsum' is undefined"),
        (
            "{{ messages[0].role.upper }}",
            "prints <built-in method upper of .*; call it",
        ),
        (
            "{{ messages | map('string') ~ '.' }}",
            "prints <generator .*or list it",
        ),
        ("{{ 'a' * 10**10 }}", "takes more than 1024 MiB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        (
            "{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}",
            "more than 16777216",
        ),
    ],
)
def test_a_broken_or_hostile_template_is_refused_with_its_line(template, named):
    error = refused(template)
    assert re.search(named, error), error


def test_an_address_in_a_message_is_text_like_any_other():
    text = 'it printed <function "f" at 0x7f6ddd8df840>'
    chat = [{"role": "user", "content": text}]
    assert made("{{ messages[0].content }}", chat) == text


def test_a_date_is_the_same_in_training_and_generation_and_is_reported(caplog):
    template = ChatTemplate(
        text=(
            "{{ strftime_now('%d %b %Y') }}{% for m in messages %}[{{ m.role }}]"
            "{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
    )
    trained = read_chat({"messages": CHAT}, template, "f:1").text
    prompt = render(template, CHAT[:1], add_generation_prompt=True)
    assert trained == "26 Jul 2024[user]hé?[assistant]yes"
    assert trained.startswith(prompt)
    check(template.text)
    assert "the date: it is always 2024-07-26, in training, generation" in caplog.text
    caplog.clear()
    check(CHATML)
    assert not caplog.records


def test_an_endless_template_ends_in_an_error_and_the_next_one_is_rendered(monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_LIMIT_S", 0.2)
    loops = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    assert "rendering takes more than 0.2 s of CPU time" in refused(loops)
    assert made("{{ messages | length }}", CHAT) == "2"
    assert "OverflowError" in refused("{% for i in range(10**12) %}{% endfor %}")


def test_a_worker_that_waits_for_a_core_is_not_ended(monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_LIMIT_S", 0.2)
    assert made("{{ messages | length }}", CHAT) == "2"
    process = chat_template._WORKER_PROCESS._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)  # as without a core: its CPU clock stands still
    wake = threading.Timer(1.0, process.send_signal, [signal.SIGCONT])
    wake.start()
    assert made("{{ messages | length }}", CHAT) == "2"
    wake.join()


def test_threads_get_their_own_texts():
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        chat = [{"role": "user", "content": str(number)}]
        texts[number] = made("{{ messages[0].content }}", chat)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: str(n) for n in range(8)}


def test_a_message_that_is_not_json_is_refused():
    with pytest.raises(ValueError, match="is not JSON"):
        made(CHATML, [{"role": "user", "content": b"x"}])


def test_the_template_beside_a_tokenizer_is_found_in_each_of_its_forms(tmp_path):
    assert read_beside(tmp_path) is None
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "A",
    }
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    assert read_beside(tmp_path) == ChatTemplate(text="A", **names)
    config["chat_template"] = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D"},
    ]
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    assert read_beside(tmp_path) == ChatTemplate(text="D", **names)
    (tmp_path / TEMPLATE_FILE).write_text("F")
    assert read_beside(tmp_path) == ChatTemplate(text="F", **names)
    (tmp_path / TEMPLATE_FILE).unlink()
    (tmp_path / CONFIG_FILE).write_text('{"chat_template": 3}')
    with pytest.raises(ValueError, match=r"chat_template must be a text.*got int"):
        read_beside(tmp_path)
