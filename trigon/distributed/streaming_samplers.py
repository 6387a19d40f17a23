"""The rollout engine of separate pools that sample all the time: its calls can be interrupted.

What a lost replica has sampled is sampled again later, and not by another replica in the same call,
which may be busy for long. The results therefore depend on what fails and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from trigon.distributed.sampler_engine import SamplersRolloutEngine, Share
from trigon.distributed.sampler_pool import POLL_SECONDS
from trigon.rollout.protocol import OnGroup, Until
from trigon.types import Completion, Prompt, SamplingParams


class StreamingSamplersEngine(SamplersRolloutEngine):
    """Samples on workers that do not train, until it is interrupted. Implements StoppingEngine.

    For replicas of one rank: several ranks would have to stop after the same forward pass.
    """

    def generate_until(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        until: Until,
        *,
        step: int,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        """See StoppingEngine. All replicas sample to the end, unless they are interrupted.

        The prompts of a replica that is lost, less those that it has finished, are returned as they
        were begun. With no replica that has the weights, so are all.
        """
        assert until.interruption is not None, "sampling ends by an interruption"
        self._note_step(step)
        samplers, interruption = self._samplers, until.interruption
        able = self._able()
        begun = {index: list(row) for index, row in enumerate(until.begun) if row}
        shares: dict[int, Share] = {}
        calls = {}
        for number, replica in enumerate(able[: len(prompts)]):
            share = shares[replica] = Share(replica, range(number, len(prompts), len(able)))
            part = Until(len(share.indices), 0, tuple(tuple(begun.get(index, ())) for index in share.indices))
            share_prompts = [prompts[index] for index in share.indices]
            calls[replica] = partial(self._engine_of(replica).generate_until, share_prompts, sampling, part, step=step)
        completions: dict[int, list[Completion]] = {}
        asked = 0.0
        pending: Sequence[int] = list(shares)

        def receive(share: Share, index_in_share: int, found: Sequence[Completion]) -> None:
            index = share.indices[index_in_share]
            completions[index] = [replace(completion, replica=share.replica) for completion in found]
            if on_group is not None:
                on_group(index, completions[index])

        def interrupt(replicas: Sequence[int]) -> None:
            nonlocal asked, pending
            pending = replicas
            kind = interruption.kind
            if kind is None or time.monotonic() - asked < POLL_SECONDS:
                return
            asked = time.monotonic()
            for replica in replicas:
                self._engine_of(replica).interrupt(kind)

        try:
            done = self._sample(shares, calls, receive, on_progress, look=interrupt)
        except BaseException:
            if not samplers.is_closed:  # what the others would sample to the end is not used
                for replica in pending:
                    if replica in samplers.alive:
                        self._engine_of(replica).interrupt("stop")
            raise
        for replica, rows in done.items():
            for index, row in zip(shares[replica].indices, rows, strict=True):
                completions.setdefault(index, [replace(completion, replica=replica) for completion in row])
        nothing = [
            Completion(
                token_ids=(), sampling_logprobs=(), finish_reason="unfinished", text="", policy_version=self._version
            )
        ] * sampling.n
        return [completions.get(index, begun.get(index, nothing)) for index in range(len(prompts))]
