"""Shell completion of programs, commands and flags: `mjax completion bash`.

Input: the name of a shell. Output: on stdout a script for its start-up file. When Tab
is pressed, the script calls `mjax completion --words` with the words of the command
line. That command takes the first word as the name of a program, runs this program's
`-h`, and completes exactly the names that its help lists.
"""

import contextlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence

_BASH = """# Completes mjax in bash. In ~/.bashrc: eval "$(mjax completion bash)"
_mjax() {
    local IFS=$'\\n'
    COMPREPLY=($(mjax completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o bashdefault -o default -F _mjax mjax
"""

_ZSH = """#compdef mjax
# Completes mjax in zsh. In ~/.zshrc, after compinit: eval "$(mjax completion zsh)"
_mjax() {
    local -a found
    found=("${(@f)$(mjax completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then
        compadd -- "${found[@]}"
    else
        _files
    fi
}
compdef _mjax mjax
"""

_FISH = """# Completes mjax in fish. In ~/.config/fish/config.fish:
#   mjax completion fish | source
function __mjax_found
    set -l words (commandline -opc) (commandline -ct)
    mjax completion --words $words[2..-1] 2>/dev/null
end
complete -c mjax -a '(__mjax_found)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""Script for the start-up file, by shell."""


def main(words: Sequence[str], programs: Mapping[str, str]) -> int:
    """Print the script of a shell, or the completions of a word; return the exit code.

    Args:
      words: the name of a shell, or `--words` and the words of an mjax command line;
        the last word is unfinished and may be empty.
      programs: names that may come first, with their descriptions.
    """
    if words and words[0] == "--words":
        print("\n".join(candidates(words[1:], programs)))
        return 0
    if len(words) == 1 and words[0] in SCRIPTS:
        print(SCRIPTS[words[0]], end="")
        return 0
    print(
        f"error: mjax completion takes one of {', '.join(SCRIPTS)}, got "
        f"{' '.join(words) or 'nothing'}",
        file=sys.stderr,
    )
    return 2


def candidates(words: Sequence[str], programs: Mapping[str, str]) -> list[str]:
    """Return the completions of the last word.

    Args:
      words: words of a command line, without `mjax`; the last one may be empty.
      programs: names that may come first.
    Returns:
      Programs, commands, flags or choices, sorted; empty if a file or text is expected.
    """
    *before, last = words or [""]
    if not before:
        return sorted(n for n in [*programs, "completion"] if n.startswith(last))
    if before == ["completion"]:
        return sorted(name for name in SCRIPTS if name.startswith(last))
    if before[0] not in programs:
        return []
    text, commands = help_of(before[0]), []
    if len(before) > 1:
        if before[1] in commands_in(text):
            text = help_of(before[0], before[1])
    else:
        commands = commands_in(text)
    flags = flags_in(text)
    found = flags.get(before[-1], [*flags, *commands])
    return sorted(word for word in found if word.startswith(last))


def help_of(*names: str) -> str:
    """Return the help of a program or of one of its commands."""
    program, *command = names
    printed, argv = io.StringIO(), sys.argv
    sys.argv = [program, *command, "-h"]
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.suppress(SystemExit),
            warnings.catch_warnings(),
        ):
            # runpy warns about a module that was imported before, for example by an
            # earlier call of this function.
            warnings.simplefilter("ignore", RuntimeWarning)
            runpy.run_module(f"mjax.{program}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
    return printed.getvalue()


def flags_in(text: str) -> dict[str, list[str]]:
    """Return the flags that a help lists, each with the choices of its value.

    A flag begins a line, and `{a,b}` after it are its choices. A switch that is on by
    default names the flag that turns it off.
    """
    found: dict[str, list[str]] = {}
    for name, rest in re.findall(r"^ *(--[a-z][\w.-]*)(.*)$", text, re.M):
        choices = re.search(r"\{([^}]*)\}", rest)
        found[name] = choices[1].split(",") if choices else []
        if off := re.search(r"(--[\w.-]+) turns it off", rest):
            found[off[1]] = []
    recipes = re.search(r"^Recipes: ([^.]*)\.", text, re.M)
    if recipes and "--recipe" in found:
        found["--recipe"] = re.findall(r"[\w-]+", recipes[1])
    return found


def commands_in(text: str) -> list[str]:
    """Return the commands that a help lists.

    Each command begins a line, and at least two spaces separate it from its
    description. A program with only one command names it in the usage line.
    """
    only = re.findall(r"^usage: \S+ -m \S+ ([a-z-]+)", text)
    return only or re.findall(r"^ {0,2}([a-z][a-z-]+) {2,}\S", text, re.M)
