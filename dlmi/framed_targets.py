"""Targets of a run in their templates."""

import dataclasses
from collections.abc import Sequence

from dlmi.frames import Frame, common_beginning
from dlmi.lm import FrozenLM
from dlmi.targets import Target
from dlmi.templates import Template


def frame_target(lm: FrozenLM, target: Target, template: Template) -> Target:
    """A target whose tokens are known already, in a template without fields."""
    filled = template.fill(lm, {}, f"target {target.id}")
    return dataclasses.replace(target, frame=filled.frame)


def share_head(targets: Sequence[Target]) -> list[Target]:
    """The targets of a run, with what all of them start with marked to be read once."""
    frames = [example.frame for target in targets for example in target.readings]
    head = len(common_beginning([frame.pieces[0] for frame in frames]))

    def marked(frame: Frame) -> Frame:
        return frame if frame.head == head else dataclasses.replace(frame, head=head)

    return [
        dataclasses.replace(
            target,
            frame=target.frame if target.examples else marked(target.frame),
            examples=tuple(dataclasses.replace(e, frame=marked(e.frame)) for e in target.examples),
        )
        for target in targets
    ]
