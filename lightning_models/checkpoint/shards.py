"""Sharded checkpoints: each process writes its shards of the tensors, one file holds the rest.

The file, such as ``last.ckpt``, is an ordinary checkpoint without its sharded tensors. These are in
safetensors files in a folder next to it, which it names. It is written after them, so at any time
it is a complete checkpoint, the previous or the new one. Any number of processes can read it:
torch.distributed.checkpoint gives each the slices that it needs.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_models.checkpoint.content import CheckpointError

KEY = "shards"
"""Key in a checkpoint of the shards' folder, their digests, and the tensors' names and shapes."""

KeyPath = tuple[str | int, ...]
"""Keys from the content down to a tensor, e.g. ("optimizer_states", 0, "state", 3, "exp_avg")."""


@dataclass(frozen=True)
class Sharded:
    """A checkpoint's entry for one tensor in its folder."""

    path: KeyPath
    shape: tuple[int, ...]
    dtype: torch.dtype


def take_out(content: Any, take: Callable[[Any], bool]) -> tuple[Any, dict[KeyPath, Any]]:
    """Splits nested dicts and lists into a copy without some values, and these by key path.

    Args:
        content: Nested dicts and lists, which are not changed.
        take: Predicate of the values to take out of dicts. It is not called with dicts and lists.
    """
    taken: dict[KeyPath, Any] = {}

    def copy(node: Any, path: KeyPath) -> Any:
        if isinstance(node, list):
            return [copy(value, (*path, n)) for n, value in enumerate(node)]
        if not isinstance(node, dict):
            return node
        kept = {}
        for key, value in node.items():
            if not isinstance(value, dict | list) and take(value):
                taken[(*path, key)] = value
            else:
                kept[key] = copy(value, (*path, key))
        return kept

    return copy(content, ()), taken


def put_back(content: Any, values: Mapping[KeyPath, Any], file: Path) -> Any:
    """Reverses :func:`take_out`, in place, and returns the content.

    Args:
        content: Nested dicts and lists without the values.
        values: The values by key path.
        file: The checkpoint's file, for messages.

    Raises:
        CheckpointError: If the content has no such path.
    """
    for (*path, key), value in values.items():
        node = content
        try:
            for step in path:
                node = node[step]
            node[key] = value
        except (LookupError, TypeError) as error:
            raise CheckpointError(
                f"{file}: names a tensor at {[*path, key]}, where none fits"
            ) from error
    return content


