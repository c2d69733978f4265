"""In which line a request waits: one queue for each kind of request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlm_jax.distributed.rows import num_shares, spans_processes, split_rows
from dlm_jax.inference.kinds import Kind, slot_count
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import Request, Static, group, static_of
from dlm_jax.inference.results import canvas_size
from dlm_jax.inference.waiting import Queue


class Queues:
    """The queues of an engine, by what is static.

    Args:
      model: whose programs they run in.
      batch_size: slots of a reserved queue at most.
      sizes: numbers of slots that the programs of other queues may have.
      canvases: lengths that they may have; None is powers of two from 64.
      limit: how many there are before those without work are forgotten.
    """

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int,
        sizes: Sequence[int],
        canvases: Sequence[int] | None,
        limit: int,
    ):
        self._model, self._facts = model, model.facts
        self._batch_size, self._sizes, self._limit = batch_size, tuple(sizes), limit
        self._canvases = None if canvases is None else tuple(sorted(canvases))
        self._rows = split_rows(model.params)
        self._is_together = spans_processes(self._rows)
        self._queues: dict[Static, list[Queue]] = {}

    def __iter__(self) -> Iterator[Queue]:
        """All of them, those without work too."""
        return (queue for queues in self._queues.values() for queue in queues)

    def reserve(self, requests: Sequence[Request], *, on_one_canvas: bool = False) -> list[Queue]:
        """Queues that hold exactly these, in as few slots as they need."""
        made = []
        for static, members in group(requests).items():
            canvases: dict[int, list[Request]] = {}
            for request in (requests[index] for index in members):
                canvas = 0 if on_one_canvas else self._canvas(request)
                canvases.setdefault(canvas, []).append(request)
            for canvas, some in canvases.items():
                fitted = canvas or canvas_size(max(request.room for request in some))
                size = slot_count(len(some), self._batch_size, self._shares(static))
                queue = Queue(Kind(some, self._facts, fitted), [size], is_reserved=True)
                made.append(self._add(queue))
        return made

    def find(self, request: Request) -> Queue:
        """Where a request is to wait; a new queue if no other holds it.

        Raises:
          ValueError: no canvas is long enough, or several processes have not reserved it.
        """
        static, canvas = static_of(request), self._canvas(request)
        for queue in self._queues.get(static, ()):
            if (queue.is_reserved or queue.kind.canvas == canvas) and queue.kind.holds(request):
                return queue
        if self._is_together:
            raise ValueError(
                "an engine on the devices of several processes runs the requests that all of them "
                "have reserved; call `reserve` first, with the same ones everywhere"
            )
        self._forget_some()
        shares = self._shares(static)
        sizes = sorted({-(-size // shares) * shares for size in self._sizes})
        return self._add(Queue(Kind([request], self._facts, canvas), sizes))

    def _add(self, queue: Queue) -> Queue:
        queues = self._queues.setdefault(queue.kind.static, [])
        same = next((other for other in queues if other.kind.key == queue.kind.key), None)
        if same is not None:
            same.sizes = tuple(sorted({*same.sizes, *queue.sizes}))
            return same
        queues.append(queue)
        queues.sort(key=lambda other: other.kind.canvas)
        return queue

    def _forget_some(self) -> None:
        if sum(map(len, self._queues.values())) < self._limit:
            return
        kept = {static: [queue for queue in queues if queue.is_busy or queue.is_reserved]
                for static, queues in self._queues.items()}  # fmt: skip
        self._queues = {static: queues for static, queues in kept.items() if queues}

    def _canvas(self, request: Request) -> int:
        if self._canvases is None:
            return canvas_size(request.room, is_shared=True)
        for canvas in self._canvases:
            if canvas >= request.room:
                return canvas
        raise ValueError(
            f"the request may fill {request.room} positions, and the longest canvas is "
            f"{self._canvases[-1]}; ask for less, or give the engine a longer one"
        )

    def _shares(self, static: Static) -> int:
        if static.needs_host and self._is_together:
            raise ValueError(
                "host samplers and read-back look at whole rows in one process; drop them, or the "
                "other processes"
            )
        return 1 if static.needs_host else num_shares(self._rows)
