"""The notebook of the documentation runs, and shows what it says."""

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tour.ipynb"


@pytest.fixture(scope="module")
def cells():
    """The code cells, in order."""
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def test_outputs_are_stored(cells):
    """Without errors and warnings, and with the figures."""
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.real
def test_it_runs(cells):
    matplotlib.use("agg")
    names = {}
    for number, cell in enumerate(cells, 1):
        exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
    assert names["paris"].exact
    assert names["verified"].exact
    assert names["verified"].problems == ()
    assert names["said"] == " Paris."
    history = names["temperatures"].history
    assert len(history) >= names["relaxed"].steps  # the last one may not have been affordable
    assert {len(temperatures) for temperatures in history} == {8}
    assert all(len(row.trace) > 1 for row in (names["relaxed"], names["searched"]))
    matplotlib.pyplot.close("all")
