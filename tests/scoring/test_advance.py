"""Steps of several slots side by side: LM calls, budgets, and costs that are what the LM saw."""

import dataclasses

import pytest
import torch
from helpers.lm_calls import counted_calls
from helpers.methods import METHODS, make_inverter
from helpers.slots import MadeUp, begin, open_slot, take_steps

from dlmi import load_lm
from dlmi.lm.memory import RowsPerPass
from dlmi.run.budget import Budget, most_evaluated
from dlmi.run.slot_pool import SlotPool
from dlmi.scoring.engine import Engine
from dlmi.scoring.passes import Account, Cost, Pass, advance
from dlmi.scoring.prefixes import PrefixStore
from dlmi.targets.context import NO_CONTEXT, Context
from dlmi.targets.target import Target
from dlmi.tokens.vocabulary import Vocabulary

INFINITE = float("inf")


def asking(count, log=None):
    """A step that asks so many times, one prompt more each time, and gives what it was told."""
    told = []
    try:
        for i in range(count):
            told.append(len((yield Pass(torch.zeros(i + 1, 3, dtype=torch.long), ())).losses))
    finally:
        if log is not None:
            log.append(count)
    return told


# ---- without an LM


def test_passes_that_are_asked_for_at_the_same_time_are_read_together():
    reader = MadeUp(cost=10)
    accounts = [Account() for _ in range(4)]
    outcomes = advance([asking(count) for count in (2, 0, 3, 1)], reader, accounts)
    assert [outcome.value for outcome in outcomes] == [[1, 2], [], [1, 2, 3], [1]]
    assert reader.rounds == [3, 2, 1]
    assert [account.cost for account in accounts] == [Cost(20), Cost(0), Cost(30), Cost(10)]


def test_nobody_asks_nothing_is_read():
    reader = MadeUp()
    assert advance([], reader, []) == []
    assert reader.rounds == []


def test_a_budget_that_ends_between_two_passes():
    """What was read is paid for, what would be too much is not read; the others go on."""
    reader, log = MadeUp(cost=10), []
    accounts = [Account(25.0), Account(30.0), Account()]
    outcomes = advance([asking(3, log) for _ in accounts], reader, accounts)
    assert [outcome.value for outcome in outcomes] == [None, [1, 2, 3], [1, 2, 3]]
    assert [account.cost.total for account in accounts] == [20, 30, 30]
    assert [account.left for account in accounts] == [5.0, 0.0, INFINITE]
    assert reader.rounds == [3, 3, 2]
    assert log == [3, 3, 3]  # also the step that was given up has ended


def test_a_step_that_raises_is_heard():
    def broken():
        yield Pass(torch.zeros(1, 3, dtype=torch.long), ())
        raise ZeroDivisionError("in a step")

    reader = MadeUp()
    with pytest.raises(ZeroDivisionError, match="in a step"):
        advance([asking(3), broken()], reader, [Account(), Account()])
    assert reader.rounds == [2]


def test_an_account_pays_for_a_beginning_once():
    account = Account(left=100.0)
    assert account.learn((1, 2, 3)) == 3
    assert account.learn((1, 2, 3)) == account.learn((1, 2)) == account.learn(()) == 0
    assert account.learn((1, 2, 9, 9)) == 2
    assert Account(known=[*account.known]).learn((1, 2, 9, 8)) == 1
    for first in range(10, 14):  # the latest four are remembered
        assert account.learn((first,)) == 1
    assert Account(known=[*account.known]).learn((1, 2, 3)) == 3
    assert account.charge(Cost(60, 40))
    assert not account.charge(Cost(1))
    assert (account.left, account.cost) == (0.0, Cost(60, 40))


# ---- LM calls


class CountedRounds:
    """The engine, and how many times it was asked.

    Attributes:
        rounds: The same.
    """

    def __init__(self, engine):
        self.engine = engine
        self.price = engine.price
        self.rounds = 0

    def __call__(self, passes):
        self.rounds += 1
        return self.engine(passes)


@pytest.mark.parametrize("count", [1, 4, 64])
@pytest.mark.parametrize(
    "name", ["dlmi", "dlmi_rao", "reinforce_rloo", "soda", "gcg", "pez", "adc", "swap_search"]
)
def test_lm_calls_do_not_grow_with_the_slots(name, count, tiny, monkeypatch):
    """Of a step at most twice the passes of the slot that makes most, however many there are."""
    monkeypatch.setattr(tiny, "rows_per_pass", RowsPerPass(4096))
    method, vocabulary = METHODS[name], Vocabulary(tiny)
    reader = CountedRounds(Engine(vocabulary, slots=count))
    assert tiny.can_pack
    slots = []
    for i in range(count):
        ids = tuple((i + j) % 28 + 3 for j in range(2 + i % 3))
        slots.append(open_slot(vocabulary, Target.single(f"t{i}", ids, ""), 5, method))
        begin(method, slots[-1], reader)
    total = 0
    for _ in range(3):
        reader.rounds = 0
        with counted_calls(tiny) as calls:
            take_steps(method, slots, reader)
        assert len(calls.tokens) <= 2 * reader.rounds
        total += len(calls.tokens)
    assert total > 0


