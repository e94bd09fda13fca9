"""The commands of docs/fine_tuning.md, in their order and as they are written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "fine_tuning.md"


def test_the_commands_of_the_page_run_one_after_the_other(tmp_path):
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        ),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for block in blocks:
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    template = (tmp_path / "chat.jinja").read_bytes()
    for folder in ("runs/tuned/tokenizer", "adapters", "merged"):
        assert (tmp_path / folder / "chat_template.jinja").read_bytes() == template
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (8, "base")
    assert (tmp_path / "merged" / "model.safetensors").is_file()
