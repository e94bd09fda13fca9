"""Templates render as transformers renders them; `make test-hf`.

The templates are written for this test, with what those of the named models use.
"""

import json
import subprocess
from pathlib import Path

import pytest

from mjax.data.chat_template import ChatTemplate, as_templates_read, render_several

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-hf" / "bin" / "python"
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"é": "<"}}}]

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
    {{- '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}"""
LIKE_LLAMA = """{{- bos_token }}
{%- if not date is defined %}
    {%- set date = '26 Jul 2024' %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date + '\\n' + system }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\\n' }}{%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {{- m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
LIKE_QWEN = """{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{%- continue %}{%- endif %}
    {%- if m.content is string and m.content.startswith('x') %}
        {{- m.content.split('x')[-1].lstrip('\\n') }}
    {%- else %}
        {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- ns.last }}{%- if tools %}{{- tools | tojson }}{%- endif %}"""
LIKE_GEMMA = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
MARKED = """{% macro head(role) %}<{{ role }}>{% endmacro %}
{% for m in messages %}{{ head(m.role) }}{% if m.role == 'assistant' %}
{% generation %}{% set eot = eos_token %}{{ m.content }}{{ eot }}
{% endgeneration %}{{ eot }}{% else %}{{ m.content }}{% endif %}{% endfor %}"""

LIKE_QWEN3 = """{%- for m in messages %}
    {%- set thought = '' %}
    {%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
    {%- elif '</think>' in m.content %}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if thought and loop.last %}{{- '<think>' + thought.strip('\\n') + '</think>' }}
    {%- endif %}
    {{- m.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}"""
LIKE_GPT_OSS = """{%- for m in messages %}
    {%- if m.role == 'assistant' and "thinking" in m and not add_generation_prompt %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking }}
        {{- "<|end|>" }}
    {%- endif %}
    {{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
{%- endfor %}"""
PRINTS = "{% for m in messages %}{{ m | tojson }}{% endfor %}"

TEMPLATES = {
    "chatml": CHATML,
    "llama": LIKE_LLAMA,
    "qwen": LIKE_QWEN,
    "gemma": LIKE_GEMMA,
    "generation": MARKED,
    "qwen3": LIKE_QWEN3,
    "gpt-oss": LIKE_GPT_OSS,
    "prints messages": PRINTS,
}
CHATS = [
    [{"role": "user", "content": " hé <there>? "}],
    [
        {"role": "system", "content": "You are\nkind. "},
        {"role": "user", "content": "a 'b' \"c\""},
        {"role": "assistant", "content": "xyes\n"},
        {"role": "user", "content": "日本 🙂"},
        {"role": "assistant", "content": ""},
    ],
    *(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", **first},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d", **last},
        ]
        for first, last in (
            ({"reasoning_content": "hm\n"}, {"reasoning_content": " ho"}),
            ({"reasoning": "hm"}, {"reasoning": "ho"}),
            ({"thinking": "hm"}, {"reasoning": "ho", "thinking": "he"}),
            ({}, {"reasoning_content": "hi", "thinking": "he", "reasoning": "ho"}),
            ({"reasoning": ""}, {"reasoning_content": None, "reasoning": "ho"}),
        )
    ),
]


@pytest.mark.hf
def test_templates_render_as_in_transformers(tmp_path):
    jobs = [
        {
            "template": template,
            "messages": chat,
            "prompt": prompt,
            "tools": tools,
            "variables": NAMES,
        }
        for template in TEMPLATES.values()
        for chat in CHATS
        for prompt in (False, True)
        for tools in (None, TOOLS)
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    peer = Path(__file__).with_name("chat_peer.py")
    done = subprocess.run(
        [PYTHON, peer, path], check=True, timeout=300, capture_output=True, text=True
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    for job, (text, places) in zip(jobs, theirs, strict=True):
        found = render_several(
            ChatTemplate(text=job["template"], **NAMES),
            [(as_templates_read(job["messages"]), job["prompt"])],
            variables={"tools": job["tools"]},
        )[0]
        assert found.text == text
        assert [list(place) for place in found.answers] == places
