"""Runs the episodes of a call of generate over an engine that samples turns.

    prompt | observation | turn | observation | turn |
           |<------------- completion -------------->|

The environment answers a turn with the next observation; the first one is optional.
Without an environment an episode is one turn. The tokens of an episode only grow: what was sampled
is never decoded and tokenized again. All engines use this code (turns.py). It does not depend on
what an environment is, or how a chat template is read.

A call with `until` may stop before an episode has ended. The episode is then kept here with its
environment, which lives on, and the next call with `until` continues it: the running turn is
submitted again with the tokens that it has, and an environment that was asked may answer in the
meantime. Episodes that this call does not continue are stopped. Calls without `until`, such as
validations, may come in between.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from trigon.config.names import ToolFormat
from trigon.data.turns import TurnTokens
from trigon.environments.calls import end_of_calls, invented_replies
from trigon.environments.protocol import Outcome
from trigon.errors import DataError
from trigon.metrics import Mean, Metric, Metrics, Sum, mean_of, merge
from trigon.rollout.episode_settings import EpisodeSettings, encoded_images
from trigon.rollout.episode_state import Episode, Groups, sample_seed
from trigon.rollout.protocol import OnGroup, Until
from trigon.rollout.turns import SampledTurn, TurnEngine
from trigon.system.trace import DecodeTracer
from trigon.types import Completion, FinishReason, Prompt, SamplingParams, Vision

POLL_SECONDS = 1.0
"""How long the environments are waited for before progress is reported."""

_NUM_LOADERS = 4
"""Threads that process the images of observations while the engine samples."""


class Episodes:
    """Runs the completions of one engine.

    turn_by_turn: whether the next turns of all episodes begin together, in the order of prompts and
    samples, once all environments have answered. Then the engine gets the same requests in the same
    order however long environments take, so that results are the same bits. If not, a turn begins
    as soon as its environment has answered.
    """

    def __init__(
        self,
        settings: EpisodeSettings | None,
        *,
        tokenizer: Any,
        skip_special_tokens: bool,
        stop_token_ids: Sequence[int],
        turn_by_turn: bool,
        tracer: DecodeTracer | None = None,
    ) -> None:
        """Keep the settings.

        Args:
            settings: None: a completion is one turn, without an environment.
            skip_special_tokens: leave special tokens out of the text of turns.
            stop_token_ids: end a turn. The first one is the only token of an episode that failed
                before anything was sampled.
            turn_by_turn: true where the engine gives the same bits for the same requests.
            tracer: traces the engine's decode steps; None: no traces.
        """
        self._settings = settings
        self.tracer = DecodeTracer(Path(), rank=None, steps=()) if tracer is None else tracer
        self._media = None if settings is None else settings.media
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self.stop_token_ids = tuple(stop_token_ids)
        self.turn_by_turn = turn_by_turn
        self._numbers = itertools.count()
        self._kept: dict[tuple[str, int], Episode] = {}  # between calls, by prompt id and sample
        self._metrics: Metrics = {}  # since the last pop_metrics

    def wake(self) -> None:
        """Begin a step, or a validation. Engines call this when they wake."""
        if self._media is not None:
            self._media.start_step()

    def with_pixels(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts, with pixel values in place of files if there are settings.

        Raises: DataError if a file cannot be decoded.
        """
        return list(prompts) if self._settings is None else self._settings.load_prompts(prompts)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return tokens as text, special tokens included, which may mark calls of tools."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Return tokens as SampledTurn.text."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))

    def run(
        self,
        turns: TurnEngine,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        unprocessed: Sequence[Prompt],
        policy_version: int,
        on_progress: Callable[[int | None], None] | None = None,
        on_group: OnGroup | None = None,
        until: Until | None = None,
    ) -> list[list[Completion]]:
        """Return what RolloutEngine.generate returns.

        An unfinished completion that an earlier call has begun continues its episode. If that is
        not kept here, a completion of one turn continues from its tokens, and an episode begins
        again from its start, which is counted.

        An episode whose environment fails, or whose observation cannot be shown to the model, has a
        completion with an error. The caller aborts what is still sampled if this raises.
        Args:
            prompts: the prompts with pixel values, see with_pixels.
            unprocessed: the arguments of with_pixels.
        Raises: as turns.step, on_progress and on_group do, and as the environments do for what is
        not the failure of one episode.
        """
        settings = None if sampling.one_turn else self._settings
        groups = Groups(len(prompts), sampling.num_completions)
        run = _Run(self, settings, turns, sampling, policy_version, groups, on_progress, on_group)
        with closing(run), self.tracer.call(newest_draw(prompts)) as trace:
            num_begun_again = self._add_episodes(run, prompts, unprocessed, until)
            run.report_groups(range(len(prompts)))  # that earlier calls have ended
            # Turn by turn, when a call stops does not depend on how long environments take.
            waits_for_all = until is not None and settings is not None and self.turn_by_turn
            drained = False
            while run.has_work:
                interrupted = None if until is None else until.interrupted
                may_stop = not waits_for_all or bool(run.sampling) or run.is_between_turns
                if until is not None and (interrupted == "stop" or (may_stop and run.has_enough(until))):
                    run.stop()
                    break
                if interrupted == "drain" and not drained:
                    run.stop_waiting()
                    drained = True
                if drained and not run.sampling:
                    run.leave()
                    break
                if not drained:
                    run.begin()
                    run.submit()
                works = bool(run.sampling)
                if run.sampling:
                    with trace.engine_step(turns.is_decoding):
                        ended = turns.step()
                    for name, turn in ended:
                        run.end_turn(name, turn)
                if run.sampling or not drained:  # a drained call waits for no environment
                    works |= run.observe(holds_answers=waits_for_all and not drained and bool(run.sampling))
                run.report(works)
            if run.ended:  # while what was loading was finished
                run.report(True)
            left, run.left = run.left, []
            self._kept |= {(episode.prompt.prompt_id, episode.sample): episode for episode in left}
        # Not of a call that failed, whose episodes all run again.
        again: Metrics = {"rollout/episodes_begun_again": Sum(float(num_begun_again))} if settings is not None else {}
        self._metrics = merge(self._metrics, run.metrics(), again)
        return [groups.completions(prompt_index) for prompt_index in range(len(prompts))]

    def _add_episodes(
        self, run: _Run, prompts: Sequence[Prompt], unprocessed: Sequence[Prompt], until: Until | None
    ) -> int:
        """Add the completions of a call; return how many episodes that have tokens begin again."""
        begun = {
            (prompt_index, sample): completion
            for prompt_index, completions in enumerate(() if until is None else until.begun)
            for sample, completion in enumerate(completions)
        }
        kept = {} if until is None or run.settings is None else self._take_kept(prompts, begun)
        continued, num_begun_again = [], 0
        for prompt_index, prompt in enumerate(prompts):
            for sample in range(run.params.num_completions):
                so_far = begun.get((prompt_index, sample))
                if so_far is not None and not so_far.is_unfinished:
                    run.groups.add(prompt_index, sample, so_far)
                    continue
                episode = kept.get((prompt.prompt_id, sample))
                if episode is not None:
                    episode.enter(prompt_index, prompt, unprocessed[prompt_index])
                    continued.append(episode)
                    continue
                seed = run.params.seed
                episode = Episode(
                    number=next(self._numbers),
                    prompt_index=prompt_index,
                    sample=sample,
                    prompt=prompt,
                    unprocessed=unprocessed[prompt_index],
                    seed=sample_seed(seed, draw=prompt.draw, prompt_id=prompt.prompt_id, sample=sample),
                    greedy=sample == run.params.n,  # the baseline
                )
                if so_far is not None and run.settings is None:
                    episode.begin_with(so_far)
                elif so_far is not None:
                    num_begun_again += bool(so_far.token_ids)
                run.not_begun.append(episode)
        run.add_continued(continued, others=self._kept.values())
        return num_begun_again

    def _take_kept(
        self, prompts: Sequence[Prompt], begun: Mapping[tuple[int, int], Completion]
    ) -> dict[tuple[str, int], Episode]:
        """Return the kept episodes that a call continues, and stop the others; keep none."""
        names = {
            (prompts[prompt_index].prompt_id, sample)
            for (prompt_index, sample), completion in begun.items()
            if completion.is_unfinished
        }
        taken = {name: self._kept.pop(name) for name in names & self._kept.keys()}
        self.stop()
        return taken

    def stop(self) -> None:
        """Stop the episodes that are kept between calls, which then begin again."""
        for episode in self._kept.values():
            assert self._settings is not None
            self._settings.environments.stop(episode.number)
        self._kept = {}

    def pop_metrics(self) -> Metrics:
        """Return the counts of episodes and the times of environments since the last call.

        They include the counts of EpisodeSettings.media. There are none without settings.
        """
        metrics, self._metrics = self._metrics, {}
        return metrics if self._media is None else {**metrics, **self._media.pop_metrics()}


