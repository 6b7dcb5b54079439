"""Small settings of every method, and of each of its ways, for the tiny LM."""

from dlmi import Inverter
from dlmi.methods import (
    ADC,
    ARCA,
    DLMI,
    GBDA,
    GCG,
    MAC,
    PEZ,
    PGD,
    REINFORCE,
    SODA,
    AutoPrompt,
    RandomSearch,
    Refined,
    SwapSearch,
)

SMALL = {"prompt_length": 5, "steps": 12, "eval_every": 4}

# The contracts run for every row. Where a run needs more than a method, its options stand beside.
METHODS = {
    "dlmi": DLMI(tau0=1.0, num_samples=2),
    "dlmi_shared_free_run": DLMI(
        tau0=2.0, num_samples=2, temperature="shared", teacher_forcing=False
    ),
    "dlmi_soft_next_token": DLMI(
        tau0=1.0, num_samples=8, teacher_forcing=False, next_token_tau=1.0, loss="hinge", lr=0.4
    ),
    "dlmi_rao": DLMI(tau0=1.0, num_samples=2, estimator="gumbel_rao", lr=0.4),
    "dlmi_fixed_reinmax": DLMI(
        tau0=1.0, num_samples=2, temperature="fixed", estimator="reinmax", lr=0.4
    ),
    "gbda_annealed_final_samples": GBDA(
        tau=2.0, tau_end=0.5, num_samples=2, final_samples=6, lr=0.3
    ),
    "dlmi_fluent": DLMI(tau0=1.0, num_samples=2, estimator="straight_through", lr=0.4),
    "reinforce": REINFORCE(num_samples=16, lr=0.3),
    "reinforce_rloo": REINFORCE(num_samples=16, baseline="rloo", teacher_forcing=True, lr=0.3),
    "soda": SODA(reset_every=25),
    "soda_fluent": SODA(reset_every=25),
    "gcg": GCG(search_width=16, topk=8),
    "gcg_fluent": GCG(search_width=16, topk=8),
    "mac": MAC(search_width=16, topk=8),
    "autoprompt": AutoPrompt(topk=4, loss="mellowmax"),
    "arca": ARCA(num_candidates=3),
    "random_search": RandomSearch(width=2),
    "pgd": PGD(entropy_steps=6, patience=4),
    "pez": PEZ(lr=0.03),
    "adc": ADC(restarts=2, lr=1.0, norm_gradient_scale=0.85),
    "adc_refined": Refined(ADC(restarts=1, lr=1.0), SwapSearch(width=8), after=0.3),
    "swap_search": SwapSearch(width=1, num_starts=1),
    "swap_search_random": SwapSearch(width=2, num_starts=3, start_from="random"),
    "swap_search_window": SwapSearch(width=2, num_starts=2, window=2, horizon=2),
    "soda_refined": Refined(SODA(reset_every=25), after=0.8),
    "dlmi_refined": Refined(DLMI(num_samples=2, lr=0.4), after=0.5),
}
RUN_OPTIONS = {name: {"fluency": 0.3} for name in METHODS if name.endswith("_fluent")}


def make_inverter(name: str, **options) -> Inverter:
    """A small run of a row of `METHODS`."""
    return Inverter(METHODS[name], **{**SMALL, **RUN_OPTIONS.get(name, {}), **options})
