"""Chat templates rendered by transformers; run by the interpreter of `.venv-hf`.

Nothing of mjax is imported here. Input: a JSON file of jobs: template, messages,
whether to add a prompt, and variables. Output on stdout: texts, and the positions of
answers.
"""

import json
import sys

from transformers.utils.chat_template_utils import (  # pyright: ignore[reportMissingImports]
    render_jinja_template,
)


def main(path: str) -> None:
    with open(path) as file:
        jobs = json.load(file)
    done = []
    for job in jobs:
        texts, places = render_jinja_template(
            conversations=[job["messages"]],
            chat_template=job["template"],
            add_generation_prompt=job["prompt"],
            tools=job["tools"],
            return_assistant_tokens_mask=True,
            **job["variables"],
        )
        done.append([texts[0], [list(place) for place in places[0]]])
    print(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1])