def describe(tensors: Mapping[KeyPath, Tensor]) -> dict[str, dict[str, Any]]:
    """Returns plain entries, by names in files, from which :class:`Shards` reads the tensors.

    Args:
        tensors: DTensors by key path.
    """
    return {
        name_of(path): {
            "place": list(path),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        for path, tensor in tensors.items()
    }


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sum_of(path: Path) -> str:
    """Returns the digest of a file, or "" if it cannot be read."""
    try:
        return digest(path)
    except OSError:
        return ""


def name_of(path: KeyPath) -> str:
    """Returns the name in files of the tensor at a key path."""
    return "/".join(map(str, path))


class Shards:
    """The tensors in the folder of a checkpoint.

    Args:
        path: The checkpoint's file.
        content: The file's content, with :data:`KEY`.

    Raises:
        CheckpointError: If the entries are broken, or name no existing folder next to the file.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        try:
            folder = str(content[KEY]["folder"])
            sums = content[KEY].get("sums")  # none in older checkpoints
            self.sums = None if sums is None else dict(sums)
            self.tensors = {
                str(name): Sharded(
                    tuple(entry["place"]), tuple(entry["shape"]), getattr(torch, entry["dtype"])
                )
                for name, entry in content[KEY]["tensors"].items()
            }
            shapes = [size for stored in self.tensors.values() for size in stored.shape]
            dtypes = [stored.dtype for stored in self.tensors.values()]
            sound = all(isinstance(size, int) and size >= 0 for size in shapes)
            sound &= all(isinstance(dtype, torch.dtype) for dtype in dtypes)
        except (LookupError, TypeError, AttributeError) as error:
            raise self._broken(f"its {KEY} cannot be read ({error})") from error
        if not sound:
            raise self._broken(f"its {KEY} have shapes or dtypes that tensors do not have")
        if folder != Path(folder).name or folder in ("", ".", ".."):
            raise self._broken(f"its {KEY} are in {folder!r}, not in a folder next to it")
        self.folder = path.parent / folder
        if not self.folder.is_dir():
            raise self._broken(
                f"its tensors are in {self.folder}, which is missing; copy that folder as well"
            )

    def _broken(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def below(self, key: str) -> dict[str, str]:
        """Returns the names of the tensors below one key of the content, by their last key."""
        return {
            str(stored.path[-1]): name
            for name, stored in self.tensors.items()
            if stored.path[0] == key
        }

    def verify(self, share: slice = slice(None)) -> None:
        """Compares the files with their digests, which older checkpoints do not have.

        Args:
            share: Slice of the files to read, sorted by name. Defaults to all files.

        Raises:
            CheckpointError: If a file was changed, removed or added, or no file has a digest.
        """
        if self.sums is None:
            return
        if self.tensors and not self.sums:
            raise self._broken(f"its {KEY} name no file of {self.folder}; use another checkpoint")
        names = sorted(self.sums)
        wrong = [name for name in names[share] if sum_of(self.folder / name) != self.sums[name]]
        wrong += {path.name for path in self.folder.glob("*.safetensors")} - self.sums.keys()
        if wrong:
            raise self._broken(
                f"{self.folder / min(wrong)} is damaged, or not the file that was written (its "
                "SHA-256 is not the one in the checkpoint); copy it again, or use another "
                "checkpoint"
            )

    def read(
        self, names: Iterable[str], empty: Callable[..., Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Reads tensors by name, without verifying their files.

        Args:
            names: Names of the tensors.
            empty: Function of a shape and a ``dtype`` that creates the tensor to fill. It may
                create DTensors, of which each process reads its part; all processes must then call
                this. Defaults to full tensors on the CPU.

        Raises:
            CheckpointError: If files are missing, damaged or of other tensors.
        """
        import torch.distributed.checkpoint as dcp

        state = {
            name: (empty or torch.empty)(self.tensors[name].shape, dtype=self.tensors[name].dtype)
            for name in names
        }
        with self._readable():
            reader = dcp.HuggingFaceStorageReader(str(self.folder))
            dcp.load(state, storage_reader=reader, no_dist=empty is None)
        return state

    def check(self) -> None:
        """Checks by their headers that the files cover every tensor completely.

        Raises:
            CheckpointError: If files are missing, damaged or of other tensors.
        """
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        with self._readable():
            metadata = HuggingFaceStorageReader(str(self.folder)).read_metadata()
        for name, tensor in self.tensors.items():
            stored: Any = metadata.state_dict_metadata.get(name)
            chunks = () if stored is None else stored.chunks
            complete = stored is not None and tuple(stored.size) == tensor.shape
            complete &= _fill(chunks, tensor.shape)
            if not complete or stored.properties.dtype != tensor.dtype:
                raise self._broken(
                    f"{self.folder} does not have all of {name}; copy that folder again"
                )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turns the readers' errors on damaged files into a CheckpointError."""
        from safetensors import SafetensorError
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if a single process reads
                yield
        except (OSError, ValueError, KeyError, SafetensorError, CheckpointException) as error:
            reason = str(error).splitlines()[-1]
            raise self._broken(f"{self.folder} is damaged ({reason}); copy it again") from error


def _fill(chunks: Iterable[Any], shape: tuple[int, ...]) -> bool:
    """Whether chunks of the first dimension (``offsets``, ``sizes``) tile a tensor of ``shape``."""
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if not shape or not math.prod(shape):
        return len(chunks) == (1 if not shape else 0)
    end = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[0]):
        if chunk.offsets[0] != end or tuple(chunk.sizes[1:]) != tuple(shape[1:]):
            return False
        end += chunk.sizes[0]
    return end == shape[0]


class TensorsInShards(Mapping[str, Tensor]):
    """Tensors below one key of the content, all read on first access.

    Args:
        shards: The shards of the checkpoint.
        key: A key of the content, such as ``state_dict``.
        others: Tensors below that key that are in the file itself.
    """

    def __init__(self, shards: Shards, key: str, others: Mapping[str, Any]) -> None:
        self._shards, self._names, self._others = shards, shards.below(key), others

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        read = self._shards.read(self._names.values())
        return {**self._others, **{key: read[name] for key, name in self._names.items()}}

    def __getitem__(self, key: str) -> Tensor:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self._names

    def __len__(self) -> int:
        return len(self._others) + len(self._names)


def whole(
    path: Path,
    content: dict[str, Any],
    empty: Callable[..., Tensor] | None = None,
    *,
    together: bool = False,
) -> dict[str, Any]:
    """Adds the sharded tensors to a checkpoint's content, in place, and returns it.

    Args:
        path: The checkpoint's file.
        content: The file's content. Without shards it is unchanged.
        empty: See :meth:`Shards.read`.
        together: Whether all processes of the run call this. Each then verifies its share of the
            files, and all raise the same error.

    Raises:
        CheckpointError: If the shards cannot be read.
    """
    if KEY not in content:
        return content
    distributed = together and dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    with _agreed(distributed):
        shards = Shards(path, content)
        shards.check()
        shards.verify(slice(rank, None, world))
    del content[KEY]
    with _agreed(distributed):
        read = shards.read(shards.tensors, empty)
        values = {stored.path: read[name] for name, stored in shards.tensors.items()}
        return put_back(content, values, path)


@contextmanager
def _agreed(distributed: bool) -> Iterator[None]:
    """Raises a CheckpointError on all processes of a run if one of them raises it.

    Otherwise the others would wait for it in the next collective operation.
    """
    problem: str | None = None
    try:
        yield
    except CheckpointError as error:
        if not distributed:
            raise
        problem = str(error)
    if not distributed:
        return
    of_ranks: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, problem)
    if (first := next(filter(None, of_ranks), None)) is not None:
        raise CheckpointError(first, agreed=True)
