"""The parameters of stages that other processes run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn


class OtherStages:
    """The parameters of stages that other processes run: their memory, if any, is given back.

    Shapes stay, as the model may be captured again in its other mode.
    """

    def __init__(self, root: nn.Module, kept: Sequence[torch.Tensor]) -> None:
        kept_storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._released: list[tuple[torch.UntypedStorage, int]] = []
        for parameter in root.parameters():
            if parameter.is_meta:
                continue
            storage = parameter.untyped_storage()
            alone = storage.nbytes() == parameter.numel() * parameter.element_size()
            if alone and storage.nbytes() and storage.data_ptr() not in kept_storages:
                self._released.append((storage, storage.nbytes()))
        self._resize(whole=False)

    def _resize(self, *, whole: bool) -> None:
        for storage, nbytes in self._released:
            storage.resize_(nbytes if whole else 0)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the parameters memory, of no defined content, for the time of a capture."""
        self._resize(whole=True)
        try:
            yield
        finally:
            self._resize(whole=False)
