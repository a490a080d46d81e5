"""Which nodes there are, how busy they are, and whether they fit together. Pure: times are passed in, nothing is sent.

    register (Hello) -> heard (any message), update (Status) ... -> remove (Goodbye, lease over, another connection)

A cluster has one shape (model, KV layout, vocabulary, context): that of the nodes which are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from common import messages as m
from common.errors import PeerError


@dataclass(eq=False)
class Node:
    """One joined node.

    num_own_sequences: what this proxy has placed on it now: a request counts as many as it may run at once.
    dispatched_tokens: tokens of placements that its last Status cannot know of yet.
    is_paused: gets no new work before its next Status (it refused some, or could not be reached).
    """

    instance_id: str
    hello: m.Hello
    stats: m.NodeStats
    last_heard: float
    is_draining: bool = False
    is_paused: bool = False
    num_own_sequences: int = 0
    dispatched_tokens: int = 0
    _num_own_at_status: int = field(default=0, repr=False)

    @property
    def role(self) -> m.Role:
        return self.hello.role

    @property
    def takes_work(self) -> bool:
        return not self.is_draining and not self.is_paused

    @property
    def load_tokens(self) -> int:
        """Tokens queued and held, as far as this proxy can know."""
        num_used_blocks = max(0, self.stats.num_blocks - self.stats.num_free_blocks)
        held_tokens = num_used_blocks * self.hello.layout.block_size
        return self.stats.num_queued_tokens + held_tokens + self.dispatched_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences on the node: our own are known exactly, those of other proxies as of its last Status."""
        stats = self.stats
        num_reported = stats.num_running + stats.num_waiting + stats.num_waiting_for_kv + stats.num_swapped
        return self.num_own_sequences + max(0, num_reported - self._num_own_at_status)

    def has_room(self, num_sequences: int) -> bool:
        """A few more than can run are let in, so that a slot that falls free is taken up without a round trip.

        But never a request that could not run as a whole.
        """
        limit = self.hello.max_num_seqs
        fits = self.num_sequences + num_sequences <= limit + max(1, limit // 8)
        return self.takes_work and num_sequences <= limit and fits

    @property
    def source(self) -> m.Source:
        return m.Source(self.instance_id, self.hello.fetch_endpoints)

    def update(self, status: m.Status) -> None:
        self.stats = status.stats
        self.is_draining = status.is_draining
        self.is_paused = False
        self.dispatched_tokens = 0
        self._num_own_at_status = self.num_own_sequences


class NodePool:
    """The nodes that are joined to this proxy.

    vocab_size: the tokenizer's side of the cluster's shape, checked against every node; None accepts any.
    """

    def __init__(self, *, lease_seconds: float, vocab_size: int | None = None) -> None:
        self._lease_seconds = lease_seconds
        self._vocab_size = vocab_size
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, instance_id: str) -> Node | None:
        return self._nodes.get(instance_id)

    def with_role(self, role: m.Role) -> list[Node]:
        return [node for node in self._nodes.values() if node.role == role]

    @property
    def is_ready(self) -> bool:
        """A decode node is here that takes new work (a full one does, once it has room)."""
        return any(not node.is_draining for node in self.with_role("decode"))

    @property
    def max_model_len(self) -> int | None:
        return next((node.hello.max_model_len for node in self._nodes.values()), None)

    @property
    def max_num_seqs(self) -> int | None:
        """Most sequences that one request can have: those that the largest decode node runs. None: no node is here."""
        nodes = [node for node in self.with_role("decode") if not node.is_draining]
        return max((node.hello.max_num_seqs for node in nodes), default=None)

    def register(self, instance_id: str, hello: m.Hello, now: float) -> Node:
        """A new node, or a known one that said Hello again; raises PeerError with both sides' values on a misfit."""
        self._check_fits(instance_id, hello)
        node = self._nodes.get(instance_id)
        if node is None:
            node = self._nodes[instance_id] = Node(instance_id, hello, hello.stats, now)
        node.hello, node.stats, node.last_heard = hello, hello.stats, now
        node.is_paused = False
        return node

    def heard(self, instance_id: str, now: float) -> None:
        if (node := self._nodes.get(instance_id)) is not None:
            node.last_heard = now

    def remove(self, instance_id: str) -> Node | None:
        return self._nodes.pop(instance_id, None)

    def pause(self, instance_id: str) -> None:
        if (node := self._nodes.get(instance_id)) is not None:
            node.is_paused = True

    def expired(self, now: float) -> list[str]:
        """Nodes that were silent longer than the lease."""
        return [n.instance_id for n in self._nodes.values() if now - n.last_heard > self._lease_seconds]

    def _check_fits(self, instance_id: str, hello: m.Hello) -> None:
        if hello.protocol_version != m.PROTOCOL_VERSION:
            raise PeerError(f"node speaks protocol {hello.protocol_version}, this proxy {m.PROTOCOL_VERSION}")
        if self._vocab_size is not None and hello.vocab_size != self._vocab_size:
            raise PeerError(
                f"node has a vocabulary of {hello.vocab_size}, this proxy's model one of {self._vocab_size}"
            )
        other = next((node for node in self._nodes.values() if node.instance_id != instance_id), None)
        if other is None:
            return
        theirs, ours = _shape(hello), _shape(other.hello)
        if wrong := [
            f"{name} is {theirs[name]} here, {ours[name]} there" for name in ours if theirs[name] != ours[name]
        ]:
            raise PeerError(f"node does not fit the cluster (here: the node, there: the cluster): {'; '.join(wrong)}")


def _shape(hello: m.Hello) -> dict[str, object]:
    """What all nodes of a cluster have in common, by the name that a message shows."""
    return {
        "model": hello.model,
        **asdict(hello.layout),
        "vocabulary": hello.vocab_size,
        "max_model_len": hello.max_model_len,
    }