class _Run:
    """The episodes of one call. Each is in one of the collections below, or has ended."""

    def __init__(
        self,
        episodes: Episodes,
        settings: EpisodeSettings | None,
        turns: TurnEngine,
        params: SamplingParams,
        policy_version: int,
        groups: Groups,
        on_progress: Callable[[int | None], None] | None,
        on_group: OnGroup | None,
    ) -> None:
        """Begin without episodes. settings: None: a completion is one turn."""
        self.settings, self.params, self.groups = settings, params, groups
        self._episodes, self._turns, self._policy_version = episodes, turns, policy_version
        self._on_progress, self._on_group = on_progress, on_group
        self.not_begun: deque[Episode] = deque()  # without an environment
        self._waiting: dict[int, Episode] = {}  # for an environment, by number
        self._answered: list[Episode] = []  # whose outcome is to be applied
        self._loading: list[tuple[Episode, TurnTokens, Future[Vision]]] = []  # observations with images
        self._ready: list[Episode] = []  # for the next turn
        self.sampling: dict[str, Episode] = {}  # by the name of the request
        self.left: list[Episode] = []  # for another call
        self._others: dict[int, Episode] = {}  # kept for other calls, by number; they receive their outcomes
        self.ended: list[int] = []  # prompt indices since the last report, one for each episode
        self._num_complete = 0  # prompts
        self._loaders: Executor | None = None if settings is None else ThreadPoolExecutor(_NUM_LOADERS, "observations")
        self._num_turns: list[int] = []  # of episodes that have ended without an error
        self._num_cut = 0
        self._num_failed = 0
        self._num_dropped = 0  # tokens that were sampled after calls of tools
        tool_format = None if settings is None or params.ignore_eos else settings.tool_format
        self._stop_texts = () if tool_format is None else invented_replies(tool_format)
        self._answer_seconds: list[float] = []
        self._idle_seconds = 0.0
        self._started = time.perf_counter()

    def add_continued(self, continued: Sequence[Episode], *, others: Iterable[Episode]) -> None:
        """Add episodes that an earlier call has left, and process what they have observed."""
        self._others = {each.number: each for each in others}
        self._waiting = {each.number: each for each in continued if each.is_waiting and each.outcome is None}
        self._answered = [each for each in continued if each.outcome is not None]
        self._ready = [each for each in continued if not each.is_waiting]
        if self.settings is not None:
            assert self._loaders is not None
            visions = self._loaders.map(self.settings.load_pixels, [each for one in continued for each in one.media])
            for episode in continued:
                episode.observed += itertools.islice(visions, len(episode.media))

    @property
    def has_work(self) -> bool:
        """Whether some episode has neither ended nor been left."""
        return bool(self.not_begun or self.sampling or self._ready or not self.is_between_turns)

    @property
    def is_between_turns(self) -> bool:
        """Whether all episodes that have begun are ready for their next turn."""
        return not (self.sampling or self._waiting or self._answered or self._loading)

    def has_enough(self, until: Until) -> bool:
        """Return whether as many prompts have ended as a call is to complete."""
        required = range(until.num_required)
        return self._num_complete >= until.num_groups and all(map(self.groups.is_finished, required))

    def report(self, works: bool) -> None:
        """Report what has ended since the last call.

        works: whether something was sampled or observed.
        """
        ended, self.ended = self.ended, []
        if self._on_progress is not None:
            self._on_progress(len(ended) if ended or works else None)
        self.report_groups(dict.fromkeys(ended))

    def report_groups(self, prompt_indices: Iterable[int]) -> None:
        """Report those of these prompts that have ended."""
        for prompt_index in prompt_indices:
            self._num_complete += self.groups.is_complete(prompt_index)
            if self.groups.has_ended(prompt_index) and self._on_group is not None:
                self._on_group(prompt_index, self.groups.completions(prompt_index))

    # -- to stop --

    def stop(self) -> None:
        """Leave all episodes that have not ended, and keep the tokens of their turns."""
        for name, begun in self._turns.stop():
            episode = self.sampling.pop(name)
            episode.stop_turn(begun, policy_version=self._policy_version)
            self._ready.append(episode)
        assert not self.sampling, "the engine dropped a request"
        self.leave()

    def stop_waiting(self) -> None:
        """Stop the turns of which nothing is sampled yet."""
        self._ready += [self.sampling.pop(name) for name in self._turns.stop_waiting()]

    def leave(self) -> None:
        """Leave the episodes that have not ended as they are; none of them is being sampled."""
        while self._loading:
            self._show(*self._loading[0])
            del self._loading[0]
        begun = [*self._ready, *self._waiting.values(), *self._answered]
        for episode in [*self.not_begun, *begun]:
            unfinished = episode.unfinished(policy_version=self._policy_version)
            self.groups.add(episode.prompt_index, episode.sample, unfinished)
        for collection in (self.not_begun, self._ready, self._waiting, self._answered):
            collection.clear()
        for episode in begun if self.settings is not None else ():
            if self.groups.has_failed(episode.prompt_index):  # its prompt has no completions
                self._stop_environment(episode)
            else:
                self.left.append(episode)
                episode.leave()

    def close(self) -> None:
        """Stop the environments of the episodes that have not ended."""
        if self._loaders is not None:
            self._loaders.shutdown(cancel_futures=True)
        loading = [episode for episode, _, _ in self._loading]
        collections = (self._waiting.values(), self._ready, self.sampling.values(), self.left, loading, self._answered)
        for episode in itertools.chain(*collections):
            self._stop_environment(episode)

    def metrics(self) -> Metrics:
        """Return the metrics of all episodes; none without settings."""
        if self.settings is None:
            return {}
        metrics: dict[str, Metric] = {
            "rollout/dropped_tokens": Sum(float(self._num_dropped)),
            "rollout/episodes_ended_by_length": Sum(float(self._num_cut)),
            "rollout/episodes_failed": Sum(float(self._num_failed)),
            "perf/environment_wait_fraction": Mean(self._idle_seconds, time.perf_counter() - self._started),
        }
        if self._num_turns:
            metrics["rollout/num_turns"] = mean_of(self._num_turns)
        if self._answer_seconds:
            metrics["perf/environment_step_seconds"] = mean_of(self._answer_seconds)
        return metrics

    # -- turns --

    def begin(self) -> None:
        """Begin as many episodes as may run at a time; turn by turn, only between turns."""
        settings = self.settings
        if settings is None:
            self._ready += self.not_begun
            self.not_begun.clear()
        elif self.is_between_turns or not self._episodes.turn_by_turn:
            collections = (self._waiting, self._answered, self._loading, self._ready, self.sampling)
            num_running = sum(map(len, collections))
            most = len(self.not_begun) if settings.max_episodes is None else settings.max_episodes - num_running
            for _ in range(min(most, len(self.not_begun))):
                episode = self.not_begun.popleft()
                files = encoded_images(episode.unprocessed)
                settings.environments.start(episode.number, episode.prompt.row, files)
                self._wait_for(episode)

    def submit(self) -> None:
        """Submit the next turns; turn by turn, once all episodes are ready."""
        if not self._ready or (self._episodes.turn_by_turn and not self.is_between_turns):
            return
        most = self.params.max_tokens
        limit = None if self.settings is None else self.settings.max_turn_tokens
        for episode in sorted(self._ready, key=lambda episode: episode.order):
            left = most - len(episode.token_ids)
            left_of_turn = (left if limit is None else min(left, limit)) - len(episode.begun.token_ids)
            request = episode.request(left_of_turn, self._stop_texts)
            self._turns.submit(request)
            self.sampling[request.name] = episode
        self._ready.clear()

    def end_turn(self, name: str, turn: SampledTurn | None) -> None:
        """Continue after a turn that has ended, or that the engine failed to sample."""
        episode = self.sampling.pop(name)
        if turn is None:  # the prompt of the episode has no completions
            self._end(episode, None)
            return
        turn, action = episode.end_turn(turn, policy_version=self._policy_version), ""
        if self.settings is not None:
            turn, action = self._end_with_calls(turn, self.settings.tool_format)
        episode.add(turn)
        if self.settings is None or turn.finish_reason == "length":
            self._end(episode, turn.finish_reason)
            return
        self._wait_for(episode)
        self.settings.environments.step(episode.number, action)

    def _action(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn for its environment.

        It has no end-of-sequence token, but it has other special tokens, with which some models
        mark calls of tools.
        """
        has_end = token_ids[-1] in self._episodes.stop_token_ids
        return self._episodes.decode(token_ids[:-1] if has_end else token_ids)

    def _end_with_calls(self, turn: SampledTurn, tool_format: ToolFormat | None) -> tuple[SampledTurn, str]:
        """Return a turn without what was sampled after its calls of tools, and its text.

        The last call keeps its last token whole. Space and an end-of-sequence token may follow.
        """
        action = self._action(turn.token_ids)
        end = None if tool_format is None else end_of_calls(action, tool_format)
        if end is None or not action[end:].strip():
            return turn, action
        decode, call = self._episodes.decode, action[:end]
        lengths = range(1, len(turn.token_ids) + 1)
        kept = lengths[bisect_left(lengths, True, key=lambda length: decode(turn.token_ids[:length]).startswith(call))]
        self._num_dropped += len(turn.token_ids) - kept
        token_ids = turn.token_ids[:kept]
        text = self._episodes.to_text(token_ids)
        cut = replace(turn, token_ids=token_ids, logprobs=turn.logprobs[:kept], text=text, finish_reason="stop")
        return cut, self._action(token_ids)

    # -- environments --

    def _wait_for(self, episode: Episode) -> None:
        """Note that the environment of an episode is asked."""
        episode.asked, episode.is_waiting = time.perf_counter(), True
        self._waiting[episode.number] = episode

    def observe(self, *, holds_answers: bool) -> bool:
        """Receive the answers of environments and apply them; wait if there is nothing to sample.

        holds_answers: only receive them. Returns: whether there was anything.
        """
        settings = self.settings
        if settings is None:
            return False
        can_sample = self.sampling or (self._ready and not self._episodes.turn_by_turn)
        began = time.perf_counter()
        outcomes: Sequence[Outcome] = ()
        if self._waiting:
            is_idle = not (can_sample or self._loading or self._answered)
            outcomes = settings.environments.poll(POLL_SECONDS if is_idle else 0.0)
            for outcome in outcomes:
                self._receive(outcome)
        answered: list[Episode] = []
        if not holds_answers:
            answered, self._answered = self._answered, answered
        for episode in answered:
            self._apply_outcome(settings, episode)
        loaded = bool(self._loading)
        if self._loading:
            wait([vision for _, _, vision in self._loading], 0 if can_sample or answered else None, FIRST_COMPLETED)
            for loading in [each for each in self._loading if each[2].done()]:
                self._show(*loading)  # if this raises, close() stops the environments of the others
                self._loading = [each for each in self._loading if each is not loading]
        if not can_sample:
            self._idle_seconds += time.perf_counter() - began
        return loaded or bool(outcomes or answered)

    def _receive(self, outcome: Outcome) -> None:
        """Keep the answer of an environment until it is applied."""
        episode = self._waiting.pop(outcome.episode, None)
        if episode is not None:
            if episode.asked is not None:
                self._answer_seconds.append(time.perf_counter() - episode.asked)
            self._answered.append(episode)
        else:
            episode = self._others.get(outcome.episode)
        if episode is not None:  # None: its episode was stopped when another call failed
            episode.outcome = outcome

    def _apply_outcome(self, settings: EpisodeSettings, episode: Episode) -> None:
        """Continue an episode whose environment has answered."""
        outcome = episode.pop_outcome()
        if episode.turns:
            episode.turns[-1] = replace(episode.turns[-1], reward=outcome.reward)
        if outcome.error:
            self._fail(episode, outcome.error)
        elif outcome.done and episode.turns:
            self._end(episode, "stop")
        elif outcome.done:
            self._fail(episode, "the environment was done before the first turn; return an observation from reset()")
        elif len(episode.turns) == settings.max_turns:
            self._end(episode, "turns")
        elif not episode.turns and not settings.opens:
            assert outcome.observation is None, "a first observation after a prompt with a generation prompt"
            self._ready.append(episode)
        elif episode.turns and outcome.observation is None:
            self._fail(episode, "the environment is not done, but returned no observation from step()")
        else:
            try:
                if episode.turns and outcome.observation is not None:
                    tokens = settings.template.reply(outcome.observation, last_token_id=episode.token_ids[-1])
                else:
                    tokens = settings.template.opening(outcome.observation)
            except DataError as error:
                self._fail(episode, str(error))
                return
            self._append(settings, episode, tokens)

    def _append(self, settings: EpisodeSettings, episode: Episode, tokens: TurnTokens) -> None:
        """Append an observation if there is room for it and for a token after it."""
        most = self.params.max_tokens
        if len(tokens.token_ids) < most - len(episode.token_ids):
            if tokens.media is None:
                episode.observe(tokens, None)
                self._ready.append(episode)
            else:
                assert self._loaders is not None
                self._loading.append((episode, tokens, self._loaders.submit(settings.load_pixels, tokens.media)))
        elif episode.turns:
            self._end(episode, "length")
        else:
            self._fail(episode, find_long_opening(len(tokens.token_ids), most) or "")

    def _show(self, episode: Episode, tokens: TurnTokens, vision: Future[Vision]) -> None:
        """Append an observation whose images are processed, or will be."""
        try:
            episode.observe(tokens, vision.result())
        except DataError as error:
            self._fail(episode, str(error))
        else:
            self._ready.append(episode)

    # -- the end of an episode --

    def _fail(self, episode: Episode, error: str) -> None:
        self._end(episode, "stop", error=" ".join(error.split()))

    def _end(self, episode: Episode, reason: FinishReason | None, *, error: str = "") -> None:
        """End an episode. reason: None if the engine failed to sample it."""
        completion = None
        if reason is not None:
            end_token_id, version = self._episodes.stop_token_ids[0], self._policy_version
            completion = episode.completion(reason, policy_version=version, end_token_id=end_token_id, error=error)
        self.groups.add(episode.prompt_index, episode.sample, completion)
        self.ended.append(episode.prompt_index)
        self._stop_environment(episode)
        if error:
            self._num_failed += 1
        elif completion is not None:
            self._num_turns.append(len(completion.turns))
            self._num_cut += reason == "length"

    def _stop_environment(self, episode: Episode) -> None:
        if self.settings is not None:
            self.settings.environments.stop(episode.number)


def find_long_opening(num_tokens: int, max_tokens: int) -> str | None:
    """Return why a first observation of num_tokens tokens ends an episode; None if it does not.

    max_tokens: most tokens of a completion. At least one has to be sampled.
    """
    if num_tokens < max_tokens:
        return None
    return (
        f"its first observation has {num_tokens} tokens, and a completion has at most {max_tokens} tokens "
        "(data.max_response_length, or max_tokens of worker.rollout.val_override_config): raise it, or make the "
        "observation smaller"
    )


def newest_draw(prompts: Sequence[Prompt]) -> int:
    """Return the step for which the last of these prompts was drawn; 0 for a validation."""
    return max((prompt.draw for prompt in prompts), default=0)