# ---- costs


CONTEXTS = {
    "plain": NO_CONTEXT,
    "BoS": Context(start_ids=(2,)),
    "template": Context(((8, 4), (9,)), start_ids=(2,), read_once=2),
    "two blanks": Context(((8, 4), (9, 7), (3,)), (2, 0), read_once=1),
}
CASES = ["dlmi", "dlmi_shared_free_run", "dlmi_soft_next_token", "reinforce", "soda", "gcg", "pez"]
CASES += ["adc", "swap_search", "swap_search_window"]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_costs_what_the_lm_saw(name, context, kind, model_folder):
    """Forward and backward to the token; the window of `mistral` forgets, so nothing is shared."""
    lm = load_lm(str(model_folder(kind)), dtype="float64")
    lm.rows_per_pass = RowsPerPass(4096)
    method, vocabulary = METHODS[name], Vocabulary(lm)
    engine = Engine(vocabulary)
    assert lm.can_pack == (kind == "llama")
    target = Target.single("t", (5, 9, 11, 7), "", CONTEXTS[context])
    slot = open_slot(vocabulary, target, 6, method)
    with counted_calls(lm) as calls:
        begin(method, slot, engine)
        for _ in range(4):
            take_steps(method, [slot], engine)
    assert slot.cost == Cost(sum(calls.tokens), sum(calls.backward))
    assert slot.cost.forward > 0


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_slots_share_the_cost_of_a_call(kind, model_folder):
    """Prompts of one length side by side: what each pays is what the LM saw of all."""
    lm = load_lm(str(model_folder(kind)), dtype="float64")
    method, vocabulary = METHODS["dlmi"], Vocabulary(lm)
    lm.rows_per_pass = RowsPerPass(4096)
    engine = Engine(vocabulary, slots=3)
    assert lm.can_pack == (kind == "llama")
    targets = [Target.single(f"t{i}", (5, 9, 11 + i), "") for i in range(3)]
    slots = [open_slot(vocabulary, target, 6, method) for target in targets]
    for slot in slots:
        begin(method, slot, engine)
    with counted_calls(lm) as calls:
        take_steps(method, slots, engine)
    assert [slot.cost for slot in slots] == [Cost(2 * 8, 2 * 8)] * 3
    assert sum(calls.tokens) == sum(calls.backward) == 3 * 16


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_an_evaluation_costs_what_the_lm_saw(context, kind, model_folder):
    """Where nothing can be shared, the free run reads everything again; bounds cover that."""
    lm = load_lm(str(model_folder(kind)), dtype="float64")
    vocabulary = Vocabulary(lm)
    engine = Engine(vocabulary)
    assert lm.can_pack == (kind == "llama")  # what finds that out reads tokens too
    pool = SlotPool(METHODS["dlmi"], 6)
    pool.engine, pool.budget = engine, Budget(9)
    costs = set()
    for last in range(3, 13):
        target = Target.single("t", (5, 9, 11, last), "", CONTEXTS[context])
        slot = open_slot(vocabulary, target, 6, METHODS["dlmi"])
        slot.found_ids = torch.arange(last, last + 6)
        with counted_calls(lm) as calls:
            pool.evaluate([slot])
        assert slot.cost.total == sum(calls.tokens) <= most_evaluated(slot)
        if slot.last.output_ids[0] != 5:  # wrong from the first token on
            assert slot.cost.total == most_evaluated(slot)
        costs.add(slot.cost.total)
        engine.prefixes = PrefixStore(lm, 4)
    assert costs


@pytest.mark.parametrize("name", ["dlmi", "gcg", "swap_search"])
def test_a_token_budget_holds_where_no_cache_can_be_shared(name, model_folder, data, fit):
    lm = str(model_folder("mistral"))
    for budget in (150, 333, 777):
        rows = fit(make_inverter(name, steps=10_000, token_budget=budget), data(lm=lm)).values()
        assert all(row.forward_tokens + row.backward_tokens <= budget for row in rows)


def test_padding_costs_nothing(tiny):
    """Rows of different lengths are padded to the longest; nobody pays for that."""
    vocabulary = Vocabulary(tiny)
    engine = Engine(vocabulary)
    long, short = (5, 9, 11, 7, 8), (5,)
    together = [Target.single("a", long, ""), Target.single("b", short, "")]
    shared = dataclasses.replace(
        together[0], examples=(*together[0].examples, *together[1].examples), per_step=2
    )
    prompts = torch.tensor([[4, 5, 6]])
    apart = [engine.price(Pass(prompts, t.examples), Account()) for t in together]
    assert apart == [Cost(3 + 4), Cost(3)]
    assert engine.price(Pass(prompts, shared.examples), Account()) == Cost(7 + 3)
