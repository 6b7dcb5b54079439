"""Targets with fixed tokens around their prompts."""

from dlmi.targets.context import Context
from dlmi.targets.target import Target, share_prefix, with_start_ids

# Beginnings that are partly shared, pieces of different number of tokens, one and two blanks.
CONTEXTS = [
    Context(((3, 4, 5), (6,))),
    Context(((3, 4), ())),
    Context(((3, 4, 9, 8), (7, 7), (10, 11, 12)), (2, 0)),
    Context(((3, 4, 5), (6, 8), ()), (0, 0)),
    Context(),
]
TARGETS = [(13, 14, 15), (16, 17), (18,), (19, 20, 21, 22), (23, 24)]


def targets_in_context(contexts=CONTEXTS, start_ids=()):
    pairs = zip(contexts, TARGETS, strict=False)
    targets = [Target.single(f"t{i}", ids, "", c) for i, (c, ids) in enumerate(pairs)]
    return with_start_ids(share_prefix(targets), start_ids)
