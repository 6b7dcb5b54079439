"""What `pip install .` gives: built and installed for real, without its dependencies."""

import os
import subprocess
import sys
import zipfile

import pytest
import yaml
from helpers.command_line import CONFIGS, run
from helpers.subprocess_runs import ROOT

from dlmi import __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # building leaves files in the tree
    names = ["pyproject.toml", "README.md", "LICENSE", "dlmi", "configs"]
    source.mkdir()
    subprocess.run(["cp", "-r", "--no-dereference", *names, source], cwd=ROOT, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    options = ["--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *options, "-w", folder, source], check=True)
    [file] = folder.glob("dlmi-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", file], check=True)
    return file, folder / "site"


def test_the_wheel_holds_package_configs_and_types(wheel):
    names = set(zipfile.ZipFile(wheel[0]).namelist())
    shipped = {f"dlmi/configs/{path.relative_to(CONFIGS)}" for path in CONFIGS.rglob("*.yaml")}
    assert names >= {"dlmi/py.typed", "dlmi/cli/fit.py", "dlmi/report/assets/page.css", *shipped}
    assert not any(name.startswith(("configs/", "tests/")) for name in names)


def test_the_installed_command_finds_a_config_by_name_anywhere(wheel, tmp_path):
    site = wheel[1]
    command = [site / "bin" / "dlmi", "fit", "--config", "dlmi_tau100", "--print_config"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "prompt_length: 80" in done.stdout
    assert "per_k: 5" in done.stdout  # of a file that it includes
    where = [sys.executable, "-c", "import dlmi.cli.main as c; print(c.CONFIGS)"]
    env = {**os.environ, "PYTHONPATH": str(site)}
    found = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert found.strip() == str(site / "dlmi" / "configs")


def test_the_citation_names_this_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fit", "--config", "dlmi_tau10"], "Did you mean `dlmi_tau100`?"),
        (["compare", "--config=smal"], "Did you mean `compare/small`?"),
        (["gradients", "-c", "nowhere/at_all.yaml"], "but got 'nowhere/at_all.yaml'. They are in"),
    ],
)
def test_a_name_that_no_config_has(arguments, expected, capfd):
    assert run(*arguments) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert expected in line
