"""The page of the notebooks, with links that open them in a hosted service.

Input: the notebooks and optionally the URL of the repository on GitHub, from which
Colab loads them. Output: a page of Markdown for the folder reference/. Without a URL
the page has no link to a hosted service: the project has no fixed address.
"""

import json
import re
from pathlib import Path

_REPOSITORY = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git|/)?")
_BRANCH = "main"


def page(folder: Path, repo_url: str | None) -> str:
    """Return the page: title, introduction and links of each notebook of the folder.

    Raises:
      ValueError: repo_url is not that of a repository on GitHub.
    """
    repository = None if repo_url is None else on_github(repo_url)
    parts = ["# Notebooks\n"]
    if repository is None:
        parts.append("Open them with Jupyter in a clone; `make env` installs it.\n")
    else:
        parts.append(
            "Open them with Jupyter in a clone (`make env` installs it), or in Colab. "
            "There, run this in a cell first:\n\n"
            f"    !pip install 'mjax[data] @ git+https://github.com/{repository}'\n"
        )
    for path in sorted(folder.glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        title, _, introduction = first.partition("\n")
        links = [f"[{path.name}](../{folder.name}/{path.name})"]
        if repository is not None:
            address = f"{repository}/blob/{_BRANCH}/{folder.name}/{path.name}"
            links.append(
                f"[open in Colab](https://colab.research.google.com/github/{address})"
            )
        parts.append(f"#{title}\n\n{introduction.strip()}\n\n{', '.join(links)}\n")
    return "\n".join(parts)


def on_github(url: str) -> str:
    """Return OWNER/NAME of the URL of a repository on GitHub.

    Raises:
      ValueError: the URL has another form.
    """
    found = _REPOSITORY.fullmatch(url)
    if found is None:
        raise ValueError(
            f"--repo-url must be https://github.com/OWNER/NAME, got {url}; leave it "
            "out for a site without links to Colab"
        )
    return found[1]
