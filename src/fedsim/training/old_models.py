"""Global models of earlier rounds, on which clients under way train: each is kept once on a machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from fedsim.core.store import ClientStore


class OldModels:
    """Keeps the global models with which some earlier rounds began, in the slots of a store.

    The ranks of a machine share the store; one of them writes. A slot that becomes free rests for a round: another rank
    may still read it while the writer has begun the next one.

    Args:
        store: with the slots of :meth:`slots`.
        writes: whether this rank writes.
        saves: whether this rank writes checkpoints.
    """

    def __init__(self, store: ClientStore, writes: bool = True, saves: bool = True) -> None:
        self._store, self._writes, self._saves = store, writes, saves
        self._slots: dict[int, int] = {}
        """round -> number of its slot"""
        self._resting: set[int] = set()
        self.num_slots = 0
        """slots that have been used since the beginning; none gives its memory back"""

    @staticmethod
    def slots(places: int) -> list[str]:
        """Return the names of the slots that are enough for ``places`` clients under way; none if there are none."""
        return [f"old model {number}" for number in range(2 * places + 1 if places else 0)]

    @property
    def rounds(self) -> list[int]:
        """The rounds whose models are kept, in ascending order."""
        return sorted(self._slots)

    def keep(self, round_: int, vectors: Mapping[str, Tensor]) -> None:
        """Keep the models with which a round begins: architecture -> vector [num_shared]."""
        used = {*self._slots.values(), *self._resting}
        slot = next(number for number in range(len(used) + 1) if number not in used)
        self._slots[round_] = slot
        self.num_slots = max(self.num_slots, slot + 1)
        if self._writes:
            self._store.write(f"old model {slot}", vectors)

    def of(self, round_: int, arch: str) -> Tensor:
        """Return the vector [num_shared] float32 with which a round began, in host memory."""
        return self._store.read(f"old model {self._slots[round_]}")[arch]

    def keep_only(self, rounds: Collection[int]) -> None:
        """Forget the models of all other rounds."""
        self._resting = {slot for round_, slot in self._slots.items() if round_ not in rounds}
        self._slots = {round_: slot for round_, slot in self._slots.items() if round_ in rounds}

    def saved(self) -> dict[int, dict[str, Tensor]]:
        """Return the models for a checkpoint, on a rank that saves them: round -> architecture -> vector."""
        if not self._saves:
            return {}
        return {round_: self._store.read(f"old model {self._slots[round_]}") for round_ in self.rounds}

    def load(self, saved: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace all models by those of a checkpoint."""
        self.keep_only(())
        for round_, vectors in saved.items():
            self.keep(round_, vectors)
