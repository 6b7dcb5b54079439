"""What needs no torch starts without it: importing that takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "lightning")


def loaded_by(*arguments):
    """Heavy modules that a command has imported by its end, its exit code and what it said."""
    code = (
        "import sys; from dlmi.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stderr.splitlines()[-1], done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["report", "--help"], ["frobnicate"], ["report", "nowhere"]],
    ids=" ".join,
)
def test_no_torch(arguments):
    loaded, code, _ = loaded_by(*arguments)
    assert loaded == "[]"
    assert code == (0 if arguments[-1].startswith("--") else 2)


def test_a_whole_report_needs_no_torch(tmp_path):
    cells = ROOT / "docs" / "benchmark" / "honest" / "GCG-N20-M8-seed2"
    loaded, code, said = loaded_by("report", cells, "--out", tmp_path / "out")
    assert code == 0, said
    assert loaded == "[]"
    assert (tmp_path / "out" / "report.html").is_file()
