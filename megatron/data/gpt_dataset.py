"""The order in which GPT-NeoX serves samples, computed with numpy alone.

The documents of a split are repeated once per epoch and shuffled together; the result is one long
stream of tokens. Sample ``s`` is the ``length + 1`` tokens from position ``s * length``, so that
neighbouring samples share one token and documents are crossed freely::

    stream    |--doc 7--|----doc 2----|--doc 5--|--doc 7--| ...
    samples   [0......][1......][2......][3......]

Finally the samples themselves are shuffled. Both shuffles come from one ``RandomState(seed)``,
whose sequence numpy guarantees never to change; that makes the order equal to the official one.

That is `pack_impl: packed`. With `unpacked` a sample is one document, with `pack_until_overflow` as
many whole documents as fit; what is left of the sample is padding, which carries no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import Arrays, cache_directory, cached_arrays
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError
from megatron.neox_arguments.validation import split_shares

UINT32_SAMPLES = 2**32 - 2
INT32_DOCUMENTS = 2**31 - 1


def split_bounds(split: str, num_documents: int) -> list[int]:
    """Document numbers at which train, valid and test begin and end (four of them).

    The rounding error is subtracted from every boundary, as in NeoX.
    """
    bounds = [0]
    for share in split_shares(split):
        bounds.append(bounds[-1] + round(share * float(num_documents)))
    error = bounds[-1] - num_documents
    return [0] + [min(max(bound - error, 0), num_documents) for bound in bounds[1:]]


def number_of_epochs(tokens_per_epoch: int, length: int, num_samples: int) -> int:
    """The fewest epochs that hold ``num_samples`` samples (at least one)."""
    return max(1, -(-(num_samples * length + 1) // tokens_per_epoch))


def build_sample_index(
    sizes: npt.NDArray[np.int32], first: int, last: int, length: int, epochs: int, seed: int
) -> Arrays:
    """Where each sample of ``epochs`` passes over documents ``first`` to ``last`` (exclusive) is.

    ``documents`` are the stream's, in order, ``ends`` the positions in it just past each, and
    ``order`` the sample served as item i. Nothing more need be stored for a sample: it starts at
    position ``s * length``, in ``documents[searchsorted(ends, position, "right")]``.
    """
    if last > INT32_DOCUMENTS:
        raise DataError(f"{last} documents; at most 2^31-1 can be indexed")
    generator = np.random.RandomState(seed)
    documents = np.tile(np.arange(first, last, dtype=np.int32), epochs)
    generator.shuffle(documents)
    ends = np.cumsum(sizes[documents], dtype=np.int64)
    total_samples = (int(ends[-1]) - 1) // length
    order = np.arange(
        total_samples, dtype=np.uint32 if total_samples < UINT32_SAMPLES else np.int64
    )
    generator.shuffle(order)
    return {"documents": documents, "ends": ends, "order": order}


# Samples of fixed length from a token file, in the official order.

SPLIT_NAMES = ("train", "valid", "test")
INDEX_ARRAYS = ("documents", "ends", "order")
INDEX_FORMAT = 1  # part of the cache key: raise it whenever the arrays' meaning changes
NO_LOSS = -100
"""The label of a token that carries no loss, as in GPT-NeoX and transformers; any below 0 does."""
Sample = dict[str, npt.NDArray[np.int64]]


def read_stream(
    tokens: IndexedDataset,
    documents: Sequence[int] | npt.NDArray[np.int32],
    ends: npt.NDArray[np.int64],
    start: int,
    count: int,
) -> npt.NDArray[np.int64]:
    """``count`` tokens from ``start`` on of ``documents`` end to end, which stop at ``ends``."""
    place = int(np.searchsorted(ends, start, side="right"))
    offset = start - (int(ends[place - 1]) if place else 0)
    text, filled = np.empty(count, np.int64), 0
    while filled < count:
        part = tokens.get(int(documents[place]), offset, offset + count - filled)
        text[filled : filled + len(part)] = part
        filled += len(part)
        place, offset = place + 1, 0
    return text


class GPTDataset:
    """At least ``num_samples`` samples from documents ``first`` to ``last`` (exclusive).

    Item i is ``{"text": int64[length + 1]}``: the tokens and, shifted by one, their labels. With a
    dataset of ``labels`` it also has ``{"label": int64[length + 1]}``, a label for each token, not
    shifted either.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        first: int,
        last: int,
        length: int,
        num_samples: int,
        seed: int,
        *,
        name: str = "train",
        cache_dir: str | Path | None = None,
        vocab_size: int | None = None,
        labels: IndexedDataset | None = None,
    ) -> None:
        for file in (tokens, labels):
            if file is not None and file.dtype.kind == "f":
                raise DataError(f"{file.prefix}: holds {file.dtype.name}, not token ids")
        if labels is not None and not np.array_equal(labels.sizes, tokens.sizes):
            raise DataError(
                f"{labels.prefix}: its documents have other lengths than those of {tokens.prefix}; "
                "there must be one label for each token. Prepare both in one call."
            )
        self.tokens, self.labels = tokens, labels
        self.length = length
        self.name = name
        self.vocab_size = vocab_size
        self.tokens_per_epoch = int(tokens.sizes[first:last].sum(dtype=np.int64))
        if self.tokens_per_epoch == 0:
            raise DataError(
                f"{tokens.prefix}: the {name} documents ({first} to {last - 1}) hold no tokens; "
                "change the split or use more data"
            )
        directory = cache_directory(cache_dir, tokens.prefix)
        self._order = self._index(first, last, num_samples, seed, directory)
        if not len(self._order):
            raise DataError(
                f"{tokens.prefix}: the {name} documents hold only {self.tokens_per_epoch} tokens, "
                f"fewer than one sample of length {length} needs; change the split or use more data"
            )
        # The official dataset counts one sample fewer than it shuffles. We do the same, except
        # where that would be fewer than requested.
        self._served = max(len(self._order) - 1, num_samples, 1)

    def _index(
        self, first: int, last: int, num_samples: int, seed: int, directory: Path
    ) -> npt.NDArray[Any]:
        """The sample index, from the cache if it is there; the key holds all that it depends on."""
        sizes, length = self.tokens.sizes, self.length
        epochs = number_of_epochs(self.tokens_per_epoch, length, num_samples)
        total_tokens = epochs * self.tokens_per_epoch
        samples = (total_tokens - 1) // length

        def check(arrays: Arrays) -> str | None:
            """Why a stored index cannot be this one; None if every place it names exists."""
            documents, ends, order = (arrays[key] for key in INDEX_ARRAYS)
            if documents.min() < first or documents.max() >= last:
                return "it names documents that are not there"
            if ends[0] < 0 or (np.diff(ends) < 0).any() or int(ends[-1]) != total_tokens:
                return "its documents do not follow each other"
            if samples and (order.min() < 0 or order.max() >= samples):
                return "it names samples that are not there"
            return None

        count = (last - first) * epochs
        arrays = cached_arrays(
            {
                "format": INDEX_FORMAT,
                "sizes": self.tokens.sizes_digest(),
                "documents": [first, last],
                "length": length,
                "epochs": epochs,
                "seed": seed,
            },
            lambda: build_sample_index(sizes, first, last, length, epochs, seed),
            directory=directory,
            name=f"{self.tokens.prefix.name}_{self.name}",
            lengths={"documents": count, "ends": count, "order": samples},
            check=check,
        )
        self._documents, self._ends, order = (arrays[key] for key in INDEX_ARRAYS)
        return order

    def __len__(self) -> int:
        return self._served

    def __getitem__(self, item: int) -> Sample:
        if not -len(self) <= item < len(self):
            raise IndexError(f"{self.name} sample {item} of {len(self)}")
        sample = self._read(int(self._order[item if item >= 0 else item + len(self)]))
        for key, file in (("text", self.tokens), ("label", self.labels)):
            if self.vocab_size is None or file is None:
                continue
            low, high = int(sample[key].min()), int(sample[key].max())
            wrong = low if low < 0 and key == "text" else high
            if not 0 <= wrong < self.vocab_size and wrong != NO_LOSS:
                raise DataError(
                    f"{file.prefix}: token {wrong} is outside the vocabulary of {self.vocab_size}; "
                    "the data was made with another tokenizer. Set tokenizer_type, vocab_file and "
                    "merge_file to the ones it was prepared with."
                )
        return sample

    def _read(self, sample: int) -> Sample:
        files = {"text": self.tokens}
        if self.labels is not None:
            files["label"] = self.labels
        start, count = sample * self.length, self.length + 1
        return {
            key: read_stream(file, self._documents, self._ends, start, count)
            for key, file in files.items()
        }


