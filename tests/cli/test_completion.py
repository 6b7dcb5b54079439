"""Completion at a key press, by the shell itself."""

import shutil
import subprocess
from contextlib import redirect_stdout

import pytest

from dlmi.cli.main import COMMANDS, main

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "dlmi.bash"
    with path.open("w") as file, redirect_stdout(file), pytest.raises(SystemExit) as end:
        main(["completion"])
    assert end.value.code == 0
    assert path.stat().st_size < 100_000
    return path


@pytest.mark.skipif(BASH is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["re"], {"report"}),
        ([""], {*COMMANDS, "--help", "--version"}),
        (["--v"], {"--version"}),
        (["fit", "--model.flu"], {"--model.fluency"}),
        (["fit", "--model.method.topk"], {"--model.method.topk"}),
        (["fit", "--data.load.dev"], {"--data.load.device_map"}),
        (["fit", "--model.method", "G"], {"GBDA", "GCG"}),
        (["fit", "--trainer.devi"], {"--trainer.devices", "--trainer.devices+"}),
        (["score", "--two"], {"--two_stages"}),
        (["verify", "somefile"], set()),  # readline then completes files
        (["report", "somefile.txt", "--ou"], {"--out"}),
        (["verify", "x", "--dtype", "fl"], {"float16", "float32", "float64"}),
        (["invert", "x", "--chat", "t"], {"true"}),
    ],
)
def test_bash_completes(script, tmp_path, words, expected):
    (tmp_path / "somefile.txt").touch()
    line = " ".join(f"'{word}'" for word in ("dlmi", *words))
    code = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _dlmi; "
    done = subprocess.run(  # without a PATH: no Python, nor anything else, is started
        [BASH, "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == expected
    assert not done.stderr


def test_completion_takes_no_options(capsys):
    with pytest.raises(SystemExit) as end:
        main(["completion", "zsh"])
    assert end.value.code == 2
    assert "zsh" in capsys.readouterr().err
