"""Ways to follow a module, tied and untied: the one that leaves the most freedom is proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from symmerge.derivation.deciding import Kind, kinds_of
from symmerge.derivation.patterns import add_rotary
from symmerge.derivation.recording import Recording, check_same_operations, record
from symmerge.derivation.running import Inputs, Read
from symmerge.derivation.tables import Table
from symmerge.derivation.walking import Followed, follow
from symmerge.symmetry.groups import Signs


@dataclass
class Proposal:
    """A recording that was followed, tied and untied."""

    followed: Followed
    kinds: dict[int, Kind]
    tied: Followed
    tied_kinds: dict[int, Kind]

    def freedom(self) -> tuple[float, float, float]:
        """How much may move, to choose between two tables: dimensions, orders, signs alone.

        Signs of gains come last: five layers of them outnumber the permutations of one stream.
        """
        table = Table(self.followed, self.kinds, {})
        groups = [table.group(root) for root in self.kinds if not table.still(root)]
        signs = [isinstance(group, Signs) for group in groups]
        orders = [group.log10_order for group in groups]
        return (
            sum(group.dimension for group in groups),
            sum(order for order, sign in zip(orders, signs, strict=True) if not sign),
            sum(order for order, sign in zip(orders, signs, strict=True) if sign),
        )


def largest_proposal(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    ties: Mapping[str, str],
    frozen: Sequence[str],
    both: tuple[Inputs, Inputs],
    read: Read,
) -> Proposal:
    """Parameters that are never trained may be constants: whichever leaves more freedom."""
    proposals = [_proposal(module, tensors, ties, both, read)]
    if frozen:
        trained = {name: one for name, one in tensors.items() if name not in frozen}
        proposals.append(_proposal(module, trained, ties, both, read))
    return max(proposals, key=Proposal.freedom)


def _proposal(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    ties: Mapping[str, str],
    both: tuple[Inputs, Inputs],
    read: Read,
) -> Proposal:
    first, second = (record(module, tensors, inputs, read) for inputs in both)
    check_same_operations(first, second, type(module).__name__)
    own = {alias: target for alias, target in ties.items() if alias in tensors}
    followed = _followed(first, {})
    tied = _followed(first, own) if own else followed
    return Proposal(*followed, *tied)


def _followed(recording: Recording, ties: Mapping[str, str]) -> tuple[Followed, dict[int, Kind]]:
    followed = follow(recording, ties)
    kinds = kinds_of(followed)
    add_rotary(followed, kinds)
    return followed, kinds