class WholeDocuments(GPTDataset):
    """`pack_impl: unpacked` or `pack_until_overflow`: samples that begin with a document.

    A sample is cut after ``length + 1`` tokens, and padded with token 0 and label NO_LOSS.
    """

    def __init__(
        self, *args: Any, pack_impl: str, allow_chopped: bool = True, **options: Any
    ) -> None:
        self._one_each, self._chops = pack_impl == "unpacked", allow_chopped
        super().__init__(*args, **options)

    def _index(
        self, first: int, last: int, num_samples: int, seed: int, directory: Path
    ) -> npt.NDArray[Any]:
        """GPT-NeoX's order. It is not cached: which documents count depends on every label."""
        count = max(num_samples, 1)
        generator = np.random.RandomState(seed)
        order = np.arange(count)
        generator.shuffle(order)
        usable = self._usable(first, last)
        if not usable.any():
            raise DataError(
                f"{self.tokens.prefix}: none of the {self.name} documents can be used; each is "
                + ("without a label that carries loss" if self._chops else "longer than seq_length")
                + ". Use a longer seq_length, or other data."
            )
        self.usable_documents = int(usable.sum())
        if self._one_each:
            self._documents = np.resize(np.flatnonzero(usable) + first, count)
            self._firsts = np.arange(count + 1)
        else:
            sizes = self.tokens.sizes[first:last]
            places, firsts = _packed_until_overflow(
                sizes, usable, self.length + 1, count, generator
            )
            self._documents, self._firsts = places + first, firsts
        return order

    def _usable(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which documents have tokens, fit if they must, and have a label that carries loss."""
        sizes = self.tokens.sizes[first:last]
        usable = (sizes > 0) & (self._chops | (sizes <= self.length + 1))
        if self.labels is not None:
            seen = self.length if self._one_each else self.length + 1  # as in GPT-NeoX
            for place in np.flatnonzero(usable):
                labels = self.labels.get(first + int(place), 0, seen)
                usable[place] = (labels != NO_LOSS).any()
        return usable

    def _read(self, sample: int) -> Sample:
        count = self.length + 1
        text, label = np.zeros(count, np.int64), np.full(count, NO_LOSS, np.int64)
        labels, filled = self.tokens if self.labels is None else self.labels, 0
        for document in self._documents[self._firsts[sample] : self._firsts[sample + 1]]:
            part = self.tokens.get(int(document), 0, count - filled)
            stop = filled + len(part)
            text[filled:stop] = part
            label[filled:stop] = labels.get(int(document), 0, len(part))
            filled = stop
        return {"text": text, "label": label}


def _packed_until_overflow(
    sizes: npt.NDArray[np.int32],
    usable: npt.NDArray[np.bool_],
    capacity: int,
    count: int,
    generator: np.random.RandomState,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Documents in the order they are used, and the place in it where each sample begins.

    As in GPT-NeoX, documents are shuffled anew for each epoch, and the last sample has only one.
    """
    documents: list[int] = []
    firsts: list[int] = []
    order, used = np.arange(len(sizes)), 0
    while True:
        generator.shuffle(order)
        for document in order[usable[order]].tolist():
            used += int(sizes[document])
            if not firsts or used > capacity:
                firsts.append(len(documents))
                used = int(sizes[document])
            documents.append(document)
            if len(firsts) == count:
                firsts.append(len(documents))
                return np.array(documents), np.array(firsts)


def build_train_valid_test_datasets(
    prefix: str | Path,
    split: str,
    num_samples: tuple[int, int, int],
    seq_length: int,
    seq_length_val: int | None = None,
    seed: int = 1234,
    *,
    cache_dir: str | Path | None = None,
    mmap_warmup: bool = False,
    vocab_size: int | None = None,
    kind: Callable[..., GPTDataset] = GPTDataset,
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """The three datasets of one token file; None where the split leaves nothing to serve.

    Training samples have ``seq_length`` tokens, validation and test samples ``seq_length_val``.
    """
    tokens = IndexedDataset(prefix, warmup=mmap_warmup)
    bounds = split_bounds(split, len(tokens))
    lengths = (seq_length, seq_length_val or seq_length, seq_length_val or seq_length)
    datasets: list[Any] = []
    for i, name in enumerate(SPLIT_NAMES):
        amount = int(tokens.sizes[bounds[i] : bounds[i + 1]].sum(dtype=np.int64))
        if bounds[i + 1] <= bounds[i] or (num_samples[i] == 0 and amount <= lengths[i]):
            datasets.append(None)  # no documents, or no samples requested and none possible
            continue
        datasets.append(
            kind(
                tokens,
                bounds[i],
                bounds[i + 1],
                lengths[i],
                num_samples[i],
                seed,
                name=name,
                cache_dir=cache_dir,
                vocab_size=vocab_size,
            )
        )
    return datasets[0], datasets[1], datasets[2]
