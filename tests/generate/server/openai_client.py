"""Request a server with OpenAI's client; run by the interpreter of `.venv-hf`.

Nothing of mjax is imported here. Input: the base address, a token, a model. Output: one
JSON object on stdout, which the test compares with the engine's answers.
"""

import json
import sys

import openai  # pyright: ignore[reportMissingImports]

USER = [{"role": "user", "content": "hello"}]


def failure(call) -> list:
    """Return the class, status and code of the error that a call raises."""
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code]
    return ["none", 0, None]


def main(base_url: str, token: str, model: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=token, max_retries=0)
    stranger = openai.OpenAI(base_url=base_url, api_key="x" * 20, max_retries=0)
    text, chat = client.completions, client.chat.completions
    asked = {"model": model, "max_tokens": 12, "seed": 3}

    whole = text.create(prompt=["def f", "x = "], n=2, logprobs=2, **asked)
    pieces: dict[int, str] = {}
    for chunk in text.create(prompt=["def f", "x = "], n=2, stream=True, **asked):
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + choice.text
    said = chat.create(messages=USER, logprobs=True, top_logprobs=3, **asked)
    streamed, roles, usage, ends = "", [], None, []
    for chunk in chat.create(
        messages=USER, stream=True, stream_options={"include_usage": True}, **asked
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            streamed += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    listed = said.choices[0].logprobs.content
    found = {
        "models": [each.id for each in client.models.list()],
        "texts": [choice.text for choice in whole.choices],
        "pieces": [pieces[index] for index in sorted(pieces)],
        "token_logprobs": whole.choices[0].logprobs.token_logprobs,
        "usage": whole.usage.model_dump(exclude_none=True),
        "chat": said.choices[0].message.content,
        "chat_finish": said.choices[0].finish_reason,
        "chat_logprobs": [entry.logprob for entry in listed],
        "chat_tops": [len(entry.top_logprobs) for entry in listed],
        "streamed": streamed,
        "roles": roles,
        "stream_ends": ends,
        "stream_usage": None if usage is None else usage.model_dump(exclude_none=True),
        "wrong_token": failure(lambda: stranger.models.list()),
        "wrong_model": failure(
            lambda: text.create(model="none", prompt="a", max_tokens=1)
        ),
        "wrong_value": failure(
            lambda: text.create(model=model, prompt="a", temperature=9)
        ),
        "too_long": failure(lambda: text.create(model=model, prompt="a" * 5000)),
        "tools": failure(
            lambda: chat.create(
                messages=USER,
                model=model,
                tools=[{"type": "function", "function": {"name": "f"}}],
            )
        ),
        "large": failure(lambda: text.create(model=model, prompt="a" * 3_000_000)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
