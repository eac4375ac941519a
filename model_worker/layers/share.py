"""Which elements of a dimension a rank holds."""

from dataclasses import dataclass

from torch import Tensor

from model_worker.group import Group
from model_worker.layers.weight_slot import WeightSlot
from tessera.values.config import ConfigError


class HeadsDoNotDivide(ConfigError):
    """A model's heads cannot be spread evenly over so many ranks."""


@dataclass(frozen=True, slots=True)
class Share:
    """Elements `[start, stop)` of `whole`."""

    start: int
    stop: int
    whole: int

    @classmethod
    def all_of(cls, whole: int) -> "Share":
        """What every rank holds."""
        return cls(0, whole, whole)

    @classmethod
    def of_rank(cls, whole: int, group: Group) -> "Share":
        """One of `group.size` parts in the order of the ranks; their sizes differ by at most one."""
        return cls.of_part(whole, group.rank, group.size)

    @classmethod
    def of_part(cls, whole: int, part: int, num_parts: int) -> "Share":
        """`of_rank` for any rank."""
        return cls(whole * part // num_parts, whole * (part + 1) // num_parts, whole)

    @property
    def size(self) -> int:
        """How many elements."""
        return self.stop - self.start

    def times(self, count: int) -> "Share":
        """The same share where each element stands for `count` neighbours: of heads, their rows."""
        return Share(self.start * count, self.stop * count, self.whole * count)

    def slot(self, view: Tensor, dim: int = 0) -> WeightSlot:
        """Where these elements of a weight's dimension `dim` go."""
        return WeightSlot(view, dim, self.start, self.whole)


def head_share(num_heads: int, group: Group) -> Share:
    """The query heads of a rank. Raises HeadsDoNotDivide."""
    if num_heads % group.size:
        raise HeadsDoNotDivide(
            f"tensor_parallel_size is {group.size}, which does not divide the model's {num_heads} attention heads: use {_divisors(num_heads)}"
        )
    return Share.of_rank(num_heads, group)


def kv_head_share(num_kv_heads: int, group: Group) -> Share:
    """The KV heads that the query heads of `head_share` read: several ranks have the same one where there are more ranks than KV heads.
    Raises HeadsDoNotDivide."""
    if num_kv_heads % group.size and group.size % num_kv_heads:
        raise HeadsDoNotDivide(
            f"tensor_parallel_size is {group.size}, which neither divides the model's {num_kv_heads} KV heads nor is a multiple of them"
        )
    start = num_kv_heads * group.rank // group.size
    return Share(start, start + max(1, num_kv_heads // group.size), num_kv_heads)


def _divisors(count: int) -> str:
    divisors = [str(size) for size in range(1, count + 1) if count % size == 0]
    return f"{', '.join(divisors[:-1])} or {divisors[-1]}" if len(divisors) > 1 else divisors[0]
