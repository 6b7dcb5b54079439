"""States of methods on their way into a checkpoint and back."""

import dataclasses
import io

import msgspec
import pytest
import torch

import dlmi.methods
from dlmi.methods import (
    ADC,
    ARCA,
    GCG,
    MAC,
    PGD,
    REINFORCE,
    AutoPrompt,
    RandomSearch,
    Refined,
    SwapSearch,
)
from dlmi.methods.adc import ADCState
from dlmi.methods.arca import ARCAState
from dlmi.methods.candidates import PromptState
from dlmi.methods.gcg import GCGState
from dlmi.methods.pgd import PGDState
from dlmi.methods.random_search import RandomSearchState
from dlmi.methods.refined import RefinedState
from dlmi.methods.reinforce import REINFORCEState
from dlmi.methods.slot import to_plain
from dlmi.methods.swap_search import Candidate, SwapState
from dlmi.scoring.evaluation import Evaluation

IDS = torch.tensor([4, 5, 6])
FULL = SwapState(
    at=Candidate(IDS, -1.5, torch.tensor([7, 8])),
    window=2,
    right=[1, 0],
    scored_on=["a", "b"],
    best=Candidate(IDS + 1, -2.5, torch.tensor([7, 9])),
    best_right=3,
    swaps=torch.tensor([[1, -1], [2, 3]]),
    waited=4,
    aside=Candidate(IDS + 2, 0.5, torch.tensor([1, 2])),
    barred=torch.tensor([[0, 9]]),
)
EVALUATION = Evaluation(
    3, (4, 5), (6, 7), 0.5, 1.25, -0.5, (6, 8), True, None, 0.25, False, ((1,), (2, 3))
)
STATES = {
    "gcg": (GCG(), GCGState(IDS)),
    "mac": (MAC(), GCGState(IDS, torch.tensor([[0.5, -1.0]]))),
    "autoprompt": (AutoPrompt(), PromptState(IDS)),
    "arca": (ARCA(), ARCAState(IDS, IDS + 1, 1.5)),
    "random search": (RandomSearch(), RandomSearchState(IDS, 0.5, 1.5)),
    "pgd": (PGD(), PGDState(IDS, 1.5, 3, 0.25, torch.zeros(2, 3))),
    "reinforce before its first step": (REINFORCE(), REINFORCEState()),
    "reinforce": (REINFORCE(), REINFORCEState(torch.tensor(2.5, dtype=torch.float64))),
    "adc before its first step": (ADC(), ADCState(IDS)),
    "adc": (ADC(), ADCState(IDS, 1.5, torch.tensor([0.5, 2.0]), {7, -(2**60)})),
    "swap search before its first step": (
        SwapSearch(),
        SwapState(Candidate(IDS, torch.inf, IDS[:0]), 3),
    ),
    "swap search": (SwapSearch(), FULL),
    "refined before its search": (Refined(ADC()), RefinedState(ADCState(IDS))),
    "refined": (Refined(REINFORCE()), RefinedState(REINFORCEState(), FULL)),
    "refined search": (Refined(GCG()), RefinedState(GCGState(IDS), FULL)),
}


def is_equal(one, other):
    """Of the same types all the way down, and equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(is_equal(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


def saved_and_loaded(plain):
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", STATES)
def test_a_state_survives_a_checkpoint(name):
    method, state = STATES[name]
    assert is_equal(method.restore(saved_and_loaded(to_plain(state))), state)


def test_so_does_an_evaluation():
    assert is_equal(msgspec.convert(saved_and_loaded(to_plain(EVALUATION)), Evaluation), EVALUATION)


def test_every_type_of_state_is_here():
    """All fields of the one that has most are set, so that none is lost unseen."""
    kinds = {getattr(dlmi.methods, name).state_type for name in dlmi.methods.__all__} - {None}
    assert kinds == {type(s) for _, s in STATES.values()} - {RefinedState}
    defaults = SwapState(FULL.at, 0)
    names = [field.name for field in dataclasses.fields(SwapState)][1:]
    assert not any(is_equal(getattr(FULL, n), getattr(defaults, n)) for n in names)


def test_a_restored_state_is_a_copy():
    """A run that goes on must not change what another may still read."""
    plain = to_plain(FULL)
    SwapSearch().restore(plain).swaps.fill_(-1)
    assert plain["swaps"].tolist() == [[1, -1], [2, 3]]


def test_the_comparison_can_fail():
    assert not is_equal(FULL, dataclasses.replace(FULL, waited=5))
    assert not is_equal(FULL, dataclasses.replace(FULL, barred=torch.tensor([[0, 8]])))
