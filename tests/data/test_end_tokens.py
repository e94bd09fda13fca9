"""The tokens at which generation ends: of a tokenizer, a folder and a template."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mjax.data import end_tokens
from mjax.data.chat_template import ChatTemplate
from mjax.data.tokenizer_files import read_files
from mjax.data.tokenizers import load_tokenizer
from tests.data.test_chat_transformers import TEMPLATES

# As DeepSeek writes it, with characters that look like | and _.
DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
NAMES = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|end|>"]
NAMES += [DEEPSEEK, "<|return|>", "<|endoftext|>", "<start_of_turn>"]


def loop(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


def made() -> Tokenizer:
    """A byte-level tokenizer in which only some names are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    special = [n for n in NAMES if n != "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in special])
    tokenizer.add_tokens([AddedToken("<|im_end|>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize(
    ("template", "name"),
    [
        # In the forms of Llama 2, Mistral, Zephyr, Phi 3, DeepSeek and gpt-oss.
        (loop("[{{ m.role }}] {{ m.content | trim }} {{ eos_token }}"), "</s>"),
        (loop(" {{ m.content }}{{ eos_token }}"), "</s>"),
        (loop("<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"), "</s>"),
        (loop("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"), "<|end|>"),
        (loop("Assistant: {{ m.content }}" + DEEPSEEK), DEEPSEEK),
        (
            loop("<|start|>{{ m.role }}<|message|>{{ m.content }}<|return|>"),
            "<|return|>",
        ),
        (loop("{{ m.content }}<|im_end|>{{ eos_token }}"), "<|im_end|>"),
        (loop("{{ m.role }}: {{ m.content }}\n\n"), None),
        (loop("{{ m.role }}: {{ m.content }}\n### End\n"), None),
        (TEMPLATES["chatml"], "<|im_end|>"),
        (TEMPLATES["llama"], "<|eot_id|>"),
        (TEMPLATES["qwen"], "<|im_end|>"),
        (TEMPLATES["gemma"], "<end_of_turn>"),
        (TEMPLATES["generation"], "</s>"),
    ],
)
def test_the_token_that_ends_an_answer_belongs_to_the_template(
    tmp_path, template, name
):
    tokenizer = made()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files, eos = read_files(str(tmp_path)), tokenizer.token_to_id("</s>")
    assert eos is not None
    ends = (eos,) if name is None else (eos, tokenizer.token_to_id(name))
    assert files.end_ids == tuple(dict.fromkeys(ends))
    kept = json.loads(files.contents["generation_config.json"])
    assert kept["eos_token_id"] == [*files.end_ids]
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.added == files.added
    with_another = files.with_template(ChatTemplate(text=loop("{{m.content}}<|end|>")))
    assert with_another.end_ids == (
        *(i for i in files.end_ids if i != files.added["<|end|>"]),
        files.added["<|end|>"],
    )


def test_of_the_names_at_one_place_the_longest_ends_the_answer():
    text = "<|end|><|eot|>\n"
    names = ["<|eot|>", "<|end|>", "<|end|><|eot|>", "\n", "<|"]
    assert end_tokens.first_name(text, names) == "<|end|><|eot|>"
    assert end_tokens.first_name("\n", names) is None


def test_a_template_that_needs_advice_is_asked_with_it(caplog):
    needs = "{% if messages[0].role != 'system' %}{{ raise_exception('who?') }}"
    text = needs + "{% endif %}" + loop("{{ m.content }}<|im_end|>")
    assert end_tokens.text_after_answer(ChatTemplate(text=text)) == "<|im_end|>"
    assert not caplog.text


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ nothing }}", "{% for %}"]
)
def test_a_template_that_shows_no_answer_leaves_the_end_unknown(template, caplog):
    assert end_tokens.text_after_answer(ChatTemplate(text=template)) is None
    assert "ends a turn of the chat template is unknown" in caplog.text


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"config.json": {"eos_token_id": 3}}, (3,)),
        ({"config.json": {"eos_token_id": [3, 4]}}, (3, 4)),
        ({"config.json": {"eos_token_id": None}}, ()),
        (
            {
                "config.json": {"eos_token_id": 3},
                "generation_config.json": {"eos_token_id": [5, 3], "top_p": 0.9},
            },
            (5, 3),
        ),
    ],
)
def test_the_list_of_a_folder_is_read_as_in_transformers(tmp_path, files, ids):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens.listed(tmp_path) == ids


@pytest.mark.parametrize("content", ["[", '{"eos_token_id": "x"}', "[1]"])
def test_a_damaged_list_is_refused_by_its_file(tmp_path, content):
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(RuntimeError, match=f"{path} is damaged"):
        end_tokens.listed(tmp_path)
