"""The command that counts the FLOPs of a program in a file."""

import subprocess
import sys
from pathlib import Path

MODULE = """HloModule example, is_scheduled=true

ENTRY %main (x: f32[4,8], y: f32[8,2]) -> f32[4,2] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[8,2]{1,0} parameter(1)
  ROOT %out = f32[4,2]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""  # noqa: E501


def test_the_command_prints_the_flops_of_the_program_in_a_file(tmp_path: Path):
    path = tmp_path / "program.txt"
    path.write_text(MODULE)
    command = [sys.executable, "-m", "scripts.overlap.hlo_dots", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{2 * 4 * 8 * 2}\n"), done.stderr
